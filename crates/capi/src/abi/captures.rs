//! Captures, graphs and launches.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock};

use gpupool::PoolId;
use gpupool::device::CaptureMode as Mode;
use parking_lot::Mutex;

use super::allocator::gpupool_allocator;
use super::pools::Pool;
use super::{check_out, put};
use crate::handles::{ALLOCATORS, EXECUTABLES, GRAPHS, HOLDS, fresh};
use crate::instance::{AdoptedCapture, OpenCapture};
use crate::status::{Failure, Status, guard};

/// Names a capture under way.
#[allow(non_camel_case_types)]
pub type gpupool_capture = u64;
/// Names a captured graph.
#[allow(non_camel_case_types)]
pub type gpupool_graph = u64;
/// Names an executable graph.
#[allow(non_camel_case_types)]
pub type gpupool_exec = u64;
/// Names what keeps the memory of an adopted capture's graph where it is.
#[allow(non_camel_case_types)]
pub type gpupool_hold = u64;

/// Capture mode: calls that a capture cannot contain fail, from any thread. The allocator's own are permitted in every mode.
pub const GPUPOOL_CAPTURE_GLOBAL: u32 = 0;
/// Capture mode: such calls fail from the capturing thread.
pub const GPUPOOL_CAPTURE_THREAD_LOCAL: u32 = 1;
/// Capture mode: nothing is watched.
pub const GPUPOOL_CAPTURE_RELAXED: u32 = 2;

fn mode(number: u32) -> Result<Mode, Failure> {
    match number {
        GPUPOOL_CAPTURE_GLOBAL => Ok(Mode::Global),
        GPUPOOL_CAPTURE_THREAD_LOCAL => Ok(Mode::ThreadLocal),
        GPUPOOL_CAPTURE_RELAXED => Ok(Mode::Relaxed),
        _ => Err(Failure::argument(format!("{number} is no capture mode: use GPUPOOL_CAPTURE_GLOBAL or another"))),
    }
}

/// What a capture became.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GraphInfo {
    /// The pool that its memory is in.
    pub pool: Pool,
    /// Nodes in all.
    pub nodes: u64,
    /// Nodes that allocate or free memory when the graph runs: recorded by others. Such a graph cannot be launched twice.
    pub memory_nodes: u64,
}

thread_local! {
    /// The captures that this thread began: the driver wants them ended by it.
    static OPEN: RefCell<HashMap<u64, Box<dyn OpenCapture>>> = RefCell::new(HashMap::new());
}

/// Captures that others began; no rule ties them to a thread.
static ADOPTED: LazyLock<Mutex<HashMap<u64, Box<dyn AdoptedCapture>>>> = LazyLock::new(Mutex::default);

fn no_capture(handle: u64) -> Failure {
    let text =
        format!("handle {handle} names no capture of this thread: one is ended once, by the thread that began it");
    Failure::new(Status::UnknownHandle, text)
}

fn thread_ends<E>(_: E) -> Failure {
    Failure::new(Status::Capture, "a thread that is ending can neither begin nor end captures")
}

fn take_open(handle: u64) -> Result<Box<dyn OpenCapture>, Failure> {
    let taken = OPEN.try_with(|open| open.borrow_mut().remove(&handle)).map_err(thread_ends)?;
    taken.ok_or_else(|| no_capture(handle))
}

fn choice(pool: Pool) -> Option<PoolId> {
    (pool != Pool::default()).then(|| pool.into())
}

/// Begins to capture what is submitted to `stream`. Requests on it, and on every stream that joins, are served from `pool`, or from a
/// fresh one if that is zero. Graphs may share a pool: their launches are kept from overlapping. `mode_number` is one of
/// GPUPOOL_CAPTURE_GLOBAL, GPUPOOL_CAPTURE_THREAD_LOCAL and GPUPOOL_CAPTURE_RELAXED.
///
/// # Safety
///
/// As for `gpupool_alloc`; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_capture_begin(
    allocator: gpupool_allocator,
    stream: *mut c_void,
    pool: Pool,
    mode_number: u32,
    out: *mut gpupool_capture,
) -> Status {
    guard(|| {
        check_out(out)?;
        let (instance, mode) = (ALLOCATORS.get(allocator)?, mode(mode_number)?);
        OPEN.try_with(|_| ()).map_err(thread_ends)?;
        // SAFETY: the caller says so.
        let capture = unsafe { instance.begin_capture(stream as u64, choice(pool), mode)? };
        let handle = fresh();
        OPEN.try_with(|open| open.borrow_mut().insert(handle, capture)).map_err(thread_ends)?;
        // SAFETY: the caller says so.
        unsafe { put(out, handle) }
    })
}

/// Ends a capture and writes its graph to `out`. Whatever this returns the capture is over, but for an unknown handle and a null `out`.
///
/// # Safety
///
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_capture_end(capture: gpupool_capture, out: *mut gpupool_graph) -> Status {
    guard(|| {
        check_out(out)?;
        let graph = take_open(capture)?.end()?;
        // SAFETY: the caller says so.
        unsafe { put(out, GRAPHS.insert(graph)) }
    })
}

/// Ends a capture whose graph nobody wants: stream, routing and pool are as they were before.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_capture_abandon(capture: gpupool_capture) -> Status {
    guard(|| take_open(capture).map(drop))
}

/// The pool that a capture of this thread draws from.
///
/// # Safety
///
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_capture_pool(capture: gpupool_capture, out: *mut Pool) -> Status {
    guard(|| {
        let pool = OPEN.try_with(|open| open.borrow().get(&capture).map(|c| c.pool())).map_err(thread_ends)?;
        // SAFETY: the caller says so.
        unsafe { put(out, pool.ok_or_else(|| no_capture(capture))?.into()) }
    })
}

/// Gives a capture that someone else began on `stream` a pool (a fresh one if `pool` is zero). Close it with `gpupool_adopted_finish` once
/// the capture has ended. `used` receives the pool unless it is null.
///
/// # Safety
///
/// As for `gpupool_alloc`; `out` and `used` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_capture_adopt(
    allocator: gpupool_allocator,
    stream: *mut c_void,
    pool: Pool,
    out: *mut gpupool_capture,
    used: *mut Pool,
) -> Status {
    guard(|| {
        check_out(out)?;
        // SAFETY: the caller says so.
        let adopted = unsafe { ALLOCATORS.get(allocator)?.adopt_capture(stream as u64, choice(pool))? };
        let (handle, pool) = (fresh(), adopted.pool());
        ADOPTED.lock().insert(handle, adopted);
        if !used.is_null() {
            // SAFETY: the caller says so.
            unsafe { put(used, pool.into())? };
        }
        // SAFETY: the caller says so.
        unsafe { put(out, handle) }
    })
}

/// An adopted capture has ended. Keep the hold for as long as its graph, or anything made from it, can run.
///
/// # Safety
///
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_adopted_finish(capture: gpupool_capture, out: *mut gpupool_hold) -> Status {
    guard(|| {
        check_out(out)?;
        let adopted = ADOPTED.lock().remove(&capture).ok_or_else(|| no_capture(capture))?;
        // SAFETY: the caller says so.
        unsafe { put(out, HOLDS.insert(Arc::new(adopted.finish()))) }
    })
}

/// The graph of an adopted capture is gone and its last launch is complete.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_hold_release(hold: gpupool_hold) -> Status {
    guard(|| HOLDS.remove(hold).map(drop))
}

/// What a capture became.
///
/// # Safety
///
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_graph_get_info(graph: gpupool_graph, out: *mut GraphInfo) -> Status {
    guard(|| {
        let graph = GRAPHS.get(graph)?;
        let (nodes, memory_nodes) = graph.nodes();
        let info = GraphInfo { pool: graph.pool().into(), nodes: nodes as u64, memory_nodes: memory_nodes as u64 };
        // SAFETY: the caller says so.
        unsafe { put(out, info) }
    })
}

/// Makes a graph executable.
///
/// # Safety
///
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_graph_instantiate(graph: gpupool_graph, out: *mut gpupool_exec) -> Status {
    guard(|| {
        check_out(out)?;
        let exec = GRAPHS.get(graph)?.instantiate()?;
        // SAFETY: the caller says so.
        unsafe { put(out, EXECUTABLES.insert(exec)) }
    })
}

/// Destroys a graph. Executables of it stay; its memory stays as long as one of them, or a launch, exists. Neither waits nor fails.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_graph_destroy(graph: gpupool_graph) -> Status {
    guard(|| GRAPHS.remove(graph).map(drop))
}

/// Submits one run to `stream`. Launches of graphs that share a pool are ordered on the device.
///
/// # Safety
///
/// As for `gpupool_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_exec_launch(exec: gpupool_exec, stream: *mut c_void) -> Status {
    // SAFETY: the caller says so.
    guard(|| unsafe { EXECUTABLES.get(exec)?.launch(stream as u64) })
}

/// Destroys an executable; a launch of it still completes. Neither waits nor fails.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_exec_destroy(exec: gpupool_exec) -> Status {
    guard(|| EXECUTABLES.remove(exec).map(drop))
}
