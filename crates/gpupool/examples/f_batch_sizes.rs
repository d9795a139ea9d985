//! Experiment F: one graph a batch size, c = a**2 + b*2 for 1 to 128 rows, inputs and outputs outside the pool (on a GPU in pinned host
//! memory), captured in ascending order. With one shared pool, from one stream and from four, and in a hundred random orders; and with a pool each.

mod common;

use std::sync::Arc;

use common::{Gpu, Machine, Outcome, Report, Runs, mib, taken};
use gpupool::device::{Address, Device, DriverResult, InstantiateFlags, Kernel, StreamHandle, StreamKind, Workbench};
use gpupool::graphs::{CaptureOptions, Captures};
use gpupool::{Allocator, CaptureRegistry, Config, Part, Policy, PoolId};
use gpupool_cuda_device::PinnedBytes;
use gpupool_sim_device::SimDevice;

const BATCHES: u64 = 128;
/// Random orders of capture, unless `--orders` says otherwise.
const ORDERS: u64 = 100;
/// Bytes of a row: 1,024 floats, and 64 Ki of them.
const ROW: u64 = 4 << 10;
const WIDE_ROW: u64 = 256 << 10;

fn main() -> Outcome {
    common::run("F. One graph a batch size", Runs::Anywhere(on_sim, on_gpu))
}

fn on_sim(device: Arc<SimDevice>, report: &Report) -> Outcome {
    let outside = [
        device.mem_alloc(BATCHES * WIDE_ROW)?,
        device.mem_alloc(BATCHES * WIDE_ROW)?,
        device.mem_alloc(BATCHES * WIDE_ROW)?,
    ];
    let copy = |stream, dst, src, bytes| device.launch(stream, Kernel::Copy { dst, src, bytes });
    experiment(&device, outside, &copy, None, report)
}

fn on_gpu(gpu: Arc<Gpu>, report: &Report) -> Outcome {
    let bytes = usize::try_from(BATCHES * WIDE_ROW)?;
    let host = [
        PinnedBytes::new(&gpu.device, bytes)?,
        PinnedBytes::new(&gpu.device, bytes)?,
        PinnedBytes::new(&gpu.device, bytes)?,
    ];
    let values = |n: usize| (0..bytes / 4).map(move |i| ((i * n % 97) as f32).to_bits());
    host[0].write(values(1));
    host[1].write(values(3));
    let outside = [host[0].address(), host[1].address(), host[2].address()];
    let copy = |stream, dst, src, bytes| gpu.device.copy_async(stream, dst, src, bytes);
    let right = |batch: u64| {
        let count = usize::try_from(batch * ROW / 4)?;
        let (a, b, c) = (host[0].read(), host[1].read(), host[2].read());
        let float = f32::from_bits;
        Ok((0..count).all(|i| float(c[i]) == float(a[i]) * float(a[i]) + float(b[i]) * 2.0))
    };
    experiment(&gpu, outside, &copy, Some(&right), report)
}

type Copy<'a> = &'a dyn Fn(StreamHandle, Address, Address, u64) -> DriverResult<()>;
type Right<'a> = &'a dyn Fn(u64) -> Result<bool, Box<dyn std::error::Error + Send + Sync>>;

/// How the graphs get their memory.
#[derive(Clone, Copy)]
struct Way {
    batches: u64,
    /// Captured in a random order drawn from this, else ascending.
    order: Option<u64>,
    row: u64,
    streams: usize,
    shared: bool,
    ahead: Option<u64>,
}

/// Bytes of the pools, and of the device.
struct Took {
    pools: u64,
    device: u64,
    right: bool,
}

fn experiment<M: Machine>(
    machine: &M,
    outside: [Address; 3],
    copy: Copy<'_>,
    right: Option<Right<'_>>,
    report: &Report,
) -> Outcome {
    let way = Way { batches: BATCHES, order: None, row: ROW, streams: 1, shared: true, ahead: None };
    // What the driver keeps for graphs itself is taken the first time.
    capture_all(machine, Way { batches: BATCHES, ..way }, outside, copy, None)?;
    let alone = capture_all(machine, Way { batches: 0, ..way }, outside, copy, None)?;
    report.tell("the largest graph alone, pool", &mib(alone.pools));
    report.tell("the largest graph alone, on the device", &mib(alone.device));
    for streams in [1, 4] {
        let took = capture_all(machine, Way { streams, ..way }, outside, copy, right)?;
        let ratio = took.pools as f64 / alone.pools as f64;
        let what = format!("128 graphs, one shared pool, ascending, from {streams} streams");
        report.expect_that(
            &format!("{what}: pool over the largest alone"),
            "at most 1.02",
            &format!("{ratio:.3} ({})", mib(took.pools)),
            ratio <= 1.02,
        );
        report.tell(&format!("{what}: on the device (PyTorch: 16 MiB)"), &mib(took.device));
        if right.is_some() {
            report.expect(&format!("{what}: results of all replays right"), true, took.right);
        }
    }
    let asked = std::env::args().skip_while(|argument| argument != "--orders").nth(1);
    let orders = asked.and_then(|number| number.parse().ok()).unwrap_or(ORDERS);
    let mut worst = 0;
    for order in 1..=orders {
        let took = capture_all(
            machine,
            Way { order: Some(order), streams: 1 + order as usize % 4, ..way },
            outside,
            copy,
            None,
        )?;
        worst = worst.max(took.pools);
    }
    let ratio = worst as f64 / alone.pools as f64;
    report.expect_that(
        &format!("{orders} random orders from one to four streams: the largest pool over the largest graph alone"),
        "at most 1.02",
        &format!("{ratio:.3} ({})", mib(worst)),
        ratio <= 1.02,
    );
    let apart = capture_all(machine, Way { shared: false, ..way }, outside, copy, right)?;
    report.tell("128 graphs, a pool each: pools (PyTorch: 308 MiB)", &mib(apart.pools));
    report.tell("128 graphs, a pool each: on the device (PyTorch: 320 MiB)", &mib(apart.device));
    if right.is_some() {
        report.expect("128 graphs, a pool each: results of all replays right", true, apart.right);
    }
    println!(" rows of 64 Ki floats");
    let wide = Way { row: WIDE_ROW, ..way };
    let alone = capture_all(machine, Way { batches: 0, ..wide }, outside, copy, None)?;
    report.tell("the largest graph alone, pool", &mib(alone.pools));
    let ahead = capture_all(machine, Way { ahead: Some(alone.pools), ..wide }, outside, copy, None)?;
    let ratio = ahead.pools as f64 / alone.pools as f64;
    report.expect_that(
        "sized ahead: pool over the largest alone",
        "at most 1.02",
        &format!("{ratio:.3}"),
        ratio <= 1.02,
    );
    let without = capture_all(machine, wide, outside, copy, None)?;
    report.tell(
        "not sized ahead: pool over the largest alone (PyTorch's rules: 6.5)",
        &format!("{:.2}", without.pools as f64 / alone.pools as f64),
    );
    Ok(())
}

/// Captures the graphs of batches 1 to `batches`, or of the largest one alone, and replays each.
fn capture_all<M: Machine>(
    machine: &M,
    way: Way,
    outside: [Address; 3],
    copy: Copy<'_>,
    right: Option<Right<'_>>,
) -> Result<Took, Box<dyn std::error::Error + Send + Sync>> {
    let device = machine.device();
    let registry = Arc::new(CaptureRegistry::default());
    let allocator = Allocator::with_registry(Arc::clone(device), Config::new(Policy::Segments), registry)?;
    let captures = Captures::new(&allocator);
    let mut streams = Vec::new();
    for _ in 0..way.streams {
        streams.push(allocator.register_stream(device.stream_create(StreamKind::NonBlocking)?));
    }
    let before = taken(&**device)?;
    let shared = PoolId::fresh_for_capture();
    let _held = allocator.hold_pool(shared)?;
    if let Some(bytes) = way.ahead {
        allocator.reserve_pool(shared, Part::Large, bytes)?;
    }
    let mut batches: Vec<u64> = if way.batches == 0 { vec![BATCHES] } else { (1..=way.batches).collect() };
    if let Some(mut dice) = way.order {
        for last in (1..batches.len()).rev() {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            batches.swap(last, (dice >> 33) as usize % (last + 1));
        }
    }
    let mut graphs = Vec::new();
    for (number, batch) in batches.iter().enumerate() {
        let stream = &streams[number % streams.len()];
        let (bytes, words, handle) = (batch * way.row, batch * way.row / 4, stream.handle());
        let pool = if way.shared { shared } else { PoolId::fresh_for_capture() };
        let capture = captures.begin(stream, CaptureOptions::new().with_pool(pool))?;
        let (a, b) = (allocator.alloc(bytes, stream)?, allocator.alloc(bytes, stream)?);
        copy(handle, a.address(), outside[0], bytes)?;
        copy(handle, b.address(), outside[1], bytes)?;
        let squared = allocator.alloc(bytes, stream)?;
        machine.square(handle, squared.address(), a.address(), words)?;
        let doubled = allocator.alloc(bytes, stream)?;
        machine.double(handle, doubled.address(), b.address(), words)?;
        let sum = allocator.alloc(bytes, stream)?;
        machine.plus(handle, sum.address(), squared.address(), doubled.address(), words)?;
        copy(handle, outside[2], sum.address(), bytes)?;
        drop((squared, doubled, sum));
        drop((a, b));
        let graph = capture.end()?;
        let exec = graph.instantiate(InstantiateFlags::default())?;
        graphs.push((*batch, graph, exec));
    }
    let mut all_right = true;
    for (number, (batch, _, exec)) in graphs.iter().enumerate() {
        let stream = &streams[number % streams.len()];
        exec.launch(stream)?;
        if let Some(right) = right {
            device.stream_synchronize(stream.handle())?;
            all_right &= right(*batch)?;
        }
    }
    device.device_synchronize()?;
    let device_wide = taken(&**device)?.saturating_sub(before);
    let pools = allocator.state().segments.iter().filter(|s| !s.pool.is_default()).map(|s| s.size).sum();
    drop(graphs);
    captures.tidy();
    Ok(Took { pools, device: device_wide, right: all_right })
}
