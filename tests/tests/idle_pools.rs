//! Idle pools on the simulated device: parked and woken, lent, suspended and resumed, with contents and addresses as they were.

use gpupool_allocator::{
    AllocError, Config, Contents, IdleOptions, Lending, OnLoan, OnUse, Policy, PoolError, PoolId, Preset, Residency,
    Stream, Which,
};
use gpupool_device::Call;
use gpupool_graph_capture::{CaptureOptions, Executable, Graph, LaunchError};
use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};
use gpupool_tests::graph_bench::{Block, EAGER, KIB, Lab, MIB};

/// Policies whose pools can go away.
fn configs() -> [Config; 4] {
    [
        Config::new(Policy::Segments),
        Config::new(Policy::Pages).with_preset(Preset::Memory),
        Config::new(Policy::Pages),
        Config::new(Policy::Pages).with_preset(Preset::Latency),
    ]
}

fn lab(scheduler: Scheduler, config: Config) -> Lab {
    Lab::with(SimConfig::default().with_scheduler(scheduler), config)
}

/// A graph with a pool of its own that copies `input` (outside) through scratch memory to an output that is held.
struct Serving {
    graph: Graph<SimDevice>,
    exec: Executable<SimDevice>,
    output: Block,
    pool: PoolId,
}

/// The party of a graph's pool.
const GRAPH: u64 = 7;

fn serving(lab: &Lab, s: &Stream<SimDevice>, input: &Block, bytes: u64) -> Serving {
    let (graph, exec, output) = lab.capture(s, CaptureOptions::new(), || {
        let scratch = lab.block(GRAPH, bytes, s);
        let more = lab.block(GRAPH, bytes, s);
        let output = lab.block(GRAPH, 4 * KIB, s);
        lab.copy(s, &scratch, input);
        lab.add(s, &scratch, 1);
        lab.copy(s, &more, &scratch);
        lab.add(s, &more, 1);
        lab.copy(s, &output, &more);
        output
    });
    let pool = graph.pool();
    Serving { graph, exec, output, pool }
}

/// Every policy under every kind of schedule.
fn everywhere(test: impl Fn(&Lab)) {
    for config in configs() {
        for scheduler in [Scheduler::InOrder, Scheduler::Adversarial, Scheduler::Random { seed: 3 }] {
            let lab = lab(scheduler, config.clone());
            test(&lab);
            lab.assert_clean();
        }
    }
}

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
