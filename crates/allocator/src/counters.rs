//! Counters and what they add up to.
//!
//! A [`Counter`] has one writer at a time (whoever holds the lock it belongs to) and any number of readers: a store is a plain
//! store, and [`stats`](crate::Allocator::stats) reads without taking a lock. Current and cumulative figures are exact at any quiet
//! moment.

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use crate::ids::Part;
use crate::peaks::{Peak, Telling};

mod past_bins;
mod split;
mod stat;
mod watch;

use past_bins::PastBins;
use split::SplitCounters;
pub use stat::{Stat, StatArray};
use watch::Watch;
pub(crate) use watch::Watches;

/// How many figures of an arena have peaks.
pub(crate) const FIGURES: usize = 22;

/// Adds to a figure that has one writer.
#[inline(always)]
fn add(figure: &AtomicI64, n: i64) -> i64 {
    let sum = figure.load(Relaxed) + n;
    figure.store(sum, Relaxed);
    sum
}

/// A [`Stat`] with one writer and lock-free readers. What is there and what went is counted; what came is the sum.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    current: AtomicI64,
    /// But for what is counted below.
    decreases: AtomicI64,
    /// What the shortest way put into bins.
    into_bins: AtomicI64,
    peak: Peak,
    /// Increases and decreases at the last reset of accumulated figures.
    reset_at: [AtomicI64; 2],
}

impl Counter {
    /// Whether the figure is above its ceiling now.
    #[inline]
    pub(crate) fn increase(&self, n: i64) -> bool {
        self.peak.note(self.add(n))
    }

    /// Returns the new current figure.
    #[inline(always)]
    fn add(&self, n: i64) -> i64 {
        add(&self.current, n)
    }

    #[inline(always)]
    pub(crate) fn decrease(&self, n: i64) {
        add(&self.current, -n);
        add(&self.decreases, n);
    }

    #[inline]
    pub(crate) fn current(&self) -> i64 {
        self.current.load(Relaxed)
    }

    /// What came and what went since the beginning, whatever was reset.
    pub(crate) fn raw(&self) -> (i64, i64) {
        let decreases = self.decreases.load(Relaxed) + self.into_bins.load(Relaxed);
        (self.current() + decreases, decreases)
    }

    /// What came and what went, together.
    fn came_and_went(&self) -> i64 {
        let (came, went) = self.raw();
        came + went
    }

    pub(crate) fn read(&self) -> Stat {
        let (increases, decreases) = self.raw();
        Stat {
            current: increases - decreases,
            peak: self.peak.most(),
            allocated: increases - self.reset_at[0].load(Relaxed),
            freed: decreases - self.reset_at[1].load(Relaxed),
        }
    }

    fn figure(&self) -> (i64, &Peak) {
        (self.current(), &self.peak)
    }

    pub(crate) fn reset_accumulated(&self) {
        let (increases, decreases) = self.raw();
        self.reset_at[0].store(increases, Relaxed);
        self.reset_at[1].store(decreases, Relaxed);
    }
}

/// A [`StatArray`] with one writer and lock-free readers. Only the peak of both parts together is kept beside theirs.
#[derive(Debug, Default)]
pub(crate) struct CounterArray {
    parts: [Counter; 2],
    peak: Peak,
}

impl CounterArray {
    /// Whether some figure is above its ceiling now.
    #[inline]
    pub(crate) fn increase(&self, part: Part, n: i64) -> bool {
        let (this, other) = (&self.parts[part.index()], &self.parts[1 - part.index()]);
        let current = this.add(n);
        this.peak.note(current) | self.peak.note(current + other.current())
    }

    /// Counts `n` in, and says whether that may be something new.
    #[inline(always)]
    fn passed(&self, watch: &mut Watch, part: Part, n: i64) -> bool {
        let here = self.parts[part.index()].add(n);
        watch.changed(part, n);
        let small = if part == Part::Small { here } else { self.parts[0].current() };
        watch.is_passed(part, here, small)
    }

    /// As [`decrease`](Self::decrease), of a figure that is watched.
    #[inline(always)]
    fn went(&self, watch: &mut Watch, part: Part, n: i64) {
        self.decrease(part, n);
        watch.changed(part, -n);
    }

    /// Whether a part that was increased, or both, are more than is nothing new.
    fn is_new(&self, part: Part) -> bool {
        let this = &self.parts[part.index()];
        this.current() > this.peak.watch() || self.current() > self.peak.watch()
    }

    /// A part was increased. Whether some figure is above its ceiling.
    fn note(&self, part: Part) -> bool {
        let this = &self.parts[part.index()];
        this.peak.note(this.current()) | self.peak.note(self.current())
    }

    #[inline(always)]
    pub(crate) fn decrease(&self, part: Part, n: i64) {
        self.parts[part.index()].decrease(n);
    }

    pub(crate) fn part(&self, part: Part) -> &Counter {
        &self.parts[part.index()]
    }

    /// Both parts together.
    #[inline]
    pub(crate) fn current(&self) -> i64 {
        self.parts[0].current() + self.parts[1].current()
    }

    pub(crate) fn peak(&self) -> i64 {
        self.peak.most()
    }

    pub(crate) fn read(&self) -> StatArray {
        let [small_pool, large_pool] = self.parts.each_ref().map(Counter::read);
        let mut all = small_pool;
        all.add(large_pool);
        all.peak = self.peak();
        StatArray { all, small_pool, large_pool }
    }

    fn figures(&self) -> [(i64, &Peak); 3] {
        [(self.current(), &self.peak), self.parts[0].figure(), self.parts[1].figure()]
    }

    fn reset_accumulated(&self) {
        self.parts.iter().for_each(Counter::reset_accumulated);
    }
}

/// Active blocks or bytes: those handed out, and those freed and pending. Few blocks are ever pending, so only they are counted; the rest
/// follows from the figures of what is handed out.
#[derive(Debug, Default)]
pub(crate) struct ActiveCounters {
    pending: [Counter; 2],
    peaks: [Peak; 2],
    peak: Peak,
}

impl ActiveCounters {
    /// Whether a part that was increased, or both, are more than is nothing new.
    fn is_new(&self, part: Part, handed: &CounterArray) -> bool {
        let here = self.in_part(part.index(), handed);
        here > self.peaks[part.index()].watch() || self.current(handed) > self.peak.watch()
    }

    /// Blocks of a part were handed out, and `handed` has counted them. Whether some figure is above its ceiling.
    fn note(&self, part: Part, handed: &CounterArray) -> bool {
        let here = self.in_part(part.index(), handed);
        let other = self.in_part(1 - part.index(), handed);
        self.peaks[part.index()].note(here) | self.peak.note(here + other)
    }

    #[inline]
    fn in_part(&self, part: usize, handed: &CounterArray) -> i64 {
        handed.parts[part].current() + self.pending[part].current()
    }

    fn current(&self, handed: &CounterArray) -> i64 {
        handed.current() + self.pending[0].current() + self.pending[1].current()
    }

    fn read(&self, handed: &CounterArray) -> StatArray {
        let mut out = handed.read();
        for (at, stat) in [&mut out.small_pool, &mut out.large_pool].into_iter().enumerate() {
            let pending = self.pending[at].read();
            stat.current += pending.current;
            // What became free: freed, less what became pending, plus what came out of it.
            stat.freed += pending.freed - pending.allocated;
            stat.peak = self.peaks[at].most();
        }
        out.all = out.small_pool;
        out.all.add(out.large_pool);
        out.all.peak = self.peak.most();
        out
    }

    fn figures<'a>(&'a self, handed: &CounterArray) -> [(i64, &'a Peak); 3] {
        let [small, large] = [0, 1].map(|part| self.in_part(part, handed));
        [(small + large, &self.peak), (small, &self.peaks[0]), (large, &self.peaks[1])]
    }

    fn reset_accumulated(&self) {
        self.pending.iter().for_each(Counter::reset_accumulated);
    }
}

/// What an arena counts. Written under the arena's lock; on cache lines of its own (in pairs, as they are fetched).
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct ArenaCounters {
    allocation: CounterArray,
    allocated_bytes: CounterArray,
    requested_bytes: CounterArray,
    active: ActiveCounters,
    active_bytes: ActiveCounters,
    inactive_split: SplitCounters,
    inactive_split_bytes: SplitCounters,
    oversize_allocations: Counter,
    /// Blocks and bytes of each part.
    past_bins: [[PastBins; 2]; 2],
    empty: Empty,
    /// Requests that no free block served.
    misses: AtomicI64,
    /// The most bytes that were handed out at once since [`start_recording`](Self::start_recording); `i64::MAX` when nobody records.
    recording: Recording,
    pub(crate) telling: Telling,
}

/// How many small blocks are live where everything may be free and somebody wants to know: 0, or else fewer than there ever are.
#[derive(Debug, Default)]
struct Empty(AtomicI64);

const NEVER_SO_FEW: i64 = -1;

#[derive(Debug)]
struct Recording(AtomicI64);

impl Default for Recording {
    fn default() -> Self {
        Self(AtomicI64::new(i64::MAX))
    }
}

/// An arena's figures at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArenaStats {
    pub(crate) allocation: StatArray,
    pub(crate) active: StatArray,
    pub(crate) inactive_split: StatArray,
    pub(crate) allocated_bytes: StatArray,
    pub(crate) active_bytes: StatArray,
    pub(crate) inactive_split_bytes: StatArray,
    pub(crate) requested_bytes: StatArray,
    pub(crate) oversize_allocations: Stat,
    pub(crate) binned: i64,
    pub(crate) binned_bytes: i64,
    pub(crate) misses: i64,
}

impl ArenaCounters {
    /// A block was handed out, from elsewhere than its bin; by that there are so many free blocks more, or fewer, in segments that hold others
    /// too, and so many of their bytes, each as one movement.
    #[inline(always)]
    pub(crate) fn handed_out(&self, watches: &mut Watches, part: Part, bytes: i64, requested: i64, split: (i64, i64)) {
        for (past, n) in self.past_bins[part.index()].iter().zip([1, bytes]) {
            add(&past.came, n);
        }
        self.requested_bytes.parts[part.index()].add(requested);
        let new = self.allocation.passed(&mut watches.allocation, part, 1)
            | self.allocated_bytes.passed(&mut watches.allocated_bytes, part, bytes);
        self.split_counted(watches, part, split, (1, bytes));
        // There are more only where a segment is cut for the first time.
        let new_split = split.1 > 0 && self.is_split_passed(watches, part);
        if new | new_split {
            self.note_new(watches, part, new, new_split);
        }
    }

    /// Notes what of the figures of a hand-out is at a new peak, or above its ceiling.
    #[cold]
    #[inline(never)]
    fn note_new(&self, watches: &mut Watches, part: Part, handed: bool, split: bool) {
        if handed {
            self.note_handed_out(watches, part);
        }
        if split {
            self.note_split(watches, part);
        }
    }

    /// A small block of a bin was handed out. Whether some figure may be at a new peak, or above its ceiling, or something is to be told: then
    /// [`note_handed_out`](Self::note_handed_out) comes next.
    #[inline(always)]
    #[must_use]
    pub(crate) fn handed_out_of_bin(&self, watches: &Watches, bytes: i64, requested: i64) -> bool {
        let ([blocks, _], [all_bytes, _]) = (&self.allocation.parts, &self.allocated_bytes.parts);
        let (live, live_bytes) = (blocks.add(1), all_bytes.add(bytes));
        self.requested_bytes.parts[0].add(requested);
        watches.allocation.is_passed(Part::Small, live, live)
            || watches.allocated_bytes.is_passed(Part::Small, live_bytes, live_bytes)
            || self.telling.is_due()
    }

    /// Notes what of the figures of a hand-out is at a new peak, or above its ceiling.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_handed_out(&self, watches: &mut Watches, part: Part) {
        let recording = &self.recording.0;
        let is_new = self.allocation.is_new(part)
            || self.allocated_bytes.is_new(part)
            || self.requested_bytes.is_new(part)
            || self.active.is_new(part, &self.allocation)
            || self.active_bytes.is_new(part, &self.allocated_bytes)
            || self.allocated_bytes.current() > recording.load(Relaxed);
        if is_new {
            let above = self.allocation.note(part)
                | self.allocated_bytes.note(part)
                | self.requested_bytes.note(part)
                | self.active.note(part, &self.allocation)
                | self.active_bytes.note(part, &self.allocated_bytes);
            self.telling.note(above);
            if recording.load(Relaxed) != i64::MAX {
                recording.store(recording.load(Relaxed).max(self.allocated_bytes.current()), Relaxed);
            }
            self.watch_empty();
            self.rewatch(watches);
        }
    }

    /// From now on notes the most bytes that are handed out at once.
    pub(crate) fn start_recording(&self, watches: &mut Watches) {
        self.recording.0.store(0, Relaxed);
        self.rewatch(watches);
    }

    /// The most bytes that were handed out at once since recording began. It ends.
    pub(crate) fn end_recording(&self, watches: &mut Watches) -> u64 {
        let most = self.recording.0.swap(i64::MAX, Relaxed);
        self.rewatch(watches);
        if most == i64::MAX { 0 } else { most.max(0) as u64 }
    }

    /// Works out again which figures are nothing new. After a ceiling was lowered, a peak reset, or less is pending.
    pub(crate) fn rewatch(&self, watches: &mut Watches) {
        let own = |array: &CounterArray| (array.parts.each_ref().map(|p| p.peak.watch()), array.peak.watch());
        // What is handed out may be as much as makes neither a peak of its own nor one of what it is part of beside pending blocks.
        let beside_pending = |parts: &mut [i64; 2], all: &mut i64, pending: &[Counter; 2], of: ([i64; 2], i64)| {
            let pending = pending.each_ref().map(Counter::current);
            for part in 0..2 {
                parts[part] = parts[part].min(of.0[part].saturating_sub(pending[part]));
            }
            *all = (*all).min(of.1.saturating_sub(pending[0] + pending[1]));
        };
        let of_active = |active: &ActiveCounters| (active.peaks.each_ref().map(Peak::watch), active.peak.watch());
        let (mut parts, mut all) = own(&self.allocation);
        beside_pending(&mut parts, &mut all, &self.active.pending, of_active(&self.active));
        watches.allocation.set(parts, all, self.allocation.parts[1].current());
        let (mut parts, mut all) = own(&self.allocated_bytes);
        beside_pending(&mut parts, &mut all, &self.active_bytes.pending, of_active(&self.active_bytes));
        // Bytes asked for are at most those handed out or pending, so what these may be stands for them.
        beside_pending(&mut parts, &mut all, &self.active_bytes.pending, own(&self.requested_bytes));
        let (all, large) = (all.min(self.recording.0.load(Relaxed)), self.allocated_bytes.parts[1].current());
        watches.allocated_bytes.set(parts, all, large);
        self.inactive_split.rewatch(&mut watches.inactive_split, &self.allocation);
        self.inactive_split_bytes.rewatch(&mut watches.inactive_split_bytes, &self.allocated_bytes);
    }

    /// Whether everything is free may be worth knowing from now on.
    pub(crate) fn watch_empty(&self) {
        self.empty.0.store(0, Relaxed);
    }

    /// Everything is free, and that is known; or large blocks are live, so that it is not so.
    pub(crate) fn unwatch_empty(&self) {
        self.empty.0.store(NEVER_SO_FEW, Relaxed);
    }

    /// A block was freed, and is free: [`freed_to_bin`](Self::freed_to_bin) or [`freed_to_index`](Self::freed_to_index) comes next.
    #[inline(always)]
    pub(crate) fn freed(&self, watches: &mut Watches, part: Part, bytes: i64, requested: i64) {
        self.no_longer_live(watches, part, bytes);
        self.requested_bytes.decrease(part, requested);
    }

    /// What was [freed](Self::freed) went into a bin.
    pub(crate) fn freed_to_bin(&self, watches: &mut Watches, part: Part, bytes: i64) {
        self.left(part, -1, -bytes);
        // Live or binned, it is counted all the same.
        if self.split_changed(watches, part, (1, bytes), (-1, -bytes)) {
            self.note_split(watches, part);
        }
    }

    /// What was [freed](Self::freed) was merged, or is held: so many free blocks more, or fewer, in segments that hold others too, and their
    /// bytes, each as one movement.
    #[inline(always)]
    pub(crate) fn freed_to_index(&self, watches: &mut Watches, part: Part, bytes: i64, split: (i64, i64)) {
        if self.split_changed(watches, part, split, (-1, -bytes)) {
            self.note_split(watches, part);
        }
    }

    /// A block is no longer live.
    #[inline(always)]
    fn no_longer_live(&self, watches: &mut Watches, part: Part, bytes: i64) {
        self.allocation.went(&mut watches.allocation, part, 1);
        self.allocated_bytes.went(&mut watches.allocated_bytes, part, bytes);
        if part == Part::Large && self.allocation.parts[1].current() == 0 {
            self.watch_empty();
        }
    }

    /// A small block was freed into its bin. Whether some figure may be at a new peak, or above its ceiling, or everything is free, or something
    /// is to be told: then [`note_split`](Self::note_split) comes next.
    #[inline(always)]
    #[must_use]
    pub(crate) fn freed_into_bin(&self, watches: &Watches, bytes: i64, requested: i64) -> bool {
        let ([blocks, _], [all_bytes, _]) = (&self.allocation.parts, &self.allocated_bytes.parts);
        let (live, live_bytes) = (blocks.add(-1), all_bytes.add(-bytes));
        add(&blocks.into_bins, 1);
        add(&all_bytes.into_bins, bytes);
        self.requested_bytes.parts[0].decrease(requested);
        live <= self.empty.0.load(Relaxed)
            || self.inactive_split.is_passed_beside(&watches.inactive_split, live)
            || self.inactive_split_bytes.is_passed_beside(&watches.inactive_split_bytes, live_bytes)
            || self.telling.is_due()
    }

    /// Blocks came out of bins without being handed out, or, if fewer than none, the long way put them there.
    fn left(&self, part: Part, blocks: i64, bytes: i64) {
        for (past, n) in self.past_bins[part.index()].iter().zip([blocks, bytes]) {
            add(&past.left, n);
        }
    }

    /// A block was freed, and is pending.
    pub(crate) fn became_pending(&self, watches: &mut Watches, part: Part, bytes: i64) {
        self.no_longer_live(watches, part, bytes);
        self.split_changed(watches, part, (0, 0), (-1, -bytes));
        self.active.pending[part.index()].increase(1);
        self.active_bytes.pending[part.index()].increase(bytes);
        watches.allocation.lower(part, 1);
        watches.allocated_bytes.lower(part, bytes);
    }

    /// A pending block is free.
    pub(crate) fn was_pending(&self, part: Part, bytes: i64, requested: i64) {
        self.active.pending[part.index()].decrease(1);
        self.active_bytes.pending[part.index()].decrease(bytes);
        self.requested_bytes.decrease(part, requested);
    }

    /// So many free blocks more, or fewer, in segments that hold others too, and their bytes, each as one movement.
    pub(crate) fn split(&self, watches: &mut Watches, part: Part, blocks: i64, bytes: i64) {
        if self.split_changed(watches, part, (blocks, bytes), (0, 0)) {
            self.note_split(watches, part);
        }
    }

    /// As [`split`](Self::split), where so many live blocks came, or went, and bytes. Whether some figure may be at a new peak, or above its
    /// ceiling.
    #[inline(always)]
    fn split_changed(&self, watches: &mut Watches, part: Part, split: (i64, i64), live: (i64, i64)) -> bool {
        self.split_counted(watches, part, split, live);
        self.is_split_passed(watches, part)
    }

    #[inline(always)]
    fn split_counted(&self, watches: &mut Watches, part: Part, (blocks, bytes): (i64, i64), live: (i64, i64)) {
        self.inactive_split.change(part, blocks, live.0);
        // Free and live bytes together change only where a segment becomes free, or is no longer, and where blocks are pending.
        if bytes != -live.1 {
            self.inactive_split_bytes.change(part, bytes, live.1);
        }
        watches.inactive_split.changed(part, blocks);
        watches.inactive_split_bytes.changed(part, bytes);
    }

    #[inline(always)]
    fn is_split_passed(&self, watches: &Watches, part: Part) -> bool {
        self.inactive_split.is_passed(&watches.inactive_split, part, &self.allocation)
            || self.inactive_split_bytes.is_passed(&watches.inactive_split_bytes, part, &self.allocated_bytes)
    }

    /// Notes what of the figures of free blocks in segments that hold others too is at a new peak, or above its ceiling.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_split(&self, watches: &mut Watches, part: Part) {
        let above = self.inactive_split.note(part, &self.allocation)
            | self.inactive_split_bytes.note(part, &self.allocated_bytes);
        self.telling.note(above);
        self.rewatch(watches);
    }

    /// A block that is not live went into a bin.
    pub(crate) fn went_into_bin(&self, watches: &mut Watches, part: Part, bytes: i64) {
        self.left(part, -1, -bytes);
        self.split(watches, part, 1, bytes);
    }

    /// A block came out of a bin, and is not handed out so far: it still counts with the free blocks of its segment.
    pub(crate) fn came_out_of_bin(&self, part: Part, bytes: i64) {
        self.left(part, 1, bytes);
    }

    /// A block of at least the split limit was handed out.
    pub(crate) fn oversize_handed_out(&self) {
        let above = self.oversize_allocations.increase(1);
        self.telling.note(above);
    }

    /// A block of at least the split limit was freed.
    pub(crate) fn oversize_freed(&self) {
        self.oversize_allocations.decrease(1);
    }

    /// Bytes in blocks handed out.
    pub(crate) fn allocated_bytes(&self) -> &CounterArray {
        &self.allocated_bytes
    }

    /// Whether a block is pending.
    #[inline]
    pub(crate) fn any_pending(&self) -> bool {
        self.active.pending.iter().any(|part| part.current() != 0)
    }

    /// Whether a block is live.
    #[inline]
    pub(crate) fn any_live(&self) -> bool {
        self.allocation.current() != 0
    }

    /// Bytes of live blocks.
    pub(crate) fn live_bytes(&self) -> i64 {
        self.allocated_bytes.current()
    }

    /// Bytes of live and pending blocks.
    pub(crate) fn active_bytes(&self) -> i64 {
        self.active_bytes.current(&self.allocated_bytes)
    }

    /// Bytes of all blocks that were ever handed out.
    pub(crate) fn handed_out_bytes(&self) -> i64 {
        self.allocated_bytes.parts.iter().map(|part| part.raw().0).sum()
    }

    /// The most they were.
    #[inline]
    pub(crate) fn active_peak_bytes(&self) -> i64 {
        self.active_bytes.peak.most()
    }

    pub(crate) fn read(&self) -> ArenaStats {
        ArenaStats {
            allocation: self.allocation.read(),
            active: self.active.read(&self.allocation),
            inactive_split: self.inactive_split.read(&self.allocation),
            allocated_bytes: self.allocated_bytes.read(),
            active_bytes: self.active_bytes.read(&self.allocated_bytes),
            inactive_split_bytes: self.inactive_split_bytes.read(&self.allocated_bytes),
            requested_bytes: self.requested_bytes.read(),
            oversize_allocations: self.oversize_allocations.read(),
            // Each figure by itself is never less, but two that are read one after the other may be of two moments.
            binned: self.binned().0.max(0),
            binned_bytes: self.binned().1.max(0),
            misses: self.misses(),
        }
    }

    /// Differs from what it was before if a block was handed out, freed or merged in between, or part of a free one was held: it only grows, by
    /// what came and what went of each figure.
    pub(crate) fn changes(&self) -> i64 {
        let came_and_went = |part: usize| {
            let [blocks, bytes] =
                [(&self.allocation, &self.inactive_split), (&self.allocated_bytes, &self.inactive_split_bytes)]
                    .map(|(handed, split)| split.came_and_went(part, &handed.parts[part]));
            blocks + bytes + self.allocation.parts[part].came_and_went() + self.active.pending[part].came_and_went()
        };
        came_and_went(0) + came_and_went(1)
    }

    /// Every figure that has a peak, in the order of [`Stats::of_arenas`](crate::Stats).
    pub(crate) fn figures(&self) -> [(i64, &Peak); FIGURES] {
        let arrays = [
            self.allocation.figures(),
            self.active.figures(&self.allocation),
            self.inactive_split.figures(&self.allocation),
            self.allocated_bytes.figures(),
            self.active_bytes.figures(&self.allocated_bytes),
            self.inactive_split_bytes.figures(&self.allocated_bytes),
            self.requested_bytes.figures(),
        ];
        let oversize = self.oversize_allocations.figure();
        std::array::from_fn(|at| arrays.get(at / 3).map_or(oversize, |array| array[at % 3]))
    }

    /// A request found no free block. Under no lock: several threads may miss at once.
    pub(crate) fn missed(&self) {
        self.misses.fetch_add(1, Relaxed);
    }

    /// Requests that no free block served.
    pub(crate) fn misses(&self) -> i64 {
        self.misses.load(Relaxed)
    }

    /// Blocks in bins, and their bytes.
    pub(crate) fn binned(&self) -> (i64, i64) {
        let [blocks, bytes] = [&self.allocation, &self.allocated_bytes].map(|handed| handed.parts.iter());
        let binned = |at: usize, (past, handed): (&[PastBins; 2], &Counter)| past[at].binned(handed);
        let past = || self.past_bins.iter();
        (past().zip(blocks).map(|p| binned(0, p)).sum(), past().zip(bytes).map(|p| binned(1, p)).sum())
    }

    /// Live blocks of at least the split limit.
    pub(crate) fn oversize_allocations(&self) -> i64 {
        self.oversize_allocations.current()
    }

    pub(crate) fn reset_accumulated(&self) {
        let arrays = [&self.allocation, &self.allocated_bytes, &self.requested_bytes];
        arrays.into_iter().for_each(CounterArray::reset_accumulated);
        self.inactive_split.reset_accumulated(&self.allocation);
        self.inactive_split_bytes.reset_accumulated(&self.allocated_bytes);
        self.oversize_allocations.reset_accumulated();
        self.active.reset_accumulated();
        self.active_bytes.reset_accumulated();
    }
}

/// What a private pool counts, so that its figures cost nothing to read. Written under the lock of the pool's arena.
#[derive(Debug, Default)]
pub(crate) struct PoolCounters {
    pub(crate) allocated_bytes: CounterArray,
    pub(crate) reserved_bytes: CounterArray,
}

impl PoolCounters {
    pub(crate) fn reset_peaks(&self) {
        let figures = self.allocated_bytes.figures().into_iter().chain(self.reserved_bytes.figures());
        figures.for_each(|(current, peak)| peak.reset(current));
    }

    pub(crate) fn reset_accumulated(&self) {
        self.allocated_bytes.reset_accumulated();
        self.reserved_bytes.reset_accumulated();
    }

    /// Whether the pool ever had memory, whatever was reset since.
    pub(crate) fn ever_grew(&self) -> bool {
        Part::ALL.iter().any(|part| self.reserved_bytes.part(*part).raw().0 > 0)
    }
}

#[cfg(test)]
mod tests;
