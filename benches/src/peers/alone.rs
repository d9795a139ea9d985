//! The loop and nothing else.

use crate::Peer;

/// The loop alone, without the device's captures that [`Nothing`](super::Nothing) makes.
#[derive(Clone, Copy, Debug)]
pub struct Alone;

impl Peer for Alone {
    type Block = u64;

    #[inline]
    fn alloc(&mut self, bytes: u64, _: u16) -> Option<u64> {
        Some(bytes)
    }

    #[inline]
    fn free(&mut self, _: u64) {}

    #[inline]
    fn address(&self, block: &u64) -> u64 {
        *block
    }
}
