//! gpupool itself, on a simulated device.

use std::sync::Arc;

use gpupool_allocator::{
    AllocError, Allocation, Allocator, CaptureRegistry, Config, Filter, Policy, PoolHold, PoolId, SessionKey, Stream,
};
use gpupool_device::{Call, CaptureId, CaptureMode, Device, GraphDevice, GraphHandle, StreamHandle};
use gpupool_sim_device::{CostModel, SimConfig, SimDevice};

use crate::{CAPACITY, Failed, Needs, Peer};

/// Handles of streams start here: drivers have meanings of their own for the lowest ones.
const FIRST: u64 = 16;
/// A stream that nothing is requested on: recorded uses are its.
const OTHER: StreamHandle = StreamHandle(1 << 40);

pub(super) fn handle(stream: u16) -> StreamHandle {
    StreamHandle(FIRST + u64::from(stream))
}

/// A device of [`CAPACITY`] whose calls cost no virtual time.
#[must_use]
pub fn device() -> SimDevice {
    SimDevice::new(SimConfig::default().with_capacity(CAPACITY).with_costs(CostModel::free()).for_replay())
}

/// What a caller does with an error is no part of what is measured.
#[cold]
#[inline(never)]
pub(super) fn refused(error: AllocError) {
    drop(error);
}

/// gpupool under one policy. No work is ever under way on its device: what was freed on another stream is complete as soon as anyone
/// asks.
#[derive(Debug)]
pub struct Gpupool {
    allocator: Allocator<SimDevice>,
    streams: Vec<Stream<SimDevice>>,
    other: Stream<SimDevice>,
    registry: Arc<CaptureRegistry>,
    captures: Captures,
    pools: Vec<Captured>,
    bit_exact: bool,
    /// Which turn over a trace this is: each has private pools of its own.
    turn: u64,
}

impl Gpupool {
    /// An allocator on a device of its own.
    ///
    /// # Errors
    ///
    /// The allocator's.
    pub fn new(policy: Policy, needs: Needs) -> Result<Self, Failed> {
        let registry = Arc::new(CaptureRegistry::default());
        let allocator = Allocator::with_registry(Arc::new(device()), Config::new(policy), Arc::clone(&registry))?;
        let register = |handle| {
            allocator.device().adopt_stream(handle);
            allocator.register_stream(handle)
        };
        let streams = (0..needs.streams.max(1)).map(|n| register(handle(n))).collect();
        let other = register(OTHER);
        let bit_exact = policy.is_bit_exact();
        let (captures, pools) = (Captures::default(), Vec::new());
        Ok(Self { streams, other, allocator, registry, captures, pools, bit_exact, turn: 0 })
    }

    /// The same allocator with only one stream, number `stream`, which is this peer's stream 0: for threads with a stream each.
    #[must_use]
    pub fn with_stream(&self, stream: u16) -> Self {
        let handle = handle(stream);
        self.allocator.device().adopt_stream(handle);
        Self {
            allocator: self.allocator.clone(),
            streams: vec![self.allocator.register_stream(handle)],
            other: self.other.clone(),
            registry: Arc::clone(&self.registry),
            captures: Captures::default(),
            pools: Vec::new(),
            bit_exact: self.bit_exact,
            turn: 0,
        }
    }

    /// The allocator.
    #[must_use]
    pub fn allocator(&self) -> &Allocator<SimDevice> {
        &self.allocator
    }

    /// The stream that requests on `stream` are made on.
    #[must_use]
    pub fn stream(&self, stream: u16) -> &Stream<SimDevice> {
        &self.streams[usize::from(stream)]
    }

    /// A stream that nothing is requested on.
    #[must_use]
    pub fn other_stream(&self) -> &Stream<SimDevice> {
        &self.other
    }

    /// What the allocator does when a capture has ended on the device.
    fn ended(&mut self, nth: usize) -> Result<(), Failed> {
        let captured = &mut self.pools[nth];
        if let Some(session) = captured.session.take() {
            captured.holds = self.registry.close(session).holds;
            captured.holds.iter().for_each(|hold| drop(hold.end_capture()));
        } else if self.bit_exact {
            self.allocator.mark_capture_end();
            self.allocator.end_allocate_to_pool(captured.pool)?;
            self.allocator.set_current_stream(&self.streams[0])?;
        }
        Ok(())
    }
}

/// The allocator's side of a capture.
#[derive(Debug)]
struct Captured {
    pool: PoolId,
    /// Where the registry routes it: under the policies of our own.
    session: Option<SessionKey>,
    /// What its graph keeps.
    holds: Vec<PoolHold>,
}

impl Peer for Gpupool {
    type Block = Allocation<SimDevice>;

    #[inline]
    fn alloc(&mut self, bytes: u64, stream: u16) -> Option<Self::Block> {
        self.allocator.alloc(bytes, &self.streams[usize::from(stream)]).map_err(refused).ok()
    }

    #[inline]
    fn free(&mut self, block: Self::Block) {
        drop(block);
    }

    #[inline]
    fn address(&self, block: &Self::Block) -> u64 {
        block.address().0
    }

    fn free_used(&mut self, block: Self::Block) {
        // The block is live and the stream is the same allocator's: nothing can be refused.
        let _ = block.record_stream(&self.other);
        drop(block);
    }

    fn begin_capture(&mut self, pool: u64, stream: u16) -> Result<(), Failed> {
        let pool = PoolId(pool.wrapping_add(self.turn << 40), 0);
        let stream = &self.streams[usize::from(stream)];
        let id = self.captures.begin(self.allocator.device(), stream.handle())?;
        let mut session = None;
        if self.bit_exact {
            self.allocator.set_current_stream(stream)?;
            self.allocator.begin_allocate_to_pool(pool, Filter::Capture(id))?;
            self.allocator.mark_capture_begin();
        } else {
            self.allocator.create_pool(pool)?;
            session = self.registry.adopt(id, pool);
        }
        self.pools.push(Captured { pool, session, holds: Vec::new() });
        Ok(())
    }

    fn end_capture(&mut self, nth: u32) -> Result<(), Failed> {
        if self.captures.end(self.allocator.device(), nth)? {
            self.ended(nth as usize)?;
        }
        Ok(())
    }

    fn empty_cache(&mut self) -> Result<(), Failed> {
        self.allocator.empty_cache()?;
        Ok(())
    }

    fn end_turn(&mut self) -> Result<(), Failed> {
        for nth in 0..self.pools.len() {
            self.end_capture(nth as u32)?;
        }
        for captured in self.pools.drain(..) {
            self.allocator.release_pool(captured.pool)?;
        }
        self.captures.finish(self.allocator.device())?;
        self.turn += 1;
        Ok(())
    }

    fn misses(&self) -> u64 {
        self.streams.iter().map(Stream::misses).sum()
    }

    fn driver_calls(&self) -> Option<u64> {
        let apart = [Call::StreamGetCaptureInfo, Call::StreamBeginCapture, Call::StreamEndCapture, Call::GraphDestroy];
        let counts = self.allocator.device().call_counts();
        Some(counts.iter().filter(|(call, _)| !apart.contains(call)).map(|(_, count)| count).sum())
    }
}

/// The captures of one turn on a device.
#[derive(Debug, Default)]
pub(super) struct Captures {
    all: Vec<Capture>,
}

#[derive(Debug)]
struct Capture {
    stream: StreamHandle,
    graph: Option<GraphHandle>,
}

impl Captures {
    pub(super) fn begin(&mut self, device: &SimDevice, stream: StreamHandle) -> Result<CaptureId, Failed> {
        device.begin_capture(stream, CaptureMode::Global)?;
        self.all.push(Capture { stream, graph: None });
        Ok(device.capture_status(stream)?.id().unwrap_or(CaptureId(0)))
    }

    /// Ends a capture; whether it had not ended before.
    pub(super) fn end(&mut self, device: &SimDevice, nth: u32) -> Result<bool, Failed> {
        let Some(capture) = self.all.get_mut(nth as usize).filter(|c| c.graph.is_none()) else { return Ok(false) };
        capture.graph = Some(device.end_capture(capture.stream)?);
        Ok(true)
    }

    /// Ends what is open and drops all graphs.
    pub(super) fn finish(&mut self, device: &SimDevice) -> Result<(), Failed> {
        for nth in 0..self.all.len() {
            self.end(device, nth as u32)?;
        }
        for graph in self.all.drain(..).filter_map(|capture| capture.graph) {
            device.graph_destroy(graph)?;
        }
        Ok(())
    }
}
