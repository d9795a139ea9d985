//! Private pools, and scopes that lead to them.

use std::ffi::c_void;

use gpupool::PoolId;

use super::allocator::gpupool_allocator;
use super::{check_out, put};
use crate::handles::ALLOCATORS;
use crate::scopes::{Release, StreamFilter, StreamTest};
use crate::status::{Status, guard};

/// A pool's name: two numbers of which one is zero. Both zero name the default pool.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pool {
    /// Counts the pools of captures.
    pub capture: u64,
    /// Counts the pools that users make.
    pub user: u64,
}

impl From<Pool> for PoolId {
    fn from(pool: Pool) -> Self {
        Self(pool.capture, pool.user)
    }
}

impl From<PoolId> for Pool {
    fn from(id: PoolId) -> Self {
        Self { capture: id.0, user: id.1 }
    }
}

/// Makes a private pool with one user, and writes its name to `out`.
///
/// # Safety
///
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_pool_create(allocator: gpupool_allocator, out: *mut Pool) -> Status {
    guard(|| {
        check_out(out)?;
        let id = PoolId::fresh();
        ALLOCATORS.get(allocator)?.pool_create(id)?;
        // SAFETY: the caller says so.
        unsafe { put(out, id.into()) }
    })
}

/// From now on each segment that this pool takes is one driver allocation, whatever the policy: for memory that is registered with other
/// libraries or exported, which has to lie in one. Say it before the pool's first request: under `policy=pages` it is an error once
/// the pool holds memory in pieces.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_pool_whole_segments(allocator: gpupool_allocator, pool: Pool) -> Status {
    guard(|| ALLOCATORS.get(allocator)?.pool_whole_segments(pool.into()))
}

/// Sends requests to a pool until `gpupool_pool_end`; makes the pool if there is none, and counts one user more. `filter` is asked which
/// streams; without one it is those that capture. `release`, unless it is null, is called with `context` once the scope is closed, or if this call fails.
///
/// # Safety
///
/// `filter` and `release` may be called with `context` from any thread, several at once; they neither throw nor call gpupool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_pool_begin(
    allocator: gpupool_allocator,
    pool: Pool,
    filter: StreamFilter,
    context: *mut c_void,
    release: Release,
) -> Status {
    // SAFETY: the caller says so.
    let test = unsafe { StreamTest::new(filter, context, release) };
    guard(|| ALLOCATORS.get(allocator)?.pool_begin(pool.into(), test))
}

/// Closes the newest scope of a pool (of the calling thread, if it has one). The pool keeps its user.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_pool_end(allocator: gpupool_allocator, pool: Pool) -> Status {
    guard(|| ALLOCATORS.get(allocator)?.pool_end(pool.into()))
}

/// One user of a pool less. After the last one its memory goes elsewhere only once everything submitted so far, on any stream, is done:
/// a graph of it may be running. Does not wait.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_pool_release(allocator: gpupool_allocator, pool: Pool) -> Status {
    guard(|| ALLOCATORS.get(allocator)?.pool_release(pool.into()))
}

/// Bytes that a pool has reserved, and that live blocks of it take.
///
/// # Safety
///
/// `reserved` and `allocated` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_pool_bytes(
    allocator: gpupool_allocator,
    pool: Pool,
    reserved: *mut i64,
    allocated: *mut i64,
) -> Status {
    guard(|| {
        check_out(reserved)?;
        check_out(allocated)?;
        let bytes = ALLOCATORS.get(allocator)?.pool_bytes(pool.into())?;
        // SAFETY: the caller says so of both.
        unsafe {
            put(reserved, bytes.0)?;
            put(allocated, bytes.1)
        }
    })
}
