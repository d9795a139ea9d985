//! Events and what they were recorded after.
//!
//! Recording makes a [`Record`]; the event points to its latest one. Who waits holds the record, not the event, so that
//! recording again or destroying the event changes nothing for a wait submitted before.

use std::sync::{Arc, OnceLock};

use gpupool_device::{CaptureId, EventHandle, NodeId};
use hashbrown::HashMap;

use crate::clocks::VectorClock;
use crate::streams::StreamId;

/// One recording of an event.
#[derive(Debug)]
pub(crate) struct Record {
    /// The stream it was recorded on.
    pub(crate) stream: StreamId,
    done: OnceLock<Done>,
}

/// What is known once a record is complete.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) clock: VectorClock,
    pub(crate) time: u64,
}

impl Record {
    pub(crate) fn pending(stream: StreamId) -> Self {
        Self { stream, done: OnceLock::new() }
    }

    pub(crate) fn complete(stream: StreamId, clock: VectorClock, time: u64) -> Self {
        Self { stream, done: OnceLock::from(Done { clock, time }) }
    }

    pub(crate) fn finish(&self, clock: VectorClock, time: u64) {
        // A record is finished by the one queue entry that holds it, once.
        let _ = self.done.set(Done { clock, time });
    }

    pub(crate) fn done(&self) -> Option<&Done> {
        self.done.get()
    }
}

/// What an event was last recorded as.
#[derive(Clone, Debug)]
pub(crate) enum Recorded {
    /// Never.
    Not,
    /// On a stream.
    Work(Arc<Record>),
    /// In a capture, after these nodes.
    Captured(CaptureId, Vec<NodeId>),
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: u32,
    pub(crate) recorded: Recorded,
}

/// All events of a world.
#[derive(Debug, Default)]
pub(crate) struct Events {
    all: HashMap<EventHandle, Event>,
    last: u64,
}

impl Events {
    pub(crate) fn create(&mut self, device: u32) -> EventHandle {
        self.last += 1;
        let handle = EventHandle(self.last);
        self.all.insert(handle, Event { device, recorded: Recorded::Not });
        handle
    }

    pub(crate) fn destroy(&mut self, handle: EventHandle) -> bool {
        self.all.remove(&handle).is_some()
    }

    pub(crate) fn get(&self, handle: EventHandle) -> Option<&Event> {
        self.all.get(&handle)
    }

    pub(crate) fn get_mut(&mut self, handle: EventHandle) -> Option<&mut Event> {
        self.all.get_mut(&handle)
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }
}
