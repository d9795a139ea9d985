//! Loans: free runs of an idle pool serve requests of the default pool.
//!
//! A run on loan is a live block of the pool, so nothing else can be served from it; its owner's free is a use of the stream it was lent
//! to, so it is free again only once that stream, and every other that was recorded for it, is done.

use std::sync::Arc;

use gpupool_device::Device;

use super::Residency;
use crate::arena::{Arena, ArenaState, BlockId, BlockState, LaneKind};
use crate::captures::Range;
use crate::ids::Part;
use crate::inner::{Request, Served};
use crate::units::{Units, to_bytes, to_units};

impl ArenaState {
    /// The neutral lanes of the arena's pool that a request of this part may borrow from.
    fn lending_lanes(&self, part: Part) -> impl Iterator<Item = u32> {
        let lends = move |l: &crate::arena::Lane| {
            l.in_use && l.kind == LaneKind::Neutral && (l.part == part || l.part == Part::Large)
        };
        (0..self.lanes.len() as u32).filter(move |at| lends(&self.lanes[*at as usize]))
    }

    /// The smallest free run for `size`: its lane and units.
    pub(crate) fn best_run(&self, part: Part, size: Units) -> Option<(Units, u32)> {
        let best = |lane: u32| {
            let found = self.lanes[lane as usize].index.best_fit(&self.blocks, size)?;
            Some((self.blocks[found.id].size, lane))
        };
        self.lending_lanes(part).filter_map(best).min()
    }

    /// Forgets loans that have come back. How many are still out in these ranges (or anywhere, if there are none), and their bytes. One that
    /// was freed and is still used by some stream is not out: whoever writes there comes after that use.
    pub(crate) fn loans_out(&mut self, of: &[Range]) -> (usize, u64) {
        let Self { idle, blocks, segments, .. } = self;
        idle.loans.retain(|loan| {
            let current = blocks.current(*loan);
            current.is_some_and(|b| matches!(b.state, BlockState::Live | BlockState::Pending))
        });
        let out = idle.loans.iter().filter_map(|loan| {
            let block = &blocks[loan.id()];
            let address = segments.get(block.segment)?.memory.base.offset(to_bytes(block.offset));
            let range = Range { address, bytes: to_bytes(block.size) };
            let first = of.partition_point(|r| r.end() <= address);
            let there = of.is_empty() || of.get(first).is_some_and(|r| r.intersection(range).is_some());
            (there && block.state == BlockState::Live).then_some(range.bytes)
        });
        out.fold((0, 0), |(n, sum), bytes| (n + 1, sum + bytes))
    }

    /// Whether a live block is on loan.
    pub(crate) fn is_lent(&self, id: BlockId) -> bool {
        self.idle.loans.contains(&self.blocks.key(id))
    }
}

impl<D: Device> Arena<D> {
    /// Lends the smallest run that fits. The caller sees to it that nothing of the pool runs that is not ordered before the borrower.
    pub(crate) fn lend(self: &Arc<Self>, request: &Request<D>) -> Option<Served<D>> {
        let mut state = self.lock();
        if state.idle.away {
            return None;
        }
        let (_, lane) = state.best_run(request.part, to_units(request.size)?)?;
        let block = state.take_uncut(lane, request.size, &self.counters)?;
        let handed = state.hand_out(block, request.size, request.requested, &self.counters)?;
        state.record_owner(handed.block(), &request.core);
        request.note(&state, &handed);
        // Those that have come back meanwhile are forgotten.
        state.loans_out(&[]);
        state.idle.loans.push(handed.key);
        self.idle.set(Residency::Lent);
        drop(state);
        self.shared.totals.lock().idle.lent(handed.bytes);
        Some(Served { arena: Arc::clone(self), handed })
    }

    /// Loans that are out in these ranges, which are in order; and whether the pool is resident again because none is out anywhere.
    pub(crate) fn look_at_loans(&self, of: &[Range]) -> (usize, u64) {
        let mut state = self.lock();
        let out = state.loans_out(of);
        if state.idle.loans.is_empty() && self.idle.residency() == Residency::Lent {
            self.idle.set(Residency::Resident);
        }
        out
    }
}
