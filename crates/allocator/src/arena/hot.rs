//! The shortest way through an arena: a request that its bin serves, and a free that its bin takes.
//!
//! Each looks at everything once and writes what changes, with all that it calls put into it (`inline(always)` here, in `bins.rs` and in
//! `counters.rs`). Every unusual turn leaves it for good: nothing is called in between that comes back, since then what is needed after
//! it would have to be kept for all (50 instructions a pair). Whatever is unusual is left to the long way (`place.rs`, `free.rs`), which
//! does the same and more. `docs/hot-path.md` walks both, with the cost of each step.

use std::sync::Arc;

use gpupool_device::{CaptureId, Device};

use super::{Arena, BlockId, BlockKey, BlockState, Handed, LaneKind, Locked, NONE};
use crate::events::SHARE_BLOCKS;
use crate::ids::Part;
use crate::shared::{FREES_APART, RECORDS};
use crate::stream::{Stream, StreamCore};
use crate::sync::QuickGuard;
use crate::units::{Units, to_bytes};

/// What makes a free unusual.
const UNUSUAL_FREE: u8 = RECORDS | FREES_APART;

/// Where a request that nothing unusual concerns is served from: the small lanes, beside which the large ones lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    /// Its stream's.
    pub(crate) lane: u32,
    /// In a capture the pool's neutral one, else [`NONE`].
    pub(crate) neutral: u32,
}

impl Source {
    /// Outside captures.
    #[inline(always)]
    pub(crate) fn of<D: Device>(stream: &Stream<D>) -> Self {
        Self { lane: stream.lane, neutral: NONE }
    }
}

/// What a request wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    pub(crate) part: Part,
    /// Rounded.
    pub(crate) units: Units,
    /// Bytes.
    pub(crate) requested: u64,
}

/// What became of a block that was to go into its bin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Binned {
    /// It is in its bin.
    Quietly,
    /// It is, and [`told_freed`] must come next.
    WithNews,
    /// Nothing has changed: its bin has no room for it, or there is none.
    No,
    /// Nothing has changed: the long way must be taken.
    Unusual,
}

impl Locked {
    /// Hands out a small block of exactly the wanted size from its lane's bin, and whether [`told_handed`] must come next. `None`, with nothing
    /// changed, if there is none. O(1).
    #[inline(always)]
    pub(crate) fn hand_out_of_bin(&mut self, lane: u32, want: Want) -> Option<(Handed, bool)> {
        let Self { state, counters, .. } = self;
        let bin = state.bins.small(lane, want.units)?;
        let id = bin.first();
        // There is no such block if there is none.
        let block = state.blocks.get_mut(id)?;
        let address = state.segments.address(block.segment, block.offset)?;
        bin.take(block);
        block.state = BlockState::Live;
        block.generation = block.generation.wrapping_add(1);
        block.requested = want.requested;
        let bytes = to_bytes(want.units);
        let handed = Handed { key: BlockKey::new(id, block.generation), address, bytes };
        // What a capture's bin holds was handed out in this capture before, so its range is noted already.
        let new = counters.handed_out_of_bin(&state.watches, bytes as i64, want.requested as i64);
        Some((handed, new))
    }

    /// The small neutral lane beside the one that serves the stream's requests in this capture, if that is the lane given: not where the capture
    /// has just ended, or its route is that of another.
    #[inline(always)]
    pub(crate) fn neutral_beside(&self, lane: u32, stream: &Arc<StreamCore>, capture: CaptureId) -> Option<u32> {
        let lane = self.state.lanes.get(lane as usize)?;
        (lane.capture == capture && Arc::ptr_eq(&lane.core, stream)).then_some(lane.neutral)
    }

    /// Hands out a large block of a bin, or the best fit of the lane's free index, or of the neutral one's; `None`, with nothing changed, if the
    /// long way must be taken. O(log n).
    #[inline(always)]
    pub(crate) fn hand_out_of_index(&mut self, from: Source, want: Want) -> Option<Handed> {
        let Self { state, counters, .. } = self;
        let part = want.part.index() as u32;
        let lane = from.lane + part;
        if want.part == Part::Large
            && let Some(id) = state.bins.pop(&state.blocks, Part::Large, lane, want.units)
        {
            // It is counted with the free blocks until it is handed out.
            counters.came_out_of_bin(Part::Large, to_bytes(want.units) as i64);
            return state.hand_out(id, to_bytes(want.units), want.requested, counters);
        }
        let neutral = (from.neutral != NONE).then(|| from.neutral + part);
        state.index_hit((lane, neutral), want, counters)
    }

    /// Frees a live block into its lane's bin, if nothing unusual is under way and nothing but its own stream used it. O(1).
    #[inline(always)]
    pub(crate) fn free_into_bin(&mut self, key: BlockKey) -> Binned {
        let Self { state, counters, attention, .. } = self;
        let id = key.id();
        let Some(block) = state.blocks.get_mut(id) else { return Binned::Unusual };
        let own = block.generation == key.generation() && block.state == BlockState::Live && block.uses == NONE;
        if !own || attention.get() & UNUSUAL_FREE != 0 {
            return Binned::Unusual;
        }
        if !state.bins.push_small(block, id) {
            return Binned::No;
        }
        block.state = BlockState::Binned;
        let new = counters.freed_into_bin(&state.watches, to_bytes(block.size) as i64, block.requested as i64);
        if new { Binned::WithNews } else { Binned::Quietly }
    }

    /// Whether a free must look at more than its block.
    pub(crate) fn is_free_unusual(&self) -> bool {
        self.attention.get() & UNUSUAL_FREE != 0
    }

    /// A usual free that no bin took: into its bin even if that was of another size before, or merged and indexed. O(log n).
    #[inline(always)]
    pub(crate) fn free_past_bin(&mut self, id: BlockId) {
        let Self { state, counters, .. } = self;
        // Apart, so that what depends on the part is looked at once.
        match state.part_of(id) {
            Part::Small => state.free_in_place(id, Part::Small, counters),
            Part::Large => state.free_in_place(id, Part::Large, counters),
        }
    }

    /// A usual free of a block that nothing but its own stream used. Whether it was one; if not, nothing has changed. O(log n).
    pub(crate) fn free_alone(&mut self, key: BlockKey) -> bool {
        let Self { state, counters, .. } = self;
        if state.blocks.live(key).is_none_or(|block| block.uses != NONE) {
            return false;
        }
        state.free_now(key.id(), counters);
        true
    }

    /// A usual free of a block that other streams used, unless its lane is a capture's: only under policies that let such blocks share events,
    /// which know captures by their lanes. The streams that an event must be recorded on; `None`, with nothing changed, if it was no such free.
    pub(crate) fn free_with_uses(&mut self, key: BlockKey) -> Option<Vec<Arc<StreamCore>>> {
        let Self { state, counters, .. } = self;
        if state.rules.event_each_free {
            return None;
        }
        let (id, block) = (key.id(), state.blocks.live(key)?);
        if block.uses == NONE || state.lanes[block.lane as usize].kind == LaneKind::Capture {
            return None;
        }
        state.request_free(id, counters);
        Some(state.make_pending(id, SHARE_BLOCKS, counters))
    }
}

/// After a hand-out: notes what is new, gives the lock back, and tells what has to be told.
#[cold]
#[inline(never)]
pub(crate) fn told_handed<D: Device>(mut locked: QuickGuard<'_, Locked>, part: Part) {
    let Locked { state, counters, .. } = &mut *locked;
    counters.note_handed_out(&mut state.watches, part);
    told::<D>(locked, &[]);
}

/// After a free into a bin: as [`told_handed`].
#[cold]
#[inline(never)]
pub(crate) fn told_freed<D: Device>(mut locked: QuickGuard<'_, Locked>) {
    let Locked { state, counters, .. } = &mut *locked;
    counters.note_split(&mut state.watches, Part::Small);
    state.repetition.block_freed(counters);
    state.repetition.watch_empty(counters);
    told::<D>(locked, &[]);
}

/// Gives the lock back, tells what has to be told, and records events on streams that freed blocks wait for.
#[inline]
pub(crate) fn told<D: Device>(locked: QuickGuard<'_, Locked>, to_mark: &[Arc<StreamCore>]) {
    if !to_mark.is_empty() || locked.counters.telling.is_due() {
        tell::<D>(locked, to_mark);
    }
}

#[cold]
#[inline(never)]
fn tell<D: Device>(locked: QuickGuard<'_, Locked>, to_mark: &[Arc<StreamCore>]) {
    if let Some(arena) = arena_of::<D>(locked) {
        arena.mark_for_pending(to_mark);
        arena.tell();
    }
}

/// The arena that a core keeps. Gives the lock back.
pub(crate) fn arena_of<D: Device>(locked: QuickGuard<'_, Locked>) -> Option<Arc<Arena<D>>> {
    let kept = locked.state.keep.kept();
    drop(locked);
    kept?.downcast().ok()
}
