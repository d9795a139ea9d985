//! Where new segments are placed.

use std::collections::BTreeMap;

use gpupool_device::code;

use crate::Placement;

/// Distance between the address regions of two devices of a world.
const REGION: u64 = 1 << 52;
/// Where a device's region begins to be used.
const BASE: u64 = 0x7000_0000_0000;
/// Segments begin at multiples of this, or of the granularity where that is larger.
const ALIGNMENT: u64 = 2 << 20;

/// Hands out address ranges. Knows every range that is taken.
#[derive(Debug)]
pub(crate) struct Placer {
    rule: Placement,
    alignment: u64,
    /// Next address of `Growing`.
    low: u64,
    /// Upper end of the next segment of `Falling`.
    high: u64,
    /// Next entry of a script.
    script: usize,
    taken: BTreeMap<u64, u64>,
}

/// A place found but not yet taken, so that a call that fails later has used nothing up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) address: u64,
    bytes: u64,
    scripted: bool,
}

impl Placer {
    pub(crate) fn new(rule: Placement, ordinal: u32, granularity: u64) -> Self {
        let base = u64::from(ordinal).wrapping_mul(REGION) + BASE;
        Self {
            rule,
            alignment: granularity.max(ALIGNMENT),
            low: base,
            high: base + (REGION >> 1),
            script: 0,
            taken: BTreeMap::new(),
        }
    }

    /// Finds a place for `bytes`.
    pub(crate) fn find(&self, bytes: u64) -> Result<Place, u32> {
        let no_addresses = code::OUT_OF_MEMORY;
        match &self.rule {
            Placement::Scripted(list) if self.script < list.len() => {
                let address = list.get(self.script).map_or(0, |a| a.0);
                let end = address.checked_add(bytes).ok_or(code::INVALID_VALUE)?;
                let before = self.taken.range(..end).next_back();
                if address == 0 || before.is_some_and(|(_, &taken_end)| taken_end > address) {
                    return Err(code::INVALID_VALUE);
                }
                Ok(Place { address, bytes, scripted: true })
            }
            Placement::Falling => {
                let start = self.high.checked_sub(bytes).ok_or(no_addresses)? & !(self.alignment - 1);
                Ok(Place { address: start, bytes, scripted: false })
            }
            Placement::Growing | Placement::Scripted(_) => {
                let start = self.low.checked_next_multiple_of(self.alignment).ok_or(no_addresses)?;
                start.checked_add(bytes).ok_or(no_addresses)?;
                Ok(Place { address: start, bytes, scripted: false })
            }
        }
    }

    /// Takes a place that was found.
    pub(crate) fn take(&mut self, place: Place) -> u64 {
        let end = place.address.saturating_add(place.bytes);
        self.low = self.low.max(end);
        self.high = self.high.min(place.address);
        self.script += usize::from(place.scripted);
        self.taken.insert(place.address, end);
        place.address
    }

    /// Gives a range back. Only a script can name it again.
    pub(crate) fn give_back(&mut self, address: u64) {
        self.taken.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use gpupool_device::Address;

    use super::*;

    fn next(p: &mut Placer, bytes: u64) -> Result<u64, u32> {
        let place = p.find(bytes)?;
        Ok(p.take(place))
    }

    #[test]
    fn growing_and_falling_never_use_an_address_twice() {
        let mut p = Placer::new(Placement::Growing, 0, 2 << 20);
        let a = next(&mut p, 512).unwrap();
        p.give_back(a);
        assert_eq!(next(&mut p, 512).unwrap(), a + (2 << 20));
        let mut p = Placer::new(Placement::Falling, 0, 2 << 20);
        let a = next(&mut p, 3 << 20).unwrap();
        p.give_back(a);
        let b = next(&mut p, 2 << 20).unwrap();
        assert_eq!((a % (2 << 20), b), (0, a - (2 << 20)));
    }

    #[test]
    fn a_script_is_followed_refuses_overlap_and_then_grows_above_everything() {
        let script = [0x4000_0000, 0x4000_0000, 0x1_0000_0000_0000].map(Address).to_vec();
        let mut p = Placer::new(Placement::Scripted(script), 0, 2 << 20);
        assert_eq!(next(&mut p, 4096), Ok(0x4000_0000));
        assert_eq!(next(&mut p, 4096), Err(code::INVALID_VALUE));
        p.give_back(0x4000_0000);
        assert_eq!(next(&mut p, 4096), Ok(0x4000_0000), "the refused entry is still the next one");
        assert_eq!(next(&mut p, 2 << 20), Ok(0x1_0000_0000_0000));
        assert_eq!(next(&mut p, 1), Ok(0x1_0000_0020_0000));
    }
}
