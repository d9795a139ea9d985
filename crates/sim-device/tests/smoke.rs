//! A first look: fill, add, copy and checksum through a graph.

use gpupool_device::{CaptureMode, Device, GraphDevice, InstantiateFlags, Kernel, StreamKind, Workbench};
use gpupool_sim_device::{SimConfig, SimDevice};

#[test]
fn a_captured_graph_replays_over_fixed_addresses() {
    let d = SimDevice::new(SimConfig::default());
    let s = d.stream_create(StreamKind::NonBlocking).unwrap();
    let x = d.mem_alloc(1 << 20).unwrap();
    d.begin_capture(s, CaptureMode::Global).unwrap();
    d.launch(s, Kernel::Add { dst: x, bytes: 1 << 20, value: 3 }).unwrap();
    let g = d.end_capture(s).unwrap();
    let e = d.instantiate(g, InstantiateFlags::default()).unwrap();
    for _ in 0..5 {
        d.graph_launch(e, s).unwrap();
    }
    let mut word = [0; 4];
    d.read(s, x.offset(4096), &mut word).unwrap();
    assert_eq!(u32::from_le_bytes(word), 15);
    assert!(d.reports().is_empty());
}
