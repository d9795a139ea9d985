//! A whole stress run.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpupool_allocator::{Config, Policy, Stats};
use gpupool_device::DriverError;
use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};
use serde::Serialize;

use super::harness::SCRATCH_BYTES;
use super::{Common, Failed, Harness, StressDevice, Tally};
use crate::generate::{Generator, Random, Shape};

/// Errors whose words are kept.
const KEPT_ERRORS: usize = 8;
/// Streams that each thread makes requests on.
const STREAMS_PER_THREAD: u32 = 2;

/// Gives an allocator's statistics, or none once it is gone.
pub type StatsOf = Arc<dyn Fn() -> Option<Stats> + Send + Sync>;

/// How long a run goes on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Limit {
    /// So long.
    Time(Duration),
    /// So many drawn operations, over all threads.
    Operations(NonZeroU64),
}

/// How a run is made.
#[derive(Clone, Debug)]
pub struct StressOptions {
    /// The policy.
    pub policy: Policy,
    /// Threads, at least 1.
    pub threads: u32,
    /// How long.
    pub limit: Limit,
    /// What the operations are drawn from.
    pub seed: u64,
    /// What they look like.
    pub shape: Shape,
    /// Bytes of memory that a simulated device has. Little of it makes requests fail, and wait for freed blocks.
    pub capacity: u64,
}

/// What a run came to.
#[derive(Clone, Debug, Serialize)]
pub struct StressReport {
    /// The policy's name.
    pub policy: String,
    /// The device, as a command line calls it.
    pub device: String,
    /// Threads.
    pub threads: u32,
    /// The seed.
    pub seed: u64,
    /// Calls of the allocator: allocations, frees, recorded uses, and emptying the cache.
    pub operations: u64,
    /// What was not as it must be.
    pub errors: u64,
    /// The first errors, in words.
    pub messages: Vec<String>,
    /// Bytes whose contents were compared.
    pub checked_bytes: u64,
    /// Bytes left after everything was freed and the cache was emptied.
    pub leaked_bytes: u64,
    /// Requests that found no memory. No error.
    pub out_of_memory: u64,
    /// Nanoseconds that a call of the allocator took on average, waiting for locks and the device included.
    pub ns_per_operation: f64,
    /// Seconds that the run took.
    pub seconds: f64,
}

/// A run could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StressError {
    /// The allocator or the device could not be set up.
    #[error("stress cannot be set up: {0}")]
    Setup(#[source] Failed),
    /// The device has no room for what is compared on it, beside the allocator's memory.
    #[error(
        "stress cannot be set up: {threads} threads need {needed} bytes of the device to compare contents in, and it has {free} of {total} \
         bytes free ({error}): use fewer threads, or a device with more memory (--capacity)"
    )]
    NoRoom {
        /// The threads.
        threads: u32,
        /// What they need, the driver's rounding aside.
        needed: u64,
        /// What the device had.
        free: u64,
        /// Its memory.
        total: u64,
        /// What it said.
        #[source]
        error: DriverError,
    },
}

/// A run on a simulated device with contents, a scheduler that draws lots and a race detector. `progress` is told
/// operations so far; `ready` is given a source of the allocator's statistics as the run begins, which gives none after its end.
///
/// # Errors
///
/// [`StressError`]. What goes wrong in the run itself is in the report.
pub fn stress_simulated(
    options: &StressOptions,
    progress: &(dyn Fn(u64) + Sync),
    ready: &dyn Fn(StatsOf),
) -> Result<StressReport, StressError> {
    let scheduler = Scheduler::Random { seed: options.seed };
    let config = SimConfig::default().with_scheduler(scheduler).with_capacity(options.capacity);
    stress(Arc::new(SimDevice::new(config)), options, progress, ready)
}

/// A run on `device`.
///
/// # Errors
///
/// As [`stress_simulated`].
pub fn stress<D: StressDevice>(
    device: Arc<D>,
    options: &StressOptions,
    progress: &(dyn Fn(u64) + Sync),
    ready: &dyn Fn(StatsOf),
) -> Result<StressReport, StressError> {
    let threads = options.threads.max(1);
    let asked = Arc::clone(&device);
    let setup = |failed| match failed {
        Failed::Device(error) if error.is_out_of_memory() => {
            let (free, total) = asked.mem_info().map_or((0, 0), |memory| (memory.free, memory.total));
            let needed = u64::from(threads) * SCRATCH_BYTES;
            StressError::NoRoom { threads, needed, free, total, error }
        }
        failed => StressError::Setup(failed),
    };
    let name = device.label();
    device.warm_up(threads * STREAMS_PER_THREAD + 1);
    let before = device.memory_in_use().unwrap_or(0);
    let common = Common::new(device, Config::new(options.policy), threads * STREAMS_PER_THREAD).map_err(&setup)?;
    let common = Arc::new(common);
    let watched = Arc::downgrade(&common);
    ready(Arc::new(move || Some(watched.upgrade()?.allocator().stats())));
    let harnesses = (0..threads)
        .map(|thread| {
            let own = (0..STREAMS_PER_THREAD).map(|n| thread * STREAMS_PER_THREAD + n).collect();
            Harness::new(Arc::clone(&common), own, thread)
        })
        .collect::<Result<Vec<_>, _>>()
        .map_err(&setup)?;
    let run = Run {
        options,
        start: Instant::now(),
        left: AtomicU64::new(match options.limit {
            Limit::Operations(n) => n.get(),
            Limit::Time(_) => u64::MAX,
        }),
        done: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        errors: Mutex::default(),
        total: Mutex::default(),
        progress,
    };
    std::thread::scope(|scope| {
        for (thread, harness) in (0..).zip(harnesses) {
            let run = &run;
            scope.spawn(move || run.thread(harness, thread));
        }
    });
    let leaked = match common.finish() {
        Ok(bytes) => bytes.saturating_sub(before),
        Err(error) => {
            run.failed(&error);
            0
        }
    };
    let mut messages = run.errors.into_inner().unwrap_or_else(PoisonError::into_inner);
    if leaked > 0 {
        messages.push(Failed::Leak { bytes: leaked }.to_string());
    }
    let tally = run.total.into_inner().unwrap_or_else(PoisonError::into_inner);
    let errors = messages.len() as u64;
    messages.truncate(KEPT_ERRORS);
    Ok(StressReport {
        policy: options.policy.name().to_owned(),
        device: name,
        threads,
        seed: options.seed,
        operations: tally.operations,
        errors,
        messages,
        checked_bytes: tally.checked_bytes,
        leaked_bytes: leaked,
        out_of_memory: tally.out_of_memory,
        ns_per_operation: tally.allocator_time.as_nanos() as f64 / tally.operations.max(1) as f64,
        seconds: run.start.elapsed().as_secs_f64(),
    })
}

/// What the threads of a run share.
struct Run<'a> {
    options: &'a StressOptions,
    start: Instant,
    left: AtomicU64,
    done: AtomicU64,
    stop: AtomicBool,
    errors: Mutex<Vec<String>>,
    total: Mutex<Tally>,
    progress: &'a (dyn Fn(u64) + Sync),
}

impl Run<'_> {
    fn thread<D: StressDevice>(&self, mut harness: Harness<D>, thread: u64) {
        let seed = Random::new(self.options.seed ^ (thread << 32)).next();
        let mut generator = Generator::new(seed, self.options.shape);
        let mut random = Random::new(!seed);
        while self.goes_on() {
            if self.options.threads > 1 && random.below(16) == 0 {
                harness.exchange(random.next() as u16);
            }
            if let Err(error) = harness.apply(generator.draw()) {
                self.failed(&error);
                break;
            }
            let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
            if done.is_multiple_of(512) {
                (self.progress)(done);
            }
        }
        let mut tally = harness.tally();
        match harness.finish() {
            Ok(whole) => tally = whole,
            Err(error) => self.failed(&error),
        }
        self.total.lock().unwrap_or_else(PoisonError::into_inner).add(tally);
    }

    fn goes_on(&self) -> bool {
        if self.stop.load(Ordering::Relaxed) {
            return false;
        }
        match self.options.limit {
            Limit::Time(limit) => self.start.elapsed() < limit,
            Limit::Operations(_) => {
                self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
            }
        }
    }

    /// Notes an error; the other threads stop, too, so that what it left behind is not found again and again.
    fn failed(&self, error: &Failed) {
        self.stop.store(true, Ordering::Relaxed);
        self.errors.lock().unwrap_or_else(PoisonError::into_inner).push(error.to_string());
    }
}
