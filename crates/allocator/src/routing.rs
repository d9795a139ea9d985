//! Where a request goes: the default pool, a scope's or a capture's.
//!
//! A scope is "route these requests to that pool". It is not a capture, and is never treated as one (but see the policies).

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread::ThreadId;

use gpupool_device::{CaptureId, CaptureStatus, Device, StreamHandle};

use crate::captures::SessionKey;
use crate::error::AllocError;
use crate::ids::PoolId;
use crate::inner::Inner;
use crate::policy::Routing;
use crate::pool::Pool;
use crate::shared::{Attention, SCOPES};
use crate::stream::Stream;
use crate::sync::{Mutex, Rank};

/// Which requests a scope claims.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Filter {
    /// Every request.
    All,
    /// Requests on the stream with this handle.
    Stream(StreamHandle),
    /// Requests on streams that are capturing under this id, whoever makes them.
    Capture(CaptureId),
    /// Requests made by this thread, on any stream.
    Thread(ThreadId),
}

/// "Route these requests to that pool".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Scope {
    pub(crate) pool: PoolId,
    pub(crate) filter: Filter,
    /// The capture that was under way where it was opened: such a scope goes before the capture's own pool.
    pub(crate) inside: Option<CaptureId>,
    /// Names the scope, so that it can be closed whatever others are open.
    pub(crate) key: ScopeKey,
}

/// Names an open scope.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ScopeKey(usize);

/// Of where a stream's requests go outside captures: for which requests that answer holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Claim {
    /// The [version](Scopes::version) of the scopes that were asked.
    scopes: u64,
    /// The only thread whose requests they were asked for; else it holds for all threads.
    only_from: Option<ThreadId>,
}

impl Claim {
    /// Holds for no request.
    pub(crate) const NONE: Self = Self { scopes: 0, only_from: None };

    /// Of an answer of these scopes, newest first, of which the last one claims the request or none does. `None` if there is none to ask, or the
    /// driver had a say.
    fn of(version: u64, asked: &[Scope]) -> Option<Self> {
        let mut only_from = None;
        for scope in asked {
            match scope.filter {
                Filter::All | Filter::Stream(_) => {}
                Filter::Thread(_) => only_from = Some(std::thread::current().id()),
                Filter::Capture(_) => return None,
            }
        }
        (!asked.is_empty()).then_some(Self { scopes: version, only_from })
    }

    /// Whether it holds for a request of the calling thread under scopes of this version.
    #[inline(always)]
    pub(crate) fn holds(&self, version: u64) -> bool {
        self.scopes == version && self.only_from.is_none_or(|thread| thread == std::thread::current().id())
    }
}

/// The open scopes of an allocator, oldest first.
#[derive(Debug)]
pub(crate) struct Scopes {
    open: AtomicUsize,
    /// Counts openings and closings, under the list's lock. Begins at 1.
    version: AtomicU64,
    keys: AtomicUsize,
    list: Mutex<Vec<Scope>>,
    /// Where it is noted whether one is open.
    attention: Arc<Attention>,
}

impl Scopes {
    pub(crate) fn new(attention: &Arc<Attention>) -> Self {
        let list = Mutex::new(Rank::Leaf, Vec::new());
        Self {
            open: AtomicUsize::new(0),
            version: AtomicU64::new(1),
            keys: AtomicUsize::new(0),
            list,
            attention: Arc::clone(attention),
        }
    }

    /// Under the list's lock.
    fn note_open(&self, open: usize) {
        self.version.fetch_add(1, Ordering::Release);
        self.open.store(open, Ordering::Release);
        self.attention.set(SCOPES, open > 0);
    }

    /// Whether no scope is open. One load.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    /// Differs from what it was before if a scope was opened or closed in between. One load.
    #[inline(always)]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Opens a scope. Its key is unlike every earlier one's.
    pub(crate) fn push(&self, pool: PoolId, filter: Filter, inside: Option<CaptureId>) -> ScopeKey {
        let key = ScopeKey(self.keys.fetch_add(1, Ordering::Relaxed));
        let mut list = self.list.lock();
        list.push(Scope { pool, filter, inside, key });
        self.note_open(list.len());
        key
    }

    /// Closes the newest scope that `matches`.
    pub(crate) fn take(&self, matches: impl Fn(&Scope) -> bool) -> Option<Scope> {
        let mut list = self.list.lock();
        let at = list.iter().rposition(matches)?;
        let scope = list.remove(at);
        self.note_open(list.len());
        Some(scope)
    }

    pub(crate) fn contains(&self, pool: PoolId) -> bool {
        self.list.lock().iter().any(|s| s.pool == pool)
    }

    /// All open scopes, newest first, and their [version](Self::version).
    pub(crate) fn newest_first(&self) -> (u64, Vec<Scope>) {
        let list = self.list.lock();
        (self.version(), list.iter().rev().copied().collect())
    }
}

/// Where a request goes.
pub(crate) enum Route<D: Device> {
    /// The default pool, by the open scopes if there is a claim.
    Default(Option<Claim>),
    /// A private pool, by an open scope.
    Scope(Arc<Pool<D>>, Option<Claim>),
    /// A pool of the capture that the stream is in. The capture's own one, for which the stream remembers the route, comes with the
    /// capture and the number of sessions closed before it was looked up.
    Capture(Arc<Pool<D>>, Option<(CaptureId, u64)>),
}

impl<D: Device> Inner<D> {
    /// The private pool that a request on `stream` goes to, if any. Asks the driver nothing while no capture and no scope is open.
    /// `status` is what it said of the stream a moment ago, if it was asked.
    pub(crate) fn route(
        self: &Arc<Self>,
        stream: &Stream<D>,
        status: Option<CaptureStatus>,
    ) -> Result<Route<D>, AllocError> {
        match self.shared.rules.routing {
            Routing::NewestScope => {
                if self.shared.context.scopes.is_empty() {
                    return Ok(Route::Default(None));
                }
                let (version, scopes) = self.shared.context.scopes.newest_first();
                for (at, scope) in scopes.iter().enumerate() {
                    if self.claims(&scope.filter, stream, None)? {
                        return Ok(Route::Scope(self.pools.get(scope.pool)?, Claim::of(version, &scopes[..=at])));
                    }
                }
                Ok(Route::Default(Claim::of(version, &scopes)))
            }
            Routing::CaptureFirst => {
                if self.shared.context.scopes.is_empty() && self.shared.registry.is_quiet() {
                    return Ok(Route::Default(None));
                }
                self.route_capture_first(stream, status, None)
            }
        }
    }

    /// As [`route`](Self::route) for a request that names its pool: as if a scope claimed it that was opened just now.
    pub(crate) fn route_into(self: &Arc<Self>, stream: &Stream<D>, pool: PoolId) -> Result<Route<D>, AllocError> {
        if self.shared.rules.routing == Routing::CaptureFirst && !self.shared.registry.is_quiet() {
            return self.route_capture_first(stream, None, Some(pool));
        }
        self.route_to(pool, None)
    }

    /// Outside captures.
    fn route_to(&self, pool: PoolId, claim: Option<Claim>) -> Result<Route<D>, AllocError> {
        Ok(if pool.is_default() { Route::Default(claim) } else { Route::Scope(self.pools.get(pool)?, claim) })
    }

    /// `named` is the pool that the request names, if it does.
    fn route_capture_first(
        self: &Arc<Self>,
        stream: &Stream<D>,
        status: Option<CaptureStatus>,
        named: Option<PoolId>,
    ) -> Result<Route<D>, AllocError> {
        let registry = &self.shared.registry;
        let closed = registry.closed();
        let status = match (status, registry.is_quiet()) {
            (Some(status), _) => Some(status),
            (None, true) => None,
            (None, false) => Some(self.shared.driver.capture_status(stream.core.handle)?),
        };
        let capture = match status {
            None | Some(CaptureStatus::None) => None,
            Some(CaptureStatus::Active(id)) => Some(id),
            Some(CaptureStatus::Invalidated) => {
                return Err(AllocError::InvalidatedCapture { stream: stream.core.id });
            }
        };
        let (version, scopes) = match named {
            Some(_) => (0, Vec::new()),
            None => self.shared.context.scopes.newest_first(),
        };
        // Those opened inside the capture, or without one all.
        let claiming = || -> Result<Option<usize>, AllocError> {
            for (at, scope) in scopes.iter().enumerate() {
                let counts = capture.is_none() || scope.inside == capture;
                if counts && self.claims(&scope.filter, stream, status)? {
                    return Ok(Some(at));
                }
            }
            Ok(None)
        };
        let claiming = claiming()?;
        let scope = named.or(claiming.map(|at| scopes[at].pool));
        let Some(capture) = capture else {
            let claim = Claim::of(version, &scopes[..claiming.map_or(scopes.len(), |at| at + 1)]);
            return self.route_to(scope.unwrap_or(PoolId::DEFAULT), claim);
        };
        if scope.is_some_and(PoolId::is_default) {
            return Ok(Route::Default(None));
        }
        let device = self.shared.driver.device().ordinal();
        let Some((session, own)) = registry.find(capture, device, stream.core.handle) else {
            return Err(AllocError::UnknownCapture { stream: stream.core.id, capture });
        };
        // What a scope inside leads to is baked into the graph as well, so its graph holds that pool too.
        Ok(match scope {
            Some(inner) => Route::Capture(self.pool_of_capture(session, inner)?, None),
            None => Route::Capture(self.pool_of_capture(session, own)?, Some((capture, closed))),
        })
    }

    /// A pool of a capture on this device: made, and kept for the capture's graph, at the first request.
    fn pool_of_capture(self: &Arc<Self>, session: SessionKey, id: PoolId) -> Result<Arc<Pool<D>>, AllocError> {
        if !self.shared.registry.keeps(session, self.id, id) {
            if self.shared.registry.is_drawn_from_beside(session, id) {
                return Err(AllocError::PoolInCapture { pool: id });
            }
            // The session holds the pool on some device; that it was forgotten on this one, where nobody held it, ends nothing.
            self.pools.lock().gone.remove(id);
            self.take_pool(id, None)?;
            let pool = self.pools.get(id)?;
            if let Some(hold) = self.hold(&pool) {
                hold.start_recording();
                // Another thread may have kept it meanwhile: then this one's hold goes.
                drop(self.shared.registry.keep(session, hold));
            }
            self.release_pool(id)?;
            if !self.shared.registry.keeps(session, self.id, id) {
                return Err(AllocError::PoolInCapture { pool: id });
            }
            self.pools.mark_captured(id);
            return Ok(pool);
        }
        Ok(self.pools.get(id)?)
    }

    /// Whether a scope claims the stream's requests; asks the driver only if it must and `status` is not known.
    fn claims(&self, filter: &Filter, stream: &Stream<D>, status: Option<CaptureStatus>) -> Result<bool, AllocError> {
        let ask = || self.shared.driver.capture_status(stream.core.handle);
        Ok(match filter {
            Filter::All => true,
            Filter::Stream(handle) => *handle == stream.core.handle,
            Filter::Thread(thread) => *thread == std::thread::current().id(),
            Filter::Capture(id) => status.map_or_else(ask, Ok)? == CaptureStatus::Active(*id),
        })
    }
}
