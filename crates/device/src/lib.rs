//! What the rest of gpupool means by *device*: plain words for addresses, streams, events and captures, and three traits.
//!
//! * [`Device`] is every call the allocator ever makes to a driver.
//! * [`GraphDevice`] adds what captures and graphs need.
//! * [`Workbench`] adds streams and kernels, for tests, stress and examples.
//!
//! Each is a superset of the one before. One value of such a type is one GPU and knows its ordinal. The allocator is generic
//! over the trait, so a call through it costs nothing.
//!
//! # Rules every implementation keeps
//!
//! * **D1** Sizes are bytes, times nanoseconds, and a handle's number means nothing but to the device that gave it.
//! * **D2** Every method may be called from any thread. None panics; what goes wrong is a [`DriverError`].
//! * **D3** A failed call has changed nothing (but see *capture* in each method's documentation: some calls invalidate a
//!   capture when they fail).
//! * **D4** Nothing is called back from inside a method.
//!
//! # What a method's documentation tells
//!
//! *Blocks*: whether the call can wait for the GPU. *Capture*: whether the call is permitted while a stream is being captured.
//! "Unsafe call" there means: in a `Global` capture from any thread, and in a `ThreadLocal` capture from the capturing thread,
//! the call fails with [`code::CAPTURE_UNSUPPORTED`] **and invalidates the capture**, unless the calling thread has exchanged
//! its mode to [`CaptureMode::Relaxed`].
#![forbid(unsafe_code)]

mod call;
mod device;
mod error;
mod graph;
mod types;
mod workbench;

pub use call::Call;
pub use device::{Device, are_complete, with_relaxed_capture};
pub use error::{DriverError, DriverResult, code};
pub use graph::{Edge, ExecHandle, GraphDevice, GraphHandle, HostFunction, InstantiateFlags, Node, NodeId, NodeKind};
pub use types::{
    Address, CaptureFrontier, CaptureId, CaptureMode, CaptureStatus, DeviceProperties, DriverPoolFigures,
    DriverPoolHandle, EventHandle, HostMemory, Memory, MemoryHandle, MemoryInfo, StreamHandle,
};
pub use workbench::{Gate, Kernel, StreamKind, Workbench};
