//! Instructions a pair, counted by callgrind: the same figure in every run, on a busy machine too.
//!
//! A program runs a workload twice under callgrind, with different numbers of rounds; the difference is what the rounds took, and what
//! comes before them falls out. The same for the loop alone is taken off.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use gpupool_allocator::Policy;

use crate::peers::{Gpupool, Nothing};
use crate::{Failed, Kind, Prepared, Running, Workload, traces_folder};

/// Rounds of the shorter run, and how many more the longer one has.
const FEWER: u64 = 1_000;
const MORE: u64 = 20_000;
const MORE_TURNS: u64 = 2;

/// A peer on a workload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Case {
    /// The peer; one of gpupool's policies, or the loop alone.
    pub kind: Kind,
    /// The workload.
    pub workload: Workload,
}

/// Runs a case for a number of rounds: what is run under callgrind.
///
/// # Errors
///
/// See [`Failed`].
pub fn rounds(case: &Case, rounds: u64) -> Result<(), Failed> {
    let prepared = Prepared::new(&case.workload, &traces_folder())?;
    let needs = prepared.needs();
    match case.kind {
        Kind::LoopAlone => Running::start(&prepared, Nothing::new(needs))?.run(rounds)?,
        Kind::Segments => Running::start(&prepared, Gpupool::new(Policy::Segments, needs)?)?.run(rounds)?,
        Kind::Torch215 => Running::start(&prepared, Gpupool::new(Policy::Torch215, needs)?)?.run(rounds)?,
        other => return Err(Failed::UnknownPeer { name: other.name().to_owned() }),
    };
    Ok(())
}

/// Whether valgrind can be run at all.
#[must_use]
pub fn valgrind_is_there() -> bool {
    Command::new("valgrind").arg("--version").output().is_ok_and(|out| out.status.success())
}

/// Instructions a pair, step or event, those of the loop taken off. `program` is one that runs [`rounds`] for the arguments
/// `run PEER WORKLOAD ROUNDS`.
///
/// # Errors
///
/// [`Failed::Valgrind`], [`Failed::Io`].
pub fn count(program: &Path, case: &Case) -> Result<f64, Failed> {
    let net = difference(program, case)?;
    let alone = difference(program, &Case { kind: Kind::LoopAlone, workload: case.workload.clone() })?;
    let prepared = Prepared::new(&case.workload, &traces_folder())?;
    Ok((net - alone) / prepared.units_per_round() as f64)
}

fn rounds_of(workload: &Workload) -> (u64, u64) {
    match workload {
        Workload::Trace { .. } => (1, MORE_TURNS),
        _ => (FEWER, MORE),
    }
}

/// Instructions a round, with those of the loop.
fn difference(program: &Path, case: &Case) -> Result<f64, Failed> {
    let (fewer, more) = rounds_of(&case.workload);
    let less = total(program, case, fewer)?;
    let all = total(program, case, fewer + more)?;
    Ok(all.saturating_sub(less) as f64 / more as f64)
}

/// Instructions of a whole run.
fn total(program: &Path, case: &Case, rounds: u64) -> Result<u64, Failed> {
    let text = profile(program, case, rounds)?;
    let totals = text.lines().rev().find_map(|line| line.strip_prefix("totals: ")?.trim().parse().ok());
    totals.ok_or_else(|| Failed::Valgrind { problem: "its output has no totals".to_owned() })
}

/// What callgrind writes about a whole run.
fn profile(program: &Path, case: &Case, rounds: u64) -> Result<String, Failed> {
    let file = std::env::temp_dir().join(format!("gpupool-callgrind-{}.out", std::process::id()));
    let mut command = Command::new("valgrind");
    command
        .args(["--tool=callgrind", "--dump-instr=yes"])
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(program);
    command.args(["run", case.kind.name(), &case.workload.to_string(), &rounds.to_string()]);
    let output = command.output().map_err(Failed::io("valgrind"))?;
    let text = std::fs::read_to_string(&file);
    let _ = std::fs::remove_file(&file);
    if !output.status.success() {
        let problem = String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned();
        return Err(Failed::Valgrind { problem });
    }
    text.map_err(Failed::io(file.display().to_string()))
}

/// The layers of the allocator, and the source files that each is made of (a part of their paths). Code of the standard library counts
/// to what stands around it.
const LAYERS: [(&str, &[&str]); 6] = [
    ("bin", &["allocator/src/arena/bins.rs"]),
    ("index", &["allocator/src/index/"]),
    ("lock", &["allocator/src/sync.rs", "/spin-"]),
    ("statistics", &["allocator/src/counters.rs", "allocator/src/peaks.rs"]),
    ("handle", &["allocator/src/allocation.rs", "alloc/src/sync.rs"]),
    ("request, records, merging", &["allocator/src/"]),
];

fn layer_of(file: &str) -> Option<usize> {
    LAYERS.iter().position(|(_, files)| files.iter().any(|part| file.contains(part)))
}

/// What each layer of the allocator takes of the instructions a pair, step or event.
///
/// # Errors
///
/// As [`count`].
pub fn layers(program: &Path, case: &Case) -> Result<Vec<(&'static str, f64)>, Failed> {
    let (fewer, more) = rounds_of(&case.workload);
    let less = by_layer(&profile(program, case, fewer)?);
    let all = by_layer(&profile(program, case, fewer + more)?);
    let units = more * Prepared::new(&case.workload, &traces_folder())?.units_per_round();
    let took = all.iter().zip(less).map(|(all, less)| all.saturating_sub(less) as f64 / units as f64);
    Ok(LAYERS.iter().map(|(name, _)| *name).zip(took).collect())
}

/// Adds up a profile's lines: those of a function follow each other by address, with the name of the file wherever it changes.
fn by_layer(profile: &str) -> [u64; LAYERS.len()] {
    let mut sums = [0; LAYERS.len()];
    // Files are named once and numbered from then on.
    let mut names: HashMap<&str, &str> = HashMap::new();
    let (mut layer, mut inclusive) = (None, false);
    for line in profile.lines() {
        if let Some((key, name)) = line.split_once('=') {
            let (number, name) = name.split_once(' ').unwrap_or((name, ""));
            if matches!(key, "fl" | "fi" | "fe" | "cfi" | "cfl") && !name.is_empty() {
                names.insert(number, name);
            }
            match (key, names.get(number)) {
                // What comes next is what the called function took.
                ("calls", _) => inclusive = true,
                ("fl", Some(file)) => layer = layer_of(file),
                ("fi" | "fe", Some(file)) if !file.contains("/library/") || layer_of(file).is_some() => {
                    layer = layer_of(file);
                }
                _ => {}
            }
        } else if line.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '*')) {
            let cost = line.split_whitespace().last().and_then(|cost| cost.parse::<u64>().ok());
            if let (Some(layer), Some(cost), false) = (layer, cost, inclusive) {
                sums[layer] += cost;
            }
            inclusive = false;
        }
    }
    sums
}

/// The most instructions that a case may take.
#[derive(Clone, PartialEq, Debug)]
pub struct Ceiling {
    /// The case.
    pub case: Case,
    /// Instructions a pair, step or event.
    pub most: f64,
}

impl Ceiling {
    /// Reads a file of ceilings: a peer, a workload and a number a line, apart from lines that begin with `#`.
    ///
    /// # Errors
    ///
    /// [`Failed::Ceilings`], [`Failed::Io`].
    pub fn read(file: &Path) -> Result<Vec<Self>, Failed> {
        let text = std::fs::read_to_string(file).map_err(Failed::io(file.display().to_string()))?;
        Self::parse(&file.display().to_string(), &text)
    }

    fn parse(file: &str, text: &str) -> Result<Vec<Self>, Failed> {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
        let parsed = lines.map(|(index, line)| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let ceiling = match words.as_slice() {
                [kind, workload, most] => {
                    let case = kind.parse().ok().zip(workload.parse().ok());
                    case.zip(most.parse::<f64>().ok().filter(|most| most.is_finite()))
                }
                _ => None,
            };
            let ((kind, workload), most) =
                ceiling.ok_or_else(|| Failed::Ceilings { file: file.to_owned(), line: index + 1 })?;
            Ok(Self { case: Case { kind, workload }, most })
        });
        parsed.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ceilings_are_read_and_bad_lines_named() {
        let read = |text: &str| Ceiling::parse("f", text);
        let good = read("# instructions\n\nsegments hot-512 12.5\ntorch-2.15 set-64 7\n").unwrap();
        assert_eq!(good.len(), 2);
        assert_eq!((good[0].case.kind, good[0].most), (Kind::Segments, 12.5));
        for bad in
            ["segments hot-512", "nobody hot-512 1", "segments cold 1", "segments hot-512 x", "segments hot-512 NaN"]
        {
            let error = read(&format!("#\n{bad}")).unwrap_err();
            assert!(matches!(error, Failed::Ceilings { line: 2, .. }), "{bad}: {error}");
        }
    }

    #[test]
    fn a_profile_is_added_up_by_layer() {
        let profile = "fl=(1) /x/crates/allocator/src/inner.rs\nfn=(1) alloc\n10 5\n\
            fi=(2) /x/crates/allocator/src/arena/bins.rs\n+3 7\nfi=(3) /rustc/library/core/src/option.rs\n* 2\n\
            fe=(1)\n11 1\ncfi=(4) /x/y.c\ncfn=(2) malloc\ncalls=1 20\n12 1000\n13 1\nfl=(4)\nfn=(2)\n20 1000\n";
        let sums = by_layer(profile);
        assert_eq!(LAYERS.map(|(name, _)| name)[0], "bin");
        assert_eq!(sums, [9, 0, 0, 0, 0, 7]);
    }

    #[test]
    fn the_committed_ceilings_can_be_read_and_their_cases_run() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("ceilings.txt");
        let ceilings = Ceiling::read(&file).unwrap();
        assert!(!ceilings.is_empty());
        for ceiling in ceilings {
            rounds(&ceiling.case, 1).unwrap();
        }
    }
}
