//! Idle pools that lend, and what happens when memory is short.

use gpupool_allocator::{
    AllocError, Config, IdleOptions, Lending, OnLoan, Policy, PoolError, Residency, Stream, Which,
};
use gpupool_graph_capture::{CaptureOptions, LaunchError};
use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};
use gpupool_tests::graph_bench::{Block, EAGER, Lab, MIB};
use gpupool_tests::idle_bench::{GRAPH, Serving, configs, everywhere, lab, serving};

/// Lends before anything grows.
fn lends() -> IdleOptions {
    IdleOptions::new().with_lending(Lending::BeforeGrowth)
}

/// Two streams, and a graph on the first whose pool has these options, with what it reads: two runs of 12 MiB, and an output that is 6
/// after a run.
fn lender(lab: &Lab, options: IdleOptions) -> (Stream<SimDevice>, Stream<SimDevice>, Block, Serving) {
    let (s, other) = (lab.stream(), lab.stream());
    let input = lab.block(EAGER, 12 * MIB, &s);
    lab.fill(&s, &input, 4);
    let g = serving(lab, &s, &input, 12 * MIB);
    lab.allocator.set_idle_options(g.pool, options).unwrap();
    (s, other, input, g)
}

// Catalogue: 80.
#[test]
fn a_run_is_lent_or_the_replays_and_never_both() {
    everywhere(|lab| {
        let (s, other, _input, g) = lender(lab, lends());
        g.exec.launch(&s).unwrap();
        lab.wait(&s);
        let (before, reserved) = (lab.device.memory_in_use(), lab.reserved());
        let loan = lab.block(EAGER, 11 * MIB, &other);
        assert_eq!((lab.device.memory_in_use(), lab.reserved()), (before, reserved), "no memory was taken for it");
        assert_eq!(lab.allocator.residency(g.pool).unwrap(), Residency::Lent);
        let state = lab.allocator.state();
        let pool = state.pools.iter().find(|p| p.id == g.pool).unwrap();
        assert!(pool.lent_bytes >= 11 * MIB);
        assert_eq!(lab.allocator.stats().idle.loans, 1);
        lab.fill(&other, &loan, 99);
        let refused = g.exec.launch(&s);
        assert!(
            matches!(
                &refused,
                Err(LaunchError::Pool { source: AllocError::Pool(PoolError::LoansOut { loans: 1, .. }), .. })
            ),
            "{refused:?}"
        );
        let parked = lab.allocator.park_pool(g.pool);
        assert!(matches!(parked, Err(AllocError::Pool(PoolError::LoansOut { .. }))), "{parked:?}");
        assert!(lab.allocator.suspend(&Which::All).is_err());
        assert_eq!(lab.allocator.residency(g.pool).unwrap(), Residency::Lent);
        // Freed with work on two streams still to come: the replay waits for both, on the device.
        loan.record(&s);
        let third = lab.stream();
        lab.order(&other, &third);
        lab.add(&third, &loan, 1);
        loan.free_on(&third);
        g.exec.launch(&s).unwrap();
        lab.wait(&s);
        assert_eq!(lab.word(&g.output), Some(6));
        lab.device.run_until_idle();
        lab.assert_clean();
    });
}

// Catalogue: 80.
#[test]
fn the_smallest_run_that_fits_is_lent_and_runs_count_and_not_segments() {
    for config in configs() {
        let lab = lab(Scheduler::InOrder, config);
        let s = lab.stream();
        let input = lab.block(EAGER, 40 * MIB, &s);
        lab.fill(&s, &input, 1);
        let large = serving(&lab, &s, &input, 40 * MIB);
        let (graph, exec, held) = lab.capture(&s, CaptureOptions::new(), || {
            // A free run of 16 MiB between two blocks that are held.
            let [a, b, c] = [2, 16, 2].map(|n| lab.block(GRAPH, n * MIB, &s));
            [&a, &b, &c].into_iter().for_each(|x| lab.fill(&s, x, 3));
            drop(b);
            [a, c]
        });
        exec.launch(&s).unwrap();
        large.exec.launch(&s).unwrap();
        lab.wait(&s);
        lab.allocator.set_idle_options(large.pool, lends()).unwrap();
        lab.allocator.set_idle_options(graph.pool(), lends()).unwrap();
        let before = lab.device.memory_in_use();
        let loan = lab.block(EAGER, 15 * MIB, &s);
        let pools = lab.allocator.state().pools;
        let lent = |id| pools.iter().find(|p| p.id == id).unwrap().lent_bytes;
        assert!(lent(graph.pool()) >= 15 * MIB && lent(large.pool) == 0, "{pools:?}");
        assert_eq!(lab.device.memory_in_use(), before);
        drop(loan);
        drop(held);
        lab.assert_clean();
    }
}

#[test]
fn a_launch_that_may_wait_waits_for_the_loan_to_be_freed() {
    let lab = lab(Scheduler::InOrder, Config::new(Policy::Segments));
    let (s, other, _input, g) = lender(&lab, lends().with_on_loan(OnLoan::Wait));
    g.exec.launch(&s).unwrap();
    lab.wait(&s);
    let loan = lab.block(EAGER, 11 * MIB, &other);
    lab.fill(&other, &loan, 5);
    std::thread::scope(|scope| {
        let launched = scope.spawn(|| g.exec.launch(&s).map(drop));
        drop(loan);
        launched.join().unwrap().unwrap();
    });
    lab.wait(&s);
    assert_eq!(lab.word(&g.output), Some(6));
    lab.device.run_until_idle();
    lab.assert_clean();
}

// Catalogue: 78.
#[test]
fn idle_pools_are_parked_before_out_of_memory_is_reported() {
    for config in configs() {
        let sim = SimConfig::default().with_capacity(100 * MIB);
        let lab = Lab::with(sim, config);
        let s = lab.stream();
        let input = lab.block(EAGER, 20 * MIB, &s);
        lab.fill(&s, &input, 4);
        let g = serving(&lab, &s, &input, 20 * MIB);
        g.exec.launch(&s).unwrap();
        let error = lab.try_block(EAGER, 70 * MIB, &s).err().unwrap();
        let AllocError::OutOfMemory(report) = &error else { panic!("{error}") };
        assert!(report.parkable >= 36 * MIB && report.to_string().contains("more could go"), "{report}");
        lab.allocator.set_idle_options(g.pool, IdleOptions::new().with_park_when_short(true)).unwrap();
        let block = lab.block(EAGER, 70 * MIB, &s);
        assert_eq!(lab.allocator.residency(g.pool).unwrap(), Residency::Parked);
        lab.fill(&s, &block, 1);
        // There is no room to wake it: an error that says so, and it is parked as before.
        let refused = g.exec.launch(&s);
        assert!(
            matches!(&refused, Err(LaunchError::Pool { source: AllocError::Pool(PoolError::NoMemory { .. }), .. })),
            "{refused:?}"
        );
        assert_eq!(lab.allocator.residency(g.pool).unwrap(), Residency::Parked);
        lab.allocator.validate().unwrap();
        let error = lab.try_block(EAGER, 90 * MIB, &s).err().unwrap();
        let AllocError::OutOfMemory(report) = &error else { panic!("{error}") };
        assert!(report.away > 0, "{report}");
        drop(block);
        g.exec.launch(&s).unwrap();
        lab.wait(&s);
        assert_eq!(lab.word(&g.output), Some(6));
        lab.assert_clean();
    }
}

#[test]
fn a_launch_whose_order_is_the_callers_business_still_comes_after_what_borrowed() {
    use gpupool_graph_capture::{LaunchOptions, Sharing};
    everywhere(|lab| {
        let (s, other, _input, g) = lender(lab, lends());
        g.exec.launch(&s).unwrap();
        lab.wait(&s);
        let loan = lab.block(EAGER, 11 * MIB, &other);
        lab.fill(&other, &loan, 99);
        drop(loan);
        g.exec.launch_with(&s, LaunchOptions::new().with_sharing(Sharing::Unchecked)).unwrap();
        lab.wait(&s);
        assert_eq!(lab.word(&g.output), Some(6));
        lab.device.run_until_idle();
    });
}

#[test]
fn nothing_is_lent_to_a_stream_that_captures() {
    everywhere(|lab| {
        let (s, other, _input, g) = lender(lab, lends());
        let capture = lab.begin(&other, CaptureOptions::new());
        let outside = capture.outside().unwrap();
        let workspace = lab.block(EAGER, 11 * MIB, &other);
        drop(outside);
        lab.fill(&other, &workspace, 1);
        assert_eq!(lab.allocator.stats().idle.loans, 0);
        let graph = capture.end().unwrap();
        g.exec.launch(&s).unwrap();
        lab.wait(&s);
        assert_eq!(lab.word(&g.output), Some(6));
        drop((graph, workspace));
    });
}

#[test]
fn launches_loans_and_parking_meet_on_threads() {
    for config in configs() {
        let lab = lab(Scheduler::InOrder, config);
        let streams = [lab.stream(), lab.stream(), lab.stream()];
        let input = lab.block(EAGER, 6 * MIB, &streams[0]);
        lab.fill(&streams[0], &input, 4);
        lab.wait(&streams[0]);
        let graphs = [0, 1].map(|at| serving(&lab, &streams[at], &input, 6 * MIB));
        for g in &graphs {
            let options = IdleOptions::new().with_lending(Lending::BeforeGrowth).with_on_loan(OnLoan::Wait);
            lab.allocator.set_idle_options(g.pool, options).unwrap();
        }
        std::thread::scope(|scope| {
            for (g, s) in graphs.iter().zip(&streams) {
                let lab = &lab;
                scope.spawn(move || {
                    for _ in 0..60 {
                        g.exec.launch(s).unwrap();
                        lab.wait(s);
                    }
                });
            }
            let (lab, s) = (&lab, &streams[2]);
            scope.spawn(move || {
                for round in 0..60 {
                    let loan = lab.block(EAGER, 3 * MIB, s);
                    lab.fill(s, &loan, round);
                    lab.wait(s);
                    assert_eq!(lab.word(&loan), Some(round));
                }
            });
            let graphs = &graphs;
            scope.spawn(move || {
                for round in 0..60 {
                    match lab.allocator.park_pool(graphs[round % 2].pool) {
                        Ok(_) | Err(AllocError::Pool(PoolError::LoansOut { .. } | PoolError::Busy { .. })) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
            });
        });
        lab.device.run_until_idle();
        assert!(graphs.iter().all(|g| lab.word(&g.output) == Some(6)));
        lab.assert_clean();
    }
}
