//! Copies an allocator's state into plain data, one arena at a time.

use std::sync::Arc;

use gpupool_device::Device;

use crate::arena::{Arena, ArenaState, Backing, BlockState as Phase, NONE};
use crate::inner::Inner;
use crate::pool::Pool;
use crate::state::{BackingKind, BlockState, BlockStatus, PoolState, SegmentState, State, StreamState};
use crate::stats::PoolStats;
use crate::units::to_bytes;

impl ArenaState {
    fn segment_states(&self) -> Vec<SegmentState> {
        self.segments
            .iter()
            .map(|(_, s)| SegmentState {
                ordinal: s.memory.ordinal,
                address: s.memory.base,
                size: s.memory.bytes,
                stream: s.stream,
                stream_handle: self.lanes[s.lane as usize].core.handle,
                pool: self.slots[s.slot as usize].pool,
                part: s.part,
                backing: match s.memory.backing {
                    Backing::Plain => BackingKind::Plain,
                    Backing::Handle(_) => BackingKind::Handle,
                    Backing::Provider(_) => BackingKind::Provider,
                },
                blocks: self.block_states(s.first, s.memory.base),
            })
            .collect()
    }

    fn block_states(&self, first: u32, base: gpupool_device::Address) -> Vec<BlockState> {
        let mut out = Vec::new();
        let mut at = first;
        while at != NONE {
            let b = &self.blocks[at];
            let used_by = self.uses.get(b.uses).map(|u| u.streams.iter().map(|u| u.core.id).collect());
            out.push(BlockState {
                address: base.offset(to_bytes(b.offset)),
                size: to_bytes(b.size),
                requested: b.requested,
                status: match b.state {
                    Phase::Live => BlockStatus::ActiveAllocated,
                    Phase::Pending => BlockStatus::ActivePendingFree,
                    Phase::Free | Phase::Binned | Phase::Vacant => BlockStatus::Inactive,
                },
                binned: b.state == Phase::Binned,
                stream: self.lanes[b.lane as usize].core.id,
                used_by: used_by.unwrap_or_default(),
                generation: b.generation,
            });
            at = b.next;
        }
        out
    }
}

impl<D: Device> Arena<D> {
    /// Bytes of host memory per block record, and how many records there are.
    pub(crate) fn host_bytes(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.blocks.host_bytes(), state.blocks.len())
    }
}

impl<D: Device> Inner<D> {
    /// Everything, as data. O(blocks). Each arena is locked while its part is copied.
    pub(crate) fn state(&self) -> State {
        let device = self.shared.driver.device();
        let mut segments: Vec<SegmentState> =
            self.arenas().iter().flat_map(|a| a.state.lock().segment_states()).collect();
        segments.sort_by_key(|s| s.address);
        let pools = {
            let table = self.pools.lock();
            let entries = table.pools.values();
            entries.map(|e| (Arc::clone(&e.pool), e.use_count, e.captured)).collect::<Vec<_>>()
        };
        let pools = pools
            .into_iter()
            .map(|(pool, use_count, captured)| {
                let PoolStats { allocated_bytes, reserved_bytes } = pool.stats();
                PoolState { id: pool.id, use_count, captured, allocated_bytes, reserved_bytes }
            })
            .collect();
        let streams = self.shared.context.streams.lock().clone();
        let streams = streams.iter().map(|s| StreamState { id: s.id, handle: s.handle, retired: s.is_retired() });
        let limit = self.shared.totals.lock().limit;
        State {
            device: device.ordinal(),
            policy: self.shared.config.policy(),
            total_memory: device.properties().total_memory,
            limit,
            segments,
            pools,
            streams: streams.collect(),
            stats: self.stats(),
        }
    }
}

impl<D: Device> Pool<D> {
    /// The pool's figures. O(1), no lock.
    pub(crate) fn stats(&self) -> PoolStats {
        PoolStats {
            allocated_bytes: self.allocated_bytes().read(),
            reserved_bytes: self.counters.reserved_bytes.read(),
        }
    }
}
