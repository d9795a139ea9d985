//! A simulated GPU: memory, streams, events, captures, faults and a race detector, with no GPU needed.
#![forbid(unsafe_code)]

mod clocks;
mod config;
mod costs;
mod counters;
mod device_impl;
mod events;
mod execute;
mod faults;
mod inspect;
mod memory;
mod scheduler;
mod state;
mod streams;
mod ticks;
mod work;
mod world;

pub use config::{Placement, Scheduler, SimConfig};
pub use costs::{CostModel, Curve};
pub use scheduler::{Awaited, Holdup, HoldupReason, WaitReport};
pub use world::{SimDevice, SimWorld};
