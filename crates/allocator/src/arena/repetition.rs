//! Telling a workload's first pass from its repetitions.
//!
//! While a workload unfolds for the first time, memory is kept tight: idle segments are given back before growth exceeds the previous
//! peak. When it comes again, the same trade is made at the same places every time, and costs driver calls for ever. So once everything
//! was freed, what follows is taken for a repetition, as long as it wants no more than there was: then growth takes the place of
//! trimming, in rounder steps, and the driver is asked no more after a turn or two.
//!
//! Where memory is made of pages, moving them is the trade. There growth takes its place up to some room beyond the peak, which gets larger
//! as long as a repetition still takes much of the driver.

use crate::counters::ArenaCounters;

/// A repetition may want this part (a fiftieth, 2%) more than the pass before it.
const MARGIN: i64 = 50;
/// In a repetition a segment is a multiple of half the power of two below it, so that it serves more requests than one size.
const STEPS_PER_POWER: u64 = 2;
/// ... and at least this part of the arena's peak.
const PART_OF_PEAK: u64 = 32;
/// Granularity of segments.
const SEGMENT_STEP: u64 = 2 << 20;

/// What pages may hold beyond the peak before they are moved, in sixteenths of it: in the first repetition, ...
const FIRST_ROOM: u64 = 2;
/// ... up to where a pass that needed the driver at all gets more, ...
const SMALL_ROOM: u64 = 4;
/// ... and up to where it doubles from pass to pass; beyond that it grows by [`FIRST_ROOM`].
const DOUBLED_ROOM: u64 = 8;
/// A repetition that takes more of the driver than this part of what the first pass took has more room in the next one.
const MUCH: u64 = 8;
/// From the second repetition on one that has taken this part moves nothing more.
const ENOUGH: u64 = 16;

/// Whether the arena repeats itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Repetition {
    /// Set when everything was freed: the most bytes that were active before.
    of_peak: Option<i64>,
    /// Nanoseconds that pages took of the driver in this pass, and in the one before the repetitions.
    spent: u64,
    first: u64,
    /// What pages may hold beyond the peak, in sixteenths of it.
    room: u64,
    /// Repetitions that took any of the driver and are over.
    over: u32,
}

impl Repetition {
    /// A block became free.
    #[inline]
    pub(super) fn block_freed(&mut self, counters: &ArenaCounters) {
        if counters.is_unused() {
            if self.spent > 0 || self.of_peak.is_none() {
                self.pass_ended();
            }
            self.of_peak = Some(counters.active_peak_bytes());
        }
    }

    /// Everything is free: how much room pages have in the next pass. What the driver took in this one says whether it was enough.
    #[cold]
    fn pass_ended(&mut self) {
        let spent = std::mem::take(&mut self.spent);
        if self.of_peak.is_none() {
            (self.first, self.room, self.over) = (spent, FIRST_ROOM, 0);
            return;
        }
        self.over = self.over.saturating_add(1);
        if spent > self.first / MUCH || self.room < SMALL_ROOM {
            self.room += if self.room < DOUBLED_ROOM { self.room } else { FIRST_ROOM };
        }
    }

    /// Pages took so long of the driver.
    pub(crate) fn spent(&mut self, ns: u64) {
        self.spent = self.spent.saturating_add(ns);
    }

    /// Bytes that pages may hold before they are moved: none in a first pass, any number in a repetition that has moved enough.
    pub(crate) fn may_hold(&self) -> u64 {
        let Some(peak) = self.of_peak else { return 0 };
        if self.over > 0 && self.spent > self.first / ENOUGH {
            return u64::MAX;
        }
        let peak = peak.max(0) as u64;
        peak.saturating_add((peak / 16).saturating_mul(self.room))
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
