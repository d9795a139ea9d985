//! Captures and graphs.

use crate::{Address, CaptureMode, Device, DriverResult, StreamHandle};

/// A graph: nodes and edges, not yet executable.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GraphHandle(pub u64);

/// An executable graph.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ExecHandle(pub u64);

/// A node of a graph.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u64);

/// What a node does.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NodeKind {
    /// A kernel launch.
    Kernel,
    /// A copy.
    Memcpy,
    /// A fill.
    Memset,
    /// A host function.
    Host,
    /// A graph inside the graph.
    ChildGraph,
    /// Nothing: joins its dependencies.
    Empty,
    /// Waits for an external event.
    EventWait,
    /// Records an external event.
    EventRecord,
    /// Allocates memory when it runs.
    MemAlloc {
        /// Where the memory will be.
        address: Address,
        /// How much.
        bytes: u64,
    },
    /// Frees memory when it runs.
    MemFree {
        /// What is freed.
        address: Address,
    },
    /// Some other kind, by the driver's number.
    Other(u32),
}

/// A node with its kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// The node.
    pub id: NodeId,
    /// What it does.
    pub kind: NodeKind,
}

/// One node must be complete before another starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Edge {
    /// Runs first.
    pub from: NodeId,
    /// Runs after it.
    pub to: NodeId,
}

/// How a graph is made executable.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct InstantiateFlags {
    /// Memory that the graph allocated and nobody freed is freed when it is launched again.
    pub auto_free_on_launch: bool,
    /// Kernel nodes keep the priority of the stream they were captured from.
    pub use_node_priority: bool,
}

/// A function that runs on the host when a stream reaches it. It must not call the device.
pub type HostFunction = Box<dyn FnOnce() + Send + 'static>;

/// What captures and graphs need beyond [`Device`].
pub trait GraphDevice: Device {
    /// Begins to capture what is submitted to `stream`.
    ///
    /// *Errors*: `ILLEGAL_STATE` if the stream is capturing already (that capture survives). *Blocks*: no. *Capture*: permitted
    /// on another stream.
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()>;

    /// Ends the capture that was begun on `stream` and gives its graph. It must be called even for an invalidated capture: it
    /// then returns an error and no graph, and the stream is usable again.
    ///
    /// *Errors*: `CAPTURE_INVALIDATED`, `CAPTURE_UNJOINED` (the capture is over all the same), `CAPTURE_UNMATCHED`,
    /// `CAPTURE_WRONG_THREAD`, `ILLEGAL_STATE` if the stream is not capturing. *Blocks*: no.
    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle>;

    /// The nodes of a graph, also of one under capture. *Blocks*: no. *Capture*: permitted.
    fn graph_nodes(&self, graph: GraphHandle) -> DriverResult<Vec<Node>>;

    /// The edges of a graph, also of one under capture. *Blocks*: no. *Capture*: permitted.
    fn graph_edges(&self, graph: GraphHandle) -> DriverResult<Vec<Edge>>;

    /// Destroys a graph; executables made from it stay. *Blocks*: no. *Capture*: permitted.
    fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()>;

    /// Makes a graph executable.
    ///
    /// *Errors*: `OUT_OF_MEMORY`, `INVALID_VALUE`. *Blocks*: no. *Capture*: unsafe call.
    fn instantiate(&self, graph: GraphHandle, flags: InstantiateFlags) -> DriverResult<ExecHandle>;

    /// Does a launch's one-time work ahead of it. *Blocks*: no. *Capture*: permitted on another stream.
    fn graph_upload(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()>;

    /// Submits one run of the graph to `stream`. Launches of one executable run one after the other.
    ///
    /// *Blocks*: no. *Capture*: permitted on another stream.
    fn graph_launch(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()>;

    /// Destroys an executable; a run that was submitted before still completes.
    ///
    /// *Blocks*: no. *Capture*: **unsafe call**.
    fn exec_destroy(&self, exec: ExecHandle) -> DriverResult<()>;

    /// Runs `function` on the host once `stream` reaches it. On a capturing stream it becomes a node, run once a launch; a
    /// simulated or real device may refuse that for a function that can run only once (`NOT_SUPPORTED`).
    ///
    /// *Blocks*: no. *Capture*: permitted on a stream that is not capturing.
    fn launch_host_function(&self, stream: StreamHandle, function: HostFunction) -> DriverResult<()>;
}
