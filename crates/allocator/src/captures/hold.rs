//! Holding a pool: what a graph keeps so that the memory it baked in stays put.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Weak};

use gpupool_device::{Address, Device};

use crate::allocation::Allocation;
use crate::arena::{Arena, ArenaCore, BlockKey, BlockState, NONE};
use crate::error::AllocError;
use crate::history::{Action, What};
use crate::idle::Residency;
use crate::ids::{Part, PoolId};
use crate::inner::Inner;
use crate::pool::Pool;
use crate::stats::PoolStats;
use crate::stream::WorkMark;
use crate::units::to_bytes;

/// A range of device addresses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Range {
    /// Where it starts.
    pub address: Address,
    /// Bytes.
    pub bytes: u64,
}

impl Range {
    /// The first address after it.
    #[must_use]
    pub fn end(self) -> Address {
        self.address.offset(self.bytes)
    }

    /// What two ranges have in common.
    #[must_use]
    pub fn intersection(self, other: Self) -> Option<Self> {
        let (start, end) = (self.address.max(other.address), self.end().min(other.end()));
        (start < end).then(|| Self { address: start, bytes: end.offset_from(start) })
    }

    /// What two lists of merged ranges have in common. O(a + b).
    #[must_use]
    pub fn common(a: &[Self], b: &[Self]) -> Vec<Self> {
        let (mut i, mut j, mut out) = (0, 0, Vec::new());
        while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
            out.extend(x.intersection(*y));
            if x.end() <= y.end() { i += 1 } else { j += 1 }
        }
        out
    }

    /// Ranges in order, with no overlap and no touching neighbours.
    #[must_use]
    pub fn merged(mut ranges: Vec<Self>) -> Vec<Self> {
        ranges.sort_unstable();
        let mut out: Vec<Self> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match out.last_mut() {
                Some(last) if range.address <= last.end() => {
                    last.bytes = last.end().max(range.end()).offset_from(last.address);
                }
                _ => out.push(range),
            }
        }
        out
    }
}

/// What a pool handed out during a capture.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Recording {
    /// Where, merged: everything that a replay may write.
    pub written: Vec<Range>,
    /// The most bytes that were live in the pool at once.
    pub peak_bytes: u64,
    /// Bytes in segments that were made meanwhile.
    pub new_segment_bytes: u64,
    /// Bytes of `written` in segments that were there before.
    pub reused_bytes: u64,
    /// Segments from this number on are new.
    pub(crate) first_new_segment: u64,
}

impl Recording {
    /// Counts memory as new or reused, by its number.
    fn count(&mut self, memory: Range, ordinal: u64) {
        if ordinal >= self.first_new_segment {
            self.new_segment_bytes += memory.bytes;
        } else {
            let used = self.written.iter().filter_map(|w| w.intersection(memory));
            self.reused_bytes += used.map(|r| r.bytes).sum::<u64>();
        }
    }
}

/// A live block of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct HeldBlock {
    /// Where it lies.
    pub range: Range,
    /// Bytes that its owner asked for.
    pub requested: u64,
    /// Tells it from other blocks at the same address.
    pub generation: u32,
}

/// A pool in use. Its memory stays where it is until the last hold is dropped, even when the allocator is gone.
pub struct PoolHold(Arc<dyn HeldPool>);

impl fmt::Debug for PoolHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolHold({} of device {})", self.id(), self.device())
    }
}

/// A pool, whatever device it is on.
pub(crate) trait HeldPool: Send + Sync {
    fn id(&self) -> PoolId;
    fn allocator(&self) -> u64;
    fn device(&self) -> u32;
    fn stats(&self) -> PoolStats;
    fn version(&self) -> (i64, i64);
    fn start_recording(&self);
    fn end_capture(&self) -> Recording;
    fn live_blocks(&self) -> Vec<HeldBlock>;
    fn again(&self) -> Option<PoolHold>;
    fn residency(&self) -> Residency;
    fn ready(&self, writes: &[Range]) -> Result<(), AllocError>;
    /// Each a [`WorkMark`] of the pool's device.
    fn pending_uses(&self, of: &[Range]) -> Vec<Box<dyn Any>>;
}

impl PoolHold {
    pub(crate) fn new(held: Arc<dyn HeldPool>) -> Self {
        Self(held)
    }

    /// The pool.
    #[must_use]
    pub fn id(&self) -> PoolId {
        self.0.id()
    }

    /// The ordinal of its device.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.0.device()
    }

    /// A number of the allocator it belongs to, unique in the process.
    #[must_use]
    pub fn allocator(&self) -> u64 {
        self.0.allocator()
    }

    pub(crate) fn is_same_pool(&self, other: &Self) -> bool {
        (self.id(), self.allocator()) == (other.id(), other.allocator())
    }

    /// The pool's figures. O(1).
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.0.stats()
    }

    /// Differs from what it was before if a block of the pool was handed out or freed in between. Two loads.
    #[must_use]
    pub fn version(&self) -> (i64, i64) {
        self.0.version()
    }

    /// From now on notes where blocks are handed out, until [`end_capture`](Self::end_capture).
    pub fn start_recording(&self) {
        self.0.start_recording();
    }

    /// A capture into the pool is over: what it freed belongs to no stream from now on. Returns what was noted.
    /// O(blocks of the pool).
    #[must_use]
    pub fn end_capture(&self) -> Recording {
        self.0.end_capture()
    }

    /// Where the pool's memory is. One load.
    #[must_use]
    pub fn residency(&self) -> Residency {
        self.0.residency()
    }

    /// Whether all of the pool's memory is behind its addresses, and none of it on loan. One load.
    #[inline]
    #[must_use]
    pub fn is_resident(&self) -> bool {
        self.0.residency() == Residency::Resident
    }

    /// Before a launch that writes these ranges, which are in order and do not overlap: wakes the pool if it is parked, and sees to it that
    /// nothing there is on loan. May **wait** for loans, if the pool's options say so.
    ///
    /// # Errors
    ///
    /// [`PoolError::Away`](crate::PoolError::Away), [`PoolError::LoansOut`](crate::PoolError::LoansOut), those of
    /// [`wake_pool`](crate::Allocator::wake_pool).
    pub fn ready(&self, writes: &[Range]) -> Result<(), AllocError> {
        self.0.ready(writes)
    }

    /// The live blocks of the pool but for those on loan, by address. O(blocks of the pool).
    #[must_use]
    pub fn live_blocks(&self) -> Vec<HeldBlock> {
        self.0.live_blocks()
    }

    /// Marks of the work that still uses freed blocks of the pool in these ranges, which are in order and do not overlap: whoever writes
    /// there must come after it. `D` is the pool's device. O(1) if nothing is pending, else O(pending blocks).
    #[must_use]
    pub fn pending_uses<D: Device>(&self, of: &[Range]) -> Vec<WorkMark<D>> {
        let marks = self.0.pending_uses(of).into_iter();
        marks.filter_map(|mark| mark.downcast::<WorkMark<D>>().ok()).map(|mark| *mark).collect()
    }

    /// Another hold of the same pool; `None` once the allocator is gone.
    #[must_use]
    pub fn again(&self) -> Option<Self> {
        self.0.again()
    }
}

/// A use of a pool, given back when dropped.
pub(crate) struct Held<D: Device> {
    pub(crate) pool: Arc<Pool<D>>,
    pub(crate) inner: Weak<Inner<D>>,
    pub(crate) allocator: u64,
}

impl<D: Device> Drop for Held<D> {
    fn drop(&mut self) {
        // Without an allocator there is nobody to count: the memory goes with the arena.
        let Some(inner) = self.inner.upgrade() else { return };
        match inner.release_pool(self.pool.id) {
            Ok(()) => inner.forget_if_empty(&self.pool),
            Err(e) => {
                tracing::warn!(pool = %self.pool.id, error = %e, "a pool was released by someone who did not hold it");
            }
        }
    }
}

impl<D: Device> HeldPool for Held<D> {
    fn id(&self) -> PoolId {
        self.pool.id
    }

    fn allocator(&self) -> u64 {
        self.allocator
    }

    fn device(&self) -> u32 {
        self.pool.arena.shared.driver.device().ordinal()
    }

    fn stats(&self) -> PoolStats {
        self.pool.stats()
    }

    fn version(&self) -> (i64, i64) {
        self.pool.version()
    }

    fn start_recording(&self) {
        let first_new_segment = self.pool.arena.shared.next_segment_ordinal();
        let recording = Recording { first_new_segment, ..Recording::default() };
        self.note(Action::CaptureBegin);
        let mut state = self.pool.arena.lock();
        let under_way = &mut state.slots[self.pool.slot as usize].recorded;
        if under_way.is_none() {
            *under_way = Some(recording);
            if !self.pool.arena.shared.rules.single_arena {
                self.pool.arena.counters.start_recording(&mut state.watches);
            }
        }
    }

    fn end_capture(&self) -> Recording {
        self.note(Action::CaptureEnd);
        self.pool.arena.end_capture(self.pool.slot);
        let mut state = self.pool.arena.lock();
        let Some(mut recorded) = state.slots[self.pool.slot as usize].recorded.take() else {
            return Recording::default();
        };
        recorded.written = Range::merged(recorded.written);
        recorded.peak_bytes = self.pool.arena.counters.end_recording(&mut state.watches);
        state.segments.forget_noted(self.pool.slot);
        for (_, segment) in state.segments.iter().filter(|(_, s)| s.slot == self.pool.slot) {
            if let Some(table) = &segment.pages {
                for (offset, piece) in table.iter() {
                    let address = segment.memory.base.offset(to_bytes(offset));
                    recorded.count(Range { address, bytes: piece.handle.bytes }, piece.ordinal);
                }
                continue;
            }
            let memory = Range { address: segment.memory.base, bytes: segment.memory.bytes };
            recorded.count(memory, segment.memory.ordinal);
        }
        recorded
    }

    fn live_blocks(&self) -> Vec<HeldBlock> {
        self.pool.arena.live_blocks(self.pool.slot)
    }

    fn again(&self) -> Option<PoolHold> {
        self.inner.upgrade()?.hold(&self.pool)
    }

    fn residency(&self) -> Residency {
        self.pool.arena.idle.residency()
    }

    fn ready(&self, writes: &[Range]) -> Result<(), AllocError> {
        self.pool.arena.ready(self.inner.upgrade().as_deref(), writes)
    }

    fn pending_uses(&self, of: &[Range]) -> Vec<Box<dyn Any>> {
        let arena = &self.pool.arena;
        let pending = arena.lock().pending_in(self.pool.slot, of);
        let mark = |(core, mark)| Box::new(WorkMark::new(core, mark, Arc::clone(&arena.shared))) as Box<dyn Any>;
        pending.into_iter().map(mark).collect()
    }
}

impl<D: Device> Held<D> {
    fn note(&self, action: Action) {
        let shared = &self.pool.arena.shared;
        let Some(caller) = shared.history.caller() else { return };
        let (address, stream, part) = (Address::NULL, shared.neutral.handle, Part::Large);
        let what = What { action, address, requested: 0, size: 0, stream, pool: self.pool.id, part };
        shared.history.note(what, Some(&caller));
    }
}

impl<D: Device> Arena<D> {
    fn live_blocks(&self, slot: u32) -> Vec<HeldBlock> {
        let state = self.lock();
        let mut out = Vec::new();
        for (_, segment) in state.segments.iter().filter(|(_, s)| s.slot == slot) {
            let mut at = segment.first;
            while at != NONE {
                let b = &state.blocks[at];
                if b.state == BlockState::Live && !state.is_lent(at) {
                    let address = segment.memory.base.offset(to_bytes(b.offset));
                    let range = Range { address, bytes: to_bytes(b.size) };
                    out.push(HeldBlock { range, requested: b.requested, generation: b.generation });
                }
                at = b.next;
            }
        }
        out.sort_unstable_by_key(|b| b.range);
        out
    }
}

impl<D: Device> Inner<D> {
    /// One use more of a pool.
    pub(crate) fn hold(self: &Arc<Self>, pool: &Arc<Pool<D>>) -> Option<PoolHold> {
        let taken = self.pools.take(pool.id, true).ok().flatten()?;
        let held = Held { pool: taken, inner: Arc::downgrade(self), allocator: self.id };
        Some(PoolHold::new(Arc::new(held)))
    }
}

/// A weak reference to a block: says whether it is still the same live block.
pub struct BlockRef<D: Device> {
    core: &'static ArenaCore,
    key: BlockKey,
    range: Range,
    device: PhantomData<Arc<D>>,
}

impl<D: Device> fmt::Debug for BlockRef<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockRef({}, {} bytes)", self.range.address, self.range.bytes)
    }
}

impl<D: Device> BlockRef<D> {
    /// Where the block lies.
    #[must_use]
    pub fn range(&self) -> Range {
        self.range
    }

    /// Whether the block is live and has been all the time. Takes the arena's lock.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.core.lock().state.blocks.live(self.key).is_some()
    }
}

impl<D: Device> Allocation<D> {
    /// A weak reference to the block; `None` for one that no arena holds (of zero bytes, or without caching). Takes the arena's lock.
    #[must_use]
    pub fn downgrade(&self) -> Option<BlockRef<D>> {
        let range = Range { address: self.address(), bytes: self.size() };
        Some(BlockRef { core: self.core()?, key: self.key(), range, device: PhantomData })
    }
}
