//! Worlds, devices, and what every call has in common.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use gpupool_device::{Call, CaptureMode, DeviceProperties, DriverError, DriverResult, code};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::SimConfig;
use crate::clocks::VirtualTime;
use crate::counters::Counters;
use crate::scheduler::{Awaited, Goal, Unit};
use crate::state::{Code, Held, State};

/// Several simulated devices with one clock, one set of events and one set of capture ids, so that streams of one can
/// wait for streams of another.
#[derive(Clone, Debug)]
pub struct SimWorld {
    devices: Vec<SimDevice>,
}

impl SimWorld {
    /// A world of `n` equal devices, ordinals from 0.
    #[must_use]
    pub fn new(n: u32, config: SimConfig) -> Self {
        static WORLDS: AtomicU64 = AtomicU64::new(0);
        let time = Arc::new(VirtualTime::default());
        let config = SimConfig { granularity: config.granularity.max(1).next_power_of_two(), ..config };
        let properties =
            DeviceProperties::new(config.name.clone(), config.capacity, config.virtual_memory, config.granularity);
        let captures = Arc::new(AtomicUsize::new(0));
        let status_ns = config.costs.capture_status;
        let exchange_ns = config.costs.exchange_capture_mode;
        let world = Arc::new(World {
            id: WORLDS.fetch_add(1, Relaxed),
            time: Arc::clone(&time),
            captures: Arc::clone(&captures),
            state: Mutex::new(State::new(config, n, time, captures)),
            host_function_done: Condvar::new(),
        });
        let shared = |ordinal| Shared {
            ordinal,
            properties: properties.clone(),
            counters: Counters::new(),
            armed: AtomicBool::new(false),
            status_ns,
            exchange_ns,
        };
        let device = |ordinal| SimDevice { world: Arc::clone(&world), shared: Arc::new(shared(ordinal)) };
        Self { devices: (0..n).map(device).collect() }
    }

    /// The devices, by ordinal.
    #[must_use]
    pub fn devices(&self) -> &[SimDevice] {
        &self.devices
    }

    /// The device with this ordinal.
    #[must_use]
    pub fn device(&self, ordinal: u32) -> Option<SimDevice> {
        self.devices.get(ordinal as usize).cloned()
    }
}

/// One simulated device. A handle: clones are the same device.
#[derive(Clone)]
pub struct SimDevice {
    pub(crate) world: Arc<World>,
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct World {
    /// Tells worlds apart where a thread keeps something for each.
    id: u64,
    pub(crate) time: Arc<VirtualTime>,
    /// Captures under way.
    pub(crate) captures: Arc<AtomicUsize>,
    pub(crate) state: Mutex<State>,
    host_function_done: Condvar,
}

/// What of a device is read without the lock.
pub(crate) struct Shared {
    pub(crate) ordinal: u32,
    pub(crate) properties: DeviceProperties,
    pub(crate) counters: Counters,
    /// Whether some fault is armed or an error sticks: no call may take a short cut then.
    pub(crate) armed: AtomicBool,
    pub(crate) status_ns: u64,
    pub(crate) exchange_ns: u64,
}

impl fmt::Debug for SimDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDevice").field("ordinal", &self.shared.ordinal).finish_non_exhaustive()
    }
}

impl SimDevice {
    /// One device, in a world of its own.
    #[must_use]
    pub fn new(config: SimConfig) -> Self {
        let mut world = SimWorld::new(1, config);
        world.devices.swap_remove(0)
    }

    /// Runs a call's body under the lock, after counting it and striking with armed faults. The body returns its cost too.
    pub(crate) fn call<T>(
        &self,
        call: Call,
        body: impl FnOnce(&Self, &mut Held<'_>) -> Result<(T, u64), Code>,
    ) -> DriverResult<T> {
        self.shared.counters.count(call);
        let mut state = self.world.state.lock();
        let result = state.before_call(self.shared.ordinal, call).and_then(|()| body(self, &mut state));
        if let Ok(device) = state.device(self.shared.ordinal) {
            let armed = device.faults.any() || device.sticky.is_some();
            self.shared.armed.store(armed, Relaxed);
        }
        drop(state);
        match result {
            Ok((value, ns)) => {
                self.charge(ns);
                Ok(value)
            }
            Err(code) => Err(DriverError::new(call, code)),
        }
    }

    pub(crate) fn charge(&self, ns: u64) {
        self.world.time.add(ns);
        self.shared.counters.driver_ns.fetch_add(ns, Relaxed);
    }

    /// Runs work until `goal` is reached.
    pub(crate) fn wait(&self, state: &mut Held<'_>, call: Call, awaited: Awaited, goal: &Goal) -> Result<(), Code> {
        if state.reached(goal) {
            return Ok(());
        }
        self.shared.counters.host_waits.fetch_add(1, Relaxed);
        let before = self.world.time.now();
        while !state.reached(goal) {
            if let Some(unit) = state.choose_for(goal) {
                run(&self.world, state, unit);
            } else if state.host_function_elsewhere() {
                self.world.host_function_done.wait(state);
            } else if let Some(tick) = state.tick_for(goal) {
                state.ticks.jumps += 1;
                state.set_tick(tick);
            } else {
                state.last_wait = Some(state.wait_report(call, awaited, goal));
                return Err(code::WAIT_NEVER_ENDS);
            }
        }
        self.shared.counters.wait_ns.fetch_add(self.world.time.now() - before, Relaxed);
        // Work that ran meanwhile may have faulted.
        state.device(self.shared.ordinal)?.sticky.map_or(Ok(()), Err)
    }

    /// What a call that a capture cannot contain does first.
    pub(crate) fn unsafe_call(&self, state: &mut Held<'_>) -> Result<(), Code> {
        if state.captures.any() { state.captures.unsafe_call(self.thread_mode()) } else { Ok(()) }
    }

    /// The calling thread's capture mode.
    pub(crate) fn thread_mode(&self) -> CaptureMode {
        let id = self.world.id;
        let find = |modes: &RefCell<Vec<(u64, CaptureMode)>>| {
            modes.borrow().iter().find(|m| m.0 == id).map_or(CaptureMode::Global, |m| m.1)
        };
        MODES.try_with(find).unwrap_or_default()
    }

    /// Sets it, and returns the one before.
    pub(crate) fn set_thread_mode(&self, mode: CaptureMode) -> CaptureMode {
        let before = self.thread_mode();
        let id = self.world.id;
        // A thread that is being torn down has no modes any more; it then counts as global, as it does to a driver.
        let _ = MODES.try_with(|modes| {
            let mut modes = modes.borrow_mut();
            modes.retain(|m| m.0 != id);
            if mode != CaptureMode::Global {
                modes.push((id, mode));
            }
        });
        before
    }
}

thread_local! {
    /// This thread's capture mode in each world where it is not global.
    static MODES: RefCell<Vec<(u64, CaptureMode)>> = const { RefCell::new(Vec::new()) };
}

/// Runs one piece of work. A host function runs without the lock.
pub(crate) fn run(world: &World, state: &mut Held<'_>, unit: Unit) {
    let Some(job) = state.execute(unit) else { return };
    MutexGuard::unlocked(state, || {
        let _finish = Finish { world, unit };
        job.run();
    });
}

/// Completes a host function, also one that unwinds.
struct Finish<'a> {
    world: &'a World,
    unit: Unit,
}

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.world.state.lock().finish_host(self.unit);
        self.world.host_function_done.notify_all();
    }
}
