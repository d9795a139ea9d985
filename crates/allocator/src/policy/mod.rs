//! What tells one policy from another: each difference is one named decision, made here and nowhere else.
//!
//! The rest of the crate reads [`Rules`]; no other code asks which policy it serves. To add a policy, add a module that fills
//! [`Rules`] and a name in [`crate::config::Policy`].

mod pages;
mod segments;
mod stream_ordered;
mod torch;

pub(crate) use pages::SHORT_ABOVE;

use gpupool_device::DeviceProperties;

use crate::arena::ArenaRules;
use crate::config::{Config, Policy};
use crate::ladder::Rung;
use crate::pages::PageRules;
use crate::units::Units;

/// When the allocator considers itself inside a capture, so that it must not poll, record events or give memory back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CaptureContext {
    /// Never: what a capture forbids is decided for each call and stream.
    ByCall,
    /// While a capture was marked begun and the calling thread's current stream is capturing (PyTorch from 2.13).
    CurrentStream,
    /// While any scope is open on the device (PyTorch 2.11).
    AnyScope,
}

/// Where a request goes when several places claim it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Routing {
    /// A scope opened inside the capture, the capture's pool, a scope opened before it, the default pool.
    CaptureFirst,
    /// The newest scope whose filter matches, else the default pool.
    NewestScope,
}

/// All decisions of a policy, with the configuration applied.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) arena: ArenaRules,
    /// One arena for everything: order and peaks span all streams.
    pub(crate) single_arena: bool,
    /// Segments are virtual-memory handles of a multiple of this many bytes; plain driver allocations if `None`.
    pub(crate) handle_granularity: Option<u64>,
    /// Memory is mapped in pieces that can be moved, by these rules; else a segment is one piece.
    pub(crate) pages: Option<PageRules>,
    /// Segments are blocks of the driver's own pool, each for one request, and go back to it as they are freed.
    pub(crate) stream_ordered: bool,
    /// Rounded sizes up to this many bytes are small in the default pool; in private pools [`SMALL_LIMIT`](crate::inner::SMALL_LIMIT).
    pub(crate) small_limit: u64,
    /// Completed events are looked for at every allocation, else when a search fails.
    pub(crate) poll_each_allocation: bool,
    /// A stream handle is the stream for ever, else a registration is.
    pub(crate) streams_by_handle: bool,
    pub(crate) capture_context: CaptureContext,
    pub(crate) routing: Routing,
    /// A released pool id is revived by the next use while the pool exists; else that is an error.
    pub(crate) revives_pools: bool,
    /// A pool that is released more often than it was taken counts below zero; else that release has changed nothing.
    pub(crate) counts_over_releases: bool,
    /// The figures of pools that are gone stay among those of private pools.
    pub(crate) remembers_pools: bool,
    /// Collecting garbage frees plain memory that the device may still use, which waits; else that memory stays for now.
    pub(crate) collects_busy_memory: bool,
    /// Pools that graphs may hold serve others too when memory is short, if they opted in.
    pub(crate) overflow_from_held: bool,
    /// Requests are rounded to a multiple of 512 bytes, whatever their size.
    pub(crate) plain_rounding: bool,
    /// Once streams have taken so many eighths of the most that was held from each other, growth takes the place of that.
    pub(crate) enough_traded: u64,
    /// What is tried, in order, when the search fails.
    pub(crate) ladder: &'static [Rung],
}

impl Rules {
    /// The decisions of the configured policy on this device.
    pub(crate) fn new(config: &Config, device: &DeviceProperties) -> Self {
        let rules = match config.policy() {
            Policy::Torch215 => torch::rules_2_15(config),
            Policy::Torch211 => torch::rules_2_11(config),
            Policy::Segments => segments::rules(config, device),
            Policy::Pages => pages::rules(config, device),
            Policy::StreamOrdered => stream_ordered::rules(config, device),
        };
        // Whether there is anything to poll is noted by the one arena, whenever a block begins to wait.
        debug_assert!(!rules.poll_each_allocation || (rules.single_arena && rules.arena.event_each_free));
        rules
    }
}

/// What a large block's rest must exceed to be a block of its own. Source: PyTorch's rule 1.5.
const LARGE_REMAINDER: u64 = 1 << 20;

fn arena_rules(config: &Config, shared: bool, bins: bool, tie_by_address: bool) -> ArenaRules {
    ArenaRules {
        max_split: config.max_split_size().unwrap_or(u64::MAX),
        non_split_slack: config.max_non_split_rounding(),
        shared,
        bins,
        large_remainder: LARGE_REMAINDER,
        cuts_at: 0,
        tie_by_address,
        stacked: if shared { 0 } else { Units::MAX },
        pages: false,
        capture_ends_earlier_uses: shared,
        event_each_free: shared,
        trades: !shared,
    }
}
