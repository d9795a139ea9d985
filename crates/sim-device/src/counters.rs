//! Counts of calls and sums of time, one set a device. All atomic, so that calls which need no lock can count too.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use gpupool_device::Call;

/// Counters of one device.
#[derive(Debug)]
pub(crate) struct Counters {
    calls: Vec<AtomicU64>,
    /// Virtual nanoseconds that the host spent in driver calls, waiting excluded.
    pub(crate) driver_ns: AtomicU64,
    /// Virtual nanoseconds that the host spent waiting.
    pub(crate) wait_ns: AtomicU64,
    /// Calls that found their work unfinished and had to wait.
    pub(crate) host_waits: AtomicU64,
}

impl Counters {
    pub(crate) fn new() -> Self {
        Self {
            calls: Call::ALL.iter().map(|_| AtomicU64::new(0)).collect(),
            driver_ns: AtomicU64::new(0),
            wait_ns: AtomicU64::new(0),
            host_waits: AtomicU64::new(0),
        }
    }

    pub(crate) fn count(&self, call: Call) {
        if let Some(counter) = self.calls.get(call as usize) {
            counter.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn calls(&self, call: Call) -> u64 {
        self.calls.get(call as usize).map_or(0, |c| c.load(Relaxed))
    }

    /// Every kind that was called at all.
    pub(crate) fn all(&self) -> BTreeMap<Call, u64> {
        Call::ALL.iter().map(|&c| (c, self.calls(c))).filter(|&(_, n)| n > 0).collect()
    }

    pub(crate) fn reset(&self) {
        let times = [&self.driver_ns, &self.wait_ns, &self.host_waits];
        for counter in self.calls.iter().chain(times) {
            counter.store(0, Relaxed);
        }
    }
}
