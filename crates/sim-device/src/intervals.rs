//! A map from ranges of numbers to values.
//!
//! # Invariants
//!
//! * **V1** Intervals do not overlap and none is empty.
//! * **V2** Neighbours that [continue](Piecewise::continues) each other are one interval.

use std::collections::BTreeMap;

/// A value that covers a range and can be cut.
pub(crate) trait Piecewise: Clone {
    /// The value of what is left once `bytes` are cut off the front.
    fn after(&self, _bytes: u64) -> Self {
        self.clone()
    }

    /// Whether `next`, lying right behind `bytes` of this value, is the same value going on.
    fn continues(&self, bytes: u64, next: &Self) -> bool;
}

/// Values by range.
#[derive(Clone, Debug)]
pub(crate) struct IntervalMap<V> {
    /// By start: end and value.
    map: BTreeMap<u64, (u64, V)>,
}

impl<V> Default for IntervalMap<V> {
    fn default() -> Self {
        Self { map: BTreeMap::new() }
    }
}

impl<V: Piecewise> IntervalMap<V> {
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &V> + '_ {
        self.map.values().map(|(_, value)| value)
    }

    /// The intervals that meet `[start, end)`, whole: start, end, value.
    fn meeting(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, &V)> + '_ {
        let first = self.map.range(..=start).next_back().map_or(start, |(&s, _)| s);
        let meets = move |&(_, e, _): &(u64, u64, &V)| e > start;
        self.map.range(first..end.max(first)).map(|(&s, (e, v))| (s, *e, v)).filter(meets)
    }

    /// The intervals of `[start, end)`, cut to it.
    pub(crate) fn within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, V)> + '_ {
        self.meeting(start, end).map(move |(s, e, v)| {
            let from = s.max(start);
            (from, e.min(end), v.after(from - s))
        })
    }

    /// The intervals of `[start, end)` and the gaps between them, cut to it.
    pub(crate) fn cover(&self, start: u64, end: u64) -> Vec<(u64, u64, Option<V>)> {
        let mut cover = Vec::new();
        let mut at = start;
        for (s, e, v) in self.within(start, end) {
            if at < s {
                cover.push((at, s, None));
            }
            cover.push((s, e, Some(v)));
            at = e;
        }
        if at < end {
            cover.push((at, end, None));
        }
        cover
    }

    /// Cuts the interval that lies across `at`.
    fn split(&mut self, at: u64) {
        let Some((&start, (end, value))) = self.map.range_mut(..at).next_back() else { return };
        if *end > at {
            let rest = (*end, value.after(at - start));
            *end = at;
            self.map.insert(at, rest);
        }
    }

    /// Forgets `[start, end)`.
    pub(crate) fn remove(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        self.split(start);
        self.split(end);
        while let Some((&s, _)) = self.map.range(start..end).next() {
            self.map.remove(&s);
        }
    }

    /// Sets `[start, end)`.
    pub(crate) fn set(&mut self, start: u64, end: u64, value: V) {
        if start >= end {
            return;
        }
        self.remove(start, end);
        let (mut end, mut value) = (end, value);
        if let Some((&next, (next_end, next_value))) = self.map.range(end..).next()
            && next == end
            && value.continues(end - start, next_value)
        {
            let whole = *next_end;
            self.map.remove(&end);
            end = whole;
        }
        if let Some((&before, (before_end, before_value))) = self.map.range_mut(..start).next_back()
            && *before_end == start
            && before_value.continues(start - before, &value)
        {
            value = before_value.clone();
            self.map.insert(before, (end, value));
            return;
        }
        self.map.insert(start, (end, value));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, PartialEq, Debug)]
    struct Ramp(u64);

    impl Piecewise for Ramp {
        fn after(&self, bytes: u64) -> Self {
            Self(self.0 + bytes)
        }

        fn continues(&self, bytes: u64, next: &Self) -> bool {
            self.0 + bytes == next.0
        }
    }

    proptest! {
        /// V1, V2: the map agrees with an array, and never keeps two intervals where one would do.
        #[test]
        fn it_is_an_array_with_few_pieces(ops in prop::collection::vec((0_u64..64, 0_u64..20, prop::option::of(0_u64..80)), 1..60)) {
            let mut map = IntervalMap::default();
            let mut array = vec![None; 100];
            for (start, length, value) in ops {
                match value {
                    Some(v) => map.set(start, start + length, Ramp(v)),
                    None => map.remove(start, start + length),
                }
                for i in 0..length {
                    array[(start + i) as usize] = value.map(|v| v + i);
                }
                let cover = map.cover(0, 100);
                let mut at = 0;
                for (s, e, v) in &cover {
                    prop_assert_eq!(*s, at);
                    prop_assert!(s < e);
                    for i in *s..*e {
                        prop_assert_eq!(array[i as usize], v.as_ref().map(|v| v.0 + (i - s)));
                    }
                    at = *e;
                }
                prop_assert_eq!(at, 100);
                for pair in map.map.iter().collect::<Vec<_>>().windows(2) {
                    let ((s, (e, v)), (next, (_, w))) = (pair[0], pair[1]);
                    prop_assert!(e <= next);
                    prop_assert!(!(e == next && v.continues(e - s, w)));
                }
                let part: u64 = map.within(10, 40).map(|(s, e, _)| e - s).sum();
                prop_assert_eq!(part, array[10..40].iter().flatten().count() as u64);
            }
        }
    }
}
