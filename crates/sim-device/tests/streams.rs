//! Streams, events, waits, gates, ticks, the scheduler and handles.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use gpupool_device::{Address, Call, Device, GraphDevice, Kernel, StreamHandle, StreamKind, Workbench, code};
use gpupool_sim_device::{Awaited, HoldupReason, Scheduler, SimConfig, SimDevice, SimWorld};

fn device(scheduler: Scheduler) -> SimDevice {
    SimDevice::new(SimConfig::default().with_scheduler(scheduler))
}

fn stream(d: &SimDevice) -> StreamHandle {
    d.stream_create(StreamKind::NonBlocking).unwrap()
}

fn fill(dst: Address, value: u32) -> Kernel {
    Kernel::Fill { dst, bytes: 4, value }
}

fn word(d: &SimDevice, at: Address) -> u32 {
    u32::from_le_bytes(d.read_bytes(at, 4).unwrap().try_into().unwrap())
}

#[test]
fn nothing_runs_before_a_step_or_a_wait() {
    let d = device(Scheduler::InOrder);
    let (s, x, e) = (stream(&d), d.mem_alloc(64).unwrap(), d.event_create().unwrap());
    assert!(d.event_query(e).unwrap(), "an event that was never recorded is complete");
    d.launch(s, fill(x, 5)).unwrap();
    d.event_record(e, s).unwrap();
    assert!(!d.event_query(e).unwrap());
    assert_eq!(word(&d, x), 0);
    assert!(d.step());
    assert_eq!(word(&d, x), 5);
    assert!(!d.event_query(e).unwrap(), "the record is a piece of work of its own");
    assert!(d.step() && !d.step());
    assert!(d.event_query(e).unwrap());
    d.event_record(e, s).unwrap();
    assert!(d.event_query(e).unwrap(), "an idle stream's record is complete at once");
    d.event_destroy(e).unwrap();
    assert_eq!(d.event_query(e).unwrap_err().code, code::INVALID_HANDLE);
}

#[test]
fn a_wait_holds_a_stream_back_and_binds_the_record_not_the_event() {
    for scheduler in [Scheduler::InOrder, Scheduler::Adversarial, Scheduler::Random { seed: 3 }] {
        let d = device(scheduler);
        let (a, b, x, e) = (stream(&d), stream(&d), d.mem_alloc(64).unwrap(), d.event_create().unwrap());
        let g = d.gate_create().unwrap();
        d.launch(a, fill(x, 1)).unwrap();
        d.event_record(e, a).unwrap();
        d.stream_wait_event(b, e).unwrap();
        d.launch(a, Kernel::Wait { gate: g }).unwrap();
        d.event_record(e, a).unwrap();
        d.launch(b, Kernel::Add { dst: x, bytes: 4, value: 10 }).unwrap();
        d.event_destroy(e).unwrap();
        d.stream_synchronize(b).unwrap();
        assert_eq!(word(&d, x), 11);
        assert_eq!(d.reports(), []);
    }
}

#[test]
fn overlapping_work_overlaps_in_time_and_ordered_work_adds_up() {
    let mut config = SimConfig::default();
    config.costs.kernel = 1_000_000;
    let d = SimDevice::new(config);
    let (a, b, x) = (stream(&d), stream(&d), d.mem_alloc(64).unwrap());
    let e = d.event_create().unwrap();
    let start = d.now();
    d.launch(a, fill(x, 1)).unwrap();
    d.launch(b, fill(x.offset(8), 1)).unwrap();
    d.run_until_idle();
    assert!((1_000_000..1_100_000).contains(&(d.now() - start)), "side by side");
    d.launch(a, fill(x, 1)).unwrap();
    d.event_record(e, a).unwrap();
    d.stream_wait_event(b, e).unwrap();
    d.launch(b, fill(x, 1)).unwrap();
    d.stream_synchronize(b).unwrap();
    assert!((3_000_000..3_100_000).contains(&(d.now() - start)), "one after the other");
    assert!(d.wait_ns() >= 1_900_000 && d.host_waits() == 1);
}

/// The order in which three streams' first kernels run.
fn order(scheduler: Scheduler, streams: usize) -> Vec<usize> {
    let d = device(scheduler);
    let x = d.mem_alloc(1024).unwrap();
    let streams: Vec<_> = (0..streams).map(|_| stream(&d)).collect();
    for (i, &s) in streams.iter().enumerate() {
        d.launch(s, fill(x.offset(4 * i as u64), 1)).unwrap();
    }
    let mut order = Vec::new();
    while d.step() {
        order.extend(
            (0..streams.len())
                .filter(|&i| word(&d, x.offset(4 * i as u64)) == 1 && !order.contains(&i))
                .collect::<Vec<_>>(),
        );
    }
    order
}

#[test]
fn schedulers_differ_and_seeds_decide() {
    assert_eq!(order(Scheduler::InOrder, 4), [0, 1, 2, 3]);
    assert_eq!(order(Scheduler::Adversarial, 4), [3, 2, 1, 0]);
    let random = |seed| order(Scheduler::Random { seed }, 8);
    assert_eq!(random(1), random(1));
    assert!((2..12).any(|seed| random(seed) != random(1)));
}

#[test]
fn the_adversary_runs_only_what_a_wait_needs() {
    let d = device(Scheduler::Adversarial);
    let (lagging, busy, x) = (stream(&d), stream(&d), d.mem_alloc(64).unwrap());
    d.launch(lagging, fill(x, 1)).unwrap();
    d.launch(busy, fill(x.offset(8), 1)).unwrap();
    d.launch(lagging, fill(x.offset(16), 1)).unwrap();
    d.stream_synchronize(busy).unwrap();
    assert_eq!([0, 8, 16].map(|i| word(&d, x.offset(i))), [0, 1, 0]);
    d.mem_free(x).unwrap();
    assert!(!d.step(), "a plain free waited for everything");
}

#[test]
fn a_plain_free_waits_for_the_whole_device_and_nothing_else_does() {
    let d = device(Scheduler::InOrder);
    let (s, x, y, g) = (stream(&d), d.mem_alloc(64).unwrap(), d.mem_alloc(64).unwrap(), d.gate_create().unwrap());
    d.launch(s, Kernel::Wait { gate: g }).unwrap();
    d.launch(s, fill(x, 9)).unwrap();
    let h = d.handle_create(2 << 20).unwrap();
    let r = d.address_reserve(2 << 20).unwrap();
    d.map(r, 2 << 20, h).unwrap();
    d.set_access(r, 2 << 20).unwrap();
    d.unmap(r, 2 << 20).unwrap();
    d.handle_release(h).unwrap();
    d.address_free(r, 2 << 20).unwrap();
    assert_eq!(d.mem_free(y).unwrap_err().code, code::WAIT_NEVER_ENDS);
    let report = d.last_wait_report().unwrap();
    assert_eq!((report.call, report.awaited), (Call::MemFree, Awaited::Device(0)));
    assert_eq!(report.held_up.iter().map(|h| (h.stream, h.reason)).collect::<Vec<_>>(), [(s, HoldupReason::Gate(g))]);
    d.gate_open(g).unwrap();
    d.mem_free(y).unwrap();
    assert_eq!(word(&d, x), 9);
}

#[test]
fn a_wait_that_cannot_end_names_what_holds_it() {
    let d = device(Scheduler::InOrder);
    let (a, b, e, g) = (stream(&d), stream(&d), d.event_create().unwrap(), d.gate_create().unwrap());
    d.launch(a, Kernel::Wait { gate: g }).unwrap();
    d.event_record(e, a).unwrap();
    d.stream_wait_event(b, e).unwrap();
    assert_eq!(d.stream_synchronize(b).unwrap_err().code, code::WAIT_NEVER_ENDS);
    let report = d.last_wait_report().unwrap();
    assert_eq!(report.awaited, Awaited::Stream(b));
    assert_eq!(
        report.held_up.iter().map(|h| h.reason).collect::<Vec<_>>(),
        [HoldupReason::Stream(a), HoldupReason::Gate(g)]
    );
    assert_eq!(
        report.to_string(),
        format!(
            "cuStreamSynchronize waits for stream {:#x}, which can never end: stream {:#x} waits for stream {:#x}; stream {:#x} waits at gate {}",
            b.0, b.0, a.0, a.0, g.0
        )
    );
    d.gate_open(g).unwrap();
    d.stream_synchronize(b).unwrap();
}

#[test]
fn ticks_let_held_work_go_and_waits_move_them() {
    let d = device(Scheduler::InOrder);
    let (s, t) = (stream(&d), stream(&d));
    let events: Vec<_> = (0..4).map(|_| d.event_create().unwrap()).collect();
    for (i, &e) in events.iter().enumerate() {
        d.hold_until_tick(s, 10 * (i as u64 + 1)).unwrap();
        d.event_record(e, s).unwrap();
    }
    d.stream_wait_event(t, events[1]).unwrap();
    let late = d.event_create().unwrap();
    d.event_record(late, t).unwrap();
    let complete = || events.iter().filter(|&&e| d.event_query(e).unwrap()).count();
    for _ in 0..9 {
        d.advance_tick();
    }
    assert_eq!(complete(), 0);
    assert_eq!(d.advance_tick(), 10);
    assert_eq!((complete(), d.event_query(late).unwrap()), (1, false));
    d.event_synchronize(events[2]).unwrap();
    assert_eq!((d.tick(), complete(), d.event_query(late).unwrap()), (30, 3, true));
    assert_eq!((d.tick_jumps(), d.host_waits()), (2, 1), "to 20, then to 30");
    d.hold_until_tick(t, 5).unwrap();
    assert!(!d.step(), "a tick that has passed holds nothing");
    d.device_synchronize().unwrap();
    assert_eq!((d.tick(), complete()), (40, 4));
}

#[test]
fn handles_are_recycled_at_once_and_the_old_streams_work_still_completes() {
    let d = device(Scheduler::Adversarial);
    let (a, x) = (stream(&d), d.mem_alloc(64).unwrap());
    d.launch(a, fill(x, 1)).unwrap();
    d.stream_destroy(a).unwrap();
    assert_eq!(d.launch(a, fill(x, 1)).unwrap_err().code, code::INVALID_HANDLE);
    let b = stream(&d);
    assert_eq!(a, b, "the number is back");
    d.launch(b, Kernel::Add { dst: x, bytes: 4, value: 2 }).unwrap();
    d.run_until_idle();
    let reports = d.reports();
    assert_eq!(reports.len(), 1, "the same number, but another stream: {reports:?}");
    assert_eq!(d.stream_destroy(StreamHandle::LEGACY).unwrap_err().code, code::INVALID_HANDLE);
    let d = SimDevice::new(SimConfig { recycle_stream_handles: false, ..SimConfig::default() });
    let a = stream(&d);
    d.stream_destroy(a).unwrap();
    assert_ne!(a, stream(&d));
}

#[test]
fn numbers_can_be_adopted() {
    let d = device(Scheduler::InOrder);
    let s = StreamHandle(77);
    assert_eq!(d.event_record(d.event_create().unwrap(), s).unwrap_err().code, code::INVALID_HANDLE);
    d.adopt_stream(s);
    d.adopt_stream(s);
    d.adopt_stream(StreamHandle(0x10));
    assert_ne!(stream(&d), StreamHandle(0x10), "created streams keep out of the way");
    d.event_record(d.event_create().unwrap(), s).unwrap();
    d.launch(StreamHandle(1), Kernel::Wait { gate: d.gate_create().unwrap() }).unwrap();
    assert!(!d.stream_query(StreamHandle::LEGACY).unwrap(), "1 is the driver's own name for the legacy stream");
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    let d = device(Scheduler::Adversarial);
    let (blocking, free) = (d.stream_create(StreamKind::Blocking).unwrap(), stream(&d));
    let x = d.mem_alloc(64).unwrap();
    d.launch(blocking, fill(x, 1)).unwrap();
    d.launch(StreamHandle::LEGACY, Kernel::Add { dst: x, bytes: 4, value: 1 }).unwrap();
    d.launch(StreamHandle::PER_THREAD, Kernel::Add { dst: x, bytes: 4, value: 1 }).unwrap();
    d.launch(StreamHandle::LEGACY, Kernel::Add { dst: x, bytes: 4, value: 1 }).unwrap();
    d.stream_synchronize(StreamHandle::LEGACY).unwrap();
    assert_eq!((word(&d, x), d.reports().len()), (4, 0));
    d.launch(StreamHandle::LEGACY, fill(x, 1)).unwrap();
    d.launch(free, fill(x, 2)).unwrap();
    d.run_until_idle();
    assert_eq!(d.reports().len(), 1, "a non-blocking stream has nothing to do with it");
}

#[test]
fn the_per_thread_stream_is_another_one_in_every_thread() {
    let d = device(Scheduler::InOrder);
    let x = d.mem_alloc(64).unwrap();
    d.launch(StreamHandle::PER_THREAD, fill(x, 1)).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            assert!(d.stream_query(StreamHandle::PER_THREAD).unwrap());
            d.launch(StreamHandle::PER_THREAD, fill(x, 2)).unwrap();
        });
    });
    d.run_until_idle();
    assert_eq!(d.reports().len(), 1);
}

#[test]
fn host_functions_run_in_stream_order_without_the_lock() {
    let d = device(Scheduler::InOrder);
    let (s, g) = (stream(&d), d.gate_create().unwrap());
    let seen = Arc::new(AtomicU32::new(0));
    let x = d.mem_alloc(64).unwrap();
    d.launch(s, fill(x, 6)).unwrap();
    let (there, inner) = (Arc::clone(&seen), d.clone());
    let look = move || {
        there.store(word(&inner, x), SeqCst);
        inner.gate_open(g).unwrap();
    };
    d.launch_host_function(s, Box::new(look)).unwrap();
    d.launch(s, Kernel::Wait { gate: g }).unwrap();
    d.launch(s, fill(x, 7)).unwrap();
    assert_eq!(seen.load(SeqCst), 0);
    d.stream_synchronize(s).unwrap();
    assert_eq!((seen.load(SeqCst), word(&d, x)), (6, 7));
}

#[test]
fn a_host_function_that_waits_for_its_own_stream_is_told_so() {
    let d = device(Scheduler::InOrder);
    let s = stream(&d);
    let (inner, result) = (d.clone(), Arc::new(AtomicU32::new(0)));
    let there = Arc::clone(&result);
    let wait = move || there.store(inner.stream_synchronize(s).unwrap_err().code, SeqCst);
    d.launch_host_function(s, Box::new(wait)).unwrap();
    d.stream_synchronize(s).unwrap();
    assert_eq!(result.load(SeqCst), code::WAIT_NEVER_ENDS);
    assert_eq!(d.last_wait_report().unwrap().held_up[0].reason, HoldupReason::HostFunction);
}

#[test]
fn a_host_function_that_panics_leaves_the_stream_usable() {
    let d = device(Scheduler::InOrder);
    let s = stream(&d);
    d.launch_host_function(s, Box::new(|| panic!("as planned"))).unwrap();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| d.stream_synchronize(s)));
    assert!(result.is_err());
    d.stream_synchronize(s).unwrap();
    assert!(d.stream_query(s).unwrap());
}

#[test]
fn two_threads_wait_at_once() {
    let d = device(Scheduler::InOrder);
    let streams = [stream(&d), stream(&d)];
    let x = d.mem_alloc(4096).unwrap();
    std::thread::scope(|scope| {
        for (i, s) in streams.into_iter().enumerate() {
            let (d, at) = (&d, x.offset(512 * i as u64));
            scope.spawn(move || {
                for _ in 0..200 {
                    d.launch(s, Kernel::Add { dst: at, bytes: 4, value: 1 }).unwrap();
                    d.launch_host_function(s, Box::new(std::thread::yield_now)).unwrap();
                    d.stream_synchronize(s).unwrap();
                }
            });
        }
    });
    assert_eq!([word(&d, x), word(&d, x.offset(512))], [200, 200]);
    assert_eq!(d.reports(), []);
}

#[test]
fn devices_of_a_world_share_a_clock_and_wait_for_each_other() {
    let w = SimWorld::new(2, SimConfig::default().with_scheduler(Scheduler::Adversarial));
    let (d0, d1) = (w.device(0).unwrap(), w.device(1).unwrap());
    assert!(w.device(2).is_none());
    assert_eq!((d0.ordinal(), d1.ordinal(), w.devices().len()), (0, 1, 2));
    let (s0, s1) = (stream(&d0), stream(&d1));
    let (x0, x1) = (d0.mem_alloc(64).unwrap(), d1.mem_alloc(64).unwrap());
    assert_ne!(x0, x1);
    assert_eq!(d0.now(), d1.now());
    let (e, g) = (d0.event_create().unwrap(), d0.gate_create().unwrap());
    d0.launch(s0, Kernel::Wait { gate: g }).unwrap();
    d0.event_record(e, s0).unwrap();
    d1.stream_wait_event(s1, e).unwrap();
    d1.launch(s1, fill(x1, 3)).unwrap();
    assert_eq!(d1.event_record(e, s1).unwrap_err().code, code::INVALID_HANDLE, "an event of another device");
    assert_eq!(d1.launch(s0, fill(x1, 3)).unwrap_err().code, code::INVALID_HANDLE, "a stream of another device");
    assert_eq!(d1.stream_synchronize(s1).unwrap_err().code, code::WAIT_NEVER_ENDS);
    d0.gate_open(g).unwrap();
    d1.stream_synchronize(s1).unwrap();
    assert_eq!(word(&d1, x1), 3);
    assert_eq!((d0.memory_in_use(), d1.calls(Call::MemAlloc)), (2 << 20, 1));
}
