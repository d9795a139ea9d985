//! The thinnest path through captures: begin, allocate, free, end, launch, drop, on the simulated device with its race detector on.

use std::sync::Arc;

use gpupool_allocator::{Allocator, Config, Policy};
use gpupool_device::{InstantiateFlags, Kernel, StreamKind, Workbench};
use gpupool_graph_capture::{CaptureOptions, Captures};
use gpupool_sim_device::{SimConfig, SimDevice};

#[test]
fn a_captured_graph_runs_twice_and_leaves_nothing() {
    let device = Arc::new(SimDevice::new(SimConfig::default()));
    let allocator =
        Allocator::with_registry(Arc::clone(&device), Config::new(Policy::Segments), Arc::default()).unwrap();
    let captures = Captures::new(&allocator);
    let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
    let input = allocator.alloc(4096, &stream).unwrap();
    device.launch(stream.handle(), Kernel::Fill { dst: input.address(), bytes: 4096, value: 1 }).unwrap();

    let capture = captures.begin(&stream, CaptureOptions::new()).unwrap();
    let pool = capture.pool();
    let temp = allocator.alloc(4096, &stream).unwrap();
    let temp_at = temp.address();
    device.launch(stream.handle(), Kernel::Copy { dst: temp_at, src: input.address(), bytes: 4096 }).unwrap();
    let out = allocator.alloc(4096, &stream).unwrap();
    device.launch(stream.handle(), Kernel::Copy { dst: out.address(), src: temp_at, bytes: 4096 }).unwrap();
    device.launch(stream.handle(), Kernel::Add { dst: out.address(), bytes: 4096, value: 41 }).unwrap();
    drop(temp);
    let again = allocator.alloc(4096, &stream).unwrap();
    assert_eq!(again.address(), temp_at, "a block freed on the capture's stream is used again at once");
    drop(again);
    let graph = capture.end().unwrap();
    allocator.validate().unwrap();
    assert_eq!(graph.report().node_count(), 3);
    assert_eq!(graph.report().memory_nodes, 0);
    assert_eq!(graph.report().pools[0].outputs.len(), 1);
    assert_eq!(graph.pools(), [pool]);

    // The temporary's bytes are free, and still nobody outside gets them.
    let eager = allocator.alloc(4096, &stream).unwrap();
    assert_ne!(eager.address(), temp_at);

    let exec = graph.instantiate(InstantiateFlags::default()).unwrap();
    for _ in 0..2 {
        let launched = exec.launch(&stream).unwrap();
        assert!(launched.overwrites.is_empty() && !launched.waits);
    }
    device.stream_synchronize(stream.handle()).unwrap();
    assert_eq!(device.read_bytes(out.address(), 4).unwrap(), 42u32.to_le_bytes());
    exec.launch(&stream).unwrap();
    drop(graph);
    drop(exec);
    assert_eq!(allocator.empty_cache().unwrap().released_bytes, 0, "the output and the input are still held");
    drop((out, eager, input));
    allocator.empty_cache().unwrap();
    allocator.validate().unwrap();
    assert_eq!(device.reports(), []);
    assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
    assert_eq!(device.memory_in_use(), 0);
}
