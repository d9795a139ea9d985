//! The settings one by one: what each means, its unit and its default.

use super::{AcceptedOption, Config, LimitSource, Policy, Preset, Rounding, VirtualMemory, is_fraction};

/// Reading.
impl Config {
    /// The policy, fixed by [`Config::new`].
    #[must_use]
    pub const fn policy(&self) -> Policy {
        self.policy
    }

    /// How the policy `pages` weighs memory against the driver's time. Default: balanced. Other policies have no presets.
    #[must_use]
    pub const fn preset(&self) -> Preset {
        self.preset
    }

    /// How sizes of requests are rounded. Default: to a multiple of 512 bytes.
    #[must_use]
    pub const fn rounding(&self) -> &Rounding {
        &self.rounding
    }

    /// From this many bytes on, a block is oversize: never split, and never given to a request below that size. `None`, the
    /// default: no block is. Without effect under `pages`, which bring together what splitting takes apart.
    #[must_use]
    pub const fn max_split_size(&self) -> Option<u64> {
        self.max_split_size
    }

    /// An oversize request takes a cached block only if that is less than this many bytes larger. Default: the large segment
    /// size.
    #[must_use]
    pub const fn max_non_split_rounding(&self) -> u64 {
        match self.max_non_split_rounding {
            Some(bytes) => bytes,
            None => self.large_segment_size,
        }
    }

    /// The size in bytes of a segment for requests above 1 MiB and below 10 MiB. Default: 20 MiB.
    #[must_use]
    pub const fn large_segment_size(&self) -> u64 {
        self.large_segment_size
    }

    /// The share of the limit above which old free segments are given back before growth; it acts only under a limit. `None`,
    /// the default: never.
    #[must_use]
    pub const fn garbage_collection_threshold(&self) -> Option<f64> {
        self.garbage_collection_threshold
    }

    /// The share of the device's memory that the allocator may hold, from 0 to 1. Default 1: no limit.
    #[must_use]
    pub const fn memory_fraction(&self) -> f64 {
        self.memory_fraction
    }

    /// Bytes that the allocator may hold. `None`, the default: no limit.
    #[must_use]
    pub const fn memory_limit(&self) -> Option<u64> {
        self.memory_limit
    }

    /// Whether a request that would take the allocator above [`memory_fraction`](Self::memory_fraction) is rejected at once, with
    /// no attempt to reclaim. The fraction is also a limit, which is tested first and does reclaim, so this acts only where that
    /// limit was lifted or raised at run time. Default: no.
    #[must_use]
    pub const fn reject_over_fraction(&self) -> bool {
        self.reject_over_fraction
    }

    /// Whether, inside a capture, a block that other streams used is taken again as soon as the captured graph itself proves the
    /// order; otherwise only once the capture has ended. Default: yes, but not under the bit-exact policies.
    #[must_use]
    pub const fn capture_reuse(&self) -> bool {
        self.capture_reuse
    }

    /// PyTorch's wish to drop its lock around driver calls. It has no effect: no lock is ever held over one. Default: no.
    #[must_use]
    pub const fn release_lock_on_malloc(&self) -> bool {
        self.release_lock_on_malloc
    }

    /// Whether anything is kept at all; if not, each request and each free goes to the driver. Default: yes.
    #[must_use]
    pub const fn caching(&self) -> bool {
        self.caching
    }

    /// Whether a freed block is kept as it is for the next request of its very size, and not merged with its neighbours at once. Default:
    /// yes, and never under the bit-exact policies.
    #[must_use]
    pub const fn bins(&self) -> bool {
        self.bins
    }

    /// Whether idle segments are given back before the allocator grows beyond its previous peak, where giving back does not wait
    /// for the device. Default: yes, and never under the bit-exact policies.
    #[must_use]
    pub const fn trim_before_growth(&self) -> bool {
        self.trim_before_growth
    }

    /// Whether every change is added up in one place, which all threads share. Peaks over several streams are exact without it, too, but then
    /// a request on the way to a new peak stops all streams for a moment (tens of nanoseconds each) to look at them together. Default: no,
    /// and always under the bit-exact policies, which have one arena.
    #[must_use]
    pub const fn exact_peaks(&self) -> bool {
        self.exact_peaks
    }

    /// A soft high-water mark in bytes: when growth would lead above it, cached memory above it is given back first. It refuses
    /// nothing. `None`, the default: off.
    #[must_use]
    pub const fn trim_above(&self) -> Option<u64> {
        self.trim_above
    }

    /// Nanoseconds on the device's clock after which a segment that nobody has used goes back. Looked at before growth, and whenever
    /// [`Allocator::decay`](crate::Allocator::decay) is called: a process that has come to rest needs a timer that calls it. `None`, the
    /// default: off.
    #[must_use]
    pub const fn idle_decay(&self) -> Option<u64> {
        self.idle_decay
    }

    /// Whether a request takes a freed block that other streams still use at once, and its stream waits for them on the device;
    /// otherwise the block is free only when the host has seen them finish. Default: no.
    #[must_use]
    pub const fn wait_for_recorded(&self) -> bool {
        self.wait_for_recorded
    }

    /// Whether a request of the policy `pages` that would else take more of the driver than ever before may take what another stream has
    /// freed before the device is done with it: its stream then waits for that on the device, so work of the two is in order that the
    /// program did not order. No wait on the host, and none in a repetition. Default: yes, as in the driver's own pools.
    #[must_use]
    pub const fn wait_for_streams(&self) -> bool {
        self.wait_for_streams
    }

    /// For finding bugs: whether a freed block is held back until all streams that exist are idle. Default: no.
    #[must_use]
    pub const fn quarantine(&self) -> bool {
        self.quarantine
    }

    /// Whether segments are virtual memory. Default: where the device can, and never under the bit-exact policies.
    #[must_use]
    pub const fn virtual_memory(&self) -> VirtualMemory {
        self.virtual_memory
    }

    /// Options that were read, found valid, and have no effect here, in the order they were written.
    #[must_use]
    pub fn accepted(&self) -> &[AcceptedOption] {
        &self.accepted
    }

    /// The text that [`Config::parse_pytorch`] read; empty when the configuration did not come from one.
    #[must_use]
    pub fn pytorch_options(&self) -> &str {
        &self.pytorch_options
    }

    /// The limit in bytes that an allocator starts with on a device with `total_memory` bytes, and which setting it comes from:
    /// the lower one, if both [`memory_limit`](Self::memory_limit) and [`memory_fraction`](Self::memory_fraction) set one.
    #[must_use]
    pub fn initial_limit(&self, total_memory: u64) -> Option<(u64, LimitSource)> {
        let fraction = fraction_limit(self.memory_fraction, total_memory).map(|bytes| (bytes, LimitSource::Fraction));
        let limit = self.memory_limit.map(|bytes| (bytes, LimitSource::Configuration));
        limit.into_iter().chain(fraction).min_by_key(|(bytes, _)| *bytes)
    }
}

/// The limit in bytes that `fraction` of `total_memory` bytes means, as PyTorch rounds it: none for 1, nor for what is no share.
pub(crate) fn fraction_limit(fraction: f64, total_memory: u64) -> Option<u64> {
    // Converting a float to an integer saturates, and what is not a number was sorted out.
    (is_fraction(fraction) && fraction < 1.0).then(|| (fraction * total_memory as f64).round() as u64)
}

/// Setting. Nothing is checked before [`Config::validate`].
impl Config {
    /// Sets [`rounding`](Self::rounding).
    #[must_use]
    pub fn with_rounding(mut self, rounding: Rounding) -> Self {
        self.rounding = rounding;
        self
    }

    /// Sets [`max_split_size`](Self::max_split_size): at least the large segment size.
    #[must_use]
    pub fn with_max_split_size(mut self, bytes: u64) -> Self {
        self.max_split_size = Some(bytes);
        self
    }

    /// Sets [`max_non_split_rounding`](Self::max_non_split_rounding): at least the large segment size.
    #[must_use]
    pub fn with_max_non_split_rounding(mut self, bytes: u64) -> Self {
        self.max_non_split_rounding = Some(bytes);
        self
    }

    /// Sets [`large_segment_size`](Self::large_segment_size): a multiple of 1 MiB, above 10 MiB and
    /// at most 1 TiB.
    #[must_use]
    pub fn with_large_segment_size(mut self, bytes: u64) -> Self {
        self.large_segment_size = bytes;
        self
    }

    /// Sets [`garbage_collection_threshold`](Self::garbage_collection_threshold): above 0 and below 1.
    #[must_use]
    pub fn with_garbage_collection_threshold(mut self, share: f64) -> Self {
        self.garbage_collection_threshold = Some(share);
        self
    }

    /// Sets [`memory_fraction`](Self::memory_fraction): from 0 to 1.
    #[must_use]
    pub fn with_memory_fraction(mut self, share: f64) -> Self {
        self.memory_fraction = share;
        self
    }

    /// Sets [`memory_limit`](Self::memory_limit).
    #[must_use]
    pub fn with_memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }

    /// Sets [`reject_over_fraction`](Self::reject_over_fraction). PyTorch 2.11 does not have it.
    #[must_use]
    pub fn with_reject_over_fraction(mut self, on: bool) -> Self {
        self.reject_over_fraction = on;
        self
    }

    /// Sets [`capture_reuse`](Self::capture_reuse).
    #[must_use]
    pub fn with_capture_reuse(mut self, on: bool) -> Self {
        self.capture_reuse = on;
        self
    }

    /// Sets [`release_lock_on_malloc`](Self::release_lock_on_malloc).
    #[must_use]
    pub fn with_release_lock_on_malloc(mut self, on: bool) -> Self {
        self.release_lock_on_malloc = on;
        self
    }

    /// Sets [`caching`](Self::caching).
    #[must_use]
    pub fn with_caching(mut self, on: bool) -> Self {
        self.caching = on;
        self
    }

    /// Sets [`bins`](Self::bins). The bit-exact policies do not have it.
    #[must_use]
    pub fn with_bins(mut self, on: bool) -> Self {
        self.bins = on;
        self
    }

    /// Sets [`trim_before_growth`](Self::trim_before_growth). The bit-exact policies do not have it.
    #[must_use]
    pub fn with_trim_before_growth(mut self, on: bool) -> Self {
        self.trim_before_growth = on;
        self
    }

    /// Sets [`exact_peaks`](Self::exact_peaks). The bit-exact policies cannot do without.
    #[must_use]
    pub fn with_exact_peaks(mut self, on: bool) -> Self {
        self.exact_peaks = on;
        self
    }

    /// Sets [`trim_above`](Self::trim_above). The bit-exact policies do not have it.
    #[must_use]
    pub fn with_trim_above(mut self, bytes: u64) -> Self {
        self.trim_above = Some(bytes);
        self
    }

    /// Sets [`idle_decay`](Self::idle_decay). The bit-exact policies do not have it.
    #[must_use]
    pub fn with_idle_decay(mut self, nanoseconds: u64) -> Self {
        self.idle_decay = Some(nanoseconds);
        self
    }

    /// Sets [`wait_for_recorded`](Self::wait_for_recorded). The bit-exact policies do not have it.
    #[must_use]
    pub fn with_wait_for_recorded(mut self, on: bool) -> Self {
        self.wait_for_recorded = on;
        self
    }

    /// Sets [`wait_for_streams`](Self::wait_for_streams). The bit-exact policies do not have it.
    #[must_use]
    pub fn with_wait_for_streams(mut self, on: bool) -> Self {
        self.wait_for_streams = on;
        self
    }

    /// Sets [`preset`](Self::preset). Only the policy `pages` has it.
    #[must_use]
    pub fn with_preset(mut self, preset: Preset) -> Self {
        self.preset = preset;
        self
    }

    /// Sets [`quarantine`](Self::quarantine). The bit-exact policies do not have it.
    #[must_use]
    pub fn with_quarantine(mut self, on: bool) -> Self {
        self.quarantine = on;
        self
    }

    /// Sets [`virtual_memory`](Self::virtual_memory). The bit-exact policies use none.
    #[must_use]
    pub fn with_virtual_memory(mut self, use_of: VirtualMemory) -> Self {
        self.virtual_memory = use_of;
        if self.policy == Policy::Pages && use_of == VirtualMemory::Never {
            self.turn_pages_off();
        }
        self
    }
}
