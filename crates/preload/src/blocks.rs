//! Requests and frees as the program makes them, served from our allocator. What is not ours is said to be so, and forwarded.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gpupool::device::{Address, DriverError, StreamHandle, code};
use gpupool::{AllocError, Allocation, Allocator, CaptureRegistry, Config, Stream};
use parking_lot::{Mutex, RwLock};

use crate::front::Front;
use crate::graphs::Graphs;
use crate::leaving::Leaving;

/// How a driver's entry point answers; `Forward` lets the driver do it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// With this code; 0 is success.
    Code(u32),
    /// As the driver does.
    Forward,
}

type Shard<D> = Mutex<HashMap<Address, Allocation<D>>>;

/// One context's memory.
pub(crate) struct Served<D: Front> {
    pub(crate) device: Arc<D>,
    pub(crate) allocator: Allocator<D>,
    shards: [Shard<D>; 16],
    /// What requests that name no stream are served on: never submitted to, so its free memory is in nobody's use (L1).
    no_stream: Mutex<Option<Stream<D>>>,
    /// Streams that the program has made or named, but for threads' own.
    seen: Mutex<BTreeSet<u64>>,
    /// Those that it has named.
    named: RwLock<HashMap<u64, Stream<D>>>,
    /// Whether some thread has used its own default stream.
    own_streams: AtomicBool,
    pub(crate) leaving: Arc<Leaving<D>>,
    pub(crate) graphs: Graphs<D>,
    served: AtomicU64,
    foreign: AtomicU64,
}

impl<D: Front> Served<D> {
    /// `captures` is shared by the devices of the process.
    pub(crate) fn new(
        device: Arc<D>,
        config: Config,
        captures: Arc<CaptureRegistry>,
        one_graph_pool: bool,
    ) -> Result<Self, AllocError> {
        let allocator = Allocator::with_registry(Arc::clone(&device), config, captures)?;
        let leaving = Arc::new(Leaving::new(Arc::clone(&device)));
        let queue = Arc::clone(&leaving);
        allocator.add_janitor(Arc::new(move |wait| queue.tidy(wait)));
        Ok(Self {
            device,
            allocator,
            shards: std::array::from_fn(|_| Mutex::new(HashMap::new())),
            no_stream: Mutex::new(None),
            seen: Mutex::new(BTreeSet::from([StreamHandle::LEGACY.0])),
            named: RwLock::default(),
            own_streams: AtomicBool::new(false),
            leaving,
            graphs: Graphs::new(one_graph_pool),
            served: AtomicU64::new(0),
            foreign: AtomicU64::new(0),
        })
    }

    fn shard(&self, address: Address) -> &Shard<D> {
        let hash = (address.0 / 512).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60;
        &self.shards[hash as usize]
    }

    /// # Safety
    ///
    /// As [`Front::lend`].
    pub(crate) unsafe fn stream(&self, raw: u64) -> Stream<D> {
        if let Some(known) = self.named.read().get(&raw) {
            return known.clone();
        }
        // SAFETY: the caller's promise.
        let handle = unsafe { self.device.lend(raw) };
        let stream = self.allocator.register_stream(handle);
        match handle {
            // One number for every thread's own stream: each is looked up.
            StreamHandle::PER_THREAD => self.own_streams.store(true, Ordering::Release),
            _ => {
                self.seen.lock().insert(raw);
                self.named.write().insert(raw, stream.clone());
            }
        }
        stream
    }

    /// Streams that events can be recorded on from any thread; `None` if that leaves some out.
    fn streams(&self) -> Option<BTreeSet<u64>> {
        let all = !self.own_streams.load(Ordering::Acquire);
        all.then(|| self.seen.lock().clone())
    }

    fn serve(&self, bytes: u64, stream: &Stream<D>) -> Result<Address, Answer> {
        if bytes == 0 {
            return Err(Answer::Code(code::INVALID_VALUE));
        }
        let block = self.allocator.alloc(bytes, stream).map_err(|e| match e {
            AllocError::OutOfMemory(_) | AllocError::Rejected { .. } | AllocError::AbsurdSize { .. } => {
                Answer::Code(code::OUT_OF_MEMORY)
            }
            // A capture whose begin was not seen: the driver's own memory nodes are what the program would have had.
            AllocError::UnknownCapture { .. } => Answer::Forward,
            AllocError::InvalidatedCapture { .. } => Answer::Code(code::CAPTURE_INVALIDATED),
            AllocError::Driver(DriverError { code, .. }) => Answer::Code(code),
            _ => Answer::Forward,
        })?;
        let address = block.address();
        self.shard(address).lock().insert(address, block);
        self.served.fetch_add(1, Ordering::Relaxed);
        Ok(address)
    }

    /// `cuMemAllocAsync`.
    ///
    /// # Safety
    ///
    /// As [`Front::lend`].
    pub(crate) unsafe fn alloc_on(&self, bytes: u64, stream: u64) -> Result<Address, Answer> {
        // SAFETY: the caller's promise.
        let stream = unsafe { self.stream(stream) };
        self.serve(bytes, &stream)
    }

    /// `cuMemAlloc`: memory that any stream may use at once.
    pub(crate) fn alloc(&self, bytes: u64) -> Result<Address, Answer> {
        self.leaving.tidy(false);
        let known = self.no_stream.lock().clone();
        let stream = match known {
            Some(stream) => stream,
            None => {
                let made = self.device.private_stream().map_err(|_| Answer::Forward)?;
                // Two threads may make one at once: then there are two, and one is not used again.
                self.no_stream.lock().get_or_insert(self.allocator.register_stream(made)).clone()
            }
        };
        self.serve(bytes, &stream)
    }

    /// Whether a live block of ours starts here.
    pub(crate) fn owns(&self, address: Address) -> bool {
        self.shard(address).lock().contains_key(&address)
    }

    /// Whether the program has made or named this stream here.
    pub(crate) fn knows_stream(&self, raw: u64) -> bool {
        self.named.read().contains_key(&raw) || self.seen.lock().contains(&raw)
    }

    fn take(&self, address: Address) -> Option<Allocation<D>> {
        self.shard(address).lock().remove(&address)
    }

    /// A pointer that nobody got here was freed.
    pub(crate) fn foreign_free(&self) {
        self.foreign.fetch_add(1, Ordering::Relaxed);
    }

    /// `cuMemFreeAsync`: free in the order of a stream, the block's own or another.
    ///
    /// # Safety
    ///
    /// As [`Front::lend`].
    pub(crate) unsafe fn free_on(&self, address: Address, stream: u64) -> Answer {
        let Some(block) = self.take(address) else { return Answer::Forward };
        // SAFETY: the caller's promise.
        let stream = unsafe { self.stream(stream) };
        if let Err(error) = block.record_stream(&stream) {
            // The block is the allocator's own, and live: this does not happen. It must not be reused too early all the same.
            say!("gpupool: {error}");
            self.leaving.after_all_work(Box::new(block), self.streams());
        }
        Answer::Code(0)
    }

    /// `cuMemFree`: names no stream. Nobody waits for the device here; the block does (L1).
    pub(crate) fn free(&self, address: Address) -> Answer {
        let Some(block) = self.take(address) else { return Answer::Forward };
        self.leaving.after_all_work(Box::new(block), self.streams());
        self.leaving.tidy(false);
        Answer::Code(0)
    }

    /// `cuStreamCreate`: after it. Work may be submitted there that names no block of ours.
    ///
    /// # Safety
    ///
    /// As [`Front::lend`].
    pub(crate) unsafe fn stream_begins(&self, raw: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.device.lend(raw) };
        self.seen.lock().insert(raw);
    }

    /// `cuStreamDestroy`: before it.
    ///
    /// # Safety
    ///
    /// As [`Front::lend`]; the stream is destroyed right after.
    pub(crate) unsafe fn stream_ends(&self, raw: u64) {
        if !self.knows_stream(raw) {
            return;
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { self.stream(raw) };
        if let Err(error) = self.allocator.retire_stream(&stream) {
            say!("gpupool: a stream that is destroyed could not be retired: {error}");
        }
        self.named.write().remove(&raw);
        self.seen.lock().remove(&raw);
        self.device.take_back(stream.handle());
    }

    /// The context is about to be destroyed with everything in it: gives all memory back, as the driver does with its own. **Waits** for the
    /// device, as the driver does. Addresses that the program still has name nothing any more.
    pub(crate) fn ends(&self) {
        if let Err(error) = self.device.wait_for_all() {
            say!("gpupool: a context ends, and its work could not be waited for: {error}");
        }
        for session in self.graphs.all_end() {
            drop(self.allocator.capture_registry().close(session));
        }
        for shard in &self.shards {
            let gone = std::mem::take(&mut *shard.lock());
            drop(gone);
        }
        self.leaving.all_end();
        if let Err(error) = self.allocator.empty_cache() {
            say!("gpupool: a context ends, and some of its memory could not be given back: {error}");
        }
    }

    /// Free bytes as the program should see them: the driver's, and what is cached here.
    pub(crate) fn available(&self) -> Option<u64> {
        self.allocator.available().ok()
    }

    /// Requests served, and frees of pointers that are not ours.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.served.load(Ordering::Relaxed), self.foreign.load(Ordering::Relaxed))
    }
}
