//! What serves a usual request, and how the answer gets to its owner.
//!
//! A handle that a call writes to memory is written in words of 8 bytes, and copied by its new owner in words of 16: a processor can do that only
//! once the words have left its store buffer, and it happened twice on the way to where the handle stays, a tenth of the time that a recording took.
//! So what a request finds is returned in two registers, as an [`Answer`], of which the caller's own code makes the handle.
//!
//! Every function here gives a hit, or else has changed nothing: then the request goes the longer ways (`Inner::alloc_past_hits`).

use std::num::NonZeroU64;

use gpupool_device::{Address, CaptureId, CaptureStatus, Device};

use crate::allocation::Allocation;
use crate::arena::{ArenaCore, BlockKey, Handed, Locked, NONE, NotedRoute, Source, Want, told, told_handed};
use crate::ids::Part;
use crate::inner::{Inner, SMALL_LIMIT};
use crate::shared::{CAPTURES, ROUNDS, SCOPES, Shared, UNUSUAL};
use crate::stream::Stream;
use crate::sync::QuickGuard;
use crate::units::{TAG_BITS, Units};

/// A block that was handed out, in two words.
#[derive(Clone, Copy)]
pub(crate) struct Hit {
    /// Its address, and in the bits that no address has ([`TAG_BITS`]) the [tag](ArenaCore::tag) of its arena's core; none in the stream's own arena.
    place: NonZeroU64,
    key: BlockKey,
}

impl Hit {
    /// In the stream's own arena, or in that of whoever makes the handle.
    #[inline(always)]
    fn new(handed: &Handed) -> Option<Self> {
        // No block has the address zero (`units::is_placeable`), so this is always one.
        let place = NonZeroU64::new(handed.address.0)?;
        Some(Self { place, key: handed.key })
    }

    /// In the arena of this core, of the first 65,535.
    #[inline(always)]
    fn in_arena(self, core: &ArenaCore) -> Self {
        Self { place: self.place | core.tag(), ..self }
    }

    /// The block's handle; `own` is the core of its arena, unless that was named.
    #[inline(always)]
    pub(crate) fn handle<D: Device>(self, own: &'static ArenaCore) -> Allocation<D> {
        let (core, address) = self.place(own);
        Allocation::at(core, address, self.key)
    }

    #[inline(always)]
    fn place(self, own: &'static ArenaCore) -> (&'static ArenaCore, Address) {
        let (tag, address) = (self.place.get() & TAG_BITS, self.place.get() & !TAG_BITS);
        (if tag == 0 { own } else { ArenaCore::tagged(tag) }, Address(address))
    }
}

/// There was no hit: what the driver said of the stream meanwhile, if it was asked.
#[derive(Clone, Copy)]
pub(crate) struct Missed(u64);

/// A hit, or not, as it is returned: a `Result` of them is two words too, but not for the compiler, which takes it through memory.
#[derive(Clone, Copy)]
pub(crate) struct Answer {
    /// That of a hit, or zero.
    place: u64,
    /// A hit's key, or what [`Missed`] says.
    word: u64,
}

impl Answer {
    /// No hit, and the driver was not asked.
    const MISSED: Self = Self { place: 0, word: Missed::UNASKED.0 };

    #[inline(always)]
    fn new(hit: Option<Hit>, missed: Missed) -> Self {
        match hit {
            Some(hit) => Self { place: hit.place.get(), word: hit.key.word() },
            None => Self { place: 0, word: missed.0 },
        }
    }

    /// What it says.
    #[inline(always)]
    pub(crate) fn hit(self) -> Result<Hit, Missed> {
        let key = BlockKey::of_word(self.word);
        NonZeroU64::new(self.place).map(|place| Hit { place, key }).ok_or(Missed(self.word))
    }
}

impl Missed {
    const UNASKED: Self = Self(0);
    const NO_CAPTURE: u64 = 1;
    const INVALIDATED: u64 = 2;
    /// What the ids of captures begin with.
    const CAPTURES: u64 = 3;

    #[inline(always)]
    fn asked(status: CaptureStatus) -> Self {
        Self(match status {
            CaptureStatus::None => Self::NO_CAPTURE,
            CaptureStatus::Invalidated => Self::INVALIDATED,
            // Of the last three ids there are, the driver would be asked again.
            CaptureStatus::Active(CaptureId(id)) => id.checked_add(Self::CAPTURES).unwrap_or(0),
        })
    }

    /// What the driver said.
    pub(crate) fn status(self) -> Option<CaptureStatus> {
        match self.0 {
            0 => None,
            Self::NO_CAPTURE => Some(CaptureStatus::None),
            Self::INVALIDATED => Some(CaptureStatus::Invalidated),
            id => Some(CaptureStatus::Active(CaptureId(id - Self::CAPTURES))),
        }
    }
}

impl Locked {
    /// As [`hand_out_of_index`](Self::hand_out_of_index), by itself: for who keeps much meanwhile.
    #[inline(never)]
    fn hit_in_index(&mut self, from: Source, want: Want) -> Option<Hit> {
        // Apart, so that what depends on the part is looked at once.
        Hit::new(&match want.part {
            Part::Small => self.hand_out_of_index(from, Want { part: Part::Small, ..want }),
            Part::Large => self.hand_out_of_index(from, Want { part: Part::Large, ..want }),
        }?)
    }
}

impl<D: Device> Inner<D> {
    /// A request by the shortest way, which is one function of machine code: `docs/hot-path.md` walks it.
    #[inline(never)]
    pub(crate) fn hit(&self, requested: u64, stream: &Stream<D>) -> Answer {
        // References first: they are not followed again after each look.
        let (shared, on, core) = (&*self.shared, &*stream.core, stream.arena.core);
        let unusual = shared.attention.get() & UNUSUAL;
        if !(self.is_usual(on, requested) && unusual & !CAPTURES == 0 && on.is_usable_by_all()) {
            return self.hit_beside(requested, stream);
        }
        if unusual != 0 {
            return self.hit_beside_captures(requested, stream);
        }
        let want = Shared::<D>::plain_want(requested, shared.rules.small_limit);
        if want.part == Part::Large {
            return Self::hit_large(requested, want.units, stream);
        }
        let Some(mut locked) = core.try_lock() else { return Self::hit_after_others(requested, want.units, stream) };
        match locked.hand_out_of_bin(stream.lane, want) {
            Some((handed, false)) => Answer::new(Hit::new(&handed), Missed::UNASKED),
            Some((handed, true)) => Self::hit_with_news(locked, Hit::new(&handed)),
            None => Self::hit_past_bin(requested, want.units, stream, locked),
        }
    }

    #[cold]
    #[inline(never)]
    fn hit_with_news(locked: QuickGuard<'_, Locked>, hit: Option<Hit>) -> Answer {
        told_handed::<D>(locked, Part::Small);
        Answer::new(hit, Missed::UNASKED)
    }

    // What a request wants is handed on in single words: more than that would come through memory.

    /// For a large block: from the free index.
    #[inline(never)]
    fn hit_large(requested: u64, units: Units, stream: &Stream<D>) -> Answer {
        Self::hit_of_part(stream, Want { part: Part::Large, units, requested }, stream.arena.core.lock())
    }

    /// For a small block that its bin does not have: from the free index.
    #[inline(never)]
    fn hit_past_bin(requested: u64, units: Units, stream: &Stream<D>, locked: QuickGuard<'_, Locked>) -> Answer {
        Self::hit_of_part(stream, Want { part: Part::Small, units, requested }, locked)
    }

    #[inline(always)]
    fn hit_of_part(stream: &Stream<D>, want: Want, mut locked: QuickGuard<'_, Locked>) -> Answer {
        let Some(handed) = locked.hand_out_of_index(Source::of(stream), want) else {
            return Answer::MISSED;
        };
        told::<D>(locked, &[]);
        Answer::new(Hit::new(&handed), Missed::UNASKED)
    }

    /// For a small block, where somebody else has the lock.
    #[cold]
    #[inline(never)]
    fn hit_after_others(requested: u64, units: Units, stream: &Stream<D>) -> Answer {
        let want = Want { part: Part::Small, units, requested };
        Answer::new(Self::hit_at(Source::of(stream), want, stream.arena.core.lock()), Missed::UNASKED)
    }

    /// Where the shortest way is not open: requests are rounded as configured, scopes are open, or the stream is the calling thread's own.
    #[inline(never)]
    fn hit_beside(&self, requested: u64, stream: &Stream<D>) -> Answer {
        let unusual = self.shared.attention.get() & UNUSUAL & !ROUNDS;
        if !self.is_usual_rounded(&stream.core, requested) || !stream.core.is_usable() {
            return Answer::MISSED;
        }
        match unusual {
            0 => self.hit_outside_captures(requested, stream, Missed::UNASKED),
            SCOPES => self.hit_under_scopes(requested, stream),
            CAPTURES => self.hit_beside_captures(requested, stream),
            _ => Answer::MISSED,
        }
    }

    #[inline(never)]
    fn hit_outside_captures(&self, requested: u64, stream: &Stream<D>, missed: Missed) -> Answer {
        let want = self.shared.want(requested, self.shared.rules.small_limit);
        Answer::new(Self::hit_at(Source::of(stream), want, stream.arena.core.lock()), missed)
    }

    /// While scopes are open and no capture is: from where they sent the stream's last request, if none was opened or closed since.
    #[inline(never)]
    fn hit_under_scopes(&self, requested: u64, stream: &Stream<D>) -> Answer {
        Answer::new(self.hit_as_claimed(requested, stream), Missed::UNASKED)
    }

    #[inline(always)]
    fn hit_as_claimed(&self, requested: u64, stream: &Stream<D>) -> Option<Hit> {
        // Read before the lane: a scope that this thread has closed, or opened, is counted.
        let version = self.shared.context.scopes.version();
        let NotedRoute { core, lane } = stream.core.route.get()?;
        // Somebody else there is rare: the long way waits.
        let locked = core.try_lock().filter(|locked| locked.state.is_claimed(lane, &stream.core, version))?;
        let is_default = std::ptr::eq(core, stream.arena.core);
        let small = if is_default { self.shared.rules.small_limit } else { SMALL_LIMIT };
        let hit = Self::hit_at(Source { lane, neutral: NONE }, self.shared.want(requested, small), locked)?;
        Some(hit.in_arena(core))
    }

    /// While captures may be under way: from where the route leads of the capture that the stream is in.
    #[inline(never)]
    fn hit_beside_captures(&self, requested: u64, stream: &Stream<D>) -> Answer {
        let Ok(status) = self.shared.driver.capture_status(stream.core.handle) else {
            return Answer::MISSED;
        };
        let missed = Missed::asked(status);
        match status {
            CaptureStatus::Active(capture) => Answer::new(self.hit_in_capture(requested, stream, capture), missed),
            CaptureStatus::None => self.hit_outside_captures(requested, stream, missed),
            CaptureStatus::Invalidated => Answer::new(None, missed),
        }
    }

    #[inline(always)]
    fn hit_in_capture(&self, requested: u64, stream: &Stream<D>, capture: CaptureId) -> Option<Hit> {
        let NotedRoute { core, lane } = stream.core.route.get()?;
        // Somebody else in the pool's arena is rare: the long way waits there, and looks up anew what may have changed meanwhile.
        let locked = core.try_lock()?;
        let neutral = locked.neutral_beside(lane, &stream.core, capture)?;
        let hit = Self::hit_at(Source { lane, neutral }, self.shared.want(requested, SMALL_LIMIT), locked)?;
        Some(hit.in_arena(core))
    }

    /// A block from a bin there, or from the free index; tells what has to be told.
    #[inline(always)]
    pub(crate) fn hit_at(from: Source, want: Want, mut locked: QuickGuard<'_, Locked>) -> Option<Hit> {
        if want.part == Part::Small
            && let Some((handed, news)) = locked.hand_out_of_bin(from.lane, want)
        {
            if news {
                told_handed::<D>(locked, want.part);
            }
            return Hit::new(&handed);
        }
        let hit = locked.hit_in_index(from, want)?;
        told::<D>(locked, &[]);
        Some(hit)
    }
}

#[cfg(all(test, not(gpupool_shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_said_is_not_asked_again() {
        let captures = [0, 1, 2, 3, u64::MAX - 3].map(|id| CaptureStatus::Active(CaptureId(id)));
        let said = captures.into_iter().chain([CaptureStatus::None, CaptureStatus::Invalidated]);
        said.for_each(|status| assert_eq!(Missed::asked(status).status(), Some(status)));
        assert_eq!(Missed::UNASKED.status(), None);
        assert_eq!(Missed::asked(CaptureStatus::Active(CaptureId(u64::MAX))).status(), None);
    }

    #[test]
    fn a_hit_names_any_of_the_first_cores_beside_any_address() {
        let own = ArenaCore::numbered(7);
        let key = BlockKey::new(u32::MAX - 1, u32::MAX);
        for address in [256, 512, 0x7F12_3456_7800, (1 << 56) - 256] {
            let handed = Handed { key, address: Address(address), bytes: 512 };
            let hit = Hit::new(&handed).unwrap();
            let (core, found) = hit.place(own);
            assert!(std::ptr::eq(core, own) && found.0 == address);
            for number in [1, 255, 256, 0x1234, u16::MAX] {
                let there = ArenaCore::numbered(number);
                let (core, found) = hit.in_arena(there).place(own);
                assert!(std::ptr::eq(core, there) && found.0 == address, "{number} and {address:#x}");
            }
        }
        assert_eq!((key.id(), key.generation()), (u32::MAX - 1, u32::MAX));
    }
}
