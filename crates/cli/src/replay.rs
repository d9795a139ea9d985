//! `gpupool replay`: recorded workloads, and what they take.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use comfy_table::Table;
use gpupool_allocator::{Policy, State};
use gpupool_cuda_device::CudaDevice;
use gpupool_device::{Call, DriverError, code};
use gpupool_replay::BUNDLED_TRACE;
use gpupool_replay::real::Real;
use gpupool_replay::replay::{Options, Replayed, Report, find_capacity, replay_on, replay_simulated};
use gpupool_replay::trace::{Trace, WhatIf, what_if};
use gpupool_snapshot::{Snapshot, Summary};
use serde::Serialize;

use crate::Verdict;
use crate::args::{DeviceChoice, Replay};
use crate::failure::Failure;
use crate::inspect::{page, write_snapshot};
use crate::output::{print, print_json, table, write_others};
use crate::progress::Progress;
use crate::units::{bytes, change, count, percent};

/// What `--json` prints.
#[derive(Serialize)]
struct Output {
    traces: Vec<Entry>,
}

/// A report with where its trace came from: `null` for the bundled one.
#[derive(Serialize)]
struct Entry {
    file: Option<String>,
    /// What the trace does not tell, if it was made of a snapshot.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    #[serde(flatten)]
    report: Report,
}

pub(crate) fn run(arguments: &Replay) -> Result<Verdict, Failure> {
    check(arguments)?;
    let traces = read(&arguments.traces)?;
    let mut entries = Vec::new();
    for (number, WhatIf { trace, notes }) in traces.iter().enumerate() {
        let file = arguments.traces.get(number).map(|path| path.display().to_string());
        for policy in arguments.policy.policies() {
            let replayed = one(arguments, trace, policy)?;
            match &replayed.at_peak {
                Some(state) => write_state(arguments, trace, state)?,
                None if arguments.snapshot.is_some() || arguments.html.is_some() => {
                    return Err(Failure::Usage(
                        "nothing was ever reserved, so there is no state for --snapshot or --html to write",
                    ));
                }
                None => {}
            }
            entries.push(Entry { file: file.clone(), notes: notes.clone(), report: replayed.report });
        }
    }
    let good = entries.iter().all(|entry| entry.report.completed);
    if arguments.json {
        print_json(&Output { traces: entries })?;
    } else {
        let mut notes: Vec<String> = Vec::new();
        let reports: Vec<Report> = entries
            .into_iter()
            .map(|entry| {
                let told = entry.notes.into_iter().map(|note| format!("{}: {note}.", entry.report.trace));
                for note in told {
                    if !notes.contains(&note) {
                        notes.push(note);
                    }
                }
                entry.report
            })
            .collect();
        let notes = if notes.is_empty() { String::new() } else { format!("\n\n{}", notes.join("\n")) };
        print(&format!("{}{notes}", text(arguments, &reports)))?;
    }
    Ok(if good { Verdict::Good } else { Verdict::Bad })
}

/// What this version does not do, and arguments that contradict each other.
fn check(arguments: &Replay) -> Result<(), Failure> {
    if arguments.device != DeviceChoice::Sim && arguments.find_capacity {
        return Err(Failure::Usage("--find-capacity takes --device sim: a GPU's memory cannot be made smaller"));
    }
    if arguments.preset.is_some() && !arguments.policy.policies().contains(&Policy::Pages) {
        return Err(Failure::Usage("--preset belongs to the policy `pages`"));
    }
    let one = arguments.snapshot.is_some() || arguments.html.is_some();
    if one && (arguments.traces.len() > 1 || arguments.policy.policies().len() > 1) {
        return Err(Failure::Usage("--snapshot and --html take one trace and one policy"));
    }
    write_others(&[&arguments.html, &arguments.snapshot], &arguments.traces)
}

/// Reads every trace before any is replayed. Of a snapshot it is its history, with what that does not tell.
fn read(paths: &[std::path::PathBuf]) -> Result<Vec<WhatIf>, Failure> {
    if paths.is_empty() {
        let trace = Trace::parse("bundled gpt2_train", BUNDLED_TRACE)?;
        return Ok(vec![WhatIf { trace, notes: Vec::new() }]);
    }
    paths.iter().map(|path| read_with_notes(path)).collect()
}

pub(crate) fn read_with_notes(path: &Path) -> Result<WhatIf, Failure> {
    let unread = |error| Failure::Read { path: path.to_owned(), error };
    let mut file = File::open(path).map_err(unread)?;
    let mut begin = Vec::new();
    file.by_ref().take(BEGINNING).read_to_end(&mut begin).map_err(unread)?;
    let name = path.display().to_string();
    // A pipe can be read once.
    let whole = std::io::Cursor::new(begin.clone()).chain(file);
    if is_snapshot(&begin) {
        Ok(what_if(&name, &Snapshot::read(&name, whole)?)?)
    } else {
        Ok(WhatIf { trace: Trace::parse(&name, whole)?, notes: Vec::new() })
    }
}

/// How many bytes of a file tell what it is.
const BEGINNING: u64 = 256;

/// A pickle, or JSON; but a trace that somebody unpacked also begins with an object, its header.
fn is_snapshot(begin: &[u8]) -> bool {
    let header = begin.windows(11).any(|word| word == b"torch-trace");
    matches!(begin.trim_ascii_start().first(), Some(0x80 | b'{' | b'[')) && !header
}

fn one(arguments: &Replay, trace: &Trace, policy: Policy) -> Result<Replayed, Failure> {
    let options = Options {
        preset: arguments.preset.filter(|_| policy == Policy::Pages),
        capacity: arguments.capacity,
        iterations: arguments.iterations,
        completion_lag: arguments.completion_lag,
        wants_state: arguments.snapshot.is_some() || arguments.html.is_some(),
        ..Options::new(policy)
    };
    let what = format!("{} under {policy}", trace.name());
    let mut replayed = {
        let progress = Progress::new(what.clone(), u64::from(trace.counted));
        let mut at = |events| progress.at(events);
        match arguments.device {
            DeviceChoice::Sim => replay_simulated(trace, &options, &mut at)?,
            DeviceChoice::Cuda(ordinal) => {
                // Held meanwhile, so that opening it again is quick; and its error says more.
                let _held = CudaDevice::open(ordinal)?;
                let gone = |_| DriverError::new(Call::Other, code::NO_DEVICE);
                replay_on(|| CudaDevice::open(ordinal).map(Real::new).map_err(gone), trace, &options, &mut at)?
            }
        }
    };
    if arguments.find_capacity {
        let progress = Progress::spinner(format!("{what}: smallest capacity"));
        let enough = if replayed.report.completed { replayed.report.peak_reserved } else { trace.peak_live() };
        let mut say = |replays| progress.say(format!("{what}: smallest capacity, replay {replays}"));
        replayed.report.min_capacity = Some(find_capacity(trace, &options, enough, &mut say)?.bytes);
    }
    Ok(replayed)
}

/// Writes the state at the peak, as the arguments ask.
fn write_state(arguments: &Replay, trace: &Trace, state: &State) -> Result<(), Failure> {
    let snapshot = Snapshot::of(state, &trace.header.conf);
    if let Some(path) = &arguments.snapshot {
        write_snapshot(path, &snapshot)?;
    }
    if let Some(path) = &arguments.html {
        let title = format!("{} under {}, at peak reserved", trace.name(), state.policy);
        page(path, &snapshot, &Summary::of(&snapshot), &title)?;
    }
    Ok(())
}

fn text(arguments: &Replay, reports: &[Report]) -> String {
    let mut text = String::new();
    if arguments.traces.is_empty() {
        text.push_str("Bundled recording: a PyTorch training run of GPT-2, 16 steps on an H200.\n");
    }
    if let Some(report) = reports.first() {
        text.push_str(&format!("Replayed on {} with {} of memory.\n\n", report.device_name, bytes(report.capacity)));
    }
    text.push_str(&overview(arguments, reports).trim_fmt());
    text.push_str(
        "\n\nreserved: the most held of the driver at one time. used: requested / reserved, each at its peak.\n\
         PyTorch: what its own allocator reached while the trace was recorded. driver: calls and their time in the first turn.\n\
         host: time an allocation or a free takes, median of warm turns, the loop itself taken off.",
    );
    if arguments.iterations > 1 {
        text.push_str("\n\n");
        text.push_str(&turns(reports).trim_fmt());
    }
    for report in reports {
        if let Some(stopped) = &report.stopped {
            text.push_str(&format!(
                "\n\n{} under {} stopped in turn {} at {}, out of memory:\n{}",
                report.trace, report.policy, stopped.turn, stopped.place, stopped.error
            ));
        }
    }
    text
}

fn overview(arguments: &Replay, reports: &[Report]) -> Table {
    let mut header = vec![
        "trace",
        "policy",
        "reserved",
        "PyTorch",
        "change",
        "used",
        "PyTorch",
        "driver calls",
        "driver us",
        "host ns/event",
    ];
    if arguments.find_capacity {
        header.push("smallest capacity");
    }
    let mut rows = table(&header, 2);
    for report in reports {
        let recorded = &report.recorded;
        let recorded_use = recorded.peak_requested as f64 / recorded.peak_reserved.max(1) as f64;
        let mut row = vec![report.trace.clone(), report.policy.clone()];
        if report.completed {
            row.extend([
                bytes(report.peak_reserved),
                bytes(recorded.peak_reserved),
                change(recorded.peak_reserved, report.peak_reserved),
                percent(report.utilization),
                percent(recorded_use),
            ]);
        } else {
            let stopped = "stopped".to_owned();
            row.extend([stopped, bytes(recorded.peak_reserved), String::new(), String::new(), percent(recorded_use)]);
        }
        row.extend([
            count(report.driver_calls.values().sum()),
            count(report.driver_us.round() as u64),
            report.ns_per_event.map_or_else(|| "-".to_owned(), |ns| format!("{ns:.0}")),
        ]);
        if arguments.find_capacity {
            row.push(report.min_capacity.flatten().map_or_else(|| "none".to_owned(), bytes));
        }
        rows.add_row(row);
    }
    rows
}

fn turns(reports: &[Report]) -> Table {
    let mut rows = table(&["trace", "policy", "turn", "reserved", "driver calls", "driver us"], 2);
    for report in reports {
        for (number, turn) in (1..).zip(&report.iterations) {
            rows.add_row([
                report.trace.clone(),
                report.policy.clone(),
                count(number),
                bytes(turn.peak_reserved),
                count(turn.driver_calls.values().sum()),
                count(turn.driver_us.round() as u64),
            ]);
        }
    }
    rows
}
