//! Counters and what they add up to.
//!
//! A [`Counter`] has one writer at a time (whoever holds the lock it belongs to) and any number of readers: a store is a plain
//! store, and [`stats`](crate::Allocator::stats) reads without taking a lock. Current and cumulative figures are exact at any quiet
//! moment.

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use crate::ids::Part;

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

    pub(crate) fn add(&mut self, other: Self) {
        self.all.add(other.all);
        self.small_pool.add(other.small_pool);
        self.large_pool.add(other.large_pool);
    }

    pub(crate) fn each(&mut self) -> [&mut Stat; 3] {
        [&mut self.all, &mut self.small_pool, &mut self.large_pool]
    }
}

/// A [`Stat`] with one writer and lock-free readers.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    current: AtomicI64,
    peak: AtomicI64,
    allocated: AtomicI64,
    freed: AtomicI64,
}

impl Counter {
    #[inline]
    pub(crate) fn increase(&self, n: i64) {
        let current = self.current.load(Relaxed) + n;
        self.current.store(current, Relaxed);
        if current > self.peak.load(Relaxed) {
            self.peak.store(current, Relaxed);
        }
        self.allocated.store(self.allocated.load(Relaxed) + n, Relaxed);
    }

    #[inline]
    pub(crate) fn decrease(&self, n: i64) {
        self.current.store(self.current.load(Relaxed) - n, Relaxed);
        self.freed.store(self.freed.load(Relaxed) + n, Relaxed);
    }

    /// A net change as one movement, which is what peaks are made of.
    #[inline]
    pub(crate) fn change(&self, n: i64) {
        if n > 0 {
            self.increase(n);
        } else if n < 0 {
            self.decrease(-n);
        }
    }

    pub(crate) fn current(&self) -> i64 {
        self.current.load(Relaxed)
    }

    pub(crate) fn peak(&self) -> i64 {
        self.peak.load(Relaxed)
    }

    pub(crate) fn read(&self) -> Stat {
        Stat {
            current: self.current.load(Relaxed),
            peak: self.peak.load(Relaxed),
            allocated: self.allocated.load(Relaxed),
            freed: self.freed.load(Relaxed),
        }
    }

    pub(crate) fn reset_peak(&self) {
        self.peak.store(self.current.load(Relaxed), Relaxed);
    }

    pub(crate) fn reset_accumulated(&self) {
        self.allocated.store(0, Relaxed);
        self.freed.store(0, Relaxed);
    }
}

/// A [`StatArray`] with one writer and lock-free readers.
#[derive(Debug, Default)]
pub(crate) struct CounterArray {
    all: Counter,
    parts: [Counter; 2],
}

impl CounterArray {
    #[inline]
    pub(crate) fn increase(&self, part: Part, n: i64) {
        self.all.increase(n);
        self.parts[part.index()].increase(n);
    }

    #[inline]
    pub(crate) fn decrease(&self, part: Part, n: i64) {
        self.all.decrease(n);
        self.parts[part.index()].decrease(n);
    }

    #[inline]
    pub(crate) fn change(&self, part: Part, n: i64) {
        self.all.change(n);
        self.parts[part.index()].change(n);
    }

    pub(crate) fn all(&self) -> &Counter {
        &self.all
    }

    pub(crate) fn read(&self) -> StatArray {
        StatArray { all: self.all.read(), small_pool: self.parts[0].read(), large_pool: self.parts[1].read() }
    }

    fn each(&self) -> [&Counter; 3] {
        [&self.all, &self.parts[0], &self.parts[1]]
    }
}

/// What an arena counts. Written under the arena's lock.
#[derive(Debug, Default)]
pub(crate) struct ArenaCounters {
    pub(crate) allocation: CounterArray,
    pub(crate) active: CounterArray,
    pub(crate) inactive_split: CounterArray,
    pub(crate) allocated_bytes: CounterArray,
    pub(crate) active_bytes: CounterArray,
    pub(crate) inactive_split_bytes: CounterArray,
    pub(crate) requested_bytes: CounterArray,
    pub(crate) oversize_allocations: Counter,
    /// Bytes and blocks parked in bins.
    pub(crate) binned: Counter,
    pub(crate) binned_bytes: Counter,
}

impl ArenaCounters {
    fn arrays(&self) -> [&CounterArray; 7] {
        [
            &self.allocation,
            &self.active,
            &self.inactive_split,
            &self.allocated_bytes,
            &self.active_bytes,
            &self.inactive_split_bytes,
            &self.requested_bytes,
        ]
    }

    fn each(&self) -> impl Iterator<Item = &Counter> {
        let single = [&self.oversize_allocations, &self.binned, &self.binned_bytes];
        self.arrays().into_iter().flat_map(CounterArray::each).chain(single)
    }

    pub(crate) fn reset_peaks(&self) {
        self.each().for_each(Counter::reset_peak);
    }

    pub(crate) fn reset_accumulated(&self) {
        self.each().for_each(Counter::reset_accumulated);
    }
}

/// What a private pool counts, so that its figures cost nothing to read. Written under the lock of the pool's arena.
#[derive(Debug, Default)]
pub(crate) struct PoolCounters {
    pub(crate) allocated_bytes: CounterArray,
    pub(crate) reserved_bytes: CounterArray,
}
