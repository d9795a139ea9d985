//! Which piece of work runs next, and waits of the host.
//!
//! Work runs one piece at a time, and only in `step` or in a call that waits. A piece is the head of a stream's queue
//! or, where that is a graph's run, one of its nodes. Time is a separate matter: a piece starts at the latest of its
//! stream's last end, its submission and the ends of what it waited for, whatever order pieces are run in, so
//! overlapping work overlaps in virtual time.
//!
//! # Invariants
//!
//! * **W1** A wait returns when its goal is reached, or fails with `WAIT_NEVER_ENDS` when nothing in the world can run
//!   and no tick would let the goal go on; it then has changed nothing but the work that could run.
//! * **W2** Choices depend on submissions and the seed only.

use std::fmt;
use std::sync::Arc;

use gpupool_device::{Call, EventHandle, Gate, Kernel, StreamHandle};

use crate::Scheduler;
use crate::events::Record;
use crate::graphs::{NodeWork, Run};
use crate::state::State;
use crate::streams::StreamId;
use crate::work::Work;

/// Draws among candidates.
#[derive(Debug)]
pub(crate) struct Chooser {
    rule: Scheduler,
    random: u64,
}

/// A piece of work that can run now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Unit {
    pub(crate) stream: StreamId,
    pub(crate) submission: u64,
    /// The node, if the head is a graph's run.
    pub(crate) node: Option<u32>,
}

impl Chooser {
    pub(crate) fn new(rule: Scheduler) -> Self {
        let random = if let Scheduler::Random { seed } = rule { seed } else { 0 };
        Self { rule, random }
    }

    /// SplitMix64.
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn choose(&mut self, ready: &[Unit]) -> Option<Unit> {
        match self.rule {
            Scheduler::InOrder => ready.iter().min_by_key(|u| (u.submission, u.node)).copied(),
            Scheduler::Adversarial => ready.iter().max_by_key(|u| (u.submission, u.node)).copied(),
            Scheduler::Random { .. } => {
                let index = self.draw().checked_rem(ready.len() as u64)?;
                ready.get(index as usize).copied()
            }
        }
    }
}

/// Why a head cannot run.
#[derive(Clone, Debug)]
pub(crate) enum Block {
    Record(Arc<Record>),
    Tick(u64),
    Gate(Gate),
    /// An earlier run of the same executable, in this stream.
    Run(StreamId),
    HostFunction,
}

/// What a head is doing.
pub(crate) enum Head {
    Empty,
    Ready(u64),
    Blocked(Block),
}

/// What a call waits for.
#[derive(Debug)]
pub(crate) enum Goal {
    Record(Arc<Record>),
    /// Streams that must have completed this many submissions.
    Positions(Vec<(StreamId, u64)>),
}

/// What a failed wait was waiting for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Awaited {
    /// An event.
    Event(EventHandle),
    /// All work of a stream.
    Stream(StreamHandle),
    /// All work of a device.
    Device(u32),
}

/// Something that keeps a wait from ending.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Holdup {
    /// The stream whose head cannot run.
    pub stream: StreamHandle,
    /// Why.
    pub reason: HoldupReason,
}

/// Why a stream's head cannot run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum HoldupReason {
    /// It waits for the tick counter.
    Tick(u64),
    /// It waits at a closed gate.
    Gate(Gate),
    /// It waits for work of a stream, which is held up itself.
    Stream(StreamHandle),
    /// It is a graph whose executable was launched before in that stream.
    EarlierLaunch(StreamHandle),
    /// It is a host function that is running: the one that waits.
    HostFunction,
}

/// Why a wait failed with `WAIT_NEVER_ENDS`.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct WaitReport {
    /// The call that waited.
    pub call: Call,
    /// What for.
    pub awaited: Awaited,
    /// What keeps it from ending.
    pub held_up: Vec<Holdup>,
}

impl fmt::Display for WaitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} waits for ", self.call)?;
        match self.awaited {
            Awaited::Event(event) => write!(f, "event {}", event.0)?,
            Awaited::Stream(stream) => write!(f, "stream {:#x}", stream.0)?,
            Awaited::Device(ordinal) => write!(f, "device {ordinal}")?,
        }
        f.write_str(", which can never end:")?;
        for (i, h) in self.held_up.iter().enumerate() {
            let separator = if i == 0 { " " } else { "; " };
            write!(f, "{separator}stream {:#x} ", h.stream.0)?;
            match h.reason {
                HoldupReason::Tick(tick) => write!(f, "is held until tick {tick}")?,
                HoldupReason::Gate(gate) => write!(f, "waits at gate {}", gate.0)?,
                HoldupReason::Stream(stream) => write!(f, "waits for stream {:#x}", stream.0)?,
                HoldupReason::EarlierLaunch(stream) => {
                    write!(f, "waits for the graph's earlier launch in stream {:#x}", stream.0)?;
                }
                HoldupReason::HostFunction => f.write_str("is running the host function that waits")?,
            }
        }
        Ok(())
    }
}

impl State {
    fn gate_is_open(&self, gate: Gate) -> bool {
        self.gates.get(&gate.0).is_none_or(Option::is_some)
    }

    /// The closed gate at which a node of a run waits.
    fn closed_gate(&self, run: &Run, node: u32) -> Option<Gate> {
        match run.nodes.get(node as usize)?.work {
            NodeWork::Kernel(Kernel::Wait { gate }, _) if !self.gate_is_open(gate) => Some(gate),
            _ => None,
        }
    }

    pub(crate) fn head(&self, stream: StreamId) -> Head {
        let Some(this) = self.streams.get(stream) else { return Head::Empty };
        let Some(op) = this.queue.front() else { return Head::Empty };
        if this.in_host.is_some() {
            return Head::Blocked(Block::HostFunction);
        }
        match &op.work {
            Work::Wait(record) if record.done().is_none() => Head::Blocked(Block::Record(Arc::clone(record))),
            Work::Hold(tick) if *tick > self.ticks.now => Head::Blocked(Block::Tick(*tick)),
            Work::Kernel(Kernel::Wait { gate }, _) if !self.gate_is_open(*gate) => Head::Blocked(Block::Gate(*gate)),
            Work::Launch(run) => match self.graphs.next_run(run.exec) {
                Some((other, submission)) if submission != op.submission => Head::Blocked(Block::Run(other)),
                _ => {
                    let mut gates = run.ready.iter().map(|&node| self.closed_gate(run, node));
                    match gates.next() {
                        Some(Some(gate)) if gates.all(|g| g.is_some()) => Head::Blocked(Block::Gate(gate)),
                        _ => Head::Ready(op.submission),
                    }
                }
            },
            _ => Head::Ready(op.submission),
        }
    }

    fn ready(&self, streams: impl Iterator<Item = StreamId>) -> Vec<Unit> {
        let mut units = Vec::new();
        for stream in streams {
            let Head::Ready(submission) = self.head(stream) else { continue };
            match self.streams.get(stream).and_then(|s| s.queue.front()).map(|op| &op.work) {
                Some(Work::Launch(run)) if run.left > 0 => {
                    let open = run.ready.iter().filter(|&&node| self.closed_gate(run, node).is_none());
                    units.extend(open.map(|&node| Unit { stream, submission, node: Some(node) }));
                }
                _ => units.push(Unit { stream, submission, node: None }),
            }
        }
        units
    }

    /// The next piece to run, of everything that can.
    pub(crate) fn choose(&mut self) -> Option<Unit> {
        let ready = self.ready(self.streams.busy());
        self.chooser.choose(&ready)
    }

    /// The next piece to run while a call waits for `goal`.
    pub(crate) fn choose_for(&mut self, goal: &Goal) -> Option<Unit> {
        if matches!(self.config.scheduler, Scheduler::Adversarial) {
            let needed = self.ready(self.needed(goal).into_iter());
            if let Some(unit) = self.chooser.choose(&needed) {
                return Some(unit);
            }
        }
        self.choose()
    }

    pub(crate) fn reached(&self, goal: &Goal) -> bool {
        match goal {
            Goal::Record(record) => record.done().is_some(),
            Goal::Positions(all) => all.iter().all(|&(stream, position)| self.completed(stream, position)),
        }
    }

    fn completed(&self, stream: StreamId, position: u64) -> bool {
        self.streams.get(stream).is_none_or(|s| s.completed >= position)
    }

    /// The streams whose heads stand between now and the goal.
    fn needed(&self, goal: &Goal) -> Vec<StreamId> {
        let mut needed = match goal {
            Goal::Record(record) => vec![record.stream],
            Goal::Positions(all) => all.iter().filter(|&&(s, p)| !self.completed(s, p)).map(|&(s, _)| s).collect(),
        };
        let mut next = 0;
        while let Some(&stream) = needed.get(next) {
            next += 1;
            let other = match self.head(stream) {
                Head::Blocked(Block::Record(record)) => record.stream,
                Head::Blocked(Block::Run(other)) => other,
                _ => continue,
            };
            if !needed.contains(&other) {
                needed.push(other);
            }
        }
        needed
    }

    /// Whether another thread is running a host function, so that something may still happen.
    pub(crate) fn host_function_elsewhere(&self) -> bool {
        let me = std::thread::current().id();
        self.streams.busy().filter_map(|s| self.streams.get(s)?.in_host).any(|thread| thread != me)
    }

    /// The earliest tick that lets the goal go on.
    pub(crate) fn tick_for(&self, goal: &Goal) -> Option<u64> {
        let tick = |stream| match self.head(stream) {
            Head::Blocked(Block::Tick(tick)) => Some(tick),
            _ => None,
        };
        self.needed(goal).into_iter().filter_map(tick).min()
    }

    pub(crate) fn wait_report(&self, call: Call, awaited: Awaited, goal: &Goal) -> WaitReport {
        let handle = |id: StreamId| self.streams.get(id).map_or(StreamHandle(u64::MAX), |s| s.handle);
        let mut held_up = Vec::new();
        for stream in self.needed(goal) {
            let Head::Blocked(block) = self.head(stream) else { continue };
            let reason = match block {
                Block::Record(record) => HoldupReason::Stream(handle(record.stream)),
                Block::Tick(tick) => HoldupReason::Tick(tick),
                Block::Gate(gate) => HoldupReason::Gate(gate),
                Block::Run(other) => HoldupReason::EarlierLaunch(handle(other)),
                Block::HostFunction => HoldupReason::HostFunction,
            };
            held_up.push(Holdup { stream: handle(stream), reason });
        }
        WaitReport { call, awaited, held_up }
    }

    /// Sets the tick counter, and lets go what it held: holds, and the markers behind them.
    pub(crate) fn set_tick(&mut self, tick: u64) {
        self.ticks.now = self.ticks.now.max(tick);
        let mut recorded = false;
        while let Some(stream) = self.ticks.due() {
            recorded |= self.settle(stream);
        }
        while recorded {
            recorded = false;
            let busy: Vec<StreamId> = self.streams.busy().collect();
            for stream in busy {
                recorded |= self.settle(stream);
            }
        }
    }

    /// Completes the markers at a stream's head. Whether one of them was a record.
    fn settle(&mut self, stream: StreamId) -> bool {
        let mut recorded = false;
        while let Head::Ready(_) = self.head(stream) {
            let Some(op) = self.streams.get(stream).and_then(|s| s.queue.front()) else { break };
            if !op.work.is_marker() {
                break;
            }
            recorded |= matches!(op.work, Work::Record(_));
            self.execute_marker(stream);
        }
        recorded
    }
}
