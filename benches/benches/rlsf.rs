//! rlsf on every workload: here it is the process's global allocator, which takes no `unsafe`. Host memory, sizes divided by 64.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod common;

use criterion::{Criterion, criterion_group, criterion_main};
use gpupool_benches::peers::Heap;
use gpupool_benches::{Kind, Workload, or_exit, traces_folder};

#[global_allocator]
static HEAP: rlsf::GlobalTlsf = rlsf::GlobalTlsf::new();

fn rlsf(c: &mut Criterion) {
    let recorded = or_exit(Workload::recorded(&traces_folder()));
    for workload in Workload::synthetic().into_iter().chain(recorded) {
        let prepared = common::prepare(&workload);
        let mut group = common::group(c, &workload, &prepared);
        common::row(&mut group, Kind::Rlsf.name(), &prepared, || Ok(Heap));
        group.finish();
    }
}

criterion_group! { name = benches; config = common::criterion(); targets = rlsf }
criterion_main!(benches);
