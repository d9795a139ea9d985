//! What `pages` promises of the recordings: memory used in the first pass, the driver's time in later turns, the smallest device.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::path::Path;

use gpupool_allocator::{Policy, Preset};
use gpupool_replay::replay::{DEFAULT_CAPACITY, Options, Report, find_capacity, replay_simulated};
use gpupool_replay::trace::Trace;

/// Recordings of training and serving, of which the figures are promised each and in the mean.
const FIVE: [&str; 5] = ["gnn_sampling", "gpt2_train", "moe_train", "llama_checkpoint_offload", "graph_serving"];

fn recording(name: &str) -> Trace {
    Trace::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("data/traces").join(format!("{name}.trace.gz"))).unwrap()
}

fn options(preset: Preset) -> Options {
    Options { preset: Some(preset), timed: false, ..Options::new(Policy::Pages) }
}

fn replay(trace: &Trace, options: &Options) -> Report {
    let report = replay_simulated(trace, options, &mut |_| {}).unwrap().report;
    assert!(report.completed, "{}: {:?}", trace.name(), report.stopped);
    report
}

fn first_pass_uses(preset: Preset, completion_lag: u64, each: f64, mean: f64) {
    let used = FIVE.map(|name| replay(&recording(name), &Options { completion_lag, ..options(preset) }).utilization);
    println!("{preset}, lag {completion_lag}: {used:?}");
    assert!(used.iter().all(|used| *used >= each), "{preset}, lag {completion_lag}: {used:?}, each {each}");
    assert!(used.iter().sum::<f64>() / 5.0 >= mean, "{preset}, lag {completion_lag}: {used:?}, in the mean {mean}");
}

#[test]
fn the_first_pass_uses_nearly_all_that_it_reserves() {
    first_pass_uses(Preset::Memory, 0, 0.965, 0.988);
    first_pass_uses(Preset::Balanced, 0, 0.96, 0.985);
}

#[test]
fn the_first_pass_does_so_where_completion_lags() {
    first_pass_uses(Preset::Balanced, 1_000, 0.935, 0.975);
}

#[test]
fn what_the_other_recordings_reserve_is_no_more_than_under_segments() {
    for name in ["overlap_streams", "seed_batches", "seed_batches_unshared"] {
        let trace = recording(name);
        let segments = replay(&trace, &Options { timed: false, ..Options::new(Policy::Segments) }).peak_reserved;
        for preset in Preset::ALL {
            let reserved = replay(&trace, &options(*preset)).peak_reserved;
            assert!(reserved <= segments, "{name}, {preset}: {reserved} and {segments} under segments");
        }
    }
}

/// Moves die out, also where streams use each other's blocks and something is pending at every moment (overlap_streams).
#[test]
fn from_the_fourth_turn_on_the_driver_takes_next_to_nothing() {
    for (preset, hundredths) in [(Preset::Memory, 2.0), (Preset::Balanced, 1.0)] {
        for name in FIVE.into_iter().chain(["overlap_streams"]) {
            let trace = recording(name);
            let report = replay(&trace, &Options { iterations: 10, ..options(preset) });
            let most = if name == "moe_train" { 0.0 } else { hundredths };
            let wall_us = trace.header.rest["wall_s"].as_f64().unwrap() * 1e6;
            let shares = report.iterations[3..].iter().map(|turn| turn.driver_us / wall_us * 100.0);
            let shares: Vec<f64> = shares.collect();
            println!("{name}, {preset}: {shares:.2?}% of the wall time");
            assert!(shares.iter().all(|share| *share <= most), "{name}, {preset}: {shares:.2?}%, at most {most}");
        }
    }
}

#[test]
fn a_device_little_larger_than_what_is_requested_suffices() {
    for (preset, most) in [(Preset::Memory, 1.04), (Preset::Balanced, 1.05), (Preset::Latency, 1.12)] {
        for name in FIVE {
            let trace = recording(name);
            let whole = replay(&trace, &options(preset));
            let found = find_capacity(&trace, &options(preset), whole.peak_reserved.min(DEFAULT_CAPACITY), &mut |_| {});
            let share = found.unwrap().bytes.unwrap() as f64 / whole.peak_requested as f64;
            println!("{name}, {preset}: {share:.3}");
            assert!(share <= most, "{name}, {preset}: {share:.3} of the peak requested, at most {most}");
        }
    }
}
