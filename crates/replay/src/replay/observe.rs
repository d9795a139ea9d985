//! Looking at the first turn: segments as they come and go, pools, peaks, and the state at the peak.

use std::collections::BTreeMap;

use gpupool_allocator::state::SegmentState;
use gpupool_allocator::{Allocation, Policy, PoolId, State};
use gpupool_device::{Address, StreamHandle};
use hashbrown::HashMap;

use super::Options;
use super::report::{PoolReport, SegmentReport};
use super::setup::Plan;
use super::turn::{Observer, Ours, PoolIds};
use super::{Meter, ReplayDevice};
use crate::trace::{Event, Trace};

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x100_0000_01b3;

/// A figure and the most it ever was.
#[derive(Clone, Copy, Default, Debug)]
struct Level {
    now: u64,
    peak: u64,
}

impl Level {
    fn rise(&mut self, by: u64) {
        self.now += by;
        self.peak = self.peak.max(self.now);
    }

    fn set(&mut self, now: u64) {
        self.now = now;
        self.peak = self.peak.max(now);
    }

    fn fall(&mut self, by: u64) {
        self.now = self.now.saturating_sub(by);
    }
}

#[derive(Clone, Default, Debug)]
struct PoolFigures {
    allocated: Level,
    reserved: Level,
}

/// What the first turn showed. See the module's documentation.
pub(super) struct Watch<'a> {
    trace: &'a Trace,
    plan: &'a Plan,
    progress: &'a mut dyn FnMut(u64),
    wants_state: bool,
    /// Segments are told. Not where each block is one: then the driver's pool decides what is held.
    tells_segments: bool,
    /// Counted events so far.
    counted: u64,
    memory_calls: u64,
    allocated: Level,
    reserved: Level,
    segments: Vec<SegmentReport>,
    /// Segments that exist: place in the list and pool, by ordinal.
    standing: BTreeMap<u64, (usize, PoolId)>,
    pools: HashMap<PoolId, PoolFigures>,
    /// Private pools of live blocks, by address.
    homes: HashMap<u64, PoolId>,
    /// Segments that exist, by address: ordinal.
    starts: BTreeMap<u64, u64>,
    /// The block that the event under way was given.
    given: Option<u64>,
    placements: u64,
    addresses: Vec<Address>,
    at_peak: Option<State>,
}

impl<'a> Watch<'a> {
    pub(super) fn new(trace: &'a Trace, plan: &'a Plan, options: &Options, progress: &'a mut dyn FnMut(u64)) -> Self {
        Self {
            trace,
            plan,
            progress,
            wants_state: options.wants_state,
            tells_segments: options.policy != Policy::StreamOrdered || options.wants_state,
            counted: 0,
            memory_calls: 0,
            allocated: Level::default(),
            reserved: Level::default(),
            segments: Vec::new(),
            standing: BTreeMap::new(),
            pools: HashMap::new(),
            homes: HashMap::new(),
            starts: BTreeMap::new(),
            given: None,
            placements: FNV_OFFSET,
            addresses: Vec::new(),
            at_peak: None,
        }
    }

    pub(super) fn peak_allocated(&self) -> u64 {
        self.allocated.peak
    }

    pub(super) fn counted(&self) -> u64 {
        self.counted
    }

    /// A digest of where each block was: its segment's ordinal and its offset there, in order.
    pub(super) fn placements(&self) -> u64 {
        self.placements
    }

    /// Where the segments were, in order of creation.
    pub(super) fn addresses(&self) -> Vec<Address> {
        self.addresses.clone()
    }

    /// Adds the block that the event was given to the digest (FNV-1a, a word at a time).
    fn place(&mut self) {
        let Some(address) = self.given.take() else { return };
        let Some((start, ordinal)) = self.starts.range(..=address).next_back() else { return };
        for word in [*ordinal, address - start] {
            self.placements = (self.placements ^ word).wrapping_mul(FNV_PRIME);
        }
    }

    /// The segments, the private pools, and the state at the peak.
    pub(super) fn into_parts(self) -> (Vec<SegmentReport>, Vec<PoolReport>, Option<State>) {
        let mut pools: BTreeMap<u64, PoolReport> = BTreeMap::new();
        let ids = PoolIds::of(self.trace);
        for graph in &self.trace.graphs {
            let figures = self.pools.get(&ids.id(graph.pool, 0)).cloned().unwrap_or_default();
            let pool = pools.entry(graph.pool).or_insert(PoolReport {
                pool: graph.pool,
                peak_reserved: figures.reserved.peak,
                peak_allocated: figures.allocated.peak,
                graphs: 0,
            });
            pool.graphs += 1;
        }
        (self.segments, pools.into_values().collect(), self.at_peak)
    }

    /// Memory came or went: compares the segments with those known.
    fn refresh(&mut self, state: State, event: Event) {
        self.starts = state.segments.iter().map(|segment| (segment.address.0, segment.ordinal)).collect();
        let mut gone: BTreeMap<u64, (usize, PoolId)> = std::mem::take(&mut self.standing);
        for segment in &state.segments {
            if let Some(known) = gone.remove(&segment.ordinal) {
                self.standing.insert(segment.ordinal, known);
                self.segments[known.0].bytes = segment.size;
                continue;
            }
            self.standing.insert(segment.ordinal, (self.segments.len(), segment.pool));
            let pool = if segment.pool.is_default() { 0 } else { segment.pool.0 };
            self.addresses.push(segment.address);
            self.segments.push(SegmentReport {
                ordinal: segment.ordinal,
                bytes: segment.size,
                stream: self.stream_of(segment, event),
                pool,
                released_at: None,
            });
        }
        for (index, _) in gone.into_values() {
            self.segments[index].released_at = Some(self.counted);
        }
        let before = self.reserved.peak;
        self.reserved.set(self.reserved_now());
        self.recount_pools();
        if self.wants_state && self.reserved.peak > before {
            self.at_peak = Some(state);
        }
    }

    /// The stream that a new segment was made for. Memory of a graph's pool may belong to no one stream: then it is
    /// that of the request that made it.
    fn stream_of(&self, segment: &SegmentState, event: Event) -> u64 {
        match event {
            Event::Alloc { stream, .. } if segment.stream_handle == StreamHandle(u64::MAX) => u64::from(stream),
            _ => self.plan.number(segment.stream_handle),
        }
    }

    fn reserved_now(&self) -> u64 {
        self.standing.values().map(|(index, _)| self.segments[*index].bytes).sum()
    }

    fn recount_pools(&mut self) {
        let mut now: HashMap<PoolId, u64> = HashMap::new();
        for (index, pool) in self.standing.values() {
            *now.entry(*pool).or_default() += self.segments[*index].bytes;
        }
        for (pool, figures) in &mut self.pools {
            figures.reserved.set(now.remove(pool).unwrap_or(0));
        }
        for (pool, bytes) in now {
            self.pools.entry(pool).or_default().reserved.set(bytes);
        }
    }
}

impl<D: ReplayDevice> Observer<Ours<D>> for Watch<'_> {
    fn allocated(&mut self, backend: &Ours<D>, block: &Allocation<Meter<D>>, stream: u16) {
        self.allocated.rise(block.size());
        self.given = Some(block.address().0).filter(|&address| address != 0);
        let pool = backend.pool_for(stream);
        if !pool.is_default() {
            self.homes.insert(block.address().0, pool);
            self.pools.entry(pool).or_default().allocated.rise(block.size());
        }
    }

    fn freeing(&mut self, block: &Allocation<Meter<D>>) {
        self.allocated.fall(block.size());
        if let Some(pool) = self.homes.remove(&block.address().0) {
            self.pools.entry(pool).or_default().allocated.fall(block.size());
        }
    }

    fn after(&mut self, backend: &Ours<D>, _index: usize, event: Event) {
        let calls = backend.allocator.device().memory_calls();
        if calls != self.memory_calls && self.tells_segments {
            self.memory_calls = calls;
            self.refresh(backend.allocator.state(), event);
        }
        self.place();
        if event.counts() {
            self.counted += 1;
            if self.counted.is_multiple_of(1024) {
                (self.progress)(self.counted);
            }
        }
    }
}
