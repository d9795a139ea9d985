//! What a conformance file says, as data.

use std::collections::BTreeMap;
use std::fmt;

/// The value of a conformance file's `format`.
pub const FORMAT: &str = "conform-1";

/// Which PyTorch made the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// 2.11: breaks ties by address; any open scope counts as a capture.
    V211,
    /// 2.15.
    V215,
}

/// How counters are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StatsShape {
    /// Only the current value.
    Current,
    /// `[current, peak, allocated, freed]`.
    Full,
}

/// The first line of a file.
#[derive(Clone, PartialEq, Debug)]
pub struct Header {
    /// What made the file, in words.
    pub source: String,
    /// Which PyTorch.
    pub version: Version,
    /// What kind of sequence: `plain`, `pools`, `graphs` and so on.
    pub kind: String,
    /// What the sequence was drawn from.
    pub seed: u64,
    /// Bytes that the device has.
    pub device_total: u64,
    /// Bytes that the driver gives at most.
    pub device_limit: u64,
    /// The `PYTORCH_CUDA_ALLOC_CONF` in force.
    pub conf: String,
    /// How counters are written.
    pub shape: StatsShape,
}

impl Header {
    /// Whether hash orders make some figures incomparable (C4).
    #[must_use]
    pub fn has_hash_orders(&self) -> bool {
        self.kind == "pools"
    }
}

/// Where an allocation must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// In this segment, so many bytes from its start.
    At {
        /// The segment, counted in order of creation.
        segment: u64,
        /// Bytes.
        offset: u64,
    },
    /// Nowhere: out of memory.
    OutOfMemory,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At { segment, offset } => write!(f, "segment {segment}, offset {offset}"),
            Self::OutOfMemory => f.write_str("out of memory"),
        }
    }
}

/// Whose requests a scope routes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FilterSpec {
    /// Everybody's.
    All,
    /// Those of this stream.
    Stream(u64),
}

/// A pool's id as the file writes it.
pub type PoolPair = (u64, u64);

/// One operation.
#[derive(Clone, PartialEq, Debug)]
pub enum Op {
    /// A request.
    Alloc {
        /// The allocation's number.
        id: u64,
        /// Bytes requested.
        size: u64,
        /// For this stream.
        stream: u64,
        /// Where it must be.
        place: Place,
    },
    /// A free.
    Free {
        /// The allocation.
        id: u64,
    },
    /// Another stream uses an allocation.
    RecordStream {
        /// The allocation.
        id: u64,
        /// The stream.
        stream: u64,
    },
    /// Every event recorded so far is complete.
    CompleteAllWork,
    /// The cache is emptied.
    EmptyCache,
    /// The share of memory that may be used changes.
    SetMemoryFraction {
        /// From 0 to 1.
        fraction: f64,
    },
    /// The calling thread's current stream changes.
    SetCurrentStream {
        /// The stream.
        stream: u64,
    },
    /// A pool is made, or has one user more.
    CreatePool(PoolPair),
    /// A pool has one user less.
    ReleasePool(PoolPair),
    /// A scope opens.
    BeginAllocateToPool(PoolPair, FilterSpec),
    /// A scope closes.
    EndAllocateToPool(PoolPair),
    /// A pool no longer splits blocks.
    SetNoSplit(PoolPair),
    /// A pool serves the default pool's requests when memory is short, or no longer does.
    SetUseOnOom(PoolPair, bool),
    /// A stream begins to capture.
    StreamBeginCapture {
        /// The stream.
        stream: u64,
        /// The driver's number for the capture.
        capture: u64,
    },
    /// A stream's capture ends.
    StreamEndCapture {
        /// The stream.
        stream: u64,
    },
    /// One capture more is under way.
    MarkCaptureBegin,
    /// One capture less.
    MarkCaptureEnd,
    /// The state must be this.
    Snapshot(Vec<ExpectedSegment>),
}

impl Op {
    /// The operation's name in the file.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Alloc { .. } => "alloc",
            Self::Free { .. } => "free",
            Self::RecordStream { .. } => "record_stream",
            Self::CompleteAllWork => "complete_all_work",
            Self::EmptyCache => "empty_cache",
            Self::SetMemoryFraction { .. } => "set_memory_fraction",
            Self::SetCurrentStream { .. } => "set_current_stream",
            Self::CreatePool(_) => "create_pool",
            Self::ReleasePool(_) => "release_pool",
            Self::BeginAllocateToPool(..) => "begin_allocate_to_pool",
            Self::EndAllocateToPool(_) => "end_allocate_to_pool",
            Self::SetNoSplit(_) => "set_no_split",
            Self::SetUseOnOom(..) => "set_use_on_oom",
            Self::StreamBeginCapture { .. } => "stream_begin_capture",
            Self::StreamEndCapture { .. } => "stream_end_capture",
            Self::MarkCaptureBegin => "mark_capture_begin",
            Self::MarkCaptureEnd => "mark_capture_end",
            Self::Snapshot(_) => "snapshot",
        }
    }
}

/// A driver call that an operation must make.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DriverCall {
    /// A segment is taken.
    Malloc {
        /// Its size.
        bytes: u64,
        /// Its number, in order of creation, and where it is, relative to the device's base.
        segment: u64,
        /// Bytes from the base.
        address: u64,
    },
    /// The driver refuses a segment.
    Refused {
        /// The size asked for.
        bytes: u64,
    },
    /// A segment is given back.
    Free {
        /// Its number.
        segment: u64,
    },
}

impl fmt::Display for DriverCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malloc { bytes, segment, .. } => write!(f, "malloc {bytes} -> segment {segment}"),
            Self::Refused { bytes } => write!(f, "malloc {bytes} -> refused"),
            Self::Free { segment } => write!(f, "free segment {segment}"),
        }
    }
}

/// Which part of its pool a segment belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PartKind {
    /// The small part.
    Small,
    /// The large part.
    Large,
}

/// What a block is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockKind {
    /// Live.
    Alloc,
    /// Freed, but still in use by some stream.
    Pending,
    /// Free.
    Inactive,
}

/// A segment as a snapshot must show it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpectedSegment {
    /// Its number.
    pub segment: u64,
    /// Its size.
    pub size: u64,
    /// The stream it was made for.
    pub stream: u64,
    /// Its pool.
    pub pool: PoolPair,
    /// Its part.
    pub kind: PartKind,
    /// Its blocks, in address order.
    pub blocks: Vec<ExpectedBlock>,
}

/// A block as a snapshot must show it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpectedBlock {
    /// Its size.
    pub size: u64,
    /// Bytes requested.
    pub requested: u64,
    /// What it is.
    pub kind: BlockKind,
}

/// Counters by key. A key is the path to one number: `allocation.all.peak`, `num_ooms`, `private_pools.1,0.current`.
pub type StatsLine = BTreeMap<String, i64>;

/// A line: an operation, what it must do to the driver, and which counters then differ.
#[derive(Clone, PartialEq, Debug)]
pub struct Step {
    /// The operation.
    pub op: Op,
    /// The driver calls that it must make, in order.
    pub driver: Vec<DriverCall>,
    /// The counters that change.
    pub stats: StatsLine,
}

/// A conformance file.
#[derive(Clone, PartialEq, Debug)]
pub struct Script {
    /// The first line.
    pub header: Header,
    /// The other lines. Operation *n* is `steps[n - 1]`.
    pub steps: Vec<Step>,
}
