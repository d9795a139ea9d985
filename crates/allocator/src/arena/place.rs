//! Serving a request: best fit, splitting, and the counters that move with a hand-out.

use gpupool_device::Address;

use super::{
    ArenaState, Backing, Block, BlockId, BlockKey, BlockState, LaneKind, Memory, NONE, Segment, Segments, Want, or_edge,
};
use crate::captures::Range;
use crate::counters::ArenaCounters;
use crate::history::Action;
use crate::ids::Part;
use crate::index::{Found, Key};
use crate::units::{Units, to_bytes, to_units};

/// A block that was handed out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handed {
    pub(crate) key: BlockKey,
    pub(crate) address: Address,
    pub(crate) bytes: u64,
}

impl Handed {
    /// The block's record.
    #[inline(always)]
    pub(crate) fn block(&self) -> BlockId {
        self.key.id()
    }
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
        let Self { lanes, blocks, bins, .. } = self;
        let part = lanes[lane as usize].part;
        if let Some(id) = bins.pop(blocks, part, lane, to_units(size)?) {
            // It is counted with the free blocks until it is placed.
            counters.came_out_of_bin(part, size as i64);
            return Some(id);
        }
        self.take_indexed(lane, neutral, to_units(size)?, counters)
    }

    /// Hands out the best fit of a lane's free index, or in a capture of that of the pool's neutral lane: a request of the shortest way that
    /// no bin serves. O(log n) in one size class.
    #[inline(always)]
    pub(super) fn index_hit(
        &mut self,
        (lane, neutral): (u32, Option<u32>),
        want: Want,
        counters: &ArenaCounters,
    ) -> Option<Handed> {
        let (from, fit) = self.usable_fit(lane, neutral, want.units, counters)?;
        let handed = self.cut_and_hand_out((fit.id, from, Some(fit)), want, counters)?;
        if neutral.is_some() {
            self.blocks[handed.block()].lane = lane;
        }
        Some(handed)
    }

    /// As [`take_from`](Self::take_from), from the indexes alone. O(log n) in one size class.
    fn take_indexed(
        &mut self,
        lane: u32,
        neutral: Option<u32>,
        units: Units,
        counters: &ArenaCounters,
    ) -> Option<BlockId> {
        let (from, fit) = self.usable_fit(lane, neutral, units, counters)?;
        let lane = &mut self.lanes[from as usize];
        lane.index.remove_found(&mut self.blocks, fit);
        let block = &self.blocks[fit.id];
        if !block.is_split() && self.rules.trades {
            self.idle_segments.went(lane.part, block.size, block.segment);
        }
        Some(fit.id)
    }

    /// The best fit of a lane, or the better one of the pool's neutral lane, and which of the two has it, if a request may have it. O(log n) in one
    /// size class.
    #[inline(always)]
    fn usable_fit(
        &mut self,
        lane: u32,
        neutral: Option<u32>,
        units: Units,
        counters: &ArenaCounters,
    ) -> Option<(u32, Found)> {
        let (from, fit) = match neutral {
            Some(neutral) if !self.lanes[neutral as usize].index.is_empty() => self.better_of(lane, neutral, units)?,
            // Not found before it is known who needs it: what `better_of` takes would come through memory for all.
            _ => (lane, self.lanes[lane as usize].index.best_fit(&self.blocks, units)?),
        };
        let (size, found, rules) = (to_bytes(units), to_bytes(self.blocks[fit.id].size), &self.rules);
        // An oversize block is not carved up for a small request, nor wasted on a much smaller oversize one.
        if size < rules.max_split {
            if found >= rules.max_split {
                return None;
            }
        } else if found >= size.saturating_add(rules.non_split_slack) {
            return None;
        }
        if rules.cuts_at > 0
            && !self.uncut
            && self.pinned_piece(fit.id, units, rules.cuts_at).is_some()
            && !self.grows_instead(size, counters)
        {
            // A handle may be cut first: see `pages::cut`.
            return None;
        }
        Some((from, fit))
    }

    /// The better of a lane's best fit and that of the pool's neutral lane, and which of the two has it.
    #[inline(never)]
    fn better_of(&self, lane: u32, neutral: u32, units: Units) -> Option<(u32, Found)> {
        let Self { lanes, blocks, segments, .. } = self;
        let own = lanes[lane as usize].index.best_fit(blocks, units);
        let index = &lanes[neutral as usize].index;
        // What the neutral lane has is mostly larger.
        let larger = own.is_some_and(|own| !index.has_within(units, blocks[own.id].size));
        let shared = if larger { None } else { index.best_fit(blocks, units) };
        let key = |fit: Found| Key::of(blocks, segments, fit.id);
        match (own, shared) {
            (Some(own), shared) if shared.is_none_or(|shared| key(own) <= key(shared)) => Some((lane, own)),
            (_, shared) => Some((neutral, shared?)),
        }
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
        let (part, lane) = (self.part_of(id), self.blocks[id].lane);
        self.cut_and_hand_out((id, lane, None), Want { part, units: to_units(size)?, requested }, counters)
    }

    /// As [`hand_out`](Self::hand_out), of a block of this lane that may have been found in its index and not yet been taken out: all in one piece, in
    /// which where the records lie is looked up once.
    #[inline(always)]
    fn cut_and_hand_out(
        &mut self,
        (id, lane, found): (BlockId, u32, Option<Found>),
        Want { part, units: wanted, requested }: Want,
        counters: &ArenaCounters,
    ) -> Option<Handed> {
        self.keep.hold();
        let Self { lanes, blocks, segments, slots, rules, idle_segments, .. } = self;
        let block = &blocks[id];
        let lane = &mut lanes[lane as usize];
        debug_assert_eq!(lane.part, part);
        let (size, was_split) = (block.size, block.is_split());
        let rest = size - wanted;
        let least = match part {
            Part::Small => 0,
            Part::Large if to_bytes(wanted) < rules.max_split => rules.large_remainder,
            Part::Large => u64::MAX,
        };
        let is_cut = to_bytes(rest) > least && !slots[lane.slot as usize].no_split;
        let tail = if is_cut { blocks.vacancy() } else { NONE };
        let records: &mut [Block] = blocks;
        if let Some(found) = found {
            lane.index.remove_found(records, found);
            if !was_split && rules.trades {
                idle_segments.went(part, size, records[id as usize].segment);
            }
        }
        if is_cut {
            cut(records, id, wanted, (tail, BlockState::Free));
            lane.index.insert(records, segments, tail);
        }
        let handed = make_live(records, id, requested, segments)?;
        let bytes = handed.bytes as i64;
        let blocks = i64::from(is_cut) - i64::from(was_split);
        let split = match (was_split, is_cut) {
            (true, _) => (blocks, -bytes),
            (false, true) => (blocks, to_bytes(rest) as i64),
            (false, false) => (blocks, 0),
        };
        let of = (lane.kind, lane.counts_apart);
        counters.handed_out(&mut self.watches, part, bytes, requested as i64, split);
        self.note_unusual(handed, of, counters);
        Some(handed)
    }

    /// Cuts a block that is in no index down to `front` units, or leaves it whole if it has no more, and moves the counters of free
    /// blocks in split segments.
    pub(crate) fn place(&mut self, id: BlockId, front: Units, counters: &ArenaCounters) {
        let block = &self.blocks[id];
        let (part, size, was_split) = (self.lanes[block.lane as usize].part, block.size, block.is_split());
        if front < size {
            let tail = self.divide(id, front);
            self.index(tail);
            if was_split {
                counters.split(&mut self.watches, part, 0, -(to_bytes(front) as i64));
            } else {
                counters.split(&mut self.watches, part, 1, to_bytes(size - front) as i64);
            }
        } else if was_split {
            counters.split(&mut self.watches, part, -1, -(to_bytes(size) as i64));
        }
    }

    /// Makes a block live and moves the counters of a hand-out.
    pub(crate) fn activate(&mut self, id: BlockId, requested: u64, counters: &ArenaCounters) -> Option<Handed> {
        self.keep.hold();
        let lane = &self.lanes[self.blocks[id].lane as usize];
        let (part, of) = (lane.part, (lane.kind, lane.counts_apart));
        let handed = make_live(&mut self.blocks, id, requested, &self.segments)?;
        counters.handed_out(&mut self.watches, part, handed.bytes as i64, requested as i64, (0, 0));
        self.note_unusual(handed, of, counters);
        Some(handed)
    }

    /// What is noted of few blocks that are handed out, by what their lane is.
    #[inline(always)]
    fn note_unusual(&mut self, handed: Handed, (kind, counts_apart): (LaneKind, bool), counters: &ArenaCounters) {
        if handed.bytes >= self.rules.max_split {
            counters.oversize_handed_out();
        }
        if counts_apart || (kind != LaneKind::Stream && !self.segments.is_noted(&self.blocks[handed.block()])) {
            self.note_hand_out(handed.block(), handed.address, handed.bytes);
        }
    }

    /// What a pool counts for itself, and what a capture notes of what it hands out. In single words, so that the callers need not put theirs into
    /// memory.
    #[inline(never)]
    fn note_hand_out(&mut self, id: BlockId, address: Address, bytes: u64) {
        let lane = &self.lanes[self.blocks[id].lane as usize];
        let slot = &mut self.slots[lane.slot as usize];
        if lane.counts_apart
            && let Some(pool) = &slot.counters
        {
            pool.allocated_bytes.increase(lane.part, bytes as i64);
        }
        if let Some(recorded) = &mut slot.recorded
            && lane.kind != LaneKind::Stream
        {
            note(&mut recorded.written, Range { address, bytes });
            let block = &self.blocks[id];
            if let Some(segment) = self.segments.get_mut(block.segment) {
                let (noted, new) = (&mut segment.noted, block.offset..block.offset + block.size);
                // What was handed out mostly becomes one range.
                if noted.start <= new.end && new.start <= noted.end {
                    *noted = noted.start.min(new.start)..noted.end.max(new.end);
                } else if noted.len() < new.len() {
                    *noted = new;
                }
            }
        }
    }

    /// Cuts a block in two: `id` keeps the front, the tail is in no index. The tail keeps the request size that the block had, as in
    /// PyTorch.
    pub(crate) fn divide(&mut self, id: BlockId, front: Units) -> BlockId {
        let tail = self.blocks.vacancy();
        cut(&mut self.blocks, id, front, (tail, BlockState::Held));
        tail
    }

    /// Puts a block into the index of its lane.
    pub(crate) fn index(&mut self, id: BlockId) {
        let Self { lanes, blocks, segments, slots, .. } = self;
        let lane = &mut lanes[blocks[id].lane as usize];
        let block = &mut blocks[id];
        block.state = BlockState::Free;
        if !block.is_split() {
            block.age = slots[lane.slot as usize].age[lane.part.index()] as u32;
        }
        lane.index.insert(blocks, segments, id);
        let block = &blocks[id];
        if !block.is_split() && self.rules.trades {
            self.idle_segments.came(lane.part, block.size, block.segment);
        }
    }

    /// Takes a block out of the index of its lane.
    #[inline(always)]
    pub(crate) fn unindex(&mut self, id: BlockId) {
        let Self { lanes, blocks, segments, .. } = self;
        let lane = &mut lanes[blocks[id].lane as usize];
        lane.index.remove(blocks, segments, id);
        let block = &blocks[id];
        if !block.is_split() && self.rules.trades {
            self.idle_segments.went(lane.part, block.size, block.segment);
        }
    }

    /// Adds a segment as one block that is in no index and not yet handed out. `None` beyond 2 TiB.
    pub(crate) fn add_segment(&mut self, memory: Memory, lane: u32) -> Option<BlockId> {
        let size = to_units(memory.bytes)?;
        let tie = if self.rules.tie_by_address { memory.base.0 } else { memory.registration };
        let (slot, part) = (self.lanes[lane as usize].slot, self.lanes[lane as usize].part);
        let stream = self.lanes[lane as usize].core.id;
        let segment = Segment {
            memory,
            slot,
            part,
            lane,
            stream,
            first: NONE,
            idle_since: 0,
            idle_seen: None,
            noted: 0..0,
            pages: None,
            away: Vec::new(),
        };
        let segment = self.segments.insert(segment, tie);
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

/// Makes a block live that is in no index.
#[inline(always)]
fn make_live(records: &mut [Block], id: BlockId, requested: u64, segments: &Segments) -> Option<Handed> {
    let block = &mut records[id as usize];
    block.state = BlockState::Live;
    block.generation = block.generation.wrapping_add(1);
    block.requested = requested;
    let address = segments.address(block.segment, block.offset)?;
    let key = BlockKey::new(id, block.generation);
    Some(Handed { key, address, bytes: to_bytes(block.size) })
}

/// Cuts a block in two: `id` keeps the front, and the vacant record of the tail is filled in, with the state given.
#[inline(always)]
fn cut(records: &mut [Block], id: BlockId, front: Units, (tail, state): (BlockId, BlockState)) {
    let block = &mut records[id as usize];
    let next = std::mem::replace(&mut block.next, tail);
    let size = std::mem::replace(&mut block.size, front);
    let (requested, segment, offset, lane) = (block.requested, block.segment, block.offset, block.lane);
    let record = &mut records[tail as usize];
    *record = Block {
        requested,
        segment,
        offset: offset + front,
        size: size - front,
        prev: id,
        next,
        left: NONE,
        right: NONE,
        lane,
        uses: NONE,
        generation: record.generation,
        age: 0,
        state,
    };
    records[or_edge(next)].prev = tail;
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
