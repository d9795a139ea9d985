//! What is asked of an allocator.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use gpupool_replay::trace::Trace;

use crate::{Draw, Failed, Needs, Script};

/// The smallest block of a working set.
const LEAST: u64 = 512;
/// The largest block of a working set, unless there are [`MANY`] of them.
const MOST: u64 = 32 << 20;
const MANY: u32 = 65_536;
const MOST_OF_MANY: u64 = 1 << 20;
/// Steps of a working set before they come again.
const STEPS: usize = 1 << 17;
const SEED: u64 = 0x6770_7570;

/// What is asked of an allocator. The name that it is written with is also read.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Workload {
    /// Allocate and free this many bytes, again and again.
    HotPair {
        /// Bytes.
        bytes: u64,
    },
    /// As a hot pair, on a stream that is capturing, into the capture's pool. The query of the stream's capture, which each request makes, is
    /// part of the loop.
    Captured {
        /// Bytes.
        bytes: u64,
    },
    /// Free one of this many live blocks, then allocate another; sizes log-uniform, 512 bytes to 32 MiB, or to 1 MiB from 65,536 blocks on.
    WorkingSet {
        /// Live blocks.
        live: u32,
    },
    /// As a working set, on a stream that is capturing.
    CapturedSet {
        /// Live blocks.
        live: u32,
    },
    /// Allocate and free again, sizes log-uniform, 512 bytes to 1 MiB, with this many free blocks lying between live ones: sizes that came
    /// before hardly help.
    Index {
        /// Free blocks.
        free: u32,
    },
    /// A recorded workload, over and over.
    Trace {
        /// The recording's name.
        name: String,
    },
}

impl Workload {
    /// Hot pairs.
    pub const PAIRS: [Self; 3] =
        [Self::HotPair { bytes: 512 }, Self::HotPair { bytes: 1 << 20 }, Self::HotPair { bytes: 64 << 20 }];

    /// Hot pairs inside a capture.
    pub const CAPTURED: [Self; 2] = [Self::Captured { bytes: 512 }, Self::Captured { bytes: 1 << 20 }];

    /// Working sets inside a capture.
    pub const CAPTURED_SETS: [Self; 3] =
        [Self::CapturedSet { live: 64 }, Self::CapturedSet { live: 1_024 }, Self::CapturedSet { live: 8_192 }];

    /// Working sets.
    pub const SETS: [Self; 4] = [
        Self::WorkingSet { live: 64 },
        Self::WorkingSet { live: 1_024 },
        Self::WorkingSet { live: 8_192 },
        Self::WorkingSet { live: MANY },
    ];

    /// Few and many free blocks.
    pub const INDEXES: [Self; 4] = [
        Self::Index { free: 64 },
        Self::Index { free: 1_024 },
        Self::Index { free: 8_192 },
        Self::Index { free: 65_536 },
    ];

    /// Every workload that is not a recording.
    #[must_use]
    pub fn synthetic() -> Vec<Self> {
        let pairs = Self::PAIRS.into_iter().chain(Self::CAPTURED);
        pairs.chain(Self::SETS).chain(Self::CAPTURED_SETS).chain(Self::INDEXES).collect()
    }

    /// Every recording in a folder, by name.
    ///
    /// # Errors
    ///
    /// [`Failed::Io`] if the folder cannot be read.
    pub fn recorded(folder: &Path) -> Result<Vec<Self>, Failed> {
        let what = || folder.display().to_string();
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(Failed::io(what()))? {
            let entry = entry.map_err(Failed::io(what()))?;
            names.extend(entry.file_name().to_string_lossy().strip_suffix(".trace.gz").map(str::to_owned));
        }
        names.sort();
        Ok(names.into_iter().map(|name| Self::Trace { name }).collect())
    }

    /// What is counted: a pair, a step, or an event.
    #[must_use]
    pub fn unit(&self) -> &'static str {
        match self {
            Self::HotPair { .. } | Self::Captured { .. } | Self::Index { .. } => "pair",
            Self::WorkingSet { .. } | Self::CapturedSet { .. } => "step",
            Self::Trace { .. } => "event",
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HotPair { bytes } => write!(f, "hot-{bytes}"),
            Self::Captured { bytes } => write!(f, "captured-{bytes}"),
            Self::WorkingSet { live } => write!(f, "set-{live}"),
            Self::CapturedSet { live } => write!(f, "captured-set-{live}"),
            Self::Index { free } => write!(f, "index-{free}"),
            Self::Trace { name } => write!(f, "trace-{name}"),
        }
    }
}

impl FromStr for Workload {
    type Err = Failed;

    fn from_str(name: &str) -> Result<Self, Failed> {
        let unknown = || Failed::UnknownWorkload { name: name.to_owned() };
        match name.split_once('-') {
            Some(("hot", bytes)) => Ok(Self::HotPair { bytes: bytes.parse().map_err(|_| unknown())? }),
            Some(("captured", set)) if set.starts_with("set-") => match set.parse()? {
                Self::WorkingSet { live } => Ok(Self::CapturedSet { live }),
                _ => Err(unknown()),
            },
            Some(("captured", bytes)) => Ok(Self::Captured { bytes: bytes.parse().map_err(|_| unknown())? }),
            Some(("set", live)) => match live.parse() {
                Ok(live) if live > 0 => Ok(Self::WorkingSet { live }),
                _ => Err(unknown()),
            },
            Some(("index", free)) => Ok(Self::Index { free: free.parse().map_err(|_| unknown())? }),
            Some(("trace", name)) if !name.is_empty() => Ok(Self::Trace { name: name.to_owned() }),
            _ => Err(unknown()),
        }
    }
}

/// The recordings that come with the project.
#[must_use]
pub fn traces_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/replay/data/traces")
}

/// A step of a working set: the block in `slot` is freed, and another of `bytes` put there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// Which block.
    pub slot: u32,
    /// Bytes.
    pub bytes: u32,
}

/// A workload with everything that can be made before the clock runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Prepared {
    /// A hot pair.
    HotPair {
        /// Bytes.
        bytes: u64,
    },
    /// A hot pair on a capturing stream.
    Captured {
        /// Bytes.
        bytes: u64,
    },
    /// A working set.
    WorkingSet {
        /// Sizes of the first blocks.
        first: Vec<u32>,
        /// What follows; it comes again.
        steps: Vec<Step>,
        /// On a capturing stream.
        captured: bool,
    },
    /// Pairs among free blocks.
    Index {
        /// Sizes of the first blocks, of which every second one is freed.
        first: Vec<u32>,
        /// Sizes of the pairs; they come again.
        pairs: Vec<u32>,
    },
    /// A recorded workload.
    Trace {
        /// Its operations.
        script: Script,
    },
}

impl Prepared {
    /// Makes a workload's lists; recordings are looked for in `traces`.
    ///
    /// # Errors
    ///
    /// [`Failed::Trace`] for a recording that is not there, or damaged.
    pub fn new(workload: &Workload, traces: &Path) -> Result<Self, Failed> {
        Ok(match workload {
            Workload::HotPair { bytes } => Self::HotPair { bytes: *bytes },
            Workload::Captured { bytes } => Self::Captured { bytes: *bytes },
            Workload::WorkingSet { live } => Self::working_set(*live, SEED, false),
            Workload::CapturedSet { live } => Self::working_set(*live, SEED, true),
            Workload::Index { free } => Self::index(*free, SEED),
            Workload::Trace { name } => {
                let trace = Trace::read(&traces.join(format!("{name}.trace.gz")))?;
                Self::Trace { script: Script::new(&trace) }
            }
        })
    }

    /// A working set of `live` blocks, drawn from a seed.
    #[must_use]
    pub fn working_set(live: u32, seed: u64, captured: bool) -> Self {
        let most = if live >= MANY { MOST_OF_MANY } else { MOST };
        let mut draw = Draw::new(seed ^ u64::from(live));
        // No size is beyond 32 MiB.
        let size = |draw: &mut Draw| draw.log_uniform(LEAST, most) as u32;
        let first = (0..live).map(|_| size(&mut draw)).collect();
        let steps = (0..STEPS.max(8 * live as usize))
            .map(|_| Step { slot: draw.below(u64::from(live)) as u32, bytes: size(&mut draw) })
            .collect();
        Self::WorkingSet { first, steps, captured }
    }

    /// Pairs among `free` free blocks, drawn from a seed.
    #[must_use]
    pub fn index(free: u32, seed: u64) -> Self {
        let mut draw = Draw::new(seed ^ u64::from(free));
        let mut sizes = |n: usize| (0..n).map(|_| draw.log_uniform(LEAST, MOST_OF_MANY) as u32).collect();
        Self::Index { first: sizes(2 * free as usize), pairs: sizes(STEPS) }
    }

    /// What a peer must have.
    #[must_use]
    pub fn needs(&self) -> Needs {
        match self {
            Self::HotPair { .. } | Self::Captured { .. } | Self::WorkingSet { .. } | Self::Index { .. } => {
                Needs { streams: 1 }
            }
            Self::Trace { script } => script.needs(),
        }
    }

    /// How many pairs, steps or events one round has.
    #[must_use]
    pub fn units_per_round(&self) -> u64 {
        match self {
            Self::HotPair { .. } | Self::Captured { .. } | Self::WorkingSet { .. } | Self::Index { .. } => 1,
            Self::Trace { script } => u64::from(script.events.max(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let recorded = Workload::recorded(&traces_folder()).unwrap();
        assert_eq!(recorded.len(), 8);
        for workload in Workload::synthetic().into_iter().chain(recorded) {
            assert_eq!(workload.to_string().parse::<Workload>().unwrap(), workload);
        }
        for name in ["", "hot", "hot-", "hot-x", "set-0", "set--1", "trace-", "index-", "cold-1", "captured-set-0"] {
            assert!(name.parse::<Workload>().is_err(), "{name}");
        }
    }

    #[test]
    fn a_working_set_is_the_same_every_time() {
        let set = |seed| Prepared::working_set(64, seed, false);
        assert_eq!(set(1), set(1));
        assert_ne!(set(1), set(2));
    }
}
