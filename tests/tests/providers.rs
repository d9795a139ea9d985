//! Pools whose memory comes from somewhere else than the driver: every range goes back through its provider, once and as it was given,
//! on whatever way it leaves. Beside that: reclaimers, and an allocator that does not cache.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use gpupool_allocator::state::BackingKind;
use gpupool_allocator::{AllocError, Config, Filter, Part, Policy, PoolError, PoolId, SegmentProvider};
use gpupool_device::{Address, Call, StreamHandle, code};
use gpupool_tests::lab::{BACKINGS, Backing, Block, Lab, MIB, segments};

/// Gives so many bytes, and knows what it gave.
struct Counting {
    left: AtomicU64,
    given: Mutex<BTreeMap<Address, u64>>,
    next: AtomicU64,
    calls: AtomicU64,
}

impl Counting {
    fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            left: AtomicU64::new(bytes),
            given: Mutex::default(),
            next: AtomicU64::new(0x10_0000_0000),
            calls: AtomicU64::new(0),
        })
    }

    fn outstanding(&self) -> usize {
        self.given.lock().unwrap().len()
    }
}

impl SegmentProvider for Counting {
    fn allocate(&self, bytes: u64, _: StreamHandle) -> Option<Address> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes)).ok()?;
        let address = Address(self.next.fetch_add(bytes.next_multiple_of(2 * MIB), Ordering::Relaxed));
        self.given.lock().unwrap().insert(address, bytes);
        Some(address)
    }

    fn release(&self, address: Address, bytes: u64) {
        assert_eq!(self.given.lock().unwrap().remove(&address), Some(bytes), "given back as it was given, and once");
        self.left.fetch_add(bytes, Ordering::Relaxed);
    }
}

fn request(lab: &Lab, stream: u64, mib: u64) -> Result<Block, AllocError> {
    let result = lab.allocator.alloc(mib * MIB, &lab.stream(stream));
    lab.allocator.validate().unwrap();
    result
}

fn configurations() -> Vec<Config> {
    let mut all = vec![segments(Backing::Virtual), segments(Backing::Plain)];
    all.extend([Policy::Torch215, Policy::Torch211].map(Config::new));
    all
}

#[test]
fn every_range_goes_back_through_the_provider_it_came_from() {
    for config in configurations() {
        for allocator_first in [false, true] {
            let (lab, provider, pool) = (Lab::with(config.clone(), 1_000), Counting::new(500 * MIB), PoolId::fresh());
            lab.allocator.create_pool_with(pool, Arc::clone(&provider) as Arc<dyn SegmentProvider>).unwrap();
            lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
            let blocks: Vec<Block> = [1, 5, 30, 70].map(|n| request(&lab, 1, n).unwrap()).into();
            assert_eq!(lab.device.sim.memory_in_use(), 0, "none of it is the driver's");
            let state = lab.allocator.state();
            assert!(state.segments.iter().all(|s| s.backing == BackingKind::Provider && s.pool == pool));
            let given: u64 = provider.given.lock().unwrap().values().sum();
            assert_eq!(state.stats.reserved_bytes.all.current as u64, given);
            // A free of a block with a use elsewhere, to be waited for.
            lab.run(2, &blocks[2]);
            lab.record(&blocks[2], 2);
            lab.allocator.end_allocate_to_pool(pool).unwrap();
            let other = request(&lab, 1, 20).unwrap();
            assert_eq!(lab.device.sim.memory_in_use(), 20 * MIB, "outside the pool the driver is asked");
            (0..2).for_each(|_| lab.allocator.release_pool(pool).unwrap());
            if allocator_first {
                drop(lab);
                drop((blocks, other));
            } else {
                drop((blocks, other));
                lab.allocator.empty_cache().unwrap();
                assert_eq!(lab.reserved(), 0);
                assert!(lab.allocator.pool_stats(pool).is_err());
            }
            assert_eq!(provider.outstanding(), 0, "allocator first: {allocator_first}");
        }
    }
}

#[test]
fn a_provider_with_nothing_left_is_out_of_memory_and_its_idle_ranges_go_first() {
    for config in configurations() {
        let (lab, provider, pool) = (Lab::with(config.clone(), 1_000), Counting::new(100 * MIB), PoolId::fresh());
        lab.allocator.create_pool_with(pool, Arc::clone(&provider) as Arc<dyn SegmentProvider>).unwrap();
        lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
        let x = request(&lab, 1, 60).unwrap();
        let AllocError::OutOfMemory(report) = request(&lab, 1, 50).unwrap_err() else { panic!() };
        assert_eq!((report.pool, report.reserved), (pool, 60 * MIB));
        drop(x);
        // PyTorch gives back nothing of a pool that somebody uses.
        let y = request(&lab, 1, 80);
        assert_eq!(y.is_ok(), !config.policy().is_bit_exact(), "{:?}", config.policy());
        drop(y);
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        (0..2).for_each(|_| lab.allocator.release_pool(pool).unwrap());
        lab.allocator.empty_cache().unwrap();
        assert_eq!((provider.outstanding(), provider.left.load(Ordering::Relaxed)), (0, 100 * MIB));
        assert_eq!(lab.device.sim.call_counts().get(&Call::MemAlloc), None);
    }
}

#[test]
fn a_provider_can_only_be_given_to_a_new_pool() {
    let (lab, provider, pool) = (Lab::new(Backing::Virtual, 1_000), Counting::new(MIB), PoolId::fresh());
    lab.allocator.create_pool(pool).unwrap();
    let refused = lab.allocator.create_pool_with(pool, provider).unwrap_err();
    assert!(matches!(refused, AllocError::Pool(PoolError::HasProvider { .. })), "{refused}");
    assert_eq!(lab.allocator.pool_use_count(pool).unwrap(), 1);
    lab.allocator.release_pool(pool).unwrap();
    lab.done();
}

#[test]
fn reclaimers_are_asked_in_order_once_a_request_and_may_use_the_allocator() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 100);
        let asked: Arc<Mutex<Vec<(i32, u64)>>> = Arc::default();
        let mut hooks = Vec::new();
        for priority in [1, 5, 3, 5] {
            let (asked, allocator, stream) = (Arc::clone(&asked), lab.allocator.clone(), lab.stream(2));
            hooks.push(lab.allocator.add_reclaimer(
                priority,
                Arc::new(move |bytes| {
                    asked.lock().unwrap().push((priority, bytes));
                    drop(allocator.alloc(1_000, &stream));
                    // It claims to have helped every time, and never has.
                    true
                }),
            ));
        }
        let x = lab.alloc(1, 98);
        asked.lock().unwrap().clear();
        lab.oom(1, 60);
        assert_eq!(*asked.lock().unwrap(), [5, 5, 3, 1].map(|p| (p, 60 * MIB)));
        drop(x);
        hooks.into_iter().for_each(|hook| assert!(lab.allocator.remove_hook(hook)));
        lab.done();
    }
}

#[test]
fn a_stream_retired_during_a_request_of_its_own_keeps_no_memory() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let (allocator, stream) = (lab.allocator.clone(), lab.stream(1));
        let gone = stream.clone();
        let hook = lab.allocator.add_reclaimer(
            0,
            Arc::new(move |_| {
                allocator.retire_stream(&gone).unwrap();
                allocator.trim().unwrap();
                false
            }),
        );
        let refused = lab.allocator.alloc(30 * MIB, &stream).unwrap_err();
        assert!(matches!(refused, AllocError::RetiredStream { .. }), "{refused}");
        assert_eq!(lab.reserved(), 0, "{backing:?}: whoever keeps the stream's handle keeps no memory");
        assert!(lab.allocator.remove_hook(hook));
        drop(stream);
        lab.done();
    }
}

#[test]
fn a_pool_given_up_during_a_request_for_it_keeps_no_memory() {
    for policy in [Policy::Segments, Policy::Torch215] {
        let lab = Lab::with(Config::new(policy), 1_000);
        let pool = PoolId::fresh();
        lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
        let allocator = lab.allocator.clone();
        let hook = lab.allocator.add_reclaimer(
            0,
            Arc::new(move |_| {
                allocator.end_allocate_to_pool(pool).unwrap();
                allocator.release_pool(pool).unwrap();
                allocator.empty_cache().unwrap();
                false
            }),
        );
        let refused = lab.allocator.alloc(30 * MIB, &lab.stream(1)).unwrap_err();
        assert!(matches!(refused, AllocError::Pool(PoolError::Unknown { .. })), "{refused}");
        assert_eq!(lab.reserved(), 0);
        assert!(lab.allocator.remove_hook(hook));
        lab.done();
    }
}

#[test]
fn an_observer_whose_own_request_finds_no_memory_is_not_told_of_that() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 100);
        let told = Arc::new(AtomicU64::new(0));
        let (count, allocator, stream) = (Arc::clone(&told), lab.allocator.clone(), lab.stream(2));
        let hook = lab.allocator.add_oom_observer(Arc::new(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            assert!(allocator.alloc(500 * MIB, &stream).is_err());
        }));
        lab.oom(1, 200);
        lab.oom(1, 200);
        assert_eq!((told.load(Ordering::Relaxed), lab.allocator.stats().num_ooms), (2, 4));
        assert!(lab.allocator.remove_hook(hook));
        lab.done();
    }
}

#[test]
fn without_caching_each_request_and_each_free_is_the_drivers() {
    for policy in Policy::ALL {
        let lab = Lab::with(Config::new(*policy).with_caching(false), 1_000);
        let blocks: Vec<Block> =
            [1_000, 5_000_000, 900 * MIB].map(|n| lab.allocator.alloc(n, &lab.stream(1)).unwrap()).into();
        assert_eq!(blocks.iter().map(Block::size).collect::<Vec<_>>(), [1_000, 5_000_000, 900 * MIB]);
        assert!(blocks.iter().all(|b| b.placement().is_none()));
        let AllocError::OutOfMemory(report) = lab.allocator.alloc(200 * MIB, &lab.stream(1)).unwrap_err() else {
            panic!()
        };
        assert_eq!((report.requested, report.reserved), (200 * MIB, 0));
        blocks[0].record_stream(&lab.stream(2)).unwrap();
        drop(blocks);
        let stats = lab.allocator.stats();
        assert_eq!((stats.allocation.all.allocated, stats.reserved_bytes.all.peak), (0, 0));
        let calls = |call| lab.device.sim.calls(call);
        assert_eq!((calls(Call::MemAlloc), calls(Call::MemFree), calls(Call::EventRecord)), (4, 3, 0));
        assert_eq!(lab.device.sim.memory_in_use(), 0);
    }
}

#[test]
fn without_caching_what_the_driver_did_not_take_is_given_back_later() {
    for policy in Policy::ALL {
        let lab = Lab::with(Config::new(*policy).with_caching(false), 1_000);
        let block = lab.allocator.alloc(10 * MIB, &lab.stream(1)).unwrap();
        lab.device.sim.fail_nth(Call::MemFree, 1, code::UNKNOWN);
        drop(block);
        lab.allocator.empty_cache().unwrap();
        assert_eq!(lab.device.sim.memory_in_use(), 0);
    }
}

#[test]
fn reserving_more_than_a_segment_can_be_is_refused_and_takes_nothing() {
    const TIB: u64 = 1 << 40;
    let (lab, provider, pool) = (Lab::new(Backing::Virtual, 1_000), Counting::new(u64::MAX / 2), PoolId::fresh());
    lab.allocator.create_pool_with(pool, Arc::clone(&provider) as Arc<dyn SegmentProvider>).unwrap();
    for bytes in [2 * TIB, 4 * TIB, u64::MAX] {
        let refused = lab.allocator.reserve_pool(pool, Part::Large, bytes).unwrap_err();
        assert!(matches!(refused, AllocError::CannotReserve { .. }), "{refused}");
    }
    assert_eq!((lab.reserved(), provider.calls.load(Ordering::Relaxed)), (0, 0));
    lab.allocator.release_pool(pool).unwrap();
    lab.done();
}

#[test]
fn a_checkpoint_of_another_allocators_pool_of_the_same_id_changes_nothing() {
    let pool = PoolId::fresh();
    let labs = [4u64, 40].map(|mib| {
        let lab = Lab::new(Backing::Virtual, 1_000);
        lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
        let block = lab.alloc(1, mib);
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        (lab, block)
    });
    let checkpoint = labs[1].0.allocator.checkpoint_pool(pool).unwrap();
    let (lab, block) = &labs[0];
    let before = lab.live_blocks();
    let refused = lab.allocator.restore_pool(&checkpoint, &lab.stream(1)).map(drop).unwrap_err();
    assert!(matches!(refused, AllocError::Pool(PoolError::CheckpointMismatch { .. })), "{refused}");
    assert!(lab.live_blocks() == before && block.size() == 4 * MIB);
    for (lab, block) in labs {
        drop(block);
        lab.allocator.release_pool(pool).unwrap();
        lab.done();
    }
}

/// Gives what no segment can be made of.
struct Crooked {
    address: u64,
    released: AtomicU64,
}

impl SegmentProvider for Crooked {
    fn allocate(&self, _: u64, _: StreamHandle) -> Option<Address> {
        Some(Address(self.address))
    }

    fn release(&self, address: Address, _: u64) {
        assert_eq!(address, Address(self.address));
        self.released.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn what_a_provider_gives_out_of_line_is_given_back_and_refused() {
    for config in configurations() {
        for (address, returned) in [(0, 0), (0x10_0000_0100, 1), (u64::MAX - 511, 1)] {
            let lab = Lab::with(config.clone(), 1_000);
            let provider = Arc::new(Crooked { address, released: AtomicU64::new(0) });
            let pool = PoolId::fresh();
            lab.allocator.create_pool_with(pool, Arc::clone(&provider) as _).unwrap();
            lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
            match (request(&lab, 1, 8), address) {
                (Err(AllocError::OutOfMemory(_)), 0) => {}
                (Err(AllocError::Driver(e)), 1..) => assert_eq!(e.code, code::INVALID_VALUE),
                (other, _) => panic!("{address:#x}: {other:?}"),
            }
            assert_eq!((provider.released.load(Ordering::Relaxed) > 0) as u64, returned);
            lab.allocator.end_allocate_to_pool(pool).unwrap();
            lab.allocator.release_pool(pool).unwrap();
            lab.done();
        }
    }
}
