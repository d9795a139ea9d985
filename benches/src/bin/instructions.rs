//! Instructions a pair, counted by callgrind, against the committed ceilings.
//!
//!     cargo run --release -p gpupool-benches --bin instructions            counts, and compares with benches/ceilings.txt
//!     cargo run --release -p gpupool-benches --bin instructions -- layers hot-512 set-1024 index-1024    what each layer takes
//!     cargo run --release -p gpupool-benches --bin instructions -- run segments hot-512 100000      to be profiled
//!
//! Without valgrind it says "skipped: no valgrind" and succeeds. Ceilings are for release builds.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gpupool_allocator::Policy;
use gpupool_benches::instructions::{Case, Ceiling, count, layers, rounds, valgrind_is_there};
use gpupool_benches::{Failed, Kind, Workload, or_exit};

/// Counts instructions a pair and compares them with ceilings.
#[derive(Parser, Debug)]
#[command(name = "instructions")]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// The ceilings.
    #[arg(long, default_value_os_t = Path::new(env!("CARGO_MANIFEST_DIR")).join("ceilings.txt"))]
    ceilings: PathBuf,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// What each layer of gpupool takes of the instructions of workloads.
    Layers {
        /// hot-BYTES, set-LIVE, index-FREE or trace-NAME.
        workloads: Vec<Workload>,
    },
    /// Runs a workload, for callgrind to look at.
    Run {
        /// A peer of `compare`, or `segments-scoped`, `loop-alone`, `loop-scoped`; rlsf cannot be counted.
        peer: Kind,
        /// hot-BYTES, set-LIVE or trace-NAME.
        workload: Workload,
        /// Pairs, steps or turns.
        rounds: u64,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(Command::Run { peer, workload, rounds: n }) = arguments.command {
        or_exit(rounds(&Case { kind: peer, workload }, n));
        return ExitCode::SUCCESS;
    }
    if let Some(Command::Layers { workloads }) = arguments.command {
        or_exit(print_layers(workloads));
        return ExitCode::SUCCESS;
    }
    if cfg!(debug_assertions) {
        eprintln!("ceilings are for release builds: cargo run --release -p gpupool-benches --bin instructions");
        return ExitCode::from(2);
    }
    if !valgrind_is_there() {
        println!("skipped: no valgrind");
        return ExitCode::SUCCESS;
    }
    match or_exit(check(&arguments.ceilings)) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Prints a table: a row for each layer, a column for each workload.
fn print_layers(workloads: Vec<Workload>) -> Result<(), Failed> {
    let program = std::env::current_exe().map_err(Failed::io("this program"))?;
    let mut columns = Vec::new();
    for workload in workloads {
        print!("{}", if columns.is_empty() { format!("{:<28}", "layer") } else { String::new() });
        print!("{:>24}", workload.to_string());
        columns.push(layers(&program, &Case { kind: Kind::Ours(Policy::Segments), workload })?);
    }
    println!();
    for (at, (layer, _)) in columns.first().into_iter().flatten().enumerate() {
        let row: String = columns.iter().map(|column| format!("{:>24.1}", column[at].1)).collect();
        println!("{layer:<28}{row}");
    }
    Ok(())
}

/// Prints each case's count beside its ceiling; whether all are under theirs.
fn check(file: &Path) -> Result<bool, Failed> {
    let program = std::env::current_exe().map_err(Failed::io("this program"))?;
    let mut all_under = true;
    println!("{:<16} {:<32} {:>12} {:>9}", "peer", "workload", "instructions", "ceiling");
    for Ceiling { case, most } in Ceiling::read(file)? {
        let counted = count(&program, &case)?;
        let under = counted <= most;
        all_under &= under;
        let (kind, workload, verdict) = (case.kind, case.workload.to_string(), if under { "" } else { "  too many" });
        println!("{kind:<16} {workload:<32} {counted:>12.1} {most:>9.1}{verdict}");
    }
    Ok(all_under)
}
