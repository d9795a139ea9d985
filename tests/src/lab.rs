//! A lab bench: an allocator on a watched simulated device, in the notation of the fault catalogue. `A(s, n)` is
//! [`alloc`](Lab::alloc), `K*(s, x)` is [`run`](Lab::run), `K(s, x)` is [`ran`](Lab::ran); sizes are MiB.

use std::sync::Arc;

use gpupool_allocator::config::VirtualMemory;
use gpupool_allocator::state::BlockStatus;
use gpupool_allocator::{AllocError, Allocation, Allocator, Config, OutOfMemory, Policy, Preset, Stream};
use gpupool_device::{DriverError, StreamHandle};
use gpupool_sim_device::{SimConfig, SimDevice};

use crate::recount::{Strictness, recount};
use crate::watched::Watched;

/// A mebibyte.
pub const MIB: u64 = 1 << 20;

/// What is behind segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// One virtual-memory handle each.
    Virtual,
    /// Plain allocations.
    Plain,
}

/// Both, for tests that hold either way.
pub const BACKINGS: [Backing; 2] = [Backing::Virtual, Backing::Plain];

/// A block in a test's hands.
pub type Block = Allocation<Watched>;

/// The bench.
pub struct Lab {
    /// The device.
    pub device: Arc<Watched>,
    /// The allocator.
    pub allocator: Allocator<Watched>,
}

/// Policy `segments`, on segments of this kind.
pub fn segments(backing: Backing) -> Config {
    let config = Config::new(Policy::Segments);
    match backing {
        Backing::Virtual => config,
        Backing::Plain => config.with_virtual_memory(VirtualMemory::Never),
    }
}

/// Policy `pages` with a preset.
pub fn pages(preset: Preset) -> Config {
    Config::new(Policy::Pages).with_preset(preset)
}

impl Lab {
    /// Policy `segments` on a device of so many MiB.
    pub fn new(backing: Backing, mib: u64) -> Self {
        Self::with(segments(backing), mib)
    }

    /// Any configuration on a device of so many MiB.
    pub fn with(config: Config, mib: u64) -> Self {
        Self::on(config, SimConfig::default().with_capacity(mib * MIB))
    }

    /// Any configuration on any device.
    pub fn on(config: Config, sim: SimConfig) -> Self {
        let device = Arc::new(Watched::new(SimDevice::new(sim)));
        // A registry of its own: tests of one process do not see each other's captures.
        let allocator = Allocator::with_registry(Arc::clone(&device), config, Arc::default()).unwrap();
        Self { device, allocator }
    }

    /// A stream by number, from 1.
    pub fn stream(&self, number: u64) -> Stream<Watched> {
        let handle = Self::handle(number);
        self.device.adopt(handle);
        self.allocator.register_stream(handle)
    }

    /// The handle of a stream by number.
    pub fn handle(number: u64) -> StreamHandle {
        StreamHandle(0x1000 * number)
    }

    /// `A(s, n)`: n MiB, which must be there.
    pub fn alloc(&self, stream: u64, mib: u64) -> Block {
        match self.try_bytes(stream, mib * MIB) {
            Ok(block) => block,
            Err(e) => panic!("{mib} MiB on stream {stream}: {e}"),
        }
    }

    /// As [`alloc`](Self::alloc), in bytes and possibly without success. Whatever came before on the block comes before the stream's
    /// next work.
    pub fn try_bytes(&self, stream: u64, bytes: u64) -> Result<Block, AllocError> {
        let registered = self.stream(stream);
        let result = self.allocator.alloc(bytes, &registered);
        if let Ok(block) = &result
            && let Err(breach) = self.device.handed(registered.handle(), block.address(), block.size())
        {
            panic!("{breach}");
        }
        self.check();
        result
    }

    /// n MiB that must not be there.
    pub fn oom(&self, stream: u64, mib: u64) -> OutOfMemory {
        match self.try_bytes(stream, mib * MIB) {
            Err(AllocError::OutOfMemory(report)) => *report,
            other => panic!("{mib} MiB on stream {stream}: {other:?}"),
        }
    }

    /// `R(x, s)`.
    pub fn record(&self, block: &Block, stream: u64) {
        block.record_stream(&self.stream(stream)).unwrap();
    }

    /// `F(x)`.
    pub fn free(&self, block: Block) {
        block.free().unwrap();
        self.check();
    }

    /// `K*(s, x)`: work that uses the block and goes on until [`finish`](Self::finish), or until somebody waits for it.
    pub fn run(&self, stream: u64, block: &Block) {
        self.run_until(stream, block, self.device.sim.tick() + 1);
    }

    /// `K*(s, x)` that goes on until a tick.
    pub fn run_until(&self, stream: u64, block: &Block, tick: u64) {
        let handle = self.stream(stream).handle();
        self.device.work(handle, block.address(), block.size(), tick);
    }

    /// `K(s, x)`: work that uses the block and, on an idle stream, is over.
    pub fn ran(&self, stream: u64, block: &Block) {
        self.run_until(stream, block, self.device.sim.tick());
    }

    /// Time passes: work that was to go on until now is over.
    pub fn finish(&self) {
        self.device.sim.advance_tick();
    }

    /// Reserved MiB.
    pub fn reserved(&self) -> u64 {
        self.allocator.stats().reserved_bytes.all.current as u64 / MIB
    }

    /// The most that was ever reserved, in MiB.
    pub fn peak_reserved(&self) -> u64 {
        self.allocator.stats().reserved_bytes.all.peak as u64 / MIB
    }

    /// Live MiB.
    pub fn live(&self) -> u64 {
        self.allocator.stats().allocated_bytes.all.current as u64 / MIB
    }

    /// Freed and pending MiB.
    pub fn pending(&self) -> u64 {
        let stats = self.allocator.stats();
        (stats.active_bytes.all.current - stats.allocated_bytes.all.current) as u64 / MIB
    }

    /// Driver calls of any kind so far.
    pub fn calls(&self) -> u64 {
        self.device.sim.call_counts().values().sum()
    }

    /// What must hold at any quiet moment.
    pub fn check(&self) {
        if let Err(breach) = self.sound(Strictness::Exact) {
            panic!("{breach}");
        }
    }

    /// As [`check`](Self::check), with the first breach in words.
    pub fn sound(&self, strictness: Strictness) -> Result<(), String> {
        self.allocator.validate()?;
        let state = self.allocator.state();
        recount(&state, strictness)?;
        let in_use = self.device.sim.memory_in_use();
        let granularity = self.device.sim_granularity();
        let in_segments: u64 = state.segments.iter().map(|s| s.size.next_multiple_of(granularity)).sum();
        let reserved = state.stats.reserved_bytes.all.current as u64;
        // What the driver's own pool holds is its own business, but that blocks are in it.
        let pool = self.allocator.driver_pool_figures().map_err(|e| e.to_string())?;
        // Plain allocations take whole pages of the device.
        let expected = match pool {
            Some(figures) => figures.reserved,
            None if strictness == Strictness::Exact => in_segments,
            None => in_use.max(reserved),
        };
        if in_use != expected || (strictness == Strictness::MayBeStranded && in_use < reserved) {
            return Err(format!(
                "{in_use} bytes of the device are in use, and {reserved} reserved, {in_segments} in segments"
            ));
        }
        match self.device.breaches().first() {
            None => Ok(()),
            Some(breach) => Err(breach.clone()),
        }
    }

    /// The end of a test: the cache is emptied, and everything is back. The test has dropped its blocks.
    pub fn done(self) {
        self.allocator.empty_cache().unwrap();
        self.check();
        assert_eq!(self.reserved(), 0, "reserved after everything was dropped and the cache emptied");
        assert_eq!(self.device.sim.memory_in_use(), 0);
        assert_eq!(self.device.sim.address_space_in_use(), 0);
        let device = Arc::clone(&self.device);
        drop(self.allocator);
        assert_eq!(device.sim.events_in_use(), 0, "events that nobody destroyed");
        assert_eq!(device.breaches(), Vec::<String>::new());
    }

    /// The live blocks: address, bytes, requested.
    pub fn live_blocks(&self) -> Vec<(u64, u64, u64)> {
        let state = self.allocator.state();
        let blocks = state.segments.iter().flat_map(|s| &s.blocks);
        let live = blocks.filter(|b| b.status == BlockStatus::ActiveAllocated);
        live.map(|b| (b.address.0, b.size, b.requested)).collect()
    }
}

/// The driver's error in an allocator's, if it is one.
pub fn driver_error(error: &AllocError) -> Option<DriverError> {
    match error {
        AllocError::Driver(e) => Some(*e),
        _ => None,
    }
}
