//! The shortest way through an arena: a request that its bin serves, and a free that its bin takes.
//!
//! Each is one function that looks the block's record up once and writes what changes, with all that it calls put into it
//! (`inline(always)` here, in `bins.rs` and in `counters.rs`: 40 instructions a pair); whatever is unusual is left to the long way
//! (`place.rs`, `free.rs`), which does the same and more. `docs/hot-path.md` walks both, with the cost of each step.

use std::sync::Arc;

use gpupool_device::CaptureId;

use super::{ArenaState, BlockId, BlockState, Handed, LaneKind, NONE};
use crate::counters::ArenaCounters;
use crate::events::SHARE_BLOCKS;
use crate::ids::Part;
use crate::stream::StreamCore;
use crate::units::{Units, to_bytes};

/// Where a request that nothing unusual concerns is served from: the small lanes, beside which the large ones lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    /// Its stream's.
    pub(crate) lane: u32,
    /// In a capture the pool's neutral one, else [`NONE`].
    pub(crate) neutral: u32,
    /// The capture that the lane must be of, or [`NO_CAPTURE`](super::NO_CAPTURE).
    pub(crate) capture: CaptureId,
}

impl ArenaState {
    /// Hands out a block of `size` bytes: from the lane's bin of that size, else the best fit of its free index. `None`, with nothing
    /// changed, if the long way must be taken. O(1), or O(log n).
    #[inline(always)]
    pub(crate) fn hit(
        &mut self,
        from: Source,
        part: Part,
        units: Units,
        requested: u64,
        counters: &ArenaCounters,
    ) -> Option<Handed> {
        let (size, at) = (to_bytes(units), from.lane + part.index() as u32);
        let lane = self.lanes.get_mut(at as usize)?;
        if lane.capture != from.capture {
            // The capture has just ended.
            return None;
        }
        let binned = match &mut lane.bins {
            Some(bins) if size < self.rules.max_split => bins.pop(&self.blocks, units),
            _ => None,
        };
        let Some(id) = binned else { return self.index_hit(at, from.neutral, size, requested, counters) };
        let block = self.blocks.get_mut(id)?;
        block.state = BlockState::Live;
        block.generation = block.generation.wrapping_add(1);
        block.requested = requested;
        counters.came_out_of_bin(part, size as i64, block.is_split());
        // What a capture's bin holds was handed out in this capture before, so its range is noted already.
        counters.handed_out(part, size as i64, requested as i64);
        let address = self.segments.get(block.segment)?.memory.base.offset(to_bytes(block.offset));
        Some(Handed { block: id, generation: block.generation, address, bytes: size })
    }

    #[inline(never)]
    fn index_hit(
        &mut self,
        lane: u32,
        neutral: u32,
        size: u64,
        requested: u64,
        counters: &ArenaCounters,
    ) -> Option<Handed> {
        let neutral = (neutral != NONE).then(|| neutral + self.lanes[lane as usize].part.index() as u32);
        let block = self.take_indexed(lane, neutral, size)?;
        let handed = self.hand_out(block, size, requested, counters)?;
        self.blocks[handed.block].lane = lane;
        Some(handed)
    }

    /// As [`bin_free`](Self::bin_free), else merged and indexed: a free that nothing unusual concerns. Whether it was one; if not, nothing has
    /// changed. O(1), or O(log n).
    #[inline(always)]
    pub(crate) fn usual_free(&mut self, id: BlockId, generation: u32, counters: &ArenaCounters) -> bool {
        self.bin_free(id, generation, counters) || self.index_free(id, generation, counters)
    }

    #[inline(never)]
    fn index_free(&mut self, id: BlockId, generation: u32, counters: &ArenaCounters) -> bool {
        if !self.is_live(id, generation) || self.blocks[id].uses != NONE {
            return false;
        }
        self.free_past_bin(id, counters);
        true
    }

    /// Frees a block that other streams used, unless its lane is a capture's. The streams that an event must be recorded on; `None`, with
    /// nothing changed, if it was none.
    pub(super) fn recorded_free(
        &mut self,
        id: BlockId,
        generation: u32,
        counters: &ArenaCounters,
    ) -> Option<Vec<Arc<StreamCore>>> {
        if !self.is_live(id, generation) {
            return None;
        }
        let block = &self.blocks[id];
        if block.uses == NONE || self.lanes[block.lane as usize].kind == LaneKind::Capture {
            return None;
        }
        self.request_free(id, counters);
        Some(self.make_pending(id, SHARE_BLOCKS, counters))
    }

    /// Frees a live block into its lane's bin, if nothing but its own stream used it. Whether it did; if not, nothing has changed. O(1).
    #[inline(always)]
    fn bin_free(&mut self, id: BlockId, generation: u32, counters: &ArenaCounters) -> bool {
        let Some(block) = self.blocks.get_mut(id) else { return false };
        if block.generation != generation || block.state != BlockState::Live || block.uses != NONE {
            return false;
        }
        let bytes = to_bytes(block.size);
        let Some(lane) = self.lanes.get_mut(block.lane as usize) else { return false };
        let Some(bins) = &mut lane.bins else { return false };
        if bytes >= self.rules.max_split || !bins.push(block, id) {
            return false;
        }
        block.state = BlockState::Binned;
        counters.freed(lane.part, bytes as i64, block.requested as i64);
        counters.went_into_bin(lane.part, bytes as i64, block.is_split());
        self.repetition.block_freed(counters);
        true
    }
}
