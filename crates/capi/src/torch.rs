//! The functions that PyTorch's `CUDAPluggableAllocator` calls, with the signatures that it documents or was seen to use. The Python module
//! `python/gpupool_torch.py` sets them.
//!
//! One allocator a device, made at the first use of it. Memory that runs out is null, with the last error saying where it is: PyTorch does
//! not look, so the C++ shim that the Python module builds does, and throws.

use std::ffi::{c_char, c_int, c_void};
use std::io::Write as _;
use std::sync::{Arc, LazyLock, OnceLock};

use gpupool::device::Address;
use gpupool::sim::{SimConfig, SimWorld};
use gpupool::{CaptureRegistry, Config};
use gpupool_cuda_device::CudaDevice;
use parking_lot::Mutex;

use crate::abi::allocator::gpupool_allocator;
use crate::abi::pools::Pool;
use crate::abi::{check_out, put, text};
use crate::handles::ALLOCATORS;
use crate::instance::{Instance, Of};
use crate::scopes::{Release, StreamFilter, StreamTest};
use crate::status::{Failure, Status, caught, guard};

/// Devices of the simulated world that tests run on.
const SIMULATED: u32 = 2;

/// What devices are opened with.
#[derive(Default)]
struct Setup {
    simulated: Option<SimWorld>,
    settings: String,
}

static SETUP: LazyLock<Mutex<Setup>> = LazyLock::new(Mutex::default);

/// The allocator of a device, for as long as the process lives.
struct Serving {
    handle: gpupool_allocator,
    instance: Arc<dyn Instance>,
}

/// By ordinal.
static SERVING: [OnceLock<Serving>; 64] = [const { OnceLock::new() }; 64];

/// The allocator of a device. The first request opens it.
#[inline]
fn of(device: c_int) -> Result<&'static Serving, Failure> {
    let known = usize::try_from(device).ok().and_then(|ordinal| SERVING.get(ordinal));
    let slot = known.ok_or_else(|| Failure::argument(format!("there is no device {device}")))?;
    slot.get().map_or_else(|| open(device.unsigned_abs(), slot), Ok)
}

#[inline(never)]
fn open(ordinal: u32, slot: &'static OnceLock<Serving>) -> Result<&'static Serving, Failure> {
    let setup = SETUP.lock();
    if let Some(opened) = slot.get() {
        return Ok(opened);
    }
    let config = Config::parse_settings(&setup.settings)?;
    let instance: Arc<dyn Instance> = match &setup.simulated {
        Some(world) => {
            let none = || Failure::new(Status::Unavailable, format!("there is no simulated device {ordinal}"));
            Arc::new(Of::new(Arc::new(world.device(ordinal).ok_or_else(none)?), config, CaptureRegistry::global())?)
        }
        None => Arc::new(Of::new(Arc::new(CudaDevice::open(ordinal)?), config, CaptureRegistry::global())?),
    };
    let handle = ALLOCATORS.insert(Arc::clone(&instance));
    Ok(slot.get_or_init(|| Serving { handle, instance }))
}

fn all() -> impl Iterator<Item = &'static dyn Instance> {
    SERVING.iter().filter_map(|slot| slot.get()).map(|serving| &*serving.instance)
}

/// A hook that returns nothing has failed: PyTorch cannot be told, so the user is.
fn report(what: &str, status: Status) {
    if status != Status::Ok {
        let last = crate::status::last_text();
        // A closed standard error is no reason to fail.
        let _nobody_listens = writeln!(std::io::stderr(), "gpupool: {what}: {last}");
    }
}

/// Chooses what the hooks below work on, before the first of them is called: `cuda`, or `sim` for a test without a GPU; with
/// settings as for `gpupool_create`. Fails once an allocator is in use.
///
/// # Safety
///
/// Both are null or zero-terminated strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_torch_configure(device_kind: *const c_char, settings: *const c_char) -> Status {
    guard(|| {
        // SAFETY: the caller says so of both.
        let (kind, settings) = unsafe { (text(device_kind)?, text(settings)?) };
        Config::parse_settings(settings)?;
        let simulated = match kind {
            "" | "cuda" => None,
            "sim" => Some(SimWorld::new(SIMULATED, SimConfig::default())),
            other => return Err(Failure::argument(format!("`{other}` is no kind of device: use cuda or sim"))),
        };
        let mut setup = SETUP.lock();
        if all().next().is_some() {
            return Err(Failure::argument("an allocator is in use already: configure before the first allocation"));
        }
        setup.simulated = simulated;
        settings.clone_into(&mut setup.settings);
        Ok(())
    })
}

/// The allocator that serves a device, for statistics, snapshots and limits. It must not be destroyed.
///
/// # Safety
///
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_torch_allocator(device: c_int, out: *mut gpupool_allocator) -> Status {
    guard(|| {
        check_out(out)?;
        // SAFETY: the caller says so.
        unsafe { put(out, of(device)?.handle) }
    })
}

/// PyTorch's `malloc`: null for zero bytes, and null with a last error when it fails.
///
/// # Safety
///
/// `stream` is a stream of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_torch_malloc(size: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    // SAFETY: the caller says so.
    let block = caught(|| unsafe { of(device)?.instance.alloc(size as u64, stream as u64) });
    block.map_or(std::ptr::null_mut(), |address| address.0 as *mut c_void)
}

/// PyTorch's `free`, with what the block was allocated with. A pointer that is not a live block changes nothing and is reported on
/// standard error.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_torch_free(ptr: *mut c_void, _size: usize, device: c_int, _stream: *mut c_void) {
    report("free", guard(|| of(device)?.instance.free(Address(ptr as u64))));
}

/// PyTorch's `init`: nothing to do, since a device is opened when it is first used.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_torch_init(_device_count: c_int) {}

/// PyTorch's `reset`, which is `empty_cache` on every device in use.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_torch_reset() {
    for instance in all() {
        report("empty_cache", guard(|| instance.empty_cache().map(drop)));
    }
}

/// PyTorch's memory fraction.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_torch_memory_fraction(fraction: f64, device: c_int) {
    report("set_per_process_memory_fraction", guard(|| of(device)?.instance.set_memory_fraction(fraction)));
}

/// PyTorch's base allocation: the start of the driver allocation that `ptr` lies in, and its bytes; under `policy=pages` a block may
/// span several. `ptr` itself if it is not ours.
///
/// # Safety
///
/// `size` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_torch_base_alloc(ptr: *mut c_void, size: *mut usize) -> *mut c_void {
    let found = caught(|| Ok(all().find_map(|i| i.base_allocation(Address(ptr as u64)).ok())));
    let Ok(Some((base, bytes))) = found else { return ptr };
    if !size.is_null() {
        // SAFETY: not null, so writable, as the caller says.
        unsafe { size.write_unaligned(bytes as usize) };
    }
    base.0 as *mut c_void
}

/// PyTorch's `record_stream`.
///
/// # Safety
///
/// `stream` is a stream of the device that `ptr` is on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_torch_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    let status = guard(|| {
        let address = Address(ptr as u64);
        // A tensor of no bytes has no block.
        if address.is_null() {
            return Ok(());
        }
        let owner = all().find(|i| i.block_bytes(address).is_ok());
        let owner = owner.ok_or(gpupool::FreeError::NotLive { address })?;
        // SAFETY: the caller says so.
        unsafe { owner.record_stream(address, stream as u64) }
    });
    report("record_stream", status);
}

/// PyTorch's begin, with the filter as a C function (a `std::function` is C++'s: the shim wraps it). Without a filter the pool gets the
/// requests of streams that capture.
///
/// # Safety
///
/// As for `gpupool_pool_begin`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_torch_begin_allocate_to_pool(
    device: c_int,
    pool: Pool,
    filter: StreamFilter,
    context: *mut c_void,
    release: Release,
) -> Status {
    // SAFETY: the caller says so.
    let test = unsafe { StreamTest::new(filter, context, release) };
    guard(|| of(device)?.instance.pool_begin(pool.into(), test))
}

/// PyTorch's end.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_torch_end_allocate_to_pool(device: c_int, pool: Pool) {
    report("end_allocate_to_pool", guard(|| of(device)?.instance.pool_end(pool.into())));
}

/// PyTorch's release: from now on nothing of the pool is reused or unmapped until all work submitted so far is complete.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_torch_release_pool(device: c_int, pool: Pool) {
    report("release_pool", guard(|| of(device)?.instance.pool_release(pool.into())));
}
