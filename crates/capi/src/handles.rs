//! Handles: numbers that C callers hold in place of objects. A number is never used twice, so a stale one is an error and never another
//! object.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::instance::{Executable, Graph, Hold, Instance};
use crate::status::{Failure, Status};

/// One counter for all kinds: a handle of one kind is unknown among the others.
static NEXT: AtomicU64 = AtomicU64::new(1);

pub(crate) fn fresh() -> u64 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The objects of one kind.
pub(crate) struct Table<T: ?Sized> {
    kind: &'static str,
    live: RwLock<HashMap<u64, Arc<T>>>,
}

impl<T: ?Sized> Table<T> {
    fn new(kind: &'static str) -> Self {
        Self { kind, live: RwLock::new(HashMap::new()) }
    }

    fn unknown(&self, handle: u64) -> Failure {
        let text = format!("handle {handle} names no {} (any more): was it destroyed before?", self.kind);
        Failure::new(Status::UnknownHandle, text)
    }

    pub(crate) fn insert(&self, object: Arc<T>) -> u64 {
        let handle = fresh();
        self.live.write().insert(handle, object);
        handle
    }

    pub(crate) fn get(&self, handle: u64) -> Result<Arc<T>, Failure> {
        self.live.read().get(&handle).cloned().ok_or_else(|| self.unknown(handle))
    }

    /// The object is the caller's now: it is dropped outside the table's lock.
    pub(crate) fn remove(&self, handle: u64) -> Result<Arc<T>, Failure> {
        let taken = self.live.write().remove(&handle);
        taken.ok_or_else(|| self.unknown(handle))
    }
}

pub(crate) static ALLOCATORS: LazyLock<Table<dyn Instance>> = LazyLock::new(|| Table::new("allocator"));
pub(crate) static GRAPHS: LazyLock<Table<dyn Graph>> = LazyLock::new(|| Table::new("graph"));
pub(crate) static EXECUTABLES: LazyLock<Table<dyn Executable>> = LazyLock::new(|| Table::new("executable"));
pub(crate) static HOLDS: LazyLock<Table<Hold>> = LazyLock::new(|| Table::new("hold"));
