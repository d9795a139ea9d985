//! Which idle segments an arena has, and what others see of that without its lock.
//!
//! A request that finds nothing in its own arena may be served by an idle segment of another stream. To look for one it would have to take
//! the lock of every arena, so that threads with a stream each would meet at every miss. So each arena **offers** what it has: a bit for each
//! class of sizes, two to a power, that is set as long as there is an idle segment of that class. Who looks for one takes the lock of an
//! arena only if that has one that may fit.
//!
//! * **O1** The list has each segment that is one free block, and nothing else, in the order of sizes; nothing where the policy does not
//!   [trade](super::ArenaRules::trades).
//! * **O2** Whenever the arena's lock is free, the bits are those of the list, and its bytes are said beside them.
//!
//! Binned blocks keep their segment from being idle, so nothing is offered of it until the arena's own requests empty the bins.

use std::sync::Arc;

use crate::ids::Part;
use crate::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::units::{UNIT, Units};

use super::BlockId;

/// What others see of an arena's idle segments. On cache lines of its own: it is written when a segment becomes idle or is used.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Offers {
    /// Of each part.
    classes: [AtomicU64; 2],
    /// Of all idle segments together, in units.
    units: AtomicU64,
    /// Whether a stream of the arena was retired.
    retired: AtomicBool,
}

/// The class of a size: its power of two, and which half of it.
fn class_of(size: Units) -> u32 {
    let power = size.max(1).ilog2();
    2 * power + if power > 0 { size >> (power - 1) & 1 } else { 0 }
}

impl Offers {
    /// The classes of idle segments in which one of at least `size` may be, as bits.
    pub(crate) fn at_least(&self, part: Part, size: Units) -> u64 {
        self.classes[part.index()].load(Relaxed) & (u64::MAX << class_of(size))
    }

    /// Whether there is an idle segment of this class.
    pub(crate) fn has(&self, part: Part, class: u32) -> bool {
        self.classes[part.index()].load(Relaxed) >> class & 1 == 1
    }

    /// Whether there is any idle segment.
    pub(crate) fn any(&self) -> bool {
        self.classes.iter().any(|classes| classes.load(Relaxed) != 0)
    }

    /// Bytes of all idle segments.
    pub(crate) fn bytes(&self) -> u64 {
        self.units.load(Relaxed) * UNIT
    }

    /// A stream of the arena was retired.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Release);
    }

    /// Whether a stream of the arena was retired.
    pub(crate) fn are_of_retired(&self) -> bool {
        self.retired.load(Acquire)
    }

    /// One writer at a time, as of the bits.
    fn count(&self, size: Units, came: bool) {
        let before = self.units.load(Relaxed);
        let after = if came { before + u64::from(size) } else { before.saturating_sub(size.into()) };
        self.units.store(after, Relaxed);
    }

    fn set(&self, part: Part, class: u32, on: bool) {
        let (classes, bit) = (&self.classes[part.index()], 1 << class);
        // One writer at a time: whoever holds the arena's lock.
        let before = classes.load(Relaxed);
        let after = if on { before | bit } else { before & !bit };
        if before != after {
            classes.store(after, Relaxed);
        }
    }
}

/// The idle segments of an arena, by size. Under the arena's lock.
#[derive(Debug, Default)]
pub(crate) struct IdleSegments {
    /// Of each part: the size and the one block of each.
    by_size: [Vec<(Units, BlockId)>; 2],
    offers: Arc<Offers>,
}

impl IdleSegments {
    /// What others see of it.
    pub(crate) fn offers(&self) -> &Arc<Offers> {
        &self.offers
    }

    /// A segment is one free block now. O(log n).
    #[inline(never)]
    pub(super) fn came(&mut self, part: Part, size: Units, block: BlockId) {
        let list = &mut self.by_size[part.index()];
        let at = list.partition_point(|entry| *entry < (size, block));
        list.insert(at, (size, block));
        self.offers.count(size, true);
        self.offers.set(part, class_of(size), true);
    }

    /// It is used, or gone. O(log n).
    #[inline(never)]
    pub(super) fn went(&mut self, part: Part, size: Units, block: BlockId) {
        let list = &mut self.by_size[part.index()];
        let at = list.partition_point(|entry| *entry < (size, block));
        if list.get(at) == Some(&(size, block)) {
            list.remove(at);
            self.offers.count(size, false);
        }
        let class = class_of(size);
        let same = |entry: Option<&(Units, BlockId)>| entry.is_some_and(|(size, _)| class_of(*size) == class);
        if !same(list.get(at)) && !same(at.checked_sub(1).and_then(|before| list.get(before))) {
            self.offers.set(part, class, false);
        }
    }

    /// The one block of each, part by part and the smallest first.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.by_size.iter().flatten().map(|(_, block)| *block)
    }

    /// Those of one part and class, the smallest first.
    pub(crate) fn of_class(&self, part: Part, class: u32) -> impl Iterator<Item = BlockId> + '_ {
        let list = &self.by_size[part.index()];
        let first = list.partition_point(|(size, _)| class_of(*size) < class);
        list[first..].iter().take_while(move |(size, _)| class_of(*size) == class).map(|(_, block)| *block)
    }

    /// Checks O1 and O2 against what there is: part, size and block of each idle segment.
    pub(super) fn validate(&self, mut real: Vec<(Part, Units, BlockId)>) -> Result<(), String> {
        real.sort_unstable();
        let listed = Part::ALL
            .iter()
            .flat_map(|part| self.by_size[part.index()].iter().map(|(size, block)| (*part, *size, *block)));
        let mut listed: Vec<_> = listed.collect();
        if self.by_size.iter().any(|list| !list.is_sorted()) {
            return Err(format!("O1: the list of idle segments is out of order: {:?}", self.by_size));
        }
        listed.sort_unstable();
        if listed != real {
            return Err(format!("O1: {listed:?} are listed as idle, {real:?} are"));
        }
        let bytes = real.iter().map(|(_, size, _)| u64::from(*size) * UNIT).sum::<u64>();
        if self.offers.bytes() != bytes {
            return Err(format!("O2: {} bytes are offered and {bytes} are there", self.offers.bytes()));
        }
        for part in Part::ALL {
            let sizes = real.iter().filter(|(of, ..)| *of == part).map(|(_, size, _)| *size);
            let bits = sizes.fold(0_u64, |bits, size| bits | 1 << class_of(size));
            let offered = self.offers.classes[part.index()].load(Relaxed);
            if offered != bits {
                return Err(format!("O2: {part} part offers {offered:#x} and has {bits:#x}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_grow_with_sizes_and_all_have_a_bit() {
        let mut before = 0;
        for size in
            (0..32).flat_map(|power| [1_u32 << power, (1 << power) + (1 << power) / 2, u32::MAX >> (31 - power)])
        {
            assert!(class_of(size) >= before && class_of(size) < 64, "{size}");
            before = class_of(size);
        }
    }

    #[test]
    fn what_is_offered_is_what_is_there() {
        let (mut idle, mut real) = (IdleSegments::default(), Vec::new());
        let mut x = 0x2545_F491_4F6C_DD1D_u64;
        for round in 0..2_000_u32 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let part = Part::ALL[(x >> 40) as usize % 2];
            if x.is_multiple_of(2) && !real.is_empty() {
                let (part, size, block) = real.swap_remove((x >> 8) as usize % real.len());
                idle.went(part, size, block);
            } else {
                let size = 1 + (x >> 16) as u32 % 50_000;
                real.push((part, size, round));
                idle.came(part, size, round);
            }
            idle.validate(real.clone()).unwrap();
            let wanted = 1 + (x >> 20) as u32 % 60_000;
            let classes = idle.offers().at_least(part, wanted);
            let fits = |(of, size, _): &(Part, Units, BlockId)| *of == part && *size >= wanted;
            assert!(classes != 0 || !real.iter().any(fits));
            let found: Vec<_> =
                (0..64).filter(|c| classes >> c & 1 == 1).flat_map(|c| idle.of_class(part, c)).collect();
            assert!(real.iter().filter(|idle| fits(idle)).all(|(_, _, block)| found.contains(block)));
        }
    }
}
