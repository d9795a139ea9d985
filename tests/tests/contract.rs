//! The contract suite on both devices: every check on the simulated device, and on the first GPU, where there is one.
//!
//! `cargo test -p gpupool-tests --test contract -- cuda:` runs those of the GPU alone. Without a driver they are listed as ignored.

use gpupool_cuda_device::availability;
use gpupool_tests::contract::{self, Real, Simulated, Subject};
use libtest_mimic::{Arguments, Trial};

/// One check as a test, on a new device.
fn trials<S: Subject + 'static>(device: &str, new: fn() -> S, skipped: bool) -> Vec<Trial> {
    let trial = |(name, check): contract::Check<S>| {
        let run = move || {
            check(&new());
            Ok(())
        };
        Trial::test(format!("{device}: {name}"), run).with_ignored_flag(skipped)
    };
    contract::checks::<S>().into_iter().map(trial).collect()
}

fn main() {
    let mut arguments = Arguments::from_args();
    // A capture in global mode reaches all threads of a process: one check at a time.
    arguments.test_threads = Some(1);
    let unavailable = availability::driver().err();
    if let Some(why) = &unavailable
        && !arguments.list
    {
        println!("skipped: no CUDA driver ({why})");
    }
    let mut all = trials("sim", Simulated::new, false);
    all.extend(trials("cuda", Real::open, unavailable.is_some()));
    libtest_mimic::run(&arguments, all).exit();
}
