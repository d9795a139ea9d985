//! What the graph tests share: an allocator with its captures on a simulated device, blocks that tell the device who owns them, the
//! schedules that every experiment runs under, and a device that stops where a test wants to look in.
//!
//! Who owns a byte is told by *party*: a program that hands its memory to nobody else, such as one graph, or the eager code. Work on
//! blocks of one party is submitted in its name, so an access to a byte that meanwhile went to another party is found.

// As in tests: a panic is the report.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod hooked;

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_allocator::{AllocError, Allocation, Allocator, CaptureRegistry, Config, Policy, Stream};
use gpupool_device::{Address, Call, Device, Kernel, StreamKind, Workbench};
use gpupool_graph_capture::{Capture, CaptureOptions, Captures, Executable, Graph};
use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};

pub use hooked::{Hooked, Moment};

/// A kibibyte.
pub const KIB: u64 = 1 << 10;
/// A mebibyte.
pub const MIB: u64 = 1 << 20;
/// The party of work outside graphs.
pub const EAGER: u64 = 1;

/// One schedule, and a seed for what the program itself draws.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Who runs next.
    pub scheduler: Scheduler,
    /// For the program's own draws.
    pub seed: u64,
}

/// In order and adversarially for some seeds of the program, and at random for all of them.
pub fn schedules(seeds: u64) -> impl Iterator<Item = Schedule> {
    let fixed = [Scheduler::InOrder, Scheduler::Adversarial];
    let fixed =
        fixed.into_iter().flat_map(move |s| (0..seeds.min(24)).map(move |seed| Schedule { scheduler: s, seed }));
    fixed.chain((0..seeds).map(|seed| Schedule { scheduler: Scheduler::Random { seed }, seed }))
}

/// Names the schedule that a test failed under.
pub struct Named(pub Schedule);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("under {:?}", self.0);
        }
    }
}

/// Runs an experiment under every schedule.
pub fn under_every_schedule(seeds: u64, experiment: impl Fn(Schedule)) {
    for schedule in schedules(seeds) {
        let _named = Named(schedule);
        experiment(schedule);
    }
}

/// Draws that depend on a seed only (SplitMix64).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Equal seeds draw equally.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x5EED)
    }

    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n.max(1)
    }

    /// One of a few.
    pub fn one_of<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        let at = self.below(of.len() as u64) as usize;
        &of[at]
    }

    /// In another order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in (1..list.len()).rev() {
            let with = self.below(at as u64 + 1) as usize;
            list.swap(at, with);
        }
    }
}

/// Every order of `n` things.
#[must_use]
pub fn permutations(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let shorter = permutations(n - 1);
    (0..n).flat_map(|at| shorter.iter().map(move |p| [&p[..at], &[n - 1], &p[at..]].concat())).collect()
}

/// A block whose bytes belong to a party until it is dropped.
pub struct Block {
    device: Arc<SimDevice>,
    allocation: Option<Allocation<SimDevice>>,
    party: u64,
}

impl Block {
    /// Where it starts.
    #[must_use]
    pub fn address(&self) -> Address {
        self.allocation().address()
    }

    /// Bytes that were asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.allocation().requested()
    }

    /// Whose it is.
    #[must_use]
    pub fn party(&self) -> u64 {
        self.party
    }

    /// The allocator's handle.
    pub fn allocation(&self) -> &Allocation<SimDevice> {
        self.allocation.as_ref().unwrap()
    }

    /// The allocator's handle, for a new owner; the bytes still belong to the party.
    pub fn into_allocation(mut self) -> Allocation<SimDevice> {
        self.allocation.take().unwrap()
    }

    /// Says that `stream` uses the block too.
    pub fn record(&self, stream: &Stream<SimDevice>) {
        self.allocation().record_stream(stream).unwrap();
    }

    /// Frees the block in the order of another stream.
    pub fn free_on(self, stream: &Stream<SimDevice>) {
        self.record(stream);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(allocation) = self.allocation.take() {
            self.device.disown(allocation.address(), allocation.size());
            drop(allocation);
        }
    }
}

/// An allocator and its captures on a simulated device with its race detector on.
pub struct Lab {
    /// The device.
    pub device: Arc<SimDevice>,
    /// Its allocator.
    pub allocator: Allocator<SimDevice>,
    /// Its captures.
    pub captures: Captures<SimDevice>,
}

impl Lab {
    /// Policy `segments` on a device with this scheduler.
    #[must_use]
    pub fn new(scheduler: Scheduler) -> Self {
        Self::with(SimConfig::default().with_scheduler(scheduler), Config::new(Policy::Segments))
    }

    /// On a device with so many bytes.
    #[must_use]
    pub fn of_bytes(bytes: u64) -> Self {
        Self::with(SimConfig::default().with_capacity(bytes), Config::new(Policy::Segments))
    }

    /// With these configurations.
    #[must_use]
    pub fn with(sim: SimConfig, config: Config) -> Self {
        Self::on(Arc::new(SimDevice::new(sim)), config, Arc::default())
    }

    /// On this device, with this registry of captures.
    #[must_use]
    pub fn on(device: Arc<SimDevice>, config: Config, registry: Arc<CaptureRegistry>) -> Self {
        let allocator = Allocator::with_registry(Arc::clone(&device), config, registry).unwrap();
        let captures = Captures::new(&allocator);
        Self { device, allocator, captures }
    }

    /// A new stream.
    #[must_use]
    pub fn stream(&self) -> Stream<SimDevice> {
        self.allocator.register_stream(self.device.stream_create(StreamKind::NonBlocking).unwrap())
    }

    /// A block of a party.
    ///
    /// # Errors
    ///
    /// The allocator's.
    pub fn try_block(&self, party: u64, bytes: u64, stream: &Stream<SimDevice>) -> Result<Block, AllocError> {
        let allocation = self.allocator.alloc(bytes, stream)?;
        self.device.own(allocation.address(), allocation.size(), party, stream.handle());
        Ok(Block { device: Arc::clone(&self.device), allocation: Some(allocation), party })
    }

    /// A block of a party.
    #[must_use]
    pub fn block(&self, party: u64, bytes: u64, stream: &Stream<SimDevice>) -> Block {
        self.try_block(party, bytes, stream).unwrap()
    }

    /// Begins a capture.
    pub fn begin(&self, stream: &Stream<SimDevice>, options: CaptureOptions) -> Capture<SimDevice> {
        self.captures.begin(stream, options).unwrap()
    }

    /// Captures what `body` does, and makes it executable.
    pub fn capture<T>(
        &self,
        stream: &Stream<SimDevice>,
        options: CaptureOptions,
        body: impl FnOnce() -> T,
    ) -> (Graph<SimDevice>, Executable<SimDevice>, T) {
        let capture = self.begin(stream, options);
        let value = body();
        let graph = capture.end().unwrap();
        let exec = graph.instantiate(Default::default()).unwrap();
        (graph, exec, value)
    }

    /// Sets every word of a block.
    pub fn fill(&self, stream: &Stream<SimDevice>, dst: &Block, value: u32) {
        let kernel = Kernel::Fill { dst: dst.address(), bytes: dst.bytes(), value };
        self.device.launch_as(stream.handle(), kernel, dst.party).unwrap();
    }

    /// Adds to every word of a block.
    pub fn add(&self, stream: &Stream<SimDevice>, dst: &Block, value: u32) {
        let kernel = Kernel::Add { dst: dst.address(), bytes: dst.bytes(), value };
        self.device.launch_as(stream.handle(), kernel, dst.party).unwrap();
    }

    /// Copies as much as both hold. In the name of their party, if it is one.
    pub fn copy(&self, stream: &Stream<SimDevice>, dst: &Block, src: &Block) {
        let kernel = Kernel::Copy { dst: dst.address(), src: src.address(), bytes: dst.bytes().min(src.bytes()) };
        match dst.party == src.party {
            true => self.device.launch_as(stream.handle(), kernel, dst.party).unwrap(),
            false => self.device.launch(stream.handle(), kernel).unwrap(),
        }
    }

    /// What `then` does from now on comes after what `first` was given so far. In a capture `then` joins it.
    pub fn order(&self, first: &Stream<SimDevice>, then: &Stream<SimDevice>) {
        let event = self.device.event_create().unwrap();
        self.device.event_record(event, first.handle()).unwrap();
        self.device.stream_wait_event(then.handle(), event).unwrap();
        self.device.event_destroy(event).unwrap();
    }

    /// Waits for a stream.
    pub fn wait(&self, stream: &Stream<SimDevice>) {
        self.device.stream_synchronize(stream.handle()).unwrap();
    }

    /// The word that every word of the range is now, as far as its ends and its middle tell; `None` if they differ.
    #[must_use]
    pub fn word_at(&self, address: Address, bytes: u64) -> Option<u32> {
        let window = bytes.min(1024);
        let starts = [0, (bytes - window) / 2 / 4 * 4, bytes - window];
        let read = |start| self.device.read_bytes(address.offset(start), window).unwrap();
        let found: Vec<u8> = starts.into_iter().flat_map(read).collect();
        let first: [u8; 4] = found[..4].try_into().unwrap();
        found.chunks_exact(4).all(|word| word == first).then(|| u32::from_le_bytes(first))
    }

    /// The word that every word of a block is now; `None` if they differ.
    #[must_use]
    pub fn word(&self, block: &Block) -> Option<u32> {
        self.word_at(block.address(), block.bytes())
    }

    /// Nothing was found, and every invariant holds.
    pub fn assert_clean(&self) {
        let reports = self.device.reports();
        assert!(reports.is_empty(), "{}", reports[0]);
        self.allocator.validate().unwrap();
    }

    /// Bytes in segments.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.allocator.stats().reserved_bytes.all.current as u64
    }

    /// Bytes in the segments of a pool.
    #[must_use]
    pub fn pool_bytes(&self, pool: gpupool_allocator::PoolId) -> u64 {
        self.allocator.pool_stats(pool).unwrap().reserved_bytes.all.current as u64
    }

    /// How often each call was made while `work` ran.
    pub fn calls_of<T>(&self, work: impl FnOnce() -> T) -> (BTreeMap<Call, u64>, T) {
        let before = self.device.call_counts();
        let value = work();
        (calls_since(&before, &self.device.call_counts()), value)
    }

    /// Everything else was dropped: empties the cache and sees that nothing is left, with the allocator and without.
    pub fn close(self) {
        self.allocator.empty_cache().unwrap();
        self.assert_clean();
        assert_eq!(self.reserved(), 0, "{:?}", self.allocator.state().segments);
        let device = Arc::clone(&self.device);
        drop(self);
        // Events stay in the cache as long as someone has a stream.
        assert_eq!((device.memory_in_use(), device.address_space_in_use()), (0, 0));
    }
}

/// The device holds no memory, no addresses and no events.
pub fn assert_nothing_left(device: &SimDevice) {
    assert_eq!((device.memory_in_use(), device.address_space_in_use(), device.events_in_use()), (0, 0, 0));
    assert_eq!(device.reports(), []);
}

/// What was called between two counts.
#[must_use]
pub fn calls_since(before: &BTreeMap<Call, u64>, now: &BTreeMap<Call, u64>) -> BTreeMap<Call, u64> {
    let since = now.iter().map(|(call, n)| (*call, n - before.get(call).copied().unwrap_or(0)));
    since.filter(|(_, n)| *n > 0).collect()
}

/// A lab whose device keeps no contents and looks for no races: for what is counted only.
pub fn counting_lab() -> Lab {
    Lab::with(SimConfig::default().for_replay(), Config::new(Policy::Segments))
}

/// A graph that fills a block of the pool with `value`; the block is let go in the capture or kept.
pub fn filler(
    lab: &Lab,
    s: &Stream<SimDevice>,
    options: CaptureOptions,
    party: u64,
    value: u32,
) -> (Graph<SimDevice>, Executable<SimDevice>, Block) {
    lab.capture(s, options, || {
        let block = lab.block(party, 4 * KIB, s);
        lab.fill(s, &block, value);
        block
    })
}
