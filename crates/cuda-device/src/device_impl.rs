//! [`Device`] for the real GPU.

use gpupool_device::{
    Address, Call, CaptureFrontier, CaptureId, CaptureMode, CaptureStatus, Device, DeviceProperties, DriverError,
    DriverPoolFigures, DriverPoolHandle, DriverResult, EventHandle, GraphHandle, HostMemory, MemoryHandle, MemoryInfo,
    NodeId, StreamHandle, StreamKind, code,
};
use hashbrown::HashSet;
use parking_lot::Mutex;

use cudarc::driver::sys::{CUevent, CUgraph, CUgraphEdgeData, CUgraphNode, CUstream};

use crate::CudaDevice;
use crate::device::{CaptureAnswer, EventKind, GraphKind, MemoryKind, PinnedKind, access, physical};
use crate::error::{check, check_returned};
use crate::objects::{Object, mode_number};
use crate::process::is_forked_child;

/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;
/// `CUDA_ERROR_NOT_READY`: an answer, no failure.
const NOT_READY: i32 = code::NOT_READY.cast_signed();

/// A size in the driver's type. On 32-bit hosts one that does not fit is refused.
pub(crate) fn size(call: Call, bytes: u64) -> DriverResult<usize> {
    usize::try_from(bytes).map_err(|_| DriverError::new(call, code::INVALID_VALUE))
}

impl CudaDevice {
    /// A call that gives something back by address.
    fn give_back(&self, call: Call, give: impl FnOnce() -> i32) -> DriverResult<()> {
        match self.enter(call) {
            Ok(_current) => check_returned(call, give()),
            Err(error) => check_returned(call, error.code.cast_signed()),
        }
    }
}

impl CudaDevice {
    /// The stream that copies to and from pinned memory.
    fn copy_stream(&self) -> DriverResult<StreamHandle> {
        let mut made = self.copies.lock();
        match *made {
            Some(stream) => Ok(stream),
            None => Ok(*made.insert(self.stream_create_with_priority(StreamKind::NonBlocking, 0)?)),
        }
    }

    /// Submits a copy that touches a part of pinned memory, given as offset and bytes, and waits for it. Pinned memory is held until then.
    fn copy_pinned(
        &self,
        call: Call,
        memory: HostMemory,
        (offset, bytes): (u64, u64),
        submit: impl FnOnce(u64, usize, CUstream) -> i32,
    ) -> DriverResult<()> {
        let refused = DriverError::new(call, code::INVALID_VALUE);
        let held = self.pinned.get(memory.0).ok_or(refused)?;
        if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > held.kind.bytes) {
            return Err(refused);
        }
        let stream = self.copy_stream()?;
        let raw = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        check(call, submit(held.raw + offset, size(call, bytes)?, raw.raw))?;
        // SAFETY: cuStreamSynchronize takes a stream, which is held until it returns.
        check(call, unsafe { (self.driver.stream_synchronize)(raw.raw) })
    }
}

impl Device for CudaDevice {
    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<Address> {
        let _current = self.enter(Call::MemAlloc)?;
        let mut address = 0;
        // SAFETY: cuMemAlloc writes one address.
        check(Call::MemAlloc, unsafe { (self.driver.mem_alloc)(&mut address, size(Call::MemAlloc, bytes)?) })?;
        Ok(Address(address))
    }

    fn mem_free(&self, address: Address) -> DriverResult<()> {
        // SAFETY: cuMemFree takes any number and refuses one that cuMemAlloc did not give.
        self.give_back(Call::MemFree, || unsafe { (self.driver.mem_free)(address.0) })
    }

    fn mem_info(&self) -> DriverResult<MemoryInfo> {
        let _current = self.enter(Call::MemGetInfo)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: cuMemGetInfo writes two sizes.
        check(Call::MemGetInfo, unsafe { (self.driver.mem_get_info)(&mut free, &mut total) })?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<Address> {
        let call = Call::AddressReserve;
        let _current = self.enter(call)?;
        let mut address = 0;
        // SAFETY: cuMemAddressReserve writes one address; alignment, wish and flags may be 0.
        check(call, unsafe { (self.driver.address_reserve)(&mut address, size(call, bytes)?, 0, 0, 0) })?;
        Ok(Address(address))
    }

    fn address_free(&self, address: Address, bytes: u64) -> DriverResult<()> {
        let bytes = size(Call::AddressFree, bytes)?;
        // SAFETY: cuMemAddressFree takes any range and refuses one that was not reserved as it is.
        self.give_back(Call::AddressFree, || unsafe { (self.driver.address_free)(address.0, bytes) })
    }

    fn handle_create(&self, bytes: u64) -> DriverResult<MemoryHandle> {
        let call = Call::MemCreate;
        let _current = self.enter(call)?;
        let (mut raw, properties) = (0, physical(self.context.device));
        // SAFETY: cuMemCreate reads the properties and writes one handle.
        check(call, unsafe { (self.driver.mem_create)(&mut raw, size(call, bytes)?, &properties, 0) })?;
        self.handles.insert(Object::new(&self.context, raw, MemoryKind { bytes }));
        Ok(MemoryHandle(raw))
    }

    fn handle_release(&self, handle: MemoryHandle) -> DriverResult<()> {
        self.handles.destroy(handle.0, code::INVALID_VALUE)
    }

    fn map(&self, address: Address, bytes: u64, handle: MemoryHandle) -> DriverResult<()> {
        let handle = self.handle(Call::MemMap, handle)?;
        // The driver would map a part; the trait's mappings are whole.
        if handle.kind.bytes != bytes {
            return Err(DriverError::new(Call::MemMap, code::INVALID_VALUE));
        }
        let _current = self.enter(Call::MemMap)?;
        let bytes = size(Call::MemMap, bytes)?;
        // SAFETY: cuMemMap takes a live handle (ours is held) and any range, and refuses one that is not reserved or is mapped.
        check(Call::MemMap, unsafe { (self.driver.mem_map)(address.0, bytes, 0, handle.raw, 0) })
    }

    fn set_access(&self, address: Address, bytes: u64) -> DriverResult<()> {
        let _current = self.enter(Call::MemSetAccess)?;
        let (bytes, access) = (size(Call::MemSetAccess, bytes)?, access(self.context.device));
        // SAFETY: cuMemSetAccess reads one description, takes any range and refuses one that is not mapped.
        check(Call::MemSetAccess, unsafe { (self.driver.mem_set_access)(address.0, bytes, &access, 1) })
    }

    fn unmap(&self, address: Address, bytes: u64) -> DriverResult<()> {
        let bytes = size(Call::MemUnmap, bytes)?;
        // SAFETY: cuMemUnmap takes any range and refuses one that is not made of whole mappings. Nothing on the host reads
        // through device addresses.
        self.give_back(Call::MemUnmap, || unsafe { (self.driver.mem_unmap)(address.0, bytes) })
    }

    fn event_create(&self) -> DriverResult<EventHandle> {
        let _current = self.enter(Call::EventCreate)?;
        let mut raw: CUevent = std::ptr::null_mut();
        // SAFETY: cuEventCreate writes one handle.
        check(Call::EventCreate, unsafe { (self.driver.event_create)(&mut raw, NO_TIMING) })?;
        self.events.insert(Object::new(&self.context, raw as u64, EventKind));
        Ok(EventHandle(raw as u64))
    }

    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        self.events.destroy(event.0, code::INVALID_HANDLE)
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        let call = Call::EventRecord;
        let (event, stream) = (self.event(call, event)?, self.stream(call, stream)?);
        let _current = self.enter(call)?;
        // SAFETY: cuEventRecord takes an event and a stream of one context, both held.
        check(call, unsafe { (self.driver.event_record)(event.raw as CUevent, stream.raw) })
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        let event = self.event(Call::EventQuery, event)?;
        let _current = self.enter(Call::EventQuery)?;
        // SAFETY: cuEventQuery takes an event, which is held.
        match unsafe { (self.driver.event_query)(event.raw as CUevent) } {
            NOT_READY => Ok(false),
            code => check(Call::EventQuery, code).map(|()| true),
        }
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        let event = self.event(Call::EventSynchronize, event)?;
        let _current = self.enter(Call::EventSynchronize)?;
        // SAFETY: cuEventSynchronize takes an event, which is held until it returns.
        check(Call::EventSynchronize, unsafe { (self.driver.event_synchronize)(event.raw as CUevent) })
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        let call = Call::StreamWaitEvent;
        let (stream, event) = (self.stream(call, stream)?, self.event(call, event)?);
        let _current = self.enter(call)?;
        // SAFETY: cuStreamWaitEvent takes a stream and an event, both held, and flags, which may be 0.
        check(call, unsafe { (self.driver.stream_wait_event)(stream.raw, event.raw as CUevent, 0) })
    }

    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        let answer = self.ask_capture(Call::StreamGetCaptureInfo, stream)?;
        Ok(match answer.status {
            CaptureAnswer::ACTIVE => CaptureStatus::Active(CaptureId(answer.id)),
            CaptureAnswer::INVALIDATED => CaptureStatus::Invalidated,
            _ => CaptureStatus::None,
        })
    }

    fn capture_frontier(&self, stream: StreamHandle) -> DriverResult<Option<CaptureFrontier>> {
        let call = Call::StreamGetCaptureInfo;
        let held = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        let mut answer = CaptureAnswer::default();
        let (mut nodes, mut count): (*const CUgraphNode, usize) = (std::ptr::null(), 0);
        let mut edges: *const CUgraphEdgeData = std::ptr::null();
        // SAFETY: cuStreamGetCaptureInfo_v3 writes through each pointer to a value of ours.
        let code = unsafe {
            (self.driver.capture_info)(
                held.raw,
                &mut answer.status,
                &mut answer.id,
                &mut answer.graph,
                &mut nodes,
                &mut edges,
                &mut count,
            )
        };
        check(call, code)?;
        if answer.status != CaptureAnswer::ACTIVE || answer.graph.is_null() {
            return Ok(None);
        }
        let nodes: Vec<NodeId> = if count == 0 || nodes.is_null() {
            Vec::new()
        } else {
            // SAFETY: the driver gives an array of `count` nodes that stays until the next call on the stream or the capture's end. The
            // trait's caller submits to a capturing stream from one thread at a time and asks there (see the crate's documentation).
            unsafe { std::slice::from_raw_parts(nodes, count) }.iter().map(|&n| NodeId(n as u64)).collect()
        };
        let graph = answer.graph as u64;
        let id = CaptureId(answer.id);
        let known = self.graphs.get(graph).filter(|g| g.kind.under_capture.is_some_and(|(_, of)| of == id));
        let known = known.unwrap_or_else(|| {
            let kind = GraphKind { nodes: Mutex::new(HashSet::new()), under_capture: Some((stream, id)) };
            self.graphs.insert(Object::borrowed(&self.context, graph, kind))
        });
        known.kind.nodes.lock().extend(nodes.iter().map(|n| n.0));
        Ok(Some(CaptureFrontier { id, graph: GraphHandle(graph), nodes }))
    }

    fn node_dependencies(&self, graph: GraphHandle, node: NodeId) -> DriverResult<Vec<NodeId>> {
        let call = Call::GraphGetEdges;
        let graph = self.graph(call, graph)?;
        let mut known = graph.kind.nodes.lock();
        if !known.contains(&node.0) {
            return Err(DriverError::new(call, code::INVALID_VALUE));
        }
        let _current = self.enter(call)?;
        let found = listed(call, |nodes, edges, count| {
            // SAFETY: 1. The node is one of a graph that is held and locked. 2. cuGraphNodeGetDependencies_v2 writes at most `count` of each, and
            // the lists have room for that many, or both are null and only the number is asked for.
            unsafe { (self.driver.node_dependencies)(node.0 as CUgraphNode, nodes, edges, count) }
        })?;
        known.extend(found.iter().map(|n| n.0));
        Ok(found)
    }

    fn host_alloc(&self, bytes: u64) -> DriverResult<HostMemory> {
        /// `CU_MEMHOSTALLOC_PORTABLE`.
        const PORTABLE: u32 = 1;
        let call = Call::MemHostAlloc;
        if bytes == 0 {
            return Err(DriverError::new(call, code::INVALID_VALUE));
        }
        let _current = self.enter(call)?;
        let mut host = std::ptr::null_mut();
        // SAFETY: cuMemHostAlloc writes one pointer.
        check(call, unsafe { (self.driver.mem_host_alloc)(&mut host, size(call, bytes)?, PORTABLE) })?;
        self.pinned.insert(Object::new(&self.context, host as u64, PinnedKind { bytes }));
        Ok(HostMemory(host as u64))
    }

    fn host_free(&self, memory: HostMemory) -> DriverResult<()> {
        self.pinned.destroy(memory.0, code::INVALID_VALUE)
    }

    fn copy_to_host(&self, dst: HostMemory, offset: u64, src: Address, bytes: u64) -> DriverResult<()> {
        let call = Call::MemcpyToHost;
        self.copy_pinned(call, dst, (offset, bytes), |host, bytes, stream| {
            // SAFETY: 1. `host` and the `bytes` behind it lie in pinned memory that `copy_pinned` holds until the copy is complete. 2. Nothing in
            // Rust reads or writes that memory. 3. cuMemcpyDtoHAsync refuses an address that is none of the device's.
            unsafe { (self.driver.copy_to_host)(host as *mut std::ffi::c_void, src.0, bytes, stream) }
        })
    }

    fn copy_from_host(&self, dst: Address, src: HostMemory, offset: u64, bytes: u64) -> DriverResult<()> {
        let call = Call::MemcpyFromHost;
        self.copy_pinned(call, src, (offset, bytes), |host, bytes, stream| {
            // SAFETY: as in `copy_to_host`; cuMemcpyAsync takes addresses of the unified space, and pinned memory's is its host address.
            unsafe { (self.driver.copy_async)(dst.0, host, bytes, stream) }
        })
    }

    fn driver_pool_create(&self) -> DriverResult<DriverPoolHandle> {
        self.make_pool()
    }

    fn driver_pool_destroy(&self, pool: DriverPoolHandle) -> DriverResult<()> {
        self.destroy_pool(pool)
    }

    fn driver_pool_figures(&self, pool: DriverPoolHandle) -> DriverResult<DriverPoolFigures> {
        self.pool_figures(pool)
    }

    fn driver_pool_trim(&self, pool: DriverPoolHandle, keep: u64) -> DriverResult<()> {
        self.trim_pool(pool, keep)
    }

    fn mem_alloc_async(&self, pool: DriverPoolHandle, bytes: u64, stream: StreamHandle) -> DriverResult<Address> {
        self.alloc_from(pool, bytes, stream)
    }

    fn mem_free_async(&self, address: Address, stream: StreamHandle) -> DriverResult<()> {
        self.free_async(stream, address)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        let call = Call::ExchangeCaptureMode;
        if is_forked_child() {
            return Err(DriverError::new(call, code::FORKED));
        }
        let mut number = mode_number(mode);
        // SAFETY: cuThreadExchangeStreamCaptureMode reads and writes one int. It needs no context.
        check(call, unsafe { (self.driver.exchange_mode)(&mut number) })?;
        Ok(match number {
            1 => CaptureMode::ThreadLocal,
            2 => CaptureMode::Relaxed,
            _ => CaptureMode::Global,
        })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Asks the driver for a list of nodes: how many first, then which.
pub(crate) fn listed(
    call: Call,
    ask: impl Fn(*mut CUgraphNode, *mut CUgraphEdgeData, *mut usize) -> i32,
) -> DriverResult<Vec<NodeId>> {
    let mut count = 0;
    check(call, ask(std::ptr::null_mut(), std::ptr::null_mut(), &mut count))?;
    let (mut nodes, mut edges) = (vec![std::ptr::null_mut(); count], vec![no_edge(); count]);
    if count > 0 {
        check(call, ask(nodes.as_mut_ptr(), edges.as_mut_ptr(), &mut count))?;
    }
    nodes.truncate(count);
    Ok(nodes.into_iter().map(|n| NodeId(n as u64)).collect())
}

pub(crate) fn no_edge() -> CUgraphEdgeData {
    CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] }
}

/// The pointer of a graph.
pub(crate) fn graph_pointer(graph: &Object<GraphKind>) -> CUgraph {
    graph.raw as CUgraph
}
