//! An allocator's state counted again, from its list of segments and blocks: every figure must come out as it is reported.

use std::collections::{BTreeMap, BTreeSet};

use gpupool_allocator::state::{BackingKind, BlockStatus, SegmentState, State};
use gpupool_allocator::{Part, Policy, PoolId, Stat, StatArray};

/// How exact the figures of segments must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Strictness {
    /// Reserved bytes are the segments' bytes.
    Exact,
    /// The driver refused to take memory back: it counts as reserved, but is in no segment any more.
    MayBeStranded,
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

/// Small and large.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Pair(i64, i64);

impl Pair {
    fn add(&mut self, part: Part, n: i64) {
        match part {
            Part::Small => self.0 += n,
            Part::Large => self.1 += n,
        }
    }

    fn expect(self, name: &str, stat: &StatArray) -> Result<(), String> {
        let counted = Self(stat.small_pool.current, stat.large_pool.current);
        ensure(counted == self, || format!("{name} is {counted:?} (small, large), a recount gives {self:?}"))?;
        let sum = self.0 + self.1;
        ensure(stat.all.current == sum, || format!("{name}.all is {}, its parts are {self:?}", stat.all.current))
    }
}

/// Segments lie apart, blocks tile them, free ones are merged, addresses and sizes are multiples of 512, and every counter is what
/// a recount gives.
pub fn recount(state: &State, strictness: Strictness) -> Result<(), String> {
    let mut end = 0;
    let held = |segment: &SegmentState| is_away(state, segment);
    for segment in &state.segments {
        ensure(segment.address.0 >= end, || format!("segment {} overlaps the one before", segment.address))?;
        end = segment.address.0 + segment.size;
        tiles(segment, held(segment))?;
    }
    let ordinals: BTreeSet<u64> = state.segments.iter().map(|s| s.ordinal).collect();
    ensure(ordinals.len() == state.segments.len(), || "two segments have one number".to_owned())?;
    counters(state, strictness)?;
    peaks(state)
}

/// Whether a segment is of a pool whose memory is away: what is free there is held, in no index and not merged.
fn is_away(state: &State, segment: &SegmentState) -> bool {
    let of_pool = state.pools.iter().any(|p| p.id == segment.pool && p.residency.is_away());
    of_pool || segment.backing == BackingKind::Away
}

fn tiles(segment: &SegmentState, held: bool) -> Result<(), String> {
    let (mut at, mut free_before) = (segment.address, None);
    for block in &segment.blocks {
        let place = || format!("block {} of segment {}", block.address, segment.address);
        ensure(block.address == at, || format!("{} should start at {at}", place()))?;
        ensure(block.size > 0 && block.size.is_multiple_of(512) && block.address.0.is_multiple_of(512), || {
            format!("{} has {} bytes", place(), block.size)
        })?;
        let inactive = block.status == BlockStatus::Inactive;
        ensure(!block.binned || inactive, || format!("{} is in a bin and {:?}", place(), block.status))?;
        let free = inactive && !block.binned;
        // A range of pages may serve several streams.
        let same = segment.backing != BackingKind::Pages || free_before == Some(block.stream);
        ensure(held || !(free && free_before.is_some() && same), || {
            format!("{} and the one before it are both free", place())
        })?;
        ensure(inactive || block.requested <= block.size, || {
            format!("{} of {} bytes serves a request of {}", place(), block.size, block.requested)
        })?;
        let pending = block.status == BlockStatus::ActivePendingFree;
        ensure(!inactive || block.used_by.is_empty(), || {
            format!("{} is free and used by {:?}", place(), block.used_by)
        })?;
        ensure(!pending || !block.used_by.is_empty(), || format!("{} is pending and nobody uses it", place()))?;
        free_before = free.then_some(block.stream);
        at = at.offset(block.size);
    }
    let end = segment.address.offset(segment.size);
    ensure(at == end, || format!("the blocks of segment {} end at {at}, not {end}", segment.address))
}

#[derive(Default)]
struct Sums {
    allocation: Pair,
    active: Pair,
    inactive_split: Pair,
    allocated_bytes: Pair,
    active_bytes: Pair,
    inactive_split_bytes: Pair,
    requested_bytes: Pair,
    segment: Pair,
    reserved_bytes: Pair,
    binned: (i64, i64),
    oversize: i64,
    oversize_segments: i64,
    pools: BTreeMap<PoolId, (Pair, Pair)>,
}

fn sum_up(state: &State) -> Sums {
    let mut sums = Sums::default();
    let max_split = match state.stats.max_split_size {
        -1 => u64::MAX,
        bytes => bytes as u64,
    };
    for segment in &state.segments {
        let (part, size) = (segment.part, segment.size as i64);
        if segment.backing != BackingKind::Away {
            sums.segment.add(part, 1);
            sums.reserved_bytes.add(part, size);
            sums.oversize_segments += i64::from(segment.size >= max_split);
            if !segment.pool.is_default() {
                sums.pools.entry(segment.pool).or_default().1.add(part, size);
            }
        }
        let held = is_away(state, segment);
        for block in &segment.blocks {
            let bytes = block.size as i64;
            if block.status == BlockStatus::ActiveAllocated {
                sums.allocation.add(part, 1);
                sums.allocated_bytes.add(part, bytes);
                sums.oversize += i64::from(block.size >= max_split);
                if !segment.pool.is_default() {
                    sums.pools.entry(segment.pool).or_default().0.add(part, bytes);
                }
            }
            if block.status != BlockStatus::Inactive {
                sums.active.add(part, 1);
                sums.active_bytes.add(part, bytes);
                sums.requested_bytes.add(part, block.requested as i64);
            } else if held {
                // In no index, and counted nowhere.
            } else if segment.blocks.len() > 1 || segment.backing == BackingKind::Pages {
                // A run of pages is a part of a larger range.
                sums.inactive_split.add(part, 1);
                sums.inactive_split_bytes.add(part, bytes);
            }
            if block.binned {
                sums.binned.0 += 1;
                sums.binned.1 += bytes;
            }
        }
    }
    sums
}

fn counters(state: &State, strictness: Strictness) -> Result<(), String> {
    let (stats, sums) = (&state.stats, sum_up(state));
    sums.allocation.expect("allocation", &stats.allocation)?;
    sums.active.expect("active", &stats.active)?;
    sums.inactive_split.expect("inactive_split", &stats.inactive_split)?;
    sums.allocated_bytes.expect("allocated_bytes", &stats.allocated_bytes)?;
    sums.active_bytes.expect("active_bytes", &stats.active_bytes)?;
    sums.inactive_split_bytes.expect("inactive_split_bytes", &stats.inactive_split_bytes)?;
    sums.requested_bytes.expect("requested_bytes", &stats.requested_bytes)?;
    let binned = (stats.binned, stats.binned_bytes);
    ensure(binned == sums.binned, || format!("binned is {binned:?}, a recount gives {:?}", sums.binned))?;
    ensure(stats.oversize_allocations.current == sums.oversize, || {
        format!("oversize_allocations is {}, a recount gives {}", stats.oversize_allocations.current, sums.oversize)
    })?;
    if strictness == Strictness::Exact {
        sums.segment.expect("segment", &stats.segment)?;
        sums.reserved_bytes.expect("reserved_bytes", &stats.reserved_bytes)?;
        ensure(stats.oversize_segments.current == sums.oversize_segments, || {
            format!(
                "oversize_segments is {}, a recount gives {}",
                stats.oversize_segments.current, sums.oversize_segments
            )
        })?;
        for (id, array) in &stats.private_pools {
            let (_, reserved) = sums.pools.get(id).copied().unwrap_or_default();
            reserved.expect(&format!("reserved_bytes of pool {id}"), array)?;
        }
    }
    let known: BTreeSet<PoolId> = state.pools.iter().map(|p| p.id).collect();
    for id in sums.pools.keys() {
        ensure(known.contains(id), || format!("pool {id} has segments and is not listed"))?;
    }
    for pool in &state.pools {
        let (allocated, reserved) = sums.pools.get(&pool.id).copied().unwrap_or_default();
        allocated.expect(&format!("allocated bytes of pool {}", pool.id), &pool.allocated_bytes)?;
        reserved.expect(&format!("reserved bytes of pool {}", pool.id), &pool.reserved_bytes)?;
    }
    Ok(())
}

fn peaks(state: &State) -> Result<(), String> {
    for (name, array) in state.stats.arrays() {
        for stat in [array.all, array.small_pool, array.large_pool] {
            ensure(stat.current >= 0 && stat.peak >= stat.current, || format!("{name} is {stat:?}"))?;
        }
    }
    Ok(())
}

/// Whether current figures are what went in less what went out. Not so after accumulated figures were set to zero.
pub fn adds_up(state: &State) -> Result<(), String> {
    let stats = &state.stats;
    let check = |name: &str, stat: Stat| {
        ensure(stat.current == stat.allocated - stat.freed, || {
            format!("{name} is {stat:?}: in less out is not current")
        })
    };
    for (name, array) in stats.arrays() {
        for stat in [array.all, array.small_pool, array.large_pool] {
            check(name, stat)?;
        }
    }
    for (name, stat) in
        [("oversize_allocations", stats.oversize_allocations), ("oversize_segments", stats.oversize_segments)]
    {
        check(name, stat)?;
    }
    if state.policy == Policy::Pages {
        // A segment is a run of handles, and they move.
        let handles: usize = state.segments.iter().map(|s| s.handles.len().max(1)).sum();
        let held = stats.num_device_alloc - stats.num_device_free;
        return ensure(held == handles as i64, || format!("{held} handles are counted, {handles} listed"));
    }
    let (segments, freed) = (stats.segment.all.allocated, stats.segment.all.freed);
    ensure((segments, freed) == (stats.num_device_alloc, stats.num_device_free), || {
        format!(
            "{segments} segments came and {freed} went, the driver counts {} and {}",
            stats.num_device_alloc, stats.num_device_free
        )
    })
}
