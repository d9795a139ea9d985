//! Every move of an idle pool in every state, with a fault at each driver call in turn: what fails has changed nothing, what is away is away
//! whole, and afterwards everything goes on.

use gpupool_allocator::{Config, Contents, IdleOptions, Lending, Policy, Preset, Residency, Stream, Which};
use gpupool_device::{Call, code};
use gpupool_graph_capture::{CaptureOptions, Executable, Graph};
use gpupool_sim_device::SimDevice;
use gpupool_tests::graph_bench::{Block, EAGER, Lab, MIB};
use gpupool_tests::watched::ALLOCATOR_CALLS;

const GRAPH: u64 = 7;

/// A pool with scratch memory, a block kept in place, a copied one and one given up, and something eager beside it.
struct Bench {
    lab: Lab,
    s: Stream<SimDevice>,
    other: Stream<SimDevice>,
    input: Block,
    graph: Graph<SimDevice>,
    exec: Executable<SimDevice>,
    kept: Block,
    copied: Block,
    given_up: Block,
    loan: Option<Block>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Move {
    Park,
    Wake,
    Lend,
    Suspend,
    Resume,
    Launch,
    Capture,
}

const MOVES: [Move; 7] = [Move::Park, Move::Wake, Move::Lend, Move::Suspend, Move::Resume, Move::Launch, Move::Capture];
const STATES: [Residency; 4] = [Residency::Resident, Residency::Lent, Residency::Parked, Residency::Suspended];

/// What moves may call: what the allocator calls, and copies and launches.
fn calls() -> impl Iterator<Item = Call> {
    let of_moves = [Call::MemHostAlloc, Call::MemFreeHost, Call::MemcpyToHost, Call::MemcpyFromHost, Call::GraphLaunch];
    ALLOCATOR_CALLS.iter().copied().chain(of_moves)
}

impl Bench {
    fn new(config: &Config) -> Self {
        let lab = Lab::with(Default::default(), config.clone());
        let (s, other) = (lab.stream(), lab.stream());
        let input = lab.block(EAGER, 5 * MIB, &s);
        lab.fill(&s, &input, 20);
        let (graph, exec, [kept, copied, given_up]) = lab.capture(&s, CaptureOptions::new(), || {
            let blocks = [0, 1, 2].map(|_| lab.block(GRAPH, 3 * MIB, &s));
            let scratch = lab.block(GRAPH, 5 * MIB, &s);
            lab.copy(&s, &scratch, &input);
            lab.add(&s, &scratch, 1);
            blocks.iter().for_each(|b| lab.copy(&s, b, &scratch));
            blocks
        });
        copied.allocation().set_contents(Contents::Copied).unwrap();
        given_up.allocation().set_contents(Contents::Discarded).unwrap();
        let options = IdleOptions::new().with_lending(Lending::BeforeGrowth);
        lab.allocator.set_idle_options(graph.pool(), options).unwrap();
        exec.launch(&s).unwrap();
        lab.wait(&s);
        Self { lab, s, other, input, graph, exec, kept, copied, given_up, loan: None }
    }

    fn bring_to(&mut self, state: Residency) {
        match state {
            Residency::Lent => assert!(self.apply(Move::Lend)),
            Residency::Parked => assert!(self.apply(Move::Park)),
            Residency::Suspended => assert!(self.apply(Move::Suspend)),
            _ => {}
        }
        assert_eq!(self.residency(), state);
    }

    fn residency(&self) -> Residency {
        self.lab.allocator.residency(self.graph.pool()).unwrap()
    }

    /// Whether the move was made.
    fn apply(&mut self, how: Move) -> bool {
        let (allocator, pool) = (&self.lab.allocator, self.graph.pool());
        match how {
            Move::Park => allocator.park_pool(pool).is_ok(),
            Move::Wake => allocator.wake_pool(pool).is_ok(),
            Move::Lend => match self.lab.try_block(EAGER, 4 * MIB, &self.other) {
                Ok(block) => {
                    self.loan = Some(block);
                    true
                }
                Err(_) => false,
            },
            Move::Suspend => allocator.suspend(&Which::All).is_ok(),
            Move::Resume => allocator.resume(&Which::All).is_ok(),
            Move::Launch => self.exec.launch(&self.s).is_ok(),
            Move::Capture => {
                let begun = self.lab.captures.begin(&self.s, CaptureOptions::new().with_pool(pool));
                begun.map(drop).is_ok()
            }
        }
    }

    fn in_use(&self) -> u64 {
        self.lab.device.memory_in_use()
    }

    /// One move with one fault. Whether the move made so many calls of that kind.
    fn one(config: &Config, state: Residency, how: Move, call: Call, n: u64, error: u32) -> bool {
        let mut bench = Self::new(config);
        bench.bring_to(state);
        let away = |b: &Self| b.lab.allocator.state().pools.iter().map(|p| p.away_bytes).sum::<u64>();
        let before = (bench.in_use(), away(&bench));
        let calls = bench.lab.device.calls(call);
        bench.lab.device.fail_nth(call, n, error);
        let made = bench.apply(how);
        let more = bench.lab.device.calls(call) - calls >= n;
        bench.lab.device.clear_faults();
        bench.lab.allocator.validate().unwrap();
        if !made && how != Move::Suspend && how != Move::Resume && how != Move::Capture {
            // Nothing half done: all of it is where it was.
            let whole = bench.residency() == state && (bench.in_use(), away(&bench)) == before;
            // A launch that the driver refused has woken its pool before.
            let woken = how == Move::Launch && bench.residency() == Residency::Resident && away(&bench) == 0;
            assert!(whole || woken, "after a {how:?} that failed: {:?}, was {state:?}", bench.residency());
        }
        if made && matches!(how, Move::Wake | Move::Resume) && bench.residency().is_away() {
            panic!("a {how:?} succeeded, and the pool is {:?}", bench.residency());
        }
        bench.go_on();
        more
    }

    /// Whatever happened, everything can go on from here, and nothing is lost.
    fn go_on(mut self) {
        let lab = &self.lab;
        drop(self.loan.take());
        lab.device.run_until_idle();
        if lab.allocator.resume(&Which::All).is_err() {
            lab.allocator.resume(&Which::All).unwrap();
        }
        assert_eq!(self.residency(), Residency::Resident);
        lab.allocator.validate().unwrap();
        assert_eq!((lab.word(&self.kept), lab.word(&self.copied)), (Some(21), Some(21)));
        assert_eq!(lab.word(&self.input), Some(20));
        for value in [50, 60] {
            lab.fill(&self.s, &self.input, value);
            self.exec.launch(&self.s).unwrap();
            lab.wait(&self.s);
            assert!([&self.kept, &self.copied, &self.given_up].iter().all(|b| lab.word(b) == Some(value + 1)));
            lab.allocator.park_pool(self.graph.pool()).unwrap();
        }
        lab.assert_clean();
        let Self { lab, s, other, input, graph, exec, kept, copied, given_up, loan: _ } = self;
        drop((input, kept, copied, given_up, exec, graph, s, other));
        lab.captures.tidy();
        lab.close();
    }
}

fn matrix(config: &Config) -> u64 {
    let mut struck = 0;
    for state in STATES {
        for how in MOVES {
            for call in calls() {
                for error in [code::UNKNOWN, code::OUT_OF_MEMORY] {
                    let may_run_out = matches!(call, Call::MemCreate | Call::MemHostAlloc | Call::AddressReserve);
                    if error == code::OUT_OF_MEMORY && !may_run_out {
                        continue;
                    }
                    let mut n = 1;
                    while Bench::one(config, state, how, call, n, error) {
                        n += 1;
                        struck += 1;
                    }
                }
            }
        }
    }
    struck
}

#[test]
fn every_move_in_every_state_with_a_fault_at_each_call_with_segments() {
    let struck = matrix(&Config::new(Policy::Segments));
    println!("{struck} faults struck");
    assert!(struck > 200, "{struck}");
}

#[test]
fn every_move_in_every_state_with_a_fault_at_each_call_with_pages() {
    for preset in [Preset::Balanced, Preset::Memory] {
        let struck = matrix(&Config::new(Policy::Pages).with_preset(preset));
        println!("{preset:?}: {struck} faults struck");
        assert!(struck > 200, "{struck}");
    }
}
