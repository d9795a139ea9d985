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
use crate::units::{UNIT, Units};

const SLOTS: usize = 64;
/// Most blocks in one bin.
const MAX_BLOCKS: u32 = 64;
/// Most bytes in one bin; larger blocks are never binned. What lies in a bin keeps its neighbours apart: single blocks of any size in bins
/// doubled what `gnn_sampling` reserves in later turns.
const MAX_BYTES: u64 = 1 << 20;

/// A stack of blocks of one size. An empty one changes its size for whatever comes.
#[derive(Clone, Copy, Debug)]
struct Bin {
    size: Units,
    head: BlockId,
    /// How many blocks more it takes.
    room: u32,
}

impl Bin {
    const EMPTY: Self = Self { size: 0, head: NONE, room: 0 };

    /// Whether an empty bin is of this size from now on.
    fn becomes(&mut self, size: Units) -> bool {
        let room = ((MAX_BYTES / UNIT) as u32 / size.max(1)).min(MAX_BLOCKS);
        let takes = self.head == NONE && room > 0;
        if takes {
            *self = Self { size, room, ..Self::EMPTY };
        }
        takes
    }
}

/// On cache lines of their own.
#[derive(Debug)]
#[repr(align(64))]
struct Slots([Bin; SLOTS]);

/// A lane's bins: a table indexed by a hash of the size, one size a slot.
#[derive(Debug)]
pub(crate) struct Bins {
    slots: Box<Slots>,
    count: u32,
}

const fn slot_of(size: Units) -> usize {
    (size.wrapping_mul(0x9E37_79B1) >> 26) as usize
}

impl Bins {
    pub(crate) fn new() -> Self {
        Self { slots: Box::new(Slots([Bin::EMPTY; SLOTS])), count: 0 }
    }

    /// Blocks in all bins.
    pub(crate) fn len(&self) -> u32 {
        self.count
    }

    /// The block of exactly `size` that is the next to go, or [`NONE`]. O(1).
    #[inline(always)]
    pub(crate) fn first(&self, size: Units) -> BlockId {
        let bin = &self.slots.0[slot_of(size)];
        if bin.size == size { bin.head } else { NONE }
    }

    /// Takes out the [first](Self::first) block of that size. O(1).
    #[inline(always)]
    pub(crate) fn take(&mut self, first: &Block) {
        let bin = &mut self.slots.0[slot_of(first.size)];
        bin.head = first.right;
        bin.room += 1;
        self.count -= 1;
    }

    /// Takes a block of exactly `size`. O(1).
    pub(crate) fn pop(&mut self, blocks: &Blocks, size: Units) -> Option<BlockId> {
        let id = self.first(size);
        (id != NONE).then(|| {
            self.take(&blocks[id]);
            id
        })
    }

    /// Keeps a block, unless its bin is full or holds another size. O(1).
    pub(crate) fn push(&mut self, block: &mut Block, id: BlockId) -> bool {
        let bin = &mut self.slots.0[slot_of(block.size)];
        if bin.size != block.size && !bin.becomes(block.size) {
            return false;
        }
        self.push_another(block, id)
    }

    /// As [`push`](Self::push), but not where the last block that the bin had was of another size. O(1).
    #[inline(always)]
    pub(crate) fn push_another(&mut self, block: &mut Block, id: BlockId) -> bool {
        let bin = &mut self.slots.0[slot_of(block.size)];
        if bin.size != block.size || bin.room == 0 {
            return false;
        }
        block.right = bin.head;
        bin.head = id;
        bin.room -= 1;
        self.count += 1;
        true
    }

    /// Empties all bins and returns what was in them, in a fixed order.
    pub(crate) fn drain(&mut self, blocks: &Blocks) -> Vec<BlockId> {
        let out = self.ids(blocks);
        self.slots.0.fill(Bin::EMPTY);
        self.count = 0;
        out
    }

    /// The ids in all bins.
    pub(crate) fn ids(&self, blocks: &Blocks) -> Vec<BlockId> {
        let mut out = Vec::with_capacity(self.count as usize);
        for bin in &self.slots.0 {
            let mut at = bin.head;
            while at != NONE {
                out.push(at);
                at = blocks[at].right;
            }
        }
        out
    }
}
