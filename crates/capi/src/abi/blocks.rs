//! Blocks and streams.

use std::ffi::c_void;

use gpupool::device::Address;

use super::allocator::gpupool_allocator;
use super::{check_out, put};
use crate::handles::ALLOCATORS;
use crate::status::{Status, guard};

/// Serves a block of at least `bytes` on `stream`, aligned to 512, and writes its address to `out`. Zero bytes give null. Work submitted
/// to `stream` before the block is freed never meets its next owner's.
///
/// # Safety
///
/// `stream` is a stream of the allocator's device, and stays one until `gpupool_stream_retired`; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_alloc(
    allocator: gpupool_allocator,
    bytes: u64,
    stream: *mut c_void,
    out: *mut *mut c_void,
) -> Status {
    guard(|| {
        check_out(out)?;
        // SAFETY: the caller says so.
        let address = unsafe { ALLOCATORS.get(allocator)?.alloc(bytes, stream as u64)? };
        // SAFETY: the caller says so.
        unsafe { put(out, address.0 as *mut c_void) }
    })
}

/// Frees a block, in the order of its own stream. Null is fine. Anything that is not the start of a live block of this allocator is
/// GPUPOOL_STATUS_NOT_LIVE and changes nothing.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_free(allocator: gpupool_allocator, address: *mut c_void) -> Status {
    guard(|| ALLOCATORS.get(allocator)?.free(Address(address as u64)))
}

/// Says that work on `stream` uses the block, too: once freed, it becomes free only after the work submitted there by then.
///
/// # Safety
///
/// As for `gpupool_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_record_stream(
    allocator: gpupool_allocator,
    address: *mut c_void,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller says so.
    guard(|| unsafe { ALLOCATORS.get(allocator)?.record_stream(Address(address as u64), stream as u64) })
}

/// Bytes of a live block: what was asked for, rounded up, or more.
///
/// # Safety
///
/// `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_block_size(
    allocator: gpupool_allocator,
    address: *mut c_void,
    bytes: *mut u64,
) -> Status {
    guard(|| {
        let size = ALLOCATORS.get(allocator)?.block_bytes(Address(address as u64))?;
        // SAFETY: the caller says so.
        unsafe { put(bytes, size) }
    })
}

/// Start and bytes of the driver allocation that an address lies in. Under `policy=pages` a block may span several, and another address of it
/// tells another; what is registered or exported comes from a pool of `gpupool_pool_whole_segments`, or from `policy=segments`.
///
/// # Safety
///
/// `base` and `bytes` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_base_allocation(
    allocator: gpupool_allocator,
    address: *mut c_void,
    base: *mut *mut c_void,
    bytes: *mut u64,
) -> Status {
    guard(|| {
        check_out(base)?;
        check_out(bytes)?;
        let (start, size) = ALLOCATORS.get(allocator)?.base_allocation(Address(address as u64))?;
        // SAFETY: the caller says so of both.
        unsafe {
            put(base, start.0 as *mut c_void)?;
            put(bytes, size)
        }
    })
}

/// Call it before a stream is destroyed: its free memory is given to all once its last work is done, and a new stream of the same
/// number is another stream. Does not wait.
///
/// # Safety
///
/// As for `gpupool_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_stream_retired(allocator: gpupool_allocator, stream: *mut c_void) -> Status {
    // SAFETY: the caller says so.
    guard(|| unsafe { ALLOCATORS.get(allocator)?.retire_stream(stream as u64) })
}
