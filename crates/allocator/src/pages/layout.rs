//! Holes and held blocks: how a segment's blocks follow its pieces. All of it under the arena's lock.
//!
//! A *held* block is in no index and counts as nothing: nobody is served from it while the driver is called, or while its old mapping
//! leaves. The last page of a segment is never mapped, so every block of it has a neighbour.

use crate::arena::{ArenaState, Backing, Block, BlockId, BlockState, Memory, NONE, Segment, Was, with_room};
use crate::counters::ArenaCounters;
use crate::history::Action;
use crate::pages::PageRules;
use crate::pages::table::{PageTable, Piece};
use crate::units::{Units, to_bytes, to_units};

impl ArenaState {
    /// Adds a reserved range as one hole, for pages of so many units. `None` beyond 2 TiB.
    pub(crate) fn add_hole(&mut self, memory: Memory, lane: u32, page: Units) -> Option<u32> {
        debug_assert!(matches!(memory.backing, Backing::Pages));
        let id = self.add_segment(memory, lane)?;
        let segment = self.blocks[id].segment;
        self.blocks[id].state = BlockState::Hole;
        let mut table = PageTable::new(page);
        table.hole_made(id);
        self.segments.get_mut(segment)?.pages = Some(Box::new(table));
        Some(segment)
    }

    /// Bytes mapped for the arena.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.segments.iter().filter_map(|(_, s)| s.pages.as_ref()).map(|t| t.mapped_bytes()).sum()
    }

    /// Whether growth takes the place of moves and cuts for a request: in a repetition, or where moves have used their time up; as long as
    /// what is held leaves it room. `overdrawn` is that room, in sixteenths of the peak ([`Allowance`](crate::pages::Allowance)).
    pub(crate) fn has_room(
        &mut self,
        rules: &PageRules,
        overdrawn: Option<u64>,
        size: u64,
        counters: &ArenaCounters,
    ) -> bool {
        let repeats = self.repetition.covers(size, counters);
        if rules.worth == 0 {
            return repeats;
        }
        let in_repetition = if repeats { self.repetition.may_hold() } else { 0 };
        let peak = counters.active_peak_bytes().max(counters.active_bytes().saturating_add_unsigned(size));
        let may_hold = in_repetition.max(overdrawn.map_or(0, |room| with_room(peak, room)));
        self.mapped_bytes().saturating_add(size) <= may_hold
    }

    /// Whether [`has_room`](Self::has_room) says so whatever the rules and the time that moves took: in a repetition.
    #[inline(never)]
    pub(crate) fn grows_instead(&mut self, size: u64, counters: &ArenaCounters) -> bool {
        self.repetition.covers(size, counters) && self.mapped_bytes().saturating_add(size) <= self.repetition.may_hold()
    }

    pub(crate) fn pages_of(&mut self, id: BlockId) -> Option<&mut PageTable> {
        self.segments.get_mut(self.blocks[id].segment)?.pages.as_deref_mut()
    }

    pub(crate) fn end_of(&self, id: BlockId) -> Units {
        self.blocks[id].offset + self.blocks[id].size
    }

    /// Takes a range out of a free block that is in its index: the range is held, what is left of the block stays free.
    pub(crate) fn hold(&mut self, id: BlockId, start: Units, end: Units, counters: &ArenaCounters) -> BlockId {
        let part = self.lanes[self.blocks[id].lane as usize].part;
        self.unindex(id);
        let mut pieces = -1;
        let mut at = id;
        if start > self.blocks[id].offset {
            at = self.divide(id, start - self.blocks[id].offset);
            self.index(id);
            pieces += 1;
        }
        if end < self.end_of(at) {
            let tail = self.divide(at, end - start);
            self.index(tail);
            pieces += 1;
        }
        self.blocks[at].state = BlockState::Held;
        counters.split(&mut self.watches, part, pieces, -(to_bytes(end - start) as i64));
        at
    }

    /// A held block is free: it merges with its neighbours. Returns what it has become.
    pub(crate) fn unhold(&mut self, id: BlockId, counters: &ArenaCounters) -> BlockId {
        debug_assert!(self.blocks[id].state == BlockState::Held);
        self.merge(id, Was::Elsewhere, counters);
        id
    }

    /// Takes the front of a hole, as a held block of `lane`.
    pub(crate) fn fill(&mut self, hole: BlockId, units: Units, lane: u32) -> BlockId {
        if let Some(table) = self.pages_of(hole) {
            table.hole_gone(hole);
        }
        if units < self.blocks[hole].size {
            let rest = self.divide(hole, units);
            self.blocks[rest].state = BlockState::Hole;
            if let Some(table) = self.pages_of(rest) {
                table.hole_made(rest);
            }
        }
        self.blocks[hole].state = BlockState::Held;
        self.blocks[hole].lane = lane;
        hole
    }

    /// A held block has nothing behind it any more: it is a hole, joined with holes beside it.
    pub(crate) fn empty(&mut self, id: BlockId) {
        debug_assert!(self.blocks[id].state == BlockState::Held);
        for neighbour in [self.blocks[id].prev, self.blocks[id].next] {
            if neighbour != NONE && self.blocks[neighbour].state == BlockState::Hole {
                if let Some(table) = self.pages_of(neighbour) {
                    table.hole_gone(neighbour);
                }
                self.join(id, neighbour);
            }
        }
        let lane = self.segments.get(self.blocks[id].segment).map(|s| s.lane);
        let block = &mut self.blocks[id];
        block.state = BlockState::Hole;
        block.lane = lane.unwrap_or(block.lane);
        if let Some(table) = self.pages_of(id) {
            table.hole_made(id);
        }
    }

    /// Enters pieces one after the other from an offset of a segment on. Returns by how much the number of mapped runs changed.
    pub(crate) fn enter(&mut self, segment: u32, mut offset: Units, pieces: impl IntoIterator<Item = Piece>) -> i64 {
        let Some(table) = self.segments.get_mut(segment).and_then(|s| s.pages.as_deref_mut()) else { return 0 };
        let (before, first) = (table.runs(), offset);
        for piece in pieces {
            let units = piece.units;
            table.insert(offset, piece);
            offset += units;
        }
        let change = table.runs() - before;
        self.note_pages(segment, first, offset - first, Action::SegmentMap);
        change
    }

    /// Takes the pieces of a held block out. Returns them with their offsets, and the change in runs.
    pub(crate) fn lift(&mut self, id: BlockId) -> (Vec<(Units, Piece)>, i64) {
        let (start, end) = (self.blocks[id].offset, self.end_of(id));
        let Some(table) = self.pages_of(id) else { return (Vec::new(), 0) };
        let before = table.runs();
        let offsets: Vec<Units> = table.within(start, end).map(|(at, _)| at).collect();
        let pieces: Vec<(Units, Piece)> = offsets.into_iter().filter_map(|at| Some((at, table.remove(at)?))).collect();
        let change = table.runs() - before;
        if !pieces.is_empty() {
            self.note_pages(self.blocks[id].segment, start, end - start, Action::SegmentUnmap);
        }
        (pieces, change)
    }

    /// The whole pieces of a free block: offset and piece.
    pub(crate) fn whole_pieces(&self, id: BlockId) -> impl Iterator<Item = (Units, &Piece)> {
        let block = &self.blocks[id];
        let table = self.segments.get(block.segment).and_then(|s| s.pages.as_deref());
        table.into_iter().flat_map(move |t| t.within(block.offset, block.offset + block.size))
    }

    /// The free blocks of a lane that may hold whole pieces, smallest first. O(them).
    pub(crate) fn paged_blocks(&self, lane: u32, page: Units) -> Vec<BlockId> {
        let mut order = self.lanes[lane as usize].index.in_order_from(&self.blocks, page);
        order.retain(|id| {
            let block = &self.blocks[*id];
            block.size >= page && self.segments.get(block.segment).is_some_and(|s| s.pages.is_some())
        });
        order
    }

    /// Bytes in whole pieces that nobody uses, and in wholly free segments of other kinds, of the lanes that `pick` accepts.
    pub(crate) fn free_page_bytes(&self, page: u64, pick: impl Fn(&crate::arena::Lane) -> bool) -> u64 {
        let Some(page) = to_units(page) else { return 0 };
        let lanes = self.lanes.iter().enumerate().filter(|(_, l)| l.in_use && pick(l));
        let blocks = lanes.flat_map(|(at, _)| self.paged_blocks(at as u32, page));
        blocks.map(|id| self.whole_pieces(id).map(|(_, p)| p.handle.bytes).sum::<u64>()).sum()
    }

    /// Whether the last reference to a segment of pages may go: it is one hole.
    pub(crate) fn is_empty_range(&self, segment: &Segment) -> bool {
        let block = &self.blocks[segment.first];
        segment.pages.is_some() && block.state == BlockState::Hole && !block.is_split()
    }

    /// Takes a segment out that is one hole.
    pub(crate) fn remove_range(&mut self, at: u32) -> Option<Segment> {
        let first = self.segments.get(at).filter(|s| self.is_empty_range(s))?.first;
        self.blocks.remove(first);
        self.segments.remove(at)
    }

    /// Stamps the pieces that a block lies in: what used it is done once its lane's stream has passed that (G4).
    pub(crate) fn stamp(&mut self, id: BlockId) {
        let Block { segment, offset, size, lane, .. } = self.blocks[id];
        if let Some(table) = self.segments.get_mut(segment).and_then(|s| s.pages.as_deref_mut()) {
            table.stamp(offset, offset + size, self.lanes[lane as usize].core.stamp());
        }
    }
}
