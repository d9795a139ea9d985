//! `gpupool forecast`: what a workload's captures will take, before anything is captured.

use gpupool_replay::forecast::{TraceForecast, forecast_trace};

use crate::Verdict;
use crate::args::Forecast;
use crate::failure::Failure;
use crate::output::{print, print_json, table};
use crate::replay::read_one;
use crate::units::{bytes, count};

pub(crate) fn run(arguments: &Forecast) -> Result<Verdict, Failure> {
    let trace = read_one(&arguments.trace)?;
    let forecast = match forecast_trace(&trace, arguments.capacity) {
        Ok(forecast) => forecast,
        Err(error) => {
            eprintln!("gpupool: {error}");
            return Ok(Verdict::Bad);
        }
    };
    if arguments.json {
        print_json(&forecast)?
    } else {
        print(&text(&forecast))?
    }
    Ok(Verdict::Good)
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
