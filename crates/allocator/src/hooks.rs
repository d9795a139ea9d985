//! What a user registers with an allocator: observers of running out, and reclaimers that can help.
//!
//! All are called with no lock held, so they may allocate, free and register others. A reclaimer is called at most once a request; what a
//! reclaimer or observer requests itself asks no reclaimer and tells no observer. One that owns a clone of its allocator keeps that
//! allocator alive until it is removed.

use std::cell::Cell;
use std::sync::Arc;

use crate::idle::PoolKeeper;
use crate::oom::OutOfMemory;
use crate::state::GraphState;
use crate::sync::{Mutex, Rank, assert_unlocked};

/// Called when a request ends in out of memory, before the error is returned.
pub type OomObserver = dyn Fn(&OutOfMemory) + Send + Sync;
/// Called when a request found no block; returns whether it freed anything.
pub type Reclaimer = dyn Fn(u64) -> bool + Send + Sync;
/// Called before memory is given back or waited for, to give up what is no longer needed; told whether it may wait, it returns whether
/// it gave anything up. Unlike a reclaimer it has nothing to lose by being called often.
pub type Janitor = dyn Fn(bool) -> bool + Send + Sync;
/// Tells the graphs that hold memory of the allocator with a number ([`PoolHold::allocator`](crate::PoolHold::allocator)). Called whenever
/// a state is taken.
pub type GraphSource = dyn Fn(u64) -> Vec<GraphState> + Send + Sync;
/// Called when growth was rejected outright: bytes of the segment, bytes held, bytes of the device.
pub type RejectionObserver = dyn Fn(u64, u64, u64) + Send + Sync;

/// Names a registered observer or reclaimer, to take it off again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct HookId(u64);

#[derive(Default)]
struct Lists {
    next: u64,
    oom: Vec<(HookId, Arc<OomObserver>)>,
    rejection: Vec<(HookId, Arc<RejectionObserver>)>,
    /// Highest priority first; among equals, first come first.
    reclaimers: Vec<(HookId, i32, Arc<Reclaimer>)>,
    janitors: Vec<(HookId, Arc<Janitor>)>,
    keeper: Option<Arc<dyn PoolKeeper>>,
    graphs: Vec<(HookId, Arc<GraphSource>)>,
}

impl Lists {
    fn id(&mut self) -> HookId {
        self.next += 1;
        HookId(self.next)
    }
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Calls reclaimers or observers, unless this thread is inside one: what a request of theirs finds out is their own affair, and they
/// would call themselves for ever.
fn unless_inside<T>(call: impl FnOnce() -> T) -> Option<T> {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            INSIDE.set(false);
        }
    }
    if INSIDE.replace(true) {
        return None;
    }
    let _leave = Leave;
    Some(call())
}

/// The registered hooks.
pub(crate) struct Hooks {
    lists: Mutex<Lists>,
}

impl Hooks {
    pub(crate) fn new() -> Self {
        Self { lists: Mutex::new(Rank::Leaf, Lists::default()) }
    }

    pub(crate) fn add_oom(&self, observer: Arc<OomObserver>) -> HookId {
        let mut lists = self.lists.lock();
        let id = lists.id();
        lists.oom.push((id, observer));
        id
    }

    pub(crate) fn add_rejection(&self, observer: Arc<RejectionObserver>) -> HookId {
        let mut lists = self.lists.lock();
        let id = lists.id();
        lists.rejection.push((id, observer));
        id
    }

    pub(crate) fn add_reclaimer(&self, priority: i32, reclaimer: Arc<Reclaimer>) -> HookId {
        let mut lists = self.lists.lock();
        let id = lists.id();
        let at = lists.reclaimers.partition_point(|(_, p, _)| *p >= priority);
        lists.reclaimers.insert(at, (id, priority, reclaimer));
        id
    }

    pub(crate) fn add_janitor(&self, janitor: Arc<Janitor>) -> HookId {
        let mut lists = self.lists.lock();
        let id = lists.id();
        lists.janitors.push((id, janitor));
        id
    }

    pub(crate) fn set_keeper(&self, keeper: Arc<dyn PoolKeeper>) {
        // What was there is dropped after the lock is given back: it is user code.
        let before = self.lists.lock().keeper.replace(keeper);
        drop(before);
    }

    pub(crate) fn keeper(&self) -> Option<Arc<dyn PoolKeeper>> {
        assert_unlocked();
        self.lists.lock().keeper.clone()
    }

    pub(crate) fn add_graph_source(&self, source: Arc<GraphSource>) -> HookId {
        let mut lists = self.lists.lock();
        let id = lists.id();
        lists.graphs.push((id, source));
        id
    }

    /// The graphs of an allocator, by number, each once.
    pub(crate) fn graphs(&self, allocator: u64) -> Vec<GraphState> {
        let sources: Vec<_> = self.lists.lock().graphs.iter().map(|(_, source)| Arc::clone(source)).collect();
        assert_unlocked();
        let mut graphs: Vec<GraphState> = sources.iter().flat_map(|source| source(allocator)).collect();
        graphs.sort_by_key(|graph| graph.id);
        graphs.dedup_by_key(|graph| graph.id);
        graphs
    }

    /// Calls every janitor; whether any gave something up.
    pub(crate) fn tidy(&self, wait: bool) -> bool {
        let janitors: Vec<_> = self.lists.lock().janitors.iter().map(|(_, j)| Arc::clone(j)).collect();
        assert_unlocked();
        // Every one is called: each may hold what the others do not.
        janitors.iter().filter(|tidy| tidy(wait)).count() > 0
    }

    pub(crate) fn remove(&self, id: HookId) -> bool {
        fn take<T>(list: &mut Vec<T>, matches: impl Fn(&T) -> bool) -> Option<T> {
            let at = list.iter().position(matches)?;
            Some(list.remove(at))
        }
        // What is taken off is dropped after the lock is given back: it is user code.
        let mut lists = self.lists.lock();
        let oom = take(&mut lists.oom, |(i, _)| *i == id);
        let rejection = take(&mut lists.rejection, |(i, _)| *i == id);
        let reclaimer = take(&mut lists.reclaimers, |(i, ..)| *i == id);
        let janitor = take(&mut lists.janitors, |(i, _)| *i == id);
        drop(lists);
        oom.is_some() || rejection.is_some() || reclaimer.is_some() || janitor.is_some()
    }

    /// Calls every reclaimer; whether any freed something.
    pub(crate) fn reclaim(&self, bytes: u64) -> bool {
        let reclaimers: Vec<_> = self.lists.lock().reclaimers.iter().map(|(.., r)| Arc::clone(r)).collect();
        assert_unlocked();
        // All of them, as in PyTorch.
        let all = || reclaimers.iter().filter(|reclaim| reclaim(bytes)).count() > 0;
        unless_inside(all).unwrap_or(false)
    }

    pub(crate) fn out_of_memory(&self, report: &OutOfMemory) {
        let observers: Vec<_> = self.lists.lock().oom.iter().map(|(_, o)| Arc::clone(o)).collect();
        assert_unlocked();
        unless_inside(|| observers.iter().for_each(|observe| observe(report)));
    }

    pub(crate) fn rejected(&self, segment: u64, held: u64, total: u64) {
        let observers: Vec<_> = self.lists.lock().rejection.iter().map(|(_, o)| Arc::clone(o)).collect();
        assert_unlocked();
        unless_inside(|| observers.iter().for_each(|observe| observe(segment, held, total)));
    }
}
