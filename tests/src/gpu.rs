//! Tests that need a GPU: where there is none they are listed as ignored, and the reason is printed.

use std::path::PathBuf;

use gpupool_cuda_device::{CudaDevice, availability};
use libtest_mimic::{Arguments, Failed, Trial};

/// A GPU test: its name and what it does.
pub type GpuTest = (String, Box<dyn FnOnce() -> Result<(), Failed> + Send>);

/// Runs tests one at a time; those of the GPU are skipped where there is none.
pub fn run(anywhere: Vec<Trial>, on_gpu: Vec<GpuTest>) -> ! {
    let mut arguments = Arguments::from_args();
    // A capture in global mode reaches all threads of a process: one test at a time.
    arguments.test_threads = Some(1);
    let unavailable = availability::driver().err();
    if let Some(why) = &unavailable
        && !arguments.list
    {
        println!("skipped: no CUDA driver ({why})");
    }
    let mut all = anywhere;
    all.extend(on_gpu.into_iter().map(|(name, test)| Trial::test(name, test).with_ignored_flag(unavailable.is_some())));
    libtest_mimic::run(&arguments, all).exit()
}

/// The first GPU, with its kernels loaded.
pub fn gpu() -> CudaDevice {
    let device = CudaDevice::open(0).expect("a GPU test runs only where there is one");
    device.load_kernels().expect("NVRTC");
    device
}

/// The folder of recordings: `GPUPOOL_DATA` if that is set, so that a test binary can be carried to another machine.
pub fn data() -> PathBuf {
    let here = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../crates/replay/data");
    std::env::var_os("GPUPOOL_DATA").map_or_else(here, PathBuf::from)
}
