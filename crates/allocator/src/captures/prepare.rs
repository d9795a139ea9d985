//! A pool before and after a capture.

use std::sync::Arc;

use gpupool_device::Device;

use crate::arena::{Arena, BlockId, LaneKind};
use crate::error::{AllocError, PoolError};
use crate::ids::{Part, PoolId};
use crate::inner::{Inner, Request, Served};
use crate::pool::Pool;
use crate::totals::Refusal;

impl<D: Device> Arena<D> {
    /// A capture into a pool slot is over: deferred frees are settled (what was recorded inside the capture is over with it), and what
    /// is free belongs to no stream from now on. O(blocks of the pool).
    pub(crate) fn end_capture(self: &Arc<Self>, slot: u32) {
        let still_used: Vec<BlockId> = {
            let mut guard = self.lock();
            let state = &mut *guard;
            let (blocks, lanes) = (&state.blocks, &state.lanes);
            let (mine, others) = state.deferred.iter().partition(|id| {
                let lane = &lanes[blocks[**id].lane as usize];
                lane.slot == slot && lane.kind == LaneKind::Capture
            });
            state.deferred = others;
            let mine: Vec<BlockId> = mine;
            let mut still_used = Vec::new();
            for id in mine {
                if state.forget_captured_uses(id) {
                    state.complete_free(id, &self.counters);
                } else {
                    still_used.push(id);
                }
            }
            state.neutralise(slot, &self.shared.neutral, &self.counters, |l| l.kind == LaneKind::Capture);
            let of_graph = if self.shared.rules.stream_ordered { state.take_graph_memory() } else { Vec::new() };
            drop(guard);
            self.forget_graph_memory(of_graph);
            still_used
        };
        still_used.into_iter().for_each(|id| self.make_pending(id));
    }
}

impl<D: Device> Inner<D> {
    /// Makes what eager work has freed in a pool available to captures, once the streams that used it are done with it. With `wait` it
    /// waits on the host for that, so that a capture finds the same memory in every run.
    pub(crate) fn prepare_pool(&self, pool: &Pool<D>, wait: bool) -> Result<(), AllocError> {
        let arena = &pool.arena;
        if wait {
            arena.wait_for_pending()?;
        } else {
            arena.poll(true);
        }
        let eager: Vec<_> = {
            let state = arena.lock();
            let lanes = state.lanes.iter().filter(|l| l.in_use && l.slot == pool.slot && l.kind == LaneKind::Stream);
            lanes.map(|l| Arc::clone(&l.core)).collect()
        };
        for core in eager {
            // Whoever frees eagerly meanwhile makes us look again; it is not worth more than a few looks.
            for _ in 0..4 {
                let (mark, seen) = {
                    let _state = arena.lock();
                    (core.open_mark(), pool.version())
                };
                if !core.is_done(mark) && !core.is_closed(mark) {
                    self.shared.mark_unless_capturing(&core)?;
                }
                core.poll(&self.shared.driver);
                if wait && core.is_closed(mark) {
                    core.wait(&self.shared.driver, mark)?;
                }
                let mut state = arena.lock();
                if !core.is_done(mark) {
                    break;
                }
                if pool.version() == seen {
                    let pick = |l: &crate::arena::Lane| l.kind == LaneKind::Stream && l.core.id == core.id;
                    state.neutralise(pool.slot, &self.shared.neutral, &arena.counters, pick);
                    break;
                }
            }
        }
        Ok(())
    }

    /// As [`prepare_pool`](Self::prepare_pool), for a pool of both captures and eager work that is about to give its memory back: a
    /// segment's free parts join only when they are of one lane.
    pub(crate) fn join_eager(&self, pool: &Pool<D>, wait: bool) -> Result<(), AllocError> {
        let mixed = {
            let state = pool.arena.lock();
            let has = |kind| state.lanes.iter().any(|l| l.in_use && l.slot == pool.slot && l.kind == kind);
            has(LaneKind::Neutral) && has(LaneKind::Stream)
        };
        if mixed && !self.shared.rules.streams_by_handle { self.prepare_pool(pool, wait) } else { Ok(()) }
    }

    /// Adds one segment of at least `bytes` to a pool ahead of a capture. Returns its bytes.
    pub(crate) fn reserve(&self, id: PoolId, part: Part, bytes: u64) -> Result<u64, AllocError> {
        let pool = self.pools.get(id)?;
        let whole =
            bytes.max(1).checked_next_multiple_of(2 << 20).ok_or(AllocError::CannotReserve { pool: id, bytes })?;
        let bytes = self.shared.segment_bytes(whole);
        match self.shared.totals.begin_growth(bytes, false) {
            Ok(()) => {}
            Err(Refusal::Rejected) => return Err(AllocError::Rejected { requested: bytes }),
            Err(Refusal::Limit) => return Err(AllocError::CannotReserve { pool: id, bytes }),
        }
        let memory = self
            .promised_memory(bytes, part, Some(&pool), self.shared.neutral.handle)?
            .ok_or(AllocError::CannotReserve { pool: id, bytes })?;
        let mut state = pool.arena.lock();
        // It may have been forgotten while the driver was asked.
        if !state.slots[pool.slot as usize].is_of(id) {
            drop(state);
            self.shared.give_back_or_strand(memory, part, Some(id));
            return Err(PoolError::Unknown { pool: id }.into());
        }
        pool.counters.reserved_bytes.increase(part, bytes as i64);
        let lane = state.lanes_of(pool.slot, &self.shared.neutral, LaneKind::Neutral) + part.index() as u32;
        state.attach(memory, lane);
        state.slots[pool.slot as usize].sized_ahead |= part == Part::Large;
        Ok(bytes)
    }

    /// Serves a small request of a capture from the large memory of a pool that was sized ahead: a pool that has what its captures need
    /// should not grow because some of it is asked for in small pieces.
    pub(crate) fn take_reserved(&self, request: &Request<D>) -> Option<Served<D>> {
        let neutral = request.neutral.filter(|_| request.part == Part::Small)?;
        let (lane, neutral) = (request.lane + 1, neutral + 1);
        let counters = &request.arena.counters;
        let mut state = request.arena.lock();
        let slot = state.lanes[lane as usize].slot as usize;
        if !state.slots[slot].sized_ahead {
            return None;
        }
        let block = state.take_from(lane, Some(neutral), request.size, self.shared.counts_ages(), counters)?;
        let handed = state.hand_out(block, request.size, request.requested, counters)?;
        Some(request.served_in(&mut state, handed, lane))
    }
}
