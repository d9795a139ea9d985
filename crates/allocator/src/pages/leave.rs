//! Old mappings of pieces that have moved: unmapped once the host has seen the work complete that may use them (G4).

use std::sync::Arc;

use gpupool_device::{Address, Device, DriverResult};

use super::table::Handle;
use crate::arena::{Arena, BlockId};
use crate::ids::Part;
use crate::inner::Inner;
use crate::stream::StreamCore;

/// A range whose pieces have moved away.
#[derive(Debug)]
pub(crate) struct Leaving {
    /// Held until the range is unmapped.
    pub(crate) block: BlockId,
    pub(crate) address: Address,
    pub(crate) bytes: u64,
    pub(crate) handles: Vec<Arc<Handle>>,
    /// Those of them that have no other place: released once they are unmapped, and counted as reserved of this part until then.
    pub(crate) homeless: Vec<Arc<Handle>>,
    pub(crate) part: Part,
    /// Nothing uses the range once this stream has passed this stamp.
    pub(crate) core: Arc<StreamCore>,
    pub(crate) since: u64,
}

impl<D: Device> Arena<D> {
    /// Unmaps what nothing uses any more. With `wait` waits for the rest. What the driver refuses stays, and is tried again. O(leaving).
    pub(crate) fn settle_leaving(&self, wait: bool) -> DriverResult<()> {
        let awaited = {
            let state = self.lock();
            let mut awaited: Vec<(Arc<StreamCore>, u64)> = Vec::new();
            for entry in &state.leaving {
                match awaited.iter_mut().find(|(core, _)| core.id == entry.core.id) {
                    Some((_, stamp)) => *stamp = (*stamp).max(entry.since),
                    None => awaited.push((Arc::clone(&entry.core), entry.since)),
                }
            }
            awaited
        };
        for (core, stamp) in &awaited {
            core.look(&self.shared, *stamp, wait)?;
        }
        if awaited.is_empty() {
            return Ok(());
        }
        let done: Vec<Leaving> = self.lock().leaving.extract_if(.., |l| l.core.has_passed(l.since)).collect();
        if done.is_empty() {
            return Ok(());
        }
        let device = self.shared.driver.device();
        let begun = device.now();
        for entry in done {
            match self.shared.driver.unmap(entry.address, entry.bytes) {
                Ok(()) => {
                    entry.handles.iter().for_each(|h| h.unmapped());
                    let mut state = self.lock();
                    state.empty(entry.block);
                    drop(state);
                    self.shared.totals.lock().pages.aliased_bytes -= entry.bytes as i64;
                    self.shared.release_homeless(&entry);
                }
                Err(e) => {
                    tracing::warn!(address = %entry.address, bytes = entry.bytes, error = %e, "an old mapping was not taken away; it is tried again");
                    self.lock().leaving.push(entry);
                }
            }
        }
        self.shared.totals.lock().moves.spend(device.now().saturating_sub(begun));
        // Nobody is worse off: the range is not used again before it is unmapped.
        Ok(())
    }
}

impl<D: Device> Inner<D> {
    /// [`Arena::settle_leaving`] in every arena: a handle whose old mapping stands anywhere cannot be released.
    pub(crate) fn settle_leaving(&self, wait: bool) -> DriverResult<()> {
        if self.shared.rules.pages.is_some() {
            for arena in self.arenas() {
                arena.settle_leaving(wait)?;
            }
        }
        Ok(())
    }
}
