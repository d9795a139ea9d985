//! A device that is not the first: reports, snapshots and figures say so, idle pools move on it, and streams of another device are refused by
//! every call that takes one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::sync::Arc;

use gpupool_allocator::history::HistoryOptions;
use gpupool_allocator::{
    AllocError, CaptureRegistry, Config, FreeError, IdleOptions, Lending, PoolError, Residency, Which,
};
use gpupool_device::{CaptureMode, GraphDevice};
use gpupool_graph_capture::{CaptureError, CaptureOptions, LaunchError};
use gpupool_replay::trace::what_if;
use gpupool_sim_device::{SimConfig, SimWorld};
use gpupool_snapshot::{Snapshot, Summary, prometheus};
use gpupool_tests::graph_bench::{EAGER, Lab, MIB};
use gpupool_tests::idle_bench::{configs, serving};

/// Two devices of a world, with one registry of captures.
fn labs(config: &Config) -> [Lab; 2] {
    let world = SimWorld::new(2, SimConfig::default().with_capacity(200 * MIB));
    let registry = Arc::new(CaptureRegistry::default());
    [0, 1].map(|ordinal| Lab::on(Arc::new(world.device(ordinal).unwrap()), config.clone(), Arc::clone(&registry)))
}

#[test]
fn what_is_said_of_the_second_device_names_it() {
    for config in configs() {
        let [_first, second] = labs(&config);
        let s = second.stream();
        second.allocator.record_history(Some(HistoryOptions::new(1000)));
        let block = second.block(EAGER, 3 * MIB, &s);
        second.fill(&s, &block, 1);
        second.wait(&s);
        let AllocError::OutOfMemory(report) = second.allocator.alloc(500 * MIB, &s).unwrap_err() else { panic!() };
        assert_eq!(report.device, 1);
        assert!(report.to_string().starts_with("out of memory on GPU 1: "), "{report}");
        assert!(report.pytorch_message().contains("GPU 1 has"), "{}", report.pytorch_message());
        let state = second.allocator.state();
        let snapshot = Snapshot::of(&state, "");
        assert_eq!((state.device, snapshot.device_traces.len()), (1, 2));
        let mut file = Vec::new();
        snapshot.write_pickle(&mut file).unwrap();
        let read = Snapshot::read("second", &file[..]).unwrap();
        assert!(!read.segments.is_empty() && read.segments.iter().all(|segment| segment.device == 1));
        let summary = Summary::of(&read);
        assert_eq!((summary.peaks[0].device, summary.out_of_memory[0].device), (1, 1));
        let replayed = what_if("second", &read).unwrap();
        assert_eq!(replayed.trace.counted, 2, "{:?}", replayed.notes);
        assert!(prometheus(&second.allocator.stats(), 1).contains("device=\"1\""));
    }
}

#[test]
fn streams_of_another_device_are_refused_and_change_nothing() {
    for config in configs() {
        let [first, second] = labs(&config);
        let (here, there) = (first.stream(), second.stream());
        let block = second.block(EAGER, 3 * MIB, &there);
        let foreign = |refused: bool| assert!(refused);
        foreign(matches!(second.allocator.alloc(MIB, &here), Err(AllocError::ForeignStream { .. })));
        foreign(matches!(
            second.allocator.alloc_at(MIB, block.address(), &here),
            Err(AllocError::ForeignStream { .. })
        ));
        foreign(matches!(second.allocator.retire_stream(&here), Err(AllocError::ForeignStream { .. })));
        foreign(matches!(second.allocator.set_current_stream(&here), Err(AllocError::ForeignStream { .. })));
        foreign(matches!(block.allocation().record_stream(&here), Err(FreeError::ForeignStream { .. })));
        let mark = here.mark_work().unwrap();
        foreign(matches!(block.allocation().record_last_use(&mark), Err(FreeError::ForeignStream { .. })));
        let begun = second.captures.begin(&here, CaptureOptions::new());
        foreign(matches!(begun, Err(CaptureError::Alloc(AllocError::ForeignStream { .. }))));
        first.device.begin_capture(here.handle(), CaptureMode::Relaxed).unwrap();
        let adopted = second.captures.adopt(&here, gpupool_graph_capture::PoolChoice::New);
        foreign(matches!(adopted, Err(CaptureError::Alloc(AllocError::ForeignStream { .. }))));
        let graph = first.device.end_capture(here.handle()).unwrap();
        first.device.graph_destroy(graph).unwrap();
        let input = second.block(EAGER, MIB, &there);
        second.fill(&there, &input, 4);
        let g = serving(&second, &there, &input, MIB);
        foreign(matches!(g.exec.launch(&here), Err(LaunchError::ForeignStream { .. })));
        g.exec.launch(&there).unwrap();
        second.wait(&there);
        assert_eq!(second.word(&g.output), Some(6));
        assert_eq!(first.reserved(), 0);
        first.assert_clean();
        second.assert_clean();
        drop((block, input, g, mark, here, there));
        second.close();
        first.close();
    }
}

#[test]
fn idle_pools_of_the_second_device_move_by_themselves() {
    for config in configs() {
        let labs = labs(&config);
        let streams = [labs[0].stream(), labs[1].stream()];
        let inputs = [0, 1].map(|at: usize| {
            let input = labs[at].block(EAGER, 3 * MIB, &streams[at]);
            labs[at].fill(&streams[at], &input, 4 + at as u32);
            input
        });
        let graphs = [0, 1].map(|at: usize| serving(&labs[at], &streams[at], &inputs[at], 3 * MIB));
        let options = IdleOptions::new().with_tag("night").with_lending(Lending::BeforeGrowth);
        labs[1].allocator.set_idle_options(graphs[1].pool, options).unwrap();
        let elsewhere = labs[0].device.memory_in_use();
        labs[1].allocator.suspend(&Which::All).unwrap();
        assert_eq!((labs[0].device.memory_in_use(), labs[1].device.memory_in_use()), (elsewhere, 0));
        assert_eq!(labs[1].allocator.residency(graphs[1].pool).unwrap(), Residency::Suspended);
        // A pool is one allocator's: the other knows nothing of it.
        let unknown = labs[0].allocator.park_pool(graphs[1].pool);
        assert!(matches!(unknown, Err(AllocError::Pool(PoolError::Unknown { .. }))), "{unknown:?}");
        graphs[0].exec.launch(&streams[0]).unwrap();
        assert!(graphs[1].exec.launch(&streams[1]).is_err());
        labs[1].allocator.resume(&Which::All).unwrap();
        labs[1].allocator.park_pool(graphs[1].pool).unwrap();
        graphs[1].exec.launch(&streams[1]).unwrap();
        for at in [0, 1] {
            labs[at].wait(&streams[at]);
            assert_eq!(labs[at].word(&graphs[at].output), Some(6 + at as u32));
            labs[at].assert_clean();
        }
    }
}
