//! The back end `stream-ordered`: every block is an allocation of the driver's own pool, and goes back to it in the order of its stream.
//!
//! What this allocator adds is everything around it: limits, statistics, snapshots, recorded uses, pools for graphs, errors that explain
//! themselves. A block is a segment of its own, so all of that works as it does under the other policies; there is nothing to cache and
//! nothing to split. The pool is one of ours (the device's default pool is other libraries', too) and keeps what is freed, since giving it
//! back at each synchronisation would cost more than it saves; emptying the cache trims it.
//!
//! # In a capture
//!
//! Allocations and frees of a capturing stream become memory nodes of its graph. Such a block has memory behind it only while a launch of
//! the graph runs, from its allocation node to its free node; one that is live when the capture ends stays readable until the next launch,
//! or until the graph and all executables of it are gone, whoever holds its handle. The graph's memory is the driver's to manage: it is no part of the pool.
//!
//! # Invariants
//!
//! * **O1** A block's memory is freed on its own stream, or once the device is done with it.
//! * **O2** A block from outside a capture is not freed on a capturing stream; it stays in the arena, serves later requests, and goes with
//!   the idle segments.
//! * **O3** A block of a graph serves nobody once its capture is over.

use std::sync::{Arc, OnceLock};

use gpupool_device::{
    Address, CaptureId, CaptureStatus, Device, DriverPoolFigures, DriverPoolHandle, DriverResult, StreamHandle,
};

use crate::arena::{Arena, ArenaGuard, ArenaState, Backing, BlockId, LaneKind, Segment};
use crate::error::AllocError;
use crate::growth::Idle;
use crate::inner::{Inner, Request};
use crate::ladder::Outcome;
use crate::reclaim::Trimmed;
use crate::shared::Shared;

/// An allocator's pool of the driver's, made when memory is first asked for.
#[derive(Debug, Default)]
pub(crate) struct DriverPool(OnceLock<DriverPoolHandle>);

impl<D: Device> Shared<D> {
    fn driver_pool(&self) -> DriverResult<DriverPoolHandle> {
        if let Some(pool) = self.driver_pool.0.get() {
            return Ok(*pool);
        }
        let made = self.driver.pool_create()?;
        let kept = *self.driver_pool.0.get_or_init(|| made);
        if kept != made {
            // Another thread was first.
            self.driver.pool_destroy(made)?;
        }
        Ok(kept)
    }

    /// Memory for a block of `stream`.
    pub(crate) fn make_ordered(&self, bytes: u64, stream: StreamHandle) -> DriverResult<(Address, Backing)> {
        let pool = self.driver_pool()?;
        let capture = self.driver.capture_status(stream)?.id();
        let base = self.driver.mem_alloc_async(pool, bytes, stream)?;
        Ok((base, Backing::Ordered { capture }))
    }

    /// Gives a block's memory back that the device is done with. A graph's is the graph's.
    pub(crate) fn free_ordered(&self, base: Address, capture: Option<CaptureId>) -> DriverResult<()> {
        if capture.is_some() { Ok(()) } else { self.driver.mem_free(base) }
    }

    /// What the driver's pool holds; `None` before it was made, and under other policies.
    pub(crate) fn driver_pool_figures(&self) -> DriverResult<Option<DriverPoolFigures>> {
        self.driver_pool.0.get().map(|pool| self.driver.pool_figures(*pool)).transpose()
    }

    /// The pool goes with the allocator's last block.
    pub(crate) fn drop_driver_pool(&self) {
        if let Some(pool) = self.driver_pool.0.get()
            && let Err(e) = self.driver.pool_destroy(*pool)
        {
            tracing::warn!(error = %e, "the driver's pool was not destroyed");
        }
    }
}

/// How a block's memory goes.
enum Way {
    /// In the order of this stream.
    InOrder(StreamHandle),
    /// With its graph.
    WithItsGraph,
}

impl<D: Device> Arena<D> {
    /// A block has just become free: its memory goes back, if that is possible now. Gives the arena's lock back before the driver is called.
    pub(crate) fn return_freed(&self, mut state: ArenaGuard<'_, D>, id: BlockId) {
        let Some(idle) = state.idle_of(id) else { return };
        let over = state.lanes[idle.lane as usize].kind == LaneKind::Neutral && state.is_graph_memory(&idle);
        let gone = if over { state.detach(idle.block) } else { None };
        drop(state);
        match gone {
            Some(segment) => self.forget_graph_memory(vec![segment]),
            None => self.return_in_order(&idle),
        }
    }

    /// Gives a segment back that has just become wholly free, if it is a block of the driver's pool and that is possible now.
    fn return_in_order(&self, idle: &Idle) {
        let way = match self.way(idle) {
            Ok(Some(way)) => way,
            Ok(None) => return,
            Err(e) => {
                tracing::debug!(error = %e, "a freed block stays, since its stream's capture status is not known");
                return;
            }
        };
        let driver = &self.shared.driver;
        let give = |base: Address| match way {
            Way::InOrder(stream) => driver.mem_free_async(base, stream),
            Way::WithItsGraph => Ok(()),
        };
        self.hand_back(
            idle,
            &mut Trimmed::default(),
            || true,
            |memory, part, pool| {
                give(memory.base)?;
                self.shared.totals.released(memory.bytes, part, pool);
                Ok(())
            },
        );
    }

    /// As [`return_in_order`](Self::return_in_order), for everything in the arena. O(segments).
    pub(crate) fn return_all_in_order(&self) {
        self.idle_segments(|_| true).iter().for_each(|idle| self.return_in_order(idle));
    }

    fn way(&self, idle: &Idle) -> DriverResult<Option<Way>> {
        let (core, kind, slot, capture) = {
            let state = self.lock();
            let lane = &state.lanes[idle.lane as usize];
            let Some(Backing::Ordered { capture }) = state.segments.get(idle.segment).map(|s| &s.memory.backing) else {
                return Ok(None);
            };
            (Arc::clone(&lane.core), lane.kind, lane.slot, *capture)
        };
        let usable = kind != LaneKind::Neutral && core.is_usable();
        let status = if usable { self.shared.driver.capture_status(core.handle)? } else { CaptureStatus::None };
        Ok(match (capture, status) {
            // What a private pool holds may be baked into a graph.
            (None, CaptureStatus::None) if usable && self.is_default_slot(slot) => Some(Way::InOrder(core.handle)),
            (None, _) => None,
            (Some(of), CaptureStatus::Active(now)) if of == now => Some(Way::InOrder(core.handle)),
            (Some(_), _) => Some(Way::WithItsGraph),
        })
    }

    /// Blocks of captures that are over have left the arena: so do their figures.
    pub(crate) fn forget_graph_memory(&self, gone: Vec<Segment>) {
        for segment in gone {
            let (slot, bytes) = (segment.slot as usize, segment.memory.bytes);
            let state = self.lock();
            let (pool, counters) = (state.slots[slot].pool, state.slots[slot].counters.clone());
            if let Some(counters) = counters {
                counters.reserved_bytes.decrease(segment.part, bytes as i64);
            }
            drop(state);
            self.shared.totals.released(bytes, segment.part, pool);
        }
    }
}

impl ArenaState {
    /// Takes the free blocks out that belong to graphs whose capture is over: what is in a pool's neutral lanes (O3). O(segments).
    pub(crate) fn take_graph_memory(&mut self) -> Vec<Segment> {
        let neutral = self.idle_in_order(|lane| lane.kind == LaneKind::Neutral);
        let gone: Vec<Idle> = neutral.into_iter().filter(|idle| self.is_graph_memory(idle)).collect();
        gone.iter().filter_map(|idle| self.detach(idle.block)).collect()
    }

    fn is_graph_memory(&self, idle: &Idle) -> bool {
        let backing = self.segments.get(idle.segment).map(|s| &s.memory.backing);
        matches!(backing, Some(Backing::Ordered { capture: Some(_) }))
    }
}

impl<D: Device> Inner<D> {
    /// Gives back what the driver's pool holds and nobody has. With `wait` it waits on the host for the frees under way, but on no capturing
    /// stream. Returns bytes.
    pub(crate) fn trim_driver_pool(&self, wait: bool) -> Result<u64, AllocError> {
        let shared = &self.shared;
        let Some(pool) = shared.driver_pool.0.get() else { return Ok(0) };
        let reserved = || Ok::<_, AllocError>(shared.driver.pool_figures(*pool)?.reserved);
        let before = reserved()?;
        if wait {
            let streams = shared.context.streams.lock().clone();
            // To have asked an event is not enough: the driver looks at its frees when somebody waits.
            for core in streams.iter().filter(|core| core.is_usable()) {
                let event = shared.driver.event()?;
                let waited = match shared.driver.event_record_outside_captures(event, core.handle) {
                    Ok(true) => shared.driver.event_synchronize(event),
                    recorded => recorded.map(drop),
                };
                shared.driver.recycle(event);
                waited?;
            }
        }
        shared.driver.pool_trim(*pool, 0)?;
        Ok(before.saturating_sub(reserved()?))
    }

    /// Waits for the frees under way, empties the driver's pool, and asks it again: what it holds in other pieces is the device's then.
    pub(crate) fn empty_driver_pool_then_grow(&self, request: &Request<D>) -> Result<Outcome<D>, AllocError> {
        self.trim_driver_pool(!request.in_capture)?;
        self.grow(request, true)
    }
}
