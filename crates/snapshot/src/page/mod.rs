//! A snapshot as one page: no network, no other files, no code but ours.
//!
//! What the page needs is put into it as columns of numbers; it draws everything itself (`page.js`). The work of a picture depends on the
//! pixels across, not on the events: see there.

use std::collections::HashMap;
use std::io::{self, Write};

use serde::Serialize;

use crate::model::{Action, BlockStatus, Snapshot};
use crate::owners::Owner;
use crate::stacks::StackId;
use crate::summary::Summary;

/// Everything that the page shows.
#[derive(Serialize)]
struct Data<'a> {
    title: &'a str,
    devices: Vec<Device>,
    segments: Vec<Segment>,
    owners: Vec<String>,
    /// For each owner its frames, one a line.
    stacks: Vec<String>,
    pools: Vec<String>,
    streams: Vec<String>,
    summary: &'a Summary,
    advice: Vec<(u64, String)>,
    settings: &'a std::collections::BTreeMap<String, serde_json::Value>,
    gpupool: &'a std::collections::BTreeMap<String, serde_json::Value>,
}

/// The blocks that a device's history tells of, as columns: block n was handed out by event `start[n]` and was free again with event
/// `end[n]`.
#[derive(Serialize, Default)]
struct Device {
    device: u32,
    events: usize,
    /// Microseconds of each event since the first.
    times: Vec<u64>,
    /// Events that ended in out of memory.
    oom: Vec<usize>,
    /// Whether the history tells of the block's beginning; else it was there before.
    made: Vec<u8>,
    start: Vec<usize>,
    end: Vec<usize>,
    size: Vec<u64>,
    address: Vec<u64>,
    owner: Vec<u32>,
    pool: Vec<u32>,
    stream: Vec<u32>,
}

#[derive(Serialize)]
struct Segment {
    device: u32,
    address: u64,
    size: u64,
    pool: u32,
    stream: u32,
    part: &'static str,
    /// Size, state (0 live, 1 pending, 2 free), owner, requested, the event that handed it out or -1.
    blocks: Vec<(u64, u8, u32, u64, i64)>,
}

/// Numbers for things, in order of appearance.
struct Numbers<K> {
    numbers: HashMap<K, u32>,
    names: Vec<String>,
}

impl<K: std::hash::Hash + Eq> Numbers<K> {
    fn new() -> Self {
        Self { numbers: HashMap::new(), names: Vec::new() }
    }

    fn of(&mut self, key: K, name: impl FnOnce() -> String) -> u32 {
        let next = self.names.len() as u32;
        *self.numbers.entry(key).or_insert_with(|| {
            self.names.push(name());
            next
        })
    }
}

fn pool_name(pool: (u64, u64)) -> String {
    if pool == (0, 0) { "default pool".to_owned() } else { format!("pool ({}, {})", pool.0, pool.1) }
}

/// Writes the page. `advice` are the pieces of advice of the summary in words.
///
/// # Errors
///
/// The writer's.
pub fn write_page(snapshot: &Snapshot, title: &str, advice: Vec<(u64, String)>, mut to: impl Write) -> io::Result<()> {
    let summary = Summary::of(snapshot);
    let mut owners: Numbers<Owner> = Numbers::new();
    let mut owner_stacks: Vec<StackId> = Vec::new();
    let mut pools = Numbers::new();
    let mut streams = Numbers::new();
    let mut owner_of = |owner: Owner| {
        let number = owners.of(owner, || snapshot.owner_name(owner.label, owner.frames));
        if number as usize == owner_stacks.len() {
            owner_stacks.push(owner.frames);
        }
        number
    };
    let mut stream_of = |stream: u64| streams.of(stream, || format!("stream {stream:#x}"));
    let mut pool_of = |pool: (u64, u64)| pools.of(pool, || pool_name(pool));
    let known = snapshot.owners();
    let mut devices = Vec::new();
    let mut handed: HashMap<(u32, u64), usize> = HashMap::new();
    for (device, trace) in (0_u32..).zip(&snapshot.device_traces) {
        let mut out = Device { device, events: trace.len(), ..Device::default() };
        let first = trace.first().map_or(0, |event| event.time_us);
        let segments = snapshot.segments.iter().filter(|segment| segment.device == device);
        let mut ranges: Vec<(u64, u64, (u64, u64))> =
            segments.map(|s| (s.address, s.address + s.total_size, s.segment_pool_id)).collect();
        ranges.sort_unstable();
        // Where an event does not name its pool, the segment that is there at the end does.
        let pool_at = |address: u64| {
            let at = ranges.partition_point(|(start, ..)| *start <= address);
            let range = at.checked_sub(1).and_then(|at| ranges.get(at));
            range.filter(|(_, end, _)| address < *end).map_or((0, 0), |(.., pool)| *pool)
        };
        let mut live: HashMap<u64, usize> = HashMap::new();
        let mut add = |out: &mut Device, start: Option<usize>, size, address, owner, pool, stream| {
            out.made.push(u8::from(start.is_some()));
            out.start.push(start.unwrap_or(0));
            out.end.push(trace.len());
            out.size.push(size);
            out.address.push(address);
            out.owner.push(owner_of(owner));
            out.pool.push(pool_of(pool));
            out.stream.push(stream_of(stream));
            out.start.len() - 1
        };
        // What was there before the history begins.
        let mut made: std::collections::HashSet<u64> = std::collections::HashSet::new();
        for event in trace {
            match event.action {
                Action::Alloc => {
                    made.insert(event.address);
                }
                Action::FreeCompleted if !made.contains(&event.address) => {
                    made.insert(event.address);
                    let owner = Owner { label: event.label, frames: StackId::default() };
                    let pool = event.pool.unwrap_or_else(|| pool_at(event.address));
                    let block = add(&mut out, None, event.size, event.address, owner, pool, event.stream);
                    live.insert(event.address, block);
                }
                _ => {}
            }
        }
        for segment in snapshot.segments.iter().filter(|segment| segment.device == device) {
            for block in segment.blocks.iter().filter(|block| block.state != BlockStatus::Inactive) {
                if !made.contains(&block.address) {
                    let owner = known.get(&(device, block.address)).copied().unwrap_or_default();
                    let size = block.requested_size.min(block.size);
                    let number =
                        add(&mut out, None, size, block.address, owner, segment.segment_pool_id, segment.stream);
                    live.insert(block.address, number);
                }
            }
        }
        for (at, event) in trace.iter().enumerate() {
            out.times.push(event.time_us.saturating_sub(first));
            match event.action {
                Action::Alloc => {
                    if let Some(lost) = live.remove(&event.address) {
                        out.end[lost] = at;
                    }
                    let owner = Owner { label: event.label, frames: event.frames };
                    let pool = event.pool.unwrap_or_else(|| pool_at(event.address));
                    let block = add(&mut out, Some(at), event.size, event.address, owner, pool, event.stream);
                    live.insert(event.address, block);
                    handed.insert((device, event.address), at);
                }
                Action::FreeCompleted => {
                    if let Some(block) = live.remove(&event.address) {
                        out.end[block] = at;
                    }
                }
                Action::Oom => out.oom.push(at),
                _ => {}
            }
        }
        devices.push(out);
    }
    let segments = snapshot
        .segments
        .iter()
        .map(|segment| Segment {
            device: segment.device,
            address: segment.address,
            size: segment.total_size,
            pool: pool_of(segment.segment_pool_id),
            stream: stream_of(segment.stream),
            part: segment.segment_type.name(),
            blocks: segment
                .blocks
                .iter()
                .map(|block| {
                    let key = (segment.device, block.address);
                    let state = match block.state {
                        BlockStatus::ActiveAllocated => 0,
                        BlockStatus::ActivePendingFree => 1,
                        BlockStatus::Inactive => 2,
                    };
                    let owner = owner_of(if state == 2 {
                        Owner::default()
                    } else {
                        known.get(&key).copied().unwrap_or_default()
                    });
                    let since = handed.get(&key).filter(|_| state != 2).map_or(-1, |at| *at as i64);
                    (block.size, state, owner, block.requested_size, since)
                })
                .collect(),
        })
        .collect();
    let stacks = owner_stacks
        .iter()
        .map(|id| {
            let frames =
                snapshot.stacks.frames(*id).map(|frame| format!("{}:{} {}", frame.file, frame.line as i64, frame.name));
            frames.collect::<Vec<_>>().join("\n")
        })
        .collect();
    let data = Data {
        title,
        devices,
        segments,
        owners: owners.names,
        stacks,
        pools: pools.names,
        streams: streams.names,
        summary: &summary,
        advice,
        settings: &snapshot.allocator_settings,
        gpupool: &snapshot.gpupool,
    };
    // Inside a script element nothing may end it.
    let json = serde_json::to_string(&data)?.replace('<', "\\u003c").replace("\u{2028}", "\\u2028");
    let escaped = title.replace('&', "&amp;").replace('<', "&lt;");
    for (part, text) in include_str!("page.html").split("%%").enumerate() {
        // Odd parts are names of what goes in their place.
        let text = match (part % 2, text) {
            (1, "TITLE") => &escaped,
            (1, "STYLE") => include_str!("page.css"),
            (1, "SCRIPT") => include_str!("page.js"),
            (1, "DATA") => &json,
            _ => text,
        };
        to.write_all(text.as_bytes())?;
    }
    to.flush()
}
