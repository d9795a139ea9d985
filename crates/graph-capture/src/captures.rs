//! Beginning captures.

use std::marker::PhantomData;
use std::sync::Arc;

use gpupool_allocator::state::BlockStatus;
use gpupool_allocator::{Allocator, PoolId, PoolKeeper, Range, Stream};
use gpupool_device::{Call, CaptureMode, CaptureStatus, DriverError, GraphDevice, code};

use crate::adopted::Adopted;
use crate::capture::{Capture, abandon, not_held_by_others};
use crate::error::CaptureError;
use crate::graph::{Graph, Graphs};
use crate::guarded::Guarded;
use crate::reaper::{Reaper, Reapers};
use crate::runs::RunsTable;

/// Which pool a capture draws from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum PoolChoice {
    /// A fresh one of its own.
    #[default]
    New,
    /// This one, which other graphs may hold too. Safe as long as their launches do not overlap (which launches see to) and nobody needs
    /// one's results after another ran (which [`Graph::overlap`] and the output check tell).
    Shared(PoolId),
}

impl PoolChoice {
    fn id(self) -> PoolId {
        match self {
            Self::New => PoolId::fresh_for_capture(),
            Self::Shared(pool) => pool,
        }
    }
}

/// How a capture is begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CaptureOptions {
    /// How strict the driver is about calls that a capture does not permit. The allocator's own calls are permitted in every mode.
    pub mode: CaptureMode,
    /// Which pool it draws from.
    pub pool: PoolChoice,
    /// Wait, before the driver's begin, for streams that still use blocks freed in the pool, so that the capture finds the same memory in
    /// every run. Without it what is not done yet is passed over.
    pub settle: bool,
}

impl Default for CaptureOptions {
    fn default() -> Self {
        Self { mode: CaptureMode::Global, pool: PoolChoice::New, settle: true }
    }
}

impl CaptureOptions {
    /// Global mode, a pool of its own, settled.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets [`mode`](Self::mode).
    #[must_use]
    pub fn with_mode(mut self, mode: CaptureMode) -> Self {
        self.mode = mode;
        self
    }

    /// Draws from this pool.
    #[must_use]
    pub fn with_pool(mut self, pool: PoolId) -> Self {
        self.pool = PoolChoice::Shared(pool);
        self
    }

    /// Draws from the pool of another graph.
    #[must_use]
    pub fn with_pool_of<D: GraphDevice>(self, graph: &Graph<D>) -> Self {
        self.with_pool(graph.pool())
    }

    /// Sets [`settle`](Self::settle).
    #[must_use]
    pub fn with_settle(mut self, settle: bool) -> Self {
        self.settle = settle;
        self
    }
}

/// What all captures of an allocator share.
pub(crate) struct CapturesInner<D: GraphDevice> {
    pub(crate) device: Arc<D>,
    pub(crate) reaper: Arc<Reaper<D>>,
    pub(crate) runs: Arc<RunsTable<D>>,
    pub(crate) graphs: Arc<Graphs<D>>,
}

/// The captures of an allocator. Cheap to clone; make one for each allocator. It keeps the allocator.
pub struct Captures<D: GraphDevice> {
    inner: Arc<CapturesInner<D>>,
    allocator: Allocator<D>,
}

impl<D: GraphDevice> Clone for Captures<D> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), allocator: self.allocator.clone() }
    }
}

impl<D: GraphDevice> std::fmt::Debug for Captures<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Captures({:?}, {} queued)", self.allocator, self.inner.reaper.len())
    }
}

/// A live block whose pool nobody holds any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Orphan {
    /// The pool.
    pub pool: PoolId,
    /// Where the block lies.
    pub range: Range,
    /// Bytes that its owner asked for.
    pub requested: u64,
}

impl<D: GraphDevice> Captures<D> {
    /// For an allocator. Registers with it, so that what dropped graphs held is given up before memory is given back, and that states tell
    /// of graphs.
    #[must_use]
    pub fn new(allocator: &Allocator<D>) -> Self {
        let device = Arc::clone(allocator.device());
        let reaper = Arc::new(Reaper::new(Arc::clone(&device), Arc::clone(allocator.capture_registry())));
        let all: Arc<Reapers<D>> = allocator.capture_registry().shared();
        all.add(&reaper);
        // The allocator keeps its own queue; those of other devices may hold memory of this one.
        let own = Arc::clone(&reaper);
        allocator.add_janitor(Arc::new(move |wait| own.tidy(wait) | all.tidy(wait)));
        let runs: Arc<RunsTable<D>> = allocator.capture_registry().shared();
        allocator.set_pool_keeper(Arc::clone(&runs) as Arc<dyn PoolKeeper>);
        let graphs: Arc<Graphs<D>> = allocator.capture_registry().shared();
        let known = Arc::clone(&graphs);
        allocator.add_graph_source(Arc::new(move |allocator| known.states(allocator)));
        Self { inner: Arc::new(CapturesInner { device, reaper, runs, graphs }), allocator: allocator.clone() }
    }

    /// The allocator.
    #[must_use]
    pub fn allocator(&self) -> &Allocator<D> {
        &self.allocator
    }

    /// Begins a capture on a stream. Everything that could be lazy is done before the driver's begin.
    ///
    /// # Errors
    ///
    /// See [`CaptureError`]; nothing has changed then. May **wait** for eager work on the pool (see [`CaptureOptions::settle`]).
    pub fn begin(&self, stream: &Stream<D>, options: CaptureOptions) -> Result<Capture<D>, CaptureError> {
        self.check()?;
        self.inner.reaper.tidy(false);
        let pool = options.pool.id();
        let available = not_held_by_others(&self.allocator);
        // Before the session is open, since from then on nothing is learned of the stream's earlier work.
        let held = self.allocator.hold_pool(pool)?;
        self.allocator.prepare_pool_for_capture(pool, options.settle)?;
        let session = self.allocator.open_session(stream, pool)?;
        let live = held.live_blocks().into_iter().map(|b| b.range).collect();
        drop(held);
        let registry = self.allocator.capture_registry();
        let begun = self.inner.device.begin_capture(stream.handle(), options.mode);
        let begun = begun.map_err(CaptureError::from).and_then(|()| self.id_of(stream));
        let id = match begun {
            Ok(id) => id,
            Err(e) => {
                let end = registry.close(session);
                end.holds.iter().for_each(|hold| drop(hold.end_capture()));
                return Err(e);
            }
        };
        registry.begun(session, id);
        tracing::debug!(capture = id.0, %pool, stream = ?stream.id(), "a capture began");
        Ok(Capture {
            captures: Arc::clone(&self.inner),
            allocator: self.allocator.clone(),
            stream: stream.clone(),
            session: Some(session),
            id,
            pool,
            live,
            available,
            not_send: PhantomData,
        })
    }

    /// The id of the capture that was just begun. If the driver does not say, the capture is ended.
    fn id_of(&self, stream: &Stream<D>) -> Result<gpupool_device::CaptureId, CaptureError> {
        let status = self.inner.device.capture_status(stream.handle());
        if let Ok(CaptureStatus::Active(id)) = status {
            return Ok(id);
        }
        abandon(&*self.inner.device, stream.handle());
        match status? {
            // Another thread's call broke it at once.
            CaptureStatus::Invalidated => {
                Err(DriverError::new(Call::StreamBeginCapture, code::CAPTURE_INVALIDATED).into())
            }
            _ => Err(CaptureError::NotCapturing { stream: stream.id() }),
        }
    }

    /// Gives a capture that someone else has begun on `stream` a pool: from now on its requests are served from there. Without it such
    /// requests are errors while any session is open.
    ///
    /// # Errors
    ///
    /// [`CaptureError::NotCapturing`], those of the allocator, the driver's.
    pub fn adopt(&self, stream: &Stream<D>, pool: PoolChoice) -> Result<Adopted<D>, CaptureError> {
        self.check()?;
        self.allocator.check_usable(stream)?;
        let capture = match self.inner.device.capture_status(stream.handle())? {
            CaptureStatus::Active(id) => id,
            _ => return Err(CaptureError::NotCapturing { stream: stream.id() }),
        };
        let pool = pool.id();
        let session = self.allocator.adopt_session(capture, pool)?;
        Ok(Adopted::new(self.allocator.clone(), session, capture, pool))
    }

    fn check(&self) -> Result<(), CaptureError> {
        let config = self.allocator.config();
        if !config.caching() {
            return Err(CaptureError::CachingIsOff);
        }
        if config.policy().is_bit_exact() {
            return Err(CaptureError::Policy { policy: config.policy().name() });
        }
        Ok(())
    }

    /// Calls that a capture may not permit, asked first: see [`Guarded`].
    #[must_use]
    pub fn guarded(&self) -> Guarded<'_, D> {
        Guarded::new(&self.inner.device, &self.allocator)
    }

    /// Lets go of dropped graphs and executables whose launches have finished; whether there were any. Never waits, and does nothing while
    /// a capture is under way. It happens by itself at every begin, end and drop, and before memory is given back.
    pub fn tidy(&self) -> bool {
        self.inner.reaper.tidy(false)
    }

    /// How many dropped graphs and executables still wait for launches or captures.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.inner.reaper.len()
    }

    /// Live blocks of captured pools that no graph holds any more: results still in use, and workspaces that landed in a graph's pool.
    /// O(blocks).
    #[must_use]
    pub fn orphans(&self) -> Vec<Orphan> {
        let state = self.allocator.state();
        let unheld = |pool: PoolId| state.pools.iter().any(|p| p.id == pool && p.captured && p.use_count <= 0);
        let segments = state.segments.iter().filter(|s| unheld(s.pool));
        segments
            .flat_map(|s| s.blocks.iter().map(move |b| (s.pool, b)))
            .filter(|(_, b)| b.status == BlockStatus::ActiveAllocated)
            .map(|(pool, b)| Orphan {
                pool,
                range: Range { address: b.address, bytes: b.size },
                requested: b.requested,
            })
            .collect()
    }

    /// The device's ordinal.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.inner.device.ordinal()
    }
}
