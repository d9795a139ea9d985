//! The entry points that we serve, under the driver's names. Everything else the loader finds in the driver, which this library needs.
//!
//! What may be promised about arguments is what the CUDA Driver API says of the function of that name: the program that calls us
//! believes that it calls the driver. Pointers that are null are left to the driver to refuse.
#![allow(non_snake_case)]

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use gpupool::device::{Address, StreamHandle, code};

use crate::blocks::Answer;
use crate::process::{Context, context_ends, current, of_stream, one_that, primary_ends, primary_released};
use crate::real;

/// `CUDA_ERROR_NOT_FOUND`: the driver behind us does not have the function.
const NOT_FOUND: c_int = 500;
/// `CU_GRAPH_NODE_TYPE_GRAPH`.
const CHILD_GRAPH: c_int = 4;
/// `CU_GRAPH_NODE_TYPE_CONDITIONAL`.
const CONDITIONAL: c_int = 13;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` and the three after it.
const POOL_FIGURES: std::ops::RangeInclusive<c_int> = 5..=8;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH` and `CU_MEMPOOL_ATTR_USED_MEM_HIGH`.
const POOL_PEAKS: [c_int; 2] = [6, 8];

type Forward<'a> = &'a dyn Fn() -> c_int;

/// The stream that a call of the per-thread-default-stream kind means.
fn own(stream: *mut c_void) -> u64 {
    if stream.is_null() { StreamHandle::PER_THREAD.0 } else { stream as u64 }
}

/// Does `call`. No panic crosses into the program: what was thrown is the driver's unknown error.
fn shielded(call: impl FnOnce() -> c_int) -> c_int {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
        std::mem::forget(payload);
        say!("gpupool: a fault of ours was caught at the driver's border; please report it");
        code::UNKNOWN.cast_signed()
    })
}

macro_rules! entry_points {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) |$forward:ident| $body:block)*) => {
        /// The names of what is served here, with our functions.
        fn all() -> Vec<(&'static str, *mut c_void)> {
            vec![$((concat!(stringify!($name), "\0"), $name as *mut c_void)),*]
        }
    $(
        $(#[$doc])*
        ///
        /// # Safety
        ///
        /// As the CUDA Driver API says of the function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            static REAL: OnceLock<Option<unsafe extern "C" fn($($type),*) -> c_int>> = OnceLock::new();
            // SAFETY: the driver's function of this name has this signature.
            let real = *REAL.get_or_init(|| unsafe { real::find(concat!(stringify!($name), "\0").as_bytes()) });
            let Some(real) = real else { return NOT_FOUND };
            // SAFETY: the program's arguments, as it would have passed them to the driver.
            let $forward = &move || unsafe { real($($arg),*) };
            shielded(|| $body)
        }
    )*};
}

/// Answers an allocation: writes the address, or says what went wrong, or lets the driver do it.
///
/// # Safety
///
/// `out` is null or writable.
unsafe fn allocate(
    out: *mut u64,
    context: Option<Arc<Context>>,
    forward: Forward<'_>,
    serve: impl FnOnce(&Context) -> Result<Address, Answer>,
) -> c_int {
    let Some(context) = context.filter(|_| !out.is_null()) else { return forward() };
    match serve(&context) {
        Ok(address) => {
            // SAFETY: not null, so writable, as the caller says.
            unsafe { out.write_unaligned(address.0) };
            0
        }
        Err(Answer::Code(code)) => code.cast_signed(),
        Err(Answer::Forward) => forward(),
    }
}

fn answered(answer: Answer, forward: Forward<'_>) -> c_int {
    match answer {
        Answer::Code(code) => code.cast_signed(),
        Answer::Forward => forward(),
    }
}

/// # Safety
///
/// `stream` is a stream, as the driver's function demands.
unsafe fn free_on(address: u64, stream: u64, forward: Forward<'_>) -> c_int {
    let Some(block_is_of) = one_that(|c| c.owns(Address(address))) else {
        with_context(|c| c.foreign_free());
        return forward();
    };
    match of_stream(stream) {
        Some(stream_is_of) if Arc::ptr_eq(&stream_is_of, &block_is_of) => {
            // SAFETY: the caller says so.
            answered(unsafe { block_is_of.free_on(Address(address), stream) }, forward)
        }
        // Of two devices: nothing of the block's device can be told of the stream's work, so that is waited for.
        _ => match wait_for_stream(stream) {
            0 => answered(block_is_of.free(Address(address)), forward),
            code => code,
        },
    }
}

/// `cuStreamSynchronize`.
fn wait_for_stream(stream: u64) -> c_int {
    static REAL: OnceLock<Option<unsafe extern "C" fn(*mut c_void) -> c_int>> = OnceLock::new();
    // SAFETY: the driver's function of this name has this signature.
    let real = *REAL.get_or_init(|| unsafe { real::find(b"cuStreamSynchronize\0") });
    // SAFETY: the program says that it is a stream.
    real.map_or(NOT_FOUND, |wait| unsafe { wait(stream as *mut c_void) })
}

/// # Safety
///
/// As for `free_on`.
unsafe fn begin(stream: u64, forward: Forward<'_>) -> c_int {
    let code = forward();
    if let Some(context) = of_stream(stream).filter(|_| code == 0) {
        // SAFETY: the driver has taken it for a stream.
        unsafe { context.capture_begins(stream) };
    }
    code
}

/// # Safety
///
/// `graph` is null or readable once the driver has succeeded.
unsafe fn end(stream: u64, graph: *mut *mut c_void, forward: Forward<'_>) -> c_int {
    let code = forward();
    if let Some(context) = of_stream(stream) {
        // SAFETY: the driver has just written it.
        let graph = (code == 0 && !graph.is_null()).then(|| unsafe { graph.read_unaligned() } as u64);
        context.capture_ends(stream, graph.filter(|graph| *graph != 0));
    }
    code
}

/// # Safety
///
/// As for `free_on`.
unsafe fn launch(exec: *mut c_void, stream: u64, forward: Forward<'_>) -> c_int {
    let Some(context) = of_stream(stream) else { return forward() };
    // SAFETY: the caller says so.
    unsafe { context.launch(exec as u64, stream, || forward().cast_unsigned()) }.cast_signed()
}

/// Notes something about graphs once the driver has done it.
fn noted(forward: Forward<'_>, note: impl FnOnce(&Context)) -> c_int {
    let code = forward();
    if let Some(context) = current().filter(|_| code == 0) {
        note(&context);
    }
    code
}

/// An executable was made.
///
/// # Safety
///
/// `exec` is null or readable once the driver has succeeded.
unsafe fn made(exec: *mut *mut c_void, graph: *mut c_void, forward: Forward<'_>) -> c_int {
    noted(forward, |context| {
        if !exec.is_null() {
            // SAFETY: the driver has just written it.
            context.graphs.exec_holds(unsafe { exec.read_unaligned() } as u64, graph as u64);
        }
    })
}

/// A node was added to a graph, with parameters.
///
/// # Safety
///
/// `params` is null or a `CUgraphNodeParams`.
unsafe fn node_added(graph: *mut c_void, params: *const c_void, forward: Forward<'_>) -> c_int {
    noted(forward, |context| {
        // SAFETY: the caller says so, and the driver has taken it.
        match unsafe { NodeGraphs::of(params) } {
            NodeGraphs::Child(child) => context.graphs.graph_holds_what(graph as u64, child),
            NodeGraphs::Bodies(bodies) => {
                bodies.into_iter().for_each(|body| context.graphs.graph_is_part_of(body, graph as u64));
            }
            NodeGraphs::None => {}
        }
    })
}

/// The graphs that a node's parameters name.
enum NodeGraphs {
    None,
    /// A child's.
    Child(u64),
    /// Those that the driver made for a conditional node.
    Bodies(Vec<u64>),
}

impl NodeGraphs {
    /// # Safety
    ///
    /// `params` is null or a `CUgraphNodeParams` that the driver has taken.
    unsafe fn of(params: *const c_void) -> Self {
        if params.is_null() {
            return Self::None;
        }
        // SAFETY: CUgraphNodeParams begins with the node's type; after 12 reserved bytes the parameters of the type follow. A child's begin
        // with the graph; a conditional's are a handle (8 bytes), a kind (4), how many graphs (4), and where the driver put them.
        unsafe {
            match params.cast::<c_int>().read_unaligned() {
                CHILD_GRAPH => Self::Child(params.byte_add(16).cast::<u64>().read_unaligned()),
                CONDITIONAL => {
                    let count = params.byte_add(28).cast::<c_uint>().read_unaligned();
                    let graphs = params.byte_add(32).cast::<*const u64>().read_unaligned();
                    match graphs.is_null() {
                        true => Self::None,
                        false => Self::Bodies((0..count as usize).map(|i| graphs.add(i).read_unaligned()).collect()),
                    }
                }
                _ => Self::None,
            }
        }
    }
}

/// Our function of this name (which ends with a zero), if we serve it.
pub(crate) fn named(name: &[u8]) -> Option<*mut c_void> {
    all().into_iter().find(|(known, _)| known.as_bytes() == name).map(|(_, ours)| ours)
}

/// Our function in place of the driver's, if we serve that one.
fn ours(drivers: *mut c_void) -> Option<*mut c_void> {
    // Addresses as numbers: pointers are not shared between threads.
    static OURS: OnceLock<HashMap<usize, usize>> = OnceLock::new();
    let by_drivers = OURS.get_or_init(|| {
        // SAFETY: a symbol's address, whatever it is the address of.
        let address = |name: &str| unsafe { real::find::<*mut c_void>(name.as_bytes()) };
        all().into_iter().filter_map(|(name, ours)| Some((address(name)? as usize, ours as usize))).collect()
    });
    by_drivers.get(&(drivers as usize)).map(|&ours| ours as *mut c_void)
}

/// Puts our function where the driver has put its own.
///
/// # Safety
///
/// `found` is null or readable and writable once the driver has succeeded.
unsafe fn looked_up(found: *mut *mut c_void, forward: Forward<'_>) -> c_int {
    let code = forward();
    if code == 0 && !found.is_null() {
        // SAFETY: the driver has just written it.
        unsafe {
            if let Some(ours) = ours(found.read_unaligned()) {
                found.write_unaligned(ours);
            }
        }
    }
    code
}

fn with_context(call: impl FnOnce(&Arc<Context>)) {
    if let Some(context) = current() {
        call(&context);
    }
}

entry_points! {
    /// Memory that any stream may use at once.
    fn cuMemAlloc_v2(out: *mut u64, bytes: usize) |forward| {
        // SAFETY: the driver's contract.
        unsafe { allocate(out, current(), forward, |c| c.alloc(bytes as u64)) }
    }

    /// A free that names no stream: the block is reused only after all work submitted before.
    fn cuMemFree_v2(address: u64) |forward| {
        match one_that(|c| c.owns(Address(address))) {
            Some(context) => answered(context.free(Address(address)), forward),
            None => {
                with_context(|c| c.foreign_free());
                forward()
            }
        }
    }

    /// An entry point by its name: what is served here is ours. The driver chooses the version; ours is told by the address of what it chose.
    fn cuGetProcAddress_v2(
        name: *const c_char, found: *mut *mut c_void, version: c_int, flags: c_ulonglong, status: *mut c_int
    ) |forward| {
        // SAFETY: the driver's contract.
        unsafe { looked_up(found, forward) }
    }

    /// As `cuGetProcAddress_v2`, before CUDA 12.
    fn cuGetProcAddress(name: *const c_char, found: *mut *mut c_void, version: c_int, flags: c_ulonglong) |forward| {
        // SAFETY: the driver's contract.
        unsafe { looked_up(found, forward) }
    }

    /// Memory in the order of a stream.
    fn cuMemAllocAsync(out: *mut u64, bytes: usize, stream: *mut c_void) |forward| {
        // SAFETY: the driver's contract.
        unsafe { allocate(out, of_stream(stream as u64), forward, |c| c.alloc_on(bytes as u64, stream as u64)) }
    }

    /// As `cuMemAllocAsync`; no stream means the thread's own.
    fn cuMemAllocAsync_ptsz(out: *mut u64, bytes: usize, stream: *mut c_void) |forward| {
        // SAFETY: the driver's contract.
        unsafe { allocate(out, of_stream(own(stream)), forward, |c| c.alloc_on(bytes as u64, own(stream))) }
    }

    /// Memory from a pool of the driver's: if requests that name none come from it, it is served here.
    fn cuMemAllocFromPoolAsync(out: *mut u64, bytes: usize, pool: *mut c_void, stream: *mut c_void) |forward| {
        let context = of_stream(stream as u64).filter(|context| context.is_its_pool(pool));
        // SAFETY: the driver's contract.
        unsafe { allocate(out, context, forward, |c| c.alloc_on(bytes as u64, stream as u64)) }
    }

    /// As `cuMemAllocFromPoolAsync`; no stream means the thread's own.
    fn cuMemAllocFromPoolAsync_ptsz(out: *mut u64, bytes: usize, pool: *mut c_void, stream: *mut c_void) |forward| {
        let context = of_stream(own(stream)).filter(|context| context.is_its_pool(pool));
        // SAFETY: the driver's contract.
        unsafe { allocate(out, context, forward, |c| c.alloc_on(bytes as u64, own(stream))) }
    }

    /// A free in the order of a stream.
    fn cuMemFreeAsync(address: u64, stream: *mut c_void) |forward| {
        // SAFETY: the driver's contract.
        unsafe { free_on(address, stream as u64, forward) }
    }

    /// As `cuMemFreeAsync`; no stream means the thread's own.
    fn cuMemFreeAsync_ptsz(address: u64, stream: *mut c_void) |forward| {
        // SAFETY: the driver's contract.
        unsafe { free_on(address, own(stream), forward) }
    }

    /// Free and total memory: what is cached here counts as free.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |forward| {
        noted(forward, |context| {
            if let Some(available) = context.available().filter(|_| !free.is_null()) {
                // SAFETY: the driver has just written it.
                unsafe { free.write_unaligned(usize::try_from(available).unwrap_or(usize::MAX)) };
            }
        })
    }

    /// A pool's figures: what we hold counts, since the program believes that it is in the default pool.
    fn cuMemPoolGetAttribute(pool: *mut c_void, attribute: c_int, value: *mut c_void) |forward| {
        noted(forward, |context| {
            if value.is_null() || !POOL_FIGURES.contains(&attribute) || !context.is_its_pool(pool) {
                return;
            }
            let stats = context.allocator.stats();
            let ours = match attribute {
                5 => stats.reserved_bytes.all.current,
                6 => stats.reserved_bytes.all.peak,
                7 => stats.allocated_bytes.all.current,
                _ => stats.allocated_bytes.all.peak,
            };
            let value: *mut u64 = value.cast();
            // SAFETY: these attributes are 64-bit numbers, and the driver has just written one.
            unsafe { value.write_unaligned(value.read_unaligned().saturating_add(ours.unsigned_abs())) };
        })
    }

    /// A pool's setting: a peak set to zero begins anew, ours too.
    fn cuMemPoolSetAttribute(pool: *mut c_void, attribute: c_int, value: *mut c_void) |forward| {
        noted(forward, |context| {
            if POOL_PEAKS.contains(&attribute) && context.is_its_pool(pool) {
                context.allocator.reset_peak_stats();
            }
        })
    }

    /// Gives cached memory back, ours too.
    fn cuMemPoolTrimTo(pool: *mut c_void, keep: usize) |forward| {
        with_context(|c| {
            if c.is_its_pool(pool) {
                // What could not be given back stays cached.
                let _kept = c.allocator.trim();
            }
        });
        forward()
    }

    /// A stream begins.
    fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) |forward| {
        noted(forward, |c| {
            if !stream.is_null() {
                // SAFETY: the driver has just written it, and it is a stream of the current context.
                unsafe { c.stream_begins(stream.read_unaligned() as u64) };
            }
        })
    }

    /// A stream begins.
    fn cuStreamCreateWithPriority(stream: *mut *mut c_void, flags: c_uint, priority: c_int) |forward| {
        noted(forward, |c| {
            if !stream.is_null() {
                // SAFETY: the driver has just written it, and it is a stream of the current context.
                unsafe { c.stream_begins(stream.read_unaligned() as u64) };
            }
        })
    }

    /// A stream ends.
    fn cuStreamDestroy_v2(stream: *mut c_void) |forward| {
        if let Some(context) = of_stream(stream as u64) {
            // SAFETY: the program destroys it right after.
            unsafe { context.stream_ends(stream as u64) };
        }
        forward()
    }

    /// A device's context is torn down with everything in it.
    fn cuDevicePrimaryCtxReset_v2(device: c_int) |forward| {
        primary_ends(device);
        forward()
    }

    /// As `cuDevicePrimaryCtxReset_v2`, before CUDA 11.
    fn cuDevicePrimaryCtxReset(device: c_int) |forward| {
        primary_ends(device);
        forward()
    }

    /// One use of a device's context less. We keep it.
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) |forward| {
        primary_released(device);
        forward()
    }

    /// A context is torn down with everything in it.
    fn cuCtxDestroy_v2(context: *mut c_void) |forward| {
        context_ends(context);
        forward()
    }

    /// A capture begins.
    fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_int) |forward| {
        // SAFETY: the driver's contract.
        unsafe { begin(stream as u64, forward) }
    }

    /// As `cuStreamBeginCapture_v2`; no stream means the thread's own.
    fn cuStreamBeginCapture_v2_ptsz(stream: *mut c_void, mode: c_int) |forward| {
        // SAFETY: the driver's contract.
        unsafe { begin(own(stream), forward) }
    }

    /// A capture into a graph that exists begins.
    fn cuStreamBeginCaptureToGraph(
        stream: *mut c_void, graph: *mut c_void, dependencies: *const c_void, data: *const c_void, count: usize, mode: c_int
    ) |forward| {
        // SAFETY: the driver's contract.
        unsafe { begin(stream as u64, forward) }
    }

    /// As `cuStreamBeginCaptureToGraph`; no stream means the thread's own.
    fn cuStreamBeginCaptureToGraph_ptsz(
        stream: *mut c_void, graph: *mut c_void, dependencies: *const c_void, data: *const c_void, count: usize, mode: c_int
    ) |forward| {
        // SAFETY: the driver's contract.
        unsafe { begin(own(stream), forward) }
    }

    /// A capture ends.
    fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) |forward| {
        // SAFETY: the driver's contract.
        unsafe { end(stream as u64, graph, forward) }
    }

    /// As `cuStreamEndCapture`; no stream means the thread's own.
    fn cuStreamEndCapture_ptsz(stream: *mut c_void, graph: *mut *mut c_void) |forward| {
        // SAFETY: the driver's contract.
        unsafe { end(own(stream), graph, forward) }
    }

    /// A graph becomes executable.
    fn cuGraphInstantiateWithFlags(exec: *mut *mut c_void, graph: *mut c_void, flags: c_ulonglong) |forward| {
        // SAFETY: the driver's contract.
        unsafe { made(exec, graph, forward) }
    }

    /// A graph becomes executable.
    fn cuGraphInstantiateWithParams(exec: *mut *mut c_void, graph: *mut c_void, params: *mut c_void) |forward| {
        // SAFETY: the driver's contract.
        unsafe { made(exec, graph, forward) }
    }

    /// A graph becomes executable.
    fn cuGraphInstantiateWithParams_ptsz(exec: *mut *mut c_void, graph: *mut c_void, params: *mut c_void) |forward| {
        // SAFETY: the driver's contract.
        unsafe { made(exec, graph, forward) }
    }

    /// A graph becomes executable, as before CUDA 12.
    fn cuGraphInstantiate_v2(
        exec: *mut *mut c_void, graph: *mut c_void, node: *mut c_void, log: *mut c_void, size: usize
    ) |forward| {
        // SAFETY: the driver's contract.
        unsafe { made(exec, graph, forward) }
    }

    /// An executable is updated to another graph.
    fn cuGraphExecUpdate_v2(exec: *mut c_void, graph: *mut c_void, result: *mut c_void) |forward| {
        noted(forward, |c| c.graphs.exec_holds(exec as u64, graph as u64))
    }

    /// An executable is updated to another graph, as before CUDA 12.
    fn cuGraphExecUpdate(exec: *mut c_void, graph: *mut c_void, node: *mut c_void, result: *mut c_void) |forward| {
        noted(forward, |c| c.graphs.exec_holds(exec as u64, graph as u64))
    }

    /// A node of an executable gets other parameters: another child graph, maybe.
    fn cuGraphExecNodeSetParams(exec: *mut c_void, node: *mut c_void, params: *const c_void) |forward| {
        noted(forward, |c| {
            // SAFETY: the driver's contract.
            if let NodeGraphs::Child(child) = unsafe { NodeGraphs::of(params) } {
                c.graphs.exec_holds(exec as u64, child);
            }
        })
    }

    /// A node of an executable gets another child graph.
    fn cuGraphExecChildGraphNodeSetParams(exec: *mut c_void, node: *mut c_void, child: *mut c_void) |forward| {
        noted(forward, |c| c.graphs.exec_holds(exec as u64, child as u64))
    }

    /// A graph is copied.
    fn cuGraphClone(clone: *mut *mut c_void, original: *mut c_void) |forward| {
        noted(forward, |c| {
            if !clone.is_null() {
                // SAFETY: the driver has just written it.
                c.graphs.graph_holds_what(unsafe { clone.read_unaligned() } as u64, original as u64);
            }
        })
    }

    /// A graph becomes part of another.
    fn cuGraphAddChildGraphNode(
        node: *mut c_void, graph: *mut c_void, dependencies: *const c_void, count: usize, child: *mut c_void
    ) |forward| {
        noted(forward, |c| c.graphs.graph_holds_what(graph as u64, child as u64))
    }

    /// A node is added to a graph: it may be a child graph.
    fn cuGraphAddNode(
        node: *mut c_void, graph: *mut c_void, dependencies: *const c_void, count: usize, params: *const c_void
    ) |forward| {
        // SAFETY: the driver's contract.
        unsafe { node_added(graph, params, forward) }
    }

    /// As `cuGraphAddNode`, with data of the edges.
    fn cuGraphAddNode_v2(
        node: *mut c_void, graph: *mut c_void, dependencies: *const c_void, data: *const c_void, count: usize,
        params: *const c_void
    ) |forward| {
        // SAFETY: the driver's contract.
        unsafe { node_added(graph, params, forward) }
    }

    /// The graph inside a node: a part of one that the driver does not name.
    fn cuGraphChildGraphNodeGetGraph(node: *mut c_void, graph: *mut *mut c_void) |forward| {
        noted(forward, |c| {
            if !graph.is_null() {
                // SAFETY: the driver has just written it.
                c.graphs.graph_may_be_of_any(unsafe { graph.read_unaligned() } as u64);
            }
        })
    }

    /// A launch.
    fn cuGraphLaunch(exec: *mut c_void, stream: *mut c_void) |forward| {
        // SAFETY: the driver's contract.
        unsafe { launch(exec, stream as u64, forward) }
    }

    /// As `cuGraphLaunch`; no stream means the thread's own.
    fn cuGraphLaunch_ptsz(exec: *mut c_void, stream: *mut c_void) |forward| {
        // SAFETY: the driver's contract.
        unsafe { launch(exec, own(stream), forward) }
    }

    /// An executable ends. Its last launch may be running.
    fn cuGraphExecDestroy(exec: *mut c_void) |forward| {
        let Some(context) = one_that(|c| c.graphs.knows_exec(exec as u64)) else { return forward() };
        context.exec_ends(exec as u64, || forward().cast_unsigned()).cast_signed()
    }

    /// A graph ends; executables of it may live on.
    fn cuGraphDestroy(graph: *mut c_void) |forward| {
        let Some(context) = one_that(|c| c.graphs.knows_graph(graph as u64)) else { return forward() };
        context.graphs.graph_ends(graph as u64, || forward().cast_unsigned()).cast_signed()
    }
}
