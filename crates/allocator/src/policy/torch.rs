//! PyTorch's caching allocator, decision for decision, so that the same requests get the same places, driver calls and counters.
//! Its known faults are part of that (but for the two that corrupt memory).

use super::{CaptureContext, Routing, Rules, arena_rules};
use crate::config::Config;
use crate::inner::SMALL_LIMIT;
use crate::ladder::{Rung, Step, Then};

/// PyTorch's order. Nothing is searched again after memory was given back, only the driver is asked again: a block that an event
/// has just returned is not found, as there.
const LADDER: &[Rung] = &[
    Rung { step: Step::Reclaimers, then: Then::SearchAgain },
    Rung { step: Step::GarbageCollection, then: Then::GoOn },
    Rung { step: Step::Grow { retry: false }, then: Then::GoOn },
    Rung { step: Step::OverflowPools, then: Then::GoOn },
    Rung { step: Step::OversizeThenGrow, then: Then::GoOn },
    Rung { step: Step::EmptyCacheThenGrow, then: Then::GoOn },
];

/// PyTorch 2.15.
pub(super) fn rules_2_15(config: &Config) -> Rules {
    Rules {
        arena: arena_rules(config, true, false, false),
        single_arena: true,
        handle_granularity: None,
        pages: None,
        stream_ordered: false,
        small_limit: SMALL_LIMIT,
        poll_each_allocation: true,
        streams_by_handle: true,
        capture_context: CaptureContext::CurrentStream,
        routing: Routing::NewestScope,
        revives_pools: false,
        counts_over_releases: true,
        remembers_pools: true,
        collects_busy_memory: true,
        overflow_from_held: true,
        plain_rounding: config.rounding().is_plain(),
        enough_traded: u64::MAX,
        ladder: LADDER,
    }
}

/// PyTorch 2.11: ties are broken by address, and any open scope counts as a capture.
pub(super) fn rules_2_11(config: &Config) -> Rules {
    Rules {
        arena: arena_rules(config, true, false, true),
        capture_context: CaptureContext::AnyScope,
        ..rules_2_15(config)
    }
}
