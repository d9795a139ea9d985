//! Worlds, devices, and what every call has in common.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use gpupool_device::{Call, CaptureMode, DeviceProperties, DriverError, DriverResult, code};
use parking_lot::Mutex;

use crate::SimConfig;
use crate::clocks::VirtualTime;
use crate::counters::Counters;
use crate::scheduler::{Awaited, Goal, Unit};
use crate::state::{Code, Held, State};

/// Several simulated devices with one clock, one set of events and one set of capture ids, so that streams of one can wait for
/// streams of another.
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
        let world = Arc::new(World {
            id: WORLDS.fetch_add(1, Relaxed),
            time: Arc::clone(&time),
            state: Mutex::new(State::new(config, n, time)),
        });
        let device = |ordinal| SimDevice {
            world: Arc::clone(&world),
            shared: Arc::new(Shared { ordinal, properties: properties.clone(), counters: Counters::new() }),
        };
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
    pub(crate) state: Mutex<State>,
}

/// What of a device is read without the lock.
pub(crate) struct Shared {
    pub(crate) ordinal: u32,
    pub(crate) properties: DeviceProperties,
    pub(crate) counters: Counters,
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
                run(state, unit);
            } else if let Some(tick) = state.tick_for(goal) {
                state.ticks.jumps += 1;
                state.set_tick(tick);
            } else {
                state.last_wait = Some(state.wait_report(call, awaited, goal));
                return Err(code::WAIT_NEVER_ENDS);
            }
        }
        self.shared.counters.wait_ns.fetch_add(self.world.time.now() - before, Relaxed);
        Ok(())
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

/// Runs one piece of work.
pub(crate) fn run(state: &mut Held<'_>, unit: Unit) {
    state.execute_marker(unit.stream);
}
