//! What it takes to look: statistics over few and many arenas, and a whole state with 100,000 blocks.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod common;

use criterion::{Criterion, criterion_group, criterion_main};
use gpupool_allocator::Policy;
use gpupool_benches::peers::Gpupool;
use gpupool_benches::{Needs, Peer, or_exit};

fn stats(c: &mut Criterion) {
    let mut group = c.benchmark_group("stats");
    for streams in [1, 16, 64] {
        // Under `segments` a stream has an arena; one more is the peer's own.
        let mut peer = or_exit(Gpupool::new(Policy::Segments, Needs { streams }));
        let blocks: Vec<_> = (0..streams).map(|stream| peer.alloc(512, stream)).collect();
        group.bench_function(format!("arenas {:02}", streams + 1), |b| b.iter(|| peer.allocator().stats()));
        drop(blocks);
    }
    group.finish();
}

fn snapshot(c: &mut Criterion) {
    const BLOCKS: u32 = 100_000;
    let mut group = c.benchmark_group("snapshot");
    for streams in [1, 16] {
        let mut peer = or_exit(Gpupool::new(Policy::Segments, Needs { streams }));
        let blocks: Vec<_> = (0..BLOCKS).map(|n| peer.alloc(512, (n % u32::from(streams)) as u16)).collect();
        group.bench_function(format!("blocks {BLOCKS}, streams {streams:02}"), |b| {
            b.iter(|| peer.allocator().state());
        });
        drop(blocks);
    }
    group.finish();
}

criterion_group! { name = benches; config = common::criterion(); targets = stats, snapshot }
criterion_main!(benches);
