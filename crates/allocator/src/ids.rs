//! Names of things: pools, streams, parts, segments.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A pool's name: a pair of numbers of which one is zero, as in PyTorch. `(0, 0)` is the default pool. Ids are process-wide and
/// never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PoolId(pub u64, pub u64);

static NEXT_USER_POOL: AtomicU64 = AtomicU64::new(1);
static NEXT_CAPTURE_POOL: AtomicU64 = AtomicU64::new(1);

impl PoolId {
    /// The pool of requests that no capture and no scope sends elsewhere.
    pub const DEFAULT: Self = Self(0, 0);

    /// A fresh id `(0, n)` for a pool that a user makes. Never blocks.
    #[must_use]
    pub fn fresh() -> Self {
        Self(0, NEXT_USER_POOL.fetch_add(1, Ordering::Relaxed))
    }

    /// A fresh id `(n, 0)` for the pool of a capture that was given none. Never blocks.
    #[must_use]
    pub fn fresh_for_capture() -> Self {
        Self(NEXT_CAPTURE_POOL.fetch_add(1, Ordering::Relaxed), 0)
    }

    /// Whether this is the default pool.
    #[must_use]
    pub const fn is_default(self) -> bool {
        self.0 == 0 && self.1 == 0
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_default() { f.write_str("default") } else { write!(f, "({}, {})", self.0, self.1) }
    }
}

/// A stream's registration. Unlike the driver's handle its number is never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StreamId(pub u32);

impl StreamId {
    /// What belongs to no stream has this: free memory of a private pool between captures serves any.
    pub const ANY: Self = Self(u32::MAX);
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::ANY { f.write_str("any") } else { write!(f, "#{}", self.0) }
    }
}

/// Each pool has two parts; the rounded size of a request picks one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Part {
    /// Rounded sizes up to 1 MiB, in segments of 2 MiB.
    Small,
    /// Everything larger.
    Large,
}

impl Part {
    /// Both, small first.
    pub const ALL: [Self; 2] = [Self::Small, Self::Large];

    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Small => 0,
            Self::Large => 1,
        }
    }

    /// `"small"` or `"large"`, as snapshots write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Large => "large",
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
