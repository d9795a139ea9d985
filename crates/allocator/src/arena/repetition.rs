//! Telling a workload's first pass from its repetitions.
//!
//! While a workload unfolds for the first time, memory is kept tight: idle segments are given back before growth exceeds the previous
//! peak. When it comes again, the same trade is made at the same places every time, and costs driver calls for ever. So once everything
//! was freed, what follows is taken for a repetition, as long as it wants no more than there was: then growth takes the place of
//! trimming, in rounder steps, and the driver is asked no more after a turn or two.
//!
//! Where memory is made of pages, moving them is the trade. There growth takes its place up to some room beyond the peak, which gets larger
//! as long as a repetition still takes much of the driver.
//!
//! A workload that never frees everything repeats itself too if it *holds its level*: it has handed out its peak a few times over since it
//! last wanted more than ever before, and has never gone far below that. Where memory is made of pages it may have gone as far as it likes, but only
//! after many times over: so moves die out also in training, whose weights stay.

use crate::counters::ArenaCounters;
use crate::ids::Part;

/// A repetition may want this part (a fiftieth, 2%) more than the pass before it.
const MARGIN: i64 = 50;
/// In a repetition a segment is a multiple of half the power of two below it, so that it serves more requests than one size.
const STEPS_PER_POWER: u64 = 2;
/// ... and at least this part of the arena's peak.
const PART_OF_PEAK: u64 = 32;
/// Granularity of segments.
const SEGMENT_STEP: u64 = 2 << 20;

/// What pages may hold beyond the peak before they are moved, in sixteenths of it: in the first repetition, ...
pub(crate) const FIRST_ROOM: u64 = 2;
/// ... up to where a pass that needed the driver at all gets more, ...
const SMALL_ROOM: u64 = 4;
/// ... and at most: what a workload has to spare must not depend on how long it runs.
pub(crate) const MOST_ROOM: u64 = 8;
/// A repetition that takes more of the driver than this part of what the first pass took has more room in the next one.
const MUCH: u64 = 8;
/// From the second repetition on one that has taken this part moves nothing more.
const ENOUGH: u64 = 16;
/// Beyond the device's peak the first repetition moves its own pages too, as long as that takes at most this part of what the first pass took;
/// each later one half as much.
const AT_PEAK: u64 = 4;
/// A workload holds its level once it has handed out its peak so many times over without a new one...
const TURNOVERS: i64 = 4;
/// ... and had at least this part of it (seven eighths) active all the time.
const LEVEL: (i64, i64) = (7, 8);
/// Where memory is made of pages it does so whatever it had active, but only after so many times: the recordings' first passes hand out their peak
/// up to 75 times over, and moves are what keeps them tight.
const PAGES_TURNOVERS: i64 = 128;

/// Whether the arena repeats itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Repetition {
    /// Whether memory is made of pages. Then everything counts as freed while other streams still use some of it. Not under `segments`: what they
    /// use is not free as the repetition begins, and growth that takes the place of trimming would take it a second time.
    of_pages: bool,
    /// Set when everything was freed: the most bytes that were active before.
    of_peak: Option<i64>,
    /// The most that were active in any pass. The counters' own peak may be started afresh at any time, for whoever reads it.
    most: i64,
    /// Nanoseconds that pages took of the driver in this pass by the model's prices, and in the one before the repetitions.
    spent: u64,
    first: u64,
    /// What pages may hold beyond the peak, in sixteenths of it.
    room: u64,
    /// Repetitions that took any of the driver and are over.
    over: u32,
    level: Level,
    /// Set while the level is held: the most bytes that were active.
    held: Option<i64>,
}

/// What happened since the most bytes ever were active.
#[derive(Clone, Copy, Debug, Default)]
struct Level {
    peak: i64,
    /// The fewest that were active since, as far as anybody looked.
    least: i64,
    /// All bytes handed out until then.
    handed_out: i64,
}

impl Repetition {
    pub(super) fn new(pages: bool) -> Self {
        Self { of_pages: pages, ..Self::default() }
    }

    /// Whether everything was freed.
    #[inline(always)]
    fn is_over(&self, counters: &ArenaCounters) -> bool {
        !counters.any_live() && (self.of_pages || !counters.any_pending())
    }

    /// A block was freed, or is free.
    #[inline]
    pub(super) fn block_freed(&mut self, counters: &ArenaCounters) {
        if self.is_over(counters) {
            if self.spent > 0 || self.of_peak.is_none() {
                self.pass_ended();
            }
            self.most = self.most.max(counters.active_peak_bytes());
            self.of_peak = Some(self.most);
        }
    }

    /// Says whether it is worth knowing when everything is free next: not where nothing is to be noted then, or where large blocks are live,
    /// since the last of them says so again.
    pub(super) fn watch_empty(&self, counters: &ArenaCounters) {
        let noted = self.spent == 0 && self.of_peak.is_some_and(|peak| peak >= counters.active_peak_bytes());
        if noted || counters.allocated_bytes().part(Part::Large).current() > 0 {
            counters.unwatch_empty();
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
            self.room = (2 * self.room).min(MOST_ROOM);
        }
    }

    /// Pages took so long of the driver, by the model's prices.
    pub(crate) fn spent(&mut self, ns: u64, counters: &ArenaCounters) {
        self.spent = self.spent.saturating_add(ns);
        counters.watch_empty();
    }

    /// Nanoseconds that a repetition may still take of the driver where growth would raise the device's peak.
    pub(crate) fn left_at_peak(&self) -> u64 {
        (self.first / AT_PEAK).checked_shr(self.over).unwrap_or(0).saturating_sub(self.spent)
    }

    /// Bytes that pages may hold before they are moved: none in a first pass, half as much again as the peak in a repetition that has moved enough.
    pub(crate) fn may_hold(&self) -> u64 {
        let Some(peak) = self.of_peak.or(self.held) else { return 0 };
        let settled = self.of_peak.is_none() || self.over > 0 && self.spent > self.first / ENOUGH;
        with_room(peak, if settled { MOST_ROOM } else { self.room })
    }

    /// Looks how far below its peak the workload is. Where blocks are merged, which is often enough.
    #[inline]
    pub(super) fn look(&mut self, counters: &ArenaCounters) {
        let (active, peak) = (counters.active_bytes(), counters.active_peak_bytes());
        if peak > self.level.peak {
            self.level = Level { peak, least: active, handed_out: counters.handed_out_bytes() };
        }
        self.level.least = self.level.least.min(active);
    }

    /// Whether the workload holds its level.
    fn is_level(&mut self, counters: &ArenaCounters) -> bool {
        self.look(counters);
        let Level { peak, least, handed_out } = self.level;
        let (part, whole) = LEVEL;
        let turned_over = |times: i64| counters.handed_out_bytes() - handed_out >= times.saturating_mul(peak);
        match self.of_pages {
            true => turned_over(PAGES_TURNOVERS),
            false => turned_over(TURNOVERS) && least >= peak / whole * part,
        }
    }

    /// Whether a request for `more` bytes is part of a repetition. One that wants more than there was ends it.
    pub(crate) fn covers(&mut self, more: u64, counters: &ArenaCounters) -> bool {
        // What is pending differs from turn to turn, as anybody looks.
        let used = if self.of_pages { counters.live_bytes() } else { counters.active_bytes() };
        let wanted = used.saturating_add_unsigned(more);
        let within = |peak: &i64| wanted <= peak + peak / MARGIN;
        self.of_peak = self.of_peak.filter(within);
        self.held = self.is_level(counters).then_some(self.level.peak).filter(within);
        counters.watch_empty();
        self.of_peak.or(self.held).is_some()
    }

    /// What a new segment of at least `bytes` takes in a repetition.
    pub(crate) fn segment_bytes(self, bytes: u64) -> u64 {
        let Some(peak) = self.of_peak.or(self.held) else { return bytes };
        let step = ((1 << bytes.max(1).ilog2()) / STEPS_PER_POWER).max(SEGMENT_STEP);
        let least = (peak.max(0) as u64 / PART_OF_PEAK).next_multiple_of(SEGMENT_STEP);
        bytes.next_multiple_of(step).max(least)
    }
}

/// A peak, and sixteenths of it in addition.
pub(crate) fn with_room(peak: i64, room: u64) -> u64 {
    let peak = peak.max(0) as u64;
    peak.saturating_add((peak / 16).saturating_mul(room))
}
