//! Captures and graphs: what the contract suite (`gpupool-tests`) does not ask of every device.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use gpupool_device::{
    Address, CaptureMode, CaptureStatus, Device, Edge, ExecHandle, GraphDevice, InstantiateFlags, Kernel, NodeKind,
    StreamHandle, StreamKind, Workbench, code,
};
use gpupool_sim_device::{HoldupReason, ReportKind, Scheduler, SimConfig, SimDevice, SimWorld};

const PAGE: u64 = 2 << 20;

fn device() -> SimDevice {
    SimDevice::new(SimConfig::default())
}

fn stream(d: &SimDevice) -> StreamHandle {
    d.stream_create(StreamKind::NonBlocking).unwrap()
}

fn add(dst: Address, value: u32) -> Kernel {
    Kernel::Add { dst, bytes: 4, value }
}

fn word(d: &SimDevice, at: Address) -> u32 {
    u32::from_le_bytes(d.read_bytes(at, 4).unwrap().try_into().unwrap())
}

/// Captures what `record` submits and makes it executable.
fn capture(d: &SimDevice, s: StreamHandle, record: impl FnOnce()) -> ExecHandle {
    d.begin_capture(s, CaptureMode::Global).unwrap();
    record();
    let g = d.end_capture(s).unwrap();
    let e = d.instantiate(g, InstantiateFlags::default()).unwrap();
    d.graph_destroy(g).unwrap();
    e
}

#[test]
fn a_capture_spreads_to_streams_that_wait_and_comes_back() {
    let d = device();
    let (a, b, x) = (stream(&d), stream(&d), d.mem_alloc(64).unwrap());
    let (fork, join) = (d.event_create().unwrap(), d.event_create().unwrap());
    d.begin_capture(a, CaptureMode::Global).unwrap();
    let CaptureStatus::Active(id) = d.capture_status(a).unwrap() else { panic!() };
    assert_eq!(d.capture_frontier(a).unwrap().unwrap().nodes, []);
    d.launch(a, add(x, 1)).unwrap();
    d.event_record(fork, a).unwrap();
    d.stream_wait_event(b, fork).unwrap();
    assert_eq!(d.capture_status(b).unwrap(), CaptureStatus::Active(id));
    d.launch(b, add(x.offset(8), 2)).unwrap();
    d.launch(a, add(x.offset(16), 3)).unwrap();
    d.event_record(join, b).unwrap();
    d.stream_wait_event(a, join).unwrap();
    let frontier = d.capture_frontier(a).unwrap().unwrap();
    assert_eq!((frontier.id, frontier.nodes.len()), (id, 2));
    assert_eq!(d.graph_destroy(frontier.graph).unwrap_err().code, code::INVALID_VALUE, "the driver's while it lasts");
    d.record_empty_node(a).unwrap();
    let graph = d.end_capture(a).unwrap();
    assert_eq!(graph, frontier.graph);
    assert_eq!([a, b].map(|s| d.capture_status(s).unwrap()), [CaptureStatus::None; 2]);
    let nodes: Vec<_> = d.graph_nodes(graph).unwrap();
    assert_eq!(
        nodes.iter().map(|n| n.kind.clone()).collect::<Vec<_>>(),
        [NodeKind::Kernel, NodeKind::Kernel, NodeKind::Kernel, NodeKind::Empty]
    );
    let ids: Vec<_> = nodes.iter().map(|n| n.id).collect();
    let edge = |from: usize, to: usize| Edge { from: ids[from], to: ids[to] };
    let mut edges = d.graph_edges(graph).unwrap();
    edges.sort();
    assert_eq!(edges, [edge(0, 1), edge(0, 2), edge(1, 3), edge(2, 3)]);
    let exec = d.instantiate(graph, InstantiateFlags::default()).unwrap();
    assert_eq!(word(&d, x), 0, "nothing ran while it was captured");
    for _ in 0..3 {
        d.graph_launch(exec, b).unwrap();
    }
    d.stream_synchronize(b).unwrap();
    assert_eq!([0, 8, 16].map(|i| word(&d, x.offset(i))), [3, 6, 9]);
    assert_eq!(d.reports(), []);
}

#[test]
fn capture_ids_are_unique_in_the_process() {
    let ids: std::collections::BTreeSet<_> = (0..3)
        .map(|_| {
            let d = device();
            let s = stream(&d);
            d.begin_capture(s, CaptureMode::Global).unwrap();
            d.capture_status(s).unwrap().id()
        })
        .collect();
    assert_eq!((ids.len(), ids.contains(&None)), (3, false));
}

#[test]
fn another_threads_call_can_be_made_to_break_a_capture() {
    let d = device();
    let (s, x) = (stream(&d), d.mem_alloc(64).unwrap());
    d.invalidate_capture_after(3);
    d.begin_capture(s, CaptureMode::Relaxed).unwrap();
    d.launch(s, add(x, 1)).unwrap();
    assert!(matches!(d.capture_status(s).unwrap(), CaptureStatus::Active(_)));
    assert_eq!(d.launch(s, add(x, 1)).unwrap_err().code, code::CAPTURE_INVALIDATED);
    assert_eq!(d.end_capture(s).unwrap_err().code, code::CAPTURE_INVALIDATED);
}

#[test]
fn launches_of_one_executable_run_one_after_the_other() {
    for seed in 0..20 {
        let d = SimDevice::new(SimConfig::default().with_scheduler(Scheduler::Random { seed }));
        let (a, b, x) = (stream(&d), stream(&d), d.mem_alloc(64).unwrap());
        let exec = capture(&d, a, || {
            d.launch(a, Kernel::Copy { dst: x.offset(8), src: x, bytes: 4 }).unwrap();
            d.launch(a, add(x.offset(8), 1)).unwrap();
            d.launch(a, Kernel::Copy { dst: x, src: x.offset(8), bytes: 4 }).unwrap();
        });
        for s in [a, b, b, a] {
            d.graph_launch(exec, s).unwrap();
        }
        d.device_synchronize().unwrap();
        assert_eq!((word(&d, x), d.reports().len()), (4, 0), "seed {seed}");
    }
}

#[test]
fn a_launch_behind_a_gate_holds_the_next_one_elsewhere() {
    let d = device();
    let (a, b, g) = (stream(&d), stream(&d), d.gate_create().unwrap());
    let exec = capture(&d, a, || d.launch(a, Kernel::Wait { gate: g }).unwrap());
    d.graph_launch(exec, a).unwrap();
    d.graph_launch(exec, b).unwrap();
    assert_eq!(d.stream_synchronize(b).unwrap_err().code, code::WAIT_NEVER_ENDS);
    let reasons: Vec<_> = d.last_wait_report().unwrap().held_up.iter().map(|h| h.reason).collect();
    assert_eq!(reasons, [HoldupReason::EarlierLaunch(a), HoldupReason::Gate(g)]);
    d.gate_open(g).unwrap();
    d.stream_synchronize(b).unwrap();
}

#[test]
fn an_executable_may_go_while_its_run_is_pending_and_an_empty_graph_runs() {
    let d = device();
    let (s, x) = (stream(&d), d.mem_alloc(64).unwrap());
    let exec = capture(&d, s, || d.launch(s, add(x, 1)).unwrap());
    let empty = capture(&d, s, || {});
    d.graph_launch(exec, s).unwrap();
    d.graph_launch(empty, s).unwrap();
    d.graph_upload(exec, s).unwrap();
    d.exec_destroy(exec).unwrap();
    assert_eq!(d.exec_destroy(exec).unwrap_err().code, code::INVALID_VALUE);
    assert_eq!(d.graph_launch(exec, s).unwrap_err().code, code::INVALID_VALUE);
    d.stream_synchronize(s).unwrap();
    assert_eq!(word(&d, x), 1);
}

#[test]
fn host_functions_become_nodes_if_they_can_run_again() {
    let d = device();
    let s = stream(&d);
    let count = Arc::new(AtomicU32::new(0));
    let exec = capture(&d, s, || {
        let once = d.launch_host_function(s, Box::new(|| {}));
        assert_eq!(once.unwrap_err().code, code::NOT_SUPPORTED);
        let there = Arc::clone(&count);
        d.launch_repeatable_host_function(
            s,
            Arc::new(move || {
                there.fetch_add(1, SeqCst);
            }),
        )
        .unwrap();
    });
    (0..3).for_each(|_| d.graph_launch(exec, s).unwrap());
    d.stream_synchronize(s).unwrap();
    assert_eq!(count.load(SeqCst), 3);
}

#[test]
fn a_graphs_addresses_may_change_their_memory_between_launches() {
    let d = device();
    let (s, range) = (stream(&d), d.address_reserve(PAGE).unwrap());
    let fresh = |d: &SimDevice| {
        let h = d.handle_create(PAGE).unwrap();
        d.map(range, PAGE, h).unwrap();
        d.set_access(range, PAGE).unwrap();
    };
    fresh(&d);
    let exec = capture(&d, s, || d.launch(s, add(range, 5)).unwrap());
    d.graph_launch(exec, s).unwrap();
    d.stream_synchronize(s).unwrap();
    d.unmap(range, PAGE).unwrap();
    fresh(&d);
    d.graph_launch(exec, s).unwrap();
    d.stream_synchronize(s).unwrap();
    assert_eq!((word(&d, range), d.reports().len()), (5, 0));
    d.unmap(range, PAGE).unwrap();
    d.graph_launch(exec, s).unwrap();
    assert_eq!(d.stream_synchronize(s).unwrap_err().code, code::ILLEGAL_ADDRESS);
    assert_eq!(d.reports()[0].kind, ReportKind::IllegalAddress);
}

#[test]
fn a_capture_spreads_over_devices_with_one_id() {
    let w = SimWorld::new(2, SimConfig::default());
    let (d0, d1) = (w.device(0).unwrap(), w.device(1).unwrap());
    let (s0, s1) = (stream(&d0), stream(&d1));
    let (x0, x1) = (d0.mem_alloc(64).unwrap(), d1.mem_alloc(64).unwrap());
    let (fork, join) = (d0.event_create().unwrap(), d1.event_create().unwrap());
    d0.begin_capture(s0, CaptureMode::Global).unwrap();
    d0.event_record(fork, s0).unwrap();
    d1.stream_wait_event(s1, fork).unwrap();
    assert_eq!(d0.capture_status(s0).unwrap(), d1.capture_status(s1).unwrap());
    d1.launch(s1, add(x1, 2)).unwrap();
    d1.event_record(join, s1).unwrap();
    d0.stream_wait_event(s0, join).unwrap();
    d0.launch(s0, add(x0, 1)).unwrap();
    let g = d0.end_capture(s0).unwrap();
    let exec = d0.instantiate(g, InstantiateFlags::default()).unwrap();
    d0.graph_launch(exec, s0).unwrap();
    let y = d1.mem_alloc(64).unwrap();
    d1.mem_free(y).unwrap();
    assert_eq!((word(&d0, x0), word(&d1, x1)), (1, 2), "a free waits for launches with nodes on its device");
}
