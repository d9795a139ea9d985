//! Bins of exact sizes: the shortest way from a free to the next allocation of the same size.
//!
//! A freed block goes to its stream's bin as it is, not merged with its neighbours, and the next request of exactly its size takes
//! it from there. A bin is a stack, so the block whose memory is warmest goes first.
//!
//! * **N1** Binned blocks are free: they count as free in every figure.
//! * **N2** A lane bins at most [`MAX_BLOCKS`] blocks and [`MAX_BYTES`] bytes a bin; what exceeds that is merged at once.
//! * **N3** Bins are emptied before the arena asks for more memory.

use super::{Block, BlockId, Blocks, NONE};
use crate::units::{Units, to_bytes};

const SLOTS: usize = 64;
/// Most blocks in one bin.
const MAX_BLOCKS: u32 = 64;
/// Most bytes in one bin; larger blocks are never binned. What lies in a bin keeps its neighbours apart: single blocks of any size in bins
/// doubled what `gnn_sampling` reserves in later turns.
const MAX_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy, Debug)]
struct Bin {
    size: Units,
    head: BlockId,
    count: u32,
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
        Self { slots: Box::new(Slots([Bin { size: 0, head: NONE, count: 0 }; SLOTS])), count: 0 }
    }

    /// Blocks in all bins.
    pub(crate) fn len(&self) -> u32 {
        self.count
    }

    /// Takes a block of exactly `size`. O(1).
    #[inline(always)]
    pub(crate) fn pop(&mut self, blocks: &Blocks, size: Units) -> Option<BlockId> {
        let bin = &mut self.slots.0[slot_of(size)];
        if bin.size != size || bin.count == 0 {
            return None;
        }
        let id = bin.head;
        bin.head = blocks.get(id)?.right;
        bin.count -= 1;
        self.count -= 1;
        Some(id)
    }

    /// Keeps a block, unless its bin is full or holds another size. O(1).
    #[inline(always)]
    pub(crate) fn push(&mut self, block: &mut Block, id: BlockId) -> bool {
        let size = block.size;
        let bin = &mut self.slots.0[slot_of(size)];
        if u64::from(bin.count + 1) * to_bytes(size) > MAX_BYTES {
            return false;
        }
        if bin.count == 0 {
            bin.size = size;
            bin.head = NONE;
        } else if bin.size != size || bin.count >= MAX_BLOCKS {
            return false;
        }
        block.right = bin.head;
        bin.head = id;
        bin.count += 1;
        self.count += 1;
        true
    }

    /// Empties all bins and returns what was in them, in a fixed order.
    pub(crate) fn drain(&mut self, blocks: &Blocks) -> Vec<BlockId> {
        let mut out = Vec::with_capacity(self.count as usize);
        for bin in self.slots.0.iter_mut() {
            let mut at = bin.head;
            for _ in 0..bin.count {
                out.push(at);
                at = blocks[at].right;
            }
            *bin = Bin { size: 0, head: NONE, count: 0 };
        }
        self.count = 0;
        out
    }

    /// The ids in all bins, for checks.
    pub(crate) fn ids(&self, blocks: &Blocks) -> Vec<BlockId> {
        let mut out = Vec::new();
        for bin in self.slots.0.iter() {
            let mut at = bin.head;
            for _ in 0..bin.count {
                out.push(at);
                at = blocks[at].right;
            }
        }
        out
    }
}
