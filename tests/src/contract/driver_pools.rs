//! The driver's own stream-ordered pools, and memory nodes of graphs.

use gpupool_device::{
    Address, CaptureMode, Device, DriverPoolHandle, ExecHandle, GraphDevice, GraphHandle, InstantiateFlags, Kernel,
    NodeKind, StreamHandle, Workbench, code,
};
use gpupool_sim_device::ForeignCall;

use super::{Check, Subject, add, check, code_of, holding, plain, set, stream, word};

const MIB: u64 = 1 << 20;

pub(super) fn checks<S: Subject>() -> Vec<Check<S>> {
    vec![
        check("a driver's pool keeps what is freed until it is trimmed", kept_until_trimmed),
        check("a driver's pool refuses what makes no sense", refusals),
        check("a driver's pool with live blocks is not destroyed", not_destroyed),
        check("a driver's pool takes 32 MiB at a time", growth),
        holding("a block of a driver's pool serves its stream at once and others once its free is over", order),
        holding("a block of a driver's pool that is freed by its address alone waits for nothing", freed_by_address),
        check("plain memory can be freed in the order of a stream", plain_memory),
        check("a memory node allocates and frees in each launch", memory_nodes),
        check("what a memory node allocated and nobody freed", live_after_a_launch),
    ]
}

/// A pool, and what it holds.
fn pool<S: Subject>(s: &S) -> (DriverPoolHandle, impl Fn() -> (u64, u64) + '_) {
    let pool = s.device().driver_pool_create().unwrap();
    (pool, move || {
        let figures = s.device().driver_pool_figures(pool).unwrap();
        (figures.reserved, figures.used)
    })
}

fn kept_until_trimmed<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let before = d.mem_info().unwrap().free;
    let (pool, figures) = pool(s);
    assert_eq!(figures(), (0, 0));
    let a = d.mem_alloc_async(pool, 64 * MIB, st).unwrap();
    assert!(a.0.is_multiple_of(512));
    d.launch(st, Kernel::Fill { dst: a, bytes: 64 * MIB, value: 7 }).unwrap();
    d.launch(st, add(a.offset(64 * MIB - 4), 1)).unwrap();
    assert_eq!((word(d, st, a), word(d, st, a.offset(64 * MIB - 4))), (7, 8));
    assert_eq!(figures(), (64 * MIB, 64 * MIB));
    d.driver_pool_trim(pool, 0).unwrap();
    assert_eq!(figures(), (64 * MIB, 64 * MIB), "what is in a block stays");
    d.mem_free_async(a, st).unwrap();
    assert_eq!(figures().1, 0, "counted as free when the free is submitted");
    d.stream_synchronize(st).unwrap();
    d.device_synchronize().unwrap();
    assert_eq!(figures(), (64 * MIB, 0), "waiting gives nothing back");
    assert_eq!(before - d.mem_info().unwrap().free, 64 * MIB);
    d.driver_pool_trim(pool, 64 * MIB).unwrap();
    assert_eq!(figures(), (64 * MIB, 0), "asked to keep it");
    d.driver_pool_trim(pool, 0).unwrap();
    assert_eq!(figures(), (0, 0));
    assert_eq!(d.mem_info().unwrap().free, before);
    let high = d.driver_pool_figures(pool).unwrap();
    assert_eq!((high.reserved_high, high.used_high), (64 * MIB, 64 * MIB));
    d.driver_pool_destroy(pool).unwrap();
}

fn refusals<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let (pool, figures) = pool(s);
    assert_eq!(code_of(d.mem_alloc_async(pool, 0, st)), code::INVALID_VALUE);
    assert_eq!(code_of(d.mem_alloc_async(pool, 1 << 45, st)), code::OUT_OF_MEMORY);
    assert_eq!(code_of(d.mem_alloc_async(pool, 512, StreamHandle(0x7777_7770))), code::INVALID_HANDLE);
    assert_eq!(figures(), (0, 0));
    assert_eq!(code_of(d.mem_free_async(Address(4096), st)), code::INVALID_VALUE, "nobody's");
    let a = d.mem_alloc_async(pool, 4096, st).unwrap();
    assert_eq!(code_of(d.mem_free_async(a.offset(512), st)), code::INVALID_VALUE, "inside a block");
    d.mem_free_async(a, st).unwrap();
    assert_eq!(code_of(d.mem_free_async(a, st)), code::INVALID_VALUE, "twice");
    d.driver_pool_destroy(pool).unwrap();
    let gone = [
        code_of(d.driver_pool_destroy(pool)),
        code_of(d.driver_pool_figures(pool)),
        code_of(d.driver_pool_trim(pool, 0)),
        code_of(d.mem_alloc_async(pool, 512, st)),
    ];
    assert_eq!(gone, [code::INVALID_VALUE; 4]);
}

fn not_destroyed<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let before = d.mem_info().unwrap().free;
    let (pool, _) = pool(s);
    let a = d.mem_alloc_async(pool, MIB, st).unwrap();
    assert_eq!(code_of(d.driver_pool_destroy(pool)), code::INVALID_VALUE);
    d.launch(st, set(a, 9)).unwrap();
    assert_eq!(word(d, st, a), 9);
    d.mem_free_async(a, st).unwrap();
    d.driver_pool_destroy(pool).unwrap();
    d.stream_synchronize(st).unwrap();
    d.device_synchronize().unwrap();
    assert_eq!(d.mem_info().unwrap().free, before);
}

/// What a pool reserves for blocks of several sizes, and in how many steps.
fn growth<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let mut found = Vec::new();
    for bytes in [1, 4096, 2 * MIB, 3 * MIB, 32 * MIB, 33 * MIB, 40 * MIB, 100 * MIB] {
        let (pool, figures) = pool(s);
        let a = d.mem_alloc_async(pool, bytes, st).unwrap();
        found.push((bytes, figures()));
        d.mem_free_async(a, st).unwrap();
        d.stream_synchronize(st).unwrap();
        d.driver_pool_destroy(pool).unwrap();
    }
    let chunks = |bytes: u64| bytes.next_multiple_of(32 * MIB);
    let expected: Vec<_> = found.iter().map(|&(bytes, _)| (bytes, (chunks(bytes), bytes))).collect();
    assert_eq!(found, expected);
}

fn order<S: Subject>(s: &S) {
    let d = s.device();
    let (a, b, gate) = (stream(d), stream(d), d.gate_create().unwrap());
    let (pool, figures) = pool(s);
    let first = d.mem_alloc_async(pool, 32 * MIB, a).unwrap();
    d.launch(a, Kernel::Wait { gate }).unwrap();
    d.launch(a, set(first, 1)).unwrap();
    d.mem_free_async(first, a).unwrap();
    // Another stream may not have it yet, its own may.
    let other = d.mem_alloc_async(pool, 32 * MIB, b).unwrap();
    assert_ne!(other, first);
    let again = d.mem_alloc_async(pool, 32 * MIB, a).unwrap();
    assert_eq!((again, figures().0), (first, 64 * MIB));
    d.launch(a, add(again, 1)).unwrap();
    d.gate_open(gate).unwrap();
    assert_eq!(word(d, a, again), 2);
    d.mem_free_async(again, a).unwrap();
    d.stream_synchronize(a).unwrap();
    let third = d.mem_alloc_async(pool, 32 * MIB, b).unwrap();
    assert_eq!((third, figures().0), (first, 64 * MIB), "its free is over");
    for block in [other, third] {
        d.mem_free_async(block, b).unwrap();
    }
    d.stream_synchronize(b).unwrap();
    d.driver_pool_destroy(pool).unwrap();
}

fn freed_by_address<S: Subject>(s: &S) {
    let d = s.device();
    let (a, b, gate) = (stream(d), stream(d), d.gate_create().unwrap());
    let (pool, figures) = pool(s);
    let block = d.mem_alloc_async(pool, MIB, a).unwrap();
    d.launch(a, set(block, 3)).unwrap();
    d.stream_synchronize(a).unwrap();
    d.launch(b, Kernel::Wait { gate }).unwrap();
    d.mem_free(block).unwrap();
    assert!(!s.stream_query(b).unwrap(), "it waited for the device");
    assert_eq!(code_of(d.mem_free(block)), code::INVALID_VALUE, "twice");
    d.gate_open(gate).unwrap();
    d.device_synchronize().unwrap();
    // It may count as used for good.
    assert!([0, MIB].contains(&figures().1), "{:?}", figures());
    d.driver_pool_destroy(pool).unwrap();
    d.device_synchronize().unwrap();
}

fn plain_memory<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let before = d.mem_info().unwrap().free;
    let plain = d.mem_alloc(64 * MIB).unwrap();
    d.mem_free_async(plain, st).unwrap();
    d.stream_synchronize(st).unwrap();
    assert_eq!(d.mem_info().unwrap().free, before);
    assert_eq!(code_of(d.mem_free(plain)), code::INVALID_VALUE, "it is gone");
}

/// A graph with a memory node: `with_free` says whether it frees what it allocates.
fn with_memory<S: Subject>(s: &S, st: StreamHandle, out: Address, with_free: bool) -> (Address, GraphHandle) {
    let d = s.device();
    let pool = d.driver_pool_create().unwrap();
    let outside = d.mem_alloc_async(pool, 4096, st).unwrap();
    d.begin_capture(st, CaptureMode::Global).unwrap();
    let block = d.mem_alloc_async(pool, 2 * MIB, st).unwrap();
    d.launch(st, set(block, 41)).unwrap();
    d.launch(st, add(block, 1)).unwrap();
    d.launch(st, super::copy(out, block)).unwrap();
    assert_eq!(code_of(d.mem_free_async(outside, st)), code::INVALID_VALUE, "a block from outside");
    if with_free {
        d.mem_free_async(block, st).unwrap();
        assert_eq!(code_of(d.mem_free_async(block, st)), code::INVALID_VALUE, "twice");
    }
    let graph = d.end_capture(st).unwrap();
    d.mem_free_async(outside, st).unwrap();
    let kinds: Vec<NodeKind> = d.graph_nodes(graph).unwrap().into_iter().map(|node| node.kind).collect();
    assert_eq!(kinds.first(), Some(&NodeKind::MemAlloc { address: block, bytes: 2 * MIB }));
    assert_eq!(kinds.contains(&NodeKind::MemFree { address: block }), with_free);
    (block, graph)
}

fn exec<S: Subject>(s: &S, graph: GraphHandle, auto_free_on_launch: bool) -> ExecHandle {
    let flags = InstantiateFlags { auto_free_on_launch, ..InstantiateFlags::default() };
    s.device().instantiate(graph, flags).unwrap()
}

fn memory_nodes<S: Subject>(s: &S) {
    let (d, st, x) = (s.device(), stream(s.device()), plain(s.device()));
    let (block, graph) = with_memory(s, st, x, true);
    let exec = exec(s, graph, false);
    for _ in 0..3 {
        d.launch(st, set(x, 0)).unwrap();
        d.graph_launch(exec, st).unwrap();
        assert_eq!(word(d, st, x), 42);
    }
    assert_eq!(code_of(d.mem_free_async(block, st)), code::INVALID_VALUE, "the graph has freed it");
    d.exec_destroy(exec).unwrap();
    d.graph_destroy(graph).unwrap();
    d.mem_free(x).unwrap();
}

fn live_after_a_launch<S: Subject>(s: &S) {
    let (d, st, x) = (s.device(), stream(s.device()), plain(s.device()));
    let (block, graph) = with_memory(s, st, x, false);
    let plain_exec = exec(s, graph, false);
    assert_eq!(code_of(d.mem_free_async(block, st)), code::INVALID_VALUE, "before any launch");
    d.graph_launch(plain_exec, st).unwrap();
    assert_eq!(word(d, st, block), 42);
    assert_eq!(code_of(d.graph_launch(plain_exec, st)), code::INVALID_VALUE, "it is live still");
    d.mem_free_async(block, st).unwrap();
    d.graph_launch(plain_exec, st).unwrap();
    d.stream_synchronize(st).unwrap();
    d.mem_free(block).unwrap();
    d.exec_destroy(plain_exec).unwrap();
    let freeing = exec(s, graph, true);
    for _ in 0..3 {
        d.graph_launch(freeing, st).unwrap();
        assert_eq!(word(d, st, block), 42);
    }
    d.mem_free_async(block, st).unwrap();
    d.stream_synchronize(st).unwrap();
    d.exec_destroy(freeing).unwrap();
    d.graph_destroy(graph).unwrap();
    s.foreign(ForeignCall::DeviceGraphMemTrim, st).unwrap();
    d.mem_free(x).unwrap();
}
