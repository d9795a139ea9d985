//! What was given up, but may still be used by work on the device: blocks of the synchronous free, pools of graphs that are gone.
//!
//! * **L1** A block that was freed without a stream goes back only once all work submitted to the context before the free is complete: by
//!   one event of the context, or, while a capture is open, by an event on every stream seen. On a stream that captures none can be
//!   recorded; then the block waits until one can.
//! * **L2** A pool goes once the last launch of every executable that held it is complete.

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;

use gpupool::WorkMark;
use gpupool::device::{DriverError, EventHandle, StreamHandle, are_complete, code};
use parking_lot::Mutex;

use crate::front::Front;

/// What is waited for.
enum Until<D: Front> {
    /// Everything submitted before.
    AllWork {
        /// Streams on which nothing is recorded yet; `None` if there are some that cannot be named from here.
        unmarked: Option<BTreeSet<u64>>,
        events: Vec<EventHandle>,
        /// Whether the events cover everything.
        covered: bool,
    },
    /// One launch.
    Launch(WorkMark<D>),
}

/// Something given up. What it is does not matter: dropping it gives it back.
struct Departure<D: Front> {
    _what: Box<dyn Any + Send>,
    until: Until<D>,
}

/// The queue of what was given up.
pub(crate) struct Leaving<D: Front> {
    device: Arc<D>,
    queue: Mutex<Vec<Departure<D>>>,
}

impl<D: Front> Leaving<D> {
    pub(crate) fn new(device: Arc<D>) -> Self {
        Self { device, queue: Mutex::new(Vec::new()) }
    }

    /// Drops `what` once all work submitted by now is complete. `streams` are those seen so far; `None` if some of them cannot be named
    /// from other threads.
    pub(crate) fn after_all_work(&self, what: Box<dyn Any + Send>, streams: Option<BTreeSet<u64>>) {
        let until = Until::AllWork { unmarked: streams, events: Vec::new(), covered: false };
        let mut departure = Departure { _what: what, until };
        self.cover(&mut departure);
        self.queue.lock().push(departure);
    }

    /// Drops `what` once a launch is complete.
    pub(crate) fn after_launch(&self, what: Box<dyn Any + Send>, launch: WorkMark<D>) {
        self.queue.lock().push(Departure { _what: what, until: Until::Launch(launch) });
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.lock().len()
    }

    /// Records what is missing.
    fn cover(&self, departure: &mut Departure<D>) {
        let Until::AllWork { unmarked, events, covered } = &mut departure.until else { return };
        if *covered {
            return;
        }
        let device = &*self.device;
        let Ok(event) = device.event_create() else { return };
        if let Some(Ok(())) = device.record_context(event) {
            events.push(event);
            *covered = true;
            return;
        }
        let _unused = device.event_destroy(event);
        let Some(streams) = unmarked else { return };
        let gone = |e: &DriverError| matches!(e.code, code::INVALID_HANDLE | code::INVALID_VALUE);
        streams.retain(|&stream| {
            let stream = StreamHandle(stream);
            match device.capture_status(stream) {
                Ok(status) if status.is_capturing() => return true,
                Err(e) => return !gone(&e),
                Ok(_) => {}
            }
            let Ok(event) = device.event_create() else { return true };
            match device.event_record(event, stream) {
                Ok(()) => {
                    events.push(event);
                    false
                }
                Err(e) => {
                    let _unused = device.event_destroy(event);
                    !gone(&e)
                }
            }
        });
        *covered = streams.is_empty();
    }

    fn is_over(&self, departure: &Departure<D>, wait: bool) -> bool {
        match &departure.until {
            Until::Launch(mark) if wait => mark.wait().is_ok(),
            Until::Launch(mark) => mark.poll().unwrap_or(false),
            Until::AllWork { covered: false, .. } => false,
            Until::AllWork { events, .. } => are_complete(&*self.device, events, wait),
        }
    }

    /// Drops everything: nothing runs any more, and nothing will.
    pub(crate) fn all_end(&self) {
        let queued = std::mem::take(&mut *self.queue.lock());
        queued.iter().for_each(|departure| self.forget_events(departure));
    }

    fn forget_events(&self, departure: &Departure<D>) {
        if let Until::AllWork { events, .. } = &departure.until {
            for &event in events {
                let _gone = self.device.event_destroy(event);
            }
        }
    }

    /// Drops what may go; whether anything did. With `wait` it **waits** for what is recorded.
    pub(crate) fn tidy(&self, wait: bool) -> bool {
        let queued = std::mem::take(&mut *self.queue.lock());
        let (mut rest, mut any) = (Vec::new(), false);
        // What was freed later waits for more: where one block must wait, those behind it are not asked about.
        let mut behind = false;
        for mut departure in queued {
            self.cover(&mut departure);
            let of_all_work = matches!(departure.until, Until::AllWork { .. });
            if (behind && of_all_work) || !self.is_over(&departure, wait) {
                behind |= of_all_work;
                rest.push(departure);
                continue;
            }
            self.forget_events(&departure);
            any = true;
        }
        self.queue.lock().extend(rest);
        any
    }
}
