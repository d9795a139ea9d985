//! What can go wrong, as data.

use gpupool_device::{Address, CaptureId, DriverError};

use crate::config::ConfigError;
use crate::idle::Residency;
use crate::ids::{PoolId, StreamId};
use crate::oom::OutOfMemory;

/// An allocation, or a call about pools, streams or limits, failed. It has changed no live block, route or handle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// There is no memory; the report says where it is.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// More than an exbibyte was asked for: surely a mistake in computing the size.
    #[error("{requested} bytes were asked for: more than 1 EiB, surely not what was meant")]
    AbsurdSize {
        /// Bytes asked for.
        requested: u64,
    },
    /// The configured fraction of memory forbids the growth outright (`throw_on_cudamalloc_oom`).
    #[error(
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction limit. \
         Requested size: {requested}"
    )]
    Rejected {
        /// Bytes asked for.
        requested: u64,
    },
    /// A driver call failed for another reason than lack of memory.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Another capture under way draws from the pool: what one freed would be handed to the other, and nothing orders them.
    #[error("pool {pool} is drawn from by another capture under way: end it first, or use another pool")]
    PoolInCapture {
        /// The pool.
        pool: PoolId,
    },
    /// A pool could not be sized ahead.
    #[error("{bytes} bytes could not be reserved for pool {pool}: the driver or the limit does not allow it")]
    CannotReserve {
        /// The pool.
        pool: PoolId,
        /// Bytes of the segment.
        bytes: u64,
    },
    /// The stream was registered with another allocator.
    #[error("stream {stream} belongs to another allocator")]
    ForeignStream {
        /// The stream's id there.
        stream: StreamId,
    },
    /// The stream is another thread's own default stream. Its handle names another stream here, whose work is not ordered with it.
    #[error(
        "stream {stream} is another thread's own default stream, and its handle names this thread's here: register the handle on this thread"
    )]
    OtherThreadsStream {
        /// The stream.
        stream: StreamId,
    },
    /// The stream was retired; register the handle again to use a new stream of the same number.
    #[error("stream {stream} was retired: register its handle again if a new stream has it")]
    RetiredStream {
        /// The stream.
        stream: StreamId,
    },
    /// The stream is capturing, but nobody announced the capture: default memory would be baked into a graph that does not hold it.
    #[error(
        "stream {stream} is being captured under id {} by someone who did not announce it: adopt the capture, so that its memory \
         gets a pool that its graph holds",
        .capture.0
    )]
    UnknownCapture {
        /// The stream.
        stream: StreamId,
        /// The capture's id.
        capture: CaptureId,
    },
    /// The capture that the stream is in was invalidated by an earlier call.
    #[error("the capture on stream {stream} was invalidated by an earlier call: end it before allocating there")]
    InvalidatedCapture {
        /// The stream.
        stream: StreamId,
    },
    /// A call about a pool that does not exist (any more).
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// A call about pools was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// No such pool.
    #[error("there is no pool {pool}")]
    Unknown {
        /// The id.
        pool: PoolId,
    },
    /// The default pool cannot be created, scoped or released.
    #[error("the default pool is always there: it is neither created nor released nor entered")]
    Default,
    /// The pool's last user released it. It can be used again only under a policy that revives pools.
    #[error("pool {pool} was released by its last user; take a fresh id")]
    Released {
        /// The id.
        pool: PoolId,
    },
    /// The pool was released more often than it was taken.
    #[error("pool {pool} was released more often than it was taken")]
    OverReleased {
        /// The id.
        pool: PoolId,
    },
    /// A scope for the pool is open already.
    #[error("beginAllocateToPool: already recording to pool {pool}")]
    AlreadyRecording {
        /// The id.
        pool: PoolId,
    },
    /// No scope for the pool is open.
    #[error("endAllocatePool: not currently recording to pool {pool}")]
    NotRecording {
        /// The id.
        pool: PoolId,
    },
    /// A provider was given for a pool that exists already.
    #[error("pool {pool} exists already: a provider can only be given to a new pool")]
    HasProvider {
        /// The id.
        pool: PoolId,
    },
    /// A block with pending uses cannot be part of a checkpoint.
    #[error("the block at {address} in pool {pool} still waits for a stream: synchronise before taking a checkpoint")]
    PendingBlock {
        /// The pool.
        pool: PoolId,
        /// The block.
        address: Address,
    },
    /// The pool holds memory that is mapped in pieces, so it cannot promise one driver allocation a segment.
    #[error("pool {pool} holds memory that is mapped in pieces: ask for whole segments before its first request")]
    InPieces {
        /// The id.
        pool: PoolId,
    },
    /// The pool's memory is away.
    #[error("pool {pool} is {residency}: {}", what_brings_back(*residency))]
    Away {
        /// The pool.
        pool: PoolId,
        /// Where its memory is.
        residency: Residency,
    },
    /// Runs of the pool are on loan.
    #[error("{loans} runs of pool {pool} ({bytes} bytes) are on loan: free those blocks first, or set `OnLoan::Wait`")]
    LoansOut {
        /// The pool.
        pool: PoolId,
        /// How many, of those that matter.
        loans: usize,
        /// Their bytes.
        bytes: u64,
    },
    /// The pool is in use, so its memory cannot go away now.
    #[error("the memory of pool {pool} cannot go away now: {why}")]
    Busy {
        /// The pool.
        pool: PoolId,
        /// By what.
        why: &'static str,
    },
    /// The pool's memory cannot go away and leave its addresses.
    #[error("the memory of pool {pool} cannot go away: {why}")]
    CannotMove {
        /// The pool.
        pool: PoolId,
        /// What it is.
        why: &'static str,
    },
    /// There is not enough memory to bring a pool's back; nothing of it is mapped.
    #[error(
        "pool {pool} needs {bytes} bytes to come back, and there are not so many: free memory, park other pools, or raise the limit"
    )]
    NoMemory {
        /// The pool.
        pool: PoolId,
        /// What is away of it.
        bytes: u64,
    },
    /// A checkpoint does not fit the pool any more.
    #[error("the checkpoint does not fit pool {pool}: {why}")]
    CheckpointMismatch {
        /// The pool.
        pool: PoolId,
        /// What differs.
        why: &'static str,
    },
}

fn what_brings_back(residency: Residency) -> &'static str {
    match residency {
        Residency::Suspended => "resume it first",
        _ => "wake it first, or set `OnUse::Wake`",
    }
}

/// A free was refused; nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreeError {
    /// The address is not the start of a live block of this allocator: freed before, inside a block, or from elsewhere.
    #[error("invalid device pointer: {address} is not the start of a live block of this allocator")]
    NotLive {
        /// The address.
        address: Address,
    },
    /// The stream was registered with another allocator.
    #[error("stream {stream} belongs to another allocator; the block is still live")]
    ForeignStream {
        /// The stream's id there.
        stream: StreamId,
    },
}
