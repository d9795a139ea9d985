//! What asks the driver: growth from nothing, the cache given back, and growth that gives idle segments back first. The simulated device's
//! host time is in it, and no price of a driver's: what a driver takes is another question.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod common;

use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use gpupool_allocator::{Allocation, Policy};
use gpupool_benches::peers::Gpupool;
use gpupool_benches::{Needs, Peer, or_exit};
use gpupool_sim_device::SimDevice;

/// Blocks, each in a segment of its own.
const BLOCKS: u64 = 64;
const BYTES: u64 = 20 << 20;

type Block = Allocation<SimDevice>;

fn fill(peer: &mut Gpupool, bytes: u64) -> Vec<Block> {
    (0..BLOCKS).filter_map(|_| peer.alloc(bytes, 0)).collect()
}

fn timed<T>(took: &mut Duration, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let out = work();
    *took += start.elapsed();
    out
}

/// A row for each policy, of what `round` adds to the time.
fn rows(c: &mut Criterion, name: &str, policies: &[Policy], round: impl Fn(Policy, &mut Duration)) {
    let mut group = c.benchmark_group(name);
    group.throughput(Throughput::Elements(BLOCKS));
    for policy in policies {
        group.bench_function(policy.to_string(), |b| {
            b.iter_custom(|rounds| {
                let mut took = Duration::ZERO;
                (0..rounds).for_each(|_| round(*policy, &mut took));
                took
            });
        });
    }
    group.finish();
}

fn fresh(policy: Policy) -> Gpupool {
    or_exit(Gpupool::new(policy, Needs { streams: 1 }))
}

const ALL: [Policy; 3] = [Policy::Segments, Policy::Pages, Policy::Torch215];

fn cold_growth(c: &mut Criterion) {
    rows(c, "cold growth, a segment", &ALL, |policy, took| {
        let mut peer = fresh(policy);
        let blocks = timed(took, || fill(&mut peer, BYTES));
        assert_eq!(blocks.len() as u64, BLOCKS);
    });
}

fn trim(c: &mut Criterion) {
    rows(c, "empty cache, a segment", &ALL, |policy, took| {
        let mut peer = fresh(policy);
        drop(fill(&mut peer, BYTES));
        or_exit(timed(took, || peer.empty_cache()));
        assert_eq!(peer.allocator().stats().reserved_bytes.all.current, 0);
    });
}

fn trim_before_growth(c: &mut Criterion) {
    rows(c, "trim before growth, a segment", &[Policy::Segments], |policy, took| {
        let mut peer = fresh(policy);
        // As long as it lives nothing is taken for a repetition.
        let keep = peer.alloc(512, 0);
        drop(fill(&mut peer, BYTES));
        let reserved = peer.allocator().stats().reserved_bytes.all.peak;
        // None of the idle segments is large enough; two make room for one.
        let blocks: Vec<_> = timed(took, || (0..BLOCKS / 2).filter_map(|_| peer.alloc(2 * BYTES, 0)).collect());
        assert_eq!(blocks.len() as u64, BLOCKS / 2);
        assert_eq!(peer.allocator().stats().reserved_bytes.all.peak, reserved);
        drop((keep, blocks));
    });
}

criterion_group! { name = benches; config = common::criterion(); targets = cold_growth, trim, trim_before_growth }
criterion_main!(benches);
