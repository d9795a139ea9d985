//! Serving a request: best fit, splitting, and the counters that move with a hand-out.

use gpupool_device::Address;

use super::{ArenaState, Backing, Block, BlockId, BlockState, LaneKind, Memory, NONE, Segment};
use crate::captures::Range;
use crate::counters::ArenaCounters;
use crate::history::Action;
use crate::ids::Part;
use crate::index::{Found, Key};
use crate::units::{Units, to_bytes, to_units};

/// A block that was handed out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handed {
    pub(crate) block: BlockId,
    pub(crate) generation: u32,
    pub(crate) address: Address,
    pub(crate) bytes: u64,
}

impl ArenaState {
    /// Takes the best block for `size` bytes out of a lane, or `None`. O(1) from a bin, else O(log n) in one size class.
    ///
    /// `count_age` says whether this search makes the part's free blocks older (garbage collection is in force).
    pub(crate) fn take(&mut self, lane: u32, size: u64, count_age: bool, counters: &ArenaCounters) -> Option<BlockId> {
        self.take_from(lane, None, size, count_age, counters)
    }

    /// As [`take`](Self::take), from the better of a lane and the pool's neutral lane.
    pub(crate) fn take_from(
        &mut self,
        lane: u32,
        neutral: Option<u32>,
        size: u64,
        count_age: bool,
        counters: &ArenaCounters,
    ) -> Option<BlockId> {
        if count_age {
            let l = &self.lanes[lane as usize];
            let part = l.part.index();
            self.slots[l.slot as usize].age[part] += 1;
        }
        let Self { lanes, blocks, .. } = self;
        if let Some(bins) = &mut lanes[lane as usize].bins
            && let Some(id) = bins.pop(blocks, to_units(size)?)
        {
            // It is counted with the free blocks until it is placed.
            counters.came_out_of_bin(lanes[lane as usize].part, size as i64);
            return Some(id);
        }
        self.take_indexed(lane, neutral, size)
    }

    /// As [`take_from`](Self::take_from), from the indexes alone. O(log n) in one size class.
    pub(super) fn take_indexed(&mut self, lane: u32, neutral: Option<u32>, size: u64) -> Option<BlockId> {
        let units = to_units(size)?;
        let Self { lanes, blocks, segments, rules, .. } = self;
        let index = |lane: u32| &lanes[lane as usize].index;
        let own = index(lane).best_fit(blocks, units);
        // What the neutral lane has is mostly larger.
        let better = |lane: &u32| own.is_none_or(|own| index(*lane).has_within(units, blocks[own.id].size));
        let shared = neutral.filter(better).and_then(|lane| index(lane).best_fit(blocks, units));
        let fit = match (own, shared) {
            (Some(own), Some(shared)) => {
                let key = |fit: Found| Key::of(blocks, segments, fit.id);
                if key(own) <= key(shared) { own } else { shared }
            }
            (own, shared) => own.or(shared)?,
        };
        let id = fit.id;
        let found = to_bytes(blocks[id].size);
        // An oversize block is not carved up for a small request, nor wasted on a much smaller oversize one.
        if size < rules.max_split {
            if found >= rules.max_split {
                return None;
            }
        } else if found >= size.saturating_add(rules.non_split_slack) {
            return None;
        }
        if self.rules.cuts_at > 0 && !self.uncut && self.pinned_piece(id, units, self.rules.cuts_at).is_some() {
            // A handle is cut first: see `pages::cut`.
            return None;
        }
        let Self { lanes, blocks, .. } = self;
        lanes[blocks[id].lane as usize].index.remove_found(blocks, fit);
        Some(id)
    }

    /// As [`take`](Self::take), even where that pins a large handle.
    pub(crate) fn take_uncut(&mut self, lane: u32, size: u64, counters: &ArenaCounters) -> Option<BlockId> {
        self.uncut = true;
        let taken = self.take_from(lane, None, size, false, counters);
        self.uncut = false;
        taken
    }

    /// Hands out a block that is in no index, splitting it where the rules say so.
    pub(crate) fn hand_out(
        &mut self,
        id: BlockId,
        size: u64,
        requested: u64,
        counters: &ArenaCounters,
    ) -> Option<Handed> {
        let wanted = to_units(size)?;
        let block = &self.blocks[id];
        let lane = &self.lanes[block.lane as usize];
        let (part, slot) = (lane.part, lane.slot as usize);
        let rest = block.size - wanted;
        let splits = !self.slots[slot].no_split
            && match part {
                Part::Small => rest > 0,
                Part::Large => size < self.rules.max_split && to_bytes(rest) > self.rules.large_remainder,
            };
        self.place(id, if splits { wanted } else { self.blocks[id].size }, counters);
        self.activate(id, requested, counters)
    }

    /// Cuts a block that is in no index down to `front` units, or leaves it whole if it has no more, and moves the counters of free
    /// blocks in split segments.
    pub(crate) fn place(&mut self, id: BlockId, front: Units, counters: &ArenaCounters) {
        let block = &self.blocks[id];
        let (part, size, was_split) = (self.lanes[block.lane as usize].part, block.size, block.is_split());
        if front < size {
            self.split(id, front);
            if was_split {
                counters.split(part, 0, -(to_bytes(front) as i64));
            } else {
                counters.split(part, 1, to_bytes(size - front) as i64);
            }
        } else if was_split {
            counters.split(part, -1, -(to_bytes(size) as i64));
        }
    }

    /// Makes a block live and moves the counters of a hand-out.
    pub(crate) fn activate(&mut self, id: BlockId, requested: u64, counters: &ArenaCounters) -> Option<Handed> {
        self.keep.hold();
        let block = &mut self.blocks[id];
        block.state = BlockState::Live;
        block.generation = block.generation.wrapping_add(1);
        block.requested = requested;
        let lane = &self.lanes[block.lane as usize];
        let (part, bytes) = (lane.part, to_bytes(block.size));
        counters.handed_out(part, bytes as i64, requested as i64);
        if bytes >= self.rules.max_split {
            counters.oversize_handed_out();
        }
        let address = self.segments.address(block.segment, block.offset)?;
        let slot = &mut self.slots[lane.slot as usize];
        if self.rules.shared
            && let Some(pool) = &slot.counters
        {
            pool.allocated_bytes.increase(part, bytes as i64);
        }
        if let Some(recorded) = &mut slot.recorded
            && lane.kind != LaneKind::Stream
        {
            note(&mut recorded.written, Range { address, bytes });
        }
        Some(Handed { block: id, generation: block.generation, address, bytes })
    }

    /// Cuts a block in two: `id` keeps the front, the tail becomes a free block of the same lane. The tail keeps the request size
    /// that the block had, as in PyTorch.
    pub(crate) fn split(&mut self, id: BlockId, front: Units) -> BlockId {
        let tail = self.divide(id, front);
        self.index(tail);
        tail
    }

    /// As [`split`](Self::split), with the tail in no index.
    pub(crate) fn divide(&mut self, id: BlockId, front: Units) -> BlockId {
        let block = &self.blocks[id];
        let tail = Block {
            offset: block.offset + front,
            size: block.size - front,
            prev: id,
            generation: 0,
            uses: NONE,
            left: NONE,
            right: NONE,
            state: BlockState::Held,
            ..block.clone()
        };
        let next = block.next;
        let tail = self.blocks.insert(tail);
        if next != NONE {
            self.blocks[next].prev = tail;
        }
        let block = &mut self.blocks[id];
        block.next = tail;
        block.size = front;
        tail
    }

    /// Puts a block into the index of its lane.
    pub(crate) fn index(&mut self, id: BlockId) {
        let Self { lanes, blocks, segments, slots, .. } = self;
        let lane = &mut lanes[blocks[id].lane as usize];
        let block = &mut blocks[id];
        block.state = BlockState::Free;
        block.age = slots[lane.slot as usize].age[lane.part.index()] as u32;
        lane.index.insert(blocks, segments, id);
    }

    /// Takes a block out of the index of its lane.
    pub(crate) fn unindex(&mut self, id: BlockId) {
        let Self { lanes, blocks, segments, .. } = self;
        lanes[blocks[id].lane as usize].index.remove(blocks, segments, id);
    }

    /// Adds a segment as one block that is in no index and not yet handed out. `None` beyond 2 TiB.
    pub(crate) fn add_segment(&mut self, memory: Memory, lane: u32) -> Option<BlockId> {
        let size = to_units(memory.bytes)?;
        let tie = if self.rules.tie_by_address { memory.base.0 } else { memory.registration };
        let (slot, part) = (self.lanes[lane as usize].slot, self.lanes[lane as usize].part);
        let stream = self.lanes[lane as usize].core.id;
        let segment = self.segments.insert(Segment {
            memory,
            slot,
            part,
            lane,
            stream,
            first: NONE,
            tie,
            idle_since: 0,
            idle_seen: None,
            pages: None,
            away: Vec::new(),
        });
        let id = self.blocks.insert(Block {
            requested: 0,
            segment,
            offset: 0,
            size,
            prev: NONE,
            next: NONE,
            left: NONE,
            right: NONE,
            lane,
            uses: NONE,
            generation: 0,
            age: 0,
            state: BlockState::Free,
        });
        if let Some(s) = self.segments.get_mut(segment) {
            s.first = id;
        }
        if self.segments.get(segment).is_some_and(|s| !matches!(s.memory.backing, Backing::Pages)) {
            self.note_segment(segment, Action::SegmentAlloc);
        }
        Some(id)
    }

    /// Takes a segment out whose only block is `id`, free and in the index.
    pub(crate) fn detach(&mut self, id: BlockId) -> Option<Segment> {
        debug_assert!(self.blocks[id].state == BlockState::Free && !self.blocks[id].is_split());
        self.unindex(id);
        let block = self.blocks.remove(id);
        self.note_segment(block.segment, Action::SegmentFree);
        self.segments.remove(block.segment)
    }

    /// Puts a segment in as one free block: one that came from another arena, or that could not be given back.
    pub(crate) fn attach(&mut self, memory: Memory, lane: u32) -> Option<BlockId> {
        let id = self.add_segment(memory, lane)?;
        let mark = self.lanes[lane as usize].core.open_mark();
        if let Some(s) = self.segments.get_mut(self.blocks[id].segment) {
            s.idle_since = mark;
        }
        self.index(id);
        Some(id)
    }
}

/// Adds a range to a list of ranges in order that neither overlap nor touch. What a capture hands out it mostly hands out again, so the
/// list stays short, and looking is what this mostly does. O(log n), and O(n) for a new range.
fn note(ranges: &mut Vec<Range>, range: Range) {
    let first = ranges.partition_point(|r| r.end() < range.address);
    let Some(known) = ranges.get(first).filter(|r| r.address <= range.end()) else {
        return ranges.insert(first, range);
    };
    if known.address <= range.address && range.end() <= known.end() {
        return;
    }
    let after = first + ranges[first..].partition_point(|r| r.address <= range.end());
    let address = known.address.min(range.address);
    let end = ranges[after - 1].end().max(range.end());
    ranges.drain(first + 1..after);
    ranges[first] = Range { address, bytes: end.offset_from(address) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noting_ranges_one_by_one_gives_what_merging_them_gives() {
        let mut x = 0x2545_F491_4F6C_DD1Du64;
        for _ in 0..200 {
            let (mut all, mut noted) = (Vec::new(), Vec::new());
            for _ in 0..40 {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                let range = Range { address: Address(x % 500), bytes: 1 + (x >> 32) % 40 };
                all.push(range);
                note(&mut noted, range);
                assert_eq!(noted, Range::merged(all.clone()));
            }
        }
    }
}
