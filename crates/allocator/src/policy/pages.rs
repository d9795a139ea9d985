//! `pages`: virtual ranges over physical handles of several sizes; free ones are mapped where they are needed. See `docs/pages.md`.

use gpupool_device::DeviceProperties;

use super::{Rules, segments};
use crate::config::{Config, Preset, VirtualMemory};
use crate::ladder::{Rung, Step, Then};
use crate::pages::{Haste, PageRules};
use crate::units::{Units, to_units};

/// Rounded sizes up to this many bytes are small in the default pool: fewer than in PyTorch, since what is small shares pages with nothing else.
const SMALL_LIMIT: u64 = 256 << 10;

/// Blocks of up to 64 KiB: where larger ones lie decides which pages are free.
const STACKED: Units = 128;

/// Memory counts as short once growth would take the device above this many hundredths of what it has, or of the limit.
pub(crate) const SHORT_ABOVE: u64 = 75;

/// A page that changes hands is mapped anew: a quarter of what is held may.
const PAGES_TRADED: u64 = 2;

/// A fit that would pin a large handle comes first: it is a hit that costs a driver call. Then what costs nothing, what moving and growing
/// costs, and last what waits for the GPU.
const LADDER: &[Rung] = &[
    Rung { step: Step::Cut, then: Then::SearchAgain },
    Rung { step: Step::EmptyBins, then: Then::SearchAgain },
    Rung { step: Step::CaptureOrder, then: Then::SearchAgain },
    Rung { step: Step::CompletedEvents, then: Then::SearchAgain },
    Rung { step: Step::WaitOnStream, then: Then::SearchAgain },
    Rung { step: Step::Reclaimers, then: Then::SearchAgain },
    Rung { step: Step::GarbageCollection, then: Then::SearchAgain },
    Rung { step: Step::TakeFromRetired, then: Then::GoOn },
    Rung { step: Step::ReservedAhead, then: Then::GoOn },
    Rung { step: Step::Borrow { short: false }, then: Then::GoOn },
    Rung { step: Step::Assemble(Haste::Usual), then: Then::GoOn },
    Rung { step: Step::Assemble(Haste::Short), then: Then::GoOn },
    Rung { step: Step::Grow { retry: false }, then: Then::GoOn },
    Rung { step: Step::OverflowPools, then: Then::GoOn },
    Rung { step: Step::Borrow { short: true }, then: Then::GoOn },
    Rung { step: Step::ReleaseIdle { wait: false }, then: Then::SearchAgain },
    Rung { step: Step::ParkIdle { wait: false }, then: Then::SearchAgain },
    Rung { step: Step::WaitForPending, then: Then::SearchAgain },
    Rung { step: Step::Assemble(Haste::Waiting), then: Then::GoOn },
    Rung { step: Step::ReleaseIdle { wait: true }, then: Then::SearchAgain },
    Rung { step: Step::ParkIdle { wait: true }, then: Then::SearchAgain },
];

/// The decisions of `pages`. Where the device has no virtual memory they are those of `segments`.
pub(super) fn rules(config: &Config, device: &DeviceProperties) -> Rules {
    let rules = segments::rules(config, device);
    let page = to_units(device.granularity.next_multiple_of(512)).unwrap_or(4096);
    if !device.virtual_memory || config.virtual_memory() == VirtualMemory::Never {
        return rules;
    }
    let pages = preset(config.preset(), page);
    let mut arena = rules.arena;
    // A large free run may always be carved up: pages bring together what that takes apart.
    (arena.max_split, arena.non_split_slack) = (u64::MAX, u64::MAX);
    // Every rest is of use: what comes next may grow over its page.
    arena.large_remainder = 0;
    arena.pages = true;
    arena.stacked = STACKED;
    arena.cuts_at = if pages.largest > page { page } else { 0 };
    Rules { arena, pages: Some(pages), small_limit: SMALL_LIMIT, enough_traded: PAGES_TRADED, ladder: LADDER, ..rules }
}

/// The presets.
fn preset(preset: Preset, page: Units) -> PageRules {
    const MIB: Units = 2048;
    // Many enough to move, few enough to make: a request of 20 MiB takes one.
    let middling = page.max(24 * MIB);
    let rules = PageRules {
        page,
        largest: middling,
        handles: 16,
        largest_if_short: middling,
        worth: 400_000,
        share: 32,
        in_segments: false,
    };
    match preset {
        // Of one page each they would be a tenth of a percent tighter at twice the price.
        Preset::Memory => PageRules {
            largest: 2 * page,
            handles: u64::MAX,
            largest_if_short: middling.min(2 * page),
            worth: 1_000_000,
            share: 1,
            ..rules
        },
        Preset::Balanced => rules,
        Preset::Latency => PageRules { largest: Units::MAX, worth: 0, in_segments: true, ..rules },
    }
}
