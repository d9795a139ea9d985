//! Idle pools as the allocator's users see them.

use std::sync::Arc;

use gpupool_device::Device;

use super::moves::{Idleness, PoolKeeper};
use super::{Contents, IdleOptions, Moved, Residency, Which};
use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::arena::Arena;
use crate::error::{AllocError, FreeError};
use crate::ids::PoolId;
use crate::inner::Inner;
use crate::pool::Pool;

impl<D: Device> Allocator<D> {
    /// Sets what a private pool does while it is idle: see [`IdleOptions`]. Whether its memory can go away depends on what is behind it:
    /// virtual memory, under `segments` or `pages`.
    ///
    /// # Errors
    ///
    /// [`PoolError::Unknown`](crate::PoolError::Unknown), [`PoolError::CannotMove`](crate::PoolError::CannotMove).
    pub fn set_idle_options(&self, id: PoolId, options: IdleOptions) -> Result<(), AllocError> {
        let inner = self.inner();
        inner.set_idle(&*inner.pools.get(id)?, options)
    }

    /// Where a private pool's memory is. A pool is [`Lent`](Residency::Lent) as long as a run of it is out, or was freed and is still used by
    /// some stream: of a lent pool the driver is asked about that.
    ///
    /// # Errors
    ///
    /// [`PoolError::Unknown`](crate::PoolError::Unknown).
    pub fn residency(&self, id: PoolId) -> Result<Residency, AllocError> {
        let pool = self.inner().pools.get(id)?;
        if pool.arena.idle.residency() == Residency::Lent {
            pool.arena.poll(true);
            pool.arena.look_at_loans(&[]);
        }
        Ok(pool.arena.idle.residency())
    }

    /// Gives a private pool's physical memory back and keeps its addresses. What is live in it is kept in place, copied to the host or given
    /// up, as its owner ([`Allocation::set_contents`]) and the pool's options say. **Waits** on the host for the last run of the pool's
    /// graphs and, where live blocks move, for all streams: nothing may be submitted meanwhile that uses those. A pool that is away already
    /// stays as it is.
    ///
    /// # Errors
    ///
    /// [`PoolError::LoansOut`](crate::PoolError::LoansOut), [`PoolError::Busy`](crate::PoolError::Busy),
    /// [`PoolError::CannotMove`](crate::PoolError::CannotMove), [`PoolError::Unknown`](crate::PoolError::Unknown);
    /// [`AllocError::PoolInCapture`]; the driver's. The pool is resident then, and nothing has moved.
    pub fn park_pool(&self, id: PoolId) -> Result<Moved, AllocError> {
        let inner = self.inner();
        inner.move_pool(&*inner.pools.get(id)?, Residency::Parked, Idleness::Everything)
    }

    /// Brings a parked pool's memory back: at the same addresses, all of it, with the contents that were kept. A launch does so by itself.
    /// Memory that is short is asked of other idle pools first. A resident pool stays as it is.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoMemory`](crate::PoolError::NoMemory), [`PoolError::Away`](crate::PoolError::Away) for a suspended pool,
    /// [`PoolError::Unknown`](crate::PoolError::Unknown), the driver's. The pool is away as before then, and nothing of it is mapped.
    pub fn wake_pool(&self, id: PoolId) -> Result<Moved, AllocError> {
        let inner = self.inner();
        inner.pools.get(id)?.arena.bring_back(Some(&**inner), false)
    }

    /// Copies everything live to pinned host memory and gives all physical memory back; addresses stay. Until [`resume`](Self::resume)
    /// launches and requests there are refused. Contents are kept but for blocks marked [`Contents::Discarded`]. **Waits** on the host for
    /// all streams, and for runs of the pools' graphs.
    ///
    /// # Errors
    ///
    /// As [`park_pool`](Self::park_pool). What this call had suspended by then is resident again, as far as there was memory for it.
    pub fn suspend(&self, which: &Which) -> Result<Moved, AllocError> {
        let inner = self.inner();
        if *which == Which::All {
            self.empty_cache()?;
        }
        inner.settle_leaving(true)?;
        let mut moved = Moved::default();
        let mut done: Vec<Arc<Arena<D>>> = Vec::new();
        let mut suspend = || -> Result<(), AllocError> {
            for pool in inner.chosen(which) {
                let before = pool.arena.idle.residency();
                moved.add(inner.move_pool(&pool, Residency::Suspended, Idleness::Everything)?);
                if before != Residency::Suspended {
                    done.push(Arc::clone(&pool.arena));
                }
            }
            let default = if *which == Which::All { inner.default_arenas() } else { Arc::default() };
            for arena in default.iter() {
                let before = arena.idle.residency();
                moved.add(arena.take_away(Residency::Suspended, &IdleOptions::default(), true)?);
                if before != Residency::Suspended {
                    done.push(Arc::clone(arena));
                }
            }
            Ok(())
        };
        let result = suspend();
        if let Err(e) = result {
            for arena in done {
                if let Err(also) = arena.bring_back(Some(&**inner), true) {
                    tracing::warn!(error = %also, "a suspension that failed could not be undone: resume again");
                }
            }
            return Err(e);
        }
        Ok(moved)
    }

    /// Brings back what was suspended (or parked): at the same addresses, with contents.
    ///
    /// # Errors
    ///
    /// As [`wake_pool`](Self::wake_pool), of the first pool that could not be brought back whole; those before it are resident.
    pub fn resume(&self, which: &Which) -> Result<Moved, AllocError> {
        let inner = self.inner();
        let mut moved = Moved::default();
        if *which == Which::All {
            for arena in inner.default_arenas().iter() {
                moved.add(arena.bring_back(Some(&**inner), true)?);
            }
        }
        for pool in inner.chosen(which) {
            moved.add(pool.arena.bring_back(Some(&**inner), true)?);
        }
        Ok(moved)
    }

    /// Sets who knows what uses pools' memory though no block of it is live. `Captures` do so for graphs.
    pub fn set_pool_keeper(&self, keeper: Arc<dyn PoolKeeper>) {
        self.inner().hooks.set_keeper(keeper);
    }
}

impl<D: Device> Inner<D> {
    /// The private pools that a suspension concerns.
    fn chosen(&self, which: &Which) -> Vec<Arc<Pool<D>>> {
        let mut pools = self.pools.all();
        if let Which::Tag(tag) = which {
            pools.retain(|pool| pool.arena.idle.options.lock().tag.as_ref() == Some(tag));
        }
        pools
    }
}

impl<D: Device> Allocation<D> {
    /// Says what becomes of the block's contents when its pool is parked or suspended. Takes the arena's lock.
    ///
    /// # Errors
    ///
    /// [`FreeError::NotLive`] for a block that a restored checkpoint took away.
    pub fn set_contents(&self, contents: Contents) -> Result<(), FreeError> {
        let Some(core) = self.core() else { return Ok(()) };
        let state = &mut core.lock().state;
        if state.blocks.live(self.key()).is_none() {
            return Err(FreeError::NotLive { address: self.address() });
        }
        if state.idle.contents.len() > state.blocks.used() {
            state.forget_contents();
        }
        state.idle.contents.insert(self.key(), contents);
        Ok(())
    }
}
