//! Size classes, and the two-level bitmap that finds the next class with something in it.
//!
//! A class holds the sizes `[m * 2^e, (m + 1) * 2^e)` units with `m` in 256..512 (and each size below 512 its own class): 0.4% wide, so that
//! the trees of classes stay shallow: each of their nodes is another cache line. Class numbers grow with size, so "the next non-empty class" is
//! one bit scan in a word of 64 and one in a word of 128.

use crate::units::Units;

const MANTISSA_BITS: u32 = 8;
/// Classes of sizes with the same highest bit.
pub(crate) const PER_POWER: usize = 1 << MANTISSA_BITS;
/// Bits in a word of the bitmap.
const PER_ROW: usize = 64;

/// The classes below this one hold one size each.
pub(crate) const OF_ONE_SIZE: usize = 2 * PER_POWER;

/// The class that a size belongs to.
#[inline(always)]
pub(crate) const fn class_of(size: Units) -> usize {
    // Sizes below `PER_POWER` are their own class: no branch, which would be one that nobody can predict.
    let exponent = (size | PER_POWER as u32).ilog2() - MANTISSA_BITS;
    exponent as usize * PER_POWER + (size >> exponent) as usize
}

/// Which classes are non-empty.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClassBitmap {
    /// Which words of `columns` are not zero.
    rows: [u64; 2],
    /// A bit a class, up to the largest that there is [room](Self::make_room) for.
    columns: Vec<u64>,
}

impl ClassBitmap {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.rows == [0; 2]
    }

    /// Makes room for so many classes.
    pub(crate) fn make_room(&mut self, classes: usize) {
        self.columns.resize(classes.div_ceil(PER_ROW), 0);
    }

    /// Notes that a class holds something, for which there is room.
    #[inline(always)]
    pub(crate) fn set(&mut self, class: usize) {
        let row = class / PER_ROW;
        self.rows[row / PER_ROW] |= 1 << (row % PER_ROW);
        self.columns[row] |= 1 << (class % PER_ROW);
    }

    /// Notes whether a class holds nothing any more, which held something. Without a branch: that it does nobody can predict.
    #[inline(always)]
    pub(crate) fn clear_if(&mut self, class: usize, is_empty: bool) {
        let row = class / PER_ROW;
        let column = &mut self.columns[row];
        *column &= !(u64::from(is_empty) << (class % PER_ROW));
        self.rows[row / PER_ROW] &= !(u64::from(*column == 0) << (row % PER_ROW));
    }

    /// The first non-empty class at or above `class`.
    #[inline(always)]
    pub(crate) fn next(&self, class: usize) -> Option<usize> {
        let row = class / PER_ROW;
        let here = self.columns.get(row)? & (!0u64 << (class % PER_ROW));
        if here != 0 {
            return Some(row * PER_ROW + here.trailing_zeros() as usize);
        }
        let rows = u128::from(self.rows[0]) | u128::from(self.rows[1]) << PER_ROW;
        let above = rows & (!1u128 << row);
        let row = above.trailing_zeros() as usize;
        Some(row * PER_ROW + self.columns.get(row)?.trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASSES: usize = (32 - MANTISSA_BITS as usize + 1) * PER_POWER;

    #[test]
    fn classes_grow_with_size_and_cover_all_sizes() {
        let mut last = 0;
        for size in
            (1..100_000u32).chain((0..32).map(|b| 1 << b)).chain([u32::MAX]).collect::<std::collections::BTreeSet<_>>()
        {
            let class = class_of(size);
            assert!(class >= last && class < CLASSES, "{size} -> {class} after {last}");
            last = class;
        }
        assert_eq!(class_of(63), 63);
        assert_eq!(class_of(64), 64);
        assert_eq!(class_of(511), OF_ONE_SIZE - 1);
        assert_eq!(class_of(512), 512);
        assert_eq!(class_of(513), 512);
        assert_eq!(class_of(514), 513);
    }

    #[test]
    fn next_finds_the_nearest_set_class() {
        let mut b = ClassBitmap::default();
        assert_eq!(b.next(0), None);
        b.make_room(CLASSES);
        assert_eq!(b.next(0), None);
        for c in [3, 40, 41, CLASSES - 1] {
            b.set(c);
        }
        assert_eq!(b.next(0), Some(3));
        assert_eq!(b.next(4), Some(40));
        assert_eq!(b.next(41), Some(41));
        assert_eq!(b.next(42), Some(CLASSES - 1));
        b.clear_if(CLASSES - 1, false);
        assert_eq!(b.next(42), Some(CLASSES - 1));
        b.clear_if(CLASSES - 1, true);
        assert_eq!(b.next(42), None);
        assert_eq!(b.next(CLASSES), None);
    }
}
