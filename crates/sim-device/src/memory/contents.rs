//! What memory holds, by physical number: runs of one repeated word, stretches of explicit words, and zeros where nothing is
//! noted. A fill of a gigabyte is one entry.

use std::sync::Arc;

use super::Piece;
use crate::intervals::{IntervalMap, Piecewise};

/// Words of memory. All boundaries are multiples of 4.
#[derive(Clone, Debug)]
pub(crate) enum Words {
    /// One word over and over.
    Same(u32),
    /// These, from the `usize`-th on.
    Each(Arc<[u32]>, usize),
}

impl Words {
    fn get(&self, index: u64) -> u32 {
        match self {
            Self::Same(word) => *word,
            Self::Each(words, first) => words.get(first + index as usize).copied().unwrap_or(0),
        }
    }

    fn add(&self, count: u64, value: u32) -> Self {
        match self {
            Self::Same(word) => Self::Same(word.wrapping_add(value)),
            Self::Each(..) => Self::Each((0..count).map(|i| self.get(i).wrapping_add(value)).collect(), 0),
        }
    }

    /// The sum of each word times its number, the first being number `from`.
    fn weighted_sum(&self, from: u64, count: u64) -> u64 {
        match self {
            Self::Same(word) => {
                // from + ... + (from + count - 1), in arithmetic modulo 2^64.
                let n = u128::from(count);
                let numbers = n * u128::from(from) + n * n.saturating_sub(1) / 2;
                u64::from(*word).wrapping_mul(numbers as u64)
            }
            Self::Each(..) => {
                let term = |i: u64| u64::from(self.get(i)).wrapping_mul(from.wrapping_add(i));
                (0..count).map(term).fold(0, u64::wrapping_add)
            }
        }
    }
}

impl Piecewise for Words {
    fn after(&self, bytes: u64) -> Self {
        match self {
            Self::Same(word) => Self::Same(*word),
            Self::Each(words, first) => Self::Each(Arc::clone(words), first + (bytes / 4) as usize),
        }
    }

    fn continues(&self, bytes: u64, next: &Self) -> bool {
        match (self, next) {
            (Self::Same(a), Self::Same(b)) => a == b,
            (Self::Each(a, first), Self::Each(b, second)) => {
                Arc::ptr_eq(a, b) && first + (bytes / 4) as usize == *second
            }
            _ => false,
        }
    }
}

/// A stretch of words on its way from one place to another.
type Stretch = Vec<(u64, Words)>;

/// The contents of all memory of a world.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    words: IntervalMap<Words>,
}

impl Contents {
    /// Forgets a range of physical numbers.
    pub(crate) fn forget(&mut self, start: u64, bytes: u64) {
        self.words.remove(start, start.saturating_add(bytes).saturating_add(3) & !3);
    }

    fn gather(&self, pieces: &[Piece]) -> Stretch {
        let mut stretch = Vec::new();
        for piece in pieces {
            for (start, end, words) in self.words.cover(piece.physical, piece.physical + piece.bytes) {
                stretch.push((end - start, words.unwrap_or(Words::Same(0))));
            }
        }
        stretch
    }

    fn put(&mut self, start: u64, end: u64, words: Words) {
        if matches!(words, Words::Same(0)) {
            self.words.remove(start, end);
        } else {
            self.words.set(start, end, words);
        }
    }

    fn scatter(&mut self, stretch: Stretch, pieces: &[Piece]) {
        let mut places = pieces.iter().map(|p| (p.physical, p.physical + p.bytes));
        let mut place = places.next();
        for (mut bytes, mut words) in stretch {
            while bytes > 0 {
                let Some((start, end)) = place else { return };
                let part = bytes.min(end - start);
                self.put(start, start + part, words.clone());
                bytes -= part;
                words = words.after(part);
                place = if start + part < end { Some((start + part, end)) } else { places.next() };
            }
        }
    }

    pub(crate) fn fill(&mut self, pieces: &[Piece], word: u32) {
        for piece in pieces {
            self.put(piece.physical, piece.physical + piece.bytes, Words::Same(word));
        }
    }

    pub(crate) fn copy(&mut self, from: &[Piece], to: &[Piece]) {
        let stretch = self.gather(from);
        self.scatter(stretch, to);
    }

    pub(crate) fn add(&mut self, pieces: &[Piece], value: u32) {
        let stretch = self.gather(pieces).into_iter().map(|(bytes, w)| (bytes, w.add(bytes / 4, value))).collect();
        self.scatter(stretch, pieces);
    }

    /// The checksum of what the pieces hold.
    pub(crate) fn checksum(&self, pieces: &[Piece]) -> u64 {
        let (mut sum, mut number) = (0_u64, 1);
        for (bytes, words) in self.gather(pieces) {
            sum = sum.wrapping_add(words.weighted_sum(number, bytes / 4));
            number += bytes / 4;
        }
        sum
    }

    pub(crate) fn put_u64(&mut self, pieces: &[Piece], value: u64) {
        let words: Arc<[u32]> = Arc::new([value as u32, (value >> 32) as u32]);
        self.scatter(vec![(8, Words::Each(words, 0))], pieces);
    }

    /// The pieces widened to whole words, and the bytes cut off in front.
    fn widen(pieces: &[Piece]) -> Vec<(u64, u64, u64)> {
        let wide = |p: &Piece| {
            let start = p.physical & !3;
            (start, (p.physical + p.bytes).next_multiple_of(4), p.physical - start)
        };
        pieces.iter().map(wide).collect()
    }

    /// The bytes of some pieces.
    pub(crate) fn read(&self, pieces: &[Piece]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (piece, (start, end, skip)) in pieces.iter().zip(Self::widen(pieces)) {
            let mut whole = Vec::new();
            for (s, e, words) in self.words.cover(start, end) {
                let words = words.unwrap_or(Words::Same(0));
                whole.extend((0..(e - s) / 4).flat_map(|i| words.get(i).to_le_bytes()));
            }
            bytes.extend(whole.into_iter().skip(skip as usize).take(piece.bytes as usize));
        }
        bytes
    }

    /// Writes bytes over some pieces.
    pub(crate) fn write(&mut self, pieces: &[Piece], bytes: &[u8]) {
        let mut rest = bytes.iter();
        for (piece, (start, end, skip)) in pieces.iter().zip(Self::widen(pieces)) {
            let whole = Piece { address: 0, physical: start, bytes: end - start, since: 0 };
            let mut old = self.read(&[whole]);
            for (byte, new) in old.iter_mut().skip(skip as usize).take(piece.bytes as usize).zip(&mut rest) {
                *byte = *new;
            }
            let word = |b: &[u8]| b.iter().rev().fold(0_u32, |w, &byte| (w << 8) | u32::from(byte));
            self.put(start, end, Words::Each(old.chunks(4).map(word).collect(), 0));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn piece(physical: u64, bytes: u64) -> Piece {
        Piece { address: physical, physical, bytes, since: 0 }
    }

    #[test]
    fn a_gigabyte_costs_one_entry_and_its_checksum_is_exact() {
        let mut c = Contents::default();
        c.fill(&[piece(0, 1 << 30)], 3);
        c.add(&[piece(0, 1 << 30)], 4);
        assert_eq!(c.words.len(), 1);
        let n = 1_u64 << 28;
        assert_eq!(c.checksum(&[piece(0, 1 << 30)]), 7 * (n * (n + 1) / 2));
        c.fill(&[piece(0, 1 << 30)], 0);
        assert_eq!(c.words.len(), 0, "zeros are the absence of entries");
    }

    proptest! {
        /// Every operation agrees with plain bytes, over pieces that are not contiguous.
        #[test]
        fn contents_are_bytes(ops in prop::collection::vec((0_u8..5, 0_u64..24, 0_u64..24, 1_u64..8, any::<u32>()), 1..40)) {
            let mut c = Contents::default();
            let mut plain = vec![0_u8; 256];
            for (op, a, b, words, value) in ops {
                let (a, b, bytes) = (a * 4, 128 + b * 4, words * 4);
                let half = bytes / 8 * 4;
                let dst = [piece(a, half), piece(a + half, bytes - half)].into_iter().filter(|p| p.bytes > 0).collect::<Vec<_>>();
                let range = a as usize..(a + bytes) as usize;
                let get = |plain: &[u8], at: usize| u32::from_le_bytes(plain[at..at + 4].try_into().unwrap());
                match op {
                    0 => {
                        c.fill(&dst, value);
                        range.step_by(4).for_each(|i| plain[i..i + 4].copy_from_slice(&value.to_le_bytes()));
                    }
                    1 => {
                        c.add(&dst, value);
                        for i in range.step_by(4) {
                            let sum = get(&plain, i).wrapping_add(value);
                            plain[i..i + 4].copy_from_slice(&sum.to_le_bytes());
                        }
                    }
                    2 => {
                        c.copy(&dst, &[piece(b, bytes)]);
                        plain.copy_within(range, b as usize);
                    }
                    3 => {
                        let expect = range.step_by(4).zip(1_u64..).map(|(i, n)| u64::from(get(&plain, i)).wrapping_mul(n));
                        prop_assert_eq!(c.checksum(&dst), expect.fold(0, u64::wrapping_add));
                        c.put_u64(&[piece(b, 8)], u64::from(value) << 7);
                        plain[b as usize..b as usize + 8].copy_from_slice(&(u64::from(value) << 7).to_le_bytes());
                    }
                    _ => {
                        let odd = piece(b + 1, bytes + 1);
                        let new: Vec<u8> = (0..odd.bytes).map(|i| value as u8 ^ i as u8).collect();
                        c.write(&[odd], &new);
                        plain[odd.physical as usize..(odd.physical + odd.bytes) as usize].copy_from_slice(&new);
                    }
                }
                prop_assert_eq!(&c.read(&[piece(0, 256)]), &plain);
                prop_assert_eq!(&c.read(&[piece(3, 9)])[..], &plain[3..12]);
            }
        }
    }
}
