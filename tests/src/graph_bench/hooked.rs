//! A simulated device that calls back around the calls that begin and end a capture or ask for one, so that a test can do something in a gap that
//! otherwise only a second thread would hit.

use std::sync::Mutex;

use gpupool_device::{
    Address, CaptureFrontier, CaptureMode, CaptureStatus, Device, DeviceProperties, DriverResult, Edge, EventHandle,
    ExecHandle, GraphDevice, GraphHandle, HostFunction, HostMemory, InstantiateFlags, MemoryHandle, MemoryInfo, Node,
    NodeId, StreamHandle,
};
use gpupool_sim_device::SimDevice;

/// Where a test looks in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// Before the driver's begin.
    BeforeBegin,
    /// After it, before its caller knows.
    AfterBegin,
    /// Before the driver's end.
    BeforeEnd,
    /// After it, before its caller knows.
    AfterEnd,
    /// After a stream's capture status was asked for, before its caller knows.
    AfterStatus,
}

type Hook = Box<dyn FnMut(Moment) + Send>;

/// The device.
pub struct Hooked {
    /// What does the work.
    pub sim: SimDevice,
    hook: Mutex<Option<Hook>>,
}

impl Hooked {
    /// Around a simulated device.
    #[must_use]
    pub fn new(sim: SimDevice) -> Self {
        Self { sim, hook: Mutex::new(None) }
    }

    /// Calls `hook` from now on. It is not called for what it does itself.
    pub fn on(&self, hook: impl FnMut(Moment) + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }

    /// No longer calls anything back.
    pub fn off(&self) {
        *self.hook.lock().unwrap() = None;
    }

    fn at(&self, moment: Moment) {
        let hook = self.hook.lock().unwrap().take();
        if let Some(mut hook) = hook {
            hook(moment);
            self.hook.lock().unwrap().get_or_insert(hook);
        }
    }
}

impl Device for Hooked {
    fn ordinal(&self) -> u32 {
        self.sim.ordinal()
    }
    fn properties(&self) -> &DeviceProperties {
        self.sim.properties()
    }
    fn mem_alloc(&self, bytes: u64) -> DriverResult<Address> {
        self.sim.mem_alloc(bytes)
    }
    fn mem_free(&self, address: Address) -> DriverResult<()> {
        self.sim.mem_free(address)
    }
    fn mem_info(&self) -> DriverResult<MemoryInfo> {
        self.sim.mem_info()
    }
    fn address_reserve(&self, bytes: u64) -> DriverResult<Address> {
        self.sim.address_reserve(bytes)
    }
    fn address_free(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.sim.address_free(address, bytes)
    }
    fn handle_create(&self, bytes: u64) -> DriverResult<MemoryHandle> {
        self.sim.handle_create(bytes)
    }
    fn handle_release(&self, handle: MemoryHandle) -> DriverResult<()> {
        self.sim.handle_release(handle)
    }
    fn map(&self, address: Address, bytes: u64, handle: MemoryHandle) -> DriverResult<()> {
        self.sim.map(address, bytes, handle)
    }
    fn set_access(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.sim.set_access(address, bytes)
    }
    fn unmap(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.sim.unmap(address, bytes)
    }
    fn host_alloc(&self, bytes: u64) -> DriverResult<HostMemory> {
        self.sim.host_alloc(bytes)
    }
    fn host_free(&self, memory: HostMemory) -> DriverResult<()> {
        self.sim.host_free(memory)
    }
    fn copy_to_host(&self, dst: HostMemory, offset: u64, src: Address, bytes: u64) -> DriverResult<()> {
        self.sim.copy_to_host(dst, offset, src, bytes)
    }
    fn copy_from_host(&self, dst: Address, src: HostMemory, offset: u64, bytes: u64) -> DriverResult<()> {
        self.sim.copy_from_host(dst, src, offset, bytes)
    }
    fn event_create(&self) -> DriverResult<EventHandle> {
        self.sim.event_create()
    }
    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        self.sim.event_destroy(event)
    }
    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        self.sim.event_record(event, stream)
    }
    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        self.sim.event_query(event)
    }
    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        self.sim.event_synchronize(event)
    }
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        self.sim.stream_wait_event(stream, event)
    }
    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        let status = self.sim.capture_status(stream);
        self.at(Moment::AfterStatus);
        status
    }
    fn capture_frontier(&self, stream: StreamHandle) -> DriverResult<Option<CaptureFrontier>> {
        self.sim.capture_frontier(stream)
    }
    fn node_dependencies(&self, graph: GraphHandle, node: NodeId) -> DriverResult<Vec<NodeId>> {
        self.sim.node_dependencies(graph, node)
    }
    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        self.sim.exchange_capture_mode(mode)
    }
    fn now(&self) -> u64 {
        self.sim.now()
    }
}

impl GraphDevice for Hooked {
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()> {
        self.at(Moment::BeforeBegin);
        let begun = self.sim.begin_capture(stream, mode);
        self.at(Moment::AfterBegin);
        begun
    }
    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle> {
        self.at(Moment::BeforeEnd);
        let ended = self.sim.end_capture(stream);
        self.at(Moment::AfterEnd);
        ended
    }
    fn graph_nodes(&self, graph: GraphHandle) -> DriverResult<Vec<Node>> {
        self.sim.graph_nodes(graph)
    }
    fn graph_edges(&self, graph: GraphHandle) -> DriverResult<Vec<Edge>> {
        self.sim.graph_edges(graph)
    }
    fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()> {
        self.sim.graph_destroy(graph)
    }
    fn instantiate(&self, graph: GraphHandle, flags: InstantiateFlags) -> DriverResult<ExecHandle> {
        self.sim.instantiate(graph, flags)
    }
    fn graph_upload(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        self.sim.graph_upload(exec, stream)
    }
    fn graph_launch(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        self.sim.graph_launch(exec, stream)
    }
    fn exec_destroy(&self, exec: ExecHandle) -> DriverResult<()> {
        self.sim.exec_destroy(exec)
    }
    fn launch_host_function(&self, stream: StreamHandle, function: HostFunction) -> DriverResult<()> {
        self.sim.launch_host_function(stream, function)
    }
}
