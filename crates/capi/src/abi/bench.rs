//! Streams and kernels for programs that try the allocator out, on a simulated device or a real one.

use std::ffi::c_void;

use gpupool::device::{Address, Kernel};

use super::allocator::gpupool_allocator;
use super::{check_out, put};
use crate::handles::ALLOCATORS;
use crate::status::{Failure, Status, guard};

/// Makes a non-blocking stream.
///
/// # Safety
///
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_bench_stream_create(allocator: gpupool_allocator, out: *mut *mut c_void) -> Status {
    guard(|| {
        check_out(out)?;
        let stream = ALLOCATORS.get(allocator)?.stream_create()?;
        // SAFETY: the caller says so.
        unsafe { put(out, stream as *mut c_void) }
    })
}

/// Retires and destroys a stream of `gpupool_bench_stream_create`; its work still completes.
///
/// # Safety
///
/// `stream` came from `gpupool_bench_stream_create` and was not destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_bench_stream_destroy(allocator: gpupool_allocator, stream: *mut c_void) -> Status {
    // SAFETY: the caller says so.
    guard(|| unsafe { ALLOCATORS.get(allocator)?.stream_destroy(stream as u64) })
}

/// Waits for all work of a stream.
///
/// # Safety
///
/// As for `gpupool_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_bench_synchronize(allocator: gpupool_allocator, stream: *mut c_void) -> Status {
    // SAFETY: the caller says so.
    guard(|| unsafe { ALLOCATORS.get(allocator)?.stream_synchronize(stream as u64) })
}

/// Submits a kernel that sets every 32-bit word of a range to `value`.
///
/// # Safety
///
/// As for `gpupool_alloc`; the range is memory of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_bench_fill(
    allocator: gpupool_allocator,
    stream: *mut c_void,
    address: *mut c_void,
    bytes: u64,
    value: u32,
) -> Status {
    let kernel = Kernel::Fill { dst: Address(address as u64), bytes, value };
    // SAFETY: the caller says so.
    guard(|| unsafe { ALLOCATORS.get(allocator)?.launch(stream as u64, kernel) })
}

/// Submits a kernel that adds `value` to every 32-bit word of a range.
///
/// # Safety
///
/// As for `gpupool_bench_fill`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_bench_add(
    allocator: gpupool_allocator,
    stream: *mut c_void,
    address: *mut c_void,
    bytes: u64,
    value: u32,
) -> Status {
    let kernel = Kernel::Add { dst: Address(address as u64), bytes, value };
    // SAFETY: the caller says so.
    guard(|| unsafe { ALLOCATORS.get(allocator)?.launch(stream as u64, kernel) })
}

/// Submits a kernel that copies a range to another that does not overlap it.
///
/// # Safety
///
/// As for `gpupool_bench_fill`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_bench_copy(
    allocator: gpupool_allocator,
    stream: *mut c_void,
    to: *mut c_void,
    from: *mut c_void,
    bytes: u64,
) -> Status {
    let kernel = Kernel::Copy { dst: Address(to as u64), src: Address(from as u64), bytes };
    // SAFETY: the caller says so.
    guard(|| unsafe { ALLOCATORS.get(allocator)?.launch(stream as u64, kernel) })
}

/// Waits for a stream, then copies device memory to the host.
///
/// # Safety
///
/// As for `gpupool_bench_fill`; `into` is writable for `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_bench_read(
    allocator: gpupool_allocator,
    stream: *mut c_void,
    from: *mut c_void,
    into: *mut u8,
    bytes: usize,
) -> Status {
    guard(|| {
        if into.is_null() || isize::try_from(bytes).is_err() {
            return Err(Failure::argument("there is nowhere to read into"));
        }
        // SAFETY: the caller says that it is writable for as many bytes; nobody else uses it during the call. What it held does not
        // matter: it is bytes.
        let into = unsafe { std::slice::from_raw_parts_mut(into, bytes) };
        // SAFETY: the caller says so.
        unsafe { ALLOCATORS.get(allocator)?.read(stream as u64, Address(from as u64), into) }
    })
}
