//! Captures and the graphs they become, with private pools that nobody can corrupt.
//!
//! A captured graph has addresses baked in. Whoever gets memory at such an address while the graph may still run corrupts its results,
//! with no error anywhere. This crate owns everything about captures that makes this impossible; where requests go while one is under
//! way is the allocator's part.
//!
//! # Parts
//!
//! * [`Captures`] begins, adopts and tidies up; one for each allocator.
//! * [`Capture`] is a capture under way. Ending it gives a [`Graph`]; dropping it abandons it and undoes exactly what was set up.
//! * [`Graph`] holds every pool that the capture touched, on every device.
//! * [`Executable`] is a graph that can be launched. A launch checks what must hold for its pools, and nothing else.
//!
//! # Invariants
//!
//! * **G1** A session is open from before the driver's begin until after its end, so no request on the capture's streams finds a gap.
//! * **G2** A graph holds its pools; an executable holds its graph; a launch under way holds both, also when every handle is gone.
//! * **G3** What is dropped while a capture is under way or a launch unfinished is queued. A drop neither waits nor fails.
//! * **G4** Two runs of graphs that share a pool are never unordered (unless the caller says that it sees to that).
//! * **G5** No memory node enters a graph through us; a graph that has some, recorded by others, says so.
//! * **G6** An end that fails and an abandoned capture leave stream, routing and pool as they were before the begin.
//!
//! # Locks
//!
//! A launch holds the run lock of each of its pools, in a fixed order, from its check until the driver has the launch: that is what makes
//! check and launch one step. Nothing of the allocator's is locked around a driver call.
#![forbid(unsafe_code)]

mod adopted;
mod capture;
mod captures;
mod error;
mod executable;
mod graph;
mod guarded;
mod idle;
mod inputs;
mod reaper;
mod runs;
mod sync;

pub use adopted::Adopted;
pub use capture::{Capture, Outside};
pub use captures::{CaptureOptions, Captures, Orphan, PoolChoice};
pub use error::{CaptureError, Forbidden, LaunchError};
pub use executable::{Executable, LaunchOptions, Launched, Overwrite};
pub use graph::{Graph, GraphId, GraphReport, PoolReport};
pub use guarded::{Guarded, GuardedError};
pub use inputs::StaleInput;
pub use runs::{InputCheck, OutputCheck, Sharing};
