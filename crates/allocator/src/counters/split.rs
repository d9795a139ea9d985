//! Free blocks in segments that hold others too.

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use super::watch::Watch;
use super::{Counter, CounterArray, Stat, StatArray, add};
use crate::ids::Part;
use crate::peaks::Peak;

/// Free blocks in segments that hold others too, or their bytes. Counted are these and the live ones together: a hand-out from a bin and a
/// free into one change only which of the two a block is, so they change nothing here. What is live is known from `handed`, and what went is most
/// often what was handed out, so that only the difference is kept.
#[derive(Debug, Default)]
pub(super) struct SplitCounters {
    with_live: [AtomicI64; 2],
    /// What went, less what was ever handed out.
    beyond_handed: [AtomicI64; 2],
    peaks: [Peak; 2],
    peak: Peak,
    /// Increases and decreases of each part at the last reset of accumulated figures.
    reset_at: [[AtomicI64; 2]; 2],
}

impl SplitCounters {
    #[inline(always)]
    fn in_part(&self, part: usize, handed: &CounterArray) -> i64 {
        self.with_live[part].load(Relaxed) - handed.parts[part].current()
    }

    /// So much more, or less, as one movement; and so much more is live, or less, than was last counted here. Changes nothing where the two make up
    /// for each other.
    #[inline(always)]
    pub(super) fn change(&self, part: Part, n: i64, live: i64) {
        // Which way it goes nobody can predict, so nothing here is a branch.
        add(&self.with_live[part.index()], n + live);
        add(&self.beyond_handed[part.index()], (-n).max(0) - live.max(0));
    }

    /// Whether a part may be something new.
    #[inline(always)]
    pub(super) fn is_passed(&self, watch: &Watch, part: Part, handed: &CounterArray) -> bool {
        let here = self.in_part(part.index(), handed);
        // Figures are read anew each time, and who calls knows the part.
        let small = if part == Part::Small { here } else { self.in_part(0, handed) };
        watch.is_passed(part, here, small)
    }

    /// Whether the small part may be something new, where so much of it is live.
    #[inline(always)]
    pub(super) fn is_passed_beside(&self, watch: &Watch, live: i64) -> bool {
        let here = self.with_live[0].load(Relaxed) - live;
        watch.is_passed(Part::Small, here, here)
    }

    /// A part was increased. Whether some figure is above its ceiling.
    pub(super) fn note(&self, part: Part, handed: &CounterArray) -> bool {
        let [here, other] = [part.index(), 1 - part.index()].map(|part| self.in_part(part, handed));
        self.peaks[part.index()].note(here) | self.peak.note(here + other)
    }

    pub(super) fn rewatch(&self, watch: &mut Watch, handed: &CounterArray) {
        watch.set(self.peaks.each_ref().map(Peak::watch), self.peak.watch(), self.in_part(1, handed));
    }

    /// What each part ever gained and lost.
    pub(super) fn raw(&self, handed: &CounterArray) -> [[i64; 2]; 2] {
        [0, 1].map(|part| {
            let decreases = self.decreases(part, &handed.parts[part]);
            // While other threads work the two that it is made of are not of one moment.
            [self.in_part(part, handed).max(0) + decreases, decreases]
        })
    }

    fn decreases(&self, part: usize, handed: &Counter) -> i64 {
        self.beyond_handed[part].load(Relaxed) + handed.raw().0
    }

    /// The two figures of [`raw`](Self::raw), of one part, together: of what is live only that part is looked at.
    pub(super) fn came_and_went(&self, part: usize, handed: &Counter) -> i64 {
        self.with_live[part].load(Relaxed) - handed.current() + 2 * self.decreases(part, handed)
    }

    pub(super) fn read(&self, handed: &CounterArray) -> StatArray {
        let raw = self.raw(handed);
        let [small_pool, large_pool] = [0, 1].map(|part| {
            let ([increases, decreases], [increases_then, decreases_then]) =
                (raw[part], self.reset_at[part].each_ref().map(|at| at.load(Relaxed)));
            Stat {
                current: increases - decreases,
                peak: self.peaks[part].most(),
                allocated: increases - increases_then,
                freed: decreases - decreases_then,
            }
        });
        let mut all = small_pool;
        all.add(large_pool);
        all.peak = self.peak.most();
        StatArray { all, small_pool, large_pool }
    }

    pub(super) fn figures(&self, handed: &CounterArray) -> [(i64, &Peak); 3] {
        let [small, large] = [0, 1].map(|part| self.in_part(part, handed));
        [(small + large, &self.peak), (small, &self.peaks[0]), (large, &self.peaks[1])]
    }

    pub(super) fn reset_accumulated(&self, handed: &CounterArray) {
        for (at, now) in self.reset_at.iter().flatten().zip(self.raw(handed).into_iter().flatten()) {
            at.store(now, Relaxed);
        }
    }
}
