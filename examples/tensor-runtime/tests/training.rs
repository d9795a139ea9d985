//! The eager and the captured step, on the simulated device.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use example_tensor_runtime::compute::Simulated;
use example_tensor_runtime::network::{Network, train};
use example_tensor_runtime::runtime::Runtime;
use gpupool::sim::{Scheduler, SimConfig, SimDevice};
use gpupool::{Config, Policy};

fn runtime(scheduler: Scheduler) -> Runtime<Simulated> {
    let device = SimDevice::new(SimConfig::default().with_scheduler(scheduler));
    Runtime::new(Simulated(Arc::new(device)), Config::new(Policy::Segments)).unwrap()
}

#[test]
fn the_captured_step_learns_what_the_eager_one_does() {
    for scheduler in [Scheduler::InOrder, Scheduler::Adversarial, Scheduler::Random { seed: 3 }] {
        let runtime = runtime(scheduler);
        let (eager, captured) = (train(&runtime, 20, false).unwrap(), train(&runtime, 20, true).unwrap());
        assert_eq!(eager.losses, captured.losses, "{scheduler:?}");
        assert_eq!((eager.later_allocations, captured.later_allocations), (0, 0));
        assert!(eager.losses.windows(2).all(|pair| pair[1] < pair[0]), "it learns: {:?}", eager.losses);
    }
}

#[test]
fn a_step_that_fails_leaves_the_stream_as_it_was_and_nothing_is_lost() {
    let runtime = runtime(Scheduler::InOrder);
    let network = Network::new(&runtime).unwrap();
    let failed = runtime.capture(|| {
        network.step(&runtime)?;
        Err("no".into())
    });
    assert!(failed.is_err());
    network.step(&runtime).unwrap();
    assert!(network.loss(&runtime).unwrap() > 0.0);
    drop(network);
    runtime.allocator.empty_cache().unwrap();
    assert_eq!(runtime.allocator.stats().reserved_bytes.all.current, 0);
}
