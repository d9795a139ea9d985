//! Growth: a new segment from the driver, and memory taken from elsewhere in its place.

use std::sync::Arc;

use gpupool_device::{Device, StreamHandle};

use crate::arena::{Arena, BlockId, BlockState, LaneKind, Memory};
use crate::error::{AllocError, PoolError};
use crate::ids::{Part, PoolId};
use crate::index::TieBreak;
use crate::inner::{DEDICATED_STEP, Inner, Request, Served};
use crate::ladder::{Outcome, Step};
use crate::pool::Pool;
use crate::totals::Refusal;
use crate::units::{to_bytes, to_units};

/// A wholly free segment, noted while its arena was locked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    pub(crate) block: BlockId,
    pub(crate) segment: u32,
    pub(crate) ordinal: u64,
    pub(crate) bytes: u64,
    /// Its stream's mark that covers all work on it.
    pub(crate) since: u64,
    pub(crate) lane: u32,
}

impl<D: Device> Inner<D> {
    /// Asks the driver (or the pool's provider) for a segment and serves the request from it. Where growth would take more than the
    /// request needs and that is not to be had, what it needs is asked for.
    pub(crate) fn grow(&self, request: &Request<D>, retry: bool) -> Result<Outcome<D>, AllocError> {
        let generous = self.growth_bytes(request);
        if generous > request.segment_bytes
            && let served @ Outcome::Served(_) = self.grow_by(request, generous, retry)?
        {
            return Ok(served);
        }
        self.grow_by(request, request.segment_bytes, retry)
    }

    /// As [`grow`](Self::grow), by what the request needs and no more.
    pub(crate) fn grow_to_fit(&self, request: &Request<D>) -> Result<Outcome<D>, AllocError> {
        match self.least_growth(request) {
            least if least < request.segment_bytes => self.grow_by(request, least, true),
            _ => Ok(Outcome::Nothing),
        }
    }

    /// The smallest segment that the policy's ladder would serve a request from. Bytes.
    pub(crate) fn least_growth(&self, request: &Request<D>) -> u64 {
        if !self.shared.rules.ladder.iter().any(|rung| rung.step == Step::GrowToFit) {
            return request.segment_bytes;
        }
        request.segment_bytes.min(self.shared.segment_bytes(request.size.next_multiple_of(DEDICATED_STEP)))
    }

    fn grow_by(&self, request: &Request<D>, bytes: u64, retry: bool) -> Result<Outcome<D>, AllocError> {
        match self.shared.totals.begin_growth(bytes, retry) {
            Ok(()) => {}
            Err(Refusal::Limit) => return Ok(Outcome::Nothing),
            Err(Refusal::Rejected) => {
                let held = self.shared.totals.lock().held();
                let total = self.shared.driver.device().properties().total_memory;
                self.hooks.rejected(bytes, held, total);
                return Err(AllocError::Rejected { requested: request.requested });
            }
        }
        let pool = request.pool.as_deref();
        let Some(memory) = self.promised_memory(bytes, request.part, pool, request.core.handle)? else {
            return Ok(Outcome::Nothing);
        };
        let counters = &request.arena.counters;
        let mut state = request.arena.lock();
        if request.is_stranded(&state) {
            drop(state);
            return Err(self.refuse_stranded(request, memory));
        }
        if let Some(pool) = pool {
            pool.counters.reserved_bytes.increase(request.part, bytes as i64);
        }
        let handed = state
            .add_segment(memory, request.neutral.unwrap_or(request.lane))
            .and_then(|block| state.hand_out(block, request.size, request.requested, counters));
        let Some(handed) = handed else { return Ok(Outcome::Nothing) };
        Ok(Outcome::Served(request.served(&mut state, handed)))
    }

    /// Gives memory back that was meant for a request whose stream or pool went away meanwhile: nobody would find it there.
    fn refuse_stranded(&self, request: &Request<D>, memory: Memory) -> AllocError {
        let pool = request.pool.as_ref().map(|p| p.id);
        self.shared.give_back_or_strand(memory, request.part, pool);
        match pool {
            Some(pool) => PoolError::Unknown { pool }.into(),
            None => AllocError::RetiredStream { stream: request.core.id },
        }
    }

    /// Memory for a segment of a pool, of bytes that growth was promised; counted as the device's. `None` if there is no more.
    pub(crate) fn promised_memory(
        &self,
        bytes: u64,
        part: Part,
        pool: Option<&Pool<D>>,
        stream: StreamHandle,
    ) -> Result<Option<Memory>, AllocError> {
        match self.shared.make_memory(bytes, pool.and_then(|p| p.provider.as_ref()), stream) {
            Ok(memory) => {
                self.shared.totals.commit(bytes, part, pool.map_or(PoolId::DEFAULT, |p| p.id));
                Ok(Some(memory))
            }
            Err(e) => {
                self.shared.totals.cancel(bytes);
                if e.is_out_of_memory() { Ok(None) } else { Err(e.into()) }
            }
        }
    }

    /// What growth for a request takes: more than it needs where the workload repeats itself and growth is preceded by no trimming.
    fn growth_bytes(&self, request: &Request<D>) -> u64 {
        if !self.shared.trims_before_growth() || request.pool.is_some() {
            return request.segment_bytes;
        }
        let mut state = request.arena.lock();
        let generous = match state.repetition.covers(request.size, &request.arena.counters) {
            true => self.shared.segment_bytes(state.repetition.segment_bytes(request.segment_bytes)),
            false => request.segment_bytes,
        };
        // An oversize segment would serve none of the requests that it is for.
        if request.size < self.shared.rules.arena.max_split && generous >= self.shared.rules.arena.max_split {
            return request.segment_bytes;
        }
        generous
    }

    /// Moves a fitting idle segment of another stream of the default pool into the request's arena, once the work on it is done. With `wait`,
    /// where memory is short, it waits on the host for that.
    ///
    /// Arenas that offer nothing that may fit are left alone, and so is what others have in bins or pending; but where more would be held than
    /// ever before, that is freed first: it may be the rest of a segment.
    pub(crate) fn take_idle_segment(&self, request: &Request<D>, wait: bool) -> Result<bool, AllocError> {
        if request.pool.is_some() || (!wait && self.shared.totals.has_traded_enough(request.segment_bytes)) {
            return Ok(false);
        }
        let arenas = self.default_arenas();
        // From the next one on, so that not all look at the first ones first.
        let own = arenas.iter().position(|arena| Arc::ptr_eq(arena, &request.arena)).unwrap_or(0);
        let all = arenas[own..].iter().chain(&arenas[..own]);
        let others: Vec<_> = all.filter(|arena| !Arc::ptr_eq(arena, &request.arena)).collect();
        if self.take_offered(request, &others, wait)? {
            return Ok(true);
        }
        if !wait && !self.shared.totals.would_hold_most(request.segment_bytes) {
            return Ok(false);
        }
        Ok(self.gather_free(&request.arena) && self.take_offered(request, &others, wait)?)
    }

    /// Frees what others than this arena have pending in the default pool and may have free by now, and empties their bins. Whether there was
    /// anything. Never waits.
    pub(crate) fn gather_free(&self, arena: &Arc<Arena<D>>) -> bool {
        let mut any = false;
        for other in self.default_arenas().iter().filter(|other| !Arc::ptr_eq(other, arena)) {
            any |= other.poll(true) > 0;
            any |= other.counters.binned().0 > 0 && other.lock().flush_bins(&other.counters);
        }
        any
    }

    /// As [`take_idle_segment`](Self::take_idle_segment), of what arenas offer: of the smallest class of sizes that any has, the smallest of
    /// the first arena that has one.
    fn take_offered(&self, request: &Request<D>, others: &[&Arc<Arena<D>>], wait: bool) -> Result<bool, AllocError> {
        let Some(size) = to_units(request.size) else { return Ok(false) };
        let mut classes = others.iter().fold(0, |all, arena| all | arena.offers.at_least(request.part, size));
        while classes != 0 {
            let class = classes.trailing_zeros();
            classes &= classes - 1;
            for arena in others.iter().filter(|arena| arena.offers.has(request.part, class)) {
                let mut found: Vec<Idle> = {
                    let state = arena.lock();
                    let segments = state.idle_segments.of_class(request.part, class);
                    let idle = segments.filter_map(|segment| state.idle_in(segment));
                    idle.filter(|idle| self.may_serve(request, idle.bytes)).collect()
                };
                found.sort_by_key(|idle| (idle.bytes, idle.ordinal));
                for idle in found {
                    if self.take_this_idle(request, arena, &idle, wait)? {
                        return Ok(true);
                    }
                }
            }
        }
        Ok(false)
    }

    /// As [`take_idle_segment`](Self::take_idle_segment), this one, if it still is idle and the work on it is done.
    fn take_this_idle(
        &self,
        request: &Request<D>,
        arena: &Arena<D>,
        idle: &Idle,
        wait: bool,
    ) -> Result<bool, AllocError> {
        if !arena.is_quiescent(idle, wait)? {
            return Ok(false);
        }
        let memory = {
            let mut state = arena.lock();
            if !state.still_idle(idle) {
                return Ok(false);
            }
            state.detach(idle.block).map(|s| s.memory)
        };
        let Some(memory) = memory else { return Ok(false) };
        let mut state = request.arena.lock();
        if request.is_stranded(&state) {
            drop(state);
            return Err(self.refuse_stranded(request, memory));
        }
        let bytes = memory.bytes;
        state.attach(memory, request.lane);
        drop(state);
        self.shared.totals.traded(bytes);
        Ok(true)
    }

    /// Whether an idle segment may be cut up for a request: oversize ones are kept for oversize requests.
    fn may_serve(&self, request: &Request<D>, bytes: u64) -> bool {
        let rules = &self.shared.rules.arena;
        bytes >= request.size
            && if request.size < rules.max_split {
                bytes < rules.max_split
            } else {
                bytes < request.size.saturating_add(rules.non_split_slack)
            }
    }

    /// Serves the request from a free block of a stream that was retired and whose last work is done.
    pub(crate) fn take_from_retired(&self, request: &Request<D>) -> Option<Served<D>> {
        if request.pool.is_some() {
            return None;
        }
        for arena in self.default_arenas().iter().filter(|arena| arena.offers.are_of_retired()) {
            let lanes: Vec<_> = {
                let state = arena.lock();
                let retired = state.lanes.iter().enumerate().filter(|(_, l)| {
                    l.in_use && l.part == request.part && l.core.is_retired() && arena.is_default_slot(l.slot)
                });
                retired.map(|(at, l)| (at as u32, Arc::clone(&l.core))).collect()
            };
            for (lane, core) in lanes {
                core.poll(&self.shared.driver);
                if !core.is_done(core.open_mark()) {
                    continue;
                }
                let mut state = arena.lock();
                state.flush_bins(&arena.counters);
                let Some(block) = state.take_uncut(lane, request.size, &arena.counters) else { continue };
                let handed = state.hand_out(block, request.size, request.requested, &arena.counters)?;
                state.record_owner(handed.block(), &request.core);
                request.note(&state, &handed);
                drop(state);
                return Some(Served { arena: Arc::clone(arena), handed });
            }
        }
        None
    }

    /// Serves a default request from the free blocks of pools that opted in.
    pub(crate) fn take_from_overflow(&self, request: &Request<D>) -> Option<Served<D>> {
        if request.pool.is_some() {
            return None;
        }
        let ages = self.shared.counts_ages();
        for pool in self.pools.overflow(self.shared.rules.overflow_from_held) {
            let counters = &pool.arena.counters;
            let mut state = pool.arena.lock();
            // It may have been forgotten since it was listed, and its slot be another pool's.
            if !state.slots[pool.slot as usize].is_of(pool.id) {
                continue;
            }
            let lane = state.lanes_of(pool.slot, &request.core, LaneKind::Stream) + request.part.index() as u32;
            state.uncut = true;
            let taken = state.take(lane, request.size, ages, counters);
            state.uncut = false;
            let Some(block) = taken else { continue };
            let handed = state.hand_out(block, request.size, request.requested, counters)?;
            request.note(&state, &handed);
            drop(state);
            return Some(Served { arena: Arc::clone(&pool.arena), handed });
        }
        None
    }
}

impl<D: Device> Arena<D> {
    /// Whether a pool slot is the default pool's.
    pub(crate) fn is_default_slot(&self, slot: u32) -> bool {
        // Slot 0 of an arena of the default pool is the default pool; arenas of private pools have no such slot.
        slot == 0 && self.holds_default
    }

    /// The wholly free segments of the lanes that `pick` accepts, in index order. Bins are emptied first.
    pub(crate) fn idle_segments(&self, pick: impl Fn(&crate::arena::Lane) -> bool) -> Vec<Idle> {
        let mut state = self.lock();
        state.flush_bins(&self.counters);
        state.idle_in_order(pick)
    }

    /// Whether the device is done with a wholly free segment. Without `wait` only looks, having recorded an event if there is none.
    pub(crate) fn is_quiescent(&self, idle: &Idle, wait: bool) -> Result<bool, AllocError> {
        let core = Arc::clone(&self.lock().lanes[idle.lane as usize].core);
        let driver = &self.shared.driver;
        if core.is_done(idle.since) {
            return Ok(true);
        }
        if !core.is_closed(idle.since) {
            self.shared.mark_unless_capturing(&core)?;
            if !core.is_closed(idle.since) {
                // Capturing: nothing can be learned before it ends.
                return Ok(false);
            }
        }
        core.poll(driver);
        if !core.is_done(idle.since) && wait {
            core.wait(driver, idle.since)?;
        }
        Ok(core.is_done(idle.since))
    }
}

impl crate::arena::ArenaState {
    /// The wholly free segments of some lanes, with their ties. O(idle segments), O(segments) where they are not listed.
    fn idle(&self, pick: impl Fn(&crate::arena::Lane) -> bool) -> impl Iterator<Item = (u64, Idle)> {
        let unlisted = (!self.rules.trades).then(|| self.segments.iter().map(|(at, _)| at));
        self.idle_segments.segments().chain(unlisted.into_iter().flatten()).filter_map(move |at| {
            let idle = self.idle_in(at)?;
            pick(&self.lanes[idle.lane as usize]).then(|| (self.segments.tie(at), idle))
        })
    }

    /// Bytes in the wholly free segments of some lanes. O(idle segments).
    pub(crate) fn idle_bytes(&self, pick: impl Fn(&crate::arena::Lane) -> bool) -> u64 {
        self.idle(pick).map(|(_, idle)| idle.bytes).sum()
    }

    /// The wholly free segments of some lanes, lane by lane and in index order in each. O(n log n) in idle segments.
    pub(crate) fn idle_in_order(&self, pick: impl Fn(&crate::arena::Lane) -> bool) -> Vec<Idle> {
        let mut out: Vec<_> = self.idle(pick).collect();
        out.sort_unstable_by_key(|(tie, i)| (i.lane, i.bytes, *tie));
        out.into_iter().map(|(_, idle)| idle).collect()
    }

    /// The segment that a block is all of, if it is free. O(1).
    pub(crate) fn idle_of(&self, id: BlockId) -> Option<Idle> {
        self.idle_in(self.blocks[id].segment)
    }

    /// A segment, if it is one free block. O(1).
    fn idle_in(&self, at: u32) -> Option<Idle> {
        let segment = self.segments.get(at)?;
        let block = &self.blocks[segment.first];
        let idle = block.state == BlockState::Free && !block.is_split();
        idle.then(|| Idle {
            block: segment.first,
            segment: at,
            ordinal: segment.memory.ordinal,
            bytes: to_bytes(block.size),
            since: segment.idle_since,
            lane: block.lane,
        })
    }

    /// Whether what was noted still holds: nobody has used the segment since.
    pub(crate) fn still_idle(&self, idle: &Idle) -> bool {
        let Some(segment) = self.segments.get(idle.segment) else { return false };
        segment.memory.ordinal == idle.ordinal
            && segment.idle_since == idle.since
            && segment.first == idle.block
            && self.blocks[idle.block].state == BlockState::Free
            && !self.blocks[idle.block].is_split()
    }
}
