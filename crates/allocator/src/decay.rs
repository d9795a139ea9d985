//! Decay: memory that nobody has used for a while goes back to the driver, so that others on the device find some (fault catalogue, 9).
//!
//! A look notes the time in each segment that it finds wholly free; whoever uses the segment wipes the note. So a hit pays nothing for
//! it, and the clock is read by looks only.

use gpupool_device::Device;

use crate::arena::Arena;
use crate::error::AllocError;
use crate::growth::Idle;
use crate::inner::Inner;
use crate::reclaim::{Patience, Trimmed};

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
}

impl<D: Device> Inner<D> {
    /// Gives back what nobody has used for as long as is configured, of the default pool and of pools that nobody uses. Waits for
    /// nothing.
    pub(crate) fn decay(&self) -> Result<Trimmed, AllocError> {
        let mut out = Trimmed::default();
        let Some(age) = self.shared.config.idle_decay() else { return Ok(out) };
        let now = self.shared.driver.device().now();
        for arena in self.default_arenas() {
            arena.release(&arena.unused_for(age, None, now), Patience::Nothing, &mut out)?;
        }
        for pool in self.pools.freeable() {
            let unused = pool.arena.unused_for(age, Some(pool.slot), now);
            pool.arena.release_if(&unused, Patience::Nothing, &mut out, || self.pools.is_freeable(pool.id))?;
        }
        self.forget_empty_pools();
        Ok(out)
    }
}
