//! Freeing: from live to pending or free, merging with free neighbours, and emptying bins.

use super::lane::may_absorb;
use super::{ArenaState, Bins, Block, BlockId, BlockState, Lane, LaneKind, Segments, Vacancies, or_edge};
use crate::counters::ArenaCounters;
use crate::history::Action;
use crate::ids::Part;
use crate::units::{Units, to_bytes};

/// What a block that is to be free was counted as until now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Was {
    /// Live, and counted as [freed](ArenaCounters::freed).
    Live,
    /// Free, in a segment that holds others too.
    Split,
    /// Something else that is not free in such a segment.
    Elsewhere,
}

/// Where a neighbour lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    Before,
    After,
}

impl Was {
    /// By so many free blocks, and bytes, in segments that hold others too are there fewer, as long as the block is nowhere.
    #[inline(always)]
    pub(crate) fn counted(self, size: Units) -> (i64, i64) {
        if self == Self::Split { (-1, -(to_bytes(size) as i64)) } else { (0, 0) }
    }
}

impl ArenaState {
    /// A free of a block that nothing but its own stream used: it is free at once. O(1) into a bin, else O(log n).
    pub(crate) fn free_now(&mut self, id: BlockId, counters: &ArenaCounters) {
        self.free_in_place(id, self.part_of(id), counters);
    }

    /// The part that a block belongs to.
    #[inline(always)]
    pub(super) fn part_of(&self, id: BlockId) -> Part {
        self.lanes[self.blocks[id].lane as usize].part
    }

    /// As [`free_now`](Self::free_now), of a block of this part, with all that it calls put into its caller.
    #[inline(always)]
    pub(super) fn free_in_place(&mut self, id: BlockId, part: Part, counters: &ArenaCounters) {
        let bytes = self.disowned(id, part, counters);
        counters.freed(&mut self.watches, part, bytes, self.blocks[id].requested as i64);
        self.put_free(id, part, Was::Live, counters);
    }

    /// First half of a free: the block is no longer its owner's. It counts as active until [`complete_free`](Self::complete_free).
    pub(crate) fn request_free(&mut self, id: BlockId, counters: &ArenaCounters) {
        let part = self.part_of(id);
        let bytes = self.disowned(id, part, counters);
        counters.became_pending(&mut self.watches, part, bytes);
        if self.rules.trades {
            self.repetition.block_freed(counters);
        }
    }

    /// Second half of a free: no stream can use the block any more, so it becomes free. O(1) into a bin, else O(log n).
    pub(crate) fn complete_free(&mut self, id: BlockId, counters: &ArenaCounters) {
        self.note_freed(id, &[Action::FreeCompleted], None);
        self.forget_uses(id);
        let (block, part) = (&self.blocks[id], self.part_of(id));
        counters.was_pending(part, to_bytes(block.size) as i64, block.requested as i64);
        self.put_free(id, part, Was::Elsewhere, counters);
    }

    /// What every free begins with. Returns the block's bytes.
    #[inline(always)]
    fn disowned(&mut self, id: BlockId, part: Part, counters: &ArenaCounters) -> i64 {
        let block = &mut self.blocks[id];
        block.state = BlockState::Pending;
        let lane = &self.lanes[block.lane as usize];
        let bytes = to_bytes(block.size);
        if bytes >= self.rules.max_split {
            counters.oversize_freed();
        }
        if lane.counts_apart
            && let Some(pool) = &self.slots[lane.slot as usize].counters
        {
            pool.allocated_bytes.decrease(part, bytes as i64);
        }
        bytes as i64
    }

    /// Puts a block that nobody uses into its lane's bin, or merges and indexes it.
    #[inline(always)]
    fn put_free(&mut self, id: BlockId, part: Part, was: Was, counters: &ArenaCounters) {
        if self.rules.trades {
            self.repetition.block_freed(counters);
        }
        let takes_bins = self.takes_bins();
        let Self { lanes, blocks, bins, watches, .. } = self;
        let block = &mut blocks[id];
        if takes_bins && Bins::may_take(block.size) {
            let lane = &lanes[block.lane as usize];
            if lane.kind != LaneKind::Neutral && bins.push(part, block, id) {
                block.state = BlockState::Binned;
                match was {
                    Was::Live => counters.freed_to_bin(watches, part, to_bytes(block.size) as i64),
                    _ => counters.went_into_bin(watches, part, to_bytes(block.size) as i64),
                }
                return;
            }
        }
        if self.rules.trades {
            self.repetition.look(counters);
        }
        if self.rules.pages {
            self.stamp(id);
        }
        self.merge_in_place(id, part, was, counters);
    }

    /// Merges a block that is in no index with its free neighbours and puts the result into the index.
    pub(crate) fn merge(&mut self, id: BlockId, was: Was, counters: &ArenaCounters) {
        self.merge_in_place(id, self.part_of(id), was, counters);
    }

    #[inline(always)]
    fn merge_in_place(&mut self, id: BlockId, part: Part, was: Was, counters: &ArenaCounters) {
        if self.idle.away {
            return self.hold_freed(id, was, counters);
        }
        let Block { prev, next, lane, size, .. } = self.blocks[id];
        let (mut blocks_change, mut bytes_change) = was.counted(size);
        let was_bytes = to_bytes(size) as i64;
        let Self { rules, lanes, blocks, segments, slots, idle_segments, watches, .. } = self;
        // Where they lie is looked up once.
        let (lanes, (records, vacancies)): (&mut [Lane], _) = (lanes, blocks.parts());
        for neighbour in [(prev, Side::Before), (next, Side::After)] {
            let absorbed = absorb((records, &mut *vacancies), lanes, segments, (id, lane), neighbour);
            blocks_change -= i64::from(absorbed);
        }
        let block = &mut records[id as usize];
        block.state = BlockState::Free;
        let lane = &mut lanes[lane as usize];
        // What was absorbed is as free as before.
        bytes_change += was_bytes;
        if block.is_split() {
            blocks_change += 1;
        } else {
            bytes_change -= to_bytes(block.size) as i64;
            block.age = slots[lane.slot as usize].age[part.index()] as u32;
            if let Some(segment) = segments.get_mut(block.segment) {
                segment.idle_since = lane.core.open_mark();
                segment.idle_seen = None;
            }
            if rules.trades {
                idle_segments.came(part, block.size, block.segment);
            }
        }
        // Each as one movement: peaks are made of movements.
        match was {
            Was::Live => counters.freed_to_index(watches, part, was_bytes, (blocks_change, bytes_change)),
            _ => counters.split(watches, part, blocks_change, bytes_change),
        }
        lane.index.insert(records, segments, id);
    }

    /// Adds the range of a neighbour that is in no index to `id`; the neighbour's record goes.
    pub(crate) fn join(&mut self, id: BlockId, neighbour: BlockId) {
        let side = if self.blocks[neighbour].next == id { Side::Before } else { Side::After };
        join(self.blocks.parts(), &mut self.segments, id, (neighbour, side));
    }

    /// Empties the bins: what was in them is merged and indexed. Returns whether there was anything. O(n).
    pub(crate) fn flush_bins(&mut self, counters: &ArenaCounters) -> bool {
        if counters.binned().0 == 0 {
            return false;
        }
        let Self { blocks, bins, .. } = self;
        let binned = bins.drain(blocks);
        for id in binned.iter().copied() {
            let block = &mut self.blocks[id];
            let bytes = to_bytes(block.size) as i64;
            // In no index while it is merged.
            block.state = BlockState::Pending;
            // It is counted with the free blocks until it is merged.
            counters.came_out_of_bin(self.lanes[block.lane as usize].part, bytes);
            self.stamp(id);
            self.merge(id, Was::Split, counters);
        }
        !binned.is_empty()
    }
}

/// Takes over a neighbour of a block that becomes free in `lane`, if it is free too. Returns whether it was.
#[inline(always)]
fn absorb(
    (records, vacancies): (&mut [Block], &mut Vacancies),
    lanes: &mut [Lane],
    segments: &mut Segments,
    (id, lane): (BlockId, u32),
    (neighbour, side): (BlockId, Side),
) -> bool {
    let block = &records[or_edge(neighbour)];
    let of = block.lane;
    if block.state != BlockState::Free || !may_absorb(lanes, lane, of) {
        return false;
    }
    lanes[of as usize].index.remove(records, segments, neighbour);
    join((records, vacancies), segments, id, (neighbour, side));
    true
}

/// As [`ArenaState::join`].
#[inline(always)]
fn join(
    (records, vacancies): (&mut [Block], &mut Vacancies),
    segments: &mut Segments,
    id: BlockId,
    (neighbour, side): (BlockId, Side),
) {
    let gone = vacancies.add(records, neighbour);
    let block = &mut records[id as usize];
    block.size += gone.size;
    match side {
        Side::Before => {
            (block.offset, block.prev) = (gone.offset, gone.prev);
            // There is no such record if nothing lies beyond.
            if let Some(before) = records.get_mut(gone.prev as usize) {
                before.next = id;
            } else if let Some(segment) = segments.get_mut(gone.segment) {
                segment.first = id;
            }
        }
        Side::After => {
            block.next = gone.next;
            records[or_edge(gone.next)].prev = id;
        }
    }
}
