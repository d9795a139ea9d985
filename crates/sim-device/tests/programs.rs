//! Random programs. Well-ordered ones are never reported and compute under every scheduler what their order of
//! submission says; for any others the detector agrees with an oracle that knows all orders.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;

use gpupool_device::{
    Address, CaptureMode, Device, EventHandle, ExecHandle, GraphDevice, InstantiateFlags, Kernel, StreamHandle,
    StreamKind, Workbench,
};
use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};
use proptest::prelude::*;

const STREAMS: usize = 3;
const BLOCKS: usize = 4;
const BLOCK: u64 = 256;

#[derive(Clone, Copy, Debug)]
enum Op {
    /// A kernel on a stream that changes one block.
    Add { stream: usize, block: usize, value: u32 },
    /// A kernel on a stream from one block into another.
    Copy { stream: usize, from: usize, to: usize },
    /// A launch of one of the graphs.
    Launch { stream: usize, graph: usize },
    /// One stream waits for another.
    Order { first: usize, then: usize },
    /// The host waits for a stream.
    Sync { stream: usize },
    /// Work runs.
    Step,
}

fn op() -> impl Strategy<Value = Op> {
    let (s, b) = (0..STREAMS, 0..BLOCKS);
    prop_oneof![
        4 => (s.clone(), b.clone(), 1_u32..1000).prop_map(|(stream, block, value)| Op::Add { stream, block, value }),
        4 => (s.clone(), b.clone(), 1..BLOCKS)
            .prop_map(|(stream, from, by)| Op::Copy { stream, from, to: (from + by) % BLOCKS }),
        2 => (s.clone(), 0_usize..2).prop_map(|(stream, graph)| Op::Launch { stream, graph }),
        3 => (s.clone(), 1..STREAMS).prop_map(|(first, by)| Op::Order { first, then: (first + by) % STREAMS }),
        1 => s.prop_map(|stream| Op::Sync { stream }),
        2 => Just(Op::Step),
    ]
}

/// Blocks that an operation reads and writes.
fn accesses(op: Op) -> (Vec<usize>, Vec<usize>) {
    match op {
        Op::Add { block, .. } => (vec![], vec![block]),
        Op::Copy { from, to, .. } => (vec![from], vec![to]),
        // See `Program::new`.
        Op::Launch { graph: 0, .. } => (vec![0], vec![0, 1, 2]),
        Op::Launch { .. } => (vec![3], vec![3, 1]),
        _ => (vec![], vec![]),
    }
}

struct Program {
    d: SimDevice,
    streams: Vec<StreamHandle>,
    base: Address,
    graphs: [ExecHandle; 2],
    event: EventHandle,
}

impl Program {
    fn new(scheduler: Scheduler) -> Self {
        let d = SimDevice::new(SimConfig::default().with_scheduler(scheduler));
        let streams: Vec<_> = (0..STREAMS).map(|_| d.stream_create(StreamKind::NonBlocking).unwrap()).collect();
        let base = d.mem_alloc(BLOCKS as u64 * BLOCK).unwrap();
        let event = d.event_create().unwrap();
        let block = |i: u64| base.offset(i * BLOCK);
        let (s, t) = (streams[0], streams[1]);
        let order = |first, then| {
            d.event_record(event, first).unwrap();
            d.stream_wait_event(then, event).unwrap();
        };
        // A fork and a join: 0 is changed, then copied to 1 and 2 side by side.
        d.begin_capture(s, CaptureMode::Global).unwrap();
        d.launch(s, Kernel::Add { dst: block(0), bytes: BLOCK, value: 1 }).unwrap();
        order(s, t);
        d.launch(t, Kernel::Copy { dst: block(1), src: block(0), bytes: BLOCK }).unwrap();
        d.launch(s, Kernel::Copy { dst: block(2), src: block(0), bytes: BLOCK }).unwrap();
        order(t, s);
        let fork = d.end_capture(s).unwrap();
        d.begin_capture(s, CaptureMode::Global).unwrap();
        d.launch(s, Kernel::Add { dst: block(3), bytes: BLOCK, value: 7 }).unwrap();
        d.launch(s, Kernel::Copy { dst: block(1), src: block(3), bytes: BLOCK }).unwrap();
        let chain = d.end_capture(s).unwrap();
        let graphs = [fork, chain].map(|g| d.instantiate(g, InstantiateFlags::default()).unwrap());
        Self { d, streams, base, graphs, event }
    }

    fn block(&self, i: usize) -> Address {
        self.base.offset(i as u64 * BLOCK)
    }

    fn perform(&self, op: Op) {
        let d = &self.d;
        match op {
            Op::Add { stream, block, value } => {
                d.launch(self.streams[stream], Kernel::Add { dst: self.block(block), bytes: BLOCK, value }).unwrap();
            }
            Op::Copy { stream, from, to } => {
                let kernel = Kernel::Copy { dst: self.block(to), src: self.block(from), bytes: BLOCK };
                d.launch(self.streams[stream], kernel).unwrap();
            }
            Op::Launch { stream, graph } => d.graph_launch(self.graphs[graph], self.streams[stream]).unwrap(),
            Op::Order { first, then } => {
                d.event_record(self.event, self.streams[first]).unwrap();
                d.stream_wait_event(self.streams[then], self.event).unwrap();
            }
            Op::Sync { stream } => d.stream_synchronize(self.streams[stream]).unwrap(),
            Op::Step => drop(d.step()),
        }
    }

    fn contents(&self) -> Vec<u32> {
        (0..BLOCKS)
            .map(|i| u32::from_le_bytes(self.d.read_bytes(self.block(i), 4).unwrap().try_into().unwrap()))
            .collect()
    }
}

/// What the blocks hold if everything runs in the order of its submission.
fn sequential(ops: &[Op]) -> Vec<u32> {
    let mut b = [0_u32; BLOCKS];
    for &op in ops {
        match op {
            Op::Add { block, value, .. } => b[block] = b[block].wrapping_add(value),
            Op::Copy { from, to, .. } => b[to] = b[from],
            Op::Launch { graph: 0, .. } => {
                b[0] = b[0].wrapping_add(1);
                (b[1], b[2]) = (b[0], b[0]);
            }
            Op::Launch { .. } => {
                b[3] = b[3].wrapping_add(7);
                b[1] = b[3];
            }
            _ => {}
        }
    }
    b.to_vec()
}

/// Which earlier operations each stream and the host know to come before: sets, not clocks.
#[derive(Default)]
struct Oracle {
    streams: [BTreeSet<usize>; STREAMS],
    host: BTreeSet<usize>,
    runs: [BTreeSet<usize>; 2],
    log: Vec<(Vec<usize>, Vec<usize>)>,
    raced: bool,
}

impl Oracle {
    /// The streams with accesses that `op` on `stream` would race with.
    fn unordered(&self, op: Op, stream: usize) -> Vec<usize> {
        let (reads, writes) = accesses(op);
        let mut before: BTreeSet<usize> = &self.streams[stream] | &self.host;
        if let Op::Launch { graph, .. } = op {
            before.extend(&self.runs[graph]);
        }
        let collides = |i: usize| {
            let (r, w) = &self.log[i];
            w.iter().any(|b| reads.contains(b) || writes.contains(b)) || r.iter().any(|b| writes.contains(b))
        };
        (0..self.log.len()).filter(|i| !before.contains(i) && collides(*i)).collect()
    }

    fn perform(&mut self, op: Op) {
        match op {
            Op::Add { stream, .. } | Op::Copy { stream, .. } | Op::Launch { stream, .. } => {
                self.raced |= !self.unordered(op, stream).is_empty();
                let number = self.log.len();
                self.log.push(accesses(op));
                let host = self.host.clone();
                self.streams[stream].extend(host);
                if let Op::Launch { graph, .. } = op {
                    let runs = self.runs[graph].clone();
                    self.streams[stream].extend(runs);
                }
                self.streams[stream].insert(number);
                if let Op::Launch { graph, .. } = op {
                    self.runs[graph] = self.streams[stream].clone();
                }
            }
            Op::Order { first, then } => {
                let both = &self.streams[first] | &self.host;
                self.streams[then].extend(both);
            }
            Op::Sync { stream } => {
                let done = self.streams[stream].clone();
                self.host.extend(done);
            }
            Op::Step => {}
        }
    }
}

/// The program with a wait wherever one is missing.
fn well_ordered(ops: &[Op]) -> Vec<Op> {
    let mut oracle = Oracle::default();
    let mut fixed = Vec::new();
    for &op in ops {
        if let Op::Add { stream, .. } | Op::Copy { stream, .. } | Op::Launch { stream, .. } = op {
            for first in (0..STREAMS).filter(|&s| s != stream) {
                if !oracle.unordered(op, stream).is_empty() {
                    let wait = Op::Order { first, then: stream };
                    oracle.perform(wait);
                    fixed.push(wait);
                }
            }
        }
        oracle.perform(op);
        fixed.push(op);
    }
    assert!(!oracle.raced);
    fixed
}

fn schedulers(seed: u64) -> [Scheduler; 4] {
    let random = |seed| Scheduler::Random { seed };
    [Scheduler::InOrder, Scheduler::Adversarial, random(seed), random(seed ^ 0x5555)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn ordered_programs_compute_the_same_everywhere_and_are_not_reported(
        ops in prop::collection::vec(op(), 1..60),
        seed in any::<u64>(),
    ) {
        let ops = well_ordered(&ops);
        for scheduler in schedulers(seed) {
            let p = Program::new(scheduler);
            ops.iter().for_each(|&op| p.perform(op));
            p.d.run_until_idle();
            prop_assert_eq!(p.d.reports(), vec![], "{:?}", scheduler);
            prop_assert_eq!(p.contents(), sequential(&ops), "{:?}", scheduler);
        }
    }

    #[test]
    fn the_detector_agrees_with_the_oracle_under_every_scheduler(
        ops in prop::collection::vec(op(), 1..25),
        seed in any::<u64>(),
    ) {
        let mut oracle = Oracle::default();
        ops.iter().for_each(|&op| oracle.perform(op));
        for scheduler in schedulers(seed) {
            let p = Program::new(scheduler);
            ops.iter().for_each(|&op| p.perform(op));
            p.d.run_until_idle();
            prop_assert_eq!(!p.d.reports().is_empty(), oracle.raced, "{:?}: {:?}", scheduler, p.d.reports());
        }
    }

    #[test]
    fn equal_seeds_run_equally(ops in prop::collection::vec(op(), 1..60), seed in any::<u64>()) {
        let run = || {
            let p = Program::new(Scheduler::Random { seed });
            let mut trace = Vec::new();
            for &op in &ops {
                p.perform(op);
                trace.push((p.contents(), p.d.now()));
            }
            p.d.run_until_idle();
            let reports: Vec<_> = p.d.reports().iter().map(|r| (r.kind, r.access.submission, r.address, r.bytes)).collect();
            (trace, reports, p.contents(), p.d.now(), p.d.driver_ns(), p.d.wait_ns())
        };
        prop_assert_eq!(run(), run());
    }
}
