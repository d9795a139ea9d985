//! `gpupool forecast`: what a workload's captures will take, before anything is captured.

use gpupool_replay::forecast::{TraceForecast, TraceForecastError, forecast_trace};
use gpupool_replay::replay::Stopped;
use gpupool_replay::trace::WhatIf;
use serde::Serialize;

use crate::Verdict;
use crate::args::Forecast;
use crate::failure::Failure;
use crate::output::{print, print_json, table};
use crate::replay::read_with_notes;
use crate::units::{bytes, count};

/// What `--json` prints.
#[derive(Serialize)]
struct Fits<'a> {
    /// What the trace does not tell, if it was made of a snapshot.
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    notes: &'a [String],
    #[serde(flatten)]
    forecast: &'a TraceForecast,
}

/// What it prints for a workload that does not fit.
#[derive(Serialize)]
struct TooSmall<'a> {
    file: &'a str,
    trace: &'a str,
    policy: &'static str,
    capacity: u64,
    completed: bool,
    stopped: &'a Stopped,
    error: String,
}

pub(crate) fn run(arguments: &Forecast) -> Result<Verdict, Failure> {
    let WhatIf { trace, notes } = read_with_notes(&arguments.trace)?;
    match forecast_trace(&trace, arguments.capacity) {
        Ok(forecast) => {
            if arguments.json {
                print_json(&Fits { notes: &notes, forecast: &forecast })?
            } else {
                let told: String = notes.iter().map(|note| format!("\n{}: {note}.", forecast.trace)).collect();
                print(&format!("{}{}{told}", text(&forecast), if told.is_empty() { "" } else { "\n" }))?
            }
            Ok(Verdict::Good)
        }
        Err(ref error @ TraceForecastError::TooSmall { ref file, ref trace, policy, capacity, ref stopped }) => {
            if arguments.json {
                let error = error.to_string();
                print_json(&TooSmall { file, trace, policy, capacity, completed: false, stopped, error })?;
            } else {
                print(&format!(
                    "{file}: under the policy {policy} the workload does not fit into {}: it stopped at {}, out of memory:\n{}\n\
                     Try a larger --capacity; `gpupool replay {file} --find-capacity` looks for the smallest that suffices.",
                    bytes(capacity),
                    stopped.place,
                    stopped.error.trim_end()
                ))?;
            }
            Ok(Verdict::Bad)
        }
        Err(error) => Err(error.into()),
    }
}

fn text(forecast: &TraceForecast) -> String {
    let mut out = format!(
        "{} under the policy {} will hold {} of the driver at most.\n",
        forecast.trace,
        forecast.policy,
        bytes(forecast.peak_reserved)
    );
    if forecast.pools.is_empty() {
        out += "It captures no graphs.";
        return out;
    }
    let mut rows = table(&["pool", "reserved", "allocated", "graphs", "largest graph alone"], 1);
    for pool in &forecast.pools {
        rows.add_row(vec![
            pool.pool.to_string(),
            bytes(pool.peak_reserved),
            bytes(pool.peak_allocated),
            count(pool.graphs),
            bytes(pool.largest_alone),
        ]);
    }
    out += &rows.to_string();
    out += "\nreserved, allocated: the pool's at most. largest graph alone: what it would take of a pool of its own.";
    out
}
