//! The caching allocator of gpupool: segments, blocks, pools, reclaiming and statistics, for one device.
#![forbid(unsafe_code)]

mod allocation;
mod allocator;
mod arena;
mod backtrace;
mod captures;
mod checkpoint;
mod collect;
pub mod config;
mod context;
mod counters;
mod decay;
mod driver;
mod error;
mod events;
mod forward;
mod growth;
pub mod history;
mod hit;
mod hooks;
mod id_set;
mod idle;
mod ids;
mod in_pool;
mod index;
mod inner;
mod ladder;
mod oom;
mod owners;
mod pages;
mod peaks;
mod policy;
mod pool;
mod provider;
mod reclaim;
mod routing;
mod shared;
pub mod state;
mod stats;
mod stream;
mod stream_ordered;
mod sync;
mod totals;
mod units;

pub use allocation::{Allocation, Placement};
pub use allocator::Allocator;
pub use captures::{
    BlockRef, CaptureEnd, CaptureRegistry, HeldBlock, Offence, PoolHold, Range, Recording, SessionKey, Settling,
};
pub use checkpoint::{PoolCheckpoint, Restored};
pub use config::{Config, Policy, Preset};
pub use counters::{Stat, StatArray};
pub use error::{AllocError, FreeError, PoolError};
pub use hooks::{GraphSource, HookId, Janitor, OomObserver, Reclaimer, RejectionObserver};
pub use idle::{Contents, IdleOptions, Idleness, Lending, Moved, OnLoan, OnUse, PoolKeeper, Residency, Which};
pub use ids::{Part, PoolId, StreamId};
pub use oom::{Advice, FreeBytes, OutOfMemory, PinnedBlock, PinnedSegment, PoolBytes};
pub use owners::Owned;
pub use provider::SegmentProvider;
pub use reclaim::Trimmed;
pub use routing::{Filter, ScopeKey};
pub use state::State;
pub use stats::{PoolStats, Stats};
pub use stream::{Stream, WorkMark};
pub use totals::{IdleStats, Limit, PageStats};
