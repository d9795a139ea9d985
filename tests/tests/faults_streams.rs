//! Fault catalogue, group (b): reuse across streams and recorded streams. Each test says which entry it holds us to; sizes are MiB.

use std::sync::Arc;

use gpupool_allocator::{AllocError, Allocator, Config, Filter, FreeError, Policy, PoolId, Preset};
use gpupool_device::{Call, CaptureMode, GraphDevice, Kernel, StreamHandle, StreamKind, Workbench, code};
use gpupool_sim_device::{ReportKind, Scheduler, SimConfig, SimDevice, SimWorld};
use gpupool_tests::lab::{BACKINGS, Backing, Block, Lab, MIB, pages, segments};
use gpupool_tests::watched::Watched;

/// Entry 13's loop: the host runs ahead of stream 2.
fn host_runs_ahead(lab: &Lab, rounds: u64) {
    for round in 0..rounds {
        let x = lab.alloc(1, 100);
        lab.ran(1, &x);
        lab.run_until(2, &x, 1_000 + round);
        lab.record(&x, 2);
        lab.free(x);
    }
}

// Entry 13.
#[test]
fn a_stream_that_waits_for_recorded_uses_needs_one_block_however_far_the_host_runs_ahead() {
    for backing in BACKINGS {
        let run = || {
            let lab = Lab::with(segments(backing).with_wait_for_recorded(true), 20_000);
            // `Lab::alloc` checks that each block comes after its last uses.
            host_runs_ahead(&lab, 100);
            assert_eq!(lab.device.sim.host_waits(), 0, "the stream waits, not the host");
            let peak = lab.peak_reserved();
            lab.done();
            peak
        };
        let first = run();
        assert!(first <= 200, "{backing:?}: {first}");
        assert_eq!(run(), first, "the same on every run");
    }
}

// Entry 13.
#[test]
fn by_default_the_host_looks_and_nobody_waits() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 20_000);
        host_runs_ahead(&lab, 20);
        assert_eq!((lab.device.sim.host_waits(), lab.device.sim.calls(Call::StreamWaitEvent)), (0, 0));
        assert_eq!(lab.pending(), 2_000);
        (0..2_000).for_each(|_| lab.finish());
        let reserved = lab.reserved();
        let all: Vec<Block> = (0..20).map(|_| lab.alloc(1, 100)).collect();
        assert_eq!(lab.reserved(), reserved, "what came back is found");
        drop(all);
        lab.done();
    }
}

// Entry 13.
#[test]
fn when_memory_runs_out_the_recorded_uses_are_waited_for() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 500);
        host_runs_ahead(&lab, 100);
        assert!(lab.peak_reserved() <= 500);
        lab.done();
    }
}

// Entry 13: waiting must not let a block pass to a stream that does not wait itself.
#[test]
fn a_wait_of_one_stream_frees_nothing_for_another_in_the_same_pool() {
    for backing in BACKINGS {
        let lab = Lab::with(segments(backing).with_wait_for_recorded(true), 20_000);
        let pool = gpupool_allocator::PoolId::fresh();
        lab.allocator.begin_allocate_to_pool(pool, gpupool_allocator::Filter::All).unwrap();
        let (x, y) = (lab.alloc(1, 100), lab.alloc(3, 100));
        for block in [&x, &y] {
            lab.run(2, block);
            lab.record(block, 2);
        }
        lab.free(x);
        lab.free(y);
        // Stream 1 waits for stream 2. Stream 3 does not, so its block must not be given to it as it is.
        let first = lab.alloc(1, 100);
        let second = lab.alloc(3, 100);
        drop((first, second));
        lab.finish();
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        lab.allocator.release_pool(pool).unwrap();
        lab.done();
    }
}

/// Entry 14's scenario with kernels and contents: stream 2 uses the block, recorded or not, then stream 1 gets it again.
fn used_and_passed_on(scheduler: Scheduler, config: Config, recorded: bool) -> Vec<ReportKind> {
    let device = Arc::new(SimDevice::new(SimConfig::default().with_capacity(1_000 * MIB).with_scheduler(scheduler)));
    let allocator = Allocator::with_registry(Arc::clone(&device), config, Arc::default()).unwrap();
    let handles = [0, 1].map(|_| device.stream_create(StreamKind::NonBlocking).unwrap());
    let [s1, s2] = handles.map(|h| allocator.register_stream(h));
    let fill =
        |block: &gpupool_allocator::Allocation<SimDevice>| Kernel::Fill { dst: block.address(), bytes: 1024, value: 7 };
    let mut tag = 0;
    let mut owned = || {
        tag += 1;
        let block = allocator.alloc(8 * MIB, &s1).unwrap();
        device.own(block.address(), block.size(), tag, s1.handle());
        (block, tag)
    };
    let (x, owner) = owned();
    let gate = device.gate_create().unwrap();
    device.launch(s2.handle(), Kernel::Wait { gate }).unwrap();
    device.launch_as(s2.handle(), fill(&x), owner).unwrap();
    if recorded {
        x.record_stream(&s2).unwrap();
    }
    device.disown(x.address(), x.size());
    drop(x);
    let (y, owner) = owned();
    device.launch_as(s1.handle(), fill(&y), owner).unwrap();
    device.gate_open(gate).unwrap();
    device.run_until_idle();
    device.disown(y.address(), y.size());
    drop(y);
    allocator.empty_cache().unwrap();
    assert_eq!(device.memory_in_use(), 0);
    device.reports().iter().map(|r| r.kind).collect()
}

// Entry 14.
#[test]
fn a_use_that_nobody_recorded_is_found_by_the_simulated_device() {
    let schedulers =
        [Scheduler::InOrder, Scheduler::Adversarial, Scheduler::Random { seed: 3 }, Scheduler::Random { seed: 4 }];
    for scheduler in schedulers {
        for backing in BACKINGS {
            let plain = segments(backing);
            let found = used_and_passed_on(scheduler, plain.clone(), false);
            assert_eq!(found.first(), Some(&ReportKind::Race), "{scheduler:?} {backing:?}");
            for (config, recorded) in [
                (plain.clone(), true),
                (plain.clone().with_wait_for_recorded(true), true),
                (plain.with_quarantine(true), false),
            ] {
                assert_eq!(used_and_passed_on(scheduler, config, recorded), [], "{scheduler:?} {backing:?}");
            }
        }
    }
}

// Entry 14.
#[test]
fn in_quarantine_a_freed_block_waits_until_every_stream_is_idle() {
    for backing in BACKINGS {
        let lab = Lab::with(segments(backing).with_quarantine(true), 20_000);
        drop(lab.stream(2));
        let x = lab.alloc(1, 8);
        // A use that nobody recorded.
        lab.run(2, &x);
        let place = x.address();
        lab.free(x);
        let y = lab.alloc(1, 8);
        assert_ne!(y.address(), place, "{backing:?}: stream 2 still uses it");
        lab.finish();
        let z = lab.alloc(1, 8);
        assert_eq!(z.address(), place);
        drop((y, z));
        lab.done();
    }
}

// Entry 15.
#[test]
fn a_slow_stream_holds_up_only_what_it_uses_itself() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 20_000);
        let whole = lab.alloc(1, 300);
        lab.free(whole);
        let blocks: Vec<Block> = (0..3).map(|_| lab.alloc(1, 100)).collect();
        let places: Vec<_> = blocks.iter().map(Block::address).collect();
        // Freed first, done last; then one behind it on the same queue of frees; then one that both use.
        for (block, uses) in blocks.iter().zip([vec![(2, 9)], vec![(3, 1)], vec![(2, 9), (3, 1)]]) {
            for (stream, tick) in uses {
                lab.run_until(stream, block, tick);
                lab.record(block, stream);
            }
        }
        blocks.into_iter().for_each(|b| lab.free(b));
        lab.finish();
        let again = lab.alloc(1, 100);
        assert_eq!(again.address(), places[1], "{backing:?}");
        assert_eq!((lab.reserved(), lab.pending()), (300, 200));
        (0..10).for_each(|_| lab.finish());
        let rest: Vec<_> = (0..2).map(|_| lab.alloc(1, 100)).collect();
        assert_eq!(lab.reserved(), 300);
        drop((again, rest));
        lab.done();
    }
}

// Entry 15: a stream that went quiet has no miss of its own that would notice. Before more is held than ever, others look.
#[test]
fn what_a_quiet_stream_freed_serves_others_before_more_is_held() {
    let of_pages = [Preset::Memory, Preset::Balanced].map(pages);
    for config in BACKINGS.map(segments).into_iter().chain(of_pages) {
        for into_pool in [false, true] {
            let lab = Lab::with(config.clone(), 20_000);
            let x = lab.alloc(1, 100);
            lab.run(2, &x);
            lab.record(&x, 2);
            lab.free(x);
            lab.finish();
            assert_eq!(lab.pending(), 100, "nobody has looked");
            let pool = PoolId(7, 0);
            if into_pool {
                lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
            }
            let y = lab.alloc(3, 100);
            if into_pool {
                lab.allocator.end_allocate_to_pool(pool).unwrap();
            }
            let of_plain = into_pool && config == segments(Backing::Plain);
            assert_eq!(lab.peak_reserved(), if of_plain { 200 } else { 100 }, "{config:?}, in a pool: {into_pool}");
            assert_eq!((lab.pending(), lab.device.sim.host_waits()), (if of_plain { 100 } else { 0 }, 0));
            drop(y);
            if into_pool {
                lab.allocator.release_pool(pool).unwrap();
            }
            lab.done();
        }
    }
}

// Entry 15: within one stream too, what is done is not hidden by what was freed before it.
#[test]
fn earlier_uses_of_a_stream_settle_while_its_later_ones_run() {
    let lab = Lab::new(Backing::Virtual, 20_000);
    let whole = lab.alloc(1, 200);
    lab.free(whole);
    let (x, y) = (lab.alloc(1, 100), lab.alloc(1, 100));
    let place = x.address();
    lab.run_until(2, &x, 1);
    lab.record(&x, 2);
    lab.free(x);
    // A miss makes the allocator look, so the first use gets an event of its own.
    let z = lab.alloc(1, 300);
    lab.run_until(2, &y, 9);
    lab.record(&y, 2);
    lab.free(y);
    lab.finish();
    let again = lab.alloc(1, 100);
    assert_eq!(again.address(), place);
    drop((z, again));
    lab.done();
}

// Entry 15: an event recorded when a block is freed also waits for the work that was submitted after its last use.
#[test]
fn a_block_whose_last_use_was_told_does_not_wait_for_what_came_after_it() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 20_000);
        let whole = lab.alloc(1, 200);
        lab.free(whole);
        let blocks = [lab.alloc(1, 100), lab.alloc(1, 100)];
        let places = [blocks[0].address(), blocks[1].address()];
        let two = lab.stream(2);
        lab.run_until(2, &blocks[0], 1);
        let last = two.mark_work().unwrap();
        blocks[0].record_last_use(&last).unwrap();
        // Later work of the same stream, on the other block.
        lab.run_until(2, &blocks[1], 9);
        lab.record(&blocks[1], 2);
        blocks.into_iter().for_each(|b| lab.free(b));
        assert_eq!(lab.pending(), 200, "{backing:?}");
        lab.finish();
        let again = lab.alloc(1, 100);
        assert_eq!((again.address(), lab.pending(), lab.reserved()), (places[0], 100, 200));
        // A use that is over by the time of the free keeps nothing.
        lab.ran(1, &again);
        assert!(last.poll().unwrap());
        again.record_last_use(&last).unwrap();
        lab.free(again);
        assert_eq!(lab.pending(), 100);
        (0..9).for_each(|_| lab.finish());
        drop((two, last));
        lab.done();
    }
}

// Entry 15: what says less about a use wins.
#[test]
fn a_last_use_does_not_take_back_a_use_without_an_end() {
    for last_first in [true, false] {
        let lab = Lab::new(Backing::Virtual, 20_000);
        let x = lab.alloc(1, 100);
        let two = lab.stream(2);
        let (place, last) = (x.address(), two.mark_work().unwrap());
        if last_first {
            x.record_last_use(&last).unwrap();
        }
        lab.record(&x, 2);
        if !last_first {
            x.record_last_use(&last).unwrap();
        }
        lab.run(2, &x);
        lab.free(x);
        let y = lab.alloc(1, 100);
        assert_ne!(y.address(), place);
        let stranger = Lab::new(Backing::Virtual, 100);
        let foreign = stranger.stream(2).work_so_far();
        assert!(matches!(y.record_last_use(&foreign), Err(FreeError::ForeignStream { .. })));
        lab.free(y);
        lab.finish();
        drop((two, last));
        lab.done();
        drop(foreign);
        stranger.done();
    }
}

// Entry 16.
#[test]
fn a_recycled_handle_is_another_stream() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 20_000);
        let old = lab.stream(1);
        let x = lab.alloc(1, 8);
        lab.run(1, &x);
        lab.free(x);
        lab.allocator.retire_stream(&old).unwrap();
        lab.device.recycle(Lab::handle(1));
        let new = lab.stream(1);
        assert_ne!(new.id(), old.id());
        // `Lab::alloc` checks the order against the stream that the handle names now.
        let y = lab.alloc(1, 8);
        assert!(
            matches!(lab.allocator.alloc(8, &old), Err(AllocError::RetiredStream { stream }) if stream == old.id())
        );
        drop((y, old, new));
        lab.done();
    }
}

// Entry 16.
#[test]
fn memory_of_a_dead_stream_serves_everyone_once_its_last_work_is_done() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 20_000);
        let old = lab.stream(1);
        let (x, keep) = (lab.alloc(1, 12), lab.alloc(1, 2));
        let small = lab.try_bytes(1, 1_000).unwrap();
        lab.run(1, &x);
        let places = [x.address(), small.address()];
        lab.free(x);
        lab.free(small);
        lab.allocator.retire_stream(&old).unwrap();
        lab.device.recycle(Lab::handle(1));
        let early = lab.alloc(2, 12);
        assert_ne!(early.address(), places[0], "its work still runs");
        lab.finish();
        let reserved = lab.reserved();
        let late = (lab.alloc(2, 12), lab.try_bytes(3, 1_000).unwrap());
        assert_eq!([late.0.address(), late.1.address()], places);
        assert_eq!(lab.reserved(), reserved);
        drop((early, keep));
        // What a live stream borrowed is passed on only after that stream's work.
        lab.run(2, &late.0);
        lab.free(late.0);
        let next = lab.alloc(3, 12);
        drop((next, late.1, old));
        lab.finish();
        lab.done();
    }
}

// Entry 16.
#[test]
fn blocks_of_a_stream_may_outlive_it() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let old = lab.stream(1);
        let (x, y) = (lab.alloc(1, 300), lab.alloc(2, 300));
        lab.run(1, &x);
        lab.run(1, &y);
        lab.record(&y, 1);
        lab.allocator.retire_stream(&old).unwrap();
        lab.allocator.retire_stream(&old).unwrap();
        lab.device.recycle(Lab::handle(1));
        lab.free(x);
        lab.free(y);
        // Both are waited for, through the event that was taken when the stream died.
        let all = lab.alloc(3, 1_000);
        drop((all, old));
        lab.done();
    }
}

// Entry 17.
#[test]
fn each_thread_has_its_own_per_thread_default_stream() {
    let device = Arc::new(SimDevice::new(SimConfig::default().with_capacity(1_000 * MIB)));
    let config = Config::new(Policy::Segments);
    let allocator = Allocator::with_registry(Arc::clone(&device), config, Arc::default()).unwrap();
    let mine = allocator.register_stream(StreamHandle::PER_THREAD);
    assert_eq!(allocator.register_stream(StreamHandle::PER_THREAD).id(), mine.id());
    let x = allocator.alloc(8 * MIB, &mine).unwrap();
    device.hold_until_tick(StreamHandle::PER_THREAD, 1).unwrap();
    let place = x.address();
    drop(x);
    let (other, address) = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let stream = allocator.register_stream(StreamHandle::PER_THREAD);
            let block = allocator.alloc(8 * MIB, &stream).unwrap();
            (stream.id(), block.address())
        });
        thread.join().unwrap()
    });
    assert_ne!(other, mine.id());
    assert_ne!(address, place, "the other thread's stream does not come after this one's work");
    allocator.validate().unwrap();
}

// Entry 17: on another thread the handle names another stream, so whoever got the block would use it without order.
#[test]
fn a_threads_default_stream_is_refused_on_another_thread() {
    let device = Arc::new(SimDevice::new(SimConfig::default().with_capacity(1_000 * MIB)));
    let config = Config::new(Policy::Segments);
    let allocator = Allocator::with_registry(Arc::clone(&device), config, Arc::default()).unwrap();
    let mine = allocator.register_stream(StreamHandle::PER_THREAD);
    // One that would hit, and one that would miss.
    drop(allocator.alloc(8 * MIB, &mine).unwrap());
    let elsewhere = [8 * MIB, 100 * MIB].map(|bytes| {
        std::thread::scope(|scope| scope.spawn(|| allocator.alloc(bytes, &mine).map(drop)).join().unwrap())
    });
    for result in elsewhere {
        assert!(matches!(result, Err(AllocError::OtherThreadsStream { stream }) if stream == mine.id()), "{result:?}");
    }
    drop(allocator.alloc(8 * MIB, &mine).unwrap());
    allocator.validate().unwrap();
}

// Entry 17.
#[test]
fn memory_of_a_threads_default_stream_serves_others_once_it_was_retired_there() {
    for backing in BACKINGS {
        let device = Arc::new(SimDevice::new(SimConfig::default().with_capacity(1_000 * MIB)));
        let allocator = Allocator::with_registry(Arc::clone(&device), segments(backing), Arc::default()).unwrap();
        let on_another_thread = |retires: bool| {
            std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    let stream = allocator.register_stream(StreamHandle::PER_THREAD);
                    let block = allocator.alloc(600 * MIB, &stream).unwrap();
                    device.hold_until_tick(StreamHandle::PER_THREAD, device.tick() + 1).unwrap();
                    drop(block);
                    if retires {
                        allocator.retire_stream(&stream).unwrap();
                    }
                    stream
                });
                thread.join().unwrap()
            })
        };
        let stream = on_another_thread(true);
        assert!(stream.is_retired());
        drop(stream);
        let mine = allocator.register_stream(StreamHandle::PER_THREAD);
        // It is waited for, by the event that its own thread recorded.
        let x = allocator.alloc(900 * MIB, &mine).unwrap();
        assert_eq!(device.tick(), 1);
        drop(x);
        allocator.empty_cache().unwrap();
        assert_eq!(device.memory_in_use(), 0);

        let stream = on_another_thread(false);
        assert!(
            matches!(allocator.retire_stream(&stream), Err(AllocError::Driver(e)) if e.code == code::INVALID_CONTEXT)
        );
        let trimmed = allocator.trim().unwrap();
        assert_eq!(
            (trimmed.released_bytes, trimmed.busy_bytes),
            (0, 600 * MIB),
            "nobody here knows whether it is done"
        );
        let after = allocator.alloc(900 * MIB, &mine);
        // A plain free waits for the whole device; a handle must stay.
        assert_eq!(after.is_ok(), backing == Backing::Plain, "{backing:?}");
        allocator.validate().unwrap();
    }
}

// Entry 17.
#[test]
fn the_names_of_the_legacy_default_stream_are_one_stream() {
    let lab = Lab::new(Backing::Virtual, 1_000);
    let [null, legacy] = [0, 1].map(|n| lab.allocator.register_stream(StreamHandle(n)));
    assert_eq!(null.id(), legacy.id());
    let per_thread = lab.allocator.register_stream(StreamHandle::PER_THREAD);
    assert_ne!(per_thread.id(), null.id());
    lab.done();
}

// Entry 19.
#[test]
fn allocations_and_frees_that_hit_make_no_driver_call_and_no_event() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 10_000);
        let sizes: Vec<u64> = (0..40).map(|i| 512 << (i % 17)).chain((1..20).map(|i| i * 777_777)).collect();
        let turn = || {
            let blocks: Vec<Block> = sizes.iter().map(|n| lab.allocator.alloc(*n, &lab.stream(1)).unwrap()).collect();
            let others: Vec<Block> = sizes.iter().map(|n| lab.allocator.alloc(*n, &lab.stream(2)).unwrap()).collect();
            // In another order than they came.
            let (even, odd): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
            drop((odd, others, even));
        };
        // A few turns until what is merged fits, whatever was freed first.
        (0..5).for_each(|_| turn());
        let calls = lab.device.sim.call_counts();
        (0..50).for_each(|_| turn());
        assert_eq!(lab.device.sim.call_counts(), calls);
        lab.check();
        lab.done();
    }
}

// Entry 19.
#[test]
fn events_come_from_a_cache_and_one_serves_many_frees() {
    let lab = Lab::new(Backing::Virtual, 10_000);
    for _ in 0..20 {
        let blocks: Vec<Block> = (0..500).map(|_| lab.allocator.alloc(4_096, &lab.stream(1)).unwrap()).collect();
        for block in blocks {
            lab.record(&block, 2);
            drop(block);
        }
    }
    let (created, recorded) = (lab.device.sim.calls(Call::EventCreate), lab.device.sim.calls(Call::EventRecord));
    assert!(recorded <= 20 * 500 / 32, "{recorded} records for {} frees", 20 * 500);
    assert!(created <= 20, "{created} events were created");
    lab.check();
    lab.done();
}

// Entry 20.
#[test]
fn a_free_on_another_stream_waits_for_that_stream() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 10_000);
        let x = lab.alloc(1, 8);
        lab.ran(1, &x);
        lab.run(2, &x);
        let place = x.address();
        x.free_on(&lab.stream(2)).unwrap();
        assert_eq!(lab.pending(), 8);
        let y = lab.alloc(1, 8);
        assert_ne!(y.address(), place);
        lab.finish();
        let z = lab.alloc(1, 8);
        assert_eq!(z.address(), place);
        drop((y, z));
        lab.done();
    }
}

// Entry 20.
#[test]
fn a_free_on_its_own_stream_is_a_plain_free() {
    let lab = Lab::new(Backing::Virtual, 10_000);
    let x = lab.alloc(1, 8);
    let (place, calls) = (x.address(), lab.calls());
    x.free_on(&lab.stream(1)).unwrap();
    let y = lab.alloc(1, 8);
    assert_eq!((y.address(), lab.calls()), (place, calls));
    drop(y);
    lab.done();
}

// Entry 20.
#[test]
fn the_allocator_never_touches_contents() {
    let lab = Lab::new(Backing::Virtual, 1_000);
    for n in [1, 100, 700, 900] {
        let x = lab.alloc(1, n);
        lab.record(&x, 2);
        lab.free(x);
    }
    lab.allocator.empty_cache().unwrap();
    for call in [Call::LaunchKernel, Call::LaunchHostFunc, Call::MemcpyToHost, Call::Other] {
        assert_eq!(lab.device.sim.calls(call), 0, "{call}");
    }
    lab.done();
}

// Entries 20 and 63.
#[test]
fn a_stream_of_another_device_is_refused_before_the_handle_is_used_up() {
    let world = SimWorld::new(2, SimConfig::default().with_capacity(1_000 * MIB));
    let [here, there] = [0, 1].map(|ordinal| {
        let device = Arc::new(Watched::new(world.device(ordinal).unwrap()));
        let config = Config::new(Policy::Segments);
        Lab { allocator: Allocator::with_registry(Arc::clone(&device), config, Arc::default()).unwrap(), device }
    });
    let foreign = there.stream(1);
    let x = here.alloc(1, 8);
    let before = here.live_blocks();
    assert_eq!(x.record_stream(&foreign), Err(FreeError::ForeignStream { stream: foreign.id() }));
    let (x, error) = x.free_on(&foreign).unwrap_err();
    assert_eq!(error, FreeError::ForeignStream { stream: foreign.id() });
    assert!(matches!(here.allocator.alloc(8, &foreign), Err(AllocError::ForeignStream { .. })));
    assert!(matches!(here.allocator.retire_stream(&foreign), Err(AllocError::ForeignStream { .. })));
    assert!(matches!(here.allocator.set_current_stream(&foreign), Err(AllocError::ForeignStream { .. })));
    assert_eq!(here.live_blocks(), before);
    here.check();
    x.free().unwrap();
    drop(foreign);
    here.done();
    there.done();
}

// Entries 16, 17 and 23.
#[test]
fn a_wait_is_not_submitted_where_another_stream_or_a_capture_would_get_it() {
    let device = Arc::new(SimDevice::new(SimConfig::default().with_capacity(1_000 * MIB)));
    let config = Config::new(Policy::Segments);
    let allocator = Allocator::with_registry(Arc::clone(&device), config, Arc::default()).unwrap();
    let stream = || allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
    let busy = stream();
    let gate = device.gate_create().unwrap();
    device.launch(busy.handle(), Kernel::Wait { gate }).unwrap();
    let mark = busy.mark_work().unwrap();
    let others =
        std::thread::scope(|scope| scope.spawn(|| allocator.register_stream(StreamHandle::PER_THREAD)).join().unwrap());
    let retired = stream();
    allocator.retire_stream(&retired).unwrap();
    let capturing = stream();
    device.begin_capture(capturing.handle(), CaptureMode::Global).unwrap();
    let waits = device.calls(Call::StreamWaitEvent);
    for (waiter, expected) in
        [(&others, code::INVALID_CONTEXT), (&retired, code::INVALID_HANDLE), (&capturing, code::CAPTURE_UNSUPPORTED)]
    {
        assert_eq!(mark.order_before(waiter).map_err(|e| e.code), Err(expected));
    }
    assert_eq!(device.calls(Call::StreamWaitEvent), waits);
    device.end_capture(capturing.handle()).unwrap();
    assert_eq!(mark.order_before(&capturing), Ok(true));
    device.gate_open(gate).unwrap();
    device.run_until_idle();
}
