//! A simulated device that is watched: it knows by vector clocks which work is ordered after which, so a test can ask at every hand-out
//! whether the block's new owner comes after its last uses, and it notes memory that goes back while work may still use it.
//!
//! * **V1** A stream's clock says, for every stream, how many pieces of its work come before whatever is submitted next.
//! * **V2** The host's clock says which work the host *knows* to be complete: by a query, by a wait. Work submitted from then on comes after.
//! * **V3** What the allocator was not told is not known: that work happens to be complete already does not count.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, OnceLock};

use gpupool_device::{
    Address, Call, CaptureFrontier, CaptureMode, CaptureStatus, Device, DeviceProperties, DriverPoolFigures,
    DriverPoolHandle, DriverResult, EventHandle, HostMemory, MemoryHandle, MemoryInfo, StreamHandle,
};
use gpupool_sim_device::SimDevice;

/// For each stream, how many pieces of its work come before.
#[derive(Clone, Default, Debug)]
struct Clock(Vec<u64>);

impl Clock {
    fn at(&self, stream: usize) -> u64 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    fn raise(&mut self, stream: usize, to: u64) {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] = self.0[stream].max(to);
    }

    fn join(&mut self, other: &Self) {
        other.0.iter().enumerate().for_each(|(stream, to)| self.raise(stream, *to));
    }
}

/// A piece of work that used a range.
#[derive(Clone, Copy, Debug)]
struct Use {
    start: u64,
    end: u64,
    stream: usize,
    position: u64,
}

#[derive(Default)]
struct Book {
    /// Who has a handle now. A handle that is recycled names another stream.
    names: HashMap<StreamHandle, usize>,
    clocks: Vec<Clock>,
    submitted: Vec<u64>,
    host: Clock,
    events: HashMap<EventHandle, Clock>,
    uses: Vec<Use>,
    ranges: BTreeMap<u64, u64>,
    /// Blocks of the driver's pools, and ranges freed there: what came before each free.
    pooled: BTreeMap<u64, u64>,
    pool_frees: Vec<(u64, u64, Clock)>,
    breaches: Vec<String>,
}

impl Book {
    fn stream(&mut self, handle: StreamHandle) -> usize {
        if let Some(known) = self.names.get(&handle) {
            return *known;
        }
        self.clocks.push(Clock::default());
        self.submitted.push(0);
        self.names.insert(handle, self.clocks.len() - 1);
        self.clocks.len() - 1
    }

    /// What comes before the next work on a stream.
    fn before(&mut self, stream: usize) -> Clock {
        let mut clock = self.clocks[stream].clone();
        clock.join(&self.host);
        clock.raise(stream, self.submitted[stream]);
        clock
    }

    fn leaves(&mut self, call: &str, start: u64, bytes: u64) {
        let end = start + bytes;
        for used in self.uses.iter().filter(|u| u.start < end && start < u.end) {
            if self.host.at(used.stream) < used.position {
                self.breaches.push(format!(
                    "{call} of [{start:#x}, {end:#x}) while the host does not know work {} of stream {} on [{:#x}, {:#x}) to be complete",
                    used.position, used.stream, used.start, used.end
                ));
            }
        }
        self.uses.retain(|u| u.end <= start || end <= u.start);
        self.ranges.remove(&start);
    }
}

/// Called before a driver call, with no lock held.
pub type Hook = Box<dyn Fn(Call) + Send + Sync>;

/// The device.
pub struct Watched {
    /// What it is around: counts, faults, ticks.
    pub sim: SimDevice,
    book: Mutex<Book>,
    hook: OnceLock<Hook>,
}

impl Watched {
    /// Watches a device.
    pub fn new(sim: SimDevice) -> Self {
        Self { sim, book: Mutex::default(), hook: OnceLock::new() }
    }

    /// Calls `hook` before every plain allocation and every creation of a handle from now on. Once.
    pub fn before_growth(&self, hook: Hook) {
        assert!(self.hook.set(hook).is_ok(), "there is a hook already");
    }

    fn growth(&self, call: Call) {
        if let Some(hook) = self.hook.get() {
            hook(call);
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap()
    }

    /// Memory comes in multiples of this many bytes.
    pub fn sim_granularity(&self) -> u64 {
        self.sim.properties().granularity
    }

    /// A stream with this number.
    pub fn adopt(&self, handle: StreamHandle) {
        self.sim.adopt_stream(handle);
        self.book().stream(handle);
    }

    /// From now on the handle is another stream's. Work of the one that had it goes on.
    pub fn recycle(&self, handle: StreamHandle) {
        let mut book = self.book();
        book.names.remove(&handle);
        book.stream(handle);
    }

    /// Submits work to a stream that uses a range and is complete once the tick counter has reached `until`.
    pub fn work(&self, handle: StreamHandle, address: Address, bytes: u64, until: u64) {
        let mut book = self.book();
        let stream = book.stream(handle);
        let before = book.before(stream);
        book.clocks[stream] = before;
        book.submitted[stream] += 1;
        let position = book.submitted[stream];
        book.uses.push(Use { start: address.0, end: address.0 + bytes, stream, position });
        self.sim.hold_until_tick(handle, until).unwrap();
    }

    /// A range was handed to an owner on a stream: whatever used it before must come before that stream's next work.
    pub fn handed(&self, handle: StreamHandle, address: Address, bytes: u64) -> Result<(), String> {
        let mut book = self.book();
        let stream = book.stream(handle);
        let before = book.before(stream);
        let (start, end) = (address.0, address.0 + bytes);
        for used in book.uses.iter().filter(|u| u.start < end && start < u.end) {
            if before.at(used.stream) < used.position {
                return Err(format!(
                    "[{start:#x}, {end:#x}) was handed to stream {stream}, which does not come after work {} of stream {} on [{:#x}, {:#x})",
                    used.position, used.stream, used.start, used.end
                ));
            }
        }
        let host = book.host.clone();
        book.uses.retain(|u| host.at(u.stream) < u.position);
        Ok(())
    }

    /// What went wrong so far.
    pub fn breaches(&self) -> Vec<String> {
        self.book().breaches.clone()
    }
}

impl Device for Watched {
    forward! {
        ordinal() -> u32;
        properties() -> &DeviceProperties;
        mem_info() -> DriverResult<MemoryInfo>;
        driver_pool_create() -> DriverResult<DriverPoolHandle>;
        driver_pool_destroy(pool: DriverPoolHandle) -> DriverResult<()>;
        driver_pool_figures(pool: DriverPoolHandle) -> DriverResult<DriverPoolFigures>;
        driver_pool_trim(pool: DriverPoolHandle, keep: u64) -> DriverResult<()>;
        address_reserve(bytes: u64) -> DriverResult<Address>;
        address_free(address: Address, bytes: u64) -> DriverResult<()>;
        handle_release(handle: MemoryHandle) -> DriverResult<()>;
        map(address: Address, bytes: u64, handle: MemoryHandle) -> DriverResult<()>;
        set_access(address: Address, bytes: u64) -> DriverResult<()>;
        host_alloc(bytes: u64) -> DriverResult<HostMemory>;
        host_free(memory: HostMemory) -> DriverResult<()>;
        copy_to_host(dst: HostMemory, offset: u64, src: Address, bytes: u64) -> DriverResult<()>;
        copy_from_host(dst: Address, src: HostMemory, offset: u64, bytes: u64) -> DriverResult<()>;
        event_create() -> DriverResult<EventHandle>;
        event_destroy(event: EventHandle) -> DriverResult<()>;
        capture_status(stream: StreamHandle) -> DriverResult<CaptureStatus>;
        capture_frontier(stream: StreamHandle) -> DriverResult<Option<CaptureFrontier>>;
        exchange_capture_mode(mode: CaptureMode) -> DriverResult<CaptureMode>;
        now() -> u64;
    }
    fn mem_alloc(&self, bytes: u64) -> DriverResult<Address> {
        self.growth(Call::MemAlloc);
        let mut book = self.book();
        let address = self.sim.mem_alloc(bytes)?;
        book.ranges.insert(address.0, bytes);
        Ok(address)
    }
    fn mem_free(&self, address: Address) -> DriverResult<()> {
        let mut book = self.book();
        self.sim.mem_free(address)?;
        if let Some(bytes) = book.pooled.remove(&address.0) {
            // Waits for nothing: it comes after what the host knows.
            let host = book.host.clone();
            book.pool_frees.push((address.0, address.0 + bytes, host));
            return Ok(());
        }
        // It has waited for the whole device.
        let Book { host, submitted, .. } = &mut *book;
        submitted.iter().enumerate().for_each(|(stream, n)| host.raise(stream, *n));
        let bytes = book.ranges.get(&address.0).copied().unwrap_or(0);
        book.leaves("a free", address.0, bytes);
        Ok(())
    }
    // The driver orders a block's new stream after the frees that it is made of, and after nothing else.
    fn mem_alloc_async(&self, pool: DriverPoolHandle, bytes: u64, stream: StreamHandle) -> DriverResult<Address> {
        self.growth(Call::MemAllocAsync);
        let mut book = self.book();
        let address = self.sim.mem_alloc_async(pool, bytes, stream)?;
        let (start, end) = (address.0, address.0 + bytes);
        book.pooled.insert(start, bytes);
        let stream = book.stream(stream);
        let Book { clocks, pool_frees, .. } = &mut *book;
        pool_frees.iter().filter(|(s, e, _)| *s < end && start < *e).for_each(|(.., clock)| clocks[stream].join(clock));
        Ok(address)
    }
    fn mem_free_async(&self, address: Address, stream: StreamHandle) -> DriverResult<()> {
        let mut book = self.book();
        self.sim.mem_free_async(address, stream)?;
        let stream = book.stream(stream);
        let before = book.before(stream);
        if let Some(bytes) = book.pooled.remove(&address.0) {
            book.pool_frees.push((address.0, address.0 + bytes, before));
        }
        Ok(())
    }
    fn handle_create(&self, bytes: u64) -> DriverResult<MemoryHandle> {
        self.growth(Call::MemCreate);
        self.sim.handle_create(bytes)
    }
    fn unmap(&self, address: Address, bytes: u64) -> DriverResult<()> {
        let mut book = self.book();
        self.sim.unmap(address, bytes)?;
        book.leaves("an unmap", address.0, bytes);
        Ok(())
    }
    fn event_record(&self, event: EventHandle, handle: StreamHandle) -> DriverResult<()> {
        let mut book = self.book();
        self.sim.event_record(event, handle)?;
        let stream = book.stream(handle);
        let clock = book.before(stream);
        book.events.insert(event, clock);
        Ok(())
    }
    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        let mut book = self.book();
        let complete = self.sim.event_query(event)?;
        if complete {
            let clock = book.events.get(&event).cloned().unwrap_or_default();
            book.host.join(&clock);
        }
        Ok(complete)
    }
    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        let mut book = self.book();
        self.sim.event_synchronize(event)?;
        let clock = book.events.get(&event).cloned().unwrap_or_default();
        book.host.join(&clock);
        Ok(())
    }
    fn stream_wait_event(&self, handle: StreamHandle, event: EventHandle) -> DriverResult<()> {
        let mut book = self.book();
        self.sim.stream_wait_event(handle, event)?;
        let stream = book.stream(handle);
        let clock = book.events.get(&event).cloned().unwrap_or_default();
        book.clocks[stream].join(&clock);
        Ok(())
    }
}

/// The kinds of call that an allocator makes, for tests that fail each in turn.
pub const ALLOCATOR_CALLS: &[Call] = &[
    Call::MemAlloc,
    Call::MemFree,
    Call::MemGetInfo,
    Call::AddressReserve,
    Call::AddressFree,
    Call::MemCreate,
    Call::MemRelease,
    Call::MemMap,
    Call::MemSetAccess,
    Call::MemUnmap,
    Call::EventCreate,
    Call::EventDestroy,
    Call::EventRecord,
    Call::EventQuery,
    Call::EventSynchronize,
    Call::StreamWaitEvent,
    Call::StreamGetCaptureInfo,
    Call::ExchangeCaptureMode,
];
