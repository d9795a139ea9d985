//! What users say about idle pools, and what they are told.

use std::fmt;

/// Where a pool's memory is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Residency {
    /// Behind its addresses.
    #[default]
    Resident,
    /// Behind its addresses; free runs of it are out on loan.
    Lent,
    /// Given back: the next use of the pool brings it back, or is refused.
    Parked,
    /// Given back, with what was in it copied to the host: [`resume`](crate::Allocator::resume) brings it back.
    Suspended,
}

impl Residency {
    /// Whether memory of the pool is away.
    #[must_use]
    pub fn is_away(self) -> bool {
        matches!(self, Self::Parked | Self::Suspended)
    }

    pub(crate) fn number(self) -> usize {
        match self {
            Self::Resident => 0,
            Self::Lent => 1,
            Self::Parked => 2,
            Self::Suspended => 3,
        }
    }

    pub(crate) fn from_number(number: usize) -> Self {
        match number {
            0 => Self::Resident,
            1 => Self::Lent,
            2 => Self::Parked,
            _ => Self::Suspended,
        }
    }
}

impl fmt::Display for Residency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Resident => "resident",
            Self::Lent => "lent",
            Self::Parked => "parked",
            Self::Suspended => "suspended",
        })
    }
}

/// What becomes of a live block's contents when its pool's memory goes away. Free memory has none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Contents {
    /// As the pool's options say when it is parked; copied when it is suspended.
    #[default]
    Usual,
    /// They stay where they are, and so does each handle that the block lies in. When the pool is suspended they are copied.
    InPlace,
    /// They are copied to pinned host memory, and back.
    Copied,
    /// They are given up: afterwards the block reads anything.
    Discarded,
}

/// What a launch, a capture or a request does that finds its pool parked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum OnUse {
    /// It wakes the pool first.
    #[default]
    Wake,
    /// It is refused.
    Refuse,
}

/// What a launch does that finds memory out on loan where it writes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum OnLoan {
    /// It is refused.
    #[default]
    Refuse,
    /// It waits on the host until the loan was freed, and notices that up to 2 ms later. A thread that holds the loan itself waits for ever.
    Wait,
}

/// When free runs of an idle pool serve requests of the default pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Lending {
    /// Never.
    #[default]
    Never,
    /// When the driver has no more.
    WhenShort,
    /// Before the driver is asked for more.
    BeforeGrowth,
}

/// How a pool may be used while it is idle. The default keeps it resident unless it is told to move.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct IdleOptions {
    /// Names the pool, and others like it, to [`suspend`](crate::Allocator::suspend) and [`resume`](crate::Allocator::resume).
    pub tag: Option<String>,
    /// Pools of this tag exclude each other: the use of one that is away, or a capture into one, parks the others.
    pub exclusive: bool,
    /// When it lends.
    pub lending: Lending,
    /// It may be parked before a request ends in out of memory.
    pub park_when_short: bool,
    /// What a use does that finds it parked.
    pub on_use: OnUse,
    /// What a launch does that finds memory lent where it writes.
    pub on_loan: OnLoan,
    /// What becomes of live contents when it is parked; `Usual` is in place.
    pub parked_contents: Contents,
}

impl IdleOptions {
    /// Resident, lending nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets [`tag`](Self::tag).
    #[must_use]
    pub fn with_tag(mut self, tag: impl Into<String>) -> Self {
        self.tag = Some(tag.into());
        self
    }

    /// Sets [`exclusive`](Self::exclusive).
    #[must_use]
    pub fn with_exclusive(mut self, exclusive: bool) -> Self {
        self.exclusive = exclusive;
        self
    }

    /// Sets [`lending`](Self::lending).
    #[must_use]
    pub fn with_lending(mut self, lending: Lending) -> Self {
        self.lending = lending;
        self
    }

    /// Sets [`park_when_short`](Self::park_when_short).
    #[must_use]
    pub fn with_park_when_short(mut self, on: bool) -> Self {
        self.park_when_short = on;
        self
    }

    /// Sets [`on_use`](Self::on_use).
    #[must_use]
    pub fn with_on_use(mut self, on_use: OnUse) -> Self {
        self.on_use = on_use;
        self
    }

    /// Sets [`on_loan`](Self::on_loan).
    #[must_use]
    pub fn with_on_loan(mut self, on_loan: OnLoan) -> Self {
        self.on_loan = on_loan;
        self
    }

    /// Sets [`parked_contents`](Self::parked_contents).
    #[must_use]
    pub fn with_parked_contents(mut self, contents: Contents) -> Self {
        self.parked_contents = contents;
        self
    }
}

/// Which memory is suspended or resumed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Which {
    /// All of the allocator's: every private pool, and the default pool.
    All,
    /// The private pools of a tag.
    Tag(String),
}

/// What a move did. Sizes in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Moved {
    /// Physical memory that went away or came back.
    pub bytes: u64,
    /// In how many handles.
    pub handles: u64,
    /// Physical memory that stayed: it holds contents that are kept in place, or work may still use it.
    pub kept_bytes: u64,
    /// Contents that were copied.
    pub copied_bytes: u64,
    /// Physical memory that the driver did not take back; it stayed where it was.
    pub refused_bytes: u64,
}

impl Moved {
    pub(crate) fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.handles += other.handles;
        self.kept_bytes += other.kept_bytes;
        self.copied_bytes += other.copied_bytes;
        self.refused_bytes += other.refused_bytes;
    }
}
