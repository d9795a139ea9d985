//! Graphs, executables and their runs.
//!
//! A graph's nodes are kept in the order of their capture, so dependencies always point back. An executable adds what a run
//! needs: who waits for whom, and a cover of the nodes by chains, each a component of the vector clocks, so that nodes of
//! different branches are unordered to the race detector though they run in one stream's launch.
//!
//! # Invariants
//!
//! * **G1** Launches of one executable run one after the other, in the order of their submission, and each is ordered
//!   after the one before.
//! * **G2** An executable that was destroyed stays until the last run submitted before has completed.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use gpupool_device::{CaptureId, ExecHandle, GraphHandle, Kernel, NodeId, NodeKind};
use hashbrown::HashMap;

use crate::clocks::VectorClock;
use crate::race::Detector;
use crate::streams::StreamId;

/// A host function that can run once for every launch.
pub type RepeatableHostFunction = Arc<dyn Fn() + Send + Sync + 'static>;

/// What a node does.
#[derive(Clone)]
pub(crate) enum NodeWork {
    Kernel(Kernel, Option<u64>),
    Empty,
    Host(RepeatableHostFunction),
    /// Memory of the driver's pools: what it does is done as the graph is launched.
    Memory(NodeKind),
    /// Some other library's node: listed, and nothing when it runs.
    Foreign(NodeKind),
}

impl fmt::Debug for NodeWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel(kernel, _) => crate::kernels::name(kernel),
            Self::Empty => "empty",
            Self::Host(_) => "host function",
            Self::Memory(_) => "memory node",
            Self::Foreign(_) => "foreign node",
        })
    }
}

impl NodeWork {
    pub(crate) fn kind(&self) -> NodeKind {
        match self {
            Self::Kernel(..) => NodeKind::Kernel,
            Self::Empty => NodeKind::Empty,
            Self::Host(_) => NodeKind::Host,
            Self::Memory(kind) | Self::Foreign(kind) => kind.clone(),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct GraphNode {
    pub(crate) id: NodeId,
    pub(crate) device: u32,
    pub(crate) work: NodeWork,
    pub(crate) after: Vec<NodeId>,
}

#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<GraphNode>,
    pub(crate) capture: CaptureId,
    /// Still under capture.
    pub(crate) open: bool,
}

impl Graph {
    /// `of` and everything that it comes after.
    pub(crate) fn ancestors(&self, of: &[NodeId]) -> BTreeSet<NodeId> {
        let mut found: BTreeSet<NodeId> = of.iter().copied().collect();
        for node in self.nodes.iter().rev() {
            if found.contains(&node.id) {
                found.extend(&node.after);
            }
        }
        found
    }
}

/// A node as a run sees it.
#[derive(Clone, Debug)]
pub(crate) struct ExecNode {
    pub(crate) device: u32,
    pub(crate) work: NodeWork,
    pub(crate) after: Vec<u32>,
    pub(crate) before: Vec<u32>,
    pub(crate) component: u32,
}

#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) nodes: Arc<[ExecNode]>,
    pub(crate) capture: CaptureId,
    pub(crate) components: Vec<u32>,
    /// What orders later work after the last run that completed.
    pub(crate) clock: VectorClock,
    /// Runs submitted and not complete: stream and submission.
    pub(crate) runs: VecDeque<(StreamId, u64)>,
    pub(crate) destroyed: bool,
    /// What memory nodes have live is freed by the next launch.
    pub(crate) auto_free: bool,
}

/// One submitted run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) exec: ExecHandle,
    pub(crate) capture: CaptureId,
    pub(crate) nodes: Arc<[ExecNode]>,
    /// For each node, dependencies that have not run.
    pub(crate) missing: Vec<u32>,
    pub(crate) ready: BTreeSet<u32>,
    pub(crate) left: usize,
    /// For each node that ran, its clock and its end.
    pub(crate) done: Vec<Option<(VectorClock, u64)>>,
    /// Everything that comes before the run, and the time it began; set when it starts.
    pub(crate) base: Option<(VectorClock, u64)>,
}

impl Run {
    fn new(handle: ExecHandle, exec: &Exec) -> Self {
        let missing: Vec<u32> = exec.nodes.iter().map(|n| n.after.len() as u32).collect();
        let ready = missing.iter().zip(0..).filter(|(m, _)| **m == 0).map(|(_, i)| i).collect();
        Self {
            exec: handle,
            capture: exec.capture,
            nodes: Arc::clone(&exec.nodes),
            left: missing.len(),
            done: vec![None; missing.len()],
            missing,
            ready,
            base: None,
        }
    }

    /// A node has run. Whether it was the last.
    pub(crate) fn finish(&mut self, node: u32, clock: VectorClock, end: u64) -> bool {
        self.ready.remove(&node);
        if let Some(slot) = self.done.get_mut(node as usize) {
            *slot = Some((clock, end));
        }
        let nodes = Arc::clone(&self.nodes);
        for &next in nodes.get(node as usize).map_or(&[][..], |n| &n.before) {
            if let Some(missing) = self.missing.get_mut(next as usize) {
                *missing -= 1;
                if *missing == 0 {
                    self.ready.insert(next);
                }
            }
        }
        self.left -= 1;
        self.left == 0
    }
}

/// All graphs and executables of a world.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    graphs: HashMap<GraphHandle, Graph>,
    execs: HashMap<ExecHandle, Exec>,
    last_handle: u64,
    last_node: u64,
}

impl Graphs {
    /// An empty graph under capture.
    pub(crate) fn open(&mut self, capture: CaptureId) -> GraphHandle {
        self.last_handle += 1;
        let handle = GraphHandle(self.last_handle);
        self.graphs.insert(handle, Graph { nodes: Vec::new(), capture, open: true });
        handle
    }

    pub(crate) fn get(&self, handle: GraphHandle) -> Option<&Graph> {
        self.graphs.get(&handle)
    }

    pub(crate) fn close(&mut self, handle: GraphHandle) {
        if let Some(graph) = self.graphs.get_mut(&handle) {
            graph.open = false;
        }
    }

    pub(crate) fn remove(&mut self, handle: GraphHandle) -> Option<Graph> {
        self.graphs.remove(&handle)
    }

    pub(crate) fn add_node(&mut self, graph: GraphHandle, device: u32, work: NodeWork, after: Vec<NodeId>) -> NodeId {
        self.last_node += 1;
        let id = NodeId(self.last_node);
        if let Some(graph) = self.graphs.get_mut(&graph) {
            graph.nodes.push(GraphNode { id, device, work, after });
        }
        id
    }

    /// Makes a graph executable.
    pub(crate) fn instantiate(
        &mut self,
        graph: GraphHandle,
        auto_free: bool,
        detector: &mut Detector,
    ) -> Option<ExecHandle> {
        let graph = self.graphs.get(&graph).filter(|g| !g.open)?;
        let index: HashMap<NodeId, u32> = graph.nodes.iter().map(|n| n.id).zip(0..).collect();
        let mut clock = VectorClock::default();
        let mut components = Vec::new();
        let mut nodes: Vec<ExecNode> = Vec::with_capacity(graph.nodes.len());
        for (node, number) in graph.nodes.iter().zip(0_u32..) {
            let after: Vec<u32> = node.after.iter().filter_map(|id| index.get(id).copied()).collect();
            let mut component = None;
            for &earlier in &after {
                let Some(earlier) = nodes.get_mut(earlier as usize) else { continue };
                // The chain goes on here if it has not gone on elsewhere.
                if earlier.before.is_empty() && component.is_none() {
                    component = Some(earlier.component);
                }
                earlier.before.push(number);
            }
            let component = component.unwrap_or_else(|| {
                let (new, first) = detector.component();
                components.push(new);
                clock.join(&first);
                new
            });
            nodes.push(ExecNode { device: node.device, work: node.work.clone(), after, before: Vec::new(), component });
        }
        self.last_handle += 1;
        let handle = ExecHandle(self.last_handle);
        let (capture, nodes) = (graph.capture, nodes.into());
        let exec = Exec { nodes, capture, components, clock, runs: VecDeque::new(), destroyed: false, auto_free };
        self.execs.insert(handle, exec);
        Some(handle)
    }

    /// An executable that was not destroyed.
    pub(crate) fn exec(&self, handle: ExecHandle) -> Option<&Exec> {
        self.execs.get(&handle).filter(|e| !e.destroyed)
    }

    /// The run that comes next of an executable.
    pub(crate) fn next_run(&self, handle: ExecHandle) -> Option<(StreamId, u64)> {
        self.execs.get(&handle)?.runs.front().copied()
    }

    /// A new run, to be submitted to `stream` as `submission`.
    pub(crate) fn launch(&mut self, handle: ExecHandle, stream: StreamId, submission: u64) -> Option<Run> {
        let exec = self.execs.get_mut(&handle).filter(|e| !e.destroyed)?;
        exec.runs.push_back((stream, submission));
        Some(Run::new(handle, exec))
    }

    /// What the next run of an executable comes after.
    pub(crate) fn clock(&self, handle: ExecHandle) -> VectorClock {
        self.execs.get(&handle).map(|e| e.clock.clone()).unwrap_or_default()
    }

    /// A run has completed.
    pub(crate) fn finished(&mut self, handle: ExecHandle, clock: VectorClock, detector: &mut Detector) {
        if let Some(exec) = self.execs.get_mut(&handle) {
            exec.runs.pop_front();
            exec.clock = clock;
            self.bury(handle, detector);
        }
    }

    /// Destroys an executable. Whether there was one.
    pub(crate) fn destroy(&mut self, handle: ExecHandle, detector: &mut Detector) -> bool {
        let Some(exec) = self.execs.get_mut(&handle).filter(|e| !e.destroyed) else { return false };
        exec.destroyed = true;
        self.bury(handle, detector);
        true
    }

    fn bury(&mut self, handle: ExecHandle, detector: &mut Detector) {
        if self.execs.get(&handle).is_some_and(|e| e.destroyed && e.runs.is_empty())
            && let Some(exec) = self.execs.remove(&handle)
        {
            for component in exec.components {
                detector.bury(component, exec.clock.get(component));
            }
        }
    }
}
