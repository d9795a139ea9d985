//! The budgets of host time, each beside what it was measured to be: hot pair, free index, threads, frees, statistics, tails.
//!
//!     cargo run --release -p gpupool-benches --bin budgets                   everything, 1 minute
//!     cargo run --release -p gpupool-benches --bin budgets -- threads tails  some parts
//!
//! Figures of wall-clock time want a machine that does nothing else, with a core for each thread.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use gpupool_allocator::{Allocation, Policy};
use gpupool_benches::peers::{Gpupool, Nothing};
use gpupool_benches::{
    Apart, Failed, Kind, Needs, Op, Peer, Prepared, PrivateLoop, Running, Script, Spread, Workload, or_exit, sample,
    time, together, traces_folder,
};
use gpupool_sim_device::SimDevice;

/// Measures gpupool's host time against its budgets.
#[derive(Parser, Debug)]
#[command(name = "budgets")]
struct Arguments {
    /// What to measure; all of it by default.
    parts: Vec<Measured>,
    /// Samples of each figure.
    #[arg(long, default_value_t = 7)]
    repetitions: usize,
    /// Where recordings are looked for.
    #[arg(long, default_value_os_t = traces_folder())]
    traces: PathBuf,
    /// Threads at most.
    #[arg(long, default_value_t = 16)]
    threads: u16,
}

/// A part of the measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Measured {
    /// Pairs and steps of one thread.
    Pairs,
    /// Frees from another thread, and with a recorded use.
    Frees,
    /// The statistics.
    Stats,
    /// One to many threads, beside a loop on private memory.
    Threads,
    /// The slowest requests of recorded workloads on many threads, beside an empty loop.
    Tails,
}

fn main() {
    let arguments = Arguments::parse();
    let wanted = |part| arguments.parts.is_empty() || arguments.parts.contains(&part);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    println!("{cores} cores, {} samples of each figure; median, least and most in nanoseconds", arguments.repetitions);
    if wanted(Measured::Pairs) {
        or_exit(pairs(arguments.repetitions, &arguments.traces));
    }
    if wanted(Measured::Frees) {
        or_exit(frees(arguments.repetitions));
    }
    if wanted(Measured::Stats) {
        or_exit(stats(arguments.repetitions));
    }
    if wanted(Measured::Threads) {
        or_exit(threads(arguments.repetitions.min(5), arguments.threads, &arguments.traces));
    }
    if wanted(Measured::Tails) {
        or_exit(tails(arguments.threads, &arguments.traces));
    }
}

/// One line: what, its budget, and what it took.
fn line(what: &str, budget: &str, samples: Vec<f64>) {
    if let Some(Spread { median, least, most }) = Spread::of(samples) {
        println!("{what:<44} {budget:>10} {median:>10.1} {least:>10.1} {most:>10.1}");
    }
}

fn heading(title: &str) {
    println!("\n{title:<44} {:>10} {:>10} {:>10} {:>10}", "budget", "median", "least", "most");
}

/// Nanoseconds a pair or step, those of the loop alone taken off.
fn pairs(repetitions: usize, traces: &Path) -> Result<(), Failed> {
    heading("one thread, the loop alone taken off");
    let index = Workload::INDEXES.into_iter().map(|w| (w, "80"));
    let hot = Workload::PAIRS.into_iter().map(|w| (w, "25"));
    let captured = Workload::CAPTURED.into_iter().map(|w| (w, "1.05 hot"));
    let sets = [64, 256, 1_024, 8_192].map(|live| (Workload::WorkingSet { live }, ""));
    let captured_sets = Workload::CAPTURED_SETS.into_iter().map(|w| (w, "1.05 set"));
    for (workload, budget) in hot.chain(captured).chain(sets).chain(captured_sets).chain(index) {
        let prepared = Prepared::new(&workload, traces)?;
        let mut net = Vec::new();
        for _ in 0..repetitions {
            let alone = sample(Kind::LoopAlone, &workload, &prepared, None)?.ns;
            net.push(sample(Kind::Ours(Policy::Segments), &workload, &prepared, None)?.ns - alone);
        }
        line(&workload.to_string(), budget, net);
    }
    Ok(())
}

const NEEDS: Needs = Needs { streams: 1 };
/// Blocks freed between two looks at the clock: as many as share an event.
const BATCH: u64 = 64;
const BATCHES: u64 = 500;

type Block = Allocation<SimDevice>;

/// Nanoseconds a free, and what `before` does with a block that is not timed.
fn frees(repetitions: usize) -> Result<(), Failed> {
    heading("a free alone, in batches of 64");
    for bytes in [512, 1 << 20] {
        let peer = Gpupool::new(Policy::Segments, NEEDS)?;
        let request = || peer.allocator().alloc(bytes, peer.stream(0));
        let timed = |blocks: &mut Vec<Block>| {
            let start = Instant::now();
            blocks.clear();
            start.elapsed()
        };
        let batches = |free: &mut dyn FnMut(Vec<Block>) -> Result<Duration, Failed>| -> Result<f64, Failed> {
            let mut took = Duration::ZERO;
            for _ in 0..BATCHES {
                let mut blocks = Vec::new();
                for _ in 0..BATCH {
                    blocks.push(request()?);
                }
                took += free(blocks)?;
            }
            Ok(took.as_nanos() as f64 / (BATCH * BATCHES) as f64)
        };
        let (mut own, mut other, mut recording, mut recorded) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..repetitions {
            own.push(batches(&mut |mut blocks| Ok(timed(&mut blocks)))?);
            other.push(thread::scope(|scope| {
                let (send, blocks) = mpsc::channel::<Vec<Block>>();
                let (report, took) = mpsc::channel();
                scope.spawn(move || blocks.into_iter().all(|mut batch| report.send(timed(&mut batch)).is_ok()));
                batches(&mut |batch| {
                    // The other thread ends only when this one does.
                    let _ = send.send(batch);
                    Ok(took.recv().unwrap_or_default())
                })
            })?);
            let mut record = Duration::ZERO;
            recorded.push(batches(&mut |mut blocks| {
                let start = Instant::now();
                for block in &blocks {
                    let _ = black_box(block.record_stream(peer.other_stream()));
                }
                record += start.elapsed();
                Ok(timed(&mut blocks))
            })?);
            recording.push(record.as_nanos() as f64 / (BATCH * BATCHES) as f64);
        }
        line(&format!("{bytes} bytes, own thread"), "", own);
        line(&format!("{bytes} bytes, another thread"), "40", other);
        line(&format!("{bytes} bytes, with one recorded stream"), "40", recorded);
        line(&format!("{bytes} bytes, recording it"), "", recording);
    }
    Ok(())
}

/// Nanoseconds a call of `stats()`.
fn stats(repetitions: usize) -> Result<(), Failed> {
    heading("stats()");
    for streams in [1_u16, 15, 63] {
        let peer = Gpupool::new(Policy::Segments, Needs { streams })?;
        let blocks: Result<Vec<_>, _> = (0..streams).map(|n| peer.allocator().alloc(512, peer.stream(n))).collect();
        let blocks = blocks?;
        // One stream more has nothing.
        let arenas = u64::from(streams) + 1;
        let call = || {
            let start = Instant::now();
            for _ in 0..2_000 {
                black_box(peer.allocator().stats());
            }
            start.elapsed().as_nanos() as f64 / 2_000.0
        };
        let samples = (0..repetitions).map(|_| call()).collect();
        line(&format!("{arenas} arenas"), &(1_000 + 200 * arenas).to_string(), samples);
        drop(blocks);
    }
    Ok(())
}

/// How many times as much many threads do as one, beside loops of the same length on private memory.
fn threads(repetitions: usize, most: u16, traces: &Path) -> Result<(), Failed> {
    const ROUNDS: u64 = 200_000;
    for workload in [Workload::HotPair { bytes: 512 }, Workload::WorkingSet { live: 256 }] {
        let prepared = Prepared::new(&workload, traces)?;
        let needs = prepared.needs();
        let one = (0..5).map(|_| Ok(time(&prepared, Gpupool::new(Policy::Segments, needs)?)?.ns));
        let one = Spread::of(one.collect::<Result<_, Failed>>()?).map_or(100.0, |s| s.least);
        println!(
            "\n{workload}: {:>8} {:>16} {:>10} {:>16} {:>10} {:>12} {:>10} {:>14}",
            "threads", "million a second", "scaling", "private loop", "scaling", "share", "misses", "driver calls"
        );
        let (mut first, mut first_loop) = (0.0, 0.0);
        for n in [1, 2, 4, 8, 12, 16].into_iter().filter(|n| *n <= most) {
            let peer = Gpupool::new(Policy::Segments, needs)?;
            let mut running = Vec::new();
            for stream in 0..n {
                running.push(Apart(Running::start(&prepared, peer.with_stream(stream))?));
            }
            let mut loops = vec![Apart(PrivateLoop::of_length(Duration::from_secs_f64(one * 1e-9))); usize::from(n)];
            // Each was warmed up by itself; together they settle what each needs.
            together(&mut running, |one| one.run(ROUNDS).map(drop))?;
            let calls = || (peer.allocator().stats().misses, peer.driver_calls().unwrap_or(0));
            let before = calls();
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            let rate = |took: Duration| f64::from(n) * ROUNDS as f64 / took.as_secs_f64() / 1e6;
            // In turn, so that what disturbs the machine disturbs both.
            for _ in 0..repetitions {
                ours.push(rate(together(&mut running, |one| one.run(ROUNDS).map(drop))?));
                theirs.push(rate(together(&mut loops, |one| {
                    one.run(ROUNDS);
                    Ok(())
                })?));
            }
            let median = |figures| Spread::of(figures).map_or(0.0, |s| s.median);
            let (ours, theirs) = (median(ours), median(theirs));
            if n == 1 {
                (first, first_loop) = (ours, theirs);
            }
            let (scaling, of_loop) = (ours / first, theirs / first_loop);
            let after = calls();
            let thousands = u64::from(n) as f64 * ROUNDS as f64 * repetitions as f64 / 1e3;
            println!(
                "{:>width$} {ours:>16.2} {scaling:>10.2} {theirs:>16.2} {of_loop:>10.2} {:>12.2} {:>10.3} {:>14.3}",
                n,
                scaling / of_loop,
                (after.0 - before.0) as f64 / thousands,
                (after.1 - before.1) as f64 / thousands,
                width = workload.to_string().len() + 10
            );
        }
    }
    println!("(budget: scaling 12 at 16 threads, or a share of 0.85; misses and driver calls of 1,000 pairs or steps)");
    Ok(())
}

/// Turns over a recording before anything is timed, and timed ones.
const WARM: usize = 4;
const TURNS: usize = 8;

/// How long requests took, in nanoseconds, the shortest first: those that a free block served, and those that none did.
struct Latencies {
    hits: Vec<u32>,
    misses: Vec<u32>,
}

/// How long each request of a recording takes on every one of `n` threads at once, after warm-up.
fn latencies<P: Peer + Send>(script: &Script, peers: Vec<P>) -> Result<Latencies, Failed>
where
    P::Block: Send,
{
    struct Worker<P: Peer> {
        peer: P,
        slots: Vec<Option<P::Block>>,
        hits: Vec<u32>,
        misses: Vec<u32>,
    }
    let worker = |peer| Apart(Worker { peer, slots: Vec::new(), hits: Vec::new(), misses: Vec::new() });
    let mut workers: Vec<_> = peers.into_iter().map(worker).collect();
    together(&mut workers, |w| {
        w.slots.resize_with(script.slots as usize, || None);
        for took in [&mut w.hits, &mut w.misses] {
            // Memory that was written to before: the first write to a page of new memory takes a while.
            took.resize(script.ops.len() * TURNS, 1);
            took.clear();
        }
        let mut misses = w.peer.misses();
        for turn in 0..WARM + TURNS {
            for op in &script.ops {
                match *op {
                    Op::Alloc { slot, bytes, .. } => {
                        let start = Instant::now();
                        let block = w.peer.alloc(bytes, 0);
                        let took = start.elapsed();
                        let now = w.peer.misses();
                        let missed = std::mem::replace(&mut misses, now) != now;
                        if turn >= WARM {
                            let list = if missed { &mut w.misses } else { &mut w.hits };
                            list.push(u32::try_from(took.as_nanos()).unwrap_or(u32::MAX));
                        }
                        w.slots[slot as usize] = block;
                    }
                    Op::Free { slot } => drop(w.slots[slot as usize].take().map(|block| w.peer.free(block))),
                    Op::FreeUsed { slot } => drop(w.slots[slot as usize].take().map(|block| w.peer.free_used(block))),
                    Op::Begin { .. } | Op::End { .. } | Op::EmptyCache => {}
                }
            }
            w.slots.iter_mut().filter_map(Option::take).for_each(|block| w.peer.free(block));
        }
        Ok(())
    })?;
    let mut all = Latencies { hits: Vec::new(), misses: Vec::new() };
    for Apart(worker) in workers {
        all.hits.extend(worker.hits);
        all.misses.extend(worker.misses);
    }
    all.hits.sort_unstable();
    all.misses.sort_unstable();
    Ok(all)
}

/// How long rounds of a loop on private memory take on every one of `n` threads at once, a round timed and one not in turn as with requests
/// and frees; in nanoseconds, the shortest first.
fn lonely(round: Duration, threads: u16, rounds: usize) -> Result<Vec<u32>, Failed> {
    let timed = || PrivateLoop::of_length(round);
    let mut loops: Vec<_> = (0..threads).map(|_| Apart((timed(), vec![1_u32; rounds]))).collect();
    together(&mut loops, |(private, took)| {
        for took in took {
            let start = Instant::now();
            private.run(1);
            *took = u32::try_from(start.elapsed().as_nanos()).unwrap_or(u32::MAX);
            private.run(1);
        }
        Ok(())
    })?;
    let mut all: Vec<u32> = loops.into_iter().flat_map(|Apart((_, took))| took).collect();
    all.sort_unstable();
    Ok(all)
}

/// The slowest requests, beside those of a loop that does nothing.
fn tails(threads: u16, traces: &Path) -> Result<(), Failed> {
    println!(
        "\nrequests after warm-up, {threads} threads, with both looks at the clock; nanoseconds (budget of hits: p99.9 1,000, p99.99 10,000)"
    );
    println!(
        "{:<26} {:<12} {:>9} {:>7} {:>7} {:>8} {:>9} {:>10}",
        "recording", "", "requests", "p50", "p99", "p99.9", "p99.99", "most"
    );
    // Those without captures: each thread is one stream.
    for name in ["gpt2_train", "moe_train", "gnn_sampling", "llama_checkpoint_offload", "overlap_streams"] {
        let workload = Workload::Trace { name: name.to_owned() };
        let Prepared::Trace { script } = Prepared::new(&workload, traces)? else { continue };
        let peer = Gpupool::new(Policy::Segments, NEEDS)?;
        let row = |what: &str, sorted: &[u32]| {
            let at = |share: f64| sorted.get(((sorted.len() - 1) as f64 * share) as usize).copied().unwrap_or(0);
            println!(
                "{name:<26} {what:<12} {:>9} {:>7} {:>7} {:>8} {:>9} {:>10}",
                sorted.len(),
                at(0.5),
                at(0.99),
                at(0.999),
                at(0.9999),
                at(1.0)
            );
        };
        let ours = latencies(&script, (0..threads).map(|n| peer.with_stream(n)).collect())?;
        row("hits", &ours.hits);
        row("misses", &ours.misses);
        row("empty loop", &latencies(&script, (0..threads).map(|_| Nothing::new(NEEDS)).collect())?.hits);
        // As long as most hits are: what the machine itself puts in between falls into as many of its rounds.
        let usual = Duration::from_nanos(u64::from(ours.hits.get(ours.hits.len() / 2).copied().unwrap_or(0)));
        row("private loop", &lonely(usual, threads, ours.hits.len() / usize::from(threads.max(1)))?);
    }
    Ok(())
}
