//! A peer in the middle of a workload: the loops that are timed.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::{Failed, Op, Peer, Prepared, Script, Step};

/// Pairs and turns before anything is timed; of a working set all its steps are run once.
const WARM_PAIRS: u64 = 2_000;
const WARM_TURNS: u64 = 2;
/// Pairs or steps between two looks at the clock, where it is the time that ends a run; of a trace it is a turn.
const BETWEEN_LOOKS: u64 = 1_000;

/// A peer in the middle of a workload.
#[derive(Debug)]
pub struct Running<'a, P: Peer> {
    prepared: &'a Prepared,
    // Blocks go before the peer.
    slots: Vec<Option<P::Block>>,
    peer: P,
    /// The step that comes next.
    at: usize,
    refused: u64,
}

impl<'a, P: Peer> Running<'a, P> {
    /// Starts a workload and runs it until it is warm.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn start(prepared: &'a Prepared, peer: P) -> Result<Self, Failed> {
        let mut running = Self { prepared, slots: Vec::new(), peer, at: 0, refused: 0 };
        let warm = match prepared {
            Prepared::HotPair { .. } => WARM_PAIRS,
            Prepared::Captured { .. } => {
                running.begin_capture()?;
                WARM_PAIRS
            }
            Prepared::WorkingSet { first, steps, captured } => {
                if *captured {
                    running.begin_capture()?;
                }
                running.slots = first.iter().map(|bytes| running.peer.alloc(u64::from(*bytes), 0)).collect();
                steps.len() as u64
            }
            Prepared::Index { first, pairs } => {
                running.slots = first.iter().map(|bytes| running.peer.alloc(u64::from(*bytes), 0)).collect();
                for slot in running.slots.iter_mut().step_by(2) {
                    if let Some(block) = slot.take() {
                        running.peer.free(block);
                    }
                }
                pairs.len() as u64
            }
            Prepared::Trace { script } => {
                running.slots.resize_with(script.slots as usize, || None);
                WARM_TURNS
            }
        };
        running.run(warm)?;
        Ok(running)
    }

    fn begin_capture(&mut self) -> Result<(), Failed> {
        self.peer.begin_capture(1, 0)?;
        self.peer.ask_at_each_request();
        Ok(())
    }

    /// Runs this many pairs, steps or turns; how long it took. What is between two turns is not counted.
    ///
    /// # Errors
    ///
    /// [`Failed::Refused`] if there was not enough memory; the peer's.
    pub fn run(&mut self, rounds: u64) -> Result<Duration, Failed> {
        let prepared = self.prepared;
        let took = match prepared {
            Prepared::HotPair { bytes } | Prepared::Captured { bytes } => self.pairs(*bytes, rounds),
            Prepared::WorkingSet { steps, .. } => self.steps(steps, rounds),
            Prepared::Index { pairs, .. } => self.indexed(pairs, rounds),
            Prepared::Trace { script } => self.turns(script, rounds)?,
        };
        if self.refused > 0 {
            let workload = match prepared {
                Prepared::HotPair { .. } => "a hot pair",
                Prepared::Captured { .. } => "a hot pair in a capture",
                Prepared::WorkingSet { .. } => "a working set",
                Prepared::Index { .. } => "pairs among free blocks",
                Prepared::Trace { .. } => "a trace",
            };
            return Err(Failed::Refused { workload: workload.to_owned(), refused: self.refused });
        }
        Ok(took)
    }

    /// Runs until `span` has gone by: how many pairs, steps or turns that were, and how long they took.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn run_for(&mut self, span: Duration) -> Result<(u64, Duration), Failed> {
        let at_once = if matches!(self.prepared, Prepared::Trace { .. }) { 1 } else { BETWEEN_LOOKS };
        let (mut rounds, mut took) = (0, Duration::ZERO);
        while took < span {
            took += self.run(at_once)?;
            rounds += at_once;
        }
        Ok((rounds, took))
    }

    /// The peer.
    pub fn peer(&self) -> &P {
        &self.peer
    }

    fn pairs(&mut self, bytes: u64, rounds: u64) -> Duration {
        let start = Instant::now();
        for _ in 0..rounds {
            match self.peer.alloc(black_box(bytes), 0) {
                Some(block) => {
                    black_box(self.peer.address(&block));
                    self.peer.free(block);
                }
                None => self.refused += 1,
            }
        }
        start.elapsed()
    }

    fn indexed(&mut self, pairs: &[u32], rounds: u64) -> Duration {
        let start = Instant::now();
        for _ in 0..rounds {
            match self.peer.alloc(u64::from(pairs[self.at]), 0) {
                Some(block) => {
                    black_box(self.peer.address(&block));
                    self.peer.free(block);
                }
                None => self.refused += 1,
            }
            self.at += 1;
            if self.at == pairs.len() {
                self.at = 0;
            }
        }
        start.elapsed()
    }

    fn steps(&mut self, steps: &[Step], rounds: u64) -> Duration {
        let mut left = usize::try_from(rounds).unwrap_or(usize::MAX);
        let start = Instant::now();
        while left > 0 {
            let run = &steps[self.at..steps.len().min(self.at.saturating_add(left))];
            for step in run {
                let slot = &mut self.slots[step.slot as usize];
                if let Some(block) = slot.take() {
                    self.peer.free(block);
                }
                match self.peer.alloc(u64::from(step.bytes), 0) {
                    Some(block) => {
                        black_box(self.peer.address(&block));
                        *slot = Some(block);
                    }
                    None => self.refused += 1,
                }
            }
            left -= run.len();
            self.at = (self.at + run.len()) % steps.len();
        }
        start.elapsed()
    }

    fn turns(&mut self, script: &Script, rounds: u64) -> Result<Duration, Failed> {
        let mut took = Duration::ZERO;
        for _ in 0..rounds {
            let start = Instant::now();
            self.turn(script)?;
            took += start.elapsed();
            for slot in &mut self.slots {
                if let Some(block) = slot.take() {
                    self.peer.free(block);
                }
            }
            self.peer.end_turn()?;
        }
        Ok(took)
    }

    fn turn(&mut self, script: &Script) -> Result<(), Failed> {
        for op in &script.ops {
            match *op {
                Op::Alloc { slot, bytes, stream } => match self.peer.alloc(bytes, stream) {
                    Some(block) => {
                        black_box(self.peer.address(&block));
                        self.slots[slot as usize] = Some(block);
                    }
                    // Requests of zero bytes are in no recording.
                    None => self.refused += 1,
                },
                Op::Free { slot } => {
                    if let Some(block) = self.slots[slot as usize].take() {
                        self.peer.free(block);
                    }
                }
                Op::FreeUsed { slot } => {
                    if let Some(block) = self.slots[slot as usize].take() {
                        self.peer.free_used(block);
                    }
                }
                Op::Begin { pool, stream } => self.peer.begin_capture(u64::from(pool), stream)?,
                Op::End { nth } => self.peer.end_capture(nth)?,
                Op::EmptyCache => self.peer.empty_cache()?,
            }
        }
        Ok(())
    }
}
