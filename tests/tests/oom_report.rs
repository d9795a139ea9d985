//! The out-of-memory report: its figures add up, its text says who set the limit, and each advice is there exactly when it would help.
//! Sizes are MiB.

use std::sync::{Arc, Mutex};

use gpupool_allocator::history::{HistoryOptions, label};
use gpupool_allocator::{
    Advice, AllocError, Allocator, Config, Filter, OutOfMemory, Policy, PoolBytes, PoolId, Stream,
};
use gpupool_device::{Call, Device, StreamHandle, code};
use gpupool_tests::fake::FakeDriver;
use gpupool_tests::lab::{BACKINGS, Backing, Block, Lab, MIB, segments};

/// What every report must fulfil.
fn adds_up(lab: &Lab, report: &OutOfMemory) {
    let state = lab.allocator.state();
    let free: u64 = report.free.iter().map(|f| f.bytes).sum();
    assert_eq!(report.reserved, report.live + report.pending + free);
    assert_eq!(report.reserved, lab.device.sim.memory_in_use().min(report.reserved));
    assert_eq!(report.live, state.stats.allocated_bytes.all.current as u64);
    assert_eq!(report.inactive_split, state.stats.inactive_split_bytes.all.current as u64);
    let runs = state.segments.iter().map(|s| s.largest_free_run());
    assert_eq!(report.largest_free_run, runs.max().unwrap_or(0));
    assert_eq!(report.largest_free_run, report.free.iter().map(|f| f.largest_run).max().unwrap_or(0));
    let private: u64 = report.free.iter().filter(|f| !f.pool.is_default()).map(|f| f.bytes).sum();
    assert_eq!(report.free_in_private_pools, private);
    assert!(report.free.iter().all(|f| f.largest_run <= f.bytes && f.bytes > 0));
    assert!(report.free.windows(2).all(|w| w[0].bytes >= w[1].bytes), "largest first");
    let of_pools = |of: fn(&PoolBytes) -> u64| report.pools.iter().map(of).sum::<u64>();
    assert_eq!((of_pools(|p| p.reserved), of_pools(|p| p.live)), (report.reserved, report.live));
    assert_eq!(of_pools(|p| p.pending), report.pending);
    for pinned in report.mostly_free.iter().chain(&report.pinned) {
        assert!(pinned.blocks.len() as u64 <= pinned.count && pinned.count > 0, "{pinned:?}");
        assert!(pinned.blocks.iter().map(|b| b.size).sum::<u64>() <= pinned.pinned_bytes, "{pinned:?}");
    }
    assert!(report.mostly_free.iter().all(|p| p.pinned_bytes <= p.size / 2));
    assert!(report.rounded >= report.requested && report.segment_size >= report.rounded);
    assert_eq!(report.limit, lab.allocator.memory_limit());
    let text = report.to_string();
    assert_eq!(text.lines().filter(|l| l.contains("what would help:")).count(), report.advice.len());
    for advice in &report.advice {
        assert!(text.contains(&advice.to_string()), "{advice} is missing in\n{text}");
    }
}

/// The kinds of advice, by name.
fn kinds(report: &OutOfMemory) -> Vec<&'static str> {
    let name = |advice: &Advice| match advice {
        Advice::RaiseLimit { .. } => "raise limit",
        Advice::SynchronizeStreams { .. } => "synchronize",
        Advice::ShareStreams { .. } => "share streams",
        Advice::ReleasePools { .. } => "release pools",
        Advice::Fragmented { .. } => "fragmented",
        Advice::OtherUsers { .. } => "other users",
        Advice::DropOutliving { .. } => "drop outliving",
        Advice::LargerThanDevice => "larger than device",
        other => panic!("{other:?}: say here when it applies"),
    };
    report.advice.iter().map(name).collect()
}

#[test]
fn a_device_full_of_live_blocks_gets_no_advice() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let all: Vec<Block> = (0..10).map(|_| lab.alloc(1, 100)).collect();
        let report = lab.oom(1, 100);
        adds_up(&lab, &report);
        assert_eq!(kinds(&report), [""; 0]);
        assert_eq!((report.requested, report.segment_size, report.live), (100 * MIB, 100 * MIB, 1_000 * MIB));
        assert_eq!((report.limit, report.free.len(), report.largest_free_run), (None, 0, 0));
        assert_eq!(report.pinned.as_ref().unwrap().pinned_bytes, 100 * MIB);
        assert_eq!(report.driver, lab.device.mem_info().unwrap());
        drop(all);
        lab.done();
    }
}

#[test]
fn a_shortfall_that_rounding_hides_is_told() {
    let lab = Lab::new(Backing::Virtual, 10_000);
    let half = 5_000 * MIB;
    let _half = lab.allocator.alloc(half, &lab.stream(1)).unwrap();
    // 4.88 GiB are asked for, and 4.88 are there.
    let AllocError::OutOfMemory(report) = lab.allocator.alloc(half + 1, &lab.stream(1)).unwrap_err() else { panic!() };
    let text = report.to_string();
    assert!(text.contains("4.88 GiB free of 9.77 GiB (2.00 MiB less than asked for)"), "{text}");
    lab.allocator.set_memory_limit(Some(9_000 * MIB));
    let AllocError::OutOfMemory(report) = lab.allocator.alloc(4_002 * MIB, &lab.stream(1)).unwrap_err() else {
        panic!()
    };
    let text = report.to_string();
    assert!(text.contains("segments only, and this one would exceed it by 2.00 MiB"), "{text}");
}

#[test]
fn the_report_says_whose_memory_it_is_and_who_keeps_what_is_free() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let old = lab.alloc(1, 100);
        lab.allocator.record_history(Some(HistoryOptions::new(1_000)));
        let weights = {
            let _label = label("weights");
            [lab.alloc(1, 300), lab.alloc(1, 200)]
        };
        let (whole, pin) = {
            let _label = label("batch");
            let whole = lab.alloc(2, 300);
            (whole, lab.alloc(2, 20))
        };
        lab.free(whole);
        let _label = label("activations");
        let pin2 = lab.alloc(2, 40);
        let report = lab.oom(1, 500);
        adds_up(&lab, &report);
        let owners: Vec<_> = report.owners.iter().map(|o| (o.owner.as_str(), o.bytes / MIB, o.blocks)).collect();
        assert_eq!(owners, [("weights", 500, 2), ("unknown", 100, 1), ("activations", 40, 1), ("batch", 20, 1)]);
        let kept = report.mostly_free.iter().find(|p| p.blocks.iter().any(|b| b.size == 40 * MIB));
        assert_eq!(kept.unwrap().blocks[0].owner.as_deref(), Some("activations"));
        let text = report.to_string();
        assert!(text.contains("500.00 MiB in 2 blocks of weights"), "{text}");
        drop((old, weights, pin, pin2));
        lab.done();
    }
}

#[test]
fn raising_the_limit_is_advised_only_where_the_device_has_the_rest() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        lab.allocator.set_memory_limit(Some(500 * MIB));
        let x = lab.alloc(1, 400);
        let report = lab.oom(1, 200);
        adds_up(&lab, &report);
        assert_eq!(report.advice, [Advice::RaiseLimit { driver_free: 600 * MIB }]);
        // More than the device has left: the limit is not what is in the way.
        let report = lab.oom(1, 700);
        adds_up(&lab, &report);
        assert_eq!(kinds(&report), [""; 0]);
        // The limit would not be exceeded.
        lab.allocator.set_memory_limit(Some(10_000 * MIB));
        assert_eq!(kinds(&lab.oom(1, 700)), [""; 0]);
        drop(x);
        lab.done();
    }
}

#[test]
fn the_text_says_what_the_limit_is_and_who_set_it() {
    let user = Lab::new(Backing::Virtual, 1_000);
    user.allocator.set_memory_limit(Some(300 * MIB));
    let later = Lab::new(Backing::Virtual, 1_000);
    later.allocator.set_memory_fraction(0.25).unwrap();
    let cases = [
        (
            Lab::with(segments(Backing::Virtual).with_memory_limit(200 * MIB), 1_000),
            "200.00 MiB (set by the configuration)",
        ),
        (
            Lab::with(segments(Backing::Virtual).with_memory_fraction(0.5), 1_000),
            "500.00 MiB (set by the memory fraction)",
        ),
        (user, "300.00 MiB (set by a call)"),
        (later, "250.00 MiB (set by the memory fraction)"),
    ];
    for (lab, words) in cases {
        let report = lab.oom(1, 600);
        adds_up(&lab, &report);
        let text = report.to_string();
        assert!(text.contains(words) && text.contains("it bounds this allocator's segments only"), "{text}");
        let allowed = words.split(" (").next().unwrap();
        assert!(report.pytorch_message().contains(&format!("{allowed} allowed; ")), "{}", report.pytorch_message());
        lab.done();
    }
    let lab = Lab::new(Backing::Virtual, 1_000);
    let text = lab.oom(1, 1_200).to_string();
    assert!(!text.contains("limit:"), "{text}");
    lab.done();
}

#[test]
fn a_request_larger_than_the_device_is_told_so_and_nothing_else() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        lab.allocator.set_memory_limit(Some(500 * MIB));
        let report = lab.oom(1, 1_002);
        adds_up(&lab, &report);
        assert_eq!(report.advice, [Advice::LargerThanDevice]);
        lab.done();
    }
}

#[test]
fn fragmentation_is_named_only_where_enough_is_free_in_pieces() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let whole = lab.alloc(1, 1_000);
        lab.free(whole);
        let mut blocks: Vec<Option<Block>> = (0..10).map(|_| Some(lab.alloc(1, 100))).collect();
        blocks.iter_mut().step_by(2).for_each(|b| drop(b.take()));
        // 500 MiB are free, 100 at a time.
        let report = lab.oom(1, 300);
        adds_up(&lab, &report);
        assert_eq!(report.advice, [Advice::Fragmented { free: 500 * MIB, largest_run: 100 * MIB }]);
        let pinned = report.pinned.as_ref().unwrap();
        assert_eq!((pinned.size, pinned.pinned_bytes, pinned.blocks.len()), (1_000 * MIB, 500 * MIB, 5));
        // Not enough is free: merging it would not help.
        let report = lab.oom(1, 600);
        adds_up(&lab, &report);
        assert_eq!(kinds(&report), [""; 0]);
        drop(blocks);
        lab.done();
    }
}

#[test]
fn fewer_streams_are_advised_only_where_others_hold_enough() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let whole = lab.alloc(1, 600);
        lab.free(whole);
        let pin = lab.alloc(1, 100);
        let fill = lab.alloc(2, 400);
        // 500 MiB are free on stream 1, in a segment that it still uses.
        let report = lab.oom(2, 300);
        adds_up(&lab, &report);
        assert_eq!(report.advice, [Advice::ShareStreams { other_streams: 500 * MIB }]);
        assert_eq!(kinds(&lab.oom(2, 600)), [""; 0]);
        drop((pin, fill));
        lab.done();
    }
}

#[test]
fn what_somebody_else_holds_is_told_where_it_is_much() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let x = lab.alloc(1, 300);
        let other = lab.device.sim.mem_alloc(600 * MIB).unwrap();
        let Err(AllocError::OutOfMemory(report)) = lab.allocator.alloc(200 * MIB, &lab.stream(1)) else { panic!() };
        assert_eq!(report.advice, [Advice::OtherUsers { bytes: 600 * MIB }]);
        assert_eq!(report.driver.free, 100 * MIB);
        lab.device.sim.mem_free(other).unwrap();
        drop(x);
        lab.done();
    }
}

#[test]
fn a_driver_that_does_not_tell_its_free_memory_makes_nobody_guilty() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let x = lab.alloc(1, 600);
        lab.device.sim.fail_all(Call::MemGetInfo, code::UNKNOWN);
        let report = lab.oom(1, 600);
        assert_eq!(kinds(&report), [""; 0], "{report}");
        assert!(report.to_string().contains("did not tell"), "{report}");
        lab.device.sim.clear_faults();
        drop(x);
        lab.done();
    }
}

fn in_pool<T>(lab: &Lab, pool: PoolId, work: impl FnOnce() -> T) -> T {
    lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
    let result = work();
    lab.allocator.end_allocate_to_pool(pool).unwrap();
    lab.allocator.release_pool(pool).unwrap();
    result
}

#[test]
fn releasing_pools_is_advised_only_where_they_keep_enough() {
    for (backing, kept, advised) in
        [(Backing::Virtual, 400, true), (Backing::Plain, 400, true), (Backing::Virtual, 20, false)]
    {
        let lab = Lab::new(backing, 1_000);
        let pool = PoolId::fresh();
        lab.allocator.create_pool(pool).unwrap();
        // Free, but in a segment that holds a live block.
        let pin = in_pool(&lab, pool, || {
            let whole = lab.alloc(1, kept + 100);
            lab.free(whole);
            lab.alloc(1, 100)
        });
        let fill = lab.alloc(1, 900 - kept);
        let report = lab.oom(1, 300);
        adds_up(&lab, &report);
        let expected: &[Advice] = if advised { &[Advice::ReleasePools { free: kept * MIB }] } else { &[] };
        assert_eq!(report.advice, expected, "{backing:?} {kept}");
        assert_eq!(report.free_in_private_pools, kept * MIB);
        // A pool that nobody holds keeps what its live blocks pin, and releasing it once more brings nothing.
        lab.allocator.release_pool(pool).unwrap();
        assert_eq!(kinds(&lab.oom(1, 300)), [""; 0]);
        drop((pin, fill));
        lab.done();
    }
}

#[test]
fn a_request_in_a_pool_is_reported_as_the_pools() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let pool = PoolId::fresh();
        let report = in_pool(&lab, pool, || lab.oom(3, 1_000 + 2));
        assert_eq!((report.pool, report.stream), (pool, lab.stream(3).id()));
        assert!(report.to_string().contains(&format!("(pool {pool})")));
        let report = lab.oom(3, 1_000 + 2);
        assert!(report.to_string().contains("(default pool)"));
        lab.done();
    }
}

/// Memory that cannot come back: a stream that is capturing still has a use of it.
fn pending_under_a_capture() -> (Allocator<FakeDriver>, Arc<FakeDriver>, OutOfMemory) {
    let driver = Arc::new(FakeDriver::new(1_000 * MIB, 1_000 * MIB));
    let config = Config::new(Policy::Segments);
    let allocator = Allocator::with_registry(Arc::clone(&driver), config, Arc::default()).unwrap();
    let [s1, s2]: [Stream<FakeDriver>; 2] = [1, 2].map(|n| allocator.register_stream(StreamHandle(0x10 * n)));
    let x = allocator.alloc(900 * MIB, &s1).unwrap();
    x.record_stream(&s2).unwrap();
    driver.begin_capture(0x20, 7);
    x.free().unwrap();
    let Err(AllocError::OutOfMemory(report)) = allocator.alloc(500 * MIB, &s1) else {
        panic!("it must wait for stream 2")
    };
    (allocator, driver, *report)
}

#[test]
fn waiting_for_streams_is_advised_only_where_something_is_pending() {
    let (allocator, driver, report) = pending_under_a_capture();
    assert_eq!(report.advice, [Advice::SynchronizeStreams { pending: 900 * MIB }]);
    assert_eq!((report.live, report.pending, report.reserved), (0, 900 * MIB, 900 * MIB));
    assert!(report.to_string().contains("900.00 MiB pending"), "{report}");
    driver.end_capture(0x20);
    let again = allocator.alloc(500 * MIB, &allocator.register_stream(StreamHandle(0x10))).unwrap();
    drop(again);
}

#[test]
fn observers_are_told_before_the_error_returns_and_may_use_the_allocator() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let keep = lab.alloc(1, 300);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (sink, allocator, stream) = (Arc::clone(&seen), lab.allocator.clone(), lab.stream(2));
        let hook = lab.allocator.add_oom_observer(Arc::new(move |report| {
            let helped = allocator.alloc(MIB, &stream).is_ok();
            sink.lock().unwrap().push((report.requested, report.advice.clone(), helped));
        }));
        let report = lab.oom(1, 800);
        assert_eq!(*seen.lock().unwrap(), [(800 * MIB, report.advice.clone(), true)]);
        assert_eq!(lab.allocator.stats().num_ooms, 1);
        assert!(lab.allocator.remove_hook(hook));
        lab.oom(1, 800);
        assert_eq!(seen.lock().unwrap().len(), 1);
        drop(keep);
        lab.done();
    }
}

#[test]
fn a_failed_request_changes_nothing_but_the_cache() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let (x, y) = (lab.alloc(1, 300), lab.alloc(2, 200));
        let cached = lab.alloc(1, 400);
        lab.free(cached);
        let before = lab.live_blocks();
        lab.oom(1, 900);
        assert_eq!(lab.live_blocks(), before);
        // It was given back for nothing, but it is there again.
        let again = lab.alloc(1, 400);
        drop((x, y, again));
        lab.done();
    }
}

#[test]
fn sizes_that_nobody_means_are_refused_at_once() {
    for policy in Policy::ALL {
        let lab = Lab::with(Config::new(*policy), 1_000);
        for bytes in [1 << 60, u64::MAX] {
            let calls = lab.calls();
            let error = lab.try_bytes(1, bytes).unwrap_err();
            assert!(matches!(error, AllocError::AbsurdSize { requested } if requested == bytes), "{error}");
            assert_eq!(lab.calls(), calls);
        }
        // The largest that is taken for meant.
        let error = lab.try_bytes(1, (1 << 60) - 1).unwrap_err();
        assert!(
            matches!(error, AllocError::OutOfMemory(ref report) if report.advice == [Advice::LargerThanDevice]),
            "{error}"
        );
        lab.done();
    }
}

#[test]
fn a_segment_too_large_for_a_record_costs_nothing() {
    // Beyond 2 TiB, on a device that would have it.
    for backing in BACKINGS {
        let lab = Lab::new(backing, 8 << 20);
        let error = lab.try_bytes(1, 3 << 40).unwrap_err();
        assert!(matches!(error, AllocError::OutOfMemory(_)), "{error}");
        assert_eq!(lab.reserved(), 0);
        lab.done();
    }
}
