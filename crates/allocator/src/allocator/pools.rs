//! Private pools, scopes and sessions, as the allocator's users see them.

use std::sync::Arc;

use gpupool_device::{CaptureId, Device};

use super::Allocator;
use crate::captures::{PoolHold, SessionKey};
use crate::checkpoint::{PoolCheckpoint, Restored};
use crate::error::{AllocError, PoolError};
use crate::ids::{Part, PoolId};
use crate::provider::SegmentProvider;
use crate::routing::{Filter, Scope, ScopeKey};
use crate::stats::PoolStats;
use crate::stream::Stream;
use crate::sync::atomic::Ordering;

impl<D: Device> Allocator<D> {
    /// Takes a private pool: makes it, or counts one more user.
    ///
    /// # Errors
    ///
    /// [`PoolError::Released`] for a pool whose last user is gone (under policies that do not revive pools); [`PoolError::Default`].
    pub fn create_pool(&self, id: PoolId) -> Result<(), AllocError> {
        self.inner.take_pool(id, None)
    }

    /// Makes a private pool whose segments come from `provider`.
    ///
    /// # Errors
    ///
    /// [`PoolError::HasProvider`] if the pool exists.
    pub fn create_pool_with(&self, id: PoolId, provider: Arc<dyn SegmentProvider>) -> Result<(), AllocError> {
        self.inner.take_pool(id, Some(provider))
    }

    /// Takes a pool, or makes it, and gives the use back when the result is dropped. Its memory stays put as long, even when the
    /// allocator is gone.
    ///
    /// # Errors
    ///
    /// As [`create_pool`](Self::create_pool).
    pub fn hold_pool(&self, id: PoolId) -> Result<PoolHold, AllocError> {
        self.inner.take_pool(id, None)?;
        let hold = self.inner.pools.get(id).map(|pool| self.inner.hold(&pool));
        self.inner.release_pool(id)?;
        hold?.ok_or_else(|| PoolError::Unknown { pool: id }.into())
    }

    /// Opens a session for a capture that is about to begin on `stream` and draws from `pool`: the pool is held, what it hands out is
    /// noted, and from the driver's begin on the capture's requests go to it. Close it with
    /// [`CaptureRegistry::close`](crate::CaptureRegistry::close) after the driver's end, whether or not the driver began.
    ///
    /// # Errors
    ///
    /// [`AllocError::PoolInCapture`] if another session draws from the pool; those of [`create_pool`](Self::create_pool).
    pub fn open_session(&self, stream: &Stream<D>, pool: PoolId) -> Result<SessionKey, AllocError> {
        self.check_usable(stream)?;
        let hold = self.hold_pool(pool)?;
        let registry = &self.inner.shared.registry;
        let session = registry.announce(self.device().ordinal(), stream.core.handle, pool);
        self.keep_for_session(session, hold, pool)
    }

    /// As [`open_session`](Self::open_session), for a capture that someone else has begun.
    ///
    /// # Errors
    ///
    /// As `open_session`; [`AllocError::PoolInCapture`] also if the capture has a session.
    pub fn adopt_session(&self, capture: CaptureId, pool: PoolId) -> Result<SessionKey, AllocError> {
        let hold = self.hold_pool(pool)?;
        let session = self.inner.shared.registry.adopt(capture, pool);
        self.keep_for_session(session, hold, pool)
    }

    fn keep_for_session(
        &self,
        session: Option<SessionKey>,
        hold: PoolHold,
        pool: PoolId,
    ) -> Result<SessionKey, AllocError> {
        let session = session.ok_or(AllocError::PoolInCapture { pool })?;
        // From here on nobody parks it.
        if let Err(e) = self.inner.ready_pool(pool) {
            drop(self.inner.shared.registry.close(session));
            return Err(e);
        }
        hold.start_recording();
        drop(self.inner.shared.registry.keep(session, hold));
        self.inner.pools.mark_captured(pool);
        Ok(session)
    }

    /// Adds one segment of at least `bytes` to a part of a pool, ahead of captures into it, so that they find it in one piece. Returns
    /// its bytes. Of large memory reserved this way captures take small blocks too, before the pool grows.
    ///
    /// # Errors
    ///
    /// [`AllocError::CannotReserve`] if the driver or the limit does not allow it: nothing was reclaimed for it. [`PoolError::Unknown`].
    pub fn reserve_pool(&self, id: PoolId, part: Part, bytes: u64) -> Result<u64, AllocError> {
        self.inner.reserve(id, part, bytes)
    }

    /// Makes what eager work has freed in a pool available to captures, as far as the streams that used it are done. With `wait` it
    /// **waits** for them.
    ///
    /// # Errors
    ///
    /// [`PoolError::Unknown`], [`PoolError::Away`], and the driver's.
    pub fn prepare_pool_for_capture(&self, id: PoolId, wait: bool) -> Result<(), AllocError> {
        self.inner.ready_pool(id)?;
        let pool = self.inner.pools.get(id)?;
        self.inner.prepare_pool(&pool, wait)
    }

    /// One user of a pool less. After the last one the pool is freeable: live blocks stay valid, and its memory goes back when the
    /// cache is emptied or memory runs out.
    ///
    /// # Errors
    ///
    /// [`PoolError::Unknown`], [`PoolError::OverReleased`].
    pub fn release_pool(&self, id: PoolId) -> Result<(), AllocError> {
        Ok(self.inner.release_pool(id)?)
    }

    /// How many users a pool has.
    ///
    /// # Errors
    ///
    /// [`PoolError::Unknown`].
    pub fn pool_use_count(&self, id: PoolId) -> Result<i64, AllocError> {
        Ok(self.inner.pools.use_count(id)?)
    }

    /// A pool's figures. O(1); no arena's lock.
    ///
    /// # Errors
    ///
    /// [`PoolError::Unknown`].
    pub fn pool_stats(&self, id: PoolId) -> Result<PoolStats, AllocError> {
        Ok(self.inner.pools.get(id)?.stats())
    }

    /// Routes the requests that `filter` claims to a pool, until [`end_allocate_to_pool`](Self::end_allocate_to_pool). Takes the pool
    /// as [`create_pool`](Self::create_pool) does. The newest scope goes first.
    ///
    /// # Errors
    ///
    /// [`PoolError::AlreadyRecording`] for a pool with an open scope, under the bit-exact policies; those of `create_pool`.
    pub fn begin_allocate_to_pool(&self, id: PoolId, filter: Filter) -> Result<(), AllocError> {
        self.begin_scope(id, filter, None).map(drop)
    }

    /// As [`begin_allocate_to_pool`](Self::begin_allocate_to_pool), from inside a capture: such a scope goes before the capture's own
    /// pool. With the default pool's id the requests go outside the capture's pool, for buffers that outlive its graph.
    ///
    /// # Errors
    ///
    /// As `begin_allocate_to_pool`.
    pub fn begin_allocate_inside(
        &self,
        capture: CaptureId,
        id: PoolId,
        filter: Filter,
    ) -> Result<ScopeKey, AllocError> {
        self.begin_scope(id, filter, Some(capture))
    }

    /// Closes the scope of this key, whatever others are open; whether it was open. For guards: unlike
    /// [`end_allocate_to_pool`](Self::end_allocate_to_pool) it never closes another's scope.
    pub fn close_scope(&self, key: ScopeKey) -> bool {
        let closed = self.inner.shared.context.scopes.take(|s| s.key == key);
        if let Some(scope) = closed {
            self.scope_closed(scope.pool);
        }
        closed.is_some()
    }

    fn begin_scope(&self, id: PoolId, filter: Filter, inside: Option<CaptureId>) -> Result<ScopeKey, AllocError> {
        let scopes = &self.inner.shared.context.scopes;
        let exclusive = self.inner.shared.rules.streams_by_handle;
        if !(id.is_default() && inside.is_some()) {
            // PyTorch counts the user before it refuses the scope, and so do the policies that copy it.
            self.create_pool(id)?;
            if exclusive && scopes.contains(id) {
                return Err(PoolError::AlreadyRecording { pool: id }.into());
            }
        }
        Ok(scopes.push(id, filter, inside))
    }

    /// Closes the newest scope of a pool (of those that claim a thread's requests, the calling thread's). The pool keeps its user: a
    /// [`release_pool`](Self::release_pool) is still owed.
    ///
    /// # Errors
    ///
    /// [`PoolError::NotRecording`].
    pub fn end_allocate_to_pool(&self, id: PoolId) -> Result<(), AllocError> {
        let me = std::thread::current().id();
        let mine = |s: &Scope| s.pool == id && !matches!(s.filter, Filter::Thread(t) if t != me);
        if self.inner.shared.context.scopes.take(mine).is_none() {
            return Err(PoolError::NotRecording { pool: id }.into());
        }
        self.scope_closed(id);
        Ok(())
    }

    fn scope_closed(&self, id: PoolId) {
        if self.config().capture_reuse() {
            self.inner.reach.lock().clear();
            if let Ok(pool) = self.inner.pools.get(id) {
                pool.arena.flush_deferred(|slot| slot == pool.slot);
            }
        }
    }

    /// From now on requests take whole blocks of this pool, never parts. May be said before the pool exists; is not taken back.
    pub fn set_no_split(&self, id: PoolId) {
        let pool = {
            let mut table = self.inner.pools.lock();
            table.no_split.insert(id);
            table.pools.get(&id).map(|e| Arc::clone(&e.pool))
        };
        if let Some(pool) = pool {
            pool.arena.lock().slots[pool.slot as usize].no_split = true;
        }
    }

    /// From now on each segment that this pool takes is one driver allocation, whatever the policy: for memory that is registered with
    /// others or exported, which pages that move would break. Say it before the pool's first request.
    /// [`base_allocation`](Self::base_allocation) tells base and extent behind any address. O(segments).
    ///
    /// # Errors
    ///
    /// [`PoolError::Unknown`]; [`PoolError::InPieces`] if the pool holds memory of other kinds already, which only happens under `pages`:
    /// later requests could be served from that.
    pub fn set_whole_segments(&self, id: PoolId) -> Result<(), AllocError> {
        let pool = self.inner.pools.get(id)?;
        let state = pool.arena.lock();
        if state.segments.iter().any(|(_, s)| s.slot == pool.slot && s.pages.is_some()) {
            return Err(PoolError::InPieces { pool: id }.into());
        }
        pool.whole_segments.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Whether free blocks of this pool serve requests of the default pool that would otherwise fail.
    pub fn set_use_on_oom(&self, id: PoolId, on: bool) {
        let mut table = self.inner.pools.lock();
        if on {
            table.use_on_oom.insert(id);
        } else {
            table.use_on_oom.remove(&id);
        }
    }

    /// Notes the layout of a private pool.
    ///
    /// # Errors
    ///
    /// [`PoolError::Unknown`], [`PoolError::PendingBlock`], [`PoolError::LoansOut`].
    pub fn checkpoint_pool(&self, id: PoolId) -> Result<PoolCheckpoint, AllocError> {
        self.inner.checkpoint(id)
    }

    /// Brings a pool's layout back: its live blocks are freed, and those of the checkpoint are live again, to be freed in the order of
    /// `stream`. Nothing is changed on an error.
    ///
    /// # Errors
    ///
    /// [`PoolError::Unknown`], [`PoolError::Released`], [`PoolError::CheckpointMismatch`]; [`PoolError::LoansOut`], since what is lent is
    /// live, and not the pool's; [`AllocError::PoolInCapture`] while a capture draws from the pool; [`AllocError::RetiredStream`], [`AllocError::OtherThreadsStream`].
    pub fn restore_pool(&self, checkpoint: &PoolCheckpoint, stream: &Stream<D>) -> Result<Restored<D>, AllocError> {
        self.check_usable(stream)?;
        self.inner.restore(checkpoint, stream)
    }

    // Captures, in PyTorch's terms.

    /// Counts a capture begun (PyTorch's `markCaptureBegin`). Only the bit-exact policies look.
    pub fn mark_capture_begin(&self) {
        self.inner.shared.mark_captures(|n| n.checked_add(1));
    }

    /// Counts a capture ended. More ends than begins are ignored.
    pub fn mark_capture_end(&self) {
        self.inner.shared.mark_captures(|n| n.checked_sub(1));
    }
}
