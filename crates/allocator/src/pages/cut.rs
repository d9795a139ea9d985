//! Cutting: a free handle in which a smaller request would end is made anew as smaller ones, so that the request pins a page of it and
//! not the whole.

use std::sync::Arc;

use gpupool_device::{Address, Device, DriverResult};

use super::assemble::Haste;
use super::plan::{PageRules, cut_price, handle_sizes};
use super::table::{Handle, Piece};
use crate::arena::{ArenaState, BlockId};
use crate::error::AllocError;
use crate::inner::{Inner, Request};
use crate::ladder::Outcome;
use crate::units::{Units, to_bytes, to_units};

impl ArenaState {
    /// The piece of a free block that a block of `size` in front of it would end in, if that piece is free, larger than a page, and the
    /// rest of it amounts to anything: offset and units. O(1) for a large block.
    pub(crate) fn pinned_piece(&self, id: BlockId, size: Units, page: Units) -> Option<(Units, Units)> {
        let block = &self.blocks[id];
        if block.size < size.saturating_add(page) || block.size <= page {
            return None;
        }
        let table = self.segments.get(block.segment)?.pages.as_deref()?;
        let end = block.offset + size;
        let (start, piece) = table.at(end)?;
        let whole = start >= block.offset && start + piece.units <= block.offset + block.size;
        // The rest beyond the page that the request ends in.
        let rest = start + piece.units - end.next_multiple_of(page).min(start + piece.units);
        let cuts = whole && start < end && piece.units > page && rest > 0;
        (cuts && self.may_move(block.lane)).then_some((start, piece.units))
    }

    /// Whether a free piece may be made anew: the device is done with it, and it is mapped once.
    pub(super) fn may_cut(&self, c: &super::plan::Candidate) -> bool {
        let core = &self.lanes[self.blocks[c.block].lane as usize].core;
        let table = self.segments.get(self.blocks[c.block].segment).and_then(|s| s.pages.as_deref());
        let aliased = table.and_then(|t| t.at(c.offset)).is_none_or(|(_, p)| p.handle.is_aliased());
        core.has_passed(c.since) && !aliased
    }

    /// The best fit of a lane, if it would pin a piece: the block, and the piece with its mark.
    fn pinning(&self, lane: u32, size: Units, page: Units) -> Option<(BlockId, Units, Units, u64)> {
        let block = self.lanes[lane as usize].index.best_fit(&self.blocks, size)?.id;
        let (start, units) = self.pinned_piece(block, size, page)?;
        let table = self.segments.get(self.blocks[block].segment)?.pages.as_deref()?;
        Some((block, start, units, table.at(start)?.1.since))
    }
}

impl<D: Device> Inner<D> {
    /// Serves a request whose best fit would pin a large handle. If the preset finds the bytes worth the calls, that handle is cut first, or,
    /// where the device is not done with it, smaller free ones are moved together instead. Else it is used uncut.
    pub(crate) fn cut(&self, request: &Request<D>) -> Result<Outcome<D>, AllocError> {
        let (Some(rules), Some(size)) = (self.shared.rules.pages, to_units(request.size)) else {
            return Ok(Outcome::Nothing);
        };
        let rules = self.rules_for(&rules, 0);
        let counters = &request.arena.counters;
        let overdrawn = self.overdrawn(&rules);
        let (found, core, spends) = {
            let mut state = request.arena.lock();
            if !state.lanes[request.lane as usize].in_use {
                return Ok(Outcome::Nothing);
            }
            let spends = rules.worth > 0 && !state.has_room(&rules, overdrawn, request.size, counters);
            let core = Arc::clone(&state.lanes[request.lane as usize].core);
            (state.pinning(request.lane, size, rules.page), core, spends)
        };
        let Some((.., since)) = found else { return Ok(Outcome::Nothing) };
        if spends {
            core.look(&self.shared, since, false)?;
            request.arena.settle_leaving(false)?;
        }
        let mut state = request.arena.lock();
        let Some((block, start, units, since)) = state.pinning(request.lane, size, rules.page) else {
            return Ok(Outcome::Nothing);
        };
        let end = state.blocks[block].offset + size;
        if spends && rules.cut_pays(start, units, end) {
            let free = state.segments.get(state.blocks[block].segment).and_then(|s| s.pages.as_deref());
            let aliased = free.and_then(|t| t.at(start)).is_none_or(|(_, p)| p.handle.is_aliased());
            if core.has_passed(since) && !aliased {
                let held = state.hold(block, start, start + units, counters);
                drop(state);
                self.recreate(request, &rules, held, end)?;
                state = request.arena.lock();
                state.repetition.spent(cut_price(units), counters);
            } else {
                drop(state);
                let worth = rules.pinned_worth(start, units, end);
                if let served @ Outcome::Served(_) = self.assemble(request, Haste::Sparing { worth })? {
                    return Ok(served);
                }
                state = request.arena.lock();
            }
        }
        let Some(block) = state.take_uncut(request.lane, request.size, counters) else { return Ok(Outcome::Progress) };
        let handed = state.hand_out(block, request.size, request.requested, counters);
        let Some(handed) = handed else { return Ok(Outcome::Nothing) };
        Ok(Outcome::Served(request.served(&mut state, handed)))
    }

    /// Makes the one handle of a held block anew, cut where a request will end. What cannot be made is given up: it was free.
    pub(super) fn recreate(
        &self,
        request: &Request<D>,
        rules: &PageRules,
        held: BlockId,
        end: Units,
    ) -> DriverResult<()> {
        let driver = &self.shared.driver;
        let pool = request.pool_id();
        let begun = driver.device().now();
        let (address, offset, piece, part) = {
            let state = request.arena.lock();
            let block = &state.blocks[held];
            let segment = state.segments.get(block.segment);
            let piece =
                segment.and_then(|s| s.pages.as_deref()).and_then(|t| t.at(block.offset)).map(|(_, p)| p.clone());
            (
                segment.map_or(Address::NULL, |s| s.memory.base.offset(to_bytes(block.offset))),
                block.offset,
                piece,
                state.lanes[block.lane as usize].part,
            )
        };
        let Some(piece) = piece else { return Ok(()) };
        let bytes = to_bytes(piece.units);
        if let Err(e) = driver.unmap(address, bytes) {
            tracing::warn!(%address, bytes, error = %e, "a handle was not cut; it is used as it is");
            request.arena.lock().unhold(held, &request.arena.counters);
            return Ok(());
        }
        let mut lost = None;
        let mut made: Vec<Arc<Handle>> = Vec::new();
        // Released first: memory may be short. Its bytes stay promised, so that no limit lets somebody else in between.
        let released = self.shared.release_handle(piece.handle.id, bytes, part, pool);
        if released {
            self.shared.totals.lock().promise(bytes);
        }
        let mut at = address;
        if released {
            for units in handle_sizes(rules, offset, piece.units, end) {
                match self.map_new(at, to_bytes(units)) {
                    Ok(handle) => {
                        at = at.offset(handle.bytes);
                        made.push(handle);
                    }
                    Err(e) => {
                        tracing::warn!(address = %at, bytes = to_bytes(units), error = %e, "a free handle was not made anew; its memory went back to the driver");
                        lost = Some(());
                        break;
                    }
                }
            }
        }
        let kept = at.offset_from(address);
        let spent = driver.device().now().saturating_sub(begun);
        let mut state = request.arena.lock();
        let (_, gone) = state.lift(held);
        let pieces: Vec<Piece> = made
            .iter()
            .map(|h| {
                h.mapped();
                let ordinal = self.shared.take_ordinal();
                Piece { handle: Arc::clone(h), units: to_units(h.bytes).unwrap_or(0), since: piece.since, ordinal }
            })
            .collect();
        let segment = state.blocks[held].segment;
        let entered = state.enter(segment, offset, pieces);
        if kept < bytes {
            let rest = if kept == 0 { held } else { state.divide(held, to_units(kept).unwrap_or(0)) };
            state.empty(rest);
            if let Some(pool) = &request.pool {
                pool.counters.reserved_bytes.decrease(part, (bytes - kept) as i64);
            }
        }
        if kept > 0 {
            state.unhold(held, &request.arena.counters);
        }
        let mut totals = self.shared.totals.lock();
        totals.pages_made(kept, made.len() as i64, (part, pool), gone + entered);
        if released {
            totals.unpromise(bytes - kept);
        }
        totals.pages.splits += u64::from(lost.is_none() && released);
        totals.pages.split_ns += spent;
        totals.moves.spend(spent);
        Ok(())
    }

    /// One new handle, mapped and accessible. After an error nothing is held.
    fn map_new(&self, at: Address, bytes: u64) -> DriverResult<Arc<Handle>> {
        let id = self.shared.driver.handle_create(bytes)?;
        if let Err(e) = self.shared.driver.map(at, bytes, id) {
            self.shared.release_unmapped(id);
            return Err(e);
        }
        Ok(Arc::new(Handle::new(id, bytes)))
    }
}
