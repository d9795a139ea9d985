//! gpupool on a device that is there: a GPU, beside other allocators on it.
//!
//! Nothing runs on the device, so what was freed is complete as soon as anyone asks. A recording's captures are scopes that route requests
//! to private pools: the peers on a GPU have no captures either, and what is compared is the same on all sides.

use std::sync::Arc;

use gpupool_allocator::{Allocation, Allocator, Config, Filter, Policy, PoolId, Stream};
use gpupool_device::{StreamKind, Workbench};

use super::gpupool::refused;
use crate::{Failed, Needs, Peer};

/// gpupool under one policy on a device.
#[derive(Debug)]
pub struct OnDevice<D: Workbench + 'static> {
    // Goes before the streams that it made.
    allocator: Allocator<D>,
    streams: Vec<Stream<D>>,
    other: Stream<D>,
    scopes: Vec<Scope>,
    /// Which turn over a trace this is: each has private pools of its own.
    turn: u64,
}

/// A capture of the recording.
#[derive(Debug)]
struct Scope {
    pool: PoolId,
    ended: bool,
}

impl<D: Workbench + 'static> OnDevice<D> {
    /// An allocator on a device, with streams of its own.
    ///
    /// # Errors
    ///
    /// The allocator's and the device's.
    pub fn new(device: Arc<D>, policy: Policy, needs: Needs) -> Result<Self, Failed> {
        Self::of(Allocator::new(device, Config::new(policy))?, needs)
    }

    /// The same allocator with streams of its own: for threads with a stream each.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn beside(&self, needs: Needs) -> Result<Self, Failed> {
        Self::of(self.allocator.clone(), needs)
    }

    fn of(allocator: Allocator<D>, needs: Needs) -> Result<Self, Failed> {
        let make =
            || Ok::<_, Failed>(allocator.register_stream(allocator.device().stream_create(StreamKind::NonBlocking)?));
        let streams = (0..needs.streams.max(1)).map(|_| make()).collect::<Result<_, _>>()?;
        let other = make()?;
        Ok(Self { allocator, streams, other, scopes: Vec::new(), turn: 0 })
    }
}

impl<D: Workbench + 'static> Peer for OnDevice<D> {
    type Block = Allocation<D>;

    #[inline]
    fn alloc(&mut self, bytes: u64, stream: u16) -> Option<Self::Block> {
        self.allocator.alloc(bytes, &self.streams[usize::from(stream)]).map_err(refused).ok()
    }

    #[inline]
    fn free(&mut self, block: Self::Block) {
        drop(block);
    }

    #[inline]
    fn address(&self, block: &Self::Block) -> u64 {
        block.address().0
    }

    fn free_used(&mut self, block: Self::Block) {
        // The block is live and the stream is the same allocator's: nothing can be refused.
        let _ = block.record_stream(&self.other);
        drop(block);
    }

    fn begin_capture(&mut self, pool: u64, stream: u16) -> Result<(), Failed> {
        let pool = PoolId(pool.wrapping_add(1 + (self.turn << 40)), 0);
        self.allocator.begin_allocate_to_pool(pool, Filter::Stream(self.streams[usize::from(stream)].handle()))?;
        self.scopes.push(Scope { pool, ended: false });
        Ok(())
    }

    fn end_capture(&mut self, nth: u32) -> Result<(), Failed> {
        if let Some(scope) = self.scopes.get_mut(nth as usize).filter(|scope| !scope.ended) {
            scope.ended = true;
            self.allocator.end_allocate_to_pool(scope.pool)?;
        }
        Ok(())
    }

    fn empty_cache(&mut self) -> Result<(), Failed> {
        self.allocator.empty_cache()?;
        Ok(())
    }

    fn end_turn(&mut self) -> Result<(), Failed> {
        for nth in 0..self.scopes.len() {
            self.end_capture(nth as u32)?;
        }
        for scope in self.scopes.drain(..) {
            self.allocator.release_pool(scope.pool)?;
        }
        self.turn += 1;
        Ok(())
    }
}

impl<D: Workbench + 'static> Drop for OnDevice<D> {
    fn drop(&mut self) {
        // While its streams are there: what uses memory still is asked of them. A stream that cannot be destroyed is the device's to clean up.
        let _ = self.allocator.empty_cache();
        for stream in self.streams.iter().chain([&self.other]) {
            let _ = self.allocator.retire_stream(stream);
            let _ = self.allocator.device().stream_destroy(stream.handle());
        }
    }
}
