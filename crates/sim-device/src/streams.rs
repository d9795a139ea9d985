//! Streams: queues of work, and the numbers that programs know them by.
//!
//! # Invariants
//!
//! * **S1** A [`StreamId`] is never used again; a handle's number may be.
//! * **S2** `submitted - completed` is the length of the queue: a position is complete once `completed` has reached it.
//! * **S3** `busy` holds exactly the streams whose queue is not empty.
//! * **S4** A destroyed stream lives until its queue is empty.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::thread::ThreadId;

use gpupool_device::{CaptureId, StreamHandle};
use hashbrown::HashMap;

use crate::clocks::VectorClock;
use crate::events::Record;
use crate::work::Op;

/// A stream of the world, for good.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct StreamId(pub(crate) u32);

/// How a stream relates to the legacy default stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Legacy,
    Blocking,
    NonBlocking,
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: u32,
    pub(crate) handle: StreamHandle,
    pub(crate) kind: Kind,
    pub(crate) queue: VecDeque<Op>,
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    /// Everything that comes before the stream's next work.
    pub(crate) clock: VectorClock,
    /// The stream's own component in clocks.
    pub(crate) component: u32,
    /// When its last work ended.
    pub(crate) time: u64,
    pub(crate) capture: Option<CaptureId>,
    pub(crate) destroyed: bool,
    /// Its head is a host function that some thread is running.
    pub(crate) in_host: Option<ThreadId>,
}

#[derive(Debug, Default)]
struct Names {
    handles: HashMap<StreamHandle, StreamId>,
    /// Each thread's own default stream.
    per_thread: HashMap<ThreadId, StreamId>,
}

/// All streams of a world.
#[derive(Debug)]
pub(crate) struct Streams {
    all: Vec<Option<Box<Stream>>>,
    names: Vec<Names>,
    busy: BTreeSet<StreamId>,
    recycle: bool,
    free_handles: Vec<StreamHandle>,
    next_handle: u64,
}

impl Streams {
    pub(crate) fn new(devices: u32, recycle: bool) -> Self {
        Self {
            all: Vec::new(),
            names: (0..devices).map(|_| Names::default()).collect(),
            busy: BTreeSet::new(),
            recycle,
            free_handles: Vec::new(),
            next_handle: 0x10,
        }
    }

    pub(crate) fn get(&self, id: StreamId) -> Option<&Stream> {
        self.all.get(id.0 as usize)?.as_deref()
    }

    pub(crate) fn get_mut(&mut self, id: StreamId) -> Option<&mut Stream> {
        self.all.get_mut(id.0 as usize)?.as_deref_mut()
    }

    pub(crate) fn busy(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.busy.iter().copied()
    }

    pub(crate) fn is_busy(&self, id: StreamId) -> bool {
        self.busy.contains(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (StreamId, &Stream)> + '_ {
        self.all.iter().enumerate().filter_map(|(i, s)| Some((StreamId(i as u32), s.as_deref()?)))
    }

    /// The stream a device's handle means to the calling thread, if it exists already.
    pub(crate) fn find(&self, device: u32, handle: StreamHandle) -> Option<StreamId> {
        let names = self.names.get(device as usize)?;
        if handle == StreamHandle::PER_THREAD {
            return names.per_thread.get(&std::thread::current().id()).copied();
        }
        names.handles.get(&handle).copied()
    }

    /// Adds a stream under a handle that means nothing yet.
    pub(crate) fn add(
        &mut self,
        device: u32,
        handle: StreamHandle,
        kind: Kind,
        component: (u32, VectorClock),
    ) -> StreamId {
        let id = StreamId(self.all.len() as u32);
        self.all.push(Some(Box::new(Stream {
            device,
            handle,
            kind,
            queue: VecDeque::new(),
            submitted: 0,
            completed: 0,
            clock: component.1,
            component: component.0,
            time: 0,
            capture: None,
            destroyed: false,
            in_host: None,
        })));
        if let Some(names) = self.names.get_mut(device as usize) {
            if handle == StreamHandle::PER_THREAD {
                names.per_thread.insert(std::thread::current().id(), id);
            } else {
                names.handles.insert(handle, id);
            }
        }
        self.free_handles.retain(|&free| free != handle);
        id
    }

    /// A number for a new stream: the one destroyed last, where numbers are recycled.
    pub(crate) fn next_handle(&mut self) -> StreamHandle {
        if let Some(handle) = self.free_handles.pop() {
            return handle;
        }
        loop {
            let handle = StreamHandle(self.next_handle);
            self.next_handle += 0x10;
            if !self.names.iter().any(|names| names.handles.contains_key(&handle)) {
                return handle;
            }
        }
    }

    /// Takes the name from a stream; the stream goes once its queue is empty.
    pub(crate) fn destroy(&mut self, id: StreamId) {
        let Some(stream) = self.all.get_mut(id.0 as usize).and_then(Option::as_deref_mut) else { return };
        stream.destroyed = true;
        let (device, handle) = (stream.device, stream.handle);
        if let Some(names) = self.names.get_mut(device as usize) {
            names.handles.remove(&handle);
        }
        if self.recycle {
            self.free_handles.push(handle);
        }
    }

    /// Forgets a stream that was destroyed and is idle.
    pub(crate) fn bury(&mut self, id: StreamId) -> Option<Box<Stream>> {
        let slot = self.all.get_mut(id.0 as usize)?;
        if slot.as_ref().is_some_and(|s| s.destroyed && s.queue.is_empty()) {
            return slot.take();
        }
        None
    }

    /// Appends work.
    pub(crate) fn push(&mut self, id: StreamId, op: Op) {
        if let Some(stream) = self.all.get_mut(id.0 as usize).and_then(Option::as_deref_mut) {
            stream.queue.push_back(op);
            stream.submitted += 1;
            self.busy.insert(id);
        }
    }

    /// Takes the head, which is complete.
    pub(crate) fn pop(&mut self, id: StreamId) -> Option<Op> {
        let stream = self.all.get_mut(id.0 as usize).and_then(Option::as_deref_mut)?;
        let op = stream.queue.pop_front()?;
        stream.completed += 1;
        if stream.queue.is_empty() {
            self.busy.remove(&id);
        }
        Some(op)
    }

    /// The record of an idle stream's present state, taken into `spare` if nobody else looks at it.
    pub(crate) fn record_idle(
        &self,
        id: StreamId,
        clock: VectorClock,
        time: u64,
        spare: Option<Arc<Record>>,
    ) -> Arc<Record> {
        if let Some(mut record) = spare
            && let Some(only) = Arc::get_mut(&mut record)
        {
            *only = Record::complete(id, clock, time);
            return record;
        }
        Arc::new(Record::complete(id, clock, time))
    }
}
