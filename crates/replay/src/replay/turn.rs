//! One turn: the loop over a trace's events, the allocator's side of it, and the side that does nothing.

use std::hint::black_box;

use gpupool_allocator::{AllocError, Allocation, Allocator, Filter, PoolId, Stream};
use gpupool_device::{CaptureId, CaptureMode, DriverError, GraphHandle, StreamHandle};
use gpupool_graph_capture::{Capture, CaptureError, CaptureOptions, Captures, Graph};

use super::setup::Plan;
use super::{Meter, ReplayDevice};
use crate::trace::{self, Event, Trace};

/// Why a request of a turn came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The allocator's word.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A capture's.
    #[error(transparent)]
    Capture(CaptureError),
    /// The device's.
    #[error(transparent)]
    Device(#[from] DriverError),
}

impl From<CaptureError> for Refusal {
    fn from(error: CaptureError) -> Self {
        match error {
            CaptureError::Alloc(error) => Self::Alloc(error),
            error => Self::Capture(error),
        }
    }
}

/// What a turn asks for. The loop is the same whoever answers.
pub(super) trait Backend {
    /// A block in the loop's hands.
    type Block;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Self::Block, Refusal>;
    fn free(&mut self, block: Self::Block);
    /// A free with one use recorded on a private stream.
    fn free_used(&mut self, block: Self::Block, private: u32);
    fn empty_cache(&mut self) -> Result<(), Refusal>;
    fn begin(&mut self, graph: u32, of: trace::Graph) -> Result<(), Refusal>;
    fn end(&mut self, graph: u32) -> Result<(), Refusal>;
    /// Whether the stream is being captured, so that nothing can be held back there.
    fn captures(&self, stream: u16) -> bool;
}

/// Looks at a turn after each event.
pub(super) trait Observer<B: Backend> {
    fn allocated(&mut self, backend: &B, block: &B::Block, stream: u16);
    fn freeing(&mut self, block: &B::Block);
    fn after(&mut self, backend: &B, index: usize, event: Event);
}

/// Looks at nothing.
pub(super) struct Blind;

impl<B: Backend> Observer<B> for Blind {
    fn allocated(&mut self, _: &B, _: &B::Block, _: u16) {}
    fn freeing(&mut self, _: &B::Block) {}
    fn after(&mut self, _: &B, _: usize, _: Event) {}
}

/// Why a turn ended early, and at which event.
pub(super) struct Early {
    pub(super) index: usize,
    pub(super) error: Refusal,
}

/// Runs the events of `trace`. `live` has a place for each block; what is in it afterwards is still alive.
pub(super) fn turn<D: ReplayDevice, B: Backend, O: Observer<B>>(
    trace: &Trace,
    plan: &Plan,
    device: &D,
    backend: &mut B,
    live: &mut [Option<B::Block>],
    observer: &mut O,
) -> Result<(), Early> {
    for (index, event) in trace.events.iter().enumerate() {
        let early = |error| Early { index, error };
        match *event {
            Event::Alloc { block, bytes, stream } => {
                let allocated = backend.alloc(bytes, stream).map_err(early)?;
                observer.allocated(backend, &allocated, stream);
                live[block as usize] = Some(allocated);
            }
            Event::Free { block } => {
                if plan.lag > 0 {
                    hold(plan, device, backend, block).map_err(|e| early(e.into()))?;
                }
                if let Some(freed) = live[block as usize].take() {
                    observer.freeing(&freed);
                    backend.free(freed);
                }
            }
            Event::FreeLate { block, late } => {
                let (private, events) = plan.late[late as usize];
                device.hold(Plan::private_handle(private), events).map_err(|e| early(e.into()))?;
                if plan.lag > 0 {
                    hold(plan, device, backend, block).map_err(|e| early(e.into()))?;
                }
                if let Some(freed) = live[block as usize].take() {
                    observer.freeing(&freed);
                    backend.free_used(freed, private);
                }
            }
            Event::Complete { .. } | Event::FreeForeign => {}
            Event::EmptyCache => backend.empty_cache().map_err(early)?,
            Event::Begin { graph } => backend.begin(graph, trace.graphs[graph as usize]).map_err(early)?,
            Event::End { graph } => backend.end(graph).map_err(early)?,
        }
        observer.after(backend, index, *event);
        if event.counts() {
            device.pass_time(plan.pace);
            if plan.ticking {
                device.advance();
            }
        }
    }
    Ok(())
}

fn hold<D: ReplayDevice, B: Backend>(plan: &Plan, device: &D, backend: &B, block: u32) -> Result<(), DriverError> {
    let stream = plan.stream_of[block as usize];
    if backend.captures(stream) {
        return Ok(());
    }
    device.hold(plan.handle(stream), plan.lag + 1)
}

/// The backend that does nothing: what the loop itself costs.
#[derive(Default)]
pub(super) struct Nothing {
    next: u64,
}

impl Backend for Nothing {
    type Block = u64;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<u64, Refusal> {
        self.next += 512;
        Ok(black_box(self.next ^ bytes ^ u64::from(stream)))
    }

    fn free(&mut self, block: u64) {
        black_box(block);
    }

    fn free_used(&mut self, block: u64, private: u32) {
        black_box((block, private));
    }

    fn empty_cache(&mut self) -> Result<(), Refusal> {
        Ok(())
    }

    fn begin(&mut self, _: u32, _: trace::Graph) -> Result<(), Refusal> {
        Ok(())
    }

    fn end(&mut self, _: u32) -> Result<(), Refusal> {
        Ok(())
    }

    fn captures(&self, _: u16) -> bool {
        false
    }
}

/// A capture of this turn.
struct Recorded<D: ReplayDevice> {
    stream: u16,
    pool: PoolId,
    now: Stage<D>,
}

/// The allocator's names for a trace's pools: others in each turn, and none is the default pool, whatever numbers the trace has.
pub(super) struct PoolIds(Vec<u64>);

impl PoolIds {
    pub(super) fn of(trace: &Trace) -> Self {
        let mut pools: Vec<u64> = trace.graphs.iter().map(|graph| graph.pool).collect();
        pools.sort_unstable();
        pools.dedup();
        Self(pools)
    }

    /// The name of one of the trace's pools in a turn, counted from 0.
    pub(super) fn id(&self, pool: u64, turn: u64) -> PoolId {
        let number = self.0.partition_point(|p| *p < pool) as u64;
        PoolId(1 + turn * self.0.len() as u64 + number, 0)
    }
}

/// How far a capture is.
enum Stage<D: ReplayDevice> {
    /// Under way in PyTorch's way: a scope, and the driver's capture.
    Scoped,
    /// Under way.
    Capturing(Box<Capture<Meter<D>>>),
    /// Over in PyTorch's way: the graph is the driver's, and we owe the pool a release.
    Scope(Option<GraphHandle>),
    /// Over. The graph holds its pool.
    Graph { _graph: Graph<Meter<D>> },
}

impl<D: ReplayDevice> Stage<D> {
    fn is_open(&self) -> bool {
        matches!(self, Self::Scoped | Self::Capturing(_))
    }
}

/// The backend that is an allocator of ours.
pub(super) struct Ours<D: ReplayDevice> {
    pub(super) allocator: Allocator<Meter<D>>,
    captures: Captures<Meter<D>>,
    bit_exact: bool,
    streams: Vec<Stream<Meter<D>>>,
    private: Vec<Stream<Meter<D>>>,
    recorded: Vec<Recorded<D>>,
    pools: PoolIds,
    /// Which turn this is: each has private pools of its own.
    turn: u64,
}

impl<D: ReplayDevice> Ours<D> {
    pub(super) fn new(allocator: Allocator<Meter<D>>, trace: &Trace, plan: &Plan) -> Result<Self, AllocError> {
        let device = allocator.device().device();
        let register = |handle: StreamHandle| {
            device.adopt_stream(handle)?;
            Ok::<_, DriverError>(allocator.register_stream(handle))
        };
        let streams = (0..trace.streams.max(1)).map(|n| register(plan.handle(n))).collect::<Result<Vec<_>, _>>()?;
        let private = (0..plan.private).map(|n| register(Plan::private_handle(n))).collect::<Result<Vec<_>, _>>()?;
        let bit_exact = allocator.config().policy().is_bit_exact();
        let captures = Captures::new(&allocator);
        let pools = PoolIds::of(trace);
        Ok(Self { allocator, captures, bit_exact, streams, private, recorded: Vec::new(), pools, turn: 0 })
    }

    fn device(&self) -> &D {
        self.allocator.device().device()
    }

    /// The pool of a graph in this turn.
    pub(super) fn pool(&self, pool: u64) -> PoolId {
        self.pools.id(pool, self.turn)
    }

    /// The pool that requests on `stream` go to.
    pub(super) fn pool_for(&self, stream: u16) -> PoolId {
        let open = |c: &&Recorded<D>| c.now.is_open() && c.stream == stream;
        self.recorded.iter().rev().find(open).map_or(PoolId::DEFAULT, |c| c.pool)
    }

    fn close(&mut self, graph: usize) -> Result<(), Refusal> {
        let Some(recorded) = self.recorded.get_mut(graph).filter(|c| c.now.is_open()) else { return Ok(()) };
        let (stream, pool) = (recorded.stream, recorded.pool);
        match std::mem::replace(&mut recorded.now, Stage::Scope(None)) {
            Stage::Capturing(capture) => {
                recorded.now = Stage::Graph { _graph: capture.end()? };
            }
            _ => {
                let ended = self.device().end_capture(self.streams[usize::from(stream)].handle());
                self.allocator.mark_capture_end();
                self.allocator.end_allocate_to_pool(pool)?;
                self.allocator.set_current_stream(&self.streams[0])?;
                self.recorded[graph].now = Stage::Scope(Some(ended?));
            }
        }
        Ok(())
    }

    /// Ends a turn: open captures are closed, graphs are dropped, and blocks still alive are freed.
    pub(super) fn finish(&mut self, plan: &Plan, live: &mut [Option<Allocation<Meter<D>>>]) -> Result<(), Refusal> {
        if plan.ticking {
            (0..=plan.lag).for_each(|_| self.device().advance());
        }
        for graph in 0..self.recorded.len() {
            self.close(graph)?;
        }
        live.iter_mut().for_each(|block| drop(block.take()));
        for recorded in std::mem::take(&mut self.recorded) {
            if let Stage::Scope(graph) = recorded.now {
                self.allocator.release_pool(recorded.pool)?;
                graph.map_or(Ok(()), |graph| self.device().graph_destroy(graph))?;
            }
        }
        self.captures.tidy();
        self.turn += 1;
        Ok(())
    }

    /// PyTorch's way: a scope for what the capture asks for.
    fn begin_scoped(&self, stream: &Stream<Meter<D>>, pool: PoolId) -> Result<(), Refusal> {
        self.device().begin_capture(stream.handle(), CaptureMode::Global)?;
        let id = self.device().capture_status(stream.handle())?.id().unwrap_or(CaptureId(0));
        self.allocator.set_current_stream(stream)?;
        self.allocator.begin_allocate_to_pool(pool, Filter::Capture(id))?;
        self.allocator.mark_capture_begin();
        Ok(())
    }
}

impl<D: ReplayDevice> Backend for Ours<D> {
    type Block = Allocation<Meter<D>>;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Self::Block, Refusal> {
        Ok(self.allocator.alloc(bytes, &self.streams[usize::from(stream)])?)
    }

    fn free(&mut self, block: Self::Block) {
        drop(block);
    }

    fn free_used(&mut self, block: Self::Block, private: u32) {
        // The stream is of the same allocator and the block is live: nothing can be refused.
        let _ = block.record_stream(&self.private[private as usize]);
        drop(block);
    }

    fn empty_cache(&mut self) -> Result<(), Refusal> {
        self.allocator.empty_cache()?;
        Ok(())
    }

    fn begin(&mut self, graph: u32, of: trace::Graph) -> Result<(), Refusal> {
        debug_assert_eq!(graph as usize, self.recorded.len());
        let stream = &self.streams[usize::from(of.stream)];
        let pool = self.pool(of.pool);
        let now = if self.bit_exact {
            self.begin_scoped(stream, pool)?;
            Stage::Scoped
        } else {
            let options = CaptureOptions::new().with_pool(pool);
            Stage::Capturing(Box::new(self.captures.begin(stream, options)?))
        };
        self.recorded.push(Recorded { stream: of.stream, pool, now });
        Ok(())
    }

    fn end(&mut self, graph: u32) -> Result<(), Refusal> {
        self.close(graph as usize)
    }

    fn captures(&self, stream: u16) -> bool {
        self.recorded.iter().any(|c| c.now.is_open() && c.stream == stream)
    }
}
