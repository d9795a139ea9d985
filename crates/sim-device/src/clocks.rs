//! Vector clocks, and what the host knows.
//!
//! # Invariants
//!
//! * **C1** A clock's component never goes back.
//! * **C2** With the race detector off nothing ever ticks, every clock is empty and joining costs nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::ThreadId;

use hashbrown::HashMap;

/// The world's virtual time in nanoseconds: never goes back, read without a lock.
#[derive(Debug, Default)]
pub(crate) struct VirtualTime(AtomicU64);

impl VirtualTime {
    pub(crate) fn now(&self) -> u64 {
        self.0.load(Relaxed)
    }

    pub(crate) fn add(&self, ns: u64) {
        self.0.fetch_add(ns, Relaxed);
    }

    pub(crate) fn raise(&self, to: u64) {
        self.0.fetch_max(to, Relaxed);
    }
}

/// For each component (a stream, or a chain of a graph's nodes) how much of its work comes before. Cheap to copy.
#[derive(Clone, Default, Debug)]
pub(crate) struct VectorClock(Option<Arc<Vec<u64>>>);

impl VectorClock {
    pub(crate) fn get(&self, component: u32) -> u64 {
        self.0.as_ref().and_then(|v| v.get(component as usize)).copied().unwrap_or(0)
    }

    /// Advances a component by one. Its new value.
    pub(crate) fn tick(&mut self, component: u32) -> u64 {
        let next = self.get(component) + 1;
        self.raise(component, next);
        next
    }

    /// Sets a component to at least `value`.
    pub(crate) fn raise(&mut self, component: u32, value: u64) {
        let index = component as usize;
        let values = Arc::make_mut(self.0.get_or_insert_default());
        if values.len() <= index {
            values.resize(index + 1, 0);
        }
        if let Some(old) = values.get_mut(index) {
            *old = (*old).max(value);
        }
    }

    /// Takes the later of both, component by component.
    pub(crate) fn join(&mut self, other: &Self) {
        let Some(theirs) = &other.0 else { return };
        let Some(ours) = &mut self.0 else {
            self.0 = Some(Arc::clone(theirs));
            return;
        };
        if Arc::ptr_eq(ours, theirs) {
            return;
        }
        let ahead = |a: &[u64], b: &[u64]| a.len() >= b.len() && a.iter().zip(b).all(|(x, y)| x >= y);
        if ahead(ours, theirs) {
            return;
        }
        if ahead(theirs, ours) {
            *ours = Arc::clone(theirs);
            return;
        }
        let ours = Arc::make_mut(ours);
        if ours.len() < theirs.len() {
            ours.resize(theirs.len(), 0);
        }
        for (x, y) in ours.iter_mut().zip(theirs.iter()) {
            *x = (*x).max(*y);
        }
    }
}

/// What the host threads know to be complete.
#[derive(Debug)]
pub(crate) struct HostKnowledge {
    shared: bool,
    /// What all threads were told.
    all: VectorClock,
    threads: HashMap<ThreadId, VectorClock>,
}

impl HostKnowledge {
    pub(crate) fn new(shared: bool) -> Self {
        Self { shared, all: VectorClock::default(), threads: HashMap::new() }
    }

    /// What the calling thread knows.
    pub(crate) fn current(&self) -> VectorClock {
        if self.shared {
            return self.all.clone();
        }
        self.threads.get(&std::thread::current().id()).unwrap_or(&self.all).clone()
    }

    /// The calling thread learns `clock`.
    pub(crate) fn learn(&mut self, clock: &VectorClock) {
        if self.shared {
            self.all.join(clock);
        } else {
            let told = &self.all;
            self.threads.entry(std::thread::current().id()).or_insert_with(|| told.clone()).join(clock);
        }
    }

    /// Everybody learns what the calling thread knows.
    pub(crate) fn share(&mut self) {
        let known = self.current();
        self.all.join(&known);
        for clock in self.threads.values_mut() {
            clock.join(&known);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joining_takes_the_later_of_each_component() {
        let (mut a, mut b) = (VectorClock::default(), VectorClock::default());
        assert_eq!((a.tick(0), a.tick(0), b.tick(3)), (1, 2, 1));
        b.join(&a);
        assert_eq!([b.get(0), b.get(3), b.get(9)], [2, 1, 0]);
        a.tick(0);
        b.tick(3);
        a.join(&b);
        assert_eq!([a.get(0), a.get(3)], [3, 2]);
        a.join(&VectorClock::default());
        assert_eq!(a.get(0), 3);
    }
}
