//! What a stream's queue holds.

use std::sync::Arc;

use crate::clocks::VectorClock;
use crate::events::Record;

/// One submission, waiting in its stream's queue.
#[derive(Debug)]
pub(crate) struct Op {
    /// Number of the submission, counted over the whole world.
    pub(crate) submission: u64,
    /// Virtual time of the submission: it cannot start before.
    pub(crate) at: u64,
    /// What the submitting thread knew to be complete.
    pub(crate) host: VectorClock,
    pub(crate) work: Work,
}

#[derive(Debug)]
pub(crate) enum Work {
    /// Completes a record.
    Record(Arc<Record>),
    /// Waits for a record.
    Wait(Arc<Record>),
    /// Waits for the tick counter.
    Hold(u64),
}

impl Work {
    /// Whether it takes no time and does nothing but order other work.
    pub(crate) fn is_marker(&self) -> bool {
        matches!(self, Self::Record(_) | Self::Wait(_) | Self::Hold(_))
    }
}
