//! A block in its owner's hands.

use std::sync::Arc;

use gpupool_device::{Address, Device, Memory};

use crate::arena::{Arena, BlockId, NONE};
use crate::error::FreeError;
use crate::inner::Served;
use crate::stream::{Stream, WorkMark};

/// A block of GPU memory. Dropping it frees it, in the order of its own stream: work that was submitted there before may still use
/// it, and nobody else gets it before that work is done.
///
/// The handle knows its block, so a free searches for nothing. It keeps the memory behind it alive, even when the allocator is gone,
/// and may be dropped on any thread.
///
/// Work on *other* streams is not known to the allocator: say so with [`record_stream`](Self::record_stream) or
/// [`free_on`](Self::free_on), or their work may find the memory in someone else's hands.
#[must_use = "dropping an allocation frees it"]
pub struct Allocation<D: Device> {
    /// `None` for a request of zero bytes.
    arena: Option<Arc<Arena<D>>>,
    /// The block's record in the arena; [`NONE`] for a driver allocation of its own, since caching is off.
    block: BlockId,
    generation: u32,
    address: Address,
    size: u64,
    requested: u64,
}

/// Where a block lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    /// The segment's number in order of creation, from 0.
    pub segment: u64,
    /// Bytes from the segment's start.
    pub offset: u64,
}

impl<D: Device> Allocation<D> {
    pub(crate) fn null() -> Self {
        Self { arena: None, block: NONE, generation: 0, address: Address::NULL, size: 0, requested: 0 }
    }

    #[inline]
    pub(crate) fn new(served: Served<D>, requested: u64) -> Self {
        let Served { arena, handed } = served;
        Self {
            arena: Some(arena),
            block: handed.block,
            generation: handed.generation,
            address: handed.address,
            size: handed.bytes,
            requested,
        }
    }

    /// A driver allocation of its own, made for a request on the stream of `arena`.
    pub(crate) fn direct(arena: Arc<Arena<D>>, address: Address, bytes: u64) -> Self {
        Self { arena: Some(arena), block: NONE, generation: 0, address, size: bytes, requested: bytes }
    }

    /// The arena, block and generation, for one in an arena.
    pub(crate) fn parts(&self) -> Option<(&Arc<Arena<D>>, u32, u32)> {
        let arena = self.arena.as_ref().filter(|_| self.block != NONE)?;
        Some((arena, self.block, self.generation))
    }

    /// Where the block starts; [`Address::NULL`] for a request of zero bytes.
    #[must_use]
    pub fn address(&self) -> Address {
        self.address
    }

    /// Bytes of the block: what was asked for, rounded up, and more where the block was not worth splitting.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that were asked for.
    #[must_use]
    pub fn requested(&self) -> u64 {
        self.requested
    }

    /// Which segment the block is in and where. `None` for a request of zero bytes, for a block that a restored checkpoint took away,
    /// and without caching. Takes the arena's lock.
    #[must_use]
    pub fn placement(&self) -> Option<Placement> {
        let (arena, block, generation) = self.parts()?;
        let state = arena.lock();
        let block = state.blocks.current(block, generation)?;
        let segment = state.segments.get(block.segment)?;
        Some(Placement { segment: segment.memory.ordinal, offset: crate::units::to_bytes(block.offset) })
    }

    /// Says that work on `stream` uses the block: when it is freed, it becomes free only after the work submitted to `stream` by then.
    /// The block's own stream needs no saying. Takes the arena's lock; no driver call.
    ///
    /// # Errors
    ///
    /// [`FreeError::ForeignStream`] for a stream of another allocator; [`FreeError::NotLive`] for a block that a restored checkpoint
    /// took away.
    pub fn record_stream(&self, stream: &Stream<D>) -> Result<(), FreeError> {
        // A driver allocation's free waits for the device: it needs no record.
        let Some((arena, block, generation)) = self.parts() else { return Ok(()) };
        if !Arc::ptr_eq(&arena.shared, &stream.arena.shared) {
            return Err(FreeError::ForeignStream { stream: stream.id() });
        }
        let in_capture = arena.shared.records_in_capture(stream.handle()).unwrap_or(true);
        let mut state = arena.lock();
        if !state.is_live(block, generation) {
            return Err(FreeError::NotLive { address: self.address });
        }
        state.record_use(block, &stream.core, in_capture);
        Ok(())
    }

    /// Says that the work before `last` uses the block, and that no later work on that stream does: when it is freed, it waits for no
    /// more than that. Where both this and [`record_stream`](Self::record_stream) are said of a stream, the latter holds. Take the mark
    /// with [`Stream::mark_work`]. Takes the arena's lock; no driver call.
    ///
    /// # Errors
    ///
    /// As `record_stream`.
    pub fn record_last_use(&self, last: &WorkMark<D>) -> Result<(), FreeError> {
        let Some((arena, block, generation)) = self.parts() else { return Ok(()) };
        let (core, mark) = last.parts();
        if !last.is_of(&arena.shared) {
            return Err(FreeError::ForeignStream { stream: core.id });
        }
        let mut state = arena.lock();
        if !state.is_live(block, generation) {
            return Err(FreeError::NotLive { address: self.address });
        }
        state.record_use_until(block, core, Some(mark));
        Ok(())
    }

    /// Frees the block in the order of another stream: as [`record_stream`](Self::record_stream), then a drop.
    ///
    /// # Errors
    ///
    /// As `record_stream`, with the handle given back unharmed.
    pub fn free_on(self, stream: &Stream<D>) -> Result<(), (Self, FreeError)> {
        match self.record_stream(stream) {
            Ok(()) => Ok(()),
            Err(e) => Err((self, e)),
        }
    }

    /// Frees the block, and says so if that was not possible.
    ///
    /// # Errors
    ///
    /// [`FreeError::NotLive`] for a block that a restored checkpoint took away.
    pub fn free(mut self) -> Result<(), FreeError> {
        self.release()
    }

    fn release(&mut self) -> Result<(), FreeError> {
        let Some(arena) = self.arena.take() else { return Ok(()) };
        if self.block == NONE {
            arena.shared.free_direct(self.address);
            return Ok(());
        }
        match arena.free(self.block, self.generation) {
            Err(FreeError::NotLive { .. }) => Err(FreeError::NotLive { address: self.address }),
            freed => freed,
        }
    }
}

impl<D: Device> Memory for Allocation<D> {
    fn address(&self) -> Address {
        Self::address(self)
    }

    fn bytes(&self) -> u64 {
        self.size()
    }
}

impl<D: Device> Drop for Allocation<D> {
    #[inline]
    fn drop(&mut self) {
        let freed = self.arena.as_ref().is_none_or(|arena| arena.usual_free(self.block, self.generation));
        if !freed {
            self.drop_the_long_way();
        }
    }
}

impl<D: Device> Allocation<D> {
    #[inline(never)]
    fn drop_the_long_way(&mut self) {
        if let Err(e) = self.release() {
            tracing::debug!(error = %e, "a handle outlived its block");
        }
    }
}

impl<D: Device> std::fmt::Debug for Allocation<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Allocation({}, {} bytes, {} requested)", self.address, self.size, self.requested)
    }
}
