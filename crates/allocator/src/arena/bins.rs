//! Bins of exact sizes: the shortest way from a free to the next allocation of the same size.
//!
//! A freed block goes to its stream's bin as it is, not merged with its neighbours, and the next request of exactly its size takes
//! it from there. A bin is a stack, so the block whose memory is warmest goes first.
//!
//! * **N1** Binned blocks are free: they count as free in every figure.
//! * **N2** A bin takes at most [`MAX_BLOCKS`] blocks and [`MAX_BYTES`] bytes; what exceeds that is merged at once.
//! * **N3** Bins are emptied before the arena asks for more memory.
//! * **N4** A binned block never fills its segment, which is larger than [`MAX_BYTES`]: so it counts with the free blocks of split segments,
//!   and nobody need look.

use super::{Block, BlockId, Blocks, NONE};
use crate::ids::Part;
use crate::units::{UNIT, Units};

const SLOTS: usize = 64;
/// Most blocks in one bin.
const MAX_BLOCKS: u32 = 64;
/// Most bytes in one bin; larger blocks are never binned. What lies in a bin keeps its neighbours apart: single blocks of any size in bins
/// doubled what `gnn_sampling` reserves in later turns.
const MAX_BYTES: u64 = 1 << 20;
const MAX_UNITS: Units = (MAX_BYTES / UNIT) as Units;

/// A stack of blocks of one lane and one size. An empty one changes both for whatever comes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bin {
    size: Units,
    lane: u32,
    head: BlockId,
    /// How many blocks more it takes.
    room: u32,
}

impl Bin {
    /// No block has this size.
    const EMPTY: Self = Self { size: 0, lane: 0, head: NONE, room: 0 };

    #[inline(always)]
    fn is_of(&self, lane: u32, size: Units) -> bool {
        self.size == size && self.lane == lane
    }

    /// The block that is the next to go, or [`NONE`].
    #[inline(always)]
    pub(super) fn first(&self) -> BlockId {
        self.head
    }

    /// Takes the [first](Self::first) block out.
    #[inline(always)]
    pub(super) fn take(&mut self, first: &Block) {
        self.head = first.right;
        self.room += 1;
    }

    /// How many blocks of a size a bin takes.
    fn room_for(size: Units) -> u32 {
        (MAX_UNITS / size.max(1)).min(MAX_BLOCKS)
    }

    /// Whether an empty bin is of this lane and size from now on.
    fn becomes(&mut self, lane: u32, size: Units) -> bool {
        let room = Self::room_for(size);
        let takes = self.head == NONE && room > 0;
        if takes {
            *self = Self { size, lane, room, ..Self::EMPTY };
        }
        takes
    }
}

/// The slot of the only bin that may be of this lane and size. `pair` is the small one of the two lanes that lie side by side.
#[inline(always)]
fn slot_of(pair: u32, size: Units) -> usize {
    ((size ^ (pair << 19)).wrapping_mul(0x9E37_79B1) >> 26) as usize
}

/// Bins by a hash of lane and size. On cache lines of its own (in pairs, as they are fetched), since every hit writes there.
#[derive(Debug)]
#[repr(align(128))]
struct Table([Bin; SLOTS]);

impl Table {
    fn new() -> Box<Self> {
        Box::new(Self([Bin::EMPTY; SLOTS]))
    }
}

/// An arena's bins: a table for each part. That of large blocks only `pages` uses: there is no such table before something is put there.
#[derive(Debug)]
pub(crate) struct Bins {
    // In a box: the arena's state is moved as pools come and go.
    small: Box<Table>,
    large: Option<Box<Table>>,
}

impl Default for Bins {
    fn default() -> Self {
        Self { small: Table::new(), large: None }
    }
}

impl Bins {
    /// The bin of small blocks of that size, if there is one. O(1).
    #[inline(always)]
    pub(super) fn small(&mut self, lane: u32, size: Units) -> Option<&mut Bin> {
        let bin = &mut self.small.0[slot_of(lane, size)];
        bin.is_of(lane, size).then_some(bin)
    }

    /// Keeps a block, if there is room in a bin of small blocks of its lane and size. O(1).
    #[inline(always)]
    pub(crate) fn push_small(&mut self, block: &mut Block, id: BlockId) -> bool {
        push(&mut self.small.0[slot_of(block.lane, block.size)], block, id)
    }

    #[inline(always)]
    fn bin(&mut self, part: Part, lane: u32, size: Units) -> Option<&mut Bin> {
        let slot = slot_of(lane - part.index() as u32, size);
        match part {
            Part::Small => Some(&mut self.small.0[slot]),
            Part::Large => self.large.as_mut().map(|large| &mut large.0[slot]),
        }
    }

    /// Takes out a block of exactly `size`. O(1).
    pub(crate) fn pop(&mut self, blocks: &Blocks, part: Part, lane: u32, size: Units) -> Option<BlockId> {
        let bin = self.bin(part, lane, size).filter(|bin| bin.is_of(lane, size))?;
        let id = bin.first();
        bin.take(blocks.get(id)?);
        Some(id)
    }

    /// Whether there may be a bin for a block of this size.
    #[inline(always)]
    pub(crate) fn may_take(size: Units) -> bool {
        size <= MAX_UNITS
    }

    /// Keeps a block, unless its bin is full or holds another size or lane. O(1).
    #[inline(always)]
    pub(crate) fn push(&mut self, part: Part, block: &mut Block, id: BlockId) -> bool {
        match self.bin(part, block.lane, block.size) {
            Some(bin) if bin.is_of(block.lane, block.size) => push(bin, block, id),
            Some(bin) if bin.head != NONE => false,
            _ => self.push_first(part, block, id),
        }
    }

    /// As [`push`](Self::push), where the bin is empty and not of the block's lane and size.
    #[inline(never)]
    fn push_first(&mut self, part: Part, block: &mut Block, id: BlockId) -> bool {
        if part == Part::Large {
            self.large.get_or_insert_with(Table::new);
        }
        let (lane, size) = (block.lane, block.size);
        self.bin(part, lane, size).is_some_and(|bin| bin.becomes(lane, size) && push(bin, block, id))
    }

    /// Empties all bins and returns what was in them, in a fixed order. From now on they are of no lane and size.
    pub(crate) fn drain(&mut self, blocks: &Blocks) -> Vec<BlockId> {
        let mut out = self.ids(blocks);
        self.clear();
        // Lane by lane.
        out.sort_by_key(|(lane, ..)| *lane);
        out.into_iter().map(|(.., id)| id).collect()
    }

    /// Bins, which must be empty, are of no lane and size any more, so that nothing is kept there as by itself. Whatever were in them would
    /// be lost.
    pub(crate) fn forget(&mut self) {
        debug_assert!(
            self.small.0.iter().chain(self.large.iter().flat_map(|table| table.0.iter())).all(|bin| bin.head == NONE),
            "bins were forgotten with blocks in them"
        );
        self.clear();
    }

    fn clear(&mut self) {
        self.small.0.fill(Bin::EMPTY);
        if let Some(large) = &mut self.large {
            large.0.fill(Bin::EMPTY);
        }
    }

    /// The blocks in all bins: lane, part and id.
    pub(crate) fn ids(&self, blocks: &Blocks) -> Vec<(u32, Part, BlockId)> {
        let mut out = Vec::new();
        for (part, table) in [(Part::Small, Some(&self.small)), (Part::Large, self.large.as_ref())] {
            for bin in table.into_iter().flat_map(|table| table.0.iter()) {
                let mut at = bin.head;
                while at != NONE {
                    out.push((bin.lane, part, at));
                    at = blocks[at].right;
                }
            }
        }
        out
    }
}

/// Puts a block on top of a bin that is of its lane and size and has room; else nothing changes.
#[inline(always)]
fn push(bin: &mut Bin, block: &mut Block, id: BlockId) -> bool {
    if !bin.is_of(block.lane, block.size) || bin.room == 0 {
        return false;
    }
    block.right = bin.head;
    bin.head = id;
    bin.room -= 1;
    true
}
