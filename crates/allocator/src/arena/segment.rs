//! The record of a segment: one range of addresses that blocks tile.

use std::ops::Range;
use std::sync::Arc;

use gpupool_device::{Address, CaptureId, MemoryHandle};

use super::{Block, BlockId};
use crate::idle::Away;
use crate::ids::{Part, StreamId};
use crate::index::TieBreak;
use crate::pages::PageTable;
use crate::provider::SegmentProvider;
use crate::units::{Units, to_bytes};

/// What is behind a segment's addresses, and so how it is given back.
#[derive(Clone)]
pub(crate) enum Backing {
    /// A plain driver allocation: giving it back waits for the whole device.
    Plain,
    /// One physical handle mapped over the whole range: giving it back waits for nothing, so the device must be done with it.
    Handle(MemoryHandle),
    /// A block of the driver's own pool, or of the graph of this capture: see [`crate::stream_ordered`].
    Ordered {
        /// The capture that its allocation is a node of.
        capture: Option<CaptureId>,
    },
    /// Handles mapped in parts of it: see [`crate::pages`].
    Pages,
    /// A pool's own provider.
    Provider(Arc<dyn SegmentProvider>),
    /// Nothing: addresses whose one handle is away (see [`crate::idle`]).
    Away,
}

impl std::fmt::Debug for Backing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plain => f.write_str("Plain"),
            Self::Handle(h) => write!(f, "Handle({})", h.0),
            Self::Pages => f.write_str("Pages"),
            Self::Ordered { capture } => write!(f, "Ordered({capture:?})"),
            Self::Provider(_) => f.write_str("Provider"),
            Self::Away => f.write_str("Away"),
        }
    }
}

/// A segment's memory as the driver gave it, whoever owns its record.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    pub(crate) base: Address,
    pub(crate) bytes: u64,
    pub(crate) backing: Backing,
    /// Counts the segments of this allocator, from 0.
    pub(crate) ordinal: u64,
    /// Counts the segments of this process: the older one is preferred among equals.
    pub(crate) registration: u64,
}

/// A segment of an arena.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) memory: Memory,
    /// Which of the arena's pool slots.
    pub(crate) slot: u32,
    pub(crate) part: Part,
    /// The lane it was made for.
    pub(crate) lane: u32,
    pub(crate) stream: StreamId,
    pub(crate) first: BlockId,
    /// The mark of its stream that covers all work on it, taken when it last became wholly free.
    pub(crate) idle_since: u64,
    /// When decay first found it wholly free, since then.
    pub(crate) idle_seen: Option<u64>,
    /// A part of it that the capture under way has handed out and noted; empty while none is.
    pub(crate) noted: Range<Units>,
    /// What is mapped, in a segment that is mapped in parts.
    pub(crate) pages: Option<Box<PageTable>>,
    /// What is away.
    pub(crate) away: Vec<Away>,
}

/// An arena's segments, by index.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    slots: Vec<Option<Segment>>,
    /// Where each starts, which every hand-out asks.
    bases: Vec<Address>,
    /// The place of each among segments when blocks of equal size compete.
    ties: Vec<u64>,
    vacant: Vec<u32>,
}

impl Segments {
    pub(crate) fn insert(&mut self, segment: Segment, tie: u64) -> u32 {
        let base = segment.memory.base;
        match self.vacant.pop() {
            Some(id) => {
                self.bases[id as usize] = base;
                self.ties[id as usize] = tie;
                self.slots[id as usize] = Some(segment);
                id
            }
            None => {
                self.bases.push(base);
                self.ties.push(tie);
                self.slots.push(Some(segment));
                self.slots.len() as u32 - 1
            }
        }
    }

    pub(crate) fn remove(&mut self, id: u32) -> Option<Segment> {
        let segment = self.slots.get_mut(id as usize)?.take()?;
        self.vacant.push(id);
        Some(segment)
    }

    #[inline]
    pub(crate) fn get(&self, id: u32) -> Option<&Segment> {
        self.slots.get(id as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: u32) -> Option<&mut Segment> {
        self.slots.get_mut(id as usize)?.as_mut()
    }

    /// The address so many units into a segment that is there.
    #[inline(always)]
    pub(crate) fn address(&self, id: u32, offset: Units) -> Option<Address> {
        Some(self.bases.get(id as usize)?.offset(to_bytes(offset)))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Segment)> {
        self.slots.iter().enumerate().filter_map(|(i, s)| Some((i as u32, s.as_ref()?)))
    }

    /// Whether the capture under way has noted the block's range.
    #[inline]
    pub(crate) fn is_noted(&self, block: &Block) -> bool {
        let noted = self.get(block.segment).map(|segment| &segment.noted);
        noted.is_some_and(|noted| noted.start <= block.offset && block.offset + block.size <= noted.end)
    }

    /// A capture into a pool is over: nothing of its segments is noted any more.
    pub(crate) fn forget_noted(&mut self, slot: u32) {
        let of_pool = self.slots.iter_mut().flatten().filter(|s| s.slot == slot);
        of_pool.for_each(|segment| segment.noted = 0..0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.len() == self.vacant.len()
    }

    pub(crate) fn into_all(self) -> Vec<Segment> {
        self.slots.into_iter().flatten().collect()
    }
}

impl TieBreak for Segments {
    #[inline(always)]
    fn tie(&self, segment: u32) -> u64 {
        self.ties[segment as usize]
    }
}
