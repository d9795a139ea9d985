//! Random sequences of every operation, over every policy and many configurations, each operation followed by every check that
//! `gpupool_tests::machine` knows. Deterministic: each configuration has its own seed. `GPUPOOL_CASES` multiplies the number of
//! sequences.

use std::sync::Arc;

use gpupool_allocator::config::{Rounding, VirtualMemory};
use gpupool_allocator::{Allocation, Allocator, Config, Filter, Placement, Policy, PoolId, Preset};
use gpupool_device::StreamHandle;
use gpupool_sim_device::{Placement as Placing, Scheduler, SimConfig, SimDevice};
use gpupool_tests::lab::{BACKINGS, Backing, MIB, pages, segments};
use gpupool_tests::machine::{Claim, Ending, Machine, Op};
use proptest::prelude::*;
use proptest::test_runner::{Config as Runs, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// Sequences for each configuration.
const CASES: u32 = 400;
/// Longest sequence.
const LENGTH: usize = 160;
/// The device, in MiB: small, so that memory runs out.
const DEVICE: u64 = 256;

fn cases(base: u32) -> u32 {
    let times = std::env::var("GPUPOOL_CASES").ok().and_then(|n| n.parse::<u32>().ok()).unwrap_or(1);
    base.saturating_mul(times.max(1))
}

/// Runs `test` on values of `strategy`, the same ones every time, and shrinks what fails.
fn for_all<S: Strategy>(name: &str, base: u32, strategy: &S, test: impl Fn(S::Value) -> Result<(), String>)
where
    S::Value: std::fmt::Debug,
{
    let mut seed = [0u8; 32];
    for (i, byte) in name.bytes().enumerate() {
        seed[i % 32] = seed[i % 32].wrapping_mul(31).wrapping_add(byte);
    }
    let runs = Runs { cases: cases(base), failure_persistence: None, max_shrink_iters: 3_000, ..Runs::default() };
    let mut runner = TestRunner::new_with_rng(runs, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    match runner.run(strategy, |value| test(value).map_err(TestCaseError::fail)) {
        Ok(()) => {}
        Err(TestError::Fail(why, value)) => panic!("{name}: {why}\nwith {value:#?}"),
        Err(other) => panic!("{name}: {other}"),
    }
}

fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        1 => Just(0),
        4 => 1..4_096u64,
        3 => (1..2_048u64).prop_map(|n| n * 512),
        6 => prop::sample::select(vec![1_000, 4_096, 700_000, MIB, MIB + 1, 5 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 37 * MIB]),
        4 => MIB..10 * MIB,
        3 => 10 * MIB..70 * MIB,
        1 => 70 * MIB..300 * MIB,
    ]
}

fn claim() -> impl Strategy<Value = Claim> {
    prop_oneof![2 => Just(Claim::All), 2 => Just(Claim::Thread), 3 => any::<u8>().prop_map(Claim::Stream)]
}

fn op() -> impl Strategy<Value = Op> {
    let n = any::<u8>;
    prop_oneof![
        30 => (n(), bytes()).prop_map(|(s, b)| Op::Alloc(s, b)),
        2 => (n(), bytes(), n(), 0..8u8).prop_map(|(s, b, which, skip)| Op::AllocAt(s, b, which, skip)),
        12 => n().prop_map(Op::Free),
        6 => n().prop_map(Op::Drop),
        5 => (n(), n()).prop_map(|(which, s)| Op::FreeOn(which, s)),
        1 => n().prop_map(Op::Raw),
        3 => (n(), n()).prop_map(|(which, s)| Op::Record(which, s)),
        10 => (n(), n(), n()).prop_map(|(which, s, t)| Op::Work(which, s, t)),
        5 => n().prop_map(Op::Tick),
        2 => Just(Op::EmptyCache),
        2 => Just(Op::Trim),
        1 => n().prop_map(Op::EmptyCacheOf),
        2 => Just(Op::NewPool),
        1 => n().prop_map(Op::TakePool),
        2 => n().prop_map(Op::ReleasePool),
        3 => (n(), claim()).prop_map(|(p, c)| Op::Open(p, c)),
        3 => n().prop_map(Op::Close),
        1 => n().prop_map(Op::NoSplit),
        1 => (n(), any::<bool>()).prop_map(|(p, on)| Op::UseOnOom(p, on)),
        2 => prop::option::weighted(0.7, 20..300u16).prop_map(Op::Limit),
        1 => (1..=100u8).prop_map(Op::Fraction),
        2 => n().prop_map(Op::Retire),
        2 => n().prop_map(Op::Checkpoint),
        2 => (n(), n()).prop_map(|(c, s)| Op::Restore(c, s)),
        1 => Just(Op::ResetPeaks),
        1 => Just(Op::ResetAccumulated),
        1 => n().prop_map(Op::TakeAll),
    ]
}

fn sequence() -> impl Strategy<Value = (Vec<Op>, Ending)> {
    let ending = (any::<u64>(), any::<bool>()).prop_map(|(order, allocator_first)| Ending { order, allocator_first });
    (prop::collection::vec(op(), 1..LENGTH), ending)
}

fn holds(name: &str, config: Config) {
    for_all(name, CASES, &sequence(), |(ops, ending)| Machine::new(config.clone(), DEVICE).run(&ops, ending));
}

fn torch(policy: Policy) -> Config {
    Config::new(policy)
}

macro_rules! machines {
    ($($name:ident: $config:expr;)*) => {
        $(#[test] fn $name() { holds(stringify!($name), $config); })*
    };
}

machines! {
    segments_with_virtual_memory: segments(Backing::Virtual);
    segments_with_plain_memory: segments(Backing::Plain);
    segments_that_are_not_trimmed: segments(Backing::Virtual).with_trim_before_growth(false).with_exact_peaks(true);
    segments_with_a_split_limit: segments(Backing::Virtual).with_large_segment_size(12 * MIB).with_max_split_size(24 * MIB);
    segments_with_a_split_limit_and_plain_memory:
        segments(Backing::Plain).with_max_split_size(30 * MIB).with_max_non_split_rounding(24 * MIB);
    segments_with_rounding: segments(Backing::Virtual).with_rounding(Rounding::uniform(4).unwrap());
    segments_with_garbage_collection:
        segments(Backing::Virtual).with_garbage_collection_threshold(0.5).with_memory_limit(128 * MIB);
    segments_with_garbage_collection_and_plain_memory:
        segments(Backing::Plain).with_garbage_collection_threshold(0.3).with_memory_fraction(0.6);
    segments_in_quarantine: segments(Backing::Virtual).with_quarantine(true);
    segments_that_wait_on_the_device: segments(Backing::Virtual).with_wait_for_recorded(true);
    segments_that_wait_on_the_device_with_plain_memory:
        segments(Backing::Plain).with_wait_for_recorded(true).with_max_split_size(40 * MIB);
    segments_with_a_high_water_mark: segments(Backing::Virtual).with_trim_above(64 * MIB);
    segments_with_a_high_water_mark_and_plain_memory: segments(Backing::Plain).with_trim_above(64 * MIB);
    segments_that_reject: segments(Backing::Virtual).with_memory_fraction(0.5).with_reject_over_fraction(true);
    segments_of_large_size: segments(Backing::Virtual).with_large_segment_size(64 * MIB);
    pages_for_memory: pages(Preset::Memory);
    pages_balanced: pages(Preset::Balanced);
    pages_for_latency: pages(Preset::Latency);
    pages_in_quarantine: pages(Preset::Memory).with_quarantine(true);
    pages_that_wait_on_the_device: pages(Preset::Balanced).with_wait_for_recorded(true);
    pages_with_a_high_water_mark: pages(Preset::Latency).with_trim_above(64 * MIB);
    pages_with_garbage_collection: pages(Preset::Balanced).with_garbage_collection_threshold(0.5).with_memory_limit(128 * MIB);
    pages_that_reject: pages(Preset::Balanced).with_memory_fraction(0.5).with_reject_over_fraction(true);
    pages_without_virtual_memory: pages(Preset::Balanced).with_virtual_memory(VirtualMemory::Never);
    stream_ordered: Config::new(Policy::StreamOrdered);
    torch_2_15: torch(Policy::Torch215);
    torch_2_15_with_a_split_limit: torch(Policy::Torch215).with_max_split_size(24 * MIB).with_max_non_split_rounding(30 * MIB);
    torch_2_15_with_garbage_collection:
        torch(Policy::Torch215).with_garbage_collection_threshold(0.5).with_memory_fraction(0.5);
    torch_2_15_with_rounding:
        torch(Policy::Torch215).with_rounding(Rounding::uniform(8).unwrap()).with_large_segment_size(32 * MIB);
    torch_2_15_that_rejects: torch(Policy::Torch215).with_memory_fraction(0.4).with_reject_over_fraction(true);
    torch_2_11: torch(Policy::Torch211);
    torch_2_11_with_a_split_limit:
        torch(Policy::Torch211).with_max_split_size(40 * MIB).with_garbage_collection_threshold(0.6).with_memory_fraction(0.7);
}

#[test]
fn the_sequences_do_what_they_are_for() {
    // Among all that the machine did there must have been hits, misses, and requests that found no memory.
    let (mut hits, mut handed, mut ooms) = (0, 0, 0);
    let strategy = sequence();
    let totals = std::sync::Mutex::new((&mut hits, &mut handed, &mut ooms));
    for_all("the sequences do what they are for", 30, &strategy, |(ops, ending)| {
        let mut machine = Machine::new(segments(Backing::Virtual), DEVICE);
        for op in &ops {
            machine.step(op)?;
        }
        let mut totals = totals.lock().unwrap();
        *totals.0 += machine.hits;
        *totals.1 += machine.handed;
        *totals.2 += machine.ooms;
        machine.end(ending)
    });
    assert!(
        handed > 300 && hits > 100 && handed - hits > 100 && ooms > 10,
        "{handed} handed, {hits} hits, {ooms} refused"
    );
}

/// A request or a free, for sequences that are played again elsewhere.
#[derive(Clone, Copy, Debug)]
enum Step {
    Alloc(u8, u64),
    Free(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (any::<u8>(), bytes()).prop_map(|(s, b)| Step::Alloc(s, b)),
        2 => any::<u8>().prop_map(Step::Free),
    ];
    prop::collection::vec(step, 1..120)
}

/// Plays a sequence; where each block went, segments numbered from the first that the sequence got.
fn play(allocator: &Allocator<SimDevice>, steps: &[Step]) -> Vec<Option<(Placement, u64)>> {
    let mut live: Vec<Allocation<SimDevice>> = Vec::new();
    let mut places = Vec::new();
    for step in steps {
        match *step {
            Step::Alloc(stream, bytes) => {
                let handle = StreamHandle(0x100 + u64::from(stream % 3));
                allocator.device().adopt_stream(handle);
                match allocator.alloc(bytes, &allocator.register_stream(handle)) {
                    Ok(block) => {
                        places.push(block.placement().map(|p| (p, block.size())));
                        live.push(block);
                    }
                    Err(_) => places.push(None),
                }
            }
            Step::Free(which) if !live.is_empty() => drop(live.swap_remove(usize::from(which) % live.len())),
            Step::Free(_) => {}
        }
        allocator.validate().unwrap();
    }
    let mut segments: Vec<u64> = places.iter().flatten().map(|(p, _)| p.segment).collect();
    segments.sort_unstable();
    segments.dedup();
    let number = |p: Placement| segments.iter().position(|s| *s == p.segment).unwrap() as u64;
    places.iter().map(|p| p.map(|(p, size)| (Placement { segment: number(p), ..p }, size))).collect()
}

fn allocator(config: Config, placing: Placing) -> Allocator<SimDevice> {
    let sim = SimConfig::default().with_capacity(DEVICE * MIB).with_placement(placing);
    Allocator::with_registry(Arc::new(SimDevice::new(sim)), config, Arc::default()).unwrap()
}

/// Design.md section 7, 8: not addresses, nor what was before, decide where blocks go.
#[test]
fn equal_sequences_from_an_empty_pool_give_equal_places() {
    let policies = [segments(Backing::Virtual), segments(Backing::Plain), torch(Policy::Torch215)];
    for (i, config) in policies.into_iter().enumerate() {
        for_all(&format!("equal places {i}"), CASES, &(steps(), steps()), |(steps, others)| {
            let first = play(&allocator(config.clone(), Placing::Growing), &steps);
            let falling = play(&allocator(config.clone(), Placing::Falling), &steps);
            if first != falling {
                return Err(format!("{first:?} with growing addresses, {falling:?} with falling ones"));
            }
            // A private pool, whatever the default pool has been through.
            let used = allocator(config.clone(), Placing::Growing);
            play(&used, &others);
            used.empty_cache().unwrap();
            let in_pool = |a: &Allocator<SimDevice>| {
                let pool = PoolId::fresh();
                a.begin_allocate_to_pool(pool, Filter::All).unwrap();
                let places = play(a, &steps);
                a.end_allocate_to_pool(pool).unwrap();
                a.release_pool(pool).unwrap();
                places
            };
            let (fresh, later) = (in_pool(&allocator(config.clone(), Placing::Growing)), in_pool(&used));
            if fresh != later {
                return Err(format!("{fresh:?} in the pool of a fresh allocator, {later:?} in that of a used one"));
            }
            Ok(())
        });
    }
}

/// The same, for the default pool of one allocator: emptied, it decides as it did at first. Trimming goes by the peak so far, and so by
/// what was before: it is off here.
#[test]
fn an_emptied_cache_starts_afresh() {
    let policies =
        [segments(Backing::Virtual).with_trim_before_growth(false), segments(Backing::Plain), torch(Policy::Torch215)];
    for (i, config) in policies.into_iter().enumerate() {
        for_all(&format!("afresh {i}"), CASES, &steps(), |steps| {
            let used = allocator(config.clone(), Placing::Growing);
            let first = play(&used, &steps);
            used.empty_cache().unwrap();
            let again = play(&used, &steps);
            if first == again {
                Ok(())
            } else {
                Err(format!("{first:?} at first, {again:?} after the cache was emptied"))
            }
        });
    }
}

/// The same operations under a scheduler that draws, and one that lets everything lag.
#[test]
fn whoever_runs_next_the_machine_holds() {
    let schedulers = [Scheduler::Adversarial, Scheduler::Random { seed: 5 }];
    for scheduler in schedulers {
        for backing in BACKINGS {
            let name = format!("{scheduler:?} {backing:?}");
            for_all(&name, CASES / 4, &sequence(), |(ops, ending)| {
                let sim = SimConfig::default().with_capacity(DEVICE * MIB).with_scheduler(scheduler);
                Machine::on(segments(backing), sim).run(&ops, ending)
            });
        }
    }
}
