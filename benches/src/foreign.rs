//! Allocators that are not Rust's: PyTorch's, the CUDA runtime's and RMM's, in a program of their own (`benches/peers`), which is handed
//! the very operations that ours are.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use serde::Deserialize;

use crate::{Failed, Op, Prepared};

/// Pairs that a script's turn has where the workload is a pair.
const PAIRS_A_TURN: usize = 256;

/// The program's peers.
#[derive(Debug)]
pub struct Program {
    path: PathBuf,
    peers: Vec<Named>,
    /// Where scripts are written.
    folder: PathBuf,
}

/// A peer of the program.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct Named {
    /// Its name.
    pub peer: String,
    /// Its version, as it says; may be empty.
    pub version: String,
}

/// An answer of the program's: a figure or why there is none.
#[derive(Deserialize)]
struct Answer {
    ns: Option<f64>,
    error: Option<String>,
}

impl Program {
    /// The program at `path`, as it is built by `benches/peers/build`.
    ///
    /// # Errors
    ///
    /// [`Failed::Io`] if it cannot be run, [`Failed::Worker`] if it is another program.
    pub fn new(path: &Path) -> Result<Self, Failed> {
        let what = || path.display().to_string();
        let output = Command::new(path).output().map_err(Failed::io(what()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let parse = |line: &str| serde_json::from_str(line).map_err(|_| Failed::Worker { answer: line.to_owned() });
        let peers = text.lines().map(parse).collect::<Result<Vec<Named>, _>>()?;
        if peers.is_empty() {
            return Err(Failed::Worker { answer: String::from_utf8_lossy(&output.stderr).trim().to_owned() });
        }
        let folder = std::env::temp_dir().join(format!("gpupool-scripts-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(Failed::io(folder.display().to_string()))?;
        Ok(Self { path: path.to_owned(), peers, folder })
    }

    /// The peers that were built.
    #[must_use]
    pub fn peers(&self) -> &[Named] {
        &self.peers
    }

    /// Starts the process of one of them.
    ///
    /// # Errors
    ///
    /// [`Failed::Io`].
    pub fn start(&self, peer: &str) -> Result<Foreign, Failed> {
        let what = || self.path.display().to_string();
        let mut command = Command::new(&self.path);
        let mut process =
            command.arg(peer).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(Failed::io(what()))?;
        let (questions, answers) = (process.stdin.take(), process.stdout.take());
        match answers {
            Some(answers) => Ok(Foreign { process, questions, answers: BufReader::new(answers) }),
            None => Err(Failed::Worker { answer: String::new() }),
        }
    }

    /// Writes a workload as a script; `None` for workloads that only ours can run.
    ///
    /// # Errors
    ///
    /// [`Failed::Io`].
    pub fn script(&self, name: &str, prepared: &Prepared) -> Result<Option<PathBuf>, Failed> {
        let Some(script) = Flat::of(prepared) else { return Ok(None) };
        let path = self.folder.join(format!("{name}.script"));
        let written = File::create(&path).map(BufWriter::new).and_then(|file| script.write(file));
        written.map_err(Failed::io(path.display().to_string()))?;
        Ok(Some(path))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.folder);
    }
}

/// The process of one peer.
#[derive(Debug)]
pub struct Foreign {
    process: Child,
    // `None` once it was told to end.
    questions: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Foreign {
    /// Nanoseconds a pair, step or event of a script, warmed up and then timed for as long as is said.
    ///
    /// # Errors
    ///
    /// [`Failed::Worker`] with what the peer says, [`Failed::Io`].
    pub fn sample(&mut self, script: &Path, threads: u16, warm_up: Duration, span: Duration) -> Result<f64, Failed> {
        let what = "the program of peers";
        if let Some(questions) = &mut self.questions {
            let (warm_up, span) = (warm_up.as_millis(), span.as_millis());
            writeln!(questions, "{threads} {warm_up} {span} {}", script.display()).map_err(Failed::io(what))?;
        }
        let mut text = String::new();
        self.answers.read_line(&mut text).map_err(Failed::io(what))?;
        match serde_json::from_str(&text) {
            Ok(Answer { ns: Some(ns), error: None }) => Ok(ns),
            Ok(Answer { error: Some(error), .. }) => Err(Failed::Worker { answer: error }),
            _ => Err(Failed::Worker { answer: text.trim().to_owned() }),
        }
    }
}

/// The process ends when nothing can come any more.
impl Drop for Foreign {
    fn drop(&mut self) {
        drop(self.questions.take());
        let _ = self.process.wait();
    }
}

/// A workload as a list of operations: those before the first turn, and a turn.
struct Flat {
    slots: u32,
    streams: u16,
    first: Vec<Record>,
    turn: Vec<Record>,
    units: u32,
    /// What is left at a turn's end is freed before the next.
    whole: bool,
}

/// One operation as `main.cpp` reads it.
#[derive(Clone, Copy)]
struct Record {
    bytes: u64,
    slot: u32,
    stream: u16,
    kind: u8,
}

impl Record {
    fn alloc(slot: u32, bytes: u64) -> Self {
        Self { bytes, slot, stream: 0, kind: 0 }
    }

    fn free(slot: u32) -> Self {
        Self { bytes: 0, slot, stream: 0, kind: 1 }
    }

    fn of(op: &Op) -> Self {
        let plain = |bytes, slot, stream, kind| Self { bytes, slot, stream, kind };
        match *op {
            Op::Alloc { slot, bytes, stream } => plain(bytes, slot, stream, 0),
            Op::Free { slot } => plain(0, slot, 0, 1),
            Op::FreeUsed { slot } => plain(0, slot, 0, 2),
            Op::Begin { pool, stream } => plain(pool.into(), 0, stream, 3),
            Op::End { nth } => plain(nth.into(), 0, 0, 4),
            Op::EmptyCache => plain(0, 0, 0, 5),
        }
    }
}

impl Flat {
    fn of(prepared: &Prepared) -> Option<Self> {
        let one_by_one =
            |first: &[u32]| (0..).zip(first).map(|(slot, bytes)| Record::alloc(slot, (*bytes).into())).collect();
        Some(match prepared {
            Prepared::HotPair { bytes } => Self {
                slots: 1,
                streams: 1,
                first: Vec::new(),
                turn: [Record::alloc(0, *bytes), Record::free(0)].repeat(PAIRS_A_TURN),
                units: PAIRS_A_TURN as u32,
                whole: false,
            },
            Prepared::Captured { .. } => return None,
            Prepared::WorkingSet { captured: true, .. } => return None,
            Prepared::WorkingSet { first, steps, captured: false } => Self {
                slots: first.len() as u32,
                streams: 1,
                first: one_by_one(first),
                turn: steps
                    .iter()
                    .flat_map(|s| [Record::free(s.slot), Record::alloc(s.slot, s.bytes.into())])
                    .collect(),
                units: steps.len() as u32,
                whole: false,
            },
            Prepared::Index { first, pairs } => {
                let spare = first.len() as u32;
                let mut before: Vec<Record> = one_by_one(first);
                before.extend((0..spare).step_by(2).map(Record::free));
                let turn = pairs.iter().flat_map(|bytes| [Record::alloc(spare, (*bytes).into()), Record::free(spare)]);
                let turn = turn.collect();
                Self { slots: spare + 1, streams: 1, first: before, turn, units: pairs.len() as u32, whole: false }
            }
            Prepared::Trace { script } => Self {
                slots: script.slots,
                streams: script.streams,
                first: Vec::new(),
                turn: script.ops.iter().map(Record::of).collect(),
                units: script.events.max(1),
                whole: true,
            },
        })
    }

    fn write(&self, mut to: impl Write) -> std::io::Result<()> {
        to.write_all(b"gpscript")?;
        let (first, turn) = (self.first.len() as u32, self.turn.len() as u32);
        for number in [self.slots, self.streams.into(), first, turn, self.units, self.whole.into()] {
            to.write_all(&number.to_le_bytes())?;
        }
        for record in self.first.iter().chain(&self.turn) {
            to.write_all(&record.bytes.to_le_bytes())?;
            to.write_all(&record.slot.to_le_bytes())?;
            to.write_all(&record.stream.to_le_bytes())?;
            to.write_all(&[record.kind, 0])?;
        }
        to.flush()
    }
}
