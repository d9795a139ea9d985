//! Reservations, handles and mappings: the rules that were measured (see the crate's documentation).

use gpupool_device::code;

use super::{Handle, Mapping, Memory, Numbers, Physical, Piece};
use crate::CostModel;

/// A physical range that is gone, and what the call cost.
type Gone = Option<Physical>;

impl Memory {
    fn whole_pages(&self, bytes: u64) -> Result<(), u32> {
        if bytes == 0 || !bytes.is_multiple_of(self.granularity) { Err(code::INVALID_VALUE) } else { Ok(()) }
    }

    pub(crate) fn reserve(&mut self, bytes: u64) -> Result<u64, u32> {
        self.whole_pages(bytes)?;
        let place = self.placer.find(bytes)?;
        let address = self.placer.take(place);
        self.reservations.insert(address, bytes);
        self.reserved += bytes;
        Ok(address)
    }

    pub(crate) fn unreserve(&mut self, address: u64, bytes: u64) -> Result<(), u32> {
        if self.reservations.get(&address) != Some(&bytes) || self.mapped_in(address, bytes) {
            return Err(code::INVALID_VALUE);
        }
        self.reservations.remove(&address);
        self.reserved -= bytes;
        self.placer.give_back(address);
        Ok(())
    }

    /// Whether anything is mapped in a range.
    fn mapped_in(&self, address: u64, bytes: u64) -> bool {
        let end = address.saturating_add(bytes);
        self.mappings.range(..end).next_back().is_some_and(|(start, m)| start + m.bytes > address)
    }

    /// A handle of `bytes` zeros. Its number.
    pub(crate) fn create(&mut self, bytes: u64, numbers: &mut Numbers) -> Result<u64, u32> {
        self.whole_pages(bytes)?;
        let taken = self.room(bytes)?;
        self.take(taken);
        let number = numbers.handle();
        self.handles.insert(number, Handle { physical: numbers.physical(bytes), mappings: 0, released: false });
        Ok(number)
    }

    /// Releases a handle. Its bytes, and the physical range if it is gone.
    pub(crate) fn release(&mut self, number: u64) -> Result<(u64, Gone), u32> {
        let handle = self.handles.get_mut(&number).filter(|h| !h.released).ok_or(code::INVALID_VALUE)?;
        handle.released = true;
        Ok((handle.physical.bytes, self.bury(number)))
    }

    /// Takes a handle away that is released and mapped nowhere.
    fn bury(&mut self, number: u64) -> Gone {
        let dead = |h: &&Handle| h.released && h.mappings == 0;
        let physical = self.handles.get(&number).filter(dead)?.physical;
        self.handles.remove(&number);
        self.used -= physical.bytes;
        Some(physical)
    }

    /// Maps a handle. Whether it is mapped elsewhere too.
    pub(crate) fn map(&mut self, address: u64, bytes: u64, number: u64, since: u64) -> Result<bool, u32> {
        let end = address.checked_add(bytes).ok_or(code::INVALID_VALUE)?;
        let inside = |(&start, &size): (&u64, &u64)| start + size >= end;
        let reserved = self.reservations.range(..=address).next_back().is_some_and(inside);
        let occupied = self.mapped_in(address, bytes);
        let handle = self.handles.get_mut(&number).filter(|h| !h.released).ok_or(code::INVALID_VALUE)?;
        if !reserved || occupied || !address.is_multiple_of(self.granularity) || handle.physical.bytes != bytes {
            return Err(code::INVALID_VALUE);
        }
        let alias = handle.mappings > 0;
        handle.mappings += 1;
        let physical = handle.physical.start;
        self.mappings.insert(address, Mapping { bytes, physical, handle: Some(number), accessible: false, since });
        Ok(alias)
    }

    /// The mappings of handles that tile a range exactly.
    fn tiles(&self, address: u64, bytes: u64) -> Result<Vec<(u64, Mapping)>, u32> {
        let mut tiles = Vec::new();
        let end = address.checked_add(bytes).ok_or(code::INVALID_VALUE)?;
        let mut at = address;
        while at < end {
            let mapping = self.mappings.get(&at).filter(|m| m.handle.is_some()).ok_or(code::INVALID_VALUE)?;
            tiles.push((at, *mapping));
            at += mapping.bytes;
        }
        if at == end && bytes > 0 { Ok(tiles) } else { Err(code::INVALID_VALUE) }
    }

    /// Makes whole mappings accessible. The call's cost.
    pub(crate) fn set_access(&mut self, address: u64, bytes: u64, costs: &CostModel) -> Result<u64, u32> {
        let tiles = self.tiles(address, bytes)?;
        let mut new = Vec::new();
        for (start, tile) in &tiles {
            if !tile.accessible {
                new.push(tile.bytes);
            }
            if let Some(mapping) = self.mappings.get_mut(start) {
                mapping.accessible = true;
            }
        }
        Ok(costs.set_access(&new, (tiles.len() - new.len()) as u64))
    }

    /// The mappings of a range that starts in a reservation and cuts none of them. There may be holes between and around them.
    fn whole_mappings(&self, address: u64, bytes: u64) -> Result<Vec<(u64, Mapping)>, u32> {
        let end = address.checked_add(bytes).filter(|_| bytes > 0).ok_or(code::INVALID_VALUE)?;
        let reservation = self.reservations.range(..=address).next_back();
        let inside = reservation.is_some_and(|(&start, &size)| start + size > address);
        let cut = self.mappings.range(..address).next_back().is_some_and(|(&start, m)| start + m.bytes > address);
        let found: Vec<_> = self.mappings.range(address..end).map(|(&start, m)| (start, *m)).collect();
        let whole = found.iter().all(|(start, m)| m.handle.is_some() && start + m.bytes <= end);
        if inside && !cut && whole { Ok(found) } else { Err(code::INVALID_VALUE) }
    }

    /// What whole mappings in a range lead to, or the error that unmapping them would be.
    pub(crate) fn unmappable(&self, address: u64, bytes: u64) -> Result<Vec<Piece>, u32> {
        let piece =
            |(start, m): (u64, Mapping)| Piece { address: start, physical: m.physical, bytes: m.bytes, since: m.since };
        Ok(self.whole_mappings(address, bytes)?.into_iter().map(piece).collect())
    }

    /// Unmaps whole mappings. The physical ranges that are gone, and the call's cost.
    pub(crate) fn unmap(&mut self, address: u64, bytes: u64, costs: &CostModel) -> Result<(Vec<Physical>, u64), u32> {
        let tiles = self.whole_mappings(address, bytes)?;
        let mut gone = Vec::new();
        for (start, tile) in &tiles {
            self.mappings.remove(start);
            let Some(number) = tile.handle else { continue };
            if let Some(handle) = self.handles.get_mut(&number) {
                handle.mappings -= 1;
            }
            gone.extend(self.bury(number));
        }
        let sizes: Vec<u64> = tiles.iter().map(|(_, tile)| tile.bytes).collect();
        Ok((gone, costs.unmap(&sizes)))
    }
}
