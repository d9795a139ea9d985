//! CubeCL's memory management (`cubecl-server`) over plain allocations of the simulated device.
//!
//! Set up as CubeCL's CUDA runtime sets it up: the default configuration, an alignment of 512 bytes, pages of at most a quarter of the
//! memory. What its server does around it is left out: its streams (one memory management each), captures, and the relocation of live
//! blocks, which needs copies and moves blocks that someone has the address of.

use std::sync::Arc;

use cubecl_ir::MemoryDeviceProperties;
use cubecl_server::logging::ServerLogger;
use cubecl_server::memory_management::{
    Cleanup, ErrorGraph, ManagedMemoryHandle, MemoryConfiguration, MemoryManagement, MemoryManagementOptions,
    PageUpdate,
};
use cubecl_server::server::IoError;
use cubecl_server::storage::{ComputeStorage, StorageHandle, StorageId, StorageUtilization};
use gpupool_device::{Address, Device};
use gpupool_sim_device::SimDevice;
use hashbrown::HashMap;

use super::gpupool::device;
use crate::{CAPACITY, Failed, Peer, Workload};

/// What its CUDA runtime aligns to; our blocks are multiples of it, too.
const ALIGNMENT: u64 = 512;

/// The peer.
pub struct Cubecl {
    memory: MemoryManagement<Plain>,
    /// It asks for one with each request; nothing here fails a kernel.
    failures: ErrorGraph,
    device: Arc<SimDevice>,
}

impl Cubecl {
    /// On a device of its own.
    #[must_use]
    pub fn new() -> Self {
        let device = Arc::new(device());
        let storage = Plain { device: Arc::clone(&device), pages: HashMap::new(), held: 0 };
        let properties = MemoryDeviceProperties::new(CAPACITY / 4, ALIGNMENT).with_max_memory(CAPACITY);
        let memory = MemoryManagement::from_configuration(
            storage,
            &properties,
            MemoryConfiguration::default(),
            Arc::new(ServerLogger::default()),
            MemoryManagementOptions::new("peer"),
        );
        Self { memory, failures: ErrorGraph::default(), device }
    }

    /// Whether the samples of this would take minutes. A request walks page after page, and all slices of each, until one fits: with 65,536
    /// live blocks that is a third of a millisecond.
    #[must_use]
    pub fn takes_minutes(workload: &Workload) -> bool {
        matches!(workload, Workload::WorkingSet { live: 65_536.. } | Workload::Index { free: 65_536.. })
    }

    /// Bytes that it holds from the device.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.memory.bytes_allocated()
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &SimDevice {
        &self.device
    }
}

impl Default for Cubecl {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Cubecl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cubecl").field("memory", &self.memory.to_string()).finish()
    }
}

/// A block and where it starts. Dropping the handle is the free: the memory management sees it at a later request.
#[derive(Debug)]
pub struct Block {
    // Held for its drop.
    _handle: ManagedMemoryHandle,
    address: Address,
}

impl Peer for Cubecl {
    type Block = Block;

    #[inline]
    fn alloc(&mut self, bytes: u64, _: u16) -> Option<Block> {
        let handle = self.memory.reserve(bytes, PageUpdate::Allow, &mut self.failures).ok()?;
        // The reservation alone does not say where: a caller that is to use the memory resolves it, once at least.
        let address = self.memory.get_resource(handle.clone().binding(), None, None).ok()?;
        Some(Block { _handle: handle, address })
    }

    #[inline]
    fn free(&mut self, block: Block) {
        drop(block);
    }

    #[inline]
    fn address(&self, block: &Block) -> u64 {
        block.address.0
    }

    fn empty_cache(&mut self) -> Result<(), Failed> {
        self.memory.cleanup(Cleanup::Explicit, &mut self.failures);
        Ok(())
    }

    fn driver_calls(&self) -> Option<u64> {
        // Nothing here captures: all of them are its own.
        Some(self.device.call_counts().values().sum())
    }
}

/// Pages for it: each a plain allocation, which is given back as soon as it is told.
struct Plain {
    device: Arc<SimDevice>,
    pages: HashMap<StorageId, Page>,
    held: u64,
}

#[derive(Clone, Copy)]
struct Page {
    address: Address,
    bytes: u64,
}

impl ComputeStorage for Plain {
    type Resource = Address;

    fn alignment(&self) -> usize {
        ALIGNMENT as usize
    }

    fn get(&mut self, handle: &StorageHandle) -> Result<Address, IoError> {
        let missing = || IoError::StorageHandleNotFound {
            reason: format!("{} is no page", handle.id).into(),
            backtrace: Default::default(),
        };
        let page = self.pages.get(&handle.id).ok_or_else(missing)?;
        Ok(Address(page.address.0 + handle.offset()))
    }

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        let refused = |_| IoError::OutOfMemory { size, backtrace: Default::default() };
        let address = self.device.mem_alloc(size).map_err(refused)?;
        let id = StorageId::new();
        self.pages.insert(id, Page { address, bytes: size });
        self.held += size;
        Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, id: StorageId) {
        if let Some(page) = self.pages.remove(&id) {
            self.held -= page.bytes;
            // No work is ever under way and nothing captures: there is nothing to refuse it for, and nobody here to tell.
            let _ = self.device.mem_free(page.address);
        }
    }

    fn flush(&mut self) {}

    fn bytes_allocated(&self) -> u64 {
        self.held
    }
}

/// Gives its pages back, which the memory management leaves to its storage.
impl Drop for Plain {
    fn drop(&mut self) {
        for page in self.pages.drain().map(|(_, page)| page) {
            let _ = self.device.mem_free(page.address);
        }
    }
}
