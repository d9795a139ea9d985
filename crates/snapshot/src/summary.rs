//! Where the memory is, and what keeps it there.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::model::{BlockStatus, Part, Segment, Snapshot};

/// How many pinned segments are listed.
const MOST_PINNED: usize = 10;
/// How many of a segment's live blocks are listed.
const MOST_BLOCKS: usize = 4;

/// Bytes by what they are. `reserved` is the sum of the next three.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Amounts {
    /// In segments.
    pub reserved: u64,
    /// In live blocks.
    pub live: u64,
    /// In freed blocks that some stream may still use.
    pub pending: u64,
    /// In free blocks.
    pub free: u64,
    /// Requested, in live and pending blocks.
    pub requested: u64,
    /// Segments.
    pub segments: u64,
    /// Live blocks.
    pub live_blocks: u64,
}

impl Amounts {
    fn add(&mut self, other: Self) {
        self.reserved += other.reserved;
        self.live += other.live;
        self.pending += other.pending;
        self.free += other.free;
        self.requested += other.requested;
        self.segments += other.segments;
        self.live_blocks += other.live_blocks;
    }

    /// What one segment holds.
    pub(crate) fn of(segment: &Segment) -> Self {
        let mut amounts = Self { reserved: segment.total_size, segments: 1, ..Self::default() };
        for block in &segment.blocks {
            match block.state {
                BlockStatus::ActiveAllocated => {
                    amounts.live += block.size;
                    amounts.live_blocks += 1;
                }
                BlockStatus::ActivePendingFree => amounts.pending += block.size,
                BlockStatus::Inactive => amounts.free += block.size,
            }
        }
        amounts.requested = segment.requested_size;
        amounts
    }
}

/// Which requests memory serves.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
pub struct Place {
    /// The GPU.
    pub device: u32,
    /// The pool; `(0, 0)` is the default pool.
    pub pool: (u64, u64),
    /// The stream's handle; `None` where requests of any stream are served.
    pub stream: Option<u64>,
    /// The part of the pool.
    pub part: Part,
}

impl Place {
    pub(crate) fn of(segment: &Segment) -> Self {
        Self {
            device: segment.device,
            pool: segment.segment_pool_id,
            stream: (!segment.any_stream).then_some(segment.stream),
            part: segment.segment_type,
        }
    }
}

/// The memory of one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Bucket {
    /// Which.
    #[serde(flatten)]
    pub place: Place,
    /// How much.
    #[serde(flatten)]
    pub amounts: Amounts,
    /// The longest run of free bytes in any one segment: the largest request that needs no new memory.
    pub largest_free_run: u64,
}

/// A segment that would go back to the driver if it were not for a few blocks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Pinned {
    /// Where it starts.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// Its free bytes.
    pub free: u64,
    /// Whose it is.
    pub place: Place,
    /// Live and pending blocks in it.
    pub blocks: u64,
    /// The largest of them: address and size.
    pub largest: Vec<(u64, u64)>,
}

/// What a snapshot tells. See the module's documentation.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Summary {
    /// Everything.
    pub total: Amounts,
    /// The same by place, most reserved first.
    pub buckets: Vec<Bucket>,
    /// The longest run of free bytes.
    pub largest_free_run: u64,
    /// Bytes in wholly free segments: an emptied cache gives them back, those of the default pool at least.
    pub idle: u64,
    /// How many segments those are.
    pub idle_segments: u64,
    /// Free bytes in segments that live or pending blocks keep.
    pub free_in_use: u64,
    /// Mostly free segments, most free bytes first.
    pub pinned: Vec<Pinned>,
}

impl Summary {
    /// What `snapshot` tells. O(blocks).
    #[must_use]
    pub fn of(snapshot: &Snapshot) -> Self {
        let mut summary = Self {
            total: Amounts::default(),
            buckets: Vec::new(),
            largest_free_run: 0,
            idle: 0,
            idle_segments: 0,
            free_in_use: 0,
            pinned: Vec::new(),
        };
        let mut places: BTreeMap<Place, (Amounts, u64)> = BTreeMap::new();
        for segment in &snapshot.segments {
            let (amounts, run) = (Amounts::of(segment), largest_free_run(segment));
            summary.total.add(amounts);
            summary.largest_free_run = summary.largest_free_run.max(run);
            let (bucket, longest) = places.entry(Place::of(segment)).or_default();
            bucket.add(amounts);
            *longest = run.max(*longest);
            if amounts.free == amounts.reserved {
                summary.idle += amounts.reserved;
                summary.idle_segments += 1;
            } else {
                summary.free_in_use += amounts.free;
                if amounts.free >= amounts.reserved / 2 && amounts.free > 0 {
                    summary.pinned.push(pinned(segment, amounts.free));
                }
            }
        }
        summary.buckets = places
            .into_iter()
            .map(|(place, (amounts, largest_free_run))| Bucket { place, amounts, largest_free_run })
            .collect();
        summary.buckets.sort_by_key(|bucket| std::cmp::Reverse(bucket.amounts.reserved));
        summary.pinned.sort_by_key(|segment| std::cmp::Reverse(segment.free));
        summary.pinned.truncate(MOST_PINNED);
        summary
    }
}

fn largest_free_run(segment: &Segment) -> u64 {
    let (mut longest, mut run) = (0, 0);
    for block in &segment.blocks {
        run = if block.state == BlockStatus::Inactive { run + block.size } else { 0 };
        longest = run.max(longest);
    }
    longest
}

fn pinned(segment: &Segment, free: u64) -> Pinned {
    let held = segment.blocks.iter().filter(|block| block.state != BlockStatus::Inactive);
    let mut largest: Vec<(u64, u64)> = held.map(|block| (block.address, block.size)).collect();
    let blocks = largest.len() as u64;
    largest.sort_by_key(|(address, size)| (std::cmp::Reverse(*size), *address));
    largest.truncate(MOST_BLOCKS);
    Pinned { address: segment.address, size: segment.total_size, free, place: Place::of(segment), blocks, largest }
}
