//! Random numbers that are the same in every run.

/// A seeded generator (xorshift64*). Equal seeds draw equally.
#[derive(Clone, Debug)]
pub struct Draw {
    state: u64,
}

impl Draw {
    /// A generator.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        // Small seeds differ in few bits, and zero is no state at all: mix once.
        let mixed = (seed ^ (seed >> 30)).wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        Self { state: mixed | 1 }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// One of `0..n`; 0 for `n` of 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }

    /// From `least` to `most`, each doubling as likely as any other.
    pub fn log_uniform(&mut self, least: u64, most: u64) -> u64 {
        let share = (self.bits() >> 11) as f64 / (1_u64 << 53) as f64;
        let (low, high) = ((least as f64).ln(), (most as f64).ln());
        ((low + share * (high - low)).exp() as u64).clamp(least, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_draw_equally_and_others_do_not() {
        let first = |seed| Draw::new(seed).bits();
        assert_eq!(first(7), first(7));
        let distinct: std::collections::BTreeSet<u64> = (0..1_000).map(first).collect();
        assert_eq!(distinct.len(), 1_000);
    }

    #[test]
    fn sizes_are_in_range_and_each_doubling_is_as_likely() {
        let mut draw = Draw::new(1);
        let mut doublings = [0_u32; 16];
        for _ in 0..160_000 {
            let size = draw.log_uniform(512, 32 << 20);
            assert!((512..=32 << 20).contains(&size));
            doublings[((size / 512).ilog2() as usize).min(15)] += 1;
        }
        assert!(doublings.iter().all(|n| (9_000..11_000).contains(n)), "{doublings:?}");
        assert!((0..1_000).all(|_| draw.below(3) < 3));
        assert_eq!(draw.below(0), 0);
    }
}
