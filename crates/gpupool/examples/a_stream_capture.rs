//! Experiment A: a stream capture makes a graph. Two streams, a fork and a join, three kernels; then the graph is launched on a third stream.

mod common;

use std::sync::Arc;

use common::{Gpu, Machine, Outcome, Report, Runs, words};
use gpupool::device::{
    CaptureMode, Device, GraphDevice, InstantiateFlags, Kernel, NodeKind, StreamHandle, StreamKind, Workbench,
};
use gpupool_sim_device::SimDevice;

const COUNT: u64 = 1024;

fn main() -> Outcome {
    common::run("A. Stream capture makes a graph", Runs::Anywhere(on_sim, on_gpu))
}

fn on_sim(device: Arc<SimDevice>, report: &Report) -> Outcome {
    let high = device.stream_create(StreamKind::NonBlocking)?;
    let graph = experiment(&device, high, 4, report)?;
    for edge in device.graph_edges(graph)? {
        report.tell("edge", &format!("{} -> {}", edge.from.0, edge.to.0));
    }
    Ok(())
}

fn on_gpu(gpu: Arc<Gpu>, report: &Report) -> Outcome {
    let (_, greatest) = gpu.device.stream_priorities()?;
    let high = gpu.device.stream_create_with_priority(StreamKind::NonBlocking, greatest)?;
    let graph = experiment(&gpu, high, 8, report)?;
    let path = std::env::temp_dir().join(format!("gpupool-a-{}.dot", std::process::id()));
    gpu.device.graph_dot(graph, &path)?;
    let dot = std::fs::read_to_string(&path)?;
    std::fs::remove_file(&path)?;
    report.expect("the driver's DOT names the kernel three times", true, dot.matches("add_often").count() >= 3);
    println!("{dot}");
    kinds(&gpu, report)
}

/// The experiment, on numbers of so many bytes. The graph it made.
fn experiment<M: Machine>(
    machine: &M,
    high: StreamHandle,
    width: u64,
    report: &Report,
) -> Result<gpupool::device::GraphHandle, Box<dyn std::error::Error + Send + Sync>> {
    let device = machine.device();
    let (first, third) =
        (device.stream_create(StreamKind::NonBlocking)?, device.stream_create(StreamKind::NonBlocking)?);
    let bytes = COUNT * width;
    let arrays = [device.mem_alloc(bytes)?, device.mem_alloc(bytes)?];
    for dst in arrays {
        device.launch(first, Kernel::Fill { dst, bytes, value: 0 })?;
    }
    device.stream_synchronize(first)?;
    let (fork, join) = (device.event_create()?, device.event_create()?);
    device.begin_capture(first, CaptureMode::Global)?;
    machine.add_thousand(first, arrays[0], 1, COUNT)?;
    device.event_record(fork, first)?;
    device.stream_wait_event(high, fork)?;
    machine.add_thousand(high, arrays[0], 2, COUNT)?;
    machine.add_thousand(first, arrays[1], -1, COUNT)?;
    device.event_record(join, high)?;
    device.stream_wait_event(first, join)?;
    let graph = device.end_capture(first)?;
    let kinds: Vec<NodeKind> = device.graph_nodes(graph)?.into_iter().map(|node| node.kind).collect();
    report.expect("nodes", vec![NodeKind::Kernel; 3], kinds);
    report.expect("edges", 2, device.graph_edges(graph)?.len());
    let exec = device.instantiate(graph, InstantiateFlags::default())?;
    // After the capture the graph owes nothing to its streams.
    device.stream_destroy(high)?;
    device.graph_launch(exec, third)?;
    for (name, array, expected) in [("array 1", arrays[0], 3000_i32), ("array 2", arrays[1], -1000)] {
        let found = words(&**device, third, array, (bytes / 4) as usize)?;
        let step = (width / 4) as usize;
        let all = found.iter().step_by(step).all(|&word| word.cast_signed() == expected);
        report.expect(&format!("{name}, all {COUNT} elements {expected}"), true, all);
    }
    device.exec_destroy(exec)?;
    Ok(graph)
}

/// Node kinds that a capture can make, recognised.
fn kinds(gpu: &Gpu, report: &Report) -> Outcome {
    let device = &gpu.device;
    let stream = device.stream_create(StreamKind::NonBlocking)?;
    let x = device.mem_alloc(4096)?;
    device.begin_capture(stream, CaptureMode::Global)?;
    device.launch(stream, Kernel::Fill { dst: x, bytes: 64, value: 1 })?;
    device.copy_async(stream, x.offset(1024), x, 64)?;
    device.memset_async(stream, x, 0, 16)?;
    device.launch_repeatable_host_function(stream, Arc::new(|| {}))?;
    device.record_empty_node(stream)?;
    let block = device.alloc_async(stream, 1 << 20)?;
    device.free_async(stream, block)?;
    let graph = device.end_capture(stream)?;
    let found: Vec<NodeKind> = device.graph_nodes(graph)?.into_iter().map(|node| node.kind).collect();
    let expected = vec![
        NodeKind::Kernel,
        NodeKind::Memcpy,
        NodeKind::Memset,
        NodeKind::Host,
        NodeKind::Empty,
        NodeKind::MemAlloc { address: block, bytes: 1 << 20 },
        NodeKind::MemFree { address: block },
    ];
    report.expect("node kinds in order", expected, found);
    device.graph_destroy(graph)?;
    Ok(())
}
