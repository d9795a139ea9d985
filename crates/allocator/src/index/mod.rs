//! The free index: a lane's free blocks, found by exact best fit.
//!
//! Sizes fall into classes (see [`classes`]); a two-level bitmap says which classes hold anything. Inside a class the blocks form
//! a search tree (see [`tree`]) in the order **(size, tie, offset)**, where the tie is a policy decision: the age of the segment,
//! or its address. Since classes grow with size, class by class and in order inside each is the order over all blocks.
//!
//! Classes below 256 KiB hold one size each. As far as the policy leaves it open which of equal blocks goes first, they are stacks (see
//! [`stack`]): the block that became free last goes first, as from a bin.
//!
//! * **F1** A block is in the index of its lane exactly while its state is `Free`.
//! * **F2** A class's bit is set exactly while it is non-empty.
//!
//! What takes blocks takes their records as a slice, which stays where it is meanwhile, so that it is looked up once.
//!
//! Everything costs O(log n) in the number of blocks *of one class*, O(1) in a stack, and no memory for each block beyond the two links
//! in its record.

mod classes;
mod stack;
mod tree;

use crate::arena::{Block, BlockId, NONE};
use crate::units::Units;
use classes::{ClassBitmap, OF_ONE_SIZE, PER_POWER, class_of};

/// What orders blocks of equal size: the smaller tie first, then the lower offset. Looked up by segment.
pub(crate) trait TieBreak {
    /// The tie of a segment.
    fn tie(&self, segment: u32) -> u64;
}

/// A block's place in the order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Key {
    pub(crate) size: Units,
    pub(crate) tie: u64,
    pub(crate) offset: Units,
}

impl Key {
    #[inline]
    pub(crate) fn of(blocks: &[Block], ties: &impl TieBreak, id: BlockId) -> Self {
        let b = &blocks[id as usize];
        Self { size: b.size, tie: ties.tie(b.segment), offset: b.offset }
    }
}

/// A block that was searched for, and where it hangs, so that it can be taken out without a second search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) id: BlockId,
    /// The node that it hangs from in its class's tree, or [`NONE`].
    parent: BlockId,
    class: u32,
}

/// A lane's free blocks.
#[derive(Clone, Debug)]
pub(crate) struct FreeIndex {
    bitmap: ClassBitmap,
    /// What each class's blocks hang from, up to the largest class that ever held anything: most lanes of most pools stay empty.
    roots: Vec<u32>,
    /// Classes below this one are stacks.
    stacks: usize,
}

impl FreeIndex {
    /// Blocks of equal size are in the order of their ties, but for those below `stacked`, and in classes of one size.
    pub(crate) fn new(stacked: Units) -> Self {
        let stacks = OF_ONE_SIZE.min(stacked as usize);
        Self { bitmap: ClassBitmap::default(), roots: Vec::new(), stacks }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.bitmap.is_empty()
    }

    /// Adds a block that is in no index. O(log n) in its class.
    #[inline(always)]
    pub(crate) fn insert(&mut self, blocks: &mut [Block], ties: &impl TieBreak, id: BlockId) {
        let class = class_of(blocks[id as usize].size);
        if class >= self.roots.len() {
            self.make_roots(class);
        }
        let root = &mut self.roots[class];
        if *root == NONE || class < self.stacks {
            *root = stack::push(blocks, *root, id);
            self.bitmap.set(class);
        } else {
            tree::insert(blocks, ties, *root, id);
        }
    }

    /// Makes room for a class that is larger than any that ever held something.
    #[cold]
    #[inline(never)]
    fn make_roots(&mut self, class: usize) {
        let classes = (class + 1).next_multiple_of(PER_POWER);
        self.roots.resize(classes, NONE);
        self.bitmap.make_room(classes);
    }

    /// Takes a block out that is in this index. O(log n) in its class.
    #[inline(always)]
    pub(crate) fn remove(&mut self, blocks: &mut [Block], ties: &impl TieBreak, id: BlockId) {
        let class = class_of(blocks[id as usize].size);
        let root = self.roots[class];
        let parent = if class < self.stacks || root == id { NONE } else { tree::parent(blocks, ties, root, id) };
        self.remove_found(blocks, Found { id, parent, class: class as u32 });
    }

    /// Takes a block out that [`best_fit`](Self::best_fit) has found, if the index has not changed since.
    #[inline(always)]
    pub(crate) fn remove_found(&mut self, blocks: &mut [Block], Found { id, parent, class }: Found) {
        let class = class as usize;
        let root = &mut self.roots[class];
        *root = if class < self.stacks {
            stack::remove(blocks, *root, id)
        } else {
            tree::remove(blocks, *root, id, parent)
        };
        self.bitmap.clear_if(class, *root == NONE);
    }

    /// The first block in order whose size is at least `size`. O(log n) in one class.
    #[inline(always)]
    pub(crate) fn best_fit(&self, blocks: &[Block], size: Units) -> Option<Found> {
        let own = class_of(size);
        let mut class = self.bitmap.next(own)?;
        // In the size's own class some may be smaller.
        if class == own && class >= OF_ONE_SIZE {
            if let Some((id, parent)) = tree::lower_bound(blocks, self.roots[class], size) {
                return Some(Found { id, parent, class: class as u32 });
            }
            class = self.bitmap.next(own + 1)?;
        }
        let root = self.roots[class];
        let (id, parent) = if class < self.stacks { (root, NONE) } else { tree::first(blocks, root) };
        Some(Found { id, parent, class: class as u32 })
    }

    /// Whether there may be a block between these sizes: whether there is one in their classes. O(1).
    #[inline]
    pub(crate) fn has_within(&self, least: Units, most: Units) -> bool {
        self.bitmap.next(class_of(least)).is_some_and(|class| class <= class_of(most))
    }

    /// The largest block. O(log n) in one class, and a scan of the classes.
    pub(crate) fn largest(&self, blocks: &[Block]) -> Option<BlockId> {
        let class = (0..self.roots.len()).rev().find(|c| self.roots[*c] != NONE)?;
        // In a stack all are of one size.
        if class < self.stacks { Some(self.roots[class]) } else { tree::last(blocks, self.roots[class]) }
    }

    /// All blocks in order. O(n).
    pub(crate) fn in_order(&self, blocks: &[Block]) -> Vec<BlockId> {
        self.in_order_from(blocks, 0)
    }

    /// Those of the class of a size and of larger ones, in order. O(them).
    pub(crate) fn in_order_from(&self, blocks: &[Block], size: Units) -> Vec<BlockId> {
        let (mut out, mut class) = (Vec::new(), class_of(size));
        while let Some(found) = self.bitmap.next(class) {
            if found < self.stacks {
                stack::in_order(blocks, self.roots[found], &mut out);
            } else {
                tree::in_order(blocks, self.roots[found], &mut out);
            }
            class = found + 1;
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{BlockState, Blocks};
    use std::collections::BTreeSet;

    struct Ties;
    impl TieBreak for Ties {
        fn tie(&self, segment: u32) -> u64 {
            u64::from(segment)
        }
    }

    fn block(size: Units, segment: u32, offset: Units) -> Block {
        Block { size, segment, offset, state: BlockState::Free, ..Block::VACANT }
    }

    /// A sorted set as the model: same best fit, same order, whatever the sequence.
    #[test]
    fn agrees_with_a_sorted_set_on_random_sequences() {
        for (seed, stacked) in (1..=40u64).flat_map(|seed| [(seed, 0), (seed, 128), (seed, Units::MAX)]) {
            // Offsets tell when a block was added.
            let key = |blocks: &Blocks, id: BlockId| {
                let (key, newest) = (Key::of(blocks, &Ties, id), u64::MAX - u64::from(blocks[id].offset));
                let is_stacked = key.size < stacked.min(OF_ONE_SIZE as u32);
                if is_stacked { Key { tie: newest, ..key } } else { key }
            };
            let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let mut next = move || {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                x
            };
            let (mut blocks, mut index, mut model) = (Blocks::new(), FreeIndex::new(stacked), BTreeSet::new());
            for step in 0..2_000u32 {
                let r = next();
                // Few distinct sizes on even seeds, so that ties decide; many on odd ones.
                let size = if seed % 2 == 0 {
                    1 + (r >> 8) as u32 % 6
                } else {
                    1 + (r >> 8) as u32 % (1 << ((r >> 40) % 20 + 1))
                };
                if r % 3 != 0 || model.is_empty() {
                    let id = blocks.insert(block(size, (r >> 33) as u32 % 5, step));
                    index.insert(&mut blocks, &Ties, id);
                    model.insert((key(&blocks, id), id));
                } else {
                    let nth = (r >> 20) as usize % model.len();
                    let Some(&(at, id)) = model.iter().nth(nth) else { continue };
                    index.remove(&mut blocks, &Ties, id);
                    blocks.remove(id);
                    model.remove(&(at, id));
                }
                let expected = model.range((Key { size, tie: 0, offset: 0 }, 0)..).next().map(|(_, id)| *id);
                let found = index.best_fit(&blocks, size);
                assert_eq!(found.map(|f| f.id), expected, "seed {seed} step {step}, stacked below {stacked}");
                if let Some(found) = found.filter(|_| r % 7 == 0) {
                    model.remove(&(key(&blocks, found.id), found.id));
                    index.remove_found(&mut blocks, found);
                    blocks.remove(found.id);
                }
                if step % 100 == 0 {
                    assert_eq!(index.in_order(&blocks), model.iter().map(|(_, id)| *id).collect::<Vec<_>>());
                }
            }
            let all: Vec<_> = model.iter().map(|(_, id)| *id).collect();
            assert_eq!(index.in_order(&blocks), all);
            for size in [1, 5, 100, 1_000, 100_000] {
                let from = index.in_order_from(&blocks, size);
                let first = all.iter().position(|id| blocks[*id].size >= size).unwrap_or(all.len());
                assert!(all.ends_with(&from) && from.len() >= all.len() - first, "seed {seed} from {size}");
            }
            assert_eq!(index.largest(&blocks).map(|id| blocks[id].size), model.iter().next_back().map(|(k, _)| k.size));
        }
    }
}
