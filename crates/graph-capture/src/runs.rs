//! The runs of a pool: which graph ran last and where, and what a launch must do about it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use gpupool_allocator::{PoolId, WorkMark};
use gpupool_device::Device;

use crate::graph::GraphId;
use crate::inputs::Writers;
use crate::sync::{Mutex, MutexGuard};

/// What a launch does when a graph that shares a pool may still be running on another stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Sharing {
    /// The launch waits for it, on the device.
    #[default]
    Serialize,
    /// The launch is refused.
    Refuse,
    /// The caller sees to it that they do not overlap.
    Unchecked,
}

/// When a launch looks for blocks that are still held and that it would overwrite.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum OutputCheck {
    /// At the first launch after another capture into one of its pools.
    #[default]
    FirstOfPair,
    /// At every launch. It costs little where no block of its pools was handed out or freed since the last one.
    Always,
    /// As `Always`, and the launch is refused if there are any.
    Refuse,
    /// Never.
    Off,
}

/// When a launch checks that declared inputs are still the same live blocks, and says what else it may read that another graph of its
/// pools has written since.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum InputCheck {
    /// Declared ones at the first launch, and always in debug builds; others are told when they become so.
    #[default]
    FirstLaunch,
    /// At every launch.
    Always,
    /// Never.
    Off,
}

/// The last run of a pool's graphs.
pub(crate) struct LastRun<D: Device> {
    pub(crate) graph: GraphId,
    pub(crate) mark: WorkMark<D>,
}

/// What is remembered of a pool's runs.
pub(crate) struct PoolRunsState<D: Device> {
    /// The last run on each stream, of those that nothing later is known to be ordered after.
    pub(crate) last: Vec<LastRun<D>>,
    /// Captures into the pool so far.
    pub(crate) captures: u64,
    /// Who writes where in the pool, and who did last.
    pub(crate) writers: Writers,
}

/// A pool's runs, with the lock that makes check and launch one step.
pub(crate) struct PoolRuns<D: Device> {
    pub(crate) pool: PoolId,
    state: Mutex<PoolRunsState<D>>,
}

impl<D: Device> PoolRuns<D> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, PoolRunsState<D>> {
        self.state.lock()
    }

    /// `None` if another thread has it, or this one.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, PoolRunsState<D>>> {
        self.state.try_lock()
    }
}

/// Runs by allocator and pool.
type Known<D> = HashMap<(u64, PoolId), Weak<PoolRuns<D>>>;

/// The runs of all pools that a graph holds, by allocator and pool: the order they are locked in. One for all who share a registry of
/// captures: whoever captured a graph, and on whichever device, its pools' runs are known.
pub(crate) struct RunsTable<D: Device> {
    pools: Mutex<Known<D>>,
}

impl<D: Device> Default for RunsTable<D> {
    fn default() -> Self {
        Self { pools: Mutex::new(HashMap::new()) }
    }
}

impl<D: Device> RunsTable<D> {
    /// The runs of a pool; the same for every graph that holds it.
    pub(crate) fn of(&self, allocator: u64, pool: PoolId) -> Arc<PoolRuns<D>> {
        let mut pools = self.pools.lock();
        if let Some(known) = pools.get(&(allocator, pool)).and_then(Weak::upgrade) {
            return known;
        }
        pools.retain(|_, runs| runs.strong_count() > 0);
        let state = PoolRunsState { last: Vec::new(), captures: 0, writers: Writers::default() };
        let runs = Arc::new(PoolRuns { pool, state: Mutex::new(state) });
        pools.insert((allocator, pool), Arc::downgrade(&runs));
        runs
    }
}
