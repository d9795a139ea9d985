//! Trains a small network eagerly, then as a captured graph: `example-tensor-runtime [sim | cuda] [STEPS]`.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use example_tensor_runtime::compute::{Compute, Failure, Gpu, Simulated};
use example_tensor_runtime::network::train;
use example_tensor_runtime::runtime::Runtime;
use gpupool::Config;
use gpupool::sim::{SimConfig, SimDevice};

fn both<C: Compute>(compute: C, steps: usize) -> Result<(), Failure> {
    let runtime = Runtime::new(compute, Config::default())?;
    let mut all = Vec::new();
    for (name, captured) in [("eager", false), ("captured", true)] {
        let start = Instant::now();
        let run = train(&runtime, steps, captured)?;
        let rate = steps as f64 / start.elapsed().as_secs_f64();
        let (first, last) = (run.losses.first().copied(), run.losses.last().copied());
        println!(
            "{name:>9}: loss {} -> {} in {steps} steps, {rate:.0} steps a second, {} driver allocations after the first step",
            first.unwrap_or(f32::NAN),
            last.unwrap_or(f32::NAN),
            run.later_allocations
        );
        all.push(run.losses);
    }
    println!("the loss curves are {}", if all[0] == all[1] { "equal, bit for bit" } else { "DIFFERENT" });
    Ok(())
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let device = arguments.next().unwrap_or_else(|| "sim".to_owned());
    let steps = arguments.next().map_or(Ok(50), |steps| steps.parse())?;
    match device.as_str() {
        "sim" => both(Simulated(Arc::new(SimDevice::new(SimConfig::default()))), steps),
        "cuda" => both(Gpu::open(0)?, steps),
        other => Err(format!("{other} is no device: use sim or cuda").into()),
    }
}
