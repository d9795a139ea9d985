//! An arena: the unit of locking. Its segments, the blocks that tile them, its lanes' free indexes and bins, and its counters.
//!
//! Under the project's own policies each stream has an arena of its own in the default pool, and each private pool has one; the bit-exact policies
//! put everything in a single arena, because their peaks and their order span all streams.
//!
//! # Invariants (checked by [`ArenaState::validate`])
//!
//! * **A1** Blocks tile each segment, in address order, without gaps.
//! * **A2** No two neighbours are both `Free` in one lane.
//! * **A3** Each `Free` block is in the index of its lane and each `Binned` one in a bin of its lane, and nothing else is.
//! * **A4** Every counter equals a recount.
//! * **A5** Pool slots and lanes that are in use are referred to by nothing that is not.
//! * **O1, O2** What is idle is listed and offered: see `offers.rs`.

mod bins;
mod block;
mod core;
mod free;
mod hot;
mod lane;
mod offers;
mod place;
mod repetition;
mod segment;
mod uses;
mod validate;

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use gpupool_device::Device;

use crate::captures::Recording;
use crate::counters::{ArenaCounters, PoolCounters, Watches};
use crate::history::{Action, History};
use crate::idle::{Idle, IdleState};
use crate::ids::{Part, PoolId};
use crate::pages::Leaving;
use crate::peaks::Publisher;
use crate::routing::Claim;
use crate::shared::Shared;
use crate::stream::StreamCore;
use crate::sync::QuickGuard;
use crate::units::Units;

use bins::Bins;
use block::Vacancies;
pub(crate) use block::{Block, BlockId, BlockKey, BlockState, Blocks, EDGE, NONE, or_edge};
pub(crate) use core::{ArenaCore, Keep, Locked};
pub(crate) use free::Was;
pub(crate) use hot::{Binned, Source, Want, arena_of, told, told_freed, told_handed};
pub(crate) use lane::{Lane, LaneKind, NO_CAPTURE};
pub(crate) use offers::{IdleSegments, Offers};
pub(crate) use place::Handed;
pub(crate) use repetition::{FIRST_ROOM, MOST_ROOM, Repetition, with_room};
pub(crate) use segment::{Backing, Memory, Segment, Segments};
pub(crate) use uses::{PendingQueue, Use, UsesTable};

/// The decisions of the policy and configuration that an arena needs, as plain values.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArenaRules {
    /// Blocks of at least this many bytes are oversize; `u64::MAX` when nothing is.
    pub(crate) max_split: u64,
    /// Slack in bytes with which an oversize block may serve an oversize request.
    pub(crate) non_split_slack: u64,
    /// Several pools share the arena, so that each counts for itself; else the arena's counters are its pool's.
    pub(crate) shared: bool,
    /// Whether freed blocks go to bins.
    pub(crate) bins: bool,
    /// A large block's rest is kept as a block of its own if it has more bytes than this.
    pub(crate) large_remainder: u64,
    /// A page, if requests that would pin a larger handle than that have it cut first (unless growth takes the place of that); else 0.
    pub(crate) cuts_at: Units,
    /// Whether ties between blocks of equal size are broken by address, else by the age of the segment.
    pub(crate) tie_by_address: bool,
    /// Of equal blocks of fewer units than this, and of few enough, no tie is broken: the one that became free last goes first.
    pub(crate) stacked: Units,
    /// Segments may be mapped in pieces, which know when they were last used.
    pub(crate) pages: bool,
    /// The end of a capture ends all uses of a block by a stream that used it inside, also those from before the capture.
    pub(crate) capture_ends_earlier_uses: bool,
    /// Every free with recorded uses records its events at once, else several share one.
    pub(crate) event_each_free: bool,
    /// Growth depends on what is idle elsewhere and on whether the workload repeats itself: idle segments are listed as they come and go, and
    /// repetitions are told. Else what is idle is looked for when the cache is emptied.
    pub(crate) trades: bool,
}

/// A pool as an arena sees it.
#[derive(Debug)]
pub(crate) struct PoolSlot {
    pub(crate) pool: PoolId,
    /// Requests take whole blocks.
    pub(crate) no_split: bool,
    /// Searches so far, for each part: the age that garbage collection goes by.
    pub(crate) age: [u64; 2],
    /// A private pool's own figures.
    pub(crate) counters: Option<Arc<PoolCounters>>,
    /// What was handed out during the capture under way.
    pub(crate) recorded: Option<Recording>,
    /// Large memory was reserved for it ahead: captures put small blocks there before they grow.
    pub(crate) sized_ahead: bool,
    pub(crate) in_use: bool,
}

impl PoolSlot {
    /// Whether this pool has the slot.
    pub(crate) fn is_of(&self, pool: PoolId) -> bool {
        self.in_use && self.pool == pool
    }
}

/// What an arena's lock protects.
#[derive(Debug)]
pub(crate) struct ArenaState {
    pub(crate) rules: ArenaRules,
    pub(crate) blocks: Blocks,
    pub(crate) segments: Segments,
    pub(crate) bins: Bins,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) slots: Vec<PoolSlot>,
    pub(crate) uses: UsesTable,
    /// Blocks that wait for other streams, a queue for each such stream.
    pub(crate) pending: Vec<PendingQueue>,
    /// Blocks freed in a capture with recorded uses; they become pending when it is over.
    pub(crate) deferred: Vec<BlockId>,
    pub(crate) repetition: Repetition,
    pub(crate) idle_segments: IdleSegments,
    pub(crate) history: Arc<History>,
    /// Ranges whose pieces have moved and that are still mapped.
    pub(crate) leaving: Vec<Leaving>,
    /// What is away, held for that reason, or on loan.
    pub(crate) idle: IdleState,
    /// Free pieces by ordinal that were seen free: their stamp then, and when that was. Only where idle memory decays.
    pub(crate) idle_pieces: HashMap<u64, (u64, u64)>,
    /// Set while a request is served that has been asked whether a handle should be cut for it.
    pub(crate) uncut: bool,
    pub(crate) keep: Keep,
    pub(crate) watches: Watches,
}

/// An arena: its core, and what is read and kept beside the lock. On cache lines of its own (in pairs, as they are fetched), so that threads
/// with an arena each do not slow each other down.
#[repr(align(128))]
pub(crate) struct Arena<D: Device> {
    pub(crate) shared: Arc<Shared<D>>,
    pub(crate) core: &'static ArenaCore,
    pub(crate) counters: Arc<ArenaCounters>,
    /// What is idle here, as others see it.
    pub(crate) offers: Arc<Offers>,
    /// Slot 0 is the default pool's.
    pub(crate) holds_default: bool,
    /// Where its memory is, and who moves it.
    pub(crate) idle: Idle,
    /// What [`ArenaCounters::changes`] was when it had no free memory that others could be given.
    barren: AtomicI64,
}

/// Where one stream's requests in a capture go, or under scopes: the core of the pool's arena, and the stream's small lane there. Only a hint:
/// whether it holds is looked up under the core's lock, in the lane, which names its stream and the capture, whose id is never used again, or
/// has a [`Claim`], whose version is not. So a route keeps nothing, needs no lock, and may lead to an arena that is gone.
#[derive(Clone, Copy)]
pub(crate) struct NotedRoute {
    pub(crate) core: &'static ArenaCore,
    pub(crate) lane: u32,
}

/// Where the last requests of a stream in a capture, or under scopes, went: the number of the core, and the lane. No number is none.
#[derive(Debug, Default)]
pub(crate) struct LastRoute(AtomicU64);

impl LastRoute {
    #[inline(always)]
    pub(crate) fn get(&self) -> Option<NotedRoute> {
        let route = self.0.load(Ordering::Relaxed);
        let number = (route >> 32) as u16;
        (number > 0).then(|| NotedRoute { core: ArenaCore::numbered(number), lane: route as u32 })
    }

    /// Remembers that they go there, to this small lane.
    pub(crate) fn set(&self, core: &ArenaCore, lane: u32) {
        self.0.store(u64::from(core.number()) << 32 | u64::from(lane), Ordering::Relaxed);
    }
}

impl<D: Device> Arena<D> {
    /// An arena that its allocator keeps until it [discards](Self::discard) it.
    pub(crate) fn new(shared: Arc<Shared<D>>, holds_default: bool) -> Arc<Self> {
        let counters = Arc::default();
        let core = ArenaCore::take(&shared, &counters);
        let offers = Arc::clone(core.lock().state.idle_segments.offers());
        let arena = Arc::new(Self {
            shared,
            core,
            counters,
            offers,
            holds_default,
            idle: Idle::new(),
            barren: AtomicI64::new(-1),
        });
        core.keep(&arena);
        arena
    }

    /// Whether it had no free memory that others could be given, and nothing was freed since. A hint, so that a miss asks few of many
    /// streams: who needs the last byte looks.
    pub(crate) fn is_barren(&self) -> bool {
        self.barren.load(Ordering::Relaxed) == self.counters.changes()
    }

    /// Notes that it had none at this state of its counters.
    pub(crate) fn note_barren(&self, changes: i64) {
        self.barren.store(changes, Ordering::Relaxed);
    }

    /// Its allocator has no use for it any more: from now on it is there as long as anything in it is live, or anybody refers to it. Call it
    /// with no lock held.
    pub(crate) fn discard(&self) {
        let mut state = self.lock();
        // Blocks come out of bins without a look at what keeps the arena.
        state.flush_bins(&self.counters);
        state.bins.forget();
        state.rules.bins = false;
        self.counters.telling.discard();
    }

    /// After the lock was given back: tells what has to be told.
    #[cold]
    #[inline(never)]
    pub(crate) fn tell(&self) {
        if self.counters.telling.peaks_are_due() {
            self.shared.peaks.publish(self);
        }
        if self.counters.telling.is_discarded() {
            self.core.let_go_if_unused();
        }
    }

    /// The arena's lock.
    #[inline]
    pub(crate) fn lock(&self) -> ArenaGuard<'_, D> {
        ArenaGuard { locked: self.core.lock(), _publisher: Publisher(self) }
    }

    /// Whether somebody holds the lock just now.
    pub(crate) fn is_busy(&self) -> bool {
        self.core.is_locked()
    }

    /// The lock, for who holds that of the peaks.
    pub(crate) fn lock_beside_others(&self) -> QuickGuard<'_, Locked> {
        self.core.lock_beside_others()
    }
}

/// Holds an arena's lock. What that changed is told after the lock was given back.
pub(crate) struct ArenaGuard<'a, D: Device> {
    // Dropped first.
    locked: QuickGuard<'a, Locked>,
    _publisher: Publisher<'a, D>,
}

impl<D: Device> Deref for ArenaGuard<'_, D> {
    type Target = ArenaState;
    #[inline]
    fn deref(&self) -> &ArenaState {
        &self.locked.state
    }
}

impl<D: Device> DerefMut for ArenaGuard<'_, D> {
    #[inline]
    fn deref_mut(&mut self) -> &mut ArenaState {
        &mut self.locked.state
    }
}

/// The last reference is gone, so no block of the arena is live: its memory goes back to the driver. Waits for work that may still
/// use it; where that is not possible the memory stays, since somebody may be using it.
impl<D: Device> Drop for Arena<D> {
    fn drop(&mut self) {
        let saved = std::mem::take(self.idle.saved.get_mut());
        saved.into_iter().for_each(|s| self.shared.free_host(s.memory));
        self.give_back(self.core.vacate());
        self.core.recycle();
    }
}

impl<D: Device> Arena<D> {
    fn give_back(&self, mut state: ArenaState) {
        // Inside a capture nothing runs, and what is in no stream's lane is done.
        let eager = state.lanes.iter().filter(|l| l.in_use && l.kind == LaneKind::Stream);
        let mut streams: Vec<Arc<StreamCore>> = eager.map(|l| Arc::clone(&l.core)).collect();
        streams.extend(state.pending.iter().filter(|q| !q.blocks.is_empty()).map(|q| Arc::clone(&q.core)));
        for block in &state.deferred {
            streams.extend(
                state
                    .uses
                    .get(state.blocks[*block].uses)
                    .into_iter()
                    .flat_map(|u| u.streams.iter().map(|u| Arc::clone(&u.core))),
            );
        }
        streams.extend(state.leaving.iter().map(|l| Arc::clone(&l.core)));
        streams.sort_by_key(|s| s.id);
        streams.dedup_by_key(|s| s.id);
        for id in state.segments.iter().map(|(id, _)| id).collect::<Vec<_>>() {
            state.note_segment(id, Action::SegmentFree);
        }
        let segments = std::mem::take(&mut state.segments).into_all();
        let leaving = std::mem::take(&mut state.leaving);
        if segments.is_empty() {
            return;
        }
        for stream in streams {
            let wait = || stream.wait(&self.shared.driver, stream.open_mark());
            // Nobody comes back to try again later.
            if let Err(e) = wait().or_else(|_| wait()) {
                tracing::warn!(?stream, error = %e, "could not wait for a stream; memory that it may use stays with the driver");
                return;
            }
        }
        self.shared.drop_leaving(leaving);
        for segment in segments {
            let pool = state.slots.get(segment.slot as usize).map(|s| s.pool);
            match segment.pages {
                Some(table) => self.shared.drop_pages(&segment.memory, *table, segment.part, pool.unwrap_or_default()),
                None => self.shared.give_back_or_strand(segment.memory, segment.part, pool),
            }
        }
    }
}

impl ArenaState {
    fn new(rules: ArenaRules, history: Arc<History>) -> Self {
        Self {
            rules,
            blocks: Blocks::new(),
            segments: Segments::default(),
            bins: Bins::default(),
            lanes: Vec::new(),
            slots: Vec::new(),
            uses: UsesTable::default(),
            pending: Vec::new(),
            deferred: Vec::new(),
            repetition: Repetition::new(rules.pages),
            idle_segments: IdleSegments::default(),
            history,
            leaving: Vec::new(),
            idle_pieces: HashMap::new(),
            idle: IdleState::default(),
            uncut: false,
            keep: Keep::default(),
            watches: Watches::default(),
        }
    }

    /// A slot for a pool, taking the place of one that is gone.
    pub(crate) fn add_slot(&mut self, pool: PoolId, counters: Option<Arc<PoolCounters>>) -> u32 {
        let slot =
            PoolSlot { pool, no_split: false, age: [0; 2], counters, recorded: None, sized_ahead: false, in_use: true };
        match self.slots.iter().position(|s| !s.in_use) {
            Some(at) => {
                self.slots[at] = slot;
                at as u32
            }
            None => {
                self.slots.push(slot);
                self.slots.len() as u32 - 1
            }
        }
    }

    /// Forgets a pool that has no segments any more.
    pub(crate) fn remove_slot(&mut self, slot: u32) {
        debug_assert!(!self.segments.iter().any(|(_, s)| s.slot == slot), "pool slot removed under its segments");
        self.slots[slot as usize].in_use = false;
        self.slots[slot as usize].counters = None;
        // An arena with bins has one pool, which has nothing left.
        self.bins = Bins::default();
        for lane in self.lanes.iter_mut().filter(|l| l.slot == slot) {
            lane.in_use = false;
            lane.capture = NO_CAPTURE;
            lane.claim = Claim::NONE;
        }
    }

    /// Whether freed blocks go to bins.
    pub(crate) fn takes_bins(&self) -> bool {
        self.rules.bins && !self.idle.away
    }

    /// The lanes of one part of a pool, in the order of the driver's handles.
    pub(crate) fn lanes_in_order(&self, slot: u32, part: Part) -> Vec<u32> {
        let mut lanes: Vec<u32> = (0..self.lanes.len() as u32)
            .filter(|l| {
                let lane = &self.lanes[*l as usize];
                lane.in_use && lane.slot == slot && lane.part == part
            })
            .collect();
        lanes.sort_by_key(|l| self.lanes[*l as usize].core.handle);
        lanes
    }
}
