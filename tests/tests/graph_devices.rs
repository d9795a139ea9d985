//! Captures that spread over two devices: an allocator each, one registry of captures.

use std::sync::Arc;

use gpupool_allocator::{AllocError, CaptureRegistry, Config, Policy, Stream};
use gpupool_device::{Call, Device};
use gpupool_graph_capture::{CaptureError, CaptureOptions, Captures, Executable, Graph, LaunchOptions, Sharing};
use gpupool_sim_device::{ReportKind, Scheduler, SimConfig, SimDevice, SimWorld};
use gpupool_tests::graph_bench::{Block, EAGER, KIB, Lab, MIB, under_every_schedule};

const BYTES: u64 = 4 * KIB;

/// Two devices of a world.
fn labs(scheduler: Scheduler) -> [Lab; 2] {
    let world = SimWorld::new(2, SimConfig::default().with_scheduler(scheduler));
    let registry = Arc::new(CaptureRegistry::default());
    [0, 1].map(|ordinal| {
        let device = Arc::new(world.device(ordinal).unwrap());
        Lab::on(device, Config::new(Policy::Segments), Arc::clone(&registry))
    })
}

/// `then`, of any device, goes on after `first`.
fn order(first: (&Lab, &Stream<SimDevice>), then: (&Lab, &Stream<SimDevice>)) {
    let event = first.0.device.event_create().unwrap();
    first.0.device.event_record(event, first.1.handle()).unwrap();
    then.0.device.stream_wait_event(then.1.handle(), event).unwrap();
    first.0.device.event_destroy(event).unwrap();
}

struct Spread {
    graph: Graph<SimDevice>,
    exec: Executable<SimDevice>,
    outs: [Block; 2],
}

/// A capture begun on device 0 whose work forks to device 1 and joins back, with a temporary and an output on each.
fn spread(labs: &[Lab; 2], streams: &[Stream<SimDevice>; 2], options: CaptureOptions, party: u64) -> Spread {
    let [here, there] = labs;
    let capture = here.begin(&streams[0], options);
    order((here, &streams[0]), (there, &streams[1]));
    let outs = [0, 1].map(|at: usize| {
        let (lab, stream) = (&labs[at], &streams[at]);
        let temp = lab.block(party, 2 * BYTES, stream);
        lab.fill(stream, &temp, party as u32 + at as u32);
        let out = lab.block(party, BYTES, stream);
        lab.copy(stream, &out, &temp);
        drop(temp);
        out
    });
    order((there, &streams[1]), (here, &streams[0]));
    let graph = capture.end().unwrap();
    let exec = graph.instantiate(Default::default()).unwrap();
    Spread { graph, exec, outs }
}

fn words(labs: &[Lab; 2], outs: &[Block; 2]) -> [Option<u32>; 2] {
    [labs[0].word(&outs[0]), labs[1].word(&outs[1])]
}

fn close(labs: [Lab; 2]) {
    let [a, b] = labs;
    // What device 0's captures let go may hold device 1's pools.
    a.allocator.empty_cache().unwrap();
    b.close();
    a.close();
}

#[test]
fn a_graph_that_spreads_over_two_devices_holds_a_pool_on_each() {
    let labs = labs(Scheduler::Adversarial);
    let streams = [labs[0].stream(), labs[1].stream()];
    let first = spread(&labs, &streams, CaptureOptions::new(), 10);
    let pool = first.graph.pools()[0];
    assert_eq!(first.graph.pools(), [pool, pool]);
    let report = first.graph.report();
    assert_eq!(report.pools.iter().map(|p| p.device).collect::<Vec<_>>(), [0, 1]);
    for (at, report) in report.pools.iter().enumerate() {
        assert_eq!((report.new_segment_bytes, report.reused_bytes), (2 * MIB, 0));
        assert_eq!((report.written_bytes(), report.outputs.len()), (3 * BYTES, 1));
        assert_eq!(labs[at].pool_bytes(pool), 2 * MIB);
        assert_eq!(labs[at].allocator.pool_use_count(pool).unwrap(), 1);
    }
    let Spread { graph, exec, outs } = first;
    drop(outs);
    // Whatever either allocator does, the memory that the graph baked in stays.
    for lab in &labs {
        let eager: Vec<_> = (0..100).map(|_| lab.block(EAGER, BYTES, &lab.stream())).collect();
        drop(eager);
        lab.allocator.empty_cache().unwrap();
        assert_eq!(lab.pool_bytes(pool), 2 * MIB);
    }
    exec.launch(&streams[0]).unwrap();
    labs[0].wait(&streams[0]);
    drop((graph, exec));
    for lab in &labs {
        lab.allocator.empty_cache().unwrap();
        assert_eq!(lab.reserved(), 0);
    }
    close(labs);
}

/// Catalogue entry 48: only the graph captured last used to replay.
#[test]
fn the_second_devices_blocks_of_every_graph_stay_so_that_each_replays() {
    under_every_schedule(100, |schedule| {
        let labs = labs(schedule.scheduler);
        let streams = [labs[0].stream(), labs[1].stream()];
        let graphs: Vec<_> = (0..3).map(|n| spread(&labs, &streams, CaptureOptions::new(), 10 * (n + 1))).collect();
        // Eager work that would take what is not held.
        let eager: Vec<_> =
            labs.iter().zip(&streams).map(|(lab, s)| (lab, s, lab.block(EAGER, 8 * BYTES, s))).collect();
        for (lab, s, block) in &eager {
            lab.fill(s, block, 99);
        }
        for graph in &graphs {
            graph.exec.launch(&streams[0]).unwrap();
        }
        labs[0].device.run_until_idle();
        for (graph, n) in graphs.iter().zip(1..) {
            assert_eq!(words(&labs, &graph.outs), [Some(10 * n), Some(10 * n + 1)]);
        }
        assert!(eager.iter().all(|(lab, _, block)| lab.word(block) == Some(99)));
        drop((graphs, eager));
        close(labs);
    });
}

#[test]
fn graphs_of_two_devices_share_both_pools_and_are_right_under_every_schedule() {
    under_every_schedule(200, |schedule| {
        let labs = labs(schedule.scheduler);
        let streams = [labs[0].stream(), labs[1].stream()];
        let other = labs[0].stream();
        let first = spread(&labs, &streams, CaptureOptions::new(), 10);
        let second = spread(&labs, &streams, CaptureOptions::new().with_pool_of(&first.graph), 20);
        assert_eq!([labs[0].reserved(), labs[1].reserved()], [2 * MIB; 2], "shared on both");
        assert_eq!(second.graph.report().pools.iter().map(|p| p.new_segment_bytes).sum::<u64>(), 0);
        for _ in 0..2 {
            first.exec.launch(&streams[0]).unwrap();
            assert!(second.exec.launch(&other).unwrap().waits);
        }
        labs[0].device.run_until_idle();
        assert_eq!(words(&labs, &first.outs), [Some(10), Some(11)]);
        assert_eq!(words(&labs, &second.outs), [Some(20), Some(21)]);
        drop((first, second));
        close(labs);
    });
}

/// A graph of device 1 alone in the pool that a graph of device 0 touched there: launched on streams of different devices.
fn beside(labs: &[Lab; 2], options: LaunchOptions) -> (Vec<ReportKind>, [Option<u32>; 2], bool) {
    let streams = [labs[0].stream(), labs[1].stream()];
    let wide = spread(labs, &streams, CaptureOptions::new(), 10);
    let there = &labs[1];
    let (graph, exec, out) = there.capture(&streams[1], CaptureOptions::new().with_pool_of(&wide.graph), || {
        let temp = there.block(20, 2 * BYTES, &streams[1]);
        there.fill(&streams[1], &temp, 30);
        let out = there.block(20, BYTES, &streams[1]);
        there.copy(&streams[1], &out, &temp);
        drop(temp);
        out
    });
    assert!(!wide.graph.overlap(&graph).is_empty());
    wide.exec.launch_with(&streams[0], options).unwrap();
    let waits = exec.launch_with(&streams[1], options).unwrap().waits;
    labs[0].device.run_until_idle();
    let reports = labs[0].device.take_reports().iter().map(|r| r.kind).collect();
    (reports, [there.word(&wide.outs[1]), there.word(&out)], waits)
}

#[test]
fn launches_from_two_devices_that_share_a_pool_are_serialised() {
    under_every_schedule(200, |schedule| {
        let labs = labs(schedule.scheduler);
        let (reports, words, waits) = beside(&labs, LaunchOptions::new());
        assert_eq!((reports, words, waits), (vec![], [Some(11), Some(30)], true));
        close(labs);
        // Unchecked it is found.
        let labs = self::labs(schedule.scheduler);
        let (reports, _, waits) = beside(&labs, LaunchOptions::new().with_sharing(Sharing::Unchecked));
        assert!(!reports.is_empty() && !waits);
    });
}

#[test]
fn two_captures_of_one_allocator_know_of_each_others_runs() {
    let lab = Lab::new(Scheduler::Adversarial);
    let again = Captures::new(&lab.allocator);
    let (a, b) = (lab.stream(), lab.stream());
    let capture = |captures: &Captures<SimDevice>, options| {
        let capture = captures.begin(&a, options).unwrap();
        let temp = lab.block(10, BYTES, &a);
        lab.fill(&a, &temp, 1);
        drop(temp);
        let graph = capture.end().unwrap();
        let exec = graph.instantiate(Default::default()).unwrap();
        (graph, exec)
    };
    let first = capture(&lab.captures, CaptureOptions::new());
    let second = capture(&again, CaptureOptions::new().with_pool_of(&first.0));
    first.1.launch(&a).unwrap();
    assert!(second.1.launch(&b).unwrap().waits);
    lab.device.run_until_idle();
    drop((first, second, again));
    lab.close();
}

#[test]
fn a_pool_that_is_forgotten_on_one_device_still_serves_there_while_the_other_holds_it() {
    let labs = labs(Scheduler::Adversarial);
    let streams = [labs[0].stream(), labs[1].stream()];
    // Held on device 0 only.
    let (here, exec, ()) = labs[0].capture(&streams[0], CaptureOptions::new(), || {
        let temp = labs[0].block(10, BYTES, &streams[0]);
        labs[0].fill(&streams[0], &temp, 1);
    });
    let wide = spread(&labs, &streams, CaptureOptions::new().with_pool_of(&here), 10);
    drop(wide);
    labs[1].allocator.empty_cache().unwrap();
    assert!(labs[1].allocator.pool_stats(here.pools()[0]).is_err(), "gone there");
    let wide = spread(&labs, &streams, CaptureOptions::new().with_pool_of(&here), 10);
    assert_eq!(wide.graph.report().pools.len(), 2);
    drop((wide, here, exec));
    close(labs);
}

#[test]
fn what_a_dropped_graph_held_of_another_device_is_there_when_that_one_runs_out() {
    let labs = labs(Scheduler::Adversarial);
    let streams = [labs[0].stream(), labs[1].stream()];
    let wide = spread(&labs, &streams, CaptureOptions::new(), 10);
    wide.exec.launch(&streams[0]).unwrap();
    drop(wide);
    assert_eq!((labs[0].captures.queued(), labs[1].reserved()), (1, 2 * MIB), "in flight");
    labs[0].device.run_until_idle();
    labs[1].device.set_capacity(2 * MIB);
    // Room for this only where the graph's pool was.
    drop(labs[1].block(EAGER, MIB, &streams[1]));
    assert_eq!((labs[0].captures.queued(), labs[1].reserved()), (0, 2 * MIB));
    close(labs);
}

#[test]
fn only_devices_that_a_capture_reaches_are_touched_and_requests_of_others_are_eager() {
    let labs = labs(Scheduler::Adversarial);
    let streams = [labs[0].stream(), labs[1].stream()];
    let capture = labs[0].begin(&streams[0], CaptureOptions::new());
    let pool = capture.pool();
    // The stream of device 1 has not joined.
    let eager = labs[1].block(EAGER, BYTES, &streams[1]);
    assert!(labs[1].allocator.pool_stats(pool).is_err());
    labs[1].fill(&streams[1], &eager, 4);
    labs[1].device.run_until_idle();
    let there = labs[1].begin(&streams[1], CaptureOptions::new());
    assert!(matches!(
        labs[1].captures.begin(&labs[1].stream(), CaptureOptions::new().with_pool(pool)),
        Err(CaptureError::Alloc(AllocError::PoolInCapture { .. }))
    ));
    drop(labs[1].block(20, BYTES, &streams[1]));
    drop(labs[0].block(10, BYTES, &streams[0]));
    let (g1, g0) = (there.end().unwrap(), capture.end().unwrap());
    assert_eq!([g0.pools().len(), g1.pools().len()], [1, 1]);
    assert_ne!(g0.pools(), g1.pools());
    assert_eq!(labs[1].word(&eager), Some(4));
    drop((g0, g1, eager));
    close(labs);
}

#[test]
fn an_allocation_asks_its_own_device_about_captures_and_only_while_one_is_open() {
    let labs = labs(Scheduler::InOrder);
    let streams = [labs[0].stream(), labs[1].stream()];
    drop(labs[1].block(EAGER, BYTES, &streams[1]));
    let count = |lab: &Lab| lab.device.calls(Call::StreamGetCaptureInfo);
    let before = [count(&labs[0]), count(&labs[1])];
    drop(labs[1].block(EAGER, BYTES, &streams[1]));
    assert_eq!([count(&labs[0]), count(&labs[1])], before);
    let capture = labs[0].begin(&streams[0], CaptureOptions::new());
    let before = [count(&labs[0]), count(&labs[1])];
    drop(labs[1].block(EAGER, BYTES, &streams[1]));
    assert_eq!([count(&labs[0]), count(&labs[1])], [before[0], before[1] + 1]);
    drop(capture);
    close(labs);
}
