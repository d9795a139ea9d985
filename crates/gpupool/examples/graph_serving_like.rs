//! Idle graph memory, as a serving process has it: 35 graphs with a pool each, of which few are needed at once. What they hold resident, parked,
//! lent and suspended by the driver's own count, what a wake costs, what a launch costs that wakes nothing; loans between replays on two
//! streams; and a suspension of 2 GiB. `--small` does little of everything, for tools that make each call slow.

mod common;

use std::sync::Arc;
use std::time::Instant;

use common::{Gpu, MIB, Machine, Outcome, Report, Runs, mib, taken, words};
use gpupool::device::{Address, Device, GraphDevice, InstantiateFlags, Kernel, StreamHandle, StreamKind, Workbench};
use gpupool::graphs::{CaptureOptions, Captures, Executable};
use gpupool::{
    Allocation, Allocator, CaptureRegistry, Config, IdleOptions, Lending, Policy, PoolId, Residency, Stream, Which,
};
use gpupool_sim_device::SimDevice;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// How much is done.
#[derive(Clone, Copy)]
struct Size {
    graphs: u64,
    /// Scratch memory of the smallest graph; the others have multiples of it.
    step: u64,
    loans: u64,
    launches: u32,
    /// Blocks of 128 MiB (or less) that are suspended.
    suspended: u64,
    suspended_bytes: u64,
}

impl Size {
    fn of(full: bool) -> Self {
        let small = std::env::args().any(|a| a == "--small");
        match (full, small) {
            (true, false) => Self {
                graphs: 35,
                step: 4 * MIB,
                loans: 10_000,
                launches: 2_000,
                suspended: 16,
                suspended_bytes: 128 * MIB,
            },
            _ => Self { graphs: 5, step: MIB, loans: 100, launches: 50, suspended: 3, suspended_bytes: 5 * MIB },
        }
    }
}

fn main() -> Outcome {
    common::run("Idle graph memory of a serving process", Runs::Anywhere(on_sim, on_gpu))
}

fn on_sim(device: Arc<SimDevice>, report: &Report) -> Outcome {
    // Virtual time is exact for few graphs as for many; the counts are what matters here.
    let size = Size { graphs: 35, loans: 1_000, launches: 50, ..Size::of(true) };
    let size = if std::env::args().any(|a| a == "--small") { Size::of(false) } else { size };
    all(&device, size, report)
}

fn on_gpu(gpu: Arc<Gpu>, report: &Report) -> Outcome {
    all(&gpu, Size::of(true), report)
}

fn all<M: Machine>(machine: &M, size: Size, report: &Report) -> Outcome {
    for policy in [Policy::Segments, Policy::Pages] {
        println!(" policy {}", policy.name());
        states(machine, policy, size, report)?;
        loans(machine, policy, size, report)?;
        suspension(machine, policy, size, report)?;
    }
    Ok(())
}

/// An allocator of its own with its captures.
struct Process<D: Workbench> {
    device: Arc<D>,
    allocator: Allocator<D>,
    captures: Captures<D>,
    input: Address,
    input_bytes: u64,
}

impl<D: Workbench> Process<D> {
    fn new(device: &Arc<D>, policy: Policy, input_bytes: u64) -> Result<Self, Failure> {
        let registry = Arc::new(CaptureRegistry::default());
        let allocator = Allocator::with_registry(Arc::clone(device), Config::new(policy), registry)?;
        let captures = Captures::new(&allocator);
        let input = device.mem_alloc(input_bytes)?;
        Ok(Self { device: Arc::clone(device), allocator, captures, input, input_bytes })
    }

    fn stream(&self) -> Result<Stream<D>, Failure> {
        Ok(self.allocator.register_stream(self.device.stream_create(StreamKind::NonBlocking)?))
    }

    fn fill(&self, stream: StreamHandle, value: u32) -> Result<(), Failure> {
        Ok(self.device.launch(stream, Kernel::Fill { dst: self.input, bytes: self.input_bytes, value })?)
    }

    /// A graph with a pool of its own: the input goes through two blocks of scratch memory, 1 is added in each, to an output that is held.
    fn graph(&self, stream: &Stream<D>, bytes: u64, options: IdleOptions) -> Result<Served<D>, Failure> {
        let (handle, pool) = (stream.handle(), PoolId::fresh_for_capture());
        let hold = self.allocator.hold_pool(pool)?;
        self.allocator.set_idle_options(pool, options)?;
        let capture = self.captures.begin(stream, CaptureOptions::new().with_pool(pool))?;
        let (a, b) = (self.allocator.alloc(bytes, stream)?, self.allocator.alloc(bytes, stream)?);
        let output = self.allocator.alloc(4096, stream)?;
        self.device.launch(handle, Kernel::Copy { dst: a.address(), src: self.input, bytes })?;
        self.device.launch(handle, Kernel::Add { dst: a.address(), bytes, value: 1 })?;
        self.device.launch(handle, Kernel::Copy { dst: b.address(), src: a.address(), bytes })?;
        self.device.launch(handle, Kernel::Add { dst: b.address(), bytes, value: 1 })?;
        // From the far end: all of the scratch memory must have been there.
        let src = b.address().offset(bytes - 4096);
        self.device.launch(handle, Kernel::Copy { dst: output.address(), src, bytes: 4096 })?;
        drop((a, b));
        let exec = capture.end()?.instantiate(InstantiateFlags::default())?;
        drop(hold);
        Ok(Served { exec, output, pool })
    }

    /// Launches each graph with an input of its own and compares what came out.
    fn are_right(&self, stream: &Stream<D>, graphs: &[Served<D>], from: u32) -> Result<bool, Failure> {
        let mut right = true;
        for (value, graph) in (from..).zip(graphs) {
            self.fill(stream.handle(), value)?;
            graph.exec.launch(stream)?;
            let found = words(&*self.device, stream.handle(), graph.output.address(), 1024)?;
            right &= found.iter().all(|word| *word == value + 2);
        }
        Ok(right)
    }
}

impl<D: Workbench> Drop for Process<D> {
    fn drop(&mut self) {
        if self.device.device_synchronize().is_ok() {
            let _freed = self.device.mem_free(self.input);
        }
    }
}

/// A graph in service.
struct Served<D: GraphDevice> {
    exec: Executable<D>,
    output: Allocation<D>,
    pool: PoolId,
}

fn micros(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}

/// Bytes in each state, what a wake costs, and what a launch costs that wakes nothing.
fn states<M: Machine>(machine: &M, policy: Policy, size: Size, report: &Report) -> Outcome {
    let device = machine.device();
    let process = Process::new(device, policy, size.graphs * size.step)?;
    let stream = process.stream()?;
    process.fill(stream.handle(), 0)?;
    let before = taken(&**device)?;
    let mut graphs = Vec::new();
    for n in 1..=size.graphs {
        let options = IdleOptions::new().with_tag("served").with_lending(Lending::BeforeGrowth);
        graphs.push(process.graph(&stream, n * size.step, options)?);
    }
    let held = |what: &str| -> Result<u64, Failure> {
        let bytes = taken(&**device)?.saturating_sub(before);
        report.tell(&format!("{} graphs, {what}: on the device", size.graphs), &mib(bytes));
        Ok(bytes)
    };
    report.expect("results of all graphs, resident", true, process.are_right(&stream, &graphs, 100)?);
    let resident = held("resident")?;
    launch_latency(&process, &stream, &graphs[0], size, report)?;
    // Eager work between replays.
    let loan = process.allocator.alloc(size.graphs * size.step / 2, &stream)?;
    let lent = graphs.iter().any(|g| process.allocator.residency(g.pool).ok() == Some(Residency::Lent));
    report.expect("a request between replays is served by a loan", true, lent);
    let with_loan = held(&format!("{} of them lent", mib(loan.size())))?;
    report.expect("a loan takes no memory of the device, bytes", resident, with_loan);
    drop(loan);
    device.stream_synchronize(stream.handle())?;
    for round in 0..2 {
        let mut went = Vec::new();
        for graph in &graphs {
            let begun = Instant::now();
            let moved = process.allocator.park_pool(graph.pool)?;
            went.push((moved, micros(begun)));
        }
        held("parked, results held in place")?;
        if round == 0 {
            println!("    pool MiB, handles parked, us to park; handles woken, us to wake");
        }
        for (graph, (parked, park_us)) in graphs.iter().zip(went) {
            let begun = Instant::now();
            let woken = process.allocator.wake_pool(graph.pool)?;
            let wake_us = micros(begun);
            println!(
                "    {:>8.0} {:>4} {park_us:>9.1} {:>4} {wake_us:>9.1}",
                woken.bytes as f64 / MIB as f64,
                parked.handles,
                woken.handles
            );
        }
        let what = format!("results of all graphs, woken, round {round}");
        report.expect(&what, true, process.are_right(&stream, &graphs, 200)?);
    }
    // A launch wakes by itself.
    for graph in &graphs {
        process.allocator.park_pool(graph.pool)?;
    }
    report.expect("results of all graphs, woken by their launches", true, process.are_right(&stream, &graphs, 300)?);
    report.expect("resident again, bytes", resident, held("woken")?);
    let begun = Instant::now();
    let moved = process.allocator.suspend(&Which::Tag("served".to_owned()))?;
    report.tell("suspended all pools in us, bytes copied", &format!("{:.0}, {}", micros(begun), moved.copied_bytes));
    held("suspended")?;
    let refused = graphs[0].exec.launch(&stream).is_err();
    report.expect("a launch of a suspended graph is refused", true, refused);
    let begun = Instant::now();
    process.allocator.resume(&Which::Tag("served".to_owned()))?;
    report.tell("resumed all pools in us", &format!("{:.0}", micros(begun)));
    report.expect("results of all graphs, resumed", true, process.are_right(&stream, &graphs, 400)?);
    Ok(())
}

/// The host's time in a launch that has nothing to wake: ours, and the driver's alone.
fn launch_latency<D: Workbench>(
    process: &Process<D>,
    stream: &Stream<D>,
    graph: &Served<D>,
    size: Size,
    report: &Report,
) -> Outcome {
    let median = |times: &mut Vec<f64>| {
        times.sort_unstable_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for round in 0..size.launches {
        let begun = Instant::now();
        graph.exec.launch(stream)?;
        ours.push(micros(begun));
        let begun = Instant::now();
        process.device.graph_launch(graph.exec.handle(), stream.handle())?;
        bare.push(micros(begun));
        if round % 16 == 0 {
            process.device.stream_synchronize(stream.handle())?;
        }
    }
    process.device.stream_synchronize(stream.handle())?;
    let (ours, bare) = (median(&mut ours), median(&mut bare));
    report.tell("launch latency, nothing to wake: us, and the driver's call alone", &format!("{ours:.2}, {bare:.2}"));
    Ok(())
}

/// Loans between replays, on two streams; every loan and every replay leaves a checksum that is compared in the end.
fn loans<M: Machine>(machine: &M, policy: Policy, size: Size, report: &Report) -> Outcome {
    let device = machine.device();
    let scratch = 24 * MIB;
    let process = Process::new(device, policy, scratch)?;
    let streams = [process.stream()?, process.stream()?];
    let options = || IdleOptions::new().with_lending(Lending::BeforeGrowth);
    let graphs = [process.graph(&streams[0], scratch, options())?, process.graph(&streams[1], scratch, options())?];
    process.fill(streams[0].handle(), 5)?;
    device.stream_synchronize(streams[0].handle())?;
    let rounds = size.loans;
    let sums = device.mem_alloc(rounds * 16)?;
    let mut lengths = Vec::new();
    let reserved = process.allocator.stats().reserved_bytes.all.current;
    for round in 0..rounds {
        let (stream, graph) = (&streams[(round % 2) as usize], &graphs[(round % 2) as usize]);
        let handle = stream.handle();
        let bytes = MIB + 4096 * (1 + round * 7 % 500);
        let loan = process.allocator.alloc(bytes, stream)?;
        let (dst, src) = (sums.offset(round * 16), loan.address());
        device.launch(handle, Kernel::Fill { dst: src, bytes, value: round as u32 })?;
        // Now and then the other stream uses it too, ordered by an event.
        let other = &streams[((round + 1) % 2) as usize];
        if round % 5 == 0 {
            let event = device.event_create()?;
            device.event_record(event, handle)?;
            device.stream_wait_event(other.handle(), event)?;
            device.event_destroy(event)?;
            device.launch(other.handle(), Kernel::Checksum { dst, src, bytes })?;
            loan.record_stream(other)?;
        } else {
            device.launch(handle, Kernel::Checksum { dst, src, bytes })?;
        }
        lengths.push(bytes);
        drop(loan);
        graph.exec.launch(stream)?;
        let (dst, src) = (sums.offset(round * 16 + 8), graph.output.address());
        device.launch(handle, Kernel::Checksum { dst, src, bytes: 4096 })?;
        // A host that never looks back would have lent everything before anything came back.
        if round % 8 == 7 {
            device.device_synchronize()?;
        }
    }
    device.device_synchronize()?;
    let found = words(&**device, streams[0].handle(), sums, rounds as usize * 4)?;
    let sum_of = |value: u64, bytes: u64| {
        let n = bytes / 4;
        value.wrapping_mul(n * (n + 1) / 2)
    };
    let wrong = lengths.iter().enumerate().filter(|(round, bytes)| {
        let at = |word: usize| u64::from(found[round * 4 + word]);
        let (loan, replay) = (at(0) | at(1) << 32, at(2) | at(3) << 32);
        loan != sum_of(*round as u64, **bytes) || replay != sum_of(7, 4096)
    });
    report.expect(&format!("{rounds} loans between replays: wrong checksums"), 0, wrong.count());
    let stats = process.allocator.stats();
    report.expect_that(
        "loans, of as many requests",
        "at least 99 %",
        &stats.idle.loans.to_string(),
        stats.idle.loans >= rounds * 99 / 100,
    );
    report.tell("grown meanwhile", &mib((stats.reserved_bytes.all.current - reserved).unsigned_abs()));
    device.mem_free(sums)?;
    Ok(())
}

/// Pools with much in them leave the device and come back.
fn suspension<M: Machine>(machine: &M, policy: Policy, size: Size, report: &Report) -> Outcome {
    let device = machine.device();
    let process = Process::new(device, policy, size.suspended_bytes)?;
    let stream = process.stream()?;
    let handle = stream.handle();
    let before = taken(&**device)?;
    let mut served = Vec::new();
    for _ in 0..size.suspended {
        let bytes = size.suspended_bytes;
        let capture = process.captures.begin(&stream, CaptureOptions::new())?;
        let held = process.allocator.alloc(bytes, &stream)?;
        device.launch(handle, Kernel::Copy { dst: held.address(), src: process.input, bytes })?;
        device.launch(handle, Kernel::Add { dst: held.address(), bytes, value: 3 })?;
        let graph = capture.end()?;
        process.allocator.set_idle_options(graph.pool(), IdleOptions::new().with_tag("asleep"))?;
        let exec = graph.instantiate(InstantiateFlags::default())?;
        served.push((exec, held));
    }
    let sums = device.mem_alloc(8 * size.suspended)?;
    let checksums = || -> Result<Vec<u32>, Failure> {
        for (at, (_, held)) in served.iter().enumerate() {
            let kernel =
                Kernel::Checksum { dst: sums.offset(8 * at as u64), src: held.address(), bytes: held.requested() };
            device.launch(handle, kernel)?;
        }
        Ok(words(&**device, handle, sums, served.len() * 2)?)
    };
    for (value, (exec, _)) in (1_u32..).zip(&served) {
        process.fill(handle, value * 1_000_003)?;
        exec.launch(&stream)?;
    }
    let (at_first, addresses) = (checksums()?, served.iter().map(|(_, h)| h.address()).collect::<Vec<_>>());
    let resident = taken(&**device)?.saturating_sub(before);
    let begun = Instant::now();
    let moved = process.allocator.suspend(&Which::All)?;
    let suspend_ms = micros(begun) / 1e3;
    let asleep = taken(&**device)?.saturating_sub(before);
    report.expect("bytes copied to the host", size.suspended * size.suspended_bytes, moved.copied_bytes);
    report.tell("on the device, resident and suspended", &format!("{}, {}", mib(resident), mib(asleep)));
    let begun = Instant::now();
    process.allocator.resume(&Which::All)?;
    let resume_ms = micros(begun) / 1e3;
    report.tell("ms to suspend and to resume", &format!("{suspend_ms:.1}, {resume_ms:.1}"));
    report.expect("checksums after it", true, at_first == checksums()?);
    let now: Vec<Address> = served.iter().map(|(_, h)| h.address()).collect();
    report.expect("addresses after it", true, addresses == now);
    let mut right = true;
    for (value, (exec, held)) in (1_u32..).zip(&served) {
        process.fill(handle, value * 7)?;
        exec.launch(&stream)?;
        let last = held.address().offset(held.requested() - 64);
        right &= words(&**device, handle, last, 16)?.iter().all(|word| *word == value * 7 + 3);
    }
    report.expect("every graph replays after it", true, right);
    device.mem_free(sums)?;
    Ok(())
}
