//! States of an allocator as data: JSON, and what a snapshot tells.
//!
//! * [`Snapshot`] is PyTorch's layout of a memory snapshot. [`Snapshot::of`] makes one of an allocator's state,
//!   [`write_json`](Snapshot::write_json) and [`read_json`](Snapshot::read_json) move it to and from files, which
//!   PyTorch's memory viewer opens, too.
//! * [`Summary`] is what a person asks of a snapshot: where the memory is, and what keeps it there.
//! * [`Growth`] is what grew between two.
//!
//! # Rules
//!
//! * **S1** What is read was checked: blocks tile their segment, segments do not overlap, sums do not overflow.
//!   Whoever holds a [`Snapshot`] made by a reader need not look again.
//! * **S2** A reader's error names the place in the file, down to the field. Nothing that a file holds makes it panic.
//! * **S3** Keys that are not known are skipped; what a file need not have has a neutral value.
#![forbid(unsafe_code)]

mod growth;
mod model;
mod read;
mod state;
mod summary;

pub use growth::{BlocksOfSize, Change, Growth};
pub use model::{Block, BlockStatus, Part, Segment, Snapshot};
pub use read::{Expected, Problem, ReadError};
pub use summary::{Amounts, Bucket, Pinned, Place, Summary};
