//! A recorded workload as a list of operations with nothing left to look up.

use gpupool_replay::trace::{Event, Trace};

use crate::Needs;

/// One operation. `slot` is a place for a block, which serves again once its block is freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// A request.
    Alloc {
        /// Where the block goes.
        slot: u32,
        /// Bytes.
        bytes: u64,
        /// The stream.
        stream: u16,
    },
    /// A free.
    Free {
        /// Where the block is.
        slot: u32,
    },
    /// A free of a block that one other stream used.
    FreeUsed {
        /// Where the block is.
        slot: u32,
    },
    /// A capture begins.
    Begin {
        /// Which pool of the recording.
        pool: u32,
        /// The stream.
        stream: u16,
    },
    /// A capture ends.
    End {
        /// Which capture, in order of their beginnings.
        nth: u32,
    },
    /// The cache is emptied.
    EmptyCache,
}

/// A recorded workload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Script {
    /// What happens, in order.
    pub ops: Vec<Op>,
    /// Places for blocks.
    pub slots: u32,
    /// Allocations and frees.
    pub events: u32,
    /// Streams.
    pub streams: u16,
}

impl Script {
    /// The script of a trace. Frees of blocks from before the recording and completions are not in it.
    #[must_use]
    pub fn new(trace: &Trace) -> Self {
        let mut slot_of = vec![0; trace.blocks.len()];
        let (mut vacant, mut slots) = (Vec::new(), 0);
        let mut ops = Vec::with_capacity(trace.events.len());
        let mut events = 0;
        for event in &trace.events {
            let op = match *event {
                Event::Alloc { block, bytes, stream } => {
                    let slot = vacant.pop().unwrap_or_else(|| {
                        slots += 1;
                        slots - 1
                    });
                    slot_of[block as usize] = slot;
                    Op::Alloc { slot, bytes, stream }
                }
                Event::Free { block } => {
                    let slot = slot_of[block as usize];
                    vacant.push(slot);
                    Op::Free { slot }
                }
                Event::FreeLate { block, .. } => {
                    let slot = slot_of[block as usize];
                    vacant.push(slot);
                    Op::FreeUsed { slot }
                }
                Event::Begin { graph } => {
                    let graph = trace.graphs[graph as usize];
                    Op::Begin { pool: graph.pool as u32, stream: graph.stream }
                }
                Event::End { graph } => Op::End { nth: graph },
                Event::EmptyCache => Op::EmptyCache,
                Event::Complete { .. } | Event::FreeForeign => continue,
            };
            events += u32::from(matches!(op, Op::Alloc { .. } | Op::Free { .. } | Op::FreeUsed { .. }));
            ops.push(op);
        }
        Self { ops, slots, events, streams: trace.streams.max(1) }
    }

    /// What a peer must have.
    #[must_use]
    pub fn needs(&self) -> Needs {
        Needs { streams: self.streams }
    }
}
