//! The driver as the allocator uses it: every call that a capture forbids is made in relaxed mode, and events come from a cache.
//!
//! Legal in a capture of anyone: the exchange of the thread's mode costs 18 ns and keeps a capture that some other thread has
//! under way alive (fault catalogue, 21).

use std::sync::Arc;

use gpupool_device::{
    Address, Call, CaptureStatus, Device, DriverError, DriverPoolFigures, DriverPoolHandle, DriverResult, EventHandle,
    HostMemory, MemoryHandle, MemoryInfo, StreamHandle, code, with_relaxed_capture,
};

use crate::captures::CaptureRegistry;
use crate::sync::{Mutex, Rank, assert_unlocked};
use crate::units::is_placeable;

/// A device with its event cache.
pub(crate) struct Driver<D: Device> {
    device: Arc<D>,
    /// Told of every call that a capture did not permit.
    registry: Arc<CaptureRegistry>,
    events: Mutex<Vec<EventHandle>>,
}

impl<D: Device> Driver<D> {
    pub(crate) fn new(device: Arc<D>, registry: Arc<CaptureRegistry>) -> Self {
        Self { device, registry, events: Mutex::new(Rank::Leaf, Vec::new()) }
    }

    /// Makes a call in relaxed mode, and notes it if a capture did not permit it all the same.
    fn relaxed<T>(&self, call: impl FnOnce(&D) -> DriverResult<T>) -> DriverResult<T> {
        assert_unlocked();
        with_relaxed_capture(&*self.device, call).inspect_err(|e| {
            if e.code == code::CAPTURE_UNSUPPORTED {
                self.registry.note(*e);
            }
        })
    }

    pub(crate) fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// The start of a range that the driver gave, if blocks may lie in it; otherwise it is given back, and the driver is taken to have failed.
    fn placed(
        call: Call,
        (base, bytes): (Address, u64),
        give_back: impl FnOnce() -> DriverResult<()>,
    ) -> DriverResult<Address> {
        if is_placeable(base, bytes) {
            return Ok(base);
        }
        tracing::warn!(address = %base, bytes, %call, "the driver gave addresses that are not aligned to 256 bytes, or beyond 2^56");
        if let Err(e) = give_back() {
            tracing::warn!(address = %base, bytes, error = %e, "they were not given back");
        }
        Err(DriverError::new(call, code::INVALID_VALUE))
    }

    pub(crate) fn mem_alloc(&self, bytes: u64) -> DriverResult<Address> {
        let address = self.relaxed(|d| d.mem_alloc(bytes))?;
        Self::placed(Call::MemAlloc, (address, bytes), || self.mem_free(address))
    }

    pub(crate) fn mem_free(&self, address: Address) -> DriverResult<()> {
        self.relaxed(|d| d.mem_free(address))
    }

    pub(crate) fn pool_create(&self) -> DriverResult<DriverPoolHandle> {
        self.relaxed(D::driver_pool_create)
    }

    pub(crate) fn pool_destroy(&self, pool: DriverPoolHandle) -> DriverResult<()> {
        self.relaxed(|d| d.driver_pool_destroy(pool))
    }

    pub(crate) fn pool_figures(&self, pool: DriverPoolHandle) -> DriverResult<DriverPoolFigures> {
        self.relaxed(|d| d.driver_pool_figures(pool))
    }

    pub(crate) fn pool_trim(&self, pool: DriverPoolHandle, keep: u64) -> DriverResult<()> {
        self.relaxed(|d| d.driver_pool_trim(pool, keep))
    }

    pub(crate) fn mem_alloc_async(
        &self,
        pool: DriverPoolHandle,
        bytes: u64,
        stream: StreamHandle,
    ) -> DriverResult<Address> {
        let address = self.relaxed(|d| d.mem_alloc_async(pool, bytes, stream))?;
        Self::placed(Call::MemAllocAsync, (address, bytes), || self.mem_free_async(address, stream))
    }

    pub(crate) fn mem_free_async(&self, address: Address, stream: StreamHandle) -> DriverResult<()> {
        self.relaxed(|d| d.mem_free_async(address, stream))
    }

    pub(crate) fn mem_info(&self) -> DriverResult<MemoryInfo> {
        assert_unlocked();
        self.device.mem_info()
    }

    pub(crate) fn address_reserve(&self, bytes: u64) -> DriverResult<Address> {
        assert_unlocked();
        let address = self.device.address_reserve(bytes)?;
        Self::placed(Call::AddressReserve, (address, bytes), || self.address_free(address, bytes))
    }

    pub(crate) fn address_free(&self, address: Address, bytes: u64) -> DriverResult<()> {
        assert_unlocked();
        self.device.address_free(address, bytes)
    }

    pub(crate) fn handle_create(&self, bytes: u64) -> DriverResult<MemoryHandle> {
        assert_unlocked();
        self.device.handle_create(bytes)
    }

    pub(crate) fn handle_release(&self, handle: MemoryHandle) -> DriverResult<()> {
        assert_unlocked();
        self.device.handle_release(handle)
    }

    pub(crate) fn map(&self, address: Address, bytes: u64, handle: MemoryHandle) -> DriverResult<()> {
        assert_unlocked();
        self.device.map(address, bytes, handle)?;
        self.device.set_access(address, bytes).inspect_err(|_| {
            if let Err(e) = self.device.unmap(address, bytes) {
                tracing::warn!(%address, bytes, error = %e, "a mapping that could not be made accessible stays");
            }
        })
    }

    /// As [`map`](Self::map), but not accessible yet.
    pub(crate) fn map_only(&self, address: Address, bytes: u64, handle: MemoryHandle) -> DriverResult<()> {
        assert_unlocked();
        self.device.map(address, bytes, handle)
    }

    pub(crate) fn set_access(&self, address: Address, bytes: u64) -> DriverResult<()> {
        assert_unlocked();
        self.device.set_access(address, bytes)
    }

    pub(crate) fn unmap(&self, address: Address, bytes: u64) -> DriverResult<()> {
        assert_unlocked();
        self.device.unmap(address, bytes)
    }

    pub(crate) fn host_alloc(&self, bytes: u64) -> DriverResult<HostMemory> {
        self.relaxed(|d| d.host_alloc(bytes))
    }

    pub(crate) fn host_free(&self, memory: HostMemory) -> DriverResult<()> {
        self.relaxed(|d| d.host_free(memory))
    }

    pub(crate) fn copy_to_host(&self, dst: HostMemory, offset: u64, src: Address, bytes: u64) -> DriverResult<()> {
        self.relaxed(|d| d.copy_to_host(dst, offset, src, bytes))
    }

    pub(crate) fn copy_from_host(&self, dst: Address, src: HostMemory, offset: u64, bytes: u64) -> DriverResult<()> {
        self.relaxed(|d| d.copy_from_host(dst, src, offset, bytes))
    }

    /// An event to record: from the cache, else a new one.
    pub(crate) fn event(&self) -> DriverResult<EventHandle> {
        if let Some(event) = self.events.lock().pop() {
            return Ok(event);
        }
        assert_unlocked();
        self.device.event_create()
    }

    /// Puts an event back that nothing waits for any more.
    pub(crate) fn recycle(&self, event: EventHandle) {
        self.events.lock().push(event);
    }

    pub(crate) fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        assert_unlocked();
        self.device.event_record(event, stream)
    }

    /// Records an event that is no part of a capture. `false` on a stream that captures, or is about to.
    ///
    /// Another thread may begin a capture on the stream between the look and the record. Its session was opened before that, which is
    /// noticed; then the event, which may be the capture's, is recorded anew.
    pub(crate) fn event_record_outside_captures(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<bool> {
        loop {
            let opened = self.registry.opened();
            // Of a capture that was begun through us the driver need not be asked.
            let known = self.registry.captures_on(self.device.ordinal(), stream);
            if known || self.capture_status(stream)?.is_capturing() {
                return Ok(false);
            }
            self.event_record(event, stream)?;
            if self.registry.opened() == opened {
                return Ok(true);
            }
        }
    }

    pub(crate) fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        self.relaxed(|d| d.event_query(event))
    }

    pub(crate) fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        self.relaxed(|d| d.event_synchronize(event))
    }

    pub(crate) fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        assert_unlocked();
        self.device.stream_wait_event(stream, event)
    }

    pub(crate) fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        assert_unlocked();
        self.device.capture_status(stream)
    }
}

impl<D: Device> Drop for Driver<D> {
    fn drop(&mut self) {
        for event in std::mem::take(self.events.get_mut()) {
            if let Err(e) = self.device.event_destroy(event) {
                tracing::debug!(error = %e, "an event was not destroyed");
            }
        }
    }
}
