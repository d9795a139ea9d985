//! An allocator's state as plain data: what snapshots are made of, and what the out-of-memory report analyses.

use gpupool_device::{Address, StreamHandle};

use crate::config::Policy;
use crate::counters::StatArray;
use crate::history::HistoryState;
use crate::idle::Residency;
use crate::ids::{Part, PoolId, StreamId};
use crate::stats::Stats;
use crate::totals::Limit;

/// Everything an allocator holds, copied segment by segment: each is consistent in itself, and where the history is on, with each other.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct State {
    /// The GPU's ordinal.
    pub device: u32,
    /// The policy.
    pub policy: Policy,
    /// Bytes of memory that the device has in all.
    pub total_memory: u64,
    /// The limit in force, if any.
    pub limit: Option<Limit>,
    /// All segments, by address.
    pub segments: Vec<SegmentState>,
    /// All private pools, by id.
    pub pools: Vec<PoolState>,
    /// All streams that may have work, by id: those not retired, and retired ones whose last work is not known to be done.
    pub streams: Vec<StreamState>,
    /// The counters.
    pub stats: Stats,
    /// What happened, if the history is on. Its last event is the newest of which `segments` know.
    pub history: Option<HistoryState>,
}

/// A segment and its blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SegmentState {
    /// Counts the segments of this allocator in order of creation, from 0.
    pub ordinal: u64,
    /// Where it starts.
    pub address: Address,
    /// Bytes.
    pub size: u64,
    /// The stream it was made for.
    pub stream: StreamId,
    /// That stream's handle.
    pub stream_handle: StreamHandle,
    /// Its pool.
    pub pool: PoolId,
    /// Its part of the pool.
    pub part: Part,
    /// What is behind it.
    pub backing: BackingKind,
    /// Bytes of each handle behind it in address order, where there are several.
    pub handles: Vec<u64>,
    /// Its blocks in address order; they tile it.
    pub blocks: Vec<BlockState>,
}

impl SegmentState {
    /// Bytes in blocks of some statuses.
    fn bytes_in(&self, pick: impl Fn(BlockStatus) -> bool) -> u64 {
        self.blocks.iter().filter(|b| pick(b.status)).map(|b| b.size).sum()
    }

    /// Bytes in live blocks.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.bytes_in(|s| s == BlockStatus::ActiveAllocated)
    }

    /// Bytes in live or pending blocks.
    #[must_use]
    pub fn active(&self) -> u64 {
        self.bytes_in(|s| s != BlockStatus::Inactive)
    }

    /// Bytes requested in live or pending blocks.
    #[must_use]
    pub fn requested(&self) -> u64 {
        self.blocks.iter().filter(|b| b.status != BlockStatus::Inactive).map(|b| b.requested).sum()
    }

    /// The longest run of free bytes.
    #[must_use]
    pub fn largest_free_run(&self) -> u64 {
        let (mut best, mut run) = (0, 0);
        for block in &self.blocks {
            run = if block.status == BlockStatus::Inactive { run + block.size } else { 0 };
            best = best.max(run);
        }
        best
    }
}

/// What is behind a segment's addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum BackingKind {
    /// A plain driver allocation.
    Plain,
    /// A virtual-memory handle.
    Handle,
    /// Virtual-memory handles that can be moved: the segment is a mapped part of a larger range of addresses.
    Pages,
    /// The pool's own provider.
    Provider,
    /// Nothing: the addresses are reserved and their memory is away, with a pool that is parked or suspended. It is not among the reserved
    /// bytes.
    Away,
    /// A block of the driver's own pool, or of a graph's memory.
    DriverPool,
}

/// A block.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct BlockState {
    /// Where it starts.
    pub address: Address,
    /// Bytes.
    pub size: u64,
    /// Bytes asked for; stale in a free block, as in PyTorch.
    pub requested: u64,
    /// What it is at present.
    pub status: BlockStatus,
    /// Free, but parked in a bin and not merged.
    pub binned: bool,
    /// The stream whose requests it serves when it is free.
    pub stream: StreamId,
    /// Streams recorded for it, beyond its own.
    pub used_by: Vec<StreamId>,
    /// Counts how often this record was handed out: an address with another generation is another block.
    pub generation: u32,
}

/// PyTorch's names for what a block is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockStatus {
    /// Live.
    ActiveAllocated,
    /// Freed, but some stream may still use it.
    ActivePendingFree,
    /// Free.
    Inactive,
}

/// A private pool.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolState {
    /// Its id.
    pub id: PoolId,
    /// Its users; at 0 its idle segments may go.
    pub use_count: i64,
    /// Whether a capture was ever routed to it.
    pub captured: bool,
    /// Bytes in live blocks.
    pub allocated_bytes: StatArray,
    /// Bytes in segments.
    pub reserved_bytes: StatArray,
    /// Where its memory is.
    pub residency: Residency,
    /// What it is named by for suspensions, and what pools that exclude each other share.
    pub tag: Option<String>,
    /// Bytes of its segments with no memory behind them, because it is parked or suspended.
    pub away_bytes: u64,
    /// Bytes of host memory that its contents are in meanwhile.
    pub host_bytes: u64,
    /// Bytes of it that are out on loan.
    pub lent_bytes: u64,
}

/// A stream's registration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StreamState {
    /// Its id.
    pub id: StreamId,
    /// Its handle.
    pub handle: StreamHandle,
    /// Whether it was retired.
    pub retired: bool,
}
