//! An executable graph, and what a launch checks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpupool_allocator::{HeldBlock, PoolId, Range, Stream, WorkMark};
use gpupool_device::{DriverResult, ExecHandle, GraphDevice};
use smallvec::SmallVec;

use crate::error::LaunchError;
use crate::graph::{GraphInner, GraphPool};
use crate::inputs::{Borrowed, StaleInput};
use crate::reaper::{Remains, Tidier};
use crate::runs::{InputCheck, LastRun, OutputCheck, PoolRunsState, Sharing};
use crate::sync::{Mutex, MutexGuard};

/// How a launch goes about its checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct LaunchOptions {
    /// What to do about graphs of the same pools that may still be running.
    pub sharing: Sharing,
    /// When to look for held blocks that the launch overwrites.
    pub outputs: OutputCheck,
    /// When to check declared inputs.
    pub inputs: InputCheck,
}

impl LaunchOptions {
    /// The defaults: serialise, report at the first launch of a pair, check inputs at the first launch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets [`sharing`](Self::sharing).
    #[must_use]
    pub fn with_sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// Sets [`outputs`](Self::outputs).
    #[must_use]
    pub fn with_outputs(mut self, outputs: OutputCheck) -> Self {
        self.outputs = outputs;
        self
    }

    /// Sets [`inputs`](Self::inputs).
    #[must_use]
    pub fn with_inputs(mut self, inputs: InputCheck) -> Self {
        self.inputs = inputs;
        self
    }
}

/// A block that is still held and that a launch overwrites.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Overwrite {
    /// The pool.
    pub pool: PoolId,
    /// The block.
    pub block: HeldBlock,
}

/// A launch that was submitted.
#[derive(Debug)]
#[non_exhaustive]
pub struct Launched<D: GraphDevice> {
    /// Done once the launch is, and what was submitted to its stream before.
    pub done: WorkMark<D>,
    /// Whether the launch was made to wait for a graph of one of its pools on another stream.
    pub waits: bool,
    /// Held blocks that it overwrites, where they were looked for.
    pub overwrites: Vec<Overwrite>,
    /// Memory that it may read and that another graph has written since, where that was looked for.
    pub stale: Vec<StaleInput>,
}

/// What is known of a pool's memory that a graph may read.
#[derive(Default)]
struct Inputs {
    /// Captures into the pool when that was last worked out.
    captures: u64,
    /// What another graph than its maker writes too.
    contested: Vec<Borrowed>,
    /// What has been told, and is so still.
    told: Vec<StaleInput>,
}

/// What is known of a pool since the last look for held blocks.
#[derive(Clone)]
struct Seen {
    version: (i64, i64),
    captures: u64,
    found: Vec<Overwrite>,
}

/// What is known of each of a graph's pools, in their order.
type SeenByPool = Vec<Option<Seen>>;

/// A graph that can be launched. Dropping it neither waits nor fails: what a launch under way needs stays until it has finished.
pub struct Executable<D: GraphDevice> {
    graph: Option<Arc<GraphInner<D>>>,
    exec: ExecHandle,
    last: Mutex<Option<WorkMark<D>>>,
    launched: AtomicBool,
    /// For each pool, what the last launch that looked saw.
    checked: Mutex<Vec<Option<Seen>>>,
    /// For each pool.
    inputs: Mutex<Vec<Inputs>>,
    /// After everything else.
    tidier: Tidier<D>,
}

impl<D: GraphDevice> fmt::Debug for Executable<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executable({})", self.exec.0)
    }
}

impl<D: GraphDevice> Executable<D> {
    pub(crate) fn new(graph: Arc<GraphInner<D>>, exec: ExecHandle, tidier: Tidier<D>) -> Self {
        Self {
            graph: Some(graph),
            exec,
            last: Mutex::new(None),
            launched: AtomicBool::new(false),
            checked: Mutex::new(Vec::new()),
            inputs: Mutex::new(Vec::new()),
            tidier,
        }
    }

    /// The driver's executable.
    #[must_use]
    pub fn handle(&self) -> ExecHandle {
        self.exec
    }

    /// Does a launch's one-time work ahead of it.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn upload(&self, stream: &Stream<D>) -> DriverResult<()> {
        match &self.graph {
            Some(graph) => graph.device.graph_upload(self.exec, stream.handle()),
            None => Ok(()),
        }
    }

    /// Submits one run of the graph to `stream`, with the default checks.
    ///
    /// # Errors
    ///
    /// As [`launch_with`](Self::launch_with).
    pub fn launch(&self, stream: &Stream<D>) -> Result<Launched<D>, LaunchError> {
        self.launch_with(stream, LaunchOptions::default())
    }

    /// Submits one run of the graph to `stream`. Waits on the host only where its pools' options say so: to wake one that is parked, or for the
    /// free of a loan. On a stream where its pools' last graph ran too it costs two locks
    /// a pool and no driver call but the launch; else one event and one wait at most for each pool, and for each stream whose work still uses
    /// a freed block where the graph writes.
    ///
    /// # Errors
    ///
    /// See [`LaunchError`]. Nothing was submitted then (but a wait may have been).
    pub fn launch_with(&self, stream: &Stream<D>, options: LaunchOptions) -> Result<Launched<D>, LaunchError> {
        let Some(graph) = &self.graph else {
            return Err(gpupool_device::DriverError::new(
                gpupool_device::Call::GraphLaunch,
                gpupool_device::code::INVALID_HANDLE,
            )
            .into());
        };
        if !stream.is_of(&graph.device) {
            return Err(LaunchError::ForeignStream { graph: graph.id, stream: stream.id() });
        }
        if stream.is_retired() {
            return Err(LaunchError::RetiredStream { graph: graph.id, stream: stream.id() });
        }
        if !stream.is_of_this_thread() {
            return Err(LaunchError::OtherThreadsStream { graph: graph.id, stream: stream.id() });
        }
        if self.tidier.0.is_capturing(stream.handle())? {
            return Err(LaunchError::StreamIsCapturing { graph: graph.id, stream: stream.id() });
        }
        let first = !self.launched.load(Ordering::Acquire);
        self.check_inputs(graph, options.inputs, first)?;
        // From here to the end the runs of all pools are ours: check and launch are one step.
        // Most graphs have one pool.
        let mut runs: SmallVec<[_; 2]> = graph.pools.iter().map(|p| p.runs.lock()).collect();
        crate::idle::ready(graph)?;
        let (overwrites, seen) = self.check_outputs(graph, options.outputs, &runs)?;
        let (stale, told) = self.stale_inputs(graph, options.inputs, &runs);
        let mut waits = false;
        for (pool, state) in graph.pools.iter().zip(&runs) {
            waits |= order(pool, state, stream, options.sharing)?;
            waits |= order_after_readers(pool, stream, options.sharing)?;
        }
        graph.device.graph_launch(self.exec, stream.handle())?;
        let done = stream.work_so_far();
        for (pool, state) in graph.pools.iter().zip(&mut runs) {
            state.writers.ran(&pool.last_run);
            // Ordered after all of them, unless the caller said that they need no order.
            let ordered = options.sharing != Sharing::Unchecked;
            state.last.retain(|run| !ordered && !run.mark.is_on(stream) && !run.mark.is_known_done());
            state.last.push(LastRun { graph: graph.id, mark: done.clone() });
        }
        if let Some(seen) = seen {
            *self.checked.lock() = seen;
        }
        if !told.is_empty() {
            self.inputs.lock().iter_mut().zip(told).for_each(|(inputs, told)| inputs.told = told);
        }
        *self.last.lock() = Some(done.clone());
        self.launched.store(true, Ordering::Release);
        Ok(Launched { done, waits, overwrites, stale })
    }

    fn check_inputs(&self, graph: &GraphInner<D>, check: InputCheck, first: bool) -> Result<(), LaunchError> {
        let looks = match check {
            InputCheck::Always => true,
            InputCheck::FirstLaunch => first || cfg!(debug_assertions),
            InputCheck::Off => false,
        };
        if !looks {
            return Ok(());
        }
        match graph.inputs.lock().iter().find(|input| !input.is_live()) {
            Some(gone) => Err(LaunchError::InputGone { range: gone.range() }),
            None => Ok(()),
        }
    }

    /// What the launch may read that another graph than its maker wrote last: all of it, or what was not told before. With what will have
    /// been told of each pool once it is submitted (nothing if there is nothing to tell of any).
    fn stale_inputs(
        &self,
        graph: &GraphInner<D>,
        check: InputCheck,
        runs: &[MutexGuard<'_, PoolRunsState<D>>],
    ) -> (Vec<StaleInput>, Vec<Vec<StaleInput>>) {
        let (mut out, mut told) = (Vec::new(), Vec::new());
        if check == InputCheck::Off || graph.pools.iter().all(|p| p.borrowed.is_empty()) {
            return (out, told);
        }
        let mut known = self.inputs.lock();
        known.resize_with(graph.pools.len(), Inputs::default);
        for (at, ((pool, state), known)) in graph.pools.iter().zip(runs).zip(known.iter_mut()).enumerate() {
            if known.captures != state.captures {
                known.captures = state.captures;
                known.contested = state.writers.contested(&pool.borrowed);
            }
            if known.contested.is_empty() {
                continue;
            }
            let stale = state.writers.stale(pool.hold.id(), &known.contested);
            out.extend(stale.iter().filter(|s| check == InputCheck::Always || !known.told.contains(s)));
            told.resize(at + 1, Vec::new());
            told[at] = stale;
        }
        if let Some(first) = out.first() {
            let count = out.len();
            tracing::warn!(graph = %graph.id, count, ?first, "a launch may read memory that another graph has written since");
        }
        (out, told)
    }

    /// The held blocks that a launch overwrites, and what is to be remembered once it is submitted (nothing if nothing was looked at).
    fn check_outputs(
        &self,
        graph: &GraphInner<D>,
        check: OutputCheck,
        runs: &[MutexGuard<'_, PoolRunsState<D>>],
    ) -> Result<(Vec<Overwrite>, Option<SeenByPool>), LaunchError> {
        if check == OutputCheck::Off {
            return Ok((Vec::new(), None));
        }
        let (mut out, mut news) = (Vec::new(), None);
        let checked = self.checked.lock();
        for (at, (pool, state)) in graph.pools.iter().zip(runs).enumerate() {
            let before = checked.get(at).and_then(Option::as_ref).filter(|before| before.captures == state.captures);
            if check == OutputCheck::FirstOfPair && before.is_some() {
                continue;
            }
            let (version, captures) = (pool.hold.version(), state.captures);
            match before {
                // Nothing was handed out or freed since: what was found then is still so.
                Some(before) if check != OutputCheck::FirstOfPair && before.version == version => {
                    out.extend_from_slice(&before.found);
                    continue;
                }
                _ => {}
            }
            let found = overwritten(pool);
            out.extend_from_slice(&found);
            let news = news.get_or_insert_with(|| checked.clone());
            if news.len() <= at {
                news.resize(at + 1, None);
            }
            news[at] = Some(Seen { version, captures, found });
        }
        if let Some(first) = out.first() {
            let count = out.len();
            tracing::warn!(graph = %graph.id, count, first = ?first.block.range, "a launch overwrites blocks that are still held");
            if check == OutputCheck::Refuse {
                return Err(LaunchError::WouldOverwrite { count, first: first.block.range });
            }
        }
        Ok((out, news))
    }
}

/// Held blocks of a pool that lie where the graph writes and are not its own outputs.
fn overwritten<D: GraphDevice>(pool: &GraphPool<D>) -> Vec<Overwrite> {
    let foreign = pool.hold.live_blocks().into_iter().filter(|b| !pool.outputs.contains(b));
    let hit = |b: &HeldBlock| !Range::common(&[b.range], &pool.written).is_empty();
    foreign.filter(hit).map(|block| Overwrite { pool: pool.hold.id(), block }).collect()
}

/// Orders a launch after the last run of a pool. Whether it was made to wait.
fn order<D: GraphDevice>(
    pool: &GraphPool<D>,
    state: &PoolRunsState<D>,
    stream: &Stream<D>,
    sharing: Sharing,
) -> Result<bool, LaunchError> {
    let mut waits = false;
    for last in &state.last {
        waits |= order_after(pool, last, stream, sharing)?;
    }
    Ok(waits)
}

/// Orders a launch after the work that still uses freed blocks where the graph writes. Whether it was made to wait.
fn order_after_readers<D: GraphDevice>(
    pool: &GraphPool<D>,
    stream: &Stream<D>,
    sharing: Sharing,
) -> Result<bool, LaunchError> {
    let mut waits = false;
    // The caller answers for what it knows: not for loans.
    if sharing == Sharing::Unchecked && pool.hold.is_resident() {
        return Ok(waits);
    }
    for mark in pool.hold.pending_uses::<D>(&pool.written) {
        // Nobody may have asked since it was done.
        if mark.is_reachable() && mark.poll()? {
            continue;
        }
        waits |= mark.submit_wait(stream).map_err(|e| match e.code {
            gpupool_device::code::CAPTURE_UNSUPPORTED | gpupool_device::code::INVALID_CONTEXT => {
                LaunchError::StillUsed { pool: pool.runs.pool, stream: mark.stream() }
            }
            _ => e.into(),
        })?;
    }
    Ok(waits)
}

fn order_after<D: GraphDevice>(
    pool: &GraphPool<D>,
    last: &LastRun<D>,
    stream: &Stream<D>,
    sharing: Sharing,
) -> Result<bool, LaunchError> {
    if last.mark.is_on(stream) || last.mark.is_known_done() {
        return Ok(false);
    }
    match sharing {
        Sharing::Unchecked => Ok(false),
        Sharing::Refuse => match last.mark.poll()? {
            true => Ok(false),
            false => {
                Err(LaunchError::PoolInUse { pool: pool.runs.pool, running: last.graph, stream: last.mark.stream() })
            }
        },
        Sharing::Serialize => last.mark.submit_wait(stream).map_err(|e| match e.code {
            gpupool_device::code::CAPTURE_UNSUPPORTED => {
                LaunchError::CannotOrder { running: last.graph, stream: last.mark.stream() }
            }
            _ => e.into(),
        }),
    }
}

impl<D: GraphDevice> Drop for Executable<D> {
    fn drop(&mut self) {
        let Some(graph) = self.graph.take() else { return };
        self.tidier.0.push(Remains {
            exec: Some(self.exec),
            graph: None,
            left_live: Vec::new(),
            last: self.last.get_mut().take(),
            of: Some(graph),
            holds: Vec::new(),
            retained: Vec::new(),
        });
    }
}
