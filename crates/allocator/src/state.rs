//! An allocator's state as plain data: what snapshots are made of, and what the out-of-memory report analyses.

use gpupool_device::{Address, CaptureId, StreamHandle};

use crate::captures::{HeldBlock, Range};
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
    /// All graphs that hold memory of this allocator, by id.
    pub graphs: Vec<GraphState>,
    /// The captures of the process that are under way, in the order of their beginnings.
    pub captures: Vec<CaptureState>,
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
    /// Whether an address lies in it.
    #[must_use]
    pub fn contains(&self, address: Address) -> bool {
        address >= self.address && address.offset_from(self.address) < self.size
    }

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
    /// The graph whose capture handed it out, if it was live at the capture's end and still is.
    pub graph: Option<u64>,
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

/// A captured graph, as far as it concerns one allocator.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct GraphState {
    /// Its number, unique in the process.
    pub id: u64,
    /// The pools that it holds.
    pub pools: Vec<PoolId>,
    /// What a run of it may write: in order, with no overlap.
    pub written: Vec<Range>,
    /// Blocks that its capture handed out and that were live at its end.
    pub outputs: Vec<HeldBlock>,
}

impl GraphState {
    /// A graph that writes nothing yet.
    #[must_use]
    pub fn new(id: u64) -> Self {
        Self { id, ..Self::default() }
    }
}

/// What a graph's memory comes to.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct GraphBytes {
    /// Its number.
    pub id: u64,
    /// The pools that it holds.
    pub pools: Vec<PoolId>,
    /// Bytes that a run of it may write.
    pub written: u64,
    /// Of those, bytes that no other graph may write: what its end would free at most.
    pub exclusive: u64,
}

impl State {
    /// What each graph's memory comes to, most bytes first. O(graphs^2 * ranges).
    #[must_use]
    pub fn graph_bytes(&self) -> Vec<GraphBytes> {
        let sum = |ranges: &[Range]| ranges.iter().map(|range| range.bytes).sum::<u64>();
        let of = |graph: &GraphState| {
            let others = self.graphs.iter().filter(|other| other.id != graph.id);
            let shared = others.flat_map(|other| Range::common(&graph.written, &other.written)).collect();
            let written = sum(&graph.written);
            let exclusive = written - sum(&Range::merged(shared));
            GraphBytes { id: graph.id, pools: graph.pools.clone(), written, exclusive }
        };
        let mut list: Vec<GraphBytes> = self.graphs.iter().map(of).collect();
        list.sort_by_key(|graph| std::cmp::Reverse(graph.written));
        list
    }
}

/// A capture under way.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CaptureState {
    /// The driver's number of it; `None` before it has begun.
    pub id: Option<CaptureId>,
    /// The ordinal of the device and the stream that it begins on; `None` for one that somebody else began.
    pub stream: Option<(u32, StreamHandle)>,
    /// The pool that its requests are served from.
    pub pool: PoolId,
    /// The pools that it has touched, of every device.
    pub pools: Vec<PoolId>,
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
