//! Stress: operations at random, from several threads, with every byte checked.
//!
//! # What is checked
//!
//! Each block is filled with a word of its own when it is handed out. Before it is freed, and wherever another stream
//! uses it, the device sums its words up, and the sum is compared later: whoever got the block too early would have
//! changed it. A [`Shadow`](crate::shadow::Shadow) sees each hand-out and each free. A simulated device checks
//! besides that each access is ordered after those before it and made by the owner. At the end the allocator recounts
//! everything, and after the cache is emptied nothing may be left.
//!
//! * [`Harness`] executes operations one by one, for property tests and fuzzing.
//! * [`stress`] runs one harness a thread on one allocator, and blocks change hands between them.

mod device;
mod harness;
mod run;

pub use device::StressDevice;
pub use harness::{Common, Failed, Harness, Tally};
pub use run::{Limit, StatsOf, StressError, StressOptions, StressReport, stress, stress_simulated};
