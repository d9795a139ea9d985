//! What grew between two snapshots.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::model::{BlockStatus, Snapshot};
use crate::summary::{Amounts, Place, Summary};

/// How many sizes of blocks, and how many owners, are listed.
const MOST_SIZES: usize = 10;

/// How one figure set changed, in bytes or counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Change {
    /// In segments.
    pub reserved: i64,
    /// In live blocks.
    pub live: i64,
    /// In freed blocks that some stream may still use.
    pub pending: i64,
    /// In free blocks.
    pub free: i64,
    /// Segments.
    pub segments: i64,
    /// Live blocks.
    pub live_blocks: i64,
}

impl Change {
    fn between(before: Amounts, after: Amounts) -> Self {
        Self {
            reserved: difference(before.reserved, after.reserved),
            live: difference(before.live, after.live),
            pending: difference(before.pending, after.pending),
            free: difference(before.free, after.free),
            segments: difference(before.segments, after.segments),
            live_blocks: difference(before.live_blocks, after.live_blocks),
        }
    }
}

fn difference(before: u64, after: u64) -> i64 {
    // Sums of bytes on one machine are far below 2^63; beyond, the most that can be said.
    i64::try_from(i128::from(after) - i128::from(before)).unwrap_or(if after > before { i64::MAX } else { i64::MIN })
}

/// Live blocks of one requested size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct BlocksOfSize {
    /// What each was requested with.
    pub requested: u64,
    /// How many there were.
    pub before: u64,
    /// How many there are.
    pub after: u64,
    /// How many bytes of blocks that is more.
    pub grown_bytes: i64,
}

/// One owner's live blocks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct OwnerGrowth {
    /// The label, or the place in the program.
    pub owner: String,
    /// Blocks before.
    pub before: u64,
    /// Blocks after.
    pub after: u64,
    /// How many bytes more.
    pub grown_bytes: i64,
}

/// What grew. See the module's documentation.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Growth {
    /// Everything.
    pub total: Change,
    /// By place, whose reserved memory grew most first; places that did not change are left out.
    pub places: Vec<(Place, Change)>,
    /// Live blocks by owner, whose bytes grew most first; owners that did not grow are left out.
    pub owners: Vec<OwnerGrowth>,
    /// Live blocks by requested size, whose bytes grew most first; sizes that did not grow are left out.
    pub sizes: Vec<BlocksOfSize>,
}

impl Growth {
    /// What grew from `before` to `after`. O(blocks).
    #[must_use]
    pub fn between(before: &Snapshot, after: &Snapshot) -> Self {
        let (old, new) = (Summary::of(before), Summary::of(after));
        let mut places: BTreeMap<Place, (Amounts, Amounts)> = BTreeMap::new();
        for bucket in &old.buckets {
            places.entry(bucket.place).or_default().0 = bucket.amounts;
        }
        for bucket in &new.buckets {
            places.entry(bucket.place).or_default().1 = bucket.amounts;
        }
        let mut places: Vec<(Place, Change)> = places
            .into_iter()
            .map(|(place, (before, after))| (place, Change::between(before, after)))
            .filter(|(_, change)| *change != Change::default())
            .collect();
        places.sort_by_key(|(_, change)| std::cmp::Reverse((change.reserved, change.live)));
        let (owners, sizes) = (owners(before, after), sizes(before, after));
        Self { total: Change::between(old.total, new.total), places, owners, sizes }
    }
}

fn owners(before: &Snapshot, after: &Snapshot) -> Vec<OwnerGrowth> {
    let mut by: BTreeMap<String, [(u64, u64); 2]> = BTreeMap::new();
    for (which, snapshot) in [before, after].into_iter().enumerate() {
        for owned in snapshot.live_by_owner(&snapshot.owners()) {
            by.entry(owned.owner).or_default()[which] = (owned.bytes, owned.blocks);
        }
    }
    let grown = by.into_iter().map(|(owner, [before, after])| OwnerGrowth {
        owner,
        before: before.1,
        after: after.1,
        grown_bytes: difference(before.0, after.0),
    });
    let mut grown: Vec<OwnerGrowth> = grown.filter(|owner| owner.grown_bytes > 0).collect();
    grown.sort_by_key(|owner| std::cmp::Reverse(owner.grown_bytes));
    grown.truncate(MOST_SIZES);
    grown
}

fn sizes(before: &Snapshot, after: &Snapshot) -> Vec<BlocksOfSize> {
    let mut sizes: BTreeMap<u64, ([u64; 2], [u64; 2])> = BTreeMap::new();
    for (which, snapshot) in [before, after].into_iter().enumerate() {
        for block in snapshot.segments.iter().flat_map(|segment| &segment.blocks) {
            if block.state == BlockStatus::ActiveAllocated {
                let (counts, bytes) = sizes.entry(block.requested_size).or_default();
                counts[which] += 1;
                bytes[which] += block.size;
            }
        }
    }
    let mut grown: Vec<BlocksOfSize> = sizes
        .into_iter()
        .map(|(requested, (counts, bytes))| BlocksOfSize {
            requested,
            before: counts[0],
            after: counts[1],
            grown_bytes: difference(bytes[0], bytes[1]),
        })
        .filter(|size| size.grown_bytes > 0)
        .collect();
    grown.sort_by_key(|size| std::cmp::Reverse(size.grown_bytes));
    grown.truncate(MOST_SIZES);
    grown
}
