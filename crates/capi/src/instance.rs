//! An allocator behind the C border, whatever its device.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpupool::device::{Address, CaptureMode, InstantiateFlags, Kernel, StreamHandle, StreamKind, code};
use gpupool::graphs::{Adopted, Capture, CaptureOptions, Captures, PoolChoice};
use gpupool::snapshot::Snapshot;
use gpupool::{Allocation, Allocator, CaptureRegistry, Config, FreeError, PoolHold, PoolId, Stream};
use parking_lot::{Mutex, RwLock};

use crate::device::Border;
use crate::scopes::{Leaving, Scope, StreamTest};
use crate::status::Failure;

/// Pools that stay as they are for as long as this lives.
pub(crate) struct Hold {
    _pools: Vec<PoolHold>,
    /// After the pools.
    _owner: Arc<dyn Instance>,
}

/// A capture that was begun here. Ended by the thread that began it.
pub(crate) trait OpenCapture {
    fn pool(&self) -> PoolId;
    fn end(self: Box<Self>) -> Result<Arc<dyn Graph>, Failure>;
}

/// A capture that someone else began.
pub(crate) trait AdoptedCapture: Send + Sync {
    fn pool(&self) -> PoolId;
    fn finish(self: Box<Self>) -> Hold;
}

/// A captured graph.
pub(crate) trait Graph: Send + Sync {
    fn pool(&self) -> PoolId;
    /// Nodes, and how many of them allocate or free memory.
    fn nodes(&self) -> (usize, usize);
    fn instantiate(&self) -> Result<Arc<dyn Executable>, Failure>;
}

/// A graph that can be launched.
pub(crate) trait Executable: Send + Sync {
    /// # Safety
    ///
    /// As [`Border::lend`] of `stream`.
    unsafe fn launch(&self, stream: u64) -> Result<(), Failure>;
}

/// An allocator and its device.
///
/// # Safety
///
/// Of every method that takes a stream: as [`Border::lend`].
pub(crate) trait Instance: Send + Sync {
    unsafe fn alloc(&self, bytes: u64, stream: u64) -> Result<Address, Failure>;
    fn free(&self, address: Address) -> Result<(), Failure>;
    unsafe fn record_stream(&self, address: Address, stream: u64) -> Result<(), Failure>;
    fn block_bytes(&self, address: Address) -> Result<u64, Failure>;
    fn base_allocation(&self, address: Address) -> Result<(Address, u64), Failure>;
    unsafe fn retire_stream(&self, stream: u64) -> Result<(), Failure>;

    /// Nobody asks for memory or frees any more: blocks are freed and scopes closed now, though graphs may keep the allocator for long.
    fn close(&self);
    fn empty_cache(&self) -> Result<u64, Failure>;
    fn trim(&self) -> Result<u64, Failure>;
    fn set_memory_fraction(&self, fraction: f64) -> Result<(), Failure>;
    fn set_memory_limit(&self, bytes: Option<u64>);
    fn available(&self) -> Result<u64, Failure>;

    fn pool_create(&self, pool: PoolId) -> Result<(), Failure>;
    fn pool_whole_segments(&self, pool: PoolId) -> Result<(), Failure>;
    fn pool_begin(&self, pool: PoolId, test: StreamTest) -> Result<(), Failure>;
    fn pool_end(&self, pool: PoolId) -> Result<(), Failure>;
    fn pool_release(&self, pool: PoolId) -> Result<(), Failure>;
    fn pool_bytes(&self, pool: PoolId) -> Result<(i64, i64), Failure>;

    unsafe fn begin_capture(
        self: Arc<Self>,
        stream: u64,
        pool: Option<PoolId>,
        mode: CaptureMode,
    ) -> Result<Box<dyn OpenCapture>, Failure>;
    unsafe fn adopt_capture(
        self: Arc<Self>,
        stream: u64,
        pool: Option<PoolId>,
    ) -> Result<Box<dyn AdoptedCapture>, Failure>;

    fn stats(&self) -> Vec<(String, i64)>;
    fn reset_peaks(&self);
    fn reset_accumulated(&self);
    fn snapshot(&self) -> Snapshot;

    fn stream_create(&self) -> Result<u64, Failure>;
    unsafe fn stream_destroy(&self, stream: u64) -> Result<(), Failure>;
    unsafe fn stream_synchronize(&self, stream: u64) -> Result<(), Failure>;
    unsafe fn launch(&self, stream: u64, kernel: Kernel) -> Result<(), Failure>;
    unsafe fn read(&self, stream: u64, from: Address, into: &mut [u8]) -> Result<(), Failure>;
}

/// [`Instance`] for one kind of device.
pub(crate) struct Of<D: Border> {
    pub(crate) device: Arc<D>,
    pub(crate) allocator: Allocator<D>,
    captures: Captures<D>,
    blocks: Blocks<D>,
    /// Streams that were ever named here and not retired, but for threads' own.
    streams: RwLock<HashMap<u64, Stream<D>, Mixed>>,
    /// How many of `scopes` there are, for those who need not look.
    open_scopes: AtomicUsize,
    pub(crate) scopes: Mutex<Vec<Scope>>,
    /// What keeps the pools of ended scopes.
    pub(crate) kept: Mutex<HashMap<PoolId, Vec<PoolHold>>>,
    pub(crate) leaving: Arc<Leaving<D>>,
}

/// Mixes numbers that are no attacker's choice: addresses and handles, whose lowest bits are all the same.
#[derive(Default)]
pub(crate) struct Mix(u64);
type Mixed = BuildHasherDefault<Mix>;

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        let product = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ product.rotate_left(32);
    }
}

/// A part of the live blocks, by address.
type Shard<D> = Mutex<HashMap<u64, Allocation<D>, Mixed>>;

/// Live blocks, in shards.
struct Blocks<D: Border>([Shard<D>; 16]);

impl<D: Border> Blocks<D> {
    fn shard(&self, address: Address) -> &Shard<D> {
        let hash = (address.0 / 512).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60;
        &self.0[hash as usize]
    }

    /// Looks at a live block. Its owner cannot free it meanwhile.
    fn with<R>(&self, address: Address, look: impl FnOnce(&Allocation<D>) -> R) -> Result<R, Failure> {
        let shard = self.shard(address).lock();
        shard.get(&address.0).map(look).ok_or_else(|| FreeError::NotLive { address }.into())
    }
}

impl<D: Border> Of<D> {
    /// `captures` is shared by all whose captures may meet: the devices of a process, or of a simulated world.
    pub(crate) fn new(device: Arc<D>, config: Config, captures: Arc<CaptureRegistry>) -> Result<Self, Failure> {
        let allocator = Allocator::with_registry(Arc::clone(&device), config, captures)?;
        let captures = Captures::new(&allocator);
        let leaving = Arc::new(Leaving::new(Arc::clone(&device)));
        let queue = Arc::clone(&leaving);
        allocator.add_janitor(Arc::new(move |wait| queue.tidy(wait)));
        Ok(Self {
            device,
            allocator,
            captures,
            blocks: Blocks(std::array::from_fn(|_| Mutex::default())),
            streams: RwLock::default(),
            open_scopes: AtomicUsize::new(0),
            scopes: Mutex::new(Vec::new()),
            kept: Mutex::new(HashMap::new()),
            leaving,
        })
    }

    /// The registration of a stream. One that is named for the first time is asked about: what the driver takes for none must not become
    /// one whose work everybody waits for.
    ///
    /// # Safety
    ///
    /// As [`Border::lend`].
    pub(crate) unsafe fn stream(&self, raw: u64) -> Result<Stream<D>, Failure> {
        if let Some(known) = self.streams.read().get(&raw) {
            return Ok(known.clone());
        }
        // SAFETY: the caller's promise.
        let handle = unsafe { self.device.lend(raw) };
        if raw > StreamHandle::PER_THREAD.0
            && let Err(error) = self.device.capture_frontier(handle)
            && matches!(error.code, code::INVALID_HANDLE | code::INVALID_VALUE)
        {
            self.device.take_back(handle);
            let text = format!(
                "{raw:#x} is no stream of this allocator's device: was it destroyed, or is it another device's?"
            );
            return Err(Failure::argument(text));
        }
        let stream = self.allocator.register_stream(handle);
        // One number for every thread's own stream: each is looked up.
        if handle != StreamHandle::PER_THREAD {
            self.streams.write().insert(raw, stream.clone());
        }
        Ok(stream)
    }

    /// Streams that were named here, but for threads' own.
    pub(crate) fn seen(&self) -> BTreeSet<u64> {
        self.streams.read().keys().copied().collect()
    }

    pub(crate) fn count_scopes(&self, open: usize) {
        self.open_scopes.store(open, Ordering::Release);
    }

    fn choice(pool: Option<PoolId>) -> PoolChoice {
        pool.map_or(PoolChoice::New, PoolChoice::Shared)
    }
}

impl<D: Border> Instance for Of<D> {
    unsafe fn alloc(&self, bytes: u64, stream: u64) -> Result<Address, Failure> {
        if bytes == 0 {
            return Ok(Address::NULL);
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { self.stream(stream)? };
        let block = match self.open_scopes.load(Ordering::Acquire) {
            0 => self.allocator.alloc(bytes, &stream)?,
            _ => self.alloc_in_scopes(bytes, &stream)?,
        };
        let address = block.address();
        let stale = self.blocks.shard(address).lock().insert(address.0, block);
        debug_assert!(stale.is_none(), "{address} was live and was handed out again");
        Ok(address)
    }

    fn free(&self, address: Address) -> Result<(), Failure> {
        if address.is_null() {
            return Ok(());
        }
        let taken = self.blocks.shard(address).lock().remove(&address.0);
        // Freed outside the shard's lock.
        taken.map(drop).ok_or_else(|| FreeError::NotLive { address }.into())
    }

    unsafe fn record_stream(&self, address: Address, stream: u64) -> Result<(), Failure> {
        if address.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { self.stream(stream)? };
        Ok(self.blocks.with(address, |block| block.record_stream(&stream))??)
    }

    fn block_bytes(&self, address: Address) -> Result<u64, Failure> {
        self.blocks.with(address, Allocation::size)
    }

    fn base_allocation(&self, address: Address) -> Result<(Address, u64), Failure> {
        self.allocator.base_allocation(address).ok_or_else(|| FreeError::NotLive { address }.into())
    }

    unsafe fn retire_stream(&self, stream: u64) -> Result<(), Failure> {
        // One that was never named here has nothing to settle.
        if stream != StreamHandle::PER_THREAD.0 && !self.streams.read().contains_key(&stream) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let registered = unsafe { self.stream(stream)? };
        self.allocator.retire_stream(&registered)?;
        self.streams.write().remove(&stream);
        self.device.take_back(registered.handle());
        Ok(())
    }

    fn close(&self) {
        for shard in &self.blocks.0 {
            // Freed outside the shard's lock.
            let blocks = std::mem::take(&mut *shard.lock());
            drop(blocks);
        }
        self.close_all_scopes();
    }

    fn empty_cache(&self) -> Result<u64, Failure> {
        Ok(self.allocator.empty_cache()?.released_bytes)
    }

    fn trim(&self) -> Result<u64, Failure> {
        Ok(self.allocator.trim()?.released_bytes)
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), Failure> {
        Ok(self.allocator.set_memory_fraction(fraction)?)
    }

    fn set_memory_limit(&self, bytes: Option<u64>) {
        self.allocator.set_memory_limit(bytes);
    }

    fn available(&self) -> Result<u64, Failure> {
        Ok(self.allocator.available()?)
    }

    fn pool_create(&self, pool: PoolId) -> Result<(), Failure> {
        Ok(self.allocator.create_pool(pool)?)
    }

    fn pool_whole_segments(&self, pool: PoolId) -> Result<(), Failure> {
        Ok(self.allocator.set_whole_segments(pool)?)
    }

    fn pool_begin(&self, pool: PoolId, test: StreamTest) -> Result<(), Failure> {
        self.open_scope(pool, test)
    }

    fn pool_end(&self, pool: PoolId) -> Result<(), Failure> {
        self.close_scope(pool)
    }

    fn pool_release(&self, pool: PoolId) -> Result<(), Failure> {
        self.give_up(pool)
    }

    fn pool_bytes(&self, pool: PoolId) -> Result<(i64, i64), Failure> {
        let stats = self.allocator.pool_stats(pool)?;
        Ok((stats.reserved_bytes.all.current, stats.allocated_bytes.all.current))
    }

    unsafe fn begin_capture(
        self: Arc<Self>,
        stream: u64,
        pool: Option<PoolId>,
        mode: CaptureMode,
    ) -> Result<Box<dyn OpenCapture>, Failure> {
        // SAFETY: the caller's promise.
        let stream = unsafe { self.stream(stream)? };
        let mut options = CaptureOptions::new().with_mode(mode);
        options.pool = Self::choice(pool);
        let capture = self.captures.begin(&stream, options)?;
        Ok(Box::new(Begun { capture, owner: self }))
    }

    unsafe fn adopt_capture(
        self: Arc<Self>,
        stream: u64,
        pool: Option<PoolId>,
    ) -> Result<Box<dyn AdoptedCapture>, Failure> {
        // SAFETY: the caller's promise.
        let stream = unsafe { self.stream(stream)? };
        let adopted = self.captures.adopt(&stream, Self::choice(pool))?;
        Ok(Box::new(Foreign { adopted, owner: self }))
    }

    fn stats(&self) -> Vec<(String, i64)> {
        self.allocator.stats().flat()
    }

    fn reset_peaks(&self) {
        self.allocator.reset_peak_stats();
    }

    fn reset_accumulated(&self) {
        self.allocator.reset_accumulated_stats();
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot::of(&self.allocator.state(), self.allocator.config().pytorch_options())
    }

    fn stream_create(&self) -> Result<u64, Failure> {
        let stream = self.device.stream_create(StreamKind::NonBlocking)?.0;
        // SAFETY: it was made just now, and whoever destroys it does so by the function below.
        unsafe { self.stream(stream)? };
        Ok(stream)
    }

    unsafe fn stream_destroy(&self, stream: u64) -> Result<(), Failure> {
        // SAFETY: the caller's promise.
        let registered = unsafe { self.stream(stream)? };
        self.allocator.retire_stream(&registered)?;
        self.streams.write().remove(&stream);
        Ok(self.device.stream_destroy(registered.handle())?)
    }

    unsafe fn stream_synchronize(&self, stream: u64) -> Result<(), Failure> {
        // SAFETY: the caller's promise.
        let handle = unsafe { self.device.lend(stream) };
        Ok(self.device.stream_synchronize(handle)?)
    }

    unsafe fn launch(&self, stream: u64, kernel: Kernel) -> Result<(), Failure> {
        // SAFETY: the caller's promise.
        let handle = unsafe { self.device.lend(stream) };
        Ok(self.device.launch(handle, kernel)?)
    }

    unsafe fn read(&self, stream: u64, from: Address, into: &mut [u8]) -> Result<(), Failure> {
        // SAFETY: the caller's promise.
        let handle = unsafe { self.device.lend(stream) };
        Ok(self.device.read(handle, from, into)?)
    }
}

struct Begun<D: Border> {
    capture: Capture<D>,
    owner: Arc<Of<D>>,
}

impl<D: Border> OpenCapture for Begun<D> {
    fn pool(&self) -> PoolId {
        self.capture.pool()
    }

    fn end(self: Box<Self>) -> Result<Arc<dyn Graph>, Failure> {
        let Self { capture, owner } = *self;
        Ok(Arc::new(Captured { graph: capture.end()?, owner }))
    }
}

struct Foreign<D: Border> {
    adopted: Adopted<D>,
    owner: Arc<Of<D>>,
}

impl<D: Border> AdoptedCapture for Foreign<D> {
    fn pool(&self) -> PoolId {
        self.adopted.pool()
    }

    fn finish(self: Box<Self>) -> Hold {
        let Self { adopted, owner } = *self;
        Hold { _pools: adopted.finish(), _owner: owner }
    }
}

struct Captured<D: Border> {
    graph: gpupool::graphs::Graph<D>,
    owner: Arc<Of<D>>,
}

impl<D: Border> Graph for Captured<D> {
    fn pool(&self) -> PoolId {
        self.graph.pool()
    }

    fn nodes(&self) -> (usize, usize) {
        let report = self.graph.report();
        (report.node_count(), report.memory_nodes)
    }

    fn instantiate(&self) -> Result<Arc<dyn Executable>, Failure> {
        let exec = self.graph.instantiate(InstantiateFlags::default())?;
        Ok(Arc::new(Ready { exec, owner: Arc::clone(&self.owner) }))
    }
}

struct Ready<D: Border> {
    exec: gpupool::graphs::Executable<D>,
    owner: Arc<Of<D>>,
}

impl<D: Border> Executable for Ready<D> {
    unsafe fn launch(&self, stream: u64) -> Result<(), Failure> {
        // SAFETY: the caller's promise.
        let stream = unsafe { self.owner.stream(stream)? };
        self.exec.launch(&stream)?;
        Ok(())
    }
}
