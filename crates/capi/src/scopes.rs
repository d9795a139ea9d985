//! "Allocate to this pool" as PyTorch means it: a pool, a test of streams, and captures that PyTorch begins itself.
//!
//! * **T1** A request on a capturing stream that a scope's test claims goes to that scope's pool, by a session that is opened for the
//!   capture at its first request and closed with the scope.
//! * **T2** After a pool was released nothing of it is reused elsewhere or unmapped until everything submitted by then is complete on
//!   the device: PyTorch makes no call at a replay, so the last one may be running. While a capture is open no event can be recorded, and
//!   the recording waits.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::Arc;
use std::thread::ThreadId;

use gpupool::device::{CaptureStatus, DriverError, DriverResult, EventHandle, StreamHandle, are_complete, code};
use gpupool::{Allocation, PoolHold, PoolId, SessionKey, Stream};
use parking_lot::Mutex;

use crate::device::Border;
use crate::instance::Of;
use crate::status::{Failure, Status};

/// Whether a scope claims a stream's requests. C: `bool filter(void *context, void *stream)`. Must neither throw nor call gpupool.
pub type StreamFilter = Option<unsafe extern "C" fn(context: *mut c_void, stream: *mut c_void) -> bool>;
/// Called once with a filter's context, when the scope is closed.
pub type Release = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// A C function that tests streams, if there is one, with its context.
pub(crate) struct StreamTest {
    filter: StreamFilter,
    context: *mut c_void,
    release: Release,
}

// SAFETY: whoever makes one promises that filter and release may be called from any thread.
unsafe impl Send for StreamTest {}
// SAFETY: as for `Send`, also from several threads at once.
unsafe impl Sync for StreamTest {}

impl StreamTest {
    /// # Safety
    ///
    /// `filter` and `release` may be called with `context` from any thread, several at once, as their types say.
    pub(crate) unsafe fn new(filter: StreamFilter, context: *mut c_void, release: Release) -> Self {
        Self { filter, context, release }
    }

    /// Whether streams are claimed because they capture, not by a function.
    fn is_for_captures(&self) -> bool {
        self.filter.is_none()
    }

    fn claims(&self, stream: StreamHandle) -> bool {
        // SAFETY: promised in `new`.
        self.filter.is_some_and(|filter| unsafe { filter(self.context, stream.0 as *mut c_void) })
    }
}

impl Drop for StreamTest {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: promised in `new`; a drop happens once, and nobody can call the filter any more.
            unsafe { release(self.context) }
        }
    }
}

/// An open "allocate to this pool".
pub(crate) struct Scope {
    pool: PoolId,
    /// One without a function claims what captures, of the thread that opened the scope first.
    test: Arc<StreamTest>,
    opener: ThreadId,
    /// The captures that were routed here.
    sessions: Vec<SessionKey>,
}

/// A scope as far as a request needs to know it.
struct Candidate {
    pool: PoolId,
    test: Arc<StreamTest>,
    opener: ThreadId,
}

impl<D: Border> Of<D> {
    pub(crate) fn open_scope(&self, pool: PoolId, test: StreamTest) -> Result<(), Failure> {
        // PyTorch owes a release for each begin.
        self.allocator.create_pool(pool)?;
        let hold = self.allocator.hold_pool(pool)?;
        self.kept.lock().entry(pool).or_default().push(hold);
        self.leaving.tidy(false);
        let opener = std::thread::current().id();
        let mut scopes = self.scopes.lock();
        scopes.push(Scope { pool, test: Arc::new(test), opener, sessions: Vec::new() });
        self.count_scopes(scopes.len());
        Ok(())
    }

    pub(crate) fn close_scope(&self, pool: PoolId) -> Result<(), Failure> {
        let scope = {
            let mut scopes = self.scopes.lock();
            let me = std::thread::current().id();
            let mine = scopes.iter().rposition(|s| s.pool == pool && s.opener == me);
            let Some(at) = mine.or_else(|| scopes.iter().rposition(|s| s.pool == pool)) else {
                return Err(gpupool::PoolError::NotRecording { pool }.into());
            };
            let scope = scopes.remove(at);
            self.count_scopes(scopes.len());
            scope
        };
        self.end_scope(scope);
        self.leaving.tidy(false);
        Ok(())
    }

    /// Closes every scope.
    pub(crate) fn close_all_scopes(&self) {
        let scopes = {
            let mut scopes = self.scopes.lock();
            self.count_scopes(0);
            std::mem::take(&mut *scopes)
        };
        scopes.into_iter().rev().for_each(|scope| self.end_scope(scope));
    }

    fn end_scope(&self, scope: Scope) {
        for session in scope.sessions {
            let end = self.allocator.capture_registry().close(session);
            end.holds.iter().for_each(|hold| drop(hold.end_capture()));
            self.kept.lock().entry(scope.pool).or_default().extend(end.holds);
        }
    }

    /// Serves a request while scopes are open.
    pub(crate) fn alloc_in_scopes(&self, bytes: u64, stream: &Stream<D>) -> Result<Allocation<D>, Failure> {
        // The test is foreign code: no lock is held while it runs.
        let candidates: Vec<Candidate> = {
            let scopes = self.scopes.lock();
            let candidate = |s: &Scope| Candidate { pool: s.pool, test: Arc::clone(&s.test), opener: s.opener };
            scopes.iter().rev().map(candidate).collect()
        };
        let handle = stream.handle();
        let by_test = |c: &&Candidate| c.test.claims(handle);
        let CaptureStatus::Active(capture) = self.device.capture_status(handle)? else {
            return match candidates.iter().find(by_test) {
                Some(scope) => Ok(self.allocator.alloc_in_pool(bytes, stream, scope.pool)?),
                None => Ok(self.allocator.alloc(bytes, stream)?),
            };
        };
        if self.allocator.capture_registry().pool_of(capture).is_none() {
            let me = std::thread::current().id();
            let untested =
                |own: bool| candidates.iter().find(move |c| c.test.is_for_captures() && (!own || c.opener == me));
            let scope = candidates.iter().find(by_test).or_else(|| untested(true)).or_else(|| untested(false));
            let Some(scope) = scope else {
                let text = format!("stream {handle:?} captures, and no open pool claims its requests");
                return Err(Failure::new(Status::Capture, text));
            };
            let session = self.allocator.adopt_session(capture, scope.pool)?;
            let mut scopes = self.scopes.lock();
            match scopes.iter_mut().rfind(|s| s.pool == scope.pool) {
                Some(open) => open.sessions.push(session),
                None => {
                    // Closed by another thread meanwhile.
                    drop(scopes);
                    drop(self.allocator.capture_registry().close(session));
                }
            }
        }
        Ok(self.allocator.alloc(bytes, stream)?)
    }

    /// One user of a pool less. After the last one what keeps its memory is queued behind everything submitted so far (T2).
    pub(crate) fn give_up(&self, pool: PoolId) -> Result<(), Failure> {
        self.allocator.release_pool(pool)?;
        let kept = {
            let mut kept = self.kept.lock();
            let holds = kept.get(&pool).map_or(0, Vec::len) as i64;
            match self.allocator.pool_use_count(pool) {
                Ok(users) if users > holds => None,
                _ => kept.remove(&pool),
            }
        };
        if let Some(holds) = kept {
            self.leaving.push(holds, &self.seen());
        }
        Ok(())
    }
}

/// Pools that were released, until what was submitted by then is complete.
pub(crate) struct Leaving<D: Border> {
    device: Arc<D>,
    queue: Mutex<Vec<Departure>>,
}

struct Departure {
    holds: Vec<PoolHold>,
    streams: Vec<u64>,
    /// Complete once everything submitted before the recording is; `None` until that was possible.
    events: Option<Vec<EventHandle>>,
}

impl<D: Border> Leaving<D> {
    pub(crate) fn new(device: Arc<D>) -> Self {
        Self { device, queue: Mutex::new(Vec::new()) }
    }

    fn push(&self, holds: Vec<PoolHold>, streams: &BTreeSet<u64>) {
        let mut departure = Departure { holds, streams: streams.iter().copied().collect(), events: None };
        self.record(&mut departure);
        self.queue.lock().push(departure);
        self.tidy(false);
    }

    /// How many pools wait.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.queue.lock().len()
    }

    /// Records the events, if a capture under way does not forbid it.
    fn record(&self, departure: &mut Departure) {
        if departure.events.is_none() {
            departure.events = self.try_record(&departure.streams);
        }
    }

    fn try_record(&self, streams: &[u64]) -> Option<Vec<EventHandle>> {
        let (mut events, device) = (Vec::new(), &*self.device);
        let all = (|| -> DriverResult<bool> {
            let event = device.event_create()?;
            events.push(event);
            match device.record_context(event) {
                Some(Ok(())) => return Ok(true),
                // A capture is open.
                Some(Err(_)) => return Ok(false),
                None => {}
            }
            for stream in streams.iter().map(|&s| StreamHandle(s)) {
                let gone = |e: &DriverError| matches!(e.code, code::INVALID_HANDLE | code::INVALID_VALUE);
                match device.capture_status(stream) {
                    Ok(status) if status.is_capturing() => return Ok(false),
                    Err(e) if !gone(&e) => return Err(e),
                    _ => {}
                }
                let event = device.event_create()?;
                events.push(event);
                match device.event_record(event, stream) {
                    // Destroyed since without a word: what it ran last cannot be learned.
                    Err(e) if gone(&e) => continue,
                    recorded => recorded?,
                }
            }
            Ok(true)
        })();
        if matches!(all, Ok(true)) {
            return Some(events);
        }
        self.destroy(&events);
        None
    }

    fn destroy(&self, events: &[EventHandle]) {
        for &event in events {
            // A context that is gone has taken its events along.
            let _gone = self.device.event_destroy(event);
        }
    }

    fn is_over(&self, departure: &Departure, wait: bool) -> bool {
        let Some(events) = &departure.events else { return false };
        are_complete(&*self.device, events, wait)
    }

    /// Lets go of the pools whose last work is complete; whether there were any. With `wait` it **waits** for them.
    pub(crate) fn tidy(&self, wait: bool) -> bool {
        let queued = std::mem::take(&mut *self.queue.lock());
        let (mut rest, mut any) = (Vec::new(), false);
        for mut departure in queued {
            self.record(&mut departure);
            if self.is_over(&departure, wait) {
                self.destroy(departure.events.as_deref().unwrap_or_default());
                drop(departure.holds);
                any = true;
            } else {
                rest.push(departure);
            }
        }
        self.queue.lock().extend(rest);
        any
    }
}

/// Nobody will ask again: waits for what is known to run. What could not be recorded goes, since the allocator does.
impl<D: Border> Drop for Leaving<D> {
    fn drop(&mut self) {
        self.tidy(true);
    }
}

#[cfg(test)]
mod tests;
