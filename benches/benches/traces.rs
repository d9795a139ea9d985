//! Recorded workloads, over and over. A round is a turn over the recording; criterion's throughput is events.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod common;

use criterion::{Criterion, criterion_group, criterion_main};
use gpupool_benches::{Workload, or_exit, traces_folder};

fn traces(c: &mut Criterion) {
    common::peers(c, &or_exit(Workload::recorded(&traces_folder())));
}

criterion_group! { name = benches; config = common::criterion(); targets = traces }
criterion_main!(benches);
