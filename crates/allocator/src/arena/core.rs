//! What a live block's handle points at: an arena's lock, with what that protects.
//!
//! A handle that counted a reference to its arena would cost two locked instructions, one at each end of its life. Instead the blocks keep
//! the arena: while any is live, its core has a reference to it.
//!
//! * **C1** Cores are never given back to the host: one whose arena is gone serves the next arena. So there are as many as there ever were
//!   arenas at once, in all allocators of the process, and a handle may always take its core's lock.
//! * **C2** While a block of an arena is live, or its allocator uses the arena, the core [keeps](Keep) it.
//! * **C3** The generations of a core's block records go on from arena to arena, so that a handle whose block a restored checkpoint took away
//!   is known for what it is even when it outlives its arena.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

use gpupool_device::{Address, Device};

use super::{Arena, ArenaRules, ArenaState};
use crate::counters::ArenaCounters;
use crate::history::History;
use crate::shared::{Attention, Shared};
use crate::sync::{Mutex, QuickGuard, QuickMutex, Rank};
#[cfg(doc)]
use crate::units::TAG_BITS;

/// Cores by number, in shelves of [`SHELF`]: so a number that was noted with no lock leads to its core. Number 0 serves no arena.
static SHELVES: [OnceLock<Box<Shelf>>; SHELF] = [const { OnceLock::new() }; SHELF];
type Shelf = [OnceLock<&'static ArenaCore>; SHELF];
const SHELF: usize = 256;

/// Cores so far, in all, and number 0.
static MADE: AtomicU32 = AtomicU32::new(1);

/// Cores whose arenas are gone.
static SPARE: Mutex<Vec<&'static ArenaCore>> = Mutex::new(Rank::Leaf, Vec::new());

/// An arena of whatever device.
pub(super) type AnyArena = dyn Any + Send + Sync;

/// On cache lines of its own (in pairs, as they are fetched), so that threads with an arena each do not slow each other down.
#[repr(align(128))]
pub(crate) struct ArenaCore {
    locked: QuickMutex<Locked>,
    number: u16,
}

/// What an arena's lock protects.
pub(crate) struct Locked {
    pub(crate) state: ArenaState,
    pub(crate) counters: Arc<ArenaCounters>,
    pub(super) attention: Arc<Attention>,
    /// The number of the allocator that the arena belongs to.
    pub(crate) allocator: u64,
}

impl Locked {
    fn new(state: ArenaState, counters: &Arc<ArenaCounters>, attention: &Arc<Attention>, allocator: u64) -> Self {
        Self { state, counters: Arc::clone(counters), attention: Arc::clone(attention), allocator }
    }

    fn vacant() -> Self {
        let state = ArenaState::new(ArenaRules::default(), Arc::new(History::new(|| 0)));
        Self::new(state, &Arc::default(), &Arc::default(), 0)
    }
}

/// What keeps an arena.
#[derive(Debug, Default)]
pub(crate) struct Keep {
    arena: Option<Weak<AnyArena>>,
    kept: Option<Arc<AnyArena>>,
    /// Driver allocations that were made on the arena's stream, since caching is off, and whose handles are live: bytes by address.
    direct: BTreeMap<Address, u64>,
}

impl Keep {
    /// What is kept.
    pub(super) fn kept(&self) -> Option<Arc<AnyArena>> {
        self.kept.clone()
    }

    /// Bytes of a driver allocation whose handle is live.
    pub(crate) fn direct_bytes(&self, address: Address) -> Option<u64> {
        self.direct.get(&address).copied()
    }

    /// A block is live from now on.
    #[inline]
    pub(super) fn hold(&mut self) {
        if self.kept.is_none() {
            self.kept = self.arena.as_ref().and_then(Weak::upgrade);
        }
    }
}

impl ArenaCore {
    /// A core for a new arena.
    pub(super) fn take<D: Device>(shared: &Shared<D>, counters: &Arc<ArenaCounters>) -> &'static Self {
        let core = Self::spare();
        let state = ArenaState::new(shared.rules.arena, Arc::clone(&shared.history));
        let locked = Locked::new(state, counters, &shared.attention, shared.neutral.allocator);
        drop(core.replace(locked));
        core
    }

    fn spare() -> &'static Self {
        // A model checker's lock is of one run, and its tests run side by side.
        let spare = if cfg!(gpupool_shuttle) { None } else { SPARE.lock().pop() };
        spare.unwrap_or_else(Self::make)
    }

    fn make() -> &'static Self {
        match u16::try_from(MADE.fetch_add(1, Relaxed)) {
            Ok(number) => Self::numbered(number),
            Err(_) => Self::leak(0),
        }
    }

    fn leak(number: u16) -> &'static Self {
        let locked = QuickMutex::new(Rank::Arena, Locked::vacant());
        Box::leak(Box::new(Self { locked, number }))
    }

    /// What [`numbered`](Self::numbered) finds the core by. 0 for all after the first 65,535.
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// The core with a number, which is made when it is first asked for. O(1), no lock once it is there.
    #[inline(always)]
    pub(crate) fn numbered(number: u16) -> &'static Self {
        let [shelf, place] = number.to_be_bytes().map(usize::from);
        let shelf = SHELVES[shelf].get_or_init(|| Box::new([const { OnceLock::new() }; SHELF]));
        shelf[place].get_or_init(|| Self::leak(number))
    }

    /// Its number, in [`TAG_BITS`].
    #[inline(always)]
    pub(crate) fn tag(&self) -> u64 {
        u64::from(self.number).rotate_right(u8::BITS)
    }

    /// The core with a tag. O(1), no lock. By itself, so that callers' own code stays short.
    #[inline(never)]
    pub(crate) fn tagged(tag: u64) -> &'static Self {
        Self::numbered(tag.rotate_left(u8::BITS) as u16)
    }

    /// Takes out what the lock protects, with nothing but the generations left in its place.
    pub(super) fn vacate(&self) -> ArenaState {
        self.replace(Locked::vacant()).state
    }

    fn replace(&self, mut next: Locked) -> Locked {
        let mut locked = self.lock();
        next.state.blocks = locked.state.blocks.successor();
        std::mem::replace(&mut *locked, next)
    }

    /// Having been [vacated](Self::vacate), the core may serve another arena.
    pub(super) fn recycle(&'static self) {
        // What a model checker's lock knows of one run means nothing in the next.
        if !cfg!(gpupool_shuttle) {
            SPARE.lock().push(self);
        }
    }

    #[inline]
    pub(crate) fn lock(&self) -> QuickGuard<'_, Locked> {
        self.locked.lock()
    }

    /// The lock, if nobody has it.
    #[inline(always)]
    pub(crate) fn try_lock(&self) -> Option<QuickGuard<'_, Locked>> {
        self.locked.try_lock()
    }

    /// Whether somebody holds the lock just now.
    pub(super) fn is_locked(&self) -> bool {
        self.locked.is_locked()
    }

    /// The lock, for who holds that of the peaks.
    pub(super) fn lock_beside_others(&self) -> QuickGuard<'_, Locked> {
        self.locked.lock_beside_others()
    }

    /// Its allocator uses the arena from now on.
    pub(super) fn keep<D: Device>(&self, arena: &Arc<Arena<D>>) {
        let arena: Arc<AnyArena> = Arc::clone(arena) as _;
        let keep = &mut self.lock().state.keep;
        keep.arena = Some(Arc::downgrade(&arena));
        keep.kept = Some(arena);
    }

    /// A driver allocation whose handle is live from now on.
    pub(crate) fn note_direct(&self, address: Address, bytes: u64) {
        let keep = &mut self.lock().state.keep;
        keep.hold();
        keep.direct.insert(address, bytes);
    }

    /// It was given back.
    pub(crate) fn forget_direct(&self, address: Address) {
        self.lock().state.keep.direct.remove(&address);
    }

    /// Lets go of an arena that its allocator has no use for any more, if nothing in it is live. Call it with no lock held.
    pub(super) fn let_go_if_unused(&self) {
        let mut locked = self.lock();
        let Locked { state, counters, .. } = &mut *locked;
        let used = !counters.telling.is_discarded() || counters.any_live() || !state.keep.direct.is_empty();
        let arena = if used { None } else { state.keep.kept.take() };
        drop(locked);
        drop(arena);
    }
}

#[cfg(all(test, not(gpupool_shuttle)))]
mod tests {
    use super::*;
    use crate::arena::{Block, BlockKey, BlockState, LastRoute};

    fn record(core: &ArenaCore) -> BlockKey {
        let block = Block { size: 1, state: BlockState::Live, ..Block::VACANT };
        let blocks = &mut core.lock().state.blocks;
        let id = blocks.insert(block);
        blocks.key(id)
    }

    #[test]
    fn a_core_whose_arena_is_gone_serves_the_next_whose_generations_go_on() {
        let core = ArenaCore::spare();
        let key = record(core);
        let (id, generation) = (key.id(), key.generation());
        core.lock().state.blocks[id].generation += 7;
        drop(core.vacate());
        core.recycle();
        let next = ArenaCore::spare();
        assert!(std::ptr::eq(core, next));
        // The arena before had no block.
        drop(next.vacate());
        assert_eq!(record(next), BlockKey::new(id, generation + 8));
        assert!(next.lock().state.blocks.live(BlockKey::new(id, generation + 7)).is_none());
    }

    #[test]
    fn no_route_leads_to_a_core_beyond_the_numbers() {
        let route = LastRoute::default();
        assert!(route.get().is_none());
        let core = ArenaCore::numbered(300);
        route.set(core, 5);
        assert!(route.get().is_some_and(|to| std::ptr::eq(to.core, core) && to.lane == 5));
        route.set(ArenaCore::leak(0), 5);
        assert!(route.get().is_none());
    }
}
