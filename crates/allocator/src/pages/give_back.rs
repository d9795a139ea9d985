//! Giving free pages back to the driver.

use std::sync::Arc;

use gpupool_device::{Address, Device};

use super::plan::Candidate;
use super::table::Piece;
use crate::arena::{Arena, BlockId, BlockState, Lane};
use crate::error::AllocError;
use crate::reclaim::{Patience, Trimmed};
use crate::stream::StreamCore;
use crate::units::{Units, to_bytes};

/// A stretch of free pieces of one block.
struct Stretch {
    block: BlockId,
    start: Units,
    end: Units,
    since: u64,
}

impl<D: Device> Arena<D> {
    /// Gives free pieces of the lanes that `pick` accepts back, at most `most` bytes, as long as `may` says so. What the device may still
    /// use stays, unless `patience` is everything: then it waits on the host. Then addresses go back that nothing is mapped in.
    pub(crate) fn give_back_pages(
        &self,
        pick: impl Fn(&Lane) -> bool,
        patience: Patience,
        most: u64,
        out: &mut Trimmed,
        may: impl Fn() -> bool,
    ) -> Result<(), AllocError> {
        self.give_back_these(pick, |_| true, patience, most, out, may)
    }

    /// As [`give_back_pages`](Self::give_back_pages), those that `which` accepts.
    pub(crate) fn give_back_these(
        &self,
        pick: impl Fn(&Lane) -> bool,
        which: impl Fn(&Candidate) -> bool,
        patience: Patience,
        most: u64,
        out: &mut Trimmed,
        may: impl Fn() -> bool,
    ) -> Result<(), AllocError> {
        let Some(rules) = self.shared.rules.pages else { return Ok(()) };
        self.settle_leaving(patience == Patience::Everything)?;
        let lanes: Vec<(u32, Arc<StreamCore>)> = {
            let mut state = self.lock();
            if !state.segments.iter().any(|(_, s)| s.pages.is_some()) {
                return Ok(());
            }
            state.flush_bins(&self.counters);
            let lanes = state.lanes.iter().enumerate().filter(|(_, l)| l.in_use && pick(l));
            lanes.map(|(at, l)| (at as u32, Arc::clone(&l.core))).collect()
        };
        let target = out.released_bytes.saturating_add(most);
        for (lane, core) in lanes {
            let newest = {
                let state = self.lock();
                state.candidates(rules.page, &[lane]).iter().map(|c| c.since).max()
            };
            let Some(newest) = newest else { continue };
            core.look(&self.shared, newest, patience == Patience::Everything)?;
            let stretches = self.stretches(lane, rules.page, &which);
            for stretch in stretches {
                if out.released_bytes >= target {
                    break;
                }
                if !core.has_passed(stretch.since) {
                    out.busy_bytes += to_bytes(stretch.end - stretch.start);
                    continue;
                }
                self.give_back_stretch(lane, &stretch, out, &may);
            }
        }
        self.free_empty_ranges();
        Ok(())
    }

    /// The free pieces of a lane, neighbours of one block together as long as the same is known of them; from the back of each block.
    fn stretches(&self, lane: u32, page: Units, which: impl Fn(&Candidate) -> bool) -> Vec<Stretch> {
        let state = self.lock();
        let core = &state.lanes[lane as usize].core;
        let mut found = state.candidates(page, &[lane]);
        found.retain(which);
        found.sort_unstable_by_key(|c| (c.block, std::cmp::Reverse(c.offset)));
        let mut out: Vec<Stretch> = Vec::new();
        for c in found {
            match out.last_mut() {
                Some(s)
                    if s.block == c.block
                        && c.offset + c.units == s.start
                        && core.has_passed(s.since) == core.has_passed(c.since) =>
                {
                    s.start = c.offset;
                    s.since = s.since.max(c.since);
                }
                _ => out.push(Stretch { block: c.block, start: c.offset, end: c.offset + c.units, since: c.since }),
            }
        }
        out
    }

    fn give_back_stretch(&self, lane: u32, stretch: &Stretch, out: &mut Trimmed, may: &impl Fn() -> bool) {
        let (held, address, pieces): (BlockId, Address, Vec<(Units, Piece)>) = {
            let mut state = self.lock();
            let block = &state.blocks[stretch.block];
            let free = block.state == BlockState::Free && block.lane == lane;
            let found = free
                && state.end_of(stretch.block) >= stretch.end
                && state.whole_pieces(stretch.block).any(|(at, p)| at == stretch.start && p.since <= stretch.since);
            let newest = state.whole_pieces(stretch.block).map(|(_, p)| p.since).max();
            // Somebody used it meanwhile.
            if !found || !may() || newest.is_none() {
                return;
            }
            let held = state.hold(stretch.block, stretch.start, stretch.end, &self.counters);
            let Some(segment) = state.segments.get(state.blocks[held].segment) else { return };
            let pieces = segment.pages.iter().flat_map(|t| t.within(stretch.start, stretch.end));
            let pieces: Vec<(Units, Piece)> = pieces.map(|(at, p)| (at, p.clone())).collect();
            let core = &state.lanes[lane as usize].core;
            let busy = pieces.iter().any(|(_, p)| !core.has_passed(p.since) || p.handle.is_aliased());
            let address = segment.memory.base.offset(to_bytes(stretch.start));
            if busy {
                state.unhold(held, &self.counters);
                out.busy_bytes += to_bytes(stretch.end - stretch.start);
                return;
            }
            (held, address, pieces)
        };
        let bytes = to_bytes(stretch.end - stretch.start);
        if let Err(e) = self.shared.driver.unmap(address, bytes) {
            tracing::warn!(%address, bytes, error = %e, "the driver did not take pages back");
            self.lock().unhold(held, &self.counters);
            out.refused_bytes += bytes;
            out.refused.get_or_insert(e);
            return;
        }
        let (part, pool) = {
            let mut state = self.lock();
            let (_, runs) = state.lift(held);
            let l = &state.lanes[state.blocks[held].lane as usize];
            let (part, slot) = (l.part, &state.slots[l.slot as usize]);
            let pool = slot.pool;
            if let Some(counters) = &slot.counters {
                counters.reserved_bytes.decrease(part, bytes as i64);
            }
            state.empty(held);
            self.shared.totals.lock().segment.change(part, runs);
            (part, pool)
        };
        for (_, piece) in &pieces {
            piece.handle.unmapped();
            if self.shared.release_handle(piece.handle.id, piece.handle.bytes, part, pool) {
                out.released_bytes += piece.handle.bytes;
                out.released_segments += 1;
            }
        }
    }

    /// Gives the addresses of segments back in which nothing is mapped.
    pub(crate) fn free_empty_ranges(&self) {
        let gone: Vec<_> = {
            let mut state = self.lock();
            let empty = state.segments.iter().filter(|(_, s)| state.is_empty_range(s));
            let empty: Vec<u32> = empty.map(|(at, _)| at).collect();
            empty.into_iter().filter_map(|at| state.remove_range(at)).collect()
        };
        for segment in gone {
            self.shared.free_range(segment.memory.base, segment.memory.bytes);
        }
    }
}
