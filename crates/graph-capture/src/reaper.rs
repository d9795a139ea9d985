//! What is dropped but may not go yet: executables whose launches are unfinished, graphs dropped while a capture is under way, and what
//! they hold.
//!
//! The allocator calls [`Reaper::tidy`] before it gives memory back or waits for some; so does every begin, end and drop.

use std::sync::{Arc, Weak};

use gpupool_allocator::{Allocation, CaptureRegistry, PoolHold, WorkMark};
use gpupool_device::{
    Address, DriverError, DriverResult, ExecHandle, GraphDevice, GraphHandle, StreamHandle, with_relaxed_capture,
};

use crate::graph::GraphInner;
use crate::sync::Mutex;

/// What is left of a graph or an executable.
pub(crate) struct Remains<D: GraphDevice> {
    pub(crate) exec: Option<ExecHandle>,
    pub(crate) graph: Option<GraphHandle>,
    /// A graph's memory nodes: what its last launch left live.
    pub(crate) left_live: Vec<Address>,
    /// The last launch.
    pub(crate) last: Option<WorkMark<D>>,
    /// An executable's graph.
    pub(crate) of: Option<Arc<GraphInner<D>>>,
    pub(crate) holds: Vec<PoolHold>,
    pub(crate) retained: Vec<Allocation<D>>,
}

impl<D: GraphDevice> Remains<D> {
    fn is_over(&self, wait: bool) -> bool {
        let Some(last) = &self.last else { return true };
        let over = if wait { last.wait().map(|()| true) } else { last.poll() };
        over.unwrap_or_else(|e| {
            tracing::debug!(error = %e, "could not learn whether a launch is over");
            false
        })
    }

    /// Destroys what the driver knows of it; what it does not take stays.
    pub(crate) fn destroy(&mut self, device: &D) {
        let warn = |e: DriverError| tracing::warn!(error = %e, "a graph was not destroyed; it is tried again");
        if let Some(exec) = self.exec {
            match with_relaxed_capture(device, |d| d.exec_destroy(exec)) {
                Ok(()) => self.exec = None,
                Err(e) => warn(e),
            }
        }
        if let Some(graph) = self.graph {
            match device.graph_destroy(graph) {
                Ok(()) => self.graph = None,
                Err(e) => warn(e),
            }
            for address in std::mem::take(&mut self.left_live) {
                // A graph that was never launched has left nothing.
                let _none = with_relaxed_capture(device, |d| d.mem_free(address));
            }
        }
    }
}

/// The queue of what may not go yet.
pub(crate) struct Reaper<D: GraphDevice> {
    device: Arc<D>,
    registry: Arc<CaptureRegistry>,
    queue: Mutex<Vec<Remains<D>>>,
}

impl<D: GraphDevice> Reaper<D> {
    pub(crate) fn new(device: Arc<D>, registry: Arc<CaptureRegistry>) -> Self {
        Self { device, registry, queue: Mutex::new(Vec::new()) }
    }

    /// Queues what was dropped. Neither waits nor fails.
    pub(crate) fn push(&self, remains: Remains<D>) {
        self.queue.lock().push(remains);
    }

    /// Whether a capture that we know of may be under way on a stream. Asks the driver only while a session is open.
    pub(crate) fn is_capturing(&self, stream: StreamHandle) -> DriverResult<bool> {
        Ok(!self.registry.is_quiet() && self.device.capture_status(stream)?.is_capturing())
    }

    /// How much is queued.
    pub(crate) fn len(&self) -> usize {
        self.queue.lock().len()
    }

    /// Lets go of what may go now; whether anything did. Does nothing while a capture is under way. With `wait` it **waits** for
    /// launches.
    pub(crate) fn tidy(&self, wait: bool) -> bool {
        if !self.registry.is_quiet() {
            return false;
        }
        let mut any = false;
        // Letting an executable go can queue its graph: look again until nothing moves.
        loop {
            let queued = std::mem::take(&mut *self.queue.lock());
            let (over, mut rest): (Vec<_>, Vec<_>) = queued.into_iter().partition(|r| r.is_over(wait));
            let mut moved = false;
            for mut remains in over {
                remains.destroy(&self.device);
                if remains.exec.is_some() || remains.graph.is_some() {
                    // The driver did not take it: its memory may go all the same, since nobody can launch it any more.
                    remains.holds.clear();
                    remains.retained.clear();
                    remains.of = None;
                    rest.push(remains);
                } else {
                    moved = true;
                }
            }
            self.queue.lock().extend(rest);
            any |= moved;
            if !moved {
                return any;
            }
        }
    }
}

/// The queues of all who share a registry: a graph of one device may hold memory of another.
pub(crate) struct Reapers<D: GraphDevice>(Mutex<Vec<Weak<Reaper<D>>>>);

impl<D: GraphDevice> Default for Reapers<D> {
    fn default() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl<D: GraphDevice> Reapers<D> {
    pub(crate) fn add(&self, reaper: &Arc<Reaper<D>>) {
        let mut all = self.0.lock();
        all.retain(|r| r.strong_count() > 0);
        all.push(Arc::downgrade(reaper));
    }

    /// As [`Reaper::tidy`], for all of them.
    pub(crate) fn tidy(&self, wait: bool) -> bool {
        let all: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        all.iter().filter(|reaper| reaper.tidy(wait)).count() > 0
    }
}

/// Gives what may go the chance to, once something was dropped: the last field of whatever queues itself.
pub(crate) struct Tidier<D: GraphDevice>(pub(crate) Arc<Reaper<D>>);

impl<D: GraphDevice> Drop for Tidier<D> {
    fn drop(&mut self) {
        self.0.tidy(false);
    }
}

/// Nobody will call again: waits for what is unfinished, and lets go of everything. A launch that cannot be waited for keeps what it
/// holds for ever, since it may be running.
impl<D: GraphDevice> Drop for Reaper<D> {
    fn drop(&mut self) {
        for mut remains in std::mem::take(self.queue.get_mut()) {
            if !remains.is_over(true) && !remains.is_over(true) {
                tracing::warn!("a launch could not be waited for; what it holds stays with the driver");
                std::mem::forget(remains);
                continue;
            }
            remains.destroy(&self.device);
            remains.destroy(&self.device);
        }
    }
}
