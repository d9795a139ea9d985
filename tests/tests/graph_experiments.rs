//! Experiment G, 1 to 7: what private pools for graphs promise, each point under in-order, adversarial and a thousand random schedules,
//! with the race detector on and the contents checked. Programs that do without the checks must be found to be wrong.

use gpupool_allocator::{AllocError, PoolError, Stream};
use gpupool_device::{Call, Workbench};
use gpupool_graph_capture::{
    CaptureOptions, Executable, Graph, InputCheck, LaunchError, LaunchOptions, OutputCheck, Sharing, StaleInput,
};
use gpupool_sim_device::{ReportKind, Scheduler, SimDevice};
use gpupool_tests::graph_bench::{Block, Dice, EAGER, KIB, Lab, MIB, Named, schedules, under_every_schedule};

/// Random schedules, as many as the experiments ask for.
const SEEDS: u64 = 1_000;

/// A graph that writes `value` + 2 to its output by way of temporaries that share memory with nobody while it runs.
fn mixer(
    lab: &Lab,
    stream: &Stream<SimDevice>,
    options: CaptureOptions,
    party: u64,
    value: u32,
) -> (Graph<SimDevice>, Executable<SimDevice>, Block) {
    lab.capture(stream, options, || {
        let t = lab.block(party, 16 * KIB, stream);
        lab.fill(stream, &t, value);
        lab.add(stream, &t, 1);
        let u = lab.block(party, 8 * KIB, stream);
        lab.copy(stream, &u, &t);
        drop(t);
        // Where `t` was.
        let v = lab.block(party, 16 * KIB, stream);
        lab.fill(stream, &v, value + 1000);
        lab.add(stream, &u, 1);
        let out = lab.block(party, 4 * KIB, stream);
        lab.copy(stream, &out, &u);
        out
    })
}

/// Two graphs, the second of which works on what the first one put out.
struct Successive {
    first: Stream<SimDevice>,
    second: Stream<SimDevice>,
    graphs: [Graph<SimDevice>; 2],
    execs: [Executable<SimDevice>; 2],
    input: Block,
    between: Block,
    result: Block,
}

impl Successive {
    fn new(lab: &Lab, shared: bool) -> Self {
        let (first, second) = (lab.stream(), lab.stream());
        let input = lab.block(EAGER, 4 * KIB, &first);
        let step = |stream: &Stream<SimDevice>, options, party, from: &Block, plus| {
            lab.capture(stream, options, || {
                // Large enough for a segment of its own.
                let temp = lab.block(party, 12 * MIB, stream);
                lab.fill(stream, &temp, 7);
                lab.copy(stream, &temp, from);
                lab.add(stream, &temp, plus);
                let out = lab.block(party, 4 * KIB, stream);
                lab.copy(stream, &out, &temp);
                out
            })
        };
        let (g0, e0, between) = step(&first, CaptureOptions::new(), 10, &input, 1);
        let options = if shared { CaptureOptions::new().with_pool_of(&g0) } else { CaptureOptions::new() };
        let (g1, e1, result) = step(&second, options, 20, &between, 10);
        Self { first, second, graphs: [g0, g1], execs: [e0, e1], input, between, result }
    }
}

/// G1.
#[test]
fn g1_a_second_graph_uses_the_firsts_result_with_and_without_a_shared_pool() {
    under_every_schedule(SEEDS, |schedule| {
        let reserved = [false, true].map(|shared| {
            let lab = Lab::new(schedule.scheduler);
            let s = Successive::new(&lab, shared);
            let mut dice = Dice::new(schedule.seed);
            for _ in 0..2 {
                let value = dice.below(1000) as u32;
                lab.fill(&s.first, &s.input, value);
                s.execs[0].launch(&s.first).unwrap();
                if !shared {
                    // Nothing but the program says that the second needs the first.
                    lab.order(&s.first, &s.second);
                }
                let launched = s.execs[1].launch(&s.second).unwrap();
                assert_eq!(launched.waits, shared, "a shared pool orders its launches by itself");
                lab.wait(&s.second);
                assert_eq!(lab.word(&s.result), Some(value + 11));
                assert_eq!(lab.word(&s.between), Some(value + 1));
            }
            lab.assert_clean();
            let reserved = lab.reserved();
            assert_eq!(s.graphs[0].pools() == s.graphs[1].pools(), shared);
            drop(s);
            lab.close();
            reserved
        });
        // A temporary's segment each, and a small one for the outputs, against one of each; and the input's.
        assert_eq!(reserved, [(12 + 2) * 2 * MIB + 2 * MIB, (12 + 2) * MIB + 2 * MIB]);
    });
}

/// G1 without the checks: nothing orders the second graph after the first, and that is found whatever the schedule.
#[test]
fn g1_unchecked_and_unordered_is_found() {
    let mut wrong = 0;
    for schedule in schedules(SEEDS / 4) {
        let _named = Named(schedule);
        let lab = Lab::new(schedule.scheduler);
        let s = Successive::new(&lab, true);
        let unchecked = LaunchOptions::new().with_sharing(Sharing::Unchecked);
        lab.fill(&s.first, &s.input, 5);
        assert!(!s.execs[0].launch_with(&s.first, unchecked).unwrap().waits);
        assert!(!s.execs[1].launch_with(&s.second, unchecked).unwrap().waits);
        lab.device.run_until_idle();
        assert!(lab.device.reports().iter().any(|r| r.kind == ReportKind::Race));
        wrong += usize::from(lab.word(&s.result) != Some(16));
    }
    assert!(wrong > 0, "the contents never showed it");
}

/// Two graphs, captured with separate pools or with one, that are launched twice each on two streams with nothing between.
fn concurrent(lab: &Lab, shared: bool, options: LaunchOptions) -> ([Option<u32>; 2], u32) {
    let streams = [lab.stream(), lab.stream()];
    let (g0, e0, out0) = mixer(lab, &streams[0], CaptureOptions::new(), 10, 100);
    let second = if shared { CaptureOptions::new().with_pool_of(&g0) } else { CaptureOptions::new() };
    let (g1, e1, out1) = mixer(lab, &streams[0], second, 20, 200);
    assert_eq!(g0.overlap(&g1).is_empty(), !shared);
    let mut waits = 0;
    for _ in 0..2 {
        waits += u32::from(e0.launch_with(&streams[0], options).unwrap().waits);
        waits += u32::from(e1.launch_with(&streams[1], options).unwrap().waits);
    }
    lab.device.run_until_idle();
    ([lab.word(&out0), lab.word(&out1)], waits)
}

/// G2, the first part.
#[test]
fn g2_graphs_with_separate_pools_run_concurrently_and_never_corrupt() {
    under_every_schedule(SEEDS, |schedule| {
        let lab = Lab::new(schedule.scheduler);
        let (words, waits) = concurrent(&lab, false, LaunchOptions::new());
        assert_eq!((words, waits), ([Some(102), Some(202)], 0));
        lab.close();
    });
}

/// G2, the second part: our default.
#[test]
fn g2_graphs_that_share_a_pool_are_serialised() {
    under_every_schedule(SEEDS, |schedule| {
        let lab = Lab::new(schedule.scheduler);
        let (words, waits) = concurrent(&lab, true, LaunchOptions::new());
        assert_eq!((words, waits), ([Some(102), Some(202)], 3), "every launch but the first waits for the one before");
        lab.close();
    });
}

/// G2, unchecked: the race detector finds it under every schedule, and the contents under many.
#[test]
fn g2_graphs_that_share_a_pool_and_run_unchecked_are_found_to_corrupt() {
    let mut wrong = 0;
    for schedule in schedules(SEEDS) {
        let _named = Named(schedule);
        let lab = Lab::new(schedule.scheduler);
        let (words, waits) = concurrent(&lab, true, LaunchOptions::new().with_sharing(Sharing::Unchecked));
        assert_eq!(waits, 0);
        let reports = lab.device.reports();
        assert!(reports.iter().any(|r| r.kind == ReportKind::Race && r.access.graph.is_some()), "{reports:?}");
        wrong += usize::from(words != [Some(102), Some(202)]);
    }
    assert!(wrong > 100, "the contents were wrong {wrong} times");
}

/// G2, refused.
#[test]
fn g2_graphs_that_share_a_pool_are_refused_while_one_runs() {
    under_every_schedule(SEEDS, |schedule| {
        let lab = Lab::new(schedule.scheduler);
        let streams = [lab.stream(), lab.stream()];
        let (g0, e0, out0) = mixer(&lab, &streams[0], CaptureOptions::new(), 10, 100);
        let (g1, e1, out1) = mixer(&lab, &streams[0], CaptureOptions::new().with_pool_of(&g0), 20, 200);
        let refuse = LaunchOptions::new().with_sharing(Sharing::Refuse);
        let gate = lab.device.gate_create().unwrap();
        lab.device.launch(streams[0].handle(), gpupool_device::Kernel::Wait { gate }).unwrap();
        e0.launch_with(&streams[0], refuse).unwrap();
        match e1.launch_with(&streams[1], refuse) {
            Err(LaunchError::PoolInUse { pool, running, stream }) => {
                assert_eq!((pool, running, stream), (g0.pools()[0], g0.id(), streams[0].id()));
            }
            other => panic!("{other:?}"),
        }
        lab.device.gate_open(gate).unwrap();
        lab.wait(&streams[0]);
        e1.launch_with(&streams[1], refuse).unwrap();
        lab.device.run_until_idle();
        assert_eq!([lab.word(&out0), lab.word(&out1)], [Some(102), Some(202)]);
        drop((g0, e0, out0, g1, e1, out1));
        lab.close();
    });
}

/// Three graphs: the second reads `c` of the first and lets it go inside its capture, the third puts its output where `c` was.
struct Three {
    stream: Stream<SimDevice>,
    graphs: Vec<Graph<SimDevice>>,
    execs: Vec<Executable<SimDevice>>,
    outputs: [Block; 2],
    /// What the launches reported of their inputs.
    stale: std::cell::RefCell<Vec<StaleInput>>,
    _kept: [Block; 3],
}

/// What the program does about `c`, which the second graph reads at every run.
#[derive(Clone, Copy, PartialEq)]
enum Keeping {
    Nothing,
    Declared,
    Retained,
}

impl Three {
    fn new(lab: &Lab, shared: bool, keeping: Keeping) -> Self {
        let s = lab.stream();
        let a = lab.block(EAGER, 4 * KIB, &s);
        lab.fill(&s, &a, 1);
        let block = || lab.block(10, 4 * KIB, &s);
        let (g0, e0, (b, c, d)) = lab.capture(&s, CaptureOptions::new(), || {
            let (b, c, d) = (block(), block(), block());
            lab.copy(&s, &b, &a);
            lab.copy(&s, &c, &b);
            lab.add(&s, &c, 1);
            lab.copy(&s, &d, &b);
            lab.add(&s, &d, 2);
            (b, c, d)
        });
        let options = || if shared { CaptureOptions::new().with_pool_of(&g0) } else { CaptureOptions::new() };
        let c_at = c.address();
        let capture = lab.begin(&s, options());
        let e = block();
        lab.copy(&s, &e, &c);
        lab.add(&s, &e, 3);
        let c = Some(c).filter(|_| keeping != Keeping::Nothing);
        let g1 = capture.end().unwrap();
        match (keeping, c) {
            (Keeping::Declared, Some(c)) => g1.declare_input(c.allocation()),
            (Keeping::Retained, Some(c)) => g1.retain(c.into_allocation()),
            _ => {}
        }
        let e1 = g1.instantiate(Default::default()).unwrap();
        let (g2, e2, f) = lab.capture(&s, options(), || {
            let f = block();
            lab.copy(&s, &f, &d);
            lab.add(&s, &f, 4);
            f
        });
        assert_eq!(f.address() == c_at, shared && keeping != Keeping::Retained);
        assert_eq!(g0.overlap(&g2).len(), usize::from(shared && keeping != Keeping::Retained));
        Self {
            stream: s,
            graphs: vec![g0, g1, g2],
            execs: vec![e0, e1, e2],
            outputs: [e, f],
            stale: Default::default(),
            _kept: [a, b, d],
        }
    }

    fn launch(&self, lab: &Lab, order: [usize; 3], options: LaunchOptions) -> Result<[Option<u32>; 2], LaunchError> {
        for at in order {
            self.stale.borrow_mut().extend(self.execs[at].launch_with(&self.stream, options)?.stale);
        }
        lab.wait(&self.stream);
        Ok([lab.word(&self.outputs[0]), lab.word(&self.outputs[1])])
    }
}

const SAFE: [usize; 3] = [0, 1, 2];
const UNSAFE: [usize; 3] = [0, 2, 1];

/// G3.
#[test]
fn g3_three_graphs_in_succession_are_right_in_the_safe_order_and_the_unsafe_one_is_reported() {
    under_every_schedule(SEEDS, |schedule| {
        let right = [Some(5), Some(7)];
        let unchecked = LaunchOptions::new().with_outputs(OutputCheck::Off).with_inputs(InputCheck::Off);
        for order in [SAFE, UNSAFE] {
            // With separate pools, or with what a graph reads kept for it, any order is right.
            for (shared, keeping) in [(false, Keeping::Nothing), (true, Keeping::Retained)] {
                let lab = Lab::new(schedule.scheduler);
                let three = Three::new(&lab, shared, keeping);
                assert_eq!(three.launch(&lab, order, LaunchOptions::new()).unwrap(), right);
                assert_eq!(*three.stale.borrow(), [], "nothing to report");
                drop(three);
                lab.close();
            }
            // Unchecked: right in the safe order only.
            let lab = Lab::new(schedule.scheduler);
            let three = Three::new(&lab, true, Keeping::Nothing);
            let words = three.launch(&lab, order, unchecked).unwrap();
            assert_eq!(words == right, order == SAFE, "{words:?}");
            // By default the unsafe order is reported, by the launch that reads what is no longer there.
            let lab = Lab::new(schedule.scheduler);
            let three = Three::new(&lab, true, Keeping::Nothing);
            assert_eq!(three.launch(&lab, order, LaunchOptions::new()).unwrap() == right, order == SAFE);
            let stale: Vec<_> =
                three.stale.borrow().iter().map(|s| (s.range.address, s.made_by, s.written_by)).collect();
            let [g0, _, g2] = [0, 1, 2].map(|at| three.graphs[at].id());
            assert_eq!(stale, if order == SAFE { vec![] } else { vec![(three.outputs[1].address(), g0, g2)] });
            // In the safe order it is right again, and not reported.
            three.stale.borrow_mut().clear();
            assert_eq!(three.launch(&lab, SAFE, LaunchOptions::new()).unwrap(), right);
            assert_eq!(*three.stale.borrow(), []);
            // It is told each time that it comes about, and not for each launch.
            three.execs[1].launch(&three.stream).unwrap();
            assert_eq!(three.execs[1].launch(&three.stream).unwrap().stale, []);
            let always = LaunchOptions::new().with_inputs(InputCheck::Always);
            assert_eq!(three.execs[1].launch_with(&three.stream, always).unwrap().stale.len(), 1);
            drop(three);
            lab.close();
            // Unchecked.
            let lab = Lab::new(schedule.scheduler);
            let three = Three::new(&lab, true, Keeping::Nothing);
            three.launch(&lab, order, unchecked).unwrap();
            // Checked: that the first one's runs destroy what the third one left is told at the first launch of the pair.
            let first = three.execs[0].launch(&three.stream).unwrap();
            let at: Vec<_> = first.overwrites.iter().map(|o| o.block.range.address).collect();
            assert_eq!(at, [three.outputs[1].address()]);
            assert!(three.execs[0].launch(&three.stream).unwrap().overwrites.is_empty(), "once a pair");
            drop(three);
            lab.close();
            // Declared: the second graph is not launched once its input is gone.
            let lab = Lab::new(schedule.scheduler);
            let three = Three::new(&lab, true, Keeping::Declared);
            let options = LaunchOptions::new().with_inputs(InputCheck::Always);
            assert!(matches!(three.launch(&lab, order, options), Err(LaunchError::InputGone { .. })));
            assert_eq!(three.graphs.len(), 3);
            drop(three);
            lab.close();
        }
    });
}

/// G4.
#[test]
fn g4_statistics_change_exactly_and_a_result_outlives_its_graph() {
    under_every_schedule(SEEDS, |schedule| {
        for (bytes, segment, pinned) in
            [(64 * KIB, 2 * MIB, true), (4 * MIB, 20 * MIB, true), (12 * MIB, 12 * MIB, false)]
        {
            let lab = Lab::new(schedule.scheduler);
            let s = lab.stream();
            // Allocated blocks, their bytes, segments, their bytes, segments ever taken and given back.
            let figures = || {
                let stats = lab.allocator.stats();
                let (blocks, allocated) = (stats.allocation.all.current, stats.allocated_bytes.all.current);
                let (segments, reserved) = (stats.segment.all.current, stats.reserved_bytes.all.current);
                (blocks, allocated as u64, segments, reserved as u64, stats.num_device_alloc, stats.num_device_free)
            };
            assert_eq!(figures(), (0, 0, 0, 0, 0, 0));
            let capture = lab.begin(&s, CaptureOptions::new());
            let pool = capture.pool();
            let pool_figures = || {
                let stats = lab.allocator.pool_stats(pool).unwrap();
                (stats.allocated_bytes.all.current as u64, stats.reserved_bytes.all.current as u64)
            };
            assert_eq!((figures(), pool_figures()), ((0, 0, 0, 0, 0, 0), (0, 0)), "a begin takes nothing");
            let temp = lab.block(10, bytes, &s);
            lab.fill(&s, &temp, 3);
            assert_eq!((figures(), pool_figures()), ((1, bytes, 1, segment, 1, 0), (bytes, segment)));
            drop(temp);
            assert_eq!((figures(), pool_figures()), ((0, 0, 1, segment, 1, 0), (0, segment)));
            let out = lab.block(10, bytes, &s);
            lab.fill(&s, &out, 9);
            let other = lab.block(10, bytes, &s);
            lab.fill(&s, &other, 1);
            drop(other);
            // A segment made for one request holds no second block.
            let two = if pinned { 1 } else { 2 };
            let held = (1, bytes, two, two as u64 * segment, two, 0);
            assert_eq!((figures(), pool_figures()), (held, (bytes, two as u64 * segment)));
            let graph = capture.end().unwrap();
            let report = &graph.report().pools[0];
            assert_eq!((report.new_segment_bytes, report.reused_bytes), (two as u64 * segment, 0));
            assert_eq!((report.peak_bytes, report.written_bytes()), (2 * bytes, 2 * bytes));
            assert_eq!(report.outputs.iter().map(|o| o.range.address).collect::<Vec<_>>(), [out.address()]);
            let exec = graph.instantiate(Default::default()).unwrap();
            exec.launch(&s).unwrap();
            assert_eq!((figures(), pool_figures()), (held, (bytes, two as u64 * segment)), "neither does a launch");
            assert_eq!(lab.allocator.trim().unwrap().released_bytes, 0);
            drop((graph, exec));
            assert_eq!(figures(), held, "what is dropped while it runs stays");
            lab.wait(&s);
            let trimmed = lab.allocator.empty_cache().unwrap();
            let kept = (1, bytes, 1, segment, two, two - 1);
            assert_eq!((figures(), trimmed.released_segments as i64), (kept, two - 1));
            assert_eq!(pool_figures(), (bytes, segment));
            // Work that comes and goes leaves the result alone.
            for value in 0..4 {
                let eager = lab.block(EAGER, bytes, &s);
                lab.fill(&s, &eager, value);
            }
            lab.wait(&s);
            assert_eq!(lab.word(&out), Some(9));
            assert_eq!(lab.captures.orphans().iter().map(|o| o.range.address).collect::<Vec<_>>(), [out.address()]);
            lab.allocator.empty_cache().unwrap();
            drop(out);
            assert_eq!(pool_figures(), (0, segment));
            lab.allocator.empty_cache().unwrap();
            let stats = figures();
            assert_eq!((stats.0, stats.1, stats.2, stats.3), (0, 0, 0, 0));
            assert_eq!(stats.4, stats.5);
            assert!(matches!(lab.allocator.pool_stats(pool), Err(AllocError::Pool(PoolError::Unknown { .. }))));
            lab.close();
        }
    });
}

/// How G5 captures: with private pools, or as an allocator without them would.
#[derive(Clone, Copy, PartialEq)]
enum Temporaries {
    InThePool,
    InDefaultMemory,
}

/// A graph of G5: its output is its input plus something, by way of a temporary that nobody holds.
struct Step {
    exec: Executable<SimDevice>,
    input: Block,
    out: Block,
    plus: u32,
    runs_on: Stream<SimDevice>,
}

/// Eager work and replays in a drawn order. Nothing is held by hand: what is eager is dropped as soon as it was submitted.
fn interleaved(lab: &Lab, seed: u64, temporaries: Temporaries) -> Result<(), String> {
    let mut dice = Dice::new(seed);
    let eager = [lab.stream(), lab.stream()];
    let (capturing, replaying) = (lab.stream(), [lab.stream(), lab.stream()]);
    let mut steps: Vec<Step> = Vec::new();
    for party in 10..13 {
        let plus = party as u32 * 100;
        let capture = lab.begin(&capturing, CaptureOptions::new());
        let input = lab.block(party, 4 * KIB, &capturing);
        let scope = (temporaries == Temporaries::InDefaultMemory).then(|| capture.outside().unwrap());
        let temp = lab.block(party, 4 * KIB, &capturing);
        drop(scope);
        lab.copy(&capturing, &temp, &input);
        lab.add(&capturing, &temp, plus);
        let out = lab.block(party, 4 * KIB, &capturing);
        lab.copy(&capturing, &out, &temp);
        drop(temp);
        let exec = capture.end().unwrap().instantiate(Default::default()).unwrap();
        steps.push(Step { exec, input, out, plus, runs_on: dice.one_of(&replaying).clone() });
    }
    let mut results: Vec<(Block, u32)> = Vec::new();
    for _ in 0..10 {
        let stream = dice.one_of(&eager).clone();
        match dice.below(4) {
            // Work of no consequence, over memory that was freed a moment ago.
            0 => {
                let on = if dice.below(2) == 0 { &stream } else { &capturing };
                let scratch = lab.block(EAGER, 4 * KIB, &stream);
                lab.order(&stream, on);
                lab.fill(on, &scratch, 1);
                scratch.free_on(on);
            }
            1 => {
                if dice.below(3) == 0 {
                    lab.allocator.empty_cache().map_err(|e| e.to_string())?;
                } else {
                    lab.allocator.trim().map_err(|e| e.to_string())?;
                }
            }
            // An input is made, copied in, and dropped; the graph runs; its output is copied out.
            _ => {
                let step = dice.one_of(&steps);
                let value = dice.below(50) as u32;
                let fresh = lab.block(EAGER, 4 * KIB, &stream);
                lab.fill(&stream, &fresh, value);
                lab.order(&stream, &step.runs_on);
                lab.copy(&step.runs_on, &step.input, &fresh);
                fresh.free_on(&step.runs_on);
                step.exec.launch(&step.runs_on).map_err(|e| e.to_string())?;
                let result = lab.block(EAGER, 4 * KIB, &step.runs_on);
                lab.copy(&step.runs_on, &result, &step.out);
                results.push((result, value + step.plus));
                if results.len() > 3 {
                    // Gone before anything of it has run, perhaps.
                    drop(results.remove(0));
                }
            }
        }
    }
    lab.device.run_until_idle();
    for (result, expected) in &results {
        let found = lab.word(result);
        if found != Some(*expected) {
            return Err(format!("a result is {found:?}, not {expected}"));
        }
    }
    Ok(())
}

/// G5.
#[test]
fn g5_eager_work_and_replays_interleave_with_no_references_held_by_hand() {
    under_every_schedule(SEEDS, |schedule| {
        let lab = Lab::new(schedule.scheduler);
        interleaved(&lab, schedule.seed, Temporaries::InThePool).unwrap();
        lab.close();
    });
}

/// G5 as it goes without private pools: found by reports, and by contents too.
#[test]
fn g5_without_private_pools_is_found_to_corrupt() {
    let (mut reported, mut wrong, mut runs) = (0, 0, 0);
    for schedule in schedules(SEEDS) {
        let lab = Lab::new(schedule.scheduler);
        runs += 1;
        wrong += usize::from(interleaved(&lab, schedule.seed, Temporaries::InDefaultMemory).is_err());
        reported += usize::from(!lab.device.reports().is_empty());
    }
    assert!(reported > runs / 4 && wrong > 0, "{reported} of {runs} reported, {wrong} wrong");
}

/// G6, as far as calls can tell: no hit asks the driver anything however many pools live, and emptying the cache touches no pool that is
/// in use.
#[test]
fn g6_emptying_the_cache_walks_freeable_pools_only() {
    for live_pools in [1, 100] {
        let lab = Lab::new(Scheduler::InOrder);
        let s = lab.stream();
        let mut graphs: Vec<_> =
            (0..live_pools + 3).map(|_| mixer(&lab, &s, CaptureOptions::new(), 10, 1)).map(|(g, ..)| g).collect();
        let eager = lab.block(EAGER, 4 * KIB, &s);
        drop(eager);
        let (calls, _) = lab.calls_of(|| {
            for _ in 0..10 {
                drop(lab.block(EAGER, 4 * KIB, &s));
            }
        });
        assert_eq!(calls, Default::default(), "{live_pools} pools");
        graphs.truncate(live_pools);
        let (calls, trimmed) = lab.calls_of(|| lab.allocator.empty_cache().unwrap());
        assert_eq!(
            (trimmed.released_segments, trimmed.released_bytes),
            (3 + 1, 4 * 2 * MIB),
            "three pools and the eager one"
        );
        assert_eq!(trimmed.held_by_pools_bytes, live_pools as u64 * 2 * MIB);
        assert_eq!((calls[&Call::MemUnmap], calls[&Call::MemRelease]), (4, 4));
        drop(graphs);
        lab.close();
    }
}

/// G6, the second part: what a pool's id means after its last user is gone.
#[test]
fn g6_a_released_pool_revives_while_it_is_freeable_and_is_an_error_afterwards() {
    under_every_schedule(SEEDS, |schedule| {
        let lab = Lab::new(schedule.scheduler);
        let s = lab.stream();
        let (g, e, out) = mixer(&lab, &s, CaptureOptions::new(), 10, 1);
        let pool = g.pools()[0];
        e.launch(&s).unwrap();
        lab.wait(&s);
        drop((g, e));
        lab.captures.tidy();
        assert_eq!(lab.allocator.pool_use_count(pool).unwrap(), 0);
        // Revived: the same memory serves again.
        let (g, e, again) = mixer(&lab, &s, CaptureOptions::new().with_pool(pool), 20, 5);
        assert_eq!(g.report().pools[0].new_segment_bytes, 0);
        assert_eq!(lab.allocator.pool_use_count(pool).unwrap(), 1);
        e.launch(&s).unwrap();
        lab.wait(&s);
        assert_eq!([lab.word(&out), lab.word(&again)], [Some(3), Some(7)]);
        drop((g, e, out, again));
        lab.allocator.empty_cache().unwrap();
        // Gone for good.
        let refused = lab.captures.begin(&s, CaptureOptions::new().with_pool(pool)).unwrap_err().to_string();
        assert_eq!(refused, PoolError::Released { pool }.to_string());
        assert!(matches!(
            lab.allocator.create_pool(pool),
            Err(AllocError::Pool(PoolError::Released { pool: p })) if p == pool
        ));
        assert_ne!(mixer(&lab, &s, CaptureOptions::new(), 10, 1).0.pools()[0], pool);
        lab.close();
    });
}

/// G7.
#[test]
fn g7_outside_any_capture_an_allocation_asks_the_driver_nothing() {
    let lab = Lab::new(Scheduler::InOrder);
    let (s, other) = (lab.stream(), lab.stream());
    let (g, e, out) = mixer(&lab, &s, CaptureOptions::new(), 10, 1);
    e.launch(&s).unwrap();
    drop(lab.block(EAGER, 4 * KIB, &other));
    let hits = || {
        for _ in 0..100 {
            drop(lab.block(EAGER, 4 * KIB, &other));
        }
    };
    hits();
    assert_eq!(lab.calls_of(hits).0, Default::default(), "graphs and pools that live cost nothing");
    // A miss asks before it records an event (somebody else may be capturing the stream), and not otherwise.
    let (calls, miss) = lab.calls_of(|| lab.block(EAGER, 64 * MIB, &other));
    assert_eq!(calls.get(&Call::StreamGetCaptureInfo), calls.get(&Call::EventRecord), "{calls:?}");
    drop(miss);
    hits();
    // While a session is open, one query each; afterwards none.
    let capture = lab.begin(&s, CaptureOptions::new());
    assert_eq!(lab.calls_of(hits).0, [(Call::StreamGetCaptureInfo, 100)].into());
    drop(capture);
    assert_eq!(lab.calls_of(hits).0, Default::default());
    drop((g, e, out));
    lab.close();
}
