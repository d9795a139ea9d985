//! A forecast is what the replay then takes, to the byte.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::path::Path;

use gpupool_allocator::Policy;
use gpupool_replay::forecast::forecast_trace;
use gpupool_replay::replay::{DEFAULT_CAPACITY, Options, replay_simulated};
use gpupool_replay::trace::Trace;

fn trace(name: &str) -> Trace {
    let path = format!("{}/data/traces/{name}.trace.gz", env!("CARGO_MANIFEST_DIR"));
    Trace::read(Path::new(&path)).unwrap()
}

#[test]
fn a_forecast_is_what_the_replay_takes() {
    for name in ["graph_serving", "seed_batches", "seed_batches_unshared"] {
        let trace = trace(name);
        let forecast = forecast_trace(&trace, DEFAULT_CAPACITY).unwrap();
        let report = replay_simulated(&trace, &Options::new(Policy::default()), &mut |_| {}).unwrap().report;
        assert_eq!(forecast.peak_reserved, report.peak_reserved, "{name}");
        let forecast: Vec<_> = forecast.pools.iter().map(|p| (p.pool, p.peak_reserved, p.peak_allocated)).collect();
        let replayed: Vec<_> = report.pools.iter().map(|p| (p.pool, p.peak_reserved, p.peak_allocated)).collect();
        assert_eq!(forecast, replayed, "{name}");
    }
}

#[test]
fn shared_pools_take_no_more_than_the_largest_graph_and_a_fiftieth() {
    for name in ["graph_serving", "seed_batches"] {
        for pool in forecast_trace(&trace(name), DEFAULT_CAPACITY).unwrap().pools {
            let most = pool.largest_alone + pool.largest_alone / 50;
            assert!(pool.peak_reserved <= most, "{name}: {pool:?}");
        }
    }
}

#[test]
fn graph_pools_are_no_larger_than_pytorch_makes_them() {
    for name in ["graph_serving", "seed_batches", "seed_batches_unshared"] {
        let trace = trace(name);
        let sum = |policy| {
            let report = replay_simulated(&trace, &Options::new(policy), &mut |_| {}).unwrap().report;
            report.pools.iter().map(|p| p.peak_reserved).sum::<u64>()
        };
        for ours in [Policy::Segments, Policy::Pages] {
            assert!(sum(ours) <= sum(Policy::Torch215), "{name} under {ours}");
        }
    }
}
