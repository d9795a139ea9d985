//! What can be wrong with a conformance file.

use crate::text::TextProblem;
use crate::trace::MAX_BYTES;

/// A conformance file cannot be used, and why.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {}{problem}", crate::text::at_line(*line))]
pub struct ConformError {
    /// The file, or what stands for one.
    pub file: String,
    /// The line, from 1; the header is line 1. 0 if the file could not be opened.
    pub line: u64,
    /// What is wrong there.
    #[source]
    pub problem: ConformProblem,
}

/// What is wrong with a line of a conformance file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConformProblem {
    /// The file itself cannot be read.
    #[error(transparent)]
    Text(#[from] TextProblem),
    /// The line is no JSON object.
    #[error("this is not a JSON object: {0}")]
    Json(#[source] serde_json::Error),
    /// The header names another format.
    #[error("the format is {found:?}, not \"conform-1\"")]
    Format {
        /// What it names.
        found: String,
    },
    /// The header names a PyTorch whose rules nobody wrote down.
    #[error("version {found:?} is not known: 2.11 and 2.15 are")]
    Version {
        /// What it names.
        found: String,
    },
    /// The header names another way to write counters.
    #[error("stats_shape {found:?} is not known: \"current\" and \"current,peak,allocated,freed\" are")]
    StatsShape {
        /// What it names.
        found: String,
    },
    /// The header's limits contradict each other.
    #[error("device_total {total} and device_limit {limit} are not the sizes of a device")]
    DeviceSize {
        /// Bytes in all.
        total: u64,
        /// Bytes that the driver gives.
        limit: u64,
    },
    /// An operation nobody knows.
    #[error("unknown op {found:?}")]
    UnknownOp {
        /// Its name.
        found: String,
    },
    /// A field that the line should have.
    #[error("field `{field}` is missing")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A field of the wrong type.
    #[error("field `{field}` should be {expected}, not {found}")]
    Type {
        /// The field.
        field: String,
        /// What it should be.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A field that the operation does not have.
    #[error("field `{field}` has no meaning for this op")]
    UnknownField {
        /// The field.
        field: String,
    },
    /// A counter nobody knows.
    #[error("counter `{counter}` is not known")]
    UnknownCounter {
        /// Its name.
        counter: String,
    },
    /// A size that no GPU has.
    #[error("{bytes} bytes are absurd: a request or segment has 1 byte to {MAX_BYTES} bytes")]
    Size {
        /// The size.
        bytes: u64,
    },
    /// An allocation number that is in use.
    #[error("allocation {id} is live already")]
    AllocatedTwice {
        /// The number.
        id: u64,
    },
    /// An allocation number that no live allocation has.
    #[error("allocation {id} was never allocated, or was freed already")]
    NotLive {
        /// The number.
        id: u64,
    },
    /// A segment out of order.
    #[error("segment {found} is made where segment {expected} comes next")]
    SegmentOrder {
        /// The number it should have.
        expected: u64,
        /// The number it has.
        found: u64,
    },
    /// A segment that does not exist.
    #[error("segment {segment} does not exist here")]
    NoSegment {
        /// Its number.
        segment: u64,
    },
    /// A segment over another, or at the end of the address space.
    #[error("segment {segment} cannot be at {address:#x}")]
    Address {
        /// Its number.
        segment: u64,
        /// Its address in the file.
        address: u64,
    },
    /// A fraction outside of 0 to 1.
    #[error("fraction {fraction} is not between 0 and 1")]
    Fraction {
        /// The fraction.
        fraction: f64,
    },
    /// A stream that begins to capture twice, or ends without having begun.
    #[error("stream {stream} {}", if *.capturing { "is capturing already" } else { "is not capturing" })]
    Capture {
        /// The stream.
        stream: u64,
        /// Whether it is capturing.
        capturing: bool,
    },
    /// More operations than are read.
    #[error("more than {limit} operations")]
    TooManyOps {
        /// The most that are read.
        limit: usize,
    },
    /// The `conf` in the header is none.
    #[error("the conf {conf:?} is not right: {problem}")]
    Conf {
        /// What the header says.
        conf: String,
        /// What is wrong with it.
        problem: String,
    },
}
