//! The arena's invariants as a function: a recount of everything, for tests and for whoever doubts.

use std::collections::HashSet;

use super::{ArenaState, BlockState, EDGE, LaneKind, NONE};
use crate::counters::ArenaCounters;
use crate::ids::Part;
use crate::units::to_bytes;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Recount {
    allocation: i64,
    active: i64,
    inactive_split: i64,
    allocated_bytes: i64,
    active_bytes: i64,
    inactive_split_bytes: i64,
    requested_bytes: i64,
}

impl Recount {
    fn of(counters: &ArenaCounters, part: Part) -> Self {
        let read = |array: crate::counters::StatArray| match part {
            Part::Small => array.small_pool.current,
            Part::Large => array.large_pool.current,
        };
        let c = counters.read();
        Self {
            allocation: read(c.allocation),
            active: read(c.active),
            inactive_split: read(c.inactive_split),
            allocated_bytes: read(c.allocated_bytes),
            active_bytes: read(c.active_bytes),
            inactive_split_bytes: read(c.inactive_split_bytes),
            requested_bytes: read(c.requested_bytes),
        }
    }
}

impl ArenaState {
    /// Checks A1 to A5 and B3; the first breach is returned in words. O(n).
    pub(crate) fn validate(&self, counters: &ArenaCounters) -> Result<(), String> {
        if self.blocks.get(EDGE).is_some_and(|edge| edge.state != BlockState::Vacant) {
            return Err("B3: the record that stands in for missing neighbours is in use".to_owned());
        }
        let mut seen = 0;
        let mut recount = [Recount::default(); 2];
        let mut binned = (0, 0);
        let mut oversize = 0;
        let mut idle = Vec::new();
        for (at, segment) in self.segments.iter() {
            let slot = self.slots.get(segment.slot as usize).filter(|s| s.in_use);
            slot.ok_or_else(|| format!("A5: segment {at} refers to pool slot {}", segment.slot))?;
            let (mut offset, mut prev, mut id, mut last_free) = (0u64, NONE, segment.first, None);
            let mut mapped = 0;
            while id != NONE {
                let b = &self.blocks[id];
                seen += 1;
                let place = format!("block {id} at {offset} of segment {at}");
                if b.segment != at || u64::from(b.offset) != offset || b.prev != prev || b.size == 0 {
                    return Err(format!("A1: {place} has {b:?}"));
                }
                if matches!(b.state, BlockState::Hole | BlockState::Held) {
                    last_free = None;
                    let hole = b.state == BlockState::Hole;
                    let known = segment.pages.as_ref().is_some_and(|t| t.holes().contains(&id));
                    if !hole && self.idle.parked.contains(&id) {
                        mapped += u64::from(b.size);
                    }
                    if known != hole || (hole && prev != NONE && self.blocks[prev].state == BlockState::Hole) {
                        return Err(format!("G1: {place} is {:?}; known as a hole: {known}", b.state));
                    }
                    offset += u64::from(b.size);
                    prev = id;
                    id = b.next;
                    continue;
                }
                let behind =
                    segment.pages.as_ref().map(|t| t.covers_beside(b.offset, b.offset + b.size, &segment.away));
                if behind == Some(false) {
                    return Err(format!("G1: {place} is not mapped throughout"));
                }
                mapped += u64::from(b.size);
                let free_lane = (b.state == BlockState::Free).then_some(b.lane);
                if free_lane.is_some() && free_lane == last_free {
                    return Err(format!("A2: {place} and its left neighbour are both free in one lane"));
                }
                last_free = free_lane;
                let lane = self.lanes.get(b.lane as usize).filter(|l| l.in_use && l.slot == segment.slot);
                let lane = lane.ok_or_else(|| format!("A5: {place} refers to lane {}", b.lane))?;
                let bytes = to_bytes(b.size) as i64;
                let r = &mut recount[lane.part.index()];
                match b.state {
                    BlockState::Live | BlockState::Pending => {
                        if b.state == BlockState::Live {
                            r.allocation += 1;
                            r.allocated_bytes += bytes;
                            oversize += i64::from(bytes as u64 >= self.rules.max_split);
                        }
                        r.active += 1;
                        r.active_bytes += bytes;
                        r.requested_bytes += b.requested as i64;
                    }
                    BlockState::Free | BlockState::Binned => {
                        if b.state == BlockState::Binned {
                            binned.0 += 1;
                            binned.1 += bytes;
                        }
                        if b.state == BlockState::Free && !b.is_split() && self.rules.trades {
                            idle.push((lane.part, b.size, at));
                        }
                        if b.is_split() {
                            r.inactive_split += 1;
                            r.inactive_split_bytes += bytes;
                        }
                    }
                    BlockState::Vacant | BlockState::Hole | BlockState::Held => {
                        return Err(format!("A1: {place} is vacant"));
                    }
                }
                offset += u64::from(b.size);
                prev = id;
                id = b.next;
            }
            if !segment.away.is_empty() && !self.idle.away {
                return Err(format!("I2: memory of segment {at} is away, and its pool is resident"));
            }
            if let Some(table) = &segment.pages {
                table.validate()?;
                mapped -= segment.away.iter().map(|a| u64::from(a.units)).sum::<u64>();
                if table.mapped_bytes() != mapped * crate::units::UNIT {
                    return Err(format!(
                        "G2: {} bytes mapped in segment {at}, its blocks have {mapped} units",
                        table.mapped_bytes()
                    ));
                }
            }
            if offset * crate::units::UNIT != segment.memory.bytes {
                return Err(format!(
                    "A1: blocks of segment {at} end at {offset} units of {} bytes",
                    segment.memory.bytes
                ));
            }
        }
        if !self.idle.away && !self.idle.parked.is_empty() {
            return Err(format!("I1: {} blocks are held in a pool that is resident", self.idle.parked.len()));
        }
        if self.idle.away && self.blocks.ids().any(|id| self.blocks[id].state == BlockState::Binned) {
            return Err("I1: a block is binned in a pool whose memory is away".to_owned());
        }
        if seen != self.blocks.used() {
            return Err(format!("A1: {} records, {seen} of them in segments", self.blocks.used()));
        }
        self.validate_index()?;
        self.idle_segments.validate(&idle)?;
        for part in Part::ALL {
            let (counted, real) = (Recount::of(counters, part), recount[part.index()]);
            if counted != real {
                return Err(format!("A4: {part} part counts {counted:?}, a recount gives {real:?}"));
            }
        }
        let counted = counters.binned();
        if counted != binned || counters.oversize_allocations() != oversize {
            return Err(format!("A4: bins count {counted:?}, a recount gives {binned:?}; oversize {oversize}"));
        }
        Ok(())
    }

    fn validate_index(&self) -> Result<(), String> {
        let (mut indexed, mut in_bins) = (HashSet::new(), HashSet::new());
        for (at, lane) in self.lanes.iter().enumerate() {
            for id in lane.index.in_order(&self.blocks) {
                let b = &self.blocks[id];
                let found = lane.index.best_fit(&self.blocks, b.size);
                if b.lane as usize != at || b.state != BlockState::Free || !indexed.insert(id) || found.is_none() {
                    return Err(format!("A3: index of lane {at} holds block {id}: {b:?}"));
                }
            }
        }
        for (at, part, id) in self.bins.ids(&self.blocks) {
            let b = &self.blocks[id];
            let lane = self.lanes.get(at as usize).filter(|l| l.part == part && l.kind != LaneKind::Neutral);
            let binned = b.lane == at && b.state == BlockState::Binned && b.is_split() && lane.is_some();
            if !binned || !in_bins.insert(id) {
                return Err(format!("A3: a bin of lane {at} holds block {id}: {b:?}"));
            }
        }
        for id in self.blocks.ids() {
            let b = &self.blocks[id];
            if (b.state == BlockState::Free) != indexed.contains(&id) {
                return Err(format!("A3: block {id} is {:?}; indexed: {}", b.state, indexed.contains(&id)));
            }
            if (b.state == BlockState::Binned) != in_bins.contains(&id) {
                return Err(format!("A3: block {id} is {:?}; in a bin: {}", b.state, in_bins.contains(&id)));
            }
        }
        Ok(())
    }
}
