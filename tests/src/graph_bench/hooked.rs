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
    forward! {
        ordinal() -> u32;
        properties() -> &DeviceProperties;
        mem_alloc(bytes: u64) -> DriverResult<Address>;
        mem_free(address: Address) -> DriverResult<()>;
        mem_info() -> DriverResult<MemoryInfo>;
        address_reserve(bytes: u64) -> DriverResult<Address>;
        address_free(address: Address, bytes: u64) -> DriverResult<()>;
        handle_create(bytes: u64) -> DriverResult<MemoryHandle>;
        handle_release(handle: MemoryHandle) -> DriverResult<()>;
        map(address: Address, bytes: u64, handle: MemoryHandle) -> DriverResult<()>;
        set_access(address: Address, bytes: u64) -> DriverResult<()>;
        unmap(address: Address, bytes: u64) -> DriverResult<()>;
        host_alloc(bytes: u64) -> DriverResult<HostMemory>;
        host_free(memory: HostMemory) -> DriverResult<()>;
        copy_to_host(dst: HostMemory, offset: u64, src: Address, bytes: u64) -> DriverResult<()>;
        copy_from_host(dst: Address, src: HostMemory, offset: u64, bytes: u64) -> DriverResult<()>;
        event_create() -> DriverResult<EventHandle>;
        event_destroy(event: EventHandle) -> DriverResult<()>;
        event_record(event: EventHandle, stream: StreamHandle) -> DriverResult<()>;
        event_query(event: EventHandle) -> DriverResult<bool>;
        event_synchronize(event: EventHandle) -> DriverResult<()>;
        stream_wait_event(stream: StreamHandle, event: EventHandle) -> DriverResult<()>;
        capture_frontier(stream: StreamHandle) -> DriverResult<Option<CaptureFrontier>>;
        node_dependencies(graph: GraphHandle, node: NodeId) -> DriverResult<Vec<NodeId>>;
        exchange_capture_mode(mode: CaptureMode) -> DriverResult<CaptureMode>;
        now() -> u64;
    }
    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        let status = self.sim.capture_status(stream);
        self.at(Moment::AfterStatus);
        status
    }
}

impl GraphDevice for Hooked {
    forward! {
        graph_nodes(graph: GraphHandle) -> DriverResult<Vec<Node>>;
        graph_edges(graph: GraphHandle) -> DriverResult<Vec<Edge>>;
        graph_destroy(graph: GraphHandle) -> DriverResult<()>;
        instantiate(graph: GraphHandle, flags: InstantiateFlags) -> DriverResult<ExecHandle>;
        graph_upload(exec: ExecHandle, stream: StreamHandle) -> DriverResult<()>;
        graph_launch(exec: ExecHandle, stream: StreamHandle) -> DriverResult<()>;
        exec_destroy(exec: ExecHandle) -> DriverResult<()>;
        launch_host_function(stream: StreamHandle, function: HostFunction) -> DriverResult<()>;
    }
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
}
