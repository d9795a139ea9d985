//! rlsf as a global allocator, measured on request: a workload's name a line on standard input, a sample as JSON a line on standard output.
//! `compare` starts it, with the folder of recordings as its argument.
//!
//! A program's global allocator is used without a word of `unsafe`, which is why rlsf has a program of its own. It is called as every peer
//! is, with its own lock around it; its pool is host memory.
#![forbid(unsafe_code)]

use std::io::{BufRead, Write};
use std::path::PathBuf;

use gpupool_benches::peers::Heap;
use gpupool_benches::{Failed, Prepared, Workload, or_exit, time, traces_folder};

#[global_allocator]
static HEAP: rlsf::GlobalTlsf = rlsf::GlobalTlsf::new();

fn main() {
    or_exit(answer());
}

fn answer() -> Result<(), Failed> {
    let traces = std::env::args_os().nth(1).map_or_else(traces_folder, PathBuf::from);
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let workload: Workload = line.map_err(Failed::io("standard input"))?.parse()?;
        let prepared = Prepared::new(&workload, &traces)?;
        let sample = time(&prepared, Heap)?;
        let text = serde_json::to_string(&sample).unwrap_or_default();
        writeln!(out, "{text}").and_then(|()| out.flush()).map_err(Failed::io("standard output"))?;
    }
    Ok(())
}
