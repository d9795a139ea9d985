//! The history of an allocator: what is recorded, that it is complete, and that states agree with it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gpupool_allocator::history::{Action, Event, Frame, HistoryOptions, Stack, backtraces, label};
use gpupool_allocator::state::BlockStatus;
use gpupool_allocator::{AllocError, Allocator, Config, Policy, Preset, State};
use gpupool_device::{Address, StreamKind, Workbench};
use gpupool_graph_capture::{CaptureOptions, Captures};
use gpupool_sim_device::{SimConfig, SimDevice};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn allocator(policy: Policy) -> (Arc<SimDevice>, Allocator<SimDevice>) {
    let device = Arc::new(SimDevice::new(SimConfig::default()));
    let allocator = Allocator::new(Arc::clone(&device), Config::new(policy)).unwrap();
    (device, allocator)
}

fn actions(state: &State) -> Vec<Action> {
    state.history.as_ref().unwrap().events().map(|e| e.action).collect()
}

/// The granularity of memory that is mapped in pieces.
const PAGE: u64 = 2 * MIB;

/// What events tell: live blocks and segments, address to bytes, and the pages that are mapped.
#[derive(Default)]
struct Told {
    blocks: HashMap<Address, u64>,
    segments: HashMap<Address, u64>,
    pages: BTreeSet<u64>,
}

fn pages_of(address: Address, bytes: u64) -> impl Iterator<Item = u64> {
    (address.0..address.0 + bytes).step_by(PAGE as usize)
}

fn told(events: impl Iterator<Item = Event>) -> Told {
    let mut told = Told::default();
    for event in events {
        let (at, size) = (event.address, event.size);
        match event.action {
            Action::Alloc => assert_eq!(told.blocks.insert(at, size), None, "{event:?} is handed out twice"),
            Action::FreeRequested => {}
            Action::FreeCompleted => assert!(told.blocks.remove(&at).is_some(), "{event:?} is not live"),
            Action::SegmentAlloc => assert_eq!(told.segments.insert(at, size), None, "{event:?}"),
            Action::SegmentFree => assert!(told.segments.remove(&at).is_some(), "{event:?} is not there"),
            Action::SegmentMap => assert!(pages_of(at, size).all(|page| told.pages.insert(page)), "{event:?} twice"),
            Action::SegmentUnmap => assert!(pages_of(at, size).all(|page| told.pages.remove(&page)), "{event:?}"),
            _ => {}
        }
    }
    told
}

fn agrees(state: &State) {
    let told = told(state.history.as_ref().unwrap().events().cloned());
    if state.policy == Policy::Pages {
        let held: BTreeSet<u64> = state.segments.iter().flat_map(|s| pages_of(s.address, s.size)).collect();
        assert!(told.segments.is_empty());
        assert_eq!(told.pages, held, "pages");
    } else {
        let held: HashMap<Address, u64> = state.segments.iter().map(|s| (s.address, s.size)).collect();
        assert_eq!(told.segments, held, "segments");
    }
    let active = state.segments.iter().flat_map(|s| &s.blocks).filter(|b| b.status != BlockStatus::Inactive);
    let active: HashMap<Address, u64> = active.map(|b| (b.address, b.size)).collect();
    assert_eq!(told.blocks, active, "blocks");
}

/// Pages that move, are cut and go back are told, and what is mapped follows from that.
#[test]
fn what_pages_map_and_unmap_is_told() {
    for preset in [Preset::Memory, Preset::Balanced, Preset::Latency] {
        let device = Arc::new(SimDevice::new(SimConfig::default().with_capacity(512 * MIB)));
        let config = Config::new(Policy::Pages).with_preset(preset);
        let allocator = Allocator::new(Arc::clone(&device), config).unwrap();
        let streams: Vec<_> =
            (0..2).map(|_| allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap())).collect();
        allocator.record_history(Some(HistoryOptions::new(1 << 20)));
        let (mut random, mut held) = (0x9E37_79B9_7F4A_7C15_u64, Vec::new());
        for step in 0..3000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            if let Ok(block) = allocator.alloc(1 + (random >> 20) % (40 * MIB), &streams[(random % 2) as usize]) {
                held.push(block);
            }
            while held.len() > 14 {
                drop(held.swap_remove((random >> 8) as usize % held.len()));
            }
            if step % 100 == 0 {
                agrees(&allocator.state());
            }
            if step % 1000 == 999 {
                held.clear();
                allocator.empty_cache().unwrap();
            }
        }
        let pages = allocator.stats().pages;
        assert!(pages.remaps > 0, "{pages:?}");
        agrees(&allocator.state());
    }
}

#[test]
fn a_history_tells_everything_from_its_beginning() {
    for policy in Policy::ALL.iter().copied() {
        let (device, allocator) = allocator(policy);
        let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
        let other = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
        assert!(allocator.state().history.is_none(), "off at first");
        allocator.record_history(Some(HistoryOptions::new(1000)));
        let first = {
            let _label = label("weights");
            allocator.alloc(3 * MIB, &stream).unwrap()
        };
        drop(allocator.alloc(100 * KIB, &stream).unwrap());
        // A second one of the size comes from what was freed: a hit.
        let hit = allocator.alloc(100 * KIB, &stream).unwrap();
        hit.record_stream(&other).unwrap();
        drop(hit);
        let state = allocator.state();
        agrees(&state);
        let history = state.history.as_ref().unwrap();
        let alloc = history.events().find(|e| e.action == Action::Alloc).unwrap();
        assert_eq!((alloc.requested, alloc.label.as_deref()), (3 * MIB, Some("weights")), "{policy}");
        assert_eq!((alloc.address, alloc.size), (first.address(), first.size()));
        assert_eq!(alloc.stream, stream.handle());
        let allocs = actions(&state).iter().filter(|a| **a == Action::Alloc).count();
        let requested = actions(&state).iter().filter(|a| **a == Action::FreeRequested).count();
        assert_eq!((allocs, requested), (3, 2), "{policy}");
        drop(first);
        allocator.empty_cache().unwrap();
        let state = allocator.state();
        agrees(&state);
        assert!(state.segments.is_empty());
        allocator.record_history(None);
        assert!(allocator.state().history.is_none());
    }
}

#[test]
fn captures_and_lack_of_memory_are_events() {
    let (device, allocator) = allocator(Policy::Segments);
    let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
    let frame = Frame { name: "forward".to_owned(), file: "model.rs".to_owned(), line: 7 };
    let stack: Stack = Arc::from([frame]);
    let source = Arc::clone(&stack);
    allocator.record_history(Some(HistoryOptions::new(100).with_stacks(Arc::new(move || Some(Arc::clone(&source))))));
    let captures = Captures::new(&allocator);
    let capture = captures.begin(&stream, CaptureOptions::new()).unwrap();
    drop(allocator.alloc(2 * MIB, &stream).unwrap());
    drop(allocator.alloc(2 * MIB, &stream).unwrap());
    let graph = capture.end().unwrap();
    allocator.set_memory_limit(Some(64 * MIB));
    assert!(matches!(allocator.alloc(100 * MIB, &stream), Err(AllocError::OutOfMemory(_))));
    let state = allocator.state();
    agrees(&state);
    let (begin, end) = (Action::CaptureBegin, Action::CaptureEnd);
    let events: Vec<Event> = state.history.as_ref().unwrap().events().cloned().collect();
    let place = |action| events.iter().position(|e| e.action == action).unwrap();
    let inside = &events[place(begin)..place(end)];
    assert_eq!(inside.iter().filter(|e| e.action == Action::Alloc).count(), 2);
    assert!(inside.iter().all(|e| e.pool == graph.pool()), "{inside:?}");
    let oom = events.iter().find(|e| e.action == Action::OutOfMemory).unwrap();
    assert_eq!(oom.requested, 100 * MIB);
    assert!(oom.size > 0, "what the driver had free");
    assert_eq!(oom.stack.as_deref(), Some(&*stack));
}

/// What many threads do at once is told in an order that is possible, and a state taken meanwhile agrees with its own history.
#[test]
fn states_taken_under_load_agree_with_their_history() {
    const OPERATIONS: usize = 20_000;
    let (device, allocator) = allocator(Policy::Segments);
    allocator.record_history(Some(HistoryOptions::new(1 << 20)));
    let running = AtomicUsize::new(3);
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
            let (allocator, running) = (&allocator, &running);
            scope.spawn(move || {
                let mut random = 0x9E37_79B9_7F4A_7C15_u64 ^ thread;
                let mut held = Vec::new();
                for _ in 0..OPERATIONS {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    if held.len() > 40 || (random & 1 == 0 && !held.is_empty()) {
                        drop(held.swap_remove(random as usize % held.len()));
                    } else {
                        held.push(allocator.alloc(1 + (random >> 20) % (4 * MIB), &stream).unwrap());
                    }
                }
                drop(held);
                allocator.trim().unwrap();
                running.fetch_sub(1, Ordering::Relaxed);
            });
        }
        let mut taken = 0;
        while running.load(Ordering::Relaxed) > 0 || taken == 0 {
            let state = allocator.state();
            agrees(&state);
            for segment in &state.segments {
                assert_eq!(segment.blocks.iter().map(|b| b.size).sum::<u64>(), segment.size, "blocks tile");
            }
            taken += 1;
        }
    });
    agrees(&allocator.state());
}

/// The longest that an allocation waits while states of 100,000 blocks are taken, beside the longest that the same loop waits while the
/// other thread does something else: what the machine itself does to it. An arena is locked while one segment of it is copied.
#[test]
#[ignore = "prints a time"]
fn how_long_a_state_stops_an_allocation() {
    let (device, allocator) = allocator(Policy::Segments);
    let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
    let blocks: Vec<_> = (0..100_000).map(|_| allocator.alloc(512, &stream).unwrap()).collect();
    let longest = |meanwhile: &(dyn Fn() + Sync)| {
        let over = AtomicBool::new(false);
        let mut waits: Vec<Duration> = std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                (0..100).for_each(|_| meanwhile());
                over.store(true, Ordering::Release);
            });
            let mut waits = Vec::new();
            while !over.load(Ordering::Acquire) {
                let start = Instant::now();
                drop(allocator.alloc(512, &stream).unwrap());
                waits.push(start.elapsed());
            }
            worker.join().unwrap();
            waits
        });
        waits.sort_unstable();
        let at = |share: f64| waits[((waits.len() - 1) as f64 * share) as usize];
        (at(0.5), at(0.999), at(0.9999), at(1.0), waits.len())
    };
    let private = || {
        std::hint::black_box((0..400_000_u64).map(|n| n * n).fold(0, u64::wrapping_add));
    };
    let states = || drop(std::hint::black_box(allocator.state()));
    println!("{} segments; median, p99.9, p99.99, longest, pairs", allocator.state().segments.len());
    for _ in 0..3 {
        println!("beside other work: {:?}", longest(&private));
        println!("beside states:     {:?}", longest(&states));
    }
    drop(blocks);
}

#[inline(never)]
fn a_function_of_the_program(allocator: &Allocator<SimDevice>, stream: &gpupool_allocator::Stream<SimDevice>) {
    drop(allocator.alloc(MIB, stream).unwrap());
}

#[inline(never)]
fn its_caller(allocator: &Allocator<SimDevice>, stream: &gpupool_allocator::Stream<SimDevice>) {
    (0..3).for_each(|_| a_function_of_the_program(allocator, stream));
    // So that the last call is no tail call, whose caller no backtrace knows.
    std::hint::black_box(());
}

#[test]
fn backtraces_of_rust_name_the_caller_and_are_shared() {
    let (device, allocator) = allocator(Policy::Segments);
    let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
    allocator.record_history(Some(HistoryOptions::new(100).with_stacks(backtraces())));
    its_caller(&allocator, &stream);
    let state = allocator.state();
    let stacks: Vec<Stack> =
        state.history.unwrap().events().filter(|e| e.action == Action::Alloc).filter_map(|e| e.stack.clone()).collect();
    let [first, second, third] = &stacks[..] else { panic!("{stacks:?}") };
    assert!(first[0].name.contains("a_function_of_the_program"), "{first:?}");
    assert!(first.iter().any(|f| f.name.contains("its_caller")), "{first:?}");
    assert!(first.iter().all(|f| !f.name.contains("gpupool_allocator::")), "{first:?}");
    assert!(Arc::ptr_eq(first, second) && Arc::ptr_eq(second, third), "equal stacks are one");
}
