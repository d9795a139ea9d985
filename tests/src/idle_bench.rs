//! What the tests of idle pools share: the policies whose pools can go away, and a graph as a serving process has it.

// As in tests: a panic is the report.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use gpupool_allocator::{Config, Policy, PoolId, Preset, Stream};
use gpupool_graph_capture::{CaptureOptions, Executable, Graph};
use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};

use crate::graph_bench::{Block, KIB, Lab};
use crate::recount::{Strictness, recount};

/// Policies whose pools can go away.
pub fn configs() -> [Config; 4] {
    [
        Config::new(Policy::Segments),
        Config::new(Policy::Pages).with_preset(Preset::Memory),
        Config::new(Policy::Pages),
        Config::new(Policy::Pages).with_preset(Preset::Latency),
    ]
}

/// A lab on a device with this scheduler.
pub fn lab(scheduler: Scheduler, config: Config) -> Lab {
    Lab::with(SimConfig::default().with_scheduler(scheduler), config)
}

/// A graph with a pool of its own that copies `input` (outside) through scratch memory to an output that is held.
pub struct Serving {
    _graph: Graph<SimDevice>,
    /// It, executable.
    pub exec: Executable<SimDevice>,
    /// What a run writes: the input and two.
    pub output: Block,
    /// Its pool.
    pub pool: PoolId,
}

/// The party of a graph's pool.
pub const GRAPH: u64 = 7;

/// Captures such a graph.
pub fn serving(lab: &Lab, s: &Stream<SimDevice>, input: &Block, bytes: u64) -> Serving {
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
    Serving { _graph: graph, exec, output, pool }
}

/// Every policy under every kind of schedule.
pub fn everywhere(test: impl Fn(&Lab)) {
    for config in configs() {
        for scheduler in [Scheduler::InOrder, Scheduler::Adversarial, Scheduler::Random { seed: 3 }] {
            let lab = lab(scheduler, config.clone());
            test(&lab);
            lab.assert_clean();
            recount(&lab.allocator.state(), Strictness::Exact).unwrap();
        }
    }
}
