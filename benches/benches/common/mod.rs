//! What the criterion benches have in common.

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput};
use gpupool_allocator::Policy;
#[cfg(feature = "offset-allocator")]
use gpupool_benches::peers::Offset;
use gpupool_benches::peers::{Gpupool, Naive, Nothing};
use gpupool_benches::{Failed, Kind, Peer, Prepared, Running, Workload, or_exit, traces_folder};

/// Fewer samples and less time than criterion's defaults: there are many rows.
pub(crate) fn criterion() -> Criterion {
    let (warm_up, measurement) = (Duration::from_millis(300), Duration::from_millis(1_500));
    Criterion::default().sample_size(30).warm_up_time(warm_up).measurement_time(measurement)
}

/// A group for each workload, a row in it for each peer of this process.
#[allow(dead_code)]
pub(crate) fn peers(c: &mut Criterion, workloads: &[Workload]) {
    for workload in workloads {
        let prepared = prepare(workload);
        let needs = prepared.needs();
        let mut group = group(c, workload, &prepared);
        row(&mut group, Kind::LoopAlone.name(), &prepared, || Ok(Nothing::new(needs)));
        row(&mut group, Policy::Segments.name(), &prepared, || Gpupool::new(Policy::Segments, needs));
        row(&mut group, Policy::Torch215.name(), &prepared, || Gpupool::new(Policy::Torch215, needs));
        #[cfg(feature = "offset-allocator")]
        row(&mut group, Kind::OffsetAllocator.name(), &prepared, || Ok(Offset::new()));
        row(&mut group, Kind::TreeAndHash.name(), &prepared, || Ok(Naive::new()));
        group.finish();
    }
}

pub(crate) fn prepare(workload: &Workload) -> Prepared {
    or_exit(Prepared::new(workload, &traces_folder()))
}

pub(crate) fn group<'a>(c: &'a mut Criterion, name: &Workload, prepared: &Prepared) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name.to_string());
    group.throughput(Throughput::Elements(prepared.units_per_round()));
    group
}

/// A row: the peer is made when criterion comes to it.
pub(crate) fn row<P: Peer>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    prepared: &Prepared,
    peer: impl Fn() -> Result<P, Failed>,
) {
    let mut running = None;
    group.bench_function(name, |b| {
        let start = || or_exit(peer().and_then(|peer| Running::start(prepared, peer)));
        let running = running.get_or_insert_with(start);
        b.iter_custom(|rounds| or_exit(running.run(rounds)));
    });
}
