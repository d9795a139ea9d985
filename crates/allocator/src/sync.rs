//! The locks of this crate, and the order they are taken in.
//!
//! Peaks, then arena, then pool, then device totals: a thread that holds one takes only later ones. The table of arenas and the streams' mark
//! queues are leaves: nothing is taken while one is held. In debug builds taking one out of order panics.
//!
//! No driver call, callback or user code runs under any of them.
//!
//! An arena's lock is a [`QuickMutex`], which is given back with a plain store: half the price of a lock that keeps a list of who waits. It is
//! held for O(log n) at a time, and mostly by the one thread that uses the stream; a thread that finds it taken looks again a few times and
//! then lets others run. It knows no priorities and no fairness. All other locks are off the hit path and let waiters sleep.
//!
//! Built with `--cfg gpupool_shuttle` the locks and the atomics that threads meet at are a model checker's, which tries other orders of
//! the threads at each of them (`tests/tests/shuttle.rs`). It runs all threads on one, so ranks are not checked then.

use std::ops::{Deref, DerefMut};

/// The atomics that threads meet at.
pub(crate) mod atomic {
    #[cfg(gpupool_shuttle)]
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    #[cfg(not(gpupool_shuttle))]
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
}

#[cfg(gpupool_shuttle)]
pub(crate) use shuttle::thread::yield_now;
#[cfg(not(gpupool_shuttle))]
pub(crate) use std::thread::yield_now;

#[cfg(not(gpupool_shuttle))]
use parking_lot::{Mutex as Inner, MutexGuard as InnerGuard};
#[cfg(gpupool_shuttle)]
use shuttle::sync::{Mutex as Inner, MutexGuard as InnerGuard};

/// Where a lock stands in the order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Rank {
    Peaks,
    Arena,
    Pool,
    Totals,
    Leaf,
}

#[cfg(all(debug_assertions, not(gpupool_shuttle)))]
mod order {
    use super::Rank;
    use std::cell::RefCell;

    thread_local! {
        static HELD: RefCell<Vec<Rank>> = const { RefCell::new(Vec::new()) };
    }

    // While thread-local storage is torn down, as at the end of a process, nothing is checked.

    pub(super) fn take(rank: Rank) {
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            if let Some(top) = held.last() {
                assert!(*top < rank, "lock order: {rank:?} taken while {top:?} is held");
            }
            held.push(rank);
        });
    }

    pub(super) fn take_beside_others(rank: Rank) {
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            let allowed = held.first() == Some(&Rank::Peaks) && held.iter().skip(1).all(|h| *h == rank);
            assert!(allowed, "lock order: {rank:?} taken beside others while {held:?} are held");
            held.push(rank);
        });
    }

    pub(super) fn give(rank: Rank) {
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            if let Some(at) = held.iter().rposition(|r| *r == rank) {
                held.remove(at);
            }
        });
    }

    pub(super) fn none_held() -> bool {
        HELD.try_with(|held| held.borrow().is_empty()).unwrap_or(true)
    }
}

/// A mutex with a place in the order.
#[derive(Debug)]
pub(crate) struct Mutex<T> {
    rank: Rank,
    inner: Inner<T>,
}

impl<T> Mutex<T> {
    pub(crate) const fn new(rank: Rank, value: T) -> Self {
        Self { rank, inner: Inner::new(value) }
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        #[cfg(all(debug_assertions, not(gpupool_shuttle)))]
        order::take(self.rank);
        Guard { inner: locked(&self.inner), rank: self.rank }
    }

    /// `None` if somebody has it.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        #[cfg(not(gpupool_shuttle))]
        let inner = self.inner.try_lock()?;
        #[cfg(gpupool_shuttle)]
        let inner = self.inner.try_lock().ok()?;
        #[cfg(all(debug_assertions, not(gpupool_shuttle)))]
        order::take(self.rank);
        Some(Guard { inner, rank: self.rank })
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        exclusive(&mut self.inner)
    }
}

#[cfg(not(gpupool_shuttle))]
#[inline]
fn locked<T>(mutex: &Inner<T>) -> InnerGuard<'_, T> {
    mutex.lock()
}

#[cfg(not(gpupool_shuttle))]
fn exclusive<T>(mutex: &mut Inner<T>) -> &mut T {
    mutex.get_mut()
}

#[cfg(gpupool_shuttle)]
fn locked<T>(mutex: &Inner<T>) -> InnerGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(gpupool_shuttle)]
fn exclusive<T>(mutex: &mut Inner<T>) -> &mut T {
    mutex.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(not(gpupool_shuttle))]
mod quick {
    /// How often a thread looks whether a lock is free before it lets other threads run. Locks are held for less than that; who has one for
    /// longer does not run.
    const LOOKS: u32 = 64;

    pub(super) type Inner<T> = spin::mutex::SpinMutex<T>;
    pub(super) type InnerGuard<'a, T> = spin::mutex::SpinMutexGuard<'a, T>;

    /// The lock, when somebody has it just now.
    #[cold]
    #[inline(never)]
    pub(super) fn wait<T>(mutex: &Inner<T>) -> InnerGuard<'_, T> {
        loop {
            for _ in 0..LOOKS {
                // A look alone leaves the line where it is.
                if !mutex.is_locked()
                    && let Some(guard) = mutex.try_lock()
                {
                    return guard;
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
    }
}
#[cfg(gpupool_shuttle)]
mod quick {
    pub(super) use shuttle::sync::{Mutex as Inner, MutexGuard as InnerGuard};
}

/// A mutex for what is held shortly and mostly by one thread.
pub(crate) struct QuickMutex<T> {
    #[cfg(all(debug_assertions, not(gpupool_shuttle)))]
    rank: Rank,
    inner: quick::Inner<T>,
}

impl<T> QuickMutex<T> {
    #[cfg_attr(any(not(debug_assertions), gpupool_shuttle), allow(unused_variables))]
    pub(crate) fn new(rank: Rank, value: T) -> Self {
        Self {
            #[cfg(all(debug_assertions, not(gpupool_shuttle)))]
            rank,
            inner: quick::Inner::new(value),
        }
    }

    #[inline]
    pub(crate) fn lock(&self) -> QuickGuard<'_, T> {
        #[cfg(all(debug_assertions, not(gpupool_shuttle)))]
        order::take(self.rank);
        self.taken()
    }

    /// The lock, if nobody has it.
    #[inline(always)]
    pub(crate) fn try_lock(&self) -> Option<QuickGuard<'_, T>> {
        #[cfg(not(gpupool_shuttle))]
        let inner = self.inner.try_lock()?;
        #[cfg(gpupool_shuttle)]
        let inner = self.inner.try_lock().ok()?;
        #[cfg(all(debug_assertions, not(gpupool_shuttle)))]
        order::take(self.rank);
        Some(QuickGuard {
            inner,
            #[cfg(all(debug_assertions, not(gpupool_shuttle)))]
            rank: self.rank,
        })
    }

    /// As [`lock`](Self::lock), while others of the same rank are held: only for who holds the lock of the peaks, and with it the right to.
    pub(crate) fn lock_beside_others(&self) -> QuickGuard<'_, T> {
        #[cfg(all(debug_assertions, not(gpupool_shuttle)))]
        order::take_beside_others(self.rank);
        self.taken()
    }

    /// Whether somebody has it just now.
    #[cfg(not(gpupool_shuttle))]
    pub(crate) fn is_locked(&self) -> bool {
        self.inner.is_locked()
    }

    #[cfg(gpupool_shuttle)]
    pub(crate) fn is_locked(&self) -> bool {
        self.inner.try_lock().is_err()
    }

    #[cfg(not(gpupool_shuttle))]
    #[inline]
    fn taken(&self) -> QuickGuard<'_, T> {
        QuickGuard {
            inner: self.inner.try_lock().unwrap_or_else(|| quick::wait(&self.inner)),
            #[cfg(debug_assertions)]
            rank: self.rank,
        }
    }

    #[cfg(gpupool_shuttle)]
    fn taken(&self) -> QuickGuard<'_, T> {
        QuickGuard { inner: locked(&self.inner) }
    }
}

/// Gives the lock back when dropped.
pub(crate) struct QuickGuard<'a, T> {
    inner: quick::InnerGuard<'a, T>,
    #[cfg(all(debug_assertions, not(gpupool_shuttle)))]
    rank: Rank,
}

impl<T> Deref for QuickGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for QuickGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

#[cfg(all(debug_assertions, not(gpupool_shuttle)))]
impl<T> Drop for QuickGuard<'_, T> {
    fn drop(&mut self) {
        order::give(self.rank);
    }
}

/// Gives the lock back when dropped.
pub(crate) struct Guard<'a, T> {
    inner: InnerGuard<'a, T>,
    #[cfg_attr(any(not(debug_assertions), gpupool_shuttle), allow(dead_code))]
    rank: Rank,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline]
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
        #[cfg(all(debug_assertions, not(gpupool_shuttle)))]
        order::give(self.rank);
        #[cfg(any(not(debug_assertions), gpupool_shuttle))]
        let _ = self.rank;
    }
}

/// A turn at something that takes driver calls: held around them, and so no lock of the order above. Taken while no lock is held.
#[derive(Debug)]
pub(crate) struct Turn(Inner<()>);

/// Gives the turn back when dropped.
pub(crate) struct TurnGuard<'a>(#[allow(dead_code, reason = "held for its drop")] InnerGuard<'a, ()>);

impl Turn {
    pub(crate) fn new() -> Self {
        Self(Inner::new(()))
    }

    /// **Waits** for whoever has it.
    pub(crate) fn take(&self) -> TurnGuard<'_> {
        assert_unlocked();
        TurnGuard(locked(&self.0))
    }

    /// `None` if somebody has it.
    pub(crate) fn try_take(&self) -> Option<TurnGuard<'_>> {
        assert_unlocked();
        #[cfg(not(gpupool_shuttle))]
        let guard = self.0.try_lock();
        #[cfg(gpupool_shuttle)]
        let guard = self.0.try_lock().ok();
        guard.map(TurnGuard)
    }
}

/// Called before every driver call and callback: in debug builds, panics if a lock is held.
#[inline]
pub(crate) fn assert_unlocked() {
    #[cfg(all(debug_assertions, not(gpupool_shuttle)))]
    assert!(order::none_held(), "driver call or callback under a lock");
}
