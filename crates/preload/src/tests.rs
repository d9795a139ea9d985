//! The interposer's logic in front of the simulated device, whose race detector watches.

use std::sync::Arc;

use gpupool::device::{
    Address, CaptureMode, DriverResult, EventHandle, ExecHandle, GraphDevice, GraphHandle, InstantiateFlags, Kernel,
    StreamHandle, StreamKind, Workbench, code,
};
use gpupool::sim::{Scheduler, SimConfig, SimDevice};
use gpupool::{Config, Policy};

use crate::blocks::{Answer, Served};
use crate::front::Front;

impl Front for SimDevice {
    unsafe fn lend(&self, raw: u64) -> StreamHandle {
        StreamHandle(raw)
    }

    fn take_back(&self, _stream: StreamHandle) {}

    fn private_stream(&self) -> DriverResult<StreamHandle> {
        self.stream_create(StreamKind::NonBlocking)
    }

    fn record_context(&self, _event: EventHandle) -> Option<DriverResult<()>> {
        None
    }

    fn wait_for_all(&self) -> DriverResult<()> {
        self.device_synchronize()
    }
}

const MIB: u64 = 1 << 20;

struct Program {
    d: Arc<SimDevice>,
    served: Served<SimDevice>,
}

impl Program {
    fn new() -> Self {
        Self::with(SimConfig::default(), false)
    }

    fn with(config: SimConfig, one_pool: bool) -> Self {
        let d = Arc::new(SimDevice::new(config));
        let served = Served::new(Arc::clone(&d), Config::new(Policy::Segments), Arc::default(), one_pool).unwrap();
        Self { d, served }
    }

    fn stream(&self) -> u64 {
        let stream = self.d.stream_create(StreamKind::NonBlocking).unwrap().0;
        // SAFETY: streams of a simulated device are looked up.
        unsafe { self.served.stream_begins(stream) };
        stream
    }

    fn alloc_on(&self, bytes: u64, stream: u64) -> Address {
        // SAFETY: streams of a simulated device are looked up.
        unsafe { self.served.alloc_on(bytes, stream) }.unwrap()
    }

    fn free_on(&self, address: Address, stream: u64) -> Answer {
        // SAFETY: as above.
        unsafe { self.served.free_on(address, stream) }
    }

    fn fill(&self, stream: u64, dst: Address, value: u32) {
        self.d.launch(StreamHandle(stream), Kernel::Fill { dst, bytes: MIB, value }).unwrap();
    }

    fn copy(&self, stream: u64, dst: Address, src: Address) {
        self.d.launch(StreamHandle(stream), Kernel::Copy { dst, src, bytes: MIB }).unwrap();
    }

    fn begin(&self, stream: u64) {
        self.d.begin_capture(StreamHandle(stream), CaptureMode::Relaxed).unwrap();
        // SAFETY: as above.
        unsafe { self.served.capture_begins(stream) };
    }

    fn end(&self, stream: u64) -> GraphHandle {
        let graph = self.d.end_capture(StreamHandle(stream)).unwrap();
        self.served.capture_ends(stream, Some(graph.0));
        graph
    }

    /// A graph that fills what it allocates, copies that to `out`, and frees it; with the address it used.
    fn captured(&self, stream: u64, out: Address, value: u32) -> (GraphHandle, Address) {
        self.begin(stream);
        let scratch = self.alloc_on(MIB, stream);
        self.fill(stream, scratch, value);
        self.copy(stream, out, scratch);
        assert_eq!(self.free_on(scratch, stream), Answer::Code(0));
        (self.end(stream), scratch)
    }

    fn instantiate(&self, graph: GraphHandle) -> ExecHandle {
        let exec = self.d.instantiate(graph, InstantiateFlags::default()).unwrap();
        self.served.graphs.exec_holds(exec.0, graph.0);
        exec
    }

    fn launch(&self, exec: ExecHandle, stream: u64) {
        let launch = || self.d.graph_launch(exec, StreamHandle(stream)).map_or_else(|e| e.code, |()| 0);
        // SAFETY: as above.
        assert_eq!(unsafe { self.served.launch(exec.0, stream, launch) }, 0);
    }

    fn destroy(&self, graph: GraphHandle) {
        assert_eq!(
            self.served.graphs.graph_ends(graph.0, || self.d.graph_destroy(graph).map_or_else(|e| e.code, |()| 0)),
            0
        );
    }

    fn destroy_exec(&self, exec: ExecHandle) {
        assert_eq!(self.served.exec_ends(exec.0, || self.d.exec_destroy(exec).map_or_else(|e| e.code, |()| 0)), 0);
    }

    fn sync(&self, stream: u64) {
        self.d.stream_synchronize(StreamHandle(stream)).unwrap();
    }

    fn word(&self, address: Address) -> u32 {
        self.d.read_bytes(address, 1).unwrap()[0].into()
    }

    /// Whether anything of captures' pools is left with us after giving back what may go.
    fn reserved(&self) -> i64 {
        self.served.allocator.trim().unwrap();
        self.served.allocator.stats().reserved_bytes.all.current
    }
}

#[test]
fn frees_in_order_are_reused_at_once_and_foreign_pointers_are_forwarded() {
    let p = Program::new();
    let s = p.stream();
    let a = p.alloc_on(MIB, s);
    p.fill(s, a, 1);
    assert_eq!(p.free_on(a, s), Answer::Code(0));
    assert_eq!(p.alloc_on(MIB, s), a);
    assert_eq!(p.free_on(a, s), Answer::Code(0));
    for foreign in [a, a.offset(512), Address(64)] {
        assert_eq!((p.free_on(foreign, s), p.served.free(foreign)), (Answer::Forward, Answer::Forward));
    }
    assert_eq!(p.served.counts(), (2, 0));
    assert_eq!(p.served.alloc(0), Err(Answer::Code(code::INVALID_VALUE)));
    assert_eq!(p.served.alloc(1 << 60), Err(Answer::Code(code::OUT_OF_MEMORY)));
}

#[test]
fn a_block_of_the_synchronous_free_is_reused_only_after_all_work_submitted_before() {
    let p = Program::new();
    let (s, t) = (p.stream(), p.stream());
    // Both kinds of blocks, used on a stream that was never named together with them.
    let plain = p.served.alloc(MIB).unwrap();
    let ordered = p.alloc_on(MIB, s);
    let gate = p.d.gate_create().unwrap();
    p.d.launch(StreamHandle(t), Kernel::Wait { gate }).unwrap();
    p.fill(t, plain, 1);
    p.fill(t, ordered, 2);
    assert_eq!((p.served.free(plain), p.served.free(ordered)), (Answer::Code(0), Answer::Code(0)));
    let (again, again_ordered) = (p.served.alloc(MIB).unwrap(), p.alloc_on(MIB, s));
    assert_ne!(again, plain);
    assert_ne!(again_ordered, ordered);
    p.d.gate_open(gate).unwrap();
    p.sync(t);
    assert_eq!(p.served.alloc(MIB).unwrap(), plain);
    assert_eq!(p.alloc_on(MIB, s), ordered);
    p.fill(s, plain, 3);
    p.d.run_until_idle();
    assert_eq!(p.d.take_reports(), []);
}

#[test]
fn while_a_stream_captures_the_synchronous_free_waits_for_that_streams_earlier_work_too() {
    let p = Program::new();
    let (capturing, other) = (p.stream(), p.stream());
    let plain = p.served.alloc(MIB).unwrap();
    p.fill(other, plain, 0);
    p.sync(other);
    p.fill(capturing, plain, 1);
    p.begin(capturing);
    let inside = p.alloc_on(MIB, capturing);
    assert_eq!(p.served.free(plain), Answer::Code(0));
    assert_ne!(p.served.alloc(MIB).unwrap(), plain, "the capturing stream's earlier work is not known to be done");
    assert_eq!(p.served.free(inside), Answer::Code(0));
    let graph = p.end(capturing);
    p.d.run_until_idle();
    assert_eq!(p.served.alloc(MIB).unwrap(), plain);
    assert_eq!(p.served.leaving.len(), 0);
    p.destroy(graph);
    assert_eq!(p.d.take_reports(), []);
}

/// Whoever gets memory from the synchronous allocation uses it on any stream at once: under every scheduler, with many frees and streams,
/// no access is unordered.
#[test]
fn random_programs_of_synchronous_frees_have_no_race() {
    for seed in 0..30u64 {
        let scheduler = if seed % 3 == 0 { Scheduler::Adversarial } else { Scheduler::Random { seed } };
        let p = Program::with(SimConfig::default().with_scheduler(scheduler), false);
        let streams: Vec<u64> = (0..3).map(|_| p.stream()).collect();
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut random = |n: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % n
        };
        // Each block with the one stream that its owner uses it on.
        let mut live: Vec<(Address, u64)> = Vec::new();
        for _ in 0..120 {
            let stream = streams[random(3) as usize];
            match random(6) {
                0 => live.push((p.served.alloc(MIB).unwrap(), stream)),
                1 => live.push((p.alloc_on(MIB, stream), stream)),
                2 | 3 if !live.is_empty() => {
                    let (address, _) = live.swap_remove(random(live.len() as u64) as usize);
                    assert_eq!(p.served.free(address), Answer::Code(0));
                }
                4 => drop(p.d.step()),
                _ => {}
            }
            live.iter().for_each(|(address, stream)| p.fill(*stream, *address, seed as u32));
        }
        p.d.run_until_idle();
        assert_eq!(p.d.take_reports(), [], "seed {seed}");
        p.served.allocator.validate().unwrap();
    }
}

#[test]
fn handle_2_is_the_calling_threads_own_stream_in_a_free_too() {
    let p = Program::new();
    let s = p.stream();
    let own = StreamHandle::PER_THREAD.0;
    let mine = p.alloc_on(MIB, own);
    let theirs = std::thread::scope(|scope| scope.spawn(|| p.alloc_on(MIB, own)).join().unwrap());
    assert_ne!(mine, theirs);
    assert_eq!(p.free_on(mine, own), Answer::Code(0));
    assert_eq!(p.alloc_on(MIB, own), mine, "the same stream");
    // A block of a stream, freed on this thread's own: the stream gets it back only after this thread's work.
    let block = p.alloc_on(MIB, s);
    p.fill(own, block, 1);
    assert_eq!(p.free_on(block, own), Answer::Code(0));
    let next = p.alloc_on(MIB, s);
    assert_ne!(next, block);
    p.d.run_until_idle();
    assert_eq!(p.d.take_reports(), []);
}

#[test]
fn a_captures_memory_lives_as_long_as_anything_that_can_run_it() {
    let p = Program::new();
    let (s, t) = (p.stream(), p.stream());
    let out = p.alloc_on(MIB, s);
    let before = p.reserved();
    let (graph, scratch) = p.captured(s, out, 7);
    let nodes = p.d.graph_nodes(graph).unwrap();
    assert_eq!(nodes.len(), 2, "two kernels and no memory node: {nodes:?}");
    for stream in [s, t] {
        assert_ne!(p.alloc_on(MIB, stream), scratch, "nobody else gets it");
    }
    let held = p.reserved();
    // A clone and a parent, by their numbers.
    let (clone, parent) = (1_000_001, 1_000_002);
    p.served.graphs.graph_holds_what(clone, graph.0);
    p.served.graphs.graph_holds_what(parent, clone);
    let exec = p.instantiate(graph);
    p.served.graphs.exec_holds(1_000_003, parent);
    p.destroy(graph);
    assert_eq!(p.served.graphs.graph_ends(clone, || 0), 0);
    assert_eq!(p.served.graphs.graph_ends(parent, || 0), 0);
    for turn in 0..1000 {
        p.launch(exec, if turn % 2 == 0 { s } else { t });
    }
    p.sync(t);
    assert_eq!((p.word(out), p.reserved()), (7, held));
    // An executable of the parent still holds it, when the first is gone.
    p.destroy_exec(exec);
    p.sync(s);
    assert_eq!(p.reserved(), held);
    assert_eq!(p.served.exec_ends(1_000_003, || 0), 0);
    assert_eq!((p.reserved(), p.served.graphs.counts()), (held - 2 * MIB as i64, (0, 0)));
    assert!(p.reserved() >= before);
    assert_eq!(p.d.take_reports(), []);
}

#[test]
fn an_executable_that_was_updated_holds_the_other_graphs_memory() {
    let p = Program::new();
    let s = p.stream();
    let out = p.alloc_on(MIB, s);
    let (first, _) = p.captured(s, out, 1);
    let (second, scratch) = p.captured(s, out, 2);
    let exec = p.instantiate(first);
    p.served.graphs.exec_holds(exec.0, second.0);
    p.destroy(first);
    p.destroy(second);
    let held = p.reserved();
    assert_ne!(p.alloc_on(MIB, s), scratch);
    p.destroy_exec(exec);
    assert_eq!(p.reserved(), held - 4 * MIB as i64);
}

#[test]
fn the_last_launch_keeps_the_memory_after_everything_was_destroyed() {
    let p = Program::new();
    let s = p.stream();
    let out = p.alloc_on(MIB, s);
    let (graph, _) = p.captured(s, out, 5);
    let exec = p.instantiate(graph);
    let held = p.reserved();
    let gate = p.d.gate_create().unwrap();
    p.d.launch(StreamHandle(s), Kernel::Wait { gate }).unwrap();
    p.launch(exec, s);
    p.destroy(graph);
    p.destroy_exec(exec);
    assert_eq!((p.reserved(), p.served.leaving.len()), (held, 1));
    p.d.gate_open(gate).unwrap();
    p.sync(s);
    assert_eq!((p.word(out), p.reserved(), p.served.leaving.len()), (5, held - 2 * MIB as i64, 0));
    assert_eq!(p.d.take_reports(), []);
}

#[test]
fn a_destroy_that_the_driver_refuses_changes_nothing() {
    let p = Program::new();
    let s = p.stream();
    let out = p.alloc_on(MIB, s);
    let (graph, _) = p.captured(s, out, 5);
    let exec = p.instantiate(graph);
    assert_eq!(p.served.graphs.graph_ends(graph.0, || code::INVALID_VALUE), code::INVALID_VALUE);
    assert_eq!(p.served.exec_ends(exec.0, || code::CAPTURE_UNSUPPORTED), code::CAPTURE_UNSUPPORTED);
    assert_eq!(p.served.graphs.counts(), (1, 1));
}

#[test]
fn graphs_in_one_pool_for_all_share_memory_and_are_kept_from_overlapping() {
    let p = Program::with(SimConfig::default().with_scheduler(Scheduler::Adversarial), true);
    let (s, t) = (p.stream(), p.stream());
    let (out, other_out) = (p.alloc_on(MIB, s), p.alloc_on(MIB, t));
    let (first, one) = p.captured(s, out, 1);
    let (second, two) = p.captured(t, other_out, 2);
    assert_eq!(one, two, "the pool is one");
    let (a, b) = (p.instantiate(first), p.instantiate(second));
    for _ in 0..50 {
        p.launch(a, s);
        p.launch(b, t);
    }
    p.sync(s);
    p.sync(t);
    assert_eq!((p.word(out), p.word(other_out)), (1, 2));
    assert_eq!(p.d.take_reports(), []);
    // Two captures at once cannot share it: the second gets its own.
    p.begin(s);
    p.begin(t);
    assert_ne!(p.alloc_on(MIB, s), p.alloc_on(MIB, t));
    p.end(s);
    p.end(t);
}

#[test]
fn a_capture_that_fails_leaves_nothing_behind() {
    let p = Program::new();
    let s = p.stream();
    p.begin(s);
    let inside = p.alloc_on(MIB, s);
    p.d.end_capture(StreamHandle(s)).unwrap();
    p.served.capture_ends(s, None);
    assert_eq!(p.free_on(inside, s), Answer::Code(0));
    p.d.run_until_idle();
    assert_eq!((p.reserved(), p.served.graphs.counts()), (0, (0, 0)));
    p.alloc_on(MIB, s);
}

#[test]
fn a_capture_that_was_not_seen_is_left_to_the_driver_while_another_is_open() {
    let p = Program::new();
    let (s, unseen) = (p.stream(), p.stream());
    p.begin(s);
    p.d.begin_capture(StreamHandle(unseen), CaptureMode::Relaxed).unwrap();
    // SAFETY: streams of a simulated device are looked up.
    assert_eq!(unsafe { p.served.alloc_on(MIB, unseen) }, Err(Answer::Forward));
    p.d.end_capture(StreamHandle(unseen)).unwrap();
    p.end(s);
}

#[test]
fn a_stream_that_ends_gives_its_memory_to_others_and_its_number_to_another() {
    let p = Program::new();
    let s = p.stream();
    let block = p.alloc_on(MIB, s);
    assert_eq!(p.free_on(block, s), Answer::Code(0));
    // SAFETY: the stream is destroyed right after.
    unsafe { p.served.stream_ends(s) };
    p.d.stream_destroy(StreamHandle(s)).unwrap();
    let again = p.stream();
    assert_eq!(again, s, "the driver uses numbers again");
    p.alloc_on(MIB, again);
    p.d.run_until_idle();
    assert_eq!(p.d.take_reports(), []);
    assert!(p.served.available().is_some());
}

#[test]
fn the_body_of_a_conditional_node_is_held_by_the_graph_that_has_the_node() {
    let p = Program::new();
    let (s, whole, exec) = (p.stream(), 2_000_001, 2_000_002);
    let out = p.alloc_on(MIB, s);
    let before = p.reserved();
    p.begin(s);
    let scratch = p.alloc_on(MIB, s);
    p.fill(s, scratch, 1);
    p.copy(s, out, scratch);
    assert_eq!(p.free_on(scratch, s), Answer::Code(0));
    // The driver made the body with the node, and the capture went into it.
    let body = p.d.end_capture(StreamHandle(s)).unwrap();
    p.served.graphs.graph_is_part_of(body.0, whole);
    p.served.capture_ends(s, Some(body.0));
    p.served.graphs.exec_holds(exec, whole);
    assert!(p.served.graphs.knows_graph(whole) && p.served.graphs.knows_exec(exec));
    // A destroy that is refused changes nothing; one that is not takes the body along.
    assert_eq!(p.served.graphs.graph_ends(whole, || code::INVALID_VALUE), code::INVALID_VALUE);
    assert_eq!(p.served.graphs.counts(), (2, 1));
    assert_eq!(p.served.graphs.graph_ends(whole, || 0), 0);
    assert_eq!(p.served.graphs.counts(), (0, 1));
    p.sync(s);
    assert!(p.reserved() > before);
    assert_eq!(p.served.exec_ends(exec, || 0), 0);
    assert_eq!(p.reserved(), before);
}

#[test]
fn when_a_context_ends_everything_goes_back_whatever_is_live_or_running() {
    let p = Program::new();
    let s = p.stream();
    let (out, plain) = (p.alloc_on(MIB, s), p.served.alloc(3 * MIB).unwrap());
    let (graph, _) = p.captured(s, out, 5);
    let exec = p.instantiate(graph);
    p.launch(exec, s);
    p.fill(s, plain, 1);
    assert_eq!(p.served.free(plain), Answer::Code(0));
    p.served.ends();
    assert_eq!((p.served.graphs.counts(), p.served.leaving.len()), ((0, 0), 0));
    assert_eq!(p.served.allocator.stats().reserved_bytes.all.current, 0);
    assert!(!p.served.owns(out));
    assert_eq!(p.d.take_reports(), []);
}

#[test]
fn when_a_context_ends_a_capture_under_way_ends_with_it() {
    let p = Program::new();
    let (s, other) = (p.stream(), p.stream());
    p.begin(s);
    p.alloc_on(MIB, s);
    // Nothing can be recorded on the stream that captures, so this waits for its end.
    let plain = p.served.alloc(3 * MIB).unwrap();
    p.fill(other, plain, 1);
    assert_eq!(p.served.free(plain), Answer::Code(0));
    assert_eq!(p.served.leaving.len(), 1);
    p.served.ends();
    assert_eq!((p.served.graphs.counts(), p.served.leaving.len()), ((0, 0), 0));
    assert!(p.served.allocator.capture_registry().is_quiet(), "no request goes to a capture that is gone");
    assert_eq!(p.served.allocator.stats().allocated_bytes.all.current, 0);
}

#[test]
fn a_free_asks_about_one_waiting_block_however_many_wait() {
    let p = Program::new();
    let s = p.stream();
    let blocks: Vec<_> = (0..200).map(|_| p.served.alloc(MIB).unwrap()).collect();
    blocks.iter().for_each(|block| p.fill(s, *block, 1));
    let before = p.d.calls(gpupool::device::Call::EventQuery);
    blocks.iter().for_each(|block| assert_eq!(p.served.free(*block), Answer::Code(0)));
    let asked = p.d.calls(gpupool::device::Call::EventQuery) - before;
    assert!(asked <= 2 * 200, "{asked}");
    assert_eq!(p.served.leaving.len(), 200);
}
