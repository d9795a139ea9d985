//! Lanes: who may be served from which free blocks.
//!
//! A lane is one stream in one part of one pool. A block belongs to the lane it will be free in; it is found only by requests of
//! that lane. A stream's two lanes in a pool lie side by side, small first.
//!
//! A private pool that captures use has two kinds more. While a capture is under way its streams have lanes of their own, and between
//! captures what is free belongs to no stream: it lies in the pool's neutral lane, and every capture into the pool draws from it. So
//! neither the order of captures nor the stream they run on matters.

use std::sync::Arc;

use gpupool_device::CaptureId;

use super::{ArenaState, BlockState, NONE, Was};
use crate::counters::ArenaCounters;
use crate::ids::Part;
use crate::index::FreeIndex;
use crate::routing::Claim;
use crate::stream::StreamCore;

/// No capture has this id: it is what a driver says of one that was invalidated.
pub(crate) const NO_CAPTURE: CaptureId = CaptureId(0);

/// Whose requests a lane serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LaneKind {
    /// Those of a stream.
    Stream,
    /// Those of a stream inside the capture under way.
    Capture,
    /// Those of any stream inside a capture.
    Neutral,
}

/// One stream in one part of one pool. On cache lines of its own (in pairs, as they are fetched): what the index's head says changes as blocks come
/// and go.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Lane {
    /// Which of the arena's pool slots.
    pub(crate) slot: u32,
    pub(crate) part: Part,
    pub(crate) kind: LaneKind,
    /// The capture whose requests on the stream are served from here by the shortest way, while it is under way; else [`NO_CAPTURE`].
    pub(crate) capture: CaptureId,
    /// Of a stream's small lane: of which requests it is known that open scopes send them here.
    pub(crate) claim: Claim,
    /// Of a capture's small lane: the pool's neutral one, once the former serves so.
    pub(crate) neutral: u32,
    /// Its pool counts for itself what it hands out.
    pub(crate) counts_apart: bool,
    pub(crate) core: Arc<StreamCore>,
    pub(crate) index: FreeIndex,
    pub(crate) in_use: bool,
}

impl ArenaState {
    /// Small and large lane of a stream in a pool slot, side by side; made at its first use. Returns the small one.
    pub(crate) fn lanes_of(&mut self, slot: u32, core: &Arc<StreamCore>, kind: LaneKind) -> u32 {
        let same = |l: &Lane| l.in_use && l.slot == slot && l.kind == kind && l.core.id == core.id;
        if let Some(at) = self.lanes.iter().position(same) {
            return at as u32;
        }
        let stacked = self.rules.stacked;
        let counts_apart = self.rules.shared && self.slots[slot as usize].counters.is_some();
        let make = |part| Lane {
            slot,
            part,
            kind,
            capture: NO_CAPTURE,
            claim: Claim::NONE,
            neutral: NONE,
            counts_apart,
            core: Arc::clone(core),
            index: FreeIndex::new(stacked),
            in_use: true,
        };
        let vacant = self.lanes.iter().step_by(2).position(|l| !l.in_use).map(|pair| pair * 2);
        let at = vacant.unwrap_or(self.lanes.len());
        if vacant.is_some() {
            self.lanes[at] = make(Part::Small);
            self.lanes[at + 1] = make(Part::Large);
        } else {
            self.lanes.push(make(Part::Small));
            self.lanes.push(make(Part::Large));
        }
        at as u32
    }

    /// From now on this small lane of a stream serves the requests of this claim by the shortest way, unless it is gone.
    pub(crate) fn note_claim(&mut self, lane: u32, claim: Claim) {
        let lane = &mut self.lanes[lane as usize];
        if lane.in_use {
            lane.claim = claim;
        }
    }

    /// Whether this is the small lane of the stream that serves the calling thread's requests under scopes of this version.
    #[inline(always)]
    pub(crate) fn is_claimed(&self, lane: u32, stream: &Arc<StreamCore>, scopes: u64) -> bool {
        let lane = self.lanes.get(lane as usize);
        lane.is_some_and(|lane| lane.claim.holds(scopes) && Arc::ptr_eq(&lane.core, stream))
    }

    /// Moves every block of some lanes of a pool slot to the pool's neutral lanes: free ones merge there, others go there when they
    /// become free. O(blocks of the pool).
    pub(crate) fn neutralise(
        &mut self,
        slot: u32,
        neutral: &Arc<StreamCore>,
        counters: &ArenaCounters,
        pick: impl Fn(&Lane) -> bool,
    ) {
        self.flush_bins(counters);
        // Lanes that end here are of somebody else next.
        self.bins.forget();
        let to = self.lanes_of(slot, neutral, LaneKind::Neutral);
        let from: Vec<u32> = (0..self.lanes.len() as u32)
            .filter(|l| {
                let lane = &self.lanes[*l as usize];
                lane.in_use && lane.slot == slot && lane.kind != LaneKind::Neutral && pick(lane)
            })
            .collect();
        let firsts: Vec<u32> = self.segments.iter().filter(|(_, s)| s.slot == slot).map(|(_, s)| s.first).collect();
        for first in firsts {
            let mut at = first;
            while at != NONE {
                if from.contains(&self.blocks[at].lane) {
                    let lane = to + self.lanes[self.blocks[at].lane as usize].part.index() as u32;
                    if self.blocks[at].state == BlockState::Free {
                        self.unindex(at);
                        self.blocks[at].lane = lane;
                        // In no index while it is merged.
                        self.blocks[at].state = BlockState::Pending;
                        self.stamp(at);
                        let was = if self.blocks[at].is_split() { Was::Split } else { Was::Elsewhere };
                        self.merge(at, was, counters);
                    } else if self.lanes[self.blocks[at].lane as usize].kind == LaneKind::Capture {
                        // A block of eager work stays where it is, and so does what becomes of it.
                        let from = std::mem::replace(&mut self.blocks[at].lane, lane);
                        if self.blocks[at].state == BlockState::Live {
                            let owner = Arc::clone(&self.lanes[from as usize].core);
                            self.record_owner(at, &owner);
                        }
                    }
                }
                at = self.blocks[at].next;
            }
        }
        for lane in from {
            // A stream's own lanes stay; those of a capture end with it.
            if self.lanes[lane as usize].kind == LaneKind::Capture {
                self.lanes[lane as usize].in_use = false;
                self.lanes[lane as usize].capture = NO_CAPTURE;
            }
        }
    }
}

/// Whether a block that becomes free in `lane` may take over a free neighbour of lane `other`.
#[inline(always)]
pub(super) fn may_absorb(lanes: &[Lane], lane: u32, other: u32) -> bool {
    let of_capture = || {
        let (a, b) = (&lanes[lane as usize], &lanes[other as usize]);
        a.kind == LaneKind::Capture && b.kind == LaneKind::Neutral && a.part == b.part
    };
    lane == other || of_capture()
}
