//! What a capture costs: a pair inside one beside a pair outside, with the query of the stream's capture as a row of its own; and a launch
//! of a captured graph beside the driver's launch alone.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "criterion's macros make undocumented functions")]

mod common;

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use gpupool_allocator::{Allocator, Config, Policy};
use gpupool_benches::{Workload, or_exit};
use gpupool_device::{GraphDevice, Kernel, StreamKind, Workbench};
use gpupool_graph_capture::{CaptureOptions, Captures, LaunchOptions, OutputCheck};
use gpupool_sim_device::{SimConfig, SimDevice};

fn requests(c: &mut Criterion) {
    common::peers(c, &[Workload::HotPair { bytes: 512 }]);
    common::peers(c, &Workload::CAPTURED);
}

fn launches(c: &mut Criterion) {
    let mut group = c.benchmark_group("launch");
    let device = Arc::new(SimDevice::new(SimConfig::default().for_replay()));
    let allocator =
        or_exit(Allocator::with_registry(Arc::clone(&device), Config::new(Policy::Segments), Arc::default()));
    let stream = allocator.register_stream(or_exit(device.stream_create(StreamKind::NonBlocking)));
    let captures = Captures::new(&allocator);
    for graphs in [1, 16] {
        let pool = gpupool_allocator::PoolId::fresh_for_capture();
        let executables: Vec<_> = (0..graphs)
            .map(|_| {
                let capture = or_exit(captures.begin(&stream, CaptureOptions::new().with_pool(pool)));
                let block = or_exit(allocator.alloc(1 << 20, &stream));
                let fill = Kernel::Fill { dst: block.address(), bytes: 512, value: 1 };
                or_exit(device.launch(stream.handle(), fill));
                drop(block);
                or_exit(or_exit(capture.end()).instantiate(Default::default()))
            })
            .collect();
        let executable = &executables[graphs - 1];
        // What is launched must also run, or the queue grows for ever: that is not in the time.
        let idle = || device.run_until_idle();
        group.bench_function(format!("the driver alone, {graphs:02} graphs in the pool"), |b| {
            b.iter_batched(
                idle,
                |()| device.graph_launch(executable.handle(), stream.handle()),
                BatchSize::PerIteration,
            );
        });
        group.bench_function(format!("with the default checks, {graphs:02} graphs in the pool"), |b| {
            b.iter_batched(idle, |()| black_box(executable.launch(&stream)).is_ok(), BatchSize::PerIteration);
        });
        let always = LaunchOptions::new().with_outputs(OutputCheck::Always);
        group.bench_function(format!("looking for held outputs each time, {graphs:02} graphs in the pool"), |b| {
            b.iter_batched(idle, |()| executable.launch_with(&stream, always).is_ok(), BatchSize::PerIteration);
        });
    }
    group.finish();
}

criterion_group! { name = benches; config = common::criterion(); targets = requests, launches }
criterion_main!(benches);
