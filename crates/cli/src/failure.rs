//! Why a command came to no result.

use std::io;
use std::path::PathBuf;

use gpupool_replay::conform::ConformError;
use gpupool_replay::forecast::TraceForecastError;
use gpupool_replay::replay::ReplayError;
use gpupool_replay::stress::StressError;
use gpupool_replay::trace::{TraceError, WhatIfError};
use gpupool_snapshot::ReadError;

/// Input or arguments make no sense, or a file cannot be written. All but [`OutputClosed`](Self::OutputClosed) end in
/// exit status 2.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A trace cannot be used.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A conformance file cannot be used.
    #[error(transparent)]
    Conform(#[from] ConformError),
    /// A snapshot cannot be used.
    #[error(transparent)]
    Snapshot(#[from] ReadError),
    /// A replay cannot be made.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// A forecast cannot be made.
    #[error(transparent)]
    Forecast(#[from] TraceForecastError),
    /// There is no such GPU.
    #[error(transparent)]
    Gpu(#[from] gpupool_cuda_device::Unavailable),
    /// The GPU's kernels cannot be had.
    #[error(transparent)]
    Kernels(#[from] gpupool_cuda_device::kernels::KernelError),
    /// Stress cannot be made.
    #[error(transparent)]
    Stress(#[from] StressError),
    /// Allocators cannot be compared.
    #[error(transparent)]
    Compare(#[from] gpupool_benches::Failed),
    /// The arguments contradict each other.
    #[error("{0}")]
    Usage(&'static str),
    /// A snapshot makes no trace.
    #[error(transparent)]
    WhatIf(#[from] WhatIfError),
    /// A file cannot be read.
    #[error("{}: cannot read the file: {error}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// A file cannot be written.
    #[error("{}: cannot write the file: {error}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// Nobody's figures can be read there.
    #[error("{}: {}", .path.display(), no_figures(error))]
    Watch {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// No socket can be opened there.
    #[error("{}: {}", .path.display(), no_socket(error))]
    Socket {
        /// Where it should be.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// Standard output cannot be written.
    #[error("cannot write to standard output: {0}")]
    Output(#[source] io::Error),
    /// Whoever read standard output has seen enough.
    #[error("standard output is closed")]
    OutputClosed,
}

fn no_figures(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "there is no such socket: has the process opened it, and does it still run?".to_owned()
        }
        io::ErrorKind::ConnectionRefused => {
            "nobody serves this socket any more: the process that opened it is gone".to_owned()
        }
        io::ErrorKind::InvalidInput => {
            "this is no socket: name the one that `stress --socket` or a program opened (`gpupool::snapshot::Live`)"
                .to_owned()
        }
        io::ErrorKind::InvalidData => format!("what serves this socket is no gpupool process: {error}"),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "whoever serves this socket does not answer".to_owned(),
        _ => format!("cannot read the socket: {error}"),
    }
}

fn no_socket(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another process serves this socket: watch that one, or choose another path".to_owned()
        }
        io::ErrorKind::AlreadyExists => {
            "a file that is no socket is there, which is not replaced: choose another path".to_owned()
        }
        io::ErrorKind::NotFound => "there is no such folder to open a socket in".to_owned(),
        _ => format!("cannot open a socket there: {error}"),
    }
}

impl Failure {
    /// An error of standard output.
    pub(crate) fn output(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe { Self::OutputClosed } else { Self::Output(error) }
    }
}
