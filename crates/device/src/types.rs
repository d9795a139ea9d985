//! Newtypes for what a driver hands out. None of them owns anything.

use std::fmt;

/// An address in the device's memory. Nothing on the host can be read through it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Address(pub u64);

impl Address {
    /// The null address: what a request of zero bytes gets.
    pub const NULL: Self = Self(0);

    /// Whether this is [`Address::NULL`].
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` further on, wrapping at the end of the address space.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    /// Bytes from `base` to this address, wrapping when it lies before.
    #[must_use]
    pub const fn offset_from(self, base: Self) -> u64 {
        self.0.wrapping_sub(base.0)
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A driver's raw stream. Drivers recycle these numbers at once, so no state may be keyed by one: the allocator gives each
/// registration an id of its own that is never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StreamHandle(pub u64);

impl StreamHandle {
    /// The legacy default stream (null, or the driver's own name for it, 1).
    pub const LEGACY: Self = Self(0);
    /// The calling thread's own default stream: one value, one stream a thread.
    pub const PER_THREAD: Self = Self(2);
}

/// A driver's event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EventHandle(pub u64);

/// Pinned memory of the host that a device copies to and from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct HostMemory(pub u64);

/// One physical allocation of virtual memory: mapped whole, at one or several addresses, or not at all.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MemoryHandle(pub u64);

/// One of the driver's own stream-ordered memory pools (`CUmemoryPool`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DriverPoolHandle(pub u64);

/// What one of the driver's pools holds, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DriverPoolFigures {
    /// Held from the device now.
    pub reserved: u64,
    /// The most that was held since the last reset.
    pub reserved_high: u64,
    /// In blocks now.
    pub used: u64,
    /// The most that was in blocks since the last reset.
    pub used_high: u64,
}

/// The driver's number for a capture in progress; every stream that joined the capture has it. Unique in a process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CaptureId(pub u64);

/// How strict the driver is, while a capture is under way, about calls that a capture cannot contain.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum CaptureMode {
    /// Unsafe calls from any thread fail and invalidate the capture.
    #[default]
    Global,
    /// Unsafe calls from the capturing thread fail and invalidate the capture.
    ThreadLocal,
    /// Nothing is watched.
    Relaxed,
}

/// Whether a stream is being captured.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CaptureStatus {
    /// Not capturing.
    None,
    /// Capturing under this id.
    Active(CaptureId),
    /// Still capturing, but a call broke the capture: its end will return an error. It has no id any more.
    Invalidated,
}

impl CaptureStatus {
    /// The capture's id. One that was invalidated has none: the driver says 0.
    #[must_use]
    pub const fn id(self) -> Option<CaptureId> {
        match self {
            Self::None | Self::Invalidated => None,
            Self::Active(id) => Some(id),
        }
    }

    /// Whether the stream is capturing, valid or not.
    #[must_use]
    pub const fn is_capturing(self) -> bool {
        !matches!(self, Self::None)
    }
}

/// Where a capturing stream stands in its graph: the next node recorded there will depend on exactly these nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaptureFrontier {
    /// The capture.
    pub id: CaptureId,
    /// The graph under construction. Owned by the driver; valid only while the capture lasts.
    pub graph: crate::GraphHandle,
    /// The stream's current terminal nodes.
    pub nodes: Vec<crate::NodeId>,
}

/// Free and total memory of the whole device, in bytes, as the driver sees them: memory that a pool holds is not free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Bytes that the driver could still give, to any process.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
}

/// What does not change while a device is open.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeviceProperties {
    /// The device's name.
    pub name: String,
    /// Bytes of memory in all.
    pub total_memory: u64,
    /// Whether the virtual-memory calls work.
    pub virtual_memory: bool,
    /// Granularity of virtual memory in bytes: sizes and addresses are multiples of it. A power of two.
    pub granularity: u64,
}

impl DeviceProperties {
    /// Properties of a device; fields that a later version adds get their neutral value.
    #[must_use]
    pub fn new(name: impl Into<String>, total_memory: u64, virtual_memory: bool, granularity: u64) -> Self {
        Self { name: name.into(), total_memory, virtual_memory, granularity }
    }
}

/// Something that has device memory for as long as it lives: a block in its owner's hands. What it says is believed by those who pass the
/// memory to a driver.
pub trait Memory {
    /// Where the memory starts.
    fn address(&self) -> Address;

    /// How many bytes may be used there.
    fn bytes(&self) -> u64;
}
