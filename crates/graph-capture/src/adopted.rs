//! A capture that someone else began.

use gpupool_allocator::{Allocator, PoolHold, PoolId, SessionKey};
use gpupool_device::{CaptureId, GraphDevice};

/// Our side of a capture that someone else began and will end. Close it with [`finish`](Self::finish) after the driver's end; dropping it
/// does the same and gives the pool up.
#[must_use = "dropping it gives the pool up"]
pub struct Adopted<D: GraphDevice> {
    allocator: Allocator<D>,
    session: Option<SessionKey>,
    capture: CaptureId,
    pool: PoolId,
}

impl<D: GraphDevice> std::fmt::Debug for Adopted<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Adopted({} into pool {})", self.capture.0, self.pool)
    }
}

impl<D: GraphDevice> Adopted<D> {
    pub(crate) fn new(allocator: Allocator<D>, session: SessionKey, capture: CaptureId, pool: PoolId) -> Self {
        Self { allocator, session: Some(session), capture, pool }
    }

    /// The driver's number of the capture.
    #[must_use]
    pub fn id(&self) -> CaptureId {
        self.capture
    }

    /// The pool that its requests are served from.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// The capture has ended. Keep what this returns for as long as its graph, or anything made from it, can run: while it lives, the
    /// memory that the graph baked in stays put.
    #[must_use = "dropping the holds gives the graph's memory up"]
    pub fn finish(mut self) -> Vec<PoolHold> {
        self.close()
    }

    fn close(&mut self) -> Vec<PoolHold> {
        let Some(session) = self.session.take() else { return Vec::new() };
        let end = self.allocator.capture_registry().close(session);
        end.holds.iter().for_each(|hold| drop(hold.end_capture()));
        end.holds
    }
}

impl<D: GraphDevice> Drop for Adopted<D> {
    fn drop(&mut self) {
        drop(self.close());
    }
}
