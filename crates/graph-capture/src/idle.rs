//! What the allocator must know before it takes a pool's memory away or lends it: whether a graph of the pool runs, or could be launched.

use gpupool_allocator::{Idleness, PoolId, PoolKeeper};
use gpupool_device::{DriverResult, GraphDevice};

use crate::error::LaunchError;
use crate::graph::GraphInner;
use crate::runs::RunsTable;

impl<D: GraphDevice> PoolKeeper for RunsTable<D> {
    /// Whoever launches a graph of the pool holds the lock of its runs from its check until the driver has the launch; so does this while
    /// `then` runs.
    fn while_idle(
        &self,
        allocator: u64,
        pool: PoolId,
        idleness: Idleness,
        then: &mut dyn FnMut(),
    ) -> DriverResult<bool> {
        // Kept until the end: a graph that is captured meanwhile finds these runs.
        let runs = self.of(allocator, pool);
        let state = match idleness {
            Idleness::Everything => runs.lock(),
            _ => match runs.try_lock() {
                Some(state) => state,
                None => return Ok(false),
            },
        };
        for run in &state.last {
            if run.mark.is_known_done() {
                continue;
            }
            match idleness {
                Idleness::Now { beside } => {
                    if beside != Some(run.mark.registration()) && !run.mark.poll()? {
                        return Ok(false);
                    }
                }
                _ => run.mark.wait()?,
            }
        }
        then();
        drop(state);
        Ok(true)
    }
}

/// Before a launch, with the runs of all its pools locked: parked pools are woken, and nothing is on loan where it writes. One load a pool
/// that is resident.
pub(crate) fn ready<D: GraphDevice>(graph: &GraphInner<D>) -> Result<(), LaunchError> {
    for pool in &graph.pools {
        if pool.hold.is_resident() {
            continue;
        }
        let source = pool.hold.ready(&pool.written);
        source.map_err(|source| LaunchError::Pool { graph: graph.id, source })?;
    }
    Ok(())
}
