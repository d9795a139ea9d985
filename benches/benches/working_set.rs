//! Free one of many live blocks, allocate another; and pairs through the free index alone, with few and many free blocks in it.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod common;

use criterion::{Criterion, criterion_group, criterion_main};
use gpupool_benches::Workload;

fn working_set(c: &mut Criterion) {
    common::peers(c, &Workload::SETS);
}

fn index(c: &mut Criterion) {
    common::peers(c, &Workload::INDEXES);
}

criterion_group! { name = benches; config = common::criterion(); targets = working_set, index }
criterion_main!(benches);
