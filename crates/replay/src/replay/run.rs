//! A whole replay: the first turn, the others, and what they cost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpupool_allocator::config::ConfigError;
use gpupool_allocator::history::HistoryOptions;
use gpupool_allocator::{AllocError, Allocator, CaptureRegistry, Config, PageStats, Policy, Preset, State};
use gpupool_device::{Device, DriverError, DriverResult};
use gpupool_sim_device::{Placement, SimConfig, SimDevice};

use super::meter::Metered;
use super::observe::Watch;
use super::report::{Iteration, Report, Stopped};
use super::setup::Plan;
use super::turn::{Blind, Early, Nothing, Ours, Refusal, turn};
use super::{DEFAULT_CAPACITY, Meter, ReplayDevice};
use crate::trace::{Event, Trace, Where};

/// Turns are timed until there are this many, or until [`ENOUGH_TIME`] is spent on them.
const ENOUGH_TURNS: usize = 7;
const ENOUGH_TIME: Duration = Duration::from_millis(1500);

/// Events of the history that comes with a state.
const HISTORY: usize = 1 << 20;

/// How a trace is replayed.
#[derive(Clone, Debug)]
pub struct Options {
    /// The policy.
    pub policy: Policy,
    /// The preset, where the policy has any.
    pub preset: Option<Preset>,
    /// Bytes of memory that a simulated device has.
    pub capacity: u64,
    /// Turns over the trace that are reported, at least 1.
    pub iterations: u32,
    /// Events by which completion lags.
    pub completion_lag: u64,
    /// Whether the state at peak reserved is wanted, with the history up to there.
    pub wants_state: bool,
    /// Nanoseconds from one counted event to the next on the device's clock; `None`: the recorded time spread evenly, or 100 us where
    /// none is recorded. What goes by the clock, as moves of pages do, follows it.
    pub pace_ns: Option<u64>,
    /// Whether turns are timed.
    pub timed: bool,
    /// Whether freed blocks are kept in bins, under policies that have any.
    pub bins: bool,
}

impl Options {
    /// One turn under `policy` with an H200's memory, timed.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let capacity = DEFAULT_CAPACITY;
        Self {
            policy,
            preset: None,
            capacity,
            iterations: 1,
            completion_lag: 0,
            wants_state: false,
            pace_ns: None,
            timed: true,
            bins: !policy.is_bit_exact(),
        }
    }
}

/// What a replay gives.
#[derive(Clone, Debug)]
pub struct Replayed {
    /// The figures.
    pub report: Report,
    /// The state when the most was held of the driver, if it was wanted.
    pub at_peak: Option<State>,
}

/// A replay could not be made. Running out of memory is no such error: see [`Report::stopped`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The trace's `conf` is not one that the policy can follow.
    #[error("{file}: the recorded PYTORCH_CUDA_ALLOC_CONF {conf:?} cannot be followed: {problem}")]
    Conf {
        /// The file.
        file: String,
        /// Its conf.
        conf: String,
        /// What is wrong with it.
        #[source]
        problem: Box<ConfigError>,
    },
    /// The allocator could not be made, or something other than lack of memory went wrong between events.
    #[error("{file}: {error}")]
    Allocator {
        /// The file.
        file: String,
        /// What went wrong.
        #[source]
        error: Box<Refusal>,
    },
    /// A request failed for another reason than lack of memory.
    #[error("{file}: {place}, under {policy}: {error}")]
    Event {
        /// The file.
        file: String,
        /// Where in it.
        place: Where,
        /// The policy.
        policy: &'static str,
        /// What went wrong.
        #[source]
        error: Box<Refusal>,
    },
    /// The device failed.
    #[error("{file}: {error}")]
    Device {
        /// The file.
        file: String,
        /// What went wrong.
        #[source]
        error: DriverError,
    },
}

/// Replays on a simulated device made for it. `progress` is told counted events of the first turn.
///
/// # Errors
///
/// See [`ReplayError`].
pub fn replay_simulated(
    trace: &Trace,
    options: &Options,
    progress: &mut dyn FnMut(u64),
) -> Result<Replayed, ReplayError> {
    replay_on(|| Ok(simulated(trace, options)), trace, options, progress)
}

/// A simulated device for a trace, with segments placed as recorded where that makes sense (R4).
fn simulated(trace: &Trace, options: &Options) -> SimDevice {
    let as_recorded = options.policy == Policy::Torch211
        && options.completion_lag == 0
        && options.capacity >= trace.header.peak_reserved;
    let placement = if as_recorded {
        Placement::Scripted(trace.segments.iter().map(|segment| segment.address).collect())
    } else {
        Placement::Growing
    };
    SimDevice::new(SimConfig::default().with_capacity(options.capacity).with_placement(placement).for_replay())
}

/// Replays on devices that `device` makes: one for the replay, and one for timing the loop that does nothing.
///
/// # Errors
///
/// See [`ReplayError`].
pub fn replay_on<D: ReplayDevice>(
    device: impl Fn() -> DriverResult<D>,
    trace: &Trace,
    options: &Options,
    progress: &mut dyn FnMut(u64),
) -> Result<Replayed, ReplayError> {
    Session::new(made(&device, trace)?, trace, options)?.whole(device, progress)
}

fn made<D>(device: impl Fn() -> DriverResult<D>, trace: &Trace) -> Result<D, ReplayError> {
    device().map_err(|error| ReplayError::Device { file: trace.file.clone(), error })
}

/// Whether the trace completes in one turn with these options.
pub(super) fn completes(trace: &Trace, options: &Options) -> Result<bool, ReplayError> {
    let mut session = Session::new(simulated(trace, options), trace, options)?;
    match turn(trace, &session.plan, session.meter.device(), &mut session.ours, &mut session.live, &mut Blind) {
        Ok(()) => Ok(true),
        Err(early) => session.stopped(early, 1).map(|_| false),
    }
}

/// A device, an allocator on it, and a trace.
struct Session<'a, D: ReplayDevice> {
    trace: &'a Trace,
    options: &'a Options,
    plan: Plan,
    // Blocks go before the allocator, and that before the device.
    live: Vec<Option<gpupool_allocator::Allocation<Meter<D>>>>,
    ours: Ours<D>,
    meter: Arc<Meter<D>>,
    /// What moving pages had taken when the turn began.
    pages: PageStats,
}

impl<'a, D: ReplayDevice> Session<'a, D> {
    fn new(device: D, trace: &'a Trace, options: &'a Options) -> Result<Self, ReplayError> {
        let name = || trace.file.clone();
        let conf = if options.policy.is_bit_exact() { trace.header.conf.as_str() } else { "" };
        let config = Config::parse_pytorch(conf, options.policy).map_err(|problem| ReplayError::Conf {
            file: name(),
            conf: conf.to_owned(),
            problem: Box::new(problem),
        })?;
        let config = match options.preset {
            Some(preset) => config.with_preset(preset),
            None => config,
        };
        let config = config.with_bins(options.bins);
        let plan = Plan::new(trace, options.completion_lag, options.pace_ns);
        let meter = Arc::new(Meter::new(device));
        let registry = Arc::new(CaptureRegistry::default());
        let ours = Allocator::with_registry(Arc::clone(&meter), config, registry)
            .and_then(|allocator| Ours::new(allocator, trace, &plan))
            .map_err(|error| ReplayError::Allocator { file: name(), error: Box::new(error.into()) })?;
        let live = (0..trace.blocks.len()).map(|_| None).collect();
        Ok(Self { trace, options, plan, live, ours, meter, pages: PageStats::default() })
    }

    fn whole(
        mut self,
        device: impl Fn() -> DriverResult<D>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Replayed, ReplayError> {
        let trace = self.trace;
        let plan = Plan::new(trace, self.options.completion_lag, self.options.pace_ns);
        if self.options.wants_state {
            self.ours.allocator.record_history(Some(HistoryOptions::new(HISTORY)));
        }
        let mut watch = Watch::new(trace, &plan, self.options, progress);
        let first = turn(trace, &plan, self.meter.device(), &mut self.ours, &mut self.live, &mut watch);
        self.ours.allocator.record_history(None);
        let (peak_allocated, events) = (watch.peak_allocated(), watch.counted());
        let metered = self.meter.read();
        // The allocator's own figure is exact under every policy, within an event too.
        let peak_reserved = self.peak_reserved()?;
        let placements = watch.placements();
        let addresses = watch.addresses();
        let (segments, pools, at_peak) = watch.into_parts();
        let peak_requested = trace.peak_requested();
        let mut report = Report {
            trace: trace.name().to_owned(),
            policy: self.options.policy.name().to_owned(),
            preset: self.options.preset.map(|preset| preset.name().to_owned()),
            device: self.meter.device().label(),
            device_name: self.meter.properties().name.clone(),
            events,
            completed: true,
            stopped: None,
            peak_requested,
            peak_allocated,
            peak_reserved,
            utilization: if peak_reserved == 0 { 0.0 } else { peak_requested as f64 / peak_reserved as f64 },
            driver_calls: metered.calls.clone(),
            driver_us: metered.spent_ns as f64 / 1e3,
            iterations: vec![self.iteration(metered, peak_reserved)],
            segments,
            placements,
            addresses,
            ns_per_event: None,
            timed_turns: 0,
            pools,
            recorded: trace.header.clone(),
            capacity: self.meter.properties().total_memory,
            completion_lag: self.options.completion_lag,
            min_capacity: None,
        };
        match first {
            Ok(()) => self.warm(device, &mut report)?,
            Err(early) => self.stop(early, 1, &mut report)?,
        }
        Ok(Replayed { report, at_peak })
    }

    /// The turns after the first: those asked for, and more if too few were timed.
    fn warm(&mut self, device: impl Fn() -> DriverResult<D>, report: &mut Report) -> Result<(), ReplayError> {
        let mut times = Vec::new();
        let mut spent = Duration::ZERO;
        for number in 2.. {
            let asked = number <= self.options.iterations;
            let enough = times.len() >= ENOUGH_TURNS || (spent >= ENOUGH_TIME && !times.is_empty());
            if !asked && (enough || !self.options.timed) {
                break;
            }
            self.between()?;
            let start = Instant::now();
            let result = turn(self.trace, &self.plan, self.meter.device(), &mut self.ours, &mut self.live, &mut Blind);
            let took = start.elapsed();
            match result {
                Ok(()) => {
                    spent += took;
                    times.push(took);
                }
                Err(early) if asked => return self.stop(early, number, report),
                Err(_) => break,
            }
            if asked {
                let turn = self.iteration(self.meter.read(), self.peak_reserved()?);
                report.iterations.push(turn);
            }
        }
        if self.options.timed && !times.is_empty() {
            let loop_ns = self.loop_alone(made(device, self.trace)?, times.len())?;
            report.timed_turns = times.len() as u32;
            let events = f64::from(self.trace.counted.max(1));
            report.ns_per_event = Some((median(times) - loop_ns).max(0.0) / events);
        }
        Ok(())
    }

    /// Frees what the last turn left, and counts from nothing.
    fn between(&mut self) -> Result<(), ReplayError> {
        let trace = self.trace;
        let failed = |error| ReplayError::Allocator { file: trace.file.clone(), error: Box::new(error) };
        self.ours.finish(&self.plan, &mut self.live).map_err(failed)?;
        self.ours.allocator.reset_peak_stats();
        self.meter.reset();
        self.pages = self.ours.allocator.stats().pages;
        Ok(())
    }

    /// The median time of the loop with nothing in it, in nanoseconds.
    fn loop_alone(&self, device: D, turns: usize) -> Result<f64, ReplayError> {
        let trace = self.trace;
        let failed = |error| ReplayError::Device { file: trace.file.clone(), error };
        for number in 0..self.plan.private {
            device.adopt_stream(Plan::private_handle(number)).map_err(failed)?;
        }
        for number in 0..trace.streams.max(1) {
            device.adopt_stream(self.plan.handle(number)).map_err(failed)?;
        }
        let mut nothing = Nothing::default();
        let mut live: Vec<Option<u64>> = vec![None; trace.blocks.len()];
        let mut times = Vec::new();
        for _ in 0..turns {
            let start = Instant::now();
            let result = turn(trace, &self.plan, &device, &mut nothing, &mut live, &mut Blind);
            times.push(start.elapsed());
            if let Err(early) = result {
                return Err(self.error(early.index, early.error));
            }
        }
        Ok(median(times))
    }

    fn iteration(&self, metered: Metered, peak_reserved: u64) -> Iteration {
        let pages = self.ours.allocator.stats().pages;
        Iteration {
            driver_us: metered.spent_ns as f64 / 1e3,
            driver_calls: metered.calls,
            peak_reserved,
            remaps: pages.remaps - self.pages.remaps,
            splits: pages.splits - self.pages.splits,
            address_bytes: pages.address_bytes,
        }
    }

    /// The most held of the driver: in segments, or by the driver's own pool.
    fn peak_reserved(&self) -> Result<u64, ReplayError> {
        let failed = |error: AllocError| {
            let file = self.trace.file.clone();
            ReplayError::Allocator { file, error: Box::new(error.into()) }
        };
        Ok(match self.ours.allocator.driver_pool_figures().map_err(failed)? {
            Some(figures) => figures.reserved_high,
            None => u64::try_from(self.ours.allocator.stats().reserved_bytes.all.peak).unwrap_or(0),
        })
    }

    fn stop(&self, early: Early, number: u32, report: &mut Report) -> Result<(), ReplayError> {
        report.stopped = Some(self.stopped(early, number)?);
        report.completed = false;
        Ok(())
    }

    /// Lack of memory is a result; anything else is an error.
    fn stopped(&self, Early { index, error }: Early, turn: u32) -> Result<Stopped, ReplayError> {
        match (error, self.trace.events.get(index)) {
            (Refusal::Alloc(AllocError::OutOfMemory(report)), Some(Event::Alloc { bytes, .. })) => {
                let (line, place) = (self.trace.line(index), self.trace.place(index).to_string());
                Ok(Stopped { turn, line, place, requested: *bytes, error: report.to_string() })
            }
            (error, _) => Err(self.error(index, error)),
        }
    }

    fn error(&self, index: usize, error: Refusal) -> ReplayError {
        let (file, place) = (self.trace.file.clone(), self.trace.place(index));
        ReplayError::Event { file, place, policy: self.options.policy.name(), error: Box::new(error) }
    }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    let middle = times.len() / 2;
    match (times.len().is_multiple_of(2), times.get(middle)) {
        (_, None) => 0.0,
        (false, Some(time)) => time.as_nanos() as f64,
        (true, Some(time)) => (time.as_nanos() + times[middle - 1].as_nanos()) as f64 / 2.0,
    }
}
