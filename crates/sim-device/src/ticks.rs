//! Ticks: a counter that replays advance once an operation, for work that completes a number of operations later.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::streams::StreamId;

#[derive(Debug, Default)]
pub(crate) struct Ticks {
    pub(crate) now: u64,
    /// Times that a wait moved the counter.
    pub(crate) jumps: u64,
    held: BinaryHeap<Reverse<(u64, StreamId)>>,
}

impl Ticks {
    pub(crate) fn hold(&mut self, stream: StreamId, until: u64) {
        self.held.push(Reverse((until, stream)));
    }

    /// A stream with a hold that the counter has reached.
    pub(crate) fn due(&mut self) -> Option<StreamId> {
        match self.held.peek() {
            Some(&Reverse((until, stream))) if until <= self.now => {
                self.held.pop();
                Some(stream)
            }
            _ => None,
        }
    }
}
