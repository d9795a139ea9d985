//! Idle pools: their memory goes away and comes back, or is lent, while their addresses stay.
//!
//! Words, the table of states and moves, and the invariants (I1 to I6) are in `docs/idle-graph-memory.md`. Here: [`take`] takes memory away
//! (park, suspend), [`bring`] brings it back (wake, resume), [`loans`] lends free runs, [`moves`] decides who may do what when.
//!
//! Only physical memory comes and goes: blocks stay as they are. While a pool's memory is away, everything free in it is *held* (in no
//! index), so a request that was on its way finds nothing there, whenever it looks.

mod api;
mod bring;
mod loans;
mod moves;
mod options;
mod take;

use std::collections::{BTreeSet, HashMap};

use gpupool_device::{Address, Device, HostMemory};

use crate::arena::{Arena, ArenaState, BlockId, BlockKey, Was};
use crate::counters::ArenaCounters;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Mutex, Rank, Turn};
use crate::units::{Units, to_bytes};

pub use moves::{Idleness, PoolKeeper};
pub use options::{Contents, IdleOptions, Lending, Moved, OnLoan, OnUse, Residency, Which};

/// A range of a segment whose memory is away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Away {
    pub(crate) offset: Units,
    pub(crate) units: Units,
    /// The number of the memory that was there, which what comes back gets too.
    pub(crate) ordinal: u64,
}

impl Away {
    pub(crate) fn end(&self) -> Units {
        self.offset + self.units
    }
}

/// Contents that were copied to the host.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) memory: HostMemory,
    pub(crate) bytes: u64,
    /// Blocks: address, bytes, offset in `memory`.
    pub(crate) blocks: Vec<(Address, u64, u64)>,
}

/// What an arena's lock protects of this.
#[derive(Debug, Default)]
pub(crate) struct IdleState {
    /// Memory is away: what becomes free is held.
    pub(crate) away: bool,
    /// What is held for that reason.
    pub(crate) parked: BTreeSet<BlockId>,
    /// Runs that are out.
    pub(crate) loans: Vec<BlockKey>,
    /// What is to become of live blocks' contents, where their owners said so.
    pub(crate) contents: HashMap<BlockKey, Contents>,
}

/// What an arena has beside its lock.
pub(crate) struct Idle {
    residency: AtomicUsize,
    /// Whoever moves the arena's memory has it.
    pub(crate) turn: Turn,
    pub(crate) options: Mutex<IdleOptions>,
    pub(crate) saved: Mutex<Vec<Saved>>,
}

impl Idle {
    pub(crate) fn new() -> Self {
        Self {
            residency: AtomicUsize::new(0),
            turn: Turn::new(),
            options: Mutex::new(Rank::Leaf, IdleOptions::default()),
            saved: Mutex::new(Rank::Leaf, Vec::new()),
        }
    }

    /// One load.
    #[inline]
    pub(crate) fn residency(&self) -> Residency {
        Residency::from_number(self.residency.load(Ordering::Acquire))
    }

    /// Said under the arena's lock.
    pub(crate) fn set(&self, residency: Residency) {
        self.residency.store(residency.number(), Ordering::Release);
    }

    /// Bytes of host memory that contents were copied to.
    pub(crate) fn host_bytes(&self) -> u64 {
        self.saved.lock().iter().map(|s| s.bytes).sum()
    }
}

impl<D: Device> Arena<D> {
    /// Differs from what it was before if a block was handed out or freed in between.
    pub(crate) fn version(&self) -> (i64, i64) {
        let allocated = self.counters.allocated_bytes();
        let (small, large) =
            (allocated.part(crate::ids::Part::Small).raw(), allocated.part(crate::ids::Part::Large).raw());
        (small.0 + large.0, small.1 + large.1)
    }
}

impl ArenaState {
    /// Bytes of the arena's segments that are away.
    pub(crate) fn away_bytes(&self) -> u64 {
        self.segments.iter().flat_map(|(_, s)| &s.away).map(|a| to_bytes(a.units)).sum()
    }

    /// What has become free while memory is away: nobody finds it.
    pub(crate) fn hold_freed(&mut self, id: BlockId, was: Was, counters: &ArenaCounters) {
        let block = &self.blocks[id];
        let (part, split) = (self.lanes[block.lane as usize].part, was.counted(block.size));
        match was {
            Was::Live => counters.freed_to_index(&mut self.watches, part, to_bytes(block.size) as i64, split),
            _ => counters.split(&mut self.watches, part, split.0, split.1),
        }
        self.blocks[id].state = crate::arena::BlockState::Held;
        self.idle.parked.insert(id);
    }

    /// Takes a free block out of its index.
    fn hold_free(&mut self, id: BlockId, counters: &ArenaCounters) {
        self.unindex(id);
        let was = if self.blocks[id].is_split() { Was::Split } else { Was::Elsewhere };
        self.hold_freed(id, was, counters);
    }

    /// From now on memory may be away: nothing is parked in bins.
    fn leave(&mut self) {
        self.idle.away = true;
        self.bins.forget();
    }

    /// Everything is back: what is held is free.
    fn arrive(&mut self, counters: &ArenaCounters) {
        self.idle.away = false;
        for id in std::mem::take(&mut self.idle.parked) {
            self.stamp(id);
            self.unhold(id, counters);
        }
    }
}
