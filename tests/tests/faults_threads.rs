//! Fault catalogue, groups (f) and (g): threads, devices, foreign pointers, requests of zero bytes. Each test says which entry it holds
//! us to; sizes are MiB.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use gpupool_allocator::{AllocError, Allocator, Config, Filter, FreeError, Policy, PoolError, PoolId};
use gpupool_device::{Address, Call};
use gpupool_sim_device::{SimConfig, SimWorld};
use gpupool_tests::lab::{BACKINGS, Backing, Block, Lab, MIB, segments};
use gpupool_tests::watched::Watched;

fn pool_of(lab: &Lab, block: &Block) -> PoolId {
    let state = lab.allocator.state();
    let holds = |s: &&gpupool_allocator::state::SegmentState| {
        s.address <= block.address() && block.address().offset_from(s.address) < s.size
    };
    state.segments.iter().find(holds).unwrap().pool
}

fn two_devices() -> [Lab; 2] {
    let world = SimWorld::new(2, SimConfig::default().with_capacity(1_000 * MIB));
    [0, 1].map(|ordinal| {
        let device = Arc::new(Watched::new(world.device(ordinal).unwrap()));
        let config = Config::new(Policy::Segments);
        Lab { allocator: Allocator::with_registry(Arc::clone(&device), config, Arc::default()).unwrap(), device }
    })
}

// Entry 62.
#[test]
fn a_scope_routes_only_the_requests_of_its_thread() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let pool = PoolId::fresh();
        lab.allocator.begin_allocate_to_pool(pool, Filter::Thread(std::thread::current().id())).unwrap();
        let mine = lab.alloc(1, 10);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let theirs = lab.alloc(1, 10);
                assert_eq!(pool_of(&lab, &theirs), PoolId::DEFAULT);
                let refused = lab.allocator.end_allocate_to_pool(pool).unwrap_err();
                assert!(matches!(refused, AllocError::Pool(PoolError::NotRecording { .. })), "{refused}");
                lab.free(theirs);
            });
        });
        assert_eq!(pool_of(&lab, &mine), pool);
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        let after = lab.alloc(1, 10);
        assert_eq!(pool_of(&lab, &after), PoolId::DEFAULT);
        drop((mine, after));
        lab.allocator.release_pool(pool).unwrap();
        lab.done();
    }
}

// Entry 62.
#[test]
fn the_innermost_scope_wins() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 1_000);
        let me = Filter::Thread(std::thread::current().id());
        let (outer, inner) = (PoolId::fresh(), PoolId::fresh());
        let scope = |pool| lab.allocator.begin_allocate_to_pool(pool, me).unwrap();
        scope(outer);
        let a = lab.alloc(1, 10);
        scope(inner);
        let b = lab.alloc(1, 10);
        // The same pool once more, inside.
        scope(outer);
        let c = lab.alloc(1, 5);
        lab.allocator.end_allocate_to_pool(outer).unwrap();
        let d = lab.alloc(1, 5);
        lab.allocator.end_allocate_to_pool(inner).unwrap();
        let e = lab.alloc(1, 5);
        lab.allocator.end_allocate_to_pool(outer).unwrap();
        let f = lab.alloc(1, 5);
        let places = [&a, &b, &c, &d, &e, &f].map(|block| pool_of(&lab, block));
        assert_eq!(places, [outer, inner, outer, inner, outer, PoolId::DEFAULT]);
        drop([a, b, c, d, e, f]);
        for (pool, users) in [(outer, 2), (inner, 1)] {
            assert_eq!(lab.allocator.pool_use_count(pool).unwrap(), users);
            (0..users).for_each(|_| lab.allocator.release_pool(pool).unwrap());
        }
        lab.done();
    }
}

// Entry 63.
#[test]
fn a_pool_belongs_to_its_device() {
    let [here, there] = two_devices();
    let pool = PoolId::fresh();
    here.allocator.create_pool(pool).unwrap();
    for error in [
        there.allocator.release_pool(pool).unwrap_err(),
        there.allocator.pool_stats(pool).map(|_| ()).unwrap_err(),
        there.allocator.checkpoint_pool(pool).map(|_| ()).unwrap_err(),
    ] {
        assert!(matches!(error, AllocError::Pool(PoolError::Unknown { pool: p }) if p == pool), "{error}");
    }
    here.allocator.release_pool(pool).unwrap();
    here.done();
    there.done();
}

// Entry 63.
#[test]
fn a_block_is_freed_on_its_own_device_whoever_drops_it() {
    let [here, there] = two_devices();
    let (x, y) = (here.alloc(1, 10), there.alloc(1, 20));
    std::thread::scope(|scope| {
        scope.spawn(move || drop((x, y)));
    });
    assert_eq!((here.live(), there.live()), (0, 0));
    assert_eq!((here.reserved(), there.reserved()), (10, 20));
    here.done();
    there.done();
}

// Entry 64. Beside this, `threads`.
#[test]
fn emptying_the_cache_beside_threads_that_allocate_corrupts_nothing() {
    for backing in BACKINGS {
        let lab = Lab::new(backing, 2_000);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let lab = &lab;
                scope.spawn(move || {
                    let stream = lab.stream(1 + thread);
                    for i in 0..200 {
                        let block = lab.allocator.alloc((1 + i % 30) * MIB, &stream).unwrap();
                        lab.device.handed(stream.handle(), block.address(), block.size()).unwrap();
                        block.record_stream(&lab.stream(9)).unwrap();
                        block.free().unwrap();
                    }
                });
            }
            scope.spawn(|| {
                for i in 0..200 {
                    let _trimmed =
                        if i % 2 == 0 { lab.allocator.trim().unwrap() } else { lab.allocator.empty_cache().unwrap() };
                }
            });
        });
        lab.check();
        lab.done();
    }
}

// Entry 68.
#[test]
fn an_address_that_is_no_live_block_is_refused_and_nothing_changes() {
    for policy in Policy::ALL {
        let (lab, other) = (Lab::with(Config::new(*policy), 1_000), Lab::with(Config::new(*policy), 1_000));
        let address = lab.allocator.into_raw(lab.alloc(1, 10));
        let keep = lab.alloc(1, 10);
        let foreign = other.allocator.into_raw(other.alloc(1, 700));
        // A block that is owned by its handle cannot be freed by its address.
        let owned = keep.address();
        let before = lab.live_blocks();
        let refused = |at: Address| {
            let error = lab.allocator.from_raw(at).unwrap_err();
            assert_eq!(error, FreeError::NotLive { address: at });
            assert!(error.to_string().contains(&at.to_string()));
            lab.check();
        };
        for wrong in [
            address.offset(512),
            address.offset(10 * MIB - 1),
            owned,
            foreign.offset(512),
            Address(1),
            Address(u64::MAX),
        ] {
            refused(wrong);
        }
        assert_eq!(lab.live_blocks(), before);
        lab.allocator.from_raw(address).unwrap().free().unwrap();
        let after = lab.live_blocks();
        // Twice.
        refused(address);
        assert_eq!(lab.live_blocks(), after);
        other.allocator.from_raw(foreign).unwrap().free().unwrap();
        drop(keep);
        lab.done();
        other.done();
    }
}

// Entry 68.
#[test]
fn a_handle_that_a_checkpoint_took_away_frees_nobody_elses_block() {
    for policy in Policy::ALL {
        let lab = Lab::with(Config::new(*policy), 1_000);
        let pool = PoolId::fresh();
        lab.allocator.begin_allocate_to_pool(pool, Filter::All).unwrap();
        let a = lab.alloc(1, 10);
        let empty = lab.allocator.checkpoint_pool(pool).unwrap();
        drop(a);
        let stale = lab.alloc(1, 10);
        let restored = lab.allocator.restore_pool(&empty, &lab.stream(1)).unwrap();
        assert_eq!(restored.freed, [stale.address()]);
        assert_eq!(restored.allocated[0].address(), stale.address());
        let before = lab.live_blocks();
        assert_eq!(stale.record_stream(&lab.stream(2)), Err(FreeError::NotLive { address: stale.address() }));
        assert_eq!(stale.placement(), None);
        let address = stale.address();
        assert_eq!(stale.free(), Err(FreeError::NotLive { address }));
        assert_eq!(lab.live_blocks(), before);
        lab.check();
        drop(restored);
        lab.allocator.end_allocate_to_pool(pool).unwrap();
        lab.allocator.release_pool(pool).unwrap();
        lab.done();
    }
}

// Entry 69.
#[test]
fn growth_on_one_stream_holds_up_no_hit_on_any_stream() {
    for backing in BACKINGS {
        // Growth must leave the idle blocks where they are.
        let lab = Lab::with(segments(backing).with_trim_before_growth(false), 10_000);
        let warm = [1, 2].map(|stream| lab.alloc(stream, 10));
        drop(warm);
        let (entered, wait_entered) = channel();
        let (leave, wait_leave) = channel();
        let (entered, wait_leave) = (Mutex::new(entered), Mutex::new(wait_leave));
        lab.device.before_growth(Box::new(move |_| {
            entered.lock().unwrap().send(()).unwrap();
            wait_leave.lock().unwrap().recv().unwrap();
        }));
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| lab.allocator.alloc(5_000 * MIB, &lab.stream(1)).unwrap());
            wait_entered.recv().unwrap();
            // The first thread is inside the driver until it is told to go on.
            for stream in [1, 2] {
                let hit = lab.allocator.alloc(10 * MIB, &lab.stream(stream)).unwrap();
                hit.record_stream(&lab.stream(3 - stream)).unwrap();
                drop(hit);
                let _ = (lab.allocator.stats(), lab.allocator.state());
            }
            leave.send(()).unwrap();
            drop(slow.join().unwrap());
        });
        lab.done();
    }
}

// Entry 69.
#[test]
fn one_streams_hits_write_nothing_that_another_streams_hits_read() {
    // What can be seen of it from outside: each stream has blocks, bins and counters of its own.
    let lab = Lab::new(Backing::Virtual, 1_000);
    let both: Vec<Block> = [1, 2].map(|s| lab.alloc(s, 5)).into();
    let state = lab.allocator.state();
    let streams: Vec<_> = state.segments.iter().map(|s| s.stream).collect();
    assert_eq!(streams, [lab.stream(1).id(), lab.stream(2).id()]);
    drop(both);
    lab.done();
}

// Entry 69. A miss takes nobody's lock for nothing, and nobody's bins are emptied for it.
#[test]
fn a_miss_leaves_what_other_streams_keep_in_bins() {
    let lab = Lab::new(Backing::Virtual, 10_000);
    let most = lab.alloc(4, 100);
    lab.free(most);
    lab.allocator.trim().unwrap();
    assert_eq!(lab.reserved(), 0);
    let small = lab.try_bytes(2, 512).unwrap();
    lab.free(small);
    let binned = || lab.allocator.stats().binned;
    assert_eq!(binned(), 1);
    let grown = lab.alloc(1, 30);
    let also_small = lab.try_bytes(1, 512).unwrap();
    assert_eq!((binned(), lab.reserved()), (1, 34));
    // Before more is held than ever before they are emptied: their segment is what is wanted.
    let more = lab.alloc(1, 66);
    assert_eq!((binned(), lab.reserved()), (1, 100));
    let last = lab.try_bytes(3, 512).unwrap();
    assert_eq!((binned(), lab.reserved()), (0, 100));
    [grown, also_small, more, last].into_iter().for_each(|block| lab.free(block));
    lab.done();
}

// Entry 69. What one stream has done with serves the next one, so that a first pass is held by little memory; but not for ever, since each
// then takes what the next one misses.
#[test]
fn streams_that_take_turns_end_up_with_memory_of_their_own() {
    let lab = Lab::new(Backing::Virtual, 10_000);
    let turn = || {
        for stream in [1, 2, 3] {
            let block = lab.alloc(stream, 100);
            lab.free(block);
        }
    };
    let reserved = || lab.allocator.stats().reserved_bytes.all.current as u64 / MIB;
    turn();
    assert_eq!(reserved(), 100);
    (0..10).for_each(|_| turn());
    // A repetition grows in rounder steps.
    assert_eq!(reserved(), 100 + 2 * 128);
    let before = (lab.calls(), lab.allocator.stats().misses);
    (0..10).for_each(|_| turn());
    assert_eq!((lab.calls(), lab.allocator.stats().misses), before);
    lab.done();
}

// Entry 69.
#[test]
fn streams_that_take_turns_share_what_there_is_where_memory_is_short() {
    let lab = Lab::new(Backing::Virtual, 10_000);
    lab.allocator.set_memory_limit(Some(200 * MIB));
    for _ in 0..20 {
        for stream in [1, 2, 3] {
            let block = lab.alloc(stream, 100);
            lab.free(block);
        }
    }
    assert_eq!(lab.allocator.stats().reserved_bytes.all.peak as u64, 100 * MIB);
    lab.done();
}

// Entry 100.
#[test]
fn a_request_of_zero_bytes_gets_null_and_null_can_be_freed_anywhere() {
    for policy in Policy::ALL {
        let [lab, other] = two_devices();
        let (lab, other) = (Lab::with(Config::new(*policy), 1_000), (lab, other).1);
        for stream in [1, 2] {
            let null = lab.try_bytes(stream, 0).unwrap();
            assert_eq!((null.address(), null.size(), null.requested()), (Address::NULL, 0, 0));
            assert_eq!(null.placement(), None);
            null.record_stream(&lab.stream(3)).unwrap();
            null.free().unwrap();
        }
        lab.try_bytes(1, 0).unwrap().free_on(&other.stream(1)).unwrap();
        let address = lab.allocator.into_raw(lab.try_bytes(1, 0).unwrap());
        assert_eq!(address, Address::NULL);
        lab.allocator.from_raw(Address::NULL).unwrap().free().unwrap();
        lab.allocator.from_raw(Address::NULL).unwrap().free().unwrap();
        let at = lab.allocator.alloc_at(0, Address(512), &lab.stream(1)).unwrap().unwrap();
        assert!(at.address().is_null());
        drop(at);
        let stats = lab.allocator.stats();
        assert_eq!((stats.allocation.all.allocated, lab.calls()), (0, 0));
        // Not even where nothing can be had, or on a stream that is gone.
        lab.allocator.set_memory_limit(Some(0));
        assert!(lab.try_bytes(1, 0).unwrap().address().is_null());
        lab.done();
    }
}

// Entry 100.
#[test]
fn an_address_is_never_handed_out_while_it_is_live() {
    for backing in BACKINGS {
        let lab = Lab::with(segments(backing), 300);
        let mut live: Vec<Block> = Vec::new();
        let mut x = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..2_000 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            if x.is_multiple_of(3) && !live.is_empty() {
                drop(live.swap_remove((x >> 8) as usize % live.len()));
                continue;
            }
            let Ok(block) = lab.allocator.alloc(1 + (x >> 16) % (4 * MIB), &lab.stream(1 + x % 3)) else {
                live.pop();
                continue;
            };
            let end = block.address().offset(block.size());
            let clash = live.iter().find(|b| b.address() < end && block.address() < b.address().offset(b.size()));
            assert!(clash.is_none(), "{block:?} overlaps {clash:?}");
            live.push(block);
        }
        drop(live);
        assert_eq!(lab.device.sim.calls(Call::MemGetInfo) > 0, lab.allocator.stats().num_ooms > 0);
        lab.done();
    }
}
