//! A device that counts what the allocator asks of it.
//!
//! A replay makes driver calls of its own (it captures, and holds work back). [`Meter`] stands between the allocator
//! and the device, so that only the allocator's calls are counted; the replay asks the device behind it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use gpupool_device::{
    Address, Call, CaptureFrontier, CaptureMode, CaptureStatus, Device, DeviceProperties, DriverPoolFigures,
    DriverPoolHandle, DriverResult, EventHandle, GraphHandle, HostMemory, MemoryHandle, MemoryInfo, NodeId,
    StreamHandle,
};

use super::ReplayDevice;

/// A device with counters before it. See the module's documentation.
#[derive(Debug)]
pub struct Meter<D> {
    device: D,
    calls: Vec<AtomicU64>,
    spent_ns: AtomicU64,
}

/// What the allocator asked of the driver in some stretch of a replay.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Metered {
    /// Calls by kind; kinds that were not called are left out.
    pub calls: BTreeMap<&'static str, u64>,
    /// Nanoseconds in those calls, waiting for work excluded where the device can tell.
    pub spent_ns: u64,
}

impl<D: ReplayDevice> Meter<D> {
    pub(super) fn new(device: D) -> Self {
        Self { device, calls: Call::ALL.iter().map(|_| AtomicU64::new(0)).collect(), spent_ns: AtomicU64::new(0) }
    }

    /// The device behind.
    pub(super) fn device(&self) -> &D {
        &self.device
    }

    /// Moves whenever memory was taken, mapped or given back.
    pub(super) fn memory_calls(&self) -> u64 {
        let kinds = [
            Call::MemAlloc,
            Call::MemFree,
            Call::MemAllocAsync,
            Call::MemFreeAsync,
            Call::MemCreate,
            Call::MemRelease,
            Call::MemMap,
            Call::MemUnmap,
        ];
        kinds.iter().map(|call| self.count(*call)).sum()
    }

    pub(super) fn read(&self) -> Metered {
        let counts = Call::ALL.iter().map(|call| (call.name(), self.count(*call)));
        Metered { calls: counts.filter(|(_, n)| *n > 0).collect(), spent_ns: self.spent_ns.load(Relaxed) }
    }

    pub(super) fn reset(&self) {
        self.calls.iter().chain([&self.spent_ns]).for_each(|counter| counter.store(0, Relaxed));
    }

    fn count(&self, call: Call) -> u64 {
        self.calls.get(call as usize).map_or(0, |counter| counter.load(Relaxed))
    }

    fn metered<T>(&self, call: Call, ask: impl FnOnce(&D) -> DriverResult<T>) -> DriverResult<T> {
        let before = self.device.driver_ns();
        let answer = ask(&self.device);
        self.spent_ns.fetch_add(self.device.driver_ns().saturating_sub(before), Relaxed);
        if let Some(counter) = self.calls.get(call as usize) {
            counter.fetch_add(1, Relaxed);
        }
        answer
    }
}

impl<D: ReplayDevice> Device for Meter<D> {
    fn ordinal(&self) -> u32 {
        self.device.ordinal()
    }

    fn properties(&self) -> &DeviceProperties {
        self.device.properties()
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<Address> {
        self.metered(Call::MemAlloc, |d| d.mem_alloc(bytes))
    }

    fn mem_free(&self, address: Address) -> DriverResult<()> {
        self.metered(Call::MemFree, |d| d.mem_free(address))
    }

    fn mem_info(&self) -> DriverResult<MemoryInfo> {
        self.metered(Call::MemGetInfo, |d| d.mem_info())
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<Address> {
        self.metered(Call::AddressReserve, |d| d.address_reserve(bytes))
    }

    fn address_free(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.metered(Call::AddressFree, |d| d.address_free(address, bytes))
    }

    fn handle_create(&self, bytes: u64) -> DriverResult<MemoryHandle> {
        self.metered(Call::MemCreate, |d| d.handle_create(bytes))
    }

    fn handle_release(&self, handle: MemoryHandle) -> DriverResult<()> {
        self.metered(Call::MemRelease, |d| d.handle_release(handle))
    }

    fn map(&self, address: Address, bytes: u64, handle: MemoryHandle) -> DriverResult<()> {
        self.metered(Call::MemMap, |d| d.map(address, bytes, handle))
    }

    fn set_access(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.metered(Call::MemSetAccess, |d| d.set_access(address, bytes))
    }

    fn unmap(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.metered(Call::MemUnmap, |d| d.unmap(address, bytes))
    }

    fn host_alloc(&self, bytes: u64) -> DriverResult<HostMemory> {
        self.metered(Call::MemHostAlloc, |d| d.host_alloc(bytes))
    }

    fn host_free(&self, memory: HostMemory) -> DriverResult<()> {
        self.metered(Call::MemFreeHost, |d| d.host_free(memory))
    }

    fn copy_to_host(&self, dst: HostMemory, offset: u64, src: Address, bytes: u64) -> DriverResult<()> {
        self.metered(Call::MemcpyToHost, |d| d.copy_to_host(dst, offset, src, bytes))
    }

    fn copy_from_host(&self, dst: Address, src: HostMemory, offset: u64, bytes: u64) -> DriverResult<()> {
        self.metered(Call::MemcpyFromHost, |d| d.copy_from_host(dst, src, offset, bytes))
    }

    fn event_create(&self) -> DriverResult<EventHandle> {
        self.metered(Call::EventCreate, D::event_create)
    }

    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        self.metered(Call::EventDestroy, |d| d.event_destroy(event))
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        self.metered(Call::EventRecord, |d| d.event_record(event, stream))
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        self.metered(Call::EventQuery, |d| d.event_query(event))
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        self.metered(Call::EventSynchronize, |d| d.event_synchronize(event))
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        self.metered(Call::StreamWaitEvent, |d| d.stream_wait_event(stream, event))
    }

    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        self.metered(Call::StreamGetCaptureInfo, |d| d.capture_status(stream))
    }

    fn capture_frontier(&self, stream: StreamHandle) -> DriverResult<Option<CaptureFrontier>> {
        self.metered(Call::StreamGetCaptureInfo, |d| d.capture_frontier(stream))
    }

    fn node_dependencies(&self, graph: GraphHandle, node: NodeId) -> DriverResult<Vec<NodeId>> {
        self.metered(Call::GraphGetEdges, |d| d.node_dependencies(graph, node))
    }

    fn driver_pool_create(&self) -> DriverResult<DriverPoolHandle> {
        self.metered(Call::MemPoolCreate, D::driver_pool_create)
    }

    fn driver_pool_destroy(&self, pool: DriverPoolHandle) -> DriverResult<()> {
        self.metered(Call::MemPoolDestroy, |d| d.driver_pool_destroy(pool))
    }

    fn driver_pool_figures(&self, pool: DriverPoolHandle) -> DriverResult<DriverPoolFigures> {
        self.metered(Call::MemPoolGetAttribute, |d| d.driver_pool_figures(pool))
    }

    fn driver_pool_trim(&self, pool: DriverPoolHandle, keep: u64) -> DriverResult<()> {
        self.metered(Call::MemPoolTrimTo, |d| d.driver_pool_trim(pool, keep))
    }

    fn mem_alloc_async(&self, pool: DriverPoolHandle, bytes: u64, stream: StreamHandle) -> DriverResult<Address> {
        self.metered(Call::MemAllocAsync, |d| d.mem_alloc_async(pool, bytes, stream))
    }

    fn mem_free_async(&self, address: Address, stream: StreamHandle) -> DriverResult<()> {
        self.metered(Call::MemFreeAsync, |d| d.mem_free_async(address, stream))
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        self.metered(Call::ExchangeCaptureMode, |d| d.exchange_capture_mode(mode))
    }

    fn now(&self) -> u64 {
        self.device.now()
    }
}
