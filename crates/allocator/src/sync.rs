//! The locks of this crate, and the order they are taken in.
//!
//! Arena, then pool, then device totals: a thread that holds one takes only later ones. The table of arenas and the streams' mark
//! queues are leaves: nothing is taken while one is held. In debug builds taking one out of order panics.
//!
//! No driver call, callback or user code runs under any of them.

use std::ops::{Deref, DerefMut};

/// Where a lock stands in the order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Rank {
    Arena,
    Pool,
    Totals,
    Leaf,
}

#[cfg(debug_assertions)]
mod order {
    use super::Rank;
    use std::cell::RefCell;

    thread_local! {
        static HELD: RefCell<Vec<Rank>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn take(rank: Rank) {
        HELD.with_borrow_mut(|held| {
            if let Some(top) = held.last() {
                assert!(*top < rank, "lock order: {rank:?} taken while {top:?} is held");
            }
            held.push(rank);
        });
    }

    pub(super) fn give(rank: Rank) {
        // A guard may be dropped while thread-local storage is torn down; then nothing is left to check.
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            if let Some(at) = held.iter().rposition(|r| *r == rank) {
                held.remove(at);
            }
        });
    }

    pub(super) fn none_held() -> bool {
        HELD.with_borrow(Vec::is_empty)
    }
}

/// A mutex with a place in the order.
#[derive(Debug)]
pub(crate) struct Mutex<T> {
    rank: Rank,
    inner: parking_lot::Mutex<T>,
}

impl<T> Mutex<T> {
    pub(crate) const fn new(rank: Rank, value: T) -> Self {
        Self { rank, inner: parking_lot::Mutex::new(value) }
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        #[cfg(debug_assertions)]
        order::take(self.rank);
        Guard { inner: self.inner.lock(), rank: self.rank }
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}

/// Gives the lock back when dropped.
pub(crate) struct Guard<'a, T> {
    inner: parking_lot::MutexGuard<'a, T>,
    #[cfg_attr(not(debug_assertions), allow(dead_code))]
    rank: Rank,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        #[cfg(debug_assertions)]
        order::give(self.rank);
        #[cfg(not(debug_assertions))]
        let _ = self.rank;
    }
}

/// Called before every driver call and callback: in debug builds, panics if a lock is held.
#[inline]
pub(crate) fn assert_unlocked() {
    #[cfg(debug_assertions)]
    assert!(order::none_held(), "driver call or callback under a lock");
}
