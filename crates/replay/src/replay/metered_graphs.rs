//! Captures and graphs through a [`Meter`]: handed on as they are. They are the replay's, not the allocator's, so they are not counted.

use gpupool_device::{
    CaptureMode, DriverResult, Edge, ExecHandle, GraphDevice, GraphHandle, HostFunction, InstantiateFlags, Node,
    StreamHandle,
};

use super::{Meter, ReplayDevice};

impl<D: ReplayDevice> GraphDevice for Meter<D> {
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()> {
        self.device().begin_capture(stream, mode)
    }

    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle> {
        self.device().end_capture(stream)
    }

    fn graph_nodes(&self, graph: GraphHandle) -> DriverResult<Vec<Node>> {
        self.device().graph_nodes(graph)
    }

    fn graph_edges(&self, graph: GraphHandle) -> DriverResult<Vec<Edge>> {
        self.device().graph_edges(graph)
    }

    fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()> {
        self.device().graph_destroy(graph)
    }

    fn instantiate(&self, graph: GraphHandle, flags: InstantiateFlags) -> DriverResult<ExecHandle> {
        self.device().instantiate(graph, flags)
    }

    fn graph_upload(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        self.device().graph_upload(exec, stream)
    }

    fn graph_launch(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        self.device().graph_launch(exec, stream)
    }

    fn exec_destroy(&self, exec: ExecHandle) -> DriverResult<()> {
        self.device().exec_destroy(exec)
    }

    fn launch_host_function(&self, stream: StreamHandle, function: HostFunction) -> DriverResult<()> {
        self.device().launch_host_function(stream, function)
    }
}
