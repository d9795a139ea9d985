//! Several threads at once, and what they would reach if they shared nothing.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::Failed;

/// A worker on cache lines of its own: threads whose data share a line slow each other down.
#[derive(Clone, Debug)]
#[repr(align(128))]
pub struct Apart<T>(pub T);

/// Runs all workers at once, a thread each, and tells the time from the first beginning to the last end.
///
/// # Errors
///
/// The first worker's that failed.
pub fn together<T: Send>(
    workers: &mut [Apart<T>],
    work: impl Fn(&mut T) -> Result<(), Failed> + Sync,
) -> Result<Duration, Failed> {
    let barrier = Barrier::new(workers.len());
    let (barrier, work) = (&barrier, &work);
    let spans = thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter_mut()
            .map(|worker| {
                scope.spawn(move || {
                    barrier.wait();
                    let start = Instant::now();
                    work(&mut worker.0)?;
                    Ok((start, Instant::now()))
                })
            })
            .collect();
        let spans = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
        spans.collect::<Result<Vec<_>, Failed>>()
    })?;
    let first = spans.iter().map(|(start, _)| *start).min();
    let last = spans.iter().map(|(_, end)| *end).max();
    Ok(last.zip(first).map(|(last, first)| last - first).unwrap_or_default())
}

/// Work on memory that no other thread has: a stretch of dependent reads and writes in 16 KiB. Its scaling is what the machine can give.
#[derive(Clone, Debug)]
pub struct PrivateLoop {
    memory: Vec<u64>,
    /// Reads and writes a round.
    length: u64,
    at: u64,
}

const WORDS: u64 = 2_048;

impl PrivateLoop {
    /// A loop whose round takes about as long as `round` on this machine now.
    #[must_use]
    pub fn of_length(round: Duration) -> Self {
        let mut probe = Self { memory: vec![1; WORDS as usize], length: 1_000, at: 0 };
        // The shortest of several probes is the least disturbed one.
        let probes = (0..10).map(|_| {
            let start = Instant::now();
            probe.run(200);
            start.elapsed()
        });
        let one = probes.min().unwrap_or_default().as_nanos() as f64 / 200e3;
        let length = (round.as_nanos() as f64 / one.max(0.01)).round() as u64;
        Self { length: length.max(1), ..probe }
    }

    /// Runs rounds.
    pub fn run(&mut self, rounds: u64) {
        for _ in 0..rounds {
            for _ in 0..black_box(self.length) {
                let word = &mut self.memory[(self.at % WORDS) as usize];
                *word = word.wrapping_add(self.at | 1);
                self.at = self.at.wrapping_add((*word >> 7) | 1);
            }
        }
        black_box(self.at);
    }
}
