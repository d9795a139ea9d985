//! What a trace needs of a device before its first event: streams, and a plan of when late frees complete.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use gpupool_device::StreamHandle;

use crate::trace::{Event, LateFree, Trace};

/// Handles of the trace's streams start here: drivers have meanings of their own for the lowest ones.
const FIRST: u64 = 16;
/// Handles of private streams start here.
const PRIVATE: u64 = 1 << 40;

/// Nanoseconds from one event to the next where the trace does not tell how long the program took. PyTorch's programs need 80 to 660 us where
/// it was recorded what they ask for, and some tens where it was not.
const PACE: u64 = 100_000;

/// A trace's streams on a device, and its late frees spread over private streams.
pub(super) struct Plan {
    /// Whether stream 0 of the trace is the legacy default stream.
    legacy: bool,
    /// For each block its stream.
    pub(super) stream_of: Vec<u16>,
    /// For each late free its private stream, and after how many counted events from the free's on it completes.
    pub(super) late: Vec<(u32, u64)>,
    /// Private streams in all.
    pub(super) private: u32,
    /// Events by which completion lags.
    pub(super) lag: u64,
    /// Whether work is ever under way, so that events must be counted on the device.
    pub(super) ticking: bool,
    /// Nanoseconds between two counted events: what the recorded program took, spread evenly.
    pub(super) pace: u64,
}

impl Plan {
    pub(super) fn new(trace: &Trace, lag: u64, pace_ns: Option<u64>) -> Self {
        // A lag beyond the whole trace is no different from one of its length, and bounds the work at its end.
        let lag = lag.min(u64::from(trace.counted) + 1);
        let mut stream_of = vec![0; trace.blocks.len()];
        for event in &trace.events {
            if let Event::Alloc { block, stream, .. } = *event {
                stream_of[block as usize] = stream;
            }
        }
        // The legacy default stream cannot be captured: a trace that captures its stream 0 means another one.
        let legacy = trace.graphs.iter().all(|graph| graph.stream != 0);
        let (late, private) = spread(&trace.late, trace.counted, lag);
        let pace = pace_ns.unwrap_or_else(|| recorded_pace(trace));
        Self { legacy, stream_of, ticking: lag > 0 || !late.is_empty(), late, private, lag, pace }
    }

    pub(super) fn handle(&self, stream: u16) -> StreamHandle {
        if stream == 0 && self.legacy { StreamHandle::LEGACY } else { StreamHandle(FIRST + u64::from(stream)) }
    }

    /// The trace's number of the stream with this handle.
    pub(super) fn number(&self, handle: StreamHandle) -> u64 {
        handle.0.saturating_sub(FIRST)
    }

    pub(super) fn private_handle(index: u32) -> StreamHandle {
        StreamHandle(PRIVATE + u64::from(index))
    }
}

/// Nanoseconds from one counted event to the next: what the recorded program took, spread evenly. At most a second.
fn recorded_pace(trace: &Trace) -> u64 {
    let wall = trace.header.rest.get("wall_s").and_then(serde_json::Value::as_f64);
    let Some(wall) = wall.filter(|seconds| seconds.is_finite() && *seconds > 0.0) else { return PACE };
    // A cast from a float stops at the largest number there is.
    ((wall * 1e9 / f64::from(trace.counted.max(1))) as u64).min(1_000_000_000)
}

/// Gives each late free a private stream that is idle when it is freed.
fn spread(late: &[LateFree], counted: u32, lag: u64) -> (Vec<(u32, u64)>, u32) {
    let mut busy: BinaryHeap<Reverse<(u64, u32)>> = BinaryHeap::new();
    let mut streams = 0;
    let plan = late
        .iter()
        .map(|free| {
            let completes = u64::from(free.completes_at.unwrap_or(counted)) + lag;
            let freed = u64::from(free.freed_at);
            let stream = match busy.peek() {
                Some(Reverse((until, stream))) if *until < freed => {
                    let stream = *stream;
                    busy.pop();
                    stream
                }
                _ => {
                    streams += 1;
                    streams - 1
                }
            };
            busy.push(Reverse((completes, stream)));
            (stream, (completes + 1).saturating_sub(freed))
        })
        .collect();
    (plan, streams)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_streams_serve_again_once_idle() {
        let free = |freed_at, completes_at| LateFree { block: 0, freed_at, completes_at };
        let late = [free(2, Some(4)), free(3, None), free(4, Some(4)), free(5, Some(6)), free(9, Some(9))];
        let (plan, streams) = spread(&late, 10, 0);
        // The free at 4 finds the first stream busy until 4; the one at 5 finds it idle.
        assert_eq!(plan, [(0, 3), (1, 8), (2, 1), (0, 2), (2, 1)]);
        assert_eq!(streams, 3);
        let (plan, streams) = spread(&late, 10, 100);
        assert_eq!(plan[2], (2, 101));
        assert_eq!(streams, 5);
    }
}
