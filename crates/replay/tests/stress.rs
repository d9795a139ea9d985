//! Operations at random: the allocator keeps its promises under every policy and schedule, and the harness notices
//! who does not.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::num::NonZeroU64;
use std::sync::Arc;

use gpupool_allocator::{Config, Policy};
use gpupool_replay::generate::{Generator, Op, Shape, Sizes, decode};
use gpupool_replay::replay::DEFAULT_CAPACITY;
use gpupool_replay::stress::{Common, Failed, Harness, Limit, StressOptions, stress, stress_simulated};
use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn harness(config: SimConfig, policy: Policy) -> (Arc<SimDevice>, Arc<Common<SimDevice>>, Harness<SimDevice>) {
    let device = Arc::new(SimDevice::new(config));
    let common = Arc::new(Common::new(Arc::clone(&device), Config::new(policy), 3).unwrap());
    let harness = Harness::new(Arc::clone(&common), vec![0, 1, 2], 0).unwrap();
    (device, common, harness)
}

fn whole(config: SimConfig, policy: Policy, ops: impl IntoIterator<Item = Op>) -> Result<u64, Failed> {
    let (device, common, mut harness) = harness(config, policy);
    for (number, op) in ops.into_iter().enumerate() {
        harness.apply(op)?;
        if number % 16 == 0 {
            common.check()?;
        }
    }
    let checked = harness.finish()?.checked_bytes;
    assert_eq!(common.finish()?, 0, "leaked");
    drop(common);
    assert_eq!(device.events_in_use(), 0, "events of the allocator outlive it");
    Ok(checked)
}

#[test]
fn drawn_sequences_keep_every_promise() {
    let shape = Shape { live: 24, crossing: 30, emptying: 10, ..Shape::default() };
    for policy in Policy::ALL {
        for scheduler in [Scheduler::InOrder, Scheduler::Random { seed: 9 }, Scheduler::Adversarial] {
            for seed in 0..4 {
                let config = SimConfig::default().with_scheduler(scheduler);
                let checked = whole(config, *policy, Generator::new(seed, shape).take(600));
                assert!(checked.unwrap_or_else(|e| panic!("{policy}, {scheduler:?}, seed {seed}: {e}")) > 0);
            }
        }
    }
}

#[test]
fn promises_are_kept_when_memory_is_short() {
    let sizes = Sizes::LogUniform { least: 512, most: 16 * MIB };
    let shape = Shape { sizes, live: 60, crossing: 25, emptying: 5 };
    for policy in Policy::ALL {
        let (_, common, mut harness) = harness(SimConfig::default().with_capacity(96 * MIB), *policy);
        for op in Generator::new(1, shape).take(3000) {
            harness.apply(op).unwrap_or_else(|e| panic!("{policy}: {e}"));
        }
        common.check().unwrap();
        assert!(harness.tally().out_of_memory > 0, "{policy}: memory was never short");
        harness.finish().unwrap();
        assert_eq!(common.finish().unwrap(), 0);
    }
}

#[test]
fn who_writes_to_a_block_that_is_not_his_is_noticed() {
    let (device, common, mut harness) = harness(SimConfig::default(), Policy::Segments);
    harness.apply(Op::Alloc { bytes: 1 << 16, stream: 0 }).unwrap();
    device.run_until_idle();
    let state = common.allocator().state();
    let block = state.segments.iter().flat_map(|s| &s.blocks).find(|b| b.requested == 1 << 16).unwrap();
    assert!(device.write_bytes(block.address.offset(512), &[1, 2, 3, 4]));
    let error = harness.finish().unwrap_err();
    assert!(matches!(error, Failed::Contents { .. }), "{error}");
}

fn plenty(policy: Policy) -> StressOptions {
    let limit = Limit::Operations(NonZeroU64::MIN);
    StressOptions { policy, threads: 1, limit, seed: 3, shape: Shape::default(), capacity: DEFAULT_CAPACITY }
}

#[test]
fn threads_compete_for_little_memory() {
    for policy in Policy::ALL {
        let limit = Limit::Operations(NonZeroU64::new(6000).unwrap());
        let options = StressOptions { threads: 3, limit, capacity: 24 * MIB, ..plenty(*policy) };
        let report = stress_simulated(&options, &|_| {}, &|_| {}).unwrap();
        assert_eq!((report.errors, report.leaked_bytes), (0, 0), "{:?}", report.messages);
        assert!(report.out_of_memory > 0, "{policy}");
    }
}

#[test]
fn threads_exchange_blocks_and_nothing_is_lost() {
    for policy in Policy::ALL {
        let operations = NonZeroU64::new(12_000).unwrap();
        let limit = Limit::Operations(operations);
        let options = StressOptions { threads: 4, limit, ..plenty(*policy) };
        let report = stress_simulated(&options, &|_| {}, &|_| {}).unwrap();
        assert_eq!((report.errors, report.leaked_bytes), (0, 0), "{:?}", report.messages);
        assert!(report.operations > 6_000 && report.checked_bytes > 0 && report.ns_per_operation > 0.0);
    }
}

#[test]
fn what_a_device_refuses_is_an_error_of_the_report() {
    let device = SimDevice::new(SimConfig::default());
    device.fail_nth(gpupool_device::Call::LaunchKernel, 500, gpupool_device::code::UNKNOWN);
    let limit = Limit::Operations(NonZeroU64::new(5000).unwrap());
    let options = StressOptions { limit, ..plenty(Policy::Segments) };
    let report = stress(Arc::new(device), &options, &|_| {}, &|_| {}).unwrap();
    assert!(report.errors > 0 && report.messages[0].contains("cuLaunchKernel"), "{:?}", report.messages);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_make_a_sequence_that_keeps_every_promise(
        bytes in proptest::collection::vec(any::<u8>(), 0..1500),
        policy in prop::sample::select(Policy::ALL),
        adversarial in any::<bool>(),
    ) {
        let scheduler = if adversarial { Scheduler::Adversarial } else { Scheduler::InOrder };
        let result = whole(SimConfig::default().with_scheduler(scheduler), policy, decode(&bytes));
        prop_assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}
