//! A driver whose every answer a test sets: places segments where it is told, completes events when it is told, and says of each
//! stream what a test wants it to say. It checks nothing; the simulated device is for that.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Mutex;

use gpupool_device::{
    Address, Call, CaptureFrontier, CaptureId, CaptureMode, CaptureStatus, Device, DeviceProperties, DriverError,
    DriverResult, EventHandle, GraphHandle, MemoryHandle, MemoryInfo, NodeId, StreamHandle, code,
};

/// Where the first segment goes.
pub const BASE: u64 = 0x7f00_0000_0000;
const STEP: u64 = 2 << 20;

/// A driver call, as the golden vectors write it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Done {
    /// `bytes` at an address relative to the first segment.
    Malloc(u64, u64),
    /// The driver refused `bytes`.
    Refused(u64),
    /// The address given back.
    Free(u64),
}

#[derive(Default)]
struct State {
    limit: u64,
    used: u64,
    next: u64,
    falling: bool,
    live: BTreeMap<u64, u64>,
    log: Vec<Done>,
    next_event: u64,
    recorded: HashMap<u64, StreamHandle>,
    complete: HashSet<u64>,
    captures: HashMap<StreamHandle, CaptureStatus>,
    frontiers: HashMap<StreamHandle, Vec<NodeId>>,
    dependencies: HashMap<NodeId, Vec<NodeId>>,
    events_recorded: Vec<StreamHandle>,
}

/// The driver.
pub struct FakeDriver {
    properties: DeviceProperties,
    state: Mutex<State>,
}

impl FakeDriver {
    /// A device of `total` bytes that gives `limit` at most. Segments go one after another, each at the next multiple of 2 MiB; nothing
    /// is used twice.
    pub fn new(total: u64, limit: u64) -> Self {
        let state = State { limit, next: BASE, ..State::default() };
        Self { properties: DeviceProperties::new("fake", total, false, STEP), state: Mutex::new(state) }
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock().unwrap())
    }

    /// Each new segment below the one before.
    pub fn place_falling(&self) {
        self.with(|s| s.falling = true);
    }

    /// What was called since the last look.
    pub fn take_log(&self) -> Vec<Done> {
        self.with(|s| std::mem::take(&mut s.log))
    }

    /// Every event recorded so far is complete.
    pub fn complete_all(&self) {
        self.with(|s| {
            let recorded: Vec<u64> = s.recorded.keys().copied().collect();
            s.complete.extend(recorded);
        });
    }

    /// On which streams events were recorded since the last look.
    pub fn take_events(&self) -> Vec<u64> {
        self.with(|s| std::mem::take(&mut s.events_recorded).into_iter().map(|h| h.0).collect())
    }

    /// Says that a stream captures under an id.
    pub fn begin_capture(&self, stream: u64, id: u64) {
        self.with(|s| s.captures.insert(StreamHandle(stream), CaptureStatus::Active(CaptureId(id))));
    }

    /// Says that a stream captures no more.
    pub fn end_capture(&self, stream: u64) {
        self.with(|s| s.captures.remove(&StreamHandle(stream)));
    }

    /// Sets a capturing stream's terminal nodes.
    pub fn set_frontier(&self, stream: u64, nodes: &[u64]) {
        self.with(|s| s.frontiers.insert(StreamHandle(stream), nodes.iter().map(|n| NodeId(*n)).collect()));
    }

    /// Says what a node depends on.
    pub fn set_dependencies(&self, node: u64, on: &[u64]) {
        self.with(|s| s.dependencies.insert(NodeId(node), on.iter().map(|n| NodeId(*n)).collect()));
    }

    /// Bytes held.
    pub fn used(&self) -> u64 {
        self.with(|s| s.used)
    }
}

fn unsupported<T>() -> DriverResult<T> {
    Err(DriverError::new(Call::Other, code::NOT_SUPPORTED))
}

impl Device for FakeDriver {
    fn ordinal(&self) -> u32 {
        0
    }
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }
    fn mem_alloc(&self, bytes: u64) -> DriverResult<Address> {
        self.with(|s| {
            if s.used + bytes > s.limit {
                s.log.push(Done::Refused(bytes));
                return Err(DriverError::new(Call::MemAlloc, code::OUT_OF_MEMORY));
            }
            let room = bytes.next_multiple_of(STEP);
            let address = if s.falling {
                s.next -= room;
                s.next
            } else {
                s.next += room;
                s.next - room
            };
            s.used += bytes;
            s.live.insert(address, bytes);
            s.log.push(Done::Malloc(bytes, address.wrapping_sub(BASE)));
            Ok(Address(address))
        })
    }
    fn mem_free(&self, address: Address) -> DriverResult<()> {
        self.with(|s| {
            let bytes = s.live.remove(&address.0).ok_or(DriverError::new(Call::MemFree, code::INVALID_VALUE))?;
            s.used -= bytes;
            s.log.push(Done::Free(address.0.wrapping_sub(BASE)));
            Ok(())
        })
    }
    fn mem_info(&self) -> DriverResult<MemoryInfo> {
        self.with(|s| Ok(MemoryInfo { free: s.limit - s.used, total: self.properties.total_memory }))
    }
    fn address_reserve(&self, _: u64) -> DriverResult<Address> {
        unsupported()
    }
    fn address_free(&self, _: Address, _: u64) -> DriverResult<()> {
        unsupported()
    }
    fn handle_create(&self, _: u64) -> DriverResult<MemoryHandle> {
        unsupported()
    }
    fn handle_release(&self, _: MemoryHandle) -> DriverResult<()> {
        unsupported()
    }
    fn map(&self, _: Address, _: u64, _: MemoryHandle) -> DriverResult<()> {
        unsupported()
    }
    fn set_access(&self, _: Address, _: u64) -> DriverResult<()> {
        unsupported()
    }
    fn unmap(&self, _: Address, _: u64) -> DriverResult<()> {
        unsupported()
    }
    fn event_create(&self) -> DriverResult<EventHandle> {
        self.with(|s| {
            s.next_event += 1;
            Ok(EventHandle(s.next_event))
        })
    }
    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        self.with(|s| s.recorded.remove(&event.0));
        Ok(())
    }
    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        self.with(|s| {
            s.complete.remove(&event.0);
            s.recorded.insert(event.0, stream);
            s.events_recorded.push(stream);
        });
        Ok(())
    }
    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        self.with(|s| Ok(s.complete.contains(&event.0) || !s.recorded.contains_key(&event.0)))
    }
    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        self.with(|s| s.complete.insert(event.0));
        Ok(())
    }
    fn stream_wait_event(&self, _: StreamHandle, _: EventHandle) -> DriverResult<()> {
        Ok(())
    }
    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        self.with(|s| Ok(s.captures.get(&stream).copied().unwrap_or(CaptureStatus::None)))
    }
    fn capture_frontier(&self, stream: StreamHandle) -> DriverResult<Option<CaptureFrontier>> {
        self.with(|s| {
            let Some(CaptureStatus::Active(id)) = s.captures.get(&stream) else { return Ok(None) };
            let nodes = s.frontiers.get(&stream).cloned().unwrap_or_default();
            Ok(Some(CaptureFrontier { id: *id, graph: GraphHandle(id.0), nodes }))
        })
    }
    fn node_dependencies(&self, _: GraphHandle, node: NodeId) -> DriverResult<Vec<NodeId>> {
        self.with(|s| Ok(s.dependencies.get(&node).cloned().unwrap_or_default()))
    }
    fn exchange_capture_mode(&self, _: CaptureMode) -> DriverResult<CaptureMode> {
        Ok(CaptureMode::Global)
    }
    fn now(&self) -> u64 {
        0
    }
}
