//! The real GPU: [`CudaDevice`] implements [`Device`](gpupool_device::Device), [`GraphDevice`](gpupool_device::GraphDevice) and
//! [`Workbench`](gpupool_device::Workbench) with the CUDA driver API.
//!
//! ```no_run
//! use gpupool_cuda_device::{CudaDevice, Unavailable};
//! use gpupool_device::Device;
//!
//! match CudaDevice::open(0) {
//!     Ok(device) => println!("{}: {} bytes free", device.properties().name, device.mem_info()?.free),
//!     Err(Unavailable::NoLibrary { .. }) => println!("skipped: no CUDA driver"),
//!     Err(other) => println!("{other}"),
//! }
//! # Ok::<(), gpupool_device::DriverError>(())
//! ```
//!
//! # How it works
//!
//! **The driver** is opened at run time, once a process, and every entry point this crate calls is looked up then
//! ([`availability`]). So this crate builds where there is no CUDA, and a missing or old driver, a stub library or a machine without a
//! GPU is an [`Unavailable`] that says which. Result codes are integers from end to end: a code that nobody here knows is an error with
//! that number. Structs are cudarc's, and its types are what an embedder passes in ([`interop`]).
//!
//! **Handles** that callers pass are looked up in tables of what exists before the driver sees them (`objects.rs`), because the driver
//! dereferences them: a stale or invented number is `INVALID_HANDLE` or `INVALID_VALUE`, no crash. Streams that somebody else made are
//! lent with [`CudaDevice::borrow_stream`], which is `unsafe`. An object that one thread destroys while another uses it goes when the other is
//! done.
//!
//! **The context** is the device's primary one, held as long as the device or any object of it lives, or one that the embedder lends
//! ([`CudaDevice::with_context`]). Each call makes it current on the calling thread if it is not, and puts back what was: no thread needs to
//! be prepared, and none finds another device than it left.
//!
//! **A forked child** can ask for nothing: every call is the error `FORKED`, and giving something back is a success that does nothing.
//! **While the driver shuts down** giving back succeeds, too: there is nothing left to give back to. Neither `Drop` nor any method panics.
//!
//! **Kernels** (the workbench's) are compiled by NVRTC when the first one is launched, or by [`CudaDevice::load_kernels`], which says what is
//! missing. Nothing else needs NVRTC.
//!
//! # Invariants
//!
//! 1. No pointer that a caller made up reaches the driver: handles are in a table, or one of the three default streams.
//! 2. Graphs and executables, which the driver does not lock, are used by one thread at a time.
//! 3. A call that fails leaves the tables as they were.
//! 4. A thread's current context is the same after each call as before it.
//!
//! # What it does not do
//!
//! It shields the driver from bad handles, not the GPU from bad addresses: a kernel that writes where nothing is mapped makes every later
//! call fail with `ILLEGAL_ADDRESS`, and one that writes into somebody else's block corrupts it. Waiting calls wait for ever if the GPU does.
//! One thread at a time may submit to a capturing stream while another asks for its frontier, as the driver demands.

pub mod availability;
mod bench;
pub mod blas;
mod context;
mod device;
mod device_impl;
mod driver;
mod error;
pub mod foreign;
mod graph_impl;
pub mod graph_memory;
mod host;
pub mod interop;
pub mod kernels;
mod objects;
mod process;
pub mod stream_ordered;
mod workbench_impl;

pub use availability::{Driver as DriverInfo, Unavailable};
pub use device::{CudaDevice, Hardware};
pub use host::{PinnedBytes, RepeatableHostFunction};
