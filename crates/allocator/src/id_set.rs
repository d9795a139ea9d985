//! A set of pool ids that takes little room where ids are given out one after another.

use std::collections::BTreeMap;

use crate::ids::PoolId;

/// Pool ids, kept as runs of neighbours.
#[derive(Debug, Default)]
pub(crate) struct PoolIdSet {
    /// For each of the two numbers that an id may consist of: the first and last of each run.
    runs: [BTreeMap<u64, u64>; 2],
}

impl PoolIdSet {
    /// Which of the two numbers an id consists of, and the number. `None` for one that has both, which nobody gives out.
    fn place(id: PoolId) -> Option<(usize, u64)> {
        match (id.0, id.1) {
            (0, n) => Some((1, n)),
            (n, 0) => Some((0, n)),
            _ => None,
        }
    }

    /// O(log n) in the number of runs.
    pub(crate) fn contains(&self, id: PoolId) -> bool {
        let Some((which, n)) = Self::place(id) else { return false };
        self.runs[which].range(..=n).next_back().is_some_and(|(_, last)| n <= *last)
    }

    /// O(log n) in the number of runs.
    pub(crate) fn remove(&mut self, id: PoolId) {
        let Some((which, n)) = Self::place(id) else { return };
        let runs = &mut self.runs[which];
        let Some((first, last)) = runs.range(..=n).next_back().map(|(a, b)| (*a, *b)).filter(|(_, last)| n <= *last)
        else {
            return;
        };
        runs.remove(&first);
        if first < n {
            runs.insert(first, n - 1);
        }
        if n < last {
            runs.insert(n + 1, last);
        }
    }

    /// O(log n) in the number of runs.
    pub(crate) fn insert(&mut self, id: PoolId) {
        let Some((which, n)) = Self::place(id).filter(|_| !self.contains(id)) else { return };
        let runs = &mut self.runs[which];
        let first = match runs.range(..n).next_back() {
            Some((first, last)) if *last + 1 == n => *first,
            _ => n,
        };
        let last = n.checked_add(1).and_then(|next| runs.remove(&next)).unwrap_or(n);
        runs.insert(first, last);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn it_holds_what_was_put_in_and_neighbours_take_one_run() {
        let (mut set, mut model) = (PoolIdSet::default(), BTreeSet::new());
        let mut n = 1_u64;
        for _ in 0..2_000 {
            n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (value, user) = ((n >> 33) % 300, n >> 63 == 1);
            let id = if user { PoolId(0, value) } else { PoolId(value, 0) };
            if (n >> 40).is_multiple_of(3) {
                set.remove(id);
                model.remove(&id);
            } else {
                set.insert(id);
                model.insert(id);
            }
            for probe in 0..300 {
                for id in [PoolId(0, probe), PoolId(probe, 0)] {
                    assert_eq!(set.contains(id), model.contains(&id), "{id:?}");
                }
            }
        }
        let mut ends = PoolIdSet::default();
        [u64::MAX, 1, 3, u64::MAX - 1, 2].into_iter().for_each(|n| ends.insert(PoolId(n, 0)));
        assert_eq!(ends.runs[0], BTreeMap::from([(1, 3), (u64::MAX - 1, u64::MAX)]));
    }
}
