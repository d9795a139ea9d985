//! The contract suite on both devices: every check on the simulated device, and on the first GPU, where there is one.
//!
//! `cargo test -p gpupool-tests --test contract -- cuda:` runs those of the GPU alone. Without a driver they are listed as ignored.

use gpupool_tests::contract::{self, Real, Simulated, Subject};
use gpupool_tests::gpu::{self, GpuTest};
use libtest_mimic::Trial;

/// The checks as tests, each on a new device.
fn tests<S: Subject + 'static>(device: &str, new: fn() -> S) -> Vec<GpuTest> {
    let test = |(name, check): contract::Check<S>| -> GpuTest {
        let run = move || {
            check(&new());
            Ok(())
        };
        (format!("{device}: {name}"), Box::new(run))
    };
    contract::checks::<S>().into_iter().map(test).collect()
}

fn main() {
    let sim = tests("sim", Simulated::new).into_iter().map(|(name, run)| Trial::test(name, run));
    gpu::run(sim.collect(), tests("cuda", Real::open));
}
