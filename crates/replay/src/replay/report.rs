//! What a replay took, as data: the JSON of `gpupool replay --json`.

use std::collections::BTreeMap;

use gpupool_device::Address;
use serde::ser::SerializeTuple;
use serde::{Serialize, Serializer};

use crate::trace::Header;

/// One trace under one policy. Sizes in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The workload's name.
    pub trace: String,
    /// The policy's name.
    pub policy: String,
    /// The preset that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// The device, as a command line calls it.
    pub device: String,
    /// The device's own name.
    pub device_name: String,
    /// Requests and frees in the trace, up to where the replay came.
    pub events: u64,
    /// Whether the replay came to the trace's end.
    pub completed: bool,
    /// Where and why it did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<Stopped>,
    /// The most that the workload had requested and not completely freed at one time.
    pub peak_requested: u64,
    /// The most in live blocks.
    pub peak_allocated: u64,
    /// The most held of the driver.
    pub peak_reserved: u64,
    /// `peak_requested` / `peak_reserved`.
    pub utilization: f64,
    /// Driver calls of the first turn by kind.
    pub driver_calls: BTreeMap<&'static str, u64>,
    /// Microseconds in them.
    pub driver_us: f64,
    /// Each turn.
    pub iterations: Vec<Iteration>,
    /// Every segment of the first turn, in order of creation.
    pub segments: Vec<SegmentReport>,
    /// Where the segments were, in order of creation: to have a simulated device place them so.
    #[serde(skip)]
    pub addresses: Vec<Address>,
    /// A digest of where each block of the first turn was: segment by ordinal, and offset. Equal digests, equal placements.
    #[serde(serialize_with = "hexadecimal")]
    pub placements: u64,
    /// Nanoseconds of host time an event costs: the median of the warm turns, less the loop itself. `None` if none
    /// was whole.
    pub ns_per_event: Option<f64>,
    /// Turns that were timed for it.
    pub timed_turns: u32,
    /// The private pools.
    pub pools: Vec<PoolReport>,
    /// What the trace's header says of the allocator it was recorded with.
    pub recorded: Header,
    /// Bytes of memory that the device had.
    pub capacity: u64,
    /// Events by which completion lagged.
    pub completion_lag: u64,
    /// The smallest capacity at which the trace completes, if it was looked for; `null` in JSON if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_capacity: Option<Option<u64>>,
}

fn hexadecimal<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{value:016x}"))
}

/// Where a replay ran out of memory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Stopped {
    /// The turn, from 1.
    pub turn: u32,
    /// The line of the trace; of a snapshot, which event of its history, from 1.
    pub line: u32,
    /// The same in words.
    pub place: String,
    /// Bytes that were requested there.
    pub requested: u64,
    /// The error.
    pub error: String,
}

/// One turn over the trace.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Iteration {
    /// Driver calls by kind.
    pub driver_calls: BTreeMap<&'static str, u64>,
    /// Microseconds in them.
    pub driver_us: f64,
    /// The most held of the driver.
    pub peak_reserved: u64,
    /// Physical handles mapped somewhere else.
    pub remaps: u64,
    /// Physical handles made anew as smaller ones.
    pub splits: u64,
    /// Bytes of addresses reserved for movable memory at the turn's end.
    pub address_bytes: u64,
}

/// A segment. In JSON a list `[ordinal, bytes, stream, pool, released_at]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentReport {
    /// Counts segments in order of creation, from 0.
    pub ordinal: u64,
    /// Its size.
    pub bytes: u64,
    /// The stream it was made for, as the trace numbers it.
    pub stream: u64,
    /// Its private pool, as the trace numbers it; 0 is the default pool.
    pub pool: u64,
    /// How many requests and frees came before it was given back; `None` if it never was.
    pub released_at: Option<u64>,
}

impl Serialize for SegmentReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_tuple(5)?;
        list.serialize_element(&self.ordinal)?;
        list.serialize_element(&self.bytes)?;
        list.serialize_element(&self.stream)?;
        list.serialize_element(&self.pool)?;
        list.serialize_element(&self.released_at)?;
        list.end()
    }
}

/// A private pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct PoolReport {
    /// The pool, as the trace numbers it.
    pub pool: u64,
    /// The most held of the driver for it.
    pub peak_reserved: u64,
    /// The most in its live blocks.
    pub peak_allocated: u64,
    /// Graphs captured into it.
    pub graphs: u64,
}
