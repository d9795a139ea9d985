//! Why a command came to no result.

use std::io;
use std::path::PathBuf;

use gpupool_replay::conform::ConformError;
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
    /// Standard output cannot be written.
    #[error("cannot write to standard output: {0}")]
    Output(#[source] io::Error),
    /// Whoever read standard output has seen enough.
    #[error("standard output is closed")]
    OutputClosed,
}

impl Failure {
    /// An error of standard output.
    pub(crate) fn output(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe { Self::OutputClosed } else { Self::Output(error) }
    }
}
