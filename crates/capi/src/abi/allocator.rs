//! Creating, configuring and destroying allocators.

use std::ffi::c_char;
use std::sync::Arc;

use gpupool::sim::{SimConfig, SimDevice};
use gpupool::{CaptureRegistry, Config};
use gpupool_cuda_device::{CudaDevice, Unavailable};

use super::{check_out, put, text};
use crate::handles::ALLOCATORS;
use crate::instance::{Instance, Of};
use crate::status::{Failure, Status, guard};

/// Bytes of a simulated GPU at most: several times the memory of any GPU.
const MOST_SIMULATED: u64 = 1 << 40;

/// Names an allocator. 0 names none.
#[allow(non_camel_case_types)]
pub type gpupool_allocator = u64;

impl From<Unavailable> for Failure {
    fn from(e: Unavailable) -> Self {
        Self::new(Status::Unavailable, e.to_string())
    }
}

/// `sim`, `sim:BYTES`, `cuda`, `cuda:N`.
pub(crate) fn open(device: &str, config: Config) -> Result<Arc<dyn Instance>, Failure> {
    let (kind, detail) = device.split_once(':').unwrap_or((device, ""));
    let number = |default: u64| match detail {
        "" => Ok(default),
        digits => digits.parse().map_err(|_| Failure::argument(format!("`{digits}` in `{device}` is not a number"))),
    };
    match kind {
        "sim" => {
            let defaults = SimConfig::default();
            let capacity = number(defaults.capacity)?;
            if !(1..=MOST_SIMULATED).contains(&capacity) {
                return Err(Failure::argument(format!("`{device}`: a simulated GPU has 1 byte to 1 TiB of memory")));
            }
            let device = SimDevice::new(defaults.with_capacity(capacity));
            Ok(Arc::new(Of::new(Arc::new(device), config, Arc::default())?))
        }
        "cuda" => {
            let ordinal = u32::try_from(number(0)?).unwrap_or(u32::MAX);
            Ok(Arc::new(Of::new(Arc::new(CudaDevice::open(ordinal)?), config, CaptureRegistry::global())?))
        }
        _ => Err(Failure::argument(format!("`{device}` is no device: use sim, sim:BYTES, cuda or cuda:N"))),
    }
}

/// The version of this library's ABI: 1000 times the major number, and the minor one. The major number changes when a program must be
/// compiled again.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_abi_version() -> u32 {
    1_000
}

/// Creates an allocator. `device` is `sim` or `sim:BYTES` (a simulated GPU, for tests), `cuda` or `cuda:N`. `settings` are
/// `name=value` pairs separated by `;`, such as `policy=segments; memory_limit=8GiB`; null or empty takes the defaults.
///
/// # Safety
///
/// `device` and `settings` are null or zero-terminated strings, `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_create(
    device: *const c_char,
    settings: *const c_char,
    out: *mut gpupool_allocator,
) -> Status {
    guard(|| {
        check_out(out)?;
        // SAFETY: the caller says so of both.
        let (device, settings) = unsafe { (text(device)?, text(settings)?) };
        let instance = open(device, Config::parse_settings(settings)?)?;
        // SAFETY: the caller says so.
        unsafe { put(out, ALLOCATORS.insert(instance)) }
    })
}

/// Destroys an allocator. Its live blocks are freed, so no work may use them any more, and its scopes closed; memory of graphs that still
/// exist, or are being captured, stays until they are gone.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_destroy(allocator: gpupool_allocator) -> Status {
    guard(|| {
        ALLOCATORS.remove(allocator)?.close();
        Ok(())
    })
}

/// Gives every wholly free segment back to the driver. Waits for freed blocks that other streams still use. Writes the bytes given
/// back to `released` unless it is null.
///
/// # Safety
///
/// `released` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_empty_cache(allocator: gpupool_allocator, released: *mut u64) -> Status {
    guard(|| {
        let bytes = ALLOCATORS.get(allocator)?.empty_cache()?;
        // SAFETY: the caller says so.
        if released.is_null() { Ok(()) } else { unsafe { put(released, bytes) } }
    })
}

/// As `gpupool_empty_cache`, but waits for nothing: what the device may still use stays.
///
/// # Safety
///
/// `released` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_trim(allocator: gpupool_allocator, released: *mut u64) -> Status {
    guard(|| {
        let bytes = ALLOCATORS.get(allocator)?.trim()?;
        // SAFETY: the caller says so.
        if released.is_null() { Ok(()) } else { unsafe { put(released, bytes) } }
    })
}

/// Limits the memory held to a fraction of the device's, 0 to 1; 1 takes any limit off.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_set_memory_fraction(allocator: gpupool_allocator, fraction: f64) -> Status {
    guard(|| ALLOCATORS.get(allocator)?.set_memory_fraction(fraction))
}

/// Limits the memory held to `bytes`; UINT64_MAX takes any limit off.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_set_memory_limit(allocator: gpupool_allocator, bytes: u64) -> Status {
    guard(|| {
        ALLOCATORS.get(allocator)?.set_memory_limit((bytes != u64::MAX).then_some(bytes));
        Ok(())
    })
}

/// Bytes that requests could still be served from: free with the driver, and cached in wholly free segments.
///
/// # Safety
///
/// `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_available(allocator: gpupool_allocator, bytes: *mut u64) -> Status {
    guard(|| {
        let available = ALLOCATORS.get(allocator)?.available()?;
        // SAFETY: the caller says so.
        unsafe { put(bytes, available) }
    })
}
