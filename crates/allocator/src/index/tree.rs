//! The search tree of one class: a treap whose links are in the blocks' records.
//!
//! A node's priority is a hash of its id: no state, no rebalancing rules, the same tree for the same sequence in every run. Expected depth is
//! 1.4 log2 n, and a few more for what [`SHALLOW`] says. (Who saw the priorities and had nodes come and go by them could make it deep.) The functions take
//! and return roots.

use super::TieBreak;
use crate::arena::{Block, BlockId, NONE};
use crate::units::Units;

/// Nodes less deep than this stay where they are when others come, whatever their priorities: most trees have few nodes, and which of two ranks higher
/// is a turn that nobody can predict. It makes a tree deeper by this, and by what lies above such a node of low priority once the one above it has gone. At least
/// 1: so a tree's root stays.
const SHALLOW: u32 = 3;

/// Mixed twice: by one multiplication ids that are some number apart, as those of one place in each layer are, get priorities in order, and what lies in
/// the same order becomes a chain.
const fn priority(id: BlockId) -> u32 {
    let h = (id as u64).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((h ^ h >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 32) as u32
}

/// Whether the block `new` is before node `at`. The tie is looked up only where it matters: most nodes differ in size, or lie in the same
/// segment.
#[inline]
fn is_before(blocks: &[Block], ties: &impl TieBreak, new: &Place, at: BlockId) -> bool {
    let node = &blocks[at as usize];
    if node.size != new.size {
        return new.size < node.size;
    }
    if node.segment == new.segment {
        return new.offset < node.offset;
    }
    (ties.tie(new.segment), new.offset) < (ties.tie(node.segment), node.offset)
}

/// What a block's place in the order is made of.
struct Place {
    size: Units,
    segment: u32,
    offset: Units,
}

impl Place {
    fn of(blocks: &[Block], id: BlockId) -> Self {
        let block = &blocks[id as usize];
        Self { size: block.size, segment: block.segment, offset: block.offset }
    }
}

/// Adds `id` to a tree that is not empty, whose root stays.
#[inline(never)]
pub(super) fn insert(blocks: &mut [Block], ties: &impl TieBreak, root: BlockId, id: BlockId) {
    let (new, rank) = (Place::of(blocks, id), priority(id));
    let (mut at, mut parent, mut went_left, mut depth) = (root, NONE, false, 0);
    // Descend past the topmost nodes, and past every node that outranks the new one.
    while at != NONE && (depth < SHALLOW || priority(at) >= rank) {
        parent = at;
        went_left = is_before(blocks, ties, &new, at);
        at = if went_left { blocks[at as usize].left } else { blocks[at as usize].right };
        depth += 1;
    }
    // What hangs there is split into the new node's two subtrees.
    let (left, right) = split(blocks, ties, at, &new);
    blocks[id as usize].left = left;
    blocks[id as usize].right = right;
    if went_left {
        blocks[parent as usize].left = id;
    } else {
        blocks[parent as usize].right = id;
    }
}

/// Splits a tree into the nodes before `new` and those after it.
fn split(blocks: &mut [Block], ties: &impl TieBreak, root: u32, new: &Place) -> (u32, u32) {
    // The ends of the two chains under construction: the right link of `last_before`, the left link of `last_after`.
    let (mut before, mut after) = (NONE, NONE);
    let (mut last_before, mut last_after) = (NONE, NONE);
    let mut at = root;
    while at != NONE {
        if !is_before(blocks, ties, new, at) {
            if last_before == NONE {
                before = at;
            } else {
                blocks[last_before as usize].right = at;
            }
            last_before = at;
            at = blocks[at as usize].right;
        } else {
            if last_after == NONE {
                after = at;
            } else {
                blocks[last_after as usize].left = at;
            }
            last_after = at;
            at = blocks[at as usize].left;
        }
    }
    if last_before != NONE {
        blocks[last_before as usize].right = NONE;
    }
    if last_after != NONE {
        blocks[last_after as usize].left = NONE;
    }
    (before, after)
}

/// The node that `id` hangs from, which is in the tree; [`NONE`] for the root.
#[inline(never)]
pub(super) fn parent(blocks: &[Block], ties: &impl TieBreak, root: u32, id: BlockId) -> BlockId {
    let place = Place::of(blocks, id);
    let (mut at, mut parent) = (root, NONE);
    while at != id {
        debug_assert_ne!(at, NONE, "block {id} is not in the tree it should be in");
        parent = at;
        at = if is_before(blocks, ties, &place, at) { blocks[at as usize].left } else { blocks[at as usize].right };
    }
    parent
}

/// Takes `id` out, which hangs from `parent`; returns the new root.
#[inline(always)]
pub(super) fn remove(blocks: &mut [Block], root: u32, id: BlockId, parent: BlockId) -> u32 {
    let Block { left, right, .. } = blocks[id as usize];
    // Which of the two is missing nobody can predict; every bit of `NONE` is set.
    let rest = if (left == NONE) | (right == NONE) { left & right } else { merge(blocks, left, right) };
    if parent == NONE {
        return rest;
    }
    let parent = &mut blocks[parent as usize];
    if parent.left == id {
        parent.left = rest;
    } else {
        parent.right = rest;
    }
    root
}

/// Joins two trees, all of the first before all of the second.
#[inline(never)]
fn merge(blocks: &mut [Block], mut a: u32, mut b: u32) -> u32 {
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
            blocks[parent as usize].left = top;
        } else {
            blocks[parent as usize].right = top;
        }
        if (take_a && b == NONE) || (!take_a && a == NONE) {
            return root;
        }
        parent = top;
        if take_a {
            went_left = false;
            a = blocks[top as usize].right;
        } else {
            went_left = true;
            b = blocks[top as usize].left;
        }
    }
    if parent != NONE {
        if went_left {
            blocks[parent as usize].left = NONE;
        } else {
            blocks[parent as usize].right = NONE;
        }
    }
    root
}

/// The first node of at least that size, and the one that it hangs from.
#[inline(always)]
pub(super) fn lower_bound(blocks: &[Block], root: u32, size: Units) -> Option<(BlockId, BlockId)> {
    let (mut at, mut parent, mut best) = (root, NONE, None);
    while at != NONE {
        let node = &blocks[at as usize];
        let above = std::mem::replace(&mut parent, at);
        if node.size >= size {
            best = Some((at, above));
            at = node.left;
        } else {
            at = node.right;
        }
    }
    best
}

/// The first node of a tree that is not empty, and the one that it hangs from.
#[inline(always)]
pub(super) fn first(blocks: &[Block], root: u32) -> (BlockId, BlockId) {
    let (mut at, mut parent) = (root, NONE);
    loop {
        match blocks[at as usize].left {
            NONE => return (at, parent),
            left => (at, parent) = (left, at),
        }
    }
}

/// The last node.
pub(super) fn last(blocks: &[Block], root: u32) -> Option<BlockId> {
    let mut at = root;
    if at == NONE {
        return None;
    }
    while blocks[at as usize].right != NONE {
        at = blocks[at as usize].right;
    }
    Some(at)
}

/// Appends all nodes in order.
pub(super) fn in_order(blocks: &[Block], root: u32, out: &mut Vec<BlockId>) {
    let (mut at, mut above) = (root, Vec::new());
    while at != NONE || !above.is_empty() {
        while at != NONE {
            above.push(at);
            at = blocks[at as usize].left;
        }
        if let Some(top) = above.pop() {
            out.push(top);
            at = blocks[top as usize].right;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All lie in one segment.
    struct NoTies;
    impl TieBreak for NoTies {
        fn tie(&self, _: u32) -> u64 {
            0
        }
    }

    const LIVE: u32 = 1 << 11;

    /// How deep a tree becomes into which so many nodes come, each at the place that `at` says of how many came before it. Whenever there are `LIVE`, half
    /// of them go: those that came first, or last.
    fn depth_after(turns: u32, first_in_first_out: bool, at: impl Fn(u32) -> Units) -> usize {
        let mut blocks = vec![Block { size: 1 << 12, ..Block::VACANT }; 2 * LIVE as usize];
        let (mut root, mut live, mut vacant) =
            (NONE, std::collections::VecDeque::new(), (0..2 * LIVE).collect::<Vec<_>>());
        let mut deepest = 0;
        for nth in 0..turns {
            let Some(id) = vacant.pop() else { break };
            blocks[id as usize].offset = at(nth);
            if root == NONE {
                (blocks[id as usize].left, blocks[id as usize].right) = (NONE, NONE);
                root = id;
            } else {
                insert(&mut blocks, &NoTies, root, id);
            }
            live.push_back(id);
            // Down to half, then up again.
            if live.len() >= LIVE as usize {
                for _ in 0..LIVE / 2 {
                    let Some(gone) = (if first_in_first_out { live.pop_front() } else { live.pop_back() }) else {
                        break;
                    };
                    let parent = if root == gone { NONE } else { parent(&blocks, &NoTies, root, gone) };
                    root = remove(&mut blocks, root, gone, parent);
                    vacant.insert(0, gone);
                }
            }
            if nth % (LIVE / 4) == 0 {
                deepest = deepest.max(depth(&blocks, root));
            }
        }
        deepest
    }

    fn depth(blocks: &[Block], root: BlockId) -> usize {
        let (mut level, mut depth) = (vec![root], 0);
        while !level.is_empty() {
            level.retain(|id| *id != NONE);
            depth += usize::from(!level.is_empty());
            level = level.into_iter().flat_map(|id| [blocks[id as usize].left, blocks[id as usize].right]).collect();
        }
        depth
    }

    #[test]
    fn no_order_of_coming_and_going_makes_a_tree_deep() {
        // The deepest of so many nodes in a tree of random priorities, and what the topmost ones that stay add.
        let most = (4.3 * f64::from(LIVE).ln()) as usize + SHALLOW as usize;
        let scattered = |nth: u32| nth.wrapping_mul(0x9E37_79B9);
        let orders: [(&str, &dyn Fn(u32) -> Units); 7] = [
            ("upwards", &|nth| nth),
            ("downwards", &|nth| Units::MAX - nth),
            ("scattered", &scattered),
            ("outwards", &|nth| if nth % 2 == 0 { 1 << 31 | nth } else { (1 << 31) - nth }),
            ("64 side by side, upwards", &|nth| nth % 64 * (1 << 20) + nth / 64),
            ("34 side by side, upwards", &|nth| nth % 34 * (1 << 20) + nth / 34),
            ("610 side by side, upwards", &|nth| nth % 610 * (1 << 20) + nth / 610),
        ];
        for (name, order) in orders {
            for first_in_first_out in [true, false] {
                let deepest = depth_after(16 * LIVE, first_in_first_out, order);
                assert!(deepest <= most, "{name}, {first_in_first_out}: {deepest} of at most {most}");
            }
        }
    }
}
