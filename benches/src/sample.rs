//! One measurement: a peer, a workload, one figure. And the worker process that rlsf is measured in.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use gpupool_allocator::Policy;
use serde::{Deserialize, Serialize};

#[cfg(feature = "cubecl")]
use crate::peers::Cubecl;
#[cfg(feature = "offset-allocator")]
use crate::peers::Offset;
use crate::peers::{Alone, Gpupool, Naive, Nothing, OnDevice, device};
use crate::{Failed, Peer, Prepared, Running, Workload};

/// How long a peer runs before a sample is timed, besides what makes it ready, and how long a sample is, whatever the peer. Long enough for
/// the core to be as fast and its caches as warm as they get after another program had the machine.
pub(crate) const WARM_UP: Duration = Duration::from_millis(30);
/// See [`WARM_UP`].
pub(crate) const SAMPLE: Duration = Duration::from_millis(60);

/// A peer by name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// The loop with nothing in it.
    LoopAlone,
    /// gpupool, under one of [`OURS`](Self::OURS).
    Ours(Policy),
    /// gpupool under `segments`, with a scope in place of each capture.
    Scoped,
    /// The loop with nothing in it, without captures: what is taken off [`Scoped`](Self::Scoped).
    ScopedLoop,
    /// rlsf, in a process of its own: where its worker was not built, there is none.
    Rlsf,
    /// offset-allocator.
    #[cfg(feature = "offset-allocator")]
    OffsetAllocator,
    /// CubeCL's memory management.
    #[cfg(feature = "cubecl")]
    Cubecl,
    /// The classical shape.
    TreeAndHash,
}

impl Kind {
    /// The policies that gpupool is compared under.
    pub const OURS: [Policy; 3] = [Policy::Segments, Policy::Pages, Policy::Torch215];

    /// What is counted and not compared: on a GPU scopes take the place of captures anyway.
    pub const SCOPED: [Self; 2] = [Self::Scoped, Self::ScopedLoop];

    /// Every peer of this build that is compared.
    pub const ALL: &'static [Self] = &[
        Self::LoopAlone,
        Self::Ours(Policy::Segments),
        Self::Ours(Policy::Pages),
        Self::Ours(Policy::Torch215),
        Self::Rlsf,
        #[cfg(feature = "offset-allocator")]
        Self::OffsetAllocator,
        #[cfg(feature = "cubecl")]
        Self::Cubecl,
        Self::TreeAndHash,
    ];

    /// Peers that this build lacks, by name: each is behind the cargo feature of that name.
    pub const LEFT_OUT: &'static [&'static str] = &[
        #[cfg(not(feature = "offset-allocator"))]
        "offset-allocator",
        #[cfg(not(feature = "cubecl"))]
        "cubecl",
    ];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::LoopAlone => "loop-alone",
            Self::Ours(policy) => policy.name(),
            Self::Scoped => "segments-scoped",
            Self::ScopedLoop => "loop-scoped",
            Self::Rlsf => "rlsf",
            #[cfg(feature = "offset-allocator")]
            Self::OffsetAllocator => "offset-allocator",
            #[cfg(feature = "cubecl")]
            Self::Cubecl => "cubecl",
            Self::TreeAndHash => "tree-and-hash",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kind {
    type Err = Failed;

    fn from_str(name: &str) -> Result<Self, Failed> {
        let found = Self::ALL.iter().copied().chain(Self::SCOPED).find(|kind| kind.name() == name);
        found.ok_or_else(|| Failed::UnknownPeer { name: name.to_owned() })
    }
}

/// What one sample found.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Nanoseconds a pair, step or event.
    pub ns: f64,
    /// Driver calls a pair, step or event; `None` for peers without a driver.
    pub driver_calls: Option<f64>,
}

/// A fresh peer, warmed up, then timed.
///
/// # Errors
///
/// See [`Failed`].
pub fn sample(
    kind: Kind,
    workload: &Workload,
    prepared: &Prepared,
    worker: Option<&mut Worker>,
) -> Result<Sample, Failed> {
    let needs = prepared.needs();
    match kind {
        Kind::LoopAlone => time(prepared, Nothing::new(needs)),
        Kind::Ours(policy) => time(prepared, Gpupool::new(policy, needs)?),
        Kind::ScopedLoop => time(prepared, Alone),
        Kind::Scoped => time(prepared, OnDevice::new(Arc::new(device()), Policy::Segments, needs)?),
        Kind::Rlsf => match worker {
            Some(worker) => worker.sample(workload),
            None => Err(Failed::UnknownPeer { name: kind.name().to_owned() }),
        },
        #[cfg(feature = "offset-allocator")]
        Kind::OffsetAllocator => time(prepared, Offset::new()),
        #[cfg(feature = "cubecl")]
        Kind::Cubecl if Cubecl::takes_minutes(workload) => {
            Err(Failed::Worker { answer: "its samples would take minutes".to_owned() })
        }
        #[cfg(feature = "cubecl")]
        Kind::Cubecl => time(prepared, Cubecl::new()),
        Kind::TreeAndHash => time(prepared, Naive::new()),
    }
    .map_err(|error| match error {
        Failed::Refused { refused, .. } => Failed::Refused { workload: format!("{kind}: {workload}"), refused },
        other => other,
    })
}

/// Warms a peer up on a workload, then times it.
///
/// # Errors
///
/// See [`Failed`].
pub fn time<P: Peer>(prepared: &Prepared, peer: P) -> Result<Sample, Failed> {
    let mut running = Running::start(prepared, peer)?;
    running.run_for(WARM_UP)?;
    let calls = |running: &Running<'_, P>| running.peer().driver_calls();
    let before = calls(&running);
    let (rounds, took) = running.run_for(SAMPLE)?;
    let units = (rounds * prepared.units_per_round()) as f64;
    let driver_calls = before.zip(calls(&running)).map(|(before, after)| (after - before) as f64 / units);
    Ok(Sample { ns: took.as_nanos() as f64 / units, driver_calls })
}

/// The middle of several figures and how far they lie apart.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
}

impl Spread {
    /// Of these figures; `None` if there are none.
    #[must_use]
    pub fn of(mut figures: Vec<f64>) -> Option<Self> {
        figures.sort_by(f64::total_cmp);
        let (least, most) = (*figures.first()?, *figures.last()?);
        let middle = figures.len() / 2;
        let median = match figures.len().is_multiple_of(2) {
            true => (figures[middle - 1] + figures[middle]) / 2.0,
            false => figures[middle],
        };
        Some(Self { median, least, most })
    }

    /// Half the distance between the smallest and the largest, as a share of the median.
    #[must_use]
    pub fn relative(&self) -> f64 {
        if self.median > 0.0 { (self.most - self.least) / 2.0 / self.median } else { 0.0 }
    }
}

/// A process in which rlsf is the global allocator. It is asked for one sample at a time, so that its samples come in turn with those of
/// the other peers.
#[derive(Debug)]
pub struct Worker {
    process: Child,
    // `None` once the worker was told to end.
    questions: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts the worker that was built beside the running program, with recordings in `traces`; `None` if none was built.
    ///
    /// # Errors
    ///
    /// [`Failed::Io`].
    pub fn start(traces: &Path) -> Result<Option<Self>, Failed> {
        let what = "the rlsf worker";
        let program = std::env::current_exe().map_err(Failed::io(what))?;
        let program = program.with_file_name(format!("rlsf_worker{}", std::env::consts::EXE_SUFFIX));
        if !program.exists() {
            return Ok(None);
        }
        let mut command = Command::new(program);
        command.arg(traces).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().map_err(Failed::io(what))?;
        let (questions, answers) = (process.stdin.take(), process.stdout.take());
        match answers {
            Some(answers) => Ok(Some(Self { process, questions, answers: BufReader::new(answers) })),
            None => Err(Failed::Worker { answer: String::new() }),
        }
    }

    fn sample(&mut self, workload: &Workload) -> Result<Sample, Failed> {
        let what = "the rlsf worker";
        if let Some(questions) = &mut self.questions {
            writeln!(questions, "{workload}").map_err(Failed::io(what))?;
        }
        let mut answer = String::new();
        self.answers.read_line(&mut answer).map_err(Failed::io(what))?;
        serde_json::from_str(&answer).map_err(|_| Failed::Worker { answer: answer.trim().to_owned() })
    }
}

/// The worker ends when nothing can come any more.
impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.questions.take());
        let _ = self.process.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_peers_are_read_as_they_are_written() {
        for kind in Kind::ALL.iter().copied().chain(Kind::SCOPED) {
            assert_eq!(kind.to_string().parse::<Kind>().unwrap(), kind);
        }
        assert!("pytorch".parse::<Kind>().is_err());
    }

    #[test]
    fn a_spread_is_that_of_its_figures() {
        let spread = |figures: &[f64]| Spread::of(figures.to_vec());
        assert_eq!(spread(&[]), None);
        assert_eq!(spread(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, least: 1.0, most: 3.0 }));
        assert_eq!(spread(&[4.0, 1.0]).map(|s| (s.median, s.relative())), Some((2.5, 0.6)));
    }
}
