//! Workload traces: what a real program asked of its allocator, format `torch-trace-1`.
//!
//! A trace is gzip text: a JSON header, then one event a line. [`Trace::read`] checks every line against the ones
//! before it, so that whoever replays a [`Trace`] can rely on it; [`TraceWriter`](write::TraceWriter) makes one.
//!
//! Numbers of blocks and graphs are made dense (from 0, in order of appearance), because a replay looks them up by
//! index.
//!
//! * **W1** Each block is allocated once, freed at most once and only after that, and completed at most once and only
//!   after that.
//! * **W2** Of two captures open at a time neither has the other's graph or stream.
//! * **W3** Recorded segments that exist at one time do not overlap, and each is given back as it was taken.
//! * **W4** The counts in the header are those of the file.

mod error;
mod of_snapshot;
mod parse;
pub mod write;

use std::fmt;

pub use error::{TraceError, TraceProblem};
use gpupool_device::Address;
pub use of_snapshot::{WhatIf, WhatIfError, what_if};
use serde::{Deserialize, Serialize};

/// The value of a trace header's `format`.
pub const FORMAT: &str = "torch-trace-1";

/// No single request and no segment is larger than this: 1 TiB, several times the memory of any GPU.
pub const MAX_BYTES: u64 = 1 << 40;

/// No more streams than this: recordings number them from 0.
pub const MAX_STREAMS: u64 = 1 << 12;

/// What the header says. Unknown fields are kept, so that results can quote the header whole.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Header {
    /// [`FORMAT`].
    pub format: String,
    /// The workload's name.
    pub name: String,
    /// The `PYTORCH_CUDA_ALLOC_CONF` under which PyTorch ran.
    pub conf: String,
    /// The most bytes in blocks handed out at one time.
    pub peak_allocated: u64,
    /// The most bytes requested and not yet completely freed at one time.
    pub peak_requested: u64,
    /// The most bytes in blocks handed out or pending at one time.
    pub peak_active: u64,
    /// The most bytes that PyTorch held of the driver.
    pub peak_reserved: u64,
    /// Segments that PyTorch took, with one from before the recording.
    pub device_allocs: u64,
    /// Allocations, with one from before the recording.
    pub allocs: u64,
    /// Segments taken less segments given back, in the recording.
    pub segments_end: u64,
    /// Everything else the header has.
    #[serde(flatten)]
    pub rest: serde_json::Map<String, serde_json::Value>,
}

/// One event. Blocks, graphs and late frees are indices into the trace's lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// `bytes` requested on `stream`.
    Alloc {
        /// The block, from 0.
        block: u32,
        /// What is requested.
        bytes: u64,
        /// The stream, as the trace numbers it.
        stream: u16,
    },
    /// A free that is complete at once.
    Free {
        /// The block.
        block: u32,
    },
    /// A free that completes later, or never: the block had recorded uses on other streams.
    FreeLate {
        /// The block.
        block: u32,
        /// Which of [`Trace::late`].
        late: u32,
    },
    /// A late free completes.
    Complete {
        /// Which of [`Trace::late`].
        late: u32,
    },
    /// A free of a block that was allocated before the recording.
    FreeForeign,
    /// A capture begins.
    Begin {
        /// Which of [`Trace::graphs`].
        graph: u32,
    },
    /// A capture ends.
    End {
        /// Which of [`Trace::graphs`].
        graph: u32,
    },
    /// The cache is emptied.
    EmptyCache,
}

impl Event {
    /// Whether it counts as an event of the workload: `a` and `f` lines do.
    #[must_use]
    pub const fn counts(self) -> bool {
        matches!(self, Self::Alloc { .. } | Self::Free { .. } | Self::FreeLate { .. } | Self::FreeForeign)
    }
}

/// A free whose completion did not follow at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LateFree {
    /// The block.
    pub block: u32,
    /// How many counted events there are up to the free, itself included.
    pub freed_at: u32,
    /// How many counted events there are before it completes; `None` if it never does.
    pub completes_at: Option<u32>,
}

/// A captured graph.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Graph {
    /// The graph's number in the file.
    pub number: u64,
    /// The private pool's number in the file.
    pub pool: u64,
    /// The stream captured.
    pub stream: u16,
}

/// A segment that PyTorch took while it was recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordedSegment {
    /// Where it was.
    pub address: Address,
    /// Its size.
    pub bytes: u64,
    /// The stream it was made for, as the trace numbers it.
    pub stream: u16,
    /// How many events of [`Trace::events`] came before.
    pub taken_before: u32,
    /// How many events of [`Trace::events`] came before it was given back; `None` if it never was.
    pub given_back_before: Option<u32>,
}

/// Where something stands in what the user gave us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Where {
    /// A line of a trace, from 1.
    Line(u32),
    /// An event of a snapshot's history, from 1.
    Event(u32),
    /// A block of a snapshot that is older than its history.
    Older,
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Event(event) => write!(f, "event {event} of its history"),
            Self::Older => f.write_str("a block that is older than its history"),
        }
    }
}

/// A workload.
#[derive(Clone, PartialEq, Debug)]
pub struct Trace {
    /// The file that it comes from, or what stands for one.
    pub file: String,
    /// Whether that is a snapshot with a history.
    pub of_history: bool,
    /// What the first line says.
    pub header: Header,
    /// What happens, in order.
    pub events: Vec<Event>,
    /// For each event its line in the file; of a snapshot, which event of its history, from 1, and 0 for blocks that are older.
    pub lines: Vec<u32>,
    /// Frees that do not complete at once, in order of the frees.
    pub late: Vec<LateFree>,
    /// Captures, in order of their beginnings.
    pub graphs: Vec<Graph>,
    /// The segments that PyTorch took, in order.
    pub segments: Vec<RecordedSegment>,
    /// For each block the bytes requested.
    pub blocks: Vec<u64>,
    /// One more than the highest stream number.
    pub streams: u16,
    /// `a` and `f` lines.
    pub counted: u32,
}

impl Trace {
    /// The workload's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.header.name
    }

    /// The line in the file of event `index`, or 0 when the trace came from no file.
    #[must_use]
    pub fn line(&self, index: usize) -> u32 {
        self.lines.get(index).copied().unwrap_or(0)
    }

    /// Where event `index` stands in the file.
    #[must_use]
    pub fn place(&self, index: usize) -> Where {
        match (self.of_history, self.line(index)) {
            (false, line) => Where::Line(line),
            (true, 0) => Where::Older,
            (true, event) => Where::Event(event),
        }
    }

    /// The most bytes requested and not yet completely freed at one time, as the trace itself has it.
    #[must_use]
    pub fn peak_requested(&self) -> u64 {
        self.peak(|event| match event {
            Event::Free { block } => Some(block),
            Event::Complete { late } => Some(self.late[late as usize].block),
            _ => None,
        })
    }

    /// The most bytes requested and not yet freed at one time: no allocator can do with less, even one that waits for
    /// every use.
    #[must_use]
    pub fn peak_live(&self) -> u64 {
        self.peak(|event| match event {
            Event::Free { block } | Event::FreeLate { block, .. } => Some(block),
            _ => None,
        })
    }

    /// The most bytes in blocks between their allocation and the event that gives them up.
    fn peak(&self, gives_up: impl Fn(Event) -> Option<u32>) -> u64 {
        let (mut now, mut peak) = (0_u64, 0);
        for event in &self.events {
            if let Event::Alloc { bytes, .. } = *event {
                now += bytes;
                peak = peak.max(now);
            } else if let Some(block) = gives_up(*event) {
                now -= self.blocks[block as usize];
            }
        }
        peak
    }
}
