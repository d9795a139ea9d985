//! A simulated GPU: memory, streams, events, captures, faults and a race detector, with no GPU needed.
#![forbid(unsafe_code)]

mod captures;
mod clocks;
mod config;
mod costs;
mod counters;
mod device_impl;
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
