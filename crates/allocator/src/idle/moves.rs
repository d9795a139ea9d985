//! Who may move a pool's memory, and when: uses of a pool, the ladder's steps, pools that exclude each other.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpupool_device::{Device, DriverResult};

use super::take::refusal;
use super::{IdleOptions, Lending, Moved, OnLoan, OnUse, Residency};
use crate::arena::{Arena, Backing, BlockState};
use crate::captures::Range;
use crate::error::{AllocError, PoolError};
use crate::history::Action;
use crate::ids::{PoolId, StreamId};
use crate::inner::{Inner, Request, Served};
use crate::pool::Pool;
use crate::units::{to_bytes, to_units};

/// What a keeper waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Idleness {
    /// Nothing. Runs on this registered stream (allocator and id) may be unfinished: what comes next there comes after them.
    Now {
        /// The stream whose next work comes after its runs.
        beside: Option<(u64, StreamId)>,
    },
    /// Runs of the pool, on the host; but for no other thread that is about to start one.
    Runs,
    /// Both.
    Everything,
}

/// Knows what uses a pool's memory though no block of it is live: runs of graphs.
pub trait PoolKeeper: Send + Sync {
    /// Calls `then` while nothing of the pool runs and nothing can be started. Whether it did.
    ///
    /// # Errors
    ///
    /// The driver's, asked about runs; then `then` was not called.
    fn while_idle(
        &self,
        allocator: u64,
        pool: PoolId,
        idleness: Idleness,
        then: &mut dyn FnMut(),
    ) -> DriverResult<bool>;
}

impl<D: Device> Arena<D> {
    /// Before the pool is used: a parked one is woken, or the use refused. `writes` are the ranges that a launch writes, in order; loans there
    /// are waited for, or the launch is refused. One load for a resident pool.
    #[inline]
    pub(crate) fn ready(&self, inner: Option<&Inner<D>>, writes: &[Range]) -> Result<(), AllocError> {
        match self.idle.residency() {
            Residency::Resident => Ok(()),
            other => self.make_ready(inner, other, writes),
        }
    }

    #[cold]
    fn make_ready(&self, inner: Option<&Inner<D>>, residency: Residency, writes: &[Range]) -> Result<(), AllocError> {
        let (on_use, on_loan) = {
            let options = self.idle.options.lock();
            (options.on_use, options.on_loan)
        };
        match residency {
            Residency::Resident => Ok(()),
            Residency::Lent if writes.is_empty() => Ok(()),
            Residency::Lent => self.wait_for_loans(on_loan, writes),
            Residency::Parked if on_use == OnUse::Wake => {
                if let Some(inner) = inner {
                    inner.park_others(self);
                }
                self.bring_back(inner, false).map(drop)
            }
            Residency::Parked | Residency::Suspended => Err(PoolError::Away { pool: self.pool_id(), residency }.into()),
        }
    }

    /// Until no loan is out where a launch writes; or it is refused.
    fn wait_for_loans(&self, on_loan: OnLoan, writes: &[Range]) -> Result<(), AllocError> {
        for round in 0.. {
            let (loans, bytes) = self.look_at_loans(writes);
            if loans == 0 {
                break;
            }
            if on_loan == OnLoan::Refuse {
                return Err(PoolError::LoansOut { pool: self.pool_id(), loans, bytes }.into());
            }
            pause(round);
        }
        Ok(())
    }
}

/// Lets others work before one looks again: at once at first, then after up to 2 ms, since a free tells nobody.
fn pause(round: u32) {
    const AT_ONCE: u32 = 64;
    // Threads that are explored step by step have no time.
    if cfg!(gpupool_shuttle) || round < AT_ONCE {
        crate::sync::yield_now();
    } else {
        std::thread::sleep(Duration::from_micros(1 << (round - AT_ONCE + 5).min(11)));
    }
}

impl<D: Device> Inner<D> {
    /// Whether a pool's memory can go away and leave its addresses.
    fn check_pool(&self, pool: &Pool<D>) -> Result<(), PoolError> {
        let cannot = |why| Err(PoolError::CannotMove { pool: pool.id, why });
        if self.shared.rules.single_arena {
            return cannot("the policy keeps all pools together, as PyTorch does");
        }
        if pool.whole_segments.load(Ordering::Relaxed) {
            return cannot("its segments are registered or exported, which names their memory");
        }
        Ok(())
    }

    /// Takes a pool's memory away once nothing of it runs.
    pub(crate) fn move_pool(&self, pool: &Pool<D>, to: Residency, idleness: Idleness) -> Result<Moved, AllocError> {
        self.check_pool(pool)?;
        let options = pool.arena.idle.options.lock().clone();
        let mut moved = Ok(Moved::default());
        let wait = idleness == Idleness::Everything;
        self.while_idle(pool.id, idleness, &mut || moved = pool.arena.take_away(to, &options, wait))
            .map_err(|e| refusal(pool.id, e))?;
        moved
    }

    fn while_idle(&self, pool: PoolId, idleness: Idleness, then: &mut dyn FnMut()) -> DriverResult<bool> {
        match self.hooks.keeper() {
            Some(keeper) => keeper.while_idle(self.id, pool, idleness, then),
            None => {
                then();
                Ok(true)
            }
        }
    }

    /// Parks pools that allow it when memory is short, but not `except`. Returns bytes.
    pub(crate) fn park_idle(&self, except: &Arena<D>, wait: bool) -> u64 {
        let pools = self.pools.all();
        let may = |pool: &&Arc<Pool<D>>| {
            pool.arena.idle.residency() == Residency::Resident
                && pool.arena.idle.options.lock().park_when_short
                && !std::ptr::eq(&*pool.arena, except)
        };
        let idleness = if wait { Idleness::Runs } else { Idleness::Now { beside: None } };
        pools.iter().filter(may).map(|pool| self.try_park(pool, idleness)).sum()
    }

    /// Parks the pools that exclude the one of this arena, if it is declared to. Pools that are in use by another thread right now stay.
    pub(crate) fn park_others(&self, arena: &Arena<D>) {
        let options = arena.idle.options.lock().clone();
        if !options.exclusive {
            return;
        }
        for pool in self.pools.all() {
            let theirs = pool.arena.idle.options.lock().clone();
            let excluded = theirs.exclusive && theirs.tag == options.tag && !std::ptr::eq(&*pool.arena, arena);
            if excluded && pool.arena.idle.residency() == Residency::Resident {
                self.try_park(&pool, Idleness::Runs);
            }
        }
    }

    fn try_park(&self, pool: &Pool<D>, idleness: Idleness) -> u64 {
        match self.move_pool(pool, Residency::Parked, idleness) {
            Ok(moved) => moved.bytes,
            Err(e) => {
                tracing::debug!(pool = %pool.id, error = %e, "an idle pool was not parked");
                0
            }
        }
    }

    /// Before a capture draws from a pool: it is resident, and those that exclude it are parked.
    pub(crate) fn ready_pool(&self, id: PoolId) -> Result<(), AllocError> {
        let pool = self.pools.get(id)?;
        pool.arena.ready(Some(self), &[])?;
        self.park_others(&pool.arena);
        Ok(())
    }

    /// Serves a request of the default pool from a free run of an idle pool that lends; of all such runs the smallest.
    pub(crate) fn borrow(&self, request: &Request<D>, short: bool) -> Option<Served<D>> {
        if request.pool.is_some() || request.in_capture {
            return None;
        }
        let size = to_units(request.size)?;
        let lenders = self.pools.lending();
        if lenders.is_empty() || self.captures_now(request) {
            return None;
        }
        let mut found: Vec<(crate::units::Units, Arc<Pool<D>>)> = Vec::new();
        for pool in lenders {
            let lending = pool.arena.idle.options.lock().lending;
            let lends = lending == Lending::BeforeGrowth || (short && lending == Lending::WhenShort);
            if !lends || self.shared.registry.is_drawn_from(pool.id) {
                continue;
            }
            // What came back and was still used then may be free by now.
            pool.arena.poll(true);
            let best = pool.arena.lock().best_run(request.part, size);
            found.extend(best.map(|(units, _)| (units, Arc::clone(&pool))));
        }
        found.sort_by_key(|(units, pool)| (*units, pool.id));
        for (_, pool) in found {
            let mut served = None;
            let beside = Some((self.id, request.core.id));
            let idle = self.while_idle(pool.id, Idleness::Now { beside }, &mut || {
                served = pool.arena.lend(request);
                if self.shared.registry.is_drawn_from(pool.id) {
                    // A capture has begun meanwhile. It draws from what is free, and this is not: nothing is shared.
                    tracing::debug!(pool = %pool.id, "a run was lent as a capture began");
                }
            });
            if idle.is_ok() && served.is_some() {
                return served;
            }
        }
        None
    }

    /// Whether a request's stream is capturing: what it gets may be baked into a graph, and would be out for good.
    fn captures_now(&self, request: &Request<D>) -> bool {
        let status = || self.shared.driver.capture_status(request.core.handle);
        !self.shared.registry.is_quiet() && status().map_or(true, |s| s.is_capturing())
    }

    /// Gives up a pool whose memory is away, that nobody uses and in which nothing is live: there is nobody to wake it for.
    pub(crate) fn dissolve(&self, pool: &Pool<D>) {
        let arena = &pool.arena;
        if !arena.idle.residency().is_away() {
            return;
        }
        let Some(_turn) = arena.idle.turn.try_take() else { return };
        let segments = {
            let mut state = arena.lock();
            let used = |state: BlockState| matches!(state, BlockState::Live | BlockState::Pending);
            let ids: Vec<u32> = state.blocks.ids().collect();
            if !self.pools.is_freeable(pool.id) || ids.iter().any(|id| used(state.blocks[*id].state)) {
                return;
            }
            for id in &ids {
                if state.blocks[*id].state == BlockState::Free {
                    state.hold_free(*id, &arena.counters);
                }
            }
            // Old mappings hold blocks of their own.
            if !state.leaving.is_empty() {
                return;
            }
            for id in ids {
                state.blocks.remove(id);
            }
            state.idle.parked.clear();
            let segments: Vec<u32> = state.segments.iter().map(|(at, _)| at).collect();
            segments.iter().for_each(|at| state.note_segment(*at, Action::SegmentFree));
            let segments: Vec<_> = segments.into_iter().filter_map(|at| state.segments.remove(at)).collect();
            state.arrive(&arena.counters);
            arena.idle.set(Residency::Resident);
            for segment in &segments {
                let mapped = match (&segment.memory.backing, &segment.pages) {
                    (Backing::Away, _) => 0,
                    (_, Some(table)) => table.mapped_bytes(),
                    _ => segment.memory.bytes,
                };
                pool.counters.reserved_bytes.decrease(segment.part, mapped as i64);
            }
            segments
        };
        let saved = std::mem::take(&mut *arena.idle.saved.lock());
        saved.into_iter().for_each(|s| self.shared.free_host(s.memory));
        for segment in segments {
            match segment.pages {
                Some(table) => self.shared.drop_pages(&segment.memory, *table, segment.part, pool.id),
                None => self.shared.give_back_or_strand(segment.memory, segment.part, Some(pool.id)),
            }
        }
    }

    /// What idle pools hold and what they have given up, for the report of a request that found no memory: bytes that could be parked, and
    /// bytes that are lent.
    pub(crate) fn idle_bytes(&self) -> (u64, u64) {
        let (mut parkable, mut lent) = (0, 0);
        for pool in self.pools.all() {
            match pool.arena.idle.residency() {
                Residency::Resident if self.check_pool(&pool).is_ok() && self.pools.is_captured(pool.id) => {
                    let state = pool.arena.lock();
                    let free = state.blocks.ids().filter(|id| state.blocks[*id].state == BlockState::Free);
                    parkable += free.map(|id| to_bytes(state.blocks[id].size)).sum::<u64>();
                }
                Residency::Lent => lent += pool.arena.look_at_loans(&[]).1,
                _ => {}
            }
        }
        (parkable, lent)
    }

    /// Sets what a pool does while it is idle.
    pub(crate) fn set_idle(&self, pool: &Pool<D>, options: IdleOptions) -> Result<(), AllocError> {
        if options != IdleOptions::default() {
            self.check_pool(pool)?;
        }
        self.pools.set_lending(pool.id, options.lending != Lending::Never);
        *pool.arena.idle.options.lock() = options;
        Ok(())
    }
}
