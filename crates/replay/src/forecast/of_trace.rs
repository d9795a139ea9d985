//! A forecast of a recorded workload: its captures, and everything around them.

use std::collections::BTreeMap;

use gpupool_allocator::{Config, Policy};
use serde::Serialize;

use super::{ForecastError, GraphRequests, PoolForecast, Request, forecast};
use crate::replay::{Options, ReplayError, Stopped, replay_simulated};
use crate::trace::{Event, Trace};

/// What a recorded workload will take.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct TraceForecast {
    /// The trace's name.
    pub trace: String,
    /// The policy's name.
    pub policy: String,
    /// Bytes from the driver at most, eager work included.
    pub peak_reserved: u64,
    /// What each private pool holds at most.
    pub pools: Vec<PoolForecast>,
}

/// Why there is no forecast of a trace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceForecastError {
    /// The workload does not fit, or cannot be replayed.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// It ran out of memory.
    #[error(
        "{file}: under {policy} the workload does not fit into {capacity} bytes: it stopped at {}, which asks for {} bytes",
        .stopped.place, .stopped.requested
    )]
    TooSmall {
        /// The file.
        file: String,
        /// The trace's name.
        trace: String,
        /// The policy's name.
        policy: &'static str,
        /// The device's bytes.
        capacity: u64,
        /// Where it stopped, and what was there.
        stopped: Box<Stopped>,
    },
    /// One of its captures alone cannot be made.
    #[error("{file}: graph {graph} alone: {error}")]
    Forecast {
        /// The file.
        file: String,
        /// The graph's number in the file.
        graph: u64,
        /// Why.
        #[source]
        error: Box<ForecastError>,
    },
}

/// The captures of a trace, each with what its stream asked for while it was under way.
#[must_use]
pub fn graphs_of(trace: &Trace) -> Vec<GraphRequests> {
    let mut graphs: Vec<GraphRequests> = trace
        .graphs
        .iter()
        .map(|g| GraphRequests { pool: g.pool, requests: Vec::new(), drops_outputs: false })
        .collect();
    let mut open: Vec<(u32, u16)> = Vec::new();
    // Which graph a block was asked for in, while that graph is under way.
    let mut of: BTreeMap<u32, u32> = BTreeMap::new();
    for event in &trace.events {
        match *event {
            Event::Begin { graph } => {
                open.extend(trace.graphs.get(graph as usize).map(|g| (graph, g.stream)));
            }
            Event::End { graph } => {
                open.retain(|(g, _)| *g != graph);
                of.retain(|_, g| *g != graph);
            }
            Event::Alloc { block, bytes, stream } => {
                if let Some((graph, _)) = open.iter().find(|(_, s)| *s == stream) {
                    of.insert(block, *graph);
                    graphs[*graph as usize].requests.push(Request::Alloc { block: block.into(), bytes });
                }
            }
            Event::Free { block } | Event::FreeLate { block, .. } => {
                if let Some(graph) = of.remove(&block) {
                    graphs[graph as usize].requests.push(Request::Free { block: block.into() });
                }
            }
            _ => {}
        }
    }
    graphs
}

/// What a trace will take under the default policy on a simulated device with `capacity` bytes.
///
/// # Errors
///
/// See [`TraceForecastError`].
pub fn forecast_trace(trace: &Trace, capacity: u64) -> Result<TraceForecast, TraceForecastError> {
    let policy = Policy::default();
    let mut options = Options::new(policy);
    options.capacity = capacity;
    options.timed = false;
    let report = replay_simulated(trace, &options, &mut |_| {})?.report;
    if let Some(stopped) = report.stopped {
        let (file, trace, stopped) = (trace.file.clone(), report.trace, Box::new(stopped));
        return Err(TraceForecastError::TooSmall { file, trace, policy: policy.name(), capacity, stopped });
    }
    let mut alone: BTreeMap<u64, u64> = BTreeMap::new();
    let config = Config::new(policy);
    for (graph, of) in graphs_of(trace).into_iter().zip(&trace.graphs) {
        let single = forecast(std::slice::from_ref(&graph), &config, capacity).map_err(|error| {
            let (file, error) = (trace.file.clone(), Box::new(error));
            TraceForecastError::Forecast { file, graph: of.number, error }
        })?;
        let largest = alone.entry(graph.pool).or_default();
        *largest = (*largest).max(single.peak_reserved);
    }
    let pools = report
        .pools
        .iter()
        .map(|p| PoolForecast {
            pool: p.pool,
            peak_reserved: p.peak_reserved,
            peak_allocated: p.peak_allocated,
            graphs: p.graphs,
            largest_alone: alone.get(&p.pool).copied().unwrap_or(0),
        })
        .collect();
    Ok(TraceForecast { trace: report.trace, policy: report.policy, peak_reserved: report.peak_reserved, pools })
}
