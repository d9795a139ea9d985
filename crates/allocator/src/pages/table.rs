//! Which handles are mapped where in a segment.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gpupool_device::MemoryHandle;

use crate::arena::{BlockId, NONE};
use crate::units::{Units, to_bytes};

/// A physical handle, shared by its piece and the aliases that are leaving.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) id: MemoryHandle,
    pub(crate) bytes: u64,
    mappings: AtomicU32,
}

impl Handle {
    pub(crate) fn new(id: MemoryHandle, bytes: u64) -> Self {
        Self { id, bytes, mappings: AtomicU32::new(0) }
    }

    pub(crate) fn mapped(&self) {
        self.mappings.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn unmapped(&self) {
        self.mappings.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether an older mapping of it still stands: releasing it would free nothing yet.
    pub(crate) fn is_aliased(&self) -> bool {
        self.mappings.load(Ordering::Acquire) > 1
    }
}

/// A handle mapped at its place in a segment.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) handle: Arc<Handle>,
    pub(crate) units: Units,
    /// Stamp of the stream whose block freed any of it last: work on it is done once that stream has passed it.
    pub(crate) since: u64,
    /// Counts the memory of this allocator in order of creation; a mapped run is named by that of its first piece.
    pub(crate) ordinal: u64,
}

/// The pieces of a segment by offset, and its holes.
///
/// Every hit of a large block and every free that no bin takes asks for the pieces that it lies in, so they are found by index: of each
/// *cell*, a page or a whole part of one, it is noted which piece covers it. 4 bytes a page, up to the last that was ever mapped.
#[derive(Clone, Debug)]
pub(crate) struct PageTable {
    /// A cell has two to this power of units.
    cell: u32,
    /// The piece that covers each cell, or [`NONE`].
    cells: Vec<u32>,
    /// Each with its offset.
    pieces: Vec<Option<(Units, Piece)>>,
    vacant: Vec<u32>,
    holes: Vec<BlockId>,
    mapped: u64,
    runs: i64,
}

impl PageTable {
    /// A table with nothing in it; what comes into it lies at multiples of `page`.
    pub(crate) fn new(page: Units) -> Self {
        let cell = page.max(1).trailing_zeros();
        Self { cell, cells: Vec::new(), pieces: Vec::new(), vacant: Vec::new(), holes: Vec::new(), mapped: 0, runs: 0 }
    }

    /// Units that are mapped.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.mapped * crate::units::UNIT
    }

    /// Stretches of pieces without a gap.
    pub(crate) fn runs(&self) -> i64 {
        self.runs
    }

    pub(crate) fn holes(&self) -> &[BlockId] {
        &self.holes
    }

    pub(crate) fn hole_made(&mut self, id: BlockId) {
        self.holes.push(id);
    }

    pub(crate) fn hole_gone(&mut self, id: BlockId) {
        self.holes.retain(|h| *h != id);
    }

    /// The cells of a range, as far as there are any.
    fn cells_of(&self, start: Units, end: Units) -> Range<usize> {
        let end = (end.div_ceil(1 << self.cell) as usize).min(self.cells.len());
        ((start >> self.cell) as usize).min(end)..end
    }

    fn touches(&self, offset: Units, end: Units) -> i64 {
        let before = offset.checked_sub(1).is_some_and(|last| self.at(last).is_some());
        i64::from(before) + i64::from(self.at(end).is_some())
    }

    pub(crate) fn insert(&mut self, offset: Units, piece: Piece) {
        let (units, end) = (piece.units, offset + piece.units);
        self.runs += 1 - self.touches(offset, end);
        self.mapped += u64::from(units);
        let id = self.vacant.pop().unwrap_or_else(|| {
            self.pieces.push(None);
            self.pieces.len() as u32 - 1
        });
        self.pieces[id as usize] = Some((offset, piece));
        let cells = (end >> self.cell) as usize;
        if cells > self.cells.len() {
            self.cells.resize(cells, NONE);
        }
        let of_piece = self.cells_of(offset, end);
        self.cells[of_piece].fill(id);
    }

    /// Takes the piece out that starts at an offset.
    pub(crate) fn remove(&mut self, offset: Units) -> Option<Piece> {
        let id = *self.cells.get((offset >> self.cell) as usize)?;
        let (_, piece) = self.pieces.get_mut(id as usize)?.take_if(|(start, _)| *start == offset)?;
        self.vacant.push(id);
        let end = offset + piece.units;
        let of_piece = self.cells_of(offset, end);
        self.cells[of_piece].fill(NONE);
        self.runs -= 1 - self.touches(offset, end);
        self.mapped -= u64::from(piece.units);
        Some(piece)
    }

    /// The piece that contains an offset, and where it starts. O(1).
    #[inline]
    pub(crate) fn at(&self, offset: Units) -> Option<(Units, &Piece)> {
        // There is no such piece if none is there.
        let id = *self.cells.get((offset >> self.cell) as usize)?;
        let (start, piece) = self.pieces.get(id as usize)?.as_ref()?;
        Some((*start, piece))
    }

    /// The pieces that begin in a range, in order. O(cells of it that nothing covers, and pieces).
    fn beginning_in(&self, start: Units, end: Units) -> impl Iterator<Item = (Units, &Piece)> {
        let Range { start: mut cell, end: stop } = self.cells_of(start, end);
        let found = std::iter::from_fn(move || {
            cell += self.cells.get(cell..stop)?.iter().position(|id| *id != NONE)?;
            let (at, piece) = self.pieces[self.cells[cell] as usize].as_ref()?;
            cell = ((at + piece.units) >> self.cell) as usize;
            Some((*at, piece))
        });
        found.skip_while(move |(at, _)| *at < start)
    }

    /// The pieces that lie wholly in a range, in order.
    pub(crate) fn within(&self, start: Units, end: Units) -> impl Iterator<Item = (Units, &Piece)> {
        self.beginning_in(start, end).take_while(move |(at, p)| at + p.units <= end)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Units, &Piece)> {
        self.beginning_in(0, Units::MAX)
    }

    /// Work before `stamp` may have used a range. O(pieces in it).
    #[inline]
    pub(crate) fn stamp(&mut self, start: Units, end: Units, stamp: u64) {
        // As slices, so that where they lie is looked up once.
        let (cells, pieces) = (self.cells.as_slice(), self.pieces.as_mut_slice());
        let mut at = start;
        while at < end {
            let cell = at >> self.cell;
            let piece = cells.get(cell as usize).and_then(|id| pieces.get_mut(*id as usize)?.as_mut());
            at = match piece {
                Some((start, piece)) => {
                    piece.since = stamp;
                    *start + piece.units
                }
                // What is away.
                None => (cell + 1) << self.cell,
            };
        }
    }

    /// The mapped runs: offset, end, and the ordinal of the first piece.
    pub(crate) fn mapped_runs(&self) -> Vec<(Units, Units, u64)> {
        let mut out: Vec<(Units, Units, u64)> = Vec::new();
        for (at, piece) in self.iter() {
            match out.last_mut() {
                Some(run) if run.1 == at => run.1 = at + piece.units,
                _ => out.push((at, at + piece.units, piece.ordinal)),
            }
        }
        out
    }

    /// Whether a range is mapped throughout.
    pub(crate) fn covers(&self, start: Units, end: Units) -> bool {
        let mut at = start;
        while at < end {
            let Some((from, piece)) = self.at(at) else { return false };
            at = from + piece.units;
        }
        true
    }

    /// Whether a range is mapped throughout, but for what is away.
    pub(crate) fn covers_beside(&self, start: Units, end: Units, away: &[crate::idle::Away]) -> bool {
        let mut at = start;
        while at < end {
            let absent = away.iter().find(|a| a.offset <= at && at < a.end()).map(|a| a.end());
            let Some(next) = absent.or_else(|| self.at(at).map(|(from, piece)| from + piece.units)) else {
                return false;
            };
            at = next;
        }
        true
    }

    /// All pieces, in order.
    pub(crate) fn into_pieces(self) -> Vec<(Units, Piece)> {
        let mut pieces: Vec<(Units, Piece)> = self.pieces.into_iter().flatten().collect();
        pieces.sort_unstable_by_key(|(at, _)| *at);
        pieces
    }

    /// Checks the figures and the cells against a recount.
    pub(crate) fn validate(&self) -> Result<(), String> {
        let (mut mapped, mut covered) = (0u64, 0);
        for (id, (at, piece)) in self.pieces.iter().enumerate().filter_map(|(id, p)| Some((id, p.as_ref()?))) {
            let cells = self.cells_of(*at, at + piece.units);
            covered += cells.len();
            if to_bytes(piece.units) != piece.handle.bytes || self.cells[cells].iter().any(|c| *c as usize != id) {
                return Err(format!("G2: the piece at {at} overlaps or is not its handle: {piece:?}"));
            }
            mapped += u64::from(piece.units);
        }
        let cells = self.cells.iter().filter(|c| **c != NONE).count();
        if cells != covered || (cells as u64) << self.cell != mapped {
            return Err(format!("G2: {cells} cells are covered, {covered} by pieces of {mapped} units"));
        }
        if mapped != self.mapped || self.mapped_runs().len() as i64 != self.runs {
            return Err(format!("G2: {} units in {} runs counted, {mapped} found", self.mapped, self.runs));
        }
        Ok(())
    }
}
