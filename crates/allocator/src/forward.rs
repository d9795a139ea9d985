//! Brings pieces of a state, copied one after the other, to one point in time.

use std::collections::BTreeMap;

use gpupool_device::Address;

use crate::history::{Action, Event, HistoryState};
use crate::ids::StreamId;
use crate::state::{BackingKind, BlockState, BlockStatus, SegmentState};

/// The pieces as they are after the last event of the history. Each comes with the number of events before it was copied. What an event
/// says is done may be so already; then nothing changes. O(blocks + later events, each O(blocks of its segment)).
pub(crate) fn bring_forward(
    pieces: impl Iterator<Item = (u64, SegmentState)>,
    history: &HistoryState,
) -> Vec<SegmentState> {
    let mut by_address: BTreeMap<Address, (u64, SegmentState)> = BTreeMap::new();
    let mut oldest = u64::MAX;
    for (at, segment) in pieces {
        oldest = oldest.min(at);
        // Two segments at one address: the older one was given back in between.
        let newer = by_address.get(&segment.address).is_none_or(|(_, s)| s.ordinal < segment.ordinal);
        if newer {
            by_address.insert(segment.address, (at, segment));
        }
    }
    // Without pieces there was nothing yet, or nothing any more: everything that is told counts.
    let known = if oldest == u64::MAX { 0 } else { oldest };
    for event in history.after(known) {
        match event.action {
            Action::SegmentAlloc => {
                by_address.entry(event.address).or_insert_with(|| (event.sequence, fresh(event)));
            }
            Action::SegmentFree if by_address.get(&event.address).is_some_and(|(at, _)| *at < event.sequence) => {
                by_address.remove(&event.address);
            }
            Action::SegmentAway | Action::SegmentBack => {
                let of = by_address.get_mut(&event.address).filter(|(at, _)| *at < event.sequence);
                if let Some((_, segment)) = of {
                    let away = event.action == Action::SegmentAway;
                    segment.backing = if away { BackingKind::Away } else { BackingKind::Handle };
                }
            }
            Action::Alloc | Action::FreeRequested | Action::FreeCompleted => {
                let of = by_address.range_mut(..=event.address).next_back();
                if let Some((_, (at, segment))) = of
                    && *at < event.sequence
                    && segment.contains(event.address)
                {
                    apply(segment, event);
                }
            }
            _ => {}
        }
    }
    by_address.into_values().map(|(_, segment)| segment).collect()
}

/// A segment that was taken after its arena was looked at.
fn fresh(event: &Event) -> SegmentState {
    let block = free_block(event.address, event.size, StreamId(0), 0);
    SegmentState {
        ordinal: u64::MAX,
        address: event.address,
        size: event.size,
        stream: StreamId(0),
        stream_handle: event.stream,
        pool: event.pool,
        part: event.part,
        backing: BackingKind::Plain,
        handles: Vec::new(),
        blocks: vec![block],
    }
}

pub(crate) fn free_block(address: Address, size: u64, stream: StreamId, requested: u64) -> BlockState {
    let status = BlockStatus::Inactive;
    BlockState {
        address,
        size,
        requested,
        status,
        binned: false,
        stream,
        used_by: Vec::new(),
        generation: 0,
        graph: None,
    }
}

fn apply(segment: &mut SegmentState, event: &Event) {
    let at = segment.blocks.partition_point(|b| b.address < event.address);
    match event.action {
        Action::Alloc => carve(segment, event),
        Action::FreeRequested => {
            if let Some(block) = segment.blocks.get_mut(at).filter(|b| b.address == event.address) {
                block.status = BlockStatus::ActivePendingFree;
            }
        }
        Action::FreeCompleted => {
            if let Some(block) = segment.blocks.get_mut(at).filter(|b| b.address == event.address) {
                block.status = BlockStatus::Inactive;
                merge(&mut segment.blocks, at);
            }
        }
        _ => {}
    }
}

/// Joins a free block with its free neighbours.
fn merge(blocks: &mut Vec<BlockState>, at: usize) {
    let free = |blocks: &[BlockState], at: usize| {
        blocks.get(at).is_some_and(|b| b.status == BlockStatus::Inactive && !b.binned)
    };
    if free(blocks, at + 1) {
        blocks[at].size += blocks[at + 1].size;
        blocks.remove(at + 1);
    }
    if at > 0 && free(blocks, at - 1) {
        blocks[at - 1].size += blocks[at].size;
        blocks.remove(at);
    }
}

/// Makes the event's range a live block, as far as it lies in the segment: pages behind it may have been mapped since. What was there gives way;
/// what sticks out of the range stays as it was.
fn carve(segment: &mut SegmentState, event: &Event) {
    let start = event.address;
    let size = event.size.min(segment.address.offset(segment.size).offset_from(start));
    let end = start.offset(size);
    let first = segment.blocks.partition_point(|b| b.address.offset(b.size) <= start);
    let last = segment.blocks.partition_point(|b| b.address < end);
    let mut pieces = Vec::with_capacity(3);
    let mut live = free_block(start, size, segment.stream, event.requested.min(size));
    live.status = BlockStatus::ActiveAllocated;
    for block in &segment.blocks[first..last] {
        if block.address < start {
            pieces.push(BlockState { size: start.offset_from(block.address), ..block.clone() });
        }
        if block.address == start {
            // As the hand-out does with the record.
            live.generation = block.generation.wrapping_add(1);
            live.stream = block.stream;
        }
    }
    pieces.push(live);
    if let Some(block) = segment.blocks[first..last].last() {
        let block_end = block.address.offset(block.size);
        if block_end > end {
            pieces.push(BlockState { address: end, size: block_end.offset_from(end), ..block.clone() });
        }
    }
    segment.blocks.splice(first..last, pieces);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{History, HistoryOptions, What};
    use crate::ids::{Part, PoolId};
    use gpupool_device::StreamHandle;

    #[test]
    fn later_events_bring_a_piece_forward_and_earlier_ones_do_nothing() {
        let history = History::new(|| 0);
        history.set(Some(HistoryOptions::new(100)));
        let note = |action, address, size| {
            let (stream, pool, part) = (StreamHandle(0), PoolId::DEFAULT, Part::Small);
            history.note(What { action, address: Address(address), requested: size, size, stream, pool, part }, None);
        };
        note(Action::SegmentAlloc, 0x1000, 4096);
        note(Action::Alloc, 0x1000, 1024);
        let mut piece = fresh(history.copy().unwrap().events().next().unwrap());
        piece.blocks =
            vec![free_block(Address(0x1000), 1024, StreamId(0), 9), free_block(Address(0x1400), 3072, StreamId(0), 0)];
        piece.blocks[0].status = BlockStatus::ActiveAllocated;
        note(Action::Alloc, 0x1400, 512);
        note(Action::FreeRequested, 0x1000, 1024);
        note(Action::SegmentAlloc, 0x9000, 2048);
        note(Action::Alloc, 0x9200, 512);
        note(Action::SegmentAlloc, 0xf000, 512);
        note(Action::SegmentFree, 0xf000, 512);
        let sizes = |segment: &SegmentState| -> Vec<(u64, BlockStatus)> {
            segment.blocks.iter().map(|b| (b.size, b.status)).collect()
        };
        use BlockStatus::{ActiveAllocated as Live, ActivePendingFree as Pending, Inactive as Free};
        let now = bring_forward([(2, piece.clone())].into_iter(), &history.copy().unwrap());
        assert_eq!(now.len(), 2);
        assert_eq!(sizes(&now[0]), [(1024, Pending), (512, Live), (2560, Free)]);
        assert_eq!(sizes(&now[1]), [(512, Free), (512, Live), (1024, Free)]);
        note(Action::FreeCompleted, 0x1000, 1024);
        note(Action::FreeRequested, 0x1400, 512);
        note(Action::FreeCompleted, 0x1400, 512);
        let now = bring_forward([(2, piece.clone())].into_iter(), &history.copy().unwrap());
        assert_eq!(sizes(&now[0]), [(4096, Free)]);
        // A block of which only a part lies in what was copied.
        note(Action::Alloc, 0x1800, 4096);
        let now = bring_forward([(2, piece.clone())].into_iter(), &history.copy().unwrap());
        assert_eq!(sizes(&now[0]), [(2048, Free), (2048, Live)]);
        let copied_last = history.sequence();
        let now = bring_forward([(copied_last, piece.clone())].into_iter(), &history.copy().unwrap());
        assert_eq!(now, [piece], "nothing happened since it was copied");
    }
}
