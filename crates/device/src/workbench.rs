//! Streams and kernels for tests, stress and examples.

use crate::{Address, DriverResult, GraphDevice, StreamHandle};

/// How a stream relates to the legacy default stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum StreamKind {
    /// Waits for the legacy default stream and is waited for by it.
    Blocking,
    /// Has nothing to do with it.
    #[default]
    NonBlocking,
}

/// A gate that a kernel waits at. Number given by the device that made it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Gate(pub u64);

/// What the workbench's kernels do. Lengths are bytes and multiples of 4 (words are 32 bits); addresses are multiples of 4.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Kernel {
    /// Sets every word of `[dst, dst + bytes)` to `value`.
    Fill {
        /// Start of the range written.
        dst: Address,
        /// Its length.
        bytes: u64,
        /// The word.
        value: u32,
    },
    /// Copies `bytes` from `src` to `dst`; the ranges do not overlap.
    Copy {
        /// Start of the range written.
        dst: Address,
        /// Start of the range read.
        src: Address,
        /// Length of both.
        bytes: u64,
    },
    /// Adds `value` (wrapping) to every word of `[dst, dst + bytes)`.
    Add {
        /// Start of the range read and written.
        dst: Address,
        /// Its length.
        bytes: u64,
        /// The word to add.
        value: u32,
    },
    /// Writes to the 8 bytes at `dst` the sum over all words of `[src, src + bytes)`, each times its index plus one (wrapping
    /// 64-bit arithmetic, little endian): two ranges with the same words in another order differ.
    Checksum {
        /// Where the sum goes, 8 bytes.
        dst: Address,
        /// Start of the range read.
        src: Address,
        /// Its length.
        bytes: u64,
    },
    /// Keeps the stream busy until the gate is opened. Touches no memory.
    Wait {
        /// The gate.
        gate: Gate,
    },
}

/// What tests, stress and examples need beyond [`GraphDevice`].
pub trait Workbench: GraphDevice {
    /// Creates a stream. Its handle may be the number of one destroyed before. *Capture*: permitted.
    fn stream_create(&self, kind: StreamKind) -> DriverResult<StreamHandle>;

    /// Destroys a stream; its work still completes. *Blocks*: no. *Capture*: permitted for a stream that is not capturing.
    fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()>;

    /// Waits on the host until all work submitted to `stream` is complete. *Blocks*: yes. *Capture*: unsafe call; on a capturing
    /// stream it fails in every mode.
    fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult<()>;

    /// Waits on the host until the device is idle. *Blocks*: yes. *Capture*: fails and invalidates in every mode.
    fn device_synchronize(&self) -> DriverResult<()>;

    /// Launches a kernel on `stream`, or records it there as a node.
    fn launch(&self, stream: StreamHandle, kernel: Kernel) -> DriverResult<()>;

    /// A closed gate.
    fn gate_create(&self) -> DriverResult<Gate>;

    /// Opens a gate for good: work that waits there goes on. Not a driver call.
    fn gate_open(&self, gate: Gate) -> DriverResult<()>;

    /// Waits for `stream`, then copies device memory to the host. *Blocks*: yes. *Capture*: unsafe call.
    fn read(&self, stream: StreamHandle, src: Address, into: &mut [u8]) -> DriverResult<()>;
}
