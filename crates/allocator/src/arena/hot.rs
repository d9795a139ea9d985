//! The shortest way through an arena: a request that its bin serves, and a free that its bin takes.
//!
//! Each is one function that looks the block's record up once and writes what changes; whatever is unusual is left to the long way
//! (`place.rs`, `free.rs`), which does the same and more. `docs/hot-path.md` walks both, with the cost of each step.

use super::{ArenaState, BlockId, BlockState, Handed, LaneKind, NONE};
use crate::counters::ArenaCounters;
use crate::stream::StreamCore;
use crate::units::{to_bytes, to_units};

impl ArenaState {
    /// Hands out a block of exactly `size` bytes from a lane's bin. `None`, with nothing changed, if the long way must be taken. O(1).
    #[inline]
    pub(crate) fn bin_hit(&mut self, lane: u32, size: u64, requested: u64, counters: &ArenaCounters) -> Option<Handed> {
        if size >= self.rules.max_split {
            return None;
        }
        let lane = self.lanes.get_mut(lane as usize)?;
        let id = lane.bins.as_mut()?.pop(&self.blocks, to_units(size)?)?;
        let block = self.blocks.get_mut(id)?;
        block.state = BlockState::Live;
        block.generation = block.generation.wrapping_add(1);
        block.requested = requested;
        counters.came_out_of_bin(lane.part, size as i64, block.is_split());
        counters.handed_out(lane.part, size as i64, requested as i64);
        // What a capture's bin holds was handed out in this capture before, so its range is noted already.
        if lane.kind != LaneKind::Stream
            && let Some(recorded) = &mut self.slots[lane.slot as usize].recorded
        {
            let live = counters.allocated_bytes().current();
            recorded.peak_bytes = recorded.peak_bytes.max(live.max(0) as u64);
        }
        let address = self.segments.get(block.segment)?.memory.base.offset(to_bytes(block.offset));
        Some(Handed { block: id, generation: block.generation, address, bytes: size })
    }

    /// As [`bin_hit`](Self::bin_hit), else from the lane's free index: what a request does that nothing unusual concerns. O(1), or O(log n).
    #[inline]
    pub(crate) fn hit(&mut self, lane: u32, size: u64, requested: u64, counters: &ArenaCounters) -> Option<Handed> {
        match self.bin_hit(lane, size, requested, counters) {
            Some(handed) => Some(handed),
            None => self.index_hit(lane, size, requested, counters),
        }
    }

    #[inline(never)]
    fn index_hit(&mut self, lane: u32, size: u64, requested: u64, counters: &ArenaCounters) -> Option<Handed> {
        let block = self.take(lane, size, false, counters)?;
        self.hand_out(block, size, requested, counters)
    }

    /// As [`bin_free`](Self::bin_free), else merged and indexed: a free that nothing unusual concerns. Whether it was one; if not, nothing has
    /// changed. O(1), or O(log n).
    #[inline]
    pub(crate) fn usual_free(
        &mut self,
        id: BlockId,
        generation: u32,
        on: Option<&StreamCore>,
        counters: &ArenaCounters,
    ) -> bool {
        self.bin_free(id, generation, on, counters) || self.index_free(id, generation, on, counters)
    }

    #[inline(never)]
    fn index_free(&mut self, id: BlockId, generation: u32, on: Option<&StreamCore>, counters: &ArenaCounters) -> bool {
        if !self.is_live(id, generation) {
            return false;
        }
        let block = &self.blocks[id];
        let own = on.is_none_or(|core| core.id == self.lanes[block.lane as usize].core.id);
        if block.uses != NONE || !own {
            return false;
        }
        self.free_past_bin(id, counters);
        true
    }

    /// Frees a live block into its lane's bin, if nothing but its own stream used it; `on` is the stream that frees it, where that may be
    /// another. Whether it did; if not, nothing has changed. O(1).
    #[inline]
    pub(crate) fn bin_free(
        &mut self,
        id: BlockId,
        generation: u32,
        on: Option<&StreamCore>,
        counters: &ArenaCounters,
    ) -> bool {
        let Some(block) = self.blocks.get_mut(id) else { return false };
        if block.generation != generation || block.state != BlockState::Live || block.uses != NONE {
            return false;
        }
        let bytes = to_bytes(block.size);
        let Some(lane) = self.lanes.get_mut(block.lane as usize) else { return false };
        let Some(bins) = &mut lane.bins else { return false };
        if bytes >= self.rules.max_split || on.is_some_and(|core| core.id != lane.core.id) || !bins.push(block, id) {
            return false;
        }
        block.state = BlockState::Binned;
        counters.freed(lane.part, bytes as i64, block.requested as i64);
        counters.went_into_bin(lane.part, bytes as i64, block.is_split());
        self.repetition.block_freed(lane.part, counters);
        true
    }
}
