//! The history as time: what was live when, and the moment when most was.

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use crate::model::{Action, BlockStatus, Event, Snapshot};
use crate::owners::{Owned, Owner};

/// How many owners a moment lists.
const MOST_OWNERS: usize = 12;

/// The moment of a device's history at which most was live.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Peak {
    /// The GPU.
    pub device: u32,
    /// Which event, from 0.
    pub event: usize,
    /// When, in microseconds.
    pub time_us: u64,
    /// Bytes requested and not completely freed then.
    pub bytes: u64,
    /// Of those, bytes that were there before the history begins.
    pub before_history: u64,
    /// Whose they were, most first. The rest is summed up last.
    pub owners: Vec<Owned>,
}

/// A request that ended in out of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct OutOfMemory {
    /// The GPU.
    pub device: u32,
    /// Which event, from 0.
    pub event: usize,
    /// When, in microseconds.
    pub time_us: u64,
    /// Bytes asked for, rounded.
    pub size: u64,
    /// What the driver had free.
    pub device_free: u64,
    /// The stream's handle.
    pub stream: u64,
}

impl Snapshot {
    /// Bytes that were live before each device's history begins: what is live at its end and was not allocated in it, and what it frees
    /// and did not allocate.
    #[must_use]
    pub fn live_before(&self, device: u32) -> u64 {
        let Some(trace) = self.device_traces.get(device as usize) else { return 0 };
        let mut made: HashSet<u64> = HashSet::new();
        let mut before = 0;
        for event in trace {
            match event.action {
                Action::Alloc => {
                    made.insert(event.address);
                }
                Action::FreeCompleted if !made.remove(&event.address) => {
                    before = event.size.saturating_add(before);
                }
                _ => {}
            }
        }
        let segments = self.segments.iter().filter(|segment| segment.device == device);
        let active = segments.flat_map(|s| &s.blocks).filter(|block| block.state != BlockStatus::Inactive);
        let kept = active.filter(|b| !made.contains(&b.address)).map(|b| b.requested_size.min(b.size)).sum::<u64>();
        kept.saturating_add(before)
    }

    /// The moment of most live bytes, for each device with a history.
    #[must_use]
    pub fn peaks(&self) -> Vec<Peak> {
        let devices = (0..).zip(&self.device_traces).filter(|(_, trace)| !trace.is_empty());
        devices.map(|(device, trace)| self.peak(device, trace)).collect()
    }

    fn peak(&self, device: u32, trace: &[Event]) -> Peak {
        let before = self.live_before(device);
        let (mut now, mut best, mut at) = (before, before, 0);
        for (index, event) in trace.iter().enumerate() {
            match event.action {
                // What a damaged file says need not make sense, but must not overflow.
                Action::Alloc => now = now.saturating_add(event.size),
                Action::FreeCompleted => now = now.saturating_sub(event.size),
                _ => {}
            }
            if now > best {
                (best, at) = (now, index);
            }
        }
        let mut live: HashMap<u64, (Owner, u64)> = HashMap::new();
        let mut old = before;
        for event in &trace[..=at] {
            match event.action {
                Action::Alloc => {
                    let owner = Owner { label: event.label, frames: event.frames };
                    live.insert(event.address, (owner, event.size));
                }
                Action::FreeCompleted if live.remove(&event.address).is_none() => old = old.saturating_sub(event.size),
                _ => {}
            }
        }
        let mut owners = self.ranked(live.into_values());
        if owners.len() > MOST_OWNERS {
            let rest = owners.split_off(MOST_OWNERS - 1);
            let (bytes, blocks) =
                rest.iter().fold((0, 0), |sum: (u64, u64), o| (sum.0.saturating_add(o.bytes), sum.1 + o.blocks));
            owners.push(Owned { owner: format!("{} others", rest.len()), bytes, blocks });
        }
        Peak { device, event: at, time_us: trace[at].time_us, bytes: best, before_history: old, owners }
    }

    /// The requests that ended in out of memory, oldest first.
    #[must_use]
    pub fn out_of_memory(&self) -> Vec<OutOfMemory> {
        let mut found = Vec::new();
        for (device, trace) in (0..).zip(&self.device_traces) {
            let events = trace.iter().enumerate().filter(|(_, event)| event.action == Action::Oom);
            found.extend(events.map(|(event, e)| OutOfMemory {
                device,
                event,
                time_us: e.time_us,
                size: e.size,
                device_free: e.address,
                stream: e.stream,
            }));
        }
        found
    }
}
