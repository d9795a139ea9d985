//! Where the memory is, and what keeps it there.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Serialize;
use serde_json::Value;

use crate::advice::{self, Advice};
use crate::model::{BlockStatus, Part, Segment, Snapshot};
use crate::owners::{Owned, Owner};
use crate::timeline::{OutOfMemory, Peak};

/// How many pinned segments are listed.
const MOST_PINNED: usize = 10;
/// How many of a segment's live blocks are listed.
const MOST_BLOCKS: usize = 4;
/// How many owners are listed.
const MOST_OWNERS: usize = 20;

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
    /// Their bytes.
    pub bytes: u64,
    /// The largest of them: address and size.
    pub largest: Vec<(u64, u64)>,
    /// Whose they are, most bytes first.
    pub owners: Vec<Owned>,
}

/// The memory of one pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct OfPool {
    /// Which; `(0, 0)` is the default pool.
    pub pool: (u64, u64),
    /// How much.
    #[serde(flatten)]
    pub amounts: Amounts,
}

/// The memory of one stream in the default pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct OfStream {
    /// Its handle.
    pub stream: u64,
    /// How much.
    #[serde(flatten)]
    pub amounts: Amounts,
}

/// The segments of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct OfSize {
    /// What each has.
    pub segment_size: u64,
    /// How much.
    #[serde(flatten)]
    pub amounts: Amounts,
}

/// Runs of free bytes of about one length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct FreeRuns {
    /// Each has at least so many bytes, and less than twice that.
    pub from: u64,
    /// How many there are.
    pub runs: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Live blocks in private pools that a capture used and that no graph holds any more.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Outliving {
    /// How many.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of the segments that they keep.
    pub segment_bytes: u64,
    /// Whose they are, most bytes first.
    pub owners: Vec<Owned>,
}

/// What one graph holds, where the snapshot tells.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct OfGraph {
    /// Its number.
    pub id: u64,
    /// The pools that it holds.
    pub pools: Vec<(u64, u64)>,
    /// Bytes that a run of it may write.
    pub written: u64,
    /// Of those, bytes that no other graph may write.
    pub exclusive: u64,
    /// Of those, bytes that others may write too.
    pub shared: u64,
    /// Bytes in results of it that are still live.
    pub live: u64,
    /// How many blocks those are.
    pub live_blocks: u64,
}

/// A capture that was under way when the snapshot was taken.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Capturing {
    /// The driver's number of it; `None` before it has begun.
    pub id: Option<u64>,
    /// The handle of the stream that it begins on; `None` for one that somebody else began.
    pub stream: Option<u64>,
    /// The pool that its requests are served from.
    pub pool: (u64, u64),
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
    /// Free bytes in all mostly free segments, listed or not.
    pub pinned_free: u64,
    /// Live and pending bytes in them.
    pub pinned_bytes: u64,
    /// How many blocks those are.
    pub pinned_blocks: u64,
    /// Of `idle`, what is in the default pool: that goes back at once.
    pub idle_default: u64,
    /// By pool, most reserved first.
    pub by_pool: Vec<OfPool>,
    /// The default pool by stream, most reserved first.
    pub by_stream: Vec<OfStream>,
    /// By size of the segment, most reserved first.
    pub by_segment_size: Vec<OfSize>,
    /// Free bytes by the length of the run, longest first.
    pub free_runs: Vec<FreeRuns>,
    /// Live blocks by owner, most bytes first.
    pub owners: Vec<Owned>,
    /// What outlives its graph.
    pub outliving: Outliving,
    /// Graphs, most bytes first.
    pub graphs: Vec<OfGraph>,
    /// Captures under way.
    pub captures: Vec<Capturing>,
    /// For each device with a history the moment of most live bytes.
    pub peaks: Vec<Peak>,
    /// Requests that ended in out of memory.
    pub out_of_memory: Vec<OutOfMemory>,
    /// Events of kinds that are not known.
    pub unknown_events: u64,
    /// Events of a size or at an address that nothing can have, which were left out.
    pub absurd_events: u64,
    /// What would help, most bytes first.
    pub advice: Vec<Advice>,
}

impl Summary {
    /// What `snapshot` tells. O(blocks + events).
    #[must_use]
    pub fn of(snapshot: &Snapshot) -> Self {
        let owners = snapshot.owners();
        let mut summary = Self {
            total: Amounts::default(),
            buckets: Vec::new(),
            largest_free_run: 0,
            idle: 0,
            idle_segments: 0,
            free_in_use: 0,
            pinned: Vec::new(),
            pinned_free: 0,
            pinned_bytes: 0,
            pinned_blocks: 0,
            idle_default: 0,
            by_pool: sums(snapshot, |segment| Some(segment.segment_pool_id), |pool, amounts| OfPool { pool, amounts }),
            by_stream: sums(
                snapshot,
                |segment| (segment.segment_pool_id == (0, 0)).then_some(segment.stream),
                |stream, amounts| OfStream { stream, amounts },
            ),
            by_segment_size: sums(
                snapshot,
                |segment| Some(segment.total_size),
                |segment_size, amounts| OfSize { segment_size, amounts },
            ),
            free_runs: free_runs(snapshot),
            owners: snapshot.live_by_owner(&owners),
            outliving: outliving(snapshot, &owners),
            graphs: graphs(snapshot),
            captures: captures(snapshot),
            peaks: snapshot.peaks(),
            out_of_memory: snapshot.out_of_memory(),
            unknown_events: snapshot.unknown_events,
            absurd_events: snapshot.absurd_events,
            advice: Vec::new(),
        };
        summary.owners.truncate(MOST_OWNERS);
        let mut places: BTreeMap<Place, (Amounts, u64)> = BTreeMap::new();
        let mut pinned_segments: Vec<&Segment> = Vec::new();
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
                summary.idle_default += if segment.segment_pool_id == (0, 0) { amounts.reserved } else { 0 };
            } else {
                summary.free_in_use += amounts.free;
                if amounts.free >= amounts.reserved / 2 && amounts.free > 0 {
                    summary.pinned_free += amounts.free;
                    summary.pinned_bytes += amounts.live + amounts.pending;
                    summary.pinned_blocks +=
                        segment.blocks.iter().filter(|block| block.state != BlockStatus::Inactive).count() as u64;
                    pinned_segments.push(segment);
                }
            }
        }
        summary.buckets = places
            .into_iter()
            .map(|(place, (amounts, largest_free_run))| Bucket { place, amounts, largest_free_run })
            .collect();
        summary.buckets.sort_by_key(|bucket| std::cmp::Reverse(bucket.amounts.reserved));
        pinned_segments.sort_by_key(|segment| std::cmp::Reverse(Amounts::of(segment).free));
        pinned_segments.truncate(MOST_PINNED);
        summary.pinned = pinned_segments.into_iter().map(|segment| pinned(snapshot, &owners, segment)).collect();
        summary.advice = advice::of(&summary);
        summary
    }
}

/// Sums segments by what `key` says of them, most reserved first.
fn sums<K: Ord, T>(snapshot: &Snapshot, key: impl Fn(&Segment) -> Option<K>, make: impl Fn(K, Amounts) -> T) -> Vec<T> {
    let mut by: BTreeMap<K, Amounts> = BTreeMap::new();
    for segment in &snapshot.segments {
        if let Some(key) = key(segment) {
            by.entry(key).or_default().add(Amounts::of(segment));
        }
    }
    let mut list: Vec<(K, Amounts)> = by.into_iter().collect();
    list.sort_by_key(|(_, amounts)| std::cmp::Reverse(amounts.reserved));
    list.into_iter().map(|(key, amounts)| make(key, amounts)).collect()
}

/// The lengths of a segment's runs of free bytes.
fn runs(segment: &Segment) -> impl Iterator<Item = u64> {
    let is_free = |block: &crate::model::Block| block.state == BlockStatus::Inactive;
    let groups = segment.blocks.chunk_by(move |a, b| is_free(a) == is_free(b));
    groups.filter(move |group| group.first().is_some_and(is_free)).map(|group| group.iter().map(|b| b.size).sum())
}

fn largest_free_run(segment: &Segment) -> u64 {
    runs(segment).max().unwrap_or(0)
}

fn free_runs(snapshot: &Snapshot) -> Vec<FreeRuns> {
    let mut by: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for run in snapshot.segments.iter().flat_map(runs) {
        let (runs, bytes) = by.entry(run.max(1).ilog2()).or_default();
        *runs += 1;
        *bytes += run;
    }
    by.into_iter().rev().map(|(power, (runs, bytes))| FreeRuns { from: 1 << power, runs, bytes }).collect()
}

fn pinned(snapshot: &Snapshot, owners: &HashMap<(u32, u64), Owner>, segment: &Segment) -> Pinned {
    let held: Vec<_> = segment.blocks.iter().filter(|block| block.state != BlockStatus::Inactive).collect();
    let mut largest: Vec<(u64, u64)> = held.iter().map(|block| (block.address, block.size)).collect();
    largest.sort_by_key(|(address, size)| (std::cmp::Reverse(*size), *address));
    largest.truncate(MOST_BLOCKS);
    let owner = |address| owners.get(&(segment.device, address)).copied().unwrap_or_default();
    let mut owned = snapshot.ranked(held.iter().map(|block| (owner(block.address), block.size)));
    owned.truncate(MOST_BLOCKS);
    Pinned {
        address: segment.address,
        size: segment.total_size,
        free: Amounts::of(segment).free,
        place: Place::of(segment),
        blocks: held.len() as u64,
        bytes: held.iter().map(|block| block.size).sum(),
        largest,
        owners: owned,
    }
}

fn outliving(snapshot: &Snapshot, owners: &HashMap<(u32, u64), Owner>) -> Outliving {
    let left = told(snapshot, "pools")
        .filter(|pool| pool["use_count"].as_i64() == Some(0) && pool["captured"].as_bool() == Some(true));
    let left: BTreeSet<(u64, u64)> = left.filter_map(|pool| pool_id(&pool["id"])).collect();
    let mut out = Outliving::default();
    let mut blocks = Vec::new();
    for segment in snapshot.segments.iter().filter(|segment| left.contains(&segment.segment_pool_id)) {
        let live: Vec<_> = segment.blocks.iter().filter(|b| b.state == BlockStatus::ActiveAllocated).collect();
        if !live.is_empty() {
            out.segment_bytes += segment.total_size;
        }
        out.blocks += live.len() as u64;
        out.bytes += live.iter().map(|block| block.size).sum::<u64>();
        blocks.extend(
            live.iter().map(|b| (owners.get(&(segment.device, b.address)).copied().unwrap_or_default(), b.size)),
        );
    }
    out.owners = snapshot.ranked(blocks.into_iter());
    out.owners.truncate(MOST_OWNERS);
    out
}

/// A list of what this project says beyond PyTorch's layout.
fn told<'a>(snapshot: &'a Snapshot, key: &str) -> impl Iterator<Item = &'a Value> {
    snapshot.gpupool.get(key).and_then(|list| list.as_array()).into_iter().flatten()
}

fn pool_id(pool: &Value) -> Option<(u64, u64)> {
    Some((pool[0].as_u64()?, pool[1].as_u64()?))
}

fn graphs(snapshot: &Snapshot) -> Vec<OfGraph> {
    let mut results: HashMap<u64, (u64, u64)> = HashMap::new();
    let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
    for block in blocks.filter(|block| block.graph != 0 && block.state == BlockStatus::ActiveAllocated) {
        let (bytes, count) = results.entry(block.graph).or_default();
        *bytes += block.size;
        *count += 1;
    }
    let of = |graph: &Value| {
        let (id, written) = (graph["id"].as_u64()?, graph["written_bytes"].as_u64()?);
        let exclusive = graph["exclusive_bytes"].as_u64()?;
        let pools = graph["pools"].as_array()?.iter().filter_map(pool_id).collect();
        let (live, live_blocks) = results.get(&id).copied().unwrap_or_default();
        Some(OfGraph { id, pools, written, exclusive, shared: written.saturating_sub(exclusive), live, live_blocks })
    };
    let mut graphs: Vec<OfGraph> = told(snapshot, "graphs").filter_map(of).collect();
    graphs.sort_by_key(|graph| std::cmp::Reverse(graph.written));
    graphs
}

fn captures(snapshot: &Snapshot) -> Vec<Capturing> {
    let of = |capture: &Value| {
        let pool = pool_id(&capture["pool"])?;
        Some(Capturing { id: capture["id"].as_u64(), stream: capture["stream"].as_u64(), pool })
    };
    told(snapshot, "captures_in_progress").filter_map(of).collect()
}
