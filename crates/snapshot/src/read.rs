//! Reading a JSON snapshot: rules S1 to S3.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};

use serde_json::{Map, Value};

use crate::model::{Block, BlockStatus, Part, Segment, Snapshot};

/// No snapshot of this size is read.
const LARGEST: u64 = 1 << 28;
/// No GPU has an ordinal this high.
const MOST_DEVICES: u64 = 1 << 10;

/// A file is no snapshot, and where it shows.
#[derive(Debug, thiserror::Error)]
#[error("{file}{}: {problem}", if .path.is_empty() { String::new() } else { format!(": {}", .path) })]
pub struct ReadError {
    /// The file, or what stands for one.
    pub file: String,
    /// The place in it, like `segments[3].blocks[0].size`; empty if it is the file as a whole.
    pub path: String,
    /// What is wrong there.
    #[source]
    pub problem: Problem,
}

/// What is wrong with a snapshot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The file cannot be read.
    #[error("cannot read the file: {0}")]
    Io(#[source] io::Error),
    /// The file is larger than any snapshot.
    #[error("the file has more than {LARGEST} bytes")]
    TooLarge,
    /// The file is one of Python's pickles.
    #[error("this is a pickle: this version reads snapshots as JSON")]
    Pickle,
    /// The file is no JSON.
    #[error("this is not JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// A value of another kind than there should be.
    #[error("{expected} is expected here, not {found}")]
    Kind {
        /// What should be there.
        expected: Expected,
        /// What is there.
        found: &'static str,
    },
    /// A key that must be there is not.
    #[error("the key is missing")]
    Missing,
    /// A word that should be one of a few.
    #[error("{found:?} is not known here")]
    Word {
        /// The word.
        found: String,
    },
    /// A number beyond what it can be.
    #[error("{value} is too large")]
    Range {
        /// The number.
        value: u64,
    },
    /// The blocks of a segment do not fill it.
    #[error("the blocks add up to {blocks} bytes, the segment has {segment}")]
    Tiling {
        /// Bytes in blocks.
        blocks: u64,
        /// Bytes of the segment.
        segment: u64,
    },
    /// A block is not where the one before it ends.
    #[error("the block is at {address:#x}, but the one before it ends at {expected:#x}")]
    BlockAddress {
        /// Where it is.
        address: u64,
        /// Where it should be.
        expected: u64,
    },
    /// A block or segment of no bytes.
    #[error("a size of 0 bytes")]
    Empty,
    /// Two segments have bytes in common.
    #[error("the segment at {address:#x} overlaps the one at {other:#x}")]
    Overlap {
        /// Where it is.
        address: u64,
        /// Where the other is.
        other: u64,
    },
}

/// What should be at some place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Expected {
    /// An object.
    Object,
    /// A list.
    List,
    /// An unsigned integer.
    Unsigned,
    /// A string.
    Text,
    /// True or false.
    Truth,
    /// A pair of unsigned integers.
    Pair,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Object => "an object",
            Self::List => "a list",
            Self::Unsigned => "an unsigned integer",
            Self::Text => "a string",
            Self::Truth => "true or false",
            Self::Pair => "a pair of unsigned integers",
        })
    }
}

impl Snapshot {
    /// Reads a JSON snapshot. `name` stands for the file in errors. At most 256 MiB are read.
    ///
    /// # Errors
    ///
    /// When the input is no snapshot; the error names the place.
    pub fn read_json(name: &str, input: impl Read) -> Result<Self, ReadError> {
        let whole = |problem| ReadError { file: name.to_owned(), path: String::new(), problem };
        let mut bytes = Vec::new();
        input.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|e| whole(Problem::Io(e)))?;
        if bytes.len() as u64 > LARGEST {
            return Err(whole(Problem::TooLarge));
        }
        if bytes.first() == Some(&0x80) {
            return Err(whole(Problem::Pickle));
        }
        let value: Value = serde_json::from_slice(&bytes).map_err(|e| whole(Problem::Json(e)))?;
        drop(bytes);
        snapshot(value).map_err(|Wrong { path, problem }| ReadError { file: name.to_owned(), path, problem })
    }
}

/// A problem whose path grows as it is handed outwards.
struct Wrong {
    path: String,
    problem: Problem,
}

impl Wrong {
    fn inside(mut self, outer: &str) -> Self {
        let dot = if self.path.is_empty() || self.path.starts_with('[') { "" } else { "." };
        self.path = format!("{outer}{dot}{}", self.path);
        self
    }
}

impl From<Problem> for Wrong {
    fn from(problem: Problem) -> Self {
        Self { path: String::new(), problem }
    }
}

fn kind(expected: Expected, found: &Value) -> Wrong {
    let found = match found {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number of another kind",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    Problem::Kind { expected, found }.into()
}

fn snapshot(value: Value) -> Result<Snapshot, Wrong> {
    let mut top = object(value)?;
    let mut segments = Vec::new();
    for (index, value) in required(&mut top, "segments", list)?.into_iter().enumerate() {
        segments.push(segment(value).map_err(|wrong| wrong.inside(&format!("segments[{index}]")))?);
    }
    no_overlap(&segments)?;
    let traces = optional(&mut top, "device_traces", list)?.unwrap_or_default();
    let device_traces = traces
        .into_iter()
        .enumerate()
        .map(|(index, trace)| list(trace).map_err(|wrong| wrong.inside(&format!("device_traces[{index}]"))))
        .collect::<Result<_, _>>()?;
    Ok(Snapshot {
        segments,
        device_traces,
        allocator_settings: optional(&mut top, "allocator_settings", pairs)?.unwrap_or_default(),
        external_annotations: optional(&mut top, "external_annotations", list)?.unwrap_or_default(),
        gpupool: optional(&mut top, "gpupool", pairs)?.unwrap_or_default(),
    })
}

fn segment(value: Value) -> Result<Segment, Wrong> {
    let mut fields = object(value)?;
    let address = required(&mut fields, "address", unsigned)?;
    let total_size = required(&mut fields, "total_size", size)?;
    let Some(end) = address.checked_add(total_size) else {
        return Err(Wrong::from(Problem::Range { value: total_size }).inside("total_size"));
    };
    let mut blocks = Vec::new();
    let mut next = address;
    for (index, value) in required(&mut fields, "blocks", list)?.into_iter().enumerate() {
        let here = |wrong: Wrong| wrong.inside(&format!("blocks[{index}]"));
        let block = block(value, next).map_err(here)?;
        next = match next.checked_add(block.size) {
            Some(next) if next <= end => next,
            _ => {
                return Err(
                    Problem::Tiling { blocks: next.saturating_add(block.size) - address, segment: total_size }.into()
                );
            }
        };
        blocks.push(block);
    }
    if next != end {
        return Err(Problem::Tiling { blocks: next - address, segment: total_size }.into());
    }
    let sum = |pick: fn(&Block) -> bool, of: fn(&Block) -> u64| blocks.iter().filter(|b| pick(b)).map(of).sum::<u64>();
    let device = required(&mut fields, "device", unsigned)?;
    let device = match u32::try_from(device) {
        Ok(ordinal) if device < MOST_DEVICES => ordinal,
        _ => return Err(Wrong::from(Problem::Range { value: device }).inside("device")),
    };
    let kind = optional(&mut fields, "segment_type", text)?;
    Ok(Segment {
        device,
        address,
        total_size,
        allocated_size: sum(|b| b.state == BlockStatus::ActiveAllocated, |b| b.size),
        active_size: sum(|b| b.state != BlockStatus::Inactive, |b| b.size),
        requested_size: sum(|b| b.state != BlockStatus::Inactive, |b| b.requested_size.min(b.size)),
        stream: required(&mut fields, "stream", unsigned)?,
        any_stream: optional(&mut fields, "any_stream", truth)?.unwrap_or(false),
        segment_type: match kind.as_deref() {
            Some("small") => Part::Small,
            Some("large") => Part::Large,
            None if total_size == 2 << 20 => Part::Small,
            None => Part::Large,
            Some(other) => return Err(word(other).inside("segment_type")),
        },
        segment_pool_id: optional(&mut fields, "segment_pool_id", pair)?.unwrap_or((0, 0)),
        is_expandable: optional(&mut fields, "is_expandable", truth)?.unwrap_or(false),
        frames: optional(&mut fields, "frames", list)?.unwrap_or_default(),
        blocks,
    })
}

fn block(value: Value, at: u64) -> Result<Block, Wrong> {
    let mut fields = object(value)?;
    let address = optional(&mut fields, "address", unsigned)?.unwrap_or(at);
    if address != at {
        return Err(Wrong::from(Problem::BlockAddress { address, expected: at }).inside("address"));
    }
    let size = required(&mut fields, "size", size)?;
    let state = required(&mut fields, "state", text)?;
    Ok(Block {
        address,
        size,
        requested_size: optional(&mut fields, "requested_size", unsigned)?.unwrap_or(size),
        state: match state.as_str() {
            "active_allocated" => BlockStatus::ActiveAllocated,
            "active_pending_free" | "active_awaiting_free" => BlockStatus::ActivePendingFree,
            "inactive" => BlockStatus::Inactive,
            other => return Err(word(other).inside("state")),
        },
        frames: optional(&mut fields, "frames", list)?.unwrap_or_default(),
    })
}

/// No two segments of a device have bytes in common.
fn no_overlap(segments: &[Segment]) -> Result<(), Wrong> {
    let mut ends: BTreeMap<(u32, u64), (u64, usize)> = BTreeMap::new();
    for (index, segment) in segments.iter().enumerate() {
        // Neither sum overflows: it was checked as the segment was read.
        let end = segment.address + segment.total_size;
        let before = ends.range((segment.device, 0)..(segment.device, end)).next_back();
        if let Some(((_, other), (other_end, _))) = before
            && *other_end > segment.address
        {
            let problem = Problem::Overlap { address: segment.address, other: *other };
            return Err(Wrong::from(problem).inside(&format!("segments[{index}]")));
        }
        ends.insert((segment.device, segment.address), (end, index));
    }
    Ok(())
}

fn word(found: &str) -> Wrong {
    Problem::Word { found: found.chars().take(40).collect() }.into()
}

fn object(value: Value) -> Result<Map<String, Value>, Wrong> {
    match value {
        Value::Object(map) => Ok(map),
        other => Err(kind(Expected::Object, &other)),
    }
}

fn pairs(value: Value) -> Result<BTreeMap<String, Value>, Wrong> {
    Ok(object(value)?.into_iter().collect())
}

fn list(value: Value) -> Result<Vec<Value>, Wrong> {
    match value {
        Value::Array(list) => Ok(list),
        other => Err(kind(Expected::List, &other)),
    }
}

fn unsigned(value: Value) -> Result<u64, Wrong> {
    value.as_u64().ok_or_else(|| kind(Expected::Unsigned, &value))
}

fn size(value: Value) -> Result<u64, Wrong> {
    match unsigned(value)? {
        0 => Err(Problem::Empty.into()),
        bytes => Ok(bytes),
    }
}

fn truth(value: Value) -> Result<bool, Wrong> {
    value.as_bool().ok_or_else(|| kind(Expected::Truth, &value))
}

fn text(value: Value) -> Result<String, Wrong> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(kind(Expected::Text, &other)),
    }
}

fn pair(value: Value) -> Result<(u64, u64), Wrong> {
    match value.as_array().map(Vec::as_slice) {
        Some([a, b]) => match (a.as_u64(), b.as_u64()) {
            (Some(a), Some(b)) => Ok((a, b)),
            _ => Err(kind(Expected::Pair, &value)),
        },
        _ => Err(kind(Expected::Pair, &value)),
    }
}

fn optional<T>(
    fields: &mut Map<String, Value>,
    key: &str,
    read: impl FnOnce(Value) -> Result<T, Wrong>,
) -> Result<Option<T>, Wrong> {
    match fields.remove(key) {
        None => Ok(None),
        Some(value) => read(value).map(Some).map_err(|wrong| wrong.inside(key)),
    }
}

fn required<T>(
    fields: &mut Map<String, Value>,
    key: &str,
    read: impl FnOnce(Value) -> Result<T, Wrong>,
) -> Result<T, Wrong> {
    optional(fields, key, read)?.ok_or_else(|| Wrong::from(Problem::Missing).inside(key))
}
