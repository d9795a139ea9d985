//! Idle pools beside everything else that an allocator is asked for: limits, trims, decay, reserved memory, checkpoints, scopes, streams that
//! retire. Whatever is refused, every invariant holds after each call, kept contents are what they were, and nothing is left.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use gpupool_allocator::history::{Action, HistoryOptions};
use gpupool_allocator::state::BackingKind;
use gpupool_allocator::{
    AllocError, Allocation, Config, Contents, Filter, IdleOptions, Lending, Moved, OnUse, Part, Policy, PoolCheckpoint,
    PoolError, PoolId, Residency, Stream, Which,
};
use gpupool_device::Workbench;
use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};
use gpupool_snapshot::Snapshot;
use gpupool_tests::graph_bench::{Block, Dice, EAGER, KIB, Lab, MIB};
use gpupool_tests::idle_bench::{Serving, configs, lab, serving};

/// Calls of one run.
const STEPS: u32 = 60;

/// A block with what is in it.
struct Kept {
    block: Block,
    word: u32,
    /// Its contents were given up at some time: nobody knows what is in it.
    given_up: bool,
}

struct Run {
    lab: Lab,
    capacity: u64,
    dice: Dice,
    streams: Vec<Stream<SimDevice>>,
    input: Block,
    eager: Vec<Kept>,
    graphs: Vec<Serving>,
    /// A pool of scopes, its live blocks, and layouts of it.
    scoped: PoolId,
    inside: Vec<Allocation<SimDevice>>,
    layouts: Vec<PoolCheckpoint>,
    word: u32,
    log: Vec<String>,
}

impl Run {
    fn new(config: Config, capacity: u64, scheduler: Scheduler, seed: u64) -> Self {
        let lab = Lab::with(SimConfig::default().with_capacity(capacity).with_scheduler(scheduler), config);
        let streams: Vec<_> = (0..3).map(|_| lab.stream()).collect();
        let input = lab.block(EAGER, 2 * MIB, &streams[0]);
        lab.fill(&streams[0], &input, 100);
        lab.wait(&streams[0]);
        let scoped = PoolId::fresh();
        lab.allocator.create_pool(scoped).unwrap();
        let (eager, graphs, inside, layouts, log) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let dice = Dice::new(seed);
        Self { lab, capacity, dice, streams, input, eager, graphs, scoped, inside, layouts, word: 0, log }
    }

    /// Says what was done, and what came of it.
    fn said<T: std::fmt::Debug>(&mut self, what: &str, result: Result<T, impl std::fmt::Display>) {
        let result = result.map_err(|e| e.to_string().lines().next().unwrap_or_default().to_owned());
        self.log.push(format!("{what}: {result:?}"));
    }

    fn pool(&mut self) -> PoolId {
        let pools: Vec<PoolId> = self.graphs.iter().map(|g| g.pool).chain([self.scoped]).collect();
        *self.dice.one_of(&pools)
    }

    fn which(&mut self) -> Which {
        if self.dice.below(2) == 0 { Which::All } else { Which::Tag("a".into()) }
    }

    /// Whether the input can be read, so that a graph may run.
    fn is_there(&self, block: &Block) -> bool {
        self.lab.device.read_bytes(block.address(), 4).is_some()
    }

    fn step(&mut self) {
        let at = self.dice.below(3) as usize;
        let s = self.streams[at].clone();
        match self.dice.below(22) {
            0..=2 => self.take_a_block(&s),
            3 | 4 => self.free_a_block(&s),
            5 | 6 => {
                let pool = self.pool();
                let parked = self.lab.allocator.park_pool(pool);
                self.said("park", parked);
            }
            7 => {
                let pool = self.pool();
                let woken = self.lab.allocator.wake_pool(pool);
                self.said("wake", woken);
            }
            8 => {
                let which = self.which();
                let suspended = self.lab.allocator.suspend(&which);
                self.said("suspend", suspended);
            }
            9 | 10 => {
                let which = self.which();
                let resumed = self.lab.allocator.resume(&which);
                self.said("resume", resumed);
            }
            11 | 12 => self.launch(&s),
            13 => {
                let (pool, bytes) = (self.pool(), *self.dice.one_of(&[1, MIB, 5 * MIB]));
                let part = *self.dice.one_of(&[Part::Small, Part::Large]);
                let reserved = self.lab.allocator.reserve_pool(pool, part, bytes);
                self.said("reserve", reserved);
            }
            14 => {
                let a = &self.lab.allocator;
                let trimmed = match self.dice.below(4) {
                    0 => a.empty_cache(),
                    1 => a.trim(),
                    2 => a.decay(),
                    _ => a.empty_cache_of(self.scoped),
                };
                self.said("trim", trimmed.map(|trimmed| trimmed.released_bytes));
            }
            15 => {
                let limit = *self.dice.one_of(&[None, Some(0), Some(30 * MIB), Some(200 * MIB)]);
                self.lab.allocator.set_memory_limit(limit);
                self.said("limit", Ok::<_, String>(limit));
            }
            16 => self.choose_options(),
            17 => self.choose_contents(),
            18 => {
                self.lab.wait(&s);
                self.lab.allocator.retire_stream(&s).unwrap();
                self.lab.device.stream_destroy(s.handle()).unwrap();
                self.streams[at] = self.lab.stream();
                self.said("retire", Ok::<_, String>(()));
            }
            19 => self.take_a_scoped_block(&s),
            20 => self.checkpoint(&s),
            _ => self.graph_comes_or_goes(&s),
        }
    }

    fn take_a_block(&mut self, s: &Stream<SimDevice>) {
        let bytes = *self.dice.one_of(&[300, 40 * KIB, MIB, 3 * MIB, 7 * MIB]);
        self.word += 1;
        let made = self.lab.try_block(EAGER, bytes, s).map(|block| {
            self.lab.fill(s, &block, self.word);
            self.lab.wait(s);
            self.eager.push(Kept { block, word: self.word, given_up: false });
            bytes
        });
        self.said("alloc", made);
    }

    fn free_a_block(&mut self, s: &Stream<SimDevice>) {
        if self.eager.is_empty() {
            return;
        }
        let gone = self.eager.swap_remove(self.dice.below(self.eager.len() as u64) as usize);
        if self.dice.below(2) == 0 {
            gone.block.record(s);
        }
        drop(gone);
        self.said("free", Ok::<_, String>(()));
    }

    fn launch(&mut self, s: &Stream<SimDevice>) {
        if self.graphs.is_empty() || !self.is_there(&self.input) {
            return;
        }
        let graph = self.dice.below(self.graphs.len() as u64) as usize;
        let g = &self.graphs[graph];
        let launched = g.exec.launch(s).map(|_| {
            self.lab.wait(s);
            assert_eq!(self.lab.word(&g.output), Some(102), "{:#?}", self.log);
        });
        self.said("launch", launched);
    }

    fn choose_options(&mut self) {
        let options = IdleOptions::new()
            .with_tag(*self.dice.one_of(&["a", "b"]))
            .with_exclusive(self.dice.below(3) == 0)
            .with_lending(*self.dice.one_of(&[Lending::Never, Lending::WhenShort, Lending::BeforeGrowth]))
            .with_park_when_short(self.dice.below(2) == 0)
            .with_on_use(*self.dice.one_of(&[OnUse::Wake, OnUse::Wake, OnUse::Refuse]))
            .with_parked_contents(*self.dice.one_of(&[Contents::Usual, Contents::InPlace, Contents::Copied]));
        let pool = self.pool();
        let set = self.lab.allocator.set_idle_options(pool, options.clone()).map(|()| options);
        self.said("options", set);
    }

    fn choose_contents(&mut self) {
        let all = [Contents::Usual, Contents::InPlace, Contents::Copied, Contents::Discarded];
        let contents = *self.dice.one_of(&all);
        if self.eager.is_empty() {
            return;
        }
        let kept = self.dice.below(self.eager.len() as u64) as usize;
        let set = self.eager[kept].block.allocation().set_contents(contents).map(|()| contents);
        self.eager[kept].given_up |= contents == Contents::Discarded;
        self.said("contents", set);
    }

    fn take_a_scoped_block(&mut self, s: &Stream<SimDevice>) {
        let a = &self.lab.allocator;
        a.begin_allocate_to_pool(self.scoped, Filter::Thread(std::thread::current().id())).unwrap();
        let made = a.alloc(*self.dice.one_of(&[300, MIB, 5 * MIB]), s);
        a.end_allocate_to_pool(self.scoped).unwrap();
        a.release_pool(self.scoped).unwrap();
        let made = made.map(|block| self.inside.push(block));
        self.said("alloc in a scope", made);
    }

    fn checkpoint(&mut self, s: &Stream<SimDevice>) {
        match self.dice.below(3) {
            0 => {
                let freed = self.inside.pop().map(|block| block.size());
                self.said("free in a scope", Ok::<_, String>(freed));
            }
            1 => {
                let noted = self.lab.allocator.checkpoint_pool(self.scoped).map(|layout| self.layouts.push(layout));
                self.said("checkpoint", noted);
            }
            _ if !self.layouts.is_empty() => {
                let layout = self.dice.one_of(&self.layouts).clone();
                let restored = self.lab.allocator.restore_pool(&layout, s);
                let restored = restored.map(|restored| self.inside = restored.allocated);
                self.said("restore", restored);
            }
            _ => {}
        }
    }

    fn graph_comes_or_goes(&mut self, s: &Stream<SimDevice>) {
        if self.graphs.len() > 2 || (self.dice.below(3) == 0 && !self.graphs.is_empty()) {
            drop(self.graphs.swap_remove(self.dice.below(self.graphs.len() as u64) as usize));
            self.said("graph goes", Ok::<_, String>(()));
        } else if self.is_there(&self.input)
            && self.lab.allocator.memory_limit().is_none()
            && self.lab.device.memory_in_use() <= 16 * MIB
        {
            let made = serving(&self.lab, s, &self.input, 2 * MIB);
            self.said("graph comes", Ok::<_, String>(made.pool));
            self.graphs.push(made);
        }
    }

    fn check(&self) {
        self.lab.allocator.validate().unwrap_or_else(|e| panic!("{e}: {:#?}", self.log));
        assert_eq!(self.lab.device.reports(), [], "{:#?}", self.log);
        for kept in self.eager.iter().filter(|kept| !kept.given_up && self.is_there(&kept.block)) {
            assert_eq!(self.lab.word(&kept.block), Some(kept.word), "{:#?}", self.log);
        }
    }

    fn end(mut self) {
        self.lab.allocator.set_memory_limit(None);
        self.eager.clear();
        self.inside.clear();
        match self.lab.allocator.resume(&Which::All) {
            Ok(_) => {
                for pool in self.graphs.iter().map(|g| g.pool).chain([self.scoped]) {
                    assert_eq!(self.lab.allocator.residency(pool).unwrap(), Residency::Resident, "{:#?}", self.log);
                }
                assert_eq!(self.lab.word(&self.input), Some(100), "{:#?}", self.log);
            }
            // Pools have grown while others were away, and there is not so much memory.
            Err(error) => {
                let away: u64 = self.lab.allocator.state().pools.iter().map(|pool| pool.away_bytes).sum();
                assert!(self.lab.device.memory_in_use() + away > self.capacity, "{error}: {:#?}", self.log);
            }
        }
        let Self { lab, streams, input, graphs, scoped, .. } = self;
        drop((graphs, input));
        lab.allocator.release_pool(scoped).unwrap();
        streams.iter().for_each(|s| lab.wait(s));
        lab.device.run_until_idle();
        drop(streams);
        lab.close();
    }
}

#[test]
fn whatever_else_is_asked_idle_pools_keep_their_promises() {
    let cases = std::env::var("GPUPOOL_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(72);
    for seed in 0..cases {
        let config = configs()[seed as usize % 4].clone();
        let capacity = [64 * MIB, 200 * MIB, 4096 * MIB][seed as usize / 4 % 3];
        let scheduler =
            [Scheduler::InOrder, Scheduler::Adversarial, Scheduler::Random { seed }][seed as usize / 12 % 3];
        let mut run = Run::new(config, capacity, scheduler, seed);
        for _ in 0..STEPS {
            run.step();
            run.check();
        }
        run.end();
    }
}

#[test]
fn a_history_tells_what_goes_away_and_comes_back() {
    for config in configs() {
        let lab = lab(Scheduler::InOrder, config.clone());
        let s = lab.stream();
        lab.allocator.record_history(Some(HistoryOptions::new(10_000)));
        let input = lab.block(EAGER, 12 * MIB, &s);
        lab.fill(&s, &input, 4);
        let g = serving(&lab, &s, &input, 12 * MIB);
        // The address and bytes that the events say are there, and those of the state.
        let agrees = || {
            let state = lab.allocator.state();
            let there = state.segments.iter().filter(|segment| segment.backing != BackingKind::Away);
            let held: u64 = there.map(|segment| segment.size).sum();
            assert_eq!(held, lab.reserved());
            let mut told = 0;
            for event in state.history.as_ref().unwrap().events() {
                match event.action {
                    Action::SegmentAlloc | Action::SegmentBack | Action::SegmentMap => told += event.size,
                    Action::SegmentFree | Action::SegmentAway | Action::SegmentUnmap => told -= event.size,
                    _ => {}
                }
            }
            assert_eq!(told, held, "{config:?}");
        };
        agrees();
        assert!(lab.allocator.park_pool(g.pool).unwrap().bytes > 0);
        agrees();
        g.exec.launch(&s).unwrap();
        lab.wait(&s);
        agrees();
        lab.allocator.suspend(&Which::All).unwrap();
        agrees();
        lab.allocator.resume(&Which::All).unwrap();
        agrees();
        lab.allocator.park_pool(g.pool).unwrap();
        drop(g);
        lab.allocator.empty_cache().unwrap();
        agrees();
    }
}

// What is lent is a live block of the pool, which a restored layout would take from its borrower.
#[test]
fn a_layout_is_neither_noted_nor_brought_back_while_a_run_is_lent() {
    for config in configs() {
        let lab = lab(Scheduler::InOrder, config);
        let s = lab.stream();
        let pool = PoolId::fresh();
        lab.allocator.create_pool(pool).unwrap();
        lab.allocator.reserve_pool(pool, Part::Large, 12 * MIB).unwrap();
        lab.allocator.set_idle_options(pool, IdleOptions::new().with_lending(Lending::BeforeGrowth)).unwrap();
        let layout = lab.allocator.checkpoint_pool(pool).unwrap();
        let loan = lab.block(EAGER, 3 * MIB, &s);
        assert_eq!(lab.allocator.residency(pool).unwrap(), Residency::Lent);
        lab.fill(&s, &loan, 7);
        let lent = |result: Result<(), AllocError>| {
            assert!(matches!(result, Err(AllocError::Pool(PoolError::LoansOut { loans: 1, .. }))), "{result:?}");
        };
        lent(lab.allocator.restore_pool(&layout, &s).map(drop));
        lent(lab.allocator.checkpoint_pool(pool).map(drop));
        lab.wait(&s);
        assert_eq!(lab.word(&loan), Some(7));
        drop(loan);
        assert_eq!(lab.allocator.residency(pool).unwrap(), Residency::Resident);
        assert!(lab.allocator.restore_pool(&layout, &s).unwrap().allocated.is_empty());
        lab.allocator.release_pool(pool).unwrap();
        drop(s);
        lab.close();
    }
}

#[test]
fn a_pool_that_needs_nothing_comes_back_whatever_the_limit() {
    for config in configs() {
        let lab = lab(Scheduler::InOrder, config);
        let s = lab.stream();
        let _block = lab.block(EAGER, 3 * MIB, &s);
        let pool = PoolId::fresh();
        lab.allocator.create_pool(pool).unwrap();
        assert_eq!(lab.allocator.park_pool(pool).unwrap(), Moved::default());
        lab.allocator.set_memory_limit(Some(0));
        assert_eq!(lab.allocator.wake_pool(pool).unwrap(), Moved::default());
        assert_eq!(lab.allocator.residency(pool).unwrap(), Residency::Resident);
    }
}

#[test]
fn a_pool_that_comes_back_waits_for_freed_blocks_that_keep_memory() {
    let lab = Lab::with(SimConfig::default().with_capacity(64 * MIB), Config::new(Policy::Segments));
    let (s, other) = (lab.stream(), lab.stream());
    let pool = PoolId::fresh();
    lab.allocator.create_pool(pool).unwrap();
    lab.allocator.reserve_pool(pool, Part::Large, 20 * MIB).unwrap();
    lab.allocator.park_pool(pool).unwrap();
    let blocks: Vec<Block> = (0..3).map(|_| lab.block(EAGER, 20 * MIB, &s)).collect();
    // Freed, but another stream still uses them.
    for block in blocks {
        block.record(&other);
        lab.fill(&other, &block, 1);
    }
    assert_eq!(lab.allocator.wake_pool(pool).unwrap().bytes, 20 * MIB);
    lab.allocator.release_pool(pool).unwrap();
    lab.assert_clean();
}

// A free block may lie in pages that go and in one that stays for the block behind it.
#[test]
fn a_snapshot_of_a_parked_pool_is_one_that_can_be_read() {
    for config in configs() {
        let lab = lab(Scheduler::InOrder, config);
        let s = lab.stream();
        let pool = PoolId::fresh();
        lab.allocator.create_pool(pool).unwrap();
        lab.allocator.begin_allocate_to_pool(pool, Filter::Thread(std::thread::current().id())).unwrap();
        let blocks: Vec<_> = (0..6).map(|_| lab.allocator.alloc(3 * MIB, &s).unwrap()).collect();
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        let kept: Vec<_> = blocks.into_iter().enumerate().filter(|(at, _)| at % 3 == 2).collect();
        lab.allocator.park_pool(pool).unwrap();
        let state = lab.allocator.state();
        for segment in &state.segments {
            let blocks: u64 = segment.blocks.iter().map(|block| block.size).sum();
            assert_eq!(blocks, segment.size, "{segment:?}");
        }
        let mut file = Vec::new();
        Snapshot::of(&state, "").write_json(&mut file).unwrap();
        let read = Snapshot::read("parked", &file[..]).unwrap();
        let live: u64 = read.segments.iter().map(|segment| segment.allocated_size).sum();
        assert_eq!(live, kept.iter().map(|(_, block)| block.size()).sum::<u64>());
    }
}

#[test]
fn suspensions_meet_requests_frees_trims_and_states_on_threads() {
    for config in configs() {
        let lab = lab(Scheduler::InOrder, config);
        lab.allocator.record_history(Some(HistoryOptions::new(100_000)));
        let pool = PoolId::fresh();
        lab.allocator.create_pool(pool).unwrap();
        lab.allocator.set_idle_options(pool, IdleOptions::new().with_park_when_short(true)).unwrap();
        let away = |error: &AllocError| {
            matches!(
                error,
                AllocError::Pool(PoolError::Away { .. } | PoolError::Busy { .. } | PoolError::LoansOut { .. })
            )
        };
        std::thread::scope(|scope| {
            for thread in 0..3_u64 {
                let (lab, s) = (&lab, lab.stream());
                scope.spawn(move || {
                    let mut held = Vec::new();
                    for round in 0..150 {
                        let scoped = thread == 2;
                        if scoped {
                            let mine = Filter::Thread(std::thread::current().id());
                            lab.allocator.begin_allocate_to_pool(pool, mine).unwrap();
                        }
                        match lab.allocator.alloc(1 + round * 30_000, &s) {
                            Ok(block) => held.push(block),
                            Err(error) => assert!(away(&error), "{error}"),
                        }
                        if scoped {
                            lab.allocator.end_allocate_to_pool(pool).unwrap();
                            lab.allocator.release_pool(pool).unwrap();
                        }
                        if round % 3 == 0 {
                            held.clear();
                        }
                    }
                });
            }
            let lab = &lab;
            scope.spawn(move || {
                for _ in 0..40 {
                    if let Err(error) = lab.allocator.suspend(&Which::All) {
                        assert!(away(&error), "{error}");
                    }
                    lab.allocator.resume(&Which::All).unwrap();
                }
            });
            scope.spawn(move || {
                for _ in 0..40 {
                    lab.allocator.trim().unwrap();
                    lab.allocator
                        .park_pool(pool)
                        .map(drop)
                        .or_else(|e| if away(&e) { Ok(()) } else { Err(e) })
                        .unwrap();
                    let state = lab.allocator.state();
                    for s in &state.segments {
                        assert_eq!(s.blocks.iter().map(|b| b.size).sum::<u64>(), s.size, "{s:?}");
                    }
                }
            });
        });
        lab.allocator.resume(&Which::All).unwrap();
        lab.allocator.release_pool(pool).unwrap();
        lab.close();
    }
}
