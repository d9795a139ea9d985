//! Idle pools on the simulated device: parked and woken, suspended and resumed, with contents and addresses as they were.

use gpupool_allocator::{
    AllocError, Config, Contents, Filter, IdleOptions, OnUse, Policy, PoolError, PoolId, Residency, Which,
};
use gpupool_device::CaptureMode;
use gpupool_graph_capture::{CaptureOptions, LaunchError};
use gpupool_sim_device::Scheduler;
use gpupool_tests::graph_bench::{EAGER, KIB, Lab, MIB};
use gpupool_tests::idle_bench::{GRAPH, configs, everywhere, lab, serving};
use gpupool_tests::recount::{Strictness, recount};

#[test]
fn a_parked_pool_gives_its_memory_back_and_a_launch_wakes_it() {
    everywhere(|lab| {
        let s = lab.stream();
        let input = lab.block(EAGER, 6 * MIB, &s);
        lab.fill(&s, &input, 40);
        let g = serving(lab, &s, &input, 6 * MIB);
        g.exec.launch(&s).unwrap();
        let (before, at) = (lab.device.memory_in_use(), g.output.address());
        let moved = lab.allocator.park_pool(g.pool).unwrap();
        assert!(moved.bytes >= 10 * MIB, "{moved:?}");
        assert_eq!(lab.device.memory_in_use(), before - moved.bytes);
        assert_eq!(lab.allocator.residency(g.pool).unwrap(), Residency::Parked);
        lab.allocator.validate().unwrap();
        assert_eq!(lab.word(&g.output), Some(42), "a result that is held stays where it is");
        lab.fill(&s, &input, 50);
        g.exec.launch(&s).unwrap();
        lab.wait(&s);
        assert_eq!((g.output.address(), lab.word(&g.output)), (at, Some(52)));
        assert_eq!(lab.device.memory_in_use(), before);
        assert_eq!(lab.allocator.residency(g.pool).unwrap(), Residency::Resident);
        lab.assert_clean();
    });
}

// What a capturing stream has freed stays mapped when the pool is parked, since its work may use it still.
#[test]
fn a_parked_pool_serves_nothing_of_what_had_to_stay_of_it() {
    everywhere(|lab| {
        let s = lab.stream();
        for on_use in [OnUse::Refuse, OnUse::Wake] {
            let pool = PoolId::fresh();
            let _hold = lab.allocator.hold_pool(pool).unwrap();
            lab.allocator.set_idle_options(pool, IdleOptions::new().with_on_use(on_use)).unwrap();
            let live = lab.allocator.alloc_in_pool(12 * MIB, &s, pool).unwrap();
            drop(lab.allocator.alloc_in_pool(512, &s, pool).unwrap());
            let options = CaptureOptions::new().with_mode(CaptureMode::Relaxed);
            let capture = lab.captures.begin(&s, options).unwrap();
            lab.allocator.park_pool(pool).unwrap();
            drop(capture.end().unwrap());
            assert_eq!(lab.allocator.residency(pool).unwrap(), Residency::Parked);
            lab.allocator.validate().unwrap();
            let away = PoolError::Away { pool, residency: Residency::Parked };
            for scoped in [false, true, true] {
                if scoped {
                    lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
                }
                let served = match scoped {
                    true => lab.allocator.alloc(512, &s),
                    false => lab.allocator.alloc_in_pool(512, &s, pool),
                };
                match on_use {
                    OnUse::Refuse => assert!(matches!(&served, Err(AllocError::Pool(e)) if *e == away), "{served:?}"),
                    _ => {
                        drop(served.unwrap());
                        assert_eq!(lab.allocator.residency(pool).unwrap(), Residency::Resident);
                    }
                }
                if scoped {
                    lab.allocator.end_allocate_to_pool(pool).unwrap();
                    lab.allocator.release_pool(pool).unwrap();
                }
                lab.allocator.validate().unwrap();
            }
            lab.allocator.wake_pool(pool).unwrap();
            drop(lab.allocator.alloc_in_pool(512, &s, pool).unwrap());
            drop(live);
        }
    });
}

#[test]
fn a_parked_pool_whose_uses_are_refused_stays_away() {
    everywhere(|lab| {
        let s = lab.stream();
        let input = lab.block(EAGER, 2 * MIB, &s);
        lab.fill(&s, &input, 1);
        let g = serving(lab, &s, &input, 2 * MIB);
        lab.allocator.set_idle_options(g.pool, IdleOptions::new().with_on_use(OnUse::Refuse)).unwrap();
        lab.allocator.park_pool(g.pool).unwrap();
        let launched = g.exec.launch(&s);
        let away = PoolError::Away { pool: g.pool, residency: Residency::Parked };
        assert!(
            matches!(&launched, Err(LaunchError::Pool { source: AllocError::Pool(e), .. }) if *e == away),
            "{launched:?}"
        );
        assert!(launched.unwrap_err().to_string().contains("wake it first"));
        let begun = lab.captures.begin(&s, CaptureOptions::new().with_pool(g.pool));
        assert!(begun.is_err(), "a capture into it is refused too");
        lab.allocator.wake_pool(g.pool).unwrap();
        g.exec.launch(&s).unwrap();
        lab.wait(&s);
        assert_eq!(lab.word(&g.output), Some(3));
    });
}

#[test]
fn a_replay_under_way_is_waited_for_before_its_memory_goes() {
    everywhere(|lab| {
        let s = lab.stream();
        let input = lab.block(EAGER, 6 * MIB, &s);
        lab.fill(&s, &input, 1);
        let g = serving(lab, &s, &input, 6 * MIB);
        for round in 0..4 {
            g.exec.launch(&s).unwrap();
            // Nothing has run yet under the adversarial schedule; the race detector would see an unmap under a kernel.
            lab.allocator.park_pool(g.pool).unwrap();
            assert_eq!(lab.word(&g.output), Some(3), "round {round}");
        }
    });
}

// Catalogue: 47.
#[test]
fn contents_stay_in_place_or_are_copied_out_and_back_as_their_owners_say() {
    everywhere(|lab| {
        let s = lab.stream();
        let input = lab.block(EAGER, 4 * MIB, &s);
        lab.fill(&s, &input, 9);
        let (graph, exec, [kept, copied, given_up]) = lab.capture(&s, CaptureOptions::new(), || {
            let blocks = [0, 1, 2].map(|_| lab.block(GRAPH, 4 * MIB, &s));
            blocks.iter().for_each(|b| lab.copy(&s, b, &input));
            blocks
        });
        exec.launch(&s).unwrap();
        lab.add(&s, &kept, 1);
        lab.add(&s, &copied, 2);
        lab.add(&s, &given_up, 3);
        let before = lab.device.memory_in_use();
        copied.allocation().set_contents(Contents::Copied).unwrap();
        given_up.allocation().set_contents(Contents::Discarded).unwrap();
        for _ in 0..2 {
            let moved = lab.allocator.park_pool(graph.pool()).unwrap();
            assert!(moved.kept_bytes >= 4 * MIB, "{moved:?}");
            assert_eq!(
                moved.copied_bytes > 0,
                moved.kept_bytes < 12 * MIB || moved.bytes > 0 || moved.copied_bytes > 0
            );
            assert_eq!(lab.device.memory_in_use(), before - moved.bytes);
            lab.allocator.validate().unwrap();
            recount(&lab.allocator.state(), Strictness::Exact).unwrap();
            let state = lab.allocator.state();
            let pool = state.pools.iter().find(|p| p.id == graph.pool()).unwrap();
            assert_eq!((pool.residency, pool.away_bytes), (Residency::Parked, moved.bytes));
            assert_eq!(pool.host_bytes, moved.copied_bytes);
            lab.allocator.wake_pool(graph.pool()).unwrap();
            assert_eq!((lab.word(&kept), lab.word(&copied)), (Some(10), Some(11)));
            assert_eq!(lab.device.memory_in_use(), before);
        }
        exec.launch(&s).unwrap();
        lab.wait(&s);
        assert_eq!([&kept, &copied, &given_up].map(|b| lab.word(b)), [Some(9); 3]);
    });
}

// Catalogue: 47, 78, 82.
#[test]
fn a_suspension_takes_everything_and_brings_everything_back() {
    everywhere(|lab| {
        let (s, other) = (lab.stream(), lab.stream());
        let input = lab.block(EAGER, 3 * MIB, &s);
        lab.fill(&s, &input, 30);
        let eager = lab.block(EAGER, 700 * KIB, &other);
        lab.fill(&other, &eager, 77);
        let graphs = [1, 2, 5].map(|n| serving(lab, &s, &input, n * 512 * KIB));
        graphs.iter().for_each(|g| drop(g.exec.launch(&s).unwrap()));
        let lost = lab.block(EAGER, 4 * KIB, &s);
        lost.allocation().set_contents(Contents::Discarded).unwrap();
        let addresses =
            || graphs.iter().map(|g| g.output.address()).chain([input.address(), eager.address()]).collect::<Vec<_>>();
        let at = addresses();
        for round in 0..3 {
            if round == 1 {
                lab.allocator.park_pool(graphs[0].pool).unwrap();
            }
            lab.allocator.suspend(&Which::All).unwrap();
            assert_eq!(lab.device.memory_in_use(), 0, "everything of it left the device");
            assert_eq!(lab.reserved(), 0);
            lab.allocator.validate().unwrap();
            recount(&lab.allocator.state(), Strictness::Exact).unwrap();
            assert!(matches!(lab.try_block(EAGER, MIB, &s).err(), Some(AllocError::Pool(PoolError::Away { .. }))));
            assert!(matches!(graphs[0].exec.launch(&s), Err(LaunchError::Pool { .. })));
            assert!(lab.allocator.wake_pool(graphs[0].pool).is_err(), "a suspended pool is resumed, not woken");
            lab.allocator.resume(&Which::All).unwrap();
            assert_eq!(addresses(), at);
            assert_eq!((lab.word(&input), lab.word(&eager)), (Some(30), Some(77)));
            assert!(graphs.iter().all(|g| lab.word(&g.output) == Some(32)));
            lab.allocator.validate().unwrap();
        }
        lab.fill(&s, &input, 60);
        graphs.iter().for_each(|g| drop(g.exec.launch(&s).unwrap()));
        lab.wait(&s);
        assert!(graphs.iter().all(|g| lab.word(&g.output) == Some(62)));
    });
}

// Catalogue: 82.
#[test]
fn a_suspension_by_tag_leaves_others_alone() {
    everywhere(|lab| {
        let s = lab.stream();
        let input = lab.block(EAGER, MIB, &s);
        lab.fill(&s, &input, 1);
        let (a, b) = (serving(lab, &s, &input, MIB), serving(lab, &s, &input, MIB));
        lab.allocator.set_idle_options(a.pool, IdleOptions::new().with_tag("night")).unwrap();
        let night = Which::Tag("night".to_owned());
        lab.allocator.suspend(&night).unwrap();
        assert_eq!(lab.allocator.residency(a.pool).unwrap(), Residency::Suspended);
        assert_eq!(lab.allocator.residency(b.pool).unwrap(), Residency::Resident);
        b.exec.launch(&s).unwrap();
        assert!(a.exec.launch(&s).is_err());
        lab.allocator.resume(&night).unwrap();
        a.exec.launch(&s).unwrap();
        lab.wait(&s);
        assert_eq!((lab.word(&a.output), lab.word(&b.output)), (Some(3), Some(3)));
    });
}

#[test]
fn memory_that_cannot_leave_its_addresses_is_refused_with_the_reason() {
    use gpupool_allocator::config::VirtualMemory;
    let plain = Config::new(Policy::Segments).with_virtual_memory(VirtualMemory::Never);
    let lab = lab(Scheduler::InOrder, plain);
    let s = lab.stream();
    let input = lab.block(EAGER, MIB, &s);
    lab.fill(&s, &input, 1);
    let g = serving(&lab, &s, &input, MIB);
    let refused = lab.allocator.park_pool(g.pool);
    assert!(matches!(refused, Err(AllocError::Pool(PoolError::CannotMove { .. }))), "{refused:?}");
    assert!(refused.unwrap_err().to_string().contains("plain memory"));
    assert!(lab.allocator.suspend(&Which::All).is_err());
    g.exec.launch(&s).unwrap();
    lab.wait(&s);
    assert_eq!(lab.word(&g.output), Some(3));
    let unknown = lab.allocator.park_pool(PoolId::fresh());
    assert!(matches!(unknown, Err(AllocError::Pool(PoolError::Unknown { .. }))));
    lab.assert_clean();
}

#[test]
fn a_move_is_refused_while_a_capture_draws_from_the_pool() {
    everywhere(|lab| {
        let s = lab.stream();
        let input = lab.block(EAGER, MIB, &s);
        lab.fill(&s, &input, 1);
        let g = serving(lab, &s, &input, MIB);
        let capture = lab.begin(&s, CaptureOptions::new().with_pool(g.pool));
        let refused = lab.allocator.park_pool(g.pool);
        assert!(matches!(refused, Err(AllocError::PoolInCapture { .. })), "{refused:?}");
        let scratch = lab.block(GRAPH, MIB, &s);
        lab.copy(&s, &scratch, &input);
        drop(scratch);
        let second = capture.end().unwrap().instantiate(Default::default()).unwrap();
        // A parked pool is woken by a capture into it.
        lab.allocator.park_pool(g.pool).unwrap();
        let capture = lab.begin(&s, CaptureOptions::new().with_pool(g.pool));
        assert_eq!(lab.allocator.residency(g.pool).unwrap(), Residency::Resident);
        drop(capture);
        second.launch(&s).unwrap();
        g.exec.launch(&s).unwrap();
        lab.wait(&s);
        assert_eq!(lab.word(&g.output), Some(3));
    });
}

#[test]
fn blocks_freed_while_their_pool_is_away_are_free_when_it_is_back() {
    everywhere(|lab| {
        let s = lab.stream();
        let input = lab.block(EAGER, 3 * MIB, &s);
        lab.fill(&s, &input, 1);
        let (graph, exec, blocks) = lab.capture(&s, CaptureOptions::new(), || {
            [0, 1, 2, 3].map(|_| {
                let block = lab.block(GRAPH, 3 * MIB, &s);
                lab.copy(&s, &block, &input);
                block
            })
        });
        exec.launch(&s).unwrap();
        let pool = graph.pool();
        let options = IdleOptions::new().with_parked_contents(Contents::Copied);
        lab.allocator.set_idle_options(pool, options).unwrap();
        let [a, b, c, d] = blocks;
        drop(a);
        lab.wait(&s);
        lab.allocator.park_pool(pool).unwrap();
        assert_eq!(lab.pool_bytes(pool), 0);
        drop(b);
        drop(c);
        lab.allocator.validate().unwrap();
        lab.allocator.wake_pool(pool).unwrap();
        lab.allocator.validate().unwrap();
        assert_eq!(lab.word(&d), Some(1));
        // A capture into the pool finds all that was freed in one piece.
        let before = lab.pool_bytes(pool);
        let (_, more, ()) =
            lab.capture(&s, CaptureOptions::new().with_pool(pool), || drop(lab.block(GRAPH, 6 * MIB, &s)));
        assert_eq!(lab.pool_bytes(pool), before);
        drop((more, exec, graph, d, input));
        lab.wait(&s);
        lab.captures.tidy();
        lab.assert_clean();
    });
}

#[test]
fn a_parked_pool_that_nobody_uses_any_more_leaves_nothing() {
    for config in configs() {
        for suspended in [false, true] {
            let lab = lab(Scheduler::InOrder, config.clone());
            let s = lab.stream();
            let input = lab.block(EAGER, 3 * MIB, &s);
            let g = serving(&lab, &s, &input, 3 * MIB);
            match suspended {
                true => lab.allocator.suspend(&Which::All).map(drop).unwrap(),
                false => lab.allocator.park_pool(g.pool).map(drop).unwrap(),
            }
            drop((g, input));
            if suspended {
                lab.allocator.resume(&Which::All).unwrap();
            }
            drop(s);
            lab.close();
        }
    }
}

#[test]
fn a_pool_outlives_its_allocator_parked_or_not() {
    for config in configs() {
        for wakes in [true, false] {
            let lab = lab(Scheduler::InOrder, config.clone());
            let s = lab.stream();
            let input = lab.block(EAGER, 3 * MIB, &s);
            lab.fill(&s, &input, 1);
            let g = serving(&lab, &s, &input, 3 * MIB);
            g.output.allocation().set_contents(Contents::Copied).unwrap();
            lab.allocator.park_pool(g.pool).unwrap();
            let Lab { device, allocator, captures } = lab;
            drop((allocator, captures));
            if wakes {
                g.exec.launch(&s).unwrap();
                device.run_until_idle();
                assert_eq!(device.read_bytes(g.output.address(), 4), Some(vec![3, 0, 0, 0]));
            }
            drop((g, input, s));
            assert_eq!((device.memory_in_use(), device.address_space_in_use()), (0, 0));
            assert_eq!(device.reports(), []);
        }
    }
}

#[test]
fn a_pool_of_scopes_is_parked_and_woken_by_its_next_request() {
    use gpupool_allocator::Filter;
    everywhere(|lab| {
        let s = lab.stream();
        let pool = PoolId::fresh();
        lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
        let held = lab.block(EAGER, 2 * MIB, &s);
        lab.fill(&s, &held, 8);
        for bytes in [30 * MIB, 3 * MIB, 100 * KIB] {
            let block = lab.block(EAGER, bytes, &s);
            lab.fill(&s, &block, 1);
        }
        let moved = lab.allocator.park_pool(pool).unwrap();
        assert!(moved.bytes > 0);
        lab.allocator.validate().unwrap();
        let block = lab.block(EAGER, 3 * MIB, &s);
        assert_eq!(lab.allocator.residency(pool).unwrap(), Residency::Resident);
        lab.fill(&s, &block, 2);
        lab.wait(&s);
        assert_eq!((lab.word(&block), lab.word(&held)), (Some(2), Some(8)));
        drop((block, held));
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        lab.allocator.release_pool(pool).unwrap();
    });
}

#[test]
fn a_move_that_cannot_wait_for_a_capturing_stream_is_refused_and_changes_nothing() {
    everywhere(|lab| {
        let (s, capturing) = (lab.stream(), lab.stream());
        let input = lab.block(EAGER, 3 * MIB, &s);
        lab.fill(&s, &input, 1);
        let g = serving(lab, &s, &input, 3 * MIB);
        g.exec.launch(&s).unwrap();
        let capture = lab.begin(&capturing, CaptureOptions::new());
        let refused = lab.allocator.suspend(&Which::All);
        let in_the_way =
            |e: &AllocError| matches!(e, AllocError::Pool(PoolError::Busy { .. }) | AllocError::PoolInCapture { .. });
        assert!(refused.as_ref().is_err_and(in_the_way), "{refused:?}");
        assert_eq!(lab.allocator.residency(g.pool).unwrap(), Residency::Resident);
        // A pool whose streams are not capturing is parked all the same, and woken: the capture survives both.
        lab.allocator.park_pool(g.pool).unwrap();
        g.exec.launch(&s).unwrap();
        let scratch = lab.block(GRAPH, MIB, &capturing);
        lab.fill(&capturing, &scratch, 1);
        drop(scratch);
        let graph = capture.end().unwrap();
        lab.wait(&s);
        assert_eq!(lab.word(&g.output), Some(3));
        lab.allocator.suspend(&Which::All).unwrap();
        assert_eq!(lab.device.memory_in_use(), 0);
        lab.allocator.resume(&Which::All).unwrap();
        drop(graph);
    });
}

#[test]
fn work_on_a_live_block_that_nobody_was_told_of_is_waited_for_before_it_moves() {
    everywhere(|lab| {
        let (s, other) = (lab.stream(), lab.stream());
        let input = lab.block(EAGER, 3 * MIB, &s);
        lab.fill(&s, &input, 1);
        let g = serving(lab, &s, &input, 3 * MIB);
        g.exec.launch(&s).unwrap();
        lab.order(&s, &other);
        lab.add(&other, &g.output, 30);
        lab.allocator.suspend(&Which::All).unwrap();
        lab.allocator.resume(&Which::All).unwrap();
        assert_eq!(lab.word(&g.output), Some(33));
    });
}
