//! A device's memory: who takes how much of it, and what lies at which address.
//!
//! Physical memory is a space of its own, numbered from a counter that never goes back: every plain allocation and
//! every handle gets a range of *physical numbers*, used once. Contents and access histories are kept by physical
//! number, so an alias shows the same bytes and a handle that moves takes them along. A *mapping* leads from device
//! addresses to physical numbers; a plain allocation is a mapping too, one that is accessible from the start and that
//! the virtual-memory calls refuse.
//!
//! # Invariants
//!
//! * **M1** `used` is the sum over plain allocations and living handles, each rounded up to the granularity; a handle
//!   lives until it is released and nothing maps it.
//! * **M2** Mappings do not overlap; each lies in one reservation or is one plain allocation.
//! * **M3** A call that fails changes nothing.

mod contents;
mod driver_pool;
mod placement;
mod virtual_memory;

use std::collections::BTreeMap;

use gpupool_device::code;
use hashbrown::HashMap;

pub(crate) use self::contents::Contents;
use self::driver_pool::DriverPools;
use self::placement::Placer;
use crate::SimConfig;

/// A range of physical numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Physical {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

/// Physical numbers and handle numbers, drawn by all devices of a world.
#[derive(Debug)]
pub(crate) struct Numbers {
    physical: u64,
    handle: u64,
}

impl Numbers {
    pub(crate) fn new() -> Self {
        Self { physical: 0, handle: 1 }
    }

    pub(crate) fn physical(&mut self, bytes: u64) -> Physical {
        let start = self.physical;
        // Words never straddle two ranges, and neighbours never merge.
        self.physical = start.saturating_add(bytes).saturating_add(16) & !7;
        Physical { start, bytes }
    }

    pub(crate) fn handle(&mut self) -> u64 {
        self.handle += 1;
        self.handle
    }
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    bytes: u64,
    physical: u64,
    /// The handle's number; `None` for a plain allocation.
    handle: Option<u64>,
    accessible: bool,
    /// Submission counter when it was mapped.
    since: u64,
}

#[derive(Debug)]
struct Handle {
    physical: Physical,
    mappings: u32,
    released: bool,
}

/// A piece of device memory behind a range of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    /// First address.
    pub(crate) address: u64,
    /// First physical number.
    pub(crate) physical: u64,
    pub(crate) bytes: u64,
    /// Submission counter when it was mapped.
    pub(crate) since: u64,
}

/// One device's memory.
#[derive(Debug)]
pub(crate) struct Memory {
    granularity: u64,
    total: u64,
    capacity: u64,
    used: u64,
    peak: u64,
    placer: Placer,
    /// Plain allocations: their bytes as asked for.
    plain: BTreeMap<u64, u64>,
    reservations: BTreeMap<u64, u64>,
    reserved: u64,
    handles: HashMap<u64, Handle>,
    mappings: BTreeMap<u64, Mapping>,
    driver_pools: DriverPools,
}

impl Memory {
    pub(crate) fn new(config: &SimConfig, ordinal: u32) -> Self {
        let granularity = config.granularity.max(1).next_power_of_two();
        Self {
            granularity,
            total: config.capacity,
            capacity: config.capacity,
            used: 0,
            peak: 0,
            placer: Placer::new(config.placement.clone(), ordinal, granularity),
            plain: BTreeMap::new(),
            reservations: BTreeMap::new(),
            reserved: 0,
            handles: HashMap::new(),
            mappings: BTreeMap::new(),
            driver_pools: DriverPools::default(),
        }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.used;
    }

    /// Bytes of addresses reserved.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved
    }

    pub(crate) fn set_capacity(&mut self, bytes: u64) {
        self.capacity = bytes;
        self.total = self.total.max(bytes);
    }

    /// Free and total bytes.
    pub(crate) fn info(&self) -> (u64, u64) {
        (self.capacity.saturating_sub(self.used), self.total)
    }

    /// Bytes that `bytes` take, if there is room for them.
    fn room(&self, bytes: u64) -> Result<u64, u32> {
        let taken = bytes.checked_next_multiple_of(self.granularity).ok_or(code::OUT_OF_MEMORY)?;
        match self.used.checked_add(taken) {
            Some(sum) if sum <= self.capacity => Ok(taken),
            _ => Err(code::OUT_OF_MEMORY),
        }
    }

    fn take(&mut self, taken: u64) {
        self.used += taken;
        self.peak = self.peak.max(self.used);
    }

    /// A plain allocation.
    pub(crate) fn alloc(&mut self, bytes: u64, since: u64, numbers: &mut Numbers) -> Result<u64, u32> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let taken = self.room(bytes)?;
        let place = self.placer.find(bytes)?;
        let address = self.placer.take(place);
        self.take(taken);
        let physical = numbers.physical(bytes).start;
        self.plain.insert(address, bytes);
        self.mappings.insert(address, Mapping { bytes, physical, handle: None, accessible: true, since });
        Ok(address)
    }

    /// Bytes of the plain allocation at `address`.
    pub(crate) fn plain(&self, address: u64) -> Result<u64, u32> {
        self.plain.get(&address).copied().ok_or(code::INVALID_VALUE)
    }

    /// Frees a plain allocation. The physical range that is gone.
    pub(crate) fn free(&mut self, address: u64) -> Result<Physical, u32> {
        let bytes = self.plain.remove(&address).ok_or(code::INVALID_VALUE)?;
        self.used -= bytes.next_multiple_of(self.granularity);
        self.placer.give_back(address);
        let start = self.mappings.remove(&address).map_or(0, |m| m.physical);
        Ok(Physical { start, bytes })
    }

    /// What lies behind `[address, address + bytes)`, appended to `out`. `Err` has the first address that is not accessible.
    pub(crate) fn translate(&self, address: u64, bytes: u64, out: &mut Vec<Piece>) -> Result<(), u64> {
        let mut at = address;
        let end = address.checked_add(bytes).ok_or(address)?;
        while at < end {
            let (&start, mapping) = self.mappings.range(..=at).next_back().ok_or(at)?;
            let inside = at - start;
            if inside >= mapping.bytes || !mapping.accessible {
                return Err(at);
            }
            let length = (mapping.bytes - inside).min(end - at);
            out.push(Piece { address: at, physical: mapping.physical + inside, bytes: length, since: mapping.since });
            at += length;
        }
        Ok(())
    }
}
