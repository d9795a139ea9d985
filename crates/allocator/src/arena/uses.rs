//! Recorded uses: which streams may still touch a block that its owner has freed.
//!
//! A block that is freed with recorded uses is pending until the marks noted for those streams are done. One queue a stream, so a
//! slow stream holds up nothing but what it uses itself (fault catalogue, 15).

use std::collections::VecDeque;
use std::sync::Arc;

use gpupool_device::NodeId;

use super::{ArenaState, BlockId, NONE};
use crate::captures::Range;
use crate::counters::ArenaCounters;
use crate::ids::StreamId;
use crate::stream::StreamCore;
use crate::units::to_bytes;

/// One stream's use of a block.
#[derive(Clone, Debug)]
pub(crate) struct Use {
    pub(crate) core: Arc<StreamCore>,
    /// The mark that covers it, where the caller said when it ended; else it may go on until the block is freed.
    pub(crate) until: Option<u64>,
    /// It is the use of the block's owner, in whose lane the block does not lie: one that a capture has left behind, or that came from a
    /// retired stream.
    pub(crate) by_owner: bool,
}

/// What is recorded for one block. Kept beside the block's record, since few blocks have any.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    /// Streams that the block was used on, beyond its own.
    pub(crate) streams: Vec<Use>,
    /// Those of them that were recorded inside a capture. Part of the block's record, so no later block can inherit them.
    pub(crate) captured: Vec<StreamId>,
    /// Queues that still hold the block.
    pub(crate) waiting: u32,
    /// Nodes of the capture's graph after which no recorded use is outstanding.
    pub(crate) markers: Vec<NodeId>,
}

impl Uses {
    /// Forgets everything but the memory that it takes.
    fn clear(&mut self) {
        self.streams.clear();
        self.captured.clear();
        self.waiting = 0;
        self.markers.clear();
    }

    /// Whether a stream is recorded, and not only inside a capture.
    fn is_used_outside(&self, stream: StreamId) -> bool {
        self.streams.iter().any(|u| u.core.id == stream) && !self.captured.contains(&stream)
    }
}

/// The side table of recorded uses. What a slot has allocated stays with it, so that recording a use mostly allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct UsesTable {
    slots: Vec<Uses>,
    vacant: Vec<u32>,
}

impl UsesTable {
    fn insert(&mut self) -> u32 {
        self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Uses::default());
            self.slots.len() as u32 - 1
        })
    }

    fn remove(&mut self, at: u32) {
        if let Some(uses) = self.slots.get_mut(at as usize) {
            uses.clear();
            self.vacant.push(at);
        }
    }

    pub(crate) fn get(&self, at: u32) -> Option<&Uses> {
        self.slots.get(at as usize)
    }

    pub(crate) fn get_mut(&mut self, at: u32) -> Option<&mut Uses> {
        self.slots.get_mut(at as usize)
    }
}

/// Blocks that wait for one stream, oldest mark first.
#[derive(Debug)]
pub(crate) struct PendingQueue {
    pub(crate) core: Arc<StreamCore>,
    pub(crate) blocks: VecDeque<(u64, BlockId)>,
    /// The newest mark, and how many blocks were queued with it.
    newest: (u64, usize),
}

impl PendingQueue {
    fn of(core: &Arc<StreamCore>) -> Self {
        Self { core: Arc::clone(core), blocks: VecDeque::new(), newest: (0, 0) }
    }

    /// Queues a block; returns how many share the mark, if no event covers it yet.
    fn push(&mut self, mark: u64, id: BlockId) -> usize {
        if self.blocks.back().is_none_or(|(last, _)| *last <= mark) {
            self.blocks.push_back((mark, id));
        } else {
            let at = self.blocks.partition_point(|(m, _)| *m <= mark);
            self.blocks.insert(at, (mark, id));
        }
        if mark != self.newest.0 {
            self.newest = (mark.max(self.newest.0), 0);
        }
        self.newest.1 += 1;
        if self.core.is_closed(mark) { 0 } else { self.newest.1 }
    }
}

impl ArenaState {
    /// Notes that `core` uses a block until it is freed. Its own stream needs no note. O(streams recorded for the block).
    pub(crate) fn record_use(&mut self, id: BlockId, core: &Arc<StreamCore>, in_capture: bool) {
        if !in_capture {
            return self.record_use_until(id, core, None);
        }
        let outside = self.uses.get(self.blocks[id].uses).is_some_and(|uses| uses.is_used_outside(core.id));
        self.record_use_until(id, core, None);
        // What the stream did with the block before it joined the capture goes on whatever the capture becomes.
        if (!outside || self.rules.capture_ends_earlier_uses)
            && let Some(uses) = self.uses.get_mut(self.blocks[id].uses)
            && !uses.captured.contains(&core.id)
        {
            uses.captured.push(core.id);
        }
    }

    /// Notes that a block was handed out to `owner` and lies in a lane that is not the owner's: its free must wait for the owner.
    pub(crate) fn record_owner(&mut self, id: BlockId, owner: &Arc<StreamCore>) {
        self.record_use_until(id, owner, None);
        let uses = self.uses.get_mut(self.blocks[id].uses);
        if let Some(known) = uses.and_then(|uses| uses.streams.iter_mut().find(|u| u.core.id == owner.id)) {
            known.by_owner = true;
        }
    }

    /// Forgets all uses of a block.
    pub(crate) fn forget_uses(&mut self, id: BlockId) {
        let uses = std::mem::replace(&mut self.blocks[id].uses, NONE);
        if uses != NONE {
            self.uses.remove(uses);
        }
    }

    /// Whether streams were recorded for a block by name.
    pub(crate) fn has_recorded_uses(&self, id: BlockId) -> bool {
        self.uses.get(self.blocks[id].uses).is_some_and(|uses| uses.streams.iter().any(|u| !u.by_owner))
    }

    /// Notes that `core` uses a block until that mark, or until it is freed. Its own stream needs no note. O(streams recorded for the
    /// block).
    pub(crate) fn record_use_until(&mut self, id: BlockId, core: &Arc<StreamCore>, until: Option<u64>) {
        if self.lanes[self.blocks[id].lane as usize].core.id == core.id {
            return;
        }
        if self.blocks[id].uses == NONE {
            self.blocks[id].uses = self.uses.insert();
        }
        let Some(uses) = self.uses.get_mut(self.blocks[id].uses) else { return };
        if until.is_some() && !self.rules.capture_ends_earlier_uses {
            uses.captured.retain(|captured| *captured != core.id);
        }
        match uses.streams.iter_mut().find(|u| u.core.id == core.id) {
            // Without an end it may go on: what says less wins.
            Some(known) => {
                known.until = known.until.zip(until).map(|(a, b)| a.max(b));
                known.by_owner = false;
            }
            None => uses.streams.push(Use { core: Arc::clone(core), until, by_owner: false }),
        }
    }

    /// A capture is over, and with it the uses of a block that were recorded inside it. Whether the block has no other.
    pub(crate) fn forget_captured_uses(&mut self, id: BlockId) -> bool {
        self.uses.get_mut(self.blocks[id].uses).is_none_or(|uses| {
            let captured = std::mem::take(&mut uses.captured);
            uses.streams.retain(|u| !captured.contains(&u.core.id));
            uses.streams.is_empty()
        })
    }

    /// The uses recorded for a block.
    pub(crate) fn uses_of(&self, id: BlockId) -> Vec<Use> {
        self.uses.get(self.blocks[id].uses).map(|u| u.streams.clone()).unwrap_or_default()
    }

    /// Queues a freed block for every stream recorded for it that may not be done with it; with none left it is free at once. Returns the
    /// streams that an event must be recorded on: where `share` blocks wait for one.
    pub(crate) fn make_pending(&mut self, id: BlockId, share: usize, counters: &ArenaCounters) -> Vec<Arc<StreamCore>> {
        let Self { uses, pending, blocks, .. } = self;
        let (mut waiting, mut to_mark) = (0, Vec::new());
        if let Some(uses) = uses.get_mut(blocks[id].uses) {
            for used in &uses.streams {
                let core = &used.core;
                let mark = used.until.unwrap_or_else(|| core.open_mark());
                if core.is_done(mark) {
                    continue;
                }
                waiting += 1;
                let at = pending.iter().position(|q| q.core.id == core.id).unwrap_or_else(|| {
                    pending.push(PendingQueue::of(core));
                    pending.len() - 1
                });
                if pending[at].push(mark, id) >= share {
                    to_mark.push(Arc::clone(core));
                }
            }
            uses.waiting = waiting;
        }
        if waiting == 0 {
            self.complete_free(id, counters);
        }
        to_mark
    }

    /// Whether a block waits for a stream.
    pub(crate) fn any_pending(&self) -> bool {
        self.pending.iter().any(|queue| !queue.blocks.is_empty())
    }

    /// Whether a freed block waits for a stream, or for the end of a capture.
    pub(crate) fn any_waiting(&self) -> bool {
        !self.deferred.is_empty() || self.any_pending()
    }

    /// The streams that pending blocks of `core` wait for, each with the newest mark.
    pub(crate) fn awaited_by(&self, core: &StreamCore) -> Vec<(Arc<StreamCore>, u64)> {
        let newest =
            |q: &PendingQueue| q.blocks.iter().rev().find(|(_, id)| self.belongs_to(*id, core)).map(|(m, _)| *m);
        self.pending.iter().filter_map(|q| Some((Arc::clone(&q.core), newest(q)?))).collect()
    }

    /// The streams that pending blocks of a pool in these ranges wait for, each with the newest mark. The ranges are in order.
    pub(crate) fn pending_in(&self, slot: u32, ranges: &[Range]) -> Vec<(Arc<StreamCore>, u64)> {
        let within = |id: BlockId| {
            let block = &self.blocks[id];
            let lane = &self.lanes[block.lane as usize];
            let segment = self.segments.get(block.segment).filter(|_| lane.slot == slot);
            segment.is_some_and(|segment| {
                let address = segment.memory.base.offset(to_bytes(block.offset));
                let range = Range { address, bytes: to_bytes(block.size) };
                let first = ranges.partition_point(|r| r.end() <= address);
                ranges.get(first).is_some_and(|r| r.intersection(range).is_some())
            })
        };
        let newest = |q: &PendingQueue| q.blocks.iter().rev().find(|(_, id)| within(*id)).map(|(mark, _)| *mark);
        self.pending.iter().filter_map(|q| Some((Arc::clone(&q.core), newest(q)?))).collect()
    }

    fn belongs_to(&self, id: BlockId, core: &StreamCore) -> bool {
        self.lanes[self.blocks[id].lane as usize].core.id == core.id
    }

    /// Frees the pending blocks whose marks are all done, stream by stream. Returns how many. O(blocks that leave a queue).
    pub(crate) fn settle_done(&mut self, counters: &ArenaCounters) -> usize {
        let mut over = Vec::new();
        for queue in &mut self.pending {
            while let Some((_, id)) = queue.blocks.front().copied().filter(|(mark, _)| queue.core.is_done(*mark)) {
                queue.blocks.pop_front();
                over.push(id);
            }
        }
        self.uses_over(&over, counters)
    }

    /// Frees the pending blocks of `core` whose uses come before what `core` does next: up to a mark of each stream given. Returns how
    /// many. O(pending blocks).
    pub(crate) fn settle_for(
        &mut self,
        core: &StreamCore,
        covered: &[(StreamId, u64)],
        counters: &ArenaCounters,
    ) -> usize {
        let mut over = Vec::new();
        let mut pending = std::mem::take(&mut self.pending);
        for queue in &mut pending {
            let Some((_, up_to)) = covered.iter().find(|(id, _)| *id == queue.core.id) else { continue };
            queue.blocks.retain(|(mark, id)| {
                let is_over = mark <= up_to && self.belongs_to(*id, core);
                if is_over {
                    over.push(*id);
                }
                !is_over
            });
        }
        self.pending = pending;
        self.uses_over(&over, counters)
    }

    /// One use each of these blocks is over. Frees those that no other holds; returns how many.
    fn uses_over(&mut self, over: &[BlockId], counters: &ArenaCounters) -> usize {
        let mut freed = 0;
        for id in over {
            let Some(uses) = self.uses.get_mut(self.blocks[*id].uses) else { continue };
            uses.waiting = uses.waiting.saturating_sub(1);
            if uses.waiting == 0 {
                self.complete_free(*id, counters);
                freed += 1;
            }
        }
        // A stream that was waited for once is waited for again.
        self.pending.retain(|q| !q.blocks.is_empty() || !q.core.is_retired());
        if freed > 0 {
            counters.rewatch(&mut self.watches);
        }
        freed
    }
}
