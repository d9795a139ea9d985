//! What a GPU must show: captures that survive what other threads do, and replays that stay right whatever happens around them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use gpupool_allocator::config::VirtualMemory;
use gpupool_allocator::{Allocator, CaptureRegistry, Config, Policy};
use gpupool_cuda_device::CudaDevice;
use gpupool_device::{
    Address, CaptureMode, Device, GraphDevice, InstantiateFlags, Kernel, StreamHandle, StreamKind, Workbench, code,
};
use gpupool_graph_capture::{CaptureOptions, Captures};
use gpupool_tests::gpu::{self, GpuTest, gpu};
use libtest_mimic::Failed;

const MIB: u64 = 1 << 20;

fn allocator(device: &Arc<CudaDevice>, config: Config) -> Allocator<CudaDevice> {
    Allocator::with_registry(Arc::clone(device), config, Arc::<CaptureRegistry>::default()).unwrap()
}

fn plain() -> Config {
    Config::new(Policy::Segments).with_virtual_memory(VirtualMemory::Never)
}

fn stream(device: &CudaDevice) -> StreamHandle {
    device.stream_create(StreamKind::NonBlocking).unwrap()
}

/// Numbers that look random and are the same every time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// The sum that a checksum kernel finds over so many words that all hold `word`.
fn sum(word: u32, words: u64) -> u64 {
    u64::from(word).wrapping_mul(words * (words + 1) / 2)
}

fn read_sum(device: &CudaDevice, stream: StreamHandle, at: Address) -> u64 {
    let mut bytes = [0; 8];
    device.read(stream, at, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

/// Eight threads take fresh memory, write it, free it, trim and ask for figures until a second has passed; meanwhile one capture in global
/// mode is under way the whole time.
fn capture_among_threads(config: Config, mode: CaptureMode) -> Result<(), Failed> {
    let device = Arc::new(gpu());
    let allocator = allocator(&device, config);
    let captures = Captures::new(&allocator);
    let main = allocator.register_stream(stream(&device));
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let output = allocator.alloc(MIB, &main)?;
    let sums = allocator.alloc(512, &main)?;
    let done = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8_u64)
            .map(|number| {
                let (device, allocator, stop, rounds) = (&device, &allocator, &stop, &rounds);
                scope.spawn(move || {
                    let own = allocator.register_stream(stream(device));
                    let other = allocator.register_stream(stream(device));
                    let mut dice = Dice(0x9e37_79b9 + number);
                    while !stop.load(SeqCst) {
                        let bytes = 512 + dice.below(24 * MIB);
                        let block = allocator.alloc(bytes, &own).unwrap();
                        let fill = Kernel::Fill { dst: block.address(), bytes: block.size(), value: 0xdead };
                        device.launch(own.handle(), fill).unwrap();
                        if dice.below(4) == 0 {
                            block.record_stream(&other).unwrap();
                        }
                        drop(block);
                        match dice.below(16) {
                            0 => drop(allocator.trim().unwrap()),
                            1 => drop(allocator.empty_cache().unwrap()),
                            2 => drop(allocator.stats()),
                            _ => {}
                        }
                        rounds.fetch_add(1, SeqCst);
                    }
                })
            })
            .collect();
        let capture = captures.begin(&main, CaptureOptions::new().with_mode(mode)).unwrap();
        let (start, before) = (Instant::now(), rounds.load(SeqCst));
        let mut kernels = 0_u64;
        let first = allocator.alloc(MIB, &main).unwrap();
        device.launch(main.handle(), Kernel::Fill { dst: first.address(), bytes: MIB, value: 1 }).unwrap();
        while start.elapsed() < Duration::from_secs(1) || rounds.load(SeqCst) < before + 400 {
            if kernels < 200 {
                // Each needs fresh memory of the capture's pool.
                let temporary = allocator.alloc(MIB + kernels * 4096, &main).unwrap();
                let copy = Kernel::Copy { dst: temporary.address(), src: first.address(), bytes: MIB };
                device.launch(main.handle(), copy).unwrap();
                device.launch(main.handle(), Kernel::Add { dst: temporary.address(), bytes: MIB, value: 1 }).unwrap();
                let back = Kernel::Copy { dst: first.address(), src: temporary.address(), bytes: MIB };
                device.launch(main.handle(), back).unwrap();
                kernels += 1;
            }
            std::thread::yield_now();
        }
        let copy = Kernel::Copy { dst: output.address(), src: first.address(), bytes: MIB };
        device.launch(main.handle(), copy).unwrap();
        let graph = capture.end();
        let during = rounds.load(SeqCst) - before;
        // Launched while the others go on.
        let graph = graph.unwrap();
        let exec = graph.instantiate(InstantiateFlags::default()).unwrap();
        for _ in 0..20 {
            device.launch(main.handle(), Kernel::Fill { dst: output.address(), bytes: MIB, value: 7 }).unwrap();
            exec.launch(&main).unwrap();
            let checksum = Kernel::Checksum { dst: sums.address(), src: output.address(), bytes: MIB };
            device.launch(main.handle(), checksum).unwrap();
            assert_eq!(read_sum(&device, main.handle(), sums.address()), sum(1 + kernels as u32, MIB / 4));
        }
        stop.store(true, SeqCst);
        threads.into_iter().for_each(|t| t.join().unwrap());
        (during, kernels)
    });
    println!(
        "{} rounds of 8 threads during the capture, which holds {} kernels and ended valid",
        done.0,
        done.1 * 3 + 2
    );
    allocator.validate().map_err(Failed::from)
}

/// Without the exchange, one plain allocation of another thread kills a capture in global mode.
fn without_the_exchange() -> Result<(), Failed> {
    let device = gpu();
    let st = stream(&device);
    let block = device.mem_alloc(MIB)?;
    device.begin_capture(st, CaptureMode::Global)?;
    device.launch(st, Kernel::Fill { dst: block, bytes: MIB, value: 1 })?;
    let other = std::thread::scope(|scope| scope.spawn(|| device.mem_alloc(MIB).unwrap_err().code).join().unwrap());
    let end = device.end_capture(st).unwrap_err().code;
    assert_eq!((other, end), (code::CAPTURE_UNSUPPORTED, code::CAPTURE_INVALIDATED));
    println!("another thread's cuMemAlloc: {other}; the capture's end: {end}");
    Ok(())
}

/// A graph of 100 kernels is replayed 10,000 times, while other streams take memory, fill it with garbage and give it back.
fn many_replays(config: Config) -> Result<(), Failed> {
    const KERNELS: u32 = 100;
    const REPLAYS: u32 = 10_000;
    const BYTES: u64 = 256 << 10;
    let device = Arc::new(gpu());
    let allocator = allocator(&device, config);
    let captures = Captures::new(&allocator);
    let main = allocator.register_stream(stream(&device));
    let eager: Vec<_> = (0..3).map(|_| allocator.register_stream(stream(&device))).collect();
    let (input, output) = (allocator.alloc(BYTES, &main)?, allocator.alloc(BYTES, &main)?);
    let sums = allocator.alloc(512, &main)?;
    let capture = captures.begin(&main, CaptureOptions::new())?;
    let mut last = input.address();
    let mut held = Vec::new();
    for kernel in 0..KERNELS / 2 {
        let temporary = allocator.alloc(BYTES + u64::from(kernel % 7) * 4096, &main)?;
        let (dst, src) = (temporary.address(), last);
        device.launch(main.handle(), Kernel::Copy { dst, src, bytes: BYTES })?;
        device.launch(main.handle(), Kernel::Add { dst, bytes: BYTES, value: 1 })?;
        last = dst;
        held.push(temporary);
        if held.len() > 2 {
            drop(held.remove(0));
        }
    }
    device.launch(main.handle(), Kernel::Copy { dst: output.address(), src: last, bytes: BYTES })?;
    drop(held);
    let graph = capture.end()?;
    let exec = graph.instantiate(InstantiateFlags::default())?;
    let mut dice = Dice(42);
    let mut live = Vec::new();
    let (mut allocated, mut trims) = (0_u64, 0_u64);
    for replay in 0..REPLAYS {
        device.launch(main.handle(), Kernel::Fill { dst: input.address(), bytes: BYTES, value: replay })?;
        for _ in 0..3 {
            let own = &eager[dice.below(3) as usize];
            let block = allocator.alloc(512 + dice.below(2 * MIB), own)?;
            device
                .launch(own.handle(), Kernel::Fill { dst: block.address(), bytes: block.size(), value: 0xbad_beef })?;
            allocated += 1;
            live.push(block);
            if live.len() > 24 {
                drop(live.swap_remove(dice.below(24) as usize));
            }
        }
        if dice.below(50) == 0 {
            let _pending = allocator.trim()?;
            trims += 1;
        }
        exec.launch(&main)?;
        let checksum = Kernel::Checksum { dst: sums.address(), src: output.address(), bytes: BYTES };
        device.launch(main.handle(), checksum)?;
        let (found, expected) =
            (read_sum(&device, main.handle(), sums.address()), sum(replay + KERNELS / 2, BYTES / 4));
        assert_eq!(found, expected, "replay {replay}");
    }
    println!(
        "{REPLAYS} replays of {} kernels right, {allocated} eager allocations and {trims} trims in between",
        KERNELS + 1
    );
    drop(live);
    allocator.validate().map_err(Failed::from)
}

/// No GPU memory is left once everything was dropped and the cache emptied.
fn nothing_left(policy: Policy) -> Result<(), Failed> {
    let device = Arc::new(gpu());
    let mut before = 0;
    for round in 0..3 {
        {
            let allocator = allocator(&device, Config::new(policy));
            let captures = Captures::new(&allocator);
            let main = allocator.register_stream(stream(&device));
            let capture = captures.begin(&main, CaptureOptions::new())?;
            let block = allocator.alloc(64 * MIB, &main)?;
            device.launch(main.handle(), Kernel::Fill { dst: block.address(), bytes: MIB, value: 1 })?;
            let exec = capture.end()?.instantiate(InstantiateFlags::default())?;
            exec.launch(&main)?;
            device.stream_synchronize(main.handle())?;
            drop((block, exec));
            captures.tidy();
            let _trimmed = allocator.empty_cache()?;
            assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
        }
        let now = device.bytes_in_use()?;
        if round > 0 {
            assert_eq!(now, before, "round {round}");
        }
        before = now;
    }
    Ok(())
}

/// A thread that has no context current, and never had one, drops what others made: it is freed all the same, and the thread has no context
/// afterwards either.
fn drops_on_a_fresh_thread(policy: Policy) -> Result<(), Failed> {
    let device = Arc::new(gpu());
    let used = || device.bytes_in_use().unwrap();
    let mut before = 0;
    for round in 0..2 {
        let allocator = allocator(&device, Config::new(policy));
        let main = allocator.register_stream(stream(&device));
        let blocks: Vec<_> = (0..8).map(|_| allocator.alloc(32 * MIB, &main)).collect::<Result<_, _>>()?;
        let captures = Captures::new(&allocator);
        let capture = captures.begin(&main, CaptureOptions::new())?;
        let inside = allocator.alloc(64 * MIB, &main)?;
        device.launch(main.handle(), Kernel::Fill { dst: inside.address(), bytes: MIB, value: 1 })?;
        drop(inside);
        let exec = capture.end()?.instantiate(InstantiateFlags::default())?;
        exec.launch(&main)?;
        device.stream_synchronize(main.handle())?;
        let held = used();
        // The memory of a graph's nodes is the driver's to give back.
        let ours = if policy == Policy::StreamOrdered { 8 * 32 * MIB } else { (8 * 32 + 64) * MIB };
        std::thread::spawn(move || {
            assert!(!has_context());
            drop((blocks, exec));
            captures.tidy();
            let trimmed = allocator.empty_cache().unwrap();
            assert!(trimmed.released_bytes + trimmed.driver_pool_bytes >= ours, "{trimmed:?}");
            drop((main, captures, allocator));
            assert!(!has_context(), "a context was left current");
        })
        .join()
        .unwrap();
        assert!(held - used() >= ours, "{} of {held}", used());
        if round > 0 {
            assert_eq!(used(), before);
        }
        before = used();
    }
    Ok(())
}

/// Whether a context is current on this thread.
fn has_context() -> bool {
    gpupool_cuda_device::interop::current_context().is_some()
}

fn main() {
    let of = Config::new;
    let mut tests: Vec<GpuTest> = vec![
        (
            "a global capture survives eight threads, on plain memory under the exchange".into(),
            Box::new(|| capture_among_threads(plain(), CaptureMode::Global)),
        ),
        ("a global capture dies of a plain allocation without the exchange".into(), Box::new(without_the_exchange)),
        ("10,000 replays stay right among eager work, on plain memory".into(), Box::new(|| many_replays(plain()))),
    ];
    for policy in [Policy::Segments, Policy::Pages, Policy::StreamOrdered] {
        tests.extend([
            (
                format!("a global capture survives eight threads, under {policy}"),
                Box::new(move || capture_among_threads(of(policy), CaptureMode::Global)) as Box<_>,
            ),
            (
                format!("10,000 replays stay right among eager work, under {policy}"),
                Box::new(move || many_replays(of(policy))) as Box<_>,
            ),
        ]);
    }
    // The policies that copy PyTorch route captures by scopes instead.
    for policy in Policy::ALL.iter().copied().filter(|policy| !policy.is_bit_exact()) {
        tests.extend([
            (
                format!("nothing is left on the GPU when everything was dropped, under {policy}"),
                Box::new(move || nothing_left(policy)) as Box<_>,
            ),
            (
                format!("drops on a thread without a context free all the same, under {policy}"),
                Box::new(move || drops_on_a_fresh_thread(policy)) as Box<_>,
            ),
        ]);
    }
    gpu::run(Vec::new(), tests);
}
