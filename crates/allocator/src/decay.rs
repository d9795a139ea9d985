//! Decay: memory that nobody has used for a while goes back to the driver, so that others on the device find some (fault catalogue, 9).
//!
//! A look notes the time in each segment that it finds wholly free; whoever uses the segment wipes the note. So a hit pays nothing for
//! it, and the clock is read by looks only. Of pages it is the pieces that are noted, with the stamp of their last use.

use std::collections::HashSet;
use std::sync::Arc;

use gpupool_device::Device;

use crate::arena::{Arena, Lane};
use crate::error::AllocError;
use crate::growth::Idle;
use crate::inner::Inner;
use crate::reclaim::{Patience, Trimmed};
use crate::stream::StreamCore;

impl<D: Device> Arena<D> {
    /// Notes the time in each wholly free segment of the lanes of a slot (all of the default pool's without) and returns those that
    /// were noted `age` nanoseconds ago or before.
    fn unused_for(&self, age: u64, slot: Option<u32>, now: u64) -> Vec<Idle> {
        let idle = self.idle_segments(|lane| slot.map_or(self.is_default_slot(lane.slot), |slot| slot == lane.slot));
        let mut state = self.lock();
        let is_old = |idle: &Idle| {
            let still = state.still_idle(idle);
            let segment = state.segments.get_mut(idle.segment).filter(|_| still)?;
            Some(now.saturating_sub(*segment.idle_seen.get_or_insert(now)) >= age)
        };
        let old: Vec<bool> = idle.iter().map(is_old).map(|old| old == Some(true)).collect();
        idle.into_iter().zip(old).filter_map(|(idle, old)| old.then_some(idle)).collect()
    }

    /// As [`unused_for`](Self::unused_for), for pages: gives those back that were noted so long ago. A piece that was used since has another
    /// stamp, since the note is followed by an event.
    fn give_back_unused_pages(
        &self,
        age: u64,
        slot: Option<u32>,
        now: u64,
        out: &mut Trimmed,
        may: impl Fn() -> bool,
    ) -> Result<(), AllocError> {
        let Some(rules) = self.shared.rules.pages else { return Ok(()) };
        let pick = |lane: &Lane| slot.map_or(self.is_default_slot(lane.slot), |slot| slot == lane.slot);
        let mut cores: Vec<Arc<StreamCore>> = Vec::new();
        let old: HashSet<u64> = {
            let mut state = self.lock();
            let before = std::mem::take(&mut state.idle_pieces);
            let picked = state.lanes.iter().enumerate().filter(|(_, l)| l.in_use && pick(l));
            let lanes: Vec<u32> = picked.map(|(at, _)| at as u32).collect();
            for c in state.candidates(rules.page, &lanes) {
                let seen = before.get(&c.ordinal).filter(|(since, _)| *since == c.since).map(|(_, seen)| *seen);
                state.idle_pieces.insert(c.ordinal, (c.since, seen.unwrap_or(now)));
                let core = &state.lanes[state.blocks[c.block].lane as usize].core;
                if seen.is_none() && !cores.iter().any(|known| known.id == core.id) {
                    cores.push(Arc::clone(core));
                }
            }
            let is_old = |(_, seen): &(u64, u64)| now.saturating_sub(*seen) >= age;
            state.idle_pieces.iter().filter(|(_, note)| is_old(note)).map(|(ordinal, _)| *ordinal).collect()
        };
        for core in cores {
            if !self.shared.mark_unless_capturing(&core)? {
                // What is used from now on could not be told from what is not.
                self.lock().idle_pieces.clear();
            }
        }
        if old.is_empty() {
            return Ok(());
        }
        self.give_back_these(pick, |c| old.contains(&c.ordinal), Patience::Nothing, u64::MAX, out, may)
    }
}

impl<D: Device> Inner<D> {
    /// Gives back what nobody has used for as long as is configured, of the default pool and of pools that nobody uses. Waits for
    /// nothing.
    pub(crate) fn decay(&self) -> Result<Trimmed, AllocError> {
        let mut out = Trimmed::default();
        let Some(age) = self.shared.config.idle_decay() else { return Ok(out) };
        let now = self.shared.driver.device().now();
        for arena in self.default_arenas().iter() {
            arena.release(&arena.unused_for(age, None, now), Patience::Nothing, &mut out)?;
            arena.give_back_unused_pages(age, None, now, &mut out, || true)?;
        }
        for pool in self.pools.freeable() {
            let unused = pool.arena.unused_for(age, Some(pool.slot), now);
            let may = || self.pools.is_freeable(pool.id);
            pool.arena.release_if(&unused, Patience::Nothing, &mut out, may)?;
            pool.arena.give_back_unused_pages(age, Some(pool.slot), now, &mut out, may)?;
        }
        self.forget_empty_pools();
        Ok(out)
    }
}
