//! Replays of the recordings in `data/traces`: under `torch-2.11` they come out as they were recorded, and under
//! every policy whole.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::path::Path;

use gpupool_allocator::Policy;
use gpupool_replay::replay::{Options, Replayed, find_capacity, replay_simulated};
use gpupool_replay::trace::Trace;

const NAMES: [&str; 8] = [
    "gnn_sampling",
    "gpt2_train",
    "graph_serving",
    "llama_checkpoint_offload",
    "moe_train",
    "overlap_streams",
    "seed_batches",
    "seed_batches_unshared",
];

fn recording(name: &str) -> Trace {
    Trace::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("data/traces").join(format!("{name}.trace.gz"))).unwrap()
}

fn options(policy: Policy) -> Options {
    Options { timed: false, ..Options::new(policy) }
}

fn replay(trace: &Trace, options: &Options) -> Replayed {
    let replayed = replay_simulated(trace, options, &mut |_| {}).unwrap();
    assert!(replayed.report.completed, "{}: {:?}", trace.name(), replayed.report.stopped);
    replayed
}

#[test]
fn torch_2_11_reaches_what_was_recorded() {
    for name in NAMES {
        let trace = recording(name);
        let report = replay(&trace, &options(Policy::Torch211)).report;
        let header = &trace.header;
        let reached = (report.peak_requested, report.peak_allocated, report.peak_reserved);
        assert_eq!(reached, (header.peak_requested, header.peak_allocated, header.peak_reserved), "{name}");
        let ours: Vec<_> = report.segments.iter().map(|s| (s.bytes, s.stream, s.released_at)).collect();
        let counted = |events: u32| trace.events[..events as usize].iter().filter(|e| e.counts()).count() as u64;
        let recorded: Vec<_> =
            trace.segments.iter().map(|s| (s.bytes, u64::from(s.stream), s.given_back_before.map(counted))).collect();
        assert_eq!(ours, recorded, "{name}");
        assert_eq!(report.events, u64::from(trace.counted));
    }
}

#[test]
fn every_policy_completes_every_recording_in_every_turn() {
    for name in NAMES {
        let trace = recording(name);
        for policy in Policy::ALL {
            let options = Options { iterations: 3, ..options(*policy) };
            let report = replay(&trace, &options).report;
            assert_eq!(report.iterations.len(), 3, "{name} under {policy}");
            assert!(report.peak_requested <= report.peak_reserved);
            assert!(report.segments.iter().all(|segment| segment.stream < u64::from(trace.streams)), "{name} {policy}");
            let graphs: u64 = report.pools.iter().map(|pool| pool.graphs).sum();
            assert_eq!(graphs, trace.graphs.len() as u64);
        }
    }
}

/// What lies in a bin is not merged, so larger blocks are cut up in its place. A recording takes at most a hundredth more for that, and
/// three hundredths where it comes again and memory is no longer given back.
#[test]
fn bins_take_hardly_more_memory_than_no_bins() {
    let mut over = Vec::new();
    for name in NAMES {
        let trace = recording(name);
        let turns = |bins| {
            let options = Options { iterations: 3, bins, ..options(Policy::Segments) };
            replay(&trace, &options).report.iterations.into_iter().map(|turn| turn.peak_reserved)
        };
        for (turn, (with, without)) in turns(true).zip(turns(false)).enumerate() {
            let hundredths = if turn == 0 { 1 } else { 3 };
            println!("{name}, turn {turn}: {with} bytes with bins, {without} without");
            if with > without + without / 100 * hundredths {
                over.push(format!("{name}, turn {turn}: {with} bytes with bins, {without} without"));
            }
        }
    }
    assert!(over.is_empty(), "{over:#?}");
}

#[test]
fn the_smallest_capacity_suffices_and_one_step_less_does_not() {
    for (name, policy) in
        [("overlap_streams", Policy::Segments), ("seed_batches", Policy::Torch215), ("gpt2_train", Policy::Torch211)]
    {
        let trace = recording(name);
        let options = options(policy);
        let whole = replay(&trace, &options).report;
        let found = find_capacity(&trace, &options, whole.peak_reserved, &mut |_| {}).unwrap();
        let bytes = found.bytes.unwrap();
        assert!(bytes <= whole.peak_reserved && bytes >= trace.peak_live(), "{name}: {bytes}");
        assert!(bytes.is_multiple_of(2 << 20));
        replay(&trace, &Options { capacity: bytes, ..options.clone() });
        let less = Options { capacity: bytes - (2 << 20), ..options };
        let report = replay_simulated(&trace, &less, &mut |_| {}).unwrap().report;
        let stopped = report.stopped.unwrap();
        assert!(!report.completed && stopped.turn == 1 && report.events < u64::from(trace.counted), "{name}");
        assert!(stopped.error.contains("memory"), "{}", stopped.error);
    }
}

#[test]
fn the_smallest_capacity_is_looked_for_beyond_a_capacity_that_does_not_suffice() {
    let trace = recording("seed_batches");
    let options = Options { capacity: 2 << 20, ..options(Policy::Segments) };
    assert!(!replay_simulated(&trace, &options, &mut |_| {}).unwrap().report.completed);
    let found = find_capacity(&trace, &options, trace.peak_live(), &mut |_| {}).unwrap();
    assert_eq!(found.bytes, Some(6 << 20));
}

#[test]
fn completion_that_lags_costs_memory_only_where_something_waits_for_it() {
    let trace = recording("overlap_streams");
    for policy in Policy::ALL {
        let prompt = replay(&trace, &options(*policy)).report;
        let late = replay(&trace, &Options { completion_lag: 200, ..options(*policy) }).report;
        assert!(
            late.peak_reserved >= prompt.peak_reserved,
            "{policy}: {} {}",
            late.peak_reserved,
            prompt.peak_reserved
        );
        let never = replay(&trace, &Options { completion_lag: u64::MAX, ..options(*policy) }).report;
        assert!(never.peak_reserved >= prompt.peak_reserved, "{policy}");
    }
    let single = recording("gpt2_train");
    let late = replay(&single, &Options { completion_lag: 50, ..options(Policy::Torch211) }).report;
    assert_eq!(late.peak_reserved, single.header.peak_reserved, "one stream waits for nothing");
}

#[test]
fn the_state_at_the_peak_has_the_peak() {
    for name in ["graph_serving", "moe_train"] {
        let trace = recording(name);
        for policy in Policy::ALL {
            let replayed = replay(&trace, &Options { wants_state: true, ..options(*policy) });
            let state = replayed.at_peak.unwrap();
            let bytes: u64 = state.segments.iter().map(|segment| segment.size).sum();
            let peak = replayed.report.peak_reserved;
            match policy {
                // The driver's pool holds more than is in blocks.
                Policy::StreamOrdered => assert!((peak / 2..=peak).contains(&bytes), "{name}: {bytes} of {peak}"),
                _ => assert_eq!(bytes, peak, "{name} under {policy}"),
            }
        }
    }
}

#[test]
fn timing_is_a_positive_figure_of_warm_turns() {
    let trace = recording("seed_batches");
    let report = replay(&trace, &Options::new(Policy::Segments)).report;
    assert!(report.timed_turns > 0 && report.ns_per_event.is_some_and(|ns| ns > 0.0));
    assert_eq!(report.iterations.len(), 1, "turns for timing alone are not reported");
}

#[test]
fn shared_pools_are_counted_once_and_unshared_ones_each() {
    let shared = replay(&recording("seed_batches"), &options(Policy::Torch211)).report;
    assert_eq!(shared.pools.len(), 1);
    assert_eq!((shared.pools[0].graphs, shared.pools[0].peak_reserved), (128, 4 << 20));
    let unshared = replay(&recording("seed_batches_unshared"), &options(Policy::Torch211)).report;
    assert_eq!(unshared.pools.len(), 128);
    assert!(unshared.pools.iter().all(|pool| pool.graphs == 1 && pool.peak_reserved >= 2 << 20));
}
