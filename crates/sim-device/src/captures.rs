//! Captures: what a stream records instead of running, which streams belong to it, and what breaks it.
//!
//! The rules are those measured on an H200 (docs/driver-rules.md); the contract suite holds both devices to them.
//!
//! # Invariants
//!
//! * **K1** A capture id is never used again in the process, whatever the world.
//! * **K2** A stream is in a capture exactly if the capture lists it; both forget each other when the capture ends.
//! * **K3** An invalidated capture stays until it is ended on its own stream; it gives no graph.
//! * **K4** `count` is the number of captures under way, valid or not, and is read without the lock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread::ThreadId;

use gpupool_device::{CaptureFrontier, CaptureId, CaptureMode, CaptureStatus, GraphHandle, NodeId, StreamHandle, code};

use crate::graphs::NodeWork;
use crate::state::{Code, State};
use crate::streams::{Kind, StreamId};

#[derive(Debug)]
struct Capture {
    mode: CaptureMode,
    thread: ThreadId,
    origin: StreamId,
    graph: GraphHandle,
    valid: bool,
    /// The streams that belong to it, each with the nodes that its next one depends on.
    frontiers: BTreeMap<StreamId, Vec<NodeId>>,
}

/// All captures under way in a world.
#[derive(Debug)]
pub(crate) struct Captures {
    active: BTreeMap<CaptureId, Capture>,
    count: Arc<AtomicUsize>,
}

impl Captures {
    pub(crate) fn new(count: Arc<AtomicUsize>) -> Self {
        Self { active: BTreeMap::new(), count }
    }

    pub(crate) fn any(&self) -> bool {
        !self.active.is_empty()
    }

    /// Whether a capture is under way and unbroken.
    pub(crate) fn is_valid(&self, id: CaptureId) -> bool {
        self.active.get(&id).is_some_and(|capture| capture.valid)
    }

    pub(crate) fn invalidate(&mut self, id: CaptureId) {
        if let Some(capture) = self.active.get_mut(&id) {
            capture.valid = false;
        }
    }

    pub(crate) fn invalidate_all(&mut self) {
        self.active.values_mut().for_each(|capture| capture.valid = false);
    }

    /// Invalidates the captures that `broken` picks; fails if there are any.
    fn forbid(&mut self, broken: impl Fn(&Capture) -> bool) -> Result<(), Code> {
        let mut result = Ok(());
        for capture in self.active.values_mut().filter(|c| broken(c)) {
            capture.valid = false;
            result = Err(code::CAPTURE_UNSUPPORTED);
        }
        result
    }

    /// An unsafe call by the calling thread, whose own mode is `mode`.
    pub(crate) fn unsafe_call(&mut self, mode: CaptureMode) -> Result<(), Code> {
        if self.active.is_empty() || mode == CaptureMode::Relaxed {
            return Ok(());
        }
        let me = std::thread::current().id();
        self.forbid(|c| match c.mode {
            CaptureMode::Relaxed => false,
            CaptureMode::ThreadLocal => c.thread == me,
            CaptureMode::Global => c.thread == me || mode == CaptureMode::Global,
        })
    }
}

impl State {
    fn capture_of(&self, stream: StreamId) -> Option<CaptureId> {
        self.streams.get(stream)?.capture
    }

    /// The graph that a capture under way makes.
    pub(crate) fn graph_under(&self, capture: CaptureId) -> Option<&crate::graphs::Graph> {
        self.graphs.get(self.captures.active.get(&capture)?.graph)
    }

    /// The capture that submissions to a stream go to, if it is capturing.
    pub(crate) fn recording(&self, stream: StreamId) -> Result<Option<CaptureId>, Code> {
        let Some(id) = self.capture_of(stream) else { return Ok(None) };
        match self.captures.active.get(&id) {
            Some(capture) if capture.valid => Ok(Some(id)),
            _ => Err(code::CAPTURE_INVALIDATED),
        }
    }

    /// A call that fails on a capturing stream in every mode, and breaks its capture.
    pub(crate) fn not_while_capturing(&mut self, stream: StreamId) -> Result<(), Code> {
        match self.capture_of(stream) {
            None => Ok(()),
            Some(id) => {
                self.captures.invalidate(id);
                Err(code::CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Waiting for the whole device: fails in every mode while one of its streams captures, and breaks that capture.
    pub(crate) fn whole_device_call(&mut self, device: u32) -> Result<(), Code> {
        let Self { captures, streams, .. } = self;
        captures.forbid(|c| c.frontiers.keys().any(|&s| streams.get(s).is_some_and(|s| s.device == device)))
    }

    /// Work on the legacy stream would depend on every blocking stream: it fails while one of them captures, in every mode, and breaks that
    /// capture.
    pub(crate) fn legacy_is_free(&mut self, stream: StreamId) -> Result<(), Code> {
        let Self { captures, streams, .. } = self;
        let Some(this) = streams.get(stream).filter(|s| s.kind == Kind::Legacy && captures.any()) else {
            return Ok(());
        };
        let implicit =
            |id: &StreamId| streams.get(*id).is_some_and(|s| s.device == this.device && s.kind == Kind::Blocking);
        captures.forbid(|c| c.frontiers.keys().any(implicit)).map_err(|_| code::CAPTURE_IMPLICIT)
    }

    pub(crate) fn begin(&mut self, stream: StreamId, mode: CaptureMode) -> Result<(), Code> {
        static CAPTURES: AtomicU64 = AtomicU64::new(1);
        let kind = self.streams.get(stream).ok_or(code::INVALID_HANDLE)?.kind;
        if kind == Kind::Legacy {
            return Err(code::CAPTURE_UNSUPPORTED);
        }
        if self.capture_of(stream).is_some() {
            return Err(code::ILLEGAL_STATE);
        }
        let id = CaptureId(CAPTURES.fetch_add(1, Relaxed));
        let capture = Capture {
            mode,
            thread: std::thread::current().id(),
            origin: stream,
            graph: self.graphs.open(id),
            valid: true,
            frontiers: BTreeMap::from([(stream, Vec::new())]),
        };
        self.captures.active.insert(id, capture);
        self.captures.count.fetch_add(1, Relaxed);
        if let Some(stream) = self.streams.get_mut(stream) {
            stream.capture = Some(id);
        }
        Ok(())
    }

    pub(crate) fn end(&mut self, stream: StreamId) -> Result<GraphHandle, Code> {
        let id = self.capture_of(stream).ok_or(code::ILLEGAL_STATE)?;
        let capture = self.captures.active.get(&id).ok_or(code::ILLEGAL_STATE)?;
        if capture.origin != stream {
            self.captures.invalidate(id);
            return Err(code::CAPTURE_UNMATCHED);
        }
        let stranger = capture.mode != CaptureMode::Relaxed && capture.thread != std::thread::current().id();
        let Some(capture) = self.captures.active.remove(&id) else { return Err(code::ILLEGAL_STATE) };
        self.released(&capture);
        if stranger || !capture.valid {
            self.graphs.remove(capture.graph);
            return Err(if stranger { code::CAPTURE_WRONG_THREAD } else { code::CAPTURE_INVALIDATED });
        }
        let own = capture.frontiers.get(&stream).map_or(&[][..], Vec::as_slice);
        let joined = self.graphs.get(capture.graph).map(|g| g.ancestors(own)).unwrap_or_default();
        if capture.frontiers.values().flatten().any(|node| !joined.contains(node)) {
            self.graphs.remove(capture.graph);
            return Err(code::CAPTURE_UNJOINED);
        }
        self.graphs.close(capture.graph);
        Ok(capture.graph)
    }

    /// A capture is over: its streams are in none.
    fn released(&mut self, capture: &Capture) {
        self.captures.count.fetch_sub(1, Relaxed);
        for stream in capture.frontiers.keys() {
            if let Some(stream) = self.streams.get_mut(*stream) {
                stream.capture = None;
            }
        }
    }

    /// A stream is destroyed. The capture that was begun on it is over; one that it joined goes on.
    pub(crate) fn leave_capture(&mut self, stream: StreamId) {
        let Some(id) = self.capture_of(stream) else { return };
        let begun_here = self.captures.active.get(&id).is_some_and(|c| c.origin == stream);
        if begun_here && let Some(capture) = self.captures.active.remove(&id) {
            self.released(&capture);
            self.graphs.remove(capture.graph);
        }
    }

    pub(crate) fn status(&self, stream: StreamId) -> CaptureStatus {
        match self.capture_of(stream) {
            None => CaptureStatus::None,
            Some(id) if self.captures.active.get(&id).is_some_and(|c| c.valid) => CaptureStatus::Active(id),
            Some(_) => CaptureStatus::Invalidated,
        }
    }

    pub(crate) fn frontier(&self, stream: StreamId) -> Option<CaptureFrontier> {
        let id = self.capture_of(stream)?;
        let capture = self.captures.active.get(&id).filter(|c| c.valid)?;
        let nodes = capture.frontiers.get(&stream).cloned().unwrap_or_default();
        Some(CaptureFrontier { id, graph: capture.graph, nodes })
    }

    /// Records a node on a capturing stream.
    pub(crate) fn record_node(&mut self, id: CaptureId, stream: StreamId, work: NodeWork) -> Result<(), Code> {
        let device = self.streams.get(stream).ok_or(code::INVALID_HANDLE)?.device;
        let capture = self.captures.active.get_mut(&id).ok_or(code::CAPTURE_INVALIDATED)?;
        let after = capture.frontiers.get(&stream).cloned().unwrap_or_default();
        let node = self.graphs.add_node(capture.graph, device, work, after);
        capture.frontiers.insert(stream, vec![node]);
        Ok(())
    }

    /// The nodes that an event recorded now on a capturing stream comes after.
    pub(crate) fn captured_nodes(&self, id: CaptureId, stream: StreamId) -> Vec<NodeId> {
        self.captures.active.get(&id).and_then(|c| c.frontiers.get(&stream)).cloned().unwrap_or_default()
    }

    /// A stream waits for an event of a capture: it joins, or depends on more of it.
    pub(crate) fn join_capture(&mut self, stream: StreamId, id: CaptureId, nodes: &[NodeId]) -> Result<(), Code> {
        if !self.captures.is_valid(id) {
            // The event leads nowhere, and a capture that was to depend on it is broken.
            if let Some(own) = self.capture_of(stream) {
                self.captures.invalidate(own);
            }
            return Err(code::INVALID_VALUE);
        }
        let capture = self.captures.active.get_mut(&id).ok_or(code::INVALID_VALUE)?;
        let this = self.streams.get_mut(stream).ok_or(code::INVALID_HANDLE)?;
        match (this.capture, this.kind) {
            (Some(other), _) if other != id => {
                self.captures.invalidate(id);
                self.captures.invalidate(other);
                return Err(code::CAPTURE_MERGE);
            }
            (None, Kind::Legacy) => {
                self.captures.invalidate(id);
                return Err(code::CAPTURE_IMPLICIT);
            }
            _ => this.capture = Some(id),
        }
        let frontier = capture.frontiers.entry(stream).or_default();
        let new = nodes.iter().filter(|node| !frontier.contains(node)).copied().collect::<Vec<_>>();
        frontier.extend(new);
        Ok(())
    }

    /// Whether a handle's stream is in a capture, for those who hand memory out.
    pub(crate) fn capture_under(&self, device: u32, handle: StreamHandle) -> Option<CaptureId> {
        self.capture_of(self.streams.find(device, handle)?)
    }
}
