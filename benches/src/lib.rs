//! What the benchmarks of gpupool and its peers have in common: workloads, and allocators to run them on.
//!
//! A [`Workload`] says what is asked: a hot pair, a working set, a recorded trace. [`Prepared`] is all of it that can be made before the
//! clock runs. A [`Peer`] is an allocator under test; [`Running`] is a peer in the middle of a workload, and is what is timed. Every loop
//! is generic over the peer, so that nothing but the peer differs between two rows.
//!
//! Host time only: no memory is touched, and the device is simulated, with calls that cost no virtual time.
#![forbid(unsafe_code)]

mod compare;
mod draw;
mod failed;
pub mod foreign;
pub mod instructions;
mod peer;
pub mod peers;
mod running;
mod sample;
mod script;
mod threads;
mod workload;

pub use compare::{Asked, Comparison, Comparisons, Figure, Row, compare};
pub use draw::Draw;
pub use failed::{Failed, or_exit};
pub use peer::{CAPACITY, Needs, Peer};
pub use running::Running;
pub use sample::{Kind, Sample, Spread, Worker, sample, time};
pub use script::{Op, Script};
pub use threads::{Apart, PrivateLoop, together};
pub use workload::{Prepared, Step, Workload, traces_folder};
