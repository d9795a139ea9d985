//! The command line.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand};
use gpupool_allocator::{Policy, Preset};
use gpupool_benches::{Asked, traces_folder};
use gpupool_replay::replay::DEFAULT_CAPACITY;

use crate::units::parse_bytes;

/// What `--policy` takes for each of them in turn.
const EVERY_POLICY: &str = "all";

/// A caching allocator for GPU memory, on the bench.
#[derive(Parser, Debug)]
#[command(name = "gpupool", version, about, arg_required_else_help = true, subcommand_required = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Replay recorded workloads and tell what they take: memory, driver calls, time
    Replay(Replay),
    /// Compare every decision with PyTorch's recorded ones
    Conform(Conform),
    /// Allocate and free at random from many threads, with every byte checked
    Stress(Stress),
    /// Say where the memory of a snapshot is and what keeps it there; of two, what grew
    Inspect(Inspect),
    /// Say what a workload's captures will take, before anything is captured
    Forecast(Forecast),
    /// Say which GPUs and driver there are, and what will and will not work on them
    Doctor(Doctor),
    /// Watch a running process through the socket that it opened
    #[cfg(unix)]
    Top(Top),
}

#[cfg(unix)]
#[derive(Args, Debug)]
pub(crate) struct Top {
    /// The socket: of `stress --socket`, or of a program that serves one (`gpupool::snapshot::Live`)
    #[arg(value_name = "SOCKET")]
    pub(crate) socket: PathBuf,
    /// Seconds between two looks, 0.1 to 3600
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = parse_interval, allow_negative_numbers = true)]
    pub(crate) interval: f64,
    /// Look once
    #[arg(long)]
    pub(crate) once: bool,
}

#[cfg(unix)]
fn parse_interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("0.1 to 3600 seconds lie between two looks".to_owned()),
    }
}

#[derive(Args, Debug)]
pub(crate) struct Doctor {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Replay {
    /// Traces (*.trace.gz), or snapshots with a history, PyTorch's or ours; without any, a bundled recording of a PyTorch training run
    #[arg(value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,
    /// The device: sim, cuda or cuda:N
    #[arg(long, default_value = "sim")]
    pub(crate) device: DeviceChoice,
    #[arg(long, value_name = "NAME", default_value_t, help = policies_help())]
    pub(crate) policy: PolicyChoice,
    /// The preset of the policy `pages`: memory, balanced, latency
    #[arg(long, value_name = "PRESET")]
    pub(crate) preset: Option<Preset>,
    /// The simulated device's memory, in bytes or with a unit (40GiB)
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value_t = DEFAULT_CAPACITY)]
    pub(crate) capacity: u64,
    /// Turns over each trace
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) iterations: u32,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// A freed block's work completes only N allocations and frees later
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) completion_lag: u64,
    /// Look for the smallest capacity at which each trace completes
    #[arg(long)]
    pub(crate) find_capacity: bool,
    /// Write the state at peak reserved to FILE, with what happened up to there: as PyTorch's pickle if FILE ends in .pickle, else as
    /// JSON (one trace, one policy)
    #[arg(long, value_name = "FILE")]
    pub(crate) snapshot: Option<PathBuf>,
    /// Write the state at peak reserved as a page for any browser (one trace, one policy)
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Forecast {
    /// A trace (*.trace.gz), or a snapshot with a history
    #[arg(value_name = "TRACE")]
    pub(crate) trace: PathBuf,
    /// The simulated device's memory, in bytes or with a unit (40GiB)
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value_t = DEFAULT_CAPACITY)]
    pub(crate) capacity: u64,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Conform {
    /// Conformance files (*.jsonl.gz)
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// Print one JSON object a file
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Stress {
    /// The device: sim, cuda or cuda:N
    #[arg(long, default_value = "sim")]
    pub(crate) device: DeviceChoice,
    #[arg(long, value_name = "NAME", default_value_t, help = policies_help())]
    pub(crate) policy: PolicyChoice,
    /// Threads
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) threads: u32,
    /// How long, in seconds
    #[arg(long, value_name = "S", default_value_t = 5.0, conflicts_with = "operations", allow_negative_numbers = true)]
    pub(crate) seconds: f64,
    /// How many operations instead, over all threads: with one thread the same seed then does the same
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) operations: Option<u64>,
    /// What the operations are drawn from
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// The simulated device's memory, in bytes or with a unit: little of it makes requests fail and wait
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value_t = DEFAULT_CAPACITY)]
    pub(crate) capacity: u64,
    /// Measure no stress but speed: a table of every allocator that is present, on pairs, working sets, recordings and threads
    #[arg(long, conflicts_with_all = ["operations", "seconds"])]
    pub(crate) compare: bool,
    /// For --compare on a GPU, the program that benches/peers/build makes: PyTorch's allocator, cudaMallocAsync, RMM
    #[arg(long, value_name = "FILE", requires = "compare")]
    pub(crate) peers: Option<PathBuf>,
    /// For --compare, the folder of recordings; those of the source tree if it is not named
    #[arg(long, value_name = "FOLDER", requires = "compare", default_value_os_t = traces_folder(), hide_default_value = true)]
    pub(crate) traces: PathBuf,
    /// For --compare, only these workloads (hot-BYTES, set-LIVE, index-FREE, trace-NAME), with xTHREADS behind one by several threads
    #[arg(long, value_name = "NAME", requires = "compare", value_delimiter = ',')]
    pub(crate) workloads: Vec<Asked>,
    /// For --compare, samples of each allocator
    #[arg(long, value_name = "N", requires = "compare", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) samples: u32,
    /// Open a socket for `gpupool top` while it runs, which only its owner can read
    #[cfg(unix)]
    #[arg(long, value_name = "FILE")]
    pub(crate) socket: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Inspect {
    /// A snapshot, PyTorch's or ours: a pickle or JSON
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,
    /// A later one
    #[arg(value_name = "SNAPSHOT2")]
    pub(crate) later: Option<PathBuf>,
    /// Write a page that shows it: one file, for any browser
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Write it again to FILE: as PyTorch's pickle if FILE ends in .pickle, else as JSON
    #[arg(long = "snapshot", value_name = "FILE", id = "rewritten")]
    pub(crate) rewritten: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Names every policy that there is.
fn policies_help() -> String {
    let names: Vec<&str> = Policy::ALL.iter().map(|policy| policy.name()).collect();
    format!("The policy: {}, or {EVERY_POLICY} of them", names.join(", "))
}

/// One policy, or all of them in turn. Without a word about it: the allocator's own default.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PolicyChoice {
    One(Policy),
    All,
}

impl PolicyChoice {
    pub(crate) fn policies(self) -> Vec<Policy> {
        match self {
            Self::One(policy) => vec![policy],
            Self::All => Policy::ALL.to_vec(),
        }
    }
}

impl Default for PolicyChoice {
    fn default() -> Self {
        Self::One(Policy::default())
    }
}

impl fmt::Display for PolicyChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(policy) => policy.fmt(f),
            Self::All => f.pad(EVERY_POLICY),
        }
    }
}

impl FromStr for PolicyChoice {
    type Err = <Policy as FromStr>::Err;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        if name == EVERY_POLICY { Ok(Self::All) } else { name.parse().map(Self::One) }
    }
}

/// What to run on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DeviceChoice {
    Sim,
    /// A GPU by its ordinal.
    Cuda(u32),
}

/// A word that names no device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a device is sim or cuda[:N]")]
pub(crate) struct DeviceError;

impl FromStr for DeviceChoice {
    type Err = DeviceError;

    fn from_str(name: &str) -> Result<Self, DeviceError> {
        match name {
            "sim" => Ok(Self::Sim),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let ordinal = name.strip_prefix("cuda:").and_then(|n| n.parse().ok());
                ordinal.map(Self::Cuda).ok_or(DeviceError)
            }
        }
    }
}
