//! The table of what a stream capture permits, row by row and column by column, as measured on an H200.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use gpupool_device::{
    Address, CaptureMode, CaptureStatus, Device, DriverPoolHandle, DriverResult, EventHandle, ExecHandle, GraphDevice,
    GraphHandle, HostMemory, InstantiateFlags, Kernel, MemoryHandle, StreamHandle, StreamKind, Workbench, code,
    with_relaxed_capture,
};
use gpupool_sim_device::ForeignCall;

use super::{Check, Needs, PAGE, Subject, check, stream};

/// A device with one stream capturing and everything at hand that a row may need.
struct Fixture<'a, S: Subject> {
    s: &'a S,
    d: &'a S::Device,
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
    pinned: HostMemory,
    pool: DriverPoolHandle,
    /// A block of it.
    pooled: Address,
    /// A pool without blocks.
    empty: DriverPoolHandle,
}

/// A pool keeps a range of addresses as large as the device as long as it has a block.
impl<S: Subject> Drop for Fixture<'_, S> {
    fn drop(&mut self) {
        let _freed_before = self.d.mem_free(self.pooled);
        let _destroyed_before = self.d.driver_pool_destroy(self.empty);
        let _destroyed = self.d.driver_pool_destroy(self.pool);
    }
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

fn fixture<S: Subject>(s: &S, mode: CaptureMode) -> Fixture<'_, S> {
    let d = s.device();
    s.prepare_foreign();
    let (capturing, other, idle) = (stream(d), stream(d), stream(d));
    let block = d.mem_alloc(PAGE).unwrap();
    let reserved = d.address_reserve(4 * PAGE).unwrap();
    let handle = d.handle_create(PAGE).unwrap();
    let spare = d.handle_create(PAGE).unwrap();
    d.map(reserved, PAGE, handle).unwrap();
    let (outside, captured) = (d.event_create().unwrap(), d.event_create().unwrap());
    d.event_record(outside, other).unwrap();
    d.launch(other, Kernel::Fill { dst: block, bytes: 64, value: 0 }).unwrap();
    d.begin_capture(other, CaptureMode::Relaxed).unwrap();
    d.launch(other, Kernel::Fill { dst: block, bytes: 64, value: 1 }).unwrap();
    let graph = d.end_capture(other).unwrap();
    let exec = d.instantiate(graph, InstantiateFlags::default()).unwrap();
    let pinned = d.host_alloc(4096).unwrap();
    d.stream_synchronize(other).unwrap();
    let pool = d.driver_pool_create().unwrap();
    let pooled = d.mem_alloc_async(pool, 4096, other).unwrap();
    let empty = d.driver_pool_create().unwrap();
    d.begin_capture(capturing, mode).unwrap();
    d.launch(capturing, Kernel::Fill { dst: block, bytes: 64, value: 2 }).unwrap();
    d.event_record(captured, capturing).unwrap();
    let mapped = reserved;
    Fixture {
        s,
        pinned,
        d,
        capturing,
        other,
        idle,
        block,
        reserved,
        mapped,
        handle,
        spare,
        outside,
        captured,
        graph,
        exec,
        pool,
        pooled,
        empty,
    }
}

type Row<S> = (&'static str, Rule, fn(&Fixture<'_, S>) -> DriverResult<()>);

fn rows<S: Subject>() -> Vec<Row<S>> {
    vec![
        ("cuMemAlloc", Rule::Unsafe, |f| f.d.mem_alloc(PAGE).map(drop)),
        ("cuMemFree", Rule::Unsafe, |f| f.d.mem_free(f.block)),
        ("cuMemAddressReserve", Rule::Permitted, |f| f.d.address_reserve(PAGE).map(drop)),
        ("cuMemCreate", Rule::Permitted, |f| f.d.handle_create(PAGE).map(drop)),
        ("cuMemMap", Rule::Permitted, |f| f.d.map(f.reserved.offset(PAGE), PAGE, f.spare)),
        ("cuMemSetAccess", Rule::Permitted, |f| f.d.set_access(f.mapped, PAGE)),
        ("cuMemUnmap", Rule::Permitted, |f| f.d.unmap(f.mapped, PAGE)),
        ("cuEventQuery of another stream's event", Rule::Unsafe, |f| f.d.event_query(f.outside).map(drop)),
        ("cuStreamSynchronize of another stream", Rule::Unsafe, |f| f.d.stream_synchronize(f.other)),
        ("cuMemAllocAsync on another stream", Rule::Unsafe, |f| f.s.foreign(ForeignCall::MemAllocAsync, f.other)),
        ("cuMemPoolCreate", Rule::Unsafe, |f| f.d.driver_pool_create().map(drop)),
        ("cuMemPoolDestroy", Rule::Unsafe, |f| f.d.driver_pool_destroy(f.empty)),
        ("cuMemPoolGetAttribute", Rule::Unsafe, |f| f.d.driver_pool_figures(f.pool).map(drop)),
        ("cuMemPoolTrimTo of a pool of ours", Rule::Unsafe, |f| f.d.driver_pool_trim(f.pool, 0)),
        ("cuMemAllocFromPoolAsync on another stream", Rule::Unsafe, |f| {
            f.d.mem_alloc_async(f.pool, 4096, f.other).map(drop)
        }),
        ("cuMemAllocFromPoolAsync on the capturing stream", Rule::Permitted, |f| {
            f.d.mem_alloc_async(f.pool, 4096, f.capturing).map(drop)
        }),
        ("cuMemFreeAsync of a pool's block on another stream", Rule::Unsafe, |f| f.d.mem_free_async(f.pooled, f.other)),
        ("cuMemFreeAsync of a pool's block on the capturing stream", Rule::Fails(code::INVALID_VALUE, false), |f| {
            f.d.mem_free_async(f.pooled, f.capturing)
        }),
        ("cuMemFree of a pool's block", Rule::Unsafe, |f| f.d.mem_free(f.pooled)),
        ("cuMemPoolTrimTo", Rule::Unsafe, |f| f.s.foreign(ForeignCall::MemPoolTrimTo, f.other)),
        ("cuMemHostAlloc", Rule::Unsafe, |f| f.s.foreign(ForeignCall::MemHostAlloc, f.other)),
        ("pinning memory of the host", Rule::Unsafe, |f| f.d.host_alloc(4096).map(drop)),
        ("giving pinned memory back", Rule::Unsafe, |f| f.d.host_free(f.pinned)),
        ("a copy to pinned memory, waited for", Rule::Unsafe, |f| f.d.copy_to_host(f.pinned, 0, f.block, 64)),
        ("a copy from pinned memory, waited for", Rule::Unsafe, |f| f.d.copy_from_host(f.block, f.pinned, 0, 64)),
        ("cuMemRelease", Rule::Permitted, |f| f.d.handle_release(f.handle)),
        ("cuMemAddressFree", Rule::Permitted, |f| {
            f.d.unmap(f.mapped, PAGE)?;
            f.d.address_free(f.reserved, 4 * PAGE)
        }),
        ("cuEventSynchronize of a completed event", Rule::Unsafe, |f| f.d.event_synchronize(f.outside)),
        ("cuStreamQuery of another stream", Rule::Unsafe, |f| f.s.stream_query(f.other).map(drop)),
        ("cuGraphInstantiate", Rule::Unsafe, |f| f.d.instantiate(f.graph, InstantiateFlags::default()).map(drop)),
        ("cuGraphExecDestroy", Rule::Unsafe, |f| f.d.exec_destroy(f.exec)),
        ("cuGraphLaunch on another stream", Rule::Permitted, |f| f.d.graph_launch(f.exec, f.other)),
        ("cuGraphUpload on another stream", Rule::Permitted, |f| f.d.graph_upload(f.exec, f.other)),
        ("cuDeviceGraphMemTrim", Rule::Permitted, |f| f.s.foreign(ForeignCall::DeviceGraphMemTrim, f.other)),
        ("cuMemFreeAsync of another stream's block there", Rule::Unsafe, |f| {
            f.s.foreign(ForeignCall::MemFreeAsync, f.other)
        }),
        ("cuMemFreeHost", Rule::Unsafe, |f| f.s.foreign(ForeignCall::MemFreeHost, f.other)),
        ("cuEventDestroy", Rule::Permitted, |f| f.d.event_destroy(f.outside)),
        ("cuEventDestroy of a captured event", Rule::Permitted, |f| f.d.event_destroy(f.captured)),
        ("cuStreamCreate, non-blocking", Rule::Permitted, |f| f.d.stream_create(StreamKind::NonBlocking).map(drop)),
        ("cuStreamCreate, blocking", Rule::Permitted, |f| f.d.stream_create(StreamKind::Blocking).map(drop)),
        ("cuStreamDestroy of another stream", Rule::Permitted, |f| f.d.stream_destroy(f.other)),
        ("memset on another stream", Rule::Permitted, |f| {
            f.d.launch(f.other, Kernel::Fill { dst: f.block, bytes: 4, value: 0 })
        }),
        ("synchronous memset", Rule::Permitted, |f| f.s.foreign(ForeignCall::MemsetSynchronous, f.other)),
        ("memset on the legacy stream", Rule::Permitted, |f| {
            f.d.launch(StreamHandle::LEGACY, Kernel::Fill { dst: f.block, bytes: 4, value: 0 })
        }),
        ("beginning a capture on another stream", Rule::Permitted, |f| f.d.begin_capture(f.idle, CaptureMode::Relaxed)),
        ("beginning one on the capturing stream", Rule::Fails(code::ILLEGAL_STATE, false), |f| {
            f.d.begin_capture(f.capturing, CaptureMode::Global)
        }),
        ("cuMemFreeAsync on the capturing stream", Rule::Fails(code::INVALID_VALUE, false), |f| {
            f.s.foreign(ForeignCall::MemFreeAsync, f.capturing)
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
            f.s.foreign(ForeignCall::MemAllocAsync, f.capturing)
        }),
        ("cuEventQuery of a captured event", Rule::Fails(code::CAPTURED_EVENT, true), |f| {
            f.d.event_query(f.captured).map(drop)
        }),
        ("cuEventSynchronize of a captured event", Rule::Fails(code::CAPTURED_EVENT, true), |f| {
            f.d.event_synchronize(f.captured)
        }),
        ("cuStreamQuery of the capturing stream", Rule::Fails(code::CAPTURE_UNSUPPORTED, true), |f| {
            f.s.stream_query(f.capturing).map(drop)
        }),
        ("cuStreamSynchronize of the capturing stream", Rule::Fails(code::CAPTURE_UNSUPPORTED, true), |f| {
            f.d.stream_synchronize(f.capturing)
        }),
        ("cuCtxSynchronize", Rule::Fails(code::CAPTURE_UNSUPPORTED, true), |f| f.d.device_synchronize()),
        ("cuStreamGetCaptureInfo", Rule::Permitted, |f| f.d.capture_frontier(f.capturing).map(drop)),
        ("cuGraphDestroy of another graph", Rule::Permitted, |f| f.d.graph_destroy(f.graph)),
        ("cuGraphLaunch on the capturing stream", Rule::Fails(code::CAPTURE_UNSUPPORTED, true), |f| {
            f.d.graph_launch(f.exec, f.capturing)
        }),
        ("cuGraphUpload on the capturing stream", Rule::Fails(code::CAPTURE_UNSUPPORTED, true), |f| {
            f.d.graph_upload(f.exec, f.capturing)
        }),
        ("the legacy stream waits on a captured event", Rule::Fails(code::CAPTURE_IMPLICIT, true), |f| {
            f.d.stream_wait_event(StreamHandle::LEGACY, f.captured)
        }),
        ("cuStreamDestroy of a stream that joined", Rule::Permitted, |f| {
            f.d.stream_wait_event(f.other, f.captured)?;
            f.d.stream_destroy(f.other)
        }),
    ]
}

/// Runs `call` on this or another thread, with or without the relaxed exchange.
fn perform<S: Subject>(
    f: &Fixture<'_, S>,
    column: Column,
    call: fn(&Fixture<'_, S>) -> DriverResult<()>,
) -> DriverResult<()> {
    let run = || if column.exchange { with_relaxed_capture(f.d, |_| call(f)) } else { call(f) };
    if column.other_thread { std::thread::scope(|s| s.spawn(run).join().unwrap()) } else { run() }
}

/// What a call came to: its code, whether the capture was invalidated, and the code of its end.
type Outcome = (u32, bool, u32);

pub(super) fn checks<S: Subject>() -> Vec<Check<S>> {
    vec![
        Check {
            name: "every row of the measured table holds in every column",
            run: the_table,
            needs: Needs::ManyCaptures,
        },
        check("the exchange is the thread's own and goes back", exchange),
        check("a thread in thread-local mode is not stopped by the global capture of another", thread_local_passes),
        check("work on the legacy stream while a blocking stream captures", implicit),
        check("destroying the capturing stream ends its capture", destroyed),
    ]
}

fn the_table<S: Subject>(s: &S) {
    let mut wrong = Vec::new();
    // A driver that crashes or never returns does not say where. GPUPOOL_CELLS=TEXT takes the rows with this text in their names, =!TEXT|TEXT
    // those with none of these, and each cell is said.
    let cells = std::env::var("GPUPOOL_CELLS").ok();
    let asked = |name: &str| match cells.as_deref().map(|text| text.strip_prefix('!').ok_or(text)) {
        None => true,
        Some(Ok(not)) => !not.split('|').any(|text| name.contains(text)),
        Some(Err(text)) => name.contains(text),
    };
    for (name, rule, call) in rows::<S>().into_iter().filter(|(name, ..)| asked(name)) {
        for (index, column) in COLUMNS.into_iter().enumerate() {
            let at = format!("{name}; {}", column.name);
            if cells.is_some() {
                eprintln!("{at}");
            }
            let f = fixture(s, column.mode);
            let result = perform(&f, column, call);
            let status = f.d.capture_status(f.capturing);
            let invalidated = matches!(status, Ok(CaptureStatus::Invalidated));
            let end = f.d.end_capture(f.capturing).map_or_else(|e| e.code, |_| 0);
            let found: Outcome = (result.map_or_else(|e| e.code, |()| 0), invalidated, end);
            let (code, invalidates) = match rule {
                Rule::Unsafe if index < 3 => (code::CAPTURE_UNSUPPORTED, true),
                Rule::Unsafe | Rule::Permitted => (0, false),
                Rule::Fails(code, invalidates) => (code, invalidates),
            };
            let ended = if invalidates { code::CAPTURE_INVALIDATED } else { 0 };
            if f.d.capture_status(f.idle).is_ok_and(|status| status.is_capturing()) {
                f.d.end_capture(f.idle).unwrap();
            }
            if found != (code, invalidates, ended) {
                wrong.push(format!("{at}: expected {:?}, found {found:?}", (code, invalidates, ended)));
            }
        }
    }
    assert!(wrong.is_empty(), "{} cells differ:\n{}", wrong.len(), wrong.join("\n"));
}

fn exchange<S: Subject>(s: &S) {
    let f = fixture(s, CaptureMode::Global);
    assert_eq!(f.d.exchange_capture_mode(CaptureMode::Relaxed).unwrap(), CaptureMode::Global);
    f.d.mem_alloc(PAGE).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(f.d.exchange_capture_mode(CaptureMode::ThreadLocal).unwrap(), CaptureMode::Global));
    });
    assert_eq!(f.d.exchange_capture_mode(CaptureMode::Global).unwrap(), CaptureMode::Relaxed);
    assert_eq!(f.d.mem_alloc(PAGE).unwrap_err().code, code::CAPTURE_UNSUPPORTED);
    assert_eq!(f.d.end_capture(f.capturing).unwrap_err().code, code::CAPTURE_INVALIDATED);
}

fn thread_local_passes<S: Subject>(s: &S) {
    let f = fixture(s, CaptureMode::Global);
    let passed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            f.d.exchange_capture_mode(CaptureMode::ThreadLocal).unwrap();
            passed.store(f.d.mem_alloc(PAGE).is_ok(), Relaxed);
        });
    });
    let end = f.d.end_capture(f.capturing).map_or_else(|e| e.code, |_| 0);
    assert_eq!((passed.into_inner(), end), (true, 0));
}

/// A blocking stream captures, and something is done on the legacy stream.
fn implicit<S: Subject>(s: &S) {
    type Do<S> = fn(&Fixture<'_, S>) -> DriverResult<()>;
    let calls: [(&str, Do<S>); 4] = [
        ("a kernel", |f| f.d.launch(StreamHandle::LEGACY, Kernel::Fill { dst: f.block, bytes: 4, value: 0 })),
        ("an event record", |f| f.d.event_record(f.outside, StreamHandle::LEGACY)),
        ("an event wait", |f| f.d.stream_wait_event(StreamHandle::LEGACY, f.outside)),
        ("a graph launch", |f| f.d.graph_launch(f.exec, StreamHandle::LEGACY)),
    ];
    for (name, call) in calls {
        for column in [COLUMNS[0], COLUMNS[3], COLUMNS[4], COLUMNS[5]] {
            let f = fixture(s, CaptureMode::Relaxed);
            f.d.end_capture(f.capturing).unwrap();
            let blocking = f.d.stream_create(StreamKind::Blocking).unwrap();
            f.d.begin_capture(blocking, column.mode).unwrap();
            f.d.launch(blocking, Kernel::Fill { dst: f.block, bytes: 64, value: 2 }).unwrap();
            let result = perform(&f, column, call).map_or_else(|e| e.code, |()| 0);
            let invalidated = matches!(f.d.capture_status(blocking), Ok(CaptureStatus::Invalidated));
            let found: Outcome = (result, invalidated, f.d.end_capture(blocking).map_or_else(|e| e.code, |_| 0));
            let expected = (code::CAPTURE_IMPLICIT, true, code::CAPTURE_INVALIDATED);
            assert_eq!(found, expected, "{name} on the legacy stream; {}", column.name);
        }
    }
}

/// In every column: the destroy succeeds, the stream and its capture are gone, and the mode watches nobody any more.
fn destroyed<S: Subject>(s: &S) {
    for column in COLUMNS {
        let f = fixture(s, column.mode);
        let result = perform(&f, column, |f| f.d.stream_destroy(f.capturing));
        assert_eq!(result, Ok(()), "{}", column.name);
        assert_eq!(f.d.end_capture(f.capturing).unwrap_err().code, code::INVALID_HANDLE);
        f.d.mem_free(f.block).unwrap();
    }
}
