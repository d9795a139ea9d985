//! Instructions a pair, counted by callgrind: the same figure in every run, on a busy machine too.
//!
//! A program runs a workload twice under callgrind, with different numbers of rounds; the difference is what the rounds took, and what
//! comes before them falls out. The same for the loop alone is taken off.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

#[cfg(feature = "cubecl")]
use crate::peers::Cubecl;
#[cfg(feature = "offset-allocator")]
use crate::peers::Offset;
use gpupool_allocator::Policy;

use crate::peers::{Alone, Gpupool, Naive, Nothing, OnDevice, device};
use crate::{Failed, Kind, Prepared, Running, Workload, traces_folder};

/// Rounds of the shorter run, and how many more the longer one has.
const FEWER: u64 = 1_000;
const MORE: u64 = 20_000;
const MORE_TURNS: u64 = 2;

/// A peer on a workload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Case {
    /// The peer; any but rlsf, which runs in a process of its own.
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
        Kind::Ours(policy) => Running::start(&prepared, Gpupool::new(policy, needs)?)?.run(rounds)?,
        Kind::ScopedLoop => Running::start(&prepared, Alone)?.run(rounds)?,
        Kind::Scoped => {
            let peer = OnDevice::new(Arc::new(device()), Policy::Segments, needs)?;
            Running::start(&prepared, peer)?.run(rounds)?
        }
        #[cfg(feature = "offset-allocator")]
        Kind::OffsetAllocator => Running::start(&prepared, Offset::new())?.run(rounds)?,
        #[cfg(feature = "cubecl")]
        Kind::Cubecl => Running::start(&prepared, Cubecl::new())?.run(rounds)?,
        Kind::TreeAndHash => Running::start(&prepared, Naive::new())?.run(rounds)?,
        Kind::Rlsf => return Err(Failed::UnknownPeer { name: case.kind.name().to_owned() }),
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
    let kind = if case.kind == Kind::Scoped { Kind::ScopedLoop } else { Kind::LoopAlone };
    let alone = difference(program, &Case { kind, workload: case.workload.clone() })?;
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
/// to what stands around it; but the lock is nothing but that, so its instructions are known by what they are.
const LAYERS: [(&str, &[&str]); 6] = [
    ("bin", &["allocator/src/arena/bins.rs"]),
    ("index", &["allocator/src/index/"]),
    ("locked instructions", &["allocator/src/sync.rs", "/spin-"]),
    ("statistics", &["allocator/src/counters", "allocator/src/peaks.rs"]),
    ("handle", &["allocator/src/allocation.rs", "alloc/src/sync.rs"]),
    ("request, records, merging", &["allocator/src/"]),
];
const LOCKED: usize = 2;

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
    let code = Code::of(program)?;
    let less = by_layer(&profile(program, case, fewer)?, &code);
    let all = by_layer(&profile(program, case, fewer + more)?, &code);
    let units = more * Prepared::new(&case.workload, &traces_folder())?.units_per_round();
    let took = all.iter().zip(less).map(|(all, less)| all.saturating_sub(less) as f64 / units as f64);
    Ok(LAYERS.iter().map(|(name, _)| *name).zip(took).collect())
}

/// A program's instructions as its file has them: where each part of it is loaded, and its bytes.
struct Code {
    parts: Vec<(u64, Vec<u8>)>,
}

impl Code {
    /// The byte that an x86-64 instruction begins with which no other core may come between.
    const LOCK_PREFIX: u8 = 0xf0;
    const LOADED: u64 = 1;

    /// Reads a program in the format of Linux (ELF, 64 bits).
    fn of(program: &Path) -> Result<Self, Failed> {
        let file = std::fs::read(program).map_err(Failed::io(program.display().to_string()))?;
        let number = |at: u64, bytes: usize| -> Option<u64> {
            let bytes = file.get(usize::try_from(at).ok()?..)?.get(..bytes)?;
            Some(bytes.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
        };
        let header = |n: u64| -> Option<Option<(u64, Vec<u8>)>> {
            let at = number(32, 8)? + n * number(54, 2)?;
            if number(at, 4)? != Self::LOADED {
                return Some(None);
            }
            let [offset, address, bytes] = [number(at + 8, 8)?, number(at + 16, 8)?, number(at + 32, 8)?];
            let offset = usize::try_from(offset).ok()?;
            let part = file.get(offset..)?.get(..usize::try_from(bytes).ok()?)?;
            Some(Some((address, part.to_vec())))
        };
        let parts: Option<Vec<_>> = number(56, 2).and_then(|headers| (0..headers).map(header).collect());
        let parts =
            parts.ok_or_else(|| Failed::Valgrind { problem: "the program's file is not understood".to_owned() })?;
        Ok(Self { parts: parts.into_iter().flatten().collect() })
    }

    fn is_locked(&self, address: u64) -> bool {
        let byte = |(start, bytes): &(u64, Vec<u8>)| {
            address.checked_sub(*start).and_then(|at| bytes.get(usize::try_from(at).ok()?).copied())
        };
        self.parts.iter().find_map(byte) == Some(Self::LOCK_PREFIX)
    }
}

/// Adds up a profile's lines: those of a function follow each other by address, with the name of the file wherever it changes.
fn by_layer(profile: &str, code: &Code) -> [u64; LAYERS.len()] {
    let mut sums = [0; LAYERS.len()];
    // Files are named once and numbered from then on.
    let mut names: HashMap<&str, &str> = HashMap::new();
    let (mut layer, mut inclusive, mut address) = (None, false, 0_u64);
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
            let mut words = line.split_whitespace();
            address = moved(address, words.next().unwrap_or_default());
            let cost = words.last().and_then(|cost| cost.parse::<u64>().ok());
            if let (Some(layer), Some(cost), false) = (layer, cost, inclusive) {
                sums[if code.is_locked(address) { LOCKED } else { layer }] += cost;
            }
            inclusive = false;
        }
    }
    sums
}

/// The address that a line of a profile says: itself, or how far from the last one.
fn moved(last: u64, said: &str) -> u64 {
    let number = |digits: &str| digits.parse().unwrap_or(0);
    match said.as_bytes().first() {
        Some(b'+') => last.wrapping_add(number(&said[1..])),
        Some(b'-') => last.wrapping_sub(number(&said[1..])),
        Some(b'*') => last,
        _ => said.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or(0),
    }
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
        assert_eq!((good[0].case.kind, good[0].most), (Kind::Ours(Policy::Segments), 12.5));
        for bad in
            ["segments hot-512", "nobody hot-512 1", "segments cold 1", "segments hot-512 x", "segments hot-512 NaN"]
        {
            let error = read(&format!("#\n{bad}")).unwrap_err();
            assert!(matches!(error, Failed::Ceilings { line: 2, .. }), "{bad}: {error}");
        }
    }

    #[test]
    fn a_profile_is_added_up_by_layer() {
        let profile = "fl=(1) /x/crates/allocator/src/inner.rs\nfn=(1) alloc\n0x10 10 5\n\
            fi=(2) /x/crates/allocator/src/arena/bins.rs\n+3 +1 7\nfi=(3) /rustc/library/core/src/option.rs\n+3 * 2\n\
            -2 * 4\n* * 1\nfe=(1)\n0x1a 11 1\ncfi=(4) /x/y.c\ncfn=(2) malloc\ncalls=1 0x20 20\n+6 12 1000\n+1 13 1\n\
            fl=(4)\nfn=(2)\n0x14 20 1000\n";
        // The instruction at 0x14 is a locked one.
        let code = Code { parts: vec![(0x10, vec![0x90, 0x90, 0x90, 0x90, Code::LOCK_PREFIX, 0x90])] };
        let sums = by_layer(profile, &code);
        assert_eq!((LAYERS[0].0, LAYERS[LOCKED].0), ("bin", "locked instructions"));
        assert_eq!(sums, [9, 0, 5, 0, 0, 7]);
    }

    #[test]
    fn a_programs_instructions_are_found_where_it_is_loaded() {
        let code = Code::of(&std::env::current_exe().unwrap()).unwrap();
        let locked = |(start, bytes): &(u64, Vec<u8>)| (0..bytes.len() as u64).any(|at| code.is_locked(start + at));
        assert!(code.parts.len() > 1 && code.parts.iter().any(locked));
        assert!(!code.is_locked(u64::MAX));
        assert!(Code::of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")).is_err());
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
