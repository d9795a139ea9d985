//! Faults on demand and counts.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;

use gpupool_device::{Call, CaptureMode, Device, Kernel, StreamKind, Workbench, code};
use gpupool_sim_device::{SimConfig, SimDevice};

#[test]
fn any_call_can_be_made_to_fail_and_has_then_done_nothing() {
    let d = SimDevice::new(SimConfig::default());
    d.fail_nth(Call::MemCreate, 2, code::OUT_OF_MEMORY);
    d.fail_nth(Call::MemAlloc, 1, code::UNKNOWN);
    let h = d.handle_create(2 << 20).unwrap();
    let before = (d.memory_in_use(), d.driver_ns());
    assert_eq!(d.handle_create(2 << 20).unwrap_err().code, code::OUT_OF_MEMORY);
    let failed = d.mem_alloc(64).unwrap_err();
    assert_eq!((failed.call, failed.code), (Call::MemAlloc, code::UNKNOWN));
    assert_eq!((d.memory_in_use(), d.driver_ns()), before);
    d.fail_all(Call::MemRelease, code::DEINITIALIZED);
    assert_eq!([0; 2].map(|_| d.handle_release(h).unwrap_err().code), [code::DEINITIALIZED; 2]);
    d.clear_faults();
    d.handle_release(h).unwrap();
    d.fail_all(Call::StreamGetCaptureInfo, code::INVALID_CONTEXT);
    d.fail_nth(Call::ExchangeCaptureMode, 1, code::INVALID_CONTEXT);
    let s = d.stream_create(StreamKind::NonBlocking).unwrap();
    assert_eq!(d.capture_status(s).unwrap_err().code, code::INVALID_CONTEXT, "calls that take no lock as well");
    assert_eq!(d.exchange_capture_mode(CaptureMode::Relaxed).unwrap_err().code, code::INVALID_CONTEXT);
    assert_eq!(d.exchange_capture_mode(CaptureMode::Relaxed).unwrap(), CaptureMode::Global);
}

#[test]
fn every_call_is_counted_by_kind() {
    let d = SimDevice::new(SimConfig::default());
    let a = d.mem_alloc(64).unwrap();
    let _ = d.mem_free(a.offset(4));
    d.mem_free(a).unwrap();
    let s = d.stream_create(StreamKind::NonBlocking).unwrap();
    d.capture_status(s).unwrap();
    assert_eq!(
        d.call_counts(),
        BTreeMap::from([
            (Call::MemAlloc, 1),
            (Call::MemFree, 2),
            (Call::StreamCreate, 1),
            (Call::StreamGetCaptureInfo, 1)
        ])
    );
    d.reset_counters();
    assert_eq!((d.call_counts().len(), d.driver_ns(), d.peak_memory_in_use()), (0, 0, 0));
    assert!(d.now() > 0, "the clock goes on");
}

#[test]
fn a_kernels_fault_sticks() {
    let d = SimDevice::new(SimConfig::default());
    let s = d.stream_create(StreamKind::NonBlocking).unwrap();
    let x = d.mem_alloc(64).unwrap();
    d.launch(s, Kernel::Fill { dst: x, bytes: 68, value: 1 }).unwrap();
    d.launch(s, Kernel::Fill { dst: x, bytes: 4, value: 1 }).unwrap();
    assert_eq!(d.stream_synchronize(s).unwrap_err().code, code::ILLEGAL_ADDRESS);
    assert_eq!(d.mem_alloc(64).unwrap_err().code, code::ILLEGAL_ADDRESS);
    assert_eq!(d.mem_info().unwrap_err().code, code::ILLEGAL_ADDRESS);
    assert_eq!(d.capture_status(s).unwrap_err().code, code::ILLEGAL_ADDRESS);
    d.clear_error();
    assert_eq!(d.read_bytes(x, 4).unwrap(), [0; 4], "nothing ran after the fault");
    d.mem_alloc(64).unwrap();
    d.capture_status(s).unwrap();
}
