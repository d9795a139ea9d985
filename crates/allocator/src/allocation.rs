//! A block in its owner's hands.

use std::marker::PhantomData;
use std::sync::Arc;

use gpupool_device::{Address, Device, Memory};

use crate::arena::{ArenaCore, ArenaState, Binned, BlockId, Handed, Locked, NONE, arena_of, told, told_freed};
use crate::error::FreeError;
use crate::inner::Served;
use crate::stream::{Stream, StreamCore, WorkMark};
use crate::sync::QuickGuard;

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
    /// That of the block's arena, which the block keeps while it is live. `None` for a request of zero bytes.
    core: Option<&'static ArenaCore>,
    /// The block's record in the arena; [`NONE`] for a driver allocation of its own, since caching is off.
    block: BlockId,
    generation: u32,
    address: Address,
    size: u64,
    requested: u64,
    device: PhantomData<Arc<D>>,
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
        let (address, device) = (Address::NULL, PhantomData);
        Self { core: None, block: NONE, generation: 0, address, size: 0, requested: 0, device }
    }

    pub(crate) fn new(served: Served<D>, requested: u64) -> Self {
        Self::of(served.arena.core, served.handed, requested)
    }

    #[inline]
    pub(crate) fn of(core: &'static ArenaCore, handed: Handed, requested: u64) -> Self {
        let Handed { block, generation, address, bytes: size } = handed;
        Self { core: Some(core), block, generation, address, size, requested, device: PhantomData }
    }

    /// A driver allocation of its own, made for a request on the stream of the arena with this core.
    pub(crate) fn direct(core: &'static ArenaCore, address: Address, bytes: u64) -> Self {
        core.count_direct(true);
        let handed = Handed { block: NONE, generation: 0, address, bytes };
        Self::of(core, handed, bytes)
    }

    /// Its arena's core, for a block in an arena.
    pub(crate) fn core(&self) -> Option<&'static ArenaCore> {
        self.core.filter(|_| self.block != NONE)
    }

    /// The block's record and generation.
    pub(crate) fn block(&self) -> (BlockId, u32) {
        (self.block, self.generation)
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
        let state = &self.core()?.lock().state;
        let block = state.blocks.current(self.block, self.generation)?;
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
        let Some(core) = self.core() else { return Ok(()) };
        let in_capture = stream.arena.shared.records_in_capture(stream.handle()).unwrap_or(true);
        self.check_use(&mut core.lock(), &stream.core)?.record_use(self.block, &stream.core, in_capture);
        Ok(())
    }

    /// The state of the block's arena, if the block is live and the stream of its allocator.
    fn check_use<'a>(&self, locked: &'a mut Locked, stream: &StreamCore) -> Result<&'a mut ArenaState, FreeError> {
        if !locked.state.is_live(self.block, self.generation) {
            return Err(FreeError::NotLive { address: self.address });
        }
        if locked.allocator != stream.allocator {
            return Err(FreeError::ForeignStream { stream: stream.id });
        }
        Ok(&mut locked.state)
    }

    /// Says that the work before `last` uses the block, and that no later work on that stream does: when it is freed, it waits for no
    /// more than that. A mark from before the block was handed out says that nothing of the stream uses it, and nothing can tell whether
    /// that is so: take it after the last use. Where both this and [`record_stream`](Self::record_stream) are said of a stream, the latter holds. Take the mark
    /// with [`Stream::mark_work`]. Takes the arena's lock; no driver call.
    ///
    /// # Errors
    ///
    /// As `record_stream`.
    pub fn record_last_use(&self, last: &WorkMark<D>) -> Result<(), FreeError> {
        let Some(core) = self.core() else { return Ok(()) };
        let (stream, mark) = last.parts();
        self.check_use(&mut core.lock(), stream)?.record_use_until(self.block, stream, Some(mark));
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
        self.core.take().map_or(Ok(()), |core| self.release(core, core.lock()))
    }

    fn release(&self, core: &'static ArenaCore, locked: QuickGuard<'_, Locked>) -> Result<(), FreeError> {
        let not_live = FreeError::NotLive { address: self.address };
        let Some(arena) = arena_of::<D>(locked) else { return Err(not_live) };
        if self.block == NONE {
            arena.shared.free_direct(self.address);
            core.count_direct(false);
            arena.tell();
            return Ok(());
        }
        match arena.free(self.block, self.generation) {
            Err(FreeError::NotLive { .. }) => Err(not_live),
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
        let Some(core) = self.core else { return };
        let Some(mut locked) = core.try_lock() else { return self.drop_after_others(core) };
        match locked.free_into_bin(self.block, self.generation) {
            Binned::Quietly => {}
            Binned::WithNews => told_freed::<D>(locked),
            Binned::No => Self::free_past_bin(self.block, locked),
            Binned::Unusual => self.drop_unusual(core, locked),
        }
    }
}

impl<D: Device> Allocation<D> {
    /// Somebody else has the lock.
    #[cold]
    #[inline(never)]
    fn drop_after_others(&self, core: &'static ArenaCore) {
        self.drop_unusual(core, core.lock());
    }

    /// A usual free that no bin took.
    #[inline(never)]
    fn free_past_bin(block: BlockId, mut locked: QuickGuard<'_, Locked>) {
        locked.free_past_bin(block);
        told::<D>(locked, &[]);
    }

    #[inline(never)]
    fn drop_unusual(&self, core: &'static ArenaCore, mut locked: QuickGuard<'_, Locked>) {
        if !locked.is_free_unusual() {
            if locked.free_alone(self.block, self.generation) {
                return told::<D>(locked, &[]);
            }
            if let Some(to_mark) = locked.free_with_uses(self.block, self.generation) {
                return told::<D>(locked, &to_mark);
            }
        }
        if let Err(e) = self.release(core, locked) {
            tracing::debug!(error = %e, "a handle outlived its block");
        }
    }
}

impl<D: Device> std::fmt::Debug for Allocation<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Allocation({}, {} bytes, {} requested)", self.address, self.size, self.requested)
    }
}
