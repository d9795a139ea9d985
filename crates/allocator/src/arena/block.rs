//! The record of a block, and the slab that holds an arena's blocks.
//!
//! A record is 56 bytes and holds everything that allocation, splitting and merging need; nothing is allocated per block. Blocks
//! refer to each other by index. What only few blocks have (recorded uses) lives in a side table.
//!
//! * **B1** `prev` and `next` link the blocks of one segment in address order, without gaps.
//! * **B2** `left` and `right` belong to the free index while the block is free, to its bin while it is binned, and to the slab
//!   while the record is vacant.
//! * **B3** The record [`EDGE`] is never in use. It stands in for a neighbour that is not there.

use crate::units::Units;

/// An index into the slab. Valid only together with the block's generation.
pub(crate) type BlockId = u32;

/// No block.
pub(crate) const NONE: u32 = u32::MAX;

/// What a handle knows its block by: the record and its generation. One word, since two that lie side by side would be written apart and read
/// together, which a processor waits for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct BlockKey(u64);

impl BlockKey {
    #[inline(always)]
    pub(crate) fn new(id: BlockId, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(id))
    }

    #[inline(always)]
    pub(crate) fn of_word(word: u64) -> Self {
        Self(word)
    }

    #[inline(always)]
    pub(crate) fn word(self) -> u64 {
        self.0
    }

    #[inline(always)]
    pub(crate) fn id(self) -> BlockId {
        self.0 as BlockId
    }

    #[inline(always)]
    pub(crate) fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// What a block is at present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BlockState {
    /// The record is not in use.
    Vacant,
    /// Handed out.
    Live,
    /// Freed, but some stream may still use it.
    Pending,
    /// In the free index.
    Free,
    /// In its stream's bin: free, but not merged.
    Binned,
    /// Out of the index for a while: the driver is being called about it, or its old mapping is leaving (see [`crate::pages`]).
    Held,
    /// Addresses with no memory behind them.
    Hole,
}

/// A part of a segment. What merging needs of its neighbours stands first and together, so that mostly one cache line has it.
#[derive(Clone, Debug)]
#[repr(C)]
pub(crate) struct Block {
    /// Units from the segment's start.
    pub(crate) offset: Units,
    pub(crate) size: Units,
    pub(crate) prev: BlockId,
    pub(crate) next: BlockId,
    pub(crate) left: u32,
    pub(crate) right: u32,
    /// The lane whose index this block goes to when it is free.
    pub(crate) lane: u32,
    pub(crate) state: BlockState,
    /// What the last owner asked for, in bytes. Stale in a free block, as in PyTorch.
    pub(crate) requested: u64,
    pub(crate) segment: u32,
    /// Recorded uses in the arena's side table, or [`NONE`].
    pub(crate) uses: u32,
    /// Counts hand-outs of this record, so that a stale handle is recognised.
    pub(crate) generation: u32,
    /// The part's age counter when the whole segment became free.
    pub(crate) age: u32,
}

impl Block {
    /// A record that is not in use.
    pub(crate) const VACANT: Self = Self {
        requested: 0,
        segment: 0,
        offset: 0,
        size: 0,
        prev: NONE,
        next: NONE,
        left: NONE,
        right: NONE,
        lane: 0,
        uses: NONE,
        generation: 0,
        age: 0,
        state: BlockState::Vacant,
    };

    /// Whether the segment holds other blocks than this one.
    #[inline]
    pub(crate) fn is_split(&self) -> bool {
        // Every bit of `NONE` is set, so that one comparison does.
        self.prev & self.next != NONE
    }
}

/// Records that a full slab is given at once, and the part of it (an eighth) where that is more.
const LEAST: usize = 16;
const GROWTH: usize = 8;
/// So many records at either end of a slab are never in use (one of them is [`EDGE`]): then no other arena's thread writes to the cache lines (in pairs, as they are fetched)
/// that those in use lie on.
const APART: usize = 128_usize.div_ceil(size_of::<Block>());

/// A record that is never in use, and stands in for a neighbour that is not there: it says so to who reads it, and who writes its links changes nothing.
/// Whether there is a neighbour nobody can predict, so that to ask first would be dear.
pub(crate) const EDGE: BlockId = APART as BlockId - 1;

/// Where a neighbour's record is; [`EDGE`] for [`NONE`].
#[inline(always)]
pub(crate) fn or_edge(neighbour: BlockId) -> usize {
    (if neighbour == NONE { EDGE } else { neighbour }) as usize
}

/// An arena's block records.
#[derive(Debug)]
pub(crate) struct Blocks {
    records: Vec<Block>,
    vacancies: Vacancies,
    /// What new records' generations begin with.
    first_generation: u32,
}

/// Which records are not in use.
#[derive(Debug)]
pub(crate) struct Vacancies {
    first: BlockId,
    /// How many others there are.
    used: u32,
}

impl Vacancies {
    /// Makes a record vacant. Handles to it become stale.
    #[inline(always)]
    pub(crate) fn add(&mut self, records: &mut [Block], id: BlockId) -> Block {
        self.used -= 1;
        let slot = &mut records[id as usize];
        let block = slot.clone();
        slot.state = BlockState::Vacant;
        slot.generation = slot.generation.wrapping_add(1);
        slot.left = self.first;
        self.first = id;
        block
    }
}

impl Blocks {
    pub(crate) fn new() -> Self {
        Self { records: Vec::new(), vacancies: Vacancies { first: NONE, used: 0 }, first_generation: 0 }
    }

    /// The records, and which of them are not in use: for who takes some out. Where they are is looked up once.
    #[inline(always)]
    pub(crate) fn parts(&mut self) -> (&mut [Block], &mut Vacancies) {
        (&mut self.records, &mut self.vacancies)
    }

    /// An empty slab whose generations go on where these end: a handle to a record here is stale there. O(records).
    pub(super) fn successor(&self) -> Self {
        let newest = self.records.iter().map(|block| block.generation).max();
        Self { first_generation: newest.map_or(self.first_generation, |newest| newest.wrapping_add(1)), ..Self::new() }
    }

    /// Adds a record; its generation continues that of the record it takes the place of.
    pub(crate) fn insert(&mut self, block: Block) -> BlockId {
        let id = self.vacancy();
        let record = &mut self.records[id as usize];
        *record = Block { generation: record.generation, ..block };
        id
    }

    /// A record that was vacant: whoever asks fills it in, all but its generation.
    #[inline(always)]
    pub(crate) fn vacancy(&mut self) -> BlockId {
        let Vacancies { first, used } = &mut self.vacancies;
        *used += 1;
        match self.records.get(*first as usize) {
            Some(record) => std::mem::replace(first, record.left),
            None => self.append(),
        }
    }

    #[cold]
    #[inline(never)]
    fn append(&mut self) -> BlockId {
        if self.records.len() + APART >= self.records.capacity() {
            // Doubling would leave half of the memory unused.
            self.records.reserve_exact((self.records.len() / GROWTH).max(LEAST) + APART);
        }
        if self.records.is_empty() {
            self.records.extend([const { Block::VACANT }; APART]);
        }
        // An arena never comes near 2^32 blocks: 2^32 blocks of 512 bytes are 2 TiB of host records first.
        let id = self.records.len() as BlockId;
        self.records.push(Block { generation: self.first_generation, ..Block::VACANT });
        id
    }

    /// Makes a record vacant. Handles to it become stale.
    #[inline(always)]
    pub(crate) fn remove(&mut self, id: BlockId) -> Block {
        self.vacancies.add(&mut self.records, id)
    }

    /// The record, unless it is vacant or of another generation.
    pub(crate) fn current(&self, key: BlockKey) -> Option<&Block> {
        let record = self.records.get(key.id() as usize)?;
        (record.generation == key.generation() && record.state != BlockState::Vacant).then_some(record)
    }

    /// The record, if the block is live and of that generation.
    pub(crate) fn live(&self, key: BlockKey) -> Option<&Block> {
        self.current(key).filter(|block| block.state == BlockState::Live)
    }

    /// By what a handle would know the block that the record is of now.
    pub(crate) fn key(&self, id: BlockId) -> BlockKey {
        BlockKey::new(id, self[id].generation)
    }

    #[inline]
    pub(crate) fn get(&self, id: BlockId) -> Option<&Block> {
        self.records.get(id as usize)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: BlockId) -> Option<&mut Block> {
        self.records.get_mut(id as usize)
    }

    /// Records in use.
    pub(crate) fn used(&self) -> usize {
        self.vacancies.used as usize
    }

    /// Bytes of host memory that the records take.
    pub(crate) fn host_bytes(&self) -> usize {
        self.records.capacity() * size_of::<Block>()
    }

    /// The ids of all records in use.
    pub(crate) fn ids(&self) -> impl Iterator<Item = BlockId> + '_ {
        (0..self.records.len() as BlockId).filter(|id| self.records[*id as usize].state != BlockState::Vacant)
    }
}

/// The records, by index: while somebody has them so, none are added, and where they are need be looked up only once.
impl std::ops::Deref for Blocks {
    type Target = [Block];
    #[inline(always)]
    fn deref(&self) -> &[Block] {
        &self.records
    }
}

impl std::ops::DerefMut for Blocks {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [Block] {
        &mut self.records
    }
}

impl std::ops::Index<BlockId> for Blocks {
    type Output = Block;
    #[inline]
    fn index(&self, id: BlockId) -> &Block {
        &self.records[id as usize]
    }
}

impl std::ops::IndexMut<BlockId> for Blocks {
    #[inline]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.records[id as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_keeps_its_promised_size() {
        assert!(size_of::<Block>() <= 56, "{}", size_of::<Block>());
    }
}
