//! The back end `stream-ordered` on the simulated device: the driver's own pool behind the same handles, statistics, limits and errors.

use std::sync::Arc;

use gpupool_allocator::{AllocError, Allocator, CaptureRegistry, Config, Policy, Stream};
use gpupool_device::{
    Call, CaptureMode, GraphDevice, InstantiateFlags, Kernel, NodeKind, StreamHandle, StreamKind, Workbench, code,
};
use gpupool_graph_capture::{CaptureOptions, Captures};
use gpupool_sim_device::{SimConfig, SimDevice};
use gpupool_tests::contract::word;

const MIB: u64 = 1 << 20;

struct Bench {
    device: Arc<SimDevice>,
    allocator: Allocator<SimDevice>,
}

impl Bench {
    fn new(mib: u64) -> Self {
        let device = Arc::new(SimDevice::new(SimConfig::default().with_capacity(mib * MIB)));
        let registry = Arc::<CaptureRegistry>::default();
        let allocator =
            Allocator::with_registry(Arc::clone(&device), Config::new(Policy::StreamOrdered), registry).unwrap();
        Self { device, allocator }
    }

    fn stream(&self) -> Stream<SimDevice> {
        self.allocator.register_stream(self.device.stream_create(StreamKind::NonBlocking).unwrap())
    }

    /// Reserved and used MiB of the driver's pool.
    fn pool(&self) -> (u64, u64) {
        let figures = self.allocator.driver_pool_figures().unwrap().unwrap();
        (figures.reserved / MIB, figures.used / MIB)
    }

    /// Allocated and reserved MiB, as the allocator counts them.
    fn counted(&self) -> (i64, i64) {
        self.allocator.validate().unwrap();
        let stats = self.allocator.stats();
        (stats.allocated_bytes.all.current / MIB as i64, stats.reserved_bytes.all.current / MIB as i64)
    }

    fn fill(&self, stream: &Stream<SimDevice>, block: &gpupool_allocator::Allocation<SimDevice>, value: u32) {
        let kernel = Kernel::Fill { dst: block.address(), bytes: block.size(), value };
        self.device.launch(stream.handle(), kernel).unwrap();
    }

    fn kinds(&self, graph: gpupool_device::GraphHandle) -> Vec<NodeKind> {
        self.device.graph_nodes(graph).unwrap().into_iter().map(|node| node.kind).collect()
    }
}

#[test]
fn every_block_is_the_drivers_and_goes_back_as_it_is_freed() {
    let bench = Bench::new(1024);
    let s = bench.stream();
    assert_eq!(bench.allocator.driver_pool_figures().unwrap(), None, "nobody has asked yet");
    let a = bench.allocator.alloc(64 * MIB, &s).unwrap();
    let b = bench.allocator.alloc(32 * MIB - 5, &s).unwrap();
    assert_eq!((bench.pool(), bench.counted()), ((96, 96), (96, 96)));
    assert_eq!((a.size(), b.size(), b.requested()), (64 * MIB, 32 * MIB, 32 * MIB - 5));
    bench.fill(&s, &a, 1);
    let at = a.address();
    drop(a);
    assert_eq!((bench.pool(), bench.counted()), ((96, 32), (32, 32)), "freed in stream order, with nothing waited for");
    let again = bench.allocator.alloc(64 * MIB, &s).unwrap();
    assert_eq!((again.address(), bench.pool()), (at, (96, 96)), "its own stream has it at once");
    assert_eq!(bench.device.calls(Call::EventRecord), 0);
    assert_eq!((bench.device.calls(Call::MemAllocAsync), bench.device.calls(Call::MemFreeAsync)), (3, 1));
    let state = bench.allocator.state();
    assert_eq!(state.segments.len(), 2, "a snapshot has a segment a block");
    drop((again, b));
    let trimmed = bench.allocator.empty_cache().unwrap();
    assert_eq!((trimmed.driver_pool_bytes, bench.pool()), (96 * MIB, (0, 0)));
    assert_eq!(bench.device.memory_in_use(), 0);
    assert_eq!(bench.device.reports(), vec![]);
}

#[test]
fn a_block_that_other_streams_used_goes_back_once_they_are_done() {
    let bench = Bench::new(1024);
    let (s, t) = (bench.stream(), bench.stream());
    let gate = bench.device.gate_create().unwrap();
    let a = bench.allocator.alloc(32 * MIB, &s).unwrap();
    bench.device.launch(t.handle(), Kernel::Wait { gate }).unwrap();
    bench.fill(&t, &a, 1);
    a.record_stream(&t).unwrap();
    drop(a);
    assert_eq!((bench.pool(), bench.counted()), ((32, 32), (0, 32)), "in use still");
    let b = bench.allocator.alloc(32 * MIB, &s).unwrap();
    assert_eq!(bench.pool(), (64, 64));
    bench.device.gate_open(gate).unwrap();
    bench.device.stream_synchronize(t.handle()).unwrap();
    let c = bench.allocator.alloc(32 * MIB, &s).unwrap();
    assert_eq!(bench.pool(), (64, 64), "it was returned, and taken again");
    drop((b, c));
    bench.allocator.empty_cache().unwrap();
    assert_eq!((bench.pool(), bench.counted()), ((0, 0), (0, 0)));
    assert_eq!(bench.device.reports(), vec![]);
}

#[test]
fn limits_and_lack_of_memory_are_errors_that_explain_themselves() {
    let bench = Bench::new(256);
    let (s, t) = (bench.stream(), bench.stream());
    bench.allocator.set_memory_limit(Some(64 * MIB));
    let a = bench.allocator.alloc(64 * MIB, &s).unwrap();
    let error = bench.allocator.alloc(MIB, &s).unwrap_err();
    let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
    assert!(report.to_string().contains("64.00 MiB"), "{report}");
    drop(a);
    bench.allocator.set_memory_limit(None);
    // All of the device in pieces of one stream; another stream wants all of it in one.
    let pieces: Vec<_> = (0..8).map(|_| bench.allocator.alloc(32 * MIB, &s).unwrap()).collect();
    assert!(bench.allocator.alloc(MIB, &t).is_err());
    pieces.iter().for_each(|piece| bench.fill(&s, piece, 3));
    drop(pieces);
    let whole = bench.allocator.alloc(256 * MIB, &t).unwrap();
    assert_eq!(bench.pool(), (256, 256), "the frees were waited for, and the pool emptied");
    bench.fill(&t, &whole, 4);
    drop(whole);
    bench.allocator.empty_cache().unwrap();
    assert_eq!(bench.device.memory_in_use(), 0);
    assert_eq!(bench.device.reports(), vec![]);
}

#[test]
fn in_a_capture_blocks_are_memory_nodes_and_the_graph_can_be_launched_again_and_again() {
    let bench = Bench::new(1024);
    let (s, captures) = (bench.stream(), Captures::new(&bench.allocator));
    let result = bench.allocator.alloc(4096, &s).unwrap();
    let capture = captures.begin(&s, CaptureOptions::new()).unwrap();
    let first = bench.allocator.alloc(2 * MIB, &s).unwrap();
    bench.fill(&s, &first, 20);
    let output = bench.allocator.alloc(2 * MIB, &s).unwrap();
    let handle = s.handle();
    let copy = Kernel::Copy { dst: output.address(), src: first.address(), bytes: 2 * MIB };
    bench.device.launch(handle, copy).unwrap();
    let freed = first.address();
    drop(first);
    bench.device.launch(handle, Kernel::Add { dst: output.address(), bytes: 2 * MIB, value: 1 }).unwrap();
    let copy = Kernel::Copy { dst: result.address(), src: output.address(), bytes: 4096 };
    bench.device.launch(handle, copy).unwrap();
    let graph = capture.end().unwrap();
    let address = output.address();
    let memory: Vec<NodeKind> =
        bench.kinds(graph.handle()).into_iter().filter(|kind| *kind != NodeKind::Kernel).collect();
    let allocates = |address| NodeKind::MemAlloc { address, bytes: 2 * MIB };
    assert_eq!(memory, [allocates(freed), allocates(address), NodeKind::MemFree { address: freed }]);
    assert_eq!(graph.report().memory_nodes, 3);
    assert_eq!(bench.pool().1, 0, "a graph's memory is no part of the pool");
    let exec = graph.instantiate(InstantiateFlags::default()).unwrap();
    for _ in 0..3 {
        exec.launch(&s).unwrap();
        assert_eq!((word(&*bench.device, handle, result.address()), word(&*bench.device, handle, address)), (21, 21));
    }
    drop(output);
    exec.launch(&s).unwrap();
    assert_eq!(word(&*bench.device, handle, result.address()), 21, "the handle's end means nothing to the graph");
    drop((exec, graph, result));
    captures.tidy();
    bench.allocator.empty_cache().unwrap();
    assert_eq!(bench.counted(), (0, 0));
    assert_eq!(bench.device.reports(), vec![]);
}

#[test]
fn a_graphs_block_serves_no_later_capture() {
    let bench = Bench::new(1024);
    let (s, captures) = (bench.stream(), Captures::new(&bench.allocator));
    let capture = captures.begin(&s, CaptureOptions::new()).unwrap();
    let kept = bench.allocator.alloc(2 * MIB, &s).unwrap();
    bench.fill(&s, &kept, 1);
    let first = capture.end().unwrap();
    let pool = first.pool();
    let at = kept.address();
    drop(kept);
    bench.device.device_synchronize().unwrap();
    let capture = captures.begin(&s, CaptureOptions::new().with_pool(pool)).unwrap();
    let other = bench.allocator.alloc(2 * MIB, &s).unwrap();
    assert_ne!(other.address(), at);
    bench.fill(&s, &other, 2);
    drop(other);
    let second = capture.end().unwrap();
    assert_eq!(bench.kinds(second.handle()).len(), 3);
    assert_eq!(bench.counted().0, 0);
}

#[test]
fn a_block_from_outside_that_is_freed_in_a_capture_stays_until_the_capture_is_over() {
    let bench = Bench::new(1024);
    let (s, captures) = (bench.stream(), Captures::new(&bench.allocator));
    let outside = bench.allocator.alloc(32 * MIB, &s).unwrap();
    let capture = captures.begin(&s, CaptureOptions::new().with_mode(CaptureMode::Global)).unwrap();
    drop(outside);
    // Another thread's requests go on meanwhile, and break nothing.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let other = bench.stream();
            drop(bench.allocator.alloc(32 * MIB, &other).unwrap());
            bench.allocator.trim().unwrap();
        });
    });
    assert_eq!(bench.pool().1, 32, "a graph may not free it");
    let graph = capture.end().unwrap();
    assert_eq!(bench.kinds(graph.handle()), []);
    bench.allocator.empty_cache().unwrap();
    assert_eq!((bench.pool(), bench.counted()), ((0, 0), (0, 0)));
}

#[test]
fn blocks_of_streams_that_are_gone_go_back_too() {
    let bench = Bench::new(1024);
    let s = bench.stream();
    let a = bench.allocator.alloc(32 * MIB, &s).unwrap();
    bench.fill(&s, &a, 1);
    bench.allocator.retire_stream(&s).unwrap();
    bench.device.stream_destroy(s.handle()).unwrap();
    drop(a);
    bench.allocator.empty_cache().unwrap();
    assert_eq!((bench.pool(), bench.counted()), ((0, 0), (0, 0)));
    // A thread's own default stream, whose block another thread drops.
    let own = bench.allocator.register_stream(StreamHandle::PER_THREAD);
    let b = bench.allocator.alloc(32 * MIB, &own).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(b));
    });
    assert_eq!(bench.pool().1, 32, "that thread cannot name the stream");
    drop(bench.allocator.alloc(32 * MIB, &own).unwrap());
    assert_eq!(bench.pool().1, 0, "it served the next request, and went with it");
    assert_eq!(bench.device.reports(), vec![]);
}

#[test]
fn each_call_may_fail_and_nothing_is_lost() {
    let calls = [
        Call::MemPoolCreate,
        Call::MemAllocAsync,
        Call::MemFreeAsync,
        Call::StreamGetCaptureInfo,
        Call::MemPoolTrimTo,
        Call::MemPoolGetAttribute,
        Call::MemFree,
        Call::ExchangeCaptureMode,
        Call::EventRecord,
    ];
    for call in calls {
        for nth in 1..6 {
            let bench = Bench::new(256);
            let (s, t) = (bench.stream(), bench.stream());
            bench.device.fail_nth(call, nth, code::UNKNOWN);
            let mut live = Vec::new();
            for round in 0..6_u64 {
                if let Ok(block) = bench.allocator.alloc((1 + round) * 5 * MIB, &s) {
                    bench.fill(&s, &block, 1);
                    if round % 2 == 0 {
                        block.record_stream(&t).unwrap();
                    }
                    live.push(block);
                }
                if round % 3 == 2 {
                    drop(live.remove(0));
                }
                bench.allocator.validate().unwrap();
            }
            drop(live);
            // The fault may strike one of them.
            assert!([0; 2].iter().any(|_| bench.allocator.empty_cache().is_ok()), "{call} {nth}");
            bench.allocator.validate().unwrap();
            assert_eq!(bench.allocator.stats().reserved_bytes.all.current, 0, "{call} {nth}");
            assert_eq!(bench.device.memory_in_use(), 0, "{call} {nth}");
            assert_eq!(bench.device.reports(), vec![], "{call} {nth}");
        }
    }
}

#[test]
fn a_device_without_such_pools_says_so() {
    let device = Arc::new(gpupool_tests::fake::FakeDriver::new(1 << 30, 1 << 30));
    let allocator = Allocator::with_registry(device, Config::new(Policy::StreamOrdered), Arc::default()).unwrap();
    let s = allocator.register_stream(StreamHandle(64));
    let error = allocator.alloc(4096, &s).unwrap_err();
    let AllocError::Driver(error) = error else { panic!("{error}") };
    assert_eq!((error.call, error.code), (Call::MemPoolCreate, code::NOT_SUPPORTED));
}
