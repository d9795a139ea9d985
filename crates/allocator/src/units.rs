//! Sizes inside an arena are counted in units of 512 bytes, so that a block's record stays small.

use gpupool_device::Address;

/// Bytes in a unit: the smallest block, the rounding quantum, and the alignment of every address handed out.
pub(crate) const UNIT: u64 = 512;

/// A number of units. 32 bits reach 2 TiB, more than any one segment.
pub(crate) type Units = u32;

/// `bytes`, a multiple of [`UNIT`], in units; `None` beyond 2 TiB.
#[inline]
pub(crate) fn to_units(bytes: u64) -> Option<Units> {
    debug_assert!(bytes.is_multiple_of(UNIT), "{bytes} is not a multiple of {UNIT}");
    Units::try_from(bytes / UNIT).ok()
}

/// Units in bytes.
pub(crate) const fn to_bytes(units: Units) -> u64 {
    units as u64 * UNIT
}

/// The bits that no address of a block has: drivers align by 256 bytes at least, and devices' addresses have at most 56 bits.
pub(crate) const TAG_BITS: u64 = 0xFF00_0000_0000_00FF;

/// Whether blocks may lie in a range of addresses: see [`TAG_BITS`].
pub(crate) fn is_placeable(base: Address, bytes: u64) -> bool {
    let last = base.0.checked_add(bytes.saturating_sub(1));
    !base.is_null() && base.0 & TAG_BITS == 0 && last.is_some_and(|last| last.leading_zeros() >= u8::BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_lie_where_an_address_leaves_its_tag_bits_free() {
        let placeable = [(256, 1), (512, 0), (1 << 55, 1 << 55)];
        let not = [(0, 512), (128, 512), (1 << 55, (1 << 55) + 1), (1 << 56, 512), (u64::MAX - 255, 512)];
        assert!(placeable.iter().all(|(base, bytes)| is_placeable(Address(*base), *bytes)));
        assert!(!not.iter().any(|(base, bytes)| is_placeable(Address(*base), *bytes)));
    }
}
