//! Running one piece of work: what it does to clocks, time, memory and the detector.

use std::sync::Arc;

use gpupool_device::{Address, CaptureId, HostFunction, Kernel, StreamHandle, code};

use crate::clocks::VectorClock;
use crate::graphs::{NodeWork, RepeatableHostFunction, Run};
use crate::kernels::{self, Touch};
use crate::memory::{Physical, Piece};
use crate::race::Moment;
use crate::report::Access;
use crate::scheduler::Unit;
use crate::state::State;
use crate::streams::StreamId;
use crate::work::Work;

/// A host function to be run without the lock.
pub(crate) enum HostJob {
    Once(HostFunction),
    Node(RepeatableHostFunction),
}

impl HostJob {
    pub(crate) fn run(self) {
        match self {
            Self::Once(function) => function(),
            Self::Node(function) => function(),
        }
    }
}

/// Where and when a kernel runs.
struct Site {
    device: u32,
    stream: StreamHandle,
    submission: u64,
    graph: Option<CaptureId>,
    clock: VectorClock,
    component: u32,
    epoch: u64,
    start: u64,
}

impl State {
    /// Runs one piece of work. A host function is given back instead, to be run and then [finished](Self::finish_host).
    pub(crate) fn execute(&mut self, unit: Unit) -> Option<HostJob> {
        let id = unit.stream;
        if let Some(node) = unit.node {
            return self.execute_node(id, node);
        }
        let stream = self.streams.get_mut(id)?;
        let op = stream.queue.front_mut()?;
        match &mut op.work {
            Work::Record(_) | Work::Wait(_) | Work::Hold(_) => self.execute_marker(id),
            Work::Kernel(kernel, tag) => {
                let (kernel, tag) = (*kernel, *tag);
                self.execute_kernel(id, &kernel, tag);
            }
            Work::Read(address, bytes) => {
                let touch = Touch { address: *address, bytes: *bytes, write: false };
                self.execute_read(id, touch);
            }
            Work::HostCopy { address, host, to_host } => {
                let touch = Touch { address: *address, bytes: host.bytes, write: !*to_host };
                let host = *host;
                self.execute_host_copy(id, touch, host);
            }
            Work::Host(function) => {
                let job = function.take().map(HostJob::Once);
                stream.in_host = Some(std::thread::current().id());
                return job;
            }
            // Only a graph without nodes is a piece of work as a whole.
            Work::Launch(_) => self.finish_run(id),
        }
        None
    }

    /// Completes the marker at a stream's head.
    pub(crate) fn execute_marker(&mut self, id: StreamId) {
        let Some(op) = self.streams.pop(id) else { return };
        let now = self.time.now();
        let Some(stream) = self.streams.get_mut(id) else { return };
        stream.clock.join(&op.host);
        stream.time = stream.time.max(op.at);
        match op.work {
            Work::Record(record) => record.finish(stream.clock.clone(), stream.time),
            Work::Wait(record) => {
                if let Some(done) = record.done() {
                    stream.clock.join(&done.clock);
                    stream.time = stream.time.max(done.time);
                }
            }
            _ => stream.time = stream.time.max(now),
        }
        self.bury(id);
    }

    /// Brings a stream's clock and time to where its head starts: behind the submission and, for a kernel that waited there,
    /// behind the opening of its gate.
    fn start(&mut self, id: StreamId, gate: Option<(VectorClock, u64)>) -> Option<u64> {
        let on = self.detector.on();
        let stream = self.streams.get_mut(id)?;
        let op = stream.queue.front()?;
        stream.clock.join(&op.host);
        stream.time = stream.time.max(op.at);
        if let Some((clock, time)) = gate {
            stream.clock.join(&clock);
            stream.time = stream.time.max(time);
        }
        Some(if on { stream.clock.tick(stream.component) } else { 0 })
    }

    /// Takes a kernel or read off a stream's head: where and when it runs.
    fn take_head(&mut self, id: StreamId, gate: Option<(VectorClock, u64)>) -> Option<Site> {
        let epoch = self.start(id, gate)?;
        let submission = self.streams.pop(id)?.submission;
        let stream = self.streams.get(id)?;
        Some(Site {
            device: stream.device,
            stream: stream.handle,
            submission,
            graph: None,
            clock: stream.clock.clone(),
            component: stream.component,
            epoch,
            start: stream.time,
        })
    }

    fn opened(&self, kernel: &Kernel) -> Option<(VectorClock, u64)> {
        match kernel {
            Kernel::Wait { gate } => self.gates.get(&gate.0).cloned().flatten(),
            _ => None,
        }
    }

    fn execute_kernel(&mut self, id: StreamId, kernel: &Kernel, tag: Option<u64>) {
        let Some(site) = self.take_head(id, self.opened(kernel)) else { return };
        let end = self.run_kernel(&site, kernel, tag);
        self.ended(id, end);
    }

    fn execute_read(&mut self, id: StreamId, touch: Touch) {
        let Some(site) = self.take_head(id, None) else { return };
        let end = site.start + self.config.costs.kernel + self.config.costs.kernel_bytes.at(touch.bytes);
        if let Some(operands) = self.touch(&site, "read", &[touch], None, end)
            && let Some(bytes) = self.reads.get_mut(&site.submission)
            && let Some(pieces) = operands.first().filter(|_| self.config.contents)
        {
            *bytes = self.contents.read(pieces);
        }
        self.ended(id, end);
    }

    /// What is written is the device's memory: from the host; else to it.
    fn execute_host_copy(&mut self, id: StreamId, touch: Touch, host: Physical) {
        let Some(site) = self.take_head(id, None) else { return };
        let end = site.start + self.config.costs.host_copy.at(touch.bytes);
        let pinned = [Piece { address: 0, physical: host.start, bytes: host.bytes, since: 0 }];
        if let Some(operands) = self.touch(&site, "copy to or from the host", &[touch], None, end)
            && let Some(pieces) = operands.first().filter(|_| self.config.contents)
        {
            match touch.write {
                true => self.contents.copy(&pinned, pieces),
                false => self.contents.copy(pieces, &pinned),
            }
        }
        self.ended(id, end);
    }

    /// A stream's piece of work ended.
    fn ended(&mut self, id: StreamId, end: u64) {
        if let Some(stream) = self.streams.get_mut(id) {
            stream.time = end;
        }
        self.time.raise(end);
        self.bury(id);
    }

    /// Runs one node of the run at a stream's head.
    fn execute_node(&mut self, id: StreamId, node: u32) -> Option<HostJob> {
        self.begin_run(id);
        let stream = self.streams.get(id)?;
        let (handle, op) = (stream.handle, stream.queue.front()?);
        let Work::Launch(run) = &op.work else { return None };
        let (submission, capture) = (op.submission, run.capture);
        let nodes = Arc::clone(&run.nodes);
        let this = nodes.get(node as usize)?;
        let (mut clock, mut start) = entry(run, &this.after);
        match &this.work {
            NodeWork::Host(function) => {
                let job = HostJob::Node(Arc::clone(function));
                self.streams.get_mut(id)?.in_host = Some(std::thread::current().id());
                return Some(job);
            }
            NodeWork::Empty | NodeWork::Memory(_) | NodeWork::Foreign(_) => self.finish_node(id, node, clock, start),
            NodeWork::Kernel(kernel, tag) => {
                if let Some((opened, time)) = self.opened(kernel) {
                    clock.join(&opened);
                    start = start.max(time);
                }
                let epoch = if self.detector.on() { clock.tick(this.component) } else { 0 };
                let (device, component) = (this.device, this.component);
                let graph = Some(capture);
                let site = Site { device, stream: handle, submission, graph, clock, component, epoch, start };
                let end = self.run_kernel(&site, kernel, *tag);
                self.finish_node(id, node, site.clock, end);
            }
        }
        None
    }

    /// Fixes what the run at a stream's head comes after, once.
    fn begin_run(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(id) else { return };
        let Some(op) = stream.queue.front_mut() else { return };
        let Work::Launch(run) = &mut op.work else { return };
        if run.base.is_none() {
            stream.clock.join(&op.host);
            stream.clock.join(&self.graphs.clock(run.exec));
            stream.time = stream.time.max(op.at);
            run.base = Some((stream.clock.clone(), stream.time));
        }
    }

    fn finish_node(&mut self, id: StreamId, node: u32, clock: VectorClock, end: u64) {
        self.time.raise(end);
        let Some(op) = self.streams.get_mut(id).and_then(|s| s.queue.front_mut()) else { return };
        let Work::Launch(run) = &mut op.work else { return };
        if run.finish(node, clock, end) {
            self.finish_run(id);
        }
    }

    /// Completes the run at a stream's head.
    fn finish_run(&mut self, id: StreamId) {
        self.begin_run(id);
        let Some(op) = self.streams.pop(id) else { return };
        let Work::Launch(run) = op.work else { return };
        let Some(stream) = self.streams.get_mut(id) else { return };
        for (clock, end) in run.done.iter().flatten() {
            stream.clock.join(clock);
            stream.time = stream.time.max(*end);
        }
        let clock = stream.clock.clone();
        self.graphs.finished(run.exec, clock, &mut self.detector);
        self.bury(id);
    }

    /// A host function has returned.
    pub(crate) fn finish_host(&mut self, unit: Unit) {
        let id = unit.stream;
        if let Some(stream) = self.streams.get_mut(id) {
            stream.in_host = None;
        }
        match unit.node {
            None => {
                let _ = self.start(id, None);
                self.streams.pop(id);
                let end = self.streams.get(id).map_or(0, |s| s.time);
                self.ended(id, end);
            }
            Some(node) => {
                let Some(op) = self.streams.get(id).and_then(|s| s.queue.front()) else { return };
                let Work::Launch(run) = &op.work else { return };
                let (clock, start) = entry(run, run.nodes.get(node as usize).map_or(&[][..], |n| &n.after));
                self.finish_node(id, node, clock, start);
            }
        }
    }

    /// Runs a kernel. When it ends.
    fn run_kernel(&mut self, site: &Site, kernel: &Kernel, tag: Option<u64>) -> u64 {
        let touches = kernels::touches(kernel).unwrap_or_default();
        let bytes = touches.iter().map(|t| t.bytes).sum();
        let time = match kernel {
            Kernel::Wait { .. } => 0,
            _ => self.config.costs.kernel + self.config.costs.kernel_bytes.at(bytes),
        };
        let end = site.start + time;
        let Some(operands) = self.touch(site, kernels::name(kernel), &touches, tag, end) else { return end };
        if !self.config.contents {
            return end;
        }
        match (kernel, operands.as_slice()) {
            (Kernel::Fill { value, .. }, [dst]) => self.contents.fill(dst, *value),
            (Kernel::Add { value, .. }, [dst]) => self.contents.add(dst, *value),
            (Kernel::Copy { .. }, [src, dst]) => self.contents.copy(src, dst),
            (Kernel::Checksum { .. }, [src, dst]) => {
                let sum = self.contents.checksum(src);
                self.contents.put_u64(dst, sum);
            }
            _ => {}
        }
        end
    }

    /// Checks operands and notes that they are touched. What lies behind each, or `None` if the device has faulted.
    fn touch(
        &mut self,
        site: &Site,
        operation: &'static str,
        touches: &[Touch],
        tag: Option<u64>,
        time: u64,
    ) -> Option<Vec<Vec<Piece>>> {
        let access = |touch: &Touch| Access {
            device: site.device,
            stream: site.stream,
            operation,
            write: touch.write,
            address: Address(touch.address),
            bytes: touch.bytes,
            submission: site.submission,
            graph: site.graph,
            tag,
            time,
        };
        let device = self.devices.get_mut(site.device as usize).filter(|d| d.sticky.is_none())?;
        let mut operands = Vec::with_capacity(touches.len());
        for touch in touches {
            let mut pieces = Vec::new();
            if let Err(at) = device.memory.translate(touch.address, touch.bytes, &mut pieces) {
                device.sticky = Some(code::ILLEGAL_ADDRESS);
                self.detector.illegal(access(touch), at);
                return None;
            }
            operands.push(pieces);
        }
        if self.detector.on() {
            let now = Moment { clock: &site.clock, component: site.component, epoch: site.epoch };
            for (touch, pieces) in touches.iter().zip(&operands) {
                self.detector.touch(&Arc::new(access(touch)), pieces, now);
            }
        }
        Some(operands)
    }
}

/// What a node comes after, and when it can start.
fn entry(run: &Run, after: &[u32]) -> (VectorClock, u64) {
    let (mut clock, mut start) = run.base.clone().unwrap_or_default();
    for &earlier in after {
        if let Some(Some((theirs, end))) = run.done.get(earlier as usize) {
            clock.join(theirs);
            start = start.max(*end);
        }
    }
    (clock, start)
}
