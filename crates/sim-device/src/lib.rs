//! A simulated GPU: memory, streams, events, captures, faults and a race detector, with no GPU needed.
//!
//! [`SimDevice`] implements [`Device`](gpupool_device::Device), [`GraphDevice`](gpupool_device::GraphDevice) and
//! [`Workbench`](gpupool_device::Workbench). It behaves as an H200 did when it was measured, refuses what that driver
//! refuses, and costs in virtual time what that driver cost. What it adds is what no GPU offers: it is deterministic,
//! chooses the order in which streams advance, tells who touched whose memory in what order, and fails when told to.
//!
//! ```
//! use gpupool_device::{Device, Kernel, StreamKind, Workbench};
//! use gpupool_sim_device::{ReportKind, Scheduler, SimConfig, SimDevice};
//!
//! # fn main() -> Result<(), gpupool_device::DriverError> {
//! let device = SimDevice::new(SimConfig::default().with_scheduler(Scheduler::Adversarial));
//! let (a, b) = (device.stream_create(StreamKind::NonBlocking)?, device.stream_create(StreamKind::NonBlocking)?);
//! let x = device.mem_alloc(4096)?;
//! device.launch(a, Kernel::Fill { dst: x, bytes: 4096, value: 1 })?;
//! device.launch(b, Kernel::Add { dst: x, bytes: 4096, value: 1 })?; // nobody made b wait for a
//! device.run_until_idle();
//! assert_eq!(device.reports()[0].kind, ReportKind::Race);
//! # Ok(())
//! # }
//! ```
//!
//! # How it works
//!
//! **Work** waits in its stream's queue. It advances only in [`step`](SimDevice::step) and inside calls that wait; there, a
//! [`Scheduler`] picks which stream's head, or which node of a graph at a head, runs next. A wait that nothing can
//! satisfy is the error `WAIT_NEVER_ENDS`, and [`last_wait_report`](SimDevice::last_wait_report) names what holds it
//! up.
//!
//! **Time** is virtual. Each call adds its price from a [`CostModel`]; a piece of work starts at the latest of its
//! stream's last end, its submission and the ends of what it waited for, so work overlaps in time whatever order it is
//! simulated in. [`driver_ns`](SimDevice::driver_ns) is what the host spent in calls, [`wait_ns`](SimDevice::wait_ns)
//! what it spent waiting.
//!
//! **Memory** has contents, by physical number: aliases show the same bytes, new memory reads zero. Contents, owners
//! and access histories are interval maps, so a kernel over a gigabyte costs what one over a word does.
//!
//! **Owners** are told by whoever hands memory out: [`own`](SimDevice::own), [`disown`](SimDevice::disown) and
//! [`launch_as`](SimDevice::launch_as). The detector reports the first access to a byte in the name of a stale owner,
//! or with no order to an earlier one; order comes from streams, event waits, graph edges and what the host has seen
//! complete.
//!
//! **Faults**: [`fail_nth`](SimDevice::fail_nth), [`fail_all`](SimDevice::fail_all),
//! [`set_capacity`](SimDevice::set_capacity), [`invalidate_capture_after`](SimDevice::invalidate_capture_after).
//!
//! # Invariants
//!
//! 1. For one driving thread, equal calls and equal seeds give equal results, reports and times.
//! 2. A program in which every access is ordered computes the same under every scheduler, and nothing is reported.
//! 3. Whether anything is reported does not depend on the scheduler, unless the program asks whether work is complete.
//! 4. A call that fails has changed nothing, but for captures it was measured to invalidate and, if it waited, work
//!    that ran (and a `read` whose wait never ends stays submitted).
//! 5. No call holds the lock while a host function runs.
//!
//! Modules state their own, with a letter each: memory M, intervals V, streams S, clocks C, scheduler W, captures K,
//! graphs G, races R.
//!
//! # What it does not do
//!
//! Graphs hold kernels, host functions, empty nodes and memory nodes of the driver's pools, which get memory as their graph is launched;
//! those of other libraries are listed but do nothing, child graphs and conditional nodes are refused. No peer access: a kernel reaches its own device's memory. Prices of
//! kernels, launches and graph inspection are assumed, not measured. Threads are not explored: several may call, but
//! their order is the machine's.
#![forbid(unsafe_code)]

mod captures;
mod clocks;
mod config;
mod costs;
mod counters;
mod device_impl;
mod driver_pools;
mod events;
mod execute;
mod faults;
mod foreign;
mod graph_impl;
mod graphs;
mod inspect;
mod intervals;
mod kernels;
mod memory;
mod race;
mod report;
mod scheduler;
mod state;
mod streams;
mod ticks;
mod work;
mod workbench_impl;
mod world;

pub use config::{Placement, Scheduler, SimConfig};
pub use costs::{CostModel, Curve};
pub use foreign::ForeignCall;
pub use graphs::RepeatableHostFunction;
pub use report::{Access, OwnerInfo, Report, ReportKind, Withdrawal};
pub use scheduler::{Awaited, Holdup, HoldupReason, WaitReport};
pub use world::{SimDevice, SimWorld};
