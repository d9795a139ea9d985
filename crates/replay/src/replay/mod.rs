//! Replaying a workload trace against an allocator, and what it took.
//!
//! # How it goes
//!
//! A replay builds a device and an allocator and makes the trace's requests in order. One run over the trace is a
//! *turn*. In the first turn every event is followed by a look at what changed (segments, pools, peaks); it is not
//! timed. Further turns run on the same allocator, with nothing in the loop but the requests; they are timed, and so
//! is the same loop on an allocator that does nothing.
//!
//! # What stands for what
//!
//! * Stream *n* of the trace is a stream of the device. The work of a trace is not in it, so the device's streams are
//!   idle, except where the trace or the caller says that work is under way.
//! * A free that completes late had uses on other streams: it is replayed as one use recorded on a private stream,
//!   whose work completes where the trace says so. A private stream serves again once it is idle.
//! * With a completion lag of *n*, a freed block's work completes *n* counted events after the free, or after the
//!   completion that the trace tells.
//! * Captures are captures: the device's stream really captures. At the end of a turn those still open are closed,
//!   graphs are dropped, and blocks still alive are freed; each turn's private pools are new ones.
//!
//! # Rules
//!
//! * **R1** Peaks, pools, segments and the snapshot are those of the first turn. What a turn costs the driver ends
//!   with its last event: freeing what is left is no part of it.
//! * **R2** Only calls that the allocator makes are counted.
//! * **R3** A replay that runs out of memory says so: it has a [`Stopped`] and no timing.
//! * **R4** Under `torch-2.11` the simulated device places segments where they were recorded, if nothing (capacity,
//!   lag) makes the run differ from the recording.

mod capacity;
mod meter;
mod metered_graphs;
mod observe;
mod report;
mod run;
mod setup;
mod turn;

pub use capacity::{Capacity, find_capacity};
use gpupool_device::{DriverResult, GraphDevice, StreamHandle};
use gpupool_sim_device::SimDevice;
pub use meter::{Meter, Metered};
pub use report::{Iteration, PoolReport, Report, SegmentReport, Stopped};
pub use run::{Options, ReplayError, Replayed, replay_on, replay_simulated};
pub use turn::Refusal;

/// Bytes that an H200 has in all: the capacity of a simulated device unless another is asked for.
pub const DEFAULT_CAPACITY: u64 = 150_109_880_320;

/// A device that traces can be replayed on. A real one needs nothing beyond its calls: its work takes the time it
/// takes.
pub trait ReplayDevice: GraphDevice {
    /// What a command line calls the device.
    fn label(&self) -> String {
        format!("cuda:{}", self.ordinal())
    }

    /// Makes `handle` name a stream, for devices on which any number can.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn adopt_stream(&self, _handle: StreamHandle) -> DriverResult<()> {
        Ok(())
    }

    /// Submits work to `stream` that completes once [`advance`](Self::advance) was called `events` more times.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn hold(&self, _stream: StreamHandle, _events: u64) -> DriverResult<()> {
        Ok(())
    }

    /// One more event of the workload is over.
    fn advance(&self) {}

    /// The program takes so many nanoseconds to its next event: the clock goes on by them, and nobody waits.
    fn pass_time(&self, _nanoseconds: u64) {}

    /// Nanoseconds on a clock that moves in driver calls; where the device can tell, not while they wait for work.
    fn driver_ns(&self) -> u64 {
        self.now()
    }
}

impl ReplayDevice for SimDevice {
    fn label(&self) -> String {
        "sim".to_owned()
    }

    fn adopt_stream(&self, handle: StreamHandle) -> DriverResult<()> {
        Self::adopt_stream(self, handle);
        Ok(())
    }

    fn hold(&self, stream: StreamHandle, events: u64) -> DriverResult<()> {
        self.hold_until_tick(stream, self.tick().saturating_add(events))
    }

    fn advance(&self) {
        self.advance_tick();
    }

    fn pass_time(&self, nanoseconds: u64) {
        Self::pass_time(self, nanoseconds);
    }

    fn driver_ns(&self) -> u64 {
        Self::driver_ns(self)
    }
}
