//! The process's global allocator, whichever it is, as a peer.
//!
//! This is how rlsf is measured: a program whose global allocator is rlsf's needs no `unsafe` to use it (`rlsf_worker`, and the bench
//! `rlsf`). Such allocators keep headers *inside* the memory that they manage, which device memory does not permit: the figure is host
//! speed only. They manage host memory, which is never touched beyond the headers; sizes are divided so that it suffices.

use crate::Peer;

/// Sizes are divided by this.
const SCALE: u64 = 64;

/// The global allocator.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap;

impl Peer for Heap {
    type Block = Vec<u8>;

    #[inline]
    fn alloc(&mut self, bytes: u64, _: u16) -> Option<Vec<u8>> {
        let mut block = Vec::new();
        block.try_reserve_exact((bytes / SCALE).max(1) as usize).ok()?;
        Some(block)
    }

    #[inline]
    fn free(&mut self, block: Vec<u8>) {
        drop(block);
    }

    #[inline]
    fn address(&self, block: &Vec<u8>) -> u64 {
        block.as_ptr().addr() as u64
    }
}
