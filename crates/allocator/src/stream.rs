//! A stream's registration, and its marks: how the allocator learns that work on a stream is done.
//!
//! A **mark** is a number on a stream's timeline. Whoever needs to know when the work submitted so far is done notes the stream's
//! open mark; recording an event closes that mark and opens the next, so one event settles everything noted before it.
//!
//! * **M1** Work submitted before [`StreamCore::open_mark`] returned `m` is done once [`StreamCore::is_done`]`(m)`.
//! * **M2** The mark is closed *before* its event is recorded. Hence M1: who reads `m` has submitted its work before the mark was
//!   closed, so before the event was recorded. (If it had been submitted after the record, the driver's own lock on the stream
//!   would order the record, and so the closing, before the submission, and the reader would have seen `m + 1`.)
//! * **M3** No event is recorded on a stream that is capturing or retired, nor on a thread's own default stream from another thread. One
//!   that was recorded while another thread began a capture there may be that capture's, and is not kept.

use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::ThreadId;

use gpupool_device::{Call, Device, DriverError, DriverResult, EventHandle, StreamHandle, code};

use crate::arena::{Arena, LastRoute};
use crate::driver::Driver;
use crate::ids::StreamId;
use crate::shared::Shared;
use crate::sync::{Mutex, Rank};

/// The mark that a stream's retirement closes: after all others.
const LAST_MARK: u64 = u64::MAX - 1;

/// What the allocator knows of a stream.
pub(crate) struct StreamCore {
    pub(crate) id: StreamId,
    pub(crate) handle: StreamHandle,
    /// The only thread that the handle means this stream to: set for a thread's own default stream.
    only_from: Option<ThreadId>,
    /// The allocator it is registered with.
    pub(crate) allocator: u64,
    open: AtomicU64,
    done: AtomicU64,
    retired: AtomicBool,
    /// Any thread may allocate on it: it is no thread's own, and not retired.
    usable_by_all: AtomicBool,
    /// Threads that are recording an event here. A stream that retires lets them finish first.
    marking: AtomicUsize,
    marks: Mutex<VecDeque<(u64, EventHandle)>>,
    /// Where its last request in a capture or under a scope went.
    pub(crate) route: LastRoute,
}

impl std::fmt::Debug for StreamCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "stream {} (handle {:#x})", self.id, self.handle.0)
    }
}

impl StreamCore {
    pub(crate) fn new(id: StreamId, handle: StreamHandle, only_from: Option<ThreadId>, allocator: u64) -> Self {
        Self {
            id,
            handle,
            only_from,
            allocator,
            open: AtomicU64::new(0),
            done: AtomicU64::new(0),
            retired: AtomicBool::new(false),
            usable_by_all: AtomicBool::new(only_from.is_none()),
            marking: AtomicUsize::new(0),
            marks: Mutex::new(Rank::Leaf, VecDeque::new()),
            route: LastRoute::default(),
        }
    }

    #[inline]
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    /// Whether the calling thread can record an event on the stream: a handle of a thread's own default stream means another stream to
    /// every other thread.
    pub(crate) fn is_reachable(&self) -> bool {
        self.only_from.is_none_or(|thread| thread == std::thread::current().id())
    }

    /// Whether any thread may allocate on the stream.
    #[inline(always)]
    pub(crate) fn is_usable_by_all(&self) -> bool {
        self.usable_by_all.load(Ordering::Relaxed)
    }

    /// Whether the calling thread may allocate on the stream.
    #[inline]
    pub(crate) fn is_usable(&self) -> bool {
        !self.is_retired() && self.is_reachable()
    }

    /// The mark that covers all work submitted so far, once it is closed and done.
    #[inline]
    pub(crate) fn open_mark(&self) -> u64 {
        self.open.load(Ordering::Acquire)
    }

    pub(crate) fn is_done(&self, mark: u64) -> bool {
        self.done.load(Ordering::Acquire) > mark
    }

    /// What a piece of memory that was freed now is stamped with: it has [passed](Self::has_passed) once the work so far is done.
    pub(crate) fn stamp(&self) -> u64 {
        self.open_mark() + 1
    }

    /// Whether the work before a [stamp](Self::stamp) is done. 0 stands for no work.
    pub(crate) fn has_passed(&self, stamp: u64) -> bool {
        stamp == 0 || self.is_done(stamp - 1)
    }

    /// Looks whether the work before a stamp is done, having recorded an event if none covers it; with `wait` waits on the host for it.
    pub(crate) fn look<D: Device>(&self, shared: &Shared<D>, stamp: u64, wait: bool) -> DriverResult<()> {
        if self.has_passed(stamp) {
            return Ok(());
        }
        let mark = stamp - 1;
        if !self.is_closed(mark) {
            shared.mark_unless_capturing(self)?;
        }
        self.poll(&shared.driver);
        if wait && !self.is_done(mark) && self.is_closed(mark) {
            self.wait(&shared.driver, mark)?;
        }
        Ok(())
    }

    /// Whether `mark` has been closed: an event covers it.
    pub(crate) fn is_closed(&self, mark: u64) -> bool {
        self.open_mark() > mark || self.is_retired()
    }

    fn settle(&self, mark: u64) {
        self.done.fetch_max(mark + 1, Ordering::AcqRel);
    }

    /// Closes the open mark by recording an event. Does nothing on a retired stream, whose last mark was closed when it retired. If the
    /// event cannot be recorded, the mark is open again.
    pub(crate) fn mark<D: Device>(&self, driver: &Driver<D>) -> DriverResult<()> {
        self.close_mark(driver, |event| driver.event_record(event, self.handle).map(|()| true)).map(drop)
    }

    /// As [`mark`](Self::mark), but not on a stream that is capturing (M3); whether an event covers what was submitted so far.
    pub(crate) fn mark_outside_captures<D: Device>(&self, driver: &Driver<D>) -> DriverResult<bool> {
        self.close_mark(driver, |event| driver.event_record_outside_captures(event, self.handle))
    }

    /// Closes the open mark by what `record` does with an event, if it says that it recorded it.
    fn close_mark<D: Device>(
        &self,
        driver: &Driver<D>,
        record: impl FnOnce(EventHandle) -> DriverResult<bool>,
    ) -> DriverResult<bool> {
        // Said before looking, and `retire` looks after it has said so: one of the two sees the other.
        self.marking.fetch_add(1, Ordering::SeqCst);
        let closed = if self.retired.load(Ordering::SeqCst) { Ok(true) } else { self.close_mark_by(driver, record) };
        self.marking.fetch_sub(1, Ordering::SeqCst);
        closed
    }

    fn close_mark_by<D: Device>(
        &self,
        driver: &Driver<D>,
        record: impl FnOnce(EventHandle) -> DriverResult<bool>,
    ) -> DriverResult<bool> {
        let event = driver.event()?;
        let mark = self.open.fetch_add(1, Ordering::AcqRel);
        let recorded = record(event);
        if matches!(recorded, Ok(true)) {
            self.enqueue(mark, event);
        } else {
            // Unless a later mark has been closed meanwhile, whose event covers this one. Who has read the next number waits for that
            // one, and it is closed after this one.
            let _ = self.open.compare_exchange(mark + 1, mark, Ordering::AcqRel, Ordering::Acquire);
            driver.recycle(event);
        }
        recorded
    }

    fn record<D: Device>(&self, driver: &Driver<D>, event: EventHandle, mark: u64) -> DriverResult<()> {
        driver.event_record(event, self.handle).inspect_err(|_| driver.recycle(event))?;
        self.enqueue(mark, event);
        Ok(())
    }

    fn enqueue(&self, mark: u64, event: EventHandle) {
        let mut marks = self.marks.lock();
        let at = marks.partition_point(|(m, _)| *m < mark);
        marks.insert(at, (mark, event));
    }

    /// Notes which marks are done by now. Never waits. A query that fails counts as "not yet": the work's owner is told by the
    /// driver, and whoever waits for the mark gets the error.
    pub(crate) fn poll<D: Device>(&self, driver: &Driver<D>) {
        loop {
            // Out of the queue while the driver is asked, so that no lock is held; no other thread can recycle it meanwhile.
            let Some((mark, event)) = self.marks.lock().pop_front() else { return };
            match driver.event_query(event) {
                Ok(true) => {
                    self.settle(mark);
                    driver.recycle(event);
                }
                Ok(false) => return self.put_back(driver, mark, event),
                Err(e) if matches!(e.code, code::CAPTURED_EVENT | code::INVALID_HANDLE) => {
                    // It will never tell anything, and must not hide those behind it: a later mark covers this one.
                    tracing::warn!(stream = ?self, error = %e, "an event is lost");
                }
                Err(e) => {
                    tracing::warn!(stream = ?self, error = %e, "an event could not be queried");
                    return self.put_back(driver, mark, event);
                }
            }
        }
    }

    /// Puts an event back into the queue that was out of it, unless a later one is known to be done by now: then nobody looks for it there,
    /// and a stream that is retired may have been forgotten.
    fn put_back<D: Device>(&self, driver: &Driver<D>, mark: u64, event: EventHandle) {
        {
            let mut marks = self.marks.lock();
            if !self.is_done(mark) {
                let at = marks.partition_point(|(m, _)| *m < mark);
                return marks.insert(at, (mark, event));
            }
        }
        driver.recycle(event);
    }

    /// As [`mark`](Self::mark), but refuses on a stream that is capturing (M3) or another thread's own: what was submitted there before
    /// cannot be learned now.
    fn mark_to_wait<D: Device>(&self, driver: &Driver<D>) -> DriverResult<()> {
        if !self.is_reachable() {
            return Err(DriverError::new(Call::EventRecord, code::INVALID_CONTEXT));
        }
        match self.mark_outside_captures(driver)? {
            true => Ok(()),
            false => Err(DriverError::new(Call::EventRecord, code::CAPTURE_UNSUPPORTED)),
        }
    }

    /// Waits on the host until `mark` is done, closing it first if need be. **Blocks.**
    pub(crate) fn wait<D: Device>(&self, driver: &Driver<D>, mark: u64) -> DriverResult<()> {
        while !self.is_done(mark) {
            if !self.is_closed(mark) {
                self.mark_to_wait(driver)?;
            }
            let covering = {
                let mut marks = self.marks.lock();
                let at = marks.partition_point(|(m, _)| *m < mark);
                marks.remove(at)
            };
            let Some((number, event)) = covering else {
                // Another thread asks whether the event is complete, or recording it failed: a fresh mark covers this one too. A
                // retired stream's last event is the only one there is, and comes back.
                if self.is_retired() || !self.is_reachable() {
                    crate::sync::yield_now();
                } else {
                    self.mark_to_wait(driver)?;
                }
                continue;
            };
            match driver.event_synchronize(event) {
                Ok(()) => {
                    self.settle(number);
                    driver.recycle(event);
                }
                Err(e) => {
                    self.put_back(driver, number, event);
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// No stream: what lies in neutral lanes is done by the rules of captures, not by a mark.
    pub(crate) fn neutral(allocator: u64) -> Self {
        let core = Self::new(StreamId::ANY, StreamHandle(u64::MAX), None, allocator);
        core.settle(0);
        core.retired.store(true, Ordering::Release);
        core.usable_by_all.store(false, Ordering::Relaxed);
        core
    }

    /// The event of the newest closed mark, for a stream to wait on. It stays in the queue; it is not recycled before it is done.
    pub(crate) fn newest_event(&self) -> Option<(u64, EventHandle)> {
        self.marks.lock().back().copied()
    }

    /// The event of the first closed mark that covers `mark`, for a stream to wait on; as [`newest_event`](Self::newest_event).
    pub(crate) fn covering_event(&self, mark: u64) -> Option<EventHandle> {
        let marks = self.marks.lock();
        marks.get(marks.partition_point(|(m, _)| *m < mark)).map(|(_, event)| *event)
    }

    /// Hands the events of a stream that nobody will poll again back to the cache.
    pub(crate) fn drop_marks<D: Device>(&self, driver: &Driver<D>) {
        let marks = std::mem::take(&mut *self.marks.lock());
        marks.into_iter().for_each(|(_, event)| driver.recycle(event));
    }

    /// The stream is going away: closes its last mark, which from then on covers everything.
    pub(crate) fn retire<D: Device>(&self, driver: &Driver<D>) -> DriverResult<()> {
        if self.is_retired() {
            return Ok(());
        }
        if !self.is_reachable() {
            return Err(DriverError::new(Call::EventRecord, code::INVALID_CONTEXT));
        }
        if driver.capture_status(self.handle)?.is_capturing() {
            return Err(DriverError::new(Call::EventRecord, code::CAPTURE_UNSUPPORTED));
        }
        let event = driver.event()?;
        if self.retired.swap(true, Ordering::SeqCst) {
            driver.recycle(event);
            return Ok(());
        }
        self.usable_by_all.store(false, Ordering::Relaxed);
        // An event that another thread records now would come after this one, or on a stream that has the handle next.
        while self.marking.load(Ordering::SeqCst) > 0 {
            crate::sync::yield_now();
        }
        // The last event covers every mark.
        self.record(driver, event, LAST_MARK).inspect_err(|_| {
            self.retired.store(false, Ordering::Release);
            self.usable_by_all.store(self.only_from.is_none(), Ordering::Relaxed);
        })
    }
}

/// A registered stream of an allocator. Cheap to clone; a clone is the same registration.
///
/// Registering gives the driver's handle an id that is never used again, so a handle that the driver recycles is never mistaken
/// for the stream that had it before.
pub struct Stream<D: Device> {
    pub(crate) core: Arc<StreamCore>,
    pub(crate) arena: Arc<Arena<D>>,
    /// The small lane in the default pool; the large one is the next.
    pub(crate) lane: u32,
}

impl<D: Device> Clone for Stream<D> {
    fn clone(&self) -> Self {
        Self { core: Arc::clone(&self.core), arena: Arc::clone(&self.arena), lane: self.lane }
    }
}

impl<D: Device> Stream<D> {
    /// How many requests on this stream found no free block in its part of the default pool, and so took the long way. O(1), no lock.
    ///
    /// Where it has not moved, the request in between was a hit.
    #[must_use]
    pub fn misses(&self) -> u64 {
        self.arena.counters.misses().max(0) as u64
    }

    /// The registration's number.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.core.id
    }

    /// The driver's handle, as it was registered.
    #[must_use]
    pub fn handle(&self) -> StreamHandle {
        self.core.handle
    }

    /// Whether the stream is registered with an allocator of this device.
    #[must_use]
    pub fn is_of(&self, device: &Arc<D>) -> bool {
        Arc::ptr_eq(self.arena.shared.driver.device(), device)
    }

    /// Whether its handle names it on the calling thread: not so for another thread's own default stream.
    #[must_use]
    pub fn is_of_this_thread(&self) -> bool {
        self.core.is_reachable()
    }

    /// Whether the stream was retired: it can no longer be allocated on.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        self.core.is_retired()
    }
}

impl<D: Device> Stream<D> {
    /// A mark after all work that was submitted to the stream before this call. No driver call.
    #[must_use]
    pub fn work_so_far(&self) -> WorkMark<D> {
        WorkMark::new(Arc::clone(&self.core), self.core.open_mark(), Arc::clone(&self.arena.shared))
    }

    /// As [`work_so_far`](Self::work_so_far), with an event recorded now: it is done without the work that is submitted later. One
    /// driver call.
    ///
    /// # Errors
    ///
    /// The driver's; `CAPTURE_UNSUPPORTED` while the stream is capturing, `INVALID_CONTEXT` for another thread's own default stream.
    pub fn mark_work(&self) -> DriverResult<WorkMark<D>> {
        let mark = self.work_so_far();
        if !self.is_retired() {
            self.core.mark_to_wait(&self.arena.shared.driver)?;
        }
        Ok(mark)
    }
}

/// A point on a stream's timeline: done once the work submitted before it is.
///
/// It costs nothing until someone asks: only then an event is recorded, and one event serves all marks before it.
pub struct WorkMark<D: Device> {
    core: Arc<StreamCore>,
    mark: u64,
    shared: Arc<Shared<D>>,
}

impl<D: Device> Clone for WorkMark<D> {
    fn clone(&self) -> Self {
        Self { core: Arc::clone(&self.core), mark: self.mark, shared: Arc::clone(&self.shared) }
    }
}

impl<D: Device> std::fmt::Debug for WorkMark<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "mark {} of {:?}", self.mark, self.core)
    }
}

impl<D: Device> WorkMark<D> {
    pub(crate) fn new(core: Arc<StreamCore>, mark: u64, shared: Arc<Shared<D>>) -> Self {
        Self { core, mark, shared }
    }

    pub(crate) fn parts(&self) -> (&Arc<StreamCore>, u64) {
        (&self.core, self.mark)
    }

    /// The stream it is on.
    #[must_use]
    pub fn stream(&self) -> StreamId {
        self.core.id
    }

    /// The registration of its stream: the allocator's number, and the stream's id there.
    #[must_use]
    pub fn registration(&self) -> (u64, StreamId) {
        (self.core.allocator, self.core.id)
    }

    /// Whether it is on this very stream.
    #[must_use]
    pub fn is_on(&self, stream: &Stream<D>) -> bool {
        Arc::ptr_eq(&self.core, &stream.core)
    }

    /// Whether the calling thread can record an event on its stream: not on another thread's own default stream.
    #[must_use]
    pub fn is_reachable(&self) -> bool {
        self.core.is_reachable()
    }

    /// Whether it is known to be done. One load; asks nobody.
    #[must_use]
    pub fn is_known_done(&self) -> bool {
        self.core.is_done(self.mark)
    }

    /// Whether the work before it is done by now. Never waits; records an event if none covers it, unless the stream is capturing.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn poll(&self) -> DriverResult<bool> {
        if self.core.is_done(self.mark) {
            return Ok(true);
        }
        if !self.core.is_closed(self.mark) {
            self.shared.mark_unless_capturing(&self.core)?;
        }
        self.core.poll(&self.shared.driver);
        Ok(self.core.is_done(self.mark))
    }

    /// Waits on the host until it is done. **Blocks.**
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn wait(&self) -> DriverResult<()> {
        self.core.wait(&self.shared.driver, self.mark)
    }

    /// Makes what is submitted to `stream` from now on wait, on the device, until it is done. Nothing is submitted if it is on that
    /// very stream or done. Returns whether a wait was submitted.
    ///
    /// # Errors
    ///
    /// The driver's; `CAPTURE_UNSUPPORTED` when no event can be recorded because the mark's stream is capturing, or when `stream` is, whose
    /// capture the wait would break; `INVALID_CONTEXT` when either is another thread's own default stream; `INVALID_HANDLE` when `stream`
    /// was retired.
    pub fn order_before(&self, stream: &Stream<D>) -> DriverResult<bool> {
        if self.is_on(stream) || self.core.is_done(self.mark) {
            return Ok(false);
        }
        let refuse = |code| Err(DriverError::new(Call::StreamWaitEvent, code));
        if !stream.is_of_this_thread() {
            return refuse(code::INVALID_CONTEXT);
        }
        if stream.is_retired() {
            return refuse(code::INVALID_HANDLE);
        }
        if stream.arena.shared.driver.capture_status(stream.core.handle)?.is_capturing() {
            return refuse(code::CAPTURE_UNSUPPORTED);
        }
        self.submit_wait(stream)
    }

    /// As [`order_before`](Self::order_before), by a caller who knows that `stream` is neither capturing nor retired nor another thread's
    /// own: one query less.
    ///
    /// # Errors
    ///
    /// As `order_before`, of the mark's stream.
    pub fn submit_wait(&self, stream: &Stream<D>) -> DriverResult<bool> {
        if self.is_on(stream) || self.core.is_done(self.mark) {
            return Ok(false);
        }
        let (driver, waiter) = (&self.shared.driver, &stream.arena.shared.driver);
        loop {
            if let Some((newest, event)) = self.core.newest_event()
                && newest >= self.mark
            {
                waiter.stream_wait_event(stream.core.handle, event)?;
                return Ok(true);
            }
            if self.core.is_done(self.mark) {
                return Ok(false);
            }
            let reachable = self.core.is_reachable();
            if !self.core.is_retired() && (reachable || !self.core.is_closed(self.mark)) {
                break;
            }
            // The only event there can be is out of the queue: another thread asks whether it is complete.
            crate::sync::yield_now();
        }
        if !self.core.is_reachable() {
            return Err(DriverError::new(Call::EventRecord, code::INVALID_CONTEXT));
        }
        // A wait means what the event was recorded for when the wait was submitted. So the event is free again at once, and there is
        // nothing to ask about later.
        let event = driver.event()?;
        let recorded = driver.event_record_outside_captures(event, self.core.handle);
        let ordered = recorded.and_then(|recorded| match recorded {
            true => waiter.stream_wait_event(stream.core.handle, event).map(|()| true),
            false => Err(DriverError::new(Call::EventRecord, code::CAPTURE_UNSUPPORTED)),
        });
        driver.recycle(event);
        ordered
    }
}

impl<D: Device> std::fmt::Debug for Stream<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.core.fmt(f)
    }
}
