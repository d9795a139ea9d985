//! Reuse inside a capture: at once on the own stream, by the capture's own graph where it proves the order, else at the end; and frees
//! of blocks from outside the capture.

use std::collections::BTreeMap;

use gpupool_allocator::{Config, Policy, Stream};
use gpupool_device::{Call, CaptureMode, Device, Kernel, Workbench};
use gpupool_graph_capture::CaptureOptions;
use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};
use gpupool_tests::graph_bench::{EAGER, KIB, Lab, MIB, under_every_schedule};

/// What catalogue entry 22 says of the pool: 100 blocks of 64 MiB, one at a time, used on a second stream.
const AT_MOST: u64 = 128 * MIB;

/// The scenario of entry 22. `joins` says whether the first stream waits for the second before the free.
fn used_on_a_second_stream(lab: &Lab, s: &Stream<SimDevice>, other: &Stream<SimDevice>, rounds: u64, joins: bool) {
    for _ in 0..rounds {
        let x = lab.block(10, 64 * MIB, s);
        lab.order(s, other);
        lab.fill(other, &x, 1);
        x.record(other);
        if joins {
            lab.order(other, s);
        }
        drop(x);
    }
    if !joins {
        lab.order(other, s);
    }
}

/// Catalogue entry 22, with the three tests that follow.
#[test]
fn a_block_used_on_a_joined_stream_is_used_again_once_the_graph_proves_the_order() {
    let lab = Lab::with(SimConfig::default().for_replay(), Config::new(Policy::Segments));
    let (s, other) = (lab.stream(), lab.stream());
    let (graph, exec, ()) =
        lab.capture(&s, CaptureOptions::new(), || used_on_a_second_stream(&lab, &s, &other, 100, true));
    let pool = graph.pools()[0];
    assert!(lab.pool_bytes(pool) <= AT_MOST, "{}", lab.pool_bytes(pool));
    assert_eq!(graph.report().node_count(), 100);
    drop((graph, exec));
    lab.close();
}

#[test]
fn what_cannot_be_proven_is_deferred_and_all_of_it_is_free_at_the_end() {
    for fails in [false, true] {
        let lab = Lab::with(SimConfig::default().for_replay(), Config::new(Policy::Segments));
        let (s, other) = (lab.stream(), lab.stream());
        let capture = lab.begin(&s, CaptureOptions::new());
        let pool = capture.pool();
        // Held, so that the pool outlives a capture that fails.
        let hold = lab.allocator.hold_pool(pool).unwrap();
        used_on_a_second_stream(&lab, &s, &other, 20, false);
        assert_eq!(lab.pool_bytes(pool), 20 * 64 * MIB, "nothing was proven");
        assert_eq!(lab.allocator.pool_stats(pool).unwrap().allocated_bytes.all.current, 0);
        assert_eq!(lab.allocator.stats().active_bytes.all.current as u64, 20 * 64 * MIB, "deferred, not free");
        if fails {
            lab.device.invalidate_capture_after(0);
            let _invalidates = lab.device.mem_info().unwrap();
            capture.end().unwrap_err();
        } else {
            drop(capture.end().unwrap());
        }
        assert_eq!(lab.allocator.stats().active_bytes.all.current, 0);
        // The next capture finds all of it.
        let capture = lab.begin(&s, CaptureOptions::new().with_pool(pool));
        let blocks: Vec<_> = (0..20).map(|_| lab.block(10, 64 * MIB, &s)).collect();
        assert_eq!(lab.pool_bytes(pool), 20 * 64 * MIB);
        drop((blocks, capture, hold));
        lab.close();
    }
}

#[test]
fn proving_costs_driver_calls_linear_in_the_nodes() {
    let calls_for = |rounds: u64| {
        let lab = Lab::with(SimConfig::default().for_replay(), Config::new(Policy::Segments));
        let (s, other) = (lab.stream(), lab.stream());
        let capture = lab.begin(&s, CaptureOptions::new());
        let (calls, ()) = lab.calls_of(|| used_on_a_second_stream(&lab, &s, &other, rounds, true));
        drop(capture);
        calls
    };
    let (short, long): (BTreeMap<_, _>, BTreeMap<_, _>) = (calls_for(100), calls_for(200));
    // Each node is asked for its dependencies once; a round adds one.
    assert!(short[&Call::GraphGetEdges] <= 100, "{short:?}");
    assert_eq!(long[&Call::GraphGetEdges] - short[&Call::GraphGetEdges], 100);
    // Of the capture queries, a constant number a round: the request's, the recorded use's, the frontiers'.
    assert_eq!(long[&Call::StreamGetCaptureInfo] - short[&Call::StreamGetCaptureInfo], short_round(&short) * 100);
    for call in [Call::MemCreate, Call::MemAlloc, Call::EventQuery, Call::EventSynchronize] {
        assert_eq!(long.get(&call), short.get(&call), "{call}");
    }
}

fn short_round(calls: &BTreeMap<Call, u64>) -> u64 {
    let each = calls[&Call::StreamGetCaptureInfo].div_ceil(100);
    assert!(each <= 5, "{each} capture queries a round");
    each
}

#[test]
fn reuse_inside_a_capture_is_right_whatever_the_branches_do() {
    under_every_schedule(300, |schedule| {
        let lab = Lab::new(schedule.scheduler);
        let mut dice = gpupool_tests::graph_bench::Dice::new(schedule.seed);
        let streams = [lab.stream(), lab.stream(), lab.stream()];
        let s = &streams[0];
        let input = lab.block(EAGER, KIB, s);
        lab.fill(s, &input, 7);
        let (graph, exec, outs) = lab.capture(s, CaptureOptions::new(), || {
            for other in &streams[1..] {
                lab.order(s, other);
            }
            let mut outs = Vec::new();
            for at in 0..12 {
                let on = dice.one_of(&streams).clone();
                let uses = dice.one_of(&streams).clone();
                let temp = lab.block(10, KIB, &on);
                lab.copy(&on, &temp, &input);
                lab.add(&on, &temp, at);
                lab.order(&on, &uses);
                let out = lab.block(10, KIB, &uses);
                lab.copy(&uses, &out, &temp);
                temp.record(&uses);
                if dice.below(2) == 0 {
                    lab.order(&uses, &on);
                }
                drop(temp);
                if dice.below(3) == 0 {
                    outs.push((out, 7 + at));
                } else if dice.below(2) == 0 {
                    out.free_on(&on);
                }
            }
            for other in &streams[1..] {
                lab.order(other, s);
            }
            outs
        });
        exec.launch(s).unwrap();
        exec.launch(&streams[1]).unwrap();
        lab.device.run_until_idle();
        for (out, expected) in &outs {
            assert_eq!(lab.word(out), Some(*expected));
        }
        drop((graph, exec, outs, input));
        lab.close();
    });
}

/// Catalogue entry 23.
#[test]
fn frees_of_outside_blocks_are_parked_without_captured_events_and_settled_afterwards() {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let lab = Lab::new(Scheduler::Adversarial);
        let (s, capturing) = (lab.stream(), lab.stream());
        let x = lab.block(EAGER, MIB, &s);
        let at = x.address();
        let keep = lab.block(EAGER, MIB, &s);
        let capture = lab.begin(&capturing, CaptureOptions::new().with_mode(mode));
        let before = lab.device.call_counts();
        lab.fill(&capturing, &x, 1);
        // Recorded on the capturing stream, and freed while it captures: many, so that an event would be due.
        let many: Vec<_> = (0..200).map(|_| lab.block(EAGER, KIB, &s)).collect();
        for block in many {
            block.record(&capturing);
        }
        x.record(&capturing);
        drop(x);
        // Requests on the other stream poll.
        let others: Vec<_> = (0..8).map(|_| lab.block(EAGER, MIB, &s)).collect();
        assert!(others.iter().all(|b| b.address() != at), "the capture may yet use it");
        lab.allocator.trim().unwrap();
        lab.allocator.empty_cache().unwrap();
        let now = gpupool_tests::graph_bench::calls_since(&before, &lab.device.call_counts());
        let events = [Call::EventQuery, Call::EventSynchronize].map(|c| now.get(&c).copied().unwrap_or(0));
        assert!(events.iter().sum::<u64>() <= now.get(&Call::EventRecord).copied().unwrap_or(0), "{now:?}");
        assert!(lab.allocator.stats().active_bytes.all.current > lab.allocator.stats().allocated_bytes.all.current);
        let graph = capture.end().unwrap();
        assert_eq!(graph.report().node_count(), 1, "our frees add no nodes");
        drop(others);
        lab.allocator.empty_cache().unwrap();
        assert_eq!(
            lab.allocator.stats().active_bytes.all.current,
            lab.allocator.stats().allocated_bytes.all.current,
            "all settled"
        );
        drop((keep, graph));
        lab.close();
    }
}

#[test]
fn the_end_of_a_capture_does_not_end_what_its_stream_did_before_it() {
    for recorded_inside in [true, false] {
        let lab = Lab::new(Scheduler::Adversarial);
        let (s, used_on) = (lab.stream(), lab.stream());
        let x = lab.block(EAGER, MIB, &s);
        let at = x.address();
        let gate = lab.device.gate_create().unwrap();
        lab.device.launch(used_on.handle(), Kernel::Wait { gate }).unwrap();
        lab.fill(&used_on, &x, 1);
        x.record(&used_on);
        let capture = lab.begin(&used_on, CaptureOptions::new());
        lab.fill(&used_on, &x, 2);
        if recorded_inside {
            x.record(&used_on);
        }
        drop(x);
        drop(capture.end().unwrap());
        lab.allocator.trim().unwrap();
        let other = lab.block(EAGER, MIB, &s);
        assert_ne!(other.address(), at, "the eager fill still runs");
        lab.device.gate_open(gate).unwrap();
        lab.device.run_until_idle();
        drop(other);
        lab.close();
    }
}

#[test]
fn the_end_of_a_capture_does_not_end_what_a_stream_did_before_it_joined() {
    for last_use_told in [false, true] {
        let lab = Lab::new(Scheduler::Adversarial);
        let (s, joins) = (lab.stream(), lab.stream());
        let capture = lab.begin(&s, CaptureOptions::new().with_mode(CaptureMode::Relaxed));
        let pool = capture.pool();
        let x = lab.block(10, MIB, &s);
        let at = x.address();
        let gate = lab.device.gate_create().unwrap();
        lab.device.launch(joins.handle(), Kernel::Wait { gate }).unwrap();
        lab.fill(&joins, &x, 7);
        match last_use_told {
            false => x.record(&joins),
            true => x.allocation().record_last_use(&joins.mark_work().unwrap()).unwrap(),
        }
        lab.order(&s, &joins);
        lab.fill(&joins, &x, 9);
        x.record(&joins);
        lab.order(&joins, &s);
        drop(x);
        let graph = capture.end().unwrap();
        let next = lab.begin(&s, CaptureOptions::new().with_settle(false).with_pool(pool));
        let y = lab.block(10, MIB, &s);
        assert_ne!(y.address(), at, "the eager fill still runs");
        drop(next.end().unwrap());
        lab.device.gate_open(gate).unwrap();
        lab.device.run_until_idle();
        drop((graph, y));
        lab.close();
    }
}
