//! Graphs and their launches.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use gpupool_device::{
    CaptureMode, Device, ExecHandle, GraphDevice, GraphHandle, InstantiateFlags, Kernel, NodeKind, StreamHandle,
    Workbench, code,
};

use super::{Check, PAGE, Subject, add, check, code_of, copy, holding, plain, stream, word, zeroed};

pub(super) fn checks<S: Subject>() -> Vec<Check<S>> {
    vec![
        check("launches of one executable run one after the other", serial),
        holding("an executable may go while its run is pending", pending),
        check("an executable stays when its graph goes", without_graph),
        check("an empty graph runs", empty),
        check("unknown graphs and executables are refused", unknown),
        check("host functions become nodes if they can run again", host_functions),
        zeroed("a graph's addresses may change their memory between launches", moved),
        check("a launch may be on any stream, and on the legacy one", anywhere),
        check("flags of instantiation are taken", flags),
        check("nothing of a graph runs before its launch", nothing_before),
    ]
}

fn capture<S: Subject>(s: &S, st: StreamHandle, record: impl FnOnce()) -> (GraphHandle, ExecHandle) {
    let d = s.device();
    d.begin_capture(st, CaptureMode::Global).unwrap();
    record();
    let graph = d.end_capture(st).unwrap();
    (graph, d.instantiate(graph, InstantiateFlags::default()).unwrap())
}

fn serial<S: Subject>(s: &S) {
    let (d, x) = (s.device(), plain(s.device()));
    let (a, b) = (stream(d), stream(d));
    let (_, exec) = capture(s, a, || {
        d.launch(a, copy(x.offset(8), x)).unwrap();
        d.launch(a, add(x.offset(8), 1)).unwrap();
        d.launch(a, copy(x, x.offset(8))).unwrap();
    });
    for st in [a, b, b, a].repeat(10) {
        d.graph_launch(exec, st).unwrap();
    }
    d.device_synchronize().unwrap();
    assert_eq!(word(d, a, x), 40);
    d.exec_destroy(exec).unwrap();
    d.mem_free(x).unwrap();
}

fn pending<S: Subject>(s: &S) {
    let (d, x, st) = (s.device(), plain(s.device()), stream(s.device()));
    let gate = d.gate_create().unwrap();
    let (graph, exec) = capture(s, st, || d.launch(st, add(x, 1)).unwrap());
    d.launch(st, Kernel::Wait { gate }).unwrap();
    d.graph_upload(exec, st).unwrap();
    d.graph_launch(exec, st).unwrap();
    d.exec_destroy(exec).unwrap();
    d.graph_destroy(graph).unwrap();
    assert_eq!(code_of(d.exec_destroy(exec)), code::INVALID_VALUE);
    assert_eq!(code_of(d.graph_launch(exec, st)), code::INVALID_VALUE);
    d.gate_open(gate).unwrap();
    assert_eq!(word(d, st, x), 1);
    d.mem_free(x).unwrap();
}

fn without_graph<S: Subject>(s: &S) {
    let (d, x, st) = (s.device(), plain(s.device()), stream(s.device()));
    let (graph, exec) = capture(s, st, || d.launch(st, add(x, 1)).unwrap());
    let twin = d.instantiate(graph, InstantiateFlags::default()).unwrap();
    assert_ne!(exec, twin);
    d.graph_destroy(graph).unwrap();
    d.graph_launch(exec, st).unwrap();
    d.graph_launch(twin, st).unwrap();
    assert_eq!(word(d, st, x), 2);
    d.exec_destroy(exec).unwrap();
    d.exec_destroy(twin).unwrap();
    d.mem_free(x).unwrap();
}

fn empty<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let (graph, exec) = capture(s, st, || {});
    assert_eq!((d.graph_nodes(graph).unwrap(), d.graph_edges(graph).unwrap()), (vec![], vec![]));
    d.graph_launch(exec, st).unwrap();
    d.stream_synchronize(st).unwrap();
    d.exec_destroy(exec).unwrap();
}

fn unknown<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let (g, x) = (GraphHandle(0x7777_7770), ExecHandle(0x7777_7770));
    let codes = [
        code_of(d.graph_nodes(g)),
        code_of(d.graph_edges(g)),
        code_of(d.graph_destroy(g)),
        code_of(d.instantiate(g, InstantiateFlags::default())),
        code_of(d.graph_launch(x, st)),
        code_of(d.graph_upload(x, st)),
        code_of(d.exec_destroy(x)),
    ];
    assert_eq!(codes, [code::INVALID_VALUE; 7]);
}

fn host_functions<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let count = Arc::new(AtomicU32::new(0));
    let (graph, exec) = capture(s, st, || {
        assert_eq!(code_of(d.launch_host_function(st, Box::new(|| {}))), code::NOT_SUPPORTED);
        let there = Arc::clone(&count);
        s.host_function(
            st,
            Arc::new(move || {
                there.fetch_add(1, SeqCst);
            }),
        )
        .unwrap();
    });
    let kinds: Vec<_> = d.graph_nodes(graph).unwrap().into_iter().map(|n| n.kind).collect();
    assert_eq!(kinds, [NodeKind::Host]);
    (0..3).for_each(|_| d.graph_launch(exec, st).unwrap());
    d.stream_synchronize(st).unwrap();
    assert_eq!(count.load(SeqCst), 3);
    d.graph_destroy(graph).unwrap();
    d.exec_destroy(exec).unwrap();
}

fn moved<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let range = d.address_reserve(PAGE).unwrap();
    let fresh = || {
        let h = d.handle_create(PAGE).unwrap();
        d.map(range, PAGE, h).unwrap();
        d.set_access(range, PAGE).unwrap();
        d.handle_release(h).unwrap();
    };
    fresh();
    let (_, exec) = capture(s, st, || d.launch(st, add(range, 5)).unwrap());
    d.graph_launch(exec, st).unwrap();
    assert_eq!(word(d, st, range), 5);
    d.unmap(range, PAGE).unwrap();
    fresh();
    d.graph_launch(exec, st).unwrap();
    assert_eq!(word(d, st, range), 5, "from zero, in the new memory");
    d.exec_destroy(exec).unwrap();
    d.unmap(range, PAGE).unwrap();
    d.address_free(range, PAGE).unwrap();
}

fn anywhere<S: Subject>(s: &S) {
    let (d, x, st) = (s.device(), plain(s.device()), stream(s.device()));
    let (_, exec) = capture(s, st, || d.launch(st, add(x, 1)).unwrap());
    let other = stream(d);
    for to in [st, other, StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
        d.graph_launch(exec, to).unwrap();
    }
    d.device_synchronize().unwrap();
    assert_eq!(word(d, st, x), 4);
    d.exec_destroy(exec).unwrap();
    d.mem_free(x).unwrap();
}

fn flags<S: Subject>(s: &S) {
    let (d, x, st) = (s.device(), plain(s.device()), stream(s.device()));
    let (graph, exec) = capture(s, st, || d.launch(st, add(x, 1)).unwrap());
    d.exec_destroy(exec).unwrap();
    for (auto_free_on_launch, use_node_priority) in [(true, false), (false, true), (true, true)] {
        let exec = d.instantiate(graph, InstantiateFlags { auto_free_on_launch, use_node_priority }).unwrap();
        d.graph_launch(exec, st).unwrap();
        d.stream_synchronize(st).unwrap();
        d.exec_destroy(exec).unwrap();
    }
    assert_eq!(word(d, st, x), 3);
    d.mem_free(x).unwrap();
}

fn nothing_before<S: Subject>(s: &S) {
    let (d, x, st) = (s.device(), plain(s.device()), stream(s.device()));
    let (_, exec) = capture(s, st, || {
        for _ in 0..100 {
            d.launch(st, add(x, 1)).unwrap();
        }
    });
    d.graph_upload(exec, st).unwrap();
    assert_eq!(word(d, st, x), 0);
    d.graph_launch(exec, st).unwrap();
    assert_eq!(word(d, st, x), 100);
    d.exec_destroy(exec).unwrap();
    d.mem_free(x).unwrap();
}
