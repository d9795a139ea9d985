//! Allocate and free one size, again and again.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod common;

use criterion::{Criterion, criterion_group, criterion_main};
use gpupool_benches::Workload;

fn hot_pair(c: &mut Criterion) {
    common::peers(c, &Workload::PAIRS);
}

criterion_group! { name = benches; config = common::criterion(); targets = hot_pair }
criterion_main!(benches);
