//! A bench for golden vectors: `m(1, 1000, 0)` requests 1000 bytes on stream 0 as block 1, `f(1)` frees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_allocator::state::BlockStatus;
use gpupool_allocator::{AllocError, Allocation, Allocator, Config, OutOfMemory, Policy, Stat, Stream};
use gpupool_device::StreamHandle;

use crate::fake::{BASE, Done, FakeDriver};

/// An allocator over a [`FakeDriver`], its blocks by number.
pub struct Bench {
    /// The driver.
    pub driver: Arc<FakeDriver>,
    /// The allocator.
    pub allocator: Allocator<FakeDriver>,
    blocks: BTreeMap<u32, Allocation<FakeDriver>>,
}

/// A `Stat` as the golden vectors write it.
pub fn flat(stat: Stat) -> [i64; 4] {
    [stat.current, stat.peak, stat.allocated, stat.freed]
}

impl Bench {
    /// A device of 80 GiB.
    pub fn new(policy: Policy) -> Self {
        Self::with(Config::new(policy), 80 << 30, 80 << 30)
    }

    /// A device of `total` bytes that gives `limit` at most.
    pub fn with(config: Config, total: u64, limit: u64) -> Self {
        let driver = Arc::new(FakeDriver::new(total, limit));
        let allocator = Allocator::with_registry(Arc::clone(&driver), config, Arc::default()).unwrap();
        Self { driver, allocator, blocks: BTreeMap::new() }
    }

    /// The registration of a stream.
    pub fn stream(&self, stream: u64) -> Stream<FakeDriver> {
        self.allocator.register_stream(StreamHandle(stream))
    }

    /// Requests; returns the address relative to the first segment.
    pub fn m(&mut self, id: u32, bytes: u64, stream: u64) -> u64 {
        let block = self.allocator.alloc(bytes, &self.stream(stream)).unwrap();
        let at = block.address().0.wrapping_sub(BASE);
        self.allocator.validate().unwrap();
        assert!(self.blocks.insert(id, block).is_none(), "block {id} is live already");
        at
    }

    /// Requests what cannot be had.
    pub fn oom(&mut self, bytes: u64, stream: u64) -> OutOfMemory {
        let error = self.allocator.alloc(bytes, &self.stream(stream)).unwrap_err();
        self.allocator.validate().unwrap();
        match error {
            AllocError::OutOfMemory(report) => *report,
            other => panic!("{other}"),
        }
    }

    /// Frees.
    pub fn f(&mut self, id: u32) {
        self.blocks.remove(&id).unwrap().free().unwrap();
        self.allocator.validate().unwrap();
    }

    /// Records a use.
    pub fn record(&self, id: u32, stream: u64) {
        self.blocks[&id].record_stream(&self.stream(stream)).unwrap();
    }

    /// A block.
    pub fn block(&self, id: u32) -> &Allocation<FakeDriver> {
        &self.blocks[&id]
    }

    /// What the driver was asked since the last look.
    pub fn log(&self) -> Vec<Done> {
        self.driver.take_log()
    }

    /// The blocks of the segment at `address` (relative): size, requested, what it is.
    pub fn blocks_at(&self, address: u64) -> Vec<(u64, u64, BlockStatus)> {
        let state = self.allocator.state();
        let segment = state.segments.iter().find(|s| s.address.0.wrapping_sub(BASE) == address).unwrap();
        segment.blocks.iter().map(|b| (b.size, b.requested, b.status)).collect()
    }
}
