//! [`CudaDevice`]: what it consists of, and how it is opened.

use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUevent, CUgraph, CUgraphExec, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemLocation, CUmemLocationType, CUstream,
};
use gpupool_device::{
    Call, CaptureId, DeviceProperties, DriverError, DriverResult, EventHandle, ExecHandle, GraphHandle, MemoryHandle,
    StreamHandle, code,
};
use hashbrown::HashSet;
use parking_lot::Mutex;

use crate::availability::{self, Unavailable};
use crate::bench::Bench;
use crate::context::{Context, Current};
use crate::driver::{Code, Driver};
use crate::error::check;
use crate::objects::{Kind, Object, Table};
use crate::stream_ordered::PoolKind;

/// `CU_DEVICE_ATTRIBUTE_…` by the driver's numbers.
mod attribute {
    use std::ffi::c_int;
    pub(super) const MULTIPROCESSORS: c_int = 16;
    pub(super) const INTEGRATED: c_int = 18;
    pub(super) const CAPABILITY_MAJOR: c_int = 75;
    pub(super) const CAPABILITY_MINOR: c_int = 76;
    pub(super) const VIRTUAL_MEMORY: c_int = 102;
    pub(super) const MEMORY_POOLS: c_int = 115;
}

/// A stream of the table. Streams have nothing to know.
#[derive(Debug)]
pub(crate) struct StreamKindOf;
/// An event of the table.
#[derive(Debug)]
pub(crate) struct EventKind;
/// A handle of virtual memory.
#[derive(Debug)]
pub(crate) struct MemoryKind {
    pub(crate) bytes: u64,
}
/// Pinned memory of the host.
#[derive(Debug)]
pub(crate) struct PinnedKind {
    pub(crate) bytes: u64,
}
/// A graph.
#[derive(Debug)]
pub(crate) struct GraphKind {
    /// The nodes that callers have heard of: only those are looked up. The lock is held while the driver reads or changes the graph,
    /// which it does not lock itself.
    pub(crate) nodes: Mutex<HashSet<u64>>,
    /// A graph under capture is the driver's, and lives as long as this stream captures under this id.
    pub(crate) under_capture: Option<(StreamHandle, CaptureId)>,
}
/// An executable graph.
#[derive(Debug)]
pub(crate) struct ExecKind {
    /// Held while the driver uses the executable, which it does not lock itself.
    pub(crate) using: Mutex<()>,
}

// SAFETY (of the six `destroy`s): the trait's contract is that the object is live and unused; each number is the pointer or number that the
// function named below gave out for its kind.
impl Kind for StreamKindOf {
    const DESTROY: Call = Call::StreamDestroy;
    unsafe fn destroy(&self, driver: &Driver, raw: u64) -> Code {
        // SAFETY: made by cuStreamCreateWithPriority; cuStreamDestroy lets its work complete.
        unsafe { (driver.stream_destroy)(raw as CUstream) }
    }
}

impl Kind for EventKind {
    const DESTROY: Call = Call::EventDestroy;
    unsafe fn destroy(&self, driver: &Driver, raw: u64) -> Code {
        // SAFETY: made by cuEventCreate; cuEventDestroy may be called while the event is pending.
        unsafe { (driver.event_destroy)(raw as CUevent) }
    }
}

impl Kind for MemoryKind {
    const DESTROY: Call = Call::MemRelease;
    unsafe fn destroy(&self, driver: &Driver, raw: u64) -> Code {
        // SAFETY: made by cuMemCreate; cuMemRelease keeps the memory while it is mapped.
        unsafe { (driver.mem_release)(raw) }
    }
}

impl Kind for PinnedKind {
    const DESTROY: Call = Call::MemFreeHost;
    unsafe fn destroy(&self, driver: &Driver, raw: u64) -> Code {
        // SAFETY: made by cuMemHostAlloc; every copy into or out of it was waited for by the call that made it, which held it.
        unsafe { (driver.mem_free_host)(raw as *mut std::ffi::c_void) }
    }
}

impl Kind for GraphKind {
    const DESTROY: Call = Call::GraphDestroy;
    unsafe fn destroy(&self, driver: &Driver, raw: u64) -> Code {
        // SAFETY: given by cuStreamEndCapture, which makes the caller its owner.
        unsafe { (driver.graph_destroy)(raw as CUgraph) }
    }
}

impl Kind for ExecKind {
    const DESTROY: Call = Call::GraphExecDestroy;
    unsafe fn destroy(&self, driver: &Driver, raw: u64) -> Code {
        // SAFETY: made by cuGraphInstantiate; cuGraphExecDestroy lets runs complete.
        unsafe { (driver.exec_destroy)(raw as CUgraphExec) }
    }
}

/// What kind of GPU it is, beyond [`DeviceProperties`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Hardware {
    /// Compute capability, such as (9, 0).
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Whether the GPU shares the host's memory.
    pub integrated: bool,
    /// Whether the driver's stream-ordered pools work.
    pub memory_pools: bool,
}

/// One GPU. See the crate's documentation. Methods may be called from any thread.
#[derive(Debug)]
pub struct CudaDevice {
    pub(crate) driver: &'static Driver,
    pub(crate) ordinal: u32,
    pub(crate) properties: DeviceProperties,
    pub(crate) hardware: Hardware,
    pub(crate) start: Instant,
    // Objects before the context that they are in.
    pub(crate) bench: Bench,
    pub(crate) streams: Table<StreamKindOf>,
    pub(crate) events: Table<EventKind>,
    pub(crate) handles: Table<MemoryKind>,
    pub(crate) pinned: Table<PinnedKind>,
    /// What copies to and from pinned memory; made when it is first needed.
    pub(crate) copies: Mutex<Option<StreamHandle>>,
    pub(crate) graphs: Table<GraphKind>,
    pub(crate) execs: Table<ExecKind>,
    pub(crate) pools: Table<PoolKind>,
    pub(crate) context: Arc<Context>,
}

impl CudaDevice {
    /// Opens the device with this number, as the driver counts them (`CUDA_VISIBLE_DEVICES` applies), in its primary context, which the
    /// CUDA runtime, PyTorch and cudarc use too. Several may be open on one GPU. Takes a second or so the first time in a process.
    ///
    /// # Errors
    ///
    /// [`Unavailable`].
    pub fn open(ordinal: u32) -> Result<Self, Unavailable> {
        let open = availability::open()?;
        let no_such = Unavailable::NoSuchDevice { ordinal, count: open.info.devices };
        if ordinal >= open.info.devices {
            return Err(no_such);
        }
        let number = c_int::try_from(ordinal).map_err(|_| no_such)?;
        let failed = |error| Unavailable::Device { ordinal, error };
        let mut device: CUdevice = 0;
        // SAFETY: cuDeviceGet writes one int.
        check(Call::Other, unsafe { (open.table.device_get)(&mut device, number) }).map_err(failed)?;
        let context = Context::primary(&open.table, device).map_err(failed)?;
        Self::inside(Arc::new(context), ordinal).map_err(failed)
    }

    /// Opens the device of a context of cudarc's, and keeps that context.
    ///
    /// # Errors
    ///
    /// [`Unavailable`].
    pub fn of(context: &Arc<CudaContext>) -> Result<Self, Unavailable> {
        let open = availability::open()?;
        let ordinal = u32::try_from(context.ordinal()).unwrap_or(u32::MAX);
        Self::inside(Arc::new(Context::of_cudarc(&open.table, context)), ordinal)
            .map_err(|error| Unavailable::Device { ordinal, error })
    }

    /// Opens the device of a context that the embedder owns.
    ///
    /// # Safety
    ///
    /// `context` is a context of this process, and is not destroyed before this device and everything that uses it is gone.
    ///
    /// # Errors
    ///
    /// [`Unavailable`].
    pub unsafe fn with_context(context: CUcontext) -> Result<Self, Unavailable> {
        let open = availability::open()?;
        let failed = |error| Unavailable::Device { ordinal: 0, error };
        // SAFETY: the caller's promise is the one asked for.
        let context = unsafe { Context::borrowed(&open.table, context) }.map_err(failed)?;
        let ordinal = context.device.unsigned_abs();
        Self::inside(Arc::new(context), ordinal).map_err(failed)
    }

    fn inside(context: Arc<Context>, ordinal: u32) -> DriverResult<Self> {
        let driver = context.driver;
        let (properties, hardware) = {
            let _current = context.enter(Call::Other)?;
            look(driver, context.device)?
        };
        Ok(Self {
            driver,
            ordinal,
            properties,
            hardware,
            start: Instant::now(),
            bench: Bench::new(&context),
            streams: Table::default(),
            events: Table::default(),
            handles: Table::default(),
            pinned: Table::default(),
            copies: Mutex::default(),
            graphs: Table::default(),
            execs: Table::default(),
            pools: Table::default(),
            context,
        })
    }

    /// What kind of GPU it is.
    #[must_use]
    pub fn hardware(&self) -> Hardware {
        self.hardware
    }

    /// The context, for an embedder who makes driver calls.
    #[must_use]
    pub fn cu_context(&self) -> CUcontext {
        self.context.raw()
    }

    /// Makes a stream that somebody else created known to this device. It is never destroyed by this device; call
    /// [`return_stream`](Self::return_stream) before its owner destroys it. The three default streams need no borrowing.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of this device's context (or one of its default streams), and stays one until it was returned.
    pub unsafe fn borrow_stream(&self, stream: CUstream) -> StreamHandle {
        let handle = StreamHandle(stream as u64);
        if handle.0 > StreamHandle::PER_THREAD.0 && self.streams.get(handle.0).is_none() {
            self.streams.insert(Object::borrowed(&self.context, handle.0, StreamKindOf));
        }
        handle
    }

    /// From now on the number names no stream here. Nothing is destroyed.
    pub fn return_stream(&self, stream: StreamHandle) {
        self.streams.forget(stream.0);
    }

    /// Makes the context current for a call.
    pub(crate) fn enter(&self, call: Call) -> DriverResult<Current<'_>> {
        self.context.enter(call)
    }

    /// The driver's stream under a handle, held while it is used.
    pub(crate) fn stream(&self, call: Call, handle: StreamHandle) -> DriverResult<StreamRef> {
        if handle.0 <= StreamHandle::PER_THREAD.0 {
            return Ok(StreamRef { raw: handle.0 as CUstream, _held: None });
        }
        let held = self.streams.get(handle.0).ok_or(DriverError::new(call, code::INVALID_HANDLE))?;
        Ok(StreamRef { raw: held.raw as CUstream, _held: Some(held) })
    }

    pub(crate) fn event(&self, call: Call, handle: EventHandle) -> DriverResult<Arc<Object<EventKind>>> {
        self.events.get(handle.0).ok_or(DriverError::new(call, code::INVALID_HANDLE))
    }

    pub(crate) fn exec(&self, call: Call, handle: ExecHandle) -> DriverResult<Arc<Object<ExecKind>>> {
        self.execs.get(handle.0).ok_or(DriverError::new(call, code::INVALID_VALUE))
    }

    pub(crate) fn handle(&self, call: Call, handle: MemoryHandle) -> DriverResult<Arc<Object<MemoryKind>>> {
        self.handles.get(handle.0).ok_or(DriverError::new(call, code::INVALID_VALUE))
    }

    /// A graph of ours, or one under capture whose capture still goes on.
    pub(crate) fn graph(&self, call: Call, handle: GraphHandle) -> DriverResult<Arc<Object<GraphKind>>> {
        let unknown = DriverError::new(call, code::INVALID_VALUE);
        let graph = self.graphs.get(handle.0).ok_or(unknown)?;
        if let Some((stream, id)) = graph.kind.under_capture {
            let now = self.ask_capture(call, stream)?;
            if now.status != CaptureAnswer::ACTIVE || now.id != id.0 || now.graph as u64 != handle.0 {
                self.graphs.forget(handle.0);
                return Err(unknown);
            }
        }
        Ok(graph)
    }

    /// What the driver says about a stream's capture. Only with the context current does a default stream mean this device's.
    pub(crate) fn ask_capture(&self, call: Call, stream: StreamHandle) -> DriverResult<CaptureAnswer> {
        let stream = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        let mut answer = CaptureAnswer::default();
        // SAFETY: cuStreamGetCaptureInfo_v3 writes through the pointers that are not null, each to a value of ours; the others may be null.
        let code = unsafe {
            (self.driver.capture_info)(
                stream.raw,
                &mut answer.status,
                &mut answer.id,
                &mut answer.graph,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        check(call, code)?;
        Ok(answer)
    }
}

/// The answer of cuStreamGetCaptureInfo without the frontier.
pub(crate) struct CaptureAnswer {
    pub(crate) status: c_int,
    pub(crate) id: u64,
    pub(crate) graph: CUgraph,
}

impl CaptureAnswer {
    /// `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
    pub(crate) const ACTIVE: c_int = 1;
    /// `CU_STREAM_CAPTURE_STATUS_INVALIDATED`.
    pub(crate) const INVALIDATED: c_int = 2;
}

impl Default for CaptureAnswer {
    fn default() -> Self {
        Self { status: 0, id: 0, graph: std::ptr::null_mut() }
    }
}

/// A stream in use.
pub(crate) struct StreamRef {
    pub(crate) raw: CUstream,
    _held: Option<Arc<Object<StreamKindOf>>>,
}

/// How virtual memory of a device is made.
pub(crate) fn physical(device: CUdevice) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: cudarc::driver::sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

pub(crate) fn location(device: CUdevice) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// Readable and writable for the device.
pub(crate) fn access(device: CUdevice) -> CUmemAccessDesc {
    CUmemAccessDesc { location: location(device), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE }
}

fn look(driver: &Driver, device: CUdevice) -> DriverResult<(DeviceProperties, Hardware)> {
    let ask = |what: c_int| -> DriverResult<u32> {
        let mut value: c_int = 0;
        // SAFETY: cuDeviceGetAttribute writes one int; the numbers are those of `CUdevice_attribute`.
        check(Call::Other, unsafe { (driver.device_attribute)(&mut value, what, device) })?;
        Ok(value.unsigned_abs())
    };
    let mut name: [c_char; 256] = [0; 256];
    // SAFETY: cuDeviceGetName writes at most as many bytes as it is told, the last one zero.
    check(Call::Other, unsafe { (driver.device_name)(name.as_mut_ptr(), 256, device) })?;
    let name: Vec<u8> = name.iter().map(|&c| c.cast_unsigned()).take_while(|&c| c != 0).collect();
    let mut total = 0;
    // SAFETY: cuDeviceTotalMem writes one size.
    check(Call::Other, unsafe { (driver.device_total_mem)(&mut total, device) })?;
    let virtual_memory = ask(attribute::VIRTUAL_MEMORY)? != 0;
    let mut granularity: usize = 2 << 20;
    if virtual_memory {
        let properties = physical(device);
        // SAFETY: cuMemGetAllocationGranularity reads the properties and writes one size; 0 asks for the minimum.
        check(Call::Other, unsafe { (driver.mem_granularity)(&mut granularity, &properties, 0) })?;
    }
    let hardware = Hardware {
        capability: (ask(attribute::CAPABILITY_MAJOR)?, ask(attribute::CAPABILITY_MINOR)?),
        multiprocessors: ask(attribute::MULTIPROCESSORS)?,
        integrated: ask(attribute::INTEGRATED)? != 0,
        memory_pools: ask(attribute::MEMORY_POOLS)? != 0,
    };
    let name = String::from_utf8_lossy(&name);
    Ok((DeviceProperties::new(name, total as u64, virtual_memory, granularity as u64), hardware))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::fake;
    use gpupool_device::{Address, Device, GraphDevice, InstantiateFlags, StreamKind, Workbench};

    /// A device on a made-up driver, which says 0 to everything and does nothing.
    fn made_up() -> CudaDevice {
        fake::answer_with(0);
        let driver: &'static Driver = Box::leak(Box::new(Driver::fake()));
        CudaDevice::inside(Arc::new(Context::primary(driver, 0).unwrap()), 0).unwrap()
    }

    #[test]
    fn numbers_that_name_nothing_never_reach_the_driver() {
        let d = made_up();
        fake::take_calls();
        let (s, e, h, g, x) = (StreamHandle(77), EventHandle(78), MemoryHandle(79), GraphHandle(80), ExecHandle(81));
        let codes = [
            d.event_query(e).map(drop),
            d.event_synchronize(e),
            d.event_record(e, StreamHandle::LEGACY),
            d.event_destroy(e),
            d.stream_wait_event(s, e),
            d.capture_status(s).map(drop),
            d.capture_frontier(s).map(drop),
            d.stream_synchronize(s),
            d.stream_destroy(s),
            d.begin_capture(s, gpupool_device::CaptureMode::Global),
            d.end_capture(s).map(drop),
            d.stream_destroy(StreamHandle::LEGACY),
            d.stream_destroy(StreamHandle::PER_THREAD),
        ]
        .map(|r| r.unwrap_err().code);
        assert_eq!(codes, [code::INVALID_HANDLE; 13]);
        let codes = [
            d.handle_release(h),
            d.map(Address(0), 0, h),
            d.graph_nodes(g).map(drop),
            d.graph_edges(g).map(drop),
            d.node_dependencies(g, gpupool_device::NodeId(1)).map(drop),
            d.graph_destroy(g),
            d.instantiate(g, InstantiateFlags::default()).map(drop),
            d.graph_launch(x, StreamHandle::LEGACY),
            d.graph_upload(x, StreamHandle::LEGACY),
            d.exec_destroy(x),
        ]
        .map(|r| r.unwrap_err().code);
        assert_eq!(codes, [code::INVALID_VALUE; 10]);
        assert_eq!(fake::take_calls(), Vec::<&str>::new());
    }

    #[test]
    fn a_code_that_nobody_knows_is_an_error_with_its_number() {
        let d = made_up();
        fake::answer_with(31_337);
        let error = d.mem_alloc(1).unwrap_err();
        assert_eq!((error.call, error.code), (Call::MemAlloc, 31_337));
        assert!(error.to_string().contains("31337"));
    }

    #[test]
    fn giving_back_succeeds_while_the_driver_shuts_down_and_nothing_else_does() {
        let d = made_up();
        let s = d.stream_create(StreamKind::NonBlocking).unwrap();
        assert_eq!(s, StreamHandle(0), "the made-up driver gives null: put a number in its place");
        d.streams.insert(Object::new(&d.context, 16, StreamKindOf));
        d.events.insert(Object::new(&d.context, 16, EventKind));
        for gone in [code::DEINITIALIZED, code::CONTEXT_DESTROYED] {
            fake::answer_with(gone.cast_signed());
            assert_eq!(d.mem_alloc(1).unwrap_err().code, gone);
            assert_eq!(d.event_create().unwrap_err().code, gone);
            d.mem_free(Address(512)).unwrap();
            d.unmap(Address(512), 512).unwrap();
            d.address_free(Address(512), 512).unwrap();
        }
        d.event_destroy(EventHandle(16)).unwrap();
        d.stream_destroy(StreamHandle(16)).unwrap();
        drop(d);
    }

    #[test]
    fn what_cannot_be_destroyed_stays_and_can_be_destroyed_later() {
        let d = made_up();
        d.execs.insert(Object::new(&d.context, 16, ExecKind { using: Mutex::new(()) }));
        fake::answer_with(code::CAPTURE_UNSUPPORTED.cast_signed());
        assert_eq!(d.exec_destroy(ExecHandle(16)).unwrap_err().code, code::CAPTURE_UNSUPPORTED);
        assert_eq!(d.execs.len(), 1);
        fake::answer_with(0);
        d.exec_destroy(ExecHandle(16)).unwrap();
        assert_eq!(d.exec_destroy(ExecHandle(16)).unwrap_err().code, code::INVALID_VALUE);
    }

    #[test]
    fn an_object_in_use_is_destroyed_by_who_uses_it_last() {
        let d = made_up();
        let used = d.events.insert(Object::new(&d.context, 16, EventKind));
        fake::take_calls();
        d.event_destroy(EventHandle(16)).unwrap();
        assert_eq!(fake::take_calls(), Vec::<&str>::new());
        drop(used);
        let calls = fake::take_calls();
        assert_eq!(calls.iter().filter(|c| **c == "cuEventDestroy_v2").count(), 1, "{calls:?}");
        assert_eq!(calls.first(), Some(&"cuThreadExchangeStreamCaptureMode"), "no capture is broken by it");
    }

    #[test]
    fn what_is_left_goes_before_the_context() {
        let d = made_up();
        d.streams.insert(Object::new(&d.context, 16, StreamKindOf));
        d.streams.insert(Object::borrowed(&d.context, 32, StreamKindOf));
        fake::take_calls();
        drop(d);
        let calls = fake::take_calls();
        let at = |name| calls.iter().position(|c| *c == name);
        assert!(at("cuStreamDestroy_v2") < at("cuDevicePrimaryCtxRelease_v2") && at("cuStreamDestroy_v2").is_some());
        assert_eq!(calls.iter().filter(|c| **c == "cuStreamDestroy_v2").count(), 1, "a borrowed stream is not ours");
    }
}
