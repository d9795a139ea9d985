//! Why a measurement could not be made.

use gpupool_allocator::AllocError;
use gpupool_device::DriverError;
use gpupool_replay::trace::TraceError;

/// Why a measurement could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failed {
    /// Requests were refused, so that the loop did less than it should have.
    #[error("{workload}: {refused} requests were refused")]
    Refused {
        /// The workload.
        workload: String,
        /// How many.
        refused: u64,
    },
    /// The allocator said no to something else than a request.
    #[error(transparent)]
    Allocator(#[from] AllocError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DriverError),
    /// There is no such GPU.
    #[error(transparent)]
    Gpu(#[from] gpupool_cuda_device::Unavailable),
    /// A recording could not be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// No workload has this name.
    #[error("no workload is called {name:?}: hot-BYTES, set-LIVE or trace-NAME, where NAME is a recording")]
    UnknownWorkload {
        /// The name.
        name: String,
    },
    /// No peer has this name.
    #[error("no peer of this build is called {name:?}")]
    UnknownPeer {
        /// The name.
        name: String,
    },
    /// Reading, writing or running something failed.
    #[error("{what}: {error}")]
    Io {
        /// What.
        what: String,
        /// Why.
        #[source]
        error: std::io::Error,
    },
    /// The process that a peer runs in says why it has no figure, or something that is no answer.
    #[error("a peer's process answered {answer:?}")]
    Worker {
        /// What it said.
        answer: String,
    },
    /// Valgrind did not do its work.
    #[error("valgrind: {problem}")]
    Valgrind {
        /// What is wrong.
        problem: String,
    },
    /// A file of ceilings has a line that is not one.
    #[error("{file}: line {line}: not a peer, a workload and a number")]
    Ceilings {
        /// The file.
        file: String,
        /// The line, from 1.
        line: usize,
    },
}

impl Failed {
    /// For [`Result::map_err`] on something that does input or output.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::Io { what: what.into(), error }
    }
}

/// The value; for benchmarks, which have no other way to fail than to say why and stop.
pub fn or_exit<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| {
        eprintln!("benchmark failed: {error}");
        std::process::exit(1)
    })
}
