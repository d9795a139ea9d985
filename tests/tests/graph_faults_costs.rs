//! Faults that users report of what captures cost and of what replays read: catalogue entries 49, 60, 77, 79, 83 and 96.

use gpupool_allocator::{AllocError, Filter, Part, PoolId, Range};
use gpupool_device::{Call, Device, with_relaxed_capture};
use gpupool_graph_capture::{CaptureOptions, InputCheck, LaunchError, LaunchOptions, OutputCheck};
use gpupool_sim_device::Scheduler;
use gpupool_tests::graph_bench::{Dice, EAGER, KIB, Lab, MIB, counting_lab, filler, under_every_schedule};

const BYTES: u64 = 4 * KIB;

/// Entry 49.
#[test]
fn an_input_that_was_made_anew_elsewhere_or_in_the_same_place_is_noticed_at_the_launch() {
    let lab = Lab::new(Scheduler::Adversarial);
    let s = lab.stream();
    let inputs = [lab.block(EAGER, BYTES, &s), lab.block(EAGER, BYTES, &s)];
    let (graph, exec, out) = lab.capture(&s, CaptureOptions::new(), || {
        let out = lab.block(10, BYTES, &s);
        for input in &inputs {
            lab.copy(&s, &out, input);
        }
        out
    });
    inputs.iter().for_each(|input| graph.declare_input(input.allocation()));
    exec.launch(&s).unwrap();
    lab.wait(&s);
    let [first, second] = inputs;
    let second_range = Range { address: second.address(), bytes: second.allocation().size() };
    drop(second);
    // Produced fresh: in another place, then in the same one.
    let elsewhere = lab.block(EAGER, 2 * BYTES, &s);
    let same = lab.block(EAGER, BYTES, &s);
    assert_eq!(same.address(), second_range.address);
    for fresh in [Some(elsewhere), Some(same)] {
        let launched = exec.launch_with(&s, LaunchOptions::new().with_inputs(InputCheck::Always));
        assert!(matches!(launched, Err(LaunchError::InputGone { range }) if range == second_range), "{launched:?}");
        drop(fresh);
    }
    drop((graph, exec, out, first));
    lab.close();
}

/// Entry 60.
#[test]
fn a_captures_report_tells_what_it_took_reused_needed_at_once_and_left() {
    let lab = counting_lab();
    let s = lab.stream();
    let free = || lab.device.mem_info().unwrap().free;
    // Cached memory and a transient of the default pool: not the graph's cost.
    drop(lab.block(EAGER, 200 * MIB, &s));
    let before = free();
    let (first, e1, out) = lab.capture(&s, CaptureOptions::new(), || {
        let a = lab.block(10, 24 * MIB, &s);
        let b = lab.block(10, 12 * MIB, &s);
        drop(a);
        let c = lab.block(10, 16 * MIB, &s);
        drop(b);
        c
    });
    let taken = before - free();
    let report = &first.report().pools[0];
    assert_eq!((report.new_segment_bytes, report.reused_bytes), (36 * MIB, 0));
    assert_eq!((report.peak_bytes, report.written_bytes()), (36 * MIB, 36 * MIB));
    assert_eq!(report.outputs.iter().map(|o| o.range.address).collect::<Vec<_>>(), [out.address()]);
    // Trimming before growth may have given cache back meanwhile: what the driver lost is never more than the graph's own.
    assert!(taken <= report.new_segment_bytes, "{taken}");
    // The second graph: some reused, some new.
    let (second, e2, ()) = lab.capture(&s, CaptureOptions::new().with_pool_of(&first), || {
        let a = lab.block(20, 12 * MIB, &s);
        let b = lab.block(20, 40 * MIB, &s);
        drop((a, b));
    });
    let report = &second.report().pools[0];
    assert_eq!((report.new_segment_bytes, report.reused_bytes), (40 * MIB, 12 * MIB));
    assert_eq!(
        (report.peak_bytes, report.outputs.len()),
        (16 * MIB + 52 * MIB, 0),
        "what another graph left live counts"
    );
    assert_eq!((first.report().driver_bytes, second.report().driver_bytes), (0, 0));
    // A capture that asks for nothing costs nothing; what a library takes meanwhile is told apart.
    let (third, e3, theirs) = lab.capture(&s, CaptureOptions::new().with_pool_of(&first), || {
        with_relaxed_capture(&*lab.device, |d| d.mem_alloc(6 * MIB)).unwrap()
    });
    let report = &third.report().pools[0];
    assert_eq!((report.new_segment_bytes, report.reused_bytes, report.written_bytes()), (0, 0, 0));
    assert_eq!(third.report().driver_bytes, 6 * MIB as i64);
    lab.device.mem_free(theirs).unwrap();
    drop((first, second, third, e1, e2, e3, out));
    lab.close();
}

/// Entry 77.
#[test]
fn the_inner_pool_is_used_and_every_pool_that_a_graph_touched_is_held_by_it() {
    under_every_schedule(50, |schedule| {
        let lab = Lab::new(schedule.scheduler);
        let s = lab.stream();
        let me = Filter::Thread(std::thread::current().id());
        let inner = PoolId::fresh();
        let capture = lab.begin(&s, CaptureOptions::new());
        let own = capture.pool();
        let temp_at = {
            lab.allocator.begin_allocate_inside(capture.id(), inner, me).unwrap();
            let temp = lab.block(10, BYTES, &s);
            lab.fill(&s, &temp, 1);
            lab.allocator.end_allocate_to_pool(inner).unwrap();
            // The scope's owner is done with the pool.
            lab.allocator.release_pool(inner).unwrap();
            temp.address()
        };
        let out = lab.block(10, BYTES, &s);
        lab.fill(&s, &out, 2);
        let graph = capture.end().unwrap();
        let exec = graph.instantiate(Default::default()).unwrap();
        let mut pools = graph.pools();
        pools.sort_unstable();
        assert_eq!(pools, [inner.min(own), inner.max(own)]);
        assert_eq!(lab.allocator.pool_use_count(inner).unwrap(), 1);
        // Emptying the cache leaves it, and eager requests of that very pool stay off what is baked in.
        lab.allocator.empty_cache().unwrap();
        lab.allocator.begin_allocate_to_pool(inner, me).unwrap();
        let eager: Vec<_> = (0..8).map(|_| lab.block(EAGER, BYTES, &s)).collect();
        lab.allocator.end_allocate_to_pool(inner).unwrap();
        lab.allocator.release_pool(inner).unwrap();
        assert!(eager.iter().all(|b| b.address() != temp_at));
        eager.iter().for_each(|b| lab.fill(&s, b, 9));
        exec.launch(&s).unwrap();
        lab.wait(&s);
        assert!(eager.iter().all(|b| lab.word(b) == Some(9)));
        assert_eq!((lab.word(&out), lab.word_at(temp_at, BYTES)), (Some(2), Some(1)));
        drop((graph, exec, out, eager));
        lab.close();
    });
    // A pool that another capture draws from is not entered.
    let lab = Lab::new(Scheduler::InOrder);
    let (s, other) = (lab.stream(), lab.stream());
    let me = Filter::Thread(std::thread::current().id());
    let (first, second) = (lab.begin(&s, CaptureOptions::new()), lab.begin(&other, CaptureOptions::new()));
    lab.allocator.begin_allocate_inside(first.id(), second.pool(), me).unwrap();
    let refused = lab.allocator.alloc(BYTES, &s);
    assert!(matches!(refused, Err(AllocError::PoolInCapture { pool }) if pool == second.pool()), "{refused:?}");
    lab.allocator.end_allocate_to_pool(second.pool()).unwrap();
    lab.allocator.release_pool(second.pool()).unwrap();
    drop((first, second));
    lab.close();
}

/// A program's requests, as draws of a seed: what it captures, each graph's into one pool.
fn program(lab: &Lab, seed: u64) -> (u64, Vec<(u64, u64)>) {
    let mut dice = Dice::new(seed);
    let s = lab.stream();
    let pool = PoolId::fresh_for_capture();
    let (mut layout, mut graphs) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let (graph, _exec, kept) = lab.capture(&s, CaptureOptions::new().with_pool(pool), || {
            let mut live = Vec::new();
            for _ in 0..20 {
                let block = lab.block(10, dice.below(8 * MIB) + 1, &s);
                let placement = block.allocation().placement().unwrap();
                layout.push((placement.segment, placement.offset));
                live.push(block);
                if dice.below(3) > 0 {
                    let at = dice.below(live.len() as u64) as usize;
                    drop(live.swap_remove(at));
                }
            }
            live.truncate(1);
            live
        });
        graphs.push((graph, kept));
    }
    (lab.pool_bytes(pool), layout)
}

/// Entry 79.
#[test]
fn what_captures_will_cost_is_known_to_the_byte_from_a_run_on_a_simulated_device_and_can_be_reserved() {
    for seed in 0..20 {
        // The forecast: the same requests on a device of no one. Then the real thing, beside other work.
        let forecast = program(&counting_lab(), seed);
        let lab = counting_lab();
        let eager: Vec<_> = (0..10).map(|n| lab.block(EAGER, n * MIB + 1, &lab.stream())).collect();
        let first = lab.allocator.stats().num_device_alloc as u64;
        let real = program(&lab, seed);
        assert_eq!(real.0, forecast.0);
        let shifted: Vec<_> = forecast.1.iter().map(|(segment, offset)| (segment + first, *offset)).collect();
        assert_eq!(real.1, shifted, "the same layout");
        drop(eager);
    }
    // What does not fit is an error before the driver has begun.
    let lab = Lab::of_bytes(64 * MIB);
    let s = lab.stream();
    let pool = PoolId::fresh_for_capture();
    let hold = lab.allocator.hold_pool(pool).unwrap();
    let refused = lab.allocator.reserve_pool(pool, Part::Large, 65 * MIB);
    assert!(matches!(refused, Err(AllocError::CannotReserve { bytes, .. }) if bytes == 66 * MIB), "{refused:?}");
    assert_eq!((lab.reserved(), lab.device.memory_in_use()), (0, 0));
    assert_eq!(lab.device.calls(Call::StreamBeginCapture), 0);
    // What does is there in one piece.
    lab.allocator.reserve_pool(pool, Part::Large, 64 * MIB).unwrap();
    let (graph, exec, ()) = lab.capture(&s, CaptureOptions::new().with_pool(pool), || {
        let _blocks: Vec<_> = (0..8).map(|_| lab.block(10, 8 * MIB, &s)).collect();
    });
    assert_eq!(graph.report().pools[0].new_segment_bytes, 0);
    drop((graph, exec, hold));
    lab.close();
}

/// Entry 83.
#[test]
fn a_replay_checks_that_what_it_reads_is_what_it_was_and_what_it_overwrites_is_nobodys() {
    let lab = Lab::new(Scheduler::InOrder);
    let s = lab.stream();
    let input = lab.block(EAGER, BYTES, &s);
    let (ga, ea, y) = filler(&lab, &s, CaptureOptions::new(), 10, 1);
    ga.declare_input(input.allocation());
    drop(y);
    let (gb, eb, z) = filler(&lab, &s, CaptureOptions::new().with_pool_of(&ga), 20, 2);
    let strict = LaunchOptions::new().with_inputs(InputCheck::Always).with_outputs(OutputCheck::Refuse);
    // It would overwrite what is held.
    let refused = ea.launch_with(&s, strict);
    assert!(matches!(refused, Err(LaunchError::WouldOverwrite { count: 1, .. })), "{refused:?}");
    eb.launch_with(&s, strict).unwrap();
    drop(z);
    ea.launch_with(&s, strict).unwrap();
    // It would read what is another block by now, at the same address and of the same size.
    lab.wait(&s);
    let at = input.address();
    drop(input);
    let impostor = lab.block(EAGER, BYTES, &s);
    assert_eq!(impostor.address(), at);
    let refused = ea.launch_with(&s, strict);
    assert!(matches!(refused, Err(LaunchError::InputGone { range }) if range.address == at), "{refused:?}");
    assert_eq!(lab.device.calls(Call::GraphLaunch), 2, "what was refused was not submitted");
    drop((ga, ea, gb, eb, impostor));
    lab.close();
}

/// Entry 96.
#[test]
fn a_closure_that_captures_may_drop_what_it_likes_and_the_executable_alone_is_enough_to_replay() {
    under_every_schedule(50, |schedule| {
        let lab = Lab::new(schedule.scheduler);
        let s = lab.stream();
        // The closure owns its state; all of it is dropped inside, and the graph's handle after it.
        let (exec, out_at) = {
            let weights = lab.block(EAGER, BYTES, &s);
            lab.fill(&s, &weights, 20);
            lab.wait(&s);
            let captured = lab.begin(&s, CaptureOptions::new());
            let out_at = {
                let hidden = lab.block(10, BYTES, &s);
                lab.copy(&s, &hidden, &weights);
                lab.add(&s, &hidden, 1);
                let out = lab.block(10, BYTES, &s);
                lab.copy(&s, &out, &hidden);
                lab.add(&s, &out, 1);
                out.address()
            };
            let graph = captured.end().unwrap();
            graph.retain(weights.into_allocation());
            (graph.instantiate(Default::default()).unwrap(), out_at)
        };
        // Other work all the while, and everything idle given back.
        for round in 0..3 {
            let eager: Vec<_> = (0..4).map(|_| lab.block(EAGER, BYTES, &s)).collect();
            eager.iter().for_each(|b| lab.fill(&s, b, round));
            lab.allocator.empty_cache().unwrap();
            exec.launch(&s).unwrap();
            lab.wait(&s);
            assert_eq!(lab.word_at(out_at, BYTES), Some(22));
        }
        // The executable may go to another thread, and end there while it runs.
        let stream = s.clone();
        std::thread::spawn(move || {
            exec.launch(&stream).unwrap();
            drop(exec);
        })
        .join()
        .unwrap();
        lab.device.run_until_idle();
        assert_eq!(lab.word_at(out_at, BYTES), Some(22));
        drop(s);
        lab.close();
    });
}
