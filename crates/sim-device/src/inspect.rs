//! What a test, a benchmark or a replay asks a simulated device beyond the traits.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use gpupool_device::{Address, Call, DriverError, DriverResult, StreamHandle};

use crate::SimDevice;
use crate::memory::Piece;
use crate::race::Handing;
use crate::report::{OwnerInfo, Report};
use crate::scheduler::{Awaited, Goal, WaitReport};
use crate::state::{Code, Held, State};
use crate::streams::{Kind, Stream, StreamId};
use crate::work::Work;
use crate::world::run;

/// Counts and figures.
impl SimDevice {
    /// Calls of one kind so far, failed ones included.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.shared.counters.calls(call)
    }

    /// Every kind that was called, with its count.
    #[must_use]
    pub fn call_counts(&self) -> BTreeMap<Call, u64> {
        self.shared.counters.all()
    }

    /// Virtual nanoseconds that the host spent in driver calls, waiting excluded.
    #[must_use]
    pub fn driver_ns(&self) -> u64 {
        self.shared.counters.driver_ns.load(Relaxed)
    }

    /// Virtual nanoseconds that the host spent waiting for work.
    #[must_use]
    pub fn wait_ns(&self) -> u64 {
        self.shared.counters.wait_ns.load(Relaxed)
    }

    /// Calls that found their work unfinished and waited for it.
    #[must_use]
    pub fn host_waits(&self) -> u64 {
        self.shared.counters.host_waits.load(Relaxed)
    }

    /// Bytes of memory taken: plain allocations and handles.
    #[must_use]
    pub fn memory_in_use(&self) -> u64 {
        self.with_memory(|m| m.used())
    }

    /// The most bytes that were taken at once since the last [`reset_counters`](Self::reset_counters).
    #[must_use]
    pub fn peak_memory_in_use(&self) -> u64 {
        self.with_memory(|m| m.peak())
    }

    /// Bytes of addresses that `address_reserve` gave and nobody gave back.
    #[must_use]
    pub fn address_space_in_use(&self) -> u64 {
        self.with_memory(|m| m.reserved())
    }

    /// Events that exist, in the whole world.
    #[must_use]
    pub fn events_in_use(&self) -> usize {
        self.world.state.lock().events.len()
    }

    /// Sets counts and times to zero and the memory peak to what is taken now. The clock goes on.
    pub fn reset_counters(&self) {
        self.shared.counters.reset();
        if let Ok(device) = self.world.state.lock().device(self.shared.ordinal) {
            device.memory.reset_peak();
        }
    }

    fn with_memory(&self, look: impl FnOnce(&crate::memory::Memory) -> u64) -> u64 {
        self.world.state.lock().device(self.shared.ordinal).map_or(0, |d| look(&d.memory))
    }
}

/// Faults on demand.
impl SimDevice {
    /// The `n`-th call of this kind from now on, counted from 1, fails once with `code`.
    pub fn fail_nth(&self, call: Call, n: u64, code: u32) {
        self.with_faults(|f| f.fail_nth(call, n, code));
    }

    /// Every call of this kind fails with `code`.
    pub fn fail_all(&self, call: Call, code: u32) {
        self.with_faults(|f| f.fail_all(call, code));
    }

    /// After `n` more calls to this device, of any kind, the captures then active in the world are invalidated, as an
    /// unsafe call of another thread would. If none is active then, the next call that finds one does it.
    pub fn invalidate_capture_after(&self, n: u64) {
        self.with_faults(|f| f.invalidate_after(n));
    }

    /// Disarms every fault. A sticky error stays: see [`clear_error`](Self::clear_error).
    pub fn clear_faults(&self) {
        self.with_faults(crate::faults::Faults::clear);
    }

    /// Changes how much memory there is. What is taken stays taken.
    pub fn set_capacity(&self, bytes: u64) {
        if let Ok(device) = self.world.state.lock().device(self.shared.ordinal) {
            device.memory.set_capacity(bytes);
        }
    }

    /// Forgets the sticky error of a kernel's fault. No driver can do that.
    pub fn clear_error(&self) {
        if let Ok(device) = self.world.state.lock().device(self.shared.ordinal) {
            device.sticky = None;
            self.shared.armed.store(device.faults.any(), Relaxed);
        }
    }

    fn with_faults(&self, change: impl FnOnce(&mut crate::faults::Faults)) {
        if let Ok(device) = self.world.state.lock().device(self.shared.ordinal) {
            change(&mut device.faults);
            self.shared.armed.store(device.faults.any() || device.sticky.is_some(), Relaxed);
        }
    }
}

/// Work and time.
impl SimDevice {
    /// Runs one piece of work of the world, if any can run.
    pub fn step(&self) -> bool {
        let mut state = self.world.state.lock();
        match state.choose() {
            Some(unit) => {
                run(&self.world, &mut state, unit);
                true
            }
            None => false,
        }
    }

    /// Runs everything that can run. What is behind a closed gate or a tick stays.
    pub fn run_until_idle(&self) {
        while self.step() {}
    }

    /// Why the last wait that failed with `WAIT_NEVER_ENDS` did.
    #[must_use]
    pub fn last_wait_report(&self) -> Option<WaitReport> {
        self.world.state.lock().last_wait.clone()
    }

    /// Registers a number as a non-blocking stream, for replays that number streams themselves. One that exists stays
    /// as it is.
    pub fn adopt_stream(&self, handle: StreamHandle) {
        let mut state = self.world.state.lock();
        if state.stream(self.shared.ordinal, handle).is_err() {
            state.add_stream(self.shared.ordinal, handle, Kind::NonBlocking);
        }
    }

    /// Submits work to a stream that completes once the tick counter has reached `tick`.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE` for an unknown stream.
    pub fn hold_until_tick(&self, stream: StreamHandle, tick: u64) -> DriverResult<()> {
        let mut state = self.world.state.lock();
        let error = |code| DriverError::new(Call::Other, code);
        let stream = state.stream(self.shared.ordinal, stream).map_err(error)?;
        let idle = state.streams.get(stream).is_none_or(|s| s.queue.is_empty());
        if tick > state.ticks.now || !idle {
            state.submit(stream, Work::Hold(tick));
            state.ticks.hold(stream, tick);
        }
        Ok(())
    }

    /// Advances the tick counter by one and completes what it held. The counter's new value.
    pub fn advance_tick(&self) -> u64 {
        let mut state = self.world.state.lock();
        let tick = state.ticks.now + 1;
        state.set_tick(tick);
        tick
    }

    /// The host does nothing for so many nanoseconds of virtual time. No work advances.
    pub fn pass_time(&self, nanoseconds: u64) {
        self.world.time.add(nanoseconds);
    }

    /// The tick counter.
    #[must_use]
    pub fn tick(&self) -> u64 {
        self.world.state.lock().ticks.now
    }

    /// Times that a wait moved the tick counter.
    #[must_use]
    pub fn tick_jumps(&self) -> u64 {
        self.world.state.lock().ticks.jumps
    }

    /// Every host thread learns what the calling one knows to be complete. Needed only without
    /// [`shared_host_order`](crate::SimConfig::shared_host_order).
    pub fn share_host_knowledge(&self) {
        self.world.state.lock().host.share();
    }

    /// Waits for everything that was submitted to this device so far, and tells the host so.
    pub(crate) fn drain(&self, state: &mut Held<'_>, call: Call) -> Result<(), Code> {
        let ordinal = self.shared.ordinal;
        let concerned = |s: &Stream| s.device == ordinal || s.queue.iter().any(|op| op.work.runs_on(ordinal));
        let all = state.streams.iter().filter(|(_, s)| concerned(s)).map(|(id, s)| (id, s.submitted));
        // Without the detector there is nothing to learn from a stream that is idle.
        let mine: Vec<(StreamId, u64)> = match state.detector.on() {
            true => all.collect(),
            false => all.filter(|(id, _)| state.streams.is_busy(*id)).collect(),
        };
        self.wait(state, call, Awaited::Device(ordinal), &Goal::Positions(mine.clone()))?;
        for (id, _) in mine {
            let clock = state.stream_clock(id);
            state.host.learn(&clock);
        }
        // Streams that are gone left their clocks here.
        let retired = state.device(ordinal)?.retired.clone();
        state.host.learn(&retired);
        Ok(())
    }
}

/// Owners, findings and memory seen from outside.
impl SimDevice {
    /// From now on the bytes belong to `tag` and are for use on `stream`. If that stream is capturing, launches of the
    /// capture's graph may touch them in any name that the capture knew.
    pub fn own(&self, start: Address, bytes: u64, tag: u64, stream: StreamHandle) {
        let mut state = self.world.state.lock();
        if !state.detector.on() {
            return;
        }
        let device = self.shared.ordinal;
        let capture = state.capture_under(device, stream);
        let owner = OwnerInfo { tag, live: true, stream, capture, submission: state.submissions };
        let State { devices, detector, .. } = &mut *state;
        let mut pieces = Vec::new();
        if let Some(device) = devices.get(device as usize) {
            // What is not mapped has no history.
            let _ = device.memory.translate(start.0, bytes, &mut pieces);
        }
        detector.hand(device, start.0, bytes, Handing::Out(owner), &pieces);
    }

    /// From now on the bytes belong to nobody.
    pub fn disown(&self, start: Address, bytes: u64) {
        let mut state = self.world.state.lock();
        if state.detector.on() {
            let before = state.submissions;
            state.detector.hand(self.shared.ordinal, start.0, bytes, Handing::Back(before), &[]);
        }
    }

    /// What was found so far in the whole world: the first 64 findings, in order.
    #[must_use]
    pub fn reports(&self) -> Vec<Report> {
        self.world.state.lock().detector.reports().to_vec()
    }

    /// How many findings there were, kept or not.
    #[must_use]
    pub fn reports_found(&self) -> u64 {
        self.world.state.lock().detector.found()
    }

    /// The findings so far, which are forgotten.
    pub fn take_reports(&self) -> Vec<Report> {
        let mut state = self.world.state.lock();
        let reports = state.detector.reports().to_vec();
        state.detector.clear_reports();
        reports
    }

    /// The bytes at an address as they are now, whatever work is pending. Not a call, and no access to the race detector.
    #[must_use]
    pub fn read_bytes(&self, address: Address, bytes: u64) -> Option<Vec<u8>> {
        let state = self.world.state.lock();
        let pieces = self.pieces(&state, address, bytes)?;
        Some(state.contents.read(&pieces))
    }

    /// Changes bytes at once, whatever work is pending. Not a call, and no access to the race detector. Whether all of
    /// the range was accessible; nothing is written otherwise.
    pub fn write_bytes(&self, address: Address, bytes: &[u8]) -> bool {
        let mut state = self.world.state.lock();
        match self.pieces(&state, address, bytes.len() as u64) {
            Some(pieces) => {
                state.contents.write(&pieces, bytes);
                true
            }
            None => false,
        }
    }

    fn pieces(&self, state: &State, address: Address, bytes: u64) -> Option<Vec<Piece>> {
        let mut pieces = Vec::new();
        let memory = &state.devices.get(self.shared.ordinal as usize)?.memory;
        memory.translate(address.0, bytes, &mut pieces).ok().map(|()| pieces)
    }
}
