//! Faults that users report of the life of graph pools: catalogue entries 11 and 36 to 45 (48 is in `graph_devices`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use gpupool_allocator::{AllocError, Config, Filter, Part, Policy, PoolError, PoolId, Range, SegmentProvider, State};
use gpupool_device::{Address, Call, Kernel, StreamHandle, Workbench, code};
use gpupool_graph_capture::{CaptureOptions, Graph, InputCheck, LaunchOptions};
use gpupool_sim_device::{ForeignCall, ReportKind, Scheduler, SimConfig, SimDevice};
use gpupool_tests::graph_bench::{
    Block, Dice, EAGER, KIB, Lab, MIB, counting_lab, filler, permutations, under_every_schedule,
};

const BYTES: u64 = 4 * KIB;

/// Entry 11.
#[test]
fn small_shapes_first_costs_the_largest_once_the_pool_is_sized_ahead_and_the_loss_without_is_told() {
    let shapes: Vec<u64> = (1..=16).map(|n| n * 64 * MIB).collect();
    let reserved = |order: &[u64], ahead: bool| {
        let lab = counting_lab();
        let s = lab.stream();
        let pool = PoolId::fresh_for_capture();
        let hold = lab.allocator.hold_pool(pool).unwrap();
        if ahead {
            assert_eq!(lab.allocator.reserve_pool(pool, Part::Large, 1024 * MIB).unwrap(), 1024 * MIB);
        }
        let graphs: Vec<_> = order
            .iter()
            .map(|bytes| {
                let options = CaptureOptions::new().with_pool(pool);
                lab.capture(&s, options, || drop(lab.block(10, *bytes, &s))).0
            })
            .collect();
        // What each capture made anew is in its report: the sum is the loss over the largest.
        let new: u64 = graphs.iter().map(|g| g.report().pools[0].new_segment_bytes).sum();
        let bytes = lab.pool_bytes(pool);
        assert_eq!(bytes, if ahead { 1024 * MIB } else { new });
        drop((graphs, hold));
        lab.close();
        bytes
    };
    let descending: Vec<u64> = shapes.iter().rev().copied().collect();
    assert_eq!(reserved(&descending, false), 1024 * MIB);
    for order in [&shapes, &descending] {
        assert_eq!(reserved(order, true), 1024 * MIB);
    }
    // Growable segments are to make this the maximum as well.
    assert_eq!(reserved(&shapes, false), shapes.iter().sum::<u64>());
}

/// Entry 36.
#[test]
fn a_block_that_an_earlier_graph_still_writes_is_kept_told_or_reported() {
    under_every_schedule(50, |schedule| {
        // Retained: the later capture goes elsewhere, and both results are right.
        let lab = Lab::new(schedule.scheduler);
        let s = lab.stream();
        let (ga, ea, y) = filler(&lab, &s, CaptureOptions::new(), 10, 1);
        let y_at = y.address();
        ga.retain(y.into_allocation());
        let (gb, eb, z) = filler(&lab, &s, CaptureOptions::new().with_pool_of(&ga), 20, 2);
        assert_ne!(z.address(), y_at);
        assert_eq!(ga.overlap(&gb), []);
        ea.launch(&s).unwrap();
        eb.launch(&s).unwrap();
        lab.wait(&s);
        assert_eq!([lab.word_at(y_at, BYTES), lab.word(&z)], [Some(1), Some(2)]);
        drop((ga, ea, gb, eb, z));
        lab.close();
        // Not retained: the overlap tells which bytes, and a launch that is about to destroy what is held is reported.
        let lab = Lab::new(schedule.scheduler);
        let s = lab.stream();
        let (ga, ea, y) = filler(&lab, &s, CaptureOptions::new(), 10, 1);
        drop(y);
        let (gb, eb, z) = filler(&lab, &s, CaptureOptions::new().with_pool_of(&ga), 20, 2);
        assert_eq!(z.address(), y_at_of(&ga));
        assert_eq!(ga.overlap(&gb), [Range { address: z.address(), bytes: BYTES }]);
        eb.launch(&s).unwrap();
        let launched = ea.launch(&s).unwrap();
        assert_eq!(launched.overwrites[0].block.range.address, z.address());
        lab.wait(&s);
        assert_eq!(lab.word(&z), Some(1), "lost, as was reported");
        assert!(lab.device.take_reports().iter().all(|r| r.kind == ReportKind::StaleOwner));
        drop((ga, ea, gb, eb, z));
        lab.close();
    });
}

fn y_at_of(graph: &Graph<SimDevice>) -> Address {
    graph.report().pools[0].written[0].address
}

/// Entry 37.
#[test]
fn a_workspace_that_landed_in_a_graphs_pool_survives_that_graph_and_can_be_put_elsewhere_at_once() {
    under_every_schedule(50, |schedule| {
        for outside in [false, true] {
            let lab = Lab::new(schedule.scheduler);
            let s = lab.stream();
            // The first capture makes the library's workspace, as a library does at its first use.
            let capture = lab.begin(&s, CaptureOptions::new());
            let scope = outside.then(|| capture.outside().unwrap());
            let workspace = lab.block(EAGER, BYTES, &s);
            drop(scope);
            let first_pool = capture.pool();
            lab.device.launch(s.handle(), Kernel::Fill { dst: workspace.address(), bytes: BYTES, value: 1 }).unwrap();
            let first = capture.end().unwrap();
            // Others use it too.
            let (second, exec, out) = lab.capture(&s, CaptureOptions::new(), || {
                let out = lab.block(20, BYTES, &s);
                lab.device
                    .launch(s.handle(), Kernel::Fill { dst: workspace.address(), bytes: BYTES, value: 7 })
                    .unwrap();
                lab.copy(&s, &out, &workspace);
                out
            });
            drop(first);
            lab.allocator.empty_cache().unwrap();
            let orphans: Vec<_> = lab.captures.orphans().iter().map(|o| (o.pool, o.range.address)).collect();
            match outside {
                true => assert_eq!(orphans, [], "it was never in a pool"),
                false => {
                    assert_eq!(orphans, [(first_pool, workspace.address())], "it outlives its graph, and is listed")
                }
            }
            exec.launch(&s).unwrap();
            lab.wait(&s);
            assert_eq!(lab.word(&out), Some(7));
            // Let go, its memory goes back.
            drop((second, exec, out, workspace));
            lab.close();
        }
    });
}

/// Entry 38.
#[test]
fn nothing_handed_out_after_a_capture_is_where_its_temporaries_were() {
    under_every_schedule(200, |schedule| {
        let lab = Lab::new(schedule.scheduler);
        let s = lab.stream();
        let (graph, exec, t_at) = lab.capture(&s, CaptureOptions::new(), || {
            let t = lab.block(10, BYTES, &s);
            lab.fill(&s, &t, 5);
            t.address()
        });
        let w: Vec<_> = (0..20).map(|_| lab.block(EAGER, BYTES, &s)).collect();
        assert!(w.iter().all(|w| w.address() != t_at));
        w.iter().for_each(|w| lab.fill(&s, w, 6));
        exec.launch(&s).unwrap();
        lab.wait(&s);
        assert!(w.iter().all(|w| lab.word(w) == Some(6)));
        // Nor after the graph is gone, as long as its launch runs.
        exec.launch(&s).unwrap();
        drop((graph, exec));
        let more: Vec<_> = (0..20).map(|_| lab.block(EAGER, BYTES, &s)).collect();
        assert!(more.iter().all(|w| w.address() != t_at));
        drop((w, more));
        lab.close();
    });
}

/// Entry 39.
#[test]
fn addresses_that_a_graph_baked_in_stay_and_a_counter_tells_when_any_went() {
    for scheduler in [Scheduler::InOrder, Scheduler::Adversarial] {
        let lab = Lab::with(
            SimConfig::default().with_capacity(100 * MIB).with_scheduler(scheduler),
            Config::new(Policy::Segments),
        );
        let (s, other) = (lab.stream(), lab.stream());
        // The graph reads a block of the default pool, which it keeps.
        let input = lab.block(EAGER, 20 * MIB, &s);
        lab.fill(&s, &input, 4);
        let (graph, exec, out) = lab.capture(&s, CaptureOptions::new(), || {
            let out = lab.block(10, BYTES, &s);
            lab.copy(&s, &out, &input);
            out
        });
        let input_at = input.address();
        lab.wait(&s);
        graph.declare_input(input.allocation());
        graph.retain(input.into_allocation());
        let generation = || lab.allocator.stats().num_device_free;
        let before = generation();
        // The device fills up, so that everything idle is flushed.
        drop(lab.block(EAGER, 60 * MIB, &other));
        assert_eq!(generation(), before);
        drop(lab.block(EAGER, 78 * MIB, &s));
        assert!(generation() > before, "the counter tells that addresses were given back");
        assert!(matches!(lab.try_block(EAGER, 90 * MIB, &s).map(drop), Err(AllocError::OutOfMemory(_))));
        exec.launch_with(&s, LaunchOptions::new().with_inputs(InputCheck::Always)).unwrap();
        lab.wait(&s);
        assert_eq!((lab.word(&out), lab.allocator.base_allocation(input_at).is_some()), (Some(4), true));
        lab.device.disown(input_at, 20 * MIB);
        drop((graph, exec, out));
        lab.close();
    }
}

/// Entry 40. From several threads at once, and with a pool that was on the list of those that help out.
#[test]
fn a_released_pool_id_revives_or_is_an_error_and_is_on_no_list_any_more() {
    let lab = Lab::of_bytes(64 * MIB);
    let s = lab.stream();
    let (graph, exec, out) = filler(&lab, &s, CaptureOptions::new(), 10, 1);
    let pool = graph.pools()[0];
    lab.allocator.set_use_on_oom(pool, true);
    drop((graph, exec, out));
    // Taken and released by several threads: the count is never negative, and nobody aborts.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    let hold = lab.allocator.hold_pool(pool).unwrap();
                    assert!(lab.allocator.pool_use_count(pool).unwrap() >= 1);
                    drop(hold);
                }
            });
        }
    });
    assert_eq!(lab.allocator.pool_use_count(pool).unwrap(), 0);
    assert!(matches!(lab.allocator.release_pool(pool), Err(AllocError::Pool(PoolError::OverReleased { .. }))));
    assert_eq!(lab.allocator.pool_use_count(pool).unwrap(), 0);
    lab.allocator.empty_cache().unwrap();
    for refused in [
        lab.allocator.hold_pool(pool).map(drop),
        lab.allocator.create_pool(pool),
        lab.allocator.begin_allocate_to_pool(pool, Filter::All),
    ] {
        assert!(matches!(refused, Err(AllocError::Pool(PoolError::Released { pool: p })) if p == pool), "{refused:?}");
    }
    for unknown in [
        lab.allocator.pool_use_count(pool).map(drop),
        lab.allocator.release_pool(pool),
        lab.allocator.reserve_pool(pool, Part::Small, 1).map(drop),
        lab.allocator.pool_stats(pool).map(drop),
    ] {
        assert!(matches!(unknown, Err(AllocError::Pool(PoolError::Unknown { pool: p })) if p == pool), "{unknown:?}");
    }
    // Memory runs out: nobody looks for the pool that is gone.
    let _all = lab.block(EAGER, 64 * MIB, &s);
    assert!(matches!(lab.try_block(EAGER, BYTES, &s).map(drop), Err(AllocError::OutOfMemory(_))));
}

/// Entry 41.
#[test]
fn sharing_is_cheap_each_graph_knows_its_bytes_and_dropped_graphs_give_theirs_back_promptly() {
    let lab = counting_lab();
    let s = lab.stream();
    // Eleven shapes, of which a tenth stays: with a pool each, and with one.
    let shape = |at: u64| (at + 1) * 16 * MIB;
    let capture = |pool: Option<PoolId>, at: u64| {
        let options = pool.map_or_else(CaptureOptions::new, |p| CaptureOptions::new().with_pool(p));
        let (graph, exec, out) = lab.capture(&s, options, || {
            drop(lab.block(at, shape(at), &s));
            lab.block(at, shape(at) / 10, &s)
        });
        (graph, exec, out)
    };
    let apart: Vec<_> = (0..11).rev().map(|at| capture(None, at)).collect();
    let bytes_apart = lab.reserved();
    drop(apart);
    lab.allocator.empty_cache().unwrap();
    assert_eq!(lab.reserved(), 0, "given back promptly");
    let pool = PoolId::fresh_for_capture();
    let shared: Vec<_> = (0..11).rev().map(|at| capture(Some(pool), at)).collect();
    assert!(lab.reserved() * 2 < bytes_apart, "{} against {bytes_apart}", lab.reserved());
    let graphs: Vec<_> = shared.iter().map(|(g, ..)| g).collect();
    for graph in &graphs {
        let report = &graph.report().pools[0];
        let exclusive = graph.exclusive_bytes(&graphs);
        assert!(exclusive <= report.written_bytes());
        assert_eq!(report.outputs.len(), 1);
        assert_eq!(graph.exclusive_bytes(&[]), report.written_bytes());
    }
    drop(shared);
    lab.allocator.empty_cache().unwrap();
    // A cache of graphs that turns over does not grow.
    let mut cache: Vec<_> = Vec::new();
    let mut peak = 0;
    for at in 0..60 {
        cache.push(capture(None, at % 4));
        if cache.len() > 4 {
            drop(cache.remove(0));
            lab.allocator.empty_cache().unwrap();
        }
        if at == 10 {
            peak = lab.reserved();
        }
    }
    assert!(lab.reserved() <= peak + 90 * MIB, "{} against {peak}", lab.reserved());
    drop(cache);
    lab.close();
}

/// Entry 42.
#[test]
fn two_graphs_of_one_pool_captured_on_two_streams_cost_the_larger_one() {
    for sizes in [[30, 50], [50, 30], [40, 40]] {
        let lab = counting_lab();
        let streams = [lab.stream(), lab.stream()];
        let pool = PoolId::fresh_for_capture();
        let hold = lab.allocator.hold_pool(pool).unwrap();
        // Warming up inside the pool, on one stream, with work that is still to be waited for.
        let me = Filter::Thread(std::thread::current().id());
        lab.allocator.begin_allocate_to_pool(pool, me).unwrap();
        let warm = lab.block(EAGER, 50 * MIB, &streams[0]);
        lab.fill(&streams[0], &warm, 1);
        drop(warm);
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        lab.allocator.release_pool(pool).unwrap();
        let graphs: Vec<_> = sizes
            .iter()
            .zip(&streams)
            .map(|(size, s)| {
                let options = CaptureOptions::new().with_pool(pool);
                lab.capture(s, options, || drop(lab.block(10, size * MIB, s)))
            })
            .collect();
        assert_eq!(lab.pool_bytes(pool), 50 * MIB);
        drop((graphs, hold));
        lab.close();
    }
}

/// Entry 43.
#[test]
fn temporaries_in_turn_cost_one_and_memory_nodes_of_others_are_told() {
    let lab = counting_lab();
    let s = lab.stream();
    let (graph, exec, ()) = lab.capture(&s, CaptureOptions::new(), || {
        for _ in 0..3 {
            let temp = lab.block(10, 1024 * MIB, &s);
            lab.fill(&s, &temp, 1);
        }
    });
    assert_eq!((graph.report().memory_nodes, lab.pool_bytes(graph.pools()[0])), (0, 1024 * MIB));
    for _ in 0..3 {
        exec.launch(&s).unwrap();
    }
    lab.wait(&s);
    // Somebody else's asynchronous allocation becomes a node; the graph says so.
    let (theirs, their_exec, ()) = lab.capture(&s, CaptureOptions::new(), || {
        lab.device.foreign_call(ForeignCall::MemAllocAsync, s.handle()).unwrap();
    });
    assert_eq!(theirs.report().memory_nodes, 1);
    assert_eq!(theirs.report().nodes, [("memory allocation".to_owned(), 1)].into());
    drop((graph, exec, theirs, their_exec));
    lab.close();
}

/// A provider that counts what it has out.
#[derive(Default)]
struct Counting {
    out: Mutex<BTreeMap<Address, u64>>,
    next: Mutex<u64>,
}

impl SegmentProvider for Counting {
    fn allocate(&self, bytes: u64, _: StreamHandle) -> Option<Address> {
        let mut next = self.next.lock().unwrap();
        *next += 1;
        let address = Address(*next << 40);
        self.out.lock().unwrap().insert(address, bytes);
        Some(address)
    }

    fn release(&self, address: Address, bytes: u64) {
        assert_eq!(self.out.lock().unwrap().remove(&address), Some(bytes), "given back once, whole");
    }
}

/// Entry 44.
#[test]
fn owners_that_die_in_any_order_give_every_segment_back_through_the_provider_that_made_it() {
    for order in permutations(5) {
        let lab = counting_lab();
        let s = lab.stream();
        let device = Arc::clone(&lab.device);
        let provider = Arc::new(Counting::default());
        let pool = PoolId::fresh();
        lab.allocator.create_pool_with(pool, provider.clone()).unwrap();
        let me = Filter::Thread(std::thread::current().id());
        lab.allocator.begin_allocate_to_pool(pool, me).unwrap();
        let eager = lab.block(EAGER, 5 * MIB, &s);
        // The scope ends, and all its uses are given up, while a block is live.
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        let (graph, exec, out) = lab.capture(&s, CaptureOptions::new().with_pool(pool), || lab.block(10, 30 * MIB, &s));
        for _ in 0..2 {
            lab.allocator.release_pool(pool).unwrap();
        }
        // The graph's own hold is not theirs to release, and no count goes below zero.
        assert_eq!(lab.allocator.pool_use_count(pool).unwrap(), 1);
        assert_eq!(provider.out.lock().unwrap().len(), 2);
        assert_eq!(lab.device.memory_in_use(), 0, "all of it from the provider");
        let (mut eager, mut graph, mut exec, mut out, mut rest) =
            (Some(eager), Some(graph), Some(exec), Some(out), Some((lab, s)));
        for what in order {
            match what {
                0 => drop(eager.take()),
                1 => drop(graph.take()),
                2 => drop(exec.take()),
                3 => drop(out.take()),
                _ => drop(rest.take()),
            }
        }
        assert_eq!(*provider.out.lock().unwrap(), BTreeMap::new());
        assert_eq!(device.memory_in_use(), 0);
    }
}

/// What the driver has mapped, and what the pools say of it.
fn assert_counted(lab: &Lab) {
    let State { segments, pools, .. } = lab.allocator.state();
    for pool in &pools {
        let mapped: Vec<_> = segments.iter().filter(|s| s.pool == pool.id).collect();
        let bytes: u64 = mapped.iter().map(|s| s.size).sum();
        assert_eq!(pool.reserved_bytes.all.current as u64, bytes, "{:?}", pool.id);
        let live: u64 = mapped.iter().map(|s| s.allocated()).sum();
        assert_eq!(pool.allocated_bytes.all.current as u64, live, "{:?}", pool.id);
    }
    let all: u64 = segments.iter().map(|s| s.size).sum();
    assert_eq!((lab.reserved(), lab.device.memory_in_use()), (all, all));
    assert_eq!(lab.allocator.stats().segment.all.current as usize, segments.len());
    lab.allocator.validate().unwrap();
}

/// Entry 45, with segments of one handle each.
#[test]
fn what_a_pool_counts_is_what_is_mapped_for_it_after_every_map_and_unmap_also_when_one_fails() {
    let faults = [Call::AddressReserve, Call::MemCreate, Call::MemMap, Call::MemSetAccess, Call::MemUnmap];
    for seed in 0..60 {
        let lab = counting_lab();
        let s = lab.stream();
        let mut dice = Dice::new(seed);
        let pool = PoolId::fresh_for_capture();
        let mut held: Vec<(Graph<SimDevice>, Option<Block>)> = Vec::new();
        for _ in 0..30 {
            if dice.below(3) == 0 {
                lab.device.fail_nth(*dice.one_of(&faults), 1, code::OUT_OF_MEMORY);
            }
            match dice.below(5) {
                0 => {
                    let _faulty = lab.allocator.empty_cache();
                }
                1 if !held.is_empty() => drop(held.remove(dice.below(held.len() as u64) as usize)),
                2 => {
                    let hold = lab.allocator.hold_pool(pool);
                    let _faulty = lab.allocator.reserve_pool(pool, Part::Large, 8 * MIB);
                    drop(hold);
                }
                _ => {
                    let options =
                        if dice.below(2) == 0 { CaptureOptions::new() } else { CaptureOptions::new().with_pool(pool) };
                    if let Ok(capture) = lab.captures.begin(&s, options) {
                        let mut out = None;
                        for _ in 0..3 {
                            out = lab.try_block(10, (dice.below(30) + 1) * MIB / 2, &s).ok();
                            assert_counted(&lab);
                        }
                        held.push((capture.end().unwrap(), out));
                    }
                }
            }
            lab.device.clear_faults();
            assert_counted(&lab);
        }
        drop(held);
        lab.close();
    }
}
