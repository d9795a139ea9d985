//! Figures over time, as they are told.

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
