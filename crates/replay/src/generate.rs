//! Sequences of operations: the language that property tests, fuzzing and stress share.
//!
//! An [`Op`] names no block and no stream that may not exist: it *picks* one, modulo what there is. So every sequence
//! makes sense, whatever it was drawn or decoded from, and a shorter one made of its parts does too. Whoever executes
//! a sequence gives the picks their meaning; [`Harness`](crate::stress::Harness) does so against an allocator, a
//! device and a shadow model.
//!
//! * [`Generator`] draws operations from a seed. Equal seeds and shapes give equal sequences, on every machine.
//! * [`decode`] reads operations from any bytes, for fuzzers.
//!
//! To make whole workloads rather than operations, see [`workload`].

use crate::trace::write::{Peaks, TraceWriter};

/// One operation. Picks are taken modulo the number of things to pick from; with none, the operation does nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Op {
    /// A request of `bytes` on a stream; its contents are written.
    Alloc {
        /// Bytes requested, at least 1.
        bytes: u64,
        /// Picks the stream.
        stream: u8,
    },
    /// A live block is checked and freed.
    Free {
        /// Picks the block.
        pick: u16,
    },
    /// A live block is checked on another stream, ordered after its own, and freed there.
    FreeOn {
        /// Picks the block.
        pick: u16,
        /// Picks the stream.
        stream: u8,
    },
    /// A live block is read on another stream, ordered after its own, and the use is recorded.
    Use {
        /// Picks the block.
        pick: u16,
        /// Picks the stream.
        stream: u8,
    },
    /// A live block is written anew on its own stream.
    Write {
        /// Picks the block.
        pick: u16,
    },
    /// The device does up to so many pieces of work.
    Progress {
        /// How many.
        steps: u8,
    },
    /// The host waits for a stream.
    Synchronize {
        /// Picks the stream.
        stream: u8,
    },
    /// The cache is emptied.
    EmptyCache,
    /// What needs no waiting is given back.
    Trim,
}

/// What sizes are drawn from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sizes {
    /// As likely between 1 and 2 KiB as between 1 and 2 MiB.
    LogUniform {
        /// The smallest.
        least: u64,
        /// The largest.
        most: u64,
    },
    /// One of these.
    Few(&'static [u64]),
}

impl Sizes {
    fn draw(self, random: &mut Random) -> u64 {
        match self {
            Self::LogUniform { least, most } => {
                let least = least.max(1);
                let octaves = most.max(least).ilog2() - least.ilog2() + 1;
                let base = 1_u64 << (least.ilog2() + random.below(u64::from(octaves)) as u32);
                (base + random.below(base)).clamp(least, most.max(least))
            }
            Self::Few(sizes) => match sizes.len() {
                0 => 1,
                n => sizes[random.below(n as u64) as usize].max(1),
            },
        }
    }
}

/// What a generator's sequences look like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Sizes of requests.
    pub sizes: Sizes,
    /// Around so many blocks are live at a time.
    pub live: u32,
    /// Of 100 operations so many are uses and frees on other streams.
    pub crossing: u8,
    /// Of 1,000 operations so many empty or trim the cache.
    pub emptying: u16,
}

impl Default for Shape {
    fn default() -> Self {
        Self { sizes: Sizes::LogUniform { least: 1, most: 4 << 20 }, live: 64, crossing: 15, emptying: 2 }
    }
}

/// Draws operations. See the module's documentation.
#[derive(Clone, Debug)]
pub struct Generator {
    random: Random,
    shape: Shape,
    live: u32,
}

impl Generator {
    /// Operations of `shape` drawn from `seed`.
    #[must_use]
    pub fn new(seed: u64, shape: Shape) -> Self {
        Self { random: Random::new(seed), shape, live: 0 }
    }

    /// The next operation.
    pub fn draw(&mut self) -> Op {
        let random = &mut self.random;
        if random.below(1000) < u64::from(self.shape.emptying) {
            return if random.below(2) == 0 { Op::EmptyCache } else { Op::Trim };
        }
        let (pick, stream) = (random.next() as u16, random.next() as u8);
        if self.live > 0 && random.below(100) < u64::from(self.shape.crossing) {
            if random.below(3) == 0 {
                self.live -= 1;
                return Op::FreeOn { pick, stream };
            }
            return Op::Use { pick, stream };
        }
        match random.below(20) {
            0 => Op::Progress { steps: random.below(64) as u8 },
            1 if random.below(8) == 0 => Op::Synchronize { stream },
            2 => Op::Write { pick },
            // The further from the wanted number, the likelier the way back.
            _ if random.below(2 * u64::from(self.shape.live.max(1))) >= u64::from(self.live) => {
                self.live += 1;
                Op::Alloc { bytes: self.shape.sizes.draw(random), stream }
            }
            _ => {
                self.live = self.live.saturating_sub(1);
                Op::Free { pick }
            }
        }
    }
}

impl Iterator for Generator {
    type Item = Op;

    fn next(&mut self) -> Option<Op> {
        Some(self.draw())
    }
}

/// Reads operations from any bytes: 5 an operation, what is left over is dropped.
#[must_use]
pub fn decode(bytes: &[u8]) -> Vec<Op> {
    let one = |chunk: &[u8; 5]| {
        let [kind, a, b, c, d] = *chunk;
        let pick = u16::from_le_bytes([a, b]);
        match kind % 16 {
            0..=5 => {
                // An octave from 1 byte to 32 MiB, and where in it.
                let base = 1_u64 << (b % 25);
                Op::Alloc { bytes: base + base * u64::from(c) / 256, stream: a ^ d }
            }
            6..=8 => Op::Free { pick },
            9 => Op::FreeOn { pick, stream: c },
            10 | 11 => Op::Use { pick, stream: c },
            12 => Op::Write { pick },
            13 => Op::Progress { steps: a },
            14 if c % 4 == 0 => Op::EmptyCache,
            14 => Op::Trim,
            _ => Op::Synchronize { stream: c },
        }
    };
    let (chunks, _) = bytes.as_chunks::<5>();
    chunks.iter().map(one).collect()
}

/// A workload trace as gzip bytes: `steps` repetitions of one pattern of requests with long-lived blocks among them,
/// as training steps are. Equal seeds give equal traces.
///
/// # Errors
///
/// None in practice: compressing in memory does not fail.
pub fn workload(seed: u64, steps: u32, shape: Shape) -> std::io::Result<Vec<u8>> {
    let mut random = Random::new(seed);
    let mut writer = TraceWriter::new();
    let (mut now, mut peak) = (0_u64, 0_u64);
    let pattern: Vec<u64> = (0..shape.live.max(1)).map(|_| shape.sizes.draw(&mut random)).collect();
    let mut kept: Vec<(u64, u64)> = Vec::new();
    for _ in 0..steps {
        let mut step: Vec<(u64, u64)> = Vec::new();
        for bytes in &pattern {
            step.push((writer.alloc(*bytes, 0), *bytes));
            now += bytes;
            peak = peak.max(now);
        }
        // The last allocated goes first, but for one that stays a while.
        let stays = random.below(step.len() as u64) as usize;
        kept.push(step.remove(stays));
        let leaving = if kept.len() > 4 { Some(kept.remove(random.below(4) as usize)) } else { None };
        for (id, bytes) in step.into_iter().rev().chain(leaving) {
            writer.free(id);
            writer.complete(id);
            now -= bytes;
        }
    }
    let peaks = Peaks { requested: peak, ..Peaks::default() };
    writer.finish(&format!("generated-{seed}"), "", peaks)
}

/// A small generator of random numbers (SplitMix64): the same on every machine, and no secret.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Numbers drawn from `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 if that is 0.
    pub const fn below(&mut self, bound: u64) -> u64 {
        ((self.next() as u128 * bound as u128) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Trace;

    #[test]
    fn equal_seeds_draw_equally() {
        let draw = |seed| Generator::new(seed, Shape::default()).take(500).collect::<Vec<_>>();
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn sequences_hold_around_the_wanted_number_of_blocks() {
        let shape = Shape { live: 50, ..Shape::default() };
        let mut live = 0_i64;
        let mut most = 0;
        for op in Generator::new(3, shape).take(10_000) {
            match op {
                Op::Alloc { bytes, .. } => {
                    assert!((1..=4 << 20).contains(&bytes));
                    live += 1;
                }
                Op::Free { .. } | Op::FreeOn { .. } => live -= 1,
                _ => {}
            }
            most = most.max(live);
        }
        assert!((50..=100).contains(&most), "{most}");
    }

    #[test]
    fn any_bytes_are_operations() {
        assert!(decode(&[1, 2, 3, 4]).is_empty());
        let bytes: Vec<u8> = (0..=255).cycle().take(5 * 256).collect();
        let ops = decode(&bytes);
        assert_eq!(ops.len(), 256);
        assert!(ops.iter().all(|op| !matches!(op, Op::Alloc { bytes, .. } if *bytes == 0 || *bytes > 64 << 20)));
    }

    #[test]
    fn generated_workloads_are_traces() {
        let trace = Trace::parse("generated", &workload(5, 20, Shape::default()).unwrap()[..]).unwrap();
        assert_eq!(trace.blocks.len(), 20 * 64);
        assert_eq!(trace.peak_requested(), trace.header.peak_requested);
    }
}
