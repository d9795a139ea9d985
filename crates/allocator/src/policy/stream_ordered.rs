//! `stream-ordered`: the driver's own pool behind the same handles. See [`crate::stream_ordered`].

use super::{Rules, arena_rules, segments};
use crate::config::Config;
use crate::ladder::{Rung, Step, Then};

/// The driver is asked at once; what this allocator does is what the driver cannot: return blocks that other streams are done with, ask for
/// memory to be given up, wait.
const LADDER: &[Rung] = &[
    Rung { step: Step::CompletedEvents, then: Then::SearchAgain },
    Rung { step: Step::WaitOnStream, then: Then::SearchAgain },
    Rung { step: Step::TakeFromRetired, then: Then::GoOn },
    Rung { step: Step::ReservedAhead, then: Then::GoOn },
    Rung { step: Step::Grow { retry: false }, then: Then::GoOn },
    Rung { step: Step::Reclaimers, then: Then::SearchAgain },
    Rung { step: Step::OverflowPools, then: Then::GoOn },
    Rung { step: Step::ReleaseIdle { wait: false }, then: Then::SearchAgain },
    Rung { step: Step::WaitForPending, then: Then::SearchAgain },
    Rung { step: Step::ReleaseIdle { wait: true }, then: Then::SearchAgain },
    Rung { step: Step::EmptyDriverPoolThenGrow, then: Then::GoOn },
];

/// The decisions of `stream-ordered`.
pub(super) fn rules(config: &Config, device: &gpupool_device::DeviceProperties) -> Rules {
    Rules {
        arena: arena_rules(config, false, false, false),
        handle_granularity: None,
        stream_ordered: true,
        ladder: LADDER,
        ..segments::rules(config, device)
    }
}
