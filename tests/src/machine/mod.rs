//! A machine that does any operation of the allocator and checks everything after it, beside a model of its own.
//!
//! The model knows: the live blocks and whose they are; the pools, their users and the open scopes; which request must be a hit. The
//! watched device knows which work is ordered after which. After every operation, whether it succeeded or not:
//!
//! 1. blocks tile their segments, free ones are merged and found, and every counter equals a recount (design.md section 7, 1 and 2);
//! 2. no two live blocks overlap, and the allocator's list of live blocks is the model's (3, 6);
//! 3. a block's new owner comes after its last uses (3);
//! 4. under `segments` and `pages` a hit has made no driver call, nor has a free without recorded uses (7);
//! 5. what the device says is in use is what is reserved, and nothing was unmapped under work (catalogue 18);
//! 6. a request that failed for want of memory had none: what is pinned by live blocks leaves no room for it.

mod checks;
mod frees;
mod pools;
mod requests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpupool_allocator::config::VirtualMemory;
use gpupool_allocator::state::{BackingKind, BlockStatus, SegmentState, State};
use gpupool_allocator::{
    AllocError, Config, Filter, FreeError, OutOfMemory, Part, Policy, PoolCheckpoint, PoolError, PoolId, Stream,
    Trimmed,
};
use gpupool_device::{Address, Call, Device};
use gpupool_sim_device::SimConfig;

use crate::lab::{Block, Lab, MIB};
use crate::recount::{Strictness, adds_up};
use crate::watched::Watched;

/// Streams that a machine uses.
pub const STREAMS: u8 = 4;

/// What a scope claims.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// Everything.
    All,
    /// This thread.
    Thread,
    /// One stream.
    Stream(u8),
}

/// One operation. Numbers that name blocks, pools and checkpoints are taken modulo how many there are, so that an operation keeps its
/// meaning when others are left out.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Op {
    /// Requests bytes on a stream.
    Alloc(u8, u64),
    /// Requests bytes at a place inside a free block.
    AllocAt(u8, u64, u8, u8),
    /// Frees a block.
    Free(u8),
    /// Drops a block.
    Drop(u8),
    /// Frees a block in the order of a stream.
    FreeOn(u8, u8),
    /// Gives a block's handle up for its address, and takes it back.
    Raw(u8),
    /// Records a use.
    Record(u8, u8),
    /// Submits work on a block to a stream, recorded if it is not the block's own, that ends so many ticks later.
    Work(u8, u8, u8),
    /// So many ticks pass.
    Tick(u8),
    /// Empties the cache.
    EmptyCache,
    /// Empties the cache without waiting.
    Trim,
    /// Empties the cache of a pool.
    EmptyCacheOf(u8),
    /// Makes a pool.
    NewPool,
    /// Takes a pool once more.
    TakePool(u8),
    /// Releases a pool once, if it has a user that is no scope's.
    ReleasePool(u8),
    /// Opens a scope.
    Open(u8, Claim),
    /// Closes the newest scope of a pool, and releases its user.
    Close(u8),
    /// Requests of a pool take whole blocks from now on.
    NoSplit(u8),
    /// Whether a pool serves others when memory is short.
    UseOnOom(u8, bool),
    /// Limits segments to so many MiB.
    Limit(Option<u16>),
    /// Limits segments to so many hundredths of the device.
    Fraction(u8),
    /// Retires a stream; its handle is another stream's from then on.
    Retire(u8),
    /// Notes a pool's layout.
    Checkpoint(u8),
    /// Brings a noted layout back.
    Restore(u8, u8),
    /// Sets peaks to what is there.
    ResetPeaks,
    /// Sets cumulative figures to zero.
    ResetAccumulated,
    /// Asks how much could still be had, and takes it in one piece.
    TakeAll(u8),
}

/// A live block and what the model knows of it.
struct Live {
    block: Block,
    /// Which of the machine's streams it was requested on, and that stream's registration.
    stream: Stream<Watched>,
    /// Uses on other streams were recorded, or it is in another stream's segment: its free makes it pending.
    shared: bool,
}

/// Free blocks that a request may be served from.
#[derive(Default, Debug)]
struct Prediction {
    /// In bins, of exactly the size.
    binned: Vec<(Address, u64)>,
    /// In the index, of any size.
    indexed: Vec<(Address, u64)>,
    /// The size of the best fit in the index, if the split limit permits it.
    best: Option<u64>,
    /// Runs that are large enough once bins are emptied, if the split limit permits the best of them.
    merged: Option<Vec<(Address, u64)>>,
}

struct Pool {
    id: PoolId,
    /// Users that are no scope's.
    users: i64,
    no_split: bool,
    overflow: bool,
}

struct Scope {
    pool: PoolId,
    claim: Claim,
}

/// The machine.
pub struct Machine {
    /// The allocator and the device.
    pub lab: Lab,
    live: Vec<Live>,
    stale: Vec<Block>,
    pools: Vec<Pool>,
    scopes: Vec<Scope>,
    /// Ids that the allocator may have forgotten.
    checkpoints: Vec<PoolCheckpoint>,
    retired: Vec<Stream<Watched>>,
    accumulated: bool,
    /// The most seen after any operation, of the figures in `checks::peaks`.
    peaks: Vec<i64>,
    /// Torch 2.11 takes an open scope for a capture, and forgets uses recorded in it when it is closed: one of its faults.
    forgets_uses: bool,
    /// Something was handed out for a moment only, beside what is live before and after. The bit-exact policies count that, as PyTorch does.
    peaks_blurred: bool,
    strictness: Strictness,
    /// Faults are armed: driver errors are answers, and what they leave undone is looked at in the end only.
    faulty: bool,
    /// Requests that ended in out of memory.
    pub ooms: u64,
    /// Hits.
    pub hits: u64,
    /// Blocks handed out.
    pub handed: u64,
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

fn segment_of(state: &State, address: Address) -> Option<&SegmentState> {
    state.segments.iter().find(|s| s.address <= address && address.offset_from(s.address) < s.size)
}

impl Machine {
    /// A machine on a device of so many MiB.
    pub fn new(config: Config, mib: u64) -> Self {
        Self::on(config, SimConfig::default().with_capacity(mib * MIB))
    }

    /// A machine on any device.
    pub fn on(config: Config, sim: SimConfig) -> Self {
        let lab = Lab::on(config, sim);
        (1..=u64::from(STREAMS)).for_each(|n| drop(lab.stream(n)));
        Self {
            lab,
            live: Vec::new(),
            stale: Vec::new(),
            pools: Vec::new(),
            scopes: Vec::new(),
            checkpoints: Vec::new(),
            retired: Vec::new(),
            accumulated: true,
            peaks: Vec::new(),
            peaks_blurred: false,
            forgets_uses: false,
            strictness: Strictness::Exact,
            faulty: false,
            ooms: 0,
            hits: 0,
            handed: 0,
        }
    }

    /// From now on driver calls may fail.
    pub fn expect_faults(&mut self) {
        (self.faulty, self.strictness) = (true, Strictness::MayBeStranded);
    }

    fn config(&self) -> &Config {
        self.lab.allocator.config()
    }

    fn bit_exact(&self) -> bool {
        self.config().policy().is_bit_exact()
    }

    fn pages(&self) -> bool {
        self.config().policy() == Policy::Pages && self.config().virtual_memory() == VirtualMemory::WherePossible
    }

    /// Every block is the driver's own.
    fn ordered(&self) -> bool {
        self.config().policy() == Policy::StreamOrdered
    }

    fn stream(&self, number: u8) -> Stream<Watched> {
        self.lab.stream(u64::from(number % STREAMS) + 1)
    }

    fn pick(&self, which: u8) -> Option<usize> {
        (!self.live.is_empty()).then(|| usize::from(which) % self.live.len())
    }

    fn pool(&self, which: u8) -> Option<usize> {
        (!self.pools.is_empty()).then(|| usize::from(which) % self.pools.len())
    }

    /// Does one operation and checks everything.
    pub fn step(&mut self, op: &Op) -> Result<(), String> {
        self.apply(op).map_err(|e| format!("{op:?}: {e}"))?;
        self.check().map_err(|e| format!("after {op:?}: {e}"))
    }

    /// Does all of them, then ends.
    pub fn run(mut self, ops: &[Op], ending: Ending) -> Result<(), String> {
        for (i, op) in ops.iter().enumerate() {
            self.step(op).map_err(|e| format!("operation {i}: {e}"))?;
        }
        self.end(ending)
    }

    fn apply(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Alloc(stream, bytes) => self.alloc(stream, bytes),
            Op::AllocAt(stream, bytes, which, skip) => self.alloc_at(stream, bytes, which, skip),
            Op::Free(which) | Op::Drop(which) => {
                let Some(at) = self.pick(which) else { return Ok(()) };
                self.free(at, matches!(op, Op::Drop(_)))
            }
            Op::FreeOn(which, stream) => self.free_on(which, stream),
            Op::Raw(which) => self.raw(which),
            Op::Record(which, stream) => {
                let Some(at) = self.pick(which) else { return Ok(()) };
                self.record(at, &self.stream(stream))
            }
            Op::Work(which, stream, ticks) => {
                let Some(at) = self.pick(which) else { return Ok(()) };
                let stream = self.stream(stream);
                self.record(at, &stream)?;
                let (device, block) = (&self.lab.device, &self.live[at].block);
                device.work(stream.handle(), block.address(), block.size(), device.sim.tick() + u64::from(ticks % 8));
                Ok(())
            }
            Op::Tick(n) => {
                (0..=n % 8).for_each(|_| self.lab.finish());
                Ok(())
            }
            Op::EmptyCache => self.empty_cache(),
            Op::Trim => self.trim(),
            Op::EmptyCacheOf(which) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                let before = self.lab.allocator.stats().reserved_bytes.all.current;
                let result = self.lab.allocator.empty_cache_of(self.pools[at].id);
                self.released(before, result).map(|_| ())
            }
            Op::ResetPeaks => {
                self.lab.allocator.reset_peak_stats();
                self.peaks.clear();
                Ok(())
            }
            Op::ResetAccumulated => {
                self.lab.allocator.reset_accumulated_stats();
                self.accumulated = false;
                let stats = self.lab.allocator.stats();
                let all = [stats.allocation.all, stats.segment.all, stats.reserved_bytes.all, stats.active_bytes.all];
                ensure(all.iter().all(|s| (s.allocated, s.freed) == (0, 0)), || format!("{all:?} were reset"))
            }
            Op::Limit(mib) => {
                self.lab.allocator.set_memory_limit(mib.map(|n| u64::from(n) * MIB));
                Ok(())
            }
            Op::Fraction(hundredths) => {
                let fraction = f64::from(hundredths.min(100)) / 100.0;
                self.lab.allocator.set_memory_fraction(fraction).map_err(|e| e.to_string())
            }
            Op::Retire(stream) => self.retire(stream),
            Op::TakeAll(stream) => self.take_all(stream),
            _ => self.apply_to_pools(op),
        }
    }
}

/// In which order everything is given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ending {
    /// Draws the order of the blocks.
    pub order: u64,
    /// The allocator goes before the blocks.
    pub allocator_first: bool,
}
