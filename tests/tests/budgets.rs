//! Budgets that are counted and not timed: host memory a block, driver calls in a steady state.
#![allow(clippy::unwrap_used, reason = "a panic in a test is its report")]

use std::sync::Arc;

use gpupool_allocator::{Allocation, Allocator, Config, Policy};
use gpupool_device::{StreamKind, Workbench};
use gpupool_sim_device::{SimConfig, SimDevice};

fn allocator(policy: Policy) -> Allocator<SimDevice> {
    let device = Arc::new(SimDevice::new(SimConfig::default().for_replay()));
    Allocator::with_registry(device, Config::new(policy), Arc::default()).unwrap()
}

/// Records grow by an eighth, not twofold, so that this holds at any number of blocks.
#[test]
fn a_block_takes_at_most_64_bytes_of_host_memory() {
    for policy in Policy::ALL {
        let allocator = allocator(*policy);
        let stream = allocator.register_stream(allocator.device().stream_create(StreamKind::NonBlocking).unwrap());
        let mut live = Vec::new();
        for blocks in [1_000, 30_000, 100_000, 140_000] {
            live.extend((live.len()..blocks).map(|_| allocator.alloc(512, &stream).unwrap()));
            let (bytes, records) = allocator.host_bytes();
            assert!(records >= blocks && bytes <= 64 * blocks, "{policy}: {bytes} bytes for {blocks} blocks");
        }
    }
    // What the owner holds.
    assert!(size_of::<Allocation<SimDevice>>() <= 24);
}

/// Blocks of many sizes are freed and allocated for ever, and never all are free: once the level was held for a while, memory is kept.
#[test]
fn a_workload_that_holds_its_level_asks_the_driver_nothing_in_the_end() {
    for policy in [Policy::Segments, Policy::Torch215] {
        let allocator = allocator(policy);
        let device = Arc::clone(allocator.device());
        let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
        let mut x = 0x2545_F491_4F6C_DD1Du64;
        let mut draw = move || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x
        };
        // Powers of two with something between, 512 bytes to 32 MiB.
        let mut size = {
            let mut draw = draw;
            move || (512 << (draw() % 16)) + draw() % 512
        };
        let mut live: Vec<_> = (0..2_000).map(|_| allocator.alloc(size(), &stream).unwrap()).collect();
        let mut step = || {
            let at = (draw() % live.len() as u64) as usize;
            drop(live.swap_remove(at));
            live.push(allocator.alloc(size(), &stream).unwrap());
        };
        (0..60_000).for_each(|_| step());
        let calls = || device.call_counts().values().sum::<u64>();
        let before = calls();
        (0..40_000).for_each(|_| step());
        let after = calls() - before;
        assert!(after <= 20, "{policy}: {after} driver calls in 40,000 steps");
    }
}
