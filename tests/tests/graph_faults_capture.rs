//! Faults that users report of capturing, each as a scenario: catalogue entries 21 to 35.

use std::sync::Arc;

use gpupool_allocator::{AllocError, Allocation, Allocator, Config, Policy, PoolId, Range, Stream};
use gpupool_device::{Call, CaptureMode, Device, GraphDevice, Kernel, StreamKind, Workbench};
use gpupool_graph_capture::{CaptureError, CaptureOptions, Captures};
use gpupool_sim_device::{ForeignCall, Scheduler, SimConfig, SimDevice};
use gpupool_tests::graph_bench::{
    Block, EAGER, Hooked, KIB, Lab, MIB, Moment, assert_nothing_left, calls_since, under_every_schedule,
};

const BYTES: u64 = 4 * KIB;
const MODES: [CaptureMode; 3] = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

/// With virtual memory and without.
fn both_kinds(bytes: u64) -> [Lab; 2] {
    both_kinds_with(bytes, Config::new(Policy::Segments))
}

fn both_kinds_with(bytes: u64, config: Config) -> [Lab; 2] {
    [true, false].map(|virtual_memory| {
        let sim = SimConfig { virtual_memory, ..SimConfig::default() }.with_capacity(bytes);
        Lab::with(sim.with_scheduler(Scheduler::Adversarial), config.clone())
    })
}

fn pool_of(lab: &Lab, block: &Block) -> PoolId {
    let at = Range { address: block.address(), bytes: block.bytes() };
    let state = lab.allocator.state();
    let segment =
        state.segments.iter().find(|s| Range { address: s.address, bytes: s.size }.intersection(at).is_some());
    segment.unwrap().pool
}

/// Entry 21.
#[test]
fn what_another_thread_asks_of_the_allocator_leaves_a_capture_alive() {
    for mode in MODES {
        for lab in both_kinds(1 << 30) {
            let (s1, s2, s3) = (lab.stream(), lab.stream(), lab.stream());
            let capture = lab.begin(&s1, CaptureOptions::new().with_mode(mode));
            std::thread::scope(|scope| {
                let other = scope.spawn(|| {
                    // An empty pool: the driver is asked for memory. Then a free that needs an event, and a request that asks about it.
                    let block = lab.block(EAGER, 64 * MIB, &s2);
                    lab.order(&s2, &s3);
                    lab.fill(&s3, &block, 1);
                    block.free_on(&s3);
                    drop(lab.block(EAGER, 64 * MIB, &s2));
                    lab.allocator.empty_cache().unwrap();
                    // The thread's mode is what it was.
                    lab.device.exchange_capture_mode(CaptureMode::Global).unwrap()
                });
                assert_eq!(other.join().unwrap(), CaptureMode::Global);
            });
            assert_eq!(lab.device.exchange_capture_mode(CaptureMode::Global).unwrap(), CaptureMode::Global);
            let block = lab.block(10, BYTES, &s1);
            lab.fill(&s1, &block, 1);
            drop(block);
            assert_eq!(capture.end().expect("the capture is valid").report().node_count(), 1);
            lab.close();
        }
    }
}

/// Entry 24. The illegal operation is somebody else's.
#[test]
fn a_capture_that_an_illegal_call_broke_leaves_nothing_whether_it_is_ended_or_unwound() {
    for unwinds in [false, true] {
        for lab in both_kinds(1 << 30) {
            let s = lab.stream();
            let capture = lab.begin(&s, CaptureOptions::new());
            let x = lab.block(10, 100 * MIB, &s);
            lab.fill(&s, &x, 1);
            lab.device.foreign_call(ForeignCall::MemHostAlloc, s.handle()).unwrap_err();
            if unwinds {
                let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    let _capture = capture;
                    std::panic::resume_unwind(Box::new(()));
                }));
                assert!(unwound.is_err());
            } else {
                assert!(matches!(capture.end(), Err(CaptureError::Invalidated { .. })));
            }
            // The driver destroyed the graph of a broken capture itself: it is not destroyed again.
            assert_eq!(lab.device.calls(Call::GraphDestroy), 0);
            assert_eq!(lab.device.calls(Call::StreamEndCapture), 1);
            assert!(lab.allocator.capture_registry().is_quiet());
            assert!(!lab.device.capture_status(s.handle()).unwrap().is_capturing());
            drop(x);
            lab.allocator.empty_cache().unwrap();
            assert_eq!(lab.reserved(), 0);
            let (graph, exec, out) = lab.capture(&s, CaptureOptions::new(), || {
                let out = lab.block(10, BYTES, &s);
                lab.fill(&s, &out, 3);
                out
            });
            exec.launch(&s).unwrap();
            lab.wait(&s);
            assert_eq!(lab.word(&out), Some(3));
            drop((graph, exec, out));
            lab.close();
        }
    }
}

/// Entry 25.
#[test]
fn a_miss_inside_a_capture_gives_idle_memory_back_and_else_is_out_of_memory_with_the_capture_alive() {
    for mode in MODES {
        for lab in both_kinds(1000 * MIB) {
            let (s0, sc) = (lab.stream(), lab.stream());
            let x = lab.block(EAGER, 900 * MIB, &s0);
            let capture = lab.begin(&sc, CaptureOptions::new().with_mode(mode));
            // All of it is live: out of memory, as a value.
            match lab.try_block(10, 500 * MIB, &sc).map(drop) {
                Err(AllocError::OutOfMemory(report)) => {
                    assert_eq!((report.requested, report.pool), (500 * MIB, capture.pool()));
                }
                other => panic!("{other:?}"),
            }
            lab.fill(&s0, &x, 1);
            drop(x);
            // Cached and still in use by its own stream: waited for, given back.
            let y = lab.block(10, 500 * MIB, &sc);
            lab.fill(&sc, &y, 1);
            drop(y);
            let graph = capture.end().expect("the capture is valid");
            assert_eq!(graph.report().pools[0].new_segment_bytes, 500 * MIB);
            drop(graph);
            lab.close();
        }
    }
}

/// Entry 26.
#[test]
fn memory_of_a_stream_that_was_forked_in_a_capture_comes_from_its_pool_and_nobody_overwrites_it() {
    under_every_schedule(100, |schedule| {
        let lab = Lab::new(schedule.scheduler);
        let (s0, s1) = (lab.stream(), lab.stream());
        let (graph, exec, (z, w)) = lab.capture(&s0, CaptureOptions::new(), || {
            let z = lab.block(10, BYTES, &s0);
            lab.order(&s0, &s1);
            let w = lab.block(10, BYTES, &s1);
            lab.fill(&s0, &z, 1);
            lab.fill(&s1, &w, 2);
            lab.order(&s1, &s0);
            (z, w)
        });
        let pool = graph.pools()[0];
        assert_eq!([pool_of(&lab, &z), pool_of(&lab, &w)], [pool; 2]);
        let (z_at, w_at) = (z.address(), w.address());
        drop((z, w));
        let eager: Vec<_> = [&s0, &s1].into_iter().map(|s| (lab.block(EAGER, BYTES, s), s)).collect();
        for (block, stream) in &eager {
            lab.fill(stream, block, 9);
        }
        exec.launch(&s0).unwrap();
        lab.wait(&s0);
        lab.wait(&s1);
        assert_eq!([lab.word_at(z_at, BYTES), lab.word_at(w_at, BYTES)], [Some(1), Some(2)]);
        assert!(eager.iter().all(|(block, _)| lab.word(block) == Some(9)));
        drop((graph, exec, eager));
        lab.close();
    });
}

/// Entry 27.
#[test]
fn graphs_dropped_during_a_capture_are_destroyed_after_it_and_record_nothing_into_it() {
    let lab = Lab::new(Scheduler::Adversarial);
    let (s, other) = (lab.stream(), lab.stream());
    let make = || {
        lab.capture(&s, CaptureOptions::new(), || {
            let t = lab.block(10, BYTES, &s);
            lab.fill(&s, &t, 1);
        })
    };
    let (old_graph, old_exec, ()) = make();
    let (mut graph, mut exec) = (Some(old_graph), Some(old_exec));
    let pool = graph.as_ref().unwrap().pools()[0];
    exec.as_ref().unwrap().launch(&s).unwrap();
    lab.wait(&s);
    let capture = lab.begin(&other, CaptureOptions::new());
    let before = lab.device.call_counts();
    // As a garbage collector would, on whatever thread.
    std::thread::scope(|scope| {
        let (graph, exec) = (graph.take(), exec.take());
        scope.spawn(move || drop(exec));
        scope.spawn(move || drop(graph));
    });
    let _none_freed = lab.allocator.empty_cache().unwrap();
    let now = calls_since(&before, &lab.device.call_counts());
    assert_eq!(now.get(&Call::GraphExecDestroy), None);
    assert_eq!(now.get(&Call::GraphDestroy), None);
    assert_eq!(lab.pool_bytes(pool), 2 * MIB, "the pool's release is queued too");
    let t = lab.block(10, BYTES, &other);
    lab.fill(&other, &t, 1);
    drop(t);
    let new = capture.end().expect("the capture is valid");
    assert_eq!(new.report().node_count(), 1);
    assert_eq!((lab.captures.queued(), lab.device.calls(Call::GraphExecDestroy)), (0, 1));
    lab.allocator.empty_cache().unwrap();
    assert!(lab.allocator.pool_stats(pool).is_err(), "gone");
    drop(new);
    lab.close();
}

/// Entry 28.
#[test]
fn the_first_allocation_of_all_may_be_inside_a_capture() {
    for mode in MODES {
        for lab in both_kinds(1 << 30) {
            let s = lab.stream();
            let capture = lab.begin(&s, CaptureOptions::new().with_mode(mode));
            let block = lab.block(10, MIB, &s);
            lab.fill(&s, &block, 1);
            drop(block);
            drop(capture.end().expect("the capture is valid"));
            lab.close();
        }
    }
    // An allocator may even be made while somebody captures.
    let device = Arc::new(SimDevice::new(SimConfig::default()));
    let stream = device.stream_create(StreamKind::NonBlocking).unwrap();
    device.begin_capture(stream, CaptureMode::Global).unwrap();
    let lab = Lab::on(Arc::clone(&device), Config::new(Policy::Segments), Arc::default());
    let other = lab.stream();
    drop(lab.block(EAGER, MIB, &other));
    let graph = device.end_capture(stream).expect("the capture is valid");
    device.graph_destroy(graph).unwrap();
    lab.close();
}

/// Entry 29. What another thread may do in the gaps before and after the driver's begin and end is done there.
#[test]
fn there_is_no_gap_around_the_drivers_begin_and_end() {
    for moment in [Moment::BeforeBegin, Moment::AfterBegin, Moment::BeforeEnd, Moment::AfterEnd] {
        let sim = SimDevice::new(SimConfig::default().with_scheduler(Scheduler::Adversarial));
        let device = Arc::new(Hooked::new(sim.clone()));
        let allocator =
            Allocator::with_registry(Arc::clone(&device), Config::new(Policy::Segments), Arc::default()).unwrap();
        let captures = Captures::new(&allocator);
        let stream = || allocator.register_stream(sim.stream_create(StreamKind::NonBlocking).unwrap());
        let (s, other) = (stream(), stream());
        // Work of the stream that the capture will be on, before it.
        let x = allocator.alloc(BYTES, &other).unwrap();
        sim.launch(s.handle(), Kernel::Fill { dst: x.address(), bytes: BYTES, value: 1 }).unwrap();
        let found: Arc<std::sync::Mutex<Vec<Allocation<Hooked>>>> = Arc::default();
        let frees = Arc::new(std::sync::Mutex::new(Some(x)));
        let (allocator_inside, s_inside, other_inside) = (allocator.clone(), s.clone(), other.clone());
        let found_inside = Arc::clone(&found);
        device.on(move |at| {
            if at != moment {
                return;
            }
            let (allocator, s, other) = (allocator_inside.clone(), s_inside.clone(), other_inside.clone());
            let (found, frees) = (Arc::clone(&found_inside), Arc::clone(&frees));
            std::thread::spawn(move || {
                // A free of what the capturing stream uses, a poll, and a request on that stream.
                let x: Allocation<Hooked> = frees.lock().unwrap().take().unwrap();
                x.free_on(&s).map_err(|(_, e)| e).unwrap();
                drop(allocator.alloc(BYTES, &other).unwrap());
                allocator.trim().unwrap();
                found.lock().unwrap().push(allocator.alloc(BYTES, &s).unwrap());
            })
            .join()
            .unwrap();
        });
        let capture = captures.begin(&s, CaptureOptions::new()).unwrap();
        let pool = capture.pool();
        let block = allocator.alloc(BYTES, &s).unwrap();
        sim.launch(s.handle(), Kernel::Fill { dst: block.address(), bytes: BYTES, value: 2 }).unwrap();
        drop(block);
        let graph = capture.end().unwrap_or_else(|e| panic!("{moment:?}: {e}"));
        device.off();
        assert_eq!(graph.report().node_count(), 1);
        // The request went to the pool exactly while the driver captured.
        let served = found.lock().unwrap().pop().unwrap();
        let state = allocator.state();
        let segment = state
            .segments
            .iter()
            .find(|seg| served.address() >= seg.address && served.address().offset_from(seg.address) < seg.size);
        let inside = matches!(moment, Moment::AfterBegin | Moment::BeforeEnd);
        assert_eq!(segment.unwrap().pool, if inside { pool } else { PoolId::DEFAULT }, "{moment:?}");
        drop((served, graph, found));
        allocator.empty_cache().unwrap();
        allocator.validate().unwrap();
        assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
        drop((captures, allocator, s, other));
        drop(device);
        assert_nothing_left(&sim);
    }
}

/// Entry 29 too: an event that is recorded just as another thread begins a capture on the stream is part of that capture.
#[test]
fn an_event_that_a_capture_overtakes_is_not_asked_about() {
    let sim = SimDevice::new(SimConfig::default().with_scheduler(Scheduler::Adversarial));
    let device = Arc::new(Hooked::new(sim.clone()));
    let allocator =
        Allocator::with_registry(Arc::clone(&device), Config::new(Policy::Segments), Arc::default()).unwrap();
    let captures = Captures::new(&allocator);
    let stream = || allocator.register_stream(sim.stream_create(StreamKind::NonBlocking).unwrap());
    let (s, other) = (stream(), stream());
    // A block that waits for the stream.
    let x = allocator.alloc(BYTES, &other).unwrap();
    sim.launch(s.handle(), Kernel::Fill { dst: x.address(), bytes: BYTES, value: 1 }).unwrap();
    x.free_on(&s).map_err(|(_, e)| e).unwrap();
    let (begun, is_begun) = std::sync::mpsc::channel();
    let (finish, may_finish) = std::sync::mpsc::channel::<()>();
    let (go, may_go) = std::sync::mpsc::channel::<()>();
    let capturer = {
        let (captures, s) = (captures.clone(), s.clone());
        std::thread::spawn(move || {
            may_go.recv().unwrap();
            let capture = captures.begin(&s, CaptureOptions::new()).unwrap();
            begun.send(()).unwrap();
            may_finish.recv().unwrap();
            capture.end().map(|graph| graph.report().node_count())
        })
    };
    let mut waiting = Some((go, is_begun));
    device.on(move |at| {
        if at == Moment::AfterStatus
            && let Some((go, is_begun)) = waiting.take()
        {
            go.send(()).unwrap();
            is_begun.recv().unwrap();
        }
    });
    // It looks: the stream is not capturing. The capture begins. It records.
    allocator.trim().unwrap();
    assert!(sim.capture_status(s.handle()).unwrap().is_capturing());
    for _ in 0..2 {
        allocator.trim().unwrap();
        allocator.empty_cache().unwrap();
        drop(allocator.alloc(BYTES, &other).unwrap());
    }
    finish.send(()).unwrap();
    assert_eq!(capturer.join().unwrap().expect("nobody asked about an event of the capture"), 0);
    device.off();
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
    drop((captures, allocator, s, other));
    drop(device);
    assert_nothing_left(&sim);
}

/// Entry 30, as far as it can be told without conditional nodes: a body is a capture of its own, under way beside its parent's.
#[test]
fn a_body_captured_beside_its_parent_reuses_nothing_of_the_parents_and_siblings_share_what_bodies_freed() {
    let lab = Lab::new(Scheduler::InOrder);
    let (s, body_stream) = (lab.stream(), lab.stream());
    let parent = lab.begin(&s, CaptureOptions::new());
    let block = lab.block(10, BYTES, &s);
    let at = block.address();
    // Into the parent's pool it cannot be captured: what one freed would be handed to the other.
    let refused = lab.captures.begin(&body_stream, CaptureOptions::new().with_pool(parent.pool())).unwrap_err();
    assert!(matches!(refused, CaptureError::Alloc(AllocError::PoolInCapture { .. })));
    let body = lab.begin(&body_stream, CaptureOptions::new());
    let bodies = body.pool();
    // The parent's block is freed in the body: that is the parent's business.
    drop(block);
    let inside: Vec<_> = (0..8).map(|_| lab.block(20, BYTES, &body_stream)).collect();
    assert!(inside.iter().all(|b| b.address() != at && pool_of(&lab, b) == bodies));
    let first_at: Vec<_> = inside.iter().map(Block::address).collect();
    drop(inside);
    let first = body.end().unwrap();
    // The parent reuses it, and a later sibling what the first body freed.
    let again = lab.block(10, BYTES, &s);
    assert_eq!(again.address(), at);
    let (second, exec, ()) = lab.capture(&body_stream, CaptureOptions::new().with_pool(bodies), || {
        let inside: Vec<_> = (0..8).map(|_| lab.block(30, BYTES, &body_stream)).collect();
        assert!(inside.iter().all(|b| first_at.contains(&b.address())));
    });
    drop((again, exec));
    let graph = parent.end().unwrap();
    // No graph keeps a body's stream: it may go.
    lab.allocator.retire_stream(&body_stream).unwrap();
    lab.device.stream_destroy(body_stream.handle()).unwrap();
    drop((graph, first, second));
    lab.close();
}

/// Entry 31.
#[test]
fn trimming_during_a_capture_gives_back_what_is_legal_and_says_what_it_did_not() {
    for empties in [false, true] {
        for mode in MODES {
            // Growth trims by itself otherwise.
            for lab in both_kinds_with(1 << 30, Config::new(Policy::Segments).with_trim_before_growth(false)) {
                let (s, other) = (lab.stream(), lab.stream());
                // Idle default memory, a pool that a graph holds, one that nobody does.
                drop(lab.block(EAGER, 20 * MIB, &other));
                let held = lab.capture(&s, CaptureOptions::new(), || drop(lab.block(10, 30 * MIB, &s)));
                let gone = lab.capture(&s, CaptureOptions::new(), || drop(lab.block(10, 40 * MIB, &s)));
                drop(gone);
                let capture = lab.begin(&s, CaptureOptions::new().with_mode(mode));
                drop(lab.block(20, 50 * MIB, &s));
                let trim = || if empties { lab.allocator.empty_cache() } else { lab.allocator.trim() };
                let trimmed = std::thread::scope(|scope| scope.spawn(|| trim().unwrap()).join().unwrap());
                assert_eq!(trimmed.released_bytes, (20 + 40) * MIB);
                assert_eq!(trimmed.held_by_pools_bytes, (30 + 50) * MIB, "held by a graph and by the capture");
                assert_eq!((trimmed.busy_bytes, trimmed.refused_bytes), (0, 0));
                // And once more on the capturing thread: nothing is left to give back.
                assert_eq!(trim().unwrap().released_bytes, 0);
                let graph = capture.end().expect("the capture is valid");
                drop((graph, held));
                lab.close();
            }
        }
    }
}

/// Entry 32.
#[test]
fn a_thread_beside_a_capture_gets_the_same_places_figures_and_calls_as_without_one() {
    let run = |captures: bool| {
        let lab = Lab::new(Scheduler::InOrder);
        let (s1, s2, s3) = (lab.stream(), lab.stream(), lab.stream());
        let capture = captures.then(|| lab.begin(&s1, CaptureOptions::new()));
        let (places, calls, stats) = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let before = lab.device.call_counts();
                let mut places = Vec::new();
                for at in 0..1000 {
                    let block = lab.block(EAGER, (at % 7 + 1) * 300 * KIB, &s2);
                    places.push((block.address(), block.allocation().size()));
                    lab.order(&s2, &s3);
                    lab.fill(&s3, &block, 1);
                    block.free_on(&s3);
                    if at % 100 == 99 {
                        lab.allocator.trim().unwrap();
                    }
                }
                let mut calls = calls_since(&before, &lab.device.call_counts());
                // The one thing that differs: each request asks once, each recorded use too.
                calls.remove(&Call::StreamGetCaptureInfo);
                (places, calls, lab.allocator.stats())
            });
            other.join().unwrap()
        });
        drop(capture);
        lab.assert_clean();
        (places, calls, stats)
    };
    let (without, with) = (run(false), run(true));
    assert_eq!(without.0, with.0, "places");
    assert_eq!(without.1, with.1, "calls");
    assert_eq!(without.2, with.2, "figures");
}

/// Entry 33.
#[test]
fn no_free_adds_a_node_whichever_stream_it_comes_from() {
    let lab = Lab::new(Scheduler::InOrder);
    let (s, side, outside) = (lab.stream(), lab.stream(), lab.stream());
    let eager = lab.block(EAGER, BYTES, &outside);
    let capture = lab.begin(&s, CaptureOptions::new());
    lab.order(&s, &side);
    let own = lab.block(10, BYTES, &s);
    let sides = lab.block(10, BYTES, &side);
    let both = lab.block(10, BYTES, &s);
    lab.fill(&s, &own, 1);
    lab.fill(&side, &sides, 1);
    lab.order(&side, &s);
    lab.fill(&s, &both, 1);
    let graph = lab.device.capture_frontier(s.handle()).unwrap().unwrap().graph;
    let nodes = || lab.device.graph_nodes(graph).unwrap().len();
    let before = nodes();
    // On the side stream after it was joined back; of a block that both used; of one from outside.
    drop(sides);
    both.free_on(&side);
    eager.free_on(&s);
    drop(own);
    assert_eq!(nodes(), before);
    let graph = capture.end().expect("nothing is unjoined");
    assert_eq!((graph.report().node_count(), before), (3, 3));
    drop(graph);
    lab.close();
}

/// Entry 34.
#[test]
fn a_capture_that_recorded_nothing_says_so_also_when_the_work_went_to_another_device() {
    let world = gpupool_sim_device::SimWorld::new(2, SimConfig::default());
    let registry = Arc::new(gpupool_allocator::CaptureRegistry::default());
    let labs = [0, 1].map(|ordinal| {
        let device = Arc::new(world.device(ordinal).unwrap());
        Lab::on(device, Config::new(Policy::Segments), Arc::clone(&registry))
    });
    let (s0, s1) = (labs[0].stream(), labs[1].stream());
    let capture = labs[0].begin(&s0, CaptureOptions::new());
    let block = labs[1].block(EAGER, BYTES, &s1);
    labs[1].fill(&s1, &block, 1);
    let graph = capture.end().unwrap();
    assert_eq!((graph.report().node_count(), graph.report().nodes.len()), (0, 0));
    assert_eq!(graph.report().pools[0].written_bytes(), 0);
    world.devices()[1].run_until_idle();
    drop((graph, block));
    for lab in labs {
        lab.close();
    }
}

/// Entry 35.
#[test]
fn without_caching_a_capture_is_refused_at_its_begin_and_says_why() {
    let lab = Lab::with(SimConfig::default(), Config::new(Policy::Segments).with_caching(false));
    let s: Stream<SimDevice> = lab.stream();
    let refused = lab.captures.begin(&s, CaptureOptions::new()).unwrap_err();
    assert!(matches!(refused, CaptureError::CachingIsOff));
    assert!(refused.to_string().contains("caching"), "{refused}");
    assert!(matches!(lab.captures.adopt(&s, gpupool_graph_capture::PoolChoice::New), Err(CaptureError::CachingIsOff)));
    assert_eq!(lab.device.calls(Call::StreamBeginCapture), 0);
    // Without a capture it works as ever.
    let block = lab.block(EAGER, BYTES, &s);
    assert_ne!(block.address().0, 0);
    drop(block);
    lab.close();
}
