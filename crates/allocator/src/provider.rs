//! Memory for a pool from somewhere else than the driver.

use gpupool_device::{Address, StreamHandle};

/// Gives a pool its segments in place of the driver, and takes them back. Called with no lock held, from any thread.
///
/// Segment sizes are the usual ones: 2 MiB, the large segment size, or a multiple of 2 MiB.
pub trait SegmentProvider: Send + Sync + 'static {
    /// A range of `bytes`, aligned to 512 at least, or `None` (or null) when there is none: that is out of memory, and the ladder goes on.
    /// A range that is not so aligned is released at once, and the request ends with the driver's `INVALID_VALUE`.
    fn allocate(&self, bytes: u64, stream: StreamHandle) -> Option<Address>;

    /// Takes a range back, exactly as it was given. All work on it is complete, or the provider waits for it.
    fn release(&self, address: Address, bytes: u64);
}
