//! offset-allocator: the core of a sub-allocator and nothing around it. No lock, no streams, no counters, no segments; one range.

use offset_allocator::{Allocation, Allocator};

use crate::{CAPACITY, Peer};

/// It counts in 32 bits; here in units of what our blocks are multiples of.
const UNIT: u64 = 512;
/// Blocks, live and free, that it has records for.
const RECORDS: u32 = 1 << 18;

/// The peer.
pub struct Offset {
    inner: Allocator,
}

impl Offset {
    /// One range of [`CAPACITY`] bytes.
    #[must_use]
    pub fn new() -> Self {
        Self { inner: Allocator::with_max_allocs((CAPACITY / UNIT) as u32, RECORDS) }
    }
}

impl Default for Offset {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Offset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offset").field("report", &self.inner.storage_report()).finish()
    }
}

impl Peer for Offset {
    type Block = Allocation;

    #[inline]
    fn alloc(&mut self, bytes: u64, _: u16) -> Option<Allocation> {
        self.inner.allocate(u32::try_from(bytes.div_ceil(UNIT)).ok()?)
    }

    #[inline]
    fn free(&mut self, block: Allocation) {
        self.inner.free(block);
    }

    #[inline]
    fn address(&self, block: &Allocation) -> u64 {
        u64::from(block.offset) * UNIT
    }
}
