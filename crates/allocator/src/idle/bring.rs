//! Memory comes back: a pool is woken or resumed.
//!
//! All or nothing: every handle is made and mapped, and every copy brought back, before anybody is told. What fails on the way is undone,
//! and the pool is away as before.

use std::sync::Arc;

use gpupool_device::{Address, Device, DriverError, MemoryHandle};

use super::{Away, Moved, Residency, Saved};
use crate::arena::{Arena, Backing};
use crate::counters::PoolCounters;
use crate::error::{AllocError, PoolError};
use crate::history::Action;
use crate::ids::{Part, PoolId};
use crate::inner::Inner;
use crate::pages::{Handle, Piece};
use crate::units::to_bytes;

/// A range that comes back as one handle.
struct Coming {
    segment: u32,
    address: Address,
    range: Away,
    part: Part,
    pool: PoolId,
    counters: Option<Arc<PoolCounters>>,
}

impl<D: Device> Arena<D> {
    /// Brings everything back that is away. A suspended pool only if `resumes`. `inner` is asked for room where memory is short.
    pub(crate) fn bring_back(&self, inner: Option<&Inner<D>>, resumes: bool) -> Result<Moved, AllocError> {
        let _turn = self.idle.turn.take();
        let residency = self.idle.residency();
        if !residency.is_away() {
            return Ok(Moved::default());
        }
        let pool = self.pool_id();
        if residency == Residency::Suspended && !resumes {
            return Err(PoolError::Away { pool, residency }.into());
        }
        let begun = self.shared.driver.device().now();
        // Mappings that could not be undone would be in the way.
        self.shared.retry_stranded();
        let coming = self.coming();
        let bytes: u64 = coming.iter().map(|c| to_bytes(c.range.units)).sum();
        let no_memory = || PoolError::NoMemory { pool, bytes };
        // Where nothing is away nothing is needed, whatever the limit says.
        while bytes > 0 && self.shared.totals.begin_growth(bytes, false).is_err() {
            if !self.make_room(inner) {
                return Err(no_memory().into());
            }
        }
        let made = match self.make(&coming, inner) {
            Ok(made) => made,
            Err(e) => {
                self.shared.totals.cancel(bytes);
                return Err(if e.is_out_of_memory() { no_memory().into() } else { e.into() });
            }
        };
        let saved = std::mem::take(&mut *self.idle.saved.lock());
        if let Err(e) = self.restore(&saved) {
            self.idle.saved.lock().extend(saved);
            self.unmake(&coming, &made);
            self.shared.totals.cancel(bytes);
            return Err(e.into());
        }
        let handles = made.len() as u64;
        self.enter(coming, made);
        let copied_bytes = saved.iter().map(|s| s.bytes).sum();
        saved.into_iter().for_each(|s| self.shared.free_host(s.memory));
        let spent = self.shared.driver.device().now().saturating_sub(begun);
        self.shared.totals.lock().idle.came(residency, bytes, spent);
        Ok(Moved { bytes, handles, copied_bytes, ..Moved::default() })
    }

    /// What is away; neighbours together, since a handle costs what it costs whatever its size.
    fn coming(&self) -> Vec<Coming> {
        let state = self.lock();
        let mut out: Vec<Coming> = Vec::new();
        for (at, segment) in state.segments.iter() {
            let slot = &state.slots[segment.slot as usize];
            let mut away = segment.away.clone();
            away.sort_unstable_by_key(|a| a.offset);
            for range in away {
                if let Some(last) = out.last_mut()
                    && last.segment == at
                    && last.range.end() == range.offset
                {
                    last.range.units += range.units;
                    continue;
                }
                let address = segment.memory.base.offset(to_bytes(range.offset));
                let (part, pool, counters) = (segment.part, slot.pool, slot.counters.clone());
                out.push(Coming { segment: at, address, range, part, pool, counters });
            }
        }
        out
    }

    /// Asks others for memory: whether there may be more now. Never moves this arena's.
    fn make_room(&self, inner: Option<&Inner<D>>) -> bool {
        let Some(inner) = inner else { return false };
        [false, true].into_iter().any(|wait| {
            let tidied = inner.hooks.tidy(wait);
            let freed = if wait { self.wait_for_others(inner) } else { 0 };
            let released = inner.release_idle(None, wait).unwrap_or(0);
            tidied || freed > 0 || released > 0 || inner.park_idle(self, wait) > 0
        })
    }

    /// Waits for freed blocks elsewhere that streams still use: they keep memory that would go back. How many are free now.
    fn wait_for_others(&self, inner: &Inner<D>) -> usize {
        let others = inner.arenas().into_iter().filter(|arena| !std::ptr::eq(&**arena, self));
        // Where the driver cannot wait, others may still have some.
        others.map(|arena| arena.wait_for_pending().unwrap_or(0)).sum()
    }

    /// Makes and maps a handle for each range. After an error none is there.
    fn make(&self, coming: &[Coming], inner: Option<&Inner<D>>) -> Result<Vec<MemoryHandle>, DriverError> {
        let driver = &self.shared.driver;
        let mut made = Vec::with_capacity(coming.len());
        for range in coming {
            let bytes = to_bytes(range.range.units);
            let handle = loop {
                match driver.handle_create(bytes) {
                    Err(e) if e.is_out_of_memory() && self.make_room(inner) => {}
                    other => break other,
                }
            };
            let mapped = handle.and_then(|handle| {
                driver.map_only(range.address, bytes, handle).inspect_err(|_| self.shared.release_unmapped(handle))?;
                made.push(handle);
                driver.set_access(range.address, bytes)
            });
            if let Err(e) = mapped {
                self.unmake(coming, &made);
                return Err(e);
            }
        }
        Ok(made)
    }

    /// Takes the first handles away again, which nobody has used.
    fn unmake(&self, coming: &[Coming], made: &[MemoryHandle]) {
        for (range, handle) in coming.iter().zip(made) {
            let bytes = to_bytes(range.range.units);
            match self.shared.driver.unmap(range.address, bytes) {
                Ok(()) => self.shared.release_unmapped(*handle),
                Err(e) => {
                    tracing::warn!(address = %range.address, bytes, error = %e, "a mapping was not undone; it is tried again");
                    self.shared.strand_mapping(range.address, bytes, *handle);
                }
            }
        }
    }

    fn restore(&self, saved: &[Saved]) -> Result<(), DriverError> {
        for copy in saved {
            for &(address, bytes, offset) in &copy.blocks {
                self.shared.driver.copy_from_host(address, copy.memory, offset, bytes)?;
            }
        }
        Ok(())
    }

    /// Everything is there: says so.
    fn enter(&self, coming: Vec<Coming>, made: Vec<MemoryHandle>) {
        let mut state = self.lock();
        for (range, handle) in coming.into_iter().zip(made) {
            let bytes = to_bytes(range.range.units);
            if let Some(counters) = &range.counters {
                counters.reserved_bytes.increase(range.part, bytes as i64);
            }
            let Some(segment) = state.segments.get_mut(range.segment) else { continue };
            segment.away.clear();
            match segment.pages {
                Some(_) => {
                    let piece = Piece {
                        handle: Arc::new(Handle::new(handle, bytes)),
                        units: range.range.units,
                        since: 0,
                        ordinal: range.range.ordinal,
                    };
                    piece.handle.mapped();
                    let runs = state.enter(range.segment, range.range.offset, [piece]);
                    self.shared.totals.lock().pages_made(bytes, 1, (range.part, range.pool), runs);
                }
                None => {
                    segment.memory.backing = Backing::Handle(handle);
                    state.note_segment(range.segment, Action::SegmentBack);
                    self.shared.totals.commit(bytes, range.part, range.pool);
                }
            }
        }
        state.arrive(&self.counters);
        self.idle.set(Residency::Resident);
    }
}
