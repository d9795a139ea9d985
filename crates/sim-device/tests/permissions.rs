//! The table of what a stream capture permits, row by row and column by column, as measured on an H200.
#![allow(clippy::unwrap_used, clippy::panic)]

use gpupool_device::{
    Address, CaptureMode, CaptureStatus, Device, DriverResult, EventHandle, ExecHandle, GraphDevice, GraphHandle,
    InstantiateFlags, Kernel, MemoryHandle, StreamHandle, StreamKind, Workbench, code, with_relaxed_capture,
};
use gpupool_sim_device::{ForeignCall, SimConfig, SimDevice};

const PAGE: u64 = 2 << 20;

/// A device with one stream capturing and everything at hand that a row may need.
struct Fixture {
    d: SimDevice,
    capturing: StreamHandle,
    other: StreamHandle,
    idle: StreamHandle,
    block: Address,
    reserved: Address,
    mapped: Address,
    handle: MemoryHandle,
    spare: MemoryHandle,
    outside: EventHandle,
    captured: EventHandle,
    graph: GraphHandle,
    exec: ExecHandle,
}

#[derive(Clone, Copy, Debug)]
struct Column {
    name: &'static str,
    mode: CaptureMode,
    other_thread: bool,
    exchange: bool,
}

const COLUMNS: [Column; 7] = {
    use CaptureMode::{Global, Relaxed, ThreadLocal};
    const fn column(name: &'static str, mode: CaptureMode, other_thread: bool, exchange: bool) -> Column {
        Column { name, mode, other_thread, exchange }
    }
    [
        column("global, capturing thread", Global, false, false),
        column("global, another thread", Global, true, false),
        column("thread-local, capturing thread", ThreadLocal, false, false),
        column("thread-local, another thread", ThreadLocal, true, false),
        column("relaxed", Relaxed, false, false),
        column("global, relaxed exchange", Global, false, true),
        column("global, another thread, relaxed exchange", Global, true, true),
    ]
};

/// What a row says for every column.
#[derive(Clone, Copy, Debug)]
enum Rule {
    /// Fails and invalidates where the mode watches; the first three columns.
    Unsafe,
    /// Succeeds.
    Permitted,
    /// Fails with this code in every column; whether the capture is invalidated.
    Fails(u32, bool),
}

fn fixture(mode: CaptureMode) -> Fixture {
    let d = SimDevice::new(SimConfig::default());
    let stream = || d.stream_create(StreamKind::NonBlocking).unwrap();
    let (capturing, other, idle) = (stream(), stream(), stream());
    let block = d.mem_alloc(PAGE).unwrap();
    let reserved = d.address_reserve(4 * PAGE).unwrap();
    let handle = d.handle_create(PAGE).unwrap();
    let spare = d.handle_create(PAGE).unwrap();
    d.map(reserved, PAGE, handle).unwrap();
    let (outside, captured) = (d.event_create().unwrap(), d.event_create().unwrap());
    d.event_record(outside, other).unwrap();
    d.begin_capture(other, CaptureMode::Relaxed).unwrap();
    d.launch(other, Kernel::Fill { dst: block, bytes: 64, value: 1 }).unwrap();
    let graph = d.end_capture(other).unwrap();
    let exec = d.instantiate(graph, InstantiateFlags::default()).unwrap();
    d.begin_capture(capturing, mode).unwrap();
    d.launch(capturing, Kernel::Fill { dst: block, bytes: 64, value: 2 }).unwrap();
    d.event_record(captured, capturing).unwrap();
    Fixture {
        d,
        capturing,
        other,
        idle,
        block,
        reserved,
        mapped: reserved,
        handle,
        spare,
        outside,
        captured,
        graph,
        exec,
    }
}

type Row = (&'static str, Rule, fn(&Fixture) -> DriverResult<()>);

const ROWS: &[Row] = &[
    ("cuMemAlloc", Rule::Unsafe, |f| f.d.mem_alloc(PAGE).map(drop)),
    ("cuMemFree", Rule::Unsafe, |f| f.d.mem_free(f.block)),
    ("cuMemAddressReserve", Rule::Permitted, |f| f.d.address_reserve(PAGE).map(drop)),
    ("cuMemCreate", Rule::Permitted, |f| f.d.handle_create(PAGE).map(drop)),
    ("cuMemMap", Rule::Permitted, |f| f.d.map(f.reserved.offset(PAGE), PAGE, f.spare)),
    ("cuMemSetAccess", Rule::Permitted, |f| f.d.set_access(f.mapped, PAGE)),
    ("cuMemUnmap", Rule::Permitted, |f| f.d.unmap(f.mapped, PAGE)),
    ("cuEventQuery of another stream's event", Rule::Unsafe, |f| f.d.event_query(f.outside).map(drop)),
    ("cuStreamSynchronize of another stream", Rule::Unsafe, |f| f.d.stream_synchronize(f.other)),
    ("cuMemAllocAsync on another stream", Rule::Unsafe, |f| f.d.foreign_call(ForeignCall::MemAllocAsync, f.other)),
    ("cuMemPoolTrimTo", Rule::Unsafe, |f| f.d.foreign_call(ForeignCall::MemPoolTrimTo, f.other)),
    ("cuMemHostAlloc", Rule::Unsafe, |f| f.d.foreign_call(ForeignCall::MemHostAlloc, f.other)),
    ("cuMemRelease", Rule::Permitted, |f| f.d.handle_release(f.handle)),
    ("cuMemAddressFree", Rule::Permitted, |f| {
        f.d.unmap(f.mapped, PAGE)?;
        f.d.address_free(f.reserved, 4 * PAGE)
    }),
    ("cuEventSynchronize of a completed event", Rule::Unsafe, |f| f.d.event_synchronize(f.outside)),
    ("cuStreamQuery of another stream", Rule::Unsafe, |f| f.d.stream_query(f.other).map(drop)),
    ("cuGraphInstantiate", Rule::Unsafe, |f| f.d.instantiate(f.graph, InstantiateFlags::default()).map(drop)),
    ("cuGraphExecDestroy", Rule::Unsafe, |f| f.d.exec_destroy(f.exec)),
    ("cuGraphLaunch on another stream", Rule::Permitted, |f| f.d.graph_launch(f.exec, f.other)),
    ("cuGraphUpload on another stream", Rule::Permitted, |f| f.d.graph_upload(f.exec, f.other)),
    ("cuDeviceGraphMemTrim", Rule::Permitted, |f| f.d.foreign_call(ForeignCall::DeviceGraphMemTrim, f.other)),
    ("cuMemFreeAsync of another stream's block there", Rule::Unsafe, |f| {
        f.d.foreign_call(ForeignCall::MemFreeAsync, f.other)
    }),
    ("cuMemFreeHost", Rule::Unsafe, |f| f.d.foreign_call(ForeignCall::MemFreeHost, f.other)),
    ("cuEventDestroy", Rule::Permitted, |f| f.d.event_destroy(f.outside)),
    ("cuEventDestroy of a captured event", Rule::Permitted, |f| f.d.event_destroy(f.captured)),
    ("cuStreamCreate, non-blocking", Rule::Permitted, |f| f.d.stream_create(StreamKind::NonBlocking).map(drop)),
    ("cuStreamCreate, blocking", Rule::Permitted, |f| f.d.stream_create(StreamKind::Blocking).map(drop)),
    ("cuStreamDestroy of another stream", Rule::Permitted, |f| f.d.stream_destroy(f.other)),
    ("memset on another stream", Rule::Permitted, |f| {
        f.d.launch(f.other, Kernel::Fill { dst: f.block, bytes: 4, value: 0 })
    }),
    ("synchronous memset", Rule::Permitted, |f| f.d.foreign_call(ForeignCall::MemsetSynchronous, f.other)),
    ("memset on the legacy stream", Rule::Permitted, |f| {
        f.d.launch(StreamHandle::LEGACY, Kernel::Fill { dst: f.block, bytes: 4, value: 0 })
    }),
    ("beginning a capture on another stream", Rule::Permitted, |f| f.d.begin_capture(f.idle, CaptureMode::Global)),
    ("beginning one on the capturing stream", Rule::Fails(code::ILLEGAL_STATE, false), |f| {
        f.d.begin_capture(f.capturing, CaptureMode::Global)
    }),
    ("cuMemFreeAsync on the capturing stream", Rule::Fails(code::INVALID_VALUE, false), |f| {
        f.d.foreign_call(ForeignCall::MemFreeAsync, f.capturing)
    }),
    ("the capturing stream waits on an outside event", Rule::Fails(code::CAPTURE_ISOLATION, true), |f| {
        f.d.stream_wait_event(f.capturing, f.outside)
    }),
    ("another stream waits on a captured event", Rule::Permitted, |f| {
        f.d.stream_wait_event(f.other, f.captured)?;
        assert_eq!(f.d.capture_status(f.other)?.id(), f.d.capture_status(f.capturing)?.id());
        Ok(())
    }),
    ("cuEventRecord on another stream", Rule::Permitted, |f| f.d.event_record(f.outside, f.other)),
    ("cuEventCreate", Rule::Permitted, |f| f.d.event_create().map(drop)),
    ("cuMemGetInfo", Rule::Permitted, |f| f.d.mem_info().map(drop)),
    ("cuMemAllocAsync on the capturing stream", Rule::Permitted, |f| {
        f.d.foreign_call(ForeignCall::MemAllocAsync, f.capturing)
    }),
    ("cuEventQuery of a captured event", Rule::Fails(code::CAPTURED_EVENT, true), |f| {
        f.d.event_query(f.captured).map(drop)
    }),
    ("cuEventSynchronize of a captured event", Rule::Fails(code::CAPTURED_EVENT, true), |f| {
        f.d.event_synchronize(f.captured)
    }),
    ("cuStreamQuery of the capturing stream", Rule::Fails(code::CAPTURE_UNSUPPORTED, true), |f| {
        f.d.stream_query(f.capturing).map(drop)
    }),
    ("cuStreamSynchronize of the capturing stream", Rule::Fails(code::CAPTURE_UNSUPPORTED, true), |f| {
        f.d.stream_synchronize(f.capturing)
    }),
    ("cuCtxSynchronize", Rule::Fails(code::CAPTURE_UNSUPPORTED, true), |f| f.d.device_synchronize()),
    ("cuStreamGetCaptureInfo", Rule::Permitted, |f| f.d.capture_frontier(f.capturing).map(drop)),
    ("cuGraphDestroy of another graph", Rule::Permitted, |f| f.d.graph_destroy(f.graph)),
    ("cuStreamDestroy of the capturing stream", Rule::Fails(code::UNMEASURED, false), |f| {
        f.d.stream_destroy(f.capturing)
    }),
    ("cuGraphLaunch on the capturing stream", Rule::Fails(code::UNMEASURED, false), |f| {
        f.d.graph_launch(f.exec, f.capturing)
    }),
];

/// Runs `call` on this or another thread, with or without the relaxed exchange.
fn perform(f: &Fixture, column: Column, call: fn(&Fixture) -> DriverResult<()>) -> DriverResult<()> {
    let run = || if column.exchange { with_relaxed_capture(&f.d, |_| call(f)) } else { call(f) };
    if column.other_thread { std::thread::scope(|s| s.spawn(run).join().unwrap()) } else { run() }
}

#[test]
fn every_row_of_the_measured_table_holds_in_every_column() {
    for &(name, rule, call) in ROWS {
        for (index, column) in COLUMNS.into_iter().enumerate() {
            let f = fixture(column.mode);
            let result = perform(&f, column, call);
            let (expected, invalidated) = match rule {
                Rule::Unsafe if index < 3 => (Err(code::CAPTURE_UNSUPPORTED), true),
                Rule::Unsafe | Rule::Permitted => (Ok(()), false),
                Rule::Fails(code, invalidates) => (Err(code), invalidates),
            };
            let at = format!("{name}; {}", column.name);
            assert_eq!(result.map_err(|e| e.code), expected, "{at}");
            let status = f.d.capture_status(f.capturing).unwrap();
            assert_eq!(matches!(status, CaptureStatus::Invalidated(_)), invalidated, "{at}");
            assert!(status.is_capturing(), "{at}");
            let end = f.d.end_capture(f.capturing).map(drop).map_err(|e| e.code);
            assert_eq!(end, if invalidated { Err(code::CAPTURE_INVALIDATED) } else { Ok(()) }, "{at}");
            assert_eq!(f.d.capture_status(f.capturing).unwrap(), CaptureStatus::None, "{at}");
        }
    }
}

#[test]
fn the_exchange_is_the_threads_own_and_goes_back() {
    let f = fixture(CaptureMode::Global);
    assert_eq!(f.d.exchange_capture_mode(CaptureMode::Relaxed).unwrap(), CaptureMode::Global);
    f.d.mem_alloc(PAGE).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| assert_eq!(f.d.exchange_capture_mode(CaptureMode::ThreadLocal).unwrap(), CaptureMode::Global));
    });
    assert_eq!(f.d.exchange_capture_mode(CaptureMode::Global).unwrap(), CaptureMode::Relaxed);
    assert_eq!(f.d.mem_alloc(PAGE).unwrap_err().code, code::CAPTURE_UNSUPPORTED);
    let other = SimDevice::new(SimConfig::default());
    assert_eq!(other.exchange_capture_mode(CaptureMode::Global).unwrap(), CaptureMode::Global, "another world");
}

#[test]
fn a_thread_in_thread_local_mode_is_not_stopped_by_the_global_capture_of_another() {
    let f = fixture(CaptureMode::Global);
    std::thread::scope(|s| {
        s.spawn(|| {
            f.d.exchange_capture_mode(CaptureMode::ThreadLocal).unwrap();
            f.d.mem_alloc(PAGE).unwrap();
        });
    });
    f.d.end_capture(f.capturing).unwrap();
}
