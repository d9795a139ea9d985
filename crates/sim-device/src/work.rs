//! What a stream's queue holds.

use std::fmt;
use std::sync::Arc;

use gpupool_device::{HostFunction, Kernel};

use crate::clocks::VectorClock;
use crate::events::Record;
use crate::graphs::Run;
use crate::memory::Physical;

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

pub(crate) enum Work {
    /// Completes a record.
    Record(Arc<Record>),
    /// Waits for a record.
    Wait(Arc<Record>),
    /// Waits for the tick counter.
    Hold(u64),
    /// A kernel, in an owner's name.
    Kernel(Kernel, Option<u64>),
    /// Copies bytes to the host, under the number of the submission.
    Read(u64, u64),
    /// Copies bytes between an address and pinned memory of the host.
    HostCopy { address: u64, host: Physical, to_host: bool },
    /// A host function; taken out while it runs.
    Host(Option<HostFunction>),
    /// A graph's run.
    Launch(Box<Run>),
}

impl Work {
    /// Whether it takes no time and does nothing but order other work.
    pub(crate) fn is_marker(&self) -> bool {
        matches!(self, Self::Record(_) | Self::Wait(_) | Self::Hold(_))
    }

    /// Whether it is a graph's run with a node on this device.
    pub(crate) fn runs_on(&self, device: u32) -> bool {
        matches!(self, Self::Launch(run) if run.nodes.iter().any(|node| node.device == device))
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Record(_) => "record",
            Self::Wait(_) => "wait",
            Self::Hold(_) => "hold",
            Self::Kernel(kernel, _) => crate::kernels::name(kernel),
            Self::Read(..) => "read",
            Self::HostCopy { .. } => "copy to or from the host",
            Self::Host(_) => "host function",
            Self::Launch(_) => "launch",
        })
    }
}
