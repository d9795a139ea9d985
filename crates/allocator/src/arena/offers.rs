//! Which idle segments an arena has, and what others see of that without its lock.
//!
//! A request that finds nothing in its own arena may be served by an idle segment of another stream. To look for one it would have to take
//! the lock of every arena, so that threads with a stream each would meet at every miss. So each arena **offers** what it has: a bit for each
//! class of sizes, two to a power, that is set as long as there is an idle segment of that class. Who looks for one takes the lock of an
//! arena only if that has one that may fit.
//!
//! Segments come and go with every other block of a training step, and the list is read only at a miss. So it has no order: who reads it sorts
//! what was found. Each class is a ring of links that begins at the class itself, so that coming and going are a handful of stores each, without
//! a turn that could be mispredicted, and a class is empty once what is taken out has the class on both sides.
//!
//! * **O1** The rings have each segment that is one free block, and nothing else, in the ring of its part and class; nothing where the policy
//!   does not [trade](super::ArenaRules::trades).
//! * **O2** Whenever the arena's lock is free, the bits are those of the list, and its bytes are said beside them.
//!
//! Binned blocks keep their segment from being idle, so nothing is offered of it until the arena's own requests empty the bins.

use std::sync::Arc;

use crate::ids::Part;
use crate::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::units::{UNIT, Units};

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
    let size = size.max(1);
    let above = size.leading_zeros();
    // The highest bit and the next one are 2 or 3 together.
    60 + (size << above >> 30) - 2 * above
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

    /// A segment of this class came, of so many units. One writer at a time: whoever holds the arena's lock. Nothing is asked before it is
    /// written: the cache line is this thread's anyway.
    #[inline(always)]
    fn add(&self, part: Part, class: u32, size: Units) {
        let classes = &self.classes[part.index()];
        classes.store(classes.load(Relaxed) | 1 << class, Relaxed);
        self.units.store(self.units.load(Relaxed).wrapping_add(size.into()), Relaxed);
    }

    /// One went; `left` is the class if it was the last one of it.
    #[inline(always)]
    fn take_off(&self, part: Part, left: Option<u32>, size: Units) {
        let classes = &self.classes[part.index()];
        classes.store(classes.load(Relaxed) & !left.map_or(0, |class| 1 << class), Relaxed);
        self.units.store(self.units.load(Relaxed).wrapping_sub(size.into()), Relaxed);
    }
}

/// What stands before a segment, or a class, in its ring and what comes after it: places in [`IdleSegments::links`].
#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    after: u32,
}

/// Classes of each part.
const CLASSES: u32 = 64;
/// Where the rings begin: the links of the classes, part by part. Behind them are those of the segments.
const HEADS: u32 = 2 * CLASSES;
/// Rings of nothing: each class is linked with itself.
static EMPTY: [Link; HEADS as usize] = {
    let (mut links, mut at) = ([Link { before: 0, after: 0 }; HEADS as usize], 0);
    while at < HEADS {
        links[at as usize] = Link { before: at, after: at };
        at += 1;
    }
    links
};
/// So many links behind the last segment's are never used: then no other arena's thread writes to the cache lines (in pairs, as they are
/// fetched) that those in use lie on. What lies before them are classes of sizes that no segment has.
const APART: usize = 128 / size_of::<Link>();

/// The idle segments of an arena, by class. Under the arena's lock.
#[derive(Debug, Default)]
pub(crate) struct IdleSegments {
    /// Of each class, and then of each segment by its index. Nothing before the first one comes.
    links: Vec<Link>,
    offers: Arc<Offers>,
}

impl IdleSegments {
    /// What others see of it.
    pub(crate) fn offers(&self) -> &Arc<Offers> {
        &self.offers
    }

    /// A segment is one free block now. O(1).
    #[inline(never)]
    pub(super) fn came(&mut self, part: Part, size: Units, segment: u32) {
        let (class, at) = (class_of(size), HEADS + segment);
        if at as usize >= self.links.len() {
            return self.came_first(part, size, segment);
        }
        let head = part.index() as u32 * CLASSES + class;
        let links = self.links.as_mut_slice();
        let after = std::mem::replace(&mut links[head as usize].after, at);
        links[after as usize].before = at;
        links[at as usize] = Link { before: head, after };
        self.offers.add(part, class, size);
    }

    /// It is used, or gone. O(1).
    #[inline(never)]
    pub(super) fn went(&mut self, part: Part, size: Units, segment: u32) {
        let links = self.links.as_mut_slice();
        let Link { before, after } = links[(HEADS + segment) as usize];
        debug_assert_eq!(links[before as usize].after, HEADS + segment, "segment {segment} is not listed as idle");
        links[before as usize].after = after;
        links[after as usize].before = before;
        // Only the class itself can stand on both sides.
        let left = (before == after).then_some(before % CLASSES);
        self.offers.take_off(part, left, size);
    }

    /// As [`came`](Self::came), of a segment that has no link yet.
    #[cold]
    #[inline(never)]
    fn came_first(&mut self, part: Part, size: Units, segment: u32) {
        if self.links.is_empty() {
            self.links.reserve_exact(EMPTY.len() + 2 * APART);
            self.links.extend_from_slice(&EMPTY);
        }
        let links = ((HEADS + segment) as usize + 1).next_multiple_of(APART);
        if links + APART > self.links.capacity() {
            // Doubling, as a list does.
            self.links.reserve(links + APART - self.links.len());
        }
        self.links.resize(links, EMPTY[0]);
        self.came(part, size, segment);
    }

    /// Each of them, in no order that means anything. O(them).
    pub(crate) fn segments(&self) -> impl Iterator<Item = u32> + '_ {
        Part::ALL.into_iter().flat_map(move |part| {
            let mut classes = self.offers.classes[part.index()].load(Relaxed);
            let classes = std::iter::from_fn(move || {
                let class = (classes != 0).then_some(classes.trailing_zeros());
                classes &= classes.wrapping_sub(1);
                class
            });
            classes.flat_map(move |class| self.of_class(part, class))
        })
    }

    /// Those of one part and class, in no order that means anything. O(them).
    pub(crate) fn of_class(&self, part: Part, class: u32) -> impl Iterator<Item = u32> + '_ {
        let head = part.index() as u32 * CLASSES + class;
        let next = |at: u32| self.links.get(at as usize).map(|link| link.after).filter(|at| *at >= HEADS);
        std::iter::successors(next(head), move |at| next(*at)).map(|at| at - HEADS)
    }

    /// Checks O1 and O2 against what there is: part, size and index of each idle segment.
    pub(super) fn validate(&self, real: &[(Part, Units, u32)]) -> Result<(), String> {
        let links = |at: u32| self.links.get(at as usize).map(|link| (link.before, link.after));
        let heads = (0..HEADS).filter(|_| !self.links.is_empty());
        for at in heads.chain(real.iter().map(|(_, _, segment)| HEADS + segment)) {
            let both = links(at).and_then(|(before, after)| Some((links(before)?.1, links(after)?.0)));
            if both != Some((at, at)) {
                return Err(format!("O1: beside link {at}, which is {:?}, are {both:?}", links(at)));
            }
        }
        let (mut wanted, mut bits) = (Vec::new(), [0_u64; 2]);
        for (part, size, segment) in real {
            wanted.push((*part, class_of(*size), *segment));
            bits[part.index()] |= 1 << class_of(*size);
        }
        // All that is linked leads back to where it came from, so this ends.
        let classes = Part::ALL.into_iter().flat_map(|part| (0..CLASSES).map(move |class| (part, class)));
        let listed = classes.flat_map(|(part, class)| self.of_class(part, class).map(move |at| (part, class, at)));
        let mut listed: Vec<_> = listed.collect();
        listed.sort_unstable();
        wanted.sort_unstable();
        if listed != wanted {
            return Err(format!("O1: {listed:?} are listed as idle, {wanted:?} are"));
        }
        let bytes = real.iter().map(|(_, size, _)| u64::from(*size) * UNIT).sum::<u64>();
        if self.offers.bytes() != bytes {
            return Err(format!("O2: {} bytes are offered and {bytes} are there", self.offers.bytes()));
        }
        for part in Part::ALL {
            let (offered, bits) = (self.offers.classes[part.index()].load(Relaxed), bits[part.index()]);
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
        let (mut idle, mut real, mut vacant) = (IdleSegments::default(), Vec::new(), Vec::new());
        idle.validate(&real).unwrap();
        let mut x = 0x2545_F491_4F6C_DD1D_u64;
        for round in 0..2_000_u32 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let part = Part::ALL[(x >> 40) as usize % 2];
            if x.is_multiple_of(2) && !real.is_empty() {
                let (part, size, segment) = real.swap_remove((x >> 8) as usize % real.len());
                idle.went(part, size, segment);
                vacant.push(segment);
            } else {
                let (size, segment) = (1 + (x >> 16) as u32 % 50_000, vacant.pop().unwrap_or(round));
                real.push((part, size, segment));
                idle.came(part, size, segment);
            }
            idle.validate(&real).unwrap();
            assert_eq!(idle.segments().count(), real.len());
            let wanted = 1 + (x >> 20) as u32 % 60_000;
            let classes = idle.offers().at_least(part, wanted);
            let fits = |(of, size, _): &(Part, Units, u32)| *of == part && *size >= wanted;
            assert!(classes != 0 || !real.iter().any(fits));
            let found: Vec<_> =
                (0..64).filter(|c| classes >> c & 1 == 1).flat_map(|c| idle.of_class(part, c)).collect();
            assert!(real.iter().filter(|idle| fits(idle)).all(|(_, _, segment)| found.contains(segment)));
        }
    }
}
