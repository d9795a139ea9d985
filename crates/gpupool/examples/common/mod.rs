//! What the experiments share: the choice of a device, their kernels on each, and a report of what was expected and what came.
#![allow(dead_code, reason = "no experiment uses all of it")]

use std::cell::Cell;
use std::error::Error;
use std::sync::Arc;

use gpupool::device::{Address, DriverResult, Kernel, StreamHandle, Workbench};
use gpupool_cuda_device::CudaDevice;
use gpupool_cuda_device::kernels::{Experiment, Experiments};
use gpupool_sim_device::{SimConfig, SimDevice};

/// What an experiment returns.
pub(crate) type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

/// A gibibyte and a mebibyte.
pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const MIB: u64 = 1 << 20;

/// Expectations and how many were not met.
#[derive(Default)]
pub(crate) struct Report {
    missed: Cell<u32>,
}

impl Report {
    /// A line: what was expected, and what came.
    pub(crate) fn expect<T: PartialEq + std::fmt::Debug>(&self, what: &str, expected: T, got: T) {
        let met = expected == got;
        self.line(what, &format!("{expected:?}"), &format!("{got:?}"), met);
    }

    /// A line whose expectation is a bound.
    pub(crate) fn expect_that(&self, what: &str, expected: &str, got: &str, met: bool) {
        self.line(what, expected, got, met);
    }

    /// A line without an expectation.
    pub(crate) fn tell(&self, what: &str, got: &str) {
        println!("  {what}: {got}");
    }

    fn line(&self, what: &str, expected: &str, got: &str, met: bool) {
        self.missed.set(self.missed.get() + u32::from(!met));
        let verdict = if met { "ok" } else { "DIFFERS" };
        println!("  {what}: expected {expected}, got {got}: {verdict}");
    }
}

/// An experiment, for any device or for a GPU only.
pub(crate) enum Runs {
    Anywhere(fn(Arc<SimDevice>, &Report) -> Outcome, fn(Arc<Gpu>, &Report) -> Outcome),
    OnGpu(fn(Arc<Gpu>, &Report) -> Outcome),
}

/// A GPU with the experiments' kernels.
pub(crate) struct Gpu {
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) kernels: Experiments,
}

/// Runs an experiment on the device that the command line names (`--device sim|cuda[:N]`, a GPU if there is one).
///
/// # Errors
///
/// What went wrong, or that an expectation was missed.
pub(crate) fn run(title: &str, experiment: Runs) -> Outcome {
    let arguments: Vec<String> = std::env::args().collect();
    let chosen = arguments.iter().position(|a| a == "--device").and_then(|at| arguments.get(at + 1));
    let present = gpupool_cuda_device::availability::driver().is_ok();
    let name = chosen.cloned().unwrap_or_else(|| if present { "cuda" } else { "sim" }.to_owned());
    println!("{title}, on {name}");
    let report = Report::default();
    match (&experiment, name.as_str()) {
        (Runs::Anywhere(on_sim, _), "sim") => on_sim(Arc::new(SimDevice::new(SimConfig::default())), &report)?,
        (Runs::OnGpu(_), "sim") => {
            println!("  skipped: no CUDA driver asked for, and this needs one");
            return Ok(());
        }
        (Runs::Anywhere(_, on_gpu) | Runs::OnGpu(on_gpu), "cuda") if present => {
            let device = CudaDevice::open(0)?;
            device.load_kernels()?;
            let kernels = Experiments::load(&device)?;
            on_gpu(Arc::new(Gpu { device: Arc::new(device), kernels }), &report)?;
        }
        (_, "cuda") => {
            println!("  skipped: no CUDA driver");
            return Ok(());
        }
        _ => return Err("usage: --device sim|cuda".into()),
    }
    match report.missed.get() {
        0 => Ok(()),
        missed => Err(format!("{missed} expectations were missed").into()),
    }
}

/// The experiments' kernels, on both devices. On the simulated one, kernels that read and write the same ranges stand in.
pub(crate) trait Machine {
    type Device: Workbench;

    fn device(&self) -> &Arc<Self::Device>;

    /// c = a + b, 32-bit words; on the simulated device `b` is filled with `b_word`.
    fn sum(&self, stream: StreamHandle, c: Address, a: Address, b: (Address, u32), words: u64) -> DriverResult<()>;

    /// out = x * x.
    fn square(&self, stream: StreamHandle, out: Address, x: Address, words: u64) -> DriverResult<()>;

    /// out = x * 2.
    fn double(&self, stream: StreamHandle, out: Address, x: Address, words: u64) -> DriverResult<()>;

    /// out = x + y, floats.
    fn plus(&self, stream: StreamHandle, out: Address, x: Address, y: Address, words: u64) -> DriverResult<()>;

    /// Adds `value` a thousand times to each of so many 64-bit numbers (32-bit ones on the simulated device).
    fn add_thousand(&self, stream: StreamHandle, x: Address, value: i32, count: u64) -> DriverResult<()>;
}

impl Machine for Arc<SimDevice> {
    type Device = SimDevice;

    fn device(&self) -> &Arc<SimDevice> {
        self
    }

    fn sum(&self, stream: StreamHandle, c: Address, a: Address, b: (Address, u32), words: u64) -> DriverResult<()> {
        let bytes = words * 4;
        self.launch(stream, Kernel::Copy { dst: c, src: a, bytes })?;
        self.launch(stream, Kernel::Add { dst: c, bytes, value: b.1 })
    }

    fn square(&self, stream: StreamHandle, out: Address, x: Address, words: u64) -> DriverResult<()> {
        self.launch(stream, Kernel::Copy { dst: out, src: x, bytes: words * 4 })
    }

    fn double(&self, stream: StreamHandle, out: Address, x: Address, words: u64) -> DriverResult<()> {
        self.launch(stream, Kernel::Copy { dst: out, src: x, bytes: words * 4 })
    }

    fn plus(&self, stream: StreamHandle, out: Address, x: Address, _y: Address, words: u64) -> DriverResult<()> {
        self.launch(stream, Kernel::Copy { dst: out, src: x, bytes: words * 4 })
    }

    fn add_thousand(&self, stream: StreamHandle, x: Address, value: i32, count: u64) -> DriverResult<()> {
        let value = value.wrapping_mul(1000).cast_unsigned();
        self.launch(stream, Kernel::Add { dst: x, bytes: count * 4, value })
    }
}

impl Machine for Arc<Gpu> {
    type Device = CudaDevice;

    fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    fn sum(&self, stream: StreamHandle, c: Address, a: Address, b: (Address, u32), n: u64) -> DriverResult<()> {
        self.kernels.launch(&self.device, stream, Experiment::SumI32 { c, a, b: b.0, n })
    }

    fn square(&self, stream: StreamHandle, out: Address, x: Address, n: u64) -> DriverResult<()> {
        self.kernels.launch(&self.device, stream, Experiment::Square { out, x, n })
    }

    fn double(&self, stream: StreamHandle, out: Address, x: Address, n: u64) -> DriverResult<()> {
        self.kernels.launch(&self.device, stream, Experiment::Double { out, x, n })
    }

    fn plus(&self, stream: StreamHandle, out: Address, x: Address, y: Address, n: u64) -> DriverResult<()> {
        self.kernels.launch(&self.device, stream, Experiment::Sum { out, x, y, n })
    }

    fn add_thousand(&self, stream: StreamHandle, x: Address, value: i32, n: u64) -> DriverResult<()> {
        let kernel = Experiment::AddOften { x, n, value: i64::from(value), times: 1000 };
        self.kernels.launch(&self.device, stream, kernel)
    }
}

/// The 32-bit words at an address, after everything on the stream.
///
/// # Errors
///
/// The driver's.
pub(crate) fn words<D: Workbench>(
    device: &D,
    stream: StreamHandle,
    at: Address,
    count: usize,
) -> DriverResult<Vec<u32>> {
    let mut bytes = vec![0; count * 4];
    device.read(stream, at, &mut bytes)?;
    let (words, _) = bytes.as_chunks::<4>();
    Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// Bytes of the device that are taken, by whomever.
///
/// # Errors
///
/// The driver's.
pub(crate) fn taken<D: Workbench>(device: &D) -> DriverResult<u64> {
    let info = device.mem_info()?;
    Ok(info.total.saturating_sub(info.free))
}

/// Bytes in MiB.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / MIB as f64)
}
