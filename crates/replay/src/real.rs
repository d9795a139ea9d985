//! A real device under a trace or under stress.
//!
//! # What it adds to a device
//!
//! * **Streams by number.** A trace numbers its streams; here each number is a stream of the device, made when it is first named.
//! * **Completion by count.** A trace says that work completes so many events later, but has no work in it. Here the streams are idle, and
//!   what is held back is held back on paper: an event recorded on a stream with work under way is not complete before the count is reached.
//!   Waiting for one moves the count on, as on the simulated device. An event that is complete on paper is waited for on the device, so that
//!   what the allocator sees does not depend on how fast the device is.
//! * **Memory in use** is the whole device's, as the driver tells.
//!
//! With no work held back, and in stress, everything goes straight to the device.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use gpupool_device::{
    Address, CaptureFrontier, CaptureMode, CaptureStatus, Device, DeviceProperties, DriverPoolFigures,
    DriverPoolHandle, DriverResult, Edge, EventHandle, ExecHandle, Gate, GraphDevice, GraphHandle, HostFunction,
    HostMemory, InstantiateFlags, Kernel, MemoryHandle, MemoryInfo, Node, NodeId, StreamHandle, StreamKind, Workbench,
};
use hashbrown::HashMap;

use crate::replay::ReplayDevice;
use crate::stress::StressDevice;

/// What is under way on paper, in counted events.
#[derive(Debug, Default)]
struct Paper {
    now: u64,
    /// When each stream's work is complete.
    streams: HashMap<StreamHandle, u64>,
    /// When each event is.
    events: HashMap<EventHandle, u64>,
}

/// A device and what a trace needs besides. See the module's documentation.
#[derive(Debug)]
pub struct Real<D> {
    device: D,
    /// The device's streams by the numbers they have here.
    names: RwLock<HashMap<StreamHandle, StreamHandle>>,
    /// Whether anything was ever held back.
    holding: AtomicBool,
    paper: Mutex<Paper>,
    /// Nanoseconds that the program is said to have taken between its events: a replay makes them without a pause.
    passed: AtomicU64,
}

impl<D: Workbench> Real<D> {
    /// Takes a device over.
    pub fn new(device: D) -> Self {
        Self {
            device,
            names: RwLock::default(),
            holding: AtomicBool::new(false),
            paper: Mutex::default(),
            passed: AtomicU64::new(0),
        }
    }

    /// The device itself.
    pub fn device(&self) -> &D {
        &self.device
    }

    fn name(&self, stream: StreamHandle) -> StreamHandle {
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        names.get(&stream).copied().unwrap_or(stream)
    }

    fn paper(&self) -> MutexGuard<'_, Paper> {
        self.paper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When an event is complete on paper, if it is not yet.
    fn held(&self, event: EventHandle) -> Option<u64> {
        if !self.holding.load(Relaxed) {
            return None;
        }
        let paper = self.paper();
        paper.events.get(&event).copied().filter(|&until| until > paper.now)
    }

    fn move_on(&self, until: u64) {
        let mut paper = self.paper();
        paper.now = paper.now.max(until);
    }

    /// A call that waits for the whole device: everything on paper is over.
    fn move_to_the_end(&self) {
        if self.holding.load(Relaxed) {
            let mut paper = self.paper();
            paper.now = paper.streams.values().copied().fold(paper.now, u64::max);
        }
    }
}

impl<D: Workbench> Device for Real<D> {
    fn ordinal(&self) -> u32 {
        self.device.ordinal()
    }

    fn properties(&self) -> &DeviceProperties {
        self.device.properties()
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<Address> {
        self.device.mem_alloc(bytes)
    }

    fn mem_free(&self, address: Address) -> DriverResult<()> {
        self.device.mem_free(address)?;
        self.move_to_the_end();
        Ok(())
    }

    fn mem_info(&self) -> DriverResult<MemoryInfo> {
        self.device.mem_info()
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<Address> {
        self.device.address_reserve(bytes)
    }

    fn address_free(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.device.address_free(address, bytes)
    }

    fn handle_create(&self, bytes: u64) -> DriverResult<MemoryHandle> {
        self.device.handle_create(bytes)
    }

    fn handle_release(&self, handle: MemoryHandle) -> DriverResult<()> {
        self.device.handle_release(handle)
    }

    fn map(&self, address: Address, bytes: u64, handle: MemoryHandle) -> DriverResult<()> {
        self.device.map(address, bytes, handle)
    }

    fn set_access(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.device.set_access(address, bytes)
    }

    fn unmap(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.device.unmap(address, bytes)
    }

    fn host_alloc(&self, bytes: u64) -> DriverResult<HostMemory> {
        self.device.host_alloc(bytes)
    }

    fn host_free(&self, memory: HostMemory) -> DriverResult<()> {
        self.device.host_free(memory)
    }

    fn copy_to_host(&self, dst: HostMemory, offset: u64, src: Address, bytes: u64) -> DriverResult<()> {
        self.device.copy_to_host(dst, offset, src, bytes)
    }

    fn copy_from_host(&self, dst: Address, src: HostMemory, offset: u64, bytes: u64) -> DriverResult<()> {
        self.device.copy_from_host(dst, src, offset, bytes)
    }

    fn event_create(&self) -> DriverResult<EventHandle> {
        self.device.event_create()
    }

    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        if self.holding.load(Relaxed) {
            self.paper().events.remove(&event);
        }
        self.device.event_destroy(event)
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        self.device.event_record(event, self.name(stream))?;
        if self.holding.load(Relaxed) {
            let mut paper = self.paper();
            let until = paper.streams.get(&stream).copied().unwrap_or(0);
            paper.events.insert(event, until);
        }
        Ok(())
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        if !self.holding.load(Relaxed) {
            return self.device.event_query(event);
        }
        let complete = self.held(event).is_none();
        if complete {
            self.device.event_synchronize(event)?;
        } else {
            self.device.event_query(event)?;
        }
        Ok(complete)
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        if let Some(until) = self.held(event) {
            self.move_on(until);
        }
        self.device.event_synchronize(event)
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        self.device.stream_wait_event(self.name(stream), event)?;
        if let Some(until) = self.held(event) {
            let mut paper = self.paper();
            let work = paper.streams.entry(stream).or_default();
            *work = until.max(*work);
        }
        Ok(())
    }

    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        self.device.capture_status(self.name(stream))
    }

    fn capture_frontier(&self, stream: StreamHandle) -> DriverResult<Option<CaptureFrontier>> {
        self.device.capture_frontier(self.name(stream))
    }

    fn node_dependencies(&self, graph: GraphHandle, node: NodeId) -> DriverResult<Vec<NodeId>> {
        self.device.node_dependencies(graph, node)
    }

    fn driver_pool_create(&self) -> DriverResult<DriverPoolHandle> {
        self.device.driver_pool_create()
    }

    fn driver_pool_destroy(&self, pool: DriverPoolHandle) -> DriverResult<()> {
        self.device.driver_pool_destroy(pool)
    }

    fn driver_pool_figures(&self, pool: DriverPoolHandle) -> DriverResult<DriverPoolFigures> {
        self.device.driver_pool_figures(pool)
    }

    fn driver_pool_trim(&self, pool: DriverPoolHandle, keep: u64) -> DriverResult<()> {
        self.device.driver_pool_trim(pool, keep)
    }

    fn mem_alloc_async(&self, pool: DriverPoolHandle, bytes: u64, stream: StreamHandle) -> DriverResult<Address> {
        self.device.mem_alloc_async(pool, bytes, self.name(stream))
    }

    fn mem_free_async(&self, address: Address, stream: StreamHandle) -> DriverResult<()> {
        self.device.mem_free_async(address, self.name(stream))
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        self.device.exchange_capture_mode(mode)
    }

    fn now(&self) -> u64 {
        self.device.now().saturating_add(self.passed.load(Relaxed))
    }
}

impl<D: Workbench> GraphDevice for Real<D> {
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()> {
        self.device.begin_capture(self.name(stream), mode)
    }

    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle> {
        self.device.end_capture(self.name(stream))
    }

    fn graph_nodes(&self, graph: GraphHandle) -> DriverResult<Vec<Node>> {
        self.device.graph_nodes(graph)
    }

    fn graph_edges(&self, graph: GraphHandle) -> DriverResult<Vec<Edge>> {
        self.device.graph_edges(graph)
    }

    fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()> {
        self.device.graph_destroy(graph)
    }

    fn instantiate(&self, graph: GraphHandle, flags: InstantiateFlags) -> DriverResult<ExecHandle> {
        self.device.instantiate(graph, flags)
    }

    fn graph_upload(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        self.device.graph_upload(exec, self.name(stream))
    }

    fn graph_launch(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        self.device.graph_launch(exec, self.name(stream))
    }

    fn exec_destroy(&self, exec: ExecHandle) -> DriverResult<()> {
        self.device.exec_destroy(exec)
    }

    fn launch_host_function(&self, stream: StreamHandle, function: HostFunction) -> DriverResult<()> {
        self.device.launch_host_function(self.name(stream), function)
    }
}

impl<D: Workbench> Workbench for Real<D> {
    fn stream_create(&self, kind: StreamKind) -> DriverResult<StreamHandle> {
        self.device.stream_create(kind)
    }

    fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()> {
        self.device.stream_destroy(self.name(stream))?;
        self.names.write().unwrap_or_else(PoisonError::into_inner).remove(&stream);
        Ok(())
    }

    fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult<()> {
        self.device.stream_synchronize(self.name(stream))
    }

    fn device_synchronize(&self) -> DriverResult<()> {
        self.device.device_synchronize()?;
        self.move_to_the_end();
        Ok(())
    }

    fn launch(&self, stream: StreamHandle, kernel: Kernel) -> DriverResult<()> {
        self.device.launch(self.name(stream), kernel)
    }

    fn gate_create(&self) -> DriverResult<Gate> {
        self.device.gate_create()
    }

    fn gate_open(&self, gate: Gate) -> DriverResult<()> {
        self.device.gate_open(gate)
    }

    fn read(&self, stream: StreamHandle, src: Address, into: &mut [u8]) -> DriverResult<()> {
        self.device.read(self.name(stream), src, into)
    }
}

impl<D: Workbench> ReplayDevice for Real<D> {
    fn adopt_stream(&self, handle: StreamHandle) -> DriverResult<()> {
        if handle.0 <= StreamHandle::PER_THREAD.0 {
            return Ok(());
        }
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        if !names.contains_key(&handle) {
            names.insert(handle, self.device.stream_create(StreamKind::NonBlocking)?);
        }
        Ok(())
    }

    fn hold(&self, stream: StreamHandle, events: u64) -> DriverResult<()> {
        self.holding.store(true, Relaxed);
        let mut paper = self.paper();
        let until = paper.now.saturating_add(events);
        let work = paper.streams.entry(stream).or_default();
        *work = until.max(*work);
        Ok(())
    }

    fn advance(&self) {
        self.paper().now += 1;
    }

    fn pass_time(&self, nanoseconds: u64) {
        self.passed.fetch_add(nanoseconds, Relaxed);
    }
}

impl<D: Workbench> Real<D> {
    fn use_everything(&self, streams: u32) -> DriverResult<()> {
        let device = &self.device;
        let (at, event) = (device.mem_alloc(4096)?, device.event_create()?);
        let streams =
            (0..streams).map(|_| device.stream_create(StreamKind::NonBlocking)).collect::<Result<Vec<_>, _>>()?;
        let kernels = [
            Kernel::Fill { dst: at, bytes: 1024, value: 0 },
            Kernel::Copy { dst: at.offset(1024), src: at, bytes: 1024 },
            Kernel::Add { dst: at, bytes: 1024, value: 1 },
            Kernel::Checksum { dst: at.offset(2048), src: at, bytes: 1024 },
        ];
        // One stream after the other: they share the memory.
        for stream in &streams {
            for kernel in kernels {
                device.launch(*stream, kernel)?;
            }
            device.event_record(event, *stream)?;
            device.read(*stream, at, &mut [0; 64])?;
        }
        streams.into_iter().try_for_each(|stream| device.stream_destroy(stream))?;
        device.event_destroy(event)?;
        device.mem_free(at)
    }
}

impl<D: Workbench> StressDevice for Real<D> {
    fn warm_up(&self, streams: u32) {
        // What fails here fails again in the run, which says so.
        let _ = self.use_everything(streams);
    }

    fn memory_in_use(&self) -> Option<u64> {
        let info = self.device.mem_info().ok()?;
        Some(info.total.saturating_sub(info.free))
    }
}
