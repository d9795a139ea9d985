//! The classical shape of a caching allocator, as a baseline: an ordered tree of free blocks by (size, address), a hash map from address
//! to block, one lock around both.
//!
//! Requests are rounded and take the best fit; blocks are split, and merged with free neighbours, by the same rules as PyTorch's. What a
//! real one does beyond that (streams, pools, events, statistics) is left out, so the baseline is a friendly one: the hash is a cheap
//! one too.

use std::collections::BTreeSet;
use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::{CAPACITY, Peer};

const UNIT: u64 = 512;
const MIB: u64 = 1 << 20;
/// Requests up to this size are small: a part of the pool of their own.
const SMALL_LIMIT: u64 = MIB;
const SMALL_SEGMENT: u64 = 2 * MIB;
const LARGE_SEGMENT: u64 = 20 * MIB;
/// From this size on, a segment is made for the request alone.
const DEDICATED_FROM: u64 = 10 * MIB;

/// A part of a segment; neighbours by address, 0 for none.
#[derive(Clone, Copy, Debug)]
struct Block {
    size: u64,
    previous: u64,
    next: u64,
    large: bool,
    free: bool,
}

#[derive(Debug)]
struct State {
    /// Free blocks of the small and the large part, by size and address.
    free: [BTreeSet<(u64, u64)>; 2],
    blocks: HashMap<u64, Block>,
    /// Where the next segment goes.
    end: u64,
}

impl State {
    fn alloc(&mut self, bytes: u64) -> Option<u64> {
        let size = bytes.max(1).next_multiple_of(UNIT);
        let large = size > SMALL_LIMIT;
        let part = &mut self.free[usize::from(large)];
        let address = match part.range((size, 0)..).next().copied() {
            Some(found) => {
                part.remove(&found);
                found.1
            }
            None => self.grow(size, large)?,
        };
        let block = self.blocks.get_mut(&address)?;
        block.free = false;
        let (rest, next) = (block.size - size, block.next);
        if rest > if large { MIB } else { 0 } {
            let tail = address + size;
            block.size = size;
            block.next = tail;
            self.blocks.insert(tail, Block { size: rest, previous: address, next, large, free: true });
            if let Some(next) = self.blocks.get_mut(&next) {
                next.previous = tail;
            }
            self.free[usize::from(large)].insert((rest, tail));
        }
        Some(address)
    }

    fn grow(&mut self, size: u64, large: bool) -> Option<u64> {
        let bytes = match large {
            false => SMALL_SEGMENT,
            true if size < DEDICATED_FROM => LARGE_SEGMENT,
            true => size.next_multiple_of(2 * MIB),
        };
        let address = self.end;
        self.end = address.checked_add(bytes).filter(|end| *end <= UNIT + CAPACITY)?;
        self.blocks.insert(address, Block { size: bytes, previous: 0, next: 0, large, free: false });
        Some(address)
    }

    fn free(&mut self, address: u64) {
        let Some(block) = self.blocks.get(&address).copied().filter(|block| !block.free) else { return };
        let (mut start, mut merged) = (address, Block { free: true, ..block });
        if let Some(next) = self.take_free(block.next) {
            merged.size += next.size;
            merged.next = next.next;
        }
        if let Some(previous) = self.take_free(block.previous) {
            self.blocks.remove(&address);
            start = block.previous;
            merged.size += previous.size;
            merged.previous = previous.previous;
        }
        if let Some(next) = self.blocks.get_mut(&merged.next) {
            next.previous = start;
        }
        if let Some(previous) = self.blocks.get_mut(&merged.previous) {
            previous.next = start;
        }
        self.blocks.insert(start, merged);
        self.free[usize::from(block.large)].insert((merged.size, start));
    }

    /// Takes a block out, if it is free.
    fn take_free(&mut self, address: u64) -> Option<Block> {
        let block = self.blocks.get(&address).copied().filter(|block| block.free)?;
        self.blocks.remove(&address);
        self.free[usize::from(block.large)].remove(&(block.size, address));
        Some(block)
    }
}

/// The peer.
#[derive(Debug)]
pub struct Naive {
    state: Mutex<State>,
}

impl Naive {
    /// With nothing yet of its [`CAPACITY`].
    #[must_use]
    pub fn new() -> Self {
        // Address 0 stands for no block.
        let state = State { free: [BTreeSet::new(), BTreeSet::new()], blocks: HashMap::new(), end: UNIT };
        Self { state: Mutex::new(state) }
    }
}

impl Default for Naive {
    fn default() -> Self {
        Self::new()
    }
}

impl Peer for Naive {
    type Block = u64;

    #[inline]
    fn alloc(&mut self, bytes: u64, _: u16) -> Option<u64> {
        self.state.lock().alloc(bytes)
    }

    #[inline]
    fn free(&mut self, block: u64) {
        self.state.lock().free(block);
    }

    #[inline]
    fn address(&self, block: &u64) -> u64 {
        *block
    }
}

/// [`Naive`] shared by threads.
#[derive(Clone, Debug, Default)]
pub struct SharedNaive {
    inner: Arc<Naive>,
}

impl Peer for SharedNaive {
    type Block = u64;

    #[inline]
    fn alloc(&mut self, bytes: u64, _: u16) -> Option<u64> {
        self.inner.state.lock().alloc(bytes)
    }

    #[inline]
    fn free(&mut self, block: u64) {
        self.inner.state.lock().free(block);
    }

    #[inline]
    fn address(&self, block: &u64) -> u64 {
        *block
    }
}
