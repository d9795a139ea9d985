//! What would help: rules, each of which says nothing unless it applies, and how many bytes it is about.

use serde::Serialize;

use crate::summary::Summary;

/// A rule speaks from this share of what is reserved on.
const WORTHWHILE: u64 = 50;

/// Something that would help. Sizes in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "rule", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Advice {
    /// The last request failed though as much was free, but in pieces.
    Fragmented {
        /// Asked for.
        asked: u64,
        /// Free in all.
        bytes: u64,
        /// The longest run.
        longest: u64,
    },
    /// The last request that failed asked for less than the driver had free: a limit stopped it.
    RaiseLimit {
        /// Asked for.
        asked: u64,
        /// What the driver had free.
        bytes: u64,
    },
    /// Wholly free segments of the default pool.
    EmptyCache {
        /// Their bytes.
        bytes: u64,
    },
    /// Few live bytes keep mostly free segments.
    Unpin {
        /// Free in those segments.
        bytes: u64,
        /// Live and pending in them.
        by: u64,
        /// How many blocks those are.
        blocks: u64,
    },
    /// Free memory in private pools serves nobody else.
    SharePools {
        /// Free in private pools.
        bytes: u64,
        /// How many pools have some.
        pools: u64,
    },
    /// Live blocks in private pools that no graph holds.
    DropOutliving {
        /// Their segments' bytes.
        bytes: u64,
        /// How many blocks.
        blocks: u64,
    },
    /// Freed blocks that other streams may still use.
    SynchronizeStreams {
        /// Their bytes.
        bytes: u64,
    },
    /// Free memory of several streams, of which none may use another's.
    FewerStreams {
        /// Free on all but the stream that has most.
        bytes: u64,
        /// How many streams have some.
        streams: u64,
    },
    /// Blocks are larger than what was asked for.
    Rounding {
        /// By so much.
        bytes: u64,
    },
}

impl Advice {
    /// How many bytes it is about.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        match self {
            Self::Fragmented { bytes, .. }
            | Self::RaiseLimit { bytes, .. }
            | Self::EmptyCache { bytes }
            | Self::Unpin { bytes, .. }
            | Self::SharePools { bytes, .. }
            | Self::DropOutliving { bytes, .. }
            | Self::SynchronizeStreams { bytes }
            | Self::FewerStreams { bytes, .. }
            | Self::Rounding { bytes } => *bytes,
        }
    }
}

/// What applies, most bytes first; what an out-of-memory error is about comes before all.
pub(crate) fn of(summary: &Summary) -> Vec<Advice> {
    let total = summary.total;
    let mut all = Vec::new();
    let worthwhile = |bytes: u64| bytes > 0 && bytes >= total.reserved / WORTHWHILE;
    if worthwhile(summary.idle_default) {
        all.push(Advice::EmptyCache { bytes: summary.idle_default });
    }
    if worthwhile(summary.pinned_free) {
        let (by, blocks) = (summary.pinned_bytes, summary.pinned_blocks);
        all.push(Advice::Unpin { bytes: summary.pinned_free, by, blocks });
    }
    let private: Vec<u64> = summary.by_pool.iter().filter(|p| p.pool != (0, 0)).map(|p| p.amounts.free).collect();
    let (free, pools) = (private.iter().sum(), private.iter().filter(|bytes| **bytes > 0).count() as u64);
    if worthwhile(free) {
        all.push(Advice::SharePools { bytes: free, pools });
    }
    if summary.outliving.blocks > 0 {
        all.push(Advice::DropOutliving { bytes: summary.outliving.segment_bytes, blocks: summary.outliving.blocks });
    }
    if worthwhile(total.pending) {
        all.push(Advice::SynchronizeStreams { bytes: total.pending });
    }
    let mut streams: Vec<u64> = summary.by_stream.iter().map(|s| s.amounts.free).filter(|free| *free > 0).collect();
    streams.sort_unstable();
    let most = streams.pop().unwrap_or(0);
    let others = streams.iter().sum::<u64>();
    if most > 0 && worthwhile(others) {
        all.push(Advice::FewerStreams { bytes: others, streams: streams.len() as u64 + 1 });
    }
    let rounding = (total.live + total.pending).saturating_sub(total.requested);
    if worthwhile(rounding.saturating_mul(2)) && rounding >= (total.live + total.pending) / 10 {
        all.push(Advice::Rounding { bytes: rounding });
    }
    all.sort_by_key(|advice| std::cmp::Reverse(advice.bytes()));
    if let Some(oom) = summary.out_of_memory.last()
        && total.free >= oom.size
        && summary.largest_free_run < oom.size
    {
        let longest = summary.largest_free_run;
        all.insert(0, Advice::Fragmented { asked: oom.size, bytes: total.free, longest });
    }
    // The driver would have had to give a whole segment: twice the request is certainly more than one.
    if let Some(oom) = summary.out_of_memory.last().filter(|oom| oom.device_free / 2 > oom.size.max(20 << 20)) {
        all.insert(0, Advice::RaiseLimit { asked: oom.size, bytes: oom.device_free });
    }
    all
}
