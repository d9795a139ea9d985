//! `gpupool stress`: operations at random, with every byte checked.

use std::num::NonZeroU64;
#[cfg(unix)]
use std::path::Path;
use std::sync::Arc;
#[cfg(unix)]
use std::sync::OnceLock;
use std::time::Duration;

use gpupool_allocator::Policy;
use gpupool_benches::{Asked, Comparison};
use gpupool_cuda_device::CudaDevice;
use gpupool_replay::generate::Shape;
use gpupool_replay::real::Real;
use gpupool_replay::stress::{Limit, StatsOf, StressOptions, StressReport, stress, stress_simulated};
#[cfg(unix)]
use gpupool_snapshot::Live;
use serde::Serialize;

use crate::Verdict;
use crate::args::{DeviceChoice, Stress};
use crate::failure::Failure;
use crate::output::{print, print_json, table};
use crate::progress::Progress;
use crate::units::{bytes, count};

/// What `--json` prints where several policies were asked for.
#[derive(Serialize)]
struct Output<'a> {
    policies: &'a [StressReport],
}

pub(crate) fn run(arguments: &Stress) -> Result<Verdict, Failure> {
    if arguments.compare {
        return compare(arguments);
    }
    let limit = limit(arguments)?;
    let reports: Vec<StressReport> = arguments
        .policy
        .policies()
        .into_iter()
        .map(|policy| one(arguments, limit, policy))
        .collect::<Result<_, _>>()?;
    match (arguments.json, &reports[..]) {
        (true, [report]) => print_json(report)?,
        (true, reports) => print_json(&Output { policies: reports })?,
        (false, reports) => print(&text(reports))?,
    }
    let good = reports.iter().all(|report| report.errors == 0);
    Ok(if good { Verdict::Good } else { Verdict::Bad })
}

/// Prints how fast every allocator is that is present.
fn compare(arguments: &Stress) -> Result<Verdict, Failure> {
    let gpu = match arguments.device {
        DeviceChoice::Sim if arguments.peers.is_some() => {
            return Err(Failure::Usage("--peers measures allocators of a GPU: add --device cuda"));
        }
        DeviceChoice::Sim => None,
        DeviceChoice::Cuda(ordinal) => Some(ordinal),
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let rows = match arguments.workloads.is_empty() {
        true => Asked::all(&arguments.traces, cores.clamp(2, 16) as u16)?,
        false => arguments.workloads.clone(),
    };
    let what = Comparison {
        rows,
        peers: Vec::new(),
        repetitions: arguments.samples,
        traces: arguments.traces.clone(),
        gpu,
        program: arguments.peers.clone(),
    };
    let progress = Progress::spinner("comparing".to_owned());
    let found = gpupool_benches::compare(&what, &mut |row| progress.say(format!("comparing: {row}")))?;
    drop(progress);
    match arguments.json {
        true => print_json(&found)?,
        false => print(&found.tables())?,
    }
    Ok(Verdict::Good)
}

fn limit(arguments: &Stress) -> Result<Limit, Failure> {
    if let Some(operations) = arguments.operations.and_then(NonZeroU64::new) {
        return Ok(Limit::Operations(operations));
    }
    match Duration::try_from_secs_f64(arguments.seconds) {
        Ok(time) if !time.is_zero() && time < Duration::from_secs(1 << 31) => Ok(Limit::Time(time)),
        _ => Err(Failure::Usage("--seconds takes a positive number of seconds")),
    }
}

fn one(arguments: &Stress, limit: Limit, policy: Policy) -> Result<StressReport, Failure> {
    let what = format!("stress under {policy}");
    let progress = Progress::spinner(what.clone());
    let options = StressOptions {
        policy,
        threads: arguments.threads,
        limit,
        seed: arguments.seed,
        shape: Shape::default(),
        capacity: arguments.capacity,
    };
    let say = |operations| progress.say(format!("{what}: {} operations", count(operations)));
    let run = |ready: &dyn Fn(StatsOf)| match arguments.device {
        DeviceChoice::Sim => Ok(stress_simulated(&options, &say, ready)?),
        DeviceChoice::Cuda(ordinal) => {
            let device = CudaDevice::open(ordinal)?;
            // Loaded now, so that what the driver counts as taken does not change later.
            device.load_kernels()?;
            Ok(stress(Arc::new(Real::new(device)), &options, &say, ready)?)
        }
    };
    #[cfg(unix)]
    if let Some(path) = &arguments.socket {
        let ordinal = match arguments.device {
            DeviceChoice::Sim => 0,
            DeviceChoice::Cuda(ordinal) => ordinal,
        };
        return watched(path, ordinal, run);
    }
    run(&|_| ())
}

/// A run that `gpupool top` can watch. The socket is opened first: a path that cannot be had is told before anything runs.
#[cfg(unix)]
fn watched(
    path: &Path,
    ordinal: u32,
    run: impl FnOnce(&dyn Fn(StatsOf)) -> Result<StressReport, Failure>,
) -> Result<StressReport, Failure> {
    let source: Arc<OnceLock<Option<StatsOf>>> = Arc::default();
    let told = Arc::clone(&source);
    // Whoever looks before there is anything to see waits for it.
    let live = Live::serve(path, Arc::new(move || Some((ordinal, told.wait().as_ref()?()?))))
        .map_err(|error| Failure::Socket { path: path.to_owned(), error })?;
    eprintln!("gpupool: watch with `gpupool top {}`", path.display());
    let report = run(&|stats| drop(source.set(Some(stats))));
    // Nobody waits for a run that never began.
    let _ = source.set(None);
    drop(live);
    report
}

fn text(reports: &[StressReport]) -> String {
    let header = ["policy", "threads", "calls", "ns/call", "checked", "out of memory", "leaked", "errors"];
    let mut rows = table(&header, 1);
    for report in reports {
        rows.add_row([
            report.policy.clone(),
            count(u64::from(report.threads)),
            count(report.operations),
            format!("{:.0}", report.ns_per_operation),
            bytes(report.checked_bytes),
            count(report.out_of_memory),
            bytes(report.leaked_bytes),
            count(report.errors),
        ]);
    }
    let mut text = format!(
        "{}\n\ncalls: of the allocator; ns/call is their host time on average. checked: bytes whose contents were compared.",
        rows.trim_fmt()
    );
    for report in reports {
        for message in &report.messages {
            text.push_str(&format!("\n{}, seed {}: {message}", report.policy, report.seed));
        }
    }
    text
}
