//! The shadow model: what must be true of handed-out memory, whatever the allocator does inside.
//!
//! [`Shadow`] is told what was handed out and what was freed, and keeps an interval map of it. It knows nothing of
//! segments and size classes, so it cannot make the allocator's mistakes.
//!
//! # What it holds against
//!
//! * **H1** A block is aligned to 512 and no smaller than what was requested.
//! * **H2** No two live blocks have bytes in common.
//! * **H3** Bytes that were freed go to a stream only if all work that used them is complete, or that stream is
//!   ordered after it.
//! * **H4** Every live block is shown live, whole and in a segment by the allocator's state; nothing else is shown
//!   live; blocks tile segments; segments do not overlap.

use std::collections::BTreeMap;

use gpupool_allocator::State;
use gpupool_allocator::state::BlockStatus;
use gpupool_device::Address;

/// A use of freed bytes: so much of the work on a stream. Streams are numbered by whoever asks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Usage {
    /// The stream.
    pub stream: u32,
    /// The last piece of work on it that may use the bytes, counted from 1.
    pub position: u64,
}

/// Something is not as it must be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Breach {
    /// H1.
    #[error("{size} bytes at {address} for a request of {requested}: misaligned or too small")]
    Misshapen {
        /// Where.
        address: Address,
        /// How much was given.
        size: u64,
        /// How much was asked for.
        requested: u64,
    },
    /// H2.
    #[error("{size} bytes at {address} overlap the live block at {other}")]
    Overlap {
        /// Where.
        address: Address,
        /// How much.
        size: u64,
        /// The other block.
        other: Address,
    },
    /// H3.
    #[error("{size} bytes at {address} went to stream {stream} while stream {user} still uses {used}")]
    HandedOutEarly {
        /// Where.
        address: Address,
        /// How much.
        size: u64,
        /// To whom.
        stream: u32,
        /// Who still uses them.
        user: u32,
        /// Where the bytes in use start.
        used: Address,
    },
    /// A block was freed that was never handed out.
    #[error("the block at {address} is not live")]
    NotLive {
        /// Where.
        address: Address,
    },
    /// H4: the state shows a live block otherwise, or not at all.
    #[error("the live block at {address} ({size} bytes) is not in the allocator's state as such")]
    NotInState {
        /// Where.
        address: Address,
        /// How much.
        size: u64,
    },
    /// H4: the state shows a block live that is not.
    #[error("the allocator's state shows a live block at {address} that nobody holds")]
    UnknownLive {
        /// Where.
        address: Address,
    },
    /// H4: blocks leave a gap, or segments overlap.
    #[error("the segment at {address} is not tiled by its blocks, or overlaps another")]
    Untiled {
        /// Where.
        address: Address,
    },
}

/// Freed bytes that work may still use.
#[derive(Clone, Debug)]
struct Past {
    end: u64,
    uses: Vec<Usage>,
}

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct Shadow {
    /// Live blocks: end by start.
    live: BTreeMap<u64, u64>,
    /// Freed bytes by start; disjoint.
    past: BTreeMap<u64, Past>,
}

impl Shadow {
    /// Nothing is handed out.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Live blocks.
    #[must_use]
    pub fn live_blocks(&self) -> usize {
        self.live.len()
    }

    /// A block was handed out to `stream`. `settled` tells whether a use is complete or `stream` is ordered after it.
    ///
    /// # Errors
    ///
    /// H1 to H3.
    pub fn hand_out(
        &mut self,
        address: Address,
        size: u64,
        requested: u64,
        stream: u32,
        settled: impl Fn(Usage) -> bool,
    ) -> Result<(), Breach> {
        let Some(end) = address.0.checked_add(size) else {
            return Err(Breach::Misshapen { address, size, requested });
        };
        if !address.0.is_multiple_of(512) || size < requested || size == 0 {
            return Err(Breach::Misshapen { address, size, requested });
        }
        if let Some((other, _)) = self.live.range(..end).next_back().filter(|(_, e)| **e > address.0) {
            return Err(Breach::Overlap { address, size, other: Address(*other) });
        }
        self.live.insert(address.0, end);
        for (start, past) in self.take_past(address.0, end) {
            for usage in past.uses {
                if usage.stream != stream && !settled(usage) {
                    let (user, used) = (usage.stream, Address(start));
                    return Err(Breach::HandedOutEarly { address, size, stream, user, used });
                }
            }
        }
        Ok(())
    }

    /// A block was freed; `uses` is the work that may still use it, on its own stream and others.
    ///
    /// # Errors
    ///
    /// [`Breach::NotLive`].
    pub fn free(&mut self, address: Address, uses: Vec<Usage>) -> Result<(), Breach> {
        let end = self.live.remove(&address.0).ok_or(Breach::NotLive { address })?;
        self.take_past(address.0, end);
        self.past.insert(address.0, Past { end, uses });
        Ok(())
    }

    /// Forgets uses that are complete.
    pub fn forget(&mut self, complete: impl Fn(Usage) -> bool) {
        self.past.retain(|_, past| {
            past.uses.retain(|usage| !complete(*usage));
            !past.uses.is_empty()
        });
    }

    /// Cuts the freed bytes in `start..end` out and returns the pieces.
    fn take_past(&mut self, start: u64, end: u64) -> Vec<(u64, Past)> {
        let mut taken = Vec::new();
        while let Some((at, past)) = self.past.range(..end).next_back().map(|(at, past)| (*at, past.clone())) {
            if past.end <= start {
                break;
            }
            self.past.remove(&at);
            if at < start {
                self.past.insert(at, Past { end: start, uses: past.uses.clone() });
            }
            if past.end > end {
                self.past.insert(end, Past { end: past.end, uses: past.uses.clone() });
            }
            taken.push((at.max(start), past));
        }
        taken
    }

    /// Compares with the allocator's state, at a quiet moment. O(blocks).
    ///
    /// # Errors
    ///
    /// H4.
    pub fn check_state(&self, state: &State) -> Result<(), Breach> {
        let mut shown: BTreeMap<u64, u64> = BTreeMap::new();
        let mut segments: Vec<(u64, u64)> = Vec::new();
        for segment in &state.segments {
            let mut next = segment.address.0;
            segments.push((next, next + segment.size));
            for block in &segment.blocks {
                if block.address.0 != next {
                    return Err(Breach::Untiled { address: segment.address });
                }
                next += block.size;
                if block.status == BlockStatus::ActiveAllocated {
                    shown.insert(block.address.0, next);
                }
            }
            if next != segment.address.0 + segment.size {
                return Err(Breach::Untiled { address: segment.address });
            }
        }
        segments.sort_unstable();
        if let Some(pair) = segments.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            return Err(Breach::Untiled { address: Address(pair[1].0) });
        }
        for (start, end) in &self.live {
            if shown.remove(start) != Some(*end) {
                return Err(Breach::NotInState { address: Address(*start), size: end - start });
            }
        }
        match shown.first_key_value() {
            Some((address, _)) => Err(Breach::UnknownLive { address: Address(*address) }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hand_out(shadow: &mut Shadow, address: u64, size: u64, stream: u32) -> Result<(), Breach> {
        shadow.hand_out(Address(address), size, size, stream, |usage| usage.position <= 10)
    }

    #[test]
    fn h1_h2_shape_and_overlap() {
        let mut shadow = Shadow::new();
        assert!(matches!(hand_out(&mut shadow, 100, 512, 0), Err(Breach::Misshapen { .. })));
        assert!(shadow.hand_out(Address(0), 512, 513, 0, |_| true).is_err());
        hand_out(&mut shadow, 1024, 1024, 0).unwrap();
        for (address, size) in [(1024, 512), (1536, 512), (512, 1024), (0, 8192)] {
            assert!(matches!(hand_out(&mut shadow, address, size, 0), Err(Breach::Overlap { .. })));
        }
        hand_out(&mut shadow, 512, 512, 0).unwrap();
        hand_out(&mut shadow, 2048, 512, 0).unwrap();
        assert_eq!(shadow.live_blocks(), 3);
        assert!(matches!(shadow.free(Address(1536), vec![]), Err(Breach::NotLive { .. })));
    }

    #[test]
    fn h3_freed_bytes_wait_for_their_uses() {
        let use_of = |stream, position| Usage { stream, position };
        let mut shadow = Shadow::new();
        hand_out(&mut shadow, 0, 4096, 1).unwrap();
        shadow.free(Address(0), vec![use_of(1, 50), use_of(2, 5)]).unwrap();
        hand_out(&mut shadow, 0, 512, 1).unwrap();
        // Cut in the middle: the pieces before and behind keep their uses.
        let early = hand_out(&mut shadow, 1024, 512, 3).unwrap_err();
        assert!(matches!(early, Breach::HandedOutEarly { user: 1, used: Address(1024), .. }), "{early}");
        assert!(hand_out(&mut shadow, 512, 512, 3).is_err());
        assert!(hand_out(&mut shadow, 2048, 2048, 3).is_err());
        shadow.forget(|_| true);
        assert!(shadow.past.is_empty());
    }
}
