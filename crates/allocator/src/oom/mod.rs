//! Out of memory, explained: what was asked and by whom, what was there, and what would help.

mod text;

use std::collections::BTreeMap;

use gpupool_device::{Address, Device, DriverError, MemoryInfo};

use crate::error::AllocError;
use crate::history::{Action, What};
use crate::ids::{Part, PoolId, StreamId};
use crate::inner::{Inner, Request};
use crate::owners::{Owned, Owners};
use crate::state::{BackingKind, BlockState, BlockStatus, CaptureState, GraphBytes, SegmentState, State};
use crate::totals::Limit;

/// How many pinning blocks of a segment are listed.
const PINNING_BLOCKS: usize = 8;
/// How many mostly free segments are.
const MOSTLY_FREE: usize = 8;
/// How many owners are.
const OWNERS: usize = 16;

/// The report of a request that found no memory. Sizes in bytes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// The GPU.
    pub device: u32,
    /// Asked for.
    pub requested: u64,
    /// After rounding.
    pub rounded: u64,
    /// What the smallest new segment for it would have taken.
    pub segment_size: u64,
    /// The stream that asked.
    pub stream: StreamId,
    /// The pool it was for.
    pub pool: PoolId,
    /// Its part of the pool.
    pub part: Part,
    /// Whether a capture was under way, so that less could be tried.
    pub in_capture: bool,
    /// The limit in force and who set it.
    pub limit: Option<Limit>,
    /// Free and total as the driver sees them; 0 free if it did not tell.
    pub driver: MemoryInfo,
    /// Why the driver did not tell.
    pub driver_error: Option<DriverError>,
    /// Held from the driver.
    pub reserved: u64,
    /// In live blocks.
    pub live: u64,
    /// Freed, but some stream may still use it.
    pub pending: u64,
    /// Free, by pool and stream, largest first.
    pub free: Vec<FreeBytes>,
    /// Free bytes cached in private pools.
    pub free_in_private_pools: u64,
    /// The longest run of free bytes anywhere.
    pub largest_free_run: u64,
    /// Free bytes in segments that live blocks keep.
    pub inactive_split: u64,
    /// The segment whose live blocks stand most cheaply in the way.
    pub pinned: Option<PinnedSegment>,
    /// Segments at least half of which is free, and the few blocks that keep them; most free bytes first.
    pub mostly_free: Vec<PinnedSegment>,
    /// Live bytes by who asked for them, most first: by label, or by the place in the program. Empty where no history is recorded.
    pub owners: Vec<Owned>,
    /// What every pool holds, most first.
    pub pools: Vec<PoolBytes>,
    /// What every graph may write, and what of that no other graph may; most first.
    pub graphs: Vec<GraphBytes>,
    /// The captures under way.
    pub captures: Vec<CaptureState>,
    /// In pools that are parked or suspended: addresses with no memory behind them, in none of the figures above.
    pub away: u64,
    /// Out on loan from idle pools of graphs; part of `live`.
    pub lent: u64,
    /// Free in pools of graphs that may go away between runs, and would if the pools' options allowed it.
    pub parkable: u64,
    /// What would help, each with the bytes it would bring; only what applies.
    pub advice: Vec<Advice>,
}

/// Free bytes of one stream in one pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct FreeBytes {
    /// The pool.
    pub pool: PoolId,
    /// The stream that may use them.
    pub stream: StreamId,
    /// How many.
    pub bytes: u64,
    /// The longest run.
    pub largest_run: u64,
}

/// What one pool holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolBytes {
    /// The pool.
    pub pool: PoolId,
    /// In segments.
    pub reserved: u64,
    /// In live blocks.
    pub live: u64,
    /// In freed blocks that some stream may still use.
    pub pending: u64,
    /// Whether somebody uses it: of the default pool everybody, of another a graph or a scope.
    pub held: bool,
    /// Whether a capture ever drew from it, so that graphs may have its addresses.
    pub captured: bool,
}

/// A segment that would be of use if a few live blocks were not in it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PinnedSegment {
    /// Where it starts.
    pub address: Address,
    /// Bytes.
    pub size: u64,
    /// Live or pending bytes in it.
    pub pinned_bytes: u64,
    /// Its pool.
    pub pool: PoolId,
    /// How many blocks those are.
    pub count: u64,
    /// The first few of them.
    pub blocks: Vec<PinnedBlock>,
}

/// A live or pending block that keeps a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PinnedBlock {
    /// Where it starts.
    pub address: Address,
    /// Bytes.
    pub size: u64,
    /// Who asked for it, where the history tells.
    pub owner: Option<String>,
    /// The graph that it is a result of.
    pub graph: Option<u64>,
}

/// Something that would help.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Advice {
    /// The limit, not the device, is what stopped the request.
    RaiseLimit {
        /// Free as the driver sees it.
        driver_free: u64,
    },
    /// Freed blocks wait for streams: synchronise them, or record uses later.
    SynchronizeStreams {
        /// Pending bytes.
        pending: u64,
    },
    /// Free blocks of other streams cannot serve this one.
    ShareStreams {
        /// Their bytes.
        other_streams: u64,
    },
    /// Idle memory is kept by private pools that graphs or scopes hold.
    ReleasePools {
        /// Their free bytes.
        free: u64,
    },
    /// Pools of graphs keep memory that nobody uses between runs.
    ParkPools {
        /// Their free bytes.
        free: u64,
    },
    /// Enough is free, but in pieces.
    Fragmented {
        /// Free bytes of this stream in this pool.
        free: u64,
        /// The longest run of them.
        largest_run: u64,
    },
    /// Somebody else holds most of the device.
    OtherUsers {
        /// Bytes neither free nor reserved here.
        bytes: u64,
    },
    /// Live blocks in pools that captures drew from and that no graph holds any more.
    DropOutliving {
        /// Bytes of the segments that they keep.
        bytes: u64,
        /// How many blocks.
        blocks: u64,
    },
    /// The request is larger than the device.
    LargerThanDevice,
}

fn free_by_stream(segments: &[SegmentState]) -> Vec<FreeBytes> {
    let mut by: BTreeMap<(PoolId, StreamId), (u64, u64)> = BTreeMap::new();
    for segment in segments {
        let entry = by.entry((segment.pool, segment.stream)).or_default();
        entry.0 += segment.size - segment.active();
        entry.1 = entry.1.max(segment.largest_free_run());
    }
    let mut out: Vec<_> = by
        .into_iter()
        .filter(|(_, (bytes, _))| *bytes > 0)
        .map(|((pool, stream), (bytes, largest_run))| FreeBytes { pool, stream, bytes, largest_run })
        .collect();
    out.sort_by_key(|f| std::cmp::Reverse(f.bytes));
    out
}

/// What keeps a segment.
fn pinned(segment: &SegmentState, owners: &Owners<'_>) -> PinnedSegment {
    let pinning = || segment.blocks.iter().filter(|b| b.status != BlockStatus::Inactive);
    let block = |b: &BlockState| PinnedBlock {
        address: b.address,
        size: b.size,
        owner: owners.name(b.address),
        graph: b.graph,
    };
    PinnedSegment {
        address: segment.address,
        size: segment.size,
        pinned_bytes: segment.active(),
        pool: segment.pool,
        count: pinning().count() as u64,
        blocks: pinning().take(PINNING_BLOCKS).map(block).collect(),
    }
}

/// The segment that could serve `size` bytes to that pool and stream but for the fewest live bytes.
fn cheapest(segments: &[SegmentState], size: u64, pool: PoolId, stream: StreamId) -> Option<&SegmentState> {
    let usable = |s: &&SegmentState| s.pool == pool && s.stream == stream && s.size >= size && s.active() > 0;
    segments.iter().filter(usable).min_by_key(|s| (s.active(), s.size))
}

/// Segments at least half of which is free but not all, most free bytes first.
fn mostly_free(segments: &[SegmentState]) -> Vec<&SegmentState> {
    let mut list: Vec<&SegmentState> = segments.iter().filter(|s| s.active() > 0 && s.active() <= s.size / 2).collect();
    list.sort_by_key(|s| std::cmp::Reverse(s.size - s.active()));
    list.truncate(MOSTLY_FREE);
    list
}

fn pool_bytes(state: &State) -> Vec<PoolBytes> {
    let mut by: BTreeMap<PoolId, PoolBytes> = BTreeMap::new();
    for segment in &state.segments {
        let known = state.pools.iter().find(|p| p.id == segment.pool);
        let pool = by.entry(segment.pool).or_insert(PoolBytes {
            pool: segment.pool,
            reserved: 0,
            live: 0,
            pending: 0,
            held: known.is_none_or(|p| p.use_count > 0),
            captured: known.is_some_and(|p| p.captured),
        });
        pool.reserved += segment.size;
        pool.live += segment.allocated();
        pool.pending += segment.active() - segment.allocated();
    }
    let mut list: Vec<PoolBytes> = by.into_values().collect();
    list.sort_by_key(|p| std::cmp::Reverse(p.reserved));
    list
}

/// Live blocks of captured pools that nobody holds: the bytes of their segments, and how many they are.
fn outliving(state: &State, pools: &[PoolBytes]) -> Option<Advice> {
    let left = |s: &&SegmentState| pools.iter().any(|p| p.pool == s.pool && p.captured && !p.held);
    let (mut bytes, mut blocks) = (0, 0);
    for segment in state.segments.iter().filter(left) {
        let live = segment.blocks.iter().filter(|b| b.status == BlockStatus::ActiveAllocated).count() as u64;
        blocks += live;
        bytes += if live > 0 { segment.size } else { 0 };
    }
    (blocks > 0).then_some(Advice::DropOutliving { bytes, blocks })
}

/// What would help.
fn advice(report: &OutOfMemory, state: &State) -> Vec<Advice> {
    let mut out = Vec::new();
    if report.segment_size > report.driver.total {
        out.push(Advice::LargerThanDevice);
        return out;
    }
    let limited = report.limit.is_some_and(|l| report.reserved + report.segment_size > l.bytes);
    if limited && report.driver.free >= report.segment_size {
        out.push(Advice::RaiseLimit { driver_free: report.driver.free });
    }
    if report.pending > 0 {
        out.push(Advice::SynchronizeStreams { pending: report.pending });
    }
    let mine = report.free.iter().find(|f| f.pool == report.pool && f.stream == report.stream);
    if let Some(mine) = mine.filter(|f| f.bytes >= report.rounded && f.largest_run < report.rounded) {
        out.push(Advice::Fragmented { free: mine.bytes, largest_run: mine.largest_run });
    }
    let others: u64 =
        report.free.iter().filter(|f| f.pool == report.pool && f.stream != report.stream).map(|f| f.bytes).sum();
    if others >= report.rounded {
        out.push(Advice::ShareStreams { other_streams: others });
    }
    let held = |pool| state.pools.iter().any(|p| p.id == pool && p.use_count > 0);
    let in_held = |f: &&FreeBytes| f.pool != report.pool && held(f.pool);
    let pools: u64 = report.free.iter().filter(in_held).map(|f| f.bytes).sum();
    // What could be had beside it.
    let under_limit = report.limit.map_or(u64::MAX, |l| l.bytes.saturating_sub(report.reserved));
    let room = report.driver.free.min(under_limit);
    if pools > 0 && pools.saturating_add(room) >= report.segment_size {
        out.push(Advice::ReleasePools { free: pools });
    }
    if report.parkable > 0 && report.parkable.saturating_add(room) >= report.segment_size {
        out.push(Advice::ParkPools { free: report.parkable });
    }
    out.extend(outliving(state, &report.pools));
    let foreign = report.driver.total.saturating_sub(report.driver.free).saturating_sub(report.reserved);
    if report.driver_error.is_none() && foreign > report.driver.total / 4 {
        out.push(Advice::OtherUsers { bytes: foreign });
    }
    out
}

impl<D: Device> Inner<D> {
    /// Counts, reports and tells the observers.
    pub(crate) fn out_of_memory(&self, request: &Request<D>) -> AllocError {
        let total = self.shared.driver.device().properties().total_memory;
        let driver = self.shared.driver.mem_info();
        self.shared.totals.lock().ooms += 1;
        if let Some(caller) = &request.caller {
            let (requested, size) = (request.size, driver.as_ref().map_or(0, |info| info.free));
            let (stream, pool, part) = (request.core.handle, request.pool_id(), request.part);
            let address = Address::NULL;
            let what = What { action: Action::OutOfMemory, address, requested, size, stream, pool, part };
            self.shared.history.note(what, Some(caller));
        }
        let mut state = self.state();
        let away = |s: &SegmentState| s.backing == BackingKind::Away;
        let away_bytes = state.segments.iter().filter(|s| away(s)).map(|s| s.size).sum();
        state.segments.retain(|s| !away(s));
        let (parkable, lent) = self.idle_bytes();
        let mut report = report(request, self.least_growth(request), driver.map_err(|e| (e, total)), &state);
        (report.away, report.parkable, report.lent) = (away_bytes, parkable, lent);
        report.advice = advice(&report, &state);
        tracing::warn!(
            device = report.device,
            requested = report.requested,
            pool = %report.pool,
            reserved = report.reserved,
            live = report.live,
            driver_free = report.driver.free,
            "out of memory"
        );
        self.hooks.out_of_memory(&report);
        AllocError::OutOfMemory(Box::new(report))
    }
}

fn report<D: Device>(
    request: &Request<D>,
    segment_size: u64,
    driver: Result<MemoryInfo, (DriverError, u64)>,
    state: &State,
) -> OutOfMemory {
    let (driver, driver_error) = match driver {
        Ok(info) => (info, None),
        Err((e, total)) => (MemoryInfo { free: 0, total }, Some(e)),
    };
    let stats = &state.stats;
    let live = stats.allocated_bytes.all.current.max(0) as u64;
    let (pool, stream) = (request.pool_id(), request.core.id);
    let owners = Owners::of(state);
    let mut owned = owners.live(state);
    owned.truncate(OWNERS);
    OutOfMemory {
        device: state.device,
        requested: request.requested,
        rounded: request.size,
        segment_size,
        stream,
        pool,
        part: request.part,
        in_capture: request.in_capture,
        limit: state.limit,
        driver,
        driver_error,
        reserved: stats.reserved_bytes.all.current.max(0) as u64,
        live,
        pending: (stats.active_bytes.all.current.max(0) as u64).saturating_sub(live),
        free: free_by_stream(&state.segments),
        free_in_private_pools: state
            .segments
            .iter()
            .filter(|s| !s.pool.is_default())
            .map(|s| s.size - s.active())
            .sum(),
        largest_free_run: state.segments.iter().map(SegmentState::largest_free_run).max().unwrap_or(0),
        inactive_split: stats.inactive_split_bytes.all.current.max(0) as u64,
        pinned: cheapest(&state.segments, request.size, pool, stream).map(|s| pinned(s, &owners)),
        mostly_free: mostly_free(&state.segments).into_iter().map(|s| pinned(s, &owners)).collect(),
        owners: owned,
        pools: pool_bytes(state),
        graphs: state.graph_bytes(),
        captures: state.captures.clone(),
        away: 0,
        lent: 0,
        parkable: 0,
        advice: Vec::new(),
    }
}
