//! Threads with a stream each on one allocator: a hot pair, and a working set of 256 live blocks. Criterion's throughput is pairs of all
//! threads together. Beside it, loops of the same length on memory of their own: what the machine's cores can give at most.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod common;

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use gpupool_allocator::Policy;
use gpupool_benches::peers::{Gpupool, SharedNaive};
use gpupool_benches::{Apart, Failed, Peer, Prepared, PrivateLoop, Running, Spread, Workload, or_exit, time, together};

/// Thread counts that this machine has cores for; two in any case.
fn counts() -> impl Iterator<Item = u16> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    [1, 2, 4, 8, 16].into_iter().filter(move |n| *n <= 2 || usize::from(*n) <= cores)
}

fn row<P: Peer + Send>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    prepared: &Prepared,
    threads: u16,
    peers: impl Fn() -> Result<Vec<P>, Failed>,
) where
    P::Block: Send,
{
    let mut running: Option<Vec<Apart<Running<'_, P>>>> = None;
    group.throughput(Throughput::Elements(u64::from(threads)));
    group.bench_function(format!("{name}, threads {threads:02}"), |b| {
        let running = running.get_or_insert_with(|| {
            let start = |peer| Running::start(prepared, peer).map(Apart);
            or_exit(peers().and_then(|peers| peers.into_iter().map(start).collect()))
        });
        b.iter_custom(|rounds| or_exit(together(running, |one| one.run(rounds).map(drop))));
    });
}

fn threads(c: &mut Criterion) {
    for workload in [Workload::HotPair { bytes: 512 }, Workload::WorkingSet { live: 256 }] {
        let prepared = common::prepare(&workload);
        let needs = prepared.needs();
        let mut group = c.benchmark_group(format!("threads-{workload}"));
        for policy in [Policy::Segments, Policy::Torch215] {
            for threads in counts() {
                row(&mut group, policy.name(), &prepared, threads, || {
                    let peer = Gpupool::new(policy, needs)?;
                    Ok((0..threads).map(|n| peer.with_stream(n)).collect())
                });
            }
        }
        for threads in counts() {
            row(&mut group, "tree-and-hash", &prepared, threads, || {
                let peer = SharedNaive::default();
                Ok((0..threads).map(|_| peer.clone()).collect())
            });
        }
        let one = |_| or_exit(Gpupool::new(Policy::Segments, needs).and_then(|peer| time(&prepared, peer))).ns;
        let least = Spread::of((0..5).map(one).collect()).map_or(100.0, |spread| spread.least);
        let round = Duration::from_secs_f64(least * 1e-9);
        for threads in counts() {
            let mut loops = vec![Apart(PrivateLoop::of_length(round)); usize::from(threads)];
            group.throughput(Throughput::Elements(u64::from(threads)));
            group.bench_function(format!("private loop, threads {threads:02}"), |b| {
                b.iter_custom(|rounds| {
                    or_exit(together(&mut loops, |one| {
                        one.run(rounds);
                        Ok(())
                    }))
                });
            });
        }
        group.finish();
    }
}

criterion_group! { name = benches; config = common::criterion(); targets = threads }
criterion_main!(benches);
