//! Copies an allocator's state into plain data, one segment at a time, so that nobody waits for long.
//!
//! With the history on, the pieces are then brought to one point in time: each knows the last event before it was copied, and the
//! later ones are applied to it ([`crate::history`], H1).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpupool_device::{Address, Device};

use crate::arena::{Arena, ArenaState, Backing, BlockState as Phase, NONE, Segment, Use};
use crate::forward::{bring_forward, free_block};
use crate::ids::StreamId;
use crate::inner::Inner;
use crate::pool::Pool;
use crate::state::{BackingKind, BlockState, BlockStatus, GraphState, PoolState, SegmentState, State, StreamState};
use crate::stats::PoolStats;
use crate::units::{Units, to_bytes};

/// Blocks of the fullest segment of small ones.
const ROOM: usize = 4_096;

/// Empty, with room for so many blocks in memory that was written to before: the first write to a page of new memory takes a while.
fn used(blocks: usize) -> Vec<BlockState> {
    let mut room = vec![free_block(Address::NULL, 0, StreamId(0), 0); blocks];
    room.clear();
    room
}

impl ArenaState {
    /// A segment; one that is mapped in parts is shown as its parts. The blocks of one that is not are put into `room`: memory that is
    /// there already keeps nobody waiting.
    fn segment_states(&self, id: u32, room: &mut Vec<BlockState>) -> Vec<SegmentState> {
        let Some(s) = self.segments.get(id) else { return Vec::new() };
        if s.pages.is_some() {
            return self.run_states(s);
        }
        vec![SegmentState {
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
                Backing::Pages => BackingKind::Pages,
                Backing::Provider(_) => BackingKind::Provider,
                Backing::Away => BackingKind::Away,
                Backing::Ordered { .. } => BackingKind::DriverPool,
            },
            handles: Vec::new(),
            blocks: self.block_states(s.first, s.memory.base, None, std::mem::take(room)),
        }]
    }

    fn run_states(&self, s: &Segment) -> Vec<SegmentState> {
        let Some(table) = &s.pages else { return Vec::new() };
        let state = |(start, end, ordinal): (Units, Units, u64)| SegmentState {
            ordinal,
            address: s.memory.base.offset(to_bytes(start)),
            size: to_bytes(end - start),
            stream: s.stream,
            stream_handle: self.lanes[s.lane as usize].core.handle,
            pool: self.slots[s.slot as usize].pool,
            part: s.part,
            backing: BackingKind::Pages,
            handles: table.within(start, end).map(|(_, p)| p.handle.bytes).collect(),
            blocks: self.block_states(s.first, s.memory.base, Some((start, end)), Vec::new()),
        };
        let away = s.away.iter().map(|a| SegmentState {
            backing: BackingKind::Away,
            handles: Vec::new(),
            ..state((a.offset, a.end(), a.ordinal))
        });
        table.mapped_runs().into_iter().map(state).chain(away).collect()
    }

    /// The blocks of a segment, or those in a range of it. What was free when memory went away may lie in several ranges, away and mapped:
    /// each has its part.
    fn block_states(
        &self,
        first: u32,
        base: gpupool_device::Address,
        range: Option<(Units, Units)>,
        mut out: Vec<BlockState>,
    ) -> Vec<BlockState> {
        let mut at = first;
        while at != NONE {
            let b = &self.blocks[at];
            let (first, last) = range.unwrap_or((b.offset, b.offset + b.size));
            let (first, last) = (first.max(b.offset), last.min(b.offset + b.size));
            if first >= last {
                at = b.next;
                continue;
            }
            let size = to_bytes(last - first);
            // That its owner uses a live block goes without saying; what a pending one waits for does not.
            let said = |used: &&Use| b.state != Phase::Live || !used.by_owner;
            let used_by = self.uses.get(b.uses).map(|u| u.streams.iter().filter(said).map(|u| u.core.id).collect());
            out.push(BlockState {
                address: base.offset(to_bytes(first)),
                size,
                requested: if last - first < b.size { b.requested.min(size) } else { b.requested },
                status: match b.state {
                    Phase::Live => BlockStatus::ActiveAllocated,
                    Phase::Pending => BlockStatus::ActivePendingFree,
                    Phase::Free | Phase::Binned | Phase::Held | Phase::Hole | Phase::Vacant => BlockStatus::Inactive,
                },
                binned: b.state == Phase::Binned,
                stream: self.lanes[b.lane as usize].core.id,
                used_by: used_by.unwrap_or_default(),
                generation: b.generation,
                graph: None,
            });
            at = b.next;
        }
        out
    }
}

impl<D: Device> Arena<D> {
    /// Bytes of host memory per block record, and how many records there are.
    pub(crate) fn host_bytes(&self) -> (usize, usize) {
        let state = self.lock();
        (state.blocks.host_bytes(), state.blocks.used())
    }
}

impl<D: Device> Inner<D> {
    /// The segments of all arenas, each with the number of events before it was copied. An arena is locked while one segment of it is.
    fn pieces(&self) -> BTreeMap<u64, (u64, SegmentState)> {
        let mut pieces = BTreeMap::new();
        // Ranges that are mapped in parts, each part with a number of its own.
        let mut seen = BTreeSet::new();
        let mut room = used(ROOM);
        // A segment may move to an arena that was looked at before: the second round finds it.
        for _ in 0..2 {
            for arena in self.arenas() {
                let ids: Vec<(u32, u64)> = arena.lock().segments.iter().map(|(id, s)| (id, s.memory.ordinal)).collect();
                for (id, ordinal) in ids {
                    if pieces.contains_key(&ordinal) || seen.contains(&ordinal) {
                        continue;
                    }
                    let (at, mut copied) = {
                        let state = arena.lock();
                        (self.shared.history.sequence(), state.segment_states(id, &mut room))
                    };
                    // Taken, and so to be put back.
                    if room.capacity() == 0
                        && let [one] = &mut copied[..]
                    {
                        room = std::mem::take(&mut one.blocks);
                        one.blocks = room.clone();
                        room.clear();
                    }
                    if room.capacity() < ROOM {
                        room = used(ROOM);
                    }
                    if !copied.is_empty() {
                        seen.insert(ordinal);
                    }
                    for piece in copied {
                        pieces.entry(piece.ordinal).or_insert((at, piece));
                    }
                }
            }
        }
        pieces
    }

    /// Everything, as data. O(blocks).
    pub(crate) fn state(&self) -> State {
        let device = self.shared.driver.device();
        let pieces = self.pieces();
        let history = self.shared.history.copy();
        let mut segments: Vec<SegmentState> = match &history {
            Some(history) => bring_forward(pieces.into_values(), history),
            None => pieces.into_values().map(|(_, segment)| segment).collect(),
        };
        segments.sort_by_key(|s| s.address);
        let graphs = self.hooks.graphs(self.id);
        let captures = self.shared.registry.states();
        attribute(&mut segments, &graphs);
        let pools = {
            let table = self.pools.lock();
            let entries = table.pools.values();
            entries.map(|e| (Arc::clone(&e.pool), e.use_count, e.captured)).collect::<Vec<_>>()
        };
        let pools = pools
            .into_iter()
            .map(|(pool, use_count, captured)| {
                let PoolStats { allocated_bytes, reserved_bytes } = pool.stats();
                let lent_bytes = pool.arena.look_at_loans(&[]).1;
                let (away_bytes, tag) = (pool.arena.lock().away_bytes(), pool.arena.idle.options.lock().tag.clone());
                let (residency, host_bytes) = (pool.arena.idle.residency(), pool.arena.idle.host_bytes());
                let id = pool.id;
                PoolState {
                    id,
                    use_count,
                    captured,
                    allocated_bytes,
                    reserved_bytes,
                    residency,
                    tag,
                    away_bytes,
                    host_bytes,
                    lent_bytes,
                }
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
            graphs,
            captures,
            stats: self.stats(),
            history,
        }
    }
}

/// Says of the results of graphs whose they are.
fn attribute(segments: &mut [SegmentState], graphs: &[GraphState]) {
    let of = |graph: &GraphState| {
        graph.outputs.iter().map(|b| (b.range.address, (b.generation, graph.id))).collect::<Vec<_>>()
    };
    let outputs: BTreeMap<Address, Vec<(u32, u64)>> =
        graphs.iter().flat_map(of).fold(BTreeMap::new(), |mut by, (at, of)| {
            by.entry(at).or_insert_with(Vec::new).push(of);
            by
        });
    if outputs.is_empty() {
        return;
    }
    for block in segments.iter_mut().flat_map(|s| &mut s.blocks).filter(|b| b.status != BlockStatus::Inactive) {
        let of =
            outputs.get(&block.address).into_iter().flatten().find(|(generation, _)| *generation == block.generation);
        block.graph = of.map(|(_, graph)| *graph);
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
