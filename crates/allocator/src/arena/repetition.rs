//! Telling a workload's first pass from its repetitions.
//!
//! While a workload unfolds for the first time, memory is kept tight: idle segments are given back before growth exceeds the previous
//! peak. When it comes again, the same trade is made at the same places every time, and costs driver calls for ever. So once everything
//! was freed, what follows is taken for a repetition, as long as it wants no more than there was: then growth takes the place of
//! trimming, in rounder steps, and the driver is asked no more after a turn or two.

use crate::counters::ArenaCounters;

/// A repetition may want this part (a fiftieth, 2%) more than the pass before it.
const MARGIN: i64 = 50;
/// In a repetition a segment is a multiple of half the power of two below it, so that it serves more requests than one size.
const STEPS_PER_POWER: u64 = 2;
/// ... and at least this part of the arena's peak.
const PART_OF_PEAK: u64 = 32;
/// Granularity of segments.
const SEGMENT_STEP: u64 = 2 << 20;

/// Whether the arena repeats itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Repetition {
    /// Set when everything was freed: the most bytes that were active before.
    of_peak: Option<i64>,
}

impl Repetition {
    /// A block became free.
    #[inline]
    pub(super) fn block_freed(&mut self, counters: &ArenaCounters) {
        if counters.is_unused() {
            self.of_peak = Some(counters.active_peak_bytes());
        }
    }

    /// Whether a request for `more` bytes is part of a repetition. One that wants more than there was ends it.
    pub(crate) fn covers(&mut self, more: u64, counters: &ArenaCounters) -> bool {
        let wanted = counters.active_bytes().saturating_add_unsigned(more);
        if self.of_peak.is_some_and(|peak| wanted > peak + peak / MARGIN) {
            self.of_peak = None;
        }
        self.of_peak.is_some()
    }

    /// What a new segment of at least `bytes` takes in a repetition.
    pub(crate) fn segment_bytes(self, bytes: u64) -> u64 {
        let Some(peak) = self.of_peak else { return bytes };
        let step = ((1 << bytes.max(1).ilog2()) / STEPS_PER_POWER).max(SEGMENT_STEP);
        let least = (peak.max(0) as u64 / PART_OF_PEAK).next_multiple_of(SEGMENT_STEP);
        bytes.next_multiple_of(step).max(least)
    }
}
