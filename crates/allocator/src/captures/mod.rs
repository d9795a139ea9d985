//! What the allocator does for captures: where their requests go, what is kept for their graphs, and when a block may be used again
//! inside one. Captures themselves (begin, end, replay, lifetime) are the business of the crate `graph-capture`.

mod hold;
mod order;
mod prepare;
mod registry;

pub use hold::{BlockRef, HeldBlock, PoolHold, Range, Recording};
pub(crate) use order::ReachSets;
pub use registry::{CaptureEnd, CaptureRegistry, Offence, SessionKey, Settling};
