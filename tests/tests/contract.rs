//! The contract suite on both devices: every check on the simulated device, and on the first GPU, where there is one.
//!
//! `cargo test -p gpupool-tests --test contract -- cuda:` runs those of the GPU alone. Without a driver they are listed as ignored.
//!
//! Under a debugging tool some checks cannot be made; they are listed as ignored, and the reason is printed. `GPUPOOL_TOOL` names the tool. Under
//! each of compute-sanitizer's some calls wait for kernels, so that nothing can be held at a gate; and `initcheck` reports reads of memory which
//! only the driver zeroed as errors, though they are none.

use gpupool_tests::contract::{self, Needs, Real, Simulated, Subject};
use gpupool_tests::gpu::{self, GpuTest};
use libtest_mimic::Trial;

/// The checks as tests, each on a new device.
fn tests<S: Subject + 'static>(device: &str, new: fn() -> S) -> Vec<(Needs, GpuTest)> {
    let test = |check: contract::Check<S>| -> (Needs, GpuTest) {
        let run = move || {
            (check.run)(&new());
            Ok(())
        };
        (check.needs, (format!("{device}: {}", check.name), Box::new(run)))
    };
    contract::checks::<S>().into_iter().map(test).collect()
}

/// Why a check cannot be made on the GPU here.
fn hindrance(needs: Needs, tool: Option<&str>) -> Option<&'static str> {
    match needs {
        Needs::HeldWork if tool.is_some() => Some("under the tool some calls wait for kernels"),
        Needs::ZeroedMemory if tool == Some("initcheck") => {
            Some("it reads memory that only the driver zeroed, which the tool does not know")
        }
        Needs::Figures if tool == Some("initcheck") => Some("the tool itself takes memory for what is mapped"),
        // Which cell that is depends on how many there were before it, not on what it asks.
        Needs::ManyCaptures if tool == Some("memcheck") => Some("after some 145 cells the tool does not return"),
        _ => None,
    }
}

fn main() {
    let mut anywhere: Vec<Trial> =
        tests("sim", Simulated::new).into_iter().map(|(_, (name, run))| Trial::test(name, run)).collect();
    let tool = std::env::var("GPUPOOL_TOOL").ok();
    let mut on_gpu = Vec::new();
    for (needs, (name, run)) in tests("cuda", Real::open) {
        if let Some(why) = hindrance(needs, tool.as_deref()) {
            println!("skipped: {name}: {why}");
            anywhere.push(Trial::test(name, run).with_ignored_flag(true));
        } else {
            on_gpu.push((name, run));
        }
    }
    gpu::run(anywhere, on_gpu);
}
