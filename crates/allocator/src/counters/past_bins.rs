//! What passes the bins by.

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use super::Counter;

/// Blocks or bytes of a part that are live or in bins, but for what bins themselves do: hand-outs from bins and frees into them change
/// nothing here, and so cost nothing. With what is live this gives what is in bins, and with what was ever handed out how much came out of
/// bins.
#[derive(Debug, Default)]
pub(super) struct PastBins {
    /// Handed out from elsewhere.
    pub(super) came: AtomicI64,
    /// No longer live and not binned either; or out of its bin without being handed out.
    pub(super) went: AtomicI64,
}

impl PastBins {
    /// What is live or in bins.
    pub(super) fn current(&self) -> i64 {
        self.came.load(Relaxed) - self.went.load(Relaxed)
    }

    /// What was handed out from bins, of all that was handed out.
    pub(super) fn of_bins(&self, handed_out: &Counter) -> i64 {
        handed_out.raw().0 - self.came.load(Relaxed)
    }
}
