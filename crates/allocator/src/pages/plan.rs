//! Decisions: where a request goes, which free pieces are moved for it, and how large new handles are.

use super::cost;
use crate::arena::{ArenaState, BlockId, BlockState, LaneKind, NONE};
use crate::units::{UNIT, Units, to_bytes, to_units};

/// What a preset decides (see `docs/pages.md`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PageRules {
    /// The granularity.
    pub(crate) page: Units,
    /// New handles are at most this large, ...
    pub(crate) largest: Units,
    /// ... and at most this large where memory is short.
    pub(crate) largest_if_short: Units,
    /// But a large request is made of at most about so many, unless memory is short: each costs the same to move.
    pub(crate) handles: u64,
    /// Nanoseconds that a page kept from the driver is worth.
    pub(crate) worth: u64,
    /// Moves and cuts may take one part in so many of the time.
    pub(crate) share: u64,
    /// Growth takes what a segment would, so that small requests do not each ask the driver.
    pub(crate) in_segments: bool,
}

impl PageRules {
    pub(crate) fn page_bytes(&self) -> u64 {
        to_bytes(self.page)
    }

    /// The rules where memory is short: there it is worth anything.
    pub(crate) fn if_short(self) -> Self {
        Self { largest: self.largest_if_short, worth: u64::MAX, in_segments: false, ..self }
    }

    /// The rules for a request of so many bytes.
    pub(crate) fn for_request(self, bytes: u64) -> Self {
        let each = to_units(self.round_up((bytes / UNIT).div_ceil(self.handles)) * UNIT);
        Self { largest: self.largest.max(each.unwrap_or(0)), ..self }
    }

    /// What a handle pinned where a block will end is worth, in nanoseconds: what the block would pin beyond its own pages.
    pub(crate) fn pinned_worth(&self, start: Units, units: Units, end: Units) -> u64 {
        let rest = start + units - end.next_multiple_of(self.page).min(start + units);
        u64::from(rest / self.page).saturating_mul(self.worth)
    }

    /// Whether cutting a free handle where a block will end is worth its calls.
    pub(crate) fn cut_pays(&self, start: Units, units: Units, end: Units) -> bool {
        self.pinned_worth(start, units, end) >= cut_price(units)
    }

    pub(crate) fn round_up(&self, units: u64) -> u64 {
        units.next_multiple_of(u64::from(self.page))
    }
}

/// What cutting a free handle takes of the driver, in nanoseconds, by the model's prices.
pub(crate) fn cut_price(units: Units) -> u64 {
    cost::unmap(to_bytes(units)) + cost::release(to_bytes(units)) + 3 * cost::make(to_bytes(units))
}

/// Where a request goes: the front of a hole, with what is free beside it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) hole: BlockId,
    pub(crate) segment: u32,
    /// A free block that ends where the hole begins.
    pub(crate) before: Option<BlockId>,
    /// A free block that begins where the hole ends, if the whole hole is filled.
    pub(crate) after: Option<BlockId>,
    /// What must be mapped, and what could be.
    pub(crate) needs: Units,
    pub(crate) room: Units,
}

/// A piece that could be moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) block: BlockId,
    pub(crate) block_units: Units,
    pub(crate) offset: Units,
    pub(crate) units: Units,
    pub(crate) since: u64,
    pub(crate) ordinal: u64,
}

impl Candidate {
    /// Its place in the order in which pieces are taken, as one number, since all of them are sorted: the largest first, of equals those out of
    /// the smallest blocks, and then by where they lie.
    fn rank(&self) -> u128 {
        let parts = [!self.units, self.block_units, self.block, self.offset];
        parts.iter().fold(0, |rank, part| rank << 32 | u128::from(*part))
    }
}

impl ArenaState {
    /// The hole of a pool's part that leaves the least to be mapped for `size`; among equals the smallest. O(holes).
    ///
    /// Segments belong to one lane, `of`, so that what is free in one joins.
    pub(crate) fn target(&self, rules: &PageRules, of: u32, lanes: &[u32], size: Units) -> Option<Target> {
        let mut best: Option<(Units, Units, Target)> = None;
        for (segment, s) in self.segments.iter().filter(|(_, s)| s.lane == of) {
            let Some(table) = &s.pages else { continue };
            for &hole in table.holes() {
                let block = &self.blocks[hole];
                let last = block.next == NONE;
                let room = block.size - if last { rules.page } else { 0 };
                let free = |id: BlockId| {
                    let usable = id != NONE
                        && self.blocks[id].state == BlockState::Free
                        && lanes.contains(&self.blocks[id].lane);
                    usable.then_some(id)
                };
                let before = free(block.prev);
                let first = before.map_or(0, |b| self.blocks[b].size);
                let missing = rules.round_up(u64::from(size.saturating_sub(first)));
                let after =
                    free(block.next).filter(|a| before.is_none_or(|b| self.blocks[b].lane == self.blocks[*a].lane));
                let second = after.map_or(0, |a| self.blocks[a].size);
                let (needs, after) = if missing <= u64::from(room) {
                    (missing as Units, after.filter(|_| missing == u64::from(room)))
                } else if room > 0
                    && after.is_some()
                    && u64::from(first) + u64::from(room) + u64::from(second) >= u64::from(size)
                {
                    (room, after)
                } else {
                    continue;
                };
                if needs == 0 {
                    continue;
                }
                let target = Target { hole, segment, before, after, needs, room };
                if best.is_none_or(|(n, r, _)| (needs, room) < (n, r)) {
                    best = Some((needs, room, target));
                }
            }
        }
        best.map(|(.., target)| target)
    }

    /// Whether free pieces of a lane may move: not where captures may know their addresses (G5).
    pub(crate) fn may_move(&self, lane: u32) -> bool {
        let l = &self.lanes[lane as usize];
        l.in_use && l.kind == LaneKind::Stream && !self.is_baked(l.slot)
    }

    /// Whether captures used a pool slot.
    pub(crate) fn is_baked(&self, slot: u32) -> bool {
        self.lanes.iter().any(|l| l.in_use && l.slot == slot && l.kind != LaneKind::Stream)
    }

    /// Every whole piece in a free block of these lanes. O(free blocks of a page and more, and their pieces).
    pub(crate) fn candidates(&self, page: Units, lanes: &[u32]) -> Vec<Candidate> {
        let mut out = Vec::new();
        for lane in lanes {
            for id in self.paged_blocks(*lane, page) {
                let block_units = self.blocks[id].size;
                out.extend(self.whole_pieces(id).map(|(offset, p)| Candidate {
                    block: id,
                    block_units,
                    offset,
                    units: p.units,
                    since: p.since,
                    ordinal: p.ordinal,
                }));
            }
        }
        out
    }
}

/// Chooses pieces for `wanted` units: the largest that fit, each handle costing about the same, and out of the smallest blocks, which are
/// of the least use to others. Returns what is still missing, and the pieces that cover that and exceed it by at most `spare`, smallest first.
pub(crate) fn choose(
    mut from: Vec<Candidate>,
    wanted: Units,
    spare: Units,
    out: &mut Vec<Candidate>,
) -> (Units, Vec<Candidate>) {
    from.sort_unstable_by_key(Candidate::rank);
    let mut missing = wanted;
    let mut covers: Vec<Candidate> = Vec::new();
    for candidate in from {
        if missing == 0 {
            break;
        }
        if candidate.units <= missing {
            missing -= candidate.units;
            out.push(candidate);
        } else {
            covers.push(candidate);
        }
    }
    covers.retain(|c| missing > 0 && c.units - missing <= spare);
    // Of equals the one that was found first.
    covers.sort_by_key(|c| c.units);
    (missing, covers)
}

/// As [`choose`], with the piece that covers the rest, if there is one. Returns what is still missing.
pub(crate) fn choose_covering(from: Vec<Candidate>, wanted: Units, spare: Units, out: &mut Vec<Candidate>) -> Units {
    let (missing, covers) = choose(from, wanted, spare, out);
    cover(missing, &covers, out)
}

/// The second half of [`choose_covering`].
pub(super) fn cover(missing: Units, covers: &[Candidate], out: &mut Vec<Candidate>) -> Units {
    let cover = covers.first();
    out.extend(cover);
    missing.saturating_sub(cover.map_or(0, |c| c.units))
}

/// The sizes of new handles for `units` from `start` on, where the block for a request will end at `end`: whole pages before that page in
/// handles of at most `largest`, the page itself, and what is beyond it.
pub(crate) fn handle_sizes(rules: &PageRules, start: Units, units: Units, end: Units) -> Vec<Units> {
    let mut out = Vec::new();
    let stop = start + units;
    let boundary = end / rules.page * rules.page;
    let mut cut = |from: Units, to: Units| {
        let mut at = from;
        while at < to {
            let size = (to - at).min(rules.largest);
            out.push(size);
            at += size;
        }
    };
    if end.is_multiple_of(rules.page) || boundary < start || boundary >= stop {
        cut(start, boundary.clamp(start, stop));
        cut(boundary.clamp(start, stop), stop);
    } else {
        cut(start, boundary);
        cut(boundary, boundary + rules.page);
        cut(boundary + rules.page, stop);
    }
    out
}
