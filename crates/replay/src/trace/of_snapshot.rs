//! A snapshot's history as a trace: what the job asked for, so that it can be asked of another policy.
//!
//! * **H1** The requests, their streams, their frees and the order of all of them are those of the history.
//! * **H2** Blocks from before the history are requested at its beginning: those that are still live at its end or that it frees. What
//!   came and went before is not known.
//! * **H3** Captures are those that the snapshot tells. PyTorch's tells none: its requests into private pools are then ordinary ones,
//!   and [`WhatIf::notes`] says how much that is. Nothing is concluded about graphs.
//! * **H4** A request that ended the job in out of memory is made at the end.

use std::collections::{BTreeMap, HashMap};

use gpupool_allocator::{Config, Policy};
use gpupool_device::Address;
use gpupool_snapshot::{Action, BlockStatus, Event, Snapshot};

use super::write::{Peaks, TraceWriter};
use super::{MAX_BYTES, MAX_STREAMS, Trace, TraceError, TraceProblem, Where};

/// Why a snapshot gives no trace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WhatIfError {
    /// No history.
    #[error(
        "{name}: the snapshot has no history{}: record one (torch.cuda.memory._record_memory_history, Allocator::record_history)",
        left_out(*.unknown, *.absurd).map_or_else(String::new, |left| format!(" but for {left}"))
    )]
    NoHistory {
        /// The file.
        name: String,
        /// Events of kinds that are not known.
        unknown: u64,
        /// Events of a size or at an address that nothing can have.
        absurd: u64,
    },
    /// More streams than a trace may have.
    #[error("{name}: the history has more than {MAX_STREAMS} streams")]
    Streams {
        /// The file.
        name: String,
    },
    /// The history contradicts itself.
    #[error("{name}: the history makes no trace, at {place}: {problem}")]
    Trace {
        /// The file.
        name: String,
        /// Where.
        place: Where,
        /// How.
        #[source]
        problem: TraceProblem,
    },
}

/// What a reader left out of a history, in words.
fn left_out(unknown: u64, absurd: u64) -> Option<String> {
    let unknown = (unknown > 0).then(|| format!("{unknown} events of kinds that are not known"));
    let absurd = (absurd > 0).then(|| format!("{absurd} events of sizes or at addresses that nothing can have"));
    let both: Vec<String> = unknown.into_iter().chain(absurd).collect();
    (!both.is_empty()).then(|| both.join(" and "))
}

/// A trace made of a snapshot.
#[derive(Clone, Debug)]
pub struct WhatIf {
    /// What to replay.
    pub trace: Trace,
    /// What the trace does not tell, in words.
    pub notes: Vec<String>,
}

/// Numbers of streams by handle; the default stream is 0.
struct Streams(HashMap<u64, u16>);

impl Streams {
    fn number(&mut self, handle: u64) -> u16 {
        let next = self.0.len() as u16;
        *self.0.entry(handle).or_insert(next)
    }
}

/// The history of the device that has the most events, as a trace. `name` stands for the file.
///
/// # Errors
///
/// See [`WhatIfError`].
pub fn what_if(name: &str, snapshot: &Snapshot) -> Result<WhatIf, WhatIfError> {
    let mut devices: Vec<(u32, &Vec<Event>)> = (0..).zip(&snapshot.device_traces).collect();
    devices.sort_by_key(|(device, trace)| (std::cmp::Reverse(trace.len()), *device));
    let Some((device, trace)) = devices.first().copied().filter(|(_, trace)| !trace.is_empty()) else {
        let (unknown, absurd) = (snapshot.unknown_events, snapshot.absurd_events);
        return Err(WhatIfError::NoHistory { name: name.to_owned(), unknown, absurd });
    };
    let mut notes = Vec::new();
    notes.extend(left_out(snapshot.unknown_events, snapshot.absurd_events).map(|left| format!("{left} were left out")));
    if devices.iter().filter(|(_, trace)| !trace.is_empty()).count() > 1 {
        notes.push(format!("the history of device {device} only, which has the most events"));
    }
    let mut streams = Streams(HashMap::from([(0, 0)]));
    let all = trace.iter().filter(|event| matches!(event.action, Action::Alloc | Action::Oom));
    let handles = all.map(|event| event.stream).chain(snapshot.segments.iter().map(|segment| segment.stream));
    let distinct: std::collections::HashSet<u64> = handles.collect();
    if distinct.len() as u64 >= MAX_STREAMS {
        return Err(WhatIfError::Streams { name: name.to_owned() });
    }

    let mut writer = TraceWriter::new();
    // For each line which event it is made of.
    let mut made_of: Vec<u32> = Vec::new();
    let mut live: HashMap<u64, Live> = HashMap::new();
    let before = from_before(snapshot, device, trace);
    let bytes = |bytes: u64| bytes.clamp(1, MAX_BYTES);
    for (address, size, stream) in &before {
        live.insert(*address, Live::new(writer.alloc(bytes(*size), streams.number(*stream))));
    }
    made_of.resize(writer.lines(), 0);
    if !before.is_empty() {
        let sum = before.iter().fold(0_u64, |sum, (_, size, _)| sum.saturating_add(*size));
        notes.push(format!(
            "{} blocks ({sum} bytes) are older than the history and are requested at its beginning",
            before.len()
        ));
    }
    let complete = segments_are_told(snapshot, device, trace);
    let captures = captures(snapshot);
    let mut open: Vec<usize> = Vec::new();
    let mut private = (0_u64, 0_u64);
    let pools = private_ranges(snapshot, device);
    for (at, event) in trace.iter().enumerate() {
        for (number, capture) in captures.iter().enumerate() {
            if capture.end == Some(at) && open.contains(&number) {
                open.retain(|open| *open != number);
                writer.end(number as u64);
            }
            if capture.begin == at
                && let Some(stream) = capture_stream(trace, capture)
            {
                open.push(number);
                writer.begin(number as u64, capture.pool, streams.number(stream));
            }
        }
        match event.action {
            Action::Alloc => {
                // An address that is handed out again was freed, whether or not that is told.
                if let Some(lost) = live.remove(&event.address) {
                    lost.complete(&mut writer);
                }
                let id = writer.alloc(bytes(event.size), streams.number(event.stream));
                live.insert(event.address, Live::new(id));
                let in_private = pools.iter().any(|(start, end)| (*start..*end).contains(&event.address))
                    || event.pool.is_some_and(|pool| pool != (0, 0));
                if in_private && captures.is_empty() {
                    private.0 += 1;
                    private.1 = private.1.saturating_add(event.size);
                }
            }
            Action::FreeRequested => {
                if let Some(block) = live.get_mut(&event.address) {
                    block.free(&mut writer);
                }
            }
            Action::FreeCompleted => {
                if let Some(block) = live.remove(&event.address) {
                    block.complete(&mut writer);
                }
            }
            Action::SegmentAlloc if complete => {
                let stream = streams.number(event.stream);
                writer.take(Address(event.address), event.size, stream);
            }
            Action::SegmentFree if complete => writer.give_back(Address(event.address), event.size),
            _ => {}
        }
        made_of.resize(writer.lines(), at as u32 + 1);
    }
    for number in open {
        writer.end(number as u64);
    }
    if let Some(last) = trace.iter().rev().find(|e| matches!(e.action, Action::Alloc | Action::Oom))
        && last.action == Action::Oom
    {
        writer.alloc(bytes(last.size), streams.number(last.stream));
        let most = if last.size > MAX_BYTES { ", as one of 1 TiB" } else { "" };
        notes.push(format!("the request of {} bytes that failed is made at the end{most}", last.size));
    }
    if private.0 > 0 {
        notes.push(format!(
            "{} requests ({} bytes) went to private pools; the history does not tell which captures made them, so they are replayed as \
             ordinary requests: this says nothing about graphs",
            private.0, private.1
        ));
    }
    if !complete {
        notes.push("segments from before the history are not known, so no addresses are replayed".to_owned());
    }
    let conf = snapshot.allocator_settings.get("PYTORCH_CUDA_ALLOC_CONF").and_then(|conf| conf.as_str()).unwrap_or("");
    let followed =
        [Policy::Torch215, Policy::Torch211].iter().all(|policy| Config::parse_pytorch(conf, *policy).is_ok());
    if !followed {
        notes.push(format!("PYTORCH_CUDA_ALLOC_CONF={conf} is not followed: the policies run with their defaults"));
    }
    made_of.resize(writer.lines(), trace.len() as u32);
    let requested = snapshot.peaks().iter().find(|peak| peak.device == device).map_or(0, |peak| peak.bytes);
    let reserved = peak_reserved(snapshot, device, trace);
    let peaks = Peaks { allocated: requested, requested, active: requested, reserved };
    let file = std::path::Path::new(name).file_name().map_or(name.into(), |file| file.to_string_lossy());
    // The header is line 1.
    let event_of = |line: u32| made_of.get((line as usize).saturating_sub(2)).copied().unwrap_or(0);
    let broken = |error: TraceError| {
        let event = event_of(u32::try_from(error.line).unwrap_or(u32::MAX));
        let place = if event == 0 { Where::Older } else { Where::Event(event) };
        WhatIfError::Trace { name: name.to_owned(), place, problem: error.problem }
    };
    let text = writer.finish(&file, if followed { conf } else { "" }, peaks).map_err(|error| {
        let problem = crate::text::TextProblem::Io(error).into();
        broken(TraceError { file: name.to_owned(), line: 1, problem })
    })?;
    let mut trace = Trace::parse(name, &text[..]).map_err(broken)?;
    trace.of_history = true;
    trace.lines.iter_mut().for_each(|line| *line = event_of(*line));
    Ok(WhatIf { trace, notes })
}

/// A block of the history: its number in the trace, and whether its free was told. Whoever recorded may have left out either part of it.
struct Live {
    id: u64,
    freed: bool,
}

impl Live {
    fn new(id: u64) -> Self {
        Self { id, freed: false }
    }

    fn free(&mut self, writer: &mut TraceWriter) {
        if !self.freed {
            writer.free(self.id);
            self.freed = true;
        }
    }

    fn complete(mut self, writer: &mut TraceWriter) {
        self.free(writer);
        writer.complete(self.id);
    }
}

/// Blocks from before the history: address, bytes requested, stream.
fn from_before(snapshot: &Snapshot, device: u32, trace: &[Event]) -> Vec<(u64, u64, u64)> {
    let mut known: HashMap<u64, bool> = HashMap::new();
    let mut before = Vec::new();
    for event in trace {
        match event.action {
            Action::Alloc => {
                known.insert(event.address, true);
            }
            // The first that is told of it is its free, or that its free is complete.
            Action::FreeRequested | Action::FreeCompleted if !known.contains_key(&event.address) => {
                known.insert(event.address, true);
                before.push((event.address, event.size, event.stream));
            }
            _ => {}
        }
    }
    for segment in snapshot.segments.iter().filter(|segment| segment.device == device) {
        for block in segment.blocks.iter().filter(|block| block.state != BlockStatus::Inactive) {
            if !known.contains_key(&block.address) {
                before.push((block.address, block.requested_size.min(block.size), segment.stream));
            }
        }
    }
    before.sort_unstable();
    before
}

/// Whether the history tells of every segment, so that replaying their addresses makes sense.
fn segments_are_told(snapshot: &Snapshot, device: u32, trace: &[Event]) -> bool {
    let mut standing: BTreeMap<u64, u64> = BTreeMap::new();
    for event in trace {
        match event.action {
            Action::SegmentAlloc => {
                // Events whose end no address has were left out.
                let before = standing.range(..event.address + event.size).next_back();
                if event.size == 0 || before.is_some_and(|(start, bytes)| start + bytes > event.address) {
                    return false;
                }
                standing.insert(event.address, event.size);
            }
            Action::SegmentFree if standing.remove(&event.address) != Some(event.size) => return false,
            Action::SegmentMap | Action::SegmentUnmap => return false,
            _ => {}
        }
    }
    let segments = snapshot.segments.iter().filter(|segment| segment.device == device);
    let held: BTreeMap<u64, u64> = segments.map(|segment| (segment.address, segment.total_size)).collect();
    standing == held
}

/// A capture that the snapshot tells.
struct Told {
    pool: u64,
    begin: usize,
    end: Option<usize>,
}

fn captures(snapshot: &Snapshot) -> Vec<Told> {
    let list = snapshot.gpupool.get("captures").and_then(|list| list.as_array()).into_iter().flatten();
    let mut numbers: HashMap<(u64, u64), u64> = HashMap::new();
    list.filter_map(|capture| {
        let pool = (capture["pool"][0].as_u64()?, capture["pool"][1].as_u64()?);
        let next = numbers.len() as u64 + 1;
        let pool = *numbers.entry(pool).or_insert(next);
        let index = |key: &str| capture[key].as_u64().and_then(|at| usize::try_from(at).ok());
        Some(Told { pool, begin: index("begin")?, end: index("end") })
    })
    .collect()
}

/// The stream that a capture's first request is on: the one captured, as far as the history tells.
fn capture_stream(trace: &[Event], capture: &Told) -> Option<u64> {
    let inside = trace.get(capture.begin..capture.end.unwrap_or(trace.len()).min(trace.len()))?;
    inside.iter().find(|event| event.action == Action::Alloc && event.pool != Some((0, 0))).map(|event| event.stream)
}

/// The address ranges of private pools, at the end.
fn private_ranges(snapshot: &Snapshot, device: u32) -> Vec<(u64, u64)> {
    let private = snapshot.segments.iter().filter(|s| s.device == device && s.segment_pool_id != (0, 0));
    private.map(|segment| (segment.address, segment.address + segment.total_size)).collect()
}

/// The most that was reserved: what is reserved at the end, followed back through the history.
fn peak_reserved(snapshot: &Snapshot, device: u32, trace: &[Event]) -> u64 {
    let mut now: u64 = snapshot.segments.iter().filter(|s| s.device == device).map(|s| s.total_size).sum();
    let mut peak = now;
    for event in trace.iter().rev() {
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => now = now.saturating_sub(event.size),
            Action::SegmentFree | Action::SegmentUnmap => now = now.saturating_add(event.size),
            _ => {}
        }
        peak = peak.max(now);
    }
    peak
}
