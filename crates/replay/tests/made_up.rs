//! `pages` on made-up workloads on which something once went wrong: each test says what.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use gpupool_allocator::{Policy, Preset};
use gpupool_replay::replay::{Options, Report, replay_simulated};
use gpupool_replay::trace::Trace;
use gpupool_replay::trace::write::{Peaks, TraceWriter};

const MIB: u64 = 1 << 20;

/// Numbers from a seed.
struct Numbers(u64);

impl Numbers {
    fn new(seed: u64) -> Self {
        Self((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % most
    }

    /// From a MiB to 64, as many of each power of two.
    fn bytes(&mut self) -> u64 {
        let power = 20 + self.below(6);
        (1 << power) + self.below(1 << power)
    }
}

fn finish(workload: TraceWriter) -> Trace {
    let written = workload.finish("made up", "", Peaks::default()).unwrap();
    Trace::parse("made up", &written[..]).unwrap()
}

fn replay(trace: &Trace, policy: Policy, options: impl FnOnce(Options) -> Options) -> Report {
    let preset = (policy == Policy::Pages).then_some(Preset::Balanced);
    let options = options(Options { preset, timed: false, ..Options::new(policy) });
    let report = replay_simulated(trace, &options, &mut |_| {}).unwrap().report;
    assert!(report.completed, "{:?}", report.stopped);
    report
}

/// Requests of any size on two streams, of which 20 live at a time. Each free completes after two more events: another stream has used the
/// block.
fn two_streams_that_free_late(seed: u64) -> Trace {
    let (mut numbers, mut workload) = (Numbers::new(seed), TraceWriter::new());
    let (mut live, mut pending) = (Vec::new(), Vec::new());
    let settle = |workload: &mut TraceWriter, pending: &mut Vec<u64>, most: usize| {
        let over = pending.len().saturating_sub(most);
        pending.drain(..over).for_each(|id| workload.complete(id));
    };
    for _ in 0..400 {
        let stream = numbers.below(2) as u16;
        live.push(workload.alloc(numbers.bytes(), stream));
        if live.len() > 20 {
            let id = live.remove(numbers.below(21) as usize);
            workload.free(id);
            pending.push(id);
        }
        settle(&mut workload, &mut pending, 1);
    }
    for id in live {
        workload.free(id);
        pending.push(id);
        settle(&mut workload, &mut pending, 1);
    }
    settle(&mut workload, &mut pending, 0);
    finish(workload)
}

/// What is pending when somebody looks differs from turn to turn, and whoever reads peaks starts them afresh: neither makes a turn a first pass
/// again, in which pages move without end.
#[test]
fn moves_die_out_where_two_streams_take_pages_from_each_other_and_free_late() {
    for seed in 0..4 {
        let trace = two_streams_that_free_late(seed);
        let report = replay(&trace, Policy::Pages, |o| Options { iterations: 12, ..o });
        let us: Vec<f64> = report.iterations.iter().map(|turn| turn.driver_us).collect();
        let later = us[6..].iter().sum::<f64>() / 6.0;
        println!("seed {seed}: {us:.0?}");
        assert!(later < us[0] / 8.0, "seed {seed}: {later} us a turn of {us:.0?}");
        // Nor is that bought with more than what `segments` comes to hold.
        let segments = replay(&trace, Policy::Segments, |o| Options { iterations: 12, ..o });
        let [ours, theirs] = [&report, &segments].map(|report| report.iterations[11].peak_reserved / MIB);
        println!("seed {seed}: {ours} MiB and {theirs}");
        assert!(ours <= theirs, "seed {seed}: {ours} MiB and {theirs}");
    }
}

/// Blocks from 16 MiB to a GiB on one stream, of which at most three live at a time.
fn large_blocks_of_any_size(seed: u64) -> Trace {
    let (mut numbers, mut workload) = (Numbers::new(seed), TraceWriter::new());
    let mut live = Vec::new();
    for _ in 0..200 {
        live.push(workload.alloc(numbers.bytes() << 4, 0));
        while live.len() as u64 > 1 + numbers.below(3) {
            let id = live.remove(0);
            workload.free(id);
            workload.complete(id);
        }
    }
    for id in live {
        workload.free(id);
        workload.complete(id);
    }
    finish(workload)
}

/// What growth may take in place of moves once these have used their time up does not become more from turn to turn.
#[test]
fn room_ends_at_half_the_peak_where_completion_lags() {
    for seed in 0..2 {
        let trace = large_blocks_of_any_size(seed);
        let options = |o| Options { iterations: 40, completion_lag: 2, pace_ns: Some(1_000_000), ..o };
        let report = replay(&trace, Policy::Pages, options);
        let held: Vec<u64> = report.iterations.iter().map(|turn| turn.peak_reserved / MIB).collect();
        println!("seed {seed}: {} MiB, {held:?}", report.peak_requested / MIB);
        // Of a lag's blocks some are pending beside those that live, and count; a handle more is a large block's share.
        let pending = held[0].saturating_sub(report.peak_requested / MIB);
        let most = (report.peak_requested / MIB + pending) * 3 / 2 + 128;
        assert!(held.iter().all(|held| *held <= most), "seed {seed}: {held:?}, at most {most}");
    }
}
