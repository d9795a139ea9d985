//! States of an allocator as data: PyTorch's pickle, JSON, and what a snapshot tells.
//!
//! * [`Snapshot`] is PyTorch's layout of a memory snapshot. [`Snapshot::of`] makes one of an allocator's state,
//!   [`write_pickle`](Snapshot::write_pickle) and [`write_json`](Snapshot::write_json) write files that PyTorch's memory viewer opens,
//!   and [`read`](Snapshot::read) reads either format, PyTorch's own files too.
//! * [`Summary`] is what a person asks of a snapshot: where the memory is, and what keeps it there.
//! * [`write_page`] shows all of it as one page for a browser.
//! * [`prometheus`] and [`Live`] tell the figures of a running process.
//! * [`Growth`] is what grew between two.
//!
//! # Rules
//!
//! * **S1** What is read was checked: blocks tile their segment, segments do not overlap, sums do not overflow.
//!   Whoever holds a [`Snapshot`] made by a reader need not look again.
//! * **S2** A reader's error names the place in the file, down to the field. Nothing that a file holds makes it panic.
//! * **S3** Keys that are not known are skipped; what a file need not have has a neutral value.
//! * **S4** Nothing in a file is ever run, and a file takes at most 64 MiB and 8 times its length of memory.
#![forbid(unsafe_code)]

mod advice;
mod convert;
mod format;
mod growth;
#[cfg(unix)]
mod live;
mod model;
mod owners;
mod page;
mod prometheus;
mod read;
mod stacks;
mod state;
mod summary;
mod timeline;

pub use advice::Advice;
pub use growth::{BlocksOfSize, Change, Growth, OwnerGrowth};
#[cfg(unix)]
pub use live::{Live, Sample, StatsSource, read_live};
pub use model::{Action, Annotation, Block, BlockStatus, Event, Part, Segment, Snapshot, Stage};
pub use owners::Owned;
pub use page::write_page;
#[cfg(feature = "metrics")]
pub use prometheus::record_metrics;
pub use prometheus::{PROMETHEUS_TYPE, prometheus};
pub use read::{Expected, Problem, ReadError};
pub use stacks::{FrameRef, StackId, Stacks, TextId};
pub use summary::{
    Amounts, Bucket, Capturing, FreeRuns, OfGraph, OfPool, OfSize, OfStream, Outliving, Pinned, Place, Summary,
};
pub use timeline::{OutOfMemory, Peak};
