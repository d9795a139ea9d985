//! The `gpupool` program: it replays recorded workloads, compares decisions with PyTorch's, stresses, and reads
//! snapshots.
//!
//! * Results go to standard output, progress and errors to standard error. With `--json` standard output holds JSON
//!   and nothing else.
//! * Every input is read whole and checked before anything is printed, so that no partial result looks like a whole
//!   one.
//! * Exit status: 0; 1 when something differs, fails or runs out of memory; 2 for input or arguments that make no
//!   sense.
#![forbid(unsafe_code)]

mod args;
mod conform;
mod doctor;
mod failure;
mod forecast;
mod inspect;
mod output;
mod progress;
mod replay;
mod stress;
#[cfg(unix)]
mod top;
mod units;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Arguments, Command};
use crate::failure::Failure;

/// What a command that came to its end says by its exit status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    /// All is well.
    Good,
    /// Something differs, fails or ran out of memory; the output says what.
    Bad,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let verdict = match &arguments.command {
        Command::Replay(replay) => replay::run(replay),
        Command::Conform(conform) => conform::run(conform),
        Command::Stress(stress) => stress::run(stress),
        Command::Inspect(inspect) => inspect::run(inspect),
        Command::Forecast(forecast) => forecast::run(forecast),
        #[cfg(unix)]
        Command::Top(top) => top::run(top),
        Command::Doctor(doctor) => doctor::run(doctor),
    };
    match verdict {
        Ok(Verdict::Good) | Err(Failure::OutputClosed) => ExitCode::SUCCESS,
        Ok(Verdict::Bad) => ExitCode::from(1),
        Err(failure) => {
            eprintln!("gpupool: {}", output::harmless(&failure.to_string()));
            ExitCode::from(2)
        }
    }
}
