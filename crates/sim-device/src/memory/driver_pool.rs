//! The driver's own stream-ordered pools, and what backs the memory nodes of graphs.
//!
//! A pool takes *chunks* from the device and cuts them up: best fit among free ranges, whose neighbours merge. A free range remembers the
//! frees that it is made of; it serves a request of a stream if each of them was on that stream or is over. Nothing goes back to the device
//! before the pool is trimmed.
//!
//! # Invariants
//!
//! * **P1** Blocks and free ranges tile each chunk; no two free ranges of a chunk touch.
//! * **P2** `reserved` is the sum of the chunks, `used` what was asked for in blocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpupool_device::{DriverPoolFigures, code};
use hashbrown::HashMap;

use super::{Mapping, Memory, Numbers, Physical};
use crate::events::Record;
use crate::streams::StreamId;

/// Sizes of blocks are multiples of this.
const UNIT: u64 = 512;
/// Sizes of chunks are multiples of this.
const CHUNK: u64 = 32 << 20;

/// All pools of a device.
#[derive(Debug, Default)]
pub(super) struct DriverPools {
    pools: BTreeMap<u64, Pool>,
    /// Blocks by address: their pool, what they take of it, and what was asked for, which is what counts as used.
    blocks: HashMap<u64, (u64, u64, u64)>,
    last: u64,
    /// Frees so far.
    frees: u64,
    /// What memory nodes allocate.
    nodes: BTreeMap<u64, NodeMemory>,
}

#[derive(Debug, Default)]
struct Pool {
    chunks: BTreeMap<u64, u64>,
    free: BTreeMap<u64, Free>,
    figures: DriverPoolFigures,
    destroyed: bool,
}

#[derive(Debug)]
struct Free {
    bytes: u64,
    /// The last free of each stream, with its place among all frees.
    after: Vec<(u64, Arc<Record>)>,
}

impl Free {
    fn is_over(&self) -> bool {
        self.after.iter().all(|(_, free)| free.done().is_some())
    }
}

/// The memory of one allocation node.
#[derive(Clone, Copy, Debug)]
struct NodeMemory {
    bytes: u64,
    /// There is memory behind it.
    backed: bool,
    /// A launch allocated it, and nobody has freed it.
    live: bool,
}

/// What a pool gave: where, and the frees that the stream must be ordered after.
pub(crate) type Given = (u64, Vec<Arc<Record>>);

impl Pool {
    fn use_more(&mut self, bytes: u64) {
        self.figures.used += bytes;
        self.figures.used_high = self.figures.used_high.max(self.figures.used);
    }

    /// Puts a range among the free ones and merges it with those it touches in its chunk.
    fn put(&mut self, address: u64, mut free: Free) {
        let Some((&chunk, &length)) = self.chunks.range(..=address).next_back() else { return };
        let mut start = address;
        let before = self.free.range(chunk..address).next_back().map(|(at, f)| (*at, f.bytes));
        if let Some((at, bytes)) = before
            && at + bytes == address
            && let Some(other) = self.free.remove(&at)
        {
            start = at;
            free.bytes += other.bytes;
            merge(&mut free.after, other.after);
        }
        let end = start + free.bytes;
        if end < chunk + length
            && let Some(other) = self.free.remove(&end)
        {
            free.bytes += other.bytes;
            merge(&mut free.after, other.after);
        }
        self.free.insert(start, free);
    }

    /// Takes the best free range for a stream.
    fn take(&mut self, bytes: u64, stream: StreamId) -> Option<Given> {
        let usable =
            |f: &Free| f.bytes >= bytes && f.after.iter().all(|(_, r)| r.stream == stream || r.done().is_some());
        let fitting = self.free.iter().filter(|(_, f)| usable(f));
        let address = *fitting.min_by_key(|(at, f)| (f.bytes, **at))?.0;
        let free = self.free.remove(&address)?;
        let after = free.after.iter().map(|(_, record)| Arc::clone(record)).collect();
        if free.bytes > bytes {
            self.free.insert(address + bytes, Free { bytes: free.bytes - bytes, ..free });
        }
        Some((address, after))
    }

    /// Chunks that are one free range whose frees are over.
    fn idle_chunks(&self) -> Vec<(u64, u64)> {
        let idle = |(at, bytes): (&u64, &u64)| self.free.get(at).is_some_and(|f| f.bytes == *bytes && f.is_over());
        self.chunks.iter().filter(|chunk| idle(*chunk)).map(|(at, bytes)| (*at, *bytes)).collect()
    }
}

/// Adds frees to a list that has one a stream: a later one comes after an earlier one.
fn merge(into: &mut Vec<(u64, Arc<Record>)>, more: Vec<(u64, Arc<Record>)>) {
    for (place, record) in more {
        match into.iter_mut().find(|(_, known)| known.stream == record.stream) {
            Some(known) if known.0 < place => *known = (place, record),
            Some(_) => {}
            None => into.push((place, record)),
        }
    }
}

impl Memory {
    pub(crate) fn pool_create(&mut self) -> u64 {
        self.driver_pools.last += 1;
        self.driver_pools.pools.insert(self.driver_pools.last, Pool::default());
        self.driver_pools.last
    }

    fn pool(&mut self, pool: u64) -> Result<&mut Pool, u32> {
        self.driver_pools.pools.get_mut(&pool).filter(|p| !p.destroyed).ok_or(code::INVALID_VALUE)
    }

    pub(crate) fn pool_figures(&mut self, pool: u64) -> Result<DriverPoolFigures, u32> {
        Ok(self.pool(pool)?.figures)
    }

    /// Destroys a pool that has no blocks; what is not over yet goes when the pools are next looked at. What is gone.
    pub(crate) fn pool_destroy(&mut self, pool: u64) -> Result<Vec<Physical>, u32> {
        let found = self.pool(pool)?;
        if found.figures.used > 0 {
            return Err(code::INVALID_VALUE);
        }
        found.destroyed = true;
        Ok(self.reap_pools())
    }

    /// Gives back what destroyed pools still hold and nobody uses.
    pub(crate) fn reap_pools(&mut self) -> Vec<Physical> {
        let dying: Vec<u64> = self.driver_pools.pools.iter().filter(|(_, p)| p.destroyed).map(|(n, _)| *n).collect();
        let mut gone = Vec::new();
        for number in dying {
            gone.extend(self.give_chunks_back(number, 0));
            self.driver_pools.pools.retain(|n, p| *n != number || !p.chunks.is_empty());
        }
        gone
    }

    /// Gives idle chunks back until the pool holds no more than `keep` bytes. What is gone.
    pub(crate) fn pool_trim(&mut self, pool: u64, keep: u64) -> Result<Vec<Physical>, u32> {
        self.pool(pool)?;
        Ok(self.give_chunks_back(pool, keep))
    }

    fn give_chunks_back(&mut self, number: u64, keep: u64) -> Vec<Physical> {
        let mut gone = Vec::new();
        let Some(pool) = self.driver_pools.pools.get_mut(&number) else { return gone };
        for (address, bytes) in pool.idle_chunks() {
            if pool.figures.reserved <= keep {
                break;
            }
            pool.figures.reserved -= bytes;
            pool.chunks.remove(&address);
            pool.free.remove(&address);
            self.used -= bytes.next_multiple_of(self.granularity);
            self.placer.give_back(address);
            let start = self.mappings.remove(&address).map_or(0, |m| m.physical);
            gone.push(Physical { start, bytes });
        }
        gone
    }

    /// A block for a stream.
    pub(crate) fn pool_alloc(
        &mut self,
        number: u64,
        bytes: u64,
        stream: StreamId,
        since: u64,
        numbers: &mut Numbers,
    ) -> Result<Given, u32> {
        let wanted = bytes.checked_next_multiple_of(UNIT).filter(|b| *b > 0).ok_or(code::INVALID_VALUE)?;
        let given = match self.pool(number)?.take(wanted, stream) {
            Some(given) => given,
            None => {
                let chunk = wanted.checked_next_multiple_of(CHUNK).ok_or(code::OUT_OF_MEMORY)?;
                let address = self.back(None, chunk, since, numbers)?;
                let pool = self.pool(number)?;
                pool.chunks.insert(address, chunk);
                pool.figures.reserved += chunk;
                pool.figures.reserved_high = pool.figures.reserved_high.max(pool.figures.reserved);
                if chunk > wanted {
                    pool.free.insert(address + wanted, Free { bytes: chunk - wanted, after: Vec::new() });
                }
                (address, Vec::new())
            }
        };
        self.pool(number)?.use_more(bytes);
        self.driver_pools.blocks.insert(given.0, (number, wanted, bytes));
        Ok(given)
    }

    /// Memory behind addresses; at a new place if none is given.
    fn back(&mut self, at: Option<u64>, bytes: u64, since: u64, numbers: &mut Numbers) -> Result<u64, u32> {
        let taken = self.room(bytes)?;
        let address = match at {
            Some(address) => address,
            None => {
                let place = self.placer.find(bytes)?;
                self.placer.take(place)
            }
        };
        self.take(taken);
        let physical = numbers.physical(bytes).start;
        self.mappings.insert(address, Mapping { bytes, physical, handle: None, accessible: true, since });
        Ok(address)
    }

    /// Whether a block of a pool, or a live one of a graph, begins there.
    pub(crate) fn is_pooled(&self, address: u64) -> bool {
        self.driver_pools.blocks.contains_key(&address)
            || self.driver_pools.nodes.get(&address).is_some_and(|node| node.live)
    }

    /// Frees a block, after what `free` was recorded after; at once if that is not said.
    pub(crate) fn pool_free(&mut self, address: u64, free: Option<Arc<Record>>) -> Result<(), u32> {
        let Some((number, bytes, asked)) = self.driver_pools.blocks.remove(&address) else {
            let node = self.driver_pools.nodes.get_mut(&address).filter(|node| node.live);
            node.ok_or(code::INVALID_VALUE)?.live = false;
            return Ok(());
        };
        self.driver_pools.frees += 1;
        let place = self.driver_pools.frees;
        if let Some(pool) = self.driver_pools.pools.get_mut(&number) {
            pool.figures.used -= asked;
            pool.put(address, Free { bytes, after: free.map(|free| (place, free)).into_iter().collect() });
        }
        Ok(())
    }

    /// Addresses for an allocation node.
    pub(crate) fn node_alloc(&mut self, bytes: u64) -> Result<u64, u32> {
        let bytes = bytes.checked_next_multiple_of(self.granularity).filter(|b| *b > 0).ok_or(code::INVALID_VALUE)?;
        let place = self.placer.find(bytes)?;
        let address = self.placer.take(place);
        self.driver_pools.nodes.insert(address, NodeMemory { bytes, backed: false, live: false });
        Ok(address)
    }

    /// A launch runs allocation nodes: puts memory behind each. `kept` says of each whether it stays live after the run; one that is live
    /// already is an error, unless `auto_free`.
    pub(crate) fn nodes_launched(
        &mut self,
        nodes: &[(u64, bool)],
        auto_free: bool,
        since: u64,
        numbers: &mut Numbers,
    ) -> Result<(), u32> {
        let known = |memory: &Self, at: u64| memory.driver_pools.nodes.get(&at).copied();
        let free = |&(at, _): &(u64, bool)| known(self, at).is_some_and(|n| auto_free || !n.live);
        if !nodes.iter().all(free) {
            return Err(code::INVALID_VALUE);
        }
        for &(at, kept) in nodes {
            let Some(mut node) = known(self, at) else { continue };
            if !node.backed {
                self.back(Some(at), node.bytes, since, numbers)?;
            }
            (node.backed, node.live) = (true, kept);
            self.driver_pools.nodes.insert(at, node);
        }
        Ok(())
    }

    /// Gives back what is behind allocation nodes that nobody has live. What is gone.
    pub(crate) fn trim_nodes(&mut self) -> Vec<Physical> {
        let idle = self.driver_pools.nodes.iter_mut().filter(|(_, node)| node.backed && !node.live);
        let mut gone = Vec::new();
        for (address, node) in idle {
            node.backed = false;
            self.used -= node.bytes;
            let start = self.mappings.remove(address).map_or(0, |m| m.physical);
            gone.push(Physical { start, bytes: node.bytes });
        }
        gone
    }
}
