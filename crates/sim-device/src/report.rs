//! What the race detector and the address check found.

use std::fmt;

use gpupool_device::{Address, Call, CaptureId, StreamHandle};

/// What is wrong with an access.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ReportKind {
    /// Two accesses to the same bytes with no order between them, one of them a write or by another owner.
    Race,
    /// An access in the name of an owner that the bytes do not belong to.
    StaleOwner,
    /// An access to addresses that are not accessible. The device's later calls fail.
    IllegalAddress,
    /// Memory was unmapped while the host did not know an earlier access to it to be complete.
    UnmappedInUse,
    /// Work touched addresses that were mapped only after it had been submitted.
    MappedAfterSubmission,
}

/// One operand of one piece of work.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Access {
    /// The device it ran on.
    pub device: u32,
    /// The stream it was submitted to.
    pub stream: StreamHandle,
    /// What ran: a kernel's name.
    pub operation: &'static str,
    /// Whether it wrote.
    pub write: bool,
    /// Start of the operand.
    pub address: Address,
    /// Its length.
    pub bytes: u64,
    /// Number of the submission, counted over the whole world; a graph's nodes have their launch's.
    pub submission: u64,
    /// The capture that the graph it is a node of came from.
    pub graph: Option<CaptureId>,
    /// In whose name.
    pub tag: Option<u64>,
    /// Virtual time at which it ended, or was submitted if it has not run.
    pub time: u64,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.write { "writes" } else { "reads" };
        write!(f, "{} {verb} {:#x}+{:#x}", self.operation, self.address.0, self.bytes)?;
        write!(f, " on stream {:#x} of device {}", self.stream.0, self.device)?;
        if let Some(capture) = self.graph {
            write!(f, ", in a launch of the graph of capture {}", capture.0)?;
        }
        if let Some(tag) = self.tag {
            write!(f, ", for owner {tag}")?;
        }
        write!(f, " (submission {}, {} ns)", self.submission, self.time)
    }
}

/// Who bytes belong to, or belonged to last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OwnerInfo {
    /// The owner.
    pub tag: u64,
    /// Whether they still belong to it.
    pub live: bool,
    /// The stream they were handed to.
    pub stream: StreamHandle,
    /// The capture under way on that stream at the time.
    pub capture: Option<CaptureId>,
    /// Submissions before they were handed out or taken back.
    pub submission: u64,
}

impl fmt::Display for OwnerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.live { "belongs to" } else { "was taken back from" };
        write!(f, "{state} owner {} on stream {:#x}", self.tag, self.stream.0)?;
        if let Some(capture) = self.capture {
            write!(f, ", handed out in capture {}", capture.0)?;
        }
        write!(f, " (after submission {})", self.submission)
    }
}

/// A call that took memory away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Withdrawal {
    /// Which call.
    pub call: Call,
    /// Submissions before it.
    pub submission: u64,
    /// When.
    pub time: u64,
}

/// One finding. Only the first for each pair of submissions is kept.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Report {
    /// What is wrong.
    pub kind: ReportKind,
    /// First byte concerned.
    pub address: Address,
    /// Bytes concerned, from there.
    pub bytes: u64,
    /// The access that showed it.
    pub access: Access,
    /// The earlier access it collides with.
    pub earlier: Option<Access>,
    /// Who the bytes belong to.
    pub owner: Option<OwnerInfo>,
    /// What took the memory away.
    pub withdrawn: Option<Withdrawal>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            ReportKind::Race => "race",
            ReportKind::StaleOwner => "access by a stale owner",
            ReportKind::IllegalAddress => "illegal address",
            ReportKind::UnmappedInUse => "unmapped while in use",
            ReportKind::MappedAfterSubmission => "mapped after the work was submitted",
        };
        write!(f, "{what} at {:#x}, {} bytes: {}", self.address.0, self.bytes, self.access)?;
        if let Some(earlier) = &self.earlier {
            write!(f, "; not ordered after: {earlier}")?;
        }
        if let Some(owner) = &self.owner {
            write!(f, "; the memory {owner}")?;
        }
        if let Some(w) = &self.withdrawn {
            write!(f, "; taken away by {} (after submission {}, {} ns)", w.call, w.submission, w.time)?;
        }
        Ok(())
    }
}
