//! Where kernels run: on the simulated device, or on a GPU. The rest of the runtime does not know which.

use std::error::Error;
use std::sync::Arc;

use gpupool::device::{Address, DriverError, DriverResult, Memory, StreamHandle, Workbench};
use gpupool::sim::SimDevice;
use gpupool_cuda_device::blas::{Blas, Product};
use gpupool_cuda_device::kernels::{Experiment, Experiments};
use gpupool_cuda_device::{CudaDevice, PinnedBytes};

/// A device with the kernels that a network needs.
pub trait Compute {
    /// The device that the allocator serves.
    type Device: Workbench;

    /// The device.
    fn device(&self) -> &Arc<Self::Device>;

    /// Submits a kernel to a stream, or records it there.
    ///
    /// # Errors
    ///
    /// The driver's, the library's.
    fn run(&self, stream: StreamHandle, kernel: Experiment) -> Result<(), Failure>;

    /// Copies values to the device. **Waits.**
    ///
    /// # Errors
    ///
    /// The driver's.
    fn upload(&self, stream: StreamHandle, to: Address, values: &[f32]) -> DriverResult<()>;

    /// Lends a library for products memory that is its own from now on. Asked once, before the first product.
    ///
    /// # Errors
    ///
    /// The library's.
    fn lend_workspace(&mut self, stream: StreamHandle, memory: impl Memory + Send + 'static) -> Result<(), Failure>;

    /// How many bytes [`lend_workspace`](Self::lend_workspace) wants; 0 for no library.
    fn workspace(&self) -> u64;
}

/// The simulated device: a kernel is a function on the host that runs when its stream gets there.
#[derive(Debug)]
pub struct Simulated(pub Arc<SimDevice>);

impl Compute for Simulated {
    type Device = SimDevice;

    fn device(&self) -> &Arc<SimDevice> {
        &self.0
    }

    fn run(&self, stream: StreamHandle, kernel: Experiment) -> Result<(), Failure> {
        let device = Arc::clone(&self.0);
        Ok(self.0.launch_repeatable_host_function(stream, Arc::new(move || simulate(&device, kernel)))?)
    }

    fn upload(&self, stream: StreamHandle, to: Address, values: &[f32]) -> DriverResult<()> {
        self.0.stream_synchronize(stream)?;
        store(&self.0, to, values);
        Ok(())
    }

    fn lend_workspace(&mut self, _stream: StreamHandle, _memory: impl Memory + Send + 'static) -> Result<(), Failure> {
        Ok(())
    }

    fn workspace(&self) -> u64 {
        0
    }
}

fn load(device: &SimDevice, from: Address, n: u64) -> Vec<f32> {
    let bytes = device.read_bytes(from, n * 4).unwrap_or_default();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn store(device: &SimDevice, to: Address, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    device.write_bytes(to, &bytes);
}

/// What kernels/cuda/experiments.cu computes, in the same order of operations.
fn simulate(device: &SimDevice, kernel: Experiment) {
    match kernel {
        Experiment::Matmul { out, a, b, rows, inner, cols, a_transposed, b_transposed } => {
            let (a, b) = (load(device, a, rows * inner), load(device, b, inner * cols));
            let x = |r: u64, k: u64| a[(if a_transposed { k * rows + r } else { r * inner + k }) as usize];
            let y = |k: u64, c: u64| b[(if b_transposed { c * inner + k } else { k * cols + c }) as usize];
            let element = |i: u64| (0..inner).fold(0.0, |sum, k| sum + x(i / cols, k) * y(k, i % cols));
            store(device, out, &(0..rows * cols).map(element).collect::<Vec<f32>>());
        }
        Experiment::Relu { out, x, n } => {
            let values: Vec<f32> = load(device, x, n).into_iter().map(|v| v.max(0.0)).collect();
            store(device, out, &values);
        }
        Experiment::ReluBack { grad, activation, n } => {
            let (g, a) = (load(device, grad, n), load(device, activation, n));
            let values: Vec<f32> = g.into_iter().zip(a).map(|(g, a)| if a > 0.0 { g } else { 0.0 }).collect();
            store(device, grad, &values);
        }
        Experiment::Loss { grad, loss, y, target, n } => {
            let (y, target) = (load(device, y, n), load(device, target, n));
            let errors: Vec<f32> = y.into_iter().zip(target).map(|(y, t)| y - t).collect();
            store(device, grad, &errors.iter().map(|d| 2.0 * d / n as f32).collect::<Vec<f32>>());
            store(device, loss, &[errors.iter().fold(0.0, |sum, d| sum + d * d) / n as f32]);
        }
        Experiment::Descend { weight, grad, rate, n } => {
            let (w, g) = (load(device, weight, n), load(device, grad, n));
            store(device, weight, &w.into_iter().zip(g).map(|(w, g)| w - rate * g).collect::<Vec<f32>>());
        }
        Experiment::Sum { out, x, y, n } => {
            let (x, y) = (load(device, x, n), load(device, y, n));
            store(device, out, &x.into_iter().zip(y).map(|(x, y)| x + y).collect::<Vec<f32>>());
        }
        other => eprintln!("the simulated device has no kernel for {other:?}"),
    }
}

/// A GPU, with the kernels compiled for it, and cuBLAS for the products.
#[derive(Debug)]
pub struct Gpu {
    device: Arc<CudaDevice>,
    kernels: Experiments,
    blas: Option<Blas>,
}

impl Gpu {
    /// Opens a GPU.
    ///
    /// # Errors
    ///
    /// There is none, or no compiler for its kernels.
    pub fn open(ordinal: u32) -> Result<Self, Box<dyn Error>> {
        let device = Arc::new(CudaDevice::open(ordinal)?);
        let kernels = Experiments::load(&device)?;
        Ok(Self { device, kernels, blas: None })
    }
}

impl Compute for Gpu {
    type Device = CudaDevice;

    fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    fn run(&self, stream: StreamHandle, kernel: Experiment) -> Result<(), Failure> {
        let (Experiment::Matmul { out, a, b, rows, inner, cols, a_transposed, b_transposed }, Some(blas)) =
            (kernel, &self.blas)
        else {
            return Ok(self.kernels.launch(&self.device, stream, kernel)?);
        };
        Ok(blas.multiply(&Product { out, a, b, rows, inner, cols, a_transposed, b_transposed })?)
    }

    fn upload(&self, stream: StreamHandle, to: Address, values: &[f32]) -> DriverResult<()> {
        let bytes = size_of_val(values);
        let pinned = PinnedBytes::new(&self.device, bytes)?;
        pinned.write(values.iter().map(|v| v.to_bits()));
        self.device.copy_async(stream, to, pinned.address(), bytes as u64)?;
        self.device.stream_synchronize(stream)
    }

    fn lend_workspace(&mut self, stream: StreamHandle, memory: impl Memory + Send + 'static) -> Result<(), Failure> {
        self.blas = Some(Blas::new(&self.device, stream, memory)?);
        Ok(())
    }

    fn workspace(&self) -> u64 {
        32 << 20
    }
}

/// A driver's error as anything's.
pub type Failure = Box<dyn Error>;

/// Bytes that were read back, as values.
///
/// # Errors
///
/// The driver's.
pub fn download<C: Compute>(
    compute: &C,
    stream: StreamHandle,
    from: Address,
    n: usize,
) -> Result<Vec<f32>, DriverError> {
    let mut bytes = vec![0; n * 4];
    compute.device().read(stream, from, &mut bytes)?;
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}
