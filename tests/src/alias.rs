//! Blocks that are used again on the same stream while work still runs on their old mappings, in every order: on any device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpupool_allocator::{Allocation, Allocator, CaptureRegistry, Config, Policy, Preset, Stream};
use gpupool_device::{Address, Kernel, StreamKind};
use gpupool_replay::stress::StressDevice;

const PAGE: u64 = 2 << 20;
/// Blocks of a page each; every second one is freed.
const BLOCKS: u64 = 12;
/// The word that block `n` holds.
const FIRST: u32 = 100;
/// Rounds of kernels that are queued on the old mapping, fewer in all than a driver queues before a launch waits.
const KERNELS: u32 = 80;
/// Slow kernels before them, so that the old mapping is in use for milliseconds.
const SLOW: usize = 60;

/// What the stream still does with the old blocks when they are freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Before {
    /// Nothing.
    Idle,
    /// Writes them.
    Writes,
    /// Reads them.
    Reads,
}

/// What it does with the new block first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum After {
    /// Writes it.
    Writes,
    /// Reads it: what the old blocks held.
    Reads,
    /// Reads and writes it.
    Adds,
}

/// Every order: what comes before, what comes after, and how often the memory moves on while the first work has not even begun.
pub fn orders() -> Vec<(Before, After, u32)> {
    let mut out = Vec::new();
    for before in [Before::Idle, Before::Writes, Before::Reads] {
        for after in [After::Writes, After::Reads, After::Adds] {
            for moves in 1..=3 {
                out.push((before, after, moves));
            }
        }
    }
    out
}

/// What one order showed.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// The longest that a request took which moved memory, while the stream was busy.
    pub longest: Duration,
    /// Handles that were moved.
    pub moved: u64,
}

fn words<D: StressDevice>(device: &D, stream: &Stream<D>, at: Address) -> u32 {
    let mut bytes = [0; 4];
    device.read(stream.handle(), at, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

/// One order. With a gate, nothing on the stream begins before all of it is submitted; without, the old mapping is in use at that moment.
///
/// # Panics
///
/// Where contents are wrong, a request waited, or moved nothing.
pub fn alias_order<D: StressDevice>(device: &Arc<D>, order: (Before, After, u32), gated: bool) -> Shown {
    let (before, after, moves) = order;
    let config = Config::new(Policy::Pages).with_preset(Preset::Memory);
    let allocator = Allocator::with_registry(Arc::clone(device), config, Arc::<CaptureRegistry>::default()).unwrap();
    let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
    let on = stream.handle();
    let half = BLOCKS / 2;
    let mut tag = 0;
    let mut owned = |bytes: u64| {
        tag += 1;
        let block = allocator.alloc(bytes, &stream).unwrap();
        device.own(block.address(), block.size(), tag, on);
        block
    };
    let free = |block: Allocation<D>| {
        device.disown(block.address(), block.size());
        drop(block);
    };
    let (sink, second) = (owned(half * PAGE), owned(half * PAGE));
    // A stream that stays busy until the gate opens, and an event behind all that is submitted before it is asked.
    let event = device.event_create().unwrap();
    let blocks: Vec<Allocation<D>> = (0..BLOCKS).map(|_| owned(PAGE)).collect();
    for (block, value) in blocks.iter().zip(FIRST..) {
        device.launch(on, Kernel::Fill { dst: block.address(), bytes: PAGE, value }).unwrap();
    }
    device.stream_synchronize(on).unwrap();
    let gate = device.gate_create().unwrap();
    if gated {
        device.launch(on, Kernel::Wait { gate }).unwrap();
    }
    let old: Vec<Address> = blocks.iter().step_by(2).map(Allocation::address).collect();
    for n in 0..SLOW {
        let src = old[n % old.len()];
        device.launch(on, Kernel::Checksum { dst: second.address(), src, bytes: PAGE }).unwrap();
    }
    for _ in 0..KERNELS {
        for &dst in &old {
            match before {
                Before::Idle => {}
                Before::Writes => device.launch(on, Kernel::Add { dst, bytes: PAGE, value: 1 }).unwrap(),
                Before::Reads => {
                    let to = sink.address().offset((dst.offset_from(old[0]) / PAGE / 2) * PAGE);
                    device.launch(on, Kernel::Copy { dst: to, src: dst, bytes: PAGE }).unwrap();
                }
            }
        }
    }
    device.event_record(event, on).unwrap();
    let mut held: Vec<Option<Allocation<D>>> = blocks.into_iter().map(Some).collect();
    held.iter_mut().step_by(2).filter_map(Option::take).for_each(free);
    let mut longest = Duration::ZERO;
    let mut block: Option<Allocation<D>> = None;
    let start_moved = allocator.stats().pages.remaps;
    for turn in 0..moves {
        if let Some(old) = block.take() {
            // Pinned on both sides, so that the next one must move too.
            free(old);
        }
        let bytes = half * PAGE - u64::from(turn) * PAGE;
        let busy = !device.event_query(event).unwrap();
        let start = Instant::now();
        let next = owned(bytes);
        let took = start.elapsed();
        if busy && (gated || !device.event_query(event).unwrap()) {
            longest = longest.max(took);
        }
        if gated {
            assert!(!device.event_query(event).unwrap(), "the request waited for the stream");
        }
        block = Some(next);
    }
    let block = block.unwrap();
    let moved = allocator.stats().pages.remaps - start_moved;
    assert!(moved >= half, "{order:?}: {moved} handles moved");
    let pages = block.size() / PAGE;
    match after {
        After::Writes => {
            device.launch(on, Kernel::Fill { dst: block.address(), bytes: block.size(), value: 7 }).unwrap()
        }
        After::Adds => {
            device.launch(on, Kernel::Add { dst: block.address(), bytes: block.size(), value: 1000 }).unwrap()
        }
        After::Reads => {
            let copy = Kernel::Copy { dst: second.address(), src: block.address(), bytes: block.size() };
            device.launch(on, copy).unwrap();
        }
    }
    device.gate_open(gate).unwrap();
    device.stream_synchronize(on).unwrap();
    let added = if before == Before::Writes { KERNELS } else { 0 };
    let was: Vec<u32> = (0..half as u32).map(|n| FIRST + 2 * n + added).collect();
    let look = |from: Address| {
        let mut found = Vec::new();
        for page in 0..pages {
            let at = |offset| words(&**device, &stream, from.offset(page * PAGE + offset));
            let (first, middle, last) = (at(0), at(PAGE / 2), at(PAGE - 4));
            assert_eq!((first, first), (middle, last), "{order:?}: page {page} is of one kind");
            found.push(first);
        }
        found.sort_unstable();
        found
    };
    let subset = |found: &[u32], add: u32| {
        assert!(found.iter().all(|word| was.contains(&(word - add))), "{order:?}: {found:?} of {was:?}");
        assert!(found.windows(2).all(|w| w[0] != w[1]), "{order:?}: {found:?}");
    };
    match after {
        After::Writes => assert!(look(block.address()).iter().all(|word| *word == 7), "{order:?}"),
        After::Adds => subset(&look(block.address()), 1000),
        After::Reads => {
            subset(&look(second.address()), 0);
            subset(&look(block.address()), 0);
        }
    }
    if before == Before::Reads {
        for (n, word) in was.iter().enumerate() {
            assert_eq!(
                words(&**device, &stream, sink.address().offset(n as u64 * PAGE)),
                *word,
                "{order:?}: read before"
            );
        }
    }
    // What stayed was touched by nobody.
    for (n, kept) in held.iter().enumerate().filter_map(|(n, b)| Some((n, b.as_ref()?))) {
        let at = |offset| words(&**device, &stream, kept.address().offset(offset));
        assert_eq!((at(0), at(PAGE - 4)), (FIRST + n as u32, FIRST + n as u32), "{order:?}: a live block");
    }
    device.event_destroy(event).unwrap();
    allocator.validate().unwrap();
    [block, sink, second].into_iter().chain(held.into_iter().flatten()).for_each(free);
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.stats().reserved_bytes.all.current, 0, "{order:?}");
    assert_eq!(device.findings(), Vec::<String>::new(), "{order:?}");
    Shown { longest, moved }
}

/// Memory that one stream still uses when it is freed serves another, which waits for the first on the device: the host goes on at once, and
/// each stream finds what it wrote. Returns how long the request took.
///
/// # Panics
///
/// Where contents are wrong, the request waited, or took new memory.
pub fn awaited_on_the_device<D: StressDevice>(device: &Arc<D>) -> Duration {
    let config = Config::new(Policy::Pages).with_preset(Preset::Memory);
    let allocator = Allocator::with_registry(Arc::clone(device), config, Arc::<CaptureRegistry>::default()).unwrap();
    let [first, second] =
        [0; 2].map(|_| allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap()));
    let on = |stream: &Stream<D>, bytes: u64, tag: u64| {
        let block = allocator.alloc(bytes, stream).unwrap();
        device.own(block.address(), block.size(), tag, stream.handle());
        block
    };
    let (sink, event, gate) = (on(&first, PAGE, 1), device.event_create().unwrap(), device.gate_create().unwrap());
    let old = on(&first, BLOCKS * PAGE, 2);
    let (dst, bytes) = (old.address(), old.size());
    device.launch(first.handle(), Kernel::Fill { dst, bytes, value: FIRST }).unwrap();
    device.launch(first.handle(), Kernel::Wait { gate }).unwrap();
    for _ in 0..KERNELS {
        device.launch(first.handle(), Kernel::Add { dst, bytes, value: 1 }).unwrap();
    }
    let copy = Kernel::Copy { dst: sink.address(), src: dst.offset(bytes - PAGE), bytes: PAGE };
    device.launch(first.handle(), copy).unwrap();
    device.event_record(event, first.handle()).unwrap();
    device.disown(dst, bytes);
    drop(old);
    let reserved = allocator.stats().reserved_bytes.all.current;
    let start = Instant::now();
    let new = allocator.alloc(BLOCKS * PAGE, &second).unwrap();
    let took = start.elapsed();
    assert!(!device.event_query(event).unwrap(), "the request waited for the other stream");
    assert_eq!(allocator.stats().reserved_bytes.all.current, reserved, "the other stream's memory serves the request");
    device.own(new.address(), new.size(), 3, second.handle());
    device.launch(second.handle(), Kernel::Fill { dst: new.address(), bytes: new.size(), value: 7 }).unwrap();
    device.gate_open(gate).unwrap();
    for stream in [&first, &second] {
        device.stream_synchronize(stream.handle()).unwrap();
    }
    for at in [0, PAGE / 2, PAGE - 4] {
        assert_eq!(words(&**device, &first, sink.address().offset(at)), FIRST + KERNELS, "what the first stream left");
    }
    for page in 0..BLOCKS {
        for at in [0, PAGE - 4] {
            assert_eq!(words(&**device, &second, new.address().offset(page * PAGE + at)), 7, "page {page}");
        }
    }
    device.event_destroy(event).unwrap();
    allocator.validate().unwrap();
    for block in [sink, new] {
        device.disown(block.address(), block.size());
    }
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
    assert_eq!(device.findings(), Vec::<String>::new());
    took
}
