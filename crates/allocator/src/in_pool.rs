//! A request that names its pool, whatever scopes are open: for callers that find out by themselves where a request goes.

use std::sync::Arc;

use gpupool_device::Device;

use crate::allocation::Allocation;
use crate::arena::{LaneKind, NONE, Source};
use crate::error::AllocError;
use crate::ids::PoolId;
use crate::inner::{Inner, SMALL_LIMIT};
use crate::policy::CaptureContext;
use crate::shared::{ROUNDS, SCOPES, UNUSUAL};
use crate::stream::Stream;

impl<D: Device> Inner<D> {
    pub(crate) fn alloc_in_pool(
        self: &Arc<Self>,
        requested: u64,
        stream: &Stream<D>,
        pool: PoolId,
    ) -> Result<Allocation<D>, AllocError> {
        if let Some(block) = self.hit_in_pool(requested, stream, pool) {
            return Ok(block);
        }
        if requested == 0 {
            return Ok(Allocation::null());
        }
        self.check_request(requested, stream)?;
        let mut request = self.request_along(requested, stream, self.route_into(stream, pool)?)?;
        if !self.shared.config.caching() {
            return self.alloc_uncached(&request);
        }
        // Where an open scope counts as a capture, so does a pool that is named.
        request.in_capture |= request.pool.is_some() && self.shared.rules.capture_context == CaptureContext::AnyScope;
        Ok(Allocation::new(self.serve(&request)?))
    }

    /// From a bin of the pool or its free index, if nothing is unusual.
    fn hit_in_pool(&self, requested: u64, stream: &Stream<D>, id: PoolId) -> Option<Allocation<D>> {
        let unusual = self.shared.attention.get() & UNUSUAL & !(ROUNDS | SCOPES);
        if unusual != 0 || !self.is_usual_rounded(&stream.core, requested) || !stream.core.is_usable() {
            return None;
        }
        let pool = self.pools.get(id).ok()?;
        let core = pool.arena.core;
        let mut locked = core.lock();
        // It may have been let go since it was found.
        if !locked.state.slots[pool.slot as usize].is_of(id) {
            return None;
        }
        let lane = locked.state.lanes_of(pool.slot, &stream.core, LaneKind::Stream);
        let want = self.shared.want(requested, SMALL_LIMIT);
        Some(Self::hit_at(Source { lane, neutral: NONE }, want, locked)?.handle(core))
    }
}
