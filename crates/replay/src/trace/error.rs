//! What can be wrong with a trace.

use crate::text::TextProblem;

/// A trace cannot be used, and why.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {}{problem}", crate::text::at_line(*line))]
pub struct TraceError {
    /// The file, or what stands for one.
    pub file: String,
    /// The line, from 1; the header is line 1. 0 if the file could not be opened.
    pub line: u64,
    /// What is wrong there.
    #[source]
    pub problem: TraceProblem,
}

/// What is wrong with a line of a trace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceProblem {
    /// The file itself cannot be read.
    #[error(transparent)]
    Text(#[from] TextProblem),
    /// The first line is no header.
    #[error("the header is not right: {0}")]
    Header(#[source] serde_json::Error),
    /// The header names another format.
    #[error("the format is {found:?}, not \"torch-trace-1\"")]
    Format {
        /// What it names.
        found: String,
    },
    /// A line that begins with no known letter.
    #[error("unknown event {found:?}")]
    UnknownEvent {
        /// How the line begins.
        found: String,
    },
    /// A line with too few or too many words.
    #[error("a line `{form}` is expected, not {found:?}")]
    Form {
        /// How such a line looks.
        form: &'static str,
        /// What is there.
        found: String,
    },
    /// A word that should be a number.
    #[error("{what} {found:?} is not a number")]
    Number {
        /// What it should be the number of.
        what: &'static str,
        /// What is there.
        found: String,
    },
    /// A size that no GPU has.
    #[error("{bytes} bytes are absurd: a request or segment has 1 byte to {} bytes", super::MAX_BYTES)]
    Size {
        /// The size.
        bytes: u64,
    },
    /// An address range that wraps around.
    #[error("a segment of {bytes} bytes does not fit at {address:#x}")]
    Address {
        /// Where it begins.
        address: u64,
        /// Its size.
        bytes: u64,
    },
    /// A stream number that is no small integer.
    #[error("stream {stream} is absurd: streams are numbered by first use, below {}", super::MAX_STREAMS)]
    Stream {
        /// The number.
        stream: u64,
    },
    /// An `a` line with the number that stands for blocks from before the recording.
    #[error("allocation 0 stands for what was allocated before the recording, so it cannot be allocated")]
    AllocatesZero,
    /// An `a` line with a number used before.
    #[error("allocation {id} exists already (line {before})")]
    AllocatedTwice {
        /// The number.
        id: u64,
        /// Where it was allocated.
        before: u64,
    },
    /// An `f` or `c` line with a number that no `a` line had.
    #[error("allocation {id} was never allocated")]
    NeverAllocated {
        /// The number.
        id: u64,
    },
    /// A second `f` line.
    #[error("allocation {id} was freed already (line {before})")]
    FreedTwice {
        /// The number.
        id: u64,
        /// Where it was freed.
        before: u64,
    },
    /// A `c` line with no `f` line before it.
    #[error("the free of allocation {id} completes before it was freed")]
    CompletedUnfreed {
        /// The number.
        id: u64,
    },
    /// A second `c` line.
    #[error("the free of allocation {id} completed already")]
    CompletedTwice {
        /// The number.
        id: u64,
    },
    /// A `B` line with a graph captured before.
    #[error("graph {graph} was captured already (line {before})")]
    CapturedTwice {
        /// The graph.
        graph: u64,
        /// Where its capture began.
        before: u64,
    },
    /// A `B` line with a stream that is capturing.
    #[error("stream {stream} is already capturing graph {graph}")]
    StreamCapturing {
        /// The stream.
        stream: u64,
        /// The graph that is being captured there.
        graph: u64,
    },
    /// A `B` line that gives a graph the default pool.
    #[error("pool 0 is the default pool: a graph cannot own it")]
    DefaultPool,
    /// An `E` line with a graph that is not being captured.
    #[error("graph {graph} is not being captured")]
    NotCapturing {
        /// The graph.
        graph: u64,
    },
    /// An `S` line over a segment that exists.
    #[error("the segment of {bytes} bytes at {address:#x} overlaps one that exists (line {other})")]
    SegmentOverlaps {
        /// Where it begins.
        address: u64,
        /// Its size.
        bytes: u64,
        /// Where the other was taken.
        other: u64,
    },
    /// An `s` line that fits no segment.
    #[error("there is no segment of {bytes} bytes at {address:#x} to give back")]
    NoSegment {
        /// Where it should begin.
        address: u64,
        /// The size it should have.
        bytes: u64,
    },
    /// More events than are read.
    #[error("more than {limit} events")]
    TooManyEvents {
        /// The most that are read.
        limit: usize,
    },
    /// A count in the header is not that of the file.
    #[error("the file is truncated or damaged: its header promises {field} = {promised}, the file has {found}")]
    Count {
        /// The header's field.
        field: &'static str,
        /// What it says.
        promised: u64,
        /// What the file has.
        found: u64,
    },
}
