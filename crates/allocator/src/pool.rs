//! Private pools: who uses them, and when they end.
//!
//! * **P1** A pool with users (a use count above zero) gives no segment back to the driver while a capture used it.
//! * **P2** A pool with no user is *freeable*: it is looked at only when the cache is emptied or memory runs out, and forgotten
//!   with its last segment.
//! * **P3** An allocation or a free never walks the pools.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use gpupool_device::Device;

use crate::arena::Arena;
use crate::counters::{CounterArray, PoolCounters};
use crate::error::PoolError;
use crate::id_set::PoolIdSet;
use crate::ids::{Part, PoolId};
use crate::provider::SegmentProvider;
use crate::sync::{Guard, Mutex, Rank};

/// A private pool.
pub(crate) struct Pool<D: Device> {
    pub(crate) id: PoolId,
    pub(crate) arena: Arc<Arena<D>>,
    pub(crate) slot: u32,
    pub(crate) counters: Arc<PoolCounters>,
    pub(crate) provider: Option<Arc<dyn SegmentProvider>>,
    /// Each segment is one driver allocation, whatever the policy: for memory that is registered or exported.
    pub(crate) whole_segments: AtomicBool,
}

impl<D: Device> Pool<D> {
    /// Bytes in live blocks: the pool's own count where it shares its arena, else the arena's.
    pub(crate) fn allocated_bytes(&self) -> &CounterArray {
        match self.arena.shared.rules.single_arena {
            true => &self.counters.allocated_bytes,
            false => self.arena.counters.allocated_bytes(),
        }
    }

    /// Differs from what it was before if a block of the pool was handed out or freed in between.
    pub(crate) fn version(&self) -> (i64, i64) {
        let (small, large) =
            (self.allocated_bytes().part(Part::Small).raw(), self.allocated_bytes().part(Part::Large).raw());
        (small.0 + large.0, small.1 + large.1)
    }
}

/// A pool in the table.
pub(crate) struct PoolEntry<D: Device> {
    pub(crate) pool: Arc<Pool<D>>,
    pub(crate) use_count: i64,
    /// A capture was routed here: addresses may be baked into a graph.
    pub(crate) captured: bool,
}

/// All private pools.
pub(crate) struct PoolTable<D: Device> {
    state: Mutex<PoolTableState<D>>,
}

/// What the table's lock protects.
pub(crate) struct PoolTableState<D: Device> {
    pub(crate) pools: BTreeMap<PoolId, PoolEntry<D>>,
    /// Ids, not pools: they may be set before the pool exists, and survive it, as in PyTorch.
    pub(crate) no_split: BTreeSet<PoolId>,
    pub(crate) use_on_oom: BTreeSet<PoolId>,
    /// Pools that lend.
    pub(crate) lending: BTreeSet<PoolId>,
    /// Pools that were forgotten: their ids are not used again (but under policies that take any id).
    pub(crate) gone: PoolIdSet,
}

impl<D: Device> PoolTable<D> {
    pub(crate) fn new() -> Self {
        let state = PoolTableState {
            pools: BTreeMap::new(),
            no_split: BTreeSet::new(),
            use_on_oom: BTreeSet::new(),
            lending: BTreeSet::new(),
            gone: PoolIdSet::default(),
        };
        Self { state: Mutex::new(Rank::Pool, state) }
    }

    pub(crate) fn lock(&self) -> Guard<'_, PoolTableState<D>> {
        self.state.lock()
    }

    pub(crate) fn get(&self, id: PoolId) -> Result<Arc<Pool<D>>, PoolError> {
        self.lock().pools.get(&id).map(|e| Arc::clone(&e.pool)).ok_or(PoolError::Unknown { pool: id })
    }

    pub(crate) fn use_count(&self, id: PoolId) -> Result<i64, PoolError> {
        self.lock().pools.get(&id).map(|e| e.use_count).ok_or(PoolError::Unknown { pool: id })
    }

    /// One user more. `None` if there is no such pool yet.
    pub(crate) fn take(&self, id: PoolId, revives: bool) -> Result<Option<Arc<Pool<D>>>, PoolError> {
        let mut table = self.lock();
        let Some(entry) = table.pools.get_mut(&id) else {
            let gone = revives && table.gone.contains(id);
            return if gone { Err(PoolError::Released { pool: id }) } else { Ok(None) };
        };
        if entry.use_count <= 0 && !revives {
            return Err(PoolError::Released { pool: id });
        }
        entry.use_count = entry.use_count.max(0) + 1;
        Ok(Some(Arc::clone(&entry.pool)))
    }

    /// One user less; at zero the pool is freeable. Of none too many, `counts_errors` says whether it is counted all the same.
    pub(crate) fn release(&self, id: PoolId, counts_errors: bool) -> Result<(), PoolError> {
        let mut table = self.lock();
        let entry = table.pools.get_mut(&id).ok_or(PoolError::Unknown { pool: id })?;
        if entry.use_count > 0 || counts_errors {
            entry.use_count -= 1;
            if entry.use_count >= 0 {
                return Ok(());
            }
        }
        Err(PoolError::OverReleased { pool: id })
    }

    /// A capture was routed to the pool.
    pub(crate) fn mark_captured(&self, id: PoolId) {
        if let Some(entry) = self.lock().pools.get_mut(&id) {
            entry.captured = true;
        }
    }

    /// Whether nobody uses a pool.
    pub(crate) fn is_freeable(&self, id: PoolId) -> bool {
        self.lock().pools.get(&id).is_some_and(|e| e.use_count <= 0)
    }

    /// Whether a capture was routed to a pool, or is about to be.
    pub(crate) fn is_captured(&self, id: PoolId) -> bool {
        self.lock().pools.get(&id).is_some_and(|e| e.captured)
    }

    /// Pools that nobody uses.
    pub(crate) fn freeable(&self) -> Vec<Arc<Pool<D>>> {
        self.lock().pools.values().filter(|e| e.use_count <= 0).map(|e| Arc::clone(&e.pool)).collect()
    }

    /// All pools.
    pub(crate) fn all(&self) -> Vec<Arc<Pool<D>>> {
        self.lock().pools.values().map(|e| Arc::clone(&e.pool)).collect()
    }

    /// From now on a pool lends, or does not.
    pub(crate) fn set_lending(&self, id: PoolId, lends: bool) {
        let mut table = self.lock();
        if lends && table.pools.contains_key(&id) {
            table.lending.insert(id);
        } else {
            table.lending.remove(&id);
        }
    }

    /// Pools that lend.
    pub(crate) fn lending(&self) -> Vec<Arc<Pool<D>>> {
        let table = self.lock();
        table.lending.iter().filter_map(|id| table.pools.get(id)).map(|e| Arc::clone(&e.pool)).collect()
    }

    /// Pools in use that no capture was ever routed to: their idle segments may go when memory is short.
    pub(crate) fn never_captured(&self) -> Vec<Arc<Pool<D>>> {
        let table = self.lock();
        table.pools.values().filter(|e| e.use_count > 0 && !e.captured).map(|e| Arc::clone(&e.pool)).collect()
    }

    /// Pools that may serve a default request that found nothing else; `held` says whether also those that graphs may hold.
    pub(crate) fn overflow(&self, held: bool) -> Vec<Arc<Pool<D>>> {
        let table = self.lock();
        let entries = table.use_on_oom.iter().filter_map(|id| table.pools.get(id));
        entries.filter(|e| held || !e.captured || e.use_count <= 0).map(|e| Arc::clone(&e.pool)).collect()
    }
}
