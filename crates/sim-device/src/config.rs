//! What a simulated device is built from.

use gpupool_device::Address;

use crate::CostModel;

/// Which stream's head runs next, wherever work runs at all (see the crate's documentation: only in `step` and in calls that
/// wait).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Scheduler {
    /// What was submitted first runs first.
    #[default]
    InOrder,
    /// Any head that can run, drawn from this seed.
    Random {
        /// Equal seeds draw equally.
        seed: u64,
    },
    /// The order that shows missing ordering: what was submitted last runs first, and a wait runs nothing but what it needs,
    /// so everything else lags as far behind as the program permits.
    Adversarial,
}

/// Where new segments are placed: plain allocations and reserved ranges.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// Each at the end of the one before, rounded up to 2 MiB. No address is ever used twice.
    #[default]
    Growing,
    /// Each below the one before. No address is ever used twice.
    Falling,
    /// The n-th allocation or reservation that succeeds lies at the n-th address; one that would overlap what is there is
    /// `INVALID_VALUE`. Once the list is used up, `Growing` above everything placed so far.
    Scripted(Vec<Address>),
}

/// Configuration of a [`SimDevice`](crate::SimDevice) or of every device of a [`SimWorld`](crate::SimWorld).
///
/// ```
/// use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};
///
/// let config = SimConfig { scheduler: Scheduler::Random { seed: 7 }, ..SimConfig::default() }.with_capacity(1 << 30);
/// let device = SimDevice::new(config);
/// assert_eq!(device.memory_in_use(), 0);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SimConfig {
    /// Bytes of memory. The default is an H200's as a fresh context sees it.
    pub capacity: u64,
    /// The device's name.
    pub name: String,
    /// Whether the virtual-memory calls work; without, they are `NOT_SUPPORTED`.
    pub virtual_memory: bool,
    /// Granularity of memory in bytes, a power of two: virtual memory comes in multiples, plain allocations take multiples.
    pub granularity: u64,
    /// Who runs next.
    pub scheduler: Scheduler,
    /// Where segments are placed.
    pub placement: Placement,
    /// Whether a destroyed stream's number is given to the next stream that is created, as drivers do.
    pub recycle_stream_handles: bool,
    /// What calls and kernels cost in virtual time.
    pub costs: CostModel,
    /// Whether memory has contents. Without, kernels take time and are checked, but move no data.
    pub contents: bool,
    /// Whether accesses are checked for owners and ordering.
    pub race_detector: bool,
    /// Whether what one host thread learned (that an event is complete) counts as known to all. On by default: threads
    /// of one process tell each other through locks that the device cannot see. Off, only
    /// [`share_host_knowledge`](crate::SimDevice::share_host_knowledge) passes it on.
    pub shared_host_order: bool,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            capacity: 150_109_880_320,
            name: "simulated H200".to_owned(),
            virtual_memory: true,
            granularity: 2 << 20,
            scheduler: Scheduler::InOrder,
            placement: Placement::Growing,
            recycle_stream_handles: true,
            costs: CostModel::h200(),
            contents: true,
            race_detector: true,
            shared_host_order: true,
        }
    }
}

impl SimConfig {
    /// With this many bytes of memory.
    #[must_use]
    pub fn with_capacity(mut self, bytes: u64) -> Self {
        self.capacity = bytes;
        self
    }

    /// With this scheduler.
    #[must_use]
    pub fn with_scheduler(mut self, scheduler: Scheduler) -> Self {
        self.scheduler = scheduler;
        self
    }

    /// With this placement.
    #[must_use]
    pub fn with_placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// With these costs.
    #[must_use]
    pub fn with_costs(mut self, costs: CostModel) -> Self {
        self.costs = costs;
        self
    }

    /// For big replays: no contents and no race detector, costs as they are.
    #[must_use]
    pub fn for_replay(mut self) -> Self {
        self.contents = false;
        self.race_detector = false;
        self
    }
}
