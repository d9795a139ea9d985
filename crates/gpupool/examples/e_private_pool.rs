//! Experiment E: a private pool in place of the driver's memory nodes. The sum captured through us, replayed with new inputs each time.

mod common;

use std::sync::Arc;

use common::{Gpu, MIB, Machine, Outcome, Report, Runs, words};
use gpupool::device::{InstantiateFlags, Kernel, NodeKind, StreamKind, Workbench};
use gpupool::graphs::{CaptureOptions, Captures};
use gpupool::{Allocator, Config, Policy};
use gpupool_sim_device::SimDevice;

const BYTES: u64 = 64 * MIB;

fn main() -> Outcome {
    common::run("E. A private pool a graph", Runs::Anywhere(on_sim, on_gpu))
}

fn on_sim(device: Arc<SimDevice>, report: &Report) -> Outcome {
    experiment(&device, report)
}

fn on_gpu(gpu: Arc<Gpu>, report: &Report) -> Outcome {
    experiment(&gpu, report)
}

fn experiment<M: Machine>(machine: &M, report: &Report) -> Outcome {
    let device = machine.device();
    let allocator = Allocator::new(Arc::clone(device), Config::new(Policy::Segments))?;
    let captures = Captures::new(&allocator);
    let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking)?);
    let handle = stream.handle();
    // The graph's own buffers: inputs are copied in before a replay.
    let (a, b) = (allocator.alloc(BYTES, &stream)?, allocator.alloc(BYTES, &stream)?);
    device.launch(handle, Kernel::Fill { dst: b.address(), bytes: BYTES, value: 2 })?;
    let capture = captures.begin(&stream, CaptureOptions::new())?;
    let c = allocator.alloc(BYTES, &stream)?;
    machine.sum(handle, c.address(), a.address(), (b.address(), 2), BYTES / 4)?;
    let graph = capture.end()?;
    let memory_nodes = device_nodes(&**device, &graph)?;
    report.expect("memory nodes in the graph", 0, memory_nodes);
    let exec = graph.instantiate(InstantiateFlags::default())?;
    let address = c.address();
    for replay in 0..5 {
        device.launch(handle, Kernel::Fill { dst: a.address(), bytes: BYTES, value: replay * 10 })?;
        exec.launch(&stream)?;
        let found = [words(&**device, handle, address, 1)?, words(&**device, handle, address.offset(BYTES - 4), 1)?];
        report.expect(
            &format!("replay {replay}, first and last word of c"),
            [vec![replay * 10 + 2], vec![replay * 10 + 2]],
            found,
        );
    }
    report.expect("c is where it was", address, c.address());
    let pools = &graph.report().pools;
    report.tell("pool of the graph", &format!("{pools:?}"));
    drop((c, exec, graph));
    device.stream_synchronize(handle)?;
    captures.tidy();
    let _trimmed = allocator.empty_cache()?;
    let left = allocator.stats().reserved_bytes.all.current;
    report.expect(
        "reserved after the graph is gone: the two buffers' segments, bytes",
        2 * BYTES,
        left.cast_unsigned(),
    );
    Ok(())
}

fn device_nodes<D: Workbench>(
    device: &D,
    graph: &gpupool::graphs::Graph<D>,
) -> Result<usize, Box<dyn std::error::Error + Send + Sync>> {
    let nodes = device.graph_nodes(graph.handle())?;
    let memory = |kind: &NodeKind| matches!(kind, NodeKind::MemAlloc { .. } | NodeKind::MemFree { .. });
    Ok(nodes.iter().filter(|node| memory(&node.kind)).count())
}
