//! Conformance files: every decision of PyTorch's caching allocator on a scripted sequence, format `conform-1`.
//!
//! A [`Script`] is a file as data. [`Script::read`] checks it line by line: an unknown operation, a field of the
//! wrong type or one too many, an id that was never allocated are errors, so that nothing in a file goes unnoticed.
//! [`run`] executes a script against an allocator of ours on a [`ScriptedDevice`], which places segments where the
//! file says, and stops at the first operation after which anything differs.
//!
//! * **C1** Every field of a line is either compared, or it is what the operation is made of; none is skipped.
//! * **C2** A counter that a line does not name has not changed. Counters that no line of the file names were not
//!   recorded and are not compared.
//! * **C3** Driver calls are compared in order, but for the order between private pools in a run of frees, which
//!   upstream is that of a hash table. The default pool comes before all others; inside a pool the order counts.
//! * **C4** In files of kind `pools` peaks of `inactive_split*` and the requested sizes of free blocks depend on a
//!   hash order, too: there only the current value counts, and free blocks' requested sizes are not looked at.
//! * **C5** Each allocation and segment is known by one number. Operations and lines count from 1; the header is line
//!   1 and no operation, so operation *n* is on line *n* + 1.

mod compare;
mod device;
mod error;
mod fields;
mod op;
mod parse;
mod run;

pub use device::{DeviceCall, ScriptedDevice};
pub use error::{ConformError, ConformProblem};
pub use op::{
    BlockKind, DriverCall, ExpectedBlock, ExpectedSegment, FORMAT, FilterSpec, Header, Op, PartKind, Place, PoolPair,
    Script, StatsLine, StatsShape, Step, Version,
};
pub use run::{Mismatch, Outcome, run};
