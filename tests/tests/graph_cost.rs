//! What captures and launches ask of the driver, counted call by call.

use std::collections::BTreeMap;

use gpupool_allocator::{Filter, PoolId, Stream};
use gpupool_device::{Call, CaptureMode, GraphDevice};
use gpupool_graph_capture::{CaptureOptions, Executable, Graph, InputCheck, LaunchOptions, OutputCheck};
use gpupool_sim_device::{Scheduler, SimDevice};
use gpupool_tests::graph_bench::{Block, EAGER, KIB, Lab, MIB};

const BYTES: u64 = 4 * KIB;

type Calls = BTreeMap<Call, u64>;

fn captured(
    lab: &Lab,
    stream: &Stream<SimDevice>,
    options: CaptureOptions,
) -> (Graph<SimDevice>, Executable<SimDevice>, Block) {
    lab.capture(stream, options, || {
        let temp = lab.block(10, BYTES, stream);
        lab.fill(stream, &temp, 1);
        let out = lab.block(10, BYTES, stream);
        lab.copy(stream, &out, &temp);
        out
    })
}

/// Calls but for the creation of an event, which comes from a cache the second time.
fn without_creation(mut calls: Calls) -> Calls {
    calls.remove(&Call::EventCreate);
    calls
}

#[test]
fn a_launch_is_one_call_where_its_pools_last_graph_ran_on_the_same_stream() {
    let lab = Lab::new(Scheduler::Adversarial);
    let s = lab.stream();
    let (g0, e0, o0) = captured(&lab, &s, CaptureOptions::new());
    let (g1, e1, o1) = captured(&lab, &s, CaptureOptions::new().with_pool_of(&g0));
    let input = lab.block(EAGER, BYTES, &s);
    g0.declare_input(input.allocation());
    let strict = LaunchOptions::new().with_inputs(InputCheck::Always).with_outputs(OutputCheck::Always);
    for options in [LaunchOptions::new(), strict] {
        for exec in [&e0, &e1, &e1, &e0] {
            let (calls, launched) = lab.calls_of(|| exec.launch_with(&s, options).unwrap());
            assert_eq!((calls, launched.waits), ([(Call::GraphLaunch, 1)].into(), false));
        }
    }
    lab.wait(&s);
    drop((g0, e0, o0, g1, e1, o1, input));
    lab.close();
}

#[test]
fn a_launch_elsewhere_is_one_event_record_and_one_wait_more_and_nothing_piles_up() {
    let lab = Lab::new(Scheduler::Adversarial);
    let streams = [lab.stream(), lab.stream()];
    let (g0, e0, o0) = captured(&lab, &streams[0], CaptureOptions::new());
    let (g1, e1, o1) = captured(&lab, &streams[0], CaptureOptions::new().with_pool_of(&g0));
    e0.launch(&streams[0]).unwrap();
    // No event may be recorded on a stream that somebody captures: so it is asked, as a part of the check.
    let expected: Calls =
        [(Call::GraphLaunch, 1), (Call::EventRecord, 1), (Call::StreamWaitEvent, 1), (Call::StreamGetCaptureInfo, 1)]
            .into();
    for round in 0..100 {
        for (exec, stream) in [(&e1, &streams[1]), (&e0, &streams[0])] {
            let (calls, launched) = lab.calls_of(|| exec.launch(stream).unwrap());
            assert!(launched.waits);
            assert_eq!(without_creation(calls.clone()), expected);
            assert!(round == 0 || !calls.contains_key(&Call::EventCreate), "{calls:?}");
        }
        assert!(lab.device.events_in_use() <= 2, "{} events", lab.device.events_in_use());
    }
    lab.device.run_until_idle();
    drop((g0, e0, o0, g1, e1, o1));
    lab.close();
}

#[test]
fn a_launch_of_several_pools_costs_one_record_and_one_wait_for_each_that_another_stream_used() {
    let lab = Lab::new(Scheduler::Adversarial);
    let streams = [lab.stream(), lab.stream()];
    let inner = PoolId::fresh();
    let both = || {
        let capture = lab.begin(&streams[0], CaptureOptions::new());
        let own = lab.block(10, BYTES, &streams[0]);
        lab.fill(&streams[0], &own, 1);
        let me = Filter::Thread(std::thread::current().id());
        lab.allocator.begin_allocate_inside(capture.id(), inner, me).unwrap();
        let other = lab.block(10, BYTES, &streams[0]);
        lab.fill(&streams[0], &other, 1);
        lab.allocator.end_allocate_to_pool(inner).unwrap();
        lab.allocator.release_pool(inner).unwrap();
        drop((own, other));
        let graph = capture.end().unwrap();
        let exec = graph.instantiate(Default::default()).unwrap();
        (graph, exec)
    };
    let (graph, exec) = both();
    assert_eq!(graph.pools().len(), 2);
    exec.launch(&streams[0]).unwrap();
    let (calls, launched) = lab.calls_of(|| exec.launch(&streams[1]).unwrap());
    assert!(launched.waits);
    assert_eq!([Call::EventRecord, Call::StreamWaitEvent, Call::GraphLaunch].map(|c| calls[&c]), [2, 2, 1]);
    lab.device.run_until_idle();
    drop((graph, exec));
    lab.close();
}

#[test]
fn no_memory_node_enters_a_graph_through_us() {
    let lab = Lab::new(Scheduler::InOrder);
    let s = lab.stream();
    let (graph, exec, ()) = lab.capture(&s, CaptureOptions::new(), || {
        for size in [512, BYTES, MIB, 2 * MIB, 30 * MIB] {
            let block = lab.block(10, size, &s);
            lab.fill(&s, &block, 1);
        }
    });
    assert_eq!(graph.report().memory_nodes, 0);
    assert_eq!(graph.report().nodes, [("kernel".to_owned(), 5)].into());
    assert_eq!(lab.device.graph_nodes(graph.handle()).unwrap().len(), 5);
    exec.launch(&s).unwrap();
    exec.launch(&s).unwrap();
    lab.wait(&s);
    drop((graph, exec));
    lab.close();
}

/// Queries about captures that ten requests of each kind make, but for those before an event is recorded: none may be recorded on a
/// stream that somebody captures.
fn queries(lab: &Lab, stream: &Stream<SimDevice>) -> [u64; 3] {
    let ask = |work: &dyn Fn()| {
        let (calls, ()) = lab.calls_of(work);
        let count = |call| calls.get(&call).copied().unwrap_or(0);
        count(Call::StreamGetCaptureInfo) - count(Call::EventRecord)
    };
    drop(lab.block(10, BYTES, stream));
    [
        // Hits.
        ask(&|| (0..10).for_each(|_| drop(lab.block(10, BYTES, stream)))),
        // Misses: none of these fits what is free.
        ask(&|| {
            let _live: Vec<_> = (0..10).map(|n| lab.block(10, (20 + n * 2) * MIB, stream)).collect();
        }),
        // Frees.
        {
            let block = lab.block(10, BYTES, stream);
            let block = std::cell::Cell::new(Some(block));
            ask(&|| drop(block.take()))
        },
    ]
}

#[test]
fn an_allocation_makes_one_capture_query_while_a_session_is_open_and_none_otherwise() {
    let lab = Lab::new(Scheduler::InOrder);
    let (s, plain, theirs) = (lab.stream(), lab.stream(), lab.stream());
    assert_eq!(queries(&lab, &s), [0, 0, 0]);
    let capture = lab.begin(&s, CaptureOptions::new());
    assert_eq!(queries(&lab, &s), [10, 10, 0], "on the capture's stream");
    assert_eq!(queries(&lab, &plain), [10, 10, 0], "beside it");
    // Scopes change nothing.
    let me = Filter::Thread(std::thread::current().id());
    let (a, b) = (PoolId::fresh(), PoolId::fresh());
    lab.allocator.begin_allocate_inside(capture.id(), a, me).unwrap();
    lab.allocator.begin_allocate_to_pool(b, Filter::Capture(capture.id())).unwrap();
    assert_eq!(queries(&lab, &s), [10, 10, 0], "in a scope");
    assert_eq!(queries(&lab, &plain), [10, 10, 0], "beside it, with scopes open");
    lab.allocator.end_allocate_to_pool(a).unwrap();
    lab.allocator.end_allocate_to_pool(b).unwrap();
    for pool in [a, b] {
        lab.allocator.release_pool(pool).unwrap();
    }
    let graph = capture.end().unwrap();
    // A scope alone, with no session: none.
    let c = PoolId::fresh();
    lab.allocator.begin_allocate_to_pool(c, me).unwrap();
    assert_eq!(queries(&lab, &plain), [0, 0, 0]);
    lab.allocator.end_allocate_to_pool(c).unwrap();
    lab.allocator.release_pool(c).unwrap();
    // Nor while somebody captures whom nobody announced.
    lab.device.begin_capture(theirs.handle(), CaptureMode::Relaxed).unwrap();
    assert_eq!(queries(&lab, &plain), [0, 0, 0]);
    let their_graph = lab.device.end_capture(theirs.handle()).unwrap();
    lab.device.graph_destroy(their_graph).unwrap();
    drop(graph);
    lab.close();
}

#[test]
fn a_capture_costs_a_begin_an_end_and_one_query_and_a_warm_pool_nothing_else() {
    let lab = Lab::new(Scheduler::InOrder);
    let s = lab.stream();
    let (first, exec, out) = captured(&lab, &s, CaptureOptions::new());
    drop((exec, out));
    lab.wait(&s);
    // The output's free is settled by the first begin after it.
    drop(captured(&lab, &s, CaptureOptions::new().with_pool_of(&first)));
    lab.captures.begin(&s, CaptureOptions::new().with_pool_of(&first)).unwrap().end().unwrap();
    let (calls, graph) = lab.calls_of(|| {
        let capture = lab.begin(&s, CaptureOptions::new().with_pool_of(&first));
        let temp = lab.block(10, BYTES, &s);
        drop(temp);
        capture.end().unwrap()
    });
    let expected: Calls = [
        (Call::StreamBeginCapture, 1),
        (Call::StreamEndCapture, 1),
        // The capture's id, and the request's.
        (Call::StreamGetCaptureInfo, 2),
        (Call::GraphGetNodes, 1),
        // What the driver had before and after, for the report.
        (Call::MemGetInfo, 2),
    ]
    .into();
    assert_eq!(calls, expected);
    drop((first, graph));
    lab.close();
}
