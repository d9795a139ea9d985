//! Every recorded workload under every policy, on the GPU and on the simulated device: the same placements, segments, pools, peaks and driver
//! calls. Under `torch-2.11`, which breaks ties by address, the simulated device places segments where the GPU did. Under `stream-ordered` the
//! places are the driver's: requests, peaks and driver calls are the same.

use gpupool_allocator::Policy;
use gpupool_cuda_device::CudaDevice;
use gpupool_device::{Call, DriverError, code};
use gpupool_replay::real::Real;
use gpupool_replay::replay::{Options, Report, replay_on};
use gpupool_replay::trace::Trace;
use gpupool_sim_device::{Placement, SimConfig, SimDevice};
use gpupool_tests::gpu::{self, GpuTest};

fn on_gpu(trace: &Trace, options: &Options) -> Report {
    let open = || CudaDevice::open(0).map(Real::new).map_err(|_| DriverError::new(Call::Other, code::NO_DEVICE));
    replay_on(open, trace, options, &mut |_| {}).unwrap().report
}

fn simulated(trace: &Trace, options: &Options, placement: &Placement) -> Report {
    let config = || SimConfig::default().with_placement(placement.clone()).for_replay();
    replay_on(|| Ok(SimDevice::new(config())), trace, options, &mut |_| {}).unwrap().report
}

fn same(trace: &Trace, policy: Policy) {
    // Moves of pages take a share of the time, and a GPU's calls take other times than the simulated device's: with a second to each event
    // that makes no difference.
    let options = Options { timed: false, iterations: 3, pace_ns: Some(1_000_000_000), ..Options::new(policy) };
    let real = on_gpu(trace, &options);
    let placement = match policy {
        Policy::Torch211 => Placement::Scripted(real.addresses.clone()),
        _ => Placement::Growing,
    };
    let sim = simulated(trace, &options, &placement);
    assert!(real.completed && sim.completed, "{:?}", real.stopped);
    let places_are_ours = policy != Policy::StreamOrdered;
    if places_are_ours {
        assert_eq!((real.peak_reserved, &real.pools), (sim.peak_reserved, &sim.pools));
    } else {
        println!("the driver's pool: {} MiB at most, model {}", real.peak_reserved >> 20, sim.peak_reserved >> 20);
    }
    assert_eq!(real.segments, sim.segments);
    assert_eq!(
        (real.peak_allocated, real.peak_requested, real.events),
        (sim.peak_allocated, sim.peak_requested, sim.events)
    );
    assert_eq!(real.driver_calls, sim.driver_calls);
    let turns = |report: &Report| {
        let peak = |peak: u64| places_are_ours.then_some(peak);
        report.iterations.iter().map(|i| (i.driver_calls.clone(), peak(i.peak_reserved))).collect::<Vec<_>>()
    };
    assert_eq!(turns(&real), turns(&sim));
    assert_eq!(real.placements, sim.placements, "segment and offset of every block");
    let calls = |n: usize| real.iterations.get(n).map_or(0, |i| i.driver_calls.values().sum::<u64>());
    println!(
        "{} under {policy}: {} events, placements {:016x}, {} segments, driver calls {} / {} / {}, driver {:.0} us (model {:.0} us)",
        trace.name(),
        real.events,
        real.placements,
        real.segments.len(),
        calls(0),
        calls(1),
        calls(2),
        real.driver_us,
        sim.driver_us,
    );
}

fn main() {
    let mut files: Vec<_> =
        std::fs::read_dir(gpu::data().join("traces")).unwrap().flatten().map(|e| e.path()).collect();
    files.sort();
    let tests = files.into_iter().flat_map(|file| {
        Policy::ALL.iter().map(move |&policy| -> GpuTest {
            let name = file.file_name().unwrap_or_default().to_string_lossy().replace(".trace.gz", "");
            let file = file.clone();
            let test = move || {
                same(&Trace::read(&file)?, policy);
                Ok(())
            };
            (format!("{name} under {policy}"), Box::new(test))
        })
    });
    gpu::run(Vec::new(), tests.collect());
}
