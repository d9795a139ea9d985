//! PyTorch's layout of a snapshot, as far as this project writes and reads it.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use crate::format::pickle_write::PickleSink;
use crate::format::sink::{self, JsonSink};
use crate::stacks::{StackId, Stacks, TextId};

/// A snapshot: segments with their blocks, what happened before, and settings. Sizes and addresses in bytes.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Snapshot {
    /// Every segment, by device and address.
    pub segments: Vec<Segment>,
    /// For each device the recorded events, oldest first.
    pub device_traces: Vec<Vec<Event>>,
    /// The frames and texts that segments, blocks and events refer to.
    pub stacks: Stacks,
    /// The settings under which the allocator ran.
    pub allocator_settings: BTreeMap<String, serde_json::Value>,
    /// Annotations from outside.
    pub external_annotations: Vec<Annotation>,
    /// What this project says beyond PyTorch's layout: policy, memory of the device, counters, pools, graphs, captures.
    pub gpupool: BTreeMap<String, serde_json::Value>,
    /// Events of kinds that are not known, which were left out.
    pub unknown_events: u64,
    /// Events of a size or at an address that nothing can have, which were left out.
    pub absurd_events: u64,
}

/// A segment.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Segment {
    /// The GPU's ordinal.
    pub device: u32,
    /// Where it starts.
    pub address: u64,
    /// Its size.
    pub total_size: u64,
    /// Bytes in live blocks.
    pub allocated_size: u64,
    /// Bytes in live and pending blocks.
    pub active_size: u64,
    /// Bytes requested in live and pending blocks.
    pub requested_size: u64,
    /// The handle of the stream whose requests it serves; 0 where it serves any.
    pub stream: u64,
    /// Whether it serves requests of any stream, as memory of a graph's pool does between captures. Not in PyTorch's
    /// layout.
    pub any_stream: bool,
    /// Which part of its pool it belongs to.
    pub segment_type: Part,
    /// Its pool; `(0, 0)` is the default pool.
    pub segment_pool_id: (u64, u64),
    /// Whether it is one of PyTorch's expandable segments.
    pub is_expandable: bool,
    /// Where it was made.
    pub frames: StackId,
    /// Its blocks, in address order. They tile it.
    pub blocks: Vec<Block>,
}

/// A block.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Block {
    /// Where it starts.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// Bytes requested; stale in a free block.
    pub requested_size: u64,
    /// What it is.
    pub state: BlockStatus,
    /// Where it was allocated.
    pub frames: StackId,
    /// The label under which it was allocated. Not in PyTorch's layout.
    pub label: TextId,
    /// Tells it from other blocks at the same address; 0 where that is not known. Not in PyTorch's layout.
    pub generation: u32,
    /// The number of the graph that it is a result of; 0 where it is none's, or that is not known. Not in PyTorch's layout.
    pub graph: u64,
}

/// An event of the history.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Event {
    /// What happened.
    pub action: Action,
    /// The block, segment or range; for [`Action::Oom`] the bytes that the driver had free.
    pub address: u64,
    /// Bytes requested; of a segment or range its bytes.
    pub size: u64,
    /// The stream's handle.
    pub stream: u64,
    /// When, in microseconds.
    pub time_us: u64,
    /// Where the caller was.
    pub frames: StackId,
    /// The caller's label (`user_metadata`).
    pub label: TextId,
    /// PyTorch's `compile_context`.
    pub context: TextId,
    /// The pool, where the file tells (PyTorch from 2.12 on).
    pub pool: Option<(u64, u64)>,
    /// The thread's number; 0 where it is not known. Not in PyTorch's layout.
    pub thread: u32,
}

macro_rules! actions {
    ($($(#[$doc:meta])* $action:ident = $name:literal),* $(,)?) => {
        /// What happened.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Action { $($(#[$doc])* $action),* }

        impl Action {
            /// Its name in files.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$action => $name),* }
            }

            pub(crate) fn of_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$action),)* _ => None }
            }
        }
    };
}

actions! {
    /// A block was handed out.
    Alloc = "alloc",
    /// Its owner freed it.
    FreeRequested = "free_requested",
    /// It is free.
    FreeCompleted = "free_completed",
    /// A segment was taken from the driver.
    SegmentAlloc = "segment_alloc",
    /// A segment goes back.
    SegmentFree = "segment_free",
    /// Memory was mapped into an expandable segment.
    SegmentMap = "segment_map",
    /// Memory was unmapped.
    SegmentUnmap = "segment_unmap",
    /// A request ended in out of memory.
    Oom = "oom",
    /// A snapshot was taken.
    Snapshot = "snapshot",
    /// Something was noted about a block.
    Annotate = "annotate",
}

/// A begin or end of something outside the allocator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Annotation {
    /// Which of the two.
    pub stage: Stage,
    /// Of what.
    pub name: TextId,
    /// The GPU.
    pub device: u32,
    /// When, in microseconds.
    pub time_us: u64,
}

/// A begin or an end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// A begin.
    Start,
    /// An end.
    End,
}

/// Which part of its pool a segment belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Requests up to 1 MiB.
    Small,
    /// Everything larger.
    Large,
}

impl Part {
    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Large => "large",
        }
    }
}

/// What a block is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockStatus {
    /// Live.
    ActiveAllocated,
    /// Freed, but some stream may still use it.
    ActivePendingFree,
    /// Free.
    Inactive,
}

impl BlockStatus {
    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ActiveAllocated => "active_allocated",
            Self::ActivePendingFree => "active_pending_free",
            Self::Inactive => "inactive",
        }
    }
}

impl Snapshot {
    /// Writes the snapshot as JSON.
    ///
    /// # Errors
    ///
    /// The writer's.
    pub fn write_json(&self, to: impl Write) -> io::Result<()> {
        let mut json = JsonSink::new(to);
        sink::write(self, &mut json)?;
        json.finish()
    }

    /// Writes the snapshot as PyTorch does, as a pickle that its memory viewer reads.
    ///
    /// # Errors
    ///
    /// The writer's.
    pub fn write_pickle(&self, to: impl Write) -> io::Result<()> {
        let mut pickle = PickleSink::new(to)?;
        sink::write(self, &mut pickle)?;
        pickle.finish()
    }
}
