//! Idle pools under schedules of every kind, with the race detector: whatever moves where, every replay computes what it should, and no run is
//! lent and the replay's at once.
//!
//! `GPUPOOL_CASES` says how many random schedules; 1,000 if it is not set.

use gpupool_allocator::{
    AllocError, Config, Contents, IdleOptions, Lending, Policy, PoolError, Residency, Stream, Which,
};
use gpupool_graph_capture::{CaptureOptions, Executable, Graph, LaunchError};
use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};
use gpupool_tests::graph_bench::{Block, Dice, EAGER, KIB, Lab, MIB, Named, Schedule, schedules};

/// A graph, its input outside and its output held in its pool.
struct Served {
    graph: Graph<SimDevice>,
    exec: Executable<SimDevice>,
    input: Block,
    output: Block,
    /// Where it was launched or its input written last.
    last: usize,
    expected: Option<u32>,
}

struct Loan {
    block: Block,
    stream: usize,
    value: u32,
}

struct World {
    lab: Lab,
    streams: Vec<Stream<SimDevice>>,
    graphs: Vec<Served>,
    loans: Vec<Loan>,
    suspended: bool,
    refused: u64,
}

impl World {
    fn new(schedule: Schedule, config: Config) -> Self {
        let lab = Lab::with(SimConfig::default().with_scheduler(schedule.scheduler), config);
        let streams: Vec<_> = (0..3).map(|_| lab.stream()).collect();
        let mut graphs = Vec::new();
        let bytes_of = |n: u64| (2 + 3 * n) * MIB;
        // Before any pool lends.
        let inputs: Vec<_> = (0..3).map(|n| lab.block(EAGER, bytes_of(n), &streams[n as usize])).collect();
        for (n, input) in (0..3_u64).zip(inputs) {
            let (s, party, bytes) = (&streams[n as usize], 10 + n, bytes_of(n));
            lab.fill(s, &input, 0);
            let (graph, exec, output) = lab.capture(s, CaptureOptions::new(), || {
                let output = lab.block(party, 64 * KIB, s);
                let (a, b) = (lab.block(party, bytes, s), lab.block(party, bytes, s));
                lab.copy(s, &a, &input);
                lab.add(s, &a, 1);
                lab.copy(s, &b, &a);
                lab.add(s, &b, 1);
                lab.copy(s, &output, &b);
                output
            });
            let options = IdleOptions::new()
                .with_lending(Lending::BeforeGrowth)
                .with_park_when_short(true)
                .with_parked_contents([Contents::InPlace, Contents::Copied][n as usize % 2]);
            lab.allocator.set_idle_options(graph.pool(), options).unwrap();
            graphs.push(Served { graph, exec, input, output, last: n as usize, expected: None });
        }
        Self { lab, streams, graphs, loans: Vec::new(), suspended: false, refused: 0 }
    }

    /// What `stream` does with a graph's input and output from now on comes after what was done so far.
    fn on(&mut self, at: usize, stream: usize) {
        let before = std::mem::replace(&mut self.graphs[at].last, stream);
        if before != stream {
            self.lab.order(&self.streams[before], &self.streams[stream]);
        }
    }

    fn launch(&mut self, at: usize, stream: usize, value: u32) {
        if self.suspended {
            assert!(self.graphs[at].exec.launch(&self.streams[stream]).is_err());
            return;
        }
        self.on(at, stream);
        let (lab, s, g) = (&self.lab, &self.streams[stream], &mut self.graphs[at]);
        lab.fill(s, &g.input, value);
        match g.exec.launch(s) {
            Ok(_) => g.expected = Some(value + 2),
            Err(LaunchError::Pool { source: AllocError::Pool(PoolError::LoansOut { .. }), .. }) => self.refused += 1,
            Err(e) => panic!("{e}"),
        }
    }

    fn lend(&mut self, dice: &mut Dice) {
        let (stream, bytes) = (dice.below(3) as usize, 2 * MIB + dice.below(4) * MIB + dice.below(9) * 4 * KIB);
        let s = &self.streams[stream];
        match self.lab.try_block(EAGER, bytes, s) {
            Ok(block) => {
                let value = dice.below(1 << 20) as u32;
                self.lab.fill(s, &block, value);
                self.loans.push(Loan { block, stream, value });
            }
            Err(e) => assert!(self.suspended, "{e}"),
        }
    }

    fn give_back(&mut self, dice: &mut Dice) {
        if self.loans.is_empty() {
            return;
        }
        let at = dice.below(self.loans.len() as u64) as usize;
        let Loan { block, stream, value } = self.loans.swap_remove(at);
        if self.suspended {
            return;
        }
        match dice.below(3) {
            0 => {
                self.lab.wait(&self.streams[stream]);
                assert_eq!(self.lab.word(&block), Some(value));
            }
            1 => {
                let other = (stream + 1) % 3;
                self.lab.order(&self.streams[stream], &self.streams[other]);
                self.lab.add(&self.streams[other], &block, 1);
                block.free_on(&self.streams[other]);
            }
            _ => {}
        }
    }

    fn step(&mut self, dice: &mut Dice) {
        let at = dice.below(3) as usize;
        let pool = self.graphs[at].graph.pool();
        let allocator = self.lab.allocator.clone();
        match dice.below(20) {
            0..6 => self.launch(at, dice.below(3) as usize, dice.below(1000) as u32),
            6..11 => self.lend(dice),
            11..15 => self.give_back(dice),
            15 | 16 => match allocator.park_pool(pool) {
                Ok(_) | Err(AllocError::Pool(PoolError::LoansOut { .. })) => {}
                Err(e) => panic!("{e}"),
            },
            17 if !self.suspended => drop(allocator.wake_pool(pool).unwrap()),
            18 => match allocator.suspend(&Which::All) {
                Ok(_) => self.suspended = true,
                Err(AllocError::Pool(PoolError::LoansOut { .. })) => {}
                Err(e) => panic!("{e}"),
            },
            _ => {
                allocator.resume(&Which::All).unwrap();
                self.suspended = false;
            }
        }
    }

    fn finish(mut self) {
        let lab = &self.lab;
        lab.allocator.resume(&Which::All).unwrap();
        lab.device.run_until_idle();
        for loan in &self.loans {
            assert_eq!(lab.word(&loan.block), Some(loan.value));
        }
        self.loans.clear();
        for g in &self.graphs {
            if let Some(expected) = g.expected {
                assert_eq!(lab.word(&g.output), Some(expected));
            }
            lab.allocator.wake_pool(g.graph.pool()).unwrap();
            assert_eq!(lab.allocator.residency(g.graph.pool()).unwrap(), Residency::Resident);
        }
        lab.assert_clean();
        let Self { lab, streams, graphs, .. } = self;
        drop((graphs, streams));
        lab.captures.tidy();
        lab.close();
    }
}

fn policies() -> [Config; 2] {
    [Config::new(Policy::Segments), Config::new(Policy::Pages)]
}

#[test]
fn whatever_moves_every_replay_computes_what_it_should_and_nothing_races() {
    let cases = std::env::var("GPUPOOL_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(1_000);
    let (mut loans, mut refused) = (0, 0);
    for (at, schedule) in schedules(cases).enumerate() {
        let _named = Named(schedule);
        let mut world = World::new(schedule, policies()[at % 2].clone());
        let mut dice = Dice::new(schedule.seed.wrapping_mul(31) + at as u64);
        for _ in 0..40 {
            world.step(&mut dice);
        }
        loans += world.lab.allocator.stats().idle.loans;
        refused += world.refused;
        world.finish();
    }
    println!("{cases} random schedules and the fixed ones: {loans} loans, {refused} launches refused for one, 0 races");
    assert!(loans > cases, "{loans}");
}

/// Loans between replays; each leaves what it wrote, and each replay what it computed.
fn ten_thousand_loans(config: Config, scheduler: Scheduler) {
    const LOANS: u64 = 10_000;
    let lab = Lab::with(SimConfig::default().with_scheduler(scheduler), config);
    let streams = [lab.stream(), lab.stream()];
    let input = lab.block(EAGER, 24 * MIB, &streams[0]);
    lab.fill(&streams[0], &input, 5);
    lab.wait(&streams[0]);
    let graphs: Vec<_> = streams
        .iter()
        .zip(20..)
        .map(|(s, party)| {
            let (graph, exec, output) = lab.capture(s, CaptureOptions::new(), || {
                let output = lab.block(party, 4 * KIB, s);
                let (a, b) = (lab.block(party, 24 * MIB, s), lab.block(party, 24 * MIB, s));
                lab.copy(s, &a, &input);
                lab.copy(s, &b, &a);
                lab.add(s, &b, 1);
                lab.copy(s, &output, &b);
                output
            });
            let options = IdleOptions::new().with_lending(Lending::BeforeGrowth);
            lab.allocator.set_idle_options(graph.pool(), options).unwrap();
            (graph, exec, output)
        })
        .collect();
    let mut dice = Dice::new(1);
    let mut kept: Vec<(Block, usize, u32)> = Vec::new();
    let mut round = 0;
    while lab.allocator.stats().idle.loans < LOANS {
        round += 1;
        let at = dice.below(2) as usize;
        let (s, (_, exec, output)) = (&streams[at], &graphs[at]);
        let loan = lab.block(EAGER, 2 * MIB + dice.below(500) * 4 * KIB, s);
        lab.fill(s, &loan, round);
        kept.push((loan, at, round));
        while kept.len() > dice.below(3) as usize {
            let (loan, at, value) = kept.remove(0);
            if dice.below(8) == 0 {
                lab.wait(&streams[at]);
                assert_eq!(lab.word(&loan), Some(value));
            }
            if dice.below(8) == 0 {
                lab.order(&streams[at], &streams[1 - at]);
                lab.add(&streams[1 - at], &loan, 1);
                loan.free_on(&streams[1 - at]);
            }
        }
        match exec.launch(s) {
            Ok(_) => {}
            Err(LaunchError::Pool { source: AllocError::Pool(PoolError::LoansOut { .. }), .. }) => {
                assert!(!kept.is_empty());
            }
            Err(e) => panic!("{e}"),
        }
        if round % 16 == 0 {
            streams.iter().for_each(|s| lab.wait(s));
            assert_eq!(lab.word(output).unwrap_or(6), 6);
        }
    }
    kept.clear();
    lab.device.run_until_idle();
    lab.assert_clean();
    println!("{LOANS} loans in {round} rounds under {scheduler:?}: 0 races");
}

#[test]
fn ten_thousand_loans_between_replays_race_with_nothing() {
    for (config, scheduler) in policies().into_iter().zip([Scheduler::Adversarial, Scheduler::Random { seed: 5 }]) {
        ten_thousand_loans(config, scheduler);
    }
}
