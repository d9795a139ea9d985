//! From "freed" to "free": deferred frees, events, and what happens to blocks whose recorded uses are over.

use std::sync::Arc;

use gpupool_device::{Device, DriverResult};

use crate::arena::{Arena, ArenaState, BlockId, BlockKey, LaneKind, NONE};
use crate::error::{AllocError, FreeError};
use crate::history::Action;
use crate::ids::StreamId;
use crate::inner::Inner;
use crate::shared::{POLLS, RECORDS, Shared};
use crate::stream::StreamCore;

/// Pending blocks that share an event at most.
pub(crate) const SHARE_BLOCKS: usize = 64;

impl<D: Device> Shared<D> {
    /// Records an event on `core`, unless it is capturing: an event recorded there would be part of the capture; or unless it is another
    /// thread's own default stream, which has no name here. Returns whether an event covers what was submitted so far; a retired
    /// stream's last one does.
    pub(crate) fn mark_unless_capturing(&self, core: &StreamCore) -> DriverResult<bool> {
        if core.is_retired() {
            return Ok(true);
        }
        if !core.is_reachable() {
            return Ok(false);
        }
        core.mark_outside_captures(&self.driver)
    }
}

impl<D: Device> Arena<D> {
    /// Frees a block: at once when nothing but its own stream used it, else once the recorded streams are done with it.
    ///
    /// O(1) or O(log n); events are recorded with no lock held.
    pub(crate) fn free(self: &Arc<Self>, key: BlockKey) -> Result<(), FreeError> {
        let id = key.id();
        let attention = self.shared.attention.get();
        let caller = if attention & RECORDS != 0 { self.shared.history.caller() } else { None };
        let in_capture_lane = {
            let mut state = self.lock();
            if state.blocks.live(key).is_none() {
                return Err(FreeError::NotLive { address: gpupool_device::Address::NULL });
            }
            if self.shared.config.quarantine() {
                let streams = self.shared.context.streams.lock().clone();
                streams.iter().for_each(|core| state.record_use(id, core, false));
            }
            if state.blocks[id].uses == NONE {
                if attention & RECORDS != 0 {
                    state.note_freed(id, &[Action::FreeRequested, Action::FreeCompleted], caller.as_ref());
                }
                state.free_now(id, &self.counters);
                if self.shared.rules.stream_ordered {
                    self.return_freed(state, id);
                }
                return Ok(());
            }
            state.note_freed(id, &[Action::FreeRequested], caller.as_ref());
            state.request_free(id, &self.counters);
            state.lanes[state.blocks[id].lane as usize].kind == LaneKind::Capture
        };
        // A capture whose state cannot be asked may be under way: deferring is always safe.
        if in_capture_lane || self.shared.in_capture().unwrap_or(true) {
            self.defer(id);
        } else {
            self.make_pending(id);
        }
        Ok(())
    }

    /// Keeps a freed block until the capture is over, or its graph proves that the recorded uses are.
    fn defer(&self, id: BlockId) {
        let markers = match self.shared.config.capture_reuse() {
            true => self.markers(id).unwrap_or_default(),
            false => Vec::new(),
        };
        let mut state = self.lock();
        let uses = state.blocks[id].uses;
        if let Some(uses) = state.uses.get_mut(uses) {
            uses.markers = markers;
        }
        state.deferred.push(id);
        self.note_waiting(&state);
    }

    /// Notes, where requests poll, whether there is anything to poll for. Their policies have one arena, so its lock is that of the bit too.
    fn note_waiting(&self, state: &ArenaState) {
        let (waits, noted) = (state.any_waiting(), self.shared.attention.get() & POLLS != 0);
        if self.shared.rules.poll_each_allocation && waits != noted {
            self.shared.attention.set(POLLS, waits);
        }
    }

    /// How many blocks that wait for a stream share an event.
    fn share(&self) -> usize {
        if self.shared.rules.arena.event_each_free { 0 } else { SHARE_BLOCKS }
    }

    /// Queues a freed block behind the streams recorded for it.
    pub(crate) fn make_pending(self: &Arc<Self>, id: BlockId) {
        let to_mark = {
            let mut state = self.lock();
            let to_mark = state.make_pending(id, self.share(), &self.counters);
            self.note_waiting(&state);
            to_mark
        };
        self.mark_for_pending(&to_mark);
    }

    /// Records events on streams that freed blocks wait for.
    pub(crate) fn mark_for_pending(&self, streams: &[Arc<StreamCore>]) {
        for core in streams {
            let result = if self.shared.rules.arena.event_each_free {
                core.mark(&self.shared.driver).map(|()| true)
            } else {
                self.shared.mark_unless_capturing(core)
            };
            if let Err(e) = result {
                tracing::warn!(stream = ?core, error = %e, "no event could be recorded for a freed block; it waits for the next one");
            }
        }
    }

    /// Deferred frees become pending ones: what was recorded inside a capture is over with it.
    pub(crate) fn flush_deferred(self: &Arc<Self>, only: impl Fn(u32) -> bool) {
        let ready: Vec<BlockId> = {
            let mut guard = self.lock();
            let state = &mut *guard;
            let (blocks, lanes) = (&state.blocks, &state.lanes);
            // What was freed inside a capture that the registry knows is settled by that capture's end.
            let (ready, rest) = state.deferred.iter().partition(|id| {
                let lane = &lanes[blocks[**id].lane as usize];
                lane.kind != LaneKind::Capture && only(lane.slot)
            });
            state.deferred = rest;
            for id in &ready {
                state.forget_captured_uses(*id);
            }
            ready
        };
        ready.into_iter().for_each(|id| self.make_pending(id));
    }

    /// The streams that pending blocks wait for. No lock where there are none.
    fn awaited(&self) -> Vec<(Arc<StreamCore>, u64)> {
        if !self.counters.any_pending() {
            return Vec::new();
        }
        let state = self.lock();
        state.pending.iter().filter_map(|q| Some((Arc::clone(&q.core), q.blocks.back()?.0))).collect()
    }

    /// Frees the blocks whose recorded uses are over by now; returns how many. Never waits. A query for each stream that blocks here wait for;
    /// no lock where none do. `mark` says whether events are recorded for what has none yet, at most one a stream: for somebody else's miss too,
    /// since a stream that went quiet has none of its own that would notice.
    pub(crate) fn poll(&self, mark: bool) -> usize {
        let awaited = self.awaited();
        if awaited.is_empty() {
            return 0;
        }
        for (core, newest) in &awaited {
            if mark
                && !core.is_closed(*newest)
                && let Err(e) = self.shared.mark_unless_capturing(core)
            {
                tracing::warn!(stream = ?core, error = %e, "no event could be recorded");
            }
            core.poll(&self.shared.driver);
        }
        self.settle()
    }

    /// Frees the blocks whose recorded uses are over; returns how many.
    fn settle(&self) -> usize {
        let mut state = self.lock();
        let freed = state.settle_done(&self.counters);
        self.note_waiting(&state);
        if freed > 0 && self.shared.rules.stream_ordered {
            let of_graphs = state.take_graph_memory();
            drop(state);
            self.forget_graph_memory(of_graphs);
            self.return_all_in_order();
        }
        freed
    }

    /// Waits on the host until every pending block is free, or the first error. Streams that are capturing are passed over, and so are
    /// other threads' own default streams of whose work no event tells.
    pub(crate) fn wait_for_pending(&self) -> DriverResult<usize> {
        let mut freed = 0;
        for (core, newest) in self.awaited() {
            let nameless = !core.is_reachable() && !core.is_closed(newest);
            let passed_over = nameless
                || (!self.shared.rules.arena.event_each_free
                    && !core.is_retired()
                    && core.is_reachable()
                    && self.shared.driver.capture_status(core.handle)?.is_capturing());
            if !passed_over {
                core.wait(&self.shared.driver, newest)?;
                freed += self.settle();
            }
        }
        Ok(freed)
    }

    /// Makes `core` wait, on the device, for every stream that this arena's blocks of `core` still wait for, and frees them: what
    /// `core` does with them from now on comes after those uses. Blocks of other streams are left as they are. Returns how many.
    pub(crate) fn wait_on_device(&self, core: &Arc<StreamCore>) -> DriverResult<usize> {
        let driver = &self.shared.driver;
        if !core.is_reachable() || driver.capture_status(core.handle)?.is_capturing() {
            return Ok(0);
        }
        let awaited = self.lock().awaited_by(core);
        let mut covered: Vec<(StreamId, u64)> = Vec::new();
        for (other, newest) in awaited {
            if other.id == core.id {
                // What was done with a block on the stream that gets it comes before by itself.
                covered.push((other.id, newest));
                continue;
            }
            if !other.is_closed(newest) {
                self.shared.mark_unless_capturing(&other)?;
            }
            other.poll(driver);
            if let Some((mark, event)) = other.newest_event()
                && mark >= newest
            {
                driver.stream_wait_event(core.handle, event)?;
                covered.push((other.id, mark));
            }
        }
        let mut state = self.lock();
        let done = state.settle_done(&self.counters);
        Ok(done + state.settle_for(core, &covered, &self.counters))
    }
}

impl<D: Device> Inner<D> {
    /// What PyTorch does at every allocation outside a capture: deferred frees, then completed events.
    pub(crate) fn poll_now(&self, arena: &Arc<Arena<D>>) -> Result<(), AllocError> {
        let (deferred, pending) = {
            let state = arena.lock();
            arena.note_waiting(&state);
            (!state.deferred.is_empty(), state.any_pending())
        };
        if deferred {
            arena.flush_deferred(|_| true);
        }
        if deferred || pending {
            arena.poll(false);
        }
        Ok(())
    }
}
