//! The registry of captures: which are under way in the process, and which pool each one's memory comes from.
//!
//! A *session* is our side of a capture. It is entered by stream before the driver begins, and known by the capture's id from then on,
//! so there is no gap in which a request on the stream finds neither:
//!
//! * **R1** While a session is open, a request on a stream that captures under its id goes to its pool, whatever thread asks and
//!   whichever stream of whichever device joined the capture.
//! * **R2** Between the driver's begin and the moment its id is noted, the session's own stream is recognised by its handle.
//! * **R3** A request on a stream that captures under an id that no session has is an error, never default memory.
//! * **R4** While no session is open, an allocation asks the driver nothing about captures.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::any::Any;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::ThreadId;

use gpupool_device::{Call, CaptureId, DriverError, StreamHandle};

use super::hold::PoolHold;
use crate::ids::PoolId;
use crate::shared::{Attention, CAPTURES};
use crate::state::CaptureState;
use crate::sync::{Mutex, Rank};

/// Names a session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SessionKey(u64);

/// A driver call of ours that a capture did not permit, and which invalidated it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offence {
    /// The call.
    pub call: Call,
    /// The driver's code.
    pub code: u32,
    /// The thread that made it.
    pub thread: ThreadId,
}

/// What a session leaves behind when it is over.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct CaptureEnd {
    /// The pools that the capture touched, on every device. They are in use as long as these live.
    pub holds: Vec<PoolHold>,
    /// The first of our calls that the capture did not permit, if any.
    pub offence: Option<Offence>,
    /// Until it is dropped no other capture may draw from the pools.
    pub settling: Settling,
}

/// The pools of a capture that is over are being settled. Dropped when they are.
#[derive(Debug, Default)]
pub struct Settling(Option<(Arc<CaptureRegistry>, SessionKey)>);

impl Drop for Settling {
    fn drop(&mut self) {
        if let Some((registry, key)) = self.0.take() {
            registry.sessions.lock().settling.retain(|(k, _)| *k != key);
        }
    }
}

#[derive(Debug)]
struct Session {
    key: SessionKey,
    /// The device's ordinal and the stream the capture begins on.
    stream: Option<(u32, StreamHandle)>,
    id: Option<CaptureId>,
    pool: PoolId,
    holds: Vec<PoolHold>,
    offence: Option<Offence>,
}

impl Session {
    /// Its own pool, or one that a scope opened inside it led to.
    fn draws_from(&self, pool: PoolId) -> bool {
        self.pool == pool || self.holds.iter().any(|h| h.id() == pool)
    }
}

#[derive(Debug, Default)]
struct Sessions {
    next: u64,
    open: Vec<Session>,
    /// Where it is noted whether any is open: a place for each allocator.
    told: Vec<Weak<Attention>>,
    /// Sessions that are closed and whose pools are not settled yet: nobody may draw from those.
    settling: Vec<(SessionKey, Vec<PoolId>)>,
}

impl Sessions {
    /// Tells whether any is open.
    fn tell(&self) {
        self.told.iter().filter_map(Weak::upgrade).for_each(|attention| attention.set(CAPTURES, !self.open.is_empty()));
    }

    /// Whether a session other than `beside` draws from a pool, or has left it unsettled.
    fn are_drawing_from(&self, pool: PoolId, beside: Option<SessionKey>) -> bool {
        let other = |key: SessionKey| beside != Some(key);
        self.open.iter().any(|s| other(s.key) && s.draws_from(pool))
            || self.settling.iter().any(|(key, pools)| other(*key) && pools.contains(&pool))
    }
}

/// Which captures of the process are under way, and which pool each one's memory comes from. Shared by the allocators of all
/// devices, since a capture can spread over several.
#[derive(Debug)]
pub struct CaptureRegistry {
    open: AtomicUsize,
    /// How many sessions were opened.
    opened: AtomicU64,
    /// How many were closed.
    closed: AtomicU64,
    sessions: Mutex<Sessions>,
    /// What crates above keep here, by type.
    kept: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

impl Default for CaptureRegistry {
    fn default() -> Self {
        let sessions = Mutex::new(Rank::Leaf, Sessions::default());
        let kept = Mutex::new(Rank::Leaf, Vec::new());
        Self { open: AtomicUsize::new(0), opened: AtomicU64::new(0), closed: AtomicU64::new(0), sessions, kept }
    }
}

impl CaptureRegistry {
    /// The registry of this process.
    #[must_use]
    pub fn global() -> Arc<Self> {
        static GLOBAL: OnceLock<Arc<CaptureRegistry>> = OnceLock::new();
        Arc::clone(GLOBAL.get_or_init(Arc::default))
    }

    /// The registry's one value of a type: for what a crate above must share between all who share the registry.
    #[must_use]
    pub fn shared<T: Any + Send + Sync + Default>(&self) -> Arc<T> {
        let mut kept = self.kept.lock();
        if let Some(known) = kept.iter().find_map(|k| Arc::clone(k).downcast().ok()) {
            return known;
        }
        let new = Arc::new(T::default());
        kept.push(Arc::clone(&new) as Arc<dyn Any + Send + Sync>);
        new
    }

    /// From now on notes there whether a session is open.
    pub(crate) fn tell(&self, attention: &Arc<Attention>) {
        let mut sessions = self.sessions.lock();
        sessions.told.retain(|told| told.strong_count() > 0);
        sessions.told.push(Arc::downgrade(attention));
        sessions.tell();
    }

    fn open(&self, stream: Option<(u32, StreamHandle)>, id: Option<CaptureId>, pool: PoolId) -> Option<SessionKey> {
        let mut sessions = self.sessions.lock();
        let known = id.is_some() && sessions.open.iter().any(|s| s.id == id);
        if known || sessions.are_drawing_from(pool, None) {
            return None;
        }
        sessions.next += 1;
        let key = SessionKey(sessions.next);
        sessions.open.push(Session { key, stream, id, pool, holds: Vec::new(), offence: None });
        self.opened.fetch_add(1, Ordering::AcqRel);
        self.open.store(sessions.open.len(), Ordering::Release);
        sessions.tell();
        Some(key)
    }

    /// Opens a session for a capture that is about to begin on a stream of the device with this ordinal. `None` if a session already
    /// draws from `pool`: what one capture freed would be handed to the other, and nothing orders them.
    pub fn announce(&self, device: u32, stream: StreamHandle, pool: PoolId) -> Option<SessionKey> {
        self.open(Some((device, stream)), None, pool)
    }

    /// The driver has begun the announced capture, under this id.
    pub fn begun(&self, key: SessionKey, id: CaptureId) {
        let mut sessions = self.sessions.lock();
        if let Some(session) = sessions.open.iter_mut().find(|s| s.key == key) {
            session.id = Some(id);
        }
    }

    /// Opens a session for a capture that someone else began. `None` as for [`announce`](Self::announce), or if the capture has a
    /// session.
    pub fn adopt(&self, id: CaptureId, pool: PoolId) -> Option<SessionKey> {
        self.open(None, Some(id), pool)
    }

    /// Whether a session draws from a pool.
    pub(crate) fn is_drawn_from(&self, pool: PoolId) -> bool {
        !self.is_quiet() && self.sessions.lock().are_drawing_from(pool, None)
    }

    /// Whether another session than `key` draws from a pool.
    pub(crate) fn is_drawn_from_beside(&self, key: SessionKey, pool: PoolId) -> bool {
        self.sessions.lock().are_drawing_from(pool, Some(key))
    }

    /// Differs from what it was before if a session was opened in between. One load.
    #[inline]
    pub(crate) fn opened(&self) -> u64 {
        self.opened.load(Ordering::Acquire)
    }

    /// Differs from what it was before if a session was closed in between. One load.
    #[inline]
    pub(crate) fn closed(&self) -> u64 {
        self.closed.load(Ordering::Acquire)
    }

    /// Closes a session. Call it after the driver's end. No other capture draws from its pools before the result is dropped, so that they
    /// can be settled first.
    pub fn close(self: &Arc<Self>, key: SessionKey) -> CaptureEnd {
        let mut sessions = self.sessions.lock();
        let Some(at) = sessions.open.iter().position(|s| s.key == key) else { return CaptureEnd::default() };
        let session = sessions.open.remove(at);
        self.closed.fetch_add(1, Ordering::AcqRel);
        self.open.store(sessions.open.len(), Ordering::Release);
        sessions.tell();
        let pools = session.holds.iter().map(PoolHold::id).chain([session.pool]).collect();
        sessions.settling.push((key, pools));
        let settling = Settling(Some((Arc::clone(self), key)));
        CaptureEnd { holds: session.holds, offence: session.offence, settling }
    }

    /// Whether no session is open. One load.
    #[inline]
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    /// Whether a session is open for a capture on this stream, begun or about to.
    pub(crate) fn captures_on(&self, device: u32, stream: StreamHandle) -> bool {
        let on = |s: &Session| s.stream == Some((device, stream));
        !self.is_quiet() && self.sessions.lock().open.iter().any(on)
    }

    /// The captures under way, in the order of their beginnings.
    pub(crate) fn states(&self) -> Vec<CaptureState> {
        if self.is_quiet() {
            return Vec::new();
        }
        let state = |s: &Session| {
            let pools = s.holds.iter().map(PoolHold::id).collect();
            CaptureState { id: s.id, stream: s.stream, pool: s.pool, pools }
        };
        self.sessions.lock().open.iter().map(state).collect()
    }

    /// The pool of a capture.
    #[must_use]
    pub fn pool_of(&self, id: CaptureId) -> Option<PoolId> {
        self.sessions.lock().open.iter().find(|s| s.id == Some(id)).map(|s| s.pool)
    }

    /// The session of a request on a stream that captures under `id`, and its pool.
    pub(crate) fn find(&self, id: CaptureId, device: u32, stream: StreamHandle) -> Option<(SessionKey, PoolId)> {
        let sessions = self.sessions.lock();
        let by_id = sessions.open.iter().find(|s| s.id == Some(id));
        // R2: begun, but its id is not noted yet.
        let by_stream = || sessions.open.iter().find(|s| s.id.is_none() && s.stream == Some((device, stream)));
        by_id.or_else(by_stream).map(|s| (s.key, s.pool))
    }

    /// Keeps a pool for a session's graph. Returns the hold back if the session is over or has it, or
    /// another draws from the pool.
    pub(crate) fn keep(&self, key: SessionKey, hold: PoolHold) -> Option<PoolHold> {
        let mut sessions = self.sessions.lock();
        if sessions.are_drawing_from(hold.id(), Some(key)) {
            return Some(hold);
        }
        let Some(session) = sessions.open.iter_mut().find(|s| s.key == key) else { return Some(hold) };
        if session.holds.iter().any(|h| h.is_same_pool(&hold)) {
            return Some(hold);
        }
        session.holds.push(hold);
        None
    }

    /// Whether a session keeps this pool of this allocator.
    pub(crate) fn keeps(&self, key: SessionKey, allocator: u64, pool: PoolId) -> bool {
        let sessions = self.sessions.lock();
        let session = sessions.open.iter().find(|s| s.key == key);
        session.is_some_and(|s| s.holds.iter().any(|h| (h.allocator(), h.id()) == (allocator, pool)))
    }

    /// Notes a call that the driver refused because of a capture: it may have invalidated any that is under way.
    pub(crate) fn note(&self, error: DriverError) {
        let offence = Offence { call: error.call, code: error.code, thread: std::thread::current().id() };
        for session in &mut self.sessions.lock().open {
            session.offence.get_or_insert(offence);
        }
    }
}
