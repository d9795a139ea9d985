//! What an allocator must be able to do to be compared.

use crate::Failed;

/// Bytes of memory that every peer manages: more than any workload needs, so that growth never decides a figure.
pub const CAPACITY: u64 = 512_000_000_000;

/// What a workload needs of a peer before its first request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Needs {
    /// Streams, numbered from 0.
    pub streams: u16,
}

/// An allocator under test.
///
/// Peers without streams or graphs ignore them: they do less than they would have to, and are compared all the same.
pub trait Peer {
    /// A block in its owner's hands.
    type Block;

    /// A block of at least `bytes` on a stream; `None` if there is no memory left.
    fn alloc(&mut self, bytes: u64, stream: u16) -> Option<Self::Block>;

    /// Frees a block on the stream it was requested on.
    fn free(&mut self, block: Self::Block);

    /// Where a block starts.
    fn address(&self, block: &Self::Block) -> u64;

    /// Frees a block that one other stream used.
    fn free_used(&mut self, block: Self::Block) {
        self.free(block);
    }

    /// A capture begins on `stream`, whose requests go to private pool `pool` from now on.
    ///
    /// # Errors
    ///
    /// The allocator's or the device's.
    fn begin_capture(&mut self, pool: u64, stream: u16) -> Result<(), Failed> {
        let _ = (pool, stream);
        Ok(())
    }

    /// From now on each request asks the device whether its stream is capturing, if the peer does not do so by itself and is to be the
    /// measure of what others do beside that.
    fn ask_at_each_request(&mut self) {}

    /// The n-th capture of this turn (from 0) ends.
    ///
    /// # Errors
    ///
    /// The allocator's or the device's.
    fn end_capture(&mut self, nth: u32) -> Result<(), Failed> {
        let _ = nth;
        Ok(())
    }

    /// The cache is emptied.
    ///
    /// # Errors
    ///
    /// The allocator's.
    fn empty_cache(&mut self) -> Result<(), Failed> {
        Ok(())
    }

    /// A turn over a trace is over and every block was freed: captures that are open are closed, graphs and pools are dropped.
    ///
    /// # Errors
    ///
    /// The allocator's or the device's.
    fn end_turn(&mut self) -> Result<(), Failed> {
        Ok(())
    }

    /// Requests so far that nothing free served, where that is known.
    fn misses(&self) -> u64 {
        0
    }

    /// Driver calls so far, where there is a driver: those of the workload's own (captures) and capture queries apart.
    fn driver_calls(&self) -> Option<u64> {
        None
    }
}
