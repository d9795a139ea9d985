//! Every peer hands out blocks that do not overlap, and gets to the end of every workload.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use gpupool_allocator::Policy;
use gpupool_benches::peers::{Gpupool, Heap, Naive, Nothing, OnDevice, device};
use gpupool_benches::{Draw, Needs, Peer, Prepared, Running, Workload, traces_folder};
use gpupool_replay::trace::Trace;

const NEEDS: Needs = Needs { streams: 1 };

/// Random requests and frees beside a map of what is live.
fn blocks_do_not_overlap(mut peer: impl Peer) {
    let mut draw = Draw::new(3);
    let mut live = Vec::new();
    let mut map: BTreeMap<u64, u64> = BTreeMap::new();
    for step in 0..20_000 {
        if draw.below(100) < 52 || live.is_empty() {
            let bytes = draw.log_uniform(1, 32 << 20);
            let block = peer.alloc(bytes, 0).unwrap();
            let address = peer.address(&block);
            let before = map.range(..=address).next_back();
            let after = map.range(address..).next();
            assert!(before.is_none_or(|(at, bytes)| at + bytes <= address), "step {step}");
            assert!(after.is_none_or(|(at, _)| address + bytes <= *at), "step {step}");
            map.insert(address, bytes);
            live.push(block);
        } else {
            let block = live.swap_remove(draw.below(live.len() as u64) as usize);
            map.remove(&peer.address(&block)).unwrap();
            peer.free(block);
        }
    }
}

#[test]
fn gpupool() {
    blocks_do_not_overlap(Gpupool::new(Policy::Segments, NEEDS).unwrap());
    blocks_do_not_overlap(Gpupool::new(Policy::Torch215, NEEDS).unwrap());
}

/// One sample after the other is taken on one GPU, beside other processes: none may keep memory.
#[test]
fn a_peer_that_is_gone_holds_nothing_of_its_device() {
    for workload in [Workload::WorkingSet { live: 64 }].into_iter().chain(Workload::recorded(&traces_folder()).unwrap())
    {
        let prepared = Prepared::new(&workload, &traces_folder()).unwrap();
        for policy in [Policy::Segments, Policy::Torch215] {
            let device = Arc::new(device());
            let peer = OnDevice::new(Arc::clone(&device), policy, prepared.needs()).unwrap();
            let beside = peer.beside(prepared.needs()).unwrap();
            let mut running = Running::start(&prepared, peer).unwrap();
            running.run(1).unwrap();
            drop((running, beside));
            assert_eq!(device.memory_in_use(), 0, "{workload} under {policy}");
        }
    }
}

#[test]
fn gpupool_on_a_device() {
    for policy in [Policy::Segments, Policy::Torch215] {
        blocks_do_not_overlap(OnDevice::new(Arc::new(device()), policy, NEEDS).unwrap());
    }
}

#[test]
fn tree_and_hash() {
    blocks_do_not_overlap(Naive::new());
}

/// What was merged is found whole again: a segment's worth of blocks, freed in any order, is one block.
#[test]
fn tree_and_hash_merges_to_whole_segments() {
    let mut naive = Naive::new();
    let mut draw = Draw::new(5);
    for _ in 0..50 {
        let mut blocks: Vec<u64> = (0..4_096).map(|_| naive.alloc(512, 0).unwrap()).collect();
        assert!(blocks.iter().all(|at| *at < 512 + (2 << 20)), "grew beyond its first segment");
        while !blocks.is_empty() {
            naive.free(blocks.swap_remove(draw.below(blocks.len() as u64) as usize));
        }
    }
}

#[cfg(feature = "offset-allocator")]
#[test]
fn offset_allocator() {
    blocks_do_not_overlap(gpupool_benches::peers::Offset::new());
}

#[cfg(feature = "cubecl")]
#[test]
fn cubecl() {
    blocks_do_not_overlap(gpupool_benches::peers::Cubecl::new());
}

/// What it takes is an allocation of the device a page, counted as ours are, and is given back when asked.
#[cfg(feature = "cubecl")]
#[test]
fn cubecl_takes_its_pages_from_the_device() {
    let mut peer = gpupool_benches::peers::Cubecl::new();
    let block = peer.alloc(3 << 20, 0).unwrap();
    let address = peer.address(&block);
    assert_eq!((peer.driver_calls(), peer.reserved()), (Some(1), 4 << 20), "the block and a megabyte of slack");
    assert_eq!(peer.device().memory_in_use(), peer.reserved());
    peer.free(block);
    let again = peer.alloc(3 << 20, 0).unwrap();
    assert_eq!((peer.address(&again), peer.driver_calls()), (address, Some(1)), "the page is kept");
    peer.free(again);
    peer.empty_cache().unwrap();
    assert_eq!((peer.driver_calls(), peer.reserved(), peer.device().memory_in_use()), (Some(2), 0, 0));
}

fn gets_through<P: Peer>(workload: &Workload, peer: impl Fn(Needs) -> P) {
    let prepared = Prepared::new(workload, &traces_folder()).unwrap();
    let mut running = Running::start(&prepared, peer(prepared.needs())).unwrap();
    running.run(3).unwrap();
}

#[test]
fn all_get_through_every_workload() {
    for workload in Workload::synthetic().into_iter().chain(Workload::recorded(&traces_folder()).unwrap()) {
        gets_through(&workload, Nothing::new);
        gets_through(&workload, |needs| Gpupool::new(Policy::Segments, needs).unwrap());
        gets_through(&workload, |needs| Gpupool::new(Policy::Torch215, needs).unwrap());
        for policy in [Policy::Segments, Policy::Torch215] {
            gets_through(&workload, |needs| OnDevice::new(Arc::new(device()), policy, needs).unwrap());
        }
        gets_through(&workload, |_| Naive::new());
        gets_through(&workload, |_| Heap);
        #[cfg(feature = "offset-allocator")]
        gets_through(&workload, |_| gpupool_benches::peers::Offset::new());
        #[cfg(feature = "cubecl")]
        if !gpupool_benches::peers::Cubecl::takes_minutes(&workload) {
            gets_through(&workload, |_| gpupool_benches::peers::Cubecl::new());
        }
    }
}

#[test]
fn a_script_has_the_events_of_its_recording() {
    for workload in Workload::recorded(&traces_folder()).unwrap() {
        let Workload::Trace { name } = &workload else { unreachable!() };
        let trace = Trace::read(&traces_folder().join(format!("{name}.trace.gz"))).unwrap();
        let Prepared::Trace { script } = Prepared::new(&workload, &traces_folder()).unwrap() else { unreachable!() };
        assert!(script.events <= trace.counted && script.events + 10 >= trace.counted, "{name}");
        assert!(script.slots as usize <= trace.blocks.len());
    }
}

/// What is warm asks the driver nothing.
#[test]
fn a_warm_hot_pair_makes_no_driver_call() {
    for workload in Workload::PAIRS {
        let prepared = Prepared::new(&workload, Path::new("")).unwrap();
        let peer = Gpupool::new(Policy::Segments, NEEDS).unwrap();
        let mut running = Running::start(&prepared, peer).unwrap();
        let before = running.peer().driver_calls();
        running.run(10_000).unwrap();
        assert_eq!(running.peer().driver_calls(), before);
    }
}
