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
    /// Whether a stream is recorded, and not only inside a capture.
    fn is_used_outside(&self, stream: StreamId) -> bool {
        self.streams.iter().any(|u| u.core.id == stream) && !self.captured.contains(&stream)
    }
}

/// The side table of recorded uses.
#[derive(Debug, Default)]
pub(crate) struct UsesTable {
    slots: Vec<Option<Uses>>,
    vacant: Vec<u32>,
}

impl UsesTable {
    fn insert(&mut self, uses: Uses) -> u32 {
        match self.vacant.pop() {
            Some(at) => {
                self.slots[at as usize] = Some(uses);
                at
            }
            None => {
                self.slots.push(Some(uses));
                self.slots.len() as u32 - 1
            }
        }
    }

    pub(super) fn remove(&mut self, at: u32) {
        if self.slots.get_mut(at as usize).is_some_and(|s| s.take().is_some()) {
            self.vacant.push(at);
        }
    }

    pub(crate) fn get(&self, at: u32) -> Option<&Uses> {
        self.slots.get(at as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, at: u32) -> Option<&mut Uses> {
        self.slots.get_mut(at as usize)?.as_mut()
    }
}

/// Blocks that wait for one stream, oldest mark first.
#[derive(Debug)]
pub(crate) struct PendingQueue {
    pub(crate) core: Arc<StreamCore>,
    pub(crate) blocks: VecDeque<(u64, BlockId)>,
}

impl ArenaState {
    /// Notes that `core` uses a block until it is freed. Its own stream needs no note. O(streams recorded for the block).
    pub(crate) fn record_use(&mut self, id: BlockId, core: &Arc<StreamCore>, in_capture: bool) {
        let outside = self.uses.get(self.blocks[id].uses).is_some_and(|uses| uses.is_used_outside(core.id));
        self.record_use_until(id, core, None);
        // What the stream did with the block before it joined the capture goes on whatever the capture becomes.
        if in_capture
            && (!outside || self.rules.capture_ends_earlier_uses)
            && let Some(uses) = self.uses.get_mut(self.blocks[id].uses)
            && !uses.captured.contains(&core.id)
        {
            uses.captured.push(core.id);
        }
    }

    /// Notes that `core` uses a block until that mark, or until it is freed. Its own stream needs no note. O(streams recorded for the
    /// block).
    pub(crate) fn record_use_until(&mut self, id: BlockId, core: &Arc<StreamCore>, until: Option<u64>) {
        if self.lanes[self.blocks[id].lane as usize].core.id == core.id {
            return;
        }
        if self.blocks[id].uses == NONE {
            self.blocks[id].uses = self.uses.insert(Uses::default());
        }
        let Some(uses) = self.uses.get_mut(self.blocks[id].uses) else { return };
        if until.is_some() && !self.rules.capture_ends_earlier_uses {
            uses.captured.retain(|captured| *captured != core.id);
        }
        match uses.streams.iter_mut().find(|u| u.core.id == core.id) {
            // Without an end it may go on: what says less wins.
            Some(known) => known.until = known.until.zip(until).map(|(a, b)| a.max(b)),
            None => uses.streams.push(Use { core: Arc::clone(core), until }),
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

    /// Queues a block for every stream recorded for it, at the mark given for each. With none left it is free at once.
    pub(crate) fn make_pending(&mut self, id: BlockId, marks: &[(Arc<StreamCore>, u64)], counters: &ArenaCounters) {
        if marks.is_empty() {
            return self.complete_free(id, counters);
        }
        for (core, mark) in marks {
            let queue = match self.pending.iter().position(|q| q.core.id == core.id) {
                Some(at) => &mut self.pending[at],
                None => {
                    self.pending.push(PendingQueue { core: Arc::clone(core), blocks: VecDeque::new() });
                    let last = self.pending.len() - 1;
                    &mut self.pending[last]
                }
            };
            let at = queue.blocks.partition_point(|(m, _)| *m <= *mark);
            queue.blocks.insert(at, (*mark, id));
        }
        if let Some(uses) = self.uses.get_mut(self.blocks[id].uses) {
            uses.waiting = marks.len() as u32;
        }
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
        self.pending.retain(|q| !q.blocks.is_empty());
        freed
    }
}
