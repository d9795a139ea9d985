//! Fault catalogue, group (a): out of memory with plenty reserved. Each test says which entry it holds us to; sizes are MiB.

use std::sync::{Arc, Mutex};

use gpupool_allocator::config::{LimitSource, Rounding};
use gpupool_allocator::{AllocError, Filter, PoolId, Preset};
use gpupool_device::Call;
use gpupool_tests::lab::{BACKINGS, Backing, Block, Lab, MIB, pages, segments};

/// The first part of entry 1: a large block, freed, and small ones that live on.
fn carved_up(lab: &Lab) -> Vec<Block> {
    let x = lab.alloc(1, 11_600);
    lab.free(x);
    let all: Vec<Block> = (0..40).map(|_| lab.alloc(1, 18)).collect();
    let (kept, gone): (Vec<_>, Vec<_>) = all.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
    gone.into_iter().for_each(|(_, b)| lab.free(b));
    kept.into_iter().map(|(_, b)| b).collect()
}

// Entry 1.
#[test]
fn with_a_split_limit_small_requests_never_carve_up_an_oversize_block() {
    for backing in BACKINGS {
        let lab = Lab::with(segments(backing).with_max_split_size(200 * MIB), 16_000);
        let kept = carved_up(&lab);
        let state = lab.allocator.state();
        let large = state.segments.iter().find(|s| s.size == 11_600 * MIB);
        assert!(large.is_none_or(|s| s.blocks.len() == 1), "{backing:?}");
        let again = lab.alloc(1, 11_600);
        drop((kept, again));
        lab.done();
    }
}

// Entry 1.
#[test]
fn what_pins_a_carved_up_segment_is_named() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 16_000);
        let kept = carved_up(&lab);
        let report = lab.oom(1, 11_600);
        let state = lab.allocator.state();
        assert_eq!(report.largest_free_run, state.segments.iter().map(|s| s.largest_free_run()).max().unwrap());
        assert_eq!(report.largest_free_run, (11_600 - 39 * 18) * MIB);
        assert_eq!(report.inactive_split, (11_600 - 20 * 18) * MIB);
        let pinned = report.pinned.as_ref().unwrap();
        assert_eq!((pinned.size, pinned.pinned_bytes), (11_600 * MIB, 20 * 18 * MIB));
        assert!(!pinned.blocks.is_empty());
        for block in &pinned.blocks {
            let live = kept.iter().any(|b| (b.address(), b.size()) == (block.address, block.size));
            assert!(live, "{block} is not live");
        }
        let text = report.to_string();
        for part in ["largest free run:", "free between live blocks", "pinned:"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        drop(kept);
        lab.done();
    }
}

// Entry 2.
#[test]
fn idle_memory_of_a_stream_that_is_not_used_again_serves_another() {
    for backing in BACKINGS {
        // Not enough for both, and enough for both: the second stream takes what the first left either way.
        for device in [32_000, 64_000] {
            let lab = Lab::new(backing, device);
            let x = lab.alloc(1, 20_000);
            lab.ran(1, &x);
            let place = x.address();
            lab.free(x);
            let y = lab.alloc(2, 20_000);
            assert_eq!((y.address(), lab.peak_reserved()), (place, 20_000), "{backing:?} {device}");
            drop(y);
            lab.done();
        }
    }
}

// Entry 2.
#[test]
fn memory_that_another_stream_still_works_on_is_handed_over_only_after_that_work() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 32_000);
        let x = lab.alloc(1, 20_000);
        lab.run(1, &x);
        lab.free(x);
        // `Lab::alloc` checks that what it gets comes after the work; here only a wait can make it so.
        let y = lab.alloc(2, 20_000);
        assert!(lab.device.sim.host_waits() > 0);
        assert_eq!(lab.peak_reserved(), 20_000);
        drop(y);
        lab.done();

        let lab = Lab::new(backing, 64_000);
        let x = lab.alloc(1, 20_000);
        lab.run(1, &x);
        lab.free(x);
        let y = lab.alloc(2, 20_000);
        assert_eq!(lab.device.sim.host_waits(), 0, "growth is possible, so nobody waits");
        lab.finish();
        let z = lab.alloc(3, 20_000);
        assert_eq!(lab.peak_reserved(), 40_000, "by now the first stream's memory is there to take");
        drop((y, z));
        lab.done();
    }
}

// Entry 2.
#[test]
fn segments_that_hold_live_blocks_stay_with_their_stream() {
    let lab = Lab::new(Backing::Virtual, 1_000);
    let keep = lab.alloc(1, 10);
    let wide = lab.alloc(1, 15);
    lab.free(wide);
    let other = lab.alloc(2, 15);
    let state = lab.allocator.state();
    for block in state.segments.iter().flat_map(|s| &s.blocks) {
        let owner = if block.address == other.address() { 2 } else { 1 };
        assert_eq!(block.stream, lab.stream(owner).id());
    }
    drop((keep, other));
    lab.done();
}

// Entry 3.
#[test]
fn a_block_that_comes_back_while_waiting_is_found_by_the_same_call() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let b = lab.alloc(1, 1_000);
        lab.free(b);
        let (x, y) = (lab.alloc(1, 900), lab.alloc(1, 100));
        assert_eq!(lab.allocator.state().segments.len(), 1);
        let place = x.address();
        lab.run(2, &x);
        lab.record(&x, 2);
        lab.free(x);
        let again = lab.alloc(1, 900);
        assert_eq!(again.address(), place);
        assert_eq!(lab.device.sim.tick(), 1, "it waited for the other stream's work");
        drop((y, again));
        lab.done();
    }
}

// Entry 3.
#[test]
fn what_a_reclaimer_freed_is_found_without_asking_the_driver() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let held = Arc::new(Mutex::new(vec![lab.alloc(1, 600), lab.alloc(1, 300)]));
        let cache = Arc::clone(&held);
        let hook = lab.allocator.add_reclaimer(0, Arc::new(move |_| cache.lock().unwrap().pop().is_some()));
        let place = held.lock().unwrap()[1].address();
        let calls = lab.calls();
        let x = lab.alloc(1, 300);
        assert_eq!((x.address(), lab.calls()), (place, calls));
        assert!(lab.allocator.remove_hook(hook));
        held.lock().unwrap().clear();
        drop(x);
        lab.done();
    }
}

// Entry 3.
#[test]
fn blocks_pending_in_two_streams_are_waited_for_until_they_make_room() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let whole = lab.alloc(1, 1_000);
        lab.free(whole);
        let parts: Vec<Block> = (0..4).map(|_| lab.alloc(1, 250)).collect();
        for (i, part) in parts.iter().enumerate() {
            lab.run_until(2 + i as u64, part, 1 + i as u64);
            lab.record(part, 2 + i as u64);
        }
        parts.into_iter().for_each(|p| lab.free(p));
        let again = lab.alloc(1, 1_000);
        assert_eq!(lab.device.sim.tick(), 4);
        drop(again);
        lab.done();
    }
}

// Entry 4.
#[test]
fn a_pool_that_is_only_routed_to_gives_memory_back_and_grows_again() {
    const GIB: u64 = 1024;
    for backing in BACKINGS {
        let lab = Lab::new(backing, 80 * GIB);
        let pool = PoolId::fresh();
        lab.allocator.begin_allocate_to_pool(pool, Filter::Thread(std::thread::current().id())).unwrap();
        let x = lab.alloc(1, 60 * GIB);
        lab.ran(1, &x);
        lab.free(x);
        let y = lab.alloc(1, 70 * GIB);
        let stats = lab.allocator.pool_stats(pool).unwrap();
        assert_eq!(stats.reserved_bytes.all.current as u64, 70 * GIB * MIB);
        drop(y);
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        lab.allocator.release_pool(pool).unwrap();
        lab.done();
    }
}

// Entry 4.
#[test]
fn converting_weights_one_by_one_inside_a_pool_needs_little_more_than_the_weights() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 12_000);
        let pool = PoolId::fresh();
        lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
        let mut weights: Vec<Block> = (0..20).map(|_| lab.alloc(1, 500)).collect();
        for weight in &mut weights {
            let converted = lab.alloc(1, 510);
            lab.ran(1, weight);
            lab.ran(1, &converted);
            lab.free(std::mem::replace(weight, converted));
        }
        assert_eq!(lab.live(), 20 * 510);
        drop(weights);
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        lab.allocator.release_pool(pool).unwrap();
        lab.done();
    }
}

// Entry 4.
#[test]
fn idle_memory_of_the_default_pool_and_of_scoped_pools_gives_way_to_each_other() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let pool = PoolId::fresh();
        let x = lab.alloc(1, 800);
        lab.free(x);
        lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
        let y = lab.alloc(1, 900);
        lab.free(y);
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        // The pool still has its user, but no graph has its addresses.
        let z = lab.alloc(1, 900);
        drop(z);
        lab.allocator.release_pool(pool).unwrap();
        lab.done();
    }
}

/// 1001, 1021, 1023, 1043, … 1500.
fn drifting() -> impl Iterator<Item = u64> {
    (0..).flat_map(|k| [1_001 + 22 * k, 1_021 + 22 * k]).take_while(|n| *n <= 1_500)
}

fn reserved_over_live(lab: &Lab, beside: u64) -> f64 {
    let keep = lab.alloc(1, beside);
    for n in drifting() {
        let x = lab.alloc(1, n);
        lab.ran(1, &x);
        lab.free(x);
    }
    drop(keep);
    let stats = lab.allocator.stats();
    stats.reserved_bytes.all.peak as f64 / stats.allocated_bytes.all.peak as f64
}

// Entry 7. The bounds are documented in docs/faults.md.
#[test]
fn sizes_that_drift_do_not_pile_up_segments() {
    let lab = Lab::new(Backing::Virtual, 100_000);
    assert!(reserved_over_live(&lab, 10) <= 1.02);
    lab.done();
    // Where nothing stays live, each size is taken for a repetition of the one before, and growth goes in steps of half a power of two.
    let lab = Lab::new(Backing::Virtual, 100_000);
    let ratio = reserved_over_live(&lab, 0);
    assert!(ratio <= 3.3, "{ratio}");
    lab.done();
    // Where giving back waits for the device, rounding is what bounds it: the sizes between two powers of two become four.
    let four = Rounding::uniform(4).unwrap();
    let lab = Lab::with(segments(Backing::Plain).with_rounding(four), 100_000);
    let ratio = reserved_over_live(&lab, 10);
    assert!(ratio <= 2.6, "{ratio}");
    lab.done();
    // Or a high-water mark.
    let lab = Lab::with(segments(Backing::Plain).with_trim_above(2_000 * MIB), 100_000);
    let ratio = reserved_over_live(&lab, 10);
    assert!(ratio <= 2_000.0 / 1_509.0, "{ratio}");
    lab.done();
}

// Entry 7.
#[test]
fn waste_by_rounding_is_told() {
    let lab = Lab::with(segments(Backing::Virtual).with_rounding(Rounding::uniform(2).unwrap()), 10_000);
    let x = lab.alloc(1, 1_100);
    let stats = lab.allocator.stats();
    let (asked, got) = (stats.requested_bytes.all.current as u64, stats.allocated_bytes.all.current as u64);
    assert_eq!((asked, got), (1_100 * MIB, 1_536 * MIB));
    assert_eq!((x.requested(), x.size()), (asked, got));
    drop(x);
    lab.done();
}

// A rounded size beyond what a segment can be must not wrap around to nothing.
#[test]
fn a_request_that_is_rounded_beyond_all_segments_is_refused_and_takes_nothing() {
    for config in [segments(Backing::Virtual), pages(Preset::Balanced)] {
        let lab = Lab::with(config.with_rounding(Rounding::uniform(4).unwrap()), 10_000);
        let (stream, scope) = (lab.stream(1), PoolId::fresh());
        let x = lab.alloc(1, 4);
        lab.free(x);
        for scoped in [false, true] {
            if scoped {
                lab.allocator.begin_allocate_to_pool(scope, Filter::All).unwrap();
                let x = lab.alloc(1, 4);
                lab.free(x);
            }
            // 2^41 bytes rounded, which is 2^32 units.
            let refused = lab.allocator.alloc((19 << 40) / 10, &stream);
            assert!(matches!(refused, Err(AllocError::OutOfMemory(_))), "{refused:?}");
            lab.allocator.validate().unwrap();
            let (x, y) = (lab.alloc(1, 4), lab.alloc(1, 4));
            assert_ne!(x.address(), y.address());
            lab.free(x);
            lab.free(y);
        }
        lab.allocator.end_allocate_to_pool(scope).unwrap();
        lab.allocator.release_pool(scope).unwrap();
        // It would keep its arena, and that its events.
        drop(stream);
        lab.done();
    }
}

// Entry 9.
#[test]
fn above_a_high_water_mark_idle_memory_goes_before_the_device_is_full() {
    for (backing, trims) in [(Backing::Virtual, true), (Backing::Virtual, false), (Backing::Plain, true)] {
        let lab = Lab::with(segments(backing).with_trim_above(600 * MIB).with_trim_before_growth(trims), 10_000);
        for n in [100, 200, 300, 400, 500, 260, 270, 280] {
            let x = lab.alloc(1, n);
            lab.ran(1, &x);
            lab.free(x);
            assert!(lab.reserved() <= 600, "{backing:?} {trims}: {} reserved for {n}", lab.reserved());
        }
        // It refuses nothing.
        let (x, y) = (lab.alloc(1, 500), lab.alloc(1, 400));
        assert!(lab.reserved() >= 900);
        drop((x, y));
        lab.done();
    }
}

// Entry 9.
#[test]
fn with_decay_what_nobody_uses_for_a_while_goes_back_and_what_is_used_stays() {
    const SECOND: u64 = 1_000_000_000;
    for backing in BACKINGS {
        let lab = Lab::with(segments(backing).with_idle_decay(10 * SECOND), 10_000);
        let decay = |seconds: u64| {
            lab.device.sim.pass_time(seconds * SECOND);
            let trimmed = lab.allocator.decay().unwrap();
            lab.check();
            trimmed.released_bytes / MIB
        };
        let all: Vec<Block> = [300, 200, 100, 50].map(|n| lab.alloc(1, n)).into();
        all.into_iter().for_each(|b| lab.free(b));
        assert_eq!(decay(100), 0, "{backing:?}: time counts from the first look");
        let x = lab.alloc(1, 200);
        assert_eq!(decay(9), 0);
        lab.free(x);
        assert_eq!(decay(1), 450, "all but what was used meanwhile");
        let x = lab.alloc(1, 200);
        lab.run_until(1, &x, lab.device.sim.tick() + 1);
        lab.free(x);
        assert_eq!((decay(1), decay(11)), (0, 0), "the device still uses it");
        lab.finish();
        assert_eq!((decay(1), lab.reserved()), (200, 0));
        // Growth looks too.
        drop([lab.alloc(1, 300), lab.alloc(1, 200)]);
        decay(0);
        let before = lab.reserved();
        lab.device.sim.pass_time(10 * SECOND);
        let y = lab.alloc(1, 2_000);
        assert!(before > 0 && lab.reserved() < before + 2_000, "{backing:?}: {} after {before}", lab.reserved());
        lab.free(y);
        lab.done();
    }
}

// Entry 9.
#[test]
fn free_pages_that_nobody_used_for_a_while_go_back_from_within_ranges() {
    const SECOND: u64 = 1_000_000_000;
    for preset in [Preset::Memory, Preset::Balanced] {
        let lab = Lab::with(pages(preset).with_idle_decay(10 * SECOND), 10_000);
        let decay = |seconds: u64| {
            lab.device.sim.pass_time(seconds * SECOND);
            let trimmed = lab.allocator.decay().unwrap();
            lab.check();
            trimmed.released_bytes / MIB
        };
        // Something stays live in the middle, so that no range is ever free as a whole.
        let [a, stays, b] = [300, 2, 200].map(|n| lab.alloc(1, n));
        [a, b].into_iter().for_each(|b| lab.free(b));
        assert_eq!(decay(100), 0, "time counts from the first look");
        let x = lab.alloc(1, 200);
        assert_eq!(decay(9), 0);
        lab.free(x);
        assert_eq!(decay(1), 300, "{preset:?}: all but what was used meanwhile");
        assert_eq!(lab.reserved(), 202);
        let x = lab.alloc(1, 200);
        lab.run_until(1, &x, lab.device.sim.tick() + 1);
        lab.free(x);
        assert_eq!((decay(1), decay(11)), (0, 0), "the device still uses it");
        lab.finish();
        assert_eq!((decay(1), lab.reserved()), (200, 2));
        // Growth looks too.
        lab.free(lab.alloc(1, 300));
        decay(0);
        lab.device.sim.pass_time(10 * SECOND);
        let y = lab.alloc(2, 400);
        assert_eq!(lab.reserved(), 402, "{preset:?}");
        [y, stays].into_iter().for_each(|b| lab.free(b));
        lab.done();
    }
}

// Entry 9.
#[test]
fn decay_is_off_by_default_and_leaves_graph_pools_alone() {
    let lab = Lab::new(Backing::Virtual, 1_000);
    drop(lab.alloc(1, 100));
    lab.device.sim.pass_time(u64::MAX / 4);
    assert_eq!(lab.allocator.decay().unwrap(), gpupool_allocator::Trimmed::default());
    assert_eq!(lab.reserved(), 100);
    lab.done();
    let lab = Lab::with(segments(Backing::Virtual).with_idle_decay(0), 1_000);
    let pool = gpupool_allocator::PoolId::fresh();
    lab.allocator.begin_allocate_to_pool(pool, gpupool_allocator::Filter::All).unwrap();
    drop(lab.alloc(1, 100));
    lab.allocator.end_allocate_to_pool(pool).unwrap();
    assert_eq!((lab.allocator.decay().unwrap().released_bytes, lab.reserved()), (0, 100), "the pool is held");
    lab.allocator.release_pool(pool).unwrap();
    assert_eq!((lab.allocator.decay().unwrap().released_bytes, lab.reserved()), (100 * MIB, 0));
    lab.done();
}

// Entry 9.
#[test]
fn nothing_is_given_back_unasked_by_default() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 10_000);
        let all: Vec<Block> = [300, 200, 100].map(|n| lab.alloc(1, n)).into();
        drop(all);
        let calls = lab.calls();
        for n in [100, 200, 300] {
            let x = lab.alloc(1, n);
            lab.free(x);
        }
        assert_eq!((lab.reserved(), lab.calls()), (600, calls));
        lab.done();
    }
}

// Entry 10.
#[test]
fn a_limit_is_met_by_giving_cached_memory_back() {
    for backing in BACKINGS {
        let limited = segments(backing).with_memory_limit(1_000 * MIB);
        let fraction = segments(backing).with_memory_fraction(0.1);
        for (config, source) in [(limited, LimitSource::Configuration), (fraction, LimitSource::Fraction)] {
            let lab = Lab::with(config, 10_000);
            let limit = lab.allocator.memory_limit().unwrap();
            assert_eq!((limit.bytes, limit.source), (1_000 * MIB, source));
            let x = lab.alloc(1, 600);
            lab.ran(1, &x);
            lab.free(x);
            let y = lab.alloc(1, 700);
            assert!(lab.peak_reserved() <= 1_000);
            drop(y);
            lab.done();
        }
    }
}

// Entry 10.
#[test]
fn a_limit_set_by_a_call_takes_the_same_ladder() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 10_000);
        lab.allocator.set_memory_limit(Some(1_000 * MIB));
        // Busy idle memory, pending memory, memory of another stream: each has to give way.
        let (x, y, z) = (lab.alloc(1, 300), lab.alloc(1, 300), lab.alloc(2, 300));
        lab.run(1, &x);
        lab.run(3, &y);
        lab.record(&y, 3);
        lab.run(2, &z);
        [x, y, z].into_iter().for_each(|b| lab.free(b));
        let all = lab.alloc(4, 1_000);
        assert_eq!(lab.reserved(), 1_000);
        let report = lab.oom(4, 10);
        assert!(report.to_string().contains("1000.00 MiB (set by a call)"), "{report}");
        lab.allocator.set_memory_limit(None);
        let more = lab.alloc(4, 10);
        drop((all, more));
        lab.done();
    }
}

// Entry 12. Beside this, the state machines.
#[test]
fn no_free_fails_while_the_cache_is_emptied_around_it() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 400);
        let mut live: Vec<Block> = Vec::new();
        let mut x = 0x2545_f491_4f6c_dd1du64;
        for step in 0..3_000 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            match x % 16 {
                0 => drop(lab.allocator.empty_cache().unwrap()),
                1 => drop(lab.allocator.trim().unwrap()),
                2..9 if !live.is_empty() => {
                    let block = live.swap_remove((x >> 8) as usize % live.len());
                    block.free().unwrap_or_else(|e| panic!("step {step}: {e}"));
                }
                _ => match lab
                    .allocator
                    .alloc(1 + (x >> 20) % (1 << (10 + (x >> 8) % 17)), &lab.stream(1 + (x >> 5) % 2))
                {
                    Ok(block) => live.push(block),
                    Err(AllocError::OutOfMemory(_)) => drop(live.pop()),
                    Err(e) => panic!("step {step}: {e}"),
                },
            }
            lab.check();
        }
        drop(live);
        lab.done();
    }
}

// Entry 12.
#[test]
fn emptying_the_cache_twice_gives_back_once() {
    let lab = Lab::new(Backing::Virtual, 1_000);
    let x = lab.alloc(1, 100);
    lab.free(x);
    assert_eq!(lab.allocator.empty_cache().unwrap().released_bytes, 100 * MIB);
    assert_eq!(lab.allocator.empty_cache().unwrap().released_bytes, 0);
    assert_eq!(lab.device.sim.calls(Call::MemUnmap), 1);
    lab.done();
}

#[test]
fn where_a_segment_of_the_usual_size_is_not_to_be_had_the_request_gets_one_that_fits_it() {
    for backing in BACKINGS {
        // 7 MiB of room for requests that usually bring 20 MiB.
        let lab = Lab::new(backing, 7);
        let x = lab.alloc(1, 2);
        let y = lab.alloc(2, 4);
        assert_eq!(lab.reserved(), 6, "{backing:?}");
        let report = lab.oom(1, 3);
        assert_eq!(report.segment_size, 4 * MIB, "what was asked for last");
        drop((x, y));
        // What fits serves others too, once it is free.
        let z = lab.alloc(1, 4);
        drop(z);
        lab.done();
    }
}
