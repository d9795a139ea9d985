//! A caching allocator for GPU memory with private pools for captured graphs.
//!
//! This crate re-exports what an embedder needs and adds nothing of its own.
//!
//! ```
//! use gpupool::device::{InstantiateFlags, Kernel, StreamKind, Workbench};
//! use gpupool::graphs::{CaptureOptions, Captures};
//! use gpupool::{Allocator, Config};
//! use gpupool_sim_device::{SimConfig, SimDevice}; // `gpupool::sim` with the feature of that name
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Arc::new(SimDevice::new(SimConfig::default()));
//! let allocator = Allocator::new(Arc::clone(&device), Config::default())?;
//! let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking)?);
//!
//! // A block on a stream; another stream uses it too, so its memory is free once both are done with it.
//! let other = allocator.register_stream(device.stream_create(StreamKind::NonBlocking)?);
//! let block = allocator.alloc(1 << 20, &stream)?;
//! block.record_stream(&other)?;
//! drop(block);
//!
//! // What a capture takes comes from a pool of its own, and stays put as long as its graph may run.
//! let captures = Captures::new(&allocator);
//! let output = allocator.alloc(4096, &stream)?;
//! let capture = captures.begin(&stream, CaptureOptions::new())?;
//! let scratch = allocator.alloc(4096, &stream)?;
//! device.launch(stream.handle(), Kernel::Fill { dst: scratch.address(), bytes: 4096, value: 42 })?;
//! device.launch(stream.handle(), Kernel::Copy { dst: output.address(), src: scratch.address(), bytes: 4096 })?;
//! drop(scratch);
//! let graph = capture.end()?;
//! let exec = graph.instantiate(InstantiateFlags::default())?;
//! exec.launch(&stream)?;
//!
//! device.stream_synchronize(stream.handle())?;
//! assert_eq!(device.read_bytes(output.address(), 4), Some(vec![42, 0, 0, 0]));
//! println!("{} bytes held from the driver", allocator.stats().reserved_bytes.all.current);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub use gpupool_allocator::*;

/// The vocabulary and the traits of a device.
pub use gpupool_device as device;

/// Captures, graphs and their launches.
pub use gpupool_graph_capture as graphs;

/// States as data: PyTorch's pickle, JSON, what they tell, and the figures of a running process.
pub use gpupool_snapshot as snapshot;

/// The simulated device.
#[cfg(feature = "sim")]
pub use gpupool_sim_device as sim;

/// The real device.
#[cfg(feature = "cuda")]
pub use gpupool_cuda_device as cuda;

/// Workload traces, conformance files, stress and the shadow model.
#[cfg(feature = "replay")]
pub use gpupool_replay as replay;
