//! A machine that does any operation of the allocator and checks everything after it, beside a model of its own.
//!
//! The model knows: the live blocks and whose they are; the pools, their users and the open scopes; which request must be a hit. The
//! watched device knows which work is ordered after which. After every operation, whether it succeeded or not:
//!
//! 1. blocks tile their segments, free ones are merged and found, and every counter equals a recount (design.md section 7, 1 and 2);
//! 2. no two live blocks overlap, and the allocator's list of live blocks is the model's (3, 6);
//! 3. a block's new owner comes after its last uses (3);
//! 4. under `segments` a hit has made no driver call, nor has a free without recorded uses (7);
//! 5. what the device says is in use is what is reserved, and nothing was unmapped under work (catalogue 18);
//! 6. a request that failed for want of memory had none: what is pinned by live blocks leaves no room for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpupool_allocator::state::{BlockStatus, SegmentState, State};
use gpupool_allocator::{
    AllocError, Config, Filter, FreeError, OutOfMemory, Part, Policy, PoolCheckpoint, PoolError, PoolId, Stream,
    Trimmed,
};
use gpupool_device::{Address, Call, Device};
use gpupool_sim_device::SimConfig;

use crate::lab::{Block, Lab, MIB};
use crate::recount::{Strictness, adds_up};
use crate::watched::Watched;

/// Whether peaks of arenas that are gone are still lost under `segments`. Delete it, and what asks for it, with that fault.
const FORGETS_PEAKS: bool = true;

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
    peak_allocated: u64,
    /// Torch 2.11 takes an open scope for a capture, and forgets uses recorded in it when it is closed: one of its faults.
    forgets_uses: bool,
    /// Something was handed out for a moment only, beside what is live before and after.
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
            peak_allocated: 0,
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
                self.peak_allocated = self.lab.allocator.stats().allocated_bytes.all.current as u64;
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

    fn apply_to_pools(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::NewPool => {
                let id = PoolId::fresh();
                self.lab.allocator.create_pool(id).map_err(|e| e.to_string())?;
                self.pools.push(Pool { id, users: 1, no_split: false, overflow: false });
                Ok(())
            }
            Op::TakePool(which) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                let (id, had) = (self.pools[at].id, self.users(self.pools[at].id));
                match self.lab.allocator.create_pool(id) {
                    Ok(()) => self.pools[at].users += 1,
                    // Without users it may have been forgotten, or may not be revived.
                    Err(AllocError::Pool(PoolError::Released { .. })) if had == 0 => {}
                    Err(e) => return Err(e.to_string()),
                }
                Ok(())
            }
            Op::ReleasePool(which) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                self.release_pool(at)
            }
            Op::Open(which, claim) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                self.open(at, claim)
            }
            Op::Close(which) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                let id = self.pools[at].id;
                let last = self.scopes.iter().rposition(|s| s.pool == id);
                match (last, self.lab.allocator.end_allocate_to_pool(id)) {
                    (Some(last), Ok(())) => {
                        self.scopes.remove(last);
                        self.lab.allocator.release_pool(id).map_err(|e| e.to_string())
                    }
                    (None, Err(AllocError::Pool(PoolError::NotRecording { .. }))) => Ok(()),
                    (last, result) => Err(format!("{result:?} with scope {last:?}")),
                }
            }
            Op::NoSplit(which) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                self.pools[at].no_split = true;
                self.lab.allocator.set_no_split(self.pools[at].id);
                Ok(())
            }
            Op::UseOnOom(which, on) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                self.pools[at].overflow = on;
                self.lab.allocator.set_use_on_oom(self.pools[at].id, on);
                Ok(())
            }
            Op::Checkpoint(which) => self.checkpoint(which),
            Op::Restore(which, stream) => self.restore(which, stream),
            _ => Err("no such operation".to_owned()),
        }
    }

    // Requests.

    fn driver_calls(&self) -> u64 {
        self.lab.calls()
    }

    /// The pool that a request on a stream goes to.
    fn expected_pool(&self, stream: u8) -> PoolId {
        let claims = |scope: &&Scope| match scope.claim {
            Claim::All | Claim::Thread => true,
            Claim::Stream(number) => number % STREAMS == stream % STREAMS,
        };
        self.scopes.iter().rev().find(claims).map_or(PoolId::DEFAULT, |s| s.pool)
    }

    fn alloc(&mut self, number: u8, bytes: u64) -> Result<(), String> {
        let (stream, pool) = (self.stream(number), self.expected_pool(number));
        let before = self.lab.allocator.state();
        let hit = self.predict(&before, bytes, &stream, pool);
        let calls = self.driver_calls();
        match self.lab.allocator.alloc(bytes, &stream) {
            Ok(block) if bytes == 0 => {
                ensure(block.address().is_null() && self.driver_calls() == calls, || format!("{block:?} for 0 bytes"))
            }
            Ok(block) => {
                let unasked = self.driver_calls() == calls;
                self.hits += u64::from(unasked);
                if let Some(hit) = &hit {
                    ensure(self.bit_exact() || unasked, || {
                        let made = self.driver_calls() - calls;
                        format!("{made} driver calls for {bytes} bytes, which {hit:?} could serve")
                    })?;
                    self.best_fit(&before, &block, hit)?;
                }
                self.admit(block, &stream, bytes, pool)
            }
            Err(error) => {
                ensure(hit.is_none() || self.faulty, || format!("{error}, with {hit:?} free"))?;
                self.refused(error, bytes, &stream, pool)
            }
        }
    }

    /// What a request can be served from without asking anybody, if anything: the free blocks of its stream in its part of its pool.
    fn predict(&self, state: &State, bytes: u64, stream: &Stream<Watched>, pool: PoolId) -> Option<Prediction> {
        if bytes == 0 {
            return None;
        }
        let size = self.config().rounding().round(bytes);
        let part = if size <= MIB { Part::Small } else { Part::Large };
        let mut found = Prediction::default();
        let mut runs = Vec::new();
        for segment in state.segments.iter().filter(|s| s.pool == pool && s.part == part) {
            let mut run: Option<(Address, u64)> = None;
            for block in &segment.blocks {
                if block.status != BlockStatus::Inactive || block.stream != stream.id() {
                    runs.extend(run.take());
                    continue;
                }
                match &mut run {
                    Some((_, length)) => *length += block.size,
                    None => run = Some((block.address, block.size)),
                }
                if !block.binned {
                    found.indexed.push((block.address, block.size));
                } else if block.size == size {
                    found.binned.push((block.address, block.size));
                }
            }
            runs.extend(run);
        }
        let fits = |free: &[(Address, u64)]| {
            let best = free.iter().map(|(_, n)| *n).filter(|n| *n >= size).min();
            let limit = self.config().max_split_size().unwrap_or(u64::MAX);
            let slack = self.config().max_non_split_rounding();
            best.filter(|n| if size < limit { *n < limit } else { *n < size.saturating_add(slack) })
        };
        found.best = fits(&found.indexed);
        // What is in bins is merged before anybody is asked.
        found.merged = fits(&runs).map(|_| runs.iter().copied().filter(|(_, n)| *n >= size).collect());
        (!found.binned.is_empty() || found.best.is_some() || found.merged.is_some()).then_some(found)
    }

    /// A hit takes a block of exactly its size from a bin, else the smallest that is large enough.
    fn best_fit(&self, before: &State, block: &Block, free: &Prediction) -> Result<(), String> {
        let pending = before.stats.active.all.current != before.stats.allocation.all.current;
        if pending && self.bit_exact() {
            // PyTorch looks for completed events first, so there may be more than there was.
            return Ok(());
        }
        let at = block.address();
        if !free.binned.is_empty() {
            return ensure(free.binned.iter().any(|(a, _)| *a == at), || {
                format!("{block:?} was not taken from a bin: {free:?}")
            });
        }
        let candidates = match (free.best, &free.merged) {
            (Some(best), _) => free.indexed.iter().filter(|(_, n)| *n == best).copied().collect(),
            (None, Some(merged)) => {
                let best = merged.iter().map(|(_, n)| *n).min();
                merged.iter().filter(|(_, n)| Some(*n) == best).copied().collect()
            }
            (None, None) => Vec::new(),
        };
        ensure(candidates.iter().any(|(a, _)| *a == at), || {
            format!("{block:?} is none of the best fits {candidates:?}: {free:?}")
        })
    }

    /// A block was handed out.
    fn admit(&mut self, block: Block, stream: &Stream<Watched>, bytes: u64, pool: PoolId) -> Result<(), String> {
        self.handed += 1;
        let (start, end) = (block.address(), block.address().offset(block.size()));
        ensure(block.size() >= bytes && block.requested() == bytes, || format!("{block:?} for {bytes} bytes"))?;
        for other in &self.live {
            let (s, e) = (other.block.address(), other.block.address().offset(other.block.size()));
            ensure(end <= s || e <= start, || format!("{block:?} overlaps {:?}", other.block))?;
        }
        let state = self.lab.allocator.state();
        let segment = segment_of(&state, start).ok_or_else(|| format!("{block:?} is in no segment"))?;
        let record = segment.blocks.iter().find(|b| b.address == start).ok_or("the block is not listed")?;
        ensure(record.status == BlockStatus::ActiveAllocated, || format!("{record:?} was handed out"))?;
        ensure((record.size, record.requested) == (block.size(), bytes), || {
            format!("{block:?} is listed as {record:?}")
        })?;
        let overflow = pool.is_default() && self.pools.iter().any(|p| p.id == segment.pool && p.overflow);
        ensure(segment.pool == pool || overflow, || format!("{block:?} is of pool {}, not {pool}", segment.pool))?;
        let borrowed = record.stream != stream.id();
        ensure(!borrowed || self.retired.iter().any(|r| r.id() == record.stream), || {
            format!("stream {} got a block of stream {}, which is not retired", stream.id(), record.stream)
        })?;
        let ordered = self.lab.device.handed(stream.handle(), start, block.size());
        if !self.forgets_uses {
            ordered?;
        }
        self.live.push(Live { block, stream: stream.clone(), shared: borrowed });
        Ok(())
    }

    /// A request was refused: was that right?
    fn refused(&mut self, error: AllocError, bytes: u64, stream: &Stream<Watched>, pool: PoolId) -> Result<(), String> {
        match error {
            AllocError::OutOfMemory(report) => {
                self.ooms += 1;
                self.out_of_memory(&report, bytes, stream, pool)
            }
            AllocError::Rejected { requested } => {
                ensure(self.config().reject_over_fraction() && requested == bytes, || format!("rejected {requested}"))
            }
            // A scope whose pool was released and forgotten.
            AllocError::Pool(PoolError::Unknown { pool: p }) => {
                ensure(p == pool && self.users(pool) == 0, || format!("pool {p} is unknown, but has users"))
            }
            AllocError::Driver(e) if self.faulty => ensure(e.code != 0, || "an error without a code".to_owned()),
            other => Err(other.to_string()),
        }
    }

    fn out_of_memory(
        &self,
        report: &OutOfMemory,
        bytes: u64,
        stream: &Stream<Watched>,
        pool: PoolId,
    ) -> Result<(), String> {
        let asked = (report.requested, report.stream, report.pool);
        ensure(asked == (bytes, stream.id(), pool), || format!("the report is about {asked:?}"))?;
        let state = self.lab.allocator.state();
        let free: u64 = report.free.iter().map(|f| f.bytes).sum();
        if !self.faulty {
            ensure(report.reserved == report.live + report.pending + free, || {
                format!(
                    "{} reserved are not {} live, {} pending and {free} free",
                    report.reserved, report.live, report.pending
                )
            })?;
            let info = self.lab.device.mem_info().map_err(|e| e.to_string())?;
            ensure(report.driver == info, || format!("{:?} is reported, the device says {info:?}", report.driver))?;
        }
        ensure(!report.to_string().is_empty() && !report.pytorch_message().is_empty(), || "no text".to_owned())?;
        if self.bit_exact() || self.faulty {
            return Ok(());
        }
        // Everything that is free could have gone, but for what live blocks pin and what pools in use that captures used keep.
        ensure(report.pending == 0, || format!("{} bytes are pending", report.pending))?;
        let pinned: u64 = state.segments.iter().filter(|s| s.active() > 0).map(|s| s.size).sum();
        let size = self.config().rounding().round(bytes);
        let nominal = match size {
            n if n <= MIB => 2 * MIB,
            n if n < 10 * MIB => self.config().large_segment_size(),
            n => n.next_multiple_of(2 * MIB),
        };
        let capacity = self.lab.device.properties().total_memory;
        let room = self.lab.allocator.memory_limit().map_or(capacity, |l| l.bytes.min(capacity));
        ensure(pinned + nominal > room, || {
            format!("out of memory for {bytes} bytes, with {pinned} of {room} pinned: giving back the rest makes room")
        })
    }

    /// What is said to be available must be had, if it is asked for as one segment.
    fn take_all(&mut self, number: u8) -> Result<(), String> {
        let available = match self.lab.allocator.available() {
            Ok(available) => available,
            Err(AllocError::Driver(_)) if self.faulty => return Ok(()),
            Err(e) => return Err(e.to_string()),
        };
        let capacity = self.lab.device.properties().total_memory;
        ensure(available <= capacity, || format!("{available} bytes are available of {capacity}"))?;
        let bytes = available / (2 * MIB) * (2 * MIB);
        let exact = self.config().rounding().round(bytes) == bytes && !self.config().reject_over_fraction();
        // A scope that takes it elsewhere, or a share of the cache that PyTorch does not give back in it.
        // Cached memory above a limit serves what fits its segments, but not in one piece.
        let reserved = self.lab.allocator.stats().reserved_bytes.all.current as u64;
        let above = self.lab.allocator.memory_limit().is_some_and(|l| l.bytes < reserved);
        if bytes < 10 * MIB
            || above
            || !exact
            || self.expected_pool(number) != PoolId::DEFAULT
            || !self.reaches_default()
        {
            return Ok(());
        }
        let before = self.live.len();
        self.alloc(number, bytes)?;
        ensure(self.live.len() == before + 1 || self.faulty, || {
            format!("{available} bytes are available, and {bytes} were not to be had")
        })
    }

    fn alloc_at(&mut self, number: u8, bytes: u64, which: u8, skip: u8) -> Result<(), String> {
        let (stream, pool) = (self.stream(number), self.expected_pool(number));
        let state = self.lab.allocator.state();
        let free: Vec<_> = state
            .segments
            .iter()
            .filter(|s| s.pool == pool)
            .flat_map(|s| &s.blocks)
            .filter(|b| b.status == BlockStatus::Inactive && b.stream == stream.id())
            .collect();
        if free.is_empty() || bytes == 0 {
            return Ok(());
        }
        let block = free[usize::from(which) % free.len()];
        let address = block.address.offset(u64::from(skip) * 512);
        let size = self.config().rounding().round(bytes);
        let fits = u64::from(skip) * 512 + size <= block.size;
        self.peaks_blurred = true;
        match self.lab.allocator.alloc_at(bytes, address, &stream) {
            Ok(Some(got)) => {
                ensure(got.address() == address, || format!("{got:?} is not at {address}"))?;
                self.admit(got, &stream, bytes, pool)
            }
            // Blocks in bins merge with their neighbours first, so more may fit than this block alone holds, not less.
            Ok(None) => ensure(!fits, || format!("{bytes} bytes at {address} are free and were not given")),
            Err(e) => self.refused(e, bytes, &stream, pool),
        }
    }

    // Frees.

    fn free(&mut self, at: usize, by_drop: bool) -> Result<(), String> {
        let Live { block, shared, .. } = self.live.swap_remove(at);
        let calls = self.driver_calls();
        if by_drop {
            drop(block);
        } else {
            block.free().map_err(|e| e.to_string())?;
        }
        let quiet = !shared && !self.config().quarantine();
        ensure(self.bit_exact() || !quiet || self.driver_calls() == calls, || {
            format!("a free without recorded uses made {} driver calls", self.driver_calls() - calls)
        })
    }

    fn free_on(&mut self, which: u8, stream: u8) -> Result<(), String> {
        let Some(at) = self.pick(which) else { return Ok(()) };
        let stream = self.stream(stream);
        self.note_use();
        let Live { block, .. } = self.live.swap_remove(at);
        block.free_on(&stream).map_err(|(_, e)| e.to_string())
    }

    fn raw(&mut self, which: u8) -> Result<(), String> {
        let Some(at) = self.pick(which) else { return Ok(()) };
        let Live { block, stream, shared } = self.live.swap_remove(at);
        let (address, allocator) = (block.address(), &self.lab.allocator);
        ensure(allocator.into_raw(block) == address, || "another address".to_owned())?;
        let wrong = allocator.from_raw(address.offset(512)).map(|b| b.address());
        ensure(wrong == Err(FreeError::NotLive { address: address.offset(512) }), || format!("{wrong:?}"))?;
        let block = allocator.from_raw(address).map_err(|e| e.to_string())?;
        ensure(allocator.from_raw(address).is_err(), || "an address that was taken back is given again".to_owned())?;
        self.live.push(Live { block, stream, shared });
        Ok(())
    }

    fn note_use(&mut self) {
        self.forgets_uses |= self.config().policy() == Policy::Torch211 && !self.scopes.is_empty();
    }

    fn record(&mut self, at: usize, stream: &Stream<Watched>) -> Result<(), String> {
        self.note_use();
        let live = &mut self.live[at];
        live.shared |= live.stream.id() != stream.id();
        live.block.record_stream(stream).map_err(|e| e.to_string())
    }

    fn retire(&mut self, number: u8) -> Result<(), String> {
        let old = self.stream(number);
        if let Err(e) = self.lab.allocator.retire_stream(&old) {
            ensure(self.faulty, || e.to_string())?;
            ensure(!old.is_retired(), || "a retirement that failed has retired the stream".to_owned())?;
            return Ok(());
        }
        if self.bit_exact() {
            return ensure(!old.is_retired(), || "a handle is a stream for ever".to_owned());
        }
        let refused = self.lab.allocator.alloc(512, &old).map(|b| b.address());
        ensure(matches!(refused, Err(AllocError::RetiredStream { .. })), || format!("{refused:?}"))?;
        self.lab.device.recycle(old.handle());
        self.retired.push(old);
        Ok(())
    }

    // Giving back.

    fn released(&self, before: i64, result: Result<Trimmed, AllocError>) -> Result<Option<Trimmed>, String> {
        let trimmed = match result {
            Ok(trimmed) => trimmed,
            Err(AllocError::Driver(_)) if self.faulty => return Ok(None),
            Err(e) => return Err(e.to_string()),
        };
        let gone = before - self.lab.allocator.stats().reserved_bytes.all.current;
        let told = trimmed.released_bytes as i64;
        ensure(told == gone || self.faulty, || format!("{told} bytes are said to be released, {gone} are"))?;
        ensure(self.faulty || trimmed.refused.is_none(), || format!("{:?}", trimmed.refused))?;
        Ok(Some(trimmed))
    }

    /// Whether emptying the cache reaches the default pool: torch 2.11 takes any open scope for a capture.
    fn reaches_default(&self) -> bool {
        self.config().policy() != Policy::Torch211 || self.scopes.is_empty()
    }

    fn empty_cache(&mut self) -> Result<(), String> {
        let before = self.lab.allocator.stats().reserved_bytes.all.current;
        let result = self.lab.allocator.empty_cache();
        let Some(trimmed) = self.released(before, result)? else { return Ok(()) };
        if self.faulty || !self.reaches_default() {
            return Ok(());
        }
        let state = self.lab.allocator.state();
        let idle = |s: &&SegmentState| s.active() == 0;
        let kept: Vec<&SegmentState> = state.segments.iter().filter(idle).collect();
        let in_use = |id: PoolId| !id.is_default() && self.users(id) > 0;
        let wrong = kept.iter().find(|s| !in_use(s.pool));
        ensure(wrong.is_none(), || format!("the cache was emptied and {wrong:?} stayed"))?;
        let held: u64 = kept.iter().map(|s| s.size).sum();
        ensure(trimmed.held_by_pools_bytes == held, || format!("{held} bytes are held by pools, not {trimmed:?}"))?;
        ensure(state.stats.active_bytes.all.current == state.stats.allocated_bytes.all.current, || {
            "blocks are still pending".to_owned()
        })
    }

    fn trim(&mut self) -> Result<(), String> {
        let before = self.lab.allocator.stats().reserved_bytes.all.current;
        let waits = self.lab.device.sim.host_waits();
        let result = self.lab.allocator.trim();
        let trimmed = self.released(before, result)?;
        // The driver's free of plain memory waits for the device, whatever is freed.
        let frees = self.lab.device.sim.calls(Call::MemFree) > 0 && trimmed.is_none_or(|t| t.released_bytes > 0);
        let waited = self.lab.device.sim.host_waits() - waits;
        ensure(waited == 0 || frees, || format!("trimming waited {waited} times"))
    }

    // Pools.

    /// All users of a pool, scopes included.
    fn users(&self, id: PoolId) -> i64 {
        let own = self.pools.iter().find(|p| p.id == id).map_or(0, |p| p.users);
        own + self.scopes.iter().filter(|s| s.pool == id).count() as i64
    }

    fn release_pool(&mut self, at: usize) -> Result<(), String> {
        let (id, had) = (self.pools[at].id, self.users(self.pools[at].id));
        if self.pools[at].users > 0 {
            self.pools[at].users -= 1;
            return self.lab.allocator.release_pool(id).map_err(|e| e.to_string());
        }
        // What was not taken cannot be released; but PyTorch's count goes below zero for good.
        if had > 0 || self.bit_exact() {
            return Ok(());
        }
        match self.lab.allocator.release_pool(id) {
            Err(AllocError::Pool(PoolError::OverReleased { .. } | PoolError::Unknown { .. })) => Ok(()),
            other => Err(format!("{other:?} for a pool with no user")),
        }
    }

    fn open(&mut self, at: usize, claim: Claim) -> Result<(), String> {
        let (id, had) = (self.pools[at].id, self.users(self.pools[at].id));
        let filter = match claim {
            Claim::All => Filter::All,
            Claim::Thread => Filter::Thread(std::thread::current().id()),
            Claim::Stream(number) => Filter::Stream(self.stream(number).handle()),
        };
        let open = self.scopes.iter().any(|s| s.pool == id);
        match self.lab.allocator.begin_allocate_to_pool(id, filter) {
            Ok(()) => {
                ensure(!(open && self.bit_exact()), || "a second scope of one pool".to_owned())?;
                self.scopes.push(Scope { pool: id, claim });
            }
            // The user that was counted before the refusal is still there.
            Err(AllocError::Pool(PoolError::AlreadyRecording { .. })) if open && self.bit_exact() => {
                self.pools[at].users += 1;
            }
            Err(AllocError::Pool(PoolError::Released { .. })) if had == 0 => {}
            Err(e) => return Err(e.to_string()),
        }
        Ok(())
    }

    fn checkpoint(&mut self, which: u8) -> Result<(), String> {
        let Some(at) = self.pool(which) else { return Ok(()) };
        let id = self.pools[at].id;
        match self.lab.allocator.checkpoint_pool(id) {
            Ok(checkpoint) => self.checkpoints.push(checkpoint),
            Err(AllocError::Pool(PoolError::PendingBlock { .. })) => {
                let state = self.lab.allocator.state();
                let mut blocks = state.segments.iter().filter(|s| s.pool == id).flat_map(|s| &s.blocks);
                let pending = blocks.any(|b| b.status == BlockStatus::ActivePendingFree);
                ensure(pending, || "no block is pending".to_owned())?;
            }
            Err(AllocError::Pool(PoolError::Unknown { .. })) if self.users(id) == 0 => {}
            Err(e) => return Err(e.to_string()),
        }
        Ok(())
    }

    fn restore(&mut self, which: u8, stream: u8) -> Result<(), String> {
        if self.checkpoints.is_empty() {
            return Ok(());
        }
        let checkpoint = &self.checkpoints[usize::from(which) % self.checkpoints.len()];
        let (id, stream) = (checkpoint.pool(), self.stream(stream));
        self.peaks_blurred = true;
        let restored = match self.lab.allocator.restore_pool(checkpoint, &stream) {
            Ok(restored) => restored,
            Err(AllocError::Pool(PoolError::CheckpointMismatch { .. })) => return Ok(()),
            Err(AllocError::Pool(PoolError::Unknown { .. } | PoolError::Released { .. })) if self.users(id) == 0 => {
                return Ok(());
            }
            Err(e) => return Err(e.to_string()),
        };
        // The blocks of the pool that were live are gone, whoever held them.
        let mut freed: BTreeSet<Address> = restored.freed.iter().copied().collect();
        for at in (0..self.live.len()).rev() {
            if freed.remove(&self.live[at].block.address()) {
                self.stale.push(self.live.swap_remove(at).block);
            }
        }
        ensure(freed.is_empty(), || format!("{freed:?} were freed and not live"))?;
        for block in restored.allocated {
            let state = self.lab.allocator.state();
            let segment = segment_of(&state, block.address()).ok_or("a restored block is in no segment")?;
            let record = segment.blocks.iter().find(|b| b.address == block.address());
            let record = record.ok_or("a restored block is not listed")?;
            ensure(segment.pool == id && record.size == block.size(), || format!("{block:?} is {record:?}"))?;
            // Restoring is the caller's doing: what used the blocks before is its to order. The block goes on as before, in the
            // order of its own stream, or of the one given.
            let shared = true;
            self.live.push(Live { block, stream: stream.clone(), shared });
        }
        Ok(())
    }

    // What always holds.

    fn check(&mut self) -> Result<(), String> {
        self.lab.sound(self.strictness)?;
        let state = self.lab.allocator.state();
        if self.accumulated && self.strictness == Strictness::Exact {
            adds_up(&state)?;
        }
        let listed: BTreeMap<Address, (u64, u64)> = state
            .segments
            .iter()
            .flat_map(|s| &s.blocks)
            .filter(|b| b.status == BlockStatus::ActiveAllocated)
            .map(|b| (b.address, (b.size, b.requested)))
            .collect();
        let model: BTreeMap<Address, (u64, u64)> =
            self.live.iter().map(|l| (l.block.address(), (l.block.size(), l.block.requested()))).collect();
        ensure(listed == model, || format!("live are {listed:?}, the model has {model:?}"))?;
        for pool in &state.pools {
            let users = self.users(pool.id);
            let counted = pool.use_count.max(if self.bit_exact() { 0 } else { i64::MIN });
            ensure(counted == users, || format!("pool {} counts {} users, it has {users}", pool.id, pool.use_count))?;
        }
        for pool in self.pools.iter().filter(|p| self.users(p.id) > 0) {
            ensure(state.pools.iter().any(|p| p.id == pool.id), || format!("pool {} has users and is gone", pool.id))?;
        }
        self.check_peak(&state)
    }

    /// Peaks of live bytes: exact where that is promised, never too low.
    fn check_peak(&mut self, state: &State) -> Result<(), String> {
        let stat = state.stats.allocated_bytes.all;
        self.peak_allocated = self.peak_allocated.max(stat.current as u64);
        let (peak, seen) = (stat.peak as u64, self.peak_allocated);
        let exact = self.bit_exact() && !self.peaks_blurred;
        // Known fault: the peaks of streams and pools that are gone are forgotten (`faults_statistics`, ignored test).
        let forgotten = !self.bit_exact() && !exact && FORGETS_PEAKS;
        if forgotten {
            self.peak_allocated = stat.current as u64;
            return Ok(());
        }
        ensure(if exact { peak == seen } else { peak >= seen }, || {
            format!("the peak is {peak}, the most seen was {seen}")
        })
    }

    // The end.

    /// Gives everything up in some order; nothing must remain.
    pub fn end(mut self, ending: Ending) -> Result<(), String> {
        self.lab.device.sim.clear_faults();
        self.close_everything()?;
        let mut order = ending.order.max(1);
        let mut draw = |n: usize| {
            order ^= order << 13;
            order ^= order >> 7;
            order ^= order << 17;
            (order >> 8) as usize % n.max(1)
        };
        let mut blocks: Vec<Block> = self.live.drain(..).map(|l| l.block).chain(self.stale.drain(..)).collect();
        self.retired.clear();
        self.checkpoints.clear();
        let device = Arc::clone(&self.lab.device);
        if ending.allocator_first {
            // The blocks outlive the allocator, and keep their memory.
            drop(self.lab);
            while !blocks.is_empty() {
                let block = blocks.swap_remove(draw(blocks.len()));
                drop(block);
            }
        } else {
            while !blocks.is_empty() {
                let block = blocks.swap_remove(draw(blocks.len()));
                drop(block);
                self.lab.sound(self.strictness).map_err(|e| format!("while blocks are dropped: {e}"))?;
                if draw(8) == 0 {
                    self.lab.allocator.trim().map_err(|e| e.to_string())?;
                }
            }
            let result = self.lab.allocator.empty_cache().map_err(|e| format!("emptying the cache: {e}"))?;
            self.lab.sound(Strictness::Exact).map_err(|e| format!("after everything was dropped: {e}"))?;
            let reserved = self.lab.allocator.stats().reserved_bytes.all.current;
            ensure(reserved == 0, || {
                format!("{reserved} bytes stay reserved after everything was dropped: {result:?}")
            })?;
            let (memory, addresses) = (device.sim.memory_in_use(), device.sim.address_space_in_use());
            ensure((memory, addresses) == (0, 0), || format!("{memory} bytes and {addresses} of addresses stay"))?;
            ensure(self.lab.allocator.state().pools.is_empty(), || "pools stay".to_owned())?;
            drop(self.lab);
        }
        let left = (device.sim.memory_in_use(), device.sim.address_space_in_use(), device.sim.events_in_use());
        ensure(left == (0, 0, 0), || format!("memory, addresses, events {left:?} are left when everything is gone"))?;
        ensure(device.breaches().is_empty(), || device.breaches().join("\n"))
    }

    fn close_everything(&mut self) -> Result<(), String> {
        let allocator = &self.lab.allocator;
        for scope in self.scopes.drain(..).rev() {
            allocator.end_allocate_to_pool(scope.pool).map_err(|e| e.to_string())?;
            allocator.release_pool(scope.pool).map_err(|e| e.to_string())?;
        }
        for pool in self.pools.drain(..) {
            for _ in 0..pool.users {
                allocator.release_pool(pool.id).map_err(|e| e.to_string())?;
            }
        }
        Ok(())
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
