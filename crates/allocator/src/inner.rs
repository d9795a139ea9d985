//! The allocator's inside: arenas, pools, routing, and how one request is served.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::ThreadId;

use gpupool_device::{CaptureStatus, Device, StreamHandle};

use crate::allocation::Allocation;
use crate::arena::{Arena, ArenaState, Handed, LaneKind, Source};
use crate::captures::ReachSets;
use crate::error::{AllocError, PoolError};
use crate::history::Caller;
use crate::hit::Missed;
use crate::hooks::Hooks;
use crate::ids::{Part, PoolId, StreamId};
use crate::pool::{Pool, PoolEntry, PoolTable};
use crate::provider::SegmentProvider;
use crate::routing::Route;
use crate::shared::{POLLS, ROUNDS, Shared, UNUSUAL};
use crate::stats::Stats;
use crate::stream::{Stream, StreamCore};
use crate::sync::{Mutex, Rank};
use crate::units::{UNIT, Units};

/// Rounded sizes up to this many bytes are small.
pub(crate) const SMALL_LIMIT: u64 = 1 << 20;
/// A small segment.
const SMALL_SEGMENT: u64 = 2 << 20;
/// From this rounded size on, a segment is made for the request alone.
const DEDICATED_FROM: u64 = 10 << 20;
/// Granularity of dedicated segments.
pub(crate) const DEDICATED_STEP: u64 = 2 << 20;
/// Requests beyond this are no hit: no segment is larger.
const LARGEST: u64 = Units::MAX as u64 * UNIT;
/// Requests of this size are a mistake.
const ABSURD: u64 = 1 << 60;

static NEXT_ALLOCATOR: AtomicU64 = AtomicU64::new(1);

/// A number that no other allocator of this process has.
pub(crate) fn fresh_allocator_id() -> u64 {
    NEXT_ALLOCATOR.fetch_add(1, Ordering::Relaxed)
}

/// One request on its way through the allocator.
pub(crate) struct Request<D: Device> {
    pub(crate) requested: u64,
    /// Rounded.
    pub(crate) size: u64,
    pub(crate) part: Part,
    /// What a new segment for it takes.
    pub(crate) segment_bytes: u64,
    pub(crate) core: Arc<StreamCore>,
    pub(crate) arena: Arc<Arena<D>>,
    /// The lane of its stream in its pool and part.
    pub(crate) lane: u32,
    /// In a capture that the registry routed: the pool's neutral lane.
    pub(crate) neutral: Option<u32>,
    /// The private pool it goes to, if any.
    pub(crate) pool: Option<Arc<Pool<D>>>,
    /// No polling, no events, no giving back: a capture is under way as far as the policy is concerned.
    pub(crate) in_capture: bool,
    /// Who asks, while the history is on.
    pub(crate) caller: Option<Caller>,
}

impl<D: Device> Request<D> {
    pub(crate) fn pool_id(&self) -> PoolId {
        self.pool.as_ref().map_or(PoolId::DEFAULT, |p| p.id)
    }

    /// Whether the stream was retired, or the pool given up, and its lane forgotten since the request was routed. (A capture that has just
    /// ended leaves its pool's neutral lane.)
    pub(crate) fn is_stranded(&self, state: &ArenaState) -> bool {
        self.neutral.is_none() && !state.lanes[self.lane as usize].in_use
    }

    /// A block of the request's arena, handed out. Inside a capture it belongs to the stream's lane there from now on.
    pub(crate) fn served(&self, state: &mut ArenaState, handed: Handed) -> Served<D> {
        self.served_in(state, handed, self.lane)
    }

    /// As [`served`](Self::served), from this lane of its stream.
    pub(crate) fn served_in(&self, state: &mut ArenaState, handed: Handed, lane: u32) -> Served<D> {
        if self.neutral.is_some() {
            if state.lanes[lane as usize].in_use {
                state.blocks[handed.block()].lane = lane;
            } else {
                // The capture has just ended, and what it holds lies in the neutral lane.
                state.record_owner(handed.block(), &self.core);
            }
        }
        self.note(state, &handed);
        Served { arena: Arc::clone(&self.arena), handed }
    }

    /// Tells the history that the request was served.
    pub(crate) fn note(&self, state: &ArenaState, handed: &Handed) {
        state.note_handed(handed, self.requested, self.core.handle, self.caller.as_ref());
    }
}

/// A block with what its handle needs.
pub(crate) struct Served<D: Device> {
    pub(crate) arena: Arc<Arena<D>>,
    pub(crate) handed: Handed,
}

/// Everything behind an [`Allocator`](crate::Allocator).
pub(crate) struct Inner<D: Device> {
    pub(crate) id: u64,
    pub(crate) shared: Arc<Shared<D>>,
    /// Every arena: those of streams in the default pool, and those of private pools.
    pub(crate) arenas: Mutex<Vec<Arc<Arena<D>>>>,
    /// Those of them that hold the default pool: an allocation that finds nothing looks at these, and at no private pool's.
    default_arenas: Mutex<Arc<[Arc<Arena<D>>]>>,
    /// Under policies with one arena, that one.
    single: Option<Arc<Arena<D>>>,
    pub(crate) pools: PoolTable<D>,
    pub(crate) streams: Mutex<HashMap<StreamKey, Stream<D>>>,
    next_stream: AtomicU32,
    pub(crate) hooks: Hooks,
    pub(crate) reach: Mutex<ReachSets>,
    /// Cumulative figures of arenas that are gone.
    pub(crate) folded: Mutex<Stats>,
}

/// What names a stream that is not retired. The per-thread default stream is one value and many streams.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct StreamKey {
    handle: StreamHandle,
    thread: Option<ThreadId>,
}

impl StreamKey {
    fn of(handle: StreamHandle, by_handle: bool) -> Self {
        if by_handle {
            return Self { handle, thread: None };
        }
        // The driver has two names for the legacy default stream.
        let handle = if handle.0 == 1 { StreamHandle::LEGACY } else { handle };
        let thread = (handle == StreamHandle::PER_THREAD).then(|| std::thread::current().id());
        Self { handle, thread }
    }
}

impl<D: Device> Inner<D> {
    pub(crate) fn new(shared: Arc<Shared<D>>, id: u64) -> Self {
        let single = shared.rules.single_arena.then(|| {
            let arena = Arena::new(Arc::clone(&shared), true);
            arena.lock().add_slot(PoolId::DEFAULT, None);
            arena
        });
        Self {
            id,
            arenas: Mutex::new(Rank::Leaf, single.iter().cloned().collect()),
            default_arenas: Mutex::new(Rank::Leaf, single.iter().cloned().collect()),
            single,
            shared,
            pools: PoolTable::new(),
            streams: Mutex::new(Rank::Leaf, HashMap::new()),
            next_stream: AtomicU32::new(0),
            hooks: Hooks::new(),
            reach: Mutex::new(Rank::Leaf, ReachSets::default()),
            folded: Mutex::new(Rank::Leaf, Stats::default()),
        }
    }

    pub(crate) fn arenas(&self) -> Vec<Arc<Arena<D>>> {
        self.arenas.lock().clone()
    }

    /// The arenas of the default pool. O(1): nobody's count of references is touched but the list's.
    pub(crate) fn default_arenas(&self) -> Arc<[Arc<Arena<D>>]> {
        Arc::clone(&self.default_arenas.lock())
    }

    /// Registers a stream, or returns its registration.
    pub(crate) fn register(&self, handle: StreamHandle) -> Stream<D> {
        let key = StreamKey::of(handle, self.shared.rules.streams_by_handle);
        if let Some(known) = self.streams.lock().get(&key) {
            return known.clone();
        }
        // 2^32 registrations take decades.
        let id = StreamId(self.next_stream.fetch_add(1, Ordering::Relaxed));
        let core = Arc::new(StreamCore::new(id, key.handle, key.thread, self.id));
        let arena = self.single.clone().unwrap_or_else(|| {
            let arena = Arena::new(Arc::clone(&self.shared), true);
            arena.lock().add_slot(PoolId::DEFAULT, None);
            arena
        });
        let lane = arena.lock().lanes_of(0, &core, LaneKind::Stream);
        let stream = Stream { core, arena, lane };
        // Two threads may register one handle at once: the first one stays.
        let known = self.streams.lock().entry(key).or_insert_with(|| stream.clone()).clone();
        if known.core.id != stream.core.id {
            if self.single.is_none() {
                stream.arena.discard();
            }
            return known;
        }
        self.shared.context.streams.lock().push(Arc::clone(&stream.core));
        if self.single.is_none() {
            self.shared.peaks.join(&stream.arena);
            self.arenas.lock().push(Arc::clone(&stream.arena));
            let mut arenas = self.default_arenas.lock();
            *arenas = arenas.iter().chain([&stream.arena]).cloned().collect();
        }
        stream
    }

    /// A new private pool's arena and slot.
    pub(crate) fn make_pool(
        &self,
        id: PoolId,
        provider: Option<Arc<dyn SegmentProvider>>,
        no_split: bool,
    ) -> Arc<Pool<D>> {
        let counters = Arc::default();
        let arena = self.single.clone().unwrap_or_else(|| {
            let arena = Arena::new(Arc::clone(&self.shared), false);
            self.shared.peaks.join(&arena);
            self.arenas.lock().push(Arc::clone(&arena));
            arena
        });
        let slot = {
            let mut state = arena.lock();
            let slot = state.add_slot(id, Some(Arc::clone(&counters)));
            state.slots[slot as usize].no_split = no_split;
            slot
        };
        Arc::new(Pool { id, arena, slot, counters, provider, whole_segments: AtomicBool::new(false) })
    }

    /// Whether the stream is this allocator's.
    pub(crate) fn check_own(&self, stream: &Stream<D>) -> Result<(), AllocError> {
        if stream.core.allocator == self.id {
            Ok(())
        } else {
            Err(AllocError::ForeignStream { stream: stream.core.id })
        }
    }

    /// Whether the calling thread may submit work to the stream and ask for memory on it.
    pub(crate) fn check_usable(&self, stream: &Stream<D>) -> Result<(), AllocError> {
        self.check_own(stream)?;
        if stream.core.is_retired() {
            return Err(AllocError::RetiredStream { stream: stream.core.id });
        }
        if !stream.core.is_reachable() {
            return Err(AllocError::OtherThreadsStream { stream: stream.core.id });
        }
        Ok(())
    }

    /// Checks a stream, finds its pool, rounds the size.
    pub(crate) fn request(self: &Arc<Self>, requested: u64, stream: &Stream<D>) -> Result<Request<D>, AllocError> {
        self.request_knowing(requested, stream, None)
    }

    /// As [`request`](Self::request), if what the driver says of the stream is known.
    fn request_knowing(
        self: &Arc<Self>,
        requested: u64,
        stream: &Stream<D>,
        status: Option<CaptureStatus>,
    ) -> Result<Request<D>, AllocError> {
        self.check_request(requested, stream)?;
        self.request_along(requested, stream, self.route(stream, status)?)
    }

    /// Whether a request is for a size that is meant, on a stream that the calling thread may use.
    pub(crate) fn check_request(&self, requested: u64, stream: &Stream<D>) -> Result<(), AllocError> {
        if requested >= ABSURD {
            return Err(AllocError::AbsurdSize { requested });
        }
        self.check_usable(stream)
    }

    /// Rounds the size of a [checked](Self::check_request) request, and finds its lane.
    pub(crate) fn request_along(
        self: &Arc<Self>,
        requested: u64,
        stream: &Stream<D>,
        route: Route<D>,
    ) -> Result<Request<D>, AllocError> {
        let in_capture = self.shared.in_capture()? || matches!(route, Route::Capture(..));
        let size = self.shared.round(requested);
        let small = if matches!(route, Route::Default(_)) { self.shared.rules.small_limit } else { SMALL_LIMIT };
        let part = if size <= small { Part::Small } else { Part::Large };
        let index = part.index() as u32;
        let (pool, arena, lane, neutral) = match route {
            Route::Default(claim) => {
                if let Some(claim) = claim {
                    stream.arena.lock().note_claim(stream.lane, claim);
                    stream.core.route.set(stream.arena.core, stream.lane);
                }
                (None, Arc::clone(&stream.arena), stream.lane + index, None)
            }
            Route::Scope(pool, claim) => {
                let mut state = pool.arena.lock();
                // Another thread may have closed the scope, and let the pool go.
                if !state.slots[pool.slot as usize].is_of(pool.id) {
                    return Err(PoolError::Unknown { pool: pool.id }.into());
                }
                let lane = state.lanes_of(pool.slot, &stream.core, LaneKind::Stream);
                if let Some(claim) = claim {
                    state.note_claim(lane, claim);
                    stream.core.route.set(pool.arena.core, lane);
                }
                drop(state);
                (Some(Arc::clone(&pool)), Arc::clone(&pool.arena), lane + index, None)
            }
            Route::Capture(pool, own) => {
                let mut state = pool.arena.lock();
                let lane = state.lanes_of(pool.slot, &stream.core, LaneKind::Capture);
                let neutral = state.lanes_of(pool.slot, &self.shared.neutral, LaneKind::Neutral);
                // Once a session was closed since, this may be the capture's, whose lanes are gone then.
                if let Some((capture, _)) = own.filter(|(_, closed)| self.shared.registry.closed() == *closed) {
                    state.lanes[lane as usize].capture = capture;
                    state.lanes[lane as usize].neutral = neutral;
                    stream.core.route.set(pool.arena.core, lane);
                }
                drop(state);
                (Some(Arc::clone(&pool)), Arc::clone(&pool.arena), lane + index, Some(neutral + index))
            }
        };
        Ok(Request {
            caller: self.shared.history.caller(),
            requested,
            size,
            part,
            segment_bytes: match self.shared.rules.stream_ordered {
                true => size,
                false => self.shared.segment_bytes(self.nominal_segment_bytes(size, part)),
            },
            core: Arc::clone(&stream.core),
            arena,
            lane,
            neutral,
            pool,
            in_capture,
        })
    }

    fn nominal_segment_bytes(&self, size: u64, part: Part) -> u64 {
        match part {
            Part::Small => SMALL_SEGMENT,
            Part::Large if size < DEDICATED_FROM => self.shared.config.large_segment_size(),
            Part::Large => size.div_ceil(DEDICATED_STEP).saturating_mul(DEDICATED_STEP),
        }
    }

    /// Whether a request is for something, no more than a segment has, and on a stream of this allocator.
    #[inline(always)]
    pub(crate) fn is_usual(&self, stream: &StreamCore, requested: u64) -> bool {
        // Bytes of zero are none of these, since one less is the most there is.
        requested.wrapping_sub(1) < LARGEST && stream.allocator == self.id
    }

    /// As [`is_usual`](Self::is_usual) where requests are rounded as configured: by that one may be more than a segment can be.
    #[inline(always)]
    pub(crate) fn is_usual_rounded(&self, stream: &StreamCore, requested: u64) -> bool {
        self.is_usual(stream, requested) && self.is_usual(stream, self.shared.round(requested))
    }

    /// A request that was no [hit](Self::hit).
    #[inline(never)]
    pub(crate) fn alloc_past_hits(
        self: &Arc<Self>,
        requested: u64,
        stream: &Stream<D>,
        missed: Missed,
    ) -> Result<Allocation<D>, AllocError> {
        let polls = self.shared.attention.get() & UNUSUAL & !ROUNDS == POLLS;
        if polls && self.is_usual_rounded(&stream.core, requested) && stream.core.is_usable() {
            return self.alloc_after_polling(requested, stream);
        }
        if requested == 0 {
            return Ok(Allocation::null());
        }
        let request = self.request_knowing(requested, stream, missed.status())?;
        if !self.shared.config.caching() {
            return self.alloc_uncached(&request);
        }
        Ok(Allocation::new(self.serve(&request)?))
    }

    /// A usual request that polls events first.
    #[inline(never)]
    fn alloc_after_polling(self: &Arc<Self>, requested: u64, stream: &Stream<D>) -> Result<Allocation<D>, AllocError> {
        self.poll_now(&stream.arena)?;
        let core = stream.arena.core;
        let want = self.shared.want(requested, self.shared.rules.small_limit);
        if let Some(hit) = Self::hit_at(Source::of(stream), want, core.lock()) {
            return Ok(hit.handle(core));
        }
        // It has polled, and searched the default pool; another thread may have opened a scope since.
        let request = self.request(requested, stream)?;
        let found = if request.pool.is_some() { self.search(&request) } else { None };
        Ok(Allocation::new(found.map_or_else(|| self.climb(&request), Ok)?))
    }

    /// Forgets the arenas of retired streams that hold nothing any more, and the streams whose last work is done.
    pub(crate) fn forget_retired(&self) {
        for arena in self.default_arenas().iter().filter(|arena| arena.offers.are_of_retired()) {
            let mut state = arena.lock();
            let retired = state.lanes.iter().all(|l| !l.in_use || l.core.is_retired());
            if self.single.is_some() || !arena.holds_default || !retired || !state.segments.is_empty() {
                continue;
            }
            // A request that is on its way here finds its lane gone.
            state.remove_slot(0);
            drop(state);
            {
                let mut arenas = self.default_arenas.lock();
                *arenas = arenas.iter().filter(|a| !Arc::ptr_eq(a, arena)).cloned().collect();
            }
            // Another thread may have forgotten it at the same time.
            if self.shared.peaks.leave(arena) {
                self.arenas.lock().retain(|a| !Arc::ptr_eq(a, arena));
                self.folded.lock().fold(&arena.counters);
                arena.discard();
            }
        }
        let streams = self.shared.context.streams.lock().clone();
        let driver = &self.shared.driver;
        streams.iter().filter(|s| s.is_retired()).for_each(|s| s.poll(driver));
        let over = |s: &Arc<StreamCore>| s.is_retired() && s.is_done(s.open_mark());
        let mut gone = Vec::new();
        self.shared.context.streams.lock().retain(|s| {
            let over = over(s);
            if over {
                gone.push(Arc::clone(s));
            }
            !over
        });
        // The last event may have been waited for before the earlier ones were asked about.
        gone.iter().for_each(|s| s.drop_marks(driver));
    }

    pub(crate) fn serve(&self, request: &Request<D>) -> Result<Served<D>, AllocError> {
        if self.shared.rules.poll_each_allocation {
            if !request.in_capture {
                self.poll_now(&request.arena)?;
            } else if self.shared.config.capture_reuse() {
                self.reuse_in_capture(request)?;
            }
        }
        if let Some(served) = self.search(request) {
            return Ok(served);
        }
        self.climb(request)
    }

    /// Without caching: a driver allocation of exactly the bytes requested, in no statistics. In a capture the driver is left to refuse it.
    pub(crate) fn alloc_uncached(&self, request: &Request<D>) -> Result<Allocation<D>, AllocError> {
        let bytes = request.requested;
        match self.shared.driver.device().mem_alloc(bytes) {
            Ok(address) => Ok(Allocation::direct(request.arena.core, address, bytes)),
            Err(e) if e.is_out_of_memory() => Err(self.out_of_memory(request)),
            Err(e) => Err(e.into()),
        }
    }

    /// Looks for a block in the request's own lane.
    pub(crate) fn search(&self, request: &Request<D>) -> Option<Served<D>> {
        let ages = self.shared.counts_ages();
        let counters = &request.arena.counters;
        let mut state = request.arena.lock();
        let block = state.take_from(request.lane, request.neutral, request.size, ages, counters)?;
        let handed = state.hand_out(block, request.size, request.requested, counters)?;
        Some(request.served(&mut state, handed))
    }

    /// One user of a pool less.
    pub(crate) fn release_pool(&self, id: PoolId) -> Result<(), PoolError> {
        self.pools.release(id, self.shared.rules.counts_over_releases)
    }

    /// One user more of a pool, which is made if there is none.
    pub(crate) fn take_pool(&self, id: PoolId, provider: Option<Arc<dyn SegmentProvider>>) -> Result<(), AllocError> {
        if id.is_default() {
            return Err(PoolError::Default.into());
        }
        if provider.is_some() && self.pools.get(id).is_ok() {
            return Err(PoolError::HasProvider { pool: id }.into());
        }
        if self.pools.take(id, self.shared.rules.revives_pools)?.is_some() {
            return Ok(());
        }
        let no_split = self.pools.lock().no_split.contains(&id);
        let pool = self.make_pool(id, provider, no_split);
        let kept = {
            let mut table = self.pools.lock();
            let new = PoolEntry { pool: Arc::clone(&pool), use_count: 0, captured: false };
            let entry = table.pools.entry(id).or_insert(new);
            entry.use_count += 1;
            Arc::clone(&entry.pool)
        };
        // Two threads may make one pool at once: the first stays.
        if !Arc::ptr_eq(&kept, &pool) {
            self.discard_pool(&pool);
        }
        Ok(())
    }
}
