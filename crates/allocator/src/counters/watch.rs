//! What figures may be without anybody looking closer.

use crate::ids::Part;

/// What a figure may be without being anything new: at most what its [`Peak`](crate::peaks::Peak)s say, so that one comparison can stand for
/// several of them.
#[derive(Debug, Default)]
pub(super) struct Watch {
    parts: [i64; 2],
    /// What the small part may be without both together being anything new, as the large one is now: so the shortest way, which is of the small
    /// part alone, need not look at the large one.
    beside_large: i64,
}

impl Watch {
    /// What each part may be, and both together where so much of it is large.
    pub(super) fn set(&mut self, parts: [i64; 2], all: i64, large: i64) {
        (self.parts, self.beside_large) = (parts, all - large);
    }

    /// So much came to a part, or went.
    #[inline(always)]
    pub(super) fn changed(&mut self, part: Part, n: i64) {
        // Who calls knows the part.
        if part == Part::Large {
            self.beside_large -= n;
        }
    }

    /// So much of another figure, which adds to a part of this one in a peak, is new: by so much less may this one grow.
    pub(super) fn lower(&mut self, part: Part, n: i64) {
        self.parts[part.index()] -= n;
        self.beside_large -= n;
    }

    /// Whether a part, by being `here`, may be something new, the small part being `small`.
    #[inline(always)]
    pub(super) fn is_passed(&self, part: Part, here: i64, small: i64) -> bool {
        (here > self.parts[part.index()]) | (small > self.beside_large)
    }
}

/// What an arena's figures may be. Behind the arena's lock, and not beside the figures: nobody else looks, so that they are plain numbers.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    pub(super) allocation: Watch,
    pub(super) allocated_bytes: Watch,
    pub(super) inactive_split: Watch,
    pub(super) inactive_split_bytes: Watch,
}
