//! Scopes: "route these requests to that pool". A scope is not a capture, and is never treated as one (but see the policies).

use crate::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;

use gpupool_device::{CaptureId, StreamHandle};

use crate::ids::PoolId;
use crate::sync::{Mutex, Rank};

/// Which requests a scope claims.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Filter {
    /// Every request.
    All,
    /// Requests on the stream with this handle.
    Stream(StreamHandle),
    /// Requests on streams that are capturing under this id, whoever makes them.
    Capture(CaptureId),
    /// Requests made by this thread, on any stream.
    Thread(ThreadId),
}

/// "Route these requests to that pool".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Scope {
    pub(crate) pool: PoolId,
    pub(crate) filter: Filter,
    /// The capture that was under way where it was opened: such a scope goes before the capture's own pool.
    pub(crate) inside: Option<CaptureId>,
    /// Names the scope, so that it can be closed whatever others are open.
    pub(crate) key: ScopeKey,
}

/// Names an open scope.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ScopeKey(usize);

/// The open scopes of an allocator, oldest first.
#[derive(Debug)]
pub(crate) struct Scopes {
    open: AtomicUsize,
    keys: AtomicUsize,
    list: Mutex<Vec<Scope>>,
}

impl Scopes {
    pub(crate) fn new() -> Self {
        Self { open: AtomicUsize::new(0), keys: AtomicUsize::new(0), list: Mutex::new(Rank::Leaf, Vec::new()) }
    }

    /// Whether no scope is open. One load.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    /// Opens a scope. Its key is unlike every earlier one's.
    pub(crate) fn push(&self, pool: PoolId, filter: Filter, inside: Option<CaptureId>) -> ScopeKey {
        let key = ScopeKey(self.keys.fetch_add(1, Ordering::Relaxed));
        let mut list = self.list.lock();
        list.push(Scope { pool, filter, inside, key });
        self.open.store(list.len(), Ordering::Release);
        key
    }

    /// Closes the newest scope that `matches`.
    pub(crate) fn take(&self, matches: impl Fn(&Scope) -> bool) -> Option<Scope> {
        let mut list = self.list.lock();
        let at = list.iter().rposition(matches)?;
        let scope = list.remove(at);
        self.open.store(list.len(), Ordering::Release);
        Some(scope)
    }

    pub(crate) fn contains(&self, pool: PoolId) -> bool {
        self.list.lock().iter().any(|s| s.pool == pool)
    }

    /// All open scopes, newest first.
    pub(crate) fn newest_first(&self) -> Vec<Scope> {
        self.list.lock().iter().rev().copied().collect()
    }
}
