//! How a request's size is rounded before anything else looks at it.

use super::ConfigError;

/// Bytes every rounded size is a multiple of: the smallest block.
const QUANTUM: u64 = 512;

/// Power-of-two rounding, PyTorch's `roundup_power2_divisions`: how many steps lie between one power of two and the next, for
/// each of sixteen ranges of sizes.
///
/// Entry `k` serves the sizes from `2^k` MiB up to the next entry's; entry 0 also serves everything smaller, entry 15 everything
/// larger. 0 and 1 mean plain rounding, to a multiple of 512 bytes. Coarser rounding wastes the part of a block beyond the
/// request and makes more requests equal, so that a cached block fits more often.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Rounding([u32; Self::ENTRIES]);

impl Rounding {
    /// The number of size ranges.
    pub const ENTRIES: usize = 16;

    /// One number of divisions for each range.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Divisions`] when one is neither 0 nor a power of two.
    pub fn new(entries: [u32; Self::ENTRIES]) -> Result<Self, ConfigError> {
        match entries.iter().position(|d| *d != 0 && !d.is_power_of_two()) {
            Some(entry) => Err(ConfigError::Divisions { entry, value: entries[entry] }),
            None => Ok(Self(entries)),
        }
    }

    /// The same number of divisions for all sizes; 0 for plain rounding.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Divisions`] when it is neither 0 nor a power of two.
    pub fn uniform(divisions: u32) -> Result<Self, ConfigError> {
        Self::new([divisions; Self::ENTRIES])
    }

    /// The number of divisions of each range.
    #[must_use]
    pub const fn entries(&self) -> &[u32; Self::ENTRIES] {
        &self.0
    }

    /// For the parser, which checks what it puts in.
    pub(super) fn entries_mut(&mut self) -> &mut [u32; Self::ENTRIES] {
        &mut self.0
    }

    /// Whether every size is rounded to a multiple of 512 bytes.
    #[must_use]
    pub const fn is_plain(&self) -> bool {
        let mut entry = 0;
        while entry < Self::ENTRIES {
            if self.0[entry] > 1 {
                return false;
            }
            entry += 1;
        }
        true
    }

    /// The entry that serves a request of `bytes`.
    #[must_use]
    #[inline]
    pub const fn entry_of(bytes: u64) -> usize {
        let log = bytes.checked_ilog2();
        match log {
            Some(log @ 20..=34) => (log - 20) as usize,
            Some(35..) => Self::ENTRIES - 1,
            _ => 0,
        }
    }

    /// The size of the block that a request of `bytes` gets, in bytes: a multiple of 512, at least 512, never less than the
    /// request but for one case: at the end of the range it is the largest multiple of 512, more than any device has.
    ///
    /// ```
    /// # use gpupool_allocator::config::Rounding;
    /// assert_eq!(Rounding::default().round(1000), 1024);
    /// let four = Rounding::uniform(4)?;
    /// assert_eq!(four.round(5000), 5120);
    /// assert_eq!(four.round(100_000_000), 100_663_296);
    /// # Ok::<(), gpupool_allocator::config::ConfigError>(())
    /// ```
    #[must_use]
    #[inline]
    pub const fn round(&self, bytes: u64) -> u64 {
        if bytes <= QUANTUM {
            return QUANTUM;
        }
        let divisions = self.0[Self::entry_of(bytes)];
        // Up to 512 bytes a division, the steps would be no coarser than plain rounding. Beyond, `bytes` has its top bit at or
        // above that of 512 * `divisions`, so a step is a power of two and at least 512.
        let step = if divisions > 1 && bytes > QUANTUM * divisions as u64 {
            (1 << bytes.ilog2()) >> divisions.trailing_zeros()
        } else {
            QUANTUM
        };
        match bytes.checked_add(step - 1) {
            Some(reach) => reach & !(step - 1),
            None => u64::MAX - (QUANTUM - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn plain_rounding_goes_to_512() {
        let plain = Rounding::default();
        for (bytes, rounded) in [(0, 512), (1, 512), (511, 512), (512, 512), (513, 1024), (1000, 1024), (1536, 1536)] {
            assert_eq!(plain.round(bytes), rounded, "{bytes}");
            assert_eq!(Rounding::uniform(1).unwrap().round(bytes), rounded, "{bytes}");
        }
        assert_eq!(plain.round(10_485_759), 10_485_760);
    }

    #[test]
    fn golden_sizes_of_four_divisions() {
        let four = Rounding::uniform(4).unwrap();
        for (bytes, rounded) in [
            (700, 1024),
            (1200, 1536),
            (2048, 2048),
            (2049, 2560),
            (5000, 5120),
            (3_000_000, 3_145_728),
            (100_000_000, 100_663_296),
        ] {
            assert_eq!(four.round(bytes), rounded, "{bytes}");
        }
    }

    #[test]
    fn powers_of_two_stay() {
        for divisions in [1, 2, 4, 8, 1 << 20, 1 << 31] {
            let rounding = Rounding::uniform(divisions).unwrap();
            for log in 9..64 {
                assert_eq!(rounding.round(1 << log), 1 << log, "{divisions} {log}");
            }
        }
    }

    #[test]
    fn each_range_uses_its_entry() {
        assert_eq!(Rounding::entry_of(0), 0);
        assert_eq!(Rounding::entry_of(1), 0);
        assert_eq!(Rounding::entry_of(2 * MIB - 1), 0);
        for k in 1..16 {
            assert_eq!(Rounding::entry_of(MIB << k), k, "{k}");
            assert_eq!(Rounding::entry_of((MIB << k) - 1), k - 1, "{k}");
        }
        assert_eq!(Rounding::entry_of(u64::MAX), 15);

        let mut entries = [0; 16];
        entries[2] = 2;
        let rounding = Rounding::new(entries).unwrap();
        assert_eq!(rounding.round(4 * MIB + 1), 6 * MIB);
        assert_eq!(rounding.round(8 * MIB - 1), 8 * MIB);
        assert_eq!(rounding.round(8 * MIB + 1), 8 * MIB + 512);
        assert_eq!(rounding.round(2 * MIB + 1), 2 * MIB + 512);
    }

    #[test]
    fn the_end_of_the_range_saturates() {
        let end = u64::MAX - 511;
        for divisions in [0, 1, 2, 4, 1 << 31] {
            let rounding = Rounding::uniform(divisions).unwrap();
            assert_eq!(rounding.round(u64::MAX), end);
            assert_eq!(rounding.round(1 << 63), 1 << 63);
        }
        assert_eq!(Rounding::default().round(end), end);
        assert_eq!(Rounding::default().round(end + 1), end);
    }

    /// The rules of PyTorch written out a second time, step by step.
    fn by_the_book(bytes: u64, d: u64) -> u64 {
        if bytes < 512 {
            return 512;
        }
        if d > 1 && bytes > 512 * d {
            if bytes.is_power_of_two() {
                return bytes;
            }
            let floor = 1u64 << (63 - bytes.leading_zeros());
            let step = floor >> d.trailing_zeros();
            return if step == 0 { floor << 1 } else { (bytes + step - 1) & !(step - 1) };
        }
        512 * bytes.div_ceil(512)
    }

    #[test]
    fn agrees_with_the_rules_written_out() {
        let mut state = 1u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bytes = (state >> 24) >> (state % 40);
            let divisions = [0, 1, 2, 4, 8, 16, 64, 1024, 1 << 20, 1 << 31][(state >> 40) as usize % 10];
            let rounding = Rounding::uniform(divisions).unwrap();
            let rounded = rounding.round(bytes);
            assert_eq!(rounded, by_the_book(bytes, divisions.into()), "{bytes} {divisions}");
            assert!(rounded >= bytes && rounded.is_multiple_of(512));
            assert_eq!(rounding.round(rounded), rounded, "rounding twice changes nothing: {bytes} {divisions}");
        }
    }

    #[test]
    fn only_powers_of_two_divide() {
        assert_eq!(Rounding::uniform(3), Err(ConfigError::Divisions { entry: 0, value: 3 }));
        let mut entries = [0; 16];
        entries[7] = 12;
        assert_eq!(Rounding::new(entries), Err(ConfigError::Divisions { entry: 7, value: 12 }));
        assert_eq!(Rounding::uniform(0).unwrap(), Rounding::default());
    }
}
