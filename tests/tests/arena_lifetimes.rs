//! How long arenas live: as long as anything in them is live or somebody refers to them, whoever drops what in which order, on which thread.

use std::cell::RefCell;
use std::sync::{Arc, Barrier};

use gpupool_allocator::{Allocation, Allocator, Config, Filter, Policy, PoolId, Stream};
use gpupool_device::{StreamKind, Workbench};
use gpupool_sim_device::{SimConfig, SimDevice};

type Block = Allocation<SimDevice>;

const SIZES: [u64; 4] = [512, 4 << 10, 1 << 20, 3 << 20];

fn allocator(config: Config) -> (Arc<SimDevice>, Allocator<SimDevice>) {
    let device = Arc::new(SimDevice::new(SimConfig::default()));
    let allocator = Allocator::with_registry(Arc::clone(&device), config, Arc::default()).unwrap();
    (device, allocator)
}

fn stream(allocator: &Allocator<SimDevice>) -> Stream<SimDevice> {
    let handle = allocator.device().stream_create(StreamKind::NonBlocking).unwrap();
    allocator.register_stream(handle)
}

/// Nothing is left of an allocator: no memory, and nobody who refers to the device.
fn assert_gone(device: Arc<SimDevice>) {
    assert_eq!(device.memory_in_use(), 0);
    assert_eq!(device.reports(), []);
    assert_eq!(Arc::strong_count(&device), 1, "somebody still refers to the device");
}

#[test]
fn the_last_live_block_takes_its_arena_and_the_device_with_it() {
    for policy in Policy::ALL {
        let (device, allocator) = allocator(Config::new(*policy));
        let stream = stream(&allocator);
        let mut blocks: Vec<Block> = SIZES.iter().map(|bytes| allocator.alloc(*bytes, &stream).unwrap()).collect();
        drop(allocator.alloc(512, &stream).unwrap());
        drop((allocator, stream));
        while let Some(block) = blocks.pop() {
            assert!(device.memory_in_use() > 0, "{policy}: the memory is gone under {block:?}");
            block.free().unwrap();
        }
        assert_gone(device);
    }
}

#[test]
fn blocks_that_outlive_their_allocator_are_freed_by_many_threads_at_once() {
    const THREADS: usize = 4;
    for policy in Policy::ALL {
        for round in 0..20 {
            let (device, allocator) = allocator(Config::new(*policy));
            let streams: Vec<_> = (0..2).map(|_| stream(&allocator)).collect();
            let mut shares: Vec<Vec<Block>> = (0..THREADS).map(|_| Vec::new()).collect();
            for at in 0..40 {
                let block = allocator.alloc(SIZES[at % SIZES.len()], &streams[at % 2]).unwrap();
                if at % 5 == 0 {
                    block.record_stream(&streams[1 - at % 2]).unwrap();
                }
                shares[at % THREADS].push(block);
            }
            drop(streams);
            // The allocator goes while they are at it, too.
            let start = Barrier::new(THREADS + 1);
            std::thread::scope(|scope| {
                for share in shares {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        drop(share);
                    });
                }
                start.wait();
                (0..round).for_each(|_| std::hint::spin_loop());
                drop(allocator);
            });
            assert_gone(device);
        }
    }
}

#[test]
fn arenas_of_pools_and_streams_that_come_and_go_leave_nothing() {
    for policy in Policy::ALL {
        let (device, allocator) = allocator(Config::new(*policy));
        let mut kept = Vec::new();
        for _ in 0..20 {
            let handle = device.stream_create(StreamKind::NonBlocking).unwrap();
            let stream = allocator.register_stream(handle);
            let pool = PoolId::fresh();
            allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
            kept.push(allocator.alloc(512, &stream).unwrap());
            drop(allocator.alloc(3 << 20, &stream).unwrap());
            allocator.end_allocate_to_pool(pool).unwrap();
            kept.push(allocator.alloc(512, &stream).unwrap());
            if kept.len() > 6 {
                kept.drain(..3);
            }
            allocator.release_pool(pool).unwrap();
            allocator.retire_stream(&stream).unwrap();
            allocator.empty_cache().unwrap();
            allocator.validate().unwrap();
        }
        drop(allocator);
        drop(kept);
        assert_gone(device);
    }
}

#[test]
fn a_stale_handle_frees_nothing_in_the_arenas_that_come_after_its_own() {
    for policy in Policy::ALL {
        let stale = {
            let (device, allocator) = allocator(Config::new(*policy));
            let stream = stream(&allocator);
            let pool = PoolId::fresh();
            allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
            drop(allocator.alloc(10 << 20, &stream).unwrap());
            let empty = allocator.checkpoint_pool(pool).unwrap();
            let stale = allocator.alloc(10 << 20, &stream).unwrap();
            drop(allocator.restore_pool(&empty, &stream).unwrap());
            allocator.end_allocate_to_pool(pool).unwrap();
            allocator.release_pool(pool).unwrap();
            drop((allocator, stream));
            assert_gone(device);
            stale
        };
        let weak = stale.downgrade().unwrap();
        // Arenas enough to come by whatever the one that is gone has left.
        let others: Vec<_> = (0..8)
            .map(|_| {
                let (device, allocator) = allocator(Config::new(*policy));
                let stream = stream(&allocator);
                let blocks: Vec<_> = (0..4).map(|_| allocator.alloc(10 << 20, &stream).unwrap()).collect();
                (device, allocator, blocks)
            })
            .collect();
        assert!(!weak.is_live());
        assert_eq!(stale.placement(), None);
        assert_eq!((stale.size(), stale.requested()), (0, 0));
        assert!(stale.free().is_err());
        for (device, allocator, blocks) in others {
            assert_eq!(allocator.stats().allocation.all.current, 4, "{policy}");
            assert!(blocks.iter().all(|block| block.downgrade().unwrap().is_live()));
            allocator.validate().unwrap();
            drop((allocator, blocks));
            assert_gone(device);
        }
    }
}

#[test]
fn a_driver_allocation_of_its_own_outlives_its_allocator() {
    let (device, allocator) = allocator(Config::new(Policy::Segments).with_caching(false));
    let stream = stream(&allocator);
    let (one, two) = (allocator.alloc(512, &stream).unwrap(), allocator.alloc(512, &stream).unwrap());
    drop((allocator, stream));
    drop(one);
    assert!(device.memory_in_use() > 0);
    drop(two);
    assert_gone(device);
}

/// The record of such a block is somebody else's, or part of what is free, while its arena is there.
#[test]
fn a_block_that_a_restored_checkpoint_took_away_has_no_size() {
    for policy in Policy::ALL {
        let (device, allocator) = allocator(Config::new(*policy));
        let stream = stream(&allocator);
        let pool = PoolId::fresh();
        allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
        let empty = allocator.checkpoint_pool(pool).unwrap();
        let stale = [512, 10 << 20].map(|bytes| allocator.alloc(bytes, &stream).unwrap());
        assert!(stale.iter().all(|block| block.size() == block.requested()));
        drop(allocator.restore_pool(&empty, &stream).unwrap());
        for block in stale {
            assert_eq!((block.size(), block.requested(), block.placement()), (0, 0, None), "{policy}");
            assert_eq!(block.downgrade().unwrap().range().bytes, 0);
            assert!(block.free().is_err());
        }
        allocator.end_allocate_to_pool(pool).unwrap();
        allocator.release_pool(pool).unwrap();
        drop((allocator, stream));
        assert_gone(device);
    }
}

#[test]
fn a_block_in_thread_local_storage_is_freed_as_its_thread_ends() {
    thread_local! {
        static KEPT: RefCell<Vec<Block>> = const { RefCell::new(Vec::new()) };
    }
    let (device, allocator) = allocator(Config::new(Policy::Segments));
    let stream = stream(&allocator);
    let other = stream.clone();
    std::thread::spawn(move || {
        let block = |bytes| allocator.alloc(bytes, &other).unwrap();
        KEPT.with_borrow_mut(|kept| kept.extend(SIZES.map(block)));
        drop(allocator);
    })
    .join()
    .unwrap();
    drop(stream);
    assert_gone(device);
}
