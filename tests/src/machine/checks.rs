//! What always holds, and what must be left when everything is given up.

use gpupool_allocator::{StatArray, Stats};

use super::*;

/// The figures whose peaks are reached between operations, not within one.
fn peaks(stats: &Stats) -> [(&'static str, StatArray); 5] {
    [
        ("allocation", stats.allocation),
        ("allocated_bytes", stats.allocated_bytes),
        ("requested_bytes", stats.requested_bytes),
        ("active", stats.active),
        ("active_bytes", stats.active_bytes),
    ]
}

impl Machine {
    // What always holds.

    pub(super) fn check(&mut self) -> Result<(), String> {
        self.lab.sound(self.strictness)?;
        let state = self.lab.allocator.state();
        if self.accumulated && self.strictness == Strictness::Exact {
            adds_up(&state)?;
        }
        let listed: BTreeMap<Address, (u64, u64)> = state
            .segments
            .iter()
            .flat_map(|s| &s.blocks)
            .filter(|b| b.status == BlockStatus::ActiveAllocated)
            .map(|b| (b.address, (b.size, b.requested)))
            .collect();
        let model: BTreeMap<Address, (u64, u64)> =
            self.live.iter().map(|l| (l.block.address(), (l.block.size(), l.block.requested()))).collect();
        ensure(listed == model, || format!("live are {listed:?}, the model has {model:?}"))?;
        for pool in &state.pools {
            let users = self.users(pool.id);
            let counted = pool.use_count.max(if self.bit_exact() { 0 } else { i64::MIN });
            ensure(counted == users, || format!("pool {} counts {} users, it has {users}", pool.id, pool.use_count))?;
        }
        for pool in self.pools.iter().filter(|p| self.users(p.id) > 0) {
            ensure(state.pools.iter().any(|p| p.id == pool.id), || format!("pool {} has users and is gone", pool.id))?;
        }
        self.check_peaks(&state)
    }

    /// Peaks over all streams and pools, whichever of them are gone, are the most there was at once.
    pub(super) fn check_peaks(&mut self, state: &State) -> Result<(), String> {
        let of_parts = |(name, array): (&'static str, StatArray)| {
            [(name, "all", array.all), (name, "small", array.small_pool), (name, "large", array.large_pool)]
        };
        let figures: Vec<_> = peaks(&state.stats).into_iter().flat_map(of_parts).collect();
        self.peaks.resize(figures.len(), 0);
        let exact = !(self.bit_exact() && self.peaks_blurred);
        for (seen, (name, part, stat)) in self.peaks.iter_mut().zip(figures) {
            *seen = (*seen).max(stat.current);
            let (peak, seen) = (stat.peak, *seen);
            ensure(if exact { peak == seen } else { peak >= seen }, || {
                format!("the peak of {name}.{part} is {peak}, the most seen was {seen}")
            })?;
        }
        Ok(())
    }

    // The end.

    /// Gives everything up in some order; nothing must remain.
    pub fn end(mut self, ending: Ending) -> Result<(), String> {
        self.lab.device.sim.clear_faults();
        self.close_everything()?;
        let mut order = ending.order.max(1);
        let mut draw = |n: usize| {
            order ^= order << 13;
            order ^= order >> 7;
            order ^= order << 17;
            (order >> 8) as usize % n.max(1)
        };
        let mut blocks: Vec<Block> = self.live.drain(..).map(|l| l.block).chain(self.stale.drain(..)).collect();
        self.retired.clear();
        self.checkpoints.clear();
        let device = Arc::clone(&self.lab.device);
        if ending.allocator_first {
            // The blocks outlive the allocator, and keep their memory.
            drop(self.lab);
            while !blocks.is_empty() {
                let block = blocks.swap_remove(draw(blocks.len()));
                drop(block);
            }
        } else {
            while !blocks.is_empty() {
                let block = blocks.swap_remove(draw(blocks.len()));
                drop(block);
                self.lab.sound(self.strictness).map_err(|e| format!("while blocks are dropped: {e}"))?;
                if draw(8) == 0 {
                    self.lab.allocator.trim().map_err(|e| e.to_string())?;
                }
            }
            let result = self.lab.allocator.empty_cache().map_err(|e| format!("emptying the cache: {e}"))?;
            self.lab.sound(Strictness::Exact).map_err(|e| format!("after everything was dropped: {e}"))?;
            let reserved = self.lab.allocator.stats().reserved_bytes.all.current;
            ensure(reserved == 0, || {
                format!("{reserved} bytes stay reserved after everything was dropped: {result:?}")
            })?;
            let (memory, addresses) = (device.sim.memory_in_use(), device.sim.address_space_in_use());
            ensure((memory, addresses) == (0, 0), || format!("{memory} bytes and {addresses} of addresses stay"))?;
            ensure(self.lab.allocator.state().pools.is_empty(), || "pools stay".to_owned())?;
            drop(self.lab);
        }
        let left = (device.sim.memory_in_use(), device.sim.address_space_in_use(), device.sim.events_in_use());
        ensure(left == (0, 0, 0), || format!("memory, addresses, events {left:?} are left when everything is gone"))?;
        ensure(device.breaches().is_empty(), || device.breaches().join("\n"))
    }

    pub(super) fn close_everything(&mut self) -> Result<(), String> {
        let allocator = &self.lab.allocator;
        for scope in self.scopes.drain(..).rev() {
            allocator.end_allocate_to_pool(scope.pool).map_err(|e| e.to_string())?;
            allocator.release_pool(scope.pool).map_err(|e| e.to_string())?;
        }
        for pool in self.pools.drain(..) {
            for _ in 0..pool.users {
                allocator.release_pool(pool.id).map_err(|e| e.to_string())?;
            }
        }
        Ok(())
    }
}
