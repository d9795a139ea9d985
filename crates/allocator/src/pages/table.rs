//! Which handles are mapped where in a segment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gpupool_device::MemoryHandle;

use crate::arena::BlockId;
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
#[derive(Clone, Debug, Default)]
pub(crate) struct PageTable {
    pieces: BTreeMap<Units, Piece>,
    holes: Vec<BlockId>,
    mapped: u64,
    runs: i64,
}

impl PageTable {
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

    fn touches(&self, offset: Units, end: Units) -> i64 {
        let before = self.pieces.range(..offset).next_back().is_some_and(|(at, p)| at + p.units == offset);
        i64::from(before) + i64::from(self.pieces.contains_key(&end))
    }

    pub(crate) fn insert(&mut self, offset: Units, piece: Piece) {
        self.runs += 1 - self.touches(offset, offset + piece.units);
        self.mapped += u64::from(piece.units);
        self.pieces.insert(offset, piece);
    }

    pub(crate) fn remove(&mut self, offset: Units) -> Option<Piece> {
        let piece = self.pieces.remove(&offset)?;
        self.runs -= 1 - self.touches(offset, offset + piece.units);
        self.mapped -= u64::from(piece.units);
        Some(piece)
    }

    /// The piece that contains an offset, and where it starts. O(log n).
    pub(crate) fn at(&self, offset: Units) -> Option<(Units, &Piece)> {
        let (start, piece) = self.pieces.range(..=offset).next_back()?;
        (offset < start + piece.units).then_some((*start, piece))
    }

    /// The pieces that lie wholly in a range, in order.
    pub(crate) fn within(&self, start: Units, end: Units) -> impl Iterator<Item = (Units, &Piece)> {
        self.pieces.range(start..end).map(|(at, p)| (*at, p)).take_while(move |(at, p)| at + p.units <= end)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Units, &Piece)> {
        self.pieces.iter().map(|(at, p)| (*at, p))
    }

    /// Work before `stamp` may have used a range. O(log n + pieces in it).
    pub(crate) fn stamp(&mut self, start: Units, end: Units, stamp: u64) {
        let first = self.at(start).map_or(start, |(at, _)| at);
        for (_, piece) in self.pieces.range_mut(first..end) {
            piece.since = stamp;
        }
    }

    /// The mapped runs: offset, end, and the ordinal of the first piece.
    pub(crate) fn mapped_runs(&self) -> Vec<(Units, Units, u64)> {
        let mut out: Vec<(Units, Units, u64)> = Vec::new();
        for (at, piece) in &self.pieces {
            match out.last_mut() {
                Some(run) if run.1 == *at => run.1 = at + piece.units,
                _ => out.push((*at, at + piece.units, piece.ordinal)),
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

    /// Takes all pieces out.
    pub(crate) fn drain(&mut self) -> Vec<(Units, Piece)> {
        (self.mapped, self.runs) = (0, 0);
        std::mem::take(&mut self.pieces).into_iter().collect()
    }

    /// Checks the figures against a recount.
    pub(crate) fn validate(&self) -> Result<(), String> {
        let (mut mapped, mut end) = (0u64, 0);
        for (at, piece) in &self.pieces {
            if *at < end || to_bytes(piece.units) != piece.handle.bytes {
                return Err(format!("G2: the piece at {at} overlaps or is not its handle: {piece:?}"));
            }
            end = at + piece.units;
            mapped += u64::from(piece.units);
        }
        if mapped != self.mapped || self.mapped_runs().len() as i64 != self.runs {
            return Err(format!("G2: {} units in {} runs counted, {mapped} found", self.mapped, self.runs));
        }
        Ok(())
    }
}
