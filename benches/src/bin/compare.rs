//! Every peer that is present on every workload, in one run. See docs/benchmarks.md.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use clap::Parser;
use gpupool_benches::{Asked, Comparison, Failed, compare, or_exit, traces_folder};

/// Every peer on every workload in one run.
#[derive(Parser, Debug)]
#[command(name = "compare")]
struct Arguments {
    /// Workloads (hot-BYTES, set-LIVE, trace-NAME; with xTHREADS behind it by several threads); all of them if none is named.
    workloads: Vec<Asked>,
    /// Only these peers, beside the loop alone.
    #[arg(long, value_delimiter = ',')]
    peers: Vec<String>,
    /// The most threads, where no workload is named.
    #[arg(long, default_value_t = 1)]
    threads: u16,
    /// Samples of each peer.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Where recordings are.
    #[arg(long, default_value_os_t = traces_folder())]
    traces: PathBuf,
    /// On this GPU in place of the simulated device.
    #[arg(long, value_name = "ORDINAL")]
    gpu: Option<u32>,
    /// The program of other allocators on the GPU, as benches/peers/build makes it.
    #[arg(long, value_name = "FILE", requires = "gpu")]
    program: Option<PathBuf>,
    /// One JSON object and nothing else.
    #[arg(long)]
    json: bool,
}

fn main() {
    or_exit(run(Arguments::parse()));
}

fn run(arguments: Arguments) -> Result<(), Failed> {
    let json = arguments.json;
    let rows = match arguments.workloads.is_empty() {
        true => Asked::all(&arguments.traces, arguments.threads)?,
        false => arguments.workloads,
    };
    let what = Comparison {
        rows,
        peers: arguments.peers,
        repetitions: arguments.repetitions,
        traces: arguments.traces,
        gpu: arguments.gpu,
        program: arguments.program,
    };
    let found = compare(&what, &mut |workload| {
        if !json {
            eprintln!("{workload}");
        }
    })?;
    match json {
        true => println!("{}", serde_json::to_string_pretty(&found).unwrap_or_default()),
        false => println!("{}", found.tables()),
    }
    Ok(())
}
