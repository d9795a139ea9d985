//! The contract of a device, as checks that any device can be put under: one suite, and the simulated and the real device must both pass it.
//!
//! Each check is told a new device. What the simulated one is known to refuse because nobody measured it stands in the *survey*
//! ([`permissions`]): on a real device it says what happens.

pub mod captures;
pub mod driver_pools;
pub mod graphs;
pub mod memory;
pub mod permissions;
pub mod streams;
pub mod subject;

use gpupool_device::{Address, Device, DriverResult, Kernel, StreamHandle, StreamKind, Workbench};
pub use subject::{Real, Simulated, Subject};

/// Two MiB: a page of virtual memory, on both devices.
pub const PAGE: u64 = 2 << 20;

/// What a check needs beyond a device. Tools that watch a GPU's memory accesses take some of it away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Needs {
    /// Nothing.
    Nothing,
    /// Work can be held at a gate: a launch comes back before its kernel is done.
    HeldWork,
    /// New virtual memory is read on purpose, since the driver zeroes it.
    ZeroedMemory,
    /// What is free on the device is compared as memory is mapped and unmapped.
    Figures,
    /// Hundreds of captures are begun in one process, with much left behind.
    ManyCaptures,
}

/// One check.
pub struct Check<S> {
    /// What it holds.
    pub name: &'static str,
    /// Panics if the device does not.
    pub run: fn(&S),
    /// What it needs.
    pub needs: Needs,
}

/// A check that needs nothing.
fn check<S>(name: &'static str, run: fn(&S)) -> Check<S> {
    Check { name, run, needs: Needs::Nothing }
}

/// A check that holds work at a gate.
fn holding<S>(name: &'static str, run: fn(&S)) -> Check<S> {
    Check { name, run, needs: Needs::HeldWork }
}

/// A check that reads memory which only the driver has zeroed.
fn zeroed<S>(name: &'static str, run: fn(&S)) -> Check<S> {
    Check { name, run, needs: Needs::ZeroedMemory }
}

/// A check that compares what is free on the device while it maps and unmaps.
fn counting<S>(name: &'static str, run: fn(&S)) -> Check<S> {
    Check { name, run, needs: Needs::Figures }
}

/// All checks.
pub fn checks<S: Subject>() -> Vec<Check<S>> {
    let parts = [
        memory::checks(),
        driver_pools::checks(),
        streams::checks(),
        captures::checks(),
        graphs::checks(),
        permissions::checks(),
    ];
    parts.into_iter().flatten().collect()
}

/// The code of a failure; 0 for success.
pub fn code_of<T>(result: DriverResult<T>) -> u32 {
    result.map_or_else(|e| e.code, |_| 0)
}

/// A stream that has nothing to do with the legacy one.
pub fn stream<D: Workbench>(d: &D) -> StreamHandle {
    d.stream_create(StreamKind::NonBlocking).unwrap()
}

/// Memory behind addresses, ready for kernels. What a check leaves behind goes with the process.
pub fn mapped<D: Device>(d: &D, bytes: u64) -> Address {
    let (at, handle) = (d.address_reserve(bytes).unwrap(), d.handle_create(bytes).unwrap());
    d.map(at, bytes, handle).unwrap();
    d.handle_release(handle).unwrap();
    d.set_access(at, bytes).unwrap();
    at
}

/// Undoes [`mapped`].
pub fn unmapped<D: Device>(d: &D, at: Address, bytes: u64) {
    d.unmap(at, bytes).unwrap();
    d.address_free(at, bytes).unwrap();
}

/// Adds to a word.
pub fn add(dst: Address, value: u32) -> Kernel {
    Kernel::Add { dst, bytes: 4, value }
}

/// Sets a word.
pub fn set(dst: Address, value: u32) -> Kernel {
    Kernel::Fill { dst, bytes: 4, value }
}

/// Copies a word.
pub fn copy(dst: Address, src: Address) -> Kernel {
    Kernel::Copy { dst, src, bytes: 4 }
}

/// Words, after everything submitted to the stream.
pub fn words<D: Workbench>(d: &D, stream: StreamHandle, at: Address, count: usize) -> Vec<u32> {
    let mut bytes = vec![0; count * 4];
    d.read(stream, at, &mut bytes).unwrap();
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|w| u32::from_le_bytes(*w)).collect()
}

/// One word.
pub fn word<D: Workbench>(d: &D, stream: StreamHandle, at: Address) -> u32 {
    words(d, stream, at, 1)[0]
}

/// 64 zeroed bytes of plain memory.
pub fn plain<D: Workbench>(d: &D) -> Address {
    let at = d.mem_alloc(4096).unwrap();
    let s = stream(d);
    d.launch(s, Kernel::Fill { dst: at, bytes: 4096, value: 0 }).unwrap();
    d.stream_synchronize(s).unwrap();
    d.stream_destroy(s).unwrap();
    at
}
