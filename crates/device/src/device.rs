//! The calls the allocator makes.

use crate::{
    Address, Call, CaptureFrontier, CaptureMode, CaptureStatus, DeviceProperties, DriverError, DriverPoolFigures,
    DriverPoolHandle, DriverResult, EventHandle, GraphHandle, HostMemory, MemoryHandle, MemoryInfo, NodeId,
    StreamHandle, code,
};

/// Every call the allocator ever makes to a driver. See the crate's documentation for the rules (D1 to D4) and for what
/// "unsafe call" means.
pub trait Device: Send + Sync + 'static {
    /// Which GPU of the process this is, from 0. No driver call.
    fn ordinal(&self) -> u32;

    /// What does not change while the device is open. No driver call.
    fn properties(&self) -> &DeviceProperties;

    /// Allocates `bytes` of memory. The address is a multiple of 512 at least.
    ///
    /// *Errors*: `OUT_OF_MEMORY`; `INVALID_VALUE` for 0 bytes. *Blocks*: no. *Capture*: unsafe call.
    fn mem_alloc(&self, bytes: u64) -> DriverResult<Address>;

    /// Frees what [`mem_alloc`](Self::mem_alloc) gave.
    ///
    /// *Errors*: `INVALID_VALUE` for any other address. *Blocks*: **until the whole device is idle**. *Capture*: unsafe call.
    fn mem_free(&self, address: Address) -> DriverResult<()>;

    /// Free and total memory. *Blocks*: no. *Capture*: permitted.
    fn mem_info(&self) -> DriverResult<MemoryInfo>;

    /// Reserves `bytes` of addresses (a multiple of the granularity) with no memory behind them.
    ///
    /// *Errors*: `INVALID_VALUE` for a size that is no multiple; `OUT_OF_MEMORY` when addresses run out. *Blocks*: no.
    /// *Capture*: permitted in every mode, as are all virtual-memory calls.
    fn address_reserve(&self, bytes: u64) -> DriverResult<Address>;

    /// Gives back a range as it was reserved, with nothing mapped in it.
    ///
    /// *Errors*: `INVALID_VALUE` for any other range. *Blocks*: no. *Capture*: permitted.
    fn address_free(&self, address: Address, bytes: u64) -> DriverResult<()>;

    /// Creates one physical allocation of `bytes` (a multiple of the granularity). Its contents are zero.
    ///
    /// *Errors*: `OUT_OF_MEMORY`; `INVALID_VALUE` for a size that is no multiple. *Blocks*: no. *Capture*: permitted.
    fn handle_create(&self, bytes: u64) -> DriverResult<MemoryHandle>;

    /// Releases a handle. The memory goes back once nothing maps it.
    ///
    /// *Errors*: `INVALID_VALUE` for an unknown handle. *Blocks*: no. *Capture*: permitted.
    fn handle_release(&self, handle: MemoryHandle) -> DriverResult<()>;

    /// Maps a whole handle at `address`, inside a reserved range, where nothing is mapped. A handle may be mapped at several
    /// addresses at once. Kernels fault there until [`set_access`](Self::set_access).
    ///
    /// *Errors*: `INVALID_VALUE` for a range not reserved or already mapped, or `bytes` other than the handle's.
    /// *Blocks*: no. *Capture*: permitted.
    fn map(&self, address: Address, bytes: u64, handle: MemoryHandle) -> DriverResult<()>;

    /// Makes mapped memory readable and writable for this device. The range consists of whole mappings.
    ///
    /// *Errors*: `INVALID_VALUE` where nothing is mapped. *Blocks*: no. *Capture*: permitted.
    fn set_access(&self, address: Address, bytes: u64) -> DriverResult<()>;

    /// Unmaps whole mappings. **The driver does not wait**: a kernel that still uses the range faults.
    ///
    /// *Errors*: `INVALID_VALUE` for part of a mapping, and for a start outside every reservation. Where nothing is mapped nothing happens.
    /// *Blocks*: no. *Capture*: permitted.
    fn unmap(&self, address: Address, bytes: u64) -> DriverResult<()>;

    /// Creates an event without timing. *Blocks*: no. *Capture*: permitted.
    fn event_create(&self) -> DriverResult<EventHandle>;

    /// Destroys an event. *Blocks*: no. *Capture*: permitted, for a captured event too.
    fn event_destroy(&self, event: EventHandle) -> DriverResult<()>;

    /// Records `event` after all work submitted to `stream` so far; what it was recorded for before is forgotten. On a
    /// capturing stream it becomes a captured event: it can no longer be queried or waited for.
    ///
    /// *Errors*: `INVALID_HANDLE`. *Blocks*: no. *Capture*: permitted.
    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()>;

    /// Whether the work that `event` was last recorded after is complete; an event never recorded is.
    ///
    /// *Errors*: `CAPTURED_EVENT` for one recorded in a capture, which it invalidates. *Blocks*: no. *Capture*: unsafe call.
    fn event_query(&self, event: EventHandle) -> DriverResult<bool>;

    /// Waits on the host until `event` is complete.
    ///
    /// *Errors*: as [`event_query`](Self::event_query). *Blocks*: yes. *Capture*: unsafe call.
    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()>;

    /// Makes work submitted to `stream` from now on wait for `event`. Waiting for a captured event makes `stream` join its
    /// capture; a capturing stream that waits for an event from outside gives `CAPTURE_ISOLATION` and invalidates the capture.
    ///
    /// *Blocks*: no. *Capture*: permitted otherwise.
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()>;

    /// Whether `stream` is capturing, and under which id. *Blocks*: no. *Capture*: permitted.
    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus>;

    /// Where a capturing stream stands in its graph; `None` if it is not capturing, or in a capture that was invalidated.
    /// *Blocks*: no. *Capture*: permitted.
    fn capture_frontier(&self, stream: StreamHandle) -> DriverResult<Option<CaptureFrontier>>;

    /// The nodes that `node` of `graph`, which is under capture, depends on directly. *Blocks*: no. *Capture*: permitted.
    ///
    /// *Errors*: `NOT_SUPPORTED` from a device that cannot tell, which is what the provided body does.
    fn node_dependencies(&self, graph: GraphHandle, node: NodeId) -> DriverResult<Vec<NodeId>> {
        let _ = (graph, node);
        Err(DriverError::new(Call::GraphGetEdges, code::NOT_SUPPORTED))
    }

    /// Pins `bytes` of the host's memory.
    ///
    /// *Errors*: `OUT_OF_MEMORY`; `INVALID_VALUE` for 0 bytes; `NOT_SUPPORTED` from a device that has no such memory, which is what the
    /// provided bodies of this and the next three do. *Blocks*: no. *Capture*: unsafe call.
    fn host_alloc(&self, bytes: u64) -> DriverResult<HostMemory> {
        let _ = bytes;
        Err(DriverError::new(Call::MemHostAlloc, code::NOT_SUPPORTED))
    }

    /// Gives pinned memory back.
    ///
    /// *Errors*: `INVALID_VALUE` for any other number. *Blocks*: may wait for the device. *Capture*: unsafe call.
    fn host_free(&self, memory: HostMemory) -> DriverResult<()> {
        let _ = memory;
        Err(DriverError::new(Call::MemFreeHost, code::NOT_SUPPORTED))
    }

    /// Copies `bytes` of device memory at `src` into pinned memory, from its `offset` on. It is ordered after what the host knows to be
    /// complete, and after nothing else.
    ///
    /// *Errors*: `INVALID_VALUE` for a range outside the pinned memory. *Blocks*: **until the copy is complete**. *Capture*: unsafe call.
    fn copy_to_host(&self, dst: HostMemory, offset: u64, src: Address, bytes: u64) -> DriverResult<()> {
        let _ = (dst, offset, src, bytes);
        Err(DriverError::new(Call::MemcpyToHost, code::NOT_SUPPORTED))
    }

    /// Copies `bytes` of pinned memory, from its `offset` on, to device memory at `dst`. Ordered as [`copy_to_host`](Self::copy_to_host).
    ///
    /// *Errors*, *Blocks*, *Capture*: as `copy_to_host`.
    fn copy_from_host(&self, dst: Address, src: HostMemory, offset: u64, bytes: u64) -> DriverResult<()> {
        let _ = (dst, src, offset, bytes);
        Err(DriverError::new(Call::MemcpyFromHost, code::NOT_SUPPORTED))
    }

    /// Makes one of the driver's own stream-ordered pools, empty. It keeps what is freed until it is [trimmed](Self::driver_pool_trim).
    ///
    /// *Errors*: `NOT_SUPPORTED` from a device without such pools, which is what the provided bodies of all these calls do. *Blocks*: no.
    /// *Capture*: unsafe call.
    fn driver_pool_create(&self) -> DriverResult<DriverPoolHandle> {
        Err(DriverError::new(Call::MemPoolCreate, code::NOT_SUPPORTED))
    }

    /// Destroys a driver's pool. What was freed in it and is not over yet goes back once it is.
    ///
    /// *Errors*: `INVALID_VALUE` for an unknown pool, and for one with a live block. *Blocks*: no. *Capture*: unsafe call.
    fn driver_pool_destroy(&self, pool: DriverPoolHandle) -> DriverResult<()> {
        let _ = pool;
        Err(DriverError::new(Call::MemPoolDestroy, code::NOT_SUPPORTED))
    }

    /// What a driver's pool holds. Memory that graphs allocate is no part of it. *Blocks*: no. *Capture*: unsafe call.
    fn driver_pool_figures(&self, pool: DriverPoolHandle) -> DriverResult<DriverPoolFigures> {
        let _ = pool;
        Err(DriverError::new(Call::MemPoolGetAttribute, code::NOT_SUPPORTED))
    }

    /// Gives back to the device what a driver's pool holds beyond `keep` bytes, is in no block, and whose frees are over, as far as the host
    /// has waited for them: to have asked an event is not enough.
    ///
    /// *Blocks*: no. *Capture*: unsafe call.
    fn driver_pool_trim(&self, pool: DriverPoolHandle, keep: u64) -> DriverResult<()> {
        let _ = (pool, keep);
        Err(DriverError::new(Call::MemPoolTrimTo, code::NOT_SUPPORTED))
    }

    /// Allocates from a driver's pool for work on `stream` from now on. On a capturing stream this records a memory node instead: the address
    /// is fixed, and there is memory behind it only from that node's run on, until its free runs.
    ///
    /// *Errors*: `OUT_OF_MEMORY`; `INVALID_VALUE` for 0 bytes or an unknown pool. *Blocks*: no. *Capture*: unsafe call on a stream that is
    /// not capturing.
    fn mem_alloc_async(&self, pool: DriverPoolHandle, bytes: u64, stream: StreamHandle) -> DriverResult<Address> {
        let _ = (pool, bytes, stream);
        Err(DriverError::new(Call::MemAllocAsync, code::NOT_SUPPORTED))
    }

    /// Frees what [`mem_alloc_async`](Self::mem_alloc_async) gave, after the work on `stream` so far. On a capturing stream this records a
    /// memory node. [`mem_free`](Self::mem_free) takes such a block, too, and then waits for nothing: the device must be done with it.
    ///
    /// *Errors*: `INVALID_VALUE` for any other address, and on a capturing stream for a block from outside the capture. *Blocks*: no.
    /// *Capture*: unsafe call on a stream that is not capturing.
    fn mem_free_async(&self, address: Address, stream: StreamHandle) -> DriverResult<()> {
        let _ = (address, stream);
        Err(DriverError::new(Call::MemFreeAsync, code::NOT_SUPPORTED))
    }

    /// Sets the calling **thread's** capture mode and returns the one before. *Blocks*: no. *Capture*: permitted.
    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode>;

    /// Nanoseconds on a clock that never goes back. Virtual time on a simulated device. No driver call.
    fn now(&self) -> u64;
}

/// Runs `call` with this thread's capture mode exchanged to [`CaptureMode::Relaxed`], and exchanges it back whatever `call`
/// returned: what makes an unsafe call survivable for a capture under way on this or another thread.
///
/// What `call` did stands, so its result is returned also where exchanging back fails, twice: the thread then stays relaxed.
///
/// # Errors
///
/// Those of the first exchange, in which case `call` was not made, and those of `call`.
pub fn with_relaxed_capture<D: Device + ?Sized, T>(
    device: &D,
    call: impl FnOnce(&D) -> DriverResult<T>,
) -> DriverResult<T> {
    let before = device.exchange_capture_mode(CaptureMode::Relaxed)?;
    let result = call(device);
    let restored = device.exchange_capture_mode(before);
    if restored.is_err() {
        let _relaxed_from_now_on = device.exchange_capture_mode(before);
    }
    result
}

/// Whether all these events are complete, asked in relaxed mode. With `wait` it **waits** for them on the host. An event that cannot be asked
/// about counts as not complete.
pub fn are_complete<D: Device + ?Sized>(device: &D, events: &[EventHandle], wait: bool) -> bool {
    events.iter().all(|&event| {
        let done = with_relaxed_capture(device, |d| match wait {
            true => d.event_synchronize(event).map(|()| true),
            false => d.event_query(event),
        });
        done.unwrap_or(false)
    })
}
