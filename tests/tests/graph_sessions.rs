//! Capture sessions: where requests go, several captures at once, those of others, and exact undo whatever goes wrong.

use std::panic::{AssertUnwindSafe, catch_unwind};

use gpupool_allocator::{AllocError, Config, Filter, Policy, PoolError, PoolId, Range, Stream};
use gpupool_device::{Call, CaptureMode, CaptureStatus, Device, GraphDevice, Kernel, Workbench, code};
use gpupool_graph_capture::{Capture, CaptureError, CaptureOptions, GuardedError, PoolChoice};
use gpupool_sim_device::{Scheduler, SimDevice};
use gpupool_tests::graph_bench::{Block, EAGER, KIB, Lab, MIB};

const BYTES: u64 = 4 * KIB;

/// The pool that a block's segment belongs to.
fn pool_of(lab: &Lab, block: &Block) -> PoolId {
    let at = Range { address: block.address(), bytes: block.bytes() };
    let state = lab.allocator.state();
    let inside = |s: &&gpupool_allocator::state::SegmentState| {
        Range { address: s.address, bytes: s.size }.intersection(at) == Some(at)
    };
    state.segments.iter().find(inside).unwrap().pool
}

fn lab() -> Lab {
    Lab::new(Scheduler::Adversarial)
}

#[test]
fn requests_go_by_the_capture_of_their_stream_from_any_thread_and_any_stream_that_joined() {
    let lab = lab();
    let (s, joins, stranger) = (lab.stream(), lab.stream(), lab.stream());
    let capture = lab.begin(&s, CaptureOptions::new());
    let pool = capture.pool();
    let served = |stream: &Stream<SimDevice>| pool_of(&lab, &lab.block(EAGER, BYTES, stream));
    assert_eq!(served(&s), pool);
    assert!(served(&joins).is_default(), "it has not joined yet");
    lab.order(&s, &joins);
    assert_eq!(served(&joins), pool);
    std::thread::scope(|scope| {
        let elsewhere = scope.spawn(|| [served(&s), served(&joins), served(&stranger)]);
        assert_eq!(elsewhere.join().unwrap(), [pool, pool, PoolId::DEFAULT]);
    });
    assert!(served(&stranger).is_default());
    // Joined back, it is still part of the capture.
    lab.order(&joins, &s);
    assert_eq!(served(&joins), pool);
    let graph = capture.end().unwrap();
    assert_eq!(graph.pools(), [pool]);
    for stream in [&s, &joins, &stranger] {
        assert!(served(stream).is_default());
    }
    drop(graph);
    lab.close();
}

#[test]
fn several_captures_at_once_keep_apart_and_end_in_any_order() {
    for order in gpupool_tests::graph_bench::permutations(3) {
        let lab = lab();
        let streams = [0; 3].map(|_| lab.stream());
        let mut captures: Vec<Option<Capture<SimDevice>>> =
            streams.iter().map(|s| Some(lab.begin(s, CaptureOptions::new()))).collect();
        let pools: Vec<_> = captures.iter().flatten().map(Capture::pool).collect();
        let ids: Vec<_> = captures.iter().flatten().map(Capture::id).collect();
        let mut blocks = Vec::new();
        for round in 0..3 {
            for (at, stream) in streams.iter().enumerate() {
                let block = lab.block(at as u64 + 10, BYTES * (round + 1), stream);
                assert_eq!(pool_of(&lab, &block), pools[at]);
                lab.fill(stream, &block, at as u32);
                blocks.push(block);
            }
        }
        // One of them draws from each pool.
        let fourth = lab.stream();
        for pool in &pools {
            let refused = lab.captures.begin(&fourth, CaptureOptions::new().with_pool(*pool)).unwrap_err();
            assert!(matches!(refused, CaptureError::Alloc(AllocError::PoolInCapture { pool: p }) if p == *pool));
        }
        for at in order {
            let graph = captures[at].take().unwrap().end().unwrap();
            assert_eq!((graph.pools(), graph.report().capture), (vec![pools[at]], ids[at]));
            assert_eq!(graph.report().pools[0].outputs.len(), 3);
        }
        drop(blocks);
        lab.close();
    }
}

#[test]
fn a_capture_that_nobody_announced_gets_no_memory_while_one_is_open_and_a_pool_once_adopted() {
    let lab = lab();
    let (s, theirs) = (lab.stream(), lab.stream());
    let capture = lab.begin(&s, CaptureOptions::new());
    lab.device.begin_capture(theirs.handle(), CaptureMode::Global).unwrap();
    let CaptureStatus::Active(id) = lab.device.capture_status(theirs.handle()).unwrap() else { panic!() };
    for bytes in [BYTES, 4 * MIB] {
        match lab.allocator.alloc(bytes, &theirs) {
            Err(AllocError::UnknownCapture { stream, capture }) => assert_eq!((stream, capture), (theirs.id(), id)),
            other => panic!("{other:?}"),
        }
    }
    let adopted = lab.captures.adopt(&theirs, PoolChoice::New).unwrap();
    assert_eq!(adopted.id(), id);
    let block = lab.block(EAGER, BYTES, &theirs);
    assert_eq!(pool_of(&lab, &block), adopted.pool());
    lab.fill(&theirs, &block, 1);
    // No second session for it, and no second drawer from a pool.
    for pool in [PoolChoice::New, PoolChoice::Shared(adopted.pool()), PoolChoice::Shared(capture.pool())] {
        assert!(matches!(
            lab.captures.adopt(&theirs, pool),
            Err(CaptureError::Alloc(AllocError::PoolInCapture { .. }))
        ));
    }
    assert!(matches!(lab.captures.adopt(&lab.stream(), PoolChoice::New), Err(CaptureError::NotCapturing { .. })));
    let stranger = Lab::new(Scheduler::InOrder).stream();
    assert!(matches!(
        lab.captures.adopt(&stranger, PoolChoice::New),
        Err(CaptureError::Alloc(AllocError::ForeignStream { .. }))
    ));
    let graph = lab.device.end_capture(theirs.handle()).unwrap();
    let pool = adopted.pool();
    let holds = adopted.finish();
    assert_eq!(holds.iter().map(|h| h.id()).collect::<Vec<_>>(), [pool]);
    assert!(pool_of(&lab, &lab.block(EAGER, BYTES, &theirs)).is_default());
    drop(capture);
    // As long as the holds live, what the graph baked in stays put.
    let at = block.address();
    drop(block);
    lab.allocator.empty_cache().unwrap();
    assert_eq!(lab.pool_bytes(pool), 2 * MIB);
    let next = lab.captures.begin(&s, CaptureOptions::new()).unwrap();
    assert_ne!(lab.block(EAGER, BYTES, &s).address(), at);
    drop(next);
    lab.device.graph_destroy(graph).unwrap();
    drop(holds);
    lab.close();
}

#[test]
fn a_capture_whose_adoption_was_dropped_too_early_gets_no_more_memory() {
    let lab = lab();
    let (s, theirs) = (lab.stream(), lab.stream());
    let _open = lab.begin(&s, CaptureOptions::new());
    lab.device.begin_capture(theirs.handle(), CaptureMode::Relaxed).unwrap();
    let adopted = lab.captures.adopt(&theirs, PoolChoice::New).unwrap();
    drop(lab.block(EAGER, BYTES, &theirs));
    drop(adopted);
    match lab.allocator.alloc(BYTES, &theirs) {
        Err(AllocError::UnknownCapture { stream, .. }) => assert_eq!(stream, theirs.id()),
        other => panic!("{other:?}"),
    }
    lab.allocator.validate().unwrap();
    let graph = lab.device.end_capture(theirs.handle()).unwrap();
    lab.device.graph_destroy(graph).unwrap();
}

/// What a begin may not change.
fn footprint(lab: &Lab, streams: &[&Stream<SimDevice>]) -> impl PartialEq + std::fmt::Debug + use<> {
    let state = lab.allocator.state();
    let segments: Vec<_> = state.segments.iter().map(|s| (s.ordinal, s.address, s.size, s.pool)).collect();
    let live: Vec<_> = lab.allocator.state().segments.iter().map(|s| s.allocated()).collect();
    let pools: Vec<_> = state.pools.iter().map(|p| (p.id, p.use_count)).collect();
    let capturing: Vec<_> =
        streams.iter().map(|s| lab.device.capture_status(s.handle()).unwrap().is_capturing()).collect();
    let quiet = lab.allocator.capture_registry().is_quiet();
    let memory = (lab.device.memory_in_use(), lab.device.address_space_in_use());
    (segments, live, pools, capturing, quiet, memory)
}

#[test]
fn a_begin_that_fails_at_any_driver_call_leaves_everything_as_it_was() {
    // Into a pool of its own; into one with free, live and pending eager blocks.
    for shared in [false, true] {
        let make = || {
            let lab = lab();
            let (s, other) = (lab.stream(), lab.stream());
            let mut kept = Vec::new();
            let options = if shared {
                let (graph, exec, out) = lab.capture(&s, CaptureOptions::new(), || lab.block(10, BYTES, &s));
                let pool = graph.pools()[0];
                lab.allocator.begin_allocate_to_pool(pool, Filter::Stream(other.handle())).unwrap();
                let eager = [0; 3].map(|_| lab.block(EAGER, BYTES, &other));
                lab.allocator.end_allocate_to_pool(pool).unwrap();
                lab.allocator.release_pool(pool).unwrap();
                let [a, b, c] = eager;
                lab.fill(&other, &a, 1);
                lab.order(&other, &s);
                lab.fill(&s, &b, 1);
                b.free_on(&s);
                drop(a);
                kept.extend([out, c]);
                drop(exec);
                (CaptureOptions::new().with_pool(pool), Some(graph))
            } else {
                (CaptureOptions::new(), None)
            };
            (lab, s, options, kept)
        };
        let (lab, s, options, kept) = make();
        let (calls, capture) = lab.calls_of(|| lab.captures.begin(&s, options.0).unwrap());
        drop((capture, kept, options.1));
        lab.close();
        assert!(calls.len() >= 2, "{calls:?}");
        for (&call, &count) in &calls {
            for nth in 1..=count {
                for fault in [code::UNKNOWN, code::OUT_OF_MEMORY, code::CAPTURE_UNSUPPORTED] {
                    let (lab, s, options, kept) = make();
                    let before = footprint(&lab, &[&s]);
                    lab.device.fail_nth(call, nth, fault);
                    let begun = lab.captures.begin(&s, options.0);
                    lab.device.clear_faults();
                    match begun {
                        Ok(capture) => drop(capture),
                        Err(e) => assert_eq!(footprint(&lab, &[&s]), before, "{e}, at call {nth} of {call}"),
                    }
                    lab.allocator.validate().unwrap();
                    assert!(pool_of(&lab, &lab.block(EAGER, BYTES, &s)).is_default());
                    // And the next one works.
                    let capture = lab.begin(&s, options.0);
                    assert_eq!(pool_of(&lab, &lab.block(10, BYTES, &s)), capture.pool());
                    let graph = capture.end().unwrap();
                    drop((graph, kept, options.1));
                    lab.close();
                }
            }
        }
    }
}

/// Catalogue entry 24.
#[test]
fn an_abandoned_capture_and_one_that_unwinds_are_undone_exactly() {
    for unwinds in [false, true] {
        let lab = lab();
        let (s, joined) = (lab.stream(), lab.stream());
        let input = lab.block(EAGER, BYTES, &s);
        lab.fill(&s, &input, 5);
        let before = footprint(&lab, &[&s, &joined]);
        let kept = {
            let abandon = || {
                let capture = lab.begin(&s, CaptureOptions::new());
                let pool = capture.pool();
                let temp = lab.block(10, BYTES, &s);
                lab.copy(&s, &temp, &input);
                lab.order(&s, &joined);
                let other = lab.block(10, 4 * MIB, &joined);
                lab.fill(&joined, &other, 1);
                // Freed with a recorded use, in the middle of things.
                other.record(&s);
                drop(other);
                if unwinds {
                    std::panic::resume_unwind(Box::new(temp.into_allocation()));
                }
                drop(capture);
                (pool, temp.into_allocation())
            };
            match catch_unwind(AssertUnwindSafe(abandon)) {
                Ok((_, kept)) => kept,
                Err(payload) => *payload.downcast().unwrap(),
            }
        };
        // The block that was handed out stays its owner's, and its pool is nobody's.
        lab.allocator.validate().unwrap();
        let orphans = lab.captures.orphans();
        assert_eq!(orphans.iter().map(|o| o.range.address).collect::<Vec<_>>(), [kept.address()]);
        assert_eq!(lab.allocator.pool_use_count(orphans[0].pool).unwrap(), 0);
        assert!(pool_of(&lab, &lab.block(EAGER, BYTES, &s)).is_default());
        assert!(pool_of(&lab, &lab.block(EAGER, BYTES, &joined)).is_default());
        lab.device.disown(kept.address(), kept.size());
        drop(kept);
        lab.wait(&s);
        lab.wait(&joined);
        assert_eq!(lab.word(&input), Some(5), "nothing of the capture ran");
        lab.allocator.empty_cache().unwrap();
        assert_eq!(footprint(&lab, &[&s, &joined]), before);
        // The next capture works, in the same place.
        let (graph, exec, out) = lab.capture(&s, CaptureOptions::new(), || {
            let out = lab.block(10, BYTES, &s);
            lab.copy(&s, &out, &input);
            out
        });
        exec.launch(&s).unwrap();
        lab.wait(&s);
        assert_eq!(lab.word(&out), Some(5));
        drop((graph, exec, out, input));
        lab.close();
    }
}

/// Catalogue entry 21: what is kept of the call that broke a capture.
#[test]
fn an_invalidated_capture_names_the_first_of_our_calls_that_it_did_not_permit() {
    let lab = lab();
    let (s, other) = (lab.stream(), lab.stream());
    // A block that waits for another stream, so that a miss queries an event.
    let pending = || {
        let block = lab.block(EAGER, BYTES, &other);
        lab.fill(&other, &block, 1);
        lab.order(&other, &s);
        lab.fill(&s, &block, 1);
        block.free_on(&s);
    };
    pending();
    let capture = lab.begin(&other, CaptureOptions::new());
    lab.device.fail_nth(Call::EventQuery, 1, code::CAPTURE_UNSUPPORTED);
    // Ours twice: the first one counts. A driver that refused would break the capture.
    let offender = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let _pending = lab.allocator.trim();
            std::thread::current().id()
        });
        thread.join().unwrap()
    });
    lab.device.fail_nth(Call::EventQuery, 1, code::CAPTURE_UNSUPPORTED);
    let _pending = lab.allocator.trim();
    lab.device.invalidate_capture_after(0);
    let refused = lab.allocator.alloc(BYTES, &other);
    assert!(matches!(refused, Err(AllocError::InvalidatedCapture { stream }) if stream == other.id()), "{refused:?}");
    let id = capture.id();
    let error = capture.end().unwrap_err();
    let text = error.to_string();
    match error {
        CaptureError::Invalidated { stream, capture, first: Some(first), end } => {
            assert_eq!((stream, capture, end.code), (other.id(), id, code::CAPTURE_INVALIDATED));
            assert_eq!((first.call, first.code, first.thread), (Call::EventQuery, code::CAPTURE_UNSUPPORTED, offender));
        }
        other => panic!("{other:?}"),
    }
    assert!(text.contains("cuEventQuery") && text.contains("stream #1"), "{text}");
    lab.close();
}

#[test]
fn an_invalidated_capture_says_when_the_call_was_not_ours() {
    let lab = lab();
    let (s, other) = (lab.stream(), lab.stream());
    let capture = lab.begin(&s, CaptureOptions::new());
    let block = lab.block(10, BYTES, &s);
    lab.fill(&s, &block, 1);
    // Somebody waits for another stream, which a capture in global mode does not permit.
    assert_eq!(lab.device.stream_synchronize(other.handle()).unwrap_err().code, code::CAPTURE_UNSUPPORTED);
    drop(block);
    assert!(matches!(lab.allocator.alloc(BYTES, &s), Err(AllocError::InvalidatedCapture { .. })));
    let error = capture.end().unwrap_err();
    assert!(matches!(error, CaptureError::Invalidated { first: None, .. }), "{error:?}");
    assert!(error.to_string().contains("not the allocator's"), "{error}");
    lab.close();
}

#[test]
fn a_stream_that_was_not_joined_back_fails_the_end_and_nothing_is_left() {
    let lab = lab();
    let (s, joins) = (lab.stream(), lab.stream());
    let capture = lab.begin(&s, CaptureOptions::new());
    lab.order(&s, &joins);
    let block = lab.block(10, BYTES, &joins);
    lab.fill(&joins, &block, 1);
    drop(block);
    match capture.end().unwrap_err() {
        CaptureError::Invalidated { end, .. } => assert_eq!(end.code, code::CAPTURE_UNJOINED),
        other => panic!("{other:?}"),
    }
    lab.close();
}

#[test]
fn precedence_is_inner_scope_then_capture_then_outer_scope_then_default() {
    let lab = lab();
    let (s, plain) = (lab.stream(), lab.stream());
    let outer = PoolId::fresh();
    let inner = PoolId::fresh();
    let served = |stream: &Stream<SimDevice>| pool_of(&lab, &lab.block(EAGER, BYTES, stream));
    let me = Filter::Thread(std::thread::current().id());
    // Default.
    assert_eq!([served(&s), served(&plain)], [PoolId::DEFAULT; 2]);
    // An outer scope.
    lab.allocator.begin_allocate_to_pool(outer, me).unwrap();
    assert_eq!([served(&s), served(&plain)], [outer; 2]);
    // The capture's pool goes before it, on the capture's streams.
    let capture = lab.begin(&s, CaptureOptions::new());
    let pool = capture.pool();
    assert_eq!([served(&s), served(&plain)], [pool, outer]);
    // A scope opened while the capture is under way, but not inside it, does not.
    let late = PoolId::fresh();
    lab.allocator.begin_allocate_to_pool(late, Filter::All).unwrap();
    assert_eq!([served(&s), served(&plain)], [pool, late]);
    lab.allocator.end_allocate_to_pool(late).unwrap();
    // One opened inside goes first, the newest before all.
    lab.allocator.begin_allocate_inside(capture.id(), inner, me).unwrap();
    assert_eq!(served(&s), inner);
    let outside = capture.outside().unwrap();
    assert_eq!(served(&s), PoolId::DEFAULT);
    // Of another thread they say nothing.
    std::thread::scope(|scope| assert_eq!(scope.spawn(|| served(&s)).join().unwrap(), pool));
    drop(outside);
    assert_eq!(served(&s), inner);
    lab.allocator.end_allocate_to_pool(inner).unwrap();
    assert_eq!([served(&s), served(&plain)], [pool, outer]);
    drop(capture);
    assert_eq!([served(&s), served(&plain)], [outer; 2]);
    lab.allocator.end_allocate_to_pool(outer).unwrap();
    assert_eq!([served(&s), served(&plain)], [PoolId::DEFAULT; 2]);
    for pool in [outer, late, inner] {
        lab.allocator.release_pool(pool).unwrap();
    }
    lab.close();
}

/// Compiles only for what is not `Send`: otherwise both implementations apply.
trait IsNotSend<A> {
    const OK: bool = true;
}
impl<T: ?Sized> IsNotSend<()> for T {}
impl<T: ?Sized + Send> IsNotSend<u8> for T {}

#[test]
fn a_capture_cannot_leave_the_thread_that_must_end_it() {
    const { assert!(<Capture<SimDevice> as IsNotSend<_>>::OK) };
    const { assert!(<gpupool_graph_capture::Outside<SimDevice> as IsNotSend<_>>::OK) };
}

#[test]
fn graphs_executables_and_holds_can() {
    fn may_travel<T: Send + Sync + 'static>() {}
    may_travel::<gpupool_graph_capture::Graph<SimDevice>>();
    may_travel::<gpupool_graph_capture::Executable<SimDevice>>();
    may_travel::<gpupool_graph_capture::Captures<SimDevice>>();
    may_travel::<gpupool_allocator::PoolHold>();
    may_travel::<gpupool_allocator::Allocation<SimDevice>>();
}

/// Threads that capture, launch and drop graphs beside threads that allocate, free and trim. What each finds is checked; what meets
/// whom is the machine's choice.
#[test]
fn captures_and_launches_of_several_threads_beside_eager_ones_stay_right() {
    for seed in 0..6 {
        let lab = Lab::new(Scheduler::Random { seed });
        let shared = PoolId::fresh_for_capture();
        std::thread::scope(|scope| {
            for thread in 0..3_u32 {
                let lab = &lab;
                scope.spawn(move || {
                    let (s, replays) = (lab.stream(), lab.stream());
                    for round in 0..12 {
                        // In turns a pool of its own and one that the threads share: then one of them has it at a time.
                        let options = match round % 2 {
                            0 => CaptureOptions::new(),
                            _ => CaptureOptions::new().with_pool(shared),
                        };
                        let Ok(capture) = lab.captures.begin(&s, options) else { continue };
                        let value = thread * 100 + round;
                        let temp = lab.block(10 + u64::from(thread), BYTES, &s);
                        lab.fill(&s, &temp, value);
                        let out = lab.block(10 + u64::from(thread), BYTES, &s);
                        lab.copy(&s, &out, &temp);
                        drop(temp);
                        let graph = capture.end().expect("nobody breaks it");
                        let exec = graph.instantiate(Default::default()).unwrap();
                        let launched = exec.launch(&replays).unwrap();
                        if round % 3 == 0 {
                            drop((graph, exec));
                        }
                        launched.done.wait().unwrap();
                        if round % 2 == 0 {
                            // Of the shared pool another thread's launch may have overwritten it by now.
                            assert_eq!(lab.word(&out), Some(value));
                        }
                        out.free_on(&replays);
                    }
                });
            }
            for _ in 0..2 {
                let lab = &lab;
                scope.spawn(move || {
                    let (s, other) = (lab.stream(), lab.stream());
                    for at in 0..150_u32 {
                        let block = lab.block(EAGER, BYTES, &s);
                        lab.fill(&s, &block, at);
                        if at % 5 == 0 {
                            lab.order(&s, &other);
                            lab.add(&other, &block, 1);
                            block.free_on(&other);
                        }
                        if at % 40 == 0 {
                            lab.allocator.trim().unwrap();
                        }
                    }
                });
            }
        });
        lab.device.run_until_idle();
        let races: Vec<_> = lab.device.take_reports();
        assert!(races.iter().all(|r| r.kind != gpupool_sim_device::ReportKind::UnmappedInUse), "{races:?}");
        lab.close();
    }
}

#[test]
fn begin_refuses_what_cannot_be_captured_and_changes_nothing() {
    let lab = lab();
    let s = lab.stream();
    let before = footprint(&lab, &[&s]);
    // A stream of another allocator.
    let other = Lab::on(lab.device.clone(), Config::new(Policy::Segments), Default::default());
    let foreign = other.stream();
    assert!(matches!(
        lab.captures.begin(&foreign, CaptureOptions::new()),
        Err(CaptureError::Alloc(AllocError::ForeignStream { .. }))
    ));
    // The default pool is nobody's to hold.
    assert!(matches!(
        lab.captures.begin(&s, CaptureOptions::new().with_pool(PoolId::DEFAULT)),
        Err(CaptureError::Alloc(AllocError::Pool(PoolError::Default)))
    ));
    assert_eq!(footprint(&lab, &[&s]), before);
    // A stream that is capturing already: that capture survives.
    let capture = lab.begin(&s, CaptureOptions::new());
    let during = footprint(&lab, &[&s]);
    match lab.captures.begin(&s, CaptureOptions::new()) {
        Err(CaptureError::Driver(e)) => assert_eq!(e.code, code::ILLEGAL_STATE),
        other => panic!("{other:?}"),
    }
    assert_eq!(footprint(&lab, &[&s]), during);
    assert_eq!(pool_of(&lab, &lab.block(10, BYTES, &s)), capture.pool());
    capture.end().unwrap();
    // Policies that route in their own way, and no caching.
    for (config, policy) in [(Policy::Torch215, true), (Policy::Torch211, true), (Policy::Segments, false)]
        .map(|(p, policy)| (Config::new(p).with_caching(policy), policy))
    {
        let lab = Lab::with(Default::default(), config);
        let s = lab.stream();
        let refused = lab.captures.begin(&s, CaptureOptions::new()).unwrap_err();
        assert_eq!(matches!(refused, CaptureError::Policy { .. }), policy, "{refused}");
        assert_eq!(matches!(refused, CaptureError::CachingIsOff), !policy, "{refused}");
        assert!(!lab.device.capture_status(s.handle()).unwrap().is_capturing());
    }
    lab.close();
}

#[test]
fn guarded_calls_are_refused_with_their_names_and_the_capture_survives() {
    let lab = lab();
    let (s, other) = (lab.stream(), lab.stream());
    let plain = lab.device.mem_alloc(2 * MIB).unwrap();
    let event = lab.device.event_create().unwrap();
    let capture = lab.begin(&s, CaptureOptions::new());
    lab.device.event_record(event, s.handle()).unwrap();
    let guarded = lab.captures.guarded();
    let refusals = [
        (Call::StreamSynchronize, guarded.synchronize(&s).unwrap_err()),
        (Call::EventSynchronize, guarded.synchronize_event(event, &s).unwrap_err()),
        (Call::EventQuery, guarded.query_event(event, &s).unwrap_err()),
        (Call::MemFree, guarded.free(plain, &s).unwrap_err()),
        (Call::LaunchKernel, guarded.allow_legacy(&s).unwrap_err()),
    ];
    for (call, refusal) in refusals {
        match refusal {
            GuardedError::Forbidden(f) => {
                assert_eq!((f.call, f.stream, f.capture), (call, s.id(), capture.id()));
                assert!(!f.instead.is_empty() && f.to_string().contains(call.name()));
            }
            other => panic!("{other:?}"),
        }
    }
    // On a stream that is not capturing they are made, in a way that the capture survives.
    guarded.synchronize(&other).unwrap();
    let done = lab.device.event_create().unwrap();
    lab.device.event_record(done, other.handle()).unwrap();
    guarded.synchronize_event(done, &other).unwrap();
    assert!(guarded.query_event(done, &other).unwrap());
    guarded.free(plain, &other).unwrap();
    guarded.allow_legacy(&other).unwrap();
    let block = lab.block(10, BYTES, &s);
    lab.device.launch(s.handle(), Kernel::Fill { dst: block.address(), bytes: BYTES, value: 1 }).unwrap();
    drop(block);
    assert_eq!(capture.end().unwrap().report().node_count(), 1);
    for event in [event, done] {
        lab.device.event_destroy(event).unwrap();
    }
    lab.close();
}

#[test]
fn capture_modes_are_the_drivers_and_our_calls_survive_all_of_them() {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        for virtual_memory in [true, false] {
            let sim = gpupool_sim_device::SimConfig { virtual_memory, ..Default::default() };
            let lab = Lab::with(sim, Config::new(Policy::Segments));
            let (s, other) = (lab.stream(), lab.stream());
            let capture = lab.begin(&s, CaptureOptions::new().with_mode(mode));
            // Growth, events, waits and giving back, on this thread and on another.
            let work = || {
                let block = lab.block(EAGER, 4 * MIB, &other);
                lab.fill(&other, &block, 1);
                drop(block);
                lab.allocator.empty_cache().unwrap();
            };
            work();
            std::thread::scope(|scope| scope.spawn(work).join().unwrap());
            drop(lab.block(10, 4 * MIB, &s));
            let graph = capture.end().unwrap();
            assert_eq!(graph.report().pools[0].new_segment_bytes, 20 * MIB);
            drop(graph);
            lab.close();
        }
    }
}

#[test]
fn a_checkpoint_is_not_restored_where_it_no_longer_fits_nor_while_a_capture_draws_from_the_pool() {
    let lab = Lab::new(Scheduler::InOrder);
    let s = lab.stream();
    let pool = PoolId::fresh();
    lab.allocator.create_pool(pool).unwrap();
    let scoped = |bytes| {
        lab.allocator.begin_allocate_to_pool(pool, gpupool_allocator::Filter::All).unwrap();
        let block = lab.block(10, bytes, &s);
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        lab.allocator.release_pool(pool).unwrap();
        block
    };
    let y = scoped(8 * MIB);
    let checkpoint = lab.allocator.checkpoint_pool(pool).unwrap();
    drop(y);
    let _ = lab.allocator.largest_free_block();
    let x = scoped(3 * MIB);
    // What the capture leaves free belongs to no stream; what is free beside it, to the stream.
    let capture = lab.begin(&s, CaptureOptions::new().with_pool(pool));
    let t = lab.block(10, 2 * MIB, &s);
    lab.fill(&s, &t, 1);
    drop(t);
    let live = lab.allocator.state();
    let refused = lab.allocator.restore_pool(&checkpoint, &s);
    assert!(matches!(refused, Err(AllocError::PoolInCapture { pool: p }) if p == pool), "{refused:?}");
    let graph = capture.end().unwrap();
    drop(x);
    match lab.allocator.restore_pool(&checkpoint, &s) {
        Err(AllocError::Pool(gpupool_allocator::PoolError::CheckpointMismatch { pool: p, .. })) => assert_eq!(p, pool),
        // Where the parts join, it fits.
        Ok(restored) => assert_eq!(restored.allocated[0].size(), 8 * MIB),
        Err(other) => panic!("{other}"),
    }
    lab.allocator.validate().unwrap();
    drop((graph, live));
    lab.allocator.release_pool(pool).unwrap();
    lab.close();
}

#[test]
fn pools_that_come_and_go_leave_nothing_in_the_figures() {
    let lab = Lab::new(Scheduler::InOrder);
    let s = lab.stream();
    for _ in 0..200 {
        let capture = lab.begin(&s, CaptureOptions::new());
        let pool = capture.pool();
        let block = lab.block(10, BYTES, &s);
        lab.fill(&s, &block, 1);
        drop(block);
        drop(capture.end().unwrap());
        lab.allocator.empty_cache().unwrap();
        assert!(matches!(lab.allocator.create_pool(pool), Err(AllocError::Pool(_))), "its name is not used again");
    }
    assert!(lab.allocator.stats().private_pools.is_empty());
    lab.close();
}
