//! Lanes: who may be served from which free blocks.
//!
//! A lane is one stream in one part of one pool. A block belongs to the lane it will be free in; it is found only by requests of
//! that lane. A stream's two lanes in a pool lie side by side, small first.

use std::sync::Arc;

use super::bins::Bins;
use crate::ids::Part;
use crate::index::FreeIndex;
use crate::stream::StreamCore;

/// One stream in one part of one pool.
#[derive(Debug)]
pub(crate) struct Lane {
    /// Which of the arena's pool slots.
    pub(crate) slot: u32,
    pub(crate) part: Part,
    pub(crate) core: Arc<StreamCore>,
    pub(crate) index: FreeIndex,
    pub(crate) bins: Option<Bins>,
    pub(crate) in_use: bool,
}

impl Lane {
    pub(crate) fn new(slot: u32, part: Part, core: Arc<StreamCore>, bins: bool) -> Self {
        Self { slot, part, core, index: FreeIndex::new(), bins: bins.then(Bins::new), in_use: true }
    }
}
