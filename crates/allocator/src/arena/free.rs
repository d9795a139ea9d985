//! Freeing: from live to pending or free, merging with free neighbours, and emptying bins.

use super::{ArenaState, Block, BlockId, BlockState, NONE};
use crate::counters::ArenaCounters;
use crate::history::Action;
use crate::ids::Part;
use crate::units::to_bytes;

impl ArenaState {
    /// The block, if it is live and of that generation.
    pub(crate) fn is_live(&self, id: BlockId, generation: u32) -> bool {
        self.blocks.current(id, generation).is_some_and(|b| b.state == BlockState::Live)
    }

    /// A free of a block that nothing but its own stream used: it is free at once. O(1) into a bin, else O(log n).
    pub(crate) fn free_now(&mut self, id: BlockId, counters: &ArenaCounters) {
        let (part, bytes) = self.disowned(id, counters);
        counters.freed(part, bytes, self.blocks[id].requested as i64);
        self.put_free(id, counters);
    }

    /// First half of a free: the block is no longer its owner's. It counts as active until [`complete_free`](Self::complete_free).
    pub(crate) fn request_free(&mut self, id: BlockId, counters: &ArenaCounters) {
        let (part, bytes) = self.disowned(id, counters);
        counters.became_pending(part, bytes);
        self.repetition.block_freed(counters);
    }

    /// Second half of a free: no stream can use the block any more, so it becomes free. O(1) into a bin, else O(log n).
    pub(crate) fn complete_free(&mut self, id: BlockId, counters: &ArenaCounters) {
        self.note_freed(id, &[Action::FreeCompleted], None);
        self.forget_uses(id);
        let block = &self.blocks[id];
        let (part, bytes) = (self.lanes[block.lane as usize].part, to_bytes(block.size) as i64);
        counters.was_pending(part, bytes, block.requested as i64);
        self.put_free(id, counters);
    }

    /// What every free begins with. Returns the block's part and bytes.
    #[inline(always)]
    fn disowned(&mut self, id: BlockId, counters: &ArenaCounters) -> (Part, i64) {
        let block = &mut self.blocks[id];
        block.state = BlockState::Pending;
        let lane = &self.lanes[block.lane as usize];
        let (part, bytes) = (lane.part, to_bytes(block.size));
        if bytes >= self.rules.max_split {
            counters.oversize_freed();
        }
        if self.rules.shared
            && let Some(pool) = &self.slots[lane.slot as usize].counters
        {
            pool.allocated_bytes.decrease(part, bytes as i64);
        }
        (part, bytes as i64)
    }

    /// Puts a block that nobody uses into its lane's bin, or merges and indexes it.
    #[inline(always)]
    fn put_free(&mut self, id: BlockId, counters: &ArenaCounters) {
        let lane = &mut self.lanes[self.blocks[id].lane as usize];
        let part = lane.part;
        self.repetition.block_freed(counters);
        let block = &mut self.blocks[id];
        if let Some(bins) = &mut lane.bins
            && bins.push(block, id)
        {
            block.state = BlockState::Binned;
            counters.went_into_bin(part, to_bytes(block.size) as i64);
            return;
        }
        self.repetition.look(counters);
        if self.rules.pages {
            self.stamp(id);
        }
        self.merge(id, 0, 0, counters);
    }

    /// Merges a block that is in no index with its free neighbours and puts the result into the index. `counted` blocks and bytes
    /// of it are in `inactive_split` already.
    pub(crate) fn merge(&mut self, id: BlockId, counted: i64, counted_bytes: i64, counters: &ArenaCounters) {
        if self.idle.away {
            return self.hold_freed(id, counted, counted_bytes, counters);
        }
        let (mut blocks_change, mut bytes_change) = (-counted, -counted_bytes);
        let Block { prev, next, lane, .. } = self.blocks[id];
        if let Some(size) = self.free_size(prev, lane) {
            (blocks_change, bytes_change) = (blocks_change - 1, bytes_change - size);
            self.unindex(prev);
            self.join(id, prev);
        }
        if let Some(size) = self.free_size(next, lane) {
            (blocks_change, bytes_change) = (blocks_change - 1, bytes_change - size);
            self.unindex(next);
            self.join(id, next);
        }
        let Self { lanes, blocks, segments, slots, idle_segments, .. } = self;
        let block = &mut blocks[id];
        block.state = BlockState::Free;
        let lane = &mut lanes[lane as usize];
        if block.is_split() {
            (blocks_change, bytes_change) = (blocks_change + 1, bytes_change + to_bytes(block.size) as i64);
        } else {
            block.age = slots[lane.slot as usize].age[lane.part.index()] as u32;
            idle_segments.came(lane.part, block.size, id);
            if let Some(segment) = segments.get_mut(block.segment) {
                segment.idle_since = lane.core.open_mark();
                segment.idle_seen = None;
            }
        }
        // Each as one movement: peaks are made of movements.
        counters.split(lane.part, blocks_change, bytes_change);
        lane.index.insert(blocks, segments, id);
    }

    /// The bytes of a neighbour that a block which becomes free in `lane` takes over, if it does.
    #[inline(always)]
    fn free_size(&self, neighbour: BlockId, lane: u32) -> Option<i64> {
        let block = self.blocks.get(neighbour)?;
        let taken = block.state == BlockState::Free && (block.lane == lane || self.may_absorb(lane, block.lane));
        taken.then_some(to_bytes(block.size) as i64)
    }

    /// Adds the range of a neighbour that is in no index to `id`; the neighbour's record goes.
    #[inline(always)]
    pub(crate) fn join(&mut self, id: BlockId, neighbour: BlockId) {
        let gone = self.blocks.remove(neighbour);
        let block = &mut self.blocks[id];
        block.size += gone.size;
        if gone.next == id {
            block.offset = gone.offset;
            block.prev = gone.prev;
            if gone.prev != NONE {
                self.blocks[gone.prev].next = id;
            } else if let Some(segment) = self.segments.get_mut(gone.segment) {
                segment.first = id;
            }
        } else {
            block.next = gone.next;
            if gone.next != NONE {
                self.blocks[gone.next].prev = id;
            }
        }
    }

    /// Empties the bins of all lanes: what was in them is merged and indexed. Returns whether there was anything. O(n).
    pub(crate) fn flush_bins(&mut self, counters: &ArenaCounters) -> bool {
        let mut any = false;
        for lane in 0..self.lanes.len() {
            let Self { lanes, blocks, .. } = self;
            let Some(bins) = lanes[lane].bins.as_mut().filter(|b| b.len() > 0) else { continue };
            let binned = bins.drain(blocks);
            any = true;
            for id in binned {
                let bytes = to_bytes(self.blocks[id].size) as i64;
                // It is counted with the free blocks until it is merged.
                counters.came_out_of_bin(self.lanes[lane].part, bytes);
                // In no index while it is merged.
                self.blocks[id].state = BlockState::Pending;
                self.stamp(id);
                self.merge(id, 1, bytes, counters);
            }
        }
        any
    }
}
