//! Fault catalogue, group (e): statistics, snapshots and what the error says. Each test says which entry it holds us to; sizes are MiB.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpupool_allocator::config::{LimitSource, VirtualMemory};
use gpupool_allocator::{Allocator, Config, Filter, Policy, PoolId, Stats, Trimmed};
use gpupool_sim_device::{SimConfig, SimDevice};
use gpupool_tests::lab::{BACKINGS, Backing, Block, Lab, MIB, segments};
use gpupool_tests::recount::adds_up;

fn in_pool<T>(lab: &Lab, pool: PoolId, work: impl FnOnce() -> T) -> T {
    lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
    let result = work();
    lab.allocator.end_allocate_to_pool(pool).unwrap();
    lab.allocator.release_pool(pool).unwrap();
    result
}

/// A default pool with live, pending and free memory, and two private pools; 1,000 MiB in all.
fn furnished(lab: &Lab) -> (Vec<Block>, [PoolId; 2]) {
    let pools = [PoolId::fresh(), PoolId::fresh()];
    pools.iter().for_each(|p| lab.allocator.create_pool(*p).unwrap());
    let mut kept = Vec::new();
    for (pool, size) in [(pools[0], 200), (pools[1], 100)] {
        in_pool(lab, pool, || {
            let whole = lab.alloc(1, size);
            lab.free(whole);
            kept.push(lab.alloc(1, size / 2));
        });
    }
    let whole = lab.alloc(1, 700);
    lab.free(whole);
    kept.push(lab.alloc(1, 300));
    let pending = lab.alloc(1, 150);
    lab.run(2, &pending);
    lab.record(&pending, 2);
    lab.free(pending);
    (kept, pools)
}

// Entry 50.
#[test]
fn figures_tell_live_pending_and_each_pool_apart() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let (kept, pools) = furnished(&lab);
        let stats = lab.allocator.stats();
        let mib = |n: i64| n as u64 / MIB;
        assert_eq!([mib(stats.reserved_bytes.all.current), lab.live(), lab.pending()], [1_000, 450, 150]);
        assert_eq!(pools.map(|p| mib(stats.private_pools[&p].all.current)), [200, 100]);
        let per_pool = pools.map(|p| lab.allocator.pool_stats(p).unwrap());
        assert_eq!(per_pool.map(|s| mib(s.allocated_bytes.all.current)), [100, 50]);
        assert_eq!(mib(stats.cached_bytes()), 400);
        pools.iter().for_each(|p| lab.allocator.release_pool(*p).unwrap());
        drop(kept);
        lab.done();
    }
}

// Entry 50.
#[test]
fn graph_memory_is_not_reported_as_reserved_but_unallocated() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let (kept, pools) = furnished(&lab);
        let report = lab.oom(1, 800);
        let free = |pool: PoolId| report.free.iter().filter(|f| f.pool == pool).map(|f| f.bytes / MIB).sum::<u64>();
        assert_eq!([free(pools[0]), free(pools[1])], [100, 50]);
        assert_eq!(report.free_in_private_pools, 150 * MIB);
        assert_eq!(free(PoolId::DEFAULT), 400, "the pending block was waited for");
        assert_eq!((report.live, report.pending), (450 * MIB, 0));
        let text = report.to_string();
        for pool in pools {
            assert!(text.contains(&format!("in pool {pool}")), "{text}");
        }
        pools.iter().for_each(|p| lab.allocator.release_pool(*p).unwrap());
        drop(kept);
        lab.done();
    }
}

// Entry 51.
#[test]
fn a_pool_has_current_and_peak_figures_of_its_own() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 10_000);
        let pool = PoolId::fresh();
        lab.allocator.create_pool(pool).unwrap();
        in_pool(&lab, pool, || {
            let x = lab.alloc(1, 300);
            let y = lab.alloc(2, 200);
            lab.free(x);
            lab.free(y);
            let z = lab.alloc(1, 100);
            lab.free(z);
        });
        let calls = lab.calls();
        let stats = lab.allocator.pool_stats(pool).unwrap();
        assert_eq!(lab.calls(), calls);
        let figures =
            [stats.allocated_bytes.all.current, stats.allocated_bytes.all.peak, stats.reserved_bytes.all.peak];
        assert_eq!(figures.map(|n| n as u64 / MIB), [0, 500, 500]);
        lab.allocator.release_pool(pool).unwrap();
        lab.allocator.empty_cache().unwrap();
        assert!(lab.allocator.pool_stats(pool).is_err(), "the pool went with its last segment");
        lab.done();
    }
}

// Entry 52. Beside this, the state machines, which recount after every operation.
#[test]
fn counters_follow_merges_in_every_direction() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        // Every order of freeing five neighbours, and of taking their place again.
        for order in 0..120u32 {
            let blocks: Vec<Block> = (0..5).map(|_| lab.alloc(1, 20)).collect();
            let mut blocks: Vec<Option<Block>> = blocks.into_iter().map(Some).collect();
            let mut rest = order;
            for left in (1..=5u32).rev() {
                let pick = rest % left;
                rest /= left;
                let nth = blocks.iter_mut().filter(|b| b.is_some()).nth(pick as usize).unwrap();
                lab.free(nth.take().unwrap());
            }
            let wide = lab.alloc(1, 100);
            lab.free(wide);
            let state = lab.allocator.state();
            adds_up(&state).unwrap();
            assert_eq!(state.stats.allocated_bytes.all.current, 0);
        }
        lab.done();
    }
}

// Entry 52.
#[test]
fn counters_are_kept_on_every_way_out_of_the_cache() {
    for backing in BACKINGS {
        let config = segments(backing)
            .with_memory_limit(1_000 * MIB)
            .with_garbage_collection_threshold(0.5)
            .with_max_split_size(200 * MIB)
            .with_trim_above(900 * MIB);
        let lab = Lab::with(config, 2_000);
        for turn in 0..6 {
            let pool = PoolId::fresh();
            // Collected, trimmed, released for want of memory, emptied, with a pool, restored.
            let x: Vec<Block> = [300, 250, 40, 7].map(|n| lab.alloc(1 + turn % 2, n)).into();
            x.into_iter().for_each(|b| lab.free(b));
            let y = lab.alloc(3, 400);
            lab.free(y);
            let whole = lab.alloc(4, 1_000);
            lab.free(whole);
            lab.allocator.create_pool(pool).unwrap();
            let (live, checkpoint) = in_pool(&lab, pool, || {
                let live = lab.alloc(1, 50);
                let checkpoint = lab.allocator.checkpoint_pool(pool).unwrap();
                let more = lab.alloc(1, 30);
                lab.free(more);
                (live, checkpoint)
            });
            let restored = lab.allocator.restore_pool(&checkpoint, &lab.stream(1)).unwrap();
            lab.check();
            drop((live, restored));
            lab.check();
            lab.allocator.release_pool(pool).unwrap();
            lab.allocator.trim().unwrap();
            lab.check();
            adds_up(&lab.allocator.state()).unwrap();
        }
        lab.done();
    }
}

// Entry 53.
#[test]
fn what_was_given_back_is_told_exactly() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 10_000);
        for count in [1, 2, 7] {
            for wait in [true, false] {
                let blocks: Vec<Block> = (0..count).map(|i| lab.alloc(1, 20 + 2 * i)).collect();
                drop(blocks);
                let before = lab.reserved();
                let Trimmed { released_bytes, released_segments, busy_bytes, refused_bytes, .. } =
                    if wait { lab.allocator.empty_cache().unwrap() } else { lab.allocator.trim().unwrap() };
                assert_eq!((released_bytes / MIB, released_segments), (before - lab.reserved(), count));
                assert_eq!((lab.reserved(), busy_bytes, refused_bytes), (0, 0, 0));
            }
        }
        lab.done();
    }
}

// Entry 53.
#[test]
fn what_stays_is_told_with_its_reason() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 10_000);
        let pool = PoolId::fresh();
        lab.allocator.create_pool(pool).unwrap();
        in_pool(&lab, pool, || {
            let x = lab.alloc(1, 50);
            lab.free(x);
        });
        let x = lab.alloc(1, 300);
        lab.run(1, &x);
        lab.free(x);
        let trimmed = lab.allocator.trim().unwrap();
        lab.check();
        assert_eq!(lab.device.sim.host_waits(), 0, "{backing:?}: trimming waits for nothing");
        assert_eq!((trimmed.released_bytes, trimmed.busy_bytes), (0, 300 * MIB), "{backing:?}");
        assert_eq!(trimmed.held_by_pools_bytes, 50 * MIB);
        lab.finish();
        let trimmed = lab.allocator.trim().unwrap();
        assert_eq!((trimmed.released_bytes, trimmed.busy_bytes), (300 * MIB, 0));
        lab.allocator.release_pool(pool).unwrap();
        lab.done();
    }
}

// Entry 54.
#[test]
fn resetting_peaks_sets_them_to_what_is_there_and_touches_nothing_else() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 10_000);
        let (x, y) = (lab.alloc(1, 300), lab.alloc(2, 500));
        lab.free(y);
        let before = lab.allocator.stats();
        lab.allocator.reset_peak_stats();
        let after = lab.allocator.stats();
        assert_eq!(after.allocated_bytes.all.peak as u64, 300 * MIB);
        assert_eq!(after.reserved_bytes.all.peak, before.reserved_bytes.all.current);
        let without_peaks = |stats: &Stats| {
            let all = stats.flat().into_iter().filter(|(name, _)| !name.ends_with(".peak"));
            all.collect::<Vec<_>>()
        };
        assert_eq!(without_peaks(&after), without_peaks(&before));
        let z = lab.alloc(1, 200);
        assert_eq!(lab.allocator.stats().allocated_bytes.all.peak as u64, 500 * MIB);
        drop((x, z));
        lab.done();
    }
}

// Entry 54.
#[test]
fn a_peak_over_several_streams_is_the_most_that_was_there_at_once() {
    for exact in [true, false] {
        let lab = Lab::with(segments(Backing::Virtual).with_exact_peaks(exact), 10_000);
        let peak = || lab.allocator.stats().allocated_bytes.all.peak as u64 / MIB;
        for stream in [1, 2] {
            let x = lab.alloc(stream, 300);
            lab.free(x);
        }
        assert_eq!(peak(), 300, "exact_peaks {exact}");
        // Less on each stream than before, and more at once.
        let both = [lab.alloc(1, 200), lab.alloc(2, 150)];
        assert_eq!(peak(), 350, "exact_peaks {exact}");
        both.into_iter().for_each(|b| lab.free(b));
        let again = [lab.alloc(2, 150), lab.alloc(1, 200)];
        assert_eq!(peak(), 350, "exact_peaks {exact}");
        again.into_iter().for_each(|b| lab.free(b));
        lab.done();
    }
}

// Entry 54.
#[test]
fn a_peak_stays_when_its_streams_and_pools_go() {
    for exact in [true, false] {
        let lab = Lab::with(segments(Backing::Virtual).with_exact_peaks(exact), 10_000);
        let peak = || lab.allocator.stats().allocated_bytes.all.peak as u64 / MIB;
        let pool = PoolId::fresh();
        lab.allocator.create_pool(pool).unwrap();
        let x = lab.alloc(1, 300);
        let y = in_pool(&lab, pool, || lab.alloc(2, 200));
        lab.free(x);
        lab.free(y);
        lab.allocator.retire_stream(&lab.stream(1)).unwrap();
        lab.allocator.release_pool(pool).unwrap();
        lab.allocator.empty_cache().unwrap();
        assert_eq!(peak(), 500, "exact_peaks {exact}");
        let z = lab.alloc(3, 450);
        assert_eq!(peak(), 500);
        lab.allocator.reset_peak_stats();
        assert_eq!(peak(), 450);
        lab.free(z);
        lab.done();
    }
}

// Entry 54. Each thread comes below its own peak at its own times; the peak over all is what all had at once.
#[test]
fn peaks_of_several_threads_are_not_added_up() {
    for exact in [true, false] {
        let lab = Lab::with(segments(Backing::Virtual).with_exact_peaks(exact), 100_000);
        let streams: Vec<_> = (1..=3).map(|n| lab.stream(n)).collect();
        let turn = std::sync::Barrier::new(streams.len());
        std::thread::scope(|scope| {
            for (at, stream) in streams.iter().enumerate() {
                let (lab, turn) = (&lab, &turn);
                scope.spawn(move || {
                    for step in 0..60 {
                        if step % 3 == at {
                            let blocks: Vec<Block> =
                                (0..10).map(|_| lab.allocator.alloc(30 * MIB, stream).unwrap()).collect();
                            drop(blocks);
                        }
                        turn.wait();
                    }
                });
            }
        });
        let stats = lab.allocator.stats();
        assert_eq!(stats.allocated_bytes.all.peak as u64, 300 * MIB, "exact_peaks {exact}");
        assert_eq!(stats.allocation.all.peak, 10);
        drop(streams);
        lab.done();
    }
}

// Entry 54. However often threads stop each other for it: never less than there was, nor more than each had at most.
#[test]
fn a_peak_that_threads_tell_at_once_reads_neither_low_nor_above_what_each_had_at_most() {
    const THREADS: u64 = 4;
    const MOST: usize = 20;
    for exact in [true, false] {
        let lab = Lab::with(segments(Backing::Virtual).with_exact_peaks(exact), 100_000);
        let streams: Vec<_> = (1..=THREADS).map(|n| lab.stream(n)).collect();
        let all_at_once = std::sync::Barrier::new(streams.len());
        std::thread::scope(|scope| {
            for stream in &streams {
                let (lab, all_at_once) = (&lab, &all_at_once);
                scope.spawn(move || {
                    let mut x = 0x9e37_79b9_7f4a_7c15_u64 ^ stream.handle().0;
                    let alloc = || lab.allocator.alloc(3 * MIB, stream).unwrap();
                    for round in 0..6 {
                        let mut blocks: Vec<Block> = Vec::new();
                        for _ in 0..2_000 {
                            x ^= x << 13;
                            x ^= x >> 7;
                            x ^= x << 17;
                            blocks.truncate(x as usize % MOST);
                            blocks.push(alloc());
                        }
                        if round == 3 {
                            blocks.resize_with(MOST, alloc);
                            all_at_once.wait();
                            all_at_once.wait();
                        }
                    }
                });
            }
        });
        let stats = lab.allocator.stats();
        let most = THREADS as i64 * MOST as i64;
        assert_eq!(stats.allocation.all.peak, most, "exact_peaks {exact}");
        assert_eq!(stats.allocated_bytes.all.peak, most * 3 * MIB as i64, "exact_peaks {exact}");
        drop(streams);
        lab.done();
    }
}

// Entry 55.
#[test]
fn misses_are_counted_and_hits_are_not() {
    let lab = Lab::new(Backing::Virtual, 1_000);
    let (one, two) = (lab.stream(1), lab.stream(2));
    let misses = || (one.misses(), two.misses(), lab.allocator.stats().misses);
    assert_eq!(misses(), (0, 0, 0));
    for _ in 0..5 {
        let block = lab.alloc(1, 10);
        lab.free(block);
        assert_eq!(misses(), (1, 0, 1));
    }
    // Another stream's idle segment is no hit.
    let block = lab.alloc(2, 10);
    assert_eq!(misses(), (1, 1, 2));
    lab.free(block);
    drop((one, two));
    lab.done();
}

// Entry 55.
#[test]
fn without_a_history_nothing_is_kept_of_what_has_been() {
    let lab = Lab::new(Backing::Virtual, 1_000);
    let turn = || {
        let blocks: Vec<Block> = (1..50).map(|n| lab.allocator.alloc(n * 10_000, &lab.stream(1)).unwrap()).collect();
        drop(blocks);
    };
    turn();
    let (bytes, calls) = (lab.allocator.host_bytes(), lab.calls());
    (0..200).for_each(|_| turn());
    let state = lab.allocator.state();
    assert_eq!((lab.allocator.host_bytes(), lab.calls()), (bytes, calls));
    assert!(state.segments.iter().map(|s| s.blocks.len()).sum::<usize>() <= 100);
    lab.done();
}

// Entry 57. Beside this, `oom_report`.
#[test]
fn the_error_names_the_limit_in_force_and_advises_only_what_would_help() {
    let lab = Lab::new(Backing::Virtual, 10_000);
    let x = lab.alloc(1, 400);
    for (bytes, source, words) in
        [(500, LimitSource::User, "500.00 MiB (set by a call)"), (450, LimitSource::User, "450.00 MiB (set by a call)")]
    {
        lab.allocator.set_memory_limit(Some(bytes * MIB));
        let report = lab.oom(1, 200);
        let limit = report.limit.unwrap();
        assert_eq!((limit.bytes, limit.source), (bytes * MIB, source));
        let text = report.to_string();
        assert!(text.contains(words), "{text}");
        assert!(!text.contains("max_split_size") && !text.contains("fragment"), "nothing is fragmented:\n{text}");
    }
    lab.allocator.set_memory_limit(None);
    assert_eq!(lab.oom(1, 9_800).limit, None);
    drop(x);
    lab.done();
}

// Entry 59.
#[test]
fn before_anything_happened_every_figure_is_zero_and_the_driver_was_not_asked() {
    for policy in Policy::ALL {
        let device = Arc::new(SimDevice::new(SimConfig::default()));
        let allocator = Allocator::with_registry(Arc::clone(&device), Config::new(*policy), Arc::default()).unwrap();
        let flat = allocator.stats().flat();
        assert!(flat.iter().all(|(name, n)| *n == 0 || name == "max_split_size"), "{flat:?}");
        let names: BTreeSet<&String> = flat.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), flat.len());
        let state = allocator.state();
        assert!(state.segments.is_empty() && state.pools.is_empty() && state.streams.is_empty());
        allocator.reset_peak_stats();
        allocator.reset_accumulated_stats();
        assert_eq!(allocator.largest_free_block(), 0);
        assert!(allocator.pool_stats(PoolId::fresh()).is_err());
        assert_eq!(allocator.empty_cache().unwrap(), Trimmed::default());
        assert_eq!(allocator.trim().unwrap(), Trimmed::default());
        allocator.validate().unwrap();
        assert!(device.call_counts().is_empty(), "{:?}", device.call_counts());
        drop(allocator);
        assert!(device.call_counts().is_empty());
    }
    assert_eq!(Config::new(Policy::Segments).virtual_memory(), VirtualMemory::WherePossible);
}

// Entries 51 and 54.
#[test]
fn resetting_figures_resets_those_of_pools_too() {
    for policy in [Policy::Segments, Policy::Torch215, Policy::Torch211] {
        let lab = Lab::with(Config::new(policy), 1_000);
        let pool = PoolId::fresh();
        lab.allocator.create_pool(pool).unwrap();
        in_pool(&lab, pool, || drop(lab.alloc(1, 30)));
        let figures = || {
            let stats = lab.allocator.pool_stats(pool).unwrap();
            [stats.allocated_bytes.all, stats.reserved_bytes.all]
                .map(|s| (s.current as u64 / MIB, s.peak as u64 / MIB, s.allocated > 0))
        };
        assert_eq!(figures(), [(0, 30, true), (30, 30, true)], "{policy:?}");
        lab.allocator.reset_peak_stats();
        assert_eq!(figures(), [(0, 0, true), (30, 30, true)], "{policy:?}");
        lab.allocator.reset_accumulated_stats();
        assert_eq!(figures(), [(0, 0, false), (30, 30, false)], "{policy:?}");
        in_pool(&lab, pool, || drop(lab.alloc(1, 20)));
        assert_eq!(figures()[0], (0, 20, true));
        lab.allocator.release_pool(pool).unwrap();
        lab.done();
    }
}

#[test]
fn misses_are_never_reset_not_even_those_of_a_stream_that_is_gone() {
    for policy in [Policy::Segments, Policy::Pages, Policy::StreamOrdered, Policy::Torch215, Policy::Torch211] {
        let lab = Lab::with(Config::new(policy), 1_000);
        drop(lab.alloc(1, 30));
        let misses = lab.allocator.stats().misses;
        assert!(misses > 0, "{policy:?}");
        lab.allocator.empty_cache().unwrap();
        lab.allocator.retire_stream(&lab.stream(1)).unwrap();
        lab.allocator.empty_cache().unwrap();
        for _ in 0..2 {
            assert_eq!(lab.allocator.stats().misses, misses, "{policy:?}");
            lab.allocator.reset_accumulated_stats();
        }
    }
}
