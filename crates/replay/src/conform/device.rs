//! The device that conformance files run on.
//!
//! [`ScriptedDevice`] has no memory, only addresses. It is told before each operation which driver calls to expect,
//! answers those as the file says, and writes down every call that was really made, so that a difference is reported
//! and not a crash.
//!
//! * **D1** A segment that the file expects lies where the file says, above [`BASE`]; any other lies above everything
//!   in any file.
//! * **D2** The driver gives no more than the header's limit, and refuses where the file says it refused.
//! * **D3** An event is complete once [`complete_all_work`](ScriptedDevice::complete_all_work) came after its last
//!   record, or somebody waited for it. Unrecorded events are complete.
//! * **D4** There is no virtual memory.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpupool_device::{
    Address, Call, CaptureFrontier, CaptureId, CaptureMode, CaptureStatus, Device, DeviceProperties, DriverError,
    DriverResult, EventHandle, MemoryHandle, MemoryInfo, StreamHandle, code,
};

use super::op::DriverCall;

/// Where the file's address 0 is.
pub(super) const BASE: u64 = 0x7f00_0000_0000;
/// The highest address that a file may name.
pub(super) const HIGHEST: u64 = 1 << 50;
/// Where segments go that no file expects.
const ELSEWHERE: u64 = 1 << 60;

/// A driver call that was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceCall {
    /// A segment was taken; its number counts the segments of this device.
    Malloc {
        /// Its size.
        bytes: u64,
        /// Its number.
        segment: u64,
    },
    /// A segment was refused.
    Refused {
        /// The size asked for.
        bytes: u64,
    },
    /// A segment was given back.
    Free {
        /// Its number.
        segment: u64,
    },
}

impl DeviceCall {
    /// Whether it is the call that the file expects.
    pub(super) fn is(self, expected: DriverCall) -> bool {
        match (self, expected) {
            (Self::Malloc { bytes, segment }, DriverCall::Malloc { bytes: b, segment: s, .. }) => {
                bytes == b && segment == s
            }
            (Self::Refused { bytes }, DriverCall::Refused { bytes: b }) => bytes == b,
            (Self::Free { segment }, DriverCall::Free { segment: s }) => segment == s,
            _ => false,
        }
    }
}

impl std::fmt::Display for DeviceCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Malloc { bytes, segment } => write!(f, "malloc {bytes} -> segment {segment}"),
            Self::Refused { bytes } => write!(f, "malloc {bytes} -> refused"),
            Self::Free { segment } => write!(f, "free segment {segment}"),
        }
    }
}

#[derive(Debug, Default)]
struct Inner {
    /// Allocations that the file expects next.
    expected: VecDeque<DriverCall>,
    made: Vec<DeviceCall>,
    /// Segments that exist: number and size by address.
    segments: BTreeMap<u64, (u64, u64)>,
    next_segment: u64,
    elsewhere: u64,
    used: u64,
    /// By event: the epoch in which it was recorded, if it was.
    events: HashMap<u64, Option<u64>>,
    next_event: u64,
    /// Moves at each completion of all work.
    epoch: u64,
    capturing: HashMap<u64, u64>,
    mode: CaptureMode,
    clock: u64,
}

/// A device that follows a script. See the module's documentation.
#[derive(Debug)]
pub struct ScriptedDevice {
    properties: DeviceProperties,
    limit: u64,
    inner: Mutex<Inner>,
}

impl ScriptedDevice {
    /// A device that has `total` bytes, of which the driver gives at most `limit`.
    #[must_use]
    pub fn new(total: u64, limit: u64) -> Self {
        let properties = DeviceProperties::new("scripted", total, false, 2 << 20);
        Self { properties, limit, inner: Mutex::new(Inner::default()) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells which driver calls the next operation must make, and forgets those made so far.
    pub fn expect(&self, calls: &[DriverCall]) {
        let mut inner = self.lock();
        inner.expected = calls.iter().copied().filter(|call| !matches!(call, DriverCall::Free { .. })).collect();
        inner.made.clear();
    }

    /// The driver calls made since [`expect`](Self::expect).
    #[must_use]
    pub fn made(&self) -> Vec<DeviceCall> {
        self.lock().made.clone()
    }

    /// The segment that holds `address`, and how far from its start.
    #[must_use]
    pub fn locate(&self, address: Address) -> Option<(u64, u64)> {
        let inner = self.lock();
        let (start, (segment, bytes)) = inner.segments.range(..=address.0).next_back()?;
        let offset = address.0 - start;
        (offset < *bytes).then_some((*segment, offset))
    }

    /// Every event recorded so far is complete from now on.
    pub fn complete_all_work(&self) {
        self.lock().epoch += 1;
    }

    /// `stream` is being captured from now on.
    pub fn begin_capture(&self, stream: StreamHandle, capture: CaptureId) {
        self.lock().capturing.insert(stream.0, capture.0);
    }

    /// `stream` is no longer being captured.
    pub fn end_capture(&self, stream: StreamHandle) {
        self.lock().capturing.remove(&stream.0);
    }
}

fn unsupported<T>(call: Call) -> DriverResult<T> {
    Err(DriverError::new(call, code::NOT_SUPPORTED))
}

impl Device for ScriptedDevice {
    fn ordinal(&self) -> u32 {
        0
    }

    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<Address> {
        let mut inner = self.lock();
        let matches = |call: &DriverCall| match *call {
            DriverCall::Malloc { bytes: b, .. } | DriverCall::Refused { bytes: b } => b == bytes,
            DriverCall::Free { .. } => false,
        };
        let expected = if inner.expected.front().is_some_and(matches) { inner.expected.pop_front() } else { None };
        let full = inner.used + bytes > self.limit;
        if full || matches!(expected, Some(DriverCall::Refused { .. })) {
            inner.made.push(DeviceCall::Refused { bytes });
            return Err(DriverError::new(Call::MemAlloc, code::OUT_OF_MEMORY));
        }
        let wanted = match expected {
            Some(DriverCall::Malloc { address, .. }) => Some(BASE + address),
            _ => None,
        };
        let free = |at: &u64| {
            let before = inner.segments.range(..at + bytes).next_back();
            before.is_none_or(|(start, (_, size))| start + size <= *at)
        };
        let address = match wanted.filter(free) {
            Some(address) => address,
            None => {
                let address = ELSEWHERE + inner.elsewhere;
                inner.elsewhere += bytes.next_multiple_of(2 << 20);
                address
            }
        };
        let segment = inner.next_segment;
        inner.next_segment += 1;
        inner.used += bytes;
        inner.segments.insert(address, (segment, bytes));
        inner.made.push(DeviceCall::Malloc { bytes, segment });
        Ok(Address(address))
    }

    fn mem_free(&self, address: Address) -> DriverResult<()> {
        let mut inner = self.lock();
        let Some((segment, bytes)) = inner.segments.remove(&address.0) else {
            return Err(DriverError::new(Call::MemFree, code::INVALID_VALUE));
        };
        inner.used -= bytes;
        inner.made.push(DeviceCall::Free { segment });
        Ok(())
    }

    fn mem_info(&self) -> DriverResult<MemoryInfo> {
        let used = self.lock().used;
        Ok(MemoryInfo { free: self.limit.saturating_sub(used), total: self.properties.total_memory })
    }

    fn address_reserve(&self, _bytes: u64) -> DriverResult<Address> {
        unsupported(Call::AddressReserve)
    }

    fn address_free(&self, _address: Address, _bytes: u64) -> DriverResult<()> {
        unsupported(Call::AddressFree)
    }

    fn handle_create(&self, _bytes: u64) -> DriverResult<MemoryHandle> {
        unsupported(Call::MemCreate)
    }

    fn handle_release(&self, _handle: MemoryHandle) -> DriverResult<()> {
        unsupported(Call::MemRelease)
    }

    fn map(&self, _address: Address, _bytes: u64, _handle: MemoryHandle) -> DriverResult<()> {
        unsupported(Call::MemMap)
    }

    fn set_access(&self, _address: Address, _bytes: u64) -> DriverResult<()> {
        unsupported(Call::MemSetAccess)
    }

    fn unmap(&self, _address: Address, _bytes: u64) -> DriverResult<()> {
        unsupported(Call::MemUnmap)
    }

    fn event_create(&self) -> DriverResult<EventHandle> {
        let mut inner = self.lock();
        inner.next_event += 1;
        let event = inner.next_event;
        inner.events.insert(event, None);
        Ok(EventHandle(event))
    }

    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        match self.lock().events.remove(&event.0) {
            Some(_) => Ok(()),
            None => Err(DriverError::new(Call::EventDestroy, code::INVALID_HANDLE)),
        }
    }

    fn event_record(&self, event: EventHandle, _stream: StreamHandle) -> DriverResult<()> {
        let mut inner = self.lock();
        let epoch = inner.epoch;
        match inner.events.get_mut(&event.0) {
            Some(recorded) => {
                *recorded = Some(epoch);
                Ok(())
            }
            None => Err(DriverError::new(Call::EventRecord, code::INVALID_HANDLE)),
        }
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        let inner = self.lock();
        match inner.events.get(&event.0) {
            Some(recorded) => Ok(recorded.is_none_or(|epoch| epoch < inner.epoch)),
            None => Err(DriverError::new(Call::EventQuery, code::INVALID_HANDLE)),
        }
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        match self.lock().events.get_mut(&event.0) {
            Some(recorded) => {
                *recorded = None;
                Ok(())
            }
            None => Err(DriverError::new(Call::EventSynchronize, code::INVALID_HANDLE)),
        }
    }

    fn stream_wait_event(&self, _stream: StreamHandle, _event: EventHandle) -> DriverResult<()> {
        Ok(())
    }

    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        let inner = self.lock();
        Ok(inner.capturing.get(&stream.0).map_or(CaptureStatus::None, |id| CaptureStatus::Active(CaptureId(*id))))
    }

    fn capture_frontier(&self, _stream: StreamHandle) -> DriverResult<Option<CaptureFrontier>> {
        Ok(None)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        Ok(std::mem::replace(&mut self.lock().mode, mode))
    }

    fn now(&self) -> u64 {
        let mut inner = self.lock();
        inner.clock += 1;
        inner.clock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_segments_lie_where_the_file_says_and_others_elsewhere() {
        let device = ScriptedDevice::new(1 << 30, 1 << 30);
        device.expect(&[DriverCall::Malloc { bytes: 2 << 20, segment: 0, address: 0x40_0000 }]);
        let first = device.mem_alloc(2 << 20).unwrap();
        assert_eq!(first, Address(BASE + 0x40_0000));
        assert_eq!(device.locate(first.offset(100)), Some((0, 100)));
        let unexpected = device.mem_alloc(2 << 20).unwrap();
        assert!(unexpected.0 >= ELSEWHERE);
        device.mem_free(first).unwrap();
        assert_eq!(device.locate(first), None);
        assert_eq!(
            device.made(),
            [
                DeviceCall::Malloc { bytes: 2 << 20, segment: 0 },
                DeviceCall::Malloc { bytes: 2 << 20, segment: 1 },
                DeviceCall::Free { segment: 0 }
            ]
        );
        assert_eq!(device.mem_free(first).unwrap_err().code, code::INVALID_VALUE);
    }

    #[test]
    fn the_limit_and_the_file_both_refuse() {
        let device = ScriptedDevice::new(1 << 30, 4 << 20);
        device.expect(&[DriverCall::Refused { bytes: 2 << 20 }]);
        assert!(device.mem_alloc(2 << 20).unwrap_err().is_out_of_memory());
        let kept = device.mem_alloc(2 << 20).unwrap();
        assert!(device.mem_alloc(3 << 20).unwrap_err().is_out_of_memory());
        assert_eq!(device.mem_info().unwrap(), MemoryInfo { free: 2 << 20, total: 1 << 30 });
        device.mem_free(kept).unwrap();
        assert_eq!(device.mem_info().unwrap().free, 4 << 20);
    }

    #[test]
    fn events_complete_when_work_does_or_when_waited_for() {
        let device = ScriptedDevice::new(1 << 30, 1 << 30);
        let event = device.event_create().unwrap();
        assert!(device.event_query(event).unwrap(), "never recorded");
        device.event_record(event, StreamHandle(1)).unwrap();
        assert!(!device.event_query(event).unwrap());
        device.complete_all_work();
        assert!(device.event_query(event).unwrap());
        device.event_record(event, StreamHandle(1)).unwrap();
        assert!(!device.event_query(event).unwrap(), "recorded again");
        device.event_synchronize(event).unwrap();
        assert!(device.event_query(event).unwrap());
        device.event_destroy(event).unwrap();
        assert!(device.event_query(event).is_err());
    }

    #[test]
    fn captures_are_what_the_script_says() {
        let device = ScriptedDevice::new(1 << 30, 1 << 30);
        device.begin_capture(StreamHandle(3), CaptureId(77));
        assert_eq!(device.capture_status(StreamHandle(3)).unwrap(), CaptureStatus::Active(CaptureId(77)));
        assert_eq!(device.capture_status(StreamHandle(2)).unwrap(), CaptureStatus::None);
        device.end_capture(StreamHandle(3));
        assert_eq!(device.capture_status(StreamHandle(3)).unwrap(), CaptureStatus::None);
    }
}
