//! What can go wrong with captures and launches, as data.

use gpupool_allocator::{AllocError, Offence, PoolId, Range, StreamId};
use gpupool_device::{Call, CaptureId, DriverError};

use crate::graph::GraphId;

/// A capture could not be begun, ended or adopted. Stream, routing and pools are as they were before it began.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// The allocator refused: no such pool, the pool is drawn from by another capture, and so on.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The driver refused the begin or the end.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The capture was invalidated while it was under way.
    #[error("the capture on stream {stream} was invalidated{}; the driver's end said: {end}", described(.first))]
    Invalidated {
        /// The stream it was begun on.
        stream: StreamId,
        /// The capture.
        capture: CaptureId,
        /// The first of our own calls that it did not permit, if it was one of ours.
        first: Option<Offence>,
        /// What the driver's end returned.
        end: DriverError,
    },
    /// Caching is off, so every allocation would be a driver call that the capture does not permit.
    #[error(
        "caching is off: an allocation would be a driver call that a capture does not permit. Switch caching on to capture"
    )]
    CachingIsOff,
    /// The allocator's policy routes captures in its own way.
    #[error(
        "the policy {policy} routes captures by scopes: use begin_allocate_to_pool, or the policy `segments` or `pages`"
    )]
    Policy {
        /// The policy's name.
        policy: &'static str,
    },
    /// The stream is not capturing, so there is nothing to adopt.
    #[error("stream {stream} is not capturing: there is nothing to adopt")]
    NotCapturing {
        /// The stream.
        stream: StreamId,
    },
}

fn described(first: &Option<Offence>) -> String {
    match first {
        Some(o) => format!(" by {} (code {}) from thread {:?}", o.call, o.code, o.thread),
        None => " by a call that was not the allocator's".to_owned(),
    }
}

/// A launch was refused. Nothing was submitted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The stream is another device's.
    #[error("stream {stream} is registered with an allocator of another device than that of graph {graph}")]
    ForeignStream {
        /// The graph.
        graph: GraphId,
        /// The stream's id with its allocator.
        stream: StreamId,
    },
    /// The stream is another thread's own default stream: its handle names another stream on this thread.
    #[error(
        "stream {stream} is another thread's own default stream, and its handle names this thread's here: graph {graph} was not launched"
    )]
    OtherThreadsStream {
        /// The graph.
        graph: GraphId,
        /// The stream's id with its allocator.
        stream: StreamId,
    },
    /// The stream was retired: nothing could tell when the launch has finished.
    #[error(
        "stream {stream} was retired, so the end of a launch of graph {graph} on it could not be learned; register it again"
    )]
    RetiredStream {
        /// The graph.
        graph: GraphId,
        /// The stream's id with its allocator.
        stream: StreamId,
    },
    /// A graph that shares a pool may still be running on another stream.
    #[error(
        "pool {pool} is still in use by graph {running} on stream {stream}: wait for it, or launch with `Sharing::Serialize`"
    )]
    PoolInUse {
        /// The shared pool.
        pool: PoolId,
        /// The graph that ran last.
        running: GraphId,
        /// Where.
        stream: StreamId,
    },
    /// The stream is capturing: a graph that was launched there would become part of another one, which does not hold its pools.
    #[error(
        "graph {graph} cannot be launched on stream {stream}, which is capturing: the captured graph would not hold its pools"
    )]
    StreamIsCapturing {
        /// The graph.
        graph: GraphId,
        /// The stream.
        stream: StreamId,
    },
    /// The launch should wait for a graph of its pool that ran on a stream which is capturing now: no event can be recorded there.
    #[error("the launch must wait for graph {running} on stream {stream}, which is capturing: end that capture first")]
    CannotOrder {
        /// The graph that ran last.
        running: GraphId,
        /// The stream.
        stream: StreamId,
    },
    /// Work on another stream still uses freed memory that the launch would write, and no event can be recorded there to wait for.
    #[error(
        "work on stream {stream} still uses freed memory of pool {pool} that the launch would write, and no event can be recorded there now: the stream is capturing, or is another thread's own default stream"
    )]
    StillUsed {
        /// The pool.
        pool: PoolId,
        /// The stream.
        stream: StreamId,
    },
    /// A declared input is not the block that it was when it was declared.
    #[error("the declared input at {} ({} bytes) is not the same live block any more: the graph would read stale memory", .range.address, .range.bytes)]
    InputGone {
        /// Where the input was.
        range: Range,
    },
    /// A pool of the graph is not to be used now: it is suspended, or parked and is not to be woken, or could not be; or runs of it that the
    /// launch would write are on loan.
    #[error("graph {graph} was not launched: {source}")]
    Pool {
        /// The graph.
        graph: GraphId,
        /// Why.
        source: AllocError,
    },
    /// Blocks that are still held would be overwritten.
    #[error("the launch would overwrite {count} blocks that are still held, the first at {} ({} bytes)", .first.address, .first.bytes)]
    WouldOverwrite {
        /// How many.
        count: usize,
        /// The first.
        first: Range,
    },
}

/// A call that a capture does not permit was not made, so the capture survives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{call} is not permitted on stream {stream} while capture {} is under way: {instead}", .capture.0)]
pub struct Forbidden {
    /// The call.
    pub call: Call,
    /// The stream it was for.
    pub stream: StreamId,
    /// The capture.
    pub capture: CaptureId,
    /// What to use in its place.
    pub instead: &'static str,
}
