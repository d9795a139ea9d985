//! What captures will take, before anything is captured: a recorded sequence of requests is captured on a simulated device and tells the
//! exact bytes and places.
//!
//! * **K1** The same requests, captured into the same pools in the same order under the same configuration, take the same bytes and get
//!   the same places on a real device: placement depends on the sequence alone.

mod of_trace;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use gpupool_allocator::{AllocError, Allocation, Allocator, CaptureRegistry, Config, PoolId, Stream};
use gpupool_device::{DriverError, Kernel, StreamKind, Workbench};
use gpupool_graph_capture::{CaptureError, CaptureOptions, Captures, Graph};
use gpupool_sim_device::{SimConfig, SimDevice};
use serde::Serialize;

pub use of_trace::{TraceForecast, TraceForecastError, forecast_trace, graphs_of};

/// One request of a capture. Blocks have numbers of the caller's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// `bytes` are asked for, on the capture's stream.
    Alloc {
        /// The block's number.
        block: u64,
        /// Bytes.
        bytes: u64,
    },
    /// A block of the capture is freed.
    Free {
        /// The block's number.
        block: u64,
    },
}

/// What one capture asks for, as a warm-up pass recorded it. What it does not free is live at its end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GraphRequests {
    /// Graphs with the same number share a pool.
    pub pool: u64,
    /// In order.
    pub requests: Vec<Request>,
    /// Whether blocks that are live at the end of the capture are dropped before the next one. Outputs that the program keeps are not.
    pub drops_outputs: bool,
}

/// What a pool will hold. Bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct PoolForecast {
    /// The pool's number.
    pub pool: u64,
    /// From the driver.
    pub peak_reserved: u64,
    /// In blocks at most.
    pub peak_allocated: u64,
    /// How many graphs draw from it.
    pub graphs: u64,
    /// The most that one of its graphs alone would take of a pool of its own.
    pub largest_alone: u64,
}

/// Where a capture's request will lie: the segment's number in order of creation, and bytes into it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Place {
    /// The segment.
    pub segment: u64,
    /// Bytes into it.
    pub offset: u64,
}

/// What a set of captures will take.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct Forecast {
    /// Bytes from the driver in all.
    pub peak_reserved: u64,
    /// By pool.
    pub pools: Vec<PoolForecast>,
    /// For each graph, where each of its requests will lie.
    pub places: Vec<Vec<Place>>,
}

/// Why there is no forecast.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForecastError {
    /// A graph frees a block that it did not ask for, or asks for one twice.
    #[error("request {request} of graph {graph}: block {block} is {what}")]
    Block {
        /// The graph, from 0.
        graph: usize,
        /// The request, from 0.
        request: usize,
        /// The block's number.
        block: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// The captures do not fit, or the policy does not capture.
    #[error("graph {graph} cannot be captured: {error}")]
    Capture {
        /// The graph, from 0.
        graph: usize,
        /// Why.
        error: CaptureError,
    },
    /// The configuration makes no sense.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The simulated device refused, which is a fault of ours.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

type Block = Allocation<SimDevice>;

/// A capture on the bench: its graph, what is live of it, and where its requests lie.
struct Captured {
    graph: Graph<SimDevice>,
    outputs: Vec<Block>,
    places: Vec<Place>,
}

/// A bench to capture on.
struct Laboratory {
    device: Arc<SimDevice>,
    allocator: Allocator<SimDevice>,
    captures: Captures<SimDevice>,
    stream: Stream<SimDevice>,
    /// A byte range of the caller's that kernels touch, so that no graph is empty.
    touched: Block,
}

impl Laboratory {
    fn new(config: &Config, capacity: u64) -> Result<Self, ForecastError> {
        let sim = SimConfig::default().with_capacity(capacity).for_replay();
        let device = Arc::new(SimDevice::new(sim));
        let registry = Arc::new(CaptureRegistry::default());
        let allocator = Allocator::with_registry(Arc::clone(&device), config.clone(), registry)?;
        let captures = Captures::new(&allocator);
        let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking)?);
        let touched = allocator.alloc(4, &stream)?;
        Ok(Self { device, allocator, captures, stream, touched })
    }

    fn capture(&self, number: usize, graph: &GraphRequests, pool: PoolId) -> Result<Captured, ForecastError> {
        let failed = |error| ForecastError::Capture { graph: number, error };
        let wrong = |request, block, what| ForecastError::Block { graph: number, request, block, what };
        let capture = self.captures.begin(&self.stream, CaptureOptions::new().with_pool(pool)).map_err(failed)?;
        let (mut live, mut places) = (HashMap::new(), Vec::new());
        for (at, request) in graph.requests.iter().enumerate() {
            match *request {
                Request::Alloc { block, bytes } => {
                    let allocation = self.allocator.alloc(bytes, &self.stream).map_err(|e| failed(e.into()))?;
                    let place = allocation.placement().map(|p| Place { segment: p.segment, offset: p.offset });
                    places.extend(place);
                    if live.insert(block, allocation).is_some() {
                        return Err(wrong(at, block, "asked for twice"));
                    }
                }
                Request::Free { block } => {
                    drop(live.remove(&block).ok_or_else(|| wrong(at, block, "not one that it asked for"))?);
                }
            }
        }
        let touch = Kernel::Fill { dst: self.touched.address(), bytes: 4, value: 0 };
        self.device.launch(self.stream.handle(), touch)?;
        let ended = capture.end().map_err(failed)?;
        let mut live: Vec<(u64, Block)> = live.into_iter().collect();
        // In a fixed order: places must not depend on a hash.
        live.sort_by_key(|(block, _)| *block);
        let outputs = if graph.drops_outputs { Vec::new() } else { live.into_iter().map(|(_, b)| b).collect() };
        Ok(Captured { graph: ended, outputs, places })
    }
}

/// What the captures of `graphs`, one after another, will take under `config` on a device with `capacity` bytes.
///
/// # Errors
///
/// See [`ForecastError`].
pub fn forecast(graphs: &[GraphRequests], config: &Config, capacity: u64) -> Result<Forecast, ForecastError> {
    let laboratory = Laboratory::new(config, capacity)?;
    let before = laboratory.allocator.stats().reserved_bytes.all.current;
    let (mut kept, mut outputs, mut places) = (Vec::new(), Vec::new(), Vec::new());
    let mut pools: BTreeMap<u64, PoolForecast> = BTreeMap::new();
    // The caller's numbers may be any, the default pool's among them.
    let mut ids: BTreeMap<u64, PoolId> = BTreeMap::new();
    for (number, graph) in graphs.iter().enumerate() {
        let pool = *ids.entry(graph.pool).or_insert_with(PoolId::fresh_for_capture);
        let captured = laboratory.capture(number, graph, pool)?;
        let stats = laboratory.allocator.pool_stats(pool)?;
        let alone = alone(number, graph, config, capacity)?;
        let entry = pools.entry(graph.pool).or_insert(PoolForecast {
            pool: graph.pool,
            peak_reserved: 0,
            peak_allocated: 0,
            graphs: 0,
            largest_alone: 0,
        });
        entry.peak_reserved = stats.reserved_bytes.all.peak.max(0) as u64;
        entry.peak_allocated = stats.allocated_bytes.all.peak.max(0) as u64;
        entry.graphs += 1;
        entry.largest_alone = entry.largest_alone.max(alone);
        kept.push(captured.graph);
        outputs.extend(captured.outputs);
        places.push(captured.places);
    }
    let reserved = laboratory.allocator.stats().reserved_bytes.all.peak - before;
    Ok(Forecast { peak_reserved: reserved.max(0) as u64, pools: pools.into_values().collect(), places })
}

/// What one graph alone takes of a fresh pool.
fn alone(number: usize, graph: &GraphRequests, config: &Config, capacity: u64) -> Result<u64, ForecastError> {
    let laboratory = Laboratory::new(config, capacity)?;
    let pool = PoolId(0, 1);
    let _captured = laboratory.capture(number, graph, pool)?;
    Ok(laboratory.allocator.pool_stats(pool)?.reserved_bytes.all.peak.max(0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_allocator::Policy;

    fn graph(pool: u64, sizes: &[u64]) -> GraphRequests {
        let alloc =
            sizes.iter().enumerate().map(|(block, bytes)| Request::Alloc { block: block as u64, bytes: *bytes });
        let free = (0..sizes.len() as u64).map(|block| Request::Free { block });
        GraphRequests { pool, requests: alloc.chain(free).collect(), drops_outputs: true }
    }

    #[test]
    fn k1_a_shared_pool_takes_what_its_largest_graph_takes() {
        let config = Config::new(Policy::Segments);
        let graphs = [graph(0, &[1 << 20, 1 << 19]), graph(0, &[3 << 20, 1 << 20]), graph(7, &[100])];
        let forecast = forecast(&graphs, &config, 1 << 30).unwrap();
        assert_eq!(forecast.pools.len(), 2);
        assert_eq!(forecast.pools[0].graphs, 2);
        assert_eq!(forecast.pools[0].peak_reserved, (2 << 20) + (20 << 20));
        assert_eq!(forecast.pools[1].largest_alone, 2 << 20);
        assert_eq!(forecast.peak_reserved, (2 << 20) + (20 << 20) + (2 << 20));
        assert_eq!(forecast.places[0].len(), 2);
    }

    #[test]
    fn what_does_not_fit_and_what_makes_no_sense_is_told() {
        let config = Config::new(Policy::Segments);
        let error = forecast(&[graph(0, &[2 << 30])], &config, 1 << 30).unwrap_err();
        assert!(matches!(error, ForecastError::Capture { graph: 0, .. }), "{error}");
        let stray = GraphRequests { pool: 0, requests: vec![Request::Free { block: 5 }], drops_outputs: true };
        let error = forecast(&[stray], &config, 1 << 30).unwrap_err();
        assert!(matches!(error, ForecastError::Block { block: 5, .. }), "{error}");
    }
}
