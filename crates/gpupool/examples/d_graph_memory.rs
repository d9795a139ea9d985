//! Experiment D: the driver's own graph memory. The sum captured with c allocated by a memory node; where the memory is at each step.

mod common;

use std::sync::Arc;

use common::{GIB, Gpu, Machine, Outcome, Report, Runs, taken, words};
use gpupool::device::{
    CaptureMode, Device, DriverError, GraphDevice, InstantiateFlags, Kernel, NodeKind, StreamKind, Workbench, code,
};

fn main() -> Outcome {
    common::run("D. The driver's graph memory pool", Runs::OnGpu(on_gpu))
}

fn code_of<T>(result: Result<T, DriverError>) -> u32 {
    result.map_or_else(|error| error.code, |_| 0)
}

fn on_gpu(gpu: Arc<Gpu>, report: &Report) -> Outcome {
    let device = &gpu.device;
    let stream = device.stream_create(StreamKind::NonBlocking)?;
    let (a, b) = (device.mem_alloc(GIB)?, device.mem_alloc(GIB)?);
    for (dst, value) in [(a, 1), (b, 2)] {
        device.launch(stream, Kernel::Fill { dst, bytes: GIB, value })?;
    }
    device.stream_synchronize(stream)?;
    device.trim_graph_memory()?;
    let before = taken(&**device)?;
    let look = |what: &str, expected: u64| -> Outcome {
        let figures = device.graph_memory()?;
        report.expect(&format!("{what}: reserved for graphs, bytes"), expected, figures.reserved);
        report.tell(
            &format!("{what}: taken on the device, used now, used at most, reserved at most"),
            &format!(
                "{} {} {} {}",
                taken(&**device)?.saturating_sub(before),
                figures.used,
                figures.used_high,
                figures.reserved_high
            ),
        );
        Ok(())
    };
    look("before the capture", 0)?;
    device.begin_capture(stream, CaptureMode::Global)?;
    let c = device.alloc_async(stream, GIB)?;
    gpu.sum(stream, c, a, (b, 2), GIB / 4)?;
    look("inside the capture", 0)?;
    report.expect(
        "freeing an outside block inside a graph",
        code::INVALID_VALUE,
        code_of(device.free_async(stream, a)),
    );
    let graph = device.end_capture(stream)?;
    let nodes: Vec<NodeKind> = device.graph_nodes(graph)?.into_iter().map(|node| node.kind).collect();
    report.expect("nodes", vec![NodeKind::MemAlloc { address: c, bytes: GIB }, NodeKind::Kernel], nodes);

    println!(" without auto-free");
    let exec = device.instantiate(graph, InstantiateFlags::default())?;
    look("after instantiation", 0)?;
    // A program that captures in a loop's first turn and does not launch there frees what was never allocated.
    report.expect("freeing c before any launch", code::INVALID_VALUE, code_of(device.free_async(stream, c)));
    device.graph_launch(exec, stream)?;
    device.stream_synchronize(stream)?;
    look("after the first launch", GIB)?;
    report.expect("the sum's last word", vec![3], words(&**device, stream, c.offset(GIB - 4), 1)?);
    report.expect(
        "a second launch while c is not freed",
        code::INVALID_VALUE,
        code_of(device.graph_launch(exec, stream)),
    );
    device.free_async(stream, c)?;
    device.stream_synchronize(stream)?;
    look("after the free", GIB)?;
    device.graph_launch(exec, stream)?;
    device.stream_synchronize(stream)?;
    look("after a launch once c was freed", GIB)?;
    device.free_async(stream, c)?;
    device.exec_destroy(exec)?;
    device.stream_synchronize(stream)?;
    device.trim_graph_memory()?;
    look("after the trim", 0)?;

    println!(" with auto-free on launch");
    let exec =
        device.instantiate(graph, InstantiateFlags { auto_free_on_launch: true, ..InstantiateFlags::default() })?;
    for launch in ["first", "second"] {
        report.expect(&format!("{launch} launch"), 0, code_of(device.graph_launch(exec, stream)));
        device.stream_synchronize(stream)?;
        look(&format!("after the {launch} launch"), GIB)?;
    }
    device.free_async(stream, c)?;
    device.stream_synchronize(stream)?;
    look("after the free", GIB)?;
    device.trim_graph_memory()?;
    look("after the trim", 0)?;
    device.exec_destroy(exec)?;
    device.graph_destroy(graph)?;
    device.mem_free(a)?;
    device.mem_free(b)?;
    Ok(())
}
