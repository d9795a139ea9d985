//! Where the pieces for a request come from: its own stream, which is in order with it; what the device is done with; and what its stream
//! can wait for on the device.

use std::sync::Arc;

use gpupool_device::{Address, Device, DriverResult};

use super::assemble::{Assembly, Haste};
use super::leave::Leaving;
use super::plan::{Candidate, PageRules, choose, choose_covering, cover};
use super::table::Piece;
use crate::arena::{Arena, ArenaState, BlockId};
use crate::counters::PoolCounters;
use crate::error::AllocError;
use crate::ids::{Part, PoolId};
use crate::inner::{Inner, Request};
use crate::stream::StreamCore;
use crate::units::{Units, to_bytes};

/// Pieces of one held block that move.
pub(super) struct Source<D: Device> {
    pub(super) arena: Arc<Arena<D>>,
    pub(super) block: BlockId,
    pub(super) address: Address,
    pub(super) bytes: u64,
    pub(super) part: Part,
    pub(super) pool: PoolId,
    pub(super) counters: Option<Arc<PoolCounters>>,
    pub(super) pieces: Vec<Piece>,
    pub(super) core: Arc<StreamCore>,
    pub(super) since: u64,
    /// The request's stream waits for the work before that, on the device.
    pub(super) awaited: bool,
}

/// Where other free pieces may be: the default pool of an arena, or a pool that nobody uses.
struct Elsewhere<D: Device> {
    arena: Arc<Arena<D>>,
    slot: u32,
    pool: Option<PoolId>,
}

impl<D: Device> Inner<D> {
    /// Pieces of the request's own stream: in order with it, so nothing is waited for.
    pub(super) fn own_sources(
        &self,
        assembly: &mut Assembly<D>,
        request: &Request<D>,
        rules: &PageRules,
        missing: Units,
        haste: Haste,
    ) -> Result<Units, AllocError> {
        if request.pool.is_some() || request.neutral.is_some() {
            return Ok(missing);
        }
        let first = request.lane - request.part.index() as u32;
        let arena = &request.arena;
        for attempt in 0..2 {
            let mut state = arena.lock();
            let lanes: Vec<u32> = [first, first + 1].into_iter().filter(|l| state.may_move(*l)).collect();
            let candidates = state.candidates(rules.page, &lanes);
            let mut chosen = Vec::new();
            let (rest, covers) = choose(candidates, missing, assembly.spare(), &mut chosen);
            let pays = |c: &Candidate| c.units > rules.page && rules.cut_pays(c.offset, c.units, c.offset + rest);
            let cuttable = covers.iter().copied().find(|c| pays(c) && state.may_cut(c));
            if let Some(whole) = cuttable.filter(|_| attempt == 0) {
                // Moved whole it would be pinned where the request ends.
                let held = state.hold(whole.block, whole.offset, whole.offset + whole.units, &arena.counters);
                drop(state);
                self.recreate(request, rules, held, whole.offset + rest)?;
                continue;
            }
            if rest > 0 && matches!(haste, Haste::Sparing { .. }) {
                return Ok(rest);
            }
            let missing = cover(rest, &covers, &mut chosen);
            let sources = hold_sources(&mut state, arena, chosen);
            drop(state);
            assembly.sources.extend(sources);
            return Ok(missing);
        }
        Ok(missing)
    }

    /// Pieces that the device is done with: of other streams, and of pools that nobody uses.
    pub(super) fn other_sources(
        &self,
        assembly: &mut Assembly<D>,
        request: &Request<D>,
        rules: &PageRules,
        mut missing: Units,
        haste: Haste,
        wait: bool,
    ) -> Result<Units, AllocError> {
        if missing == 0 {
            return Ok(0);
        }
        let mut places: Vec<Elsewhere<D>> = Vec::new();
        for arena in self.default_arenas().iter() {
            // What it has itself was looked at before. Inside a capture nothing was.
            if request.pool.is_some() || !Arc::ptr_eq(arena, &request.arena) {
                places.push(Elsewhere { arena: Arc::clone(arena), slot: 0, pool: None });
            }
        }
        for pool in self.pools.freeable() {
            self.join_eager(&pool, wait)?;
            places.push(Elsewhere { arena: Arc::clone(&pool.arena), slot: pool.slot, pool: Some(pool.id) });
        }
        for Elsewhere { arena, slot, pool } in places {
            if missing == 0 {
                break;
            }
            arena.poll(true);
            if haste == Haste::Usual && arena.is_barren() {
                continue;
            }
            arena.settle_leaving(wait)?;
            let lanes: Vec<(u32, Arc<StreamCore>)> = {
                let mut state = arena.lock();
                if pool.is_none() && !arena.holds_default {
                    continue;
                }
                state.flush_bins(&arena.counters);
                let lanes = state.lanes.iter().enumerate().filter(|(_, l)| l.in_use && l.slot == slot);
                lanes.map(|(at, l)| (at as u32, Arc::clone(&l.core))).collect()
            };
            let seen = arena.counters.changes();
            let mut any = false;
            for (lane, core) in lanes {
                let newest = {
                    let state = arena.lock();
                    state.candidates(rules.page, &[lane]).iter().map(|c| c.since).max()
                };
                let Some(newest) = newest else { continue };
                any = true;
                core.look(&self.shared, newest, wait)?;
                let mut state = arena.lock();
                if !state.lanes[lane as usize].in_use || pool.is_some_and(|id| !self.pools.is_freeable(id)) {
                    continue;
                }
                let mut done = state.candidates(rules.page, &[lane]);
                done.retain(|c| core.has_passed(c.since));
                let mut chosen = Vec::new();
                missing = choose_covering(done, missing, assembly.spare(), &mut chosen);
                let sources = hold_sources(&mut state, &arena, chosen);
                drop(state);
                assembly.sources.extend(sources);
                if missing == 0 {
                    break;
                }
            }
            if !any {
                arena.note_barren(seen);
            }
        }
        Ok(missing)
    }

    /// Pieces of other streams that the device is not done with: the request's stream waits for that work, on the device. Nothing waits on the
    /// host.
    pub(super) fn awaited_sources(
        &self,
        assembly: &mut Assembly<D>,
        request: &Request<D>,
        rules: &PageRules,
        mut missing: Units,
        haste: Haste,
    ) -> Result<Units, AllocError> {
        let waits = self.shared.config.wait_for_streams() && request.pool.is_none() && request.core.is_usable();
        if missing == 0 || !waits || self.shared.driver.capture_status(request.core.handle)?.is_capturing() {
            return Ok(missing);
        }
        for arena in self.default_arenas().iter() {
            if missing == 0 || haste == Haste::Usual && arena.is_barren() {
                continue;
            }
            let lanes: Vec<u32> = {
                let state = arena.lock();
                let others = |at: &u32| state.lanes[*at as usize].core.id != request.core.id && state.may_move(*at);
                (0..state.lanes.len() as u32).filter(others).collect()
            };
            for lane in lanes {
                let (mut sources, rest) = {
                    let mut state = arena.lock();
                    if missing == 0 || !state.may_move(lane) {
                        continue;
                    }
                    let found = state.candidates(rules.page, &[lane]);
                    let mut chosen = Vec::new();
                    let rest = choose_covering(found, missing, assembly.spare(), &mut chosen);
                    (hold_sources(&mut state, arena, chosen), rest)
                };
                let Some(newest) = sources.iter().map(|s| s.since).max() else { continue };
                match self.order_behind(&request.core, &sources[0].core, newest) {
                    Ok(true) => {
                        sources.iter_mut().for_each(|s| s.awaited = true);
                        assembly.sources.extend(sources);
                        missing = rest;
                    }
                    refused => {
                        let mut state = arena.lock();
                        for source in &sources {
                            state.unhold(source.block, &arena.counters);
                        }
                        drop(state);
                        refused?;
                    }
                }
            }
        }
        Ok(missing)
    }

    /// Makes `core` wait, on the device, for the work of `other` before a stamp, if that is not done and an event tells of it. Whether what
    /// `core` does from now on comes after it.
    fn order_behind(&self, core: &StreamCore, other: &StreamCore, stamp: u64) -> DriverResult<bool> {
        if other.has_passed(stamp) {
            return Ok(true);
        }
        if !other.is_closed(stamp - 1) && !self.shared.mark_unless_capturing(other)? {
            return Ok(false);
        }
        let Some(event) = other.covering_event(stamp - 1) else {
            // Another thread asks whether it is complete.
            return Ok(other.has_passed(stamp));
        };
        self.shared.driver.stream_wait_event(core.handle, event).map(|()| true)
    }
}

impl<D: Device> Source<D> {
    pub(super) fn leaving(&self) -> Leaving {
        Leaving {
            block: self.block,
            address: self.address,
            bytes: self.bytes,
            handles: self.pieces.iter().map(|p| Arc::clone(&p.handle)).collect(),
            homeless: Vec::new(),
            part: self.part,
            core: Arc::clone(&self.core),
            since: self.since,
        }
    }
}

/// Holds the chosen pieces, a block for each stretch of neighbours.
fn hold_sources<D: Device>(
    state: &mut ArenaState,
    arena: &Arc<Arena<D>>,
    mut chosen: Vec<Candidate>,
) -> Vec<Source<D>> {
    // From the back of each block to its front, so that the block's record stays that of what is left in front.
    chosen.sort_unstable_by_key(|c| (c.block, std::cmp::Reverse(c.offset)));
    let mut stretches: Vec<(BlockId, Units, Units)> = Vec::new();
    for c in chosen {
        match stretches.last_mut() {
            Some((block, start, _)) if *block == c.block && c.offset + c.units == *start => *start = c.offset,
            _ => stretches.push((c.block, c.offset, c.offset + c.units)),
        }
    }
    let mut out = Vec::new();
    for (block, start, end) in stretches {
        let lane = &state.lanes[state.blocks[block].lane as usize];
        let (core, part, slot) = (Arc::clone(&lane.core), lane.part, lane.slot as usize);
        let (pool, counters) = (state.slots[slot].pool, state.slots[slot].counters.clone());
        let held = state.hold(block, start, end, &arena.counters);
        let Some(segment) = state.segments.get(state.blocks[held].segment) else { continue };
        let address = segment.memory.base.offset(to_bytes(start));
        let pieces: Vec<Piece> =
            segment.pages.iter().flat_map(|t| t.within(start, end)).map(|(_, p)| p.clone()).collect();
        let since = pieces.iter().map(|p| p.since).max().unwrap_or(0);
        let (arena, bytes) = (Arc::clone(arena), to_bytes(end - start));
        out.push(Source {
            arena,
            block: held,
            address,
            bytes,
            part,
            pool,
            counters,
            pieces,
            core,
            since,
            awaited: false,
        });
    }
    out
}
