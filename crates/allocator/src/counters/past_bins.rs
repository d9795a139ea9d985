//! What passes the bins by.

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use super::Counter;

/// Blocks or bytes of a part, but for what the shortest way does: hand-outs from bins and frees into them change nothing here, and so cost nothing. With what
/// [`Counter`] knows this gives what is in bins.
#[derive(Debug, Default)]
pub(super) struct PastBins {
    /// Handed out from elsewhere.
    pub(super) came: AtomicI64,
    /// Out of its bin without being handed out, less what the long way put into one.
    pub(super) left: AtomicI64,
}

impl PastBins {
    /// What is in bins: of what came by here that which neither is live, nor went elsewhere.
    pub(super) fn binned(&self, handed: &Counter) -> i64 {
        self.came.load(Relaxed) - handed.current() - handed.decreases.load(Relaxed) - self.left.load(Relaxed)
    }
}
