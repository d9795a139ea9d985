//! The free index: a lane's free blocks, found by exact best fit.
//!
//! Sizes fall into classes (see [`classes`]); a two-level bitmap says which classes hold anything. Inside a class the blocks form
//! a search tree (see [`tree`]) in the order **(size, tie, offset)**, where the tie is a policy decision: the age of the segment,
//! or its address. Since classes grow with size, class by class and in order inside each is the order over all blocks.
//!
//! * **F1** A block is in the index of its lane exactly while its state is `Free`.
//! * **F2** A class's bit is set exactly while its tree is non-empty.
//!
//! Everything costs O(log n) in the number of blocks *of one class*, and no memory beyond the two links in each block's record.

mod classes;
mod tree;

use crate::arena::{BlockId, Blocks, NONE};
use crate::units::Units;
use classes::{ClassBitmap, class_of};
pub(crate) use tree::Found;

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
    pub(crate) fn of(blocks: &Blocks, ties: &impl TieBreak, id: BlockId) -> Self {
        let b = &blocks[id];
        Self { size: b.size, tie: ties.tie(b.segment), offset: b.offset }
    }
}

/// A lane's free blocks.
#[derive(Clone, Debug)]
pub(crate) struct FreeIndex {
    bitmap: ClassBitmap,
    /// Root of each class's tree, up to the largest class that ever held anything: most lanes of most pools stay empty.
    roots: Vec<u32>,
    len: u32,
}

impl FreeIndex {
    pub(crate) fn new() -> Self {
        Self { bitmap: ClassBitmap::default(), roots: Vec::new(), len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// Adds a block that is in no index. O(log n) in its class.
    pub(crate) fn insert(&mut self, blocks: &mut Blocks, ties: &impl TieBreak, id: BlockId) {
        let class = class_of(blocks[id].size);
        if class >= self.roots.len() {
            self.roots.resize(class + 1, NONE);
        }
        self.roots[class] = tree::insert(blocks, ties, self.roots[class], id);
        self.bitmap.set(class);
        self.len += 1;
    }

    /// Takes a block out that is in this index. O(log n) in its class.
    pub(crate) fn remove(&mut self, blocks: &mut Blocks, ties: &impl TieBreak, id: BlockId) {
        let class = class_of(blocks[id].size);
        self.roots[class] = tree::remove(blocks, ties, self.roots[class], id);
        if self.roots[class] == NONE {
            self.bitmap.clear(class);
        }
        self.len -= 1;
    }

    /// Takes a block out that [`best_fit`](Self::best_fit) has found, if the index has not changed since.
    pub(crate) fn remove_found(&mut self, blocks: &mut Blocks, found: Found) {
        let class = class_of(blocks[found.id].size);
        self.roots[class] = tree::remove_found(blocks, self.roots[class], found);
        if self.roots[class] == NONE {
            self.bitmap.clear(class);
        }
        self.len -= 1;
    }

    /// The first block in order whose size is at least `size`. O(log n) in one class.
    pub(crate) fn best_fit(&self, blocks: &Blocks, size: Units) -> Option<Found> {
        if self.len == 0 {
            return None;
        }
        let class = class_of(size);
        let root = *self.roots.get(class)?;
        if let found @ Some(_) = tree::lower_bound(blocks, root, size) {
            return found;
        }
        let class = self.bitmap.next(class + 1)?;
        tree::first(blocks, self.roots[class])
    }

    /// Whether there may be a block between these sizes: whether there is one in their classes. O(1).
    #[inline]
    pub(crate) fn has_within(&self, least: Units, most: Units) -> bool {
        self.len > 0 && self.bitmap.next(class_of(least)).is_some_and(|class| class <= class_of(most))
    }

    /// The largest block. O(log n) in one class, and a scan of the classes.
    pub(crate) fn largest(&self, blocks: &Blocks) -> Option<BlockId> {
        let class = (0..self.roots.len()).rev().find(|c| self.roots[*c] != NONE)?;
        tree::last(blocks, self.roots[class])
    }

    /// All blocks in order. O(n).
    pub(crate) fn in_order(&self, blocks: &Blocks) -> Vec<BlockId> {
        let mut out = Vec::with_capacity(self.len());
        let mut class = 0;
        while let Some(found) = self.bitmap.next(class) {
            tree::in_order(blocks, self.roots[found], &mut out);
            class = found + 1;
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Block, BlockState};
    use std::collections::BTreeSet;

    struct Ties;
    impl TieBreak for Ties {
        fn tie(&self, segment: u32) -> u64 {
            u64::from(segment)
        }
    }

    fn block(size: Units, segment: u32, offset: Units) -> Block {
        Block {
            requested: 0,
            segment,
            offset,
            size,
            prev: NONE,
            next: NONE,
            left: NONE,
            right: NONE,
            lane: 0,
            uses: NONE,
            generation: 0,
            age: 0,
            state: BlockState::Free,
        }
    }

    /// A sorted set as the model: same best fit, same order, whatever the sequence.
    #[test]
    fn agrees_with_a_sorted_set_on_random_sequences() {
        for seed in 1..=40u64 {
            let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let mut next = move || {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                x
            };
            let (mut blocks, mut index, mut model) = (Blocks::new(), FreeIndex::new(), BTreeSet::new());
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
                    model.insert((Key::of(&blocks, &Ties, id), id));
                } else {
                    let nth = (r >> 20) as usize % model.len();
                    let Some(&(key, id)) = model.iter().nth(nth) else { continue };
                    index.remove(&mut blocks, &Ties, id);
                    blocks.remove(id);
                    model.remove(&(key, id));
                }
                let expected = model.range((Key { size, tie: 0, offset: 0 }, 0)..).next().map(|(_, id)| *id);
                let found = index.best_fit(&blocks, size);
                assert_eq!(found.map(|f| f.id), expected, "seed {seed} step {step}");
                if let Some(found) = found.filter(|_| r % 7 == 0) {
                    model.remove(&(Key::of(&blocks, &Ties, found.id), found.id));
                    index.remove_found(&mut blocks, found);
                    blocks.remove(found.id);
                }
                assert_eq!(index.len(), model.len());
            }
            assert_eq!(index.in_order(&blocks), model.iter().map(|(_, id)| *id).collect::<Vec<_>>());
            assert_eq!(index.largest(&blocks).map(|id| blocks[id].size), model.iter().next_back().map(|(k, _)| k.size));
        }
    }
}
