//! Statistics under PyTorch's names.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_device::Device;

use crate::arena::Arena;
use crate::counters::{ArenaCounters, Stat, StatArray};
use crate::ids::PoolId;
use crate::inner::Inner;
use crate::totals::{IdleStats, PageStats};

/// What PyTorch calls `memory_stats`, and more. Bytes, or counts.
///
/// Current and cumulative figures are exact at any quiet moment. A peak over several streams is the most there was at once, in the order
/// in which the requests that made it came back; streams and pools that are gone stay in it. Where threads that go up and down, each at its
/// own time, would stop each other for it, it may read high: by a 32nd at first, and by no more than it takes until they do not, which is the
/// sum of what each stream had at most. With [`exact_peaks`](crate::Config::exact_peaks) it never does.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Blocks handed out and not freed.
    pub allocation: StatArray,
    /// Segments held from the driver.
    pub segment: StatArray,
    /// Blocks handed out, or freed and pending.
    pub active: StatArray,
    /// Free blocks in segments that hold others too.
    pub inactive_split: StatArray,
    /// Bytes in blocks handed out.
    pub allocated_bytes: StatArray,
    /// Bytes in segments.
    pub reserved_bytes: StatArray,
    /// Bytes in blocks handed out, or freed and pending.
    pub active_bytes: StatArray,
    /// Bytes in free blocks of segments that hold others too.
    pub inactive_split_bytes: StatArray,
    /// Bytes asked for, in blocks handed out or pending.
    pub requested_bytes: StatArray,
    /// Live blocks of at least the split limit.
    pub oversize_allocations: Stat,
    /// Segments of at least the split limit.
    pub oversize_segments: Stat,
    /// How often the driver was asked again after the cache was emptied.
    pub num_alloc_retries: i64,
    /// Requests that ended in out of memory.
    pub num_ooms: i64,
    /// Requests rejected outright.
    pub num_oom_rejections: i64,
    /// How often the cache was emptied with a wait for all streams.
    pub num_sync_all_streams: i64,
    /// Segments taken from the driver.
    pub num_device_alloc: i64,
    /// Segments given back.
    pub num_device_free: i64,
    /// The split limit at start-up; -1 without one.
    pub max_split_size: i64,
    /// Reserved bytes of every private pool that ever had a segment.
    pub private_pools: BTreeMap<PoolId, StatArray>,
    /// Free blocks parked in bins, now.
    pub binned: i64,
    /// Their bytes; part of the free bytes.
    pub binned_bytes: i64,
    /// Requests that found no free block of their stream or pool, and so took the long way: whatever served them in the end. Never reset.
    pub misses: i64,
    /// What moving pages took.
    pub pages: PageStats,
    /// What idle pools did.
    pub idle: IdleStats,
    /// Moves whenever an address goes back to the driver: graphs captured over foreign memory must then be checked again.
    pub released_generation: u64,
}

impl Stats {
    /// Keeps the cumulative figures of an arena that is going, in which nothing is live.
    pub(crate) fn fold(&mut self, c: &ArenaCounters) {
        self.add_arena(c);
        for stat in self.of_arenas() {
            stat.peak = 0;
        }
    }

    fn of_arenas(&mut self) -> impl Iterator<Item = &mut Stat> {
        let arrays = [
            &mut self.allocation,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ];
        arrays.into_iter().flat_map(StatArray::each).chain([&mut self.oversize_allocations])
    }

    fn add_arena(&mut self, counters: &ArenaCounters) {
        let c = counters.read();
        self.allocation.add(c.allocation);
        self.active.add(c.active);
        self.inactive_split.add(c.inactive_split);
        self.allocated_bytes.add(c.allocated_bytes);
        self.active_bytes.add(c.active_bytes);
        self.inactive_split_bytes.add(c.inactive_split_bytes);
        self.requested_bytes.add(c.requested_bytes);
        self.oversize_allocations.add(c.oversize_allocations);
        self.binned += c.binned;
        self.binned_bytes += c.binned_bytes;
        self.misses += c.misses;
    }

    /// Bytes in segments that are neither live nor pending.
    #[must_use]
    pub fn cached_bytes(&self) -> i64 {
        self.reserved_bytes.all.current - self.active_bytes.all.current
    }

    /// The figures that are kept for each part, under PyTorch's names and in its order.
    #[must_use]
    pub fn arrays(&self) -> [(&'static str, &StatArray); 9] {
        [
            ("active", &self.active),
            ("active_bytes", &self.active_bytes),
            ("allocated_bytes", &self.allocated_bytes),
            ("allocation", &self.allocation),
            ("inactive_split", &self.inactive_split),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("segment", &self.segment),
        ]
    }

    /// All figures as PyTorch's flat `memory_stats` dictionary: keys like `allocated_bytes.all.current`, in PyTorch's order.
    #[must_use]
    pub fn flat(&self) -> Vec<(String, i64)> {
        let mut out = Vec::new();
        for (name, array) in self.arrays() {
            push_array(&mut out, name, array);
        }
        push_stat(&mut out, "oversize_allocations", &self.oversize_allocations);
        push_stat(&mut out, "oversize_segments", &self.oversize_segments);
        for (name, value) in [
            ("max_split_size", self.max_split_size),
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("num_oom_rejections", self.num_oom_rejections),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
        ] {
            out.push((name.to_owned(), value));
        }
        for (pool, array) in &self.private_pools {
            push_array(&mut out, &format!("reserved_bytes_by_private_pools.{}_{}", pool.0, pool.1), array);
        }
        out
    }
}

fn push_array(out: &mut Vec<(String, i64)>, name: &str, array: &StatArray) {
    for (part, stat) in [("all", &array.all), ("small_pool", &array.small_pool), ("large_pool", &array.large_pool)] {
        push_stat(out, &format!("{name}.{part}"), stat);
    }
}

fn push_stat(out: &mut Vec<(String, i64)>, name: &str, stat: &Stat) {
    out.extend(stat.values().map(|(key, value)| (format!("{name}.{key}"), value)));
}

/// A private pool's figures, read in O(1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes in live blocks.
    pub allocated_bytes: StatArray,
    /// Bytes in segments.
    pub reserved_bytes: StatArray,
}

impl<D: Device> Inner<D> {
    /// O(arenas). Takes the lock of the totals, and no arena's.
    pub(crate) fn stats(&self) -> Stats {
        let mut out = Stats {
            max_split_size: i64::try_from(self.shared.rules.arena.max_split).unwrap_or(-1),
            ..self.folded.lock().clone()
        };
        let arenas: Vec<Arc<Arena<D>>> = self.arenas();
        arenas.iter().for_each(|a| out.add_arena(&a.counters));
        if !self.shared.rules.single_arena {
            for (at, stat) in out.of_arenas().enumerate() {
                stat.peak = self.shared.peaks.read(at, stat.peak);
            }
        }
        let totals = self.shared.totals.lock();
        out.segment = totals.segment;
        out.reserved_bytes = totals.reserved_bytes;
        out.oversize_segments = totals.oversize_segments;
        out.num_alloc_retries = totals.alloc_retries;
        out.num_ooms = totals.ooms;
        out.num_oom_rejections = totals.oom_rejections;
        out.num_sync_all_streams = totals.syncs;
        out.num_device_alloc = totals.device_allocs;
        out.num_device_free = totals.device_frees;
        out.private_pools = totals.pools.clone();
        out.pages = totals.pages;
        out.idle = totals.idle;
        out.released_generation = totals.released_generation;
        out
    }
}
