//! Out of memory, explained: what was asked and by whom, what was there, and what would help.

use std::collections::BTreeMap;
use std::fmt;

use gpupool_device::{Address, Device, DriverError, MemoryInfo};

use crate::config::LimitSource;
use crate::error::AllocError;
use crate::history::{Action, What};
use crate::ids::{Part, PoolId, StreamId};
use crate::inner::{Inner, Request};
use crate::state::{BackingKind, BlockStatus, SegmentState, State};
use crate::totals::Limit;

/// How many pinning blocks are listed.
const PINNING_BLOCKS: usize = 8;

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

/// A segment that would serve the request if a few live blocks were not in it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PinnedSegment {
    /// Where it starts.
    pub address: Address,
    /// Bytes.
    pub size: u64,
    /// Live or pending bytes in it.
    pub pinned_bytes: u64,
    /// The blocks (address, bytes), the first few.
    pub blocks: Vec<(Address, u64)>,
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
    /// The request is larger than the device.
    LargerThanDevice,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RaiseLimit { driver_free } => {
                write!(f, "raise the limit: the driver still has {} free", Size(*driver_free))
            }
            Self::SynchronizeStreams { pending } => write!(
                f,
                "{} was freed but other streams may still use it: synchronise them, or free after they are done",
                Size(*pending)
            ),
            Self::ShareStreams { other_streams } => write!(
                f,
                "{} is free on other streams in segments that they still use: allocate on fewer streams, and retire (`retire_stream`) those that are done",
                Size(*other_streams)
            ),
            Self::ReleasePools { free } => {
                write!(f, "{} is free in private pools that are held: drop their graphs, or share pools", Size(*free))
            }
            Self::ParkPools { free } => write!(
                f,
                "{} is free in pools of graphs: let them be parked when memory is short, or lend (IdleOptions)",
                Size(*free)
            ),
            Self::Fragmented { free, largest_run } => write!(
                f,
                "{} is free for this stream, but the longest run is {}: drop the blocks that pin it, allocate long-lived blocks first, \
                 or set max_split_size",
                Size(*free),
                Size(*largest_run)
            ),
            Self::OtherUsers { bytes } => {
                write!(f, "{} of the device is held by others: other processes, contexts or libraries", Size(*bytes))
            }
            Self::LargerThanDevice => f.write_str("the request is larger than the whole device"),
        }
    }
}

/// Bytes as a person reads them, in PyTorch's way.
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0;
        if n <= 1 << 10 {
            write!(f, "{n} bytes")
        } else if n <= 1 << 20 {
            write!(f, "{:.2} KiB", n as f64 / 1024.0)
        } else if n <= 1 << 30 {
            write!(f, "{:.2} MiB", n as f64 / 1_048_576.0)
        } else {
            write!(f, "{:.2} GiB", n as f64 / 1_073_741_824.0)
        }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "out of memory on GPU {}: {} requested by stream {}",
            self.device,
            Size(self.requested),
            self.stream
        )?;
        if self.pool.is_default() {
            f.write_str(" (default pool)")?;
        } else {
            write!(f, " (pool {})", self.pool)?;
        }
        if self.in_capture {
            f.write_str(", inside a capture")?;
        }
        writeln!(f)?;
        writeln!(f, "  asked of the driver: {} for a segment", Size(self.segment_size))?;
        if let Some(limit) = self.limit {
            let who = match limit.source {
                LimitSource::Fraction => "the memory fraction",
                LimitSource::Configuration => "the configuration",
                LimitSource::User => "a call",
            };
            writeln!(
                f,
                "  limit:               {} (set by {who}); it bounds this allocator's segments only",
                Size(limit.bytes)
            )?;
        }
        match self.driver_error {
            None => {
                writeln!(f, "  driver:              {} free of {}", Size(self.driver.free), Size(self.driver.total))?
            }
            Some(e) => writeln!(f, "  driver:              did not tell what is free ({e})")?,
        }
        let cached = self.reserved - (self.live + self.pending).min(self.reserved);
        writeln!(
            f,
            "  this allocator:      {} reserved = {} live + {} pending + {} free",
            Size(self.reserved),
            Size(self.live),
            Size(self.pending),
            Size(cached)
        )?;
        writeln!(
            f,
            "  largest free run:    {}; {} is free between live blocks",
            Size(self.largest_free_run),
            Size(self.inactive_split)
        )?;
        if self.away + self.lent + self.parkable > 0 {
            writeln!(
                f,
                "  idle pools:          {} away (parked or suspended), {} lent, {} more could go",
                Size(self.away),
                Size(self.lent),
                Size(self.parkable)
            )?;
        }
        for free in self.free.iter().take(6) {
            writeln!(
                f,
                "  free:                {} in pool {} on stream {}, longest run {}",
                Size(free.bytes),
                free.pool,
                free.stream,
                Size(free.largest_run)
            )?;
        }
        if let Some(pinned) = &self.pinned {
            write!(
                f,
                "  pinned:              the segment of {} at {} by {} in",
                Size(pinned.size),
                pinned.address,
                Size(pinned.pinned_bytes)
            )?;
            for (address, bytes) in &pinned.blocks {
                write!(f, " {address} ({})", Size(*bytes))?;
            }
            writeln!(f)?;
        }
        for advice in &self.advice {
            writeln!(f, "  what would help:     {advice}")?;
        }
        Ok(())
    }
}

impl OutOfMemory {
    fn advise(&mut self, state: &State) {
        let held: Vec<PoolId> = state.pools.iter().filter(|p| p.use_count > 0).map(|p| p.id).collect();
        self.advice = advice(self, &held);
    }

    /// The figures in PyTorch's words, for those who grep for them. The advice at its end is ours.
    #[must_use]
    pub fn pytorch_message(&self) -> String {
        let mut out = format!(
            "CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {} of which {} is free. ",
            Size(self.segment_size),
            self.device,
            Size(self.driver.total),
            Size(self.driver.free)
        );
        if let Some(limit) = self.limit {
            out += &format!("{} allowed; ", Size(limit.bytes));
        }
        let private = self.free_in_private_pools;
        let allocated = self.live + private;
        out += &format!("Of the allocated memory {} is allocated by PyTorch, ", Size(allocated));
        if private > 0 {
            out += &format!("with {} allocated in private pools (e.g., CUDA Graphs), ", Size(private));
        }
        let rest = self.reserved.saturating_sub(allocated);
        out += &format!("and {} is reserved by PyTorch but unallocated.", Size(rest));
        for advice in &self.advice {
            out += &format!(" {advice}.");
        }
        out
    }
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

/// The segment that could serve `size` bytes to that pool and stream but for the fewest live bytes.
fn cheapest_pinned(segments: &[SegmentState], size: u64, pool: PoolId, stream: StreamId) -> Option<PinnedSegment> {
    let usable = |s: &&SegmentState| s.pool == pool && s.stream == stream && s.size >= size && s.active() > 0;
    let best = segments.iter().filter(usable).min_by_key(|s| (s.active(), s.size))?;
    let pinning = best.blocks.iter().filter(|b| b.status != BlockStatus::Inactive);
    Some(PinnedSegment {
        address: best.address,
        size: best.size,
        pinned_bytes: best.active(),
        blocks: pinning.take(PINNING_BLOCKS).map(|b| (b.address, b.size)).collect(),
    })
}

/// What would help. `held` are the private pools that somebody uses.
fn advice(report: &OutOfMemory, held: &[PoolId]) -> Vec<Advice> {
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
    let in_held = |f: &&FreeBytes| f.pool != report.pool && held.contains(&f.pool);
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
        report.advise(&state);
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
        pinned: cheapest_pinned(&state.segments, request.size, pool, stream),
        away: 0,
        lent: 0,
        parkable: 0,
        advice: Vec::new(),
    }
}
