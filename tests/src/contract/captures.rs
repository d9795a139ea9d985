//! Captures: what a stream records, which streams belong, and what breaks it. The table of what a capture permits is
//! [`permissions`](super::permissions).

use gpupool_device::{
    CaptureMode, CaptureStatus, Device, GraphDevice, InstantiateFlags, NodeId, NodeKind, StreamHandle, Workbench, code,
};

use super::{Check, Subject, add, check, code_of, plain, stream, word};

pub(super) fn checks<S: Subject>() -> Vec<Check<S>> {
    vec![
        check("a capture spreads to streams that wait, and comes back", spreading),
        check("a capture needs its streams joined", unjoined),
        check("ending on a stream that joined breaks the capture", unmatched),
        check("an invalidated capture refuses work until it is ended", invalidated),
        check("captured events stay captured until they are recorded again", captured_events),
        check("captures have ids of their own and do not merge", apart),
        check("a capture that is not relaxed is ended by its own thread", threads),
        check("the default streams: the legacy one cannot be captured, a thread's own can", defaults),
        check("ending where nothing was begun is an illegal state", not_begun),
        check("a graph under capture can be looked at and belongs to the driver", under_capture),
        check("an event that was never recorded holds up no capture", never_recorded),
        check("what else was asked of a driver", asked),
    ]
}

fn status<S: Subject>(s: &S, stream: StreamHandle) -> CaptureStatus {
    s.device().capture_status(stream).unwrap()
}

fn spreading<S: Subject>(s: &S) {
    let d = s.device();
    let (a, b, x) = (stream(d), stream(d), plain(d));
    let (fork, join) = (d.event_create().unwrap(), d.event_create().unwrap());
    assert_eq!((status(s, a), d.capture_frontier(a).unwrap()), (CaptureStatus::None, None));
    d.begin_capture(a, CaptureMode::Global).unwrap();
    let CaptureStatus::Active(id) = status(s, a) else { panic!("{:?}", status(s, a)) };
    assert_eq!(d.capture_frontier(a).unwrap().unwrap().nodes, []);
    d.launch(a, add(x, 1)).unwrap();
    d.event_record(fork, a).unwrap();
    d.stream_wait_event(b, fork).unwrap();
    assert_eq!(status(s, b), CaptureStatus::Active(id));
    d.launch(b, add(x.offset(8), 2)).unwrap();
    d.launch(a, add(x.offset(16), 3)).unwrap();
    d.event_record(join, b).unwrap();
    d.stream_wait_event(a, join).unwrap();
    let frontier = d.capture_frontier(a).unwrap().unwrap();
    assert_eq!((frontier.id, frontier.nodes.len()), (id, 2));
    s.empty_node(a).unwrap();
    let last = d.capture_frontier(a).unwrap().unwrap();
    assert_eq!(last.nodes.len(), 1);
    let mut joined = d.node_dependencies(last.graph, last.nodes[0]).unwrap();
    let mut expected = frontier.nodes.clone();
    joined.sort_unstable();
    expected.sort_unstable();
    assert_eq!(joined, expected);
    let first = d.node_dependencies(last.graph, joined[0]).unwrap();
    assert_eq!((first.len(), d.node_dependencies(last.graph, first[0]).unwrap()), (1, vec![]));
    let graph = d.end_capture(a).unwrap();
    assert_eq!(graph, frontier.graph);
    assert_eq!([a, b].map(|st| status(s, st)), [CaptureStatus::None; 2]);
    let kinds: Vec<_> = d.graph_nodes(graph).unwrap().into_iter().map(|n| n.kind).collect();
    let count = |kind| kinds.iter().filter(|k| **k == kind).count();
    assert_eq!((kinds.len(), count(NodeKind::Kernel), count(NodeKind::Empty)), (4, 3, 1));
    assert_eq!(d.graph_edges(graph).unwrap().len(), 4);
    let exec = d.instantiate(graph, InstantiateFlags::default()).unwrap();
    assert_eq!(word(d, a, x), 0, "nothing ran while it was captured");
    for _ in 0..3 {
        d.graph_launch(exec, b).unwrap();
    }
    assert_eq!([0, 8, 16].map(|i| word(d, b, x.offset(i))), [3, 6, 9]);
    d.exec_destroy(exec).unwrap();
    d.graph_destroy(graph).unwrap();
    d.mem_free(x).unwrap();
}

fn unjoined<S: Subject>(s: &S) {
    let d = s.device();
    let (a, b, x, fork) = (stream(d), stream(d), plain(d), d.event_create().unwrap());
    d.begin_capture(a, CaptureMode::Global).unwrap();
    d.launch(a, add(x, 1)).unwrap();
    d.event_record(fork, a).unwrap();
    d.stream_wait_event(b, fork).unwrap();
    d.launch(b, add(x, 1)).unwrap();
    assert_eq!(code_of(d.end_capture(a)), code::CAPTURE_UNJOINED);
    assert_eq!([a, b].map(|st| status(s, st)), [CaptureStatus::None; 2], "over all the same");
    assert_eq!(code_of(d.end_capture(a)), code::ILLEGAL_STATE);
    d.launch(b, add(x, 1)).unwrap();
    assert_eq!(word(d, b, x), 1);
    d.mem_free(x).unwrap();
}

fn unmatched<S: Subject>(s: &S) {
    let d = s.device();
    let (a, b, x, fork) = (stream(d), stream(d), plain(d), d.event_create().unwrap());
    d.begin_capture(a, CaptureMode::Global).unwrap();
    d.launch(a, add(x, 1)).unwrap();
    d.event_record(fork, a).unwrap();
    d.stream_wait_event(b, fork).unwrap();
    assert_eq!(code_of(d.end_capture(b)), code::CAPTURE_UNMATCHED);
    assert_eq!([a, b].map(|st| status(s, st)), [CaptureStatus::Invalidated; 2], "that breaks it");
    assert_eq!(code_of(d.end_capture(a)), code::CAPTURE_INVALIDATED);
    assert_eq!([a, b].map(|st| status(s, st)), [CaptureStatus::None; 2]);
    d.mem_free(x).unwrap();
}

fn invalidated<S: Subject>(s: &S) {
    let d = s.device();
    let (st, other, x, e) = (stream(d), stream(d), plain(d), d.event_create().unwrap());
    d.begin_capture(st, CaptureMode::Global).unwrap();
    d.launch(st, add(x, 1)).unwrap();
    d.event_record(e, st).unwrap();
    assert_eq!(code_of(d.mem_alloc(64)), code::CAPTURE_UNSUPPORTED);
    assert!(matches!(status(s, st), CaptureStatus::Invalidated));
    assert_eq!(d.capture_frontier(st).unwrap(), None);
    assert_eq!(code_of(d.launch(st, add(x, 1))), code::CAPTURE_INVALIDATED);
    assert_eq!(code_of(d.stream_wait_event(other, e)), code::INVALID_VALUE);
    assert_eq!(code_of(d.end_capture(st)), code::CAPTURE_INVALIDATED);
    d.mem_free(d.mem_alloc(64).unwrap()).unwrap();
    d.begin_capture(st, CaptureMode::Global).unwrap();
    d.launch(st, add(x, 4)).unwrap();
    let graph = d.end_capture(st).unwrap();
    let exec = d.instantiate(graph, InstantiateFlags::default()).unwrap();
    d.graph_launch(exec, st).unwrap();
    assert_eq!(word(d, st, x), 4, "the stream is usable again");
    d.exec_destroy(exec).unwrap();
    d.mem_free(x).unwrap();
}

fn captured_events<S: Subject>(s: &S) {
    let d = s.device();
    let (st, t, e) = (stream(d), stream(d), d.event_create().unwrap());
    d.begin_capture(st, CaptureMode::Global).unwrap();
    d.event_record(e, st).unwrap();
    let graph = d.end_capture(st).unwrap();
    assert_eq!(code_of(d.event_query(e)), code::INVALID_VALUE);
    assert_eq!(code_of(d.event_synchronize(e)), code::INVALID_VALUE);
    assert_eq!(code_of(d.stream_wait_event(t, e)), code::INVALID_VALUE);
    d.event_record(e, t).unwrap();
    d.event_synchronize(e).unwrap();
    assert!(d.event_query(e).unwrap());
    d.graph_destroy(graph).unwrap();
}

fn apart<S: Subject>(s: &S) {
    let d = s.device();
    let (a, b, e) = (stream(d), stream(d), d.event_create().unwrap());
    d.begin_capture(a, CaptureMode::ThreadLocal).unwrap();
    d.begin_capture(b, CaptureMode::Relaxed).unwrap();
    let ids = [a, b].map(|st| status(s, st).id().unwrap());
    assert_ne!(ids[0], ids[1]);
    d.event_record(e, a).unwrap();
    assert_eq!(code_of(d.stream_wait_event(b, e)), code::CAPTURE_MERGE);
    assert_eq!([a, b].map(|st| status(s, st)), [CaptureStatus::Invalidated; 2], "both are broken");
    for st in [a, b] {
        assert_eq!(code_of(d.end_capture(st)), code::CAPTURE_INVALIDATED);
    }
    d.begin_capture(a, CaptureMode::Global).unwrap();
    assert!(!ids.contains(&status(s, a).id().unwrap()), "an id was used again");
    d.end_capture(a).unwrap();
}

fn threads<S: Subject>(s: &S) {
    let d = s.device();
    let (a, b) = (stream(d), stream(d));
    d.begin_capture(a, CaptureMode::ThreadLocal).unwrap();
    d.begin_capture(b, CaptureMode::Relaxed).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(code_of(d.end_capture(a)), code::CAPTURE_WRONG_THREAD);
            d.end_capture(b).unwrap();
        });
    });
    assert_eq!(status(s, a), CaptureStatus::None, "over all the same");
    assert_eq!(code_of(d.end_capture(a)), code::ILLEGAL_STATE);
}

fn defaults<S: Subject>(s: &S) {
    let d = s.device();
    let x = plain(d);
    assert_eq!(code_of(d.begin_capture(StreamHandle::LEGACY, CaptureMode::Relaxed)), code::CAPTURE_UNSUPPORTED);
    d.begin_capture(StreamHandle::PER_THREAD, CaptureMode::Relaxed).unwrap();
    assert!(status(s, StreamHandle::PER_THREAD).is_capturing());
    d.launch(StreamHandle::PER_THREAD, add(x, 1)).unwrap();
    let graph = d.end_capture(StreamHandle::PER_THREAD).unwrap();
    assert_eq!(d.graph_nodes(graph).unwrap().len(), 1);
    d.graph_destroy(graph).unwrap();
    d.mem_free(x).unwrap();
}

fn not_begun<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    assert_eq!(code_of(d.end_capture(st)), code::ILLEGAL_STATE);
    assert_eq!(code_of(s.empty_node(st)), code::ILLEGAL_STATE);
}

fn under_capture<S: Subject>(s: &S) {
    let (d, st, x) = (s.device(), stream(s.device()), plain(s.device()));
    d.begin_capture(st, CaptureMode::Global).unwrap();
    d.launch(st, add(x, 1)).unwrap();
    d.launch(st, add(x, 1)).unwrap();
    let frontier = d.capture_frontier(st).unwrap().unwrap();
    assert_eq!(d.graph_nodes(frontier.graph).unwrap().len(), 2);
    assert_eq!(d.graph_edges(frontier.graph).unwrap().len(), 1);
    assert_eq!(code_of(d.graph_destroy(frontier.graph)), code::INVALID_VALUE);
    assert_eq!(code_of(d.node_dependencies(frontier.graph, NodeId(u64::MAX))), code::INVALID_VALUE);
    let graph = d.end_capture(st).unwrap();
    assert_eq!(graph, frontier.graph);
    d.graph_destroy(graph).unwrap();
    assert_eq!(code_of(d.graph_nodes(graph)), code::INVALID_VALUE);
    assert_eq!(code_of(d.node_dependencies(graph, frontier.nodes[0])), code::INVALID_VALUE);
    d.mem_free(x).unwrap();
}

fn never_recorded<S: Subject>(s: &S) {
    let (d, st, e) = (s.device(), stream(s.device()), s.device().event_create().unwrap());
    d.begin_capture(st, CaptureMode::Global).unwrap();
    d.stream_wait_event(st, e).unwrap();
    assert!(matches!(status(s, st), CaptureStatus::Active(_)));
    assert_eq!(d.capture_frontier(st).unwrap().unwrap().nodes, []);
    d.graph_destroy(d.end_capture(st).unwrap()).unwrap();
}

/// Small programs, and what each comes to: asked of an H200 first, then written down.
fn asked<S: Subject>(s: &S) {
    let mut wrong = Vec::new();
    for (name, program, expected) in programs::<S>() {
        let found = program(s);
        if found != expected {
            wrong.push(format!("{name}: expected {expected:?}, found {found:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// A name, a program and the codes it gives.
type Program<S> = (&'static str, fn(&S) -> Vec<u32>, &'static [u32]);

/// 0 none, 1 active, 2 invalidated.
fn number<S: Subject>(s: &S, stream: StreamHandle) -> u32 {
    match s.device().capture_status(stream) {
        Ok(CaptureStatus::None) => 0,
        Ok(CaptureStatus::Active(_)) => 1,
        Ok(CaptureStatus::Invalidated) => 2,
        Err(e) => e.code,
    }
}

fn programs<S: Subject>() -> Vec<Program<S>> {
    vec![
        (
            "a captured event of an invalidated capture: query, synchronize, record on its stream, end",
            |s| {
                let (d, st, e) = (s.device(), stream(s.device()), s.device().event_create().unwrap());
                d.begin_capture(st, CaptureMode::Global).unwrap();
                d.event_record(e, st).unwrap();
                let _ = d.mem_alloc(64);
                let codes =
                    vec![code_of(d.event_query(e)), code_of(d.event_synchronize(e)), code_of(d.event_record(e, st))];
                [codes, vec![code_of(d.end_capture(st))]].concat()
            },
            &[1, 1, 901, 901],
        ),
        (
            "an invalidated global capture: allocation, waiting for another stream, end",
            |s| {
                let (d, st, other) = (s.device(), stream(s.device()), stream(s.device()));
                d.begin_capture(st, CaptureMode::Global).unwrap();
                let _ = d.mem_alloc(64);
                vec![code_of(d.mem_alloc(64)), code_of(d.stream_synchronize(other)), code_of(d.end_capture(st))]
            },
            &[900, 900, 901],
        ),
        (
            "a stream with unjoined work is destroyed: destroy, status of the origin, end",
            |s| {
                let (d, x) = (s.device(), plain(s.device()));
                let (a, b, e) = (stream(d), stream(d), d.event_create().unwrap());
                d.begin_capture(a, CaptureMode::Relaxed).unwrap();
                d.launch(a, add(x, 1)).unwrap();
                d.event_record(e, a).unwrap();
                d.stream_wait_event(b, e).unwrap();
                d.launch(b, add(x, 1)).unwrap();
                vec![code_of(d.stream_destroy(b)), number(s, a), code_of(d.end_capture(a))]
            },
            &[0, 1, 904],
        ),
        (
            "the origin is destroyed: destroy, status of a stream that joined, launch there, end there",
            |s| {
                let (d, x) = (s.device(), plain(s.device()));
                let (a, b, e) = (stream(d), stream(d), d.event_create().unwrap());
                d.begin_capture(a, CaptureMode::Relaxed).unwrap();
                d.launch(a, add(x, 1)).unwrap();
                d.event_record(e, a).unwrap();
                d.stream_wait_event(b, e).unwrap();
                let destroyed = code_of(d.stream_destroy(a));
                vec![destroyed, number(s, b), code_of(d.launch(b, add(x, 1))), code_of(d.end_capture(b))]
            },
            &[0, 0, 0, 401],
        ),
        (
            "a capturing stream waits for an event of a capture that is over: wait, status, end",
            |s| {
                let (d, a, b, e) =
                    (s.device(), stream(s.device()), stream(s.device()), s.device().event_create().unwrap());
                d.begin_capture(a, CaptureMode::Relaxed).unwrap();
                d.event_record(e, a).unwrap();
                d.end_capture(a).unwrap();
                d.begin_capture(b, CaptureMode::Relaxed).unwrap();
                vec![code_of(d.stream_wait_event(b, e)), number(s, b), code_of(d.end_capture(b))]
            },
            &[1, 2, 901],
        ),
        (
            "begin twice on one stream, end twice",
            |s| {
                let (d, a) = (s.device(), stream(s.device()));
                let begun = [
                    code_of(d.begin_capture(a, CaptureMode::Relaxed)),
                    code_of(d.begin_capture(a, CaptureMode::Global)),
                ];
                vec![begun[0], begun[1], code_of(d.end_capture(a)), code_of(d.end_capture(a))]
            },
            &[0, 401, 0, 401],
        ),
        (
            "a stream that joined begins a capture of its own, and the capture ends",
            |s| {
                let (d, a, b, e) =
                    (s.device(), stream(s.device()), stream(s.device()), s.device().event_create().unwrap());
                d.begin_capture(a, CaptureMode::Relaxed).unwrap();
                d.event_record(e, a).unwrap();
                d.stream_wait_event(b, e).unwrap();
                vec![code_of(d.begin_capture(b, CaptureMode::Relaxed)), number(s, a), code_of(d.end_capture(a))]
            },
            &[401, 1, 0],
        ),
        (
            "reading memory on a capturing stream: read, status, end",
            |s| {
                let (d, a, x) = (s.device(), stream(s.device()), plain(s.device()));
                d.begin_capture(a, CaptureMode::Relaxed).unwrap();
                let mut bytes = [0; 4];
                vec![code_of(d.read(a, x, &mut bytes)), number(s, a), code_of(d.end_capture(a))]
            },
            &[900, 2, 901],
        ),
    ]
}
