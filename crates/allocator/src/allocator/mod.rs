//! The allocator as its users see it.

mod pools;

use std::collections::HashMap;
use std::sync::Arc;

use gpupool_device::{Address, Device, DriverPoolFigures, StreamHandle};

use crate::allocation::Allocation;
use crate::arena::Segment;
use crate::captures::CaptureRegistry;
use crate::config::{Allowed, Config, ConfigError, LimitSource, fraction_limit};
use crate::counters::{ArenaCounters, PoolCounters, Watches};
use crate::driver::Driver;
use crate::error::{AllocError, FreeError};
use crate::history::HistoryOptions;
use crate::hooks::{GraphSource, HookId, Janitor, OomObserver, Reclaimer, RejectionObserver};
use crate::ids::PoolId;
use crate::inner::{Inner, fresh_allocator_id};
use crate::policy::Rules;
use crate::reclaim::Trimmed;
use crate::shared::{AGES, POLLS, RECORDS, Shared};
use crate::state::State;
use crate::stats::Stats;
use crate::stream::{Stream, StreamCore};
use crate::sync::{Mutex, Rank};
use crate::totals::{Limit, Totals};
use crate::units::{UNIT, Units, to_bytes};

/// A caching allocator for one device. Cheap to clone; a clone is the same allocator. All methods may be called from any thread.
///
/// Memory that was freed is kept and handed out again without asking the driver; [`empty_cache`](Self::empty_cache) gives it back.
/// Dropping the last clone gives back what is free at once, and the rest as the last blocks are dropped: then that drop may wait for
/// the device.
pub struct Allocator<D: Device> {
    inner: Arc<Inner<D>>,
    /// Blocks whose owner keeps an address only.
    raw: Arc<RawTable<D>>,
}

/// Live blocks by address, for owners that cannot keep a handle. Sharded by address; each shard has its own lock.
struct RawTable<D: Device> {
    shards: [Mutex<HashMap<Address, Allocation<D>>>; 16],
}

impl<D: Device> RawTable<D> {
    fn new() -> Self {
        Self { shards: std::array::from_fn(|_| Mutex::new(Rank::Leaf, HashMap::new())) }
    }

    fn shard(&self, address: Address) -> &Mutex<HashMap<Address, Allocation<D>>> {
        let hash = (address.0 / 512).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60;
        &self.shards[hash as usize]
    }
}

impl<D: Device> Clone for Allocator<D> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), raw: Arc::clone(&self.raw) }
    }
}

impl<D: Device> std::fmt::Debug for Allocator<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Allocator({}, device {})", self.config().policy(), self.device().ordinal())
    }
}

impl<D: Device> Allocator<D> {
    pub(crate) fn inner(&self) -> &Arc<Inner<D>> {
        &self.inner
    }

    /// An allocator for `device` that shares the process's registry of captures. Asks the driver nothing.
    ///
    /// # Errors
    ///
    /// [`AllocError::Config`] for a configuration that contradicts itself.
    pub fn new(device: Arc<D>, config: Config) -> Result<Self, AllocError> {
        Self::with_registry(device, config, CaptureRegistry::global())
    }

    /// As [`new`](Self::new), with a registry of captures of the caller's.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_registry(device: Arc<D>, config: Config, registry: Arc<CaptureRegistry>) -> Result<Self, AllocError> {
        config.validate()?;
        let rules = Rules::new(&config, device.properties());
        let total = device.properties().total_memory;
        let limit = config.initial_limit(total).map(|(bytes, source)| Limit { bytes, source });
        let rejecting = config.reject_over_fraction().then(|| (config.memory_fraction() * total as f64) as u64);
        let totals = Totals::new(limit, rules.arena.max_split, rejecting, total, rules.enough_traded);
        let id = fresh_allocator_id();
        let driver = Driver::new(device, Arc::clone(&registry));
        let neutral = Arc::new(StreamCore::neutral(id));
        let shared = Arc::new(Shared::new(driver, rules, config, totals, neutral, registry));
        let inner = Arc::new(Inner::new(shared, id));
        inner.note_ages();
        Ok(Self { inner, raw: Arc::new(RawTable::new()) })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<D> {
        self.inner.shared.driver.device()
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.inner.shared.config
    }

    /// The registry of captures that requests are routed by.
    #[must_use]
    pub fn capture_registry(&self) -> &Arc<CaptureRegistry> {
        &self.inner.shared.registry
    }

    // Streams.

    /// Registers a stream, or returns its registration. The handles 0 and 1 are the legacy default stream; 2 is the calling thread's
    /// own default stream, a registration a thread. O(1); no driver call.
    ///
    /// Other threads cannot name a thread's own default stream, so they cannot learn when its work is done: what it has freed serves
    /// them only after it was [retired](Self::retire_stream), from its own thread and before that thread ends.
    #[must_use]
    pub fn register_stream(&self, handle: StreamHandle) -> Stream<D> {
        self.inner.register(handle)
    }

    /// The stream is about to be destroyed. Its free memory is given to all once its last work is done; its handle may be registered
    /// again, as another stream. Records one event; does not wait. Under the bit-exact policies a handle is a stream for ever, and this
    /// does nothing.
    ///
    /// # Errors
    ///
    /// The driver's, if no event could be recorded: then call it again. `CAPTURE_UNSUPPORTED` while the stream is capturing.
    /// `INVALID_CONTEXT` for another thread's own default stream.
    pub fn retire_stream(&self, stream: &Stream<D>) -> Result<(), AllocError> {
        self.inner.check_own(stream)?;
        if self.inner.shared.rules.streams_by_handle {
            return Ok(());
        }
        stream.core.retire(&self.inner.shared.driver)?;
        stream.arena.offers.retire();
        self.inner.streams.lock().retain(|_, s| s.core.id != stream.core.id);
        self.inner.forget_retired();
        Ok(())
    }

    /// Sets the calling thread's current stream, by which the bit-exact policies tell whether they are inside a capture.
    ///
    /// # Errors
    ///
    /// [`AllocError::ForeignStream`].
    pub fn set_current_stream(&self, stream: &Stream<D>) -> Result<(), AllocError> {
        self.inner.check_own(stream)?;
        if !stream.is_of_this_thread() {
            return Err(AllocError::OtherThreadsStream { stream: stream.id() });
        }
        let thread = std::thread::current().id();
        self.inner.shared.context.current.lock().insert(thread, stream.core.handle);
        Ok(())
    }

    /// Whether this thread may submit work to the stream and ask for memory on it.
    ///
    /// # Errors
    ///
    /// [`AllocError::ForeignStream`], [`AllocError::RetiredStream`], [`AllocError::OtherThreadsStream`].
    pub fn check_usable(&self, stream: &Stream<D>) -> Result<(), AllocError> {
        self.inner.check_usable(stream)
    }

    // Blocks.

    /// A block of at least `bytes` on `stream`, aligned to 512. Zero bytes give a null block and touch nothing.
    ///
    /// A hit takes the lock of the stream's arena and calls no driver (but one capture query while a capture is announced in the
    /// process). A miss climbs the policy's ladder, whose last rungs wait for the device.
    ///
    /// # Errors
    ///
    /// See [`AllocError`]. A failed call changes no live block, route or handle; cached memory may have been given back.
    #[inline]
    pub fn alloc(&self, bytes: u64, stream: &Stream<D>) -> Result<Allocation<D>, AllocError> {
        match self.inner.hit(bytes, stream).hit() {
            Ok(hit) => Ok(hit.handle(stream.arena.core)),
            Err(missed) => self.inner.alloc_past_hits(bytes, stream, missed),
        }
    }

    /// As [`alloc`](Self::alloc), from this pool, whatever scopes are open: as if a scope that claims the request were opened for it alone. Where
    /// the stream is in a capture of a session, its graph holds the pool. The pool is not made, and no user of it is counted: hold it meanwhile.
    /// O(streams of the pool) besides.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc); [`PoolError::Unknown`](crate::PoolError::Unknown).
    pub fn alloc_in_pool(&self, bytes: u64, stream: &Stream<D>, pool: PoolId) -> Result<Allocation<D>, AllocError> {
        self.inner.alloc_in_pool(bytes, stream, pool)
    }

    /// Exactly the range that starts at `address`, if it lies in a free block that requests of `stream` would be served from; `None`
    /// if it is not free, or `address` is not a multiple of 512 into such a block. O(free blocks of the stream).
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc), but for out of memory.
    pub fn alloc_at(
        &self,
        bytes: u64,
        address: Address,
        stream: &Stream<D>,
    ) -> Result<Option<Allocation<D>>, AllocError> {
        if bytes == 0 {
            return Ok(Some(Allocation::null()));
        }
        Ok(self.inner.alloc_at(bytes, address, stream)?.map(Allocation::new))
    }

    /// Gives a block's handle up for its address: it stays live until [`from_raw`](Self::from_raw), or until the allocator is dropped.
    /// For owners that keep an address only, such as C callers. O(1), one shard's lock.
    #[must_use = "the address is the only name that the block has now"]
    pub fn into_raw(&self, allocation: Allocation<D>) -> Address {
        let address = allocation.address();
        if !address.is_null() {
            let stale = self.raw.shard(address).lock().insert(address, allocation);
            // A handle that a restored checkpoint took the block from; its drop takes locks.
            drop(stale);
        }
        address
    }

    /// The handle of a block that was given up for its address. Null gives a null block. O(1), one shard's lock.
    ///
    /// # Errors
    ///
    /// [`FreeError::NotLive`] for any other address: one freed before, inside a block, or of another allocator. Nothing has changed.
    pub fn from_raw(&self, address: Address) -> Result<Allocation<D>, FreeError> {
        if address.is_null() {
            return Ok(Allocation::null());
        }
        self.raw.shard(address).lock().remove(&address).ok_or(FreeError::NotLive { address })
    }

    /// The start and bytes of the driver allocation that an address lies in; `None` if it is in no segment. Under the policy `pages` that is
    /// a handle, and a block may span several; not in a pool of [`set_whole_segments`](Self::set_whole_segments). O(segments).
    #[must_use]
    pub fn base_allocation(&self, address: Address) -> Option<(Address, u64)> {
        self.inner.arenas().iter().find_map(|arena| {
            let state = arena.lock();
            let inside = |s: &Segment| address >= s.memory.base && address.offset_from(s.memory.base) < s.memory.bytes;
            let (_, found) = state.segments.iter().find(|(_, s)| inside(s))?;
            let Some(table) = &found.pages else { return Some((found.memory.base, found.memory.bytes)) };
            let (start, piece) = table.at((address.offset_from(found.memory.base) / UNIT) as Units)?;
            Some((found.memory.base.offset(to_bytes(start)), piece.handle.bytes))
        })
    }

    /// Bytes of the largest block that any stream or pool holds free.
    #[must_use]
    pub fn largest_free_block(&self) -> u64 {
        let per_arena = self.inner.arenas().into_iter().filter_map(|arena| {
            let mut state = arena.lock();
            state.flush_bins(&arena.counters);
            let largest = state.lanes.iter().filter_map(|l| l.index.largest(&state.blocks));
            largest.map(|id| crate::units::to_bytes(state.blocks[id].size)).max()
        });
        per_arena.max().unwrap_or(0)
    }

    // Giving memory back.

    /// Gives every wholly free segment back to the driver, of the default pool and of pools that nobody uses. **Waits** for freed
    /// blocks that other streams still use. What stays, and why, is in the result.
    ///
    /// # Errors
    ///
    /// The driver's, where waiting failed. What was given back before stays given back.
    pub fn empty_cache(&self) -> Result<Trimmed, AllocError> {
        self.inner.release_cached()
    }

    /// As [`empty_cache`](Self::empty_cache), for one private pool that nobody uses.
    ///
    /// # Errors
    ///
    /// As [`empty_cache`](Self::empty_cache).
    pub fn empty_cache_of(&self, pool: PoolId) -> Result<Trimmed, AllocError> {
        if pool.is_default() { self.empty_cache() } else { self.inner.release_cached_of(pool) }
    }

    /// As [`empty_cache`](Self::empty_cache), but waits for nothing: what the device may still use stays.
    ///
    /// Only the driver's free of plain memory waits by itself, until the device is idle; what is known to be in use is not freed.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn trim(&self) -> Result<Trimmed, AllocError> {
        self.inner.release_without_waiting()
    }

    /// Gives back the segments that were found wholly free [`idle_decay`](Config::idle_decay) ago and that nobody has used since. Waits
    /// for nothing. It is done before growth too; call this from a timer, so that a process at rest gives memory back. Time counts
    /// from the first look that finds a segment free. Does nothing unless that is set. O(segments).
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn decay(&self) -> Result<Trimmed, AllocError> {
        self.inner.decay()
    }

    /// Limits the bytes in segments to a fraction of the device's memory; 1 takes any limit off. Cached memory beyond it stays until
    /// it is needed. What the driver itself, libraries and other processes hold is not counted.
    ///
    /// # Errors
    ///
    /// [`AllocError::Config`] outside 0 to 1.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), AllocError> {
        if !(0.0..=1.0).contains(&fraction) {
            let (setting, allowed) = ("memory_fraction", Allowed::Fraction);
            return Err(ConfigError::OutsideRange { setting, value: fraction, allowed }.into());
        }
        let limit = fraction_limit(fraction, self.device().properties().total_memory);
        self.inner.shared.totals.lock().limit = limit.map(|bytes| Limit { bytes, source: LimitSource::Fraction });
        self.inner.note_ages();
        Ok(())
    }

    /// Limits the bytes in segments, or takes any limit off.
    pub fn set_memory_limit(&self, bytes: Option<u64>) {
        let limit = bytes.map(|bytes| Limit { bytes, source: LimitSource::User });
        self.inner.shared.totals.lock().limit = limit;
        self.inner.note_ages();
    }

    /// The limit in force.
    #[must_use]
    pub fn memory_limit(&self) -> Option<Limit> {
        self.inner.shared.totals.lock().limit
    }

    /// The limit as a fraction of the device's memory; 1 without one.
    #[must_use]
    pub fn memory_fraction(&self) -> f64 {
        let total = self.device().properties().total_memory;
        self.memory_limit().map_or(1.0, |l| l.bytes as f64 / total as f64)
    }

    /// Bytes that requests could still be served from: free with the driver, and cached here in wholly free segments.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn available(&self) -> Result<u64, AllocError> {
        let pages = self.inner.shared.rules.pages;
        let paged: u64 = pages.map_or(0, |rules| {
            let default = self.inner.default_arenas();
            let free = default.iter().map(|a| {
                let mut state = a.lock();
                state.flush_bins(&a.counters);
                state.free_page_bytes(rules.page_bytes(), |lane| a.is_default_slot(lane.slot))
            });
            free.sum()
        });
        let idle: u64 = self
            .inner
            .arenas()
            .iter()
            .filter(|a| a.holds_default)
            .flat_map(|a| a.idle_segments(|lane| a.is_default_slot(lane.slot)))
            .map(|i| i.bytes)
            .sum::<u64>()
            + paged;
        let free = self.inner.shared.driver.mem_info()?.free.saturating_add(idle);
        let held = self.inner.shared.totals.lock().held();
        Ok(self.memory_limit().map_or(free, |l| free.min(l.bytes.saturating_sub(held).saturating_add(idle))))
    }

    // Hooks.

    /// Adds an observer that is called, with no lock held, when a request ends in out of memory.
    pub fn add_oom_observer(&self, observer: Arc<OomObserver>) -> HookId {
        self.inner.hooks.add_oom(observer)
    }

    /// Adds an observer that is called, with no lock held, when growth is rejected outright.
    pub fn add_rejection_observer(&self, observer: Arc<RejectionObserver>) -> HookId {
        self.inner.hooks.add_rejection(observer)
    }

    /// Adds a reclaimer: called with the bytes wanted, with no lock held, when a request found no block; it returns whether it freed
    /// anything. Higher priorities first.
    pub fn add_reclaimer(&self, priority: i32, reclaimer: Arc<Reclaimer>) -> HookId {
        self.inner.hooks.add_reclaimer(priority, reclaimer)
    }

    /// Adds a janitor: called with no lock held before memory is given back or waited for.
    pub fn add_janitor(&self, janitor: Arc<Janitor>) -> HookId {
        self.inner.hooks.add_janitor(janitor)
    }

    /// Registers who knows of graphs, so that states tell of them.
    pub fn add_graph_source(&self, source: Arc<GraphSource>) -> HookId {
        self.inner.hooks.add_graph_source(source)
    }

    /// Takes an observer or reclaimer off again; whether it was there.
    pub fn remove_hook(&self, id: HookId) -> bool {
        self.inner.hooks.remove(id)
    }

    // State.

    /// Begins to record what happens, forgetting what was recorded before; or, with `None`, stops and forgets. Costs nothing while
    /// it is off. Requests that are on their way as it is switched on may be missing.
    pub fn record_history(&self, options: Option<HistoryOptions>) {
        let shared = &self.inner.shared;
        let on = options.is_some();
        shared.history.set(options);
        shared.attention.set(RECORDS, on);
    }

    /// All statistics. O(arenas); takes no arena's lock.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.inner.stats()
    }

    /// What the driver's own pool holds for this allocator, under the policy `stream-ordered`: `stats` counts what is in blocks, this says
    /// what the device has given up for them. `None` under other policies, and before the first request. One driver call.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn driver_pool_figures(&self) -> Result<Option<DriverPoolFigures>, AllocError> {
        Ok(self.inner.shared.driver_pool_figures()?)
    }

    /// Sets every peak to the current figure. Cumulative figures stay.
    pub fn reset_peak_stats(&self) {
        self.reset_counters(ArenaCounters::reset_peaks, PoolCounters::reset_peaks);
        self.inner.shared.peaks.reset();
        self.inner.shared.totals.lock().reset_peaks();
    }

    /// Sets cumulative figures and event counts to zero, but not [`misses`](Stats::misses).
    pub fn reset_accumulated_stats(&self) {
        self.reset_counters(|counters, _| counters.reset_accumulated(), PoolCounters::reset_accumulated);
        self.inner.shared.totals.lock().reset_accumulated();
        let mut folded = self.inner.folded.lock();
        *folded = Stats { misses: folded.misses, ..Stats::default() };
    }

    fn reset_counters(&self, of_arena: impl Fn(&ArenaCounters, &mut Watches), of_pool: impl Fn(&PoolCounters)) {
        for arena in self.inner.arenas() {
            let mut state = arena.lock();
            of_arena(&arena.counters, &mut state.watches);
        }
        for pool in self.inner.pools.all() {
            let _state = pool.arena.lock();
            of_pool(&pool.counters);
        }
    }

    /// Everything as data. O(blocks); each arena is locked while its part is copied.
    #[must_use]
    pub fn state(&self) -> State {
        self.inner.state()
    }

    /// Bytes of host memory that block records take, and how many records there are.
    #[must_use]
    pub fn host_bytes(&self) -> (usize, usize) {
        let per_arena = self.inner.arenas().into_iter().map(|a| a.host_bytes());
        per_arena.fold((0, 0), |sum, a| (sum.0 + a.0, sum.1 + a.1))
    }

    /// Checks every invariant by recounting everything; the first breach in words. For tests, and for whoever doubts. O(blocks).
    ///
    /// # Errors
    ///
    /// The breach.
    pub fn validate(&self) -> Result<(), String> {
        for arena in self.inner.arenas() {
            let state = arena.lock();
            state.validate(&arena.counters)?;
            let shared = &self.inner.shared;
            if shared.rules.poll_each_allocation && state.any_waiting() && shared.attention.get() & POLLS == 0 {
                return Err("a block waits for a stream, and requests do not poll".to_owned());
            }
        }
        Ok(())
    }
}

impl<D: Device> Inner<D> {
    fn note_ages(&self) {
        let limited = self.shared.totals.lock().limit.is_some();
        let counts = limited && self.shared.config.garbage_collection_threshold().is_some();
        self.shared.attention.set(AGES, counts);
    }
}

/// What is free goes back at once; what is live keeps its arena.
impl<D: Device> Drop for Inner<D> {
    fn drop(&mut self) {
        self.streams.get_mut().clear();
        if let Err(e) = self.release_without_waiting() {
            tracing::debug!(error = %e, "the cache was not emptied as the allocator was dropped");
        }
        self.arenas().iter().for_each(|arena| arena.discard());
    }
}
