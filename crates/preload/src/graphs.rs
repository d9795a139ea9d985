//! Which graphs and executables hold which pools, as the program makes and destroys them.
//!
//! * **P1** A capture that begins on a stream gets a pool, of its own or one for all. Its requests come from there.
//! * **P2** The pool is held by the capture's graph, by clones of it and graphs that it became a child or a conditional body of, by
//!   executables made from or updated to any of these, and by the last launch of each.
//! * **P3** Launches whose pools overlap are ordered on the device: no two of them run at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::ThreadId;

use gpupool::device::{CaptureId, StreamHandle};
use gpupool::{PoolHold, PoolId, SessionKey, WorkMark};
use parking_lot::Mutex;

use crate::blocks::Served;
use crate::front::Front;

/// The pools of one capture.
pub(crate) struct Held<D: Front> {
    pool: PoolId,
    /// The last launch of a graph that holds it. Locked while one is submitted (P3).
    last: Arc<Mutex<Option<WorkMark<D>>>>,
    _holds: Vec<PoolHold>,
}

type Holds<D> = Vec<Arc<Held<D>>>;

struct Executable<D: Front> {
    holds: Holds<D>,
    last: Option<WorkMark<D>>,
}

/// A stream that captures: the number of a thread's own default stream means another one on each thread.
type StreamKey = (u64, Option<ThreadId>);

fn key(stream: u64) -> StreamKey {
    (stream, (stream == StreamHandle::PER_THREAD.0).then(|| std::thread::current().id()))
}

struct Open<D: Front> {
    id: CaptureId,
    session: SessionKey,
    pool: PoolId,
    /// Of graphs that were launched into it.
    children: Holds<D>,
}

struct Tables<D: Front> {
    open: HashMap<StreamKey, Open<D>>,
    graphs: HashMap<u64, Holds<D>>,
    /// The graph that a graph is a part of: the body of a conditional node.
    parents: HashMap<u64, u64>,
    execs: HashMap<u64, Executable<D>>,
    /// The order of launches by pool.
    orders: HashMap<PoolId, Arc<Mutex<Option<WorkMark<D>>>>>,
}

/// What is known of the program's graphs.
pub(crate) struct Graphs<D: Front> {
    /// The pool of all captures, if there is one for all.
    shared: Option<PoolId>,
    tables: Mutex<Tables<D>>,
}

fn add<D: Front>(to: &mut Holds<D>, more: &Holds<D>) {
    for held in more {
        if !to.iter().any(|h| Arc::ptr_eq(h, held)) {
            to.push(Arc::clone(held));
        }
    }
}

impl<D: Front> Tables<D> {
    /// A graph holds more, and so does the graph that it is a part of.
    fn graph_holds(&mut self, graph: u64, more: &Holds<D>) {
        if more.is_empty() {
            return;
        }
        let mut next = Some(graph);
        // A part is made after its whole: there is no circle, and if numbers say otherwise, it ends all the same.
        for _ in 0..=self.parents.len() {
            let Some(graph) = next else { return };
            add(self.graphs.entry(graph).or_default(), more);
            next = self.parents.get(&graph).copied();
        }
    }

    /// A graph is gone, and its parts with it.
    fn take(&mut self, graph: u64) -> Gone<D> {
        let mut gone = Gone { graphs: Vec::new(), parents: Vec::new() };
        let mut next = vec![graph];
        while let Some(graph) = next.pop() {
            let parts: Vec<u64> =
                self.parents.iter().filter(|(_, whole)| **whole == graph).map(|(part, _)| *part).collect();
            for part in parts {
                self.parents.remove(&part);
                gone.parents.push((part, graph));
                next.push(part);
            }
            gone.graphs.extend(self.graphs.remove(&graph).map(|holds| (graph, holds)));
        }
        gone
    }
}

/// What was known of a graph that is gone.
struct Gone<D: Front> {
    graphs: Vec<(u64, Holds<D>)>,
    parents: Vec<(u64, u64)>,
}

impl<D: Front> Graphs<D> {
    pub(crate) fn new(one_pool: bool) -> Self {
        let tables = Tables {
            open: HashMap::new(),
            graphs: HashMap::new(),
            parents: HashMap::new(),
            execs: HashMap::new(),
            orders: HashMap::new(),
        };
        Self { shared: one_pool.then(PoolId::fresh_for_capture), tables: Mutex::new(tables) }
    }

    /// `graph` is a copy of `of`, or contains it, or is contained in it.
    pub(crate) fn graph_holds_what(&self, graph: u64, of: u64) {
        let mut tables = self.tables.lock();
        let more = tables.graphs.get(&of).cloned().unwrap_or_default();
        tables.graph_holds(graph, &more);
    }

    /// `part` is the body of a node of `whole`: what it comes to hold, `whole` holds, and it is destroyed with it.
    pub(crate) fn graph_is_part_of(&self, part: u64, whole: u64) {
        self.tables.lock().parents.insert(part, whole);
    }

    /// `graph` is part of a graph that is not known which: it may be of any.
    pub(crate) fn graph_may_be_of_any(&self, graph: u64) {
        let mut tables = self.tables.lock();
        let all: Vec<_> = tables.graphs.values().flatten().cloned().collect();
        add(tables.graphs.entry(graph).or_default(), &all);
    }

    /// `exec` was made from, or updated to, or got as a child, `graph`.
    pub(crate) fn exec_holds(&self, exec: u64, graph: u64) {
        let mut tables = self.tables.lock();
        let more = tables.graphs.get(&graph).cloned().unwrap_or_default();
        if !more.is_empty() {
            let entry = tables.execs.entry(exec).or_insert_with(|| Executable { holds: Vec::new(), last: None });
            add(&mut entry.holds, &more);
        }
    }

    /// Whether an executable holds pools.
    pub(crate) fn knows_exec(&self, exec: u64) -> bool {
        self.tables.lock().execs.contains_key(&exec)
    }

    /// Whether anything is known of a graph.
    pub(crate) fn knows_graph(&self, graph: u64) -> bool {
        let tables = self.tables.lock();
        tables.graphs.contains_key(&graph) || tables.parents.values().any(|whole| *whole == graph)
    }

    /// The driver destroys a graph. Forgotten before it does, since the number may be another graph's right after.
    pub(crate) fn graph_ends(&self, graph: u64, destroy: impl FnOnce() -> u32) -> u32 {
        let gone = self.tables.lock().take(graph);
        let code = destroy();
        if code != 0 {
            let mut tables = self.tables.lock();
            tables.graphs.extend(gone.graphs);
            tables.parents.extend(gone.parents);
        }
        code
    }

    /// Nothing can run any more, and nothing is captured: gives the sessions of the captures that were under way.
    pub(crate) fn all_end(&self) -> Vec<SessionKey> {
        let mut tables = self.tables.lock();
        let gone =
            (std::mem::take(&mut tables.graphs), std::mem::take(&mut tables.execs), std::mem::take(&mut tables.orders));
        let open = std::mem::take(&mut tables.open);
        tables.parents.clear();
        drop(tables);
        drop(gone);
        open.into_values().map(|open| open.session).collect()
    }

    /// How many graphs and executables hold pools.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let tables = self.tables.lock();
        (tables.graphs.len(), tables.execs.len())
    }
}

impl<D: Front> Served<D> {
    /// A capture has begun on `stream`.
    ///
    /// # Safety
    ///
    /// As [`Front::lend`].
    pub(crate) unsafe fn capture_begins(&self, stream: u64) {
        // SAFETY: the caller's promise.
        let registered = unsafe { self.stream(stream) };
        let Some(id) = self.device.capture_status(registered.handle()).ok().and_then(|status| status.id()) else {
            return;
        };
        let mut pool = self.graphs.shared.unwrap_or_else(PoolId::fresh_for_capture);
        let mut session = self.allocator.adopt_session(id, pool);
        if session.is_err() && self.graphs.shared.is_some() {
            // Another capture draws from the pool for all: nothing orders the two, so this one gets its own.
            pool = PoolId::fresh_for_capture();
            session = self.allocator.adopt_session(id, pool);
        }
        match session {
            Ok(session) => {
                let open = Open { id, session, pool, children: Vec::new() };
                self.graphs.tables.lock().open.insert(key(stream), open);
            }
            Err(error) => say!("gpupool: a capture gets no pool, the driver serves its requests: {error}"),
        }
    }

    /// The capture on `stream` has ended, with a graph unless it failed.
    pub(crate) fn capture_ends(&self, stream: u64, graph: Option<u64>) {
        let Some(open) = self.graphs.tables.lock().open.remove(&key(stream)) else { return };
        let end = self.allocator.capture_registry().close(open.session);
        end.holds.iter().for_each(|hold| drop(hold.end_capture()));
        let Some(graph) = graph else { return };
        let mut tables = self.graphs.tables.lock();
        tables.orders.retain(|_, last| Arc::strong_count(last) > 1);
        let last = Arc::clone(tables.orders.entry(open.pool).or_default());
        let held = Held { pool: open.pool, last, _holds: end.holds };
        tables.graph_holds(graph, &vec![Arc::new(held)]);
        tables.graph_holds(graph, &open.children);
    }

    /// Launches an executable by `launch`, after every launch whose pools it shares, and remembers when it is done.
    ///
    /// # Safety
    ///
    /// As [`Front::lend`].
    pub(crate) unsafe fn launch(&self, exec: u64, stream: u64, launch: impl FnOnce() -> u32) -> u32 {
        let holds = self.graphs.tables.lock().execs.get(&exec).map(|e| e.holds.clone());
        let Some(holds) = holds else { return launch() };
        // SAFETY: the caller's promise.
        let registered = unsafe { self.stream(stream) };
        let capture = match self.allocator.capture_registry().is_quiet() {
            true => None,
            false => self.device.capture_status(registered.handle()).ok().and_then(|status| status.id()),
        };
        if let Some(id) = capture {
            let code = launch();
            if code == 0
                && let Some(open) = self.graphs.tables.lock().open.values_mut().find(|open| open.id == id)
            {
                add(&mut open.children, &holds);
            }
            return code;
        }
        let mut pools: Vec<&Arc<Held<D>>> = holds.iter().collect();
        pools.sort_by_key(|held| held.pool);
        pools.dedup_by_key(|held| held.pool);
        let mut orders: Vec<_> = pools.iter().map(|held| held.last.lock()).collect();
        for last in orders.iter().filter_map(|order| order.as_ref()) {
            if let Err(error) = last.order_before(&registered) {
                say!("gpupool: a launch could not be ordered after one that shares its pool: {error}");
            }
        }
        let code = launch();
        if code == 0 {
            let done = registered.work_so_far();
            orders.iter_mut().for_each(|order| **order = Some(done.clone()));
            if let Some(executable) = self.graphs.tables.lock().execs.get_mut(&exec) {
                executable.last = Some(done);
            }
        }
        code
    }

    /// The program destroys an executable: its pools stay until its last launch is complete. Forgotten before, as graphs are.
    pub(crate) fn exec_ends(&self, exec: u64, destroy: impl FnOnce() -> u32) -> u32 {
        let gone = self.graphs.tables.lock().execs.remove(&exec);
        let code = destroy();
        match gone {
            Some(executable) if code != 0 => {
                self.graphs.tables.lock().execs.insert(exec, executable);
            }
            Some(Executable { holds, last: Some(last) }) => self.leaving.after_launch(Box::new(holds), last),
            _ => {}
        }
        self.leaving.tidy(false);
        code
    }
}
