//! Giving memory back to the driver.
//!
//! A segment is given back when it is wholly free. Plain memory may go at once, since its free waits for the device; a handle only
//! once the device is done with it, since an unmap waits for nothing (fault catalogue, 18). A segment that the driver does not take
//! is put back.

use std::sync::Arc;

use gpupool_device::{Device, DriverError, DriverResult};

use crate::arena::{Arena, Backing, Lane, Memory};
use crate::error::AllocError;
use crate::growth::Idle;
use crate::ids::{Part, PoolId};
use crate::inner::{Inner, Request};
use crate::pool::Pool;
use crate::units::to_units;

/// What emptying the cache did, and what it did not do and why. All sizes in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Trimmed {
    /// Given back to the driver.
    pub released_bytes: u64,
    /// Segments given back.
    pub released_segments: u64,
    /// What the driver's own pool gave back to the device, under the policy `stream-ordered`: freed blocks are that pool's already.
    pub driver_pool_bytes: u64,
    /// Wholly free, but the device may still be using it.
    pub busy_bytes: u64,
    /// Wholly free, but in private pools that are in use: their addresses may be baked into graphs.
    pub held_by_pools_bytes: u64,
    /// Wholly free, but a capture under way forbids giving it back.
    pub held_by_capture_bytes: u64,
    /// Wholly free, but the driver did not take it; it stays cached.
    pub refused_bytes: u64,
    /// The first error of the driver, if it refused any.
    pub refused: Option<DriverError>,
}

/// What giving memory back may wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Patience {
    /// Nothing: what the device may still use stays.
    Nothing,
    /// The driver: plain memory goes at once, and its free waits; a handle that may be in use stays.
    Driver,
    /// Everything.
    Everything,
}

impl Patience {
    fn to_wait(wait: bool) -> Self {
        if wait { Self::Everything } else { Self::Nothing }
    }
}

impl<D: Device> Arena<D> {
    /// Gives wholly free segments back, in the order given.
    pub(crate) fn release(&self, idle: &[Idle], patience: Patience, out: &mut Trimmed) -> Result<(), AllocError> {
        self.release_if(idle, patience, out, || true)
    }

    /// As [`release`](Self::release), as long as `may` says so: it is asked under the arena's lock, just before each segment goes.
    pub(crate) fn release_if(
        &self,
        idle: &[Idle],
        patience: Patience,
        out: &mut Trimmed,
        may: impl Fn() -> bool,
    ) -> Result<(), AllocError> {
        for idle in idle {
            let needs_quiescence = {
                let state = self.lock();
                let Some(segment) = state.segments.get(idle.segment) else { continue };
                let waits_itself = !matches!(segment.memory.backing, Backing::Handle(_) | Backing::Ordered { .. });
                !waits_itself || patience == Patience::Nothing
            };
            if needs_quiescence && !self.is_quiescent(idle, patience == Patience::Everything)? {
                out.busy_bytes += idle.bytes;
                continue;
            }
            self.hand_back(idle, out, &may, |memory, part, pool| self.shared.give_back(memory, part, pool));
        }
        Ok(())
    }

    /// Takes a segment out, if it is still wholly free and `may` says so, and gives its memory back with `give`; where that fails it is put
    /// back.
    pub(crate) fn hand_back(
        &self,
        idle: &Idle,
        out: &mut Trimmed,
        may: impl Fn() -> bool,
        give: impl FnOnce(&Memory, Part, PoolId) -> DriverResult<()>,
    ) {
        let (segment, pool, counters) = {
            let mut state = self.lock();
            if !state.still_idle(idle) || !may() {
                return;
            }
            let Some(segment) = state.detach(idle.block) else { return };
            let slot = &state.slots[segment.slot as usize];
            (segment, slot.pool, slot.counters.clone())
        };
        let part = segment.part;
        match give(&segment.memory, part, pool) {
            Ok(()) => {
                out.released_bytes += idle.bytes;
                out.released_segments += 1;
                if let Some(counters) = counters {
                    let _state = self.lock();
                    counters.reserved_bytes.decrease(part, idle.bytes as i64);
                }
            }
            Err(e) => {
                tracing::warn!(address = %segment.memory.base, bytes = idle.bytes, error = %e, "the driver did not take a segment back");
                let mut state = self.lock();
                if state.lanes[segment.lane as usize].in_use {
                    state.attach(segment.memory, segment.lane);
                } else {
                    // Its stream or pool was forgotten while it was out: nobody would find it here.
                    drop(state);
                    self.shared.give_back_or_strand(segment.memory, part, Some(pool));
                }
                out.refused_bytes += idle.bytes;
                out.refused.get_or_insert(e);
            }
        }
    }

    fn release_lanes(
        &self,
        pick: impl Fn(&Lane) -> bool,
        patience: Patience,
        out: &mut Trimmed,
    ) -> Result<(), AllocError> {
        let idle = self.idle_segments(&pick);
        self.release(&idle, patience, out)?;
        self.give_back_pages(pick, patience, u64::MAX, out, || true)
    }

    /// As [`idle_segments`](Self::idle_segments), for one part of one pool and with lanes in the order of their handles.
    fn idle_of_part(&self, slot: u32, part: Part) -> Vec<Idle> {
        let mut state = self.lock();
        state.flush_bins(&self.counters);
        if self.shared.rules.arena.trades && !self.offers.any() {
            return Vec::new();
        }
        let mut idle = state.idle_in_order(|l| l.slot == slot && l.part == part);
        if idle.len() > 1 {
            let lanes = state.lanes_in_order(slot, part);
            idle.sort_by_key(|i| lanes.iter().position(|l| *l == i.lane));
        }
        idle
    }
}

impl<D: Device> Inner<D> {
    /// Garbage collection, when a threshold and a limit are set: gives back free segments of the default pool's large parts that
    /// are at least of average age, until the bytes held are under the threshold or nothing is left. Returns bytes.
    pub(crate) fn collect_garbage(&self) -> Result<u64, AllocError> {
        let Some(threshold) = self.shared.config.garbage_collection_threshold() else { return Ok(0) };
        let (held, limit) = {
            let totals = self.shared.totals.lock();
            (totals.held(), totals.limit)
        };
        let Some(limit) = limit else { return Ok(0) };
        let threshold = (threshold * limit.bytes as f64).floor() as u64;
        if held <= threshold {
            return Ok(0);
        }
        let target = held - threshold;
        let mut paged = Trimmed::default();
        for arena in self.default_arenas().iter() {
            let large = |lane: &Lane| arena.is_default_slot(lane.slot) && lane.part == Part::Large;
            let most = target.saturating_sub(paged.released_bytes);
            arena.give_back_pages(large, Patience::Nothing, most, &mut paged, || true)?;
        }
        if paged.released_bytes > 0 {
            return Ok(paged.released_bytes);
        }
        let mut candidates: Vec<(Arc<Arena<D>>, Idle, u64)> = Vec::new();
        for arena in self.default_arenas().iter() {
            for idle in arena.idle_of_part(0, Part::Large) {
                let state = arena.lock();
                let age = (state.slots[0].age[Part::Large.index()] as u32).wrapping_sub(state.blocks[idle.block].age);
                drop(state);
                candidates.push((Arc::clone(arena), idle, u64::from(age)));
            }
        }
        let patience = if self.shared.rules.collects_busy_memory { Patience::Driver } else { Patience::Nothing };
        let mut out = Trimmed::default();
        let mut sum: u64 = candidates.iter().map(|(.., age)| age).sum();
        loop {
            if candidates.is_empty() || out.released_bytes >= target {
                return Ok(out.released_bytes);
            }
            let (cut, before) = (sum as f64 / candidates.len() as f64, out.released_segments);
            let mut kept = Vec::new();
            for (arena, idle, age) in candidates {
                let released = out.released_segments;
                if age as f64 >= cut {
                    arena.release(&[idle], patience, &mut out)?;
                }
                if out.released_segments > released {
                    sum -= age;
                } else {
                    kept.push((arena, idle, age));
                }
            }
            candidates = kept;
            if out.released_segments == before {
                return Ok(out.released_bytes);
            }
        }
    }

    /// Where giving back waits for nothing: idle segments go before growth beyond the previous peak (or the high-water mark), so that
    /// growth takes their place. Returns bytes.
    pub(crate) fn trim_before_growth(&self, request: &Request<D>) -> Result<u64, AllocError> {
        let config = &self.shared.config;
        let decayed = if config.idle_decay().is_some() { self.decay()?.released_bytes } else { 0 };
        let (held, peak) = {
            let totals = self.shared.totals.lock();
            (totals.held(), totals.peak_held())
        };
        let after = held.saturating_add(request.segment_bytes);
        let counters = &request.arena.counters;
        let trims =
            self.shared.trims_before_growth() && !request.arena.lock().repetition.covers(request.size, counters);
        let trims = trims && !self.shared.totals.has_traded_enough(request.segment_bytes);
        let over_peak = if trims { after.saturating_sub(peak) } else { 0 };
        let over_mark = config.trim_above().map_or(0, |mark| after.saturating_sub(mark));
        let excess = over_peak.max(over_mark);
        if excess == 0 {
            return Ok(decayed);
        }
        // A request of the default pool has done so before.
        if request.pool.is_some() {
            self.gather_free(&request.arena);
        }
        let mut found: Vec<(Arc<Arena<D>>, Idle)> = Vec::new();
        for arena in self.default_arenas().iter().filter(|arena| arena.offers.any()) {
            let idle = arena.lock().idle_in_order(|lane| arena.is_default_slot(lane.slot));
            found.extend(idle.into_iter().map(|i| (Arc::clone(arena), i)));
        }
        for pool in self.pools.freeable() {
            pool.arena.poll(true);
            let idle = pool.arena.idle_segments(|lane| lane.slot == pool.slot);
            found.extend(idle.into_iter().map(|i| (Arc::clone(&pool.arena), i)));
        }
        // One that covers all of it, the smallest such; else the largest ones first: fewest driver calls.
        found.sort_by_key(|(_, i)| (i.bytes, i.ordinal));
        let covering = found.iter().position(|(_, i)| i.bytes >= excess);
        let order: Vec<usize> = match covering {
            Some(first) => (first..found.len()).chain((0..first).rev()).collect(),
            None => (0..found.len()).rev().collect(),
        };
        let mut out = Trimmed::default();
        for at in order {
            if out.released_bytes >= excess {
                break;
            }
            let (arena, idle) = &found[at];
            arena.release(&[*idle], Patience::Nothing, &mut out)?;
        }
        self.forget_empty_pools();
        Ok(decayed + out.released_bytes)
    }

    /// Gives idle segments back, one group at a time until one yields anything: of the request's own pool and stream, of other
    /// streams, of private pools that no capture used, of pools that nobody uses. Returns bytes.
    pub(crate) fn release_idle(&self, request: Option<&Request<D>>, wait: bool) -> Result<u64, AllocError> {
        let patience = Patience::to_wait(wait);
        self.settle_leaving(wait)?;
        for arena in self.arenas() {
            arena.poll(true);
        }
        let mut out = Trimmed::default();
        let default_or_free = |arena: &Arena<D>, lane: &Lane, pools: &[Arc<Pool<D>>]| {
            arena.is_default_slot(lane.slot)
                || pools.iter().any(|p| std::ptr::eq(&*p.arena, arena) && p.slot == lane.slot)
        };
        let never_captured = self.pools.never_captured();
        if let Some(request) = request {
            let arena = &request.arena;
            arena.release_lanes(|lane| default_or_free(arena, lane, &never_captured), patience, &mut out)?;
        }
        if out.released_bytes == 0 {
            for arena in self.default_arenas().iter() {
                arena.release_lanes(|lane| arena.is_default_slot(lane.slot), patience, &mut out)?;
            }
        }
        if out.released_bytes == 0 {
            for pool in &never_captured {
                let idle = pool.arena.idle_segments(|lane| lane.slot == pool.slot);
                let may = || !self.pools.is_captured(pool.id);
                pool.arena.release_if(&idle, patience, &mut out, may)?;
                pool.arena.give_back_pages(|lane| lane.slot == pool.slot, patience, u64::MAX, &mut out, may)?;
            }
        }
        if out.released_bytes == 0 {
            for pool in self.pools.freeable() {
                self.dissolve(&pool);
                self.join_eager(&pool, wait)?;
                let idle = pool.arena.idle_segments(|lane| lane.slot == pool.slot);
                let may = || self.pools.is_freeable(pool.id);
                pool.arena.release_if(&idle, patience, &mut out, may)?;
                pool.arena.give_back_pages(|lane| lane.slot == pool.slot, patience, u64::MAX, &mut out, may)?;
            }
            self.forget_empty_pools();
        }
        Ok(out.released_bytes)
    }

    /// PyTorch's `release_available`: with a split limit, gives back free oversize blocks of the request's lane, the one that is large
    /// enough or several smaller ones. Returns whether they amount to the request.
    pub(crate) fn release_oversize(&self, request: &Request<D>) -> Result<bool, AllocError> {
        let Some(max_split) = self.shared.config.max_split_size() else { return Ok(false) };
        let key = request.size.max(max_split);
        let (enough, smaller) = {
            let state = request.arena.lock();
            let lane = request.lane;
            let mut idle = state.idle_in_order(|l| l.in_use);
            idle.retain(|i| i.lane == lane);
            let Some(wanted) = key.checked_next_multiple_of(512).and_then(to_units) else { return Ok(false) };
            let first = idle.partition_point(|i| i.bytes < u64::from(wanted) * 512);
            let smaller: Vec<Idle> = idle.drain(..first).rev().collect();
            (idle.first().copied(), smaller)
        };
        let mut out = Trimmed::default();
        if let Some(idle) = enough {
            request.arena.release(&[idle], Patience::Driver, &mut out)?;
            return Ok(out.released_bytes > 0);
        }
        for idle in smaller {
            if out.released_bytes >= key || idle.bytes < max_split {
                break;
            }
            request.arena.release(&[idle], Patience::Driver, &mut out)?;
        }
        Ok(out.released_bytes >= key)
    }

    /// Empties the cache: waits for freed blocks that streams still use, then gives every wholly free segment back of the default
    /// pool and of pools that nobody uses.
    pub(crate) fn release_cached(&self) -> Result<Trimmed, AllocError> {
        let mut out = Trimmed::default();
        let in_capture = self.shared.in_capture()?;
        self.hooks.tidy(!in_capture);
        self.shared.retry_stranded();
        if !in_capture {
            self.shared.totals.lock().syncs += 1;
            // What is deferred counts as pending.
            for arena in self.arenas().iter().filter(|arena| arena.counters.any_pending()) {
                arena.flush_deferred(|_| true);
                arena.wait_for_pending()?;
            }
            self.settle_leaving(true)?;
            for arena in self.default_arenas().iter() {
                for part in [Part::Large, Part::Small] {
                    let idle = arena.idle_of_part(0, part);
                    arena.release(&idle, Patience::Everything, &mut out)?;
                }
                let default = |lane: &Lane| arena.is_default_slot(lane.slot);
                arena.give_back_pages(default, Patience::Everything, u64::MAX, &mut out, || true)?;
            }
        }
        for pool in self.pools.freeable() {
            self.release_pool_segments(&pool, Patience::Everything, &mut out)?;
        }
        self.forget_empty_pools();
        self.forget_retired();
        out.driver_pool_bytes = self.trim_driver_pool(!in_capture)?;
        self.shared.totals.start_afresh();
        self.note_held(in_capture, &mut out);
        Ok(out)
    }

    /// Empties one private pool that nobody uses. An id that is unknown or in use is ignored, as in PyTorch.
    pub(crate) fn release_cached_of(&self, id: PoolId) -> Result<Trimmed, AllocError> {
        let mut out = Trimmed::default();
        if let Some(pool) = self.pools.freeable().into_iter().find(|p| p.id == id) {
            self.shared.totals.lock().syncs += 1;
            pool.arena.flush_deferred(|slot| slot == pool.slot);
            pool.arena.wait_for_pending()?;
            self.settle_leaving(true)?;
            self.release_pool_segments(&pool, Patience::Everything, &mut out)?;
            self.forget_empty_pools();
        }
        Ok(out)
    }

    /// As [`release_cached`](Self::release_cached), but waits for nothing: what the device may still use stays.
    pub(crate) fn release_without_waiting(&self) -> Result<Trimmed, AllocError> {
        let mut out = Trimmed::default();
        let in_capture = self.shared.in_capture()?;
        self.hooks.tidy(false);
        self.shared.retry_stranded();
        self.settle_leaving(false)?;
        for arena in self.arenas() {
            if !in_capture && arena.counters.any_pending() {
                arena.flush_deferred(|_| true);
                arena.poll(true);
            }
            if arena.holds_default && !in_capture {
                arena.release_lanes(|lane| arena.is_default_slot(lane.slot), Patience::Nothing, &mut out)?;
            }
        }
        for pool in self.pools.freeable() {
            self.release_pool_segments(&pool, Patience::Nothing, &mut out)?;
        }
        self.forget_empty_pools();
        self.forget_retired();
        out.driver_pool_bytes = self.trim_driver_pool(false)?;
        self.note_held(in_capture, &mut out);
        Ok(out)
    }

    fn release_pool_segments(&self, pool: &Pool<D>, patience: Patience, out: &mut Trimmed) -> Result<(), AllocError> {
        self.dissolve(pool);
        self.join_eager(pool, patience == Patience::Everything)?;
        for part in Part::ALL {
            let idle = pool.arena.idle_of_part(pool.slot, part);
            // Someone may have taken the pool meanwhile, and a capture may have baked the segment into a graph.
            pool.arena.release_if(&idle, patience, out, || self.pools.is_freeable(pool.id))?;
        }
        let of_pool = |lane: &Lane| lane.slot == pool.slot;
        pool.arena.give_back_pages(of_pool, patience, u64::MAX, out, || self.pools.is_freeable(pool.id))?;
        Ok(())
    }

    fn note_held(&self, in_capture: bool, out: &mut Trimmed) {
        let rules = &self.shared.rules;
        for arena in self.arenas() {
            if arena.holds_default && !in_capture && !rules.single_arena {
                continue;
            }
            // What a private pool has idle can be had without a look at each of its segments.
            if !arena.holds_default && rules.pages.is_none() && arena.counters.binned().0 == 0 {
                out.held_by_pools_bytes += arena.offers.bytes();
                continue;
            }
            let default = |l: &Lane| arena.is_default_slot(l.slot);
            let mut state = arena.lock();
            state.flush_bins(&arena.counters);
            if let Some(rules) = &rules.pages {
                out.held_by_pools_bytes += state.free_page_bytes(rules.page_bytes(), |l| !default(l));
                if in_capture {
                    out.held_by_capture_bytes += state.free_page_bytes(rules.page_bytes(), default);
                }
            }
            out.held_by_pools_bytes += state.idle_bytes(|l| !default(l));
            if in_capture {
                out.held_by_capture_bytes += state.idle_bytes(default);
            }
        }
    }

    /// Forgets the pools that nobody uses and that have no segment.
    pub(crate) fn forget_empty_pools(&self) {
        self.pools.freeable().iter().for_each(|pool| self.forget_if_empty(pool));
    }

    /// Forgets a pool if nobody uses it and it has no segment. One that never had any leaves no trace: its id may be used again.
    pub(crate) fn forget_if_empty(&self, pool: &Arc<Pool<D>>) {
        let mut state = pool.arena.lock();
        if state.segments.iter().any(|(_, s)| s.slot == pool.slot) {
            return;
        }
        let mut table = self.pools.lock();
        // Someone may have taken it meanwhile.
        if table.pools.get(&pool.id).is_some_and(|e| e.use_count <= 0 && Arc::ptr_eq(&e.pool, pool)) {
            table.pools.remove(&pool.id);
            table.use_on_oom.remove(&pool.id);
            table.lending.remove(&pool.id);
            if pool.counters.ever_grew() {
                table.gone.insert(pool.id);
            }
            drop(table);
            // Under the lock that it was found empty under: a request that is on its way here finds its lane gone, and not memory that
            // nobody looks after.
            state.remove_slot(pool.slot);
            drop(state);
            if !self.shared.rules.remembers_pools {
                self.shared.totals.lock().forget_pool(pool.id);
            }
            self.discard_arena_of(pool);
        }
    }

    /// Takes a pool that nobody ever saw out of its arena.
    pub(crate) fn discard_pool(&self, pool: &Pool<D>) {
        pool.arena.lock().remove_slot(pool.slot);
        self.discard_arena_of(pool);
    }

    /// The arena of a pool whose slot is gone goes too, if it was the pool's alone.
    fn discard_arena_of(&self, pool: &Pool<D>) {
        if !pool.arena.holds_default {
            self.shared.peaks.leave(&pool.arena);
            self.arenas.lock().retain(|a| !Arc::ptr_eq(a, &pool.arena));
            self.folded.lock().fold(&pool.arena.counters);
            pool.arena.discard();
        }
    }
}
