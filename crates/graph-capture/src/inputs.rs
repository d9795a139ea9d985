//! Memory of its pools that a graph may read and that a graph other than its maker wrote last.
//!
//! A capture may bake in the address of any block that was live in its pool when it began. Once that block is freed, a later capture into
//! the pool may get the memory, and from then on the order of launches matters: what made the block must run again before whoever reads
//! it, and nothing that writes over it in between. Nobody can tell what a kernel reads; but who wrote last is known, so a launch that may
//! read something else than what it was captured with says so.
//!
//! * **I1** What was live at the beginning of a capture was made by the newest graph of the pool that writes there, if any does.
//! * **I2** Nothing is said of a block that is still live: no capture gets its memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gpupool_allocator::{PoolId, Range};

use crate::graph::GraphId;

/// Graphs that are gone and whose last run is remembered, at most, in each pool: the latest.
const GONE_KEPT: usize = 64;

/// Memory that a launch may read and that another graph has written since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StaleInput {
    /// The pool.
    pub pool: PoolId,
    /// The bytes.
    pub range: Range,
    /// The graph that left there what was live when this one was captured: launch it again first.
    pub made_by: GraphId,
    /// The graph that wrote there last.
    pub written_by: GraphId,
}

/// Memory that was live when a capture began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Borrowed {
    range: Range,
    made_by: GraphId,
}

/// A graph that writes into a pool.
#[derive(Debug)]
struct Writer {
    graph: GraphId,
    written: Vec<Range>,
    last_run: LastRunNumber,
}

/// The number of a graph's last run among those of a pool; 0 before the first. The graph has the other reference.
pub(crate) type LastRunNumber = Arc<AtomicU64>;

impl Writer {
    fn exists(&self) -> bool {
        Arc::strong_count(&self.last_run) > 1
    }

    fn last_run(&self) -> u64 {
        self.last_run.load(Ordering::Relaxed)
    }
}

/// The graphs of a pool, in the order of their captures, and who ran last.
#[derive(Debug, Default)]
pub(crate) struct Writers {
    all: Vec<Writer>,
    runs: u64,
}

impl Writers {
    /// What a capture may have baked in, of what was live as it began. O(ranges of the pool's graphs).
    pub(crate) fn borrowed(&self, live: &[Range]) -> Vec<Borrowed> {
        let maker = |range: &Range| self.all.iter().rev().find(|w| !Range::common(&[*range], &w.written).is_empty());
        live.iter().filter_map(|range| Some(Borrowed { range: *range, made_by: maker(range)?.graph })).collect()
    }

    /// A graph was captured. Keep what is returned as long as it exists. O(graphs of the pool).
    pub(crate) fn add(&mut self, graph: GraphId, written: Vec<Range>) -> LastRunNumber {
        let mut gone: Vec<u64> = self.all.iter().filter(|w| !w.exists()).map(Writer::last_run).collect();
        if gone.len() > GONE_KEPT {
            gone.sort_unstable();
            let oldest_kept = gone[gone.len() - GONE_KEPT].max(1);
            self.all.retain(|w| w.exists() || w.last_run() >= oldest_kept);
        }
        let last_run = LastRunNumber::default();
        self.all.push(Writer { graph, written, last_run: Arc::clone(&last_run) });
        last_run
    }

    /// A graph was launched. O(1).
    pub(crate) fn ran(&mut self, graph: &LastRunNumber) {
        self.runs += 1;
        graph.store(self.runs, Ordering::Relaxed);
    }

    /// Those of what a graph may read that another than its maker writes too: for these, order matters.
    pub(crate) fn contested(&self, borrowed: &[Borrowed]) -> Vec<Borrowed> {
        let is = |b: &&Borrowed| {
            self.all.iter().any(|w| w.graph != b.made_by && !Range::common(&[b.range], &w.written).is_empty())
        };
        borrowed.iter().filter(is).copied().collect()
    }

    /// Those that another than the maker wrote last.
    pub(crate) fn stale(&self, pool: PoolId, contested: &[Borrowed]) -> Vec<StaleInput> {
        let stale = |b: &Borrowed| {
            let writers =
                self.all.iter().filter(|w| w.last_run() > 0 && !Range::common(&[b.range], &w.written).is_empty());
            let last = writers.max_by_key(|w| w.last_run()).filter(|w| w.graph != b.made_by)?;
            Some(StaleInput { pool, range: b.range, made_by: b.made_by, written_by: last.graph })
        };
        contested.iter().filter_map(stale).collect()
    }
}

#[cfg(test)]
mod tests {
    use gpupool_device::Address;

    use super::*;

    const UNITS: usize = 64;

    fn range(first: u64, units: u64) -> Range {
        Range { address: Address(first * 512), bytes: units * 512 }
    }

    fn units(range: &Range) -> std::ops::Range<usize> {
        let first = (range.address.0 / 512) as usize;
        first..first + (range.bytes / 512) as usize
    }

    /// A linear congruence is dice enough.
    fn dice(state: &mut u64, below: u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) % below
    }

    /// Beside a model that knows for each unit of memory who wrote it last.
    #[test]
    fn what_is_stale_is_what_a_record_of_each_write_says() {
        for seed in 0..200 {
            let mut state = seed;
            let mut writers = Writers::default();
            let (mut graphs, mut captured_by, mut ran_by) =
                (Vec::new(), [None; UNITS], [None::<(u64, GraphId)>; UNITS]);
            for step in 1..60 {
                if graphs.len() < 6 && dice(&mut state, 3) == 0 {
                    let live = [range(dice(&mut state, 60), 1 + dice(&mut state, 4))];
                    let borrowed = writers.borrowed(&live);
                    let newest: Option<(usize, GraphId)> =
                        live.iter().flat_map(units).filter_map(|u| captured_by[u]).max();
                    assert_eq!(borrowed.first().map(|b| b.made_by), newest.map(|(_, graph)| graph));
                    let written =
                        vec![range(dice(&mut state, 30), 1 + dice(&mut state, 8)), range(40 + dice(&mut state, 20), 2)];
                    let id = GraphId::fresh();
                    written.iter().flat_map(units).for_each(|u| captured_by[u] = Some((graphs.len(), id)));
                    graphs.push((id, writers.add(id, written.clone()), written, borrowed));
                } else if !graphs.is_empty() {
                    let (id, last_run, written, borrowed) = &graphs[dice(&mut state, graphs.len() as u64) as usize];
                    let stale = writers.stale(PoolId::DEFAULT, &writers.contested(borrowed));
                    let model = borrowed.iter().filter_map(|b| {
                        let (_, last) = units(&b.range).filter_map(|u| ran_by[u]).max()?;
                        (last != b.made_by).then_some((b.range, b.made_by, last))
                    });
                    let told: Vec<_> = stale.iter().map(|s| (s.range, s.made_by, s.written_by)).collect();
                    assert_eq!(told, model.collect::<Vec<_>>(), "seed {seed}");
                    writers.ran(last_run);
                    written.iter().flat_map(units).for_each(|u| ran_by[u] = Some((step, *id)));
                }
            }
        }
    }

    #[test]
    fn graphs_that_are_gone_are_forgotten_but_for_the_last_to_run() {
        let mut writers = Writers::default();
        for _ in 0..1_000 {
            let run = writers.add(GraphId::fresh(), vec![range(0, 1)]);
            writers.ran(&run);
        }
        assert!(writers.all.len() <= GONE_KEPT + 2, "{}", writers.all.len());
        let never_run: Vec<_> = (0..1_000).map(|_| writers.add(GraphId::fresh(), vec![range(0, 1)])).collect();
        assert!(writers.all.len() >= never_run.len());
    }
}
