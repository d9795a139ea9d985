//! Everything behind the one lock of a world.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use gpupool_device::{Call, StreamHandle, code};
use hashbrown::HashMap;
use parking_lot::MutexGuard;

use crate::SimConfig;
use crate::captures::Captures;
use crate::clocks::{HostKnowledge, VectorClock, VirtualTime};
use crate::events::{Events, Record};
use crate::faults::Faults;
use crate::graphs::Graphs;
use crate::memory::{Contents, Memory, Numbers, Physical};
use crate::race::Detector;
use crate::report::Withdrawal;
use crate::scheduler::{Chooser, WaitReport};
use crate::streams::{Kind, StreamId, Streams};
use crate::ticks::Ticks;
use crate::work::{Op, Work};

/// A result code of the driver, as an error.
pub(crate) type Code = u32;

/// The lock, held.
pub(crate) type Held<'a> = MutexGuard<'a, State>;

#[derive(Debug)]
pub(crate) struct DeviceState {
    pub(crate) memory: Memory,
    pub(crate) faults: Faults,
    /// An error that every later call returns.
    pub(crate) sticky: Option<Code>,
    /// What streams that are gone had completed.
    pub(crate) retired: VectorClock,
}

/// Everything about a world but its atomics.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) config: SimConfig,
    pub(crate) time: Arc<VirtualTime>,
    pub(crate) devices: Vec<DeviceState>,
    pub(crate) numbers: Numbers,
    pub(crate) streams: Streams,
    pub(crate) events: Events,
    pub(crate) host: HostKnowledge,
    pub(crate) ticks: Ticks,
    pub(crate) chooser: Chooser,
    pub(crate) last_wait: Option<WaitReport>,
    /// Submissions so far, hand-outs and mappings included.
    pub(crate) submissions: u64,
    pub(crate) contents: Contents,
    pub(crate) detector: Detector,
    pub(crate) captures: Captures,
    pub(crate) graphs: Graphs,
    /// Each gate: what the host knew when it was opened, and when.
    pub(crate) gates: HashMap<u64, Option<(VectorClock, u64)>>,
    /// Reads that somebody waits for, by submission, and what they copied to the host.
    pub(crate) reads: HashMap<u64, Vec<u8>>,
    /// Pinned memory of the host, by its number: bytes of a range of physical numbers.
    pub(crate) pinned: BTreeMap<u64, Physical>,
    /// The stream of each device that copies to and from the host.
    pub(crate) copy_streams: BTreeMap<u32, StreamId>,
}

impl State {
    pub(crate) fn new(config: SimConfig, devices: u32, time: Arc<VirtualTime>, captures: Arc<AtomicUsize>) -> Self {
        let device = |ordinal| DeviceState {
            memory: Memory::new(&config, ordinal),
            faults: Faults::default(),
            sticky: None,
            retired: VectorClock::default(),
        };
        let mut state = Self {
            time,
            devices: (0..devices).map(device).collect(),
            numbers: Numbers::new(),
            streams: Streams::new(devices, config.recycle_stream_handles),
            events: Events::default(),
            host: HostKnowledge::new(config.shared_host_order),
            ticks: Ticks::default(),
            chooser: Chooser::new(config.scheduler),
            last_wait: None,
            submissions: 0,
            contents: Contents::default(),
            detector: Detector::new(config.race_detector, devices),
            captures: Captures::new(captures),
            graphs: Graphs::default(),
            gates: HashMap::new(),
            reads: HashMap::new(),
            pinned: BTreeMap::new(),
            copy_streams: BTreeMap::new(),
            config,
        };
        for device in 0..devices {
            state.add_stream(device, StreamHandle::LEGACY, Kind::Legacy);
        }
        state
    }

    pub(crate) fn add_stream(&mut self, device: u32, handle: StreamHandle, kind: Kind) -> StreamId {
        let component = self.detector.component();
        self.streams.add(device, handle, kind, component)
    }

    pub(crate) fn device(&mut self, ordinal: u32) -> Result<&mut DeviceState, Code> {
        self.devices.get_mut(ordinal as usize).ok_or(code::NO_DEVICE)
    }

    /// Bookkeeping at the start of every call: faults, then the sticky error.
    pub(crate) fn before_call(&mut self, ordinal: u32, call: Call) -> Result<(), Code> {
        let device = self.device(ordinal)?;
        let struck = if device.faults.any() { device.faults.strike(call) } else { None };
        let sticky = device.sticky;
        if device.faults.any() && device.faults.invalidation_due() && self.captures.any() {
            self.captures.invalidate_all();
            self.device(ordinal)?.faults.invalidated();
        }
        struck.or(sticky).map_or(Ok(()), Err)
    }

    /// The stream a handle means to the calling thread.
    pub(crate) fn stream(&mut self, ordinal: u32, handle: StreamHandle) -> Result<StreamId, Code> {
        // 1 is the driver's own name for the legacy stream.
        let handle = if handle.0 == 1 { StreamHandle::LEGACY } else { handle };
        match self.streams.find(ordinal, handle) {
            Some(id) => Ok(id),
            None if handle == StreamHandle::PER_THREAD => Ok(self.add_stream(ordinal, handle, Kind::Blocking)),
            None => Err(code::INVALID_HANDLE),
        }
    }

    pub(crate) fn next_submission(&mut self) -> u64 {
        self.submissions += 1;
        self.submissions
    }

    /// Appends work to a stream, in order with the legacy stream where that applies. The submission's number.
    pub(crate) fn submit(&mut self, stream: StreamId, work: Work) -> u64 {
        self.order_with_legacy(stream);
        self.enqueue(stream, work)
    }

    fn enqueue(&mut self, stream: StreamId, work: Work) -> u64 {
        let submission = self.next_submission();
        self.enqueue_as(stream, work, submission);
        submission
    }

    /// Appends work whose number was drawn before.
    pub(crate) fn enqueue_as(&mut self, stream: StreamId, work: Work, submission: u64) {
        self.streams.push(stream, Op { submission, at: self.time.now(), host: self.host.current(), work });
    }

    /// Work on the legacy stream waits for all blocking streams, and theirs waits for it.
    pub(crate) fn order_with_legacy(&mut self, stream: StreamId) {
        let Some(this) = self.streams.get(stream) else { return };
        let (device, kind) = (this.device, this.kind);
        let partner = match kind {
            Kind::NonBlocking => return,
            Kind::Legacy => Kind::Blocking,
            Kind::Blocking => Kind::Legacy,
        };
        let others: Vec<StreamId> =
            self.streams.iter().filter(|(_, s)| s.device == device && s.kind == partner).map(|(id, _)| id).collect();
        for other in others {
            let record = self.record_tail(other, None);
            self.wait_on(stream, &record);
        }
    }

    /// A record of everything submitted to a stream so far.
    pub(crate) fn record_tail(&mut self, stream: StreamId, spare: Option<Arc<Record>>) -> Arc<Record> {
        let idle = self.streams.get(stream).is_none_or(|s| s.queue.is_empty());
        if idle {
            let mut clock = self.streams.get(stream).map(|s| s.clock.clone()).unwrap_or_default();
            clock.join(&self.host.current());
            let time = self.time.now();
            return self.streams.record_idle(stream, clock, time, spare);
        }
        let record = Arc::new(Record::pending(stream));
        self.enqueue(stream, Work::Record(Arc::clone(&record)));
        record
    }

    /// Makes a stream's later work wait for a record.
    pub(crate) fn wait_on(&mut self, stream: StreamId, record: &Arc<Record>) {
        if let Some(done) = record.done()
            && let Some(waiter) = self.streams.get_mut(stream)
            && waiter.queue.is_empty()
        {
            waiter.clock.join(&done.clock);
            waiter.time = waiter.time.max(done.time);
            return;
        }
        self.enqueue(stream, Work::Wait(Arc::clone(record)));
    }

    /// A call that takes memory away now.
    pub(crate) fn withdrawal(&self, call: Call) -> Withdrawal {
        Withdrawal { call, submission: self.submissions, time: self.time.now() }
    }

    /// Forgets a stream that was destroyed and is idle.
    pub(crate) fn bury(&mut self, id: StreamId) {
        let Some(stream) = self.streams.bury(id) else { return };
        self.detector.bury(stream.component, stream.clock.get(stream.component));
        if let Ok(device) = self.device(stream.device) {
            device.retired.join(&stream.clock);
        }
    }

    /// Forgets what memory that is gone held, and who touched it.
    pub(crate) fn forget(&mut self, gone: Physical) {
        self.contents.forget(gone.start, gone.bytes);
        self.detector.forget(gone);
    }

    /// Pins memory. Its number.
    pub(crate) fn pin(&mut self, bytes: u64) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let physical = self.numbers.physical(bytes);
        let number = self.numbers.handle();
        self.pinned.insert(number, physical);
        Ok(number)
    }

    /// Gives pinned memory back. Its bytes.
    pub(crate) fn unpin(&mut self, number: u64) -> Result<u64, Code> {
        let physical = self.pinned.remove(&number).ok_or(code::INVALID_VALUE)?;
        self.forget(physical);
        Ok(physical.bytes)
    }

    /// A part of pinned memory.
    pub(crate) fn pinned_part(&self, number: u64, offset: u64, bytes: u64) -> Result<Physical, Code> {
        let whole = self.pinned.get(&number).ok_or(code::INVALID_VALUE)?;
        let inside = bytes > 0 && offset.checked_add(bytes).is_some_and(|end| end <= whole.bytes);
        let words = offset.is_multiple_of(4) && bytes.is_multiple_of(4);
        if inside && words { Ok(Physical { start: whole.start + offset, bytes }) } else { Err(code::INVALID_VALUE) }
    }

    /// The stream that copies to and from the host, with its handle.
    pub(crate) fn copy_stream(&mut self, ordinal: u32) -> StreamId {
        if let Some(id) = self.copy_streams.get(&ordinal) {
            return *id;
        }
        // No driver gives such a number.
        let handle = StreamHandle(u64::MAX - 1);
        let id = self.add_stream(ordinal, handle, Kind::NonBlocking);
        self.copy_streams.insert(ordinal, id);
        id
    }

    /// What orders later work of the host after everything `stream` has completed.
    pub(crate) fn stream_clock(&self, stream: StreamId) -> VectorClock {
        self.streams.get(stream).map(|s| s.clock.clone()).unwrap_or_default()
    }
}
