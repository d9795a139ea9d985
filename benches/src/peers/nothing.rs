//! The peer that does nothing: what the loop itself costs.

use std::hint::black_box;

use gpupool_device::{CaptureStatus, Device};
use gpupool_sim_device::SimDevice;

use super::gpupool::{Captures, device, handle};
use crate::{Failed, Needs, Peer};

/// Hands out made-up addresses. Captures are real ones, of a device of its own: they are the workload's, not the allocator's.
#[derive(Debug)]
pub struct Nothing {
    next: u64,
    device: SimDevice,
    captures: Captures,
    asks: bool,
}

impl Nothing {
    /// The peer.
    #[must_use]
    pub fn new(needs: Needs) -> Self {
        let device = device();
        (0..needs.streams).for_each(|n| device.adopt_stream(handle(n)));
        Self { next: 0, device, captures: Captures::default(), asks: false }
    }
}

impl Peer for Nothing {
    type Block = u64;

    #[inline]
    fn alloc(&mut self, bytes: u64, stream: u16) -> Option<u64> {
        self.next += 512;
        if self.asks {
            // The query that each request makes, and what it says: the capture's id.
            black_box(self.device.capture_status(handle(stream)).map_or(None, CaptureStatus::id));
        }
        Some(black_box(self.next ^ bytes ^ u64::from(stream)))
    }

    #[inline]
    fn free(&mut self, block: u64) {
        black_box(block);
    }

    #[inline]
    fn address(&self, block: &u64) -> u64 {
        *block
    }

    fn begin_capture(&mut self, _: u64, stream: u16) -> Result<(), Failed> {
        self.captures.begin(&self.device, handle(stream)).map(drop)
    }

    fn ask_at_each_request(&mut self) {
        self.asks = true;
    }

    fn end_capture(&mut self, nth: u32) -> Result<(), Failed> {
        self.captures.end(&self.device, nth).map(drop)
    }

    fn end_turn(&mut self) -> Result<(), Failed> {
        self.captures.finish(&self.device)
    }
}
