//! A block in its owner's hands.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use gpupool_device::{Address, Device, Memory};

use crate::arena::{ArenaCore, ArenaState, Binned, Block, BlockId, BlockKey, Locked, NONE, arena_of, told, told_freed};
use crate::error::FreeError;
use crate::inner::Served;
use crate::stream::{Stream, StreamCore, WorkMark};
use crate::sync::QuickGuard;
use crate::units::to_bytes;

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
    /// That of the block's arena, which the block keeps while it is live.
    core: &'static ArenaCore,
    /// Null for a request of zero bytes.
    address: Address,
    /// The block's record in the arena, [`NONE`] for a driver allocation of its own, since caching is off, and for zero bytes; and its generation.
    key: BlockKey,
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
        // Number 0 serves no arena.
        Self::at(ArenaCore::numbered(0), Address::NULL, BlockKey::new(NONE, 0))
    }

    pub(crate) fn new(served: Served<D>) -> Self {
        Self::at(served.arena.core, served.handed.address, served.handed.key)
    }

    #[inline(always)]
    pub(crate) fn at(core: &'static ArenaCore, address: Address, key: BlockKey) -> Self {
        Self { core, address, key, device: PhantomData }
    }

    /// A driver allocation of its own, made for a request on the stream of the arena with this core.
    pub(crate) fn direct(core: &'static ArenaCore, address: Address, bytes: u64) -> Self {
        core.note_direct(address, bytes);
        Self::at(core, address, BlockKey::new(NONE, 0))
    }

    /// Its arena's core, for a block in an arena.
    pub(crate) fn core(&self) -> Option<&'static ArenaCore> {
        (self.key.id() != NONE).then_some(self.core)
    }

    /// The block's record and generation.
    pub(crate) fn key(&self) -> BlockKey {
        self.key
    }

    /// Where the block starts; [`Address::NULL`] for a request of zero bytes.
    #[must_use]
    pub fn address(&self) -> Address {
        self.address
    }

    /// Bytes of the block: what was asked for, rounded up, and more where the block was not worth splitting. 0 for a request of zero bytes, and for
    /// a block that a restored checkpoint took away. Takes the arena's lock.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.bytes_by(|block| to_bytes(block.size))
    }

    /// Bytes that were asked for; 0 where [`size`](Self::size) is. Takes the arena's lock.
    #[must_use]
    pub fn requested(&self) -> u64 {
        self.bytes_by(|block| block.requested)
    }

    fn bytes_by(&self, of: impl Fn(&Block) -> u64) -> u64 {
        if self.address.is_null() {
            return 0;
        }
        let state = &self.core.lock().state;
        let bytes = match self.key.id() {
            NONE => state.keep.direct_bytes(self.address),
            _ => state.blocks.live(self.key).map(of),
        };
        bytes.unwrap_or(0)
    }

    /// Which segment the block is in and where. `None` for a request of zero bytes, for a block that a restored checkpoint took away,
    /// and without caching. Takes the arena's lock.
    #[must_use]
    pub fn placement(&self) -> Option<Placement> {
        let state = &self.core()?.lock().state;
        let block = state.blocks.live(self.key)?;
        let segment = state.segments.get(block.segment)?;
        Some(Placement { segment: segment.memory.ordinal, offset: to_bytes(block.offset) })
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
        self.check_use(&mut core.lock(), &stream.core)?.record_use(self.key.id(), &stream.core, in_capture);
        Ok(())
    }

    /// The state of the block's arena, if the block is live and the stream of its allocator.
    fn check_use<'a>(&self, locked: &'a mut Locked, stream: &StreamCore) -> Result<&'a mut ArenaState, FreeError> {
        if locked.state.blocks.live(self.key).is_none() {
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
        self.check_use(&mut core.lock(), stream)?.record_use_until(self.key.id(), stream, Some(mark));
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
    pub fn free(self) -> Result<(), FreeError> {
        let Self { core, address, key, .. } = *ManuallyDrop::new(self);
        if address.is_null() { Ok(()) } else { Self::release(core, address, key, core.lock()) }
    }

    fn release(
        core: &'static ArenaCore,
        address: Address,
        key: BlockKey,
        locked: QuickGuard<'_, Locked>,
    ) -> Result<(), FreeError> {
        let not_live = FreeError::NotLive { address };
        let Some(arena) = arena_of::<D>(locked) else { return Err(not_live) };
        if key.id() == NONE {
            // Before the driver may give the address to another thread, which notes it here. The arena stays as long as `arena` does.
            core.forget_direct(address);
            arena.shared.free_direct(address);
            arena.tell();
            return Ok(());
        }
        match arena.free(key) {
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
        if !self.address.is_null() {
            Self::free_block(self.core, self.address, self.key);
        }
    }
}

impl<D: Device> Allocation<D> {
    /// By the shortest way, which is one function of machine code: `docs/hot-path.md` walks it. What the handle has comes in registers.
    #[inline(never)]
    fn free_block(core: &'static ArenaCore, address: Address, key: BlockKey) {
        let Some(mut locked) = core.try_lock() else {
            return Self::free_after_others(core, address, key);
        };
        match locked.free_into_bin(key) {
            Binned::Quietly => {}
            Binned::WithNews => told_freed::<D>(locked),
            Binned::No => Self::free_past_bin(key.id(), locked),
            Binned::Unusual => Self::free_unusual(core, address, key, locked),
        }
    }

    /// Somebody else has the lock.
    #[cold]
    #[inline(never)]
    fn free_after_others(core: &'static ArenaCore, address: Address, key: BlockKey) {
        Self::free_unusual(core, address, key, core.lock());
    }

    /// A usual free that no bin took.
    #[inline(never)]
    fn free_past_bin(block: BlockId, mut locked: QuickGuard<'_, Locked>) {
        locked.free_past_bin(block);
        told::<D>(locked, &[]);
    }

    #[inline(never)]
    fn free_unusual(core: &'static ArenaCore, address: Address, key: BlockKey, mut locked: QuickGuard<'_, Locked>) {
        if !locked.is_free_unusual() {
            if locked.free_alone(key) {
                return told::<D>(locked, &[]);
            }
            if let Some(to_mark) = locked.free_with_uses(key) {
                return told::<D>(locked, &to_mark);
            }
        }
        if let Err(e) = Self::release(core, address, key, locked) {
            tracing::debug!(error = %e, "a handle outlived its block");
        }
    }
}

/// Takes no lock, so that it may be printed anywhere.
impl<D: Device> std::fmt::Debug for Allocation<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Allocation({})", self.address)
    }
}
