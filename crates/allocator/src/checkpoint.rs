//! Checkpoints of a private pool: its layout noted, and brought back later, so that a tree of graphs can go on from a branch.

use std::collections::HashMap;
use std::sync::Arc;

use gpupool_device::{Address, Device};

use crate::allocation::Allocation;
use crate::arena::{ArenaState, BlockState, Handed, NONE};
use crate::error::{AllocError, PoolError};
use crate::history::Action;
use crate::ids::{Part, PoolId};
use crate::inner::{Inner, Served};
use crate::stream::Stream;
use crate::units::{Units, to_bytes, to_units};

/// The layout of a pool at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolCheckpoint {
    pool: PoolId,
    /// Whose pool: others may have one of this id.
    allocator: u64,
    segments: Vec<SegmentLayout>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct SegmentLayout {
    ordinal: u64,
    /// Units and whether live, front to back.
    blocks: Vec<(Units, bool)>,
}

impl PoolCheckpoint {
    /// The pool it was taken of.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        self.pool
    }
}

/// What restoring a checkpoint did to the pool's blocks.
#[derive(Debug)]
pub struct Restored<D: Device> {
    /// Blocks that were live before: their handles name nothing any more, and dropping them does nothing.
    pub freed: Vec<Address>,
    /// The blocks that were live in the checkpoint, live again.
    pub allocated: Vec<Allocation<D>>,
}

impl<D: Device> Inner<D> {
    /// Notes the layout of a pool. Large segments come first, then by age.
    pub(crate) fn checkpoint(&self, id: PoolId) -> Result<PoolCheckpoint, AllocError> {
        let pool = self.pools.get(id)?;
        pool.arena.flush_deferred(|_| true);
        let mut state = pool.arena.lock();
        state.nothing_lent(id)?;
        state.flush_bins(&pool.arena.counters);
        let mut segments: Vec<(Part, SegmentLayout)> = Vec::new();
        for (_, segment) in state.segments.iter().filter(|(_, s)| s.slot == pool.slot) {
            let mut blocks = Vec::new();
            let mut at = segment.first;
            while at != NONE {
                let block = &state.blocks[at];
                if block.state == BlockState::Pending {
                    let address = segment.memory.base.offset(to_bytes(block.offset));
                    return Err(PoolError::PendingBlock { pool: id, address }.into());
                }
                blocks.push((block.size, block.state == BlockState::Live));
                at = block.next;
            }
            segments.push((segment.part, SegmentLayout { ordinal: segment.memory.ordinal, blocks }));
        }
        segments.sort_by_key(|(part, s)| (std::cmp::Reverse(*part), s.ordinal));
        Ok(PoolCheckpoint { pool: id, allocator: self.id, segments: segments.into_iter().map(|(_, s)| s).collect() })
    }

    /// Brings a layout back: frees every live block of the pool, then carves each noted segment as it was. Segments made since stay,
    /// free. Nothing is changed if the checkpoint does not fit.
    pub(crate) fn restore(&self, checkpoint: &PoolCheckpoint, stream: &Stream<D>) -> Result<Restored<D>, AllocError> {
        let id = checkpoint.pool;
        if checkpoint.allocator != self.id {
            return Err(PoolError::CheckpointMismatch { pool: id, why: "it is another allocator's" }.into());
        }
        if self.shared.registry.is_drawn_from(id) {
            return Err(AllocError::PoolInCapture { pool: id });
        }
        let pool = self.pools.get(id)?;
        pool.arena.ready(Some(self), &[])?;
        if self.pools.use_count(id)? <= 0 {
            return Err(PoolError::Released { pool: id }.into());
        }
        pool.arena.flush_deferred(|_| true);
        let (freed, handed) = {
            let mut guard = pool.arena.lock();
            let state = &mut *guard;
            // What is lent is a live block of the pool, and its owner knows nothing of checkpoints.
            state.nothing_lent(id)?;
            let mismatch = |why| PoolError::CheckpointMismatch { pool: id, why };
            let by_ordinal: HashMap<u64, u32> = state
                .segments
                .iter()
                .filter(|(_, s)| s.slot == pool.slot)
                .map(|(at, s)| (s.memory.ordinal, at))
                .collect();
            if !checkpoint.segments.iter().all(|s| by_ordinal.contains_key(&s.ordinal)) {
                return Err(mismatch("a segment is gone").into());
            }
            if !checkpoint.segments.iter().all(|s| state.has_room_for(by_ordinal[&s.ordinal], &s.blocks)) {
                return Err(mismatch(
                    "some of its memory is gone, or parts of a segment belong to different streams now",
                )
                .into());
            }
            let in_pool = |state: &ArenaState, block| {
                let lane = state.blocks[block].lane as usize;
                state.lanes[lane].slot == pool.slot
            };
            let ids: Vec<u32> = state.blocks.ids().filter(|b| in_pool(state, *b)).collect();
            if ids.iter().any(|b| state.blocks[*b].state == BlockState::Pending || state.has_recorded_uses(*b)) {
                return Err(mismatch("a block has uses on other streams").into());
            }
            let live: Vec<u32> = ids.into_iter().filter(|b| state.blocks[*b].state == BlockState::Live).collect();
            let counters = &pool.arena.counters;
            let mut freed = Vec::new();
            for block in live {
                let base = state.segments.get(state.blocks[block].segment).map(|s| s.memory.base);
                freed.extend(base.map(|b| b.offset(to_bytes(state.blocks[block].offset))));
                state.note_freed(block, &[Action::FreeRequested, Action::FreeCompleted], None);
                state.forget_uses(block);
                state.free_now(block, counters);
            }
            state.flush_bins(counters);
            let mut handed = Vec::new();
            for layout in &checkpoint.segments {
                handed.extend(state.carve(by_ordinal[&layout.ordinal], &layout.blocks, counters));
            }
            for handed in &handed {
                state.record_owner(handed.block(), &stream.core);
                state.note_handed(handed, handed.bytes, stream.core.handle, None);
            }
            freed.sort_unstable();
            (freed, handed)
        };
        let allocated = handed
            .into_iter()
            .map(|handed| Allocation::new(Served { arena: Arc::clone(&pool.arena), handed }))
            .collect();
        Ok(Restored { freed, allocated })
    }

    /// Hands out exactly the range at `address`, which lies in a free block that the stream's requests would be served from.
    /// `None` if it is not free.
    pub(crate) fn alloc_at(
        self: &Arc<Self>,
        requested: u64,
        address: Address,
        stream: &Stream<D>,
    ) -> Result<Option<Served<D>>, AllocError> {
        let request = self.request(requested, stream)?;
        let counters = &request.arena.counters;
        let mut guard = request.arena.lock();
        let state = &mut *guard;
        state.flush_bins(counters);
        let first = request.lane - request.part.index() as u32;
        let Some(size) = to_units(request.size) else { return Ok(None) };
        for lane in [first, first + 1] {
            for id in state.lanes[lane as usize].index.in_order(&state.blocks) {
                let block = &state.blocks[id];
                let Some(segment) = state.segments.get(block.segment) else { continue };
                let start = segment.memory.base.offset(to_bytes(block.offset));
                let inside = address >= start && address.offset_from(start).is_multiple_of(512);
                let Some(skip) = inside.then(|| to_units(address.offset_from(start))).flatten() else { continue };
                if u64::from(skip) + u64::from(size) > u64::from(block.size) {
                    continue;
                }
                let handed = state.hand_out_inside(id, skip, &request, counters);
                return Ok(handed.map(|handed| request.served(state, handed)));
            }
        }
        Ok(None)
    }
}

impl ArenaState {
    /// That no run of the pool is out on loan.
    fn nothing_lent(&mut self, pool: PoolId) -> Result<(), PoolError> {
        match self.loans_out(&[]) {
            (0, _) => Ok(()),
            (loans, bytes) => Err(PoolError::LoansOut { pool, loans, bytes }),
        }
    }

    /// Whether live blocks of a layout lie where memory is still mapped, in a segment whose blocks join once they are free.
    fn has_room_for(&self, segment: u32, blocks: &[(Units, bool)]) -> bool {
        let Some(found) = self.segments.get(segment) else { return false };
        let mut offset = 0;
        for (size, live) in blocks {
            if *live && found.pages.as_ref().is_some_and(|table| !table.covers(offset, offset + size)) {
                return false;
            }
            offset += size;
        }
        // Free neighbours of two lanes stay apart.
        let (mut at, mut lane) = (found.first, None);
        while at != NONE {
            let block = &self.blocks[at];
            if block.state != BlockState::Hole && *lane.get_or_insert(block.lane) != block.lane {
                return false;
            }
            at = block.next;
        }
        true
    }

    /// As [`carve`](Self::carve), in a segment that is mapped in parts.
    fn carve_pages(
        &mut self,
        first: u32,
        blocks: &[(Units, bool)],
        counters: &crate::counters::ArenaCounters,
    ) -> Vec<Handed> {
        let (mut out, mut at, mut offset) = (Vec::new(), first, 0);
        for (size, live) in blocks {
            while at != NONE && self.end_of(at) <= offset {
                at = self.blocks[at].next;
            }
            if *live && at != NONE && self.blocks[at].state == BlockState::Free {
                at = self.hold(at, offset, offset + size, counters);
                out.extend(self.activate(at, to_bytes(*size), counters));
            }
            offset += size;
        }
        out
    }

    /// Carves a wholly free segment into blocks of these sizes; returns the live ones.
    fn carve(
        &mut self,
        segment: u32,
        blocks: &[(Units, bool)],
        counters: &crate::counters::ArenaCounters,
    ) -> Vec<Handed> {
        let mut out = Vec::new();
        let mut to_free = Vec::new();
        let Some((mut at, paged)) = self.segments.get(segment).map(|s| (s.first, s.pages.is_some())) else {
            return out;
        };
        if paged {
            return self.carve_pages(at, blocks, counters);
        }
        for (size, live) in blocks {
            self.unindex(at);
            self.place(at, *size, counters);
            let handed = self.activate(at, to_bytes(*size), counters);
            match handed {
                Some(handed) if *live => out.push(handed),
                _ => to_free.push(at),
            }
            at = self.blocks[at].next;
        }
        for id in to_free {
            self.free_now(id, counters);
        }
        self.flush_bins(counters);
        out
    }

    /// Hands out a part of a free block, `skip` units into it. What lies before it is handed out and freed again, as in PyTorch.
    fn hand_out_inside<D: Device>(
        &mut self,
        id: u32,
        skip: Units,
        request: &crate::inner::Request<D>,
        counters: &crate::counters::ArenaCounters,
    ) -> Option<Handed> {
        self.unindex(id);
        if skip == 0 {
            return self.hand_out(id, request.size, request.requested, counters);
        }
        self.place(id, skip, counters);
        self.activate(id, to_bytes(skip), counters)?;
        let rest = self.blocks[id].next;
        self.unindex(rest);
        let handed = self.hand_out(rest, request.size, request.requested, counters);
        self.free_now(id, counters);
        self.flush_bins(counters);
        handed
    }
}
