//! Counters and what they add up to.
//!
//! A [`Counter`] has one writer at a time (whoever holds the lock it belongs to) and any number of readers: a store is a plain
//! store, and [`stats`](crate::Allocator::stats) reads without taking a lock. Current and cumulative figures are exact at any quiet
//! moment.

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use crate::ids::Part;
use crate::peaks::{Peak, Telling};

/// How many figures of an arena have peaks.
pub(crate) const FIGURES: usize = 22;

/// One figure over time, under PyTorch's names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stat {
    /// Now.
    pub current: i64,
    /// The most there ever was, since the last reset of peaks.
    pub peak: i64,
    /// All increases added up, since the last reset of accumulated figures.
    pub allocated: i64,
    /// All decreases added up, since the last reset of accumulated figures.
    pub freed: i64,
}

impl Stat {
    /// The values under PyTorch's names.
    #[must_use]
    pub fn values(&self) -> [(&'static str, i64); 4] {
        [("current", self.current), ("peak", self.peak), ("allocated", self.allocated), ("freed", self.freed)]
    }

    pub(crate) fn increase(&mut self, n: i64) {
        self.current += n;
        self.peak = self.peak.max(self.current);
        self.allocated += n;
    }

    pub(crate) fn decrease(&mut self, n: i64) {
        self.current -= n;
        self.freed += n;
    }

    /// Current and cumulative figures add up; peaks do too, which is the most the sum can have been.
    pub(crate) fn add(&mut self, other: Self) {
        self.current += other.current;
        self.peak += other.peak;
        self.allocated += other.allocated;
        self.freed += other.freed;
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    pub(crate) fn reset_accumulated(&mut self) {
        self.allocated = 0;
        self.freed = 0;
    }
}

/// A figure in all, and for each part of the pools.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StatArray {
    /// Both parts together.
    pub all: Stat,
    /// The small parts.
    pub small_pool: Stat,
    /// The large parts.
    pub large_pool: Stat,
}

impl StatArray {
    fn part(&mut self, part: Part) -> &mut Stat {
        match part {
            Part::Small => &mut self.small_pool,
            Part::Large => &mut self.large_pool,
        }
    }

    pub(crate) fn increase(&mut self, part: Part, n: i64) {
        self.all.increase(n);
        self.part(part).increase(n);
    }

    pub(crate) fn decrease(&mut self, part: Part, n: i64) {
        self.all.decrease(n);
        self.part(part).decrease(n);
    }

    /// A figure that moves by either sign, as one movement.
    pub(crate) fn change(&mut self, part: Part, n: i64) {
        if n < 0 { self.decrease(part, -n) } else { self.increase(part, n) }
    }

    /// What one part has is the other's from now on.
    pub(crate) fn move_between(&mut self, from: Part, to: Part, n: i64) {
        self.part(from).decrease(n);
        self.part(to).increase(n);
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.all.add(other.all);
        self.small_pool.add(other.small_pool);
        self.large_pool.add(other.large_pool);
    }

    pub(crate) fn each(&mut self) -> [&mut Stat; 3] {
        [&mut self.all, &mut self.small_pool, &mut self.large_pool]
    }
}

/// A [`Stat`] with one writer and lock-free readers. What comes and what goes is counted; what is there is the difference, so a movement
/// is one store.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    increases: AtomicI64,
    decreases: AtomicI64,
    peak: Peak,
    /// Both counts at the last reset of accumulated figures.
    reset_at: [AtomicI64; 2],
}

impl Counter {
    /// Whether the figure is above its ceiling now.
    #[inline]
    pub(crate) fn increase(&self, n: i64) -> bool {
        self.peak.note(self.add(n))
    }

    /// Returns the new current figure.
    #[inline]
    fn add(&self, n: i64) -> i64 {
        let increases = self.increases.load(Relaxed) + n;
        self.increases.store(increases, Relaxed);
        increases - self.decreases.load(Relaxed)
    }

    #[inline]
    pub(crate) fn decrease(&self, n: i64) {
        self.decreases.store(self.decreases.load(Relaxed) + n, Relaxed);
    }

    #[inline]
    pub(crate) fn current(&self) -> i64 {
        self.increases.load(Relaxed) - self.decreases.load(Relaxed)
    }

    /// What came and what went since the beginning, whatever was reset.
    pub(crate) fn raw(&self) -> (i64, i64) {
        (self.increases.load(Relaxed), self.decreases.load(Relaxed))
    }

    pub(crate) fn read(&self) -> Stat {
        let (increases, decreases) = (self.increases.load(Relaxed), self.decreases.load(Relaxed));
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
        self.reset_at[0].store(self.increases.load(Relaxed), Relaxed);
        self.reset_at[1].store(self.decreases.load(Relaxed), Relaxed);
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

    /// A part was increased. Whether some figure is above its ceiling.
    fn note(&self, part: Part) -> bool {
        let this = &self.parts[part.index()];
        this.peak.note(this.current()) | self.peak.note(self.current())
    }

    #[inline]
    pub(crate) fn decrease(&self, part: Part, n: i64) {
        self.parts[part.index()].decrease(n);
    }

    /// A net change as one movement, which is what peaks are made of.
    #[inline]
    fn change(&self, part: Part, n: i64) -> bool {
        if n > 0 {
            return self.increase(part, n);
        }
        if n < 0 {
            self.decrease(part, -n);
        }
        false
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
        let (small_pool, large_pool) = (self.parts[0].read(), self.parts[1].read());
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

/// What is handed out may be this much without being anything new: blocks, bytes, bytes asked for. At most what [`Peak`]s say, so that one
/// comparison stands for those of what is handed out and of what is active.
#[derive(Debug, Default)]
struct Watch {
    parts: [[AtomicI64; 3]; 2],
    all: [AtomicI64; 3],
}

impl Watch {
    /// Counts `n` in, and says whether that may be something new.
    #[inline]
    fn passed(&self, at: usize, part: Part, array: &CounterArray, n: i64) -> bool {
        let here = array.parts[part.index()].add(n);
        let all = here + array.parts[1 - part.index()].current();
        (here > self.parts[part.index()][at].load(Relaxed)) | (all > self.all[at].load(Relaxed))
    }
}

/// What an arena counts. Written under the arena's lock.
#[derive(Debug, Default)]
pub(crate) struct ArenaCounters {
    allocation: CounterArray,
    allocated_bytes: CounterArray,
    requested_bytes: CounterArray,
    active: ActiveCounters,
    active_bytes: ActiveCounters,
    inactive_split: CounterArray,
    inactive_split_bytes: CounterArray,
    oversize_allocations: Counter,
    /// Blocks parked in bins, and their bytes.
    binned: [AtomicI64; 2],
    watch: Watch,
    pub(crate) telling: Telling,
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
}

impl ArenaCounters {
    /// A block was handed out.
    #[inline]
    pub(crate) fn handed_out(&self, part: Part, bytes: i64, requested: i64) {
        let new = self.watch.passed(0, part, &self.allocation, 1)
            | self.watch.passed(1, part, &self.allocated_bytes, bytes)
            | self.watch.passed(2, part, &self.requested_bytes, requested);
        if new {
            self.note_handed_out(part);
        }
    }

    /// Some figure may be at a new peak, or above its ceiling.
    #[cold]
    #[inline(never)]
    fn note_handed_out(&self, part: Part) {
        let above = self.allocation.note(part)
            | self.allocated_bytes.note(part)
            | self.requested_bytes.note(part)
            | self.active.note(part, &self.allocation)
            | self.active_bytes.note(part, &self.allocated_bytes);
        self.telling.note(above);
        self.rewatch();
    }

    /// Works out again which figures of what is handed out are nothing new. After a ceiling was lowered, a peak reset, or more is pending.
    pub(crate) fn rewatch(&self) {
        let pairs = [
            (&self.allocation, Some(&self.active)),
            (&self.allocated_bytes, Some(&self.active_bytes)),
            (&self.requested_bytes, None),
        ];
        for (at, (handed, active)) in pairs.into_iter().enumerate() {
            let least = |own: &Peak, of_active: Option<(&Peak, i64)>| {
                let active = of_active.map_or(i64::MAX, |(peak, pending)| peak.watch().saturating_sub(pending));
                own.watch().min(active)
            };
            let pending = active.map_or([0; 2], |a| [0, 1].map(|part| a.pending[part].current()));
            for (part, pending) in pending.into_iter().enumerate() {
                let watch = least(&handed.parts[part].peak, active.map(|a| (&a.peaks[part], pending)));
                self.watch.parts[part][at].store(watch, Relaxed);
            }
            let watch = least(&handed.peak, active.map(|a| (&a.peak, pending[0] + pending[1])));
            self.watch.all[at].store(watch, Relaxed);
        }
    }

    /// Whether nothing of a part is handed out.
    #[inline]
    pub(crate) fn is_unused(&self, part: Part) -> bool {
        self.allocation.part(part).current() == 0
    }

    /// A block was freed, and is free.
    #[inline]
    pub(crate) fn freed(&self, part: Part, bytes: i64, requested: i64) {
        self.allocation.decrease(part, 1);
        self.allocated_bytes.decrease(part, bytes);
        self.requested_bytes.decrease(part, requested);
    }

    /// A block was freed, and is pending.
    pub(crate) fn became_pending(&self, part: Part, bytes: i64) {
        self.allocation.decrease(part, 1);
        self.allocated_bytes.decrease(part, bytes);
        self.active.pending[part.index()].increase(1);
        self.active_bytes.pending[part.index()].increase(bytes);
        self.rewatch();
    }

    /// A pending block is free.
    pub(crate) fn was_pending(&self, part: Part, bytes: i64, requested: i64) {
        self.active.pending[part.index()].decrease(1);
        self.active_bytes.pending[part.index()].decrease(bytes);
        self.requested_bytes.decrease(part, requested);
    }

    /// So many free blocks more in segments that hold others too, and their bytes, each as one movement.
    #[inline]
    pub(crate) fn split(&self, part: Part, blocks: i64, bytes: i64) {
        let above = self.inactive_split.change(part, blocks) | self.inactive_split_bytes.change(part, bytes);
        self.telling.note(above);
    }

    /// A block went into a bin; `split` if its segment holds others too.
    #[inline]
    pub(crate) fn went_into_bin(&self, part: Part, bytes: i64, split: bool) {
        self.bin(1, bytes);
        if split {
            let above = self.inactive_split.increase(part, 1) | self.inactive_split_bytes.increase(part, bytes);
            self.telling.note(above);
        }
    }

    #[inline]
    fn bin(&self, blocks: i64, bytes: i64) {
        let [count, sum] = &self.binned;
        count.store(count.load(Relaxed) + blocks, Relaxed);
        sum.store(sum.load(Relaxed) + bytes, Relaxed);
    }

    /// A block came out of a bin; `split` if it is no longer one of the free blocks in segments that hold others too.
    #[inline]
    pub(crate) fn came_out_of_bin(&self, part: Part, bytes: i64, split: bool) {
        self.bin(-1, -bytes);
        if split {
            self.inactive_split.decrease(part, 1);
            self.inactive_split_bytes.decrease(part, bytes);
        }
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

    /// Live and pending blocks.
    #[inline]
    pub(crate) fn active_blocks(&self) -> i64 {
        self.active.current(&self.allocation)
    }

    /// Their bytes, now and at most.
    pub(crate) fn active_bytes(&self) -> (i64, i64) {
        (self.active_bytes.current(&self.allocated_bytes), self.active_bytes.peak.most())
    }

    pub(crate) fn read(&self) -> ArenaStats {
        ArenaStats {
            allocation: self.allocation.read(),
            active: self.active.read(&self.allocation),
            inactive_split: self.inactive_split.read(),
            allocated_bytes: self.allocated_bytes.read(),
            active_bytes: self.active_bytes.read(&self.allocated_bytes),
            inactive_split_bytes: self.inactive_split_bytes.read(),
            requested_bytes: self.requested_bytes.read(),
            oversize_allocations: self.oversize_allocations.read(),
            binned: self.binned().0,
            binned_bytes: self.binned().1,
        }
    }

    fn arrays(&self) -> [&CounterArray; 5] {
        [
            &self.allocation,
            &self.allocated_bytes,
            &self.requested_bytes,
            &self.inactive_split,
            &self.inactive_split_bytes,
        ]
    }

    /// Every figure that has a peak, in the order of [`Stats::of_arenas`](crate::Stats).
    pub(crate) fn figures(&self) -> [(i64, &Peak); FIGURES] {
        let arrays = [
            self.allocation.figures(),
            self.active.figures(&self.allocation),
            self.inactive_split.figures(),
            self.allocated_bytes.figures(),
            self.active_bytes.figures(&self.allocated_bytes),
            self.inactive_split_bytes.figures(),
            self.requested_bytes.figures(),
        ];
        let oversize = self.oversize_allocations.figure();
        std::array::from_fn(|at| arrays.get(at / 3).map_or(oversize, |array| array[at % 3]))
    }

    /// Blocks in bins, and their bytes.
    pub(crate) fn binned(&self) -> (i64, i64) {
        (self.binned[0].load(Relaxed), self.binned[1].load(Relaxed))
    }

    /// Live blocks of at least the split limit.
    pub(crate) fn oversize_allocations(&self) -> i64 {
        self.oversize_allocations.current()
    }

    pub(crate) fn reset_accumulated(&self) {
        self.arrays().into_iter().for_each(CounterArray::reset_accumulated);
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
