//! `segments`: block splitting in segments from the driver, without PyTorch's known faults.

use gpupool_device::DeviceProperties;

use super::{CaptureContext, Routing, Rules, arena_rules};
use crate::config::{Config, VirtualMemory};
use crate::inner::SMALL_LIMIT;
use crate::ladder::{Rung, Step, Then};

/// Trades of whole segments cost next to nothing: what is held may change hands four times over.
const SEGMENTS_TRADED: u64 = 4 * 8;

/// Every step that returned blocks is followed by a search. Cheap steps come first, and waiting for the GPU comes last.
const LADDER: &[Rung] = &[
    Rung { step: Step::EmptyBins, then: Then::SearchAgain },
    Rung { step: Step::CaptureOrder, then: Then::SearchAgain },
    Rung { step: Step::CompletedEvents, then: Then::SearchAgain },
    Rung { step: Step::WaitOnStream, then: Then::SearchAgain },
    Rung { step: Step::Reclaimers, then: Then::SearchAgain },
    Rung { step: Step::GarbageCollection, then: Then::SearchAgain },
    Rung { step: Step::TakeIdleSegment { wait: false }, then: Then::SearchAgain },
    Rung { step: Step::TakeFromRetired, then: Then::GoOn },
    Rung { step: Step::ReservedAhead, then: Then::GoOn },
    Rung { step: Step::Borrow { short: false }, then: Then::GoOn },
    Rung { step: Step::TrimBeforeGrowth, then: Then::GoOn },
    Rung { step: Step::Grow { retry: false }, then: Then::GoOn },
    Rung { step: Step::OverflowPools, then: Then::GoOn },
    Rung { step: Step::Borrow { short: true }, then: Then::GoOn },
    Rung { step: Step::ReleaseIdle { wait: false }, then: Then::SearchAgain },
    Rung { step: Step::ParkIdle { wait: false }, then: Then::SearchAgain },
    Rung { step: Step::GrowToFit, then: Then::GoOn },
    Rung { step: Step::WaitForPending, then: Then::SearchAgain },
    Rung { step: Step::TakeIdleSegment { wait: true }, then: Then::SearchAgain },
    Rung { step: Step::ReleaseIdle { wait: true }, then: Then::SearchAgain },
    Rung { step: Step::ParkIdle { wait: true }, then: Then::SearchAgain },
];

/// The decisions of `segments`: handles where the device has virtual memory, since giving one back waits for nothing.
pub(super) fn rules(config: &Config, device: &DeviceProperties) -> Rules {
    let handles = device.virtual_memory && config.virtual_memory() == VirtualMemory::WherePossible;
    Rules {
        arena: arena_rules(config, false, config.bins(), false),
        single_arena: false,
        handle_granularity: handles.then_some(device.granularity),
        pages: None,
        stream_ordered: false,
        small_limit: SMALL_LIMIT,
        poll_each_allocation: false,
        streams_by_handle: false,
        capture_context: CaptureContext::ByCall,
        routing: Routing::CaptureFirst,
        revives_pools: true,
        counts_over_releases: false,
        remembers_pools: false,
        collects_busy_memory: false,
        overflow_from_held: false,
        plain_rounding: config.rounding().is_plain(),
        enough_traded: SEGMENTS_TRADED,
        ladder: LADDER,
    }
}
