//! What all arenas of an allocator share, and outlives the allocator while a block is live: the driver, the rules, the totals.
//!
//! Also how a segment's memory is made and given back, with every failure undone. What cannot be undone is *stranded*: kept,
//! counted as reserved, and tried again whenever the cache is emptied.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use gpupool_device::{Address, Call, Device, DriverError, DriverResult, HostMemory, MemoryHandle, StreamHandle, code};

use crate::arena::{Backing, Memory, Want};
use crate::captures::CaptureRegistry;
use crate::config::Config;
use crate::context::Context;
use crate::driver::Driver;
use crate::history::History;
use crate::ids::{Part, PoolId};
use crate::pages::{Leaving, PageTable};
use crate::peaks::Peaks;
use crate::policy::{Routing, Rules};
use crate::provider::SegmentProvider;
use crate::stream::StreamCore;
use crate::stream_ordered::DriverPool;
use crate::sync::{Mutex, Rank};
use crate::totals::Totals;
use crate::units::{UNIT, Units, is_placeable, to_bytes};

/// Ages of segments, over all devices of the process.
static NEXT_REGISTRATION: AtomicU64 = AtomicU64::new(0);

/// Searches make free blocks older: a collection threshold and a limit are both in force.
pub(crate) const AGES: u8 = 1;
/// The history is on: requests take the long way, and events are noted.
pub(crate) const RECORDS: u8 = 2;
/// Freed blocks wait for all streams, or go back to where they came from: always so, or never.
pub(crate) const FREES_APART: u8 = 4;
/// A capture was marked begun, and the policy goes by that.
pub(crate) const MARKS: u8 = 8;
/// Requests poll events first, as PyTorch's do: set while a block is pending or deferred, without which there is nothing to poll.
pub(crate) const POLLS: u8 = 16;
/// A scope is open.
pub(crate) const SCOPES: u8 = 32;
/// A capture session is open in the process, and the policy goes by that.
pub(crate) const CAPTURES: u8 = 64;
/// Requests are rounded as configured, and not just up to 512 bytes: always so, or never.
pub(crate) const ROUNDS: u8 = 128;
/// What makes a request leave the shortest way. For what polls, scopes, captures and rounding by themselves there are ways between that and
/// the long one (`Inner::hit_beside`, `Inner::alloc_past_hits`).
pub(crate) const UNUSUAL: u8 = AGES | RECORDS | MARKS | POLLS | SCOPES | CAPTURES | ROUNDS;

/// What a request or a free must look at beside the usual, as bits: the constants above.
#[derive(Debug, Default)]
pub(crate) struct Attention(AtomicU8);

impl Attention {
    /// One load.
    #[inline]
    pub(crate) fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, bit: u8, on: bool) {
        if on {
            self.0.fetch_or(bit, Ordering::Relaxed);
        } else {
            self.0.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

/// Memory half given back: the pieces that the driver would not take.
#[derive(Debug, Default)]
struct Stranded {
    range: Option<(Address, u64)>,
    /// The handle is still mapped there.
    mapped: bool,
    /// The handle is still mapped here, in a range that others are mapped in too.
    mapping: Option<(Address, u64)>,
    handle: Option<MemoryHandle>,
    plain: Option<Address>,
    host: Option<HostMemory>,
    /// Counted as reserved until the handle is released.
    counted: Option<(u64, Part, PoolId)>,
    /// A piece of a segment, and not a segment.
    page: bool,
}

/// The driver, the rules and the totals.
pub(crate) struct Shared<D: Device> {
    pub(crate) driver: Driver<D>,
    pub(crate) rules: Rules,
    pub(crate) config: Config,
    pub(crate) totals: Totals,
    /// Of policies with several arenas.
    pub(crate) peaks: Peaks<D>,
    pub(crate) context: Context,
    /// What stands for no stream in the lanes of free blocks between captures.
    pub(crate) neutral: Arc<StreamCore>,
    pub(crate) registry: Arc<CaptureRegistry>,
    pub(crate) attention: Arc<Attention>,
    pub(crate) history: Arc<History>,
    next_ordinal: AtomicU64,
    stranded: Mutex<Vec<Stranded>>,
    /// Under the policy that takes blocks from it.
    pub(crate) driver_pool: DriverPool,
}

impl<D: Device> Shared<D> {
    pub(crate) fn new(
        driver: Driver<D>,
        rules: Rules,
        config: Config,
        totals: Totals,
        neutral: Arc<StreamCore>,
        registry: Arc<CaptureRegistry>,
    ) -> Self {
        let clock = Arc::clone(driver.device());
        let bit = |bit: u8, on: bool| if on { bit } else { 0 };
        let attention = Attention(AtomicU8::new(
            bit(FREES_APART, rules.stream_ordered || !config.caching() || config.quarantine())
                | bit(ROUNDS, !rules.plain_rounding),
        ));
        let attention = Arc::new(attention);
        if rules.routing == Routing::CaptureFirst {
            registry.tell(&attention);
        }
        let peaks = Peaks::new(config.exact_peaks());
        Self {
            driver,
            rules,
            config,
            totals,
            peaks,
            context: Context::new(&attention),
            neutral,
            registry,
            attention,
            history: Arc::new(History::new(move || clock.now())),
            next_ordinal: AtomicU64::new(0),
            stranded: Mutex::new(Rank::Leaf, Vec::new()),
            driver_pool: DriverPool::default(),
        }
    }

    /// What a request of that many bytes, fewer than 2^60, is rounded to.
    #[inline(always)]
    pub(crate) fn round(&self, requested: u64) -> u64 {
        match self.rules.plain_rounding {
            true => (requested + (UNIT - 1)) & !(UNIT - 1),
            false => self.round_as_configured(requested),
        }
    }

    #[inline(never)]
    fn round_as_configured(&self, requested: u64) -> u64 {
        self.config.rounding().round(requested)
    }

    /// What a request of at most 2 TiB wants, by the limit of what is small where it goes.
    #[inline(always)]
    pub(crate) fn want(&self, requested: u64, small: u64) -> Want {
        Self::want_of(self.round(requested), requested, small)
    }

    /// As [`want`](Self::want), where nothing [rounds](ROUNDS) requests but the unit.
    #[inline(always)]
    pub(crate) fn plain_want(requested: u64, small: u64) -> Want {
        Self::want_of((requested + (UNIT - 1)) & !(UNIT - 1), requested, small)
    }

    #[inline(always)]
    fn want_of(size: u64, requested: u64, small: u64) -> Want {
        let part = if size <= small { Part::Small } else { Part::Large };
        Want { part, units: (size / UNIT) as Units, requested }
    }

    pub(crate) fn counts_ages(&self) -> bool {
        self.attention.get() & AGES != 0
    }

    /// Whether idle segments are given back before growth: where that is configured and giving back waits for nothing.
    pub(crate) fn trims_before_growth(&self) -> bool {
        self.config.trim_before_growth() && self.rules.handle_granularity.is_some()
    }

    /// The number that the next segment gets at least.
    pub(crate) fn next_segment_ordinal(&self) -> u64 {
        self.next_ordinal.load(Ordering::Relaxed)
    }

    /// What a segment of at least `bytes` really takes.
    pub(crate) fn segment_bytes(&self, bytes: u64) -> u64 {
        match self.rules.handle_granularity {
            Some(granularity) => bytes.div_ceil(granularity.max(1)).saturating_mul(granularity.max(1)),
            None => bytes,
        }
    }

    /// Memory for a segment. After an error nothing is held.
    pub(crate) fn make_memory(
        &self,
        bytes: u64,
        provider: Option<&Arc<dyn SegmentProvider>>,
        stream: StreamHandle,
    ) -> DriverResult<Memory> {
        let (base, backing) = if let Some(provider) = provider {
            crate::sync::assert_unlocked();
            let out_of_memory = DriverError::new(Call::Other, code::OUT_OF_MEMORY);
            let base = provider.allocate(bytes, stream).filter(|base| !base.is_null()).ok_or(out_of_memory)?;
            if !base.0.is_multiple_of(UNIT) || !is_placeable(base, bytes) {
                tracing::warn!(address = %base, bytes, "a segment provider gave a range that is not aligned to 512 bytes or reaches beyond 2^56");
                provider.release(base, bytes);
                return Err(DriverError::new(Call::Other, code::INVALID_VALUE));
            }
            (base, Backing::Provider(Arc::clone(provider)))
        } else if self.rules.handle_granularity.is_some() {
            let (base, handle) = self.make_handle(bytes)?;
            (base, Backing::Handle(handle))
        } else if self.rules.stream_ordered && stream != self.neutral.handle {
            self.make_ordered(bytes, stream)?
        } else {
            (self.driver.mem_alloc(bytes)?, Backing::Plain)
        };
        tracing::debug!(address = %base, bytes, ?stream, "a segment was taken");
        let ordinal = self.next_ordinal.fetch_add(1, Ordering::Relaxed);
        let registration = NEXT_REGISTRATION.fetch_add(1, Ordering::Relaxed);
        Ok(Memory { base, bytes, backing, ordinal, registration })
    }

    fn make_handle(&self, bytes: u64) -> DriverResult<(Address, MemoryHandle)> {
        let base = self.driver.address_reserve(bytes)?;
        let undo_range = |handle: Option<MemoryHandle>| {
            self.strand(Stranded { range: Some((base, bytes)), handle, ..Stranded::default() });
            self.retry_stranded();
        };
        let handle = match self.driver.handle_create(bytes) {
            Ok(handle) => handle,
            Err(e) => {
                undo_range(None);
                return Err(e);
            }
        };
        if let Err(e) = self.driver.map(base, bytes, handle) {
            undo_range(Some(handle));
            return Err(e);
        }
        Ok((base, handle))
    }

    /// Gives a segment's memory back. On an error it is whole and usable, as before.
    ///
    /// The caller knows that the device is done with it, or it is plain memory, whose free waits.
    pub(crate) fn give_back(&self, memory: &Memory, part: Part, pool: PoolId) -> DriverResult<()> {
        match &memory.backing {
            Backing::Plain => self.driver.mem_free(memory.base)?,
            Backing::Ordered { capture } => self.free_ordered(memory.base, *capture)?,
            // Piece by piece, elsewhere.
            Backing::Pages => return Ok(()),
            Backing::Away => {
                if self.driver.address_free(memory.base, memory.bytes).is_err() {
                    let range = Some((memory.base, memory.bytes));
                    self.strand(Stranded { range, ..Stranded::default() });
                }
                return Ok(());
            }
            Backing::Provider(provider) => {
                crate::sync::assert_unlocked();
                provider.release(memory.base, memory.bytes);
            }
            Backing::Handle(handle) => {
                self.driver.unmap(memory.base, memory.bytes)?;
                // From here on the segment is gone, whatever the driver says.
                if self.driver.handle_release(*handle).is_err() {
                    let counted = Some((memory.bytes, part, pool));
                    let range = Some((memory.base, memory.bytes));
                    self.strand(Stranded { range, handle: Some(*handle), counted, ..Stranded::default() });
                    return Ok(());
                }
                if self.driver.address_free(memory.base, memory.bytes).is_err() {
                    let range = Some((memory.base, memory.bytes));
                    self.strand(Stranded { range, ..Stranded::default() });
                }
            }
        }
        self.totals.released(memory.bytes, part, pool);
        tracing::debug!(address = %memory.base, bytes = memory.bytes, %pool, "a segment was given back");
        Ok(())
    }

    /// As [`give_back`](Self::give_back), for an owner that cannot keep what the driver does not take.
    pub(crate) fn give_back_or_strand(&self, memory: Memory, part: Part, pool: Option<PoolId>) {
        if let Err(e) = self.give_back(&memory, part, pool.unwrap_or_default()) {
            tracing::warn!(address = %memory.base, bytes = memory.bytes, error = %e, "memory was not given back; it is tried again");
            let counted = Some((memory.bytes, part, pool.unwrap_or_default()));
            self.strand(match memory.backing {
                Backing::Plain | Backing::Ordered { .. } => {
                    Stranded { plain: Some(memory.base), counted, ..Stranded::default() }
                }
                Backing::Handle(handle) => {
                    let range = Some((memory.base, memory.bytes));
                    Stranded { range, mapped: true, handle: Some(handle), counted, ..Stranded::default() }
                }
                // A provider takes everything, pages go back piece by piece, and what is away has no memory.
                Backing::Provider(_) | Backing::Pages | Backing::Away => Stranded::default(),
            });
        }
    }

    /// Frees an allocation that was made for one request. What the driver does not take is tried again later.
    pub(crate) fn free_direct(&self, address: Address) {
        if let Err(e) = self.driver.mem_free(address) {
            tracing::warn!(%address, error = %e, "memory was not given back; it is tried again");
            self.strand(Stranded { plain: Some(address), ..Stranded::default() });
        }
    }

    pub(crate) fn take_ordinal(&self) -> u64 {
        self.next_ordinal.fetch_add(1, Ordering::Relaxed)
    }

    /// A range of addresses for pages.
    pub(crate) fn reserve_range(&self, bytes: u64) -> DriverResult<Memory> {
        let base = self.driver.address_reserve(bytes)?;
        self.totals.lock().pages.address_bytes += bytes;
        let ordinal = self.take_ordinal();
        let registration = NEXT_REGISTRATION.fetch_add(1, Ordering::Relaxed);
        Ok(Memory { base, bytes, backing: Backing::Pages, ordinal, registration })
    }

    /// Gives a range back in which nothing is mapped. What the driver does not take is tried again later.
    pub(crate) fn free_range(&self, base: Address, bytes: u64) {
        if self.driver.address_free(base, bytes).is_ok() {
            self.totals.lock().pages.address_bytes -= bytes;
        } else {
            self.strand(Stranded { range: Some((base, bytes)), page: true, ..Stranded::default() });
        }
    }

    /// Releases an unmapped handle that is counted as reserved. What the driver does not take stays counted, and is tried again later.
    pub(crate) fn release_handle(&self, handle: MemoryHandle, bytes: u64, part: Part, pool: PoolId) -> bool {
        let released = self.driver.handle_release(handle).is_ok();
        if released {
            self.totals.lock().page_released(bytes, part, pool);
        } else {
            let counted = Some((bytes, part, pool));
            self.strand(Stranded { handle: Some(handle), counted, page: true, ..Stranded::default() });
        }
        released
    }

    /// As [`release_handle`](Self::release_handle), for the one handle of a segment.
    pub(crate) fn release_segment_handle(&self, handle: MemoryHandle, bytes: u64, part: Part, pool: PoolId) {
        if self.driver.handle_release(handle).is_ok() {
            self.totals.released(bytes, part, pool);
        } else {
            let counted = Some((bytes, part, pool));
            self.strand(Stranded { handle: Some(handle), counted, ..Stranded::default() });
        }
    }

    /// A mapping of a handle that is counted nowhere could not be undone: it is tried again, and then the handle released.
    pub(crate) fn strand_mapping(&self, address: Address, bytes: u64, handle: MemoryHandle) {
        let mapping = Some((address, bytes));
        self.strand(Stranded { mapping, handle: Some(handle), page: true, ..Stranded::default() });
    }

    /// Gives pinned memory back. What the driver does not take is tried again later.
    pub(crate) fn free_host(&self, memory: HostMemory) {
        if self.driver.host_free(memory).is_err() {
            self.strand(Stranded { host: Some(memory), ..Stranded::default() });
        }
    }

    /// Releases a handle that was never entered, and is counted nowhere.
    pub(crate) fn release_unmapped(&self, handle: MemoryHandle) {
        if self.driver.handle_release(handle).is_err() {
            self.strand(Stranded { handle: Some(handle), page: true, ..Stranded::default() });
        }
    }

    /// Takes away what has moved, for an arena that is going: the device is done with it.
    pub(crate) fn drop_leaving(&self, leaving: Vec<Leaving>) {
        for entry in leaving {
            if let Err(e) = self.driver.unmap(entry.address, entry.bytes) {
                tracing::warn!(address = %entry.address, error = %e, "an old mapping stays with the driver");
                continue;
            }
            entry.handles.iter().for_each(|h| h.unmapped());
            self.totals.lock().pages.aliased_bytes -= entry.bytes as i64;
            self.release_homeless(&entry);
        }
    }

    /// Releases handles that had a place nowhere but in a mapping that is gone now.
    pub(crate) fn release_homeless(&self, entry: &Leaving) {
        for handle in &entry.homeless {
            self.release_handle(handle.id, handle.bytes, entry.part, PoolId::DEFAULT);
        }
    }

    /// Gives all pieces of a segment back, and its addresses: the device is done with it, and nothing of it is leaving.
    pub(crate) fn drop_pages(&self, memory: &Memory, table: PageTable, part: Part, pool: PoolId) {
        let runs = table.runs();
        let mut whole = true;
        for (offset, piece) in table.into_pieces() {
            let (address, bytes) = (memory.base.offset(to_bytes(offset)), piece.handle.bytes);
            if let Err(e) = self.driver.unmap(address, bytes) {
                tracing::warn!(%address, bytes, error = %e, "memory was not given back; it is tried again");
                let (range, counted) = (None, Some((bytes, part, pool)));
                let mapping = Some((address, bytes));
                self.strand(Stranded {
                    range,
                    mapping,
                    handle: Some(piece.handle.id),
                    counted,
                    page: true,
                    ..Stranded::default()
                });
                whole = false;
                continue;
            }
            piece.handle.unmapped();
            self.release_handle(piece.handle.id, bytes, part, pool);
        }
        self.totals.lock().segment.change(part, -runs);
        if whole {
            self.free_range(memory.base, memory.bytes);
        } else {
            self.strand(Stranded { range: Some((memory.base, memory.bytes)), page: true, ..Stranded::default() });
        }
    }

    fn strand(&self, piece: Stranded) {
        self.stranded.lock().push(piece);
    }

    /// Tries again to give back what was stranded.
    pub(crate) fn retry_stranded(&self) {
        let pieces = std::mem::take(&mut *self.stranded.lock());
        for mut piece in pieces {
            if let Some(address) = piece.plain
                && self.driver.mem_free(address).is_ok()
            {
                piece.plain = None;
                if let Some((bytes, part, pool)) = piece.counted.take() {
                    self.totals.released(bytes, part, pool);
                }
            }
            if piece.mapped
                && let Some((base, bytes)) = piece.range
                && self.driver.unmap(base, bytes).is_ok()
            {
                piece.mapped = false;
            }
            if let Some((base, bytes)) = piece.mapping
                && self.driver.unmap(base, bytes).is_ok()
            {
                piece.mapping = None;
            }
            if !piece.mapped
                && piece.mapping.is_none()
                && let Some(handle) = piece.handle
                && self.driver.handle_release(handle).is_ok()
            {
                piece.handle = None;
                match piece.counted.take() {
                    Some((bytes, part, pool)) if piece.page => self.totals.lock().page_released(bytes, part, pool),
                    Some((bytes, part, pool)) => self.totals.released(bytes, part, pool),
                    None => {}
                }
            }
            if piece.handle.is_none()
                && let Some((base, bytes)) = piece.range
                && self.driver.address_free(base, bytes).is_ok()
            {
                piece.range = None;
                if piece.page {
                    self.totals.lock().pages.address_bytes -= bytes;
                }
            }
            if let Some(host) = piece.host
                && self.driver.host_free(host).is_ok()
            {
                piece.host = None;
            }
            let left = piece.handle.is_some() || piece.range.is_some() || piece.plain.is_some();
            if left || piece.host.is_some() {
                self.strand(piece);
            }
        }
    }
}

impl<D: Device> Drop for Shared<D> {
    fn drop(&mut self) {
        self.retry_stranded();
        let streams = std::mem::take(&mut *self.context.streams.lock());
        streams.iter().for_each(|s| s.drop_marks(&self.driver));
        for piece in self.stranded.get_mut() {
            tracing::warn!(?piece, "memory stays with the driver until the process ends");
        }
        self.drop_driver_pool();
    }
}
