//! The sharing contract, and what a launch checks: serialised, refused or trusted; overlaps, held outputs, declared inputs, retained
//! blocks.

use gpupool_allocator::{PoolId, Range, Stream};
use gpupool_device::{Address, Kernel, Workbench, code};
use gpupool_graph_capture::{
    CaptureOptions, Executable, Graph, InputCheck, LaunchError, LaunchOptions, OutputCheck, Sharing,
};
use gpupool_sim_device::{ReportKind, Scheduler, SimDevice};
use gpupool_tests::graph_bench::{Block, Dice, EAGER, KIB, Lab, MIB};

const BYTES: u64 = 4 * KIB;

struct Captured {
    graph: Graph<SimDevice>,
    exec: Executable<SimDevice>,
    out: Option<Block>,
}

/// A graph with a temporary, and an output that is held.
fn captured(lab: &Lab, stream: &Stream<SimDevice>, pool: Option<PoolId>, party: u64) -> Captured {
    let options = pool.map_or_else(CaptureOptions::new, |p| CaptureOptions::new().with_pool(p));
    let (graph, exec, out) = lab.capture(stream, options, || {
        let temp = lab.block(party, 2 * BYTES, stream);
        lab.fill(stream, &temp, party as u32);
        let out = lab.block(party, BYTES, stream);
        lab.copy(stream, &out, &temp);
        drop(temp);
        out
    });
    Captured { graph, exec, out: Some(out) }
}

#[test]
fn a_launch_waits_refuses_or_trusts_as_it_is_told() {
    let lab = Lab::new(Scheduler::Adversarial);
    let (a, b) = (lab.stream(), lab.stream());
    let first = captured(&lab, &a, None, 10);
    let pool = first.graph.pools()[0];
    let second = captured(&lab, &a, Some(pool), 20);
    let with = |sharing| LaunchOptions::new().with_sharing(sharing);
    let gate = lab.device.gate_create().unwrap();
    lab.device.launch(a.handle(), Kernel::Wait { gate }).unwrap();
    first.exec.launch(&a).unwrap();
    // On the same stream nothing needs waiting for, and nothing is refused.
    for sharing in [Sharing::Serialize, Sharing::Refuse, Sharing::Unchecked] {
        assert!(!second.exec.launch_with(&a, with(sharing)).unwrap().waits);
    }
    // Elsewhere it does.
    match second.exec.launch_with(&b, with(Sharing::Refuse)) {
        Err(LaunchError::PoolInUse { pool: p, running, stream }) => {
            assert_eq!((p, running, stream), (pool, second.graph.id(), a.id()));
        }
        other => panic!("{other:?}"),
    }
    let launched = second.exec.launch_with(&b, with(Sharing::Serialize)).unwrap();
    assert!(launched.waits && !launched.done.poll().unwrap());
    lab.device.run_until_idle();
    assert!(!launched.done.poll().unwrap(), "it waits for what is behind the gate");
    lab.device.gate_open(gate).unwrap();
    lab.device.run_until_idle();
    assert!(launched.done.poll().unwrap());
    // Nothing runs any more: nobody waits, nothing is refused.
    let launched = first.exec.launch_with(&a, with(Sharing::Refuse)).unwrap();
    assert!(!launched.waits);
    launched.done.wait().unwrap();
    assert!(!second.exec.launch_with(&b, with(Sharing::Refuse)).unwrap().waits);
    drop((first, second));
    lab.close();
}

#[test]
fn overlap_is_what_an_independent_computation_says() {
    // From the addresses that the captures were given, byte by byte in units of 512.
    fn units(blocks: &[(Address, u64)]) -> std::collections::BTreeSet<u64> {
        blocks.iter().flat_map(|(at, bytes)| (at.0 / 512)..((at.0 + bytes) / 512)).collect()
    }
    for seed in 0..100 {
        let lab = Lab::new(Scheduler::InOrder);
        let s = lab.stream();
        let mut dice = Dice::new(seed);
        let pool = PoolId::fresh_for_capture();
        let mut graphs = Vec::new();
        let mut held = Vec::new();
        for party in 0..4 {
            let options =
                if dice.below(4) == 0 { CaptureOptions::new() } else { CaptureOptions::new().with_pool(pool) };
            let (graph, _exec, given) = lab.capture(&s, options, || {
                let (mut given, mut live) = (Vec::new(), Vec::new());
                for _ in 0..dice.below(12) + 1 {
                    let block = lab.block(party, (dice.below(20) + 1) * 512, &s);
                    given.push((block.address(), block.allocation().size()));
                    live.push(block);
                    if dice.below(2) == 0 {
                        let at = dice.below(live.len() as u64) as usize;
                        drop(live.swap_remove(at));
                    }
                }
                if dice.below(2) == 0 {
                    held.extend(live.pop());
                }
                given
            });
            graphs.push((graph, units(&given)));
        }
        for (a, mine) in &graphs {
            for (b, theirs) in &graphs {
                let found = a.overlap(b);
                assert_eq!(Range::merged(found.clone()), found, "merged and in order");
                let found: Vec<_> = found.iter().map(|r| (r.address, r.bytes)).collect();
                assert_eq!(units(&found), mine.intersection(theirs).copied().collect());
            }
            let others: Vec<_> = graphs.iter().filter(|(b, _)| b.id() != a.id()).collect();
            let shared: std::collections::BTreeSet<_> = others.iter().flat_map(|(_, u)| u).copied().collect();
            let exclusive = mine.difference(&shared).count() as u64 * 512;
            assert_eq!(a.exclusive_bytes(&graphs.iter().map(|(g, _)| g).collect::<Vec<_>>()), exclusive);
            assert_eq!(a.report().pools[0].written_bytes(), mine.len() as u64 * 512);
        }
        drop((graphs, held));
        lab.close();
    }
}

/// Two graphs of which the first one's temporary is where the second one's output is.
fn clobbering(lab: &Lab, s: &Stream<SimDevice>) -> (Captured, Captured) {
    let first = captured(lab, s, None, 10);
    let (graph, exec, out) = lab.capture(s, CaptureOptions::new().with_pool_of(&first.graph), || {
        let out = lab.block(20, BYTES, s);
        lab.fill(s, &out, 20);
        out
    });
    let second = Captured { graph, exec, out: Some(out) };
    let at = second.out.as_ref().unwrap().address();
    assert_eq!(first.graph.overlap(&second.graph)[0].address, at);
    (first, second)
}

fn overwritten(exec: &Executable<SimDevice>, s: &Stream<SimDevice>, check: OutputCheck) -> Vec<Address> {
    let launched = exec.launch_with(s, LaunchOptions::new().with_outputs(check)).unwrap();
    launched.overwrites.iter().map(|o| o.block.range.address).collect()
}

#[test]
fn held_outputs_are_reported_at_the_first_launch_of_a_pair() {
    let lab = Lab::new(Scheduler::InOrder);
    let s = lab.stream();
    let (first, second) = clobbering(&lab, &s);
    let at = second.out.as_ref().unwrap().address();
    assert_eq!(overwritten(&first.exec, &s, OutputCheck::FirstOfPair), [at]);
    assert_eq!(overwritten(&first.exec, &s, OutputCheck::FirstOfPair), []);
    // The other one's own output is no surprise, and it touches nothing of the first one's.
    assert_eq!(overwritten(&second.exec, &s, OutputCheck::FirstOfPair), []);
    // A third one makes new pairs.
    let third = captured(&lab, &s, Some(first.graph.pools()[0]), 30);
    let expected: Vec<_> = [&second, &third]
        .map(|c| c.out.as_ref().unwrap())
        .into_iter()
        .filter(|out| {
            first.graph.report().pools[0]
                .written
                .iter()
                .any(|w| w.intersection(Range { address: out.address(), bytes: out.bytes() }).is_some())
        })
        .map(Block::address)
        .collect();
    assert_eq!(overwritten(&first.exec, &s, OutputCheck::FirstOfPair), expected);
    lab.wait(&s);
    drop((first, second, third));
    lab.device.take_reports();
    lab.close();
}

#[test]
fn held_outputs_are_reported_always_where_asked_refused_where_asked_and_not_looked_for_where_asked() {
    let lab = Lab::new(Scheduler::InOrder);
    let s = lab.stream();
    let (first, mut second) = clobbering(&lab, &s);
    let out = second.out.as_ref().unwrap();
    let at = out.address();
    assert_eq!(overwritten(&first.exec, &s, OutputCheck::Off), []);
    let refuse = LaunchOptions::new().with_outputs(OutputCheck::Refuse);
    for _ in 0..2 {
        // Refused again and again, and nothing was submitted.
        let before = lab.device.calls(gpupool_device::Call::GraphLaunch);
        match first.exec.launch_with(&s, refuse) {
            Err(LaunchError::WouldOverwrite { count: 1, first }) => assert_eq!(first.address, at),
            other => panic!("{other:?}"),
        }
        assert_eq!(lab.device.calls(gpupool_device::Call::GraphLaunch), before);
    }
    for _ in 0..3 {
        assert_eq!(overwritten(&first.exec, &s, OutputCheck::Always), [at], "always");
    }
    // What is let go is no longer looked after.
    second.out = None;
    assert_eq!(overwritten(&first.exec, &s, OutputCheck::Always), []);
    first.exec.launch_with(&s, refuse).unwrap();
    lab.wait(&s);
    assert!(lab.device.take_reports().iter().all(|r| r.kind == ReportKind::StaleOwner), "the device saw it too");
    drop((first, second));
    lab.close();
}

#[test]
fn a_launch_that_was_refused_does_not_use_up_the_report() {
    let lab = Lab::new(Scheduler::Adversarial);
    let (s, other) = (lab.stream(), lab.stream());
    let (first, second) = clobbering(&lab, &s);
    let at = second.out.as_ref().unwrap().address();
    second.exec.launch(&s).unwrap();
    let refuse = LaunchOptions::new().with_sharing(Sharing::Refuse);
    assert!(matches!(first.exec.launch_with(&other, refuse), Err(LaunchError::PoolInUse { .. })));
    lab.device.fail_nth(gpupool_device::Call::GraphLaunch, 1, code::UNKNOWN);
    assert!(matches!(first.exec.launch(&s), Err(LaunchError::Driver(_))));
    assert_eq!(overwritten(&first.exec, &s, OutputCheck::FirstOfPair), [at]);
    lab.wait(&s);
    drop((first, second));
    lab.device.take_reports();
    lab.close();
}

#[test]
fn a_graphs_own_outputs_of_its_last_run_are_its_own_to_overwrite() {
    let lab = Lab::new(Scheduler::InOrder);
    let s = lab.stream();
    let first = captured(&lab, &s, None, 10);
    for check in [OutputCheck::FirstOfPair, OutputCheck::Always, OutputCheck::Refuse] {
        assert_eq!(overwritten(&first.exec, &s, check), []);
    }
    lab.wait(&s);
    drop(first);
    lab.close();
}

#[test]
fn declared_inputs_must_be_the_same_live_block() {
    let lab = Lab::new(Scheduler::InOrder);
    let s = lab.stream();
    let input = lab.block(EAGER, BYTES, &s);
    let range = Range { address: input.address(), bytes: input.allocation().size() };
    let (graph, exec, out) = lab.capture(&s, CaptureOptions::new(), || {
        let out = lab.block(10, BYTES, &s);
        lab.copy(&s, &out, &input);
        out
    });
    graph.declare_input(input.allocation());
    let with = |check| LaunchOptions::new().with_inputs(check);
    for check in [InputCheck::FirstLaunch, InputCheck::Always, InputCheck::Off] {
        exec.launch_with(&s, with(check)).unwrap();
    }
    lab.wait(&s);
    drop(input);
    let gone = |result: Result<_, LaunchError>| match result {
        Err(LaunchError::InputGone { range: r }) => assert_eq!(r, range),
        other => panic!("{other:?}"),
    };
    gone(exec.launch_with(&s, with(InputCheck::Always)).map(drop));
    // Another block at the same place is another block.
    let another = lab.block(EAGER, BYTES, &s);
    assert_eq!(another.address(), range.address);
    gone(exec.launch_with(&s, with(InputCheck::Always)).map(drop));
    // A second executable checks for itself.
    let second = graph.instantiate(Default::default()).unwrap();
    gone(second.launch(&s).map(drop));
    second.launch_with(&s, with(InputCheck::Off)).unwrap();
    lab.wait(&s);
    drop((graph, exec, second, out, another));
    lab.close();
}

#[test]
fn a_retained_block_lives_as_long_as_its_graph_and_its_last_launch() {
    let lab = Lab::new(Scheduler::Adversarial);
    let (s, replays) = (lab.stream(), lab.stream());
    let input = lab.block(EAGER, 4 * MIB, &s);
    lab.fill(&s, &input, 3);
    let (graph, exec, out) = lab.capture(&s, CaptureOptions::new(), || {
        let out = lab.block(10, 4 * MIB, &s);
        lab.copy(&s, &out, &input);
        out
    });
    let at = input.address();
    graph.retain(input.into_allocation());
    lab.order(&s, &replays);
    let gate = lab.device.gate_create().unwrap();
    lab.device.launch(replays.handle(), Kernel::Wait { gate }).unwrap();
    exec.launch(&replays).unwrap();
    drop((graph, exec));
    // The launch is not over: nobody gets the block.
    let eager: Vec<_> = (0..6).map(|_| lab.block(EAGER, 4 * MIB, &s)).collect();
    assert!(eager.iter().all(|b| b.address() != at));
    lab.allocator.trim().unwrap();
    assert_eq!(lab.captures.queued(), 1);
    lab.device.gate_open(gate).unwrap();
    lab.wait(&replays);
    assert_eq!(lab.word(&out), Some(3));
    assert!(lab.captures.tidy());
    assert_eq!(lab.captures.queued(), 0);
    let eager_at: Vec<_> = (0..2).map(|_| lab.block(EAGER, 4 * MIB, &s)).map(|b| b.address()).collect();
    assert!(eager_at.contains(&at), "given up with the last launch");
    lab.device.disown(at, 4 * MIB);
    drop((eager, out));
    lab.close();
}

#[test]
fn a_launch_on_a_capturing_stream_is_an_error_and_that_capture_survives() {
    let lab = Lab::new(Scheduler::Adversarial);
    let (a, b) = (lab.stream(), lab.stream());
    let first = captured(&lab, &a, None, 10);
    let second = captured(&lab, &a, Some(first.graph.pools()[0]), 20);
    // Something of the pool runs elsewhere, so that a launch would have to wait for it.
    first.exec.launch(&a).unwrap();
    let capture = lab.begin(&b, CaptureOptions::new());
    let refused = second.exec.launch(&b).unwrap_err();
    assert!(!refused.to_string().is_empty());
    let block = lab.block(30, BYTES, &b);
    lab.fill(&b, &block, 1);
    drop(block);
    let graph = capture.end().expect("the capture survives");
    assert_eq!(graph.report().node_count(), 1);
    second.exec.launch(&b).unwrap();
    lab.device.run_until_idle();
    drop((first, second, graph));
    lab.close();
}

#[test]
fn a_launch_that_must_follow_one_on_a_stream_that_captures_now_says_so() {
    let lab = Lab::new(Scheduler::Adversarial);
    let (a, b) = (lab.stream(), lab.stream());
    let first = captured(&lab, &a, None, 10);
    let second = captured(&lab, &a, Some(first.graph.pools()[0]), 20);
    first.exec.launch(&a).unwrap();
    let capture = lab.begin(&a, CaptureOptions::new());
    match second.exec.launch(&b) {
        Err(LaunchError::CannotOrder { running, stream }) => assert_eq!((running, stream), (first.graph.id(), a.id())),
        other => panic!("{other:?}"),
    }
    let block = lab.block(30, BYTES, &a);
    lab.fill(&a, &block, 1);
    drop(block);
    drop(capture.end().expect("the capture survives"));
    assert!(second.exec.launch(&b).unwrap().waits);
    lab.device.run_until_idle();
    drop((first, second));
    lab.close();
}

#[test]
fn a_launch_that_the_driver_refuses_leaves_no_trace() {
    let lab = Lab::new(Scheduler::Adversarial);
    let (a, b) = (lab.stream(), lab.stream());
    let first = captured(&lab, &a, None, 10);
    let second = captured(&lab, &a, Some(first.graph.pools()[0]), 20);
    let (calls, _) = lab.calls_of(|| {
        first.exec.launch(&a).unwrap();
        second.exec.launch(&b).unwrap();
    });
    lab.device.run_until_idle();
    for (&call, &count) in &calls {
        for nth in 1..=count {
            lab.device.fail_nth(call, nth, code::UNKNOWN);
            let launched = [first.exec.launch(&a).map(drop), second.exec.launch(&b).map(drop)];
            lab.device.clear_faults();
            lab.device.run_until_idle();
            lab.assert_clean();
            assert!(launched.iter().filter(|l| l.is_err()).count() <= 1);
            // A launch that failed ordered nothing wrongly: the next ones are right.
            assert!(first.exec.launch(&b).is_ok() && second.exec.launch(&a).is_ok());
            lab.device.run_until_idle();
        }
    }
    assert_eq!([&first, &second].map(|c| lab.word(c.out.as_ref().unwrap())), [Some(10), Some(20)]);
    drop((first, second));
    lab.close();
}

#[test]
fn a_retired_stream_takes_no_launch_and_no_capture() {
    let lab = Lab::new(Scheduler::Adversarial);
    let (a, gone) = (lab.stream(), lab.stream());
    let first = captured(&lab, &a, None, 10);
    lab.allocator.retire_stream(&gone).unwrap();
    let launched = first.exec.launch(&gone).map(drop);
    assert!(matches!(launched, Err(gpupool_graph_capture::LaunchError::RetiredStream { .. })), "{launched:?}");
    assert!(lab.captures.begin(&gone, gpupool_graph_capture::CaptureOptions::new()).is_err());
    drop(first);
    lab.close();
}

#[test]
fn a_capturing_stream_cannot_be_retired_and_its_capture_survives() {
    let lab = Lab::new(Scheduler::Adversarial);
    let a = lab.stream();
    drop(lab.block(1, 30 << 20, &a));
    let capture = lab.begin(&a, gpupool_graph_capture::CaptureOptions::new());
    assert!(lab.allocator.retire_stream(&a).is_err());
    drop(capture.end().expect("the capture survives"));
    lab.allocator.retire_stream(&a).unwrap();
    lab.close();
}

#[test]
fn requests_outside_a_capture_are_those_of_its_own_guard_whatever_the_order_of_closing() {
    let lab = Lab::new(Scheduler::Adversarial);
    let (a, b) = (lab.stream(), lab.stream());
    let one = lab.begin(&a, gpupool_graph_capture::CaptureOptions::new());
    let other = lab.begin(&b, gpupool_graph_capture::CaptureOptions::new());
    let outside = (one.outside().unwrap(), other.outside().unwrap());
    drop(outside.0);
    let block = lab.block(1, 4096, &a);
    assert!(
        lab.pool_bytes(one.pool()) > 0 && lab.pool_bytes(other.pool()) == 0,
        "the first capture draws from its own pool again"
    );
    drop((block, outside.1));
    drop((one.end().unwrap(), other.end().unwrap()));
    lab.device.run_until_idle();
    lab.close();
}

#[test]
fn the_pool_of_a_graph_is_its_captures_own_whatever_other_it_touched() {
    let lab = Lab::new(Scheduler::InOrder);
    let a = lab.stream();
    let inner = PoolId::fresh();
    let capture = lab.begin(&a, CaptureOptions::new());
    let own = capture.pool();
    assert!(inner < own, "the other pool is the first in order");
    let scope = lab.allocator.begin_allocate_inside(capture.id(), inner, gpupool_allocator::Filter::All).unwrap();
    drop(lab.block(1, 4 * KIB, &a));
    assert!(lab.allocator.close_scope(scope));
    lab.allocator.release_pool(inner).unwrap();
    drop(lab.block(1, 4 * KIB, &a));
    let graph = capture.end().unwrap();
    assert_eq!((graph.pool(), graph.pools()), (own, vec![inner, own]));
    let next = lab.begin(&a, CaptureOptions::new().with_pool_of(&graph));
    assert_eq!(next.pool(), own);
    drop((next.end().unwrap(), graph));
    lab.close();
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Reader {
    /// The stream that the output's graph was launched on.
    OwnStream,
    /// Another one, recorded until the block is freed.
    Recorded,
    /// Another one, whose last use was told.
    LastUse,
}

#[test]
fn a_launch_waits_for_work_that_still_reads_a_freed_output_where_it_writes() {
    for reader in [Reader::OwnStream, Reader::Recorded, Reader::LastUse] {
        for sharing in [Sharing::Serialize, Sharing::Refuse] {
            let lab = Lab::new(Scheduler::Adversarial);
            let (s, other, launching) = (lab.stream(), lab.stream(), lab.stream());
            let copied = lab.block(EAGER, BYTES, &s);
            let block = || lab.block(10, BYTES, &s);
            let (g1, e1, ()) = lab.capture(&s, CaptureOptions::new(), || lab.fill(&s, &block(), 1));
            let (g2, e2, y) = lab.capture(&s, CaptureOptions::new().with_pool_of(&g1), || {
                let y = block();
                lab.fill(&s, &y, 2);
                y
            });
            assert_eq!(g1.overlap(&g2).len(), 1);
            e2.launch(&s).unwrap().done.wait().unwrap();
            let reading = if reader == Reader::OwnStream { &s } else { &other };
            let gate = lab.device.gate_create().unwrap();
            lab.device.launch(reading.handle(), Kernel::Wait { gate }).unwrap();
            lab.copy(reading, &copied, &y);
            match reader {
                Reader::OwnStream => {}
                Reader::Recorded => y.record(reading),
                Reader::LastUse => y.allocation().record_last_use(&reading.mark_work().unwrap()).unwrap(),
            }
            drop(y);
            let checked = LaunchOptions::new().with_outputs(OutputCheck::Refuse).with_sharing(sharing);
            let launched = e1.launch_with(&launching, checked).unwrap();
            assert!(launched.waits, "{reader:?}");
            // The reader has not run yet, and the launch does not run before it.
            while lab.device.step() {}
            assert!(!launched.done.poll().unwrap());
            lab.device.gate_open(gate).unwrap();
            lab.device.run_until_idle();
            assert_eq!(lab.word(&copied), Some(2), "{reader:?}");
            // Once that is over nothing waits.
            assert!(!e1.launch(&launching).unwrap().waits);
            lab.device.run_until_idle();
            drop((g1, e1, g2, e2, copied, launched));
            lab.close();
        }
    }
}

#[test]
fn a_launch_that_cannot_be_ordered_after_such_work_is_refused() {
    let lab = Lab::new(Scheduler::InOrder);
    let (s, launching) = (lab.stream(), lab.stream());
    let (g1, e1, y) = lab.capture(&s, CaptureOptions::new(), || {
        let y = lab.block(10, BYTES, &s);
        lab.fill(&s, &y, 2);
        y
    });
    lab.fill(&s, &y, 3);
    drop(y);
    let capture = lab.begin(&s, CaptureOptions::new());
    match e1.launch(&launching) {
        Err(LaunchError::StillUsed { pool, stream }) => assert_eq!((pool, stream), (g1.pool(), s.id())),
        other => panic!("{other:?}"),
    }
    drop(capture.end().unwrap());
    assert!(e1.launch(&launching).unwrap().waits);
    lab.device.run_until_idle();
    drop((g1, e1));
    lab.close();
}
