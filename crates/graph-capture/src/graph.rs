//! A captured graph: what it holds, what it reports.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use gpupool_allocator::state::GraphState;
use gpupool_allocator::{Allocation, BlockRef, HeldBlock, PoolHold, PoolId, Range};
use gpupool_device::{
    Address, CaptureId, DriverResult, GraphDevice, GraphHandle, InstantiateFlags, Node, NodeKind, with_relaxed_capture,
};

use crate::executable::Executable;
use crate::inputs::{Borrowed, LastRunNumber};
use crate::reaper::{Reaper, Remains, Tidier};
use crate::runs::PoolRuns;
use crate::sync::Mutex;

static NEXT_GRAPH: AtomicU64 = AtomicU64::new(1);

/// A graph's number, unique in the process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GraphId(u64);

impl GraphId {
    pub(crate) fn fresh() -> Self {
        Self(NEXT_GRAPH.fetch_add(1, Ordering::Relaxed))
    }
}

impl GraphId {
    /// The number itself, as states of an allocator have it.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for GraphId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "g{}", self.0)
    }
}

/// What a capture took from one pool. Sizes in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolReport {
    /// The pool.
    pub pool: PoolId,
    /// Its device.
    pub device: u32,
    /// New segments that the capture made.
    pub new_segment_bytes: u64,
    /// Memory that was in the pool before and that the capture used.
    pub reused_bytes: u64,
    /// The most that was live in the pool at once during the capture.
    pub peak_bytes: u64,
    /// What the capture handed out, merged: everything that a replay may write.
    pub written: Vec<Range>,
    /// Blocks that the capture handed out and that were live at its end.
    pub outputs: Vec<HeldBlock>,
}

impl PoolReport {
    /// Bytes that a replay may write.
    #[must_use]
    pub fn written_bytes(&self) -> u64 {
        self.written.iter().map(|r| r.bytes).sum()
    }
}

/// What a capture became.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct GraphReport {
    /// The driver's number of the capture.
    pub capture: CaptureId,
    /// Nodes by kind.
    pub nodes: BTreeMap<String, usize>,
    /// Nodes that allocate or free memory when the graph runs: recorded by others, and a fault in most programs, since such a graph
    /// cannot be launched twice.
    pub memory_nodes: usize,
    /// What was taken from each pool that the capture touched.
    pub pools: Vec<PoolReport>,
    /// Bytes of the capture's device that went away meanwhile and are in no segment of the allocator: what libraries and the driver
    /// itself took, whether or not for the graph. Negative if they gave some back; 0 if the driver did not say.
    pub driver_bytes: i64,
}

impl GraphReport {
    /// How many nodes there are. A graph without any was most likely captured on the wrong stream or device.
    #[must_use]
    pub fn node_count(&self) -> usize {
        self.nodes.values().sum()
    }
}

/// The name of a node's kind.
fn kind_name(kind: &NodeKind) -> String {
    match kind {
        NodeKind::Kernel => "kernel".to_owned(),
        NodeKind::Memcpy => "memcpy".to_owned(),
        NodeKind::Memset => "memset".to_owned(),
        NodeKind::Host => "host function".to_owned(),
        NodeKind::ChildGraph => "child graph".to_owned(),
        NodeKind::Empty => "empty".to_owned(),
        NodeKind::EventWait => "event wait".to_owned(),
        NodeKind::EventRecord => "event record".to_owned(),
        NodeKind::MemAlloc { .. } => "memory allocation".to_owned(),
        NodeKind::MemFree { .. } => "memory free".to_owned(),
        NodeKind::Other(number) => format!("kind {number}"),
        _ => "unknown kind".to_owned(),
    }
}

/// Nodes by kind, and how many of them are memory nodes.
pub(crate) fn count_nodes(nodes: &[Node]) -> (BTreeMap<String, usize>, usize) {
    let mut by_kind = BTreeMap::new();
    let mut memory = 0;
    for node in nodes {
        *by_kind.entry(kind_name(&node.kind)).or_insert(0) += 1;
        memory += usize::from(matches!(node.kind, NodeKind::MemAlloc { .. } | NodeKind::MemFree { .. }));
    }
    (by_kind, memory)
}

/// What the allocation nodes of a graph allocate and none of its nodes frees.
pub(crate) fn left_live(nodes: &[Node]) -> Vec<Address> {
    let freed: Vec<Address> = nodes
        .iter()
        .filter_map(|node| if let NodeKind::MemFree { address } = node.kind { Some(address) } else { None })
        .collect();
    let allocated = nodes
        .iter()
        .filter_map(|node| if let NodeKind::MemAlloc { address, .. } = node.kind { Some(address) } else { None });
    allocated.filter(|address| !freed.contains(address)).collect()
}

/// One pool of a graph.
pub(crate) struct GraphPool<D: GraphDevice> {
    pub(crate) hold: PoolHold,
    pub(crate) runs: Arc<PoolRuns<D>>,
    pub(crate) written: Vec<Range>,
    pub(crate) outputs: Vec<HeldBlock>,
    /// What was live in it when the capture began.
    pub(crate) borrowed: Vec<Borrowed>,
    pub(crate) last_run: LastRunNumber,
}

/// A graph, shared by its handles, its executables and their launches.
pub(crate) struct GraphInner<D: GraphDevice> {
    pub(crate) id: GraphId,
    pub(crate) device: Arc<D>,
    pub(crate) handle: GraphHandle,
    /// The capture's own pool; `pools` may begin with another that a scope inside it led to.
    pub(crate) pool: PoolId,
    /// Weak, since the queue holds graphs.
    pub(crate) reaper: Weak<Reaper<D>>,
    /// In the order their runs are locked in.
    pub(crate) pools: Vec<GraphPool<D>>,
    pub(crate) inputs: Mutex<Vec<BlockRef<D>>>,
    pub(crate) retained: Mutex<Vec<Allocation<D>>>,
    pub(crate) report: GraphReport,
    /// Where blocks of the capture are memory nodes, since that back end was asked for: those that a launch leaves live. The next one frees
    /// them, and the graph's end.
    pub(crate) left_live: Option<Vec<Address>>,
}

impl<D: GraphDevice> GraphInner<D> {
    /// The graph as far as it concerns the allocator with this number, if it does.
    fn state(&self, allocator: u64) -> Option<GraphState> {
        let mut state = GraphState::new(self.id.0);
        for pool in self.pools.iter().filter(|pool| pool.hold.allocator() == allocator) {
            state.pools.push(pool.hold.id());
            state.written.extend(&pool.written);
            state.outputs.extend(&pool.outputs);
        }
        state.written = Range::merged(state.written);
        (!state.pools.is_empty()).then_some(state)
    }
}

/// The graphs of all who share a registry of captures, so that states can tell of them.
pub(crate) struct Graphs<D: GraphDevice>(Mutex<Vec<Weak<GraphInner<D>>>>);

impl<D: GraphDevice> Default for Graphs<D> {
    fn default() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl<D: GraphDevice> Graphs<D> {
    pub(crate) fn add(&self, graph: &Arc<GraphInner<D>>) {
        let mut graphs = self.0.lock();
        graphs.retain(|graph| graph.strong_count() > 0);
        graphs.push(Arc::downgrade(graph));
    }

    /// Those that hold memory of the allocator with this number.
    pub(crate) fn states(&self, allocator: u64) -> Vec<GraphState> {
        // A graph whose last handle goes meanwhile ends here, with no lock held.
        let graphs: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        graphs.iter().filter_map(|graph| graph.state(allocator)).collect()
    }
}

/// The last handle is gone: the graph goes to the reaper with what it holds.
impl<D: GraphDevice> Drop for GraphInner<D> {
    fn drop(&mut self) {
        let holds = std::mem::take(&mut self.pools).into_iter().map(|p| p.hold).collect();
        let retained = std::mem::take(self.retained.get_mut());
        let left_live = self.left_live.take().unwrap_or_default();
        let mut remains =
            Remains { exec: None, graph: Some(self.handle), left_live, last: None, of: None, holds, retained };
        match self.reaper.upgrade() {
            Some(reaper) => reaper.push(remains),
            None => {
                remains.destroy(&self.device);
                remains.destroy(&self.device);
            }
        }
    }
}

/// A captured graph. It holds every pool that its capture touched, so nothing that it baked in is handed to anyone outside them while it,
/// an executable of it, or a launch of one exists.
///
/// Cheap to clone; a clone is the same graph. Dropping the last handle neither waits nor fails.
pub struct Graph<D: GraphDevice> {
    pub(crate) inner: Arc<GraphInner<D>>,
    /// After the graph: the last handle's drop queues it.
    pub(crate) tidier: Tidier<D>,
}

impl<D: GraphDevice> Clone for Graph<D> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), tidier: Tidier(Arc::clone(&self.tidier.0)) }
    }
}

impl<D: GraphDevice> fmt::Debug for Graph<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({}, {} nodes)", self.inner.id, self.inner.report.node_count())
    }
}

impl<D: GraphDevice> Graph<D> {
    /// The graph's number.
    #[must_use]
    pub fn id(&self) -> GraphId {
        self.inner.id
    }

    /// The driver's graph.
    #[must_use]
    pub fn handle(&self) -> GraphHandle {
        self.inner.handle
    }

    /// What the capture became: nodes, memory, outputs.
    #[must_use]
    pub fn report(&self) -> &GraphReport {
        &self.inner.report
    }

    /// The pool that its capture drew from.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        self.inner.pool
    }

    /// The pools that the graph holds.
    #[must_use]
    pub fn pools(&self) -> Vec<PoolId> {
        self.inner.pools.iter().map(|p| p.hold.id()).collect()
    }

    /// The byte ranges that both graphs may write: as long as one's results there are needed, the other must not run. O(ranges).
    #[must_use]
    pub fn overlap(&self, other: &Self) -> Vec<Range> {
        let mut out = Vec::new();
        for mine in &self.inner.pools {
            for theirs in &other.inner.pools {
                if mine.hold.id() == theirs.hold.id() && mine.hold.allocator() == theirs.hold.allocator() {
                    out.extend(Range::common(&mine.written, &theirs.written));
                }
            }
        }
        Range::merged(out)
    }

    /// Bytes that this graph may write and none of `others` may: what its destruction would free at most.
    #[must_use]
    pub fn exclusive_bytes(&self, others: &[&Self]) -> u64 {
        let written: u64 = self.inner.pools.iter().flat_map(|p| &p.written).map(|r| r.bytes).sum();
        let shared = others.iter().filter(|o| o.id() != self.id()).flat_map(|o| self.overlap(o)).collect();
        written - Range::merged(shared).iter().map(|r| r.bytes).sum::<u64>()
    }

    /// Pins a block to the graph: it stays live until the graph is gone and its last launch has finished.
    pub fn retain(&self, block: Allocation<D>) {
        self.inner.retained.lock().push(block);
    }

    /// Declares that the graph reads this block: a launch checks that it is still the same live block, and not another one, or nobody's,
    /// at the same address.
    pub fn declare_input(&self, block: &Allocation<D>) {
        // It takes the lock of the block's arena: not under ours.
        let input = block.downgrade();
        self.inner.inputs.lock().extend(input);
    }

    /// Makes the graph executable. Under the policy `stream-ordered` what a launch left live is always freed by the next.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn instantiate(&self, mut flags: InstantiateFlags) -> DriverResult<Executable<D>> {
        flags.auto_free_on_launch |= self.inner.left_live.is_some();
        let exec = with_relaxed_capture(&*self.inner.device, |d| d.instantiate(self.inner.handle, flags))?;
        Ok(Executable::new(Arc::clone(&self.inner), exec, Tidier(Arc::clone(&self.tidier.0))))
    }
}
