//! Frees that are not the owner's on its own stream: from another thread, and with a use recorded on another stream. What is timed is the
//! free alone, in batches; the requests before are not.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod common;

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use gpupool_allocator::{Allocation, Policy};
use gpupool_benches::peers::Gpupool;
use gpupool_benches::{Needs, or_exit};
use gpupool_sim_device::SimDevice;

const NEEDS: Needs = Needs { streams: 1 };
/// As many as share an event.
const BATCH: u64 = 64;
const SIZES: [u64; 2] = [512, 1 << 20];

type Block = Allocation<SimDevice>;

/// Frees `n` blocks by batches; `free` returns how long its batch took.
fn batches(peer: &Gpupool, bytes: u64, n: u64, mut free: impl FnMut(Vec<Block>) -> Duration) -> Duration {
    let (mut took, mut left) = (Duration::ZERO, n);
    while left > 0 {
        let batch = left.min(BATCH);
        let request = |_| or_exit(peer.allocator().alloc(bytes, peer.stream(0)));
        took += free((0..batch).map(request).collect());
        left -= batch;
    }
    took
}

/// Drops the blocks; the vector's own memory is not in the time.
fn timed_drop(blocks: &mut Vec<Block>) -> Duration {
    let start = Instant::now();
    blocks.clear();
    start.elapsed()
}

fn from_another_thread(c: &mut Criterion) {
    let mut group = c.benchmark_group("cross-thread-free");
    for bytes in SIZES {
        for policy in [Policy::Segments, Policy::Torch215] {
            let peer = or_exit(Gpupool::new(policy, NEEDS));
            group.bench_function(format!("{policy}, {bytes}, same thread"), |b| {
                b.iter_custom(|n| batches(&peer, bytes, n, |mut blocks| timed_drop(&mut blocks)));
            });
            group.bench_function(format!("{policy}, {bytes}, another thread"), |b| {
                b.iter_custom(|n| {
                    thread::scope(|scope| {
                        let (send, blocks) = mpsc::channel::<Vec<Block>>();
                        let (report, took) = mpsc::channel();
                        scope.spawn(move || {
                            for mut batch in blocks {
                                if report.send(timed_drop(&mut batch)).is_err() {
                                    return;
                                }
                            }
                        });
                        batches(&peer, bytes, n, |batch| {
                            or_exit(send.send(batch));
                            or_exit(took.recv())
                        })
                    })
                });
            });
        }
    }
    group.finish();
}

fn with_a_recorded_stream(c: &mut Criterion) {
    let mut group = c.benchmark_group("recorded-stream");
    for bytes in SIZES {
        for policy in [Policy::Segments, Policy::Torch215] {
            let peer = or_exit(Gpupool::new(policy, NEEDS));
            let record = |blocks: &[Block]| {
                let start = Instant::now();
                blocks.iter().for_each(|block| or_exit(block.record_stream(peer.other_stream())));
                start.elapsed()
            };
            group.bench_function(format!("{policy}, {bytes}, record"), |b| {
                b.iter_custom(|n| batches(&peer, bytes, n, |blocks| record(&blocks)));
            });
            group.bench_function(format!("{policy}, {bytes}, free"), |b| {
                b.iter_custom(|n| {
                    batches(&peer, bytes, n, |mut blocks| {
                        record(&blocks);
                        timed_drop(&mut blocks)
                    })
                });
            });
        }
    }
    group.finish();
}

criterion_group! { name = benches; config = common::criterion(); targets = from_another_thread, with_a_recorded_stream }
criterion_main!(benches);
