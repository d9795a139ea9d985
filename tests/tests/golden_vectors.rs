//! PyTorch's allocator, vector by vector: what torch 2.15's own library did with these scripts when it was driven over a fake CUDA
//! runtime (and 2.11's where it is named). Figures are `[current, peak, allocated, freed]`.

use std::sync::{Arc, Mutex};

use gpupool_allocator::state::BlockStatus::{ActiveAllocated, ActivePendingFree, Inactive};
use gpupool_allocator::{AllocError, Config, Filter, Policy, PoolError, PoolId};
use gpupool_device::{Address, CaptureId, StreamHandle};
use gpupool_tests::bench::{Bench, flat};
use gpupool_tests::fake::{BASE, Done::*};

const MIB: u64 = 1 << 20;

#[test]
fn g1_basics() {
    let mut b = Bench::new(Policy::Torch215);
    assert_eq!(b.m(1, 1000, 0), 0);
    assert_eq!(b.m(2, 512, 0), 0x400);
    assert_eq!(b.m(3, 1_048_576, 0), 0x600);
    assert_eq!(b.m(4, 1_048_577, 0), 0x20_0000);
    assert_eq!(b.m(5, 10_485_759, 0), 0x30_0200);
    assert_eq!(b.m(6, 10_485_760, 0), 0x160_0000);
    assert_eq!(b.m(7, 12_582_912, 0), 0x200_0000);
    assert_eq!(b.m(8, 12_582_913, 0), 0x2c0_0000);
    assert_eq!(
        b.log(),
        [
            Malloc(2_097_152, 0),
            Malloc(20_971_520, 0x20_0000),
            Malloc(10_485_760, 0x160_0000),
            Malloc(12_582_912, 0x200_0000),
            Malloc(14_680_064, 0x2c0_0000)
        ]
    );
    let s = b.allocator.stats();
    assert_eq!(flat(s.allocation.all), [8, 8, 8, 0]);
    assert_eq!((s.allocation.small_pool.current, s.allocation.large_pool.current), (3, 5));
    assert_eq!(flat(s.segment.all), [5, 5, 5, 0]);
    assert_eq!(flat(s.allocated_bytes.all), [48_237_056, 48_237_056, 48_237_056, 0]);
    assert_eq!(s.requested_bytes.all.current, 48_236_009);
    assert_eq!(s.reserved_bytes.all.current, 60_817_408);
    assert_eq!(flat(s.inactive_split.all), [3, 3, 3, 0]);
    assert_eq!((s.inactive_split.small_pool.current, s.inactive_split.large_pool.current), (1, 2));
    assert_eq!(flat(s.inactive_split_bytes.all), [12_580_352, 20_969_472, 24_115_200, 11_534_848]);
    assert_eq!(flat(s.inactive_split_bytes.small_pool), [1_047_040, 2_096_128, 2_096_128, 1_049_088]);
    assert_eq!(flat(s.inactive_split_bytes.large_pool), [11_533_312, 19_922_432, 22_019_072, 10_485_760]);
    assert_eq!(s.num_device_alloc, 5);
    assert_eq!(
        b.blocks_at(0),
        [
            (1024, 1000, ActiveAllocated),
            (512, 512, ActiveAllocated),
            (1_048_576, 1_048_576, ActiveAllocated),
            (1_047_040, 0, Inactive)
        ]
    );
    assert_eq!(
        b.blocks_at(0x20_0000),
        [(1_049_088, 1_048_577, ActiveAllocated), (10_485_760, 10_485_759, ActiveAllocated), (9_436_672, 0, Inactive)]
    );
    assert_eq!(b.blocks_at(0x2c0_0000), [(12_583_424, 12_582_913, ActiveAllocated), (2_096_640, 0, Inactive)]);

    (1..=8).for_each(|id| b.f(id));
    let s = b.allocator.stats();
    assert_eq!(s.active.all.current, 0);
    assert_eq!(flat(s.inactive_split.all), [0, 4, 5, 5]);
    assert_eq!(flat(s.inactive_split_bytes.all), [0, 20_969_472, 25_165_824, 25_165_824]);
    assert_eq!(b.blocks_at(0), [(2_097_152, 1_048_576, Inactive)]);
    assert_eq!(b.blocks_at(0x20_0000), [(20_971_520, 10_485_759, Inactive)]);
    b.allocator.empty_cache().unwrap();
    assert_eq!(b.log(), [0x160_0000, 0x200_0000, 0x2c0_0000, 0x20_0000, 0].map(Free));
    let s = b.allocator.stats();
    assert_eq!((s.num_sync_all_streams, s.num_device_free), (1, 5));
}

fn tie_break(policy: Policy, falling: bool) -> (Vec<u64>, Vec<u64>) {
    let mut b = Bench::new(policy);
    if falling {
        b.driver.place_falling();
    }
    let segments: Vec<u64> = (1..=3).map(|id| b.m(id, 20_971_520, 0)).collect();
    [2, 1, 3].into_iter().for_each(|id| b.f(id));
    let served = vec![b.m(4, 20_971_520, 0), b.m(5, 20_971_520, 0), b.m(6, 1_500_000, 0), b.m(7, 1_500_000, 0)];
    (segments, served)
}

#[test]
fn g2_equal_blocks_of_the_oldest_segment_go_first() {
    let (segments, served) = tie_break(Policy::Torch215, false);
    assert_eq!(segments, [0, 0x140_0000, 0x280_0000]);
    assert_eq!(served, [0, 0x140_0000, 0x280_0000, 0x296_e400]);
}

#[test]
fn g2b_with_falling_addresses_2_15_goes_by_age_and_2_11_by_address() {
    let (s, served) = tie_break(Policy::Torch215, true);
    assert!(s[0].wrapping_add(1 << 40) > s[1].wrapping_add(1 << 40));
    assert_eq!(served[..3], [s[0], s[1], s[2]]);
    let (s, served) = tie_break(Policy::Torch211, true);
    assert_eq!(served[..3], [s[2], s[1], s[0]]);
}

#[test]
fn g3_split_threshold() {
    for (bytes, splits) in [(19_922_944, false), (19_922_432, true)] {
        let mut b = Bench::new(Policy::Torch215);
        b.m(1, 20_971_520 - 11 * MIB, 0);
        b.f(1);
        b.allocator.empty_cache().unwrap();
        let first = b.m(1, 5_000_000, 0);
        b.f(1);
        assert_eq!(b.m(2, bytes, 0), first);
        assert_eq!(b.blocks_at(first).len(), if splits { 2 } else { 1 });
    }
    let mut b = Bench::new(Policy::Torch215);
    b.m(1, 1_048_576, 0);
    b.m(2, 1_048_064, 0);
    assert_eq!(b.blocks_at(0)[2], (512, 0, Inactive));
}

#[test]
fn g4_blocks_never_serve_another_stream() {
    let mut b = Bench::new(Policy::Torch215);
    assert_eq!(b.m(1, 5_000_000, 1), 0);
    b.f(1);
    assert_eq!(b.m(2, 5_000_000, 2), 0x140_0000);
    assert_eq!(b.m(3, 5_000_000, 1), 0);
}

fn begin(b: &Bench, stream: u64, capture: u64, pool: PoolId) {
    b.allocator.set_current_stream(&b.stream(stream)).unwrap();
    b.allocator.begin_allocate_to_pool(pool, Filter::Capture(CaptureId(capture))).unwrap();
    b.driver.begin_capture(stream, capture);
    b.allocator.mark_capture_begin();
}

fn end(b: &Bench, stream: u64, pool: PoolId) {
    b.driver.end_capture(stream);
    b.allocator.mark_capture_end();
    b.allocator.end_allocate_to_pool(pool).unwrap();
}

#[test]
fn g5_a_capture_has_its_own_pool() {
    let mut b = Bench::new(Policy::Torch215);
    let pool = PoolId(1, 0);
    begin(&b, 1, 77, pool);
    assert_eq!(b.m(1, 1000, 1), 0);
    assert_eq!(b.m(2, 3_000_000, 1), 0x20_0000);
    assert_eq!(b.m(3, 500, 2), 0x160_0000);
    b.f(1);
    assert_eq!(b.m(4, 600, 1), 0);
    b.record(4, 2);
    b.f(4);
    assert_eq!(b.m(5, 600, 1), 0x400);
    end(&b, 1, pool);
    let s = b.allocator.stats();
    assert_eq!(flat(s.allocation.all), [3, 3, 5, 2]);
    assert_eq!(flat(s.active.all), [4, 4, 5, 1]);
    assert_eq!((s.active_bytes.all.current, s.allocated_bytes.all.current), (3_002_880, 3_001_856));
    let reserved = s.private_pools[&pool];
    assert_eq!(reserved.all.current, 23_068_672);
    assert_eq!((reserved.small_pool.current, reserved.large_pool.current), (2_097_152, 20_971_520));
    assert_eq!(b.m(6, 700, 1), 0x180_0000);
    assert!(b.driver.take_events().is_empty(), "the deferred block completes without an event");
    assert_eq!(b.allocator.stats().active.all.current, 4);
    b.allocator.release_pool(pool).unwrap();
    b.log();
    b.allocator.empty_cache().unwrap();
    assert_eq!(b.log(), []);
    b.f(2);
    b.f(5);
    b.allocator.empty_cache().unwrap();
    assert_eq!(b.log(), [Free(0), Free(0x20_0000)]);
    assert_eq!(b.allocator.pool_use_count(pool).unwrap_err().to_string(), PoolError::Unknown { pool }.to_string());
    assert_eq!(flat(b.allocator.stats().private_pools[&pool].all), [0, 23_068_672, 23_068_672, 23_068_672]);
}

#[test]
fn g5b_a_use_recorded_before_the_capture_gets_its_event_after_it() {
    let mut b = Bench::new(Policy::Torch215);
    b.m(1, 1000, 1);
    b.record(1, 2);
    begin(&b, 1, 77, PoolId(1, 0));
    b.f(1);
    b.m(2, 1000, 1);
    end(&b, 1, PoolId(1, 0));
    assert!(b.driver.take_events().is_empty());
    assert_eq!(b.m(3, 1000, 1), 0x400);
    assert_eq!(b.driver.take_events(), [2]);
    b.driver.complete_all();
    assert_eq!(b.m(4, 1000, 1), 0);
}

#[test]
fn g6_out_of_memory_frees_the_cache_and_asks_again() {
    let mut b = Bench::with(Config::new(Policy::Torch215), 80 << 30, 62_914_560);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    b.allocator.add_oom_observer(Arc::new(move |r| {
        sink.lock().unwrap().push((r.device, r.segment_size, r.driver.total, r.driver.free));
    }));
    b.m(1, 20_971_520, 0);
    b.m(2, 10_485_760, 0);
    b.m(3, 1000, 0);
    b.f(1);
    b.log();
    b.oom(52_428_800, 0);
    assert_eq!(b.log(), [Refused(52_428_800), Free(0), Refused(52_428_800)]);
    assert_eq!(*seen.lock().unwrap(), [(0, 52_428_800, 80 << 30, 50_331_648)]);
    b.f(2);
    b.m(5, 52_428_800, 0);
    assert!(matches!(b.log()[..], [Refused(_), Free(_), Malloc(..)]));
    let s = b.allocator.stats();
    assert_eq!((s.num_alloc_retries, s.num_ooms, s.num_sync_all_streams), (2, 1, 2));
    assert_eq!((s.num_device_alloc, s.num_device_free), (4, 2));
}

#[test]
fn g7_oversize_blocks_are_for_oversize_requests() {
    let config = Config::parse_pytorch("max_split_size_mb:40,max_non_split_rounding_mb:30", Policy::Torch215).unwrap();
    let mut b = Bench::with(config, 80 << 30, 80 << 30);
    assert_eq!(b.m(1, 52_428_800, 0), 0);
    b.f(1);
    assert_eq!(b.m(2, 10_485_760, 0), 0x320_0000);
    assert_eq!(b.m(3, 41_943_040, 0), 0);
    assert_eq!(b.block(3).size(), 52_428_800);
    b.f(3);
    assert_eq!(b.m(4, 20_971_520, 0), 0x3c0_0000);
    b.f(2);
    b.f(4);
    assert_eq!(b.m(5, 70_000_000, 0), 0x500_0000);
    assert_eq!(b.block(5).size(), 71_303_168);
    b.f(5);
    assert_eq!(b.m(6, 41_943_040, 0), 0);
    b.f(6);
    let s = b.allocator.stats();
    assert_eq!((s.oversize_allocations.allocated, s.oversize_allocations.freed), (4, 4));
    assert_eq!(flat(s.oversize_segments), [2, 2, 2, 0]);
}

#[test]
fn g8_garbage_collection_above_the_threshold() {
    let conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.1";
    let mut b = Bench::with(Config::parse_pytorch(conf, Policy::Torch215).unwrap(), 1 << 30, 1 << 30);
    assert_eq!(b.allocator.memory_limit().unwrap().bytes, 107_374_182);
    b.m(1, 20_971_520, 0);
    b.m(2, 23_068_672, 0);
    b.m(3, 25_165_824, 0);
    b.f(1);
    b.f(2);
    b.log();
    b.m(4, 1000, 0);
    assert!(matches!(b.log()[..], [Free(_), Free(_), Malloc(2_097_152, _)]));
}

#[test]
fn g9_a_no_split_pool_hands_out_whole_segments() {
    let mut b = Bench::new(Policy::Torch215);
    let pool = PoolId(0, 901);
    b.allocator.set_no_split(pool);
    b.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
    b.m(1, 1000, 0);
    b.m(2, 1000, 0);
    b.m(3, 3_000_000, 0);
    assert!(matches!(b.log()[..], [Malloc(2_097_152, _), Malloc(2_097_152, _), Malloc(20_971_520, _)]));
    assert!(b.allocator.state().segments.iter().all(|s| s.blocks.len() == 1));
    assert_eq!(b.allocator.stats().allocated_bytes.all.current, 25_165_824);
}

#[test]
fn g10_a_pool_serves_others_when_memory_is_short() {
    let mut b = Bench::with(Config::new(Policy::Torch215), 80 << 30, 41_943_040);
    let pool = PoolId(0, 7);
    b.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
    b.m(1, 41_943_040, 0);
    b.f(1);
    b.allocator.end_allocate_to_pool(pool).unwrap();
    b.allocator.set_use_on_oom(pool, true);
    b.log();
    assert_eq!(b.m(2, 30_000_000, 0), 0);
    assert_eq!(b.log(), [Refused(31_457_280)]);
    assert_eq!(b.blocks_at(0)[1], (11_942_912, 41_943_040, Inactive));
    let s = b.allocator.stats();
    assert_eq!((s.num_alloc_retries, s.num_ooms), (0, 0));
    assert_eq!(b.allocator.pool_use_count(pool).unwrap(), 1);
}

#[test]
fn g12_checkpoint_and_restore() {
    let mut b = Bench::new(Policy::Torch215);
    let pool = PoolId(1, 0);
    b.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
    b.m(1, 1000, 1);
    b.m(2, 2000, 1);
    b.m(3, 3_000_000, 1);
    let checkpoint = b.allocator.checkpoint_pool(pool).unwrap();
    b.f(2);
    assert_eq!(b.m(4, 500, 1), 0x400);
    b.f(3);
    assert_eq!(b.m(5, 700, 1), 0x600);
    assert_eq!(b.m(6, 12_000_000, 1), 0x20_0000);
    let restored = b.allocator.restore_pool(&checkpoint, &b.stream(1)).unwrap();
    b.allocator.validate().unwrap();
    let relative = |a: Address| a.0 - BASE;
    assert_eq!(restored.freed.iter().map(|a| relative(*a)).collect::<Vec<_>>(), [0, 0x400, 0x600, 0x20_0000]);
    let mut allocated: Vec<_> =
        restored.allocated.iter().map(|a| (relative(a.address()), a.size(), a.requested())).collect();
    allocated.sort_unstable();
    assert_eq!(allocated, [(0, 1024, 1024), (0x400, 2048, 2048), (0x20_0000, 3_000_320, 3_000_320)]);
    let s = b.allocator.stats();
    assert_eq!(flat(s.allocation.all), [3, 4, 11, 8]);
    assert_eq!(flat(s.allocated_bytes.all), [3_003_392, 20_971_520, 38_073_856, 35_070_464]);
    // The handles of before name nothing: dropping them frees no block of now.
    drop(b);
    drop(restored);
}

#[test]
fn g13_reuse_in_a_capture_once_the_graph_proves_the_order() {
    let config = Config::parse_pytorch("graph_capture_record_stream_reuse:True", Policy::Torch215).unwrap();
    let mut b = Bench::with(config, 80 << 30, 80 << 30);
    begin(&b, 1, 77, PoolId(1, 0));
    b.driver.begin_capture(2, 77);
    b.driver.set_frontier(1, &[101]);
    b.driver.set_frontier(2, &[102]);
    assert_eq!(b.m(1, 1000, 1), 0);
    b.record(1, 2);
    b.f(1);
    assert_eq!(b.m(2, 1000, 1), 0x400);
    b.driver.set_dependencies(103, &[101, 102]);
    b.driver.set_frontier(1, &[103]);
    assert_eq!(b.m(3, 1000, 1), 0);
    assert_eq!(b.allocator.stats().active.all.current, 2);
}

#[test]
fn g14_the_out_of_memory_text() {
    let config = Config::parse_pytorch("per_process_memory_fraction:0.001", Policy::Torch215).unwrap();
    // The driver has 58 MiB left beside the 42 MiB below.
    let mut b = Bench::with(config, 80 << 30, (58 + 42) * MIB);
    let pool = PoolId(0, 7);
    b.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
    b.m(1, 20_971_520, 0);
    b.m(2, 3_000_000, 0);
    b.f(1);
    b.allocator.end_allocate_to_pool(pool).unwrap();
    b.m(3, 1000, 0);
    let report = b.oom(60_000_000, 0);
    let text = report.pytorch_message();
    assert!(
        text.starts_with(
            "CUDA out of memory. Tried to allocate 58.00 MiB. GPU 0 has a total capacity of 80.00 GiB of which 58.00 MiB is free. \
             81.92 MiB allowed; Of the allocated memory 40.00 MiB is allocated by PyTorch, with 37.14 MiB allocated in private \
             pools (e.g., CUDA Graphs), and 2.00 MiB is reserved by PyTorch but unallocated."
        ),
        "{text}"
    );
}

#[test]
fn a_pending_block_is_free_once_its_event_is_complete() {
    let mut b = Bench::new(Policy::Torch215);
    b.m(1, 1000, 1);
    b.record(1, 2);
    b.f(1);
    assert_eq!(b.driver.take_events(), [2]);
    assert_eq!(b.blocks_at(0)[0].2, ActivePendingFree);
    assert_eq!(b.m(2, 1000, 1), 0x400);
    b.driver.complete_all();
    assert_eq!(b.m(3, 1000, 1), 0);
}

#[test]
fn torch_2_11_defers_frees_while_any_scope_is_open() {
    for (policy, expected) in [(Policy::Torch211, 0x400), (Policy::Torch215, 0)] {
        let mut b = Bench::new(policy);
        b.allocator.begin_allocate_to_pool(PoolId(0, 5), Filter::All).unwrap();
        b.m(1, 1000, 1);
        b.record(1, 2);
        b.f(1);
        b.driver.complete_all();
        assert_eq!(b.m(2, 1000, 1), expected, "{policy}");
    }
}

#[test]
fn torch_does_not_search_again_after_waiting_and_segments_does() {
    for (policy, first_succeeds) in [(Policy::Torch215, false), (Policy::Segments, true)] {
        let mut b = Bench::with(Config::new(policy), 80 << 30, 20_971_520);
        b.m(1, 9_000_000, 1);
        b.m(2, 9_000_000, 1);
        b.record(1, 2);
        b.f(1);
        if first_succeeds {
            assert_eq!(b.m(3, 9_000_000, 1), 0);
        } else {
            b.oom(9_000_000, 1);
            assert_eq!(b.m(3, 9_000_000, 1), 0);
        }
    }
}

#[test]
fn growth_beyond_the_fraction_is_rejected_outright() {
    let conf = "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5";
    let b = Bench::with(Config::parse_pytorch(conf, Policy::Torch215).unwrap(), 1 << 30, 1 << 30);
    b.allocator.set_memory_fraction(1.0).unwrap();
    let stream = b.stream(0);
    let error = b.allocator.alloc(600 * MIB, &stream).unwrap_err();
    assert!(matches!(error, AllocError::Rejected { requested } if requested == 600 * MIB), "{error}");
    assert_eq!((b.allocator.stats().num_oom_rejections, b.allocator.stats().num_ooms), (1, 0));
}

#[test]
fn exact_addresses_are_handed_out_where_they_are_free() {
    let mut b = Bench::new(Policy::Torch215);
    b.m(1, 5_000_000, 0);
    b.f(1);
    let stream = b.allocator.register_stream(StreamHandle(0));
    let at = b.allocator.alloc_at(1000, Address(BASE + 0x1000), &stream).unwrap().unwrap();
    assert_eq!(at.address(), Address(BASE + 0x1000));
    b.allocator.validate().unwrap();
    assert!(b.allocator.alloc_at(1000, Address(BASE + 0x1000), &stream).unwrap().is_none());
    assert!(b.allocator.alloc_at(1000, Address(BASE + 1), &stream).unwrap().is_none());
    let s = b.allocator.stats();
    assert_eq!((s.allocation.all.allocated, s.allocation.all.freed), (3, 2));
}
