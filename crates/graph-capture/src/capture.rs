//! A capture under way.

use std::marker::PhantomData;
use std::sync::Arc;

use gpupool_allocator::{
    Allocator, CaptureEnd, Filter, HeldBlock, Policy, PoolHold, PoolId, Range, ScopeKey, SessionKey, Stream,
};
use gpupool_device::{CaptureId, DriverResult, GraphDevice, GraphHandle, StreamHandle, code};

use crate::captures::CapturesInner;
use crate::error::CaptureError;
use crate::graph::{Graph, GraphId, GraphInner, GraphPool, GraphReport, PoolReport, count_nodes, left_live};
use crate::reaper::Tidier;

/// Ends a capture. An end that fails and leaves the stream capturing is asked for once more: nobody else will.
fn end_of_capture<D: GraphDevice>(device: &D, stream: StreamHandle) -> DriverResult<GraphHandle> {
    device.end_capture(stream).or_else(|e| match device.capture_status(stream) {
        Ok(status) if !status.is_capturing() => Err(e),
        _ => device.end_capture(stream),
    })
}

/// Ends a capture whose graph nobody wants.
pub(crate) fn abandon<D: GraphDevice>(device: &D, stream: StreamHandle) {
    match end_of_capture(device, stream) {
        Ok(graph) => destroy_graph(device, graph),
        Err(e) => tracing::debug!(error = %e, "an abandoned capture ended with an error"),
    }
}

fn destroy_graph<D: GraphDevice>(device: &D, graph: GraphHandle) {
    if let Err(e) = device.graph_destroy(graph) {
        tracing::warn!(error = %e, "a graph was not destroyed");
    }
}

/// A capture under way. Requests on its stream, and on every stream that joins it, are served from its pool, whatever thread makes them.
///
/// [`end`](Self::end) gives its graph. Dropping it abandons the capture: the driver's capture is ended, and stream, routing and pool are
/// as they were before, except that blocks handed out meanwhile stay their owners'.
///
/// It cannot be sent to another thread: the driver wants a capture ended by the thread that began it.
#[must_use = "dropping a capture abandons it"]
pub struct Capture<D: GraphDevice> {
    pub(crate) captures: Arc<CapturesInner<D>>,
    pub(crate) allocator: Allocator<D>,
    pub(crate) stream: Stream<D>,
    pub(crate) session: Option<SessionKey>,
    pub(crate) id: CaptureId,
    pub(crate) pool: PoolId,
    /// What was live in the pool when it began.
    pub(crate) live: Vec<Range>,
    /// What was free with the driver or in segments when it began.
    pub(crate) available: Option<i64>,
    pub(crate) not_send: PhantomData<*const ()>,
}

/// Bytes that are free with the driver or in an allocator's segments: all but what others hold.
pub(crate) fn not_held_by_others<D: GraphDevice>(allocator: &Allocator<D>) -> Option<i64> {
    let free = allocator.device().mem_info().ok()?.free;
    Some(free as i64 + allocator.stats().reserved_bytes.all.current)
}

impl<D: GraphDevice> std::fmt::Debug for Capture<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Capture({} on {:?} into pool {})", self.id.0, self.stream, self.pool)
    }
}

/// While it lives, requests of the thread that made it go outside its capture's pool.
#[must_use = "dropping it closes the scope"]
pub struct Outside<D: GraphDevice> {
    allocator: Allocator<D>,
    scope: ScopeKey,
    not_send: PhantomData<*const ()>,
}

impl<D: GraphDevice> Drop for Outside<D> {
    fn drop(&mut self) {
        if !self.allocator.close_scope(self.scope) {
            tracing::warn!("a scope outside a capture's pool was closed by someone else");
        }
    }
}

impl<D: GraphDevice> Capture<D> {
    /// The driver's number of the capture.
    #[must_use]
    pub fn id(&self) -> CaptureId {
        self.id
    }

    /// The pool that its requests are served from.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// The stream it was begun on.
    #[must_use]
    pub fn stream(&self) -> &Stream<D> {
        &self.stream
    }

    /// Sends this thread's requests to the default pool until the result is dropped: for buffers that outlive the graph, such as a
    /// library's workspaces.
    ///
    /// # Errors
    ///
    /// Those of [`Allocator::begin_allocate_inside`].
    pub fn outside(&self) -> Result<Outside<D>, CaptureError> {
        let filter = Filter::Thread(std::thread::current().id());
        let scope = self.allocator.begin_allocate_inside(self.id, PoolId::DEFAULT, filter)?;
        Ok(Outside { allocator: self.allocator.clone(), scope, not_send: PhantomData })
    }

    /// Ends the capture and gives its graph.
    ///
    /// # Errors
    ///
    /// [`CaptureError::Invalidated`], with the first call of ours that the capture did not permit; the driver's. The capture is over all
    /// the same, and nothing of it is left.
    pub fn end(mut self) -> Result<Graph<D>, CaptureError> {
        let ended = end_of_capture(&*self.captures.device, self.stream.handle());
        let end = self.close();
        let handle = match ended {
            Ok(handle) => handle,
            Err(e) => {
                drop(CaptureSide::settle(&self, end.holds));
                self.captures.reaper.tidy(false);
                return Err(match e.code {
                    code::CAPTURE_INVALIDATED | code::CAPTURE_UNSUPPORTED | code::CAPTURE_UNJOINED => {
                        let (stream, capture) = (self.stream.id(), self.id);
                        CaptureError::Invalidated { stream, capture, first: end.offence, end: e }
                    }
                    _ => e.into(),
                });
            }
        };
        let graph = self.graph(handle, end)?;
        self.captures.reaper.tidy(false);
        Ok(graph)
    }

    fn close(&mut self) -> CaptureEnd {
        match self.session.take() {
            Some(session) => self.allocator.capture_registry().close(session),
            None => CaptureEnd::default(),
        }
    }

    fn graph(&self, handle: GraphHandle, end: CaptureEnd) -> Result<Graph<D>, CaptureError> {
        let CaptureSide { mut pools, reports } = CaptureSide::settle(self, end.holds);
        let nodes = match self.captures.device.graph_nodes(handle) {
            Ok(nodes) => nodes,
            Err(e) => {
                // The graph must not be lost: without its nodes it is of no use to anyone.
                destroy_graph(&*self.captures.device, handle);
                return Err(e.into());
            }
        };
        let (by_kind, memory_nodes) = count_nodes(&nodes);
        let asked_for = self.allocator.config().policy() == Policy::StreamOrdered;
        let left_live = asked_for.then(|| left_live(&nodes));
        if memory_nodes > 0 && !asked_for {
            tracing::warn!(memory_nodes, "a captured graph allocates memory when it runs: it cannot be launched twice");
        }
        if by_kind.is_empty() {
            tracing::warn!("a capture recorded nothing: was the work on another stream or device?");
        }
        let available = self.available.zip(not_held_by_others(&self.allocator));
        let driver_bytes = available.map_or(0, |(before, now)| before - now);
        let report = GraphReport { capture: self.id, nodes: by_kind, memory_nodes, pools: reports, driver_bytes };
        let id = GraphId::fresh();
        for pool in &mut pools {
            let writers = &mut pool.runs.lock().writers;
            if pool.hold.id() == self.pool {
                pool.borrowed = writers.borrowed(&self.live);
            }
            pool.last_run = writers.add(id, pool.written.clone());
        }
        let inner = Arc::new(GraphInner {
            id,
            device: Arc::clone(&self.captures.device),
            handle,
            pool: self.pool,
            reaper: Arc::downgrade(&self.captures.reaper),
            pools,
            inputs: crate::sync::Mutex::new(Vec::new()),
            retained: crate::sync::Mutex::new(Vec::new()),
            report,
            left_live,
        });
        tracing::debug!(capture = self.id.0, graph = %id, nodes = inner.report.node_count(), "a capture became a graph");
        self.captures.graphs.add(&inner);
        Ok(Graph { inner, tidier: Tidier(Arc::clone(&self.captures.reaper)) })
    }
}

/// The pools of a capture that is over.
struct CaptureSide<D: GraphDevice> {
    pools: Vec<GraphPool<D>>,
    reports: Vec<PoolReport>,
}

impl<D: GraphDevice> CaptureSide<D> {
    /// Settles the pools: what was freed belongs to no stream from now on. In the order their runs are locked in.
    fn settle(capture: &Capture<D>, mut holds: Vec<PoolHold>) -> Self {
        holds.sort_by_key(|h| (h.allocator(), h.id()));
        let (mut pools, mut reports) = (Vec::new(), Vec::new());
        for hold in holds {
            let recording = hold.end_capture();
            let written = recording.written;
            let inside = |b: &HeldBlock| written.iter().any(|w| w.intersection(b.range).is_some());
            let outputs: Vec<_> = hold.live_blocks().into_iter().filter(inside).collect();
            reports.push(PoolReport {
                pool: hold.id(),
                device: hold.device(),
                new_segment_bytes: recording.new_segment_bytes,
                reused_bytes: recording.reused_bytes,
                peak_bytes: recording.peak_bytes,
                written: written.clone(),
                outputs: outputs.clone(),
            });
            let runs = capture.captures.runs.of(hold.allocator(), hold.id());
            runs.lock().captures += 1;
            let (borrowed, last_run) = Default::default();
            pools.push(GraphPool { hold, runs, written, outputs, borrowed, last_run });
        }
        Self { pools, reports }
    }
}

/// Abandons the capture.
impl<D: GraphDevice> Drop for Capture<D> {
    fn drop(&mut self) {
        if self.session.is_none() {
            return;
        }
        abandon(&*self.captures.device, self.stream.handle());
        let end = self.close();
        drop(CaptureSide::settle(self, end.holds));
        self.captures.reaper.tidy(false);
    }
}
