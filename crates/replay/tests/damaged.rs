//! Damaged files: whatever lines are lost, doubled, exchanged or changed, reading ends in an error or in something
//! that can be run, and nothing panics.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::io::{Read, Write};
use std::path::Path;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use gpupool_allocator::Policy;
use gpupool_replay::conform::{Script, run};
use gpupool_replay::generate::Random;
use gpupool_replay::replay::{Options, replay_simulated};
use gpupool_replay::trace::{Trace, TraceProblem};

fn text(name: &str) -> String {
    let file = std::fs::File::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("data").join(name)).unwrap();
    let mut text = String::new();
    GzDecoder::new(file).read_to_string(&mut text).unwrap();
    text
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// Changes one to three things, never the header.
fn damage(text: &str, random: &mut Random) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for _ in 0..=random.below(3) {
        let count = lines.len() as u64 - 1;
        let (at, other) = (1 + random.below(count) as usize, 1 + random.below(count) as usize);
        match random.below(5) {
            0 => drop(lines.remove(at)),
            1 => lines.insert(other.min(lines.len()), lines[at].clone()),
            2 => lines.swap(at, other),
            3 => {
                let line = &mut lines[at];
                let digits: Vec<usize> =
                    line.char_indices().filter(|(_, c)| c.is_ascii_digit()).map(|(index, _)| index).collect();
                if !digits.is_empty() {
                    let digit = digits[random.below(digits.len() as u64) as usize];
                    let new = ["0", "7", "99", "-", "x", ""][random.below(6) as usize];
                    line.replace_range(digit..=digit, new);
                }
            }
            _ => {
                let line = &mut lines[at];
                let cut = random.below(line.len() as u64 + 1) as usize;
                line.truncate(cut);
            }
        }
    }
    lines.join("\n") + "\n"
}

/// The counts of a damaged trace put right, so that the damage itself is looked at.
fn recount(text: &str) -> String {
    let (header, body) = text.split_once('\n').unwrap();
    let count = |letter: &str| body.lines().filter(|l| l.starts_with(letter)).count() as u64;
    let mut header: serde_json::Map<String, serde_json::Value> = serde_json::from_str(header).unwrap();
    header.insert("allocs".into(), (count("a ") + 1).into());
    header.insert("device_allocs".into(), (count("S ") + 1).into());
    header.insert("segments_end".into(), count("S ").saturating_sub(count("s ")).into());
    format!("{}\n{body}", serde_json::to_string(&header).unwrap())
}

#[test]
fn damaged_traces_are_errors_or_can_be_replayed() {
    let mut random = Random::new(11);
    let (mut refused, mut replayed) = (0, 0);
    for name in ["traces/overlap_streams.trace.gz", "traces/seed_batches.trace.gz"] {
        let whole = text(name);
        for _ in 0..150 {
            let damaged = recount(&damage(&whole, &mut random));
            match Trace::parse("damaged", &gzip(&damaged)[..]) {
                Err(error) => {
                    assert!(!matches!(error.problem, TraceProblem::Header(_)), "{error}");
                    refused += 1;
                }
                Ok(trace) => {
                    for policy in Policy::ALL {
                        let lag = random.below(20);
                        let capacity = (1 << 30) + random.below(4 << 30);
                        let options = Options { timed: false, completion_lag: lag, capacity, ..Options::new(*policy) };
                        // An error is fine: a capture that became impossible, say. A panic is not.
                        let _ = replay_simulated(&trace, &options, &mut |_| {});
                    }
                    replayed += 1;
                }
            }
        }
    }
    assert!(refused > 50 && replayed > 10, "{refused} {replayed}");
}

#[test]
fn damaged_conformance_files_are_errors_or_can_be_run() {
    let mut random = Random::new(12);
    let (mut refused, mut differed) = (0, 0);
    for name in ["torch215-pools-9003", "torch215-plain-9000", "torch211-graphs-1"] {
        let whole = text(&format!("conform/{name}.jsonl.gz"));
        for _ in 0..100 {
            match Script::parse("damaged", &gzip(&damage(&whole, &mut random))[..]) {
                Err(_) => refused += 1,
                Ok(script) => {
                    let outcome = run(&script, "damaged", |_| {}).unwrap();
                    differed += u32::from(outcome.first_mismatch.is_some());
                }
            }
        }
    }
    assert!(refused > 50 && differed > 20, "{refused} {differed}");
}
