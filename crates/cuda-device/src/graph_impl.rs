//! [`GraphDevice`] for the real GPU.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::path::Path;

use cudarc::driver::sys::{CUDA_MEM_ALLOC_NODE_PARAMS_v1, CUgraph, CUgraphExec, CUgraphNode};
use gpupool_device::{
    Address, Call, CaptureMode, DriverError, DriverResult, Edge, ExecHandle, GraphDevice, GraphHandle, HostFunction,
    InstantiateFlags, Node, NodeId, NodeKind, StreamHandle, code,
};
use hashbrown::HashSet;
use parking_lot::Mutex;

use crate::CudaDevice;
use crate::device::{CaptureAnswer, ExecKind, GraphKind};
use crate::device_impl::{graph_pointer, listed, no_edge};
use crate::error::check;
use crate::objects::{Object, mode_number};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH` and `…_USE_NODE_PRIORITY`.
const AUTO_FREE: u64 = 1;
const NODE_PRIORITY: u64 = 8;

impl GraphDevice for CudaDevice {
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()> {
        let stream = self.stream(Call::StreamBeginCapture, stream)?;
        let _current = self.enter(Call::StreamBeginCapture)?;
        // SAFETY: cuStreamBeginCapture takes a stream, which is held, and a `CUstreamCaptureMode`.
        check(Call::StreamBeginCapture, unsafe { (self.driver.begin_capture)(stream.raw, mode_number(mode)) })
    }

    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle> {
        let call = Call::StreamEndCapture;
        let stream = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: cuStreamEndCapture takes a stream, which is held, and writes one handle, null if it gives an error.
        check(call, unsafe { (self.driver.end_capture)(stream.raw, &mut graph) })?;
        if graph.is_null() {
            return Err(DriverError::new(call, code::CAPTURE_INVALIDATED));
        }
        let kind = GraphKind { nodes: Mutex::new(HashSet::new()), under_capture: None };
        self.graphs.insert(Object::new(&self.context, graph as u64, kind));
        Ok(GraphHandle(graph as u64))
    }

    fn graph_nodes(&self, graph: GraphHandle) -> DriverResult<Vec<Node>> {
        let call = Call::GraphGetNodes;
        let graph = self.graph(call, graph)?;
        let mut known = graph.kind.nodes.lock();
        let _current = self.enter(call)?;
        let nodes = listed(call, |nodes, _, count| {
            // SAFETY: 1. The graph is held and locked. 2. cuGraphGetNodes writes at most `count` handles, or the number if the list is null.
            unsafe { (self.driver.graph_nodes)(graph_pointer(&graph), nodes, count) }
        })?;
        known.extend(nodes.iter().map(|n| n.0));
        nodes.into_iter().map(|id| Ok(Node { id, kind: self.node_kind(id)? })).collect()
    }

    fn graph_edges(&self, graph: GraphHandle) -> DriverResult<Vec<Edge>> {
        let call = Call::GraphGetEdges;
        let graph = self.graph(call, graph)?;
        let mut known = graph.kind.nodes.lock();
        let _current = self.enter(call)?;
        let null = std::ptr::null_mut();
        let mut count = 0;
        // SAFETY: the graph is held and locked; cuGraphGetEdges_v2 with null lists writes the number of edges only.
        let code = unsafe {
            (self.driver.graph_edges)(
                graph_pointer(&graph),
                null,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                &mut count,
            )
        };
        check(call, code)?;
        let mut from: Vec<CUgraphNode> = vec![std::ptr::null_mut(); count];
        let (mut to, mut data) = (from.clone(), vec![no_edge(); count]);
        if count > 0 {
            // SAFETY: as above; each list has room for `count`.
            let code = unsafe {
                (self.driver.graph_edges)(
                    graph_pointer(&graph),
                    from.as_mut_ptr(),
                    to.as_mut_ptr(),
                    data.as_mut_ptr(),
                    &mut count,
                )
            };
            check(call, code)?;
        }
        let ends = from.into_iter().zip(to).take(count);
        let edges: Vec<Edge> =
            ends.map(|(from, to)| Edge { from: NodeId(from as u64), to: NodeId(to as u64) }).collect();
        known.extend(edges.iter().flat_map(|e| [e.from.0, e.to.0]));
        Ok(edges)
    }

    fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()> {
        // The driver's own: one under capture.
        if self.graphs.get(graph.0).is_some_and(|g| g.kind.under_capture.is_some()) {
            return Err(DriverError::new(Call::GraphDestroy, code::INVALID_VALUE));
        }
        self.graphs.destroy(graph.0, code::INVALID_VALUE)
    }

    fn instantiate(&self, graph: GraphHandle, flags: InstantiateFlags) -> DriverResult<ExecHandle> {
        let call = Call::GraphInstantiate;
        let graph = self.graph(call, graph)?;
        if graph.kind.under_capture.is_some() {
            return Err(DriverError::new(call, code::INVALID_VALUE));
        }
        let _locked = graph.kind.nodes.lock();
        let _current = self.enter(call)?;
        let number =
            u64::from(flags.auto_free_on_launch) * AUTO_FREE + u64::from(flags.use_node_priority) * NODE_PRIORITY;
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: cuGraphInstantiateWithFlags takes a graph, which is held and locked, and writes one handle.
        check(call, unsafe { (self.driver.instantiate)(&mut exec, graph_pointer(&graph), number) })?;
        self.execs.insert(Object::new(&self.context, exec as u64, ExecKind { using: Mutex::new(()) }));
        Ok(ExecHandle(exec as u64))
    }

    fn graph_upload(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        let call = Call::GraphUpload;
        let (exec, stream) = (self.exec(call, exec)?, self.stream(call, stream)?);
        let _using = exec.kind.using.lock();
        let _current = self.enter(call)?;
        // SAFETY: cuGraphUpload takes an executable, which is held and locked, and a stream, which is held.
        check(call, unsafe { (self.driver.graph_upload)(exec.raw as CUgraphExec, stream.raw) })
    }

    fn graph_launch(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        let call = Call::GraphLaunch;
        let (exec, stream) = (self.exec(call, exec)?, self.stream(call, stream)?);
        let _using = exec.kind.using.lock();
        let _current = self.enter(call)?;
        // SAFETY: cuGraphLaunch takes an executable, which is held and locked, and a stream, which is held.
        check(call, unsafe { (self.driver.graph_launch)(exec.raw as CUgraphExec, stream.raw) })
    }

    fn exec_destroy(&self, exec: ExecHandle) -> DriverResult<()> {
        self.execs.destroy(exec.0, code::INVALID_VALUE)
    }

    fn launch_host_function(&self, stream: StreamHandle, function: HostFunction) -> DriverResult<()> {
        let call = Call::LaunchHostFunc;
        if self.ask_capture(call, stream)?.status != 0 {
            // It can run only once, a graph many times: see `launch_repeatable_host_function`.
            return Err(DriverError::new(call, code::NOT_SUPPORTED));
        }
        self.submit_once(stream, function)
    }
}

impl CudaDevice {
    /// What a node of a graph that is held and locked does.
    fn node_kind(&self, node: NodeId) -> DriverResult<NodeKind> {
        let (call, raw) = (Call::GraphGetNodes, node.0 as CUgraphNode);
        let mut number = 0;
        // SAFETY: the caller holds and locks the node's graph; cuGraphNodeGetType writes one int.
        check(call, unsafe { (self.driver.node_type)(raw, &mut number) })?;
        Ok(match number {
            0 => NodeKind::Kernel,
            1 => NodeKind::Memcpy,
            2 => NodeKind::Memset,
            3 => NodeKind::Host,
            4 => NodeKind::ChildGraph,
            5 => NodeKind::Empty,
            6 => NodeKind::EventWait,
            7 => NodeKind::EventRecord,
            10 => {
                let mut parameters = MaybeUninit::<CUDA_MEM_ALLOC_NODE_PARAMS_v1>::zeroed();
                // SAFETY: cuGraphMemAllocNodeGetParams writes one such struct.
                check(call, unsafe { (self.driver.node_mem_alloc)(raw, parameters.as_mut_ptr().cast::<c_void>()) })?;
                let at = parameters.as_ptr();
                // SAFETY: the two fields are integers, which any bytes are; the struct as a whole, which has enumerations in it, is
                // not looked at.
                let (bytes, address) = unsafe { ((*at).bytesize, (*at).dptr) };
                NodeKind::MemAlloc { address: Address(address), bytes: bytes as u64 }
            }
            11 => {
                let mut address = 0;
                // SAFETY: cuGraphMemFreeNodeGetParams writes one address.
                check(call, unsafe { (self.driver.node_mem_free)(raw, &mut address) })?;
                NodeKind::MemFree { address: Address(address) }
            }
            other => NodeKind::Other(other.unsigned_abs()),
        })
    }

    /// Records a node on a capturing stream that only joins its dependencies.
    ///
    /// # Errors
    ///
    /// `ILLEGAL_STATE` if the stream is not capturing; the driver's.
    pub fn record_empty_node(&self, stream: StreamHandle) -> DriverResult<()> {
        let call = Call::Other;
        let frontier = gpupool_device::Device::capture_frontier(self, stream)?;
        let frontier = frontier.ok_or(DriverError::new(call, code::ILLEGAL_STATE))?;
        let held = self.stream(call, stream)?;
        let graph = self.graph(call, frontier.graph)?;
        let mut known = graph.kind.nodes.lock();
        let _current = self.enter(call)?;
        let after: Vec<CUgraphNode> = frontier.nodes.iter().map(|n| n.0 as CUgraphNode).collect();
        let mut node: CUgraphNode = std::ptr::null_mut();
        // SAFETY: cuGraphAddEmptyNode takes a graph (held, locked, under capture) and nodes of it, and writes one handle.
        let code =
            unsafe { (self.driver.graph_add_empty)(&mut node, graph_pointer(&graph), after.as_ptr(), after.len()) };
        check(call, code)?;
        known.insert(node as u64);
        // SAFETY: cuStreamUpdateCaptureDependencies_v2 reads one node of the capture's graph; 1 sets the dependencies.
        check(call, unsafe { (self.driver.update_dependencies)(held.raw, &mut node, std::ptr::null(), 1, 1) })
    }

    /// Writes a graph as DOT to a file, with everything the driver knows about its nodes.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for an unknown graph or a path with a zero byte; the driver's.
    pub fn graph_dot(&self, graph: GraphHandle, path: &Path) -> DriverResult<()> {
        /// `CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE`.
        const VERBOSE: u32 = 1;
        let call = Call::Other;
        let graph = self.graph(call, graph)?;
        let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())
            .map_err(|_| DriverError::new(call, code::INVALID_VALUE))?;
        let _locked = graph.kind.nodes.lock();
        let _current = self.enter(call)?;
        // SAFETY: cuGraphDebugDotPrint takes a graph, which is held and locked, and a string that ends in zero.
        check(call, unsafe { (self.driver.graph_dot)(graph_pointer(&graph), path.as_ptr(), VERBOSE) })
    }

    /// Whether a stream captures, valid or not.
    pub(crate) fn is_capturing(&self, call: Call, stream: StreamHandle) -> DriverResult<bool> {
        Ok(self.ask_capture(call, stream)?.status != 0)
    }

    /// The graph under construction on a stream, if its capture is valid.
    pub(crate) fn graph_of(&self, call: Call, stream: StreamHandle) -> DriverResult<Option<CUgraph>> {
        let answer = self.ask_capture(call, stream)?;
        Ok((answer.status == CaptureAnswer::ACTIVE).then_some(answer.graph))
    }
}
