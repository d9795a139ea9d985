//! Sizes inside an arena are counted in units of 512 bytes, so that a block's record stays small.

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
