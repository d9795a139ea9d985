//! PyTorch's layout of a snapshot, as far as this project writes and reads it.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

/// A snapshot: segments with their blocks, and settings. Sizes and addresses in bytes.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// Every segment, by device and address.
    pub segments: Vec<Segment>,
    /// For each device the recorded events, oldest first. This version records none; a list for each device must be
    /// there for viewers.
    pub device_traces: Vec<Vec<serde_json::Value>>,
    /// The settings under which the allocator ran.
    pub allocator_settings: BTreeMap<String, serde_json::Value>,
    /// Annotations from outside.
    pub external_annotations: Vec<serde_json::Value>,
    /// What this project says beyond PyTorch's layout: policy, memory of the device, counters.
    pub gpupool: BTreeMap<String, serde_json::Value>,
}

/// A segment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
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
    /// Where it was made. This version knows no stacks.
    pub frames: Vec<serde_json::Value>,
    /// Its blocks, in address order. They tile it.
    pub blocks: Vec<Block>,
}

/// A block.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
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
    /// Where it was allocated. This version knows no stacks.
    pub frames: Vec<serde_json::Value>,
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

impl Snapshot {
    /// Writes the snapshot as JSON.
    ///
    /// # Errors
    ///
    /// The writer's.
    pub fn write_json(&self, mut to: impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut to, self)?;
        to.write_all(b"\n")?;
        to.flush()
    }
}
