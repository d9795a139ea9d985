//! What a pair is made of, as far as it can be had from outside: the prices of a lock, of a counted reference and of the clock, a call
//! that needs no block, finding a stream's registration, and giving a handle up for its address.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod common;

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use gpupool_allocator::Policy;
use gpupool_benches::peers::Gpupool;
use gpupool_benches::{Needs, or_exit};
use parking_lot::Mutex;

const NEEDS: Needs = Needs { streams: 1 };

fn prices(c: &mut Criterion) {
    let mut group = c.benchmark_group("layers");
    let lock = Mutex::new(0_u64);
    group.bench_function("lock and unlock", |b| b.iter(|| *black_box(&lock).lock() += 1));
    let counted = Arc::new(0_u64);
    group.bench_function("clone and drop an Arc", |b| b.iter(|| Arc::clone(black_box(&counted))));
    group.bench_function("read the clock", |b| b.iter(Instant::now));
    group.finish();
}

fn calls(c: &mut Criterion) {
    let mut group = c.benchmark_group("layers");
    let peer = or_exit(Gpupool::new(Policy::Segments, NEEDS));
    let (allocator, stream) = (peer.allocator(), peer.stream(0));
    group.bench_function("zero bytes", |b| b.iter(|| allocator.alloc(black_box(0), stream).is_ok()));
    group.bench_function("registered stream", |b| b.iter(|| allocator.register_stream(black_box(stream.handle()))));
    group.bench_function("pair", |b| b.iter(|| allocator.alloc(black_box(512), stream).is_ok()));
    group.bench_function("pair by address", |b| {
        b.iter(|| {
            let address = allocator.into_raw(or_exit(allocator.alloc(black_box(512), stream)));
            allocator.from_raw(address).is_ok()
        });
    });
    group.finish();
}

criterion_group! { name = benches; config = common::criterion(); targets = prices, calls }
criterion_main!(benches);
