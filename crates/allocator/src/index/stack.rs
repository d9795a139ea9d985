//! The stack of one class whose blocks are all of one size: links to both neighbours in the blocks' records, so that all of it is O(1).
//!
//! `left` leads towards the top, `right` away from it. The functions return what the class's root, the top, is afterwards.

use crate::arena::{Block, BlockId, NONE, or_edge};

/// Puts a block on top.
#[inline(always)]
pub(super) fn push(blocks: &mut [Block], top: BlockId, id: BlockId) -> BlockId {
    let block = &mut blocks[id as usize];
    (block.left, block.right) = (NONE, top);
    blocks[or_edge(top)].left = id;
    id
}

/// Takes a block out, wherever it lies.
#[inline(always)]
pub(super) fn remove(blocks: &mut [Block], top: BlockId, id: BlockId) -> BlockId {
    let block = &blocks[id as usize];
    let (above, below) = (block.left, block.right);
    blocks[or_edge(below)].left = above;
    match blocks.get_mut(above as usize) {
        Some(above) => above.right = below,
        None => return below,
    }
    top
}

/// Appends all blocks from the top on.
pub(super) fn in_order(blocks: &[Block], top: BlockId, out: &mut Vec<BlockId>) {
    let mut at = top;
    while at != NONE {
        out.push(at);
        at = blocks[at as usize].right;
    }
}
