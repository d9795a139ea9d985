//! What the process is doing right now, as far as the policy cares: open scopes, captures marked begun, each thread's current stream.

use crate::sync::atomic::{AtomicUsize, Ordering};
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::ThreadId;

use gpupool_device::{Device, DriverResult, StreamHandle};

use crate::policy::CaptureContext;
use crate::routing::Scopes;
use crate::shared::{Attention, MARKS, Shared};
use crate::stream::StreamCore;
use crate::sync::{Mutex, Rank};

/// Scopes, marked captures, current streams.
pub(crate) struct Context {
    pub(crate) scopes: Scopes,
    /// Captures marked begun and not marked ended (PyTorch's counter).
    pub(crate) marked_captures: AtomicUsize,
    /// Each thread's current stream; only policies that ask for it look.
    pub(crate) current: Mutex<HashMap<ThreadId, StreamHandle>>,
    /// Streams that may have work: all that are not retired, and retired ones until their last mark is done. By id.
    pub(crate) streams: Mutex<Vec<Arc<StreamCore>>>,
}

impl Context {
    pub(crate) fn new(attention: &Arc<Attention>) -> Self {
        Self {
            scopes: Scopes::new(attention),
            marked_captures: AtomicUsize::new(0),
            current: Mutex::new(Rank::Leaf, HashMap::new()),
            streams: Mutex::new(Rank::Leaf, Vec::new()),
        }
    }
}

impl<D: Device> Shared<D> {
    /// Whether a use recorded for `stream` now is over when the capture under way is.
    pub(crate) fn records_in_capture(&self, stream: StreamHandle) -> DriverResult<bool> {
        if self.rules.capture_context == CaptureContext::ByCall && !self.registry.is_quiet() {
            return Ok(self.driver.capture_status(stream)?.is_capturing());
        }
        self.in_capture()
    }

    /// Changes the number of captures marked begun, unless `change` has none.
    pub(crate) fn mark_captures(&self, change: impl Fn(usize) -> Option<usize>) {
        // One at a time, so that the bit is that of the last number.
        let _current = self.context.current.lock();
        let marked = &self.context.marked_captures;
        if let Some(changed) = change(marked.load(Ordering::Acquire)) {
            marked.store(changed, Ordering::Release);
            let goes_by_marks = self.rules.capture_context == CaptureContext::CurrentStream;
            self.attention.set(MARKS, goes_by_marks && changed > 0);
        }
    }

    /// Whether the policy considers the calling thread inside a capture.
    pub(crate) fn in_capture(&self) -> DriverResult<bool> {
        match self.rules.capture_context {
            CaptureContext::ByCall => Ok(false),
            CaptureContext::AnyScope => Ok(!self.context.scopes.is_empty()),
            CaptureContext::CurrentStream => {
                if self.context.marked_captures.load(Ordering::Acquire) == 0 {
                    return Ok(false);
                }
                let thread = std::thread::current().id();
                let current = self.context.current.lock().get(&thread).copied().unwrap_or(StreamHandle::LEGACY);
                Ok(self.driver.capture_status(current)?.is_capturing())
            }
        }
    }
}
