//! The search tree of one class: a treap whose links are in the blocks' records.
//!
//! A node's priority is a hash of its id, so the shape depends on the set of blocks alone: no state, no rebalancing rules, the same
//! tree for the same sequence in every run. Expected depth is 1.4 log2 n. The functions take and return roots.

use super::{Key, TieBreak};
use crate::arena::{BlockId, Blocks, NONE};

/// Fibonacci hashing: ids are small consecutive numbers, priorities must look random.
const fn priority(id: BlockId) -> u32 {
    let h = (id as u64).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (h >> 32) as u32
}

/// Whether `key` is before node `at`. Most nodes differ in size: the tie is looked up only where it matters.
#[inline]
fn is_before(blocks: &Blocks, ties: &impl TieBreak, key: Key, at: BlockId) -> bool {
    let size = blocks[at].size;
    if size == key.size { key < Key::of(blocks, ties, at) } else { key.size < size }
}

/// Adds `id`; returns the new root.
pub(super) fn insert(blocks: &mut Blocks, ties: &impl TieBreak, root: u32, id: BlockId) -> u32 {
    let (key, rank) = (Key::of(blocks, ties, id), priority(id));
    // Descend past every node that outranks the new one.
    let (mut root, mut parent, mut went_left) = (root, NONE, false);
    let mut at = root;
    while at != NONE && priority(at) >= rank {
        parent = at;
        went_left = is_before(blocks, ties, key, at);
        at = if went_left { blocks[at].left } else { blocks[at].right };
    }
    // What hangs there is split into the new node's two subtrees.
    let (left, right) = split(blocks, ties, at, key);
    blocks[id].left = left;
    blocks[id].right = right;
    if parent == NONE {
        root = id;
    } else if went_left {
        blocks[parent].left = id;
    } else {
        blocks[parent].right = id;
    }
    root
}

/// Splits a tree into the nodes before `key` and those after it.
fn split(blocks: &mut Blocks, ties: &impl TieBreak, root: u32, key: Key) -> (u32, u32) {
    // The ends of the two chains under construction: the right link of `last_before`, the left link of `last_after`.
    let (mut before, mut after) = (NONE, NONE);
    let (mut last_before, mut last_after) = (NONE, NONE);
    let mut at = root;
    while at != NONE {
        if !is_before(blocks, ties, key, at) {
            if last_before == NONE {
                before = at;
            } else {
                blocks[last_before].right = at;
            }
            last_before = at;
            at = blocks[at].right;
        } else {
            if last_after == NONE {
                after = at;
            } else {
                blocks[last_after].left = at;
            }
            last_after = at;
            at = blocks[at].left;
        }
    }
    if last_before != NONE {
        blocks[last_before].right = NONE;
    }
    if last_after != NONE {
        blocks[last_after].left = NONE;
    }
    (before, after)
}

/// Takes `id` out, which is in the tree; returns the new root.
pub(super) fn remove(blocks: &mut Blocks, ties: &impl TieBreak, root: u32, id: BlockId) -> u32 {
    let merged = merge(blocks, blocks[id].left, blocks[id].right);
    if root == id {
        return merged;
    }
    let key = Key::of(blocks, ties, id);
    let mut at = root;
    loop {
        let left = is_before(blocks, ties, key, at);
        let child = if left { blocks[at].left } else { blocks[at].right };
        if child == id {
            if left {
                blocks[at].left = merged;
            } else {
                blocks[at].right = merged;
            }
            return root;
        }
        debug_assert_ne!(child, NONE, "block {id} is not in the tree it should be in");
        if child == NONE {
            return root;
        }
        at = child;
    }
}

/// Joins two trees, all of the first before all of the second.
fn merge(blocks: &mut Blocks, mut a: u32, mut b: u32) -> u32 {
    let (mut root, mut parent, mut went_left) = (NONE, NONE, false);
    loop {
        let (top, take_a) = match (a, b) {
            (NONE, NONE) => break,
            (_, NONE) => (a, true),
            (NONE, _) => (b, false),
            _ if priority(a) >= priority(b) => (a, true),
            _ => (b, false),
        };
        if parent == NONE {
            root = top;
        } else if went_left {
            blocks[parent].left = top;
        } else {
            blocks[parent].right = top;
        }
        if (take_a && b == NONE) || (!take_a && a == NONE) {
            return root;
        }
        parent = top;
        if take_a {
            went_left = false;
            a = blocks[top].right;
        } else {
            went_left = true;
            b = blocks[top].left;
        }
    }
    if parent != NONE {
        if went_left {
            blocks[parent].left = NONE;
        } else {
            blocks[parent].right = NONE;
        }
    }
    root
}

/// The first node at or after `key`.
pub(super) fn lower_bound(blocks: &Blocks, ties: &impl TieBreak, root: u32, key: Key) -> Option<BlockId> {
    let (mut at, mut best) = (root, NONE);
    while at != NONE {
        // Most searches ask for a size alone, and most nodes differ in it: look the tie up only where it matters.
        let size = blocks[at].size;
        let at_or_after = if size == key.size { Key::of(blocks, ties, at) >= key } else { size > key.size };
        if at_or_after {
            best = at;
            at = blocks[at].left;
        } else {
            at = blocks[at].right;
        }
    }
    (best != NONE).then_some(best)
}

/// The first node.
pub(super) fn first(blocks: &Blocks, root: u32) -> Option<BlockId> {
    let mut at = root;
    if at == NONE {
        return None;
    }
    while blocks[at].left != NONE {
        at = blocks[at].left;
    }
    Some(at)
}

/// The last node.
pub(super) fn last(blocks: &Blocks, root: u32) -> Option<BlockId> {
    let mut at = root;
    if at == NONE {
        return None;
    }
    while blocks[at].right != NONE {
        at = blocks[at].right;
    }
    Some(at)
}

/// Appends all nodes in order.
pub(super) fn in_order(blocks: &Blocks, root: u32, out: &mut Vec<BlockId>) {
    let (mut at, mut above) = (root, Vec::new());
    while at != NONE || !above.is_empty() {
        while at != NONE {
            above.push(at);
            at = blocks[at].left;
        }
        if let Some(top) = above.pop() {
            out.push(top);
            at = blocks[top].right;
        }
    }
}
