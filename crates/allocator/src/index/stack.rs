//! The stack of one class whose blocks are all of one size: links to both neighbours in the blocks' records, so that all of it is O(1).
//!
//! `left` leads towards the top, `right` away from it. The functions return what the class's root, the top, is afterwards.

use crate::arena::{BlockId, Blocks, NONE};

/// Puts a block on top.
#[inline(always)]
pub(super) fn push(blocks: &mut Blocks, top: BlockId, id: BlockId) -> BlockId {
    let block = &mut blocks[id];
    (block.left, block.right) = (NONE, top);
    if top != NONE {
        blocks[top].left = id;
    }
    id
}

/// Takes a block out, wherever it lies.
#[inline(always)]
pub(super) fn remove(blocks: &mut Blocks, top: BlockId, id: BlockId) -> BlockId {
    let block = &blocks[id];
    let (above, below) = (block.left, block.right);
    if below != NONE {
        blocks[below].left = above;
    }
    if above == NONE {
        return below;
    }
    blocks[above].right = below;
    top
}

/// Appends all blocks from the top on.
pub(super) fn in_order(blocks: &Blocks, top: BlockId, out: &mut Vec<BlockId>) {
    let mut at = top;
    while at != NONE {
        out.push(at);
        at = blocks[at].right;
    }
}
