//! Device totals: what is held from the driver, the limit on it, and how often what happened. Touched only off the hit path.

use std::collections::BTreeMap;

use crate::config::LimitSource;
use crate::counters::{Stat, StatArray};
use crate::idle::Residency;
use crate::ids::{Part, PoolId};
use crate::pages::Allowance;
use crate::policy::SHORT_ABOVE;
use crate::sync::{Guard, Mutex, Rank};
use crate::units::to_units;

/// What is grown in place of trades is paid with so many times as much of what was traded.
const PRICE: u64 = 8;

/// A limit on the bytes held from the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limit {
    /// At most this many bytes in segments.
    pub bytes: u64,
    /// Who set it.
    pub source: LimitSource,
}

/// Why memory may not be asked of the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// A limit, or more than a segment can be: treated like a driver that has no more.
    Limit,
    /// The configured fraction forbids it outright (PyTorch's `throw_on_cudamalloc_oom`).
    Rejected,
}

/// What moving pages took. Figures are cumulative but for the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PageStats {
    /// Physical handles that were mapped at another place.
    pub remaps: u64,
    /// Nanoseconds of the driver in that.
    pub remap_ns: u64,
    /// Physical handles that were made anew as smaller ones.
    pub splits: u64,
    /// Nanoseconds of the driver in that.
    pub split_ns: u64,
    /// Bytes whose old mapping still stands beside the new one: mapped twice, reserved once.
    pub aliased_bytes: i64,
    /// Bytes of address space reserved for pages.
    pub address_bytes: u64,
}

/// What idle pools did. Cumulative.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct IdleStats {
    /// How often a pool was parked.
    pub parks: u64,
    /// How often one was woken.
    pub wakes: u64,
    /// How often one, or a stream's part of the default pool, was suspended.
    pub suspensions: u64,
    /// How often one was resumed.
    pub resumptions: u64,
    /// Nanoseconds in which pools were parked and suspended, without the waits and copies before.
    pub away_ns: u64,
    /// Nanoseconds in which pools were woken and resumed.
    pub back_ns: u64,
    /// Bytes that went away.
    pub away_bytes: u64,
    /// Bytes that came back.
    pub back_bytes: u64,
    /// How many runs were lent.
    pub loans: u64,
    /// Their bytes.
    pub loan_bytes: u64,
}

impl IdleStats {
    pub(crate) fn went(&mut self, to: Residency, bytes: u64, ns: u64) {
        self.parks += u64::from(to == Residency::Parked);
        self.suspensions += u64::from(to == Residency::Suspended);
        self.away_bytes += bytes;
        self.away_ns += ns;
    }

    pub(crate) fn came(&mut self, from: Residency, bytes: u64, ns: u64) {
        self.wakes += u64::from(from == Residency::Parked);
        self.resumptions += u64::from(from == Residency::Suspended);
        self.back_bytes += bytes;
        self.back_ns += ns;
    }

    pub(crate) fn lent(&mut self, bytes: u64) {
        self.loans += 1;
        self.loan_bytes += bytes;
    }
}

/// The figures behind the lock.
#[derive(Debug, Default)]
pub(crate) struct TotalsState {
    pub(crate) limit: Option<Limit>,
    pub(crate) segment: StatArray,
    pub(crate) reserved_bytes: StatArray,
    pub(crate) oversize_segments: Stat,
    pub(crate) alloc_retries: i64,
    pub(crate) ooms: i64,
    pub(crate) oom_rejections: i64,
    pub(crate) syncs: i64,
    pub(crate) device_allocs: i64,
    pub(crate) device_frees: i64,
    /// Reserved bytes of each private pool; kept at zero after the pool is gone.
    pub(crate) pools: BTreeMap<PoolId, StatArray>,
    pub(crate) pages: PageStats,
    /// What moving pages may still take.
    pub(crate) moves: Allowance,
    pub(crate) idle: IdleStats,
    /// Bytes promised to growth under way: no lock is held while the driver is asked.
    growing: u64,
    /// Bytes in idle segments or pages that streams took from each other so that less need be held, less what was paid.
    traded: u64,
    /// The most that was held or promised since the cache was last emptied.
    most_held: u64,
    /// Counts every address that was given back: a graph captured over foreign memory can tell that it must be checked again.
    pub(crate) released_generation: u64,
}

/// Device totals and their lock.
#[derive(Debug)]
pub(crate) struct Totals {
    state: Mutex<TotalsState>,
    max_split: u64,
    rejecting_above: Option<u64>,
    /// What the device has.
    device_bytes: u64,
    /// Eighths of the most that was held that streams take from each other before growth takes the place of that.
    enough_traded: u64,
}

impl Totals {
    pub(crate) fn new(
        limit: Option<Limit>,
        max_split: u64,
        rejecting_above: Option<u64>,
        device_bytes: u64,
        enough_traded: u64,
    ) -> Self {
        let state = TotalsState { limit, ..TotalsState::default() };
        Self { state: Mutex::new(Rank::Totals, state), max_split, rejecting_above, device_bytes, enough_traded }
    }

    /// A stream took an idle segment, or pages, of so many bytes from another one, so that less need be held.
    pub(crate) fn traded(&self, bytes: u64) {
        self.state.lock().traded += bytes;
    }

    /// Whether growth by `bytes` is better than one trade more: streams have traded enough of what is held since that last rose, so the
    /// workload goes on like this, and memory is not short.
    ///
    /// A first pass is kept as tight as it can be. But streams that go up and down, each at its own time, would trade for ever: each takes
    /// what the next one misses. Growth in place of trades, and of trimming for its sake, is paid with what was traded, an eighth of it; so
    /// it ends as soon as each stream has what it needs.
    pub(crate) fn has_traded_enough(&self, bytes: u64) -> bool {
        let t = self.state.lock();
        let most = t.limit.map_or(self.device_bytes, |limit| limit.bytes.min(self.device_bytes));
        t.traded >= (t.most_held / 8).saturating_mul(self.enough_traded)
            && t.held().saturating_add(bytes) <= most / 100 * SHORT_ABOVE
    }

    pub(crate) fn lock(&self) -> Guard<'_, TotalsState> {
        self.state.lock()
    }

    /// Whether more would be held after growth by `bytes` than ever since the cache was emptied.
    pub(crate) fn would_hold_most(&self, bytes: u64) -> bool {
        let t = self.state.lock();
        t.held().saturating_add(bytes) > t.most_held
    }

    /// The cache was emptied: what was held and traded before says nothing of what comes.
    pub(crate) fn start_afresh(&self) {
        let mut t = self.state.lock();
        (t.traded, t.most_held) = (0, t.held());
    }

    /// Promises `bytes` of growth, so that two threads cannot both pass the limit. Followed by [`commit`](Self::commit) or
    /// [`cancel`](Self::cancel).
    pub(crate) fn begin_growth(&self, bytes: u64, retry: bool) -> Result<(), Refusal> {
        if to_units(bytes).is_none() {
            // Beyond 2 TiB a segment has no record, and no driver gives one.
            return Err(Refusal::Limit);
        }
        let mut t = self.state.lock();
        if retry {
            t.alloc_retries += 1;
        }
        let after = t.held().saturating_add(bytes);
        if t.limit.is_some_and(|l| after > l.bytes) {
            return Err(Refusal::Limit);
        }
        if self.rejecting_above.is_some_and(|most| after > most) {
            t.oom_rejections += 1;
            return Err(Refusal::Rejected);
        }
        t.traded = t.traded.saturating_sub(PRICE.saturating_mul(after.saturating_sub(t.most_held)));
        t.most_held = t.most_held.max(after);
        t.growing += bytes;
        Ok(())
    }

    /// The driver refused, or the segment was not used: the promise is off. Memory is short, whoever has it, so streams trade again.
    pub(crate) fn cancel(&self, bytes: u64) {
        let mut t = self.state.lock();
        t.growing -= bytes;
        t.traded = 0;
    }

    /// The promised bytes are a segment now.
    pub(crate) fn commit(&self, bytes: u64, part: Part, pool: PoolId) {
        let mut t = self.state.lock();
        t.growing -= bytes;
        t.device_allocs += 1;
        t.segment.increase(part, 1);
        t.reserved_bytes.increase(part, bytes as i64);
        if bytes >= self.max_split {
            t.oversize_segments.increase(1);
        }
        if !pool.is_default() {
            t.pools.entry(pool).or_default().increase(part, bytes as i64);
        }
    }

    /// A segment went back to the driver.
    pub(crate) fn released(&self, bytes: u64, part: Part, pool: PoolId) {
        let mut t = self.state.lock();
        t.device_frees += 1;
        t.released_generation += 1;
        t.segment.decrease(part, 1);
        t.reserved_bytes.decrease(part, bytes as i64);
        if bytes >= self.max_split {
            t.oversize_segments.decrease(1);
        }
        if !pool.is_default() {
            t.pools.entry(pool).or_default().decrease(part, bytes as i64);
        }
    }
}

impl TotalsState {
    /// Pieces of one pool's part serve another's from now on; there the mapped runs change by `runs`, negative.
    pub(crate) fn pages_moved(&mut self, bytes: u64, pieces: u64, from: (Part, PoolId), to: (Part, PoolId), runs: i64) {
        self.pages.remaps += pieces;
        self.pages.aliased_bytes += bytes as i64;
        self.segment.change(from.0, runs);
        let bytes = bytes as i64;
        if from.0 != to.0 {
            self.reserved_bytes.move_between(from.0, to.0, bytes);
        }
        if from.1 != to.1 {
            if !from.1.is_default() {
                self.pools.entry(from.1).or_default().decrease(from.0, bytes);
            }
            if !to.1.is_default() {
                self.pools.entry(to.1).or_default().increase(to.0, bytes);
            }
        }
    }

    /// Promised bytes are handles now, mapped in `runs` more runs than before.
    pub(crate) fn pages_made(&mut self, promised: u64, handles: i64, to: (Part, PoolId), runs: i64) {
        self.growing -= promised;
        self.device_allocs += handles;
        self.segment.change(to.0, runs);
        self.reserved_bytes.increase(to.0, promised as i64);
        if !to.1.is_default() {
            self.pools.entry(to.1).or_default().increase(to.0, promised as i64);
        }
    }

    /// Bytes that are given up for a moment, to be taken again: nobody else may have them in between.
    pub(crate) fn promise(&mut self, bytes: u64) {
        self.growing += bytes;
    }

    /// They were not taken again.
    pub(crate) fn unpromise(&mut self, bytes: u64) {
        self.growing -= bytes;
    }

    /// A handle went back to the driver.
    pub(crate) fn page_released(&mut self, bytes: u64, part: Part, pool: PoolId) {
        self.device_frees += 1;
        self.released_generation += 1;
        self.reserved_bytes.decrease(part, bytes as i64);
        if !pool.is_default() {
            self.pools.entry(pool).or_default().decrease(part, bytes as i64);
        }
    }

    /// Bytes held from the driver or promised to growth under way.
    pub(crate) fn held(&self) -> u64 {
        self.reserved_bytes.all.current.max(0) as u64 + self.growing
    }

    pub(crate) fn peak_held(&self) -> u64 {
        self.reserved_bytes.all.peak.max(0) as u64
    }

    fn each(&mut self) -> impl Iterator<Item = &mut Stat> {
        let arrays = [&mut self.segment, &mut self.reserved_bytes].into_iter().chain(self.pools.values_mut());
        arrays.flat_map(StatArray::each).chain([&mut self.oversize_segments])
    }

    /// A pool is gone, and with it its figures: else they would pile up as pools come and go.
    pub(crate) fn forget_pool(&mut self, pool: PoolId) {
        if self.pools.get(&pool).is_some_and(|array| array.all.current == 0) {
            self.pools.remove(&pool);
        }
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.each().for_each(Stat::reset_peak);
    }

    pub(crate) fn reset_accumulated(&mut self) {
        self.each().for_each(Stat::reset_accumulated);
        self.alloc_retries = 0;
        self.ooms = 0;
        self.oom_rejections = 0;
        self.syncs = 0;
        self.device_allocs = 0;
        self.device_frees = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    /// What is held four times over.
    const ENOUGH: u64 = 32;

    fn grow(totals: &Totals, bytes: u64) {
        totals.begin_growth(bytes, false).unwrap();
        totals.commit(bytes, Part::Large, PoolId::DEFAULT);
    }

    #[test]
    fn what_was_traded_a_few_times_over_is_grown_instead_as_far_as_it_was_paid_for() {
        let totals = Totals::new(None, u64::MAX, None, 10_000 * MIB, ENOUGH);
        grow(&totals, 100 * MIB);
        (0..399).for_each(|_| totals.traded(MIB));
        assert!(!totals.has_traded_enough(MIB));
        (0..81).for_each(|_| totals.traded(MIB));
        let mut grown = 0;
        while totals.has_traded_enough(MIB) {
            grow(&totals, MIB);
            grown += 1;
        }
        // What is held has risen too, and so has what must be traded.
        assert_eq!(grown, 80 / (PRICE + ENOUGH / 8) + 1);
    }

    #[test]
    fn what_takes_the_place_of_what_was_given_back_is_not_paid_for() {
        let totals = Totals::new(None, u64::MAX, None, 10_000 * MIB, ENOUGH);
        grow(&totals, 100 * MIB);
        totals.traded(400 * MIB);
        totals.released(50 * MIB, Part::Large, PoolId::DEFAULT);
        grow(&totals, 50 * MIB);
        assert!(totals.has_traded_enough(MIB));
    }

    #[test]
    fn memory_that_is_short_is_traded_for_ever() {
        let limit = Some(Limit { bytes: 1_000 * MIB, source: LimitSource::User });
        for (limit, device) in [(None, 1_000 * MIB), (limit, 10_000 * MIB)] {
            let totals = Totals::new(limit, u64::MAX, None, device, ENOUGH);
            grow(&totals, 740 * MIB);
            totals.traded(100_000 * MIB);
            assert!(totals.has_traded_enough(9 * MIB));
            assert!(!totals.has_traded_enough(11 * MIB));
            // What others have taken of the device is known by what the driver says.
            totals.begin_growth(MIB, false).unwrap();
            totals.cancel(MIB);
            assert!(!totals.has_traded_enough(0));
        }
    }
}
