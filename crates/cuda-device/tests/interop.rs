//! Blocks of gpupool's in cudarc's hands, on a GPU: copies, kernels compiled by NVRTC, cuBLAS; eager, and captured and replayed.
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;

use cudarc::cublas::{CudaBlas, Gemm, GemmConfig, sys as cublas};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use gpupool_allocator::{Allocation, Allocator, CaptureRegistry, Config, Policy, Stream};
use gpupool_cuda_device::CudaDevice;
use gpupool_cuda_device::interop::{TracksEvents, TypedBlock, check_for_capture};
use gpupool_cuda_device::kernels::{Experiment as E, Experiments, compile};
use gpupool_device::InstantiateFlags;
use gpupool_graph_capture::{CaptureOptions, Captures};
use gpupool_tests::gpu::{self, GpuTest};
use libtest_mimic::Failed;

type Block<T> = TypedBlock<T, Allocation<CudaDevice>>;
type Result<T = ()> = std::result::Result<T, Failed>;

const SAXPY: &str = "extern \"C\" __global__ void saxpy(float *y, const float *x, float a, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}";

/// cudarc's context and one of its streams, and an allocator that serves it. What uses the stream goes before it.
struct Host {
    own: Stream<CudaDevice>,
    allocator: Allocator<CudaDevice>,
    device: Arc<CudaDevice>,
    stream: Arc<CudaStream>,
    context: Arc<CudaContext>,
}

impl Host {
    fn new() -> Result<Self> {
        let context = CudaContext::new(0)?;
        // SAFETY: no slice of cudarc's is used on two streams here.
        unsafe { context.disable_event_tracking() };
        let device = Arc::new(CudaDevice::of(&context)?);
        let stream = context.new_stream()?;
        // SAFETY: the stream is one of this context, and this struct drops what uses it before it.
        let handle = unsafe { device.borrow_stream(stream.cu_stream()) };
        let registry = Arc::<CaptureRegistry>::default();
        let allocator = Allocator::with_registry(Arc::clone(&device), Config::new(Policy::Segments), registry)?;
        let own = allocator.register_stream(handle);
        Ok(Self { context, stream, device, allocator, own })
    }

    fn block<T: cudarc::driver::DeviceRepr>(&self, len: usize) -> Result<Block<T>> {
        let owner = self.allocator.alloc((len * size_of::<T>()) as u64, &self.own)?;
        TypedBlock::new(owner, len, &self.stream).map_err(|(_, error)| error.into())
    }

    fn filled(&self, values: &[f32]) -> Result<Block<f32>> {
        let mut block = self.block(values.len())?;
        self.stream.memcpy_htod(values, &mut block)?;
        Ok(block)
    }

    fn values(&self, block: &Block<f32>) -> Result<Vec<f32>> {
        let values = self.stream.clone_dtoh(block)?;
        self.stream.synchronize()?;
        Ok(values)
    }

    fn saxpy(&self) -> Result<CudaFunction> {
        let module = self.context.load_module(Ptx::from_binary(compile(SAXPY, self.device.hardware())?))?;
        Ok(module.load_function("saxpy")?)
    }

    /// y += a * x.
    fn launch(&self, saxpy: &CudaFunction, y: &mut Block<f32>, x: &Block<f32>, a: f32, n: u32) -> Result {
        let mut launch = self.stream.launch_builder(saxpy);
        launch.arg(y).arg(x).arg(&a).arg(&n);
        // SAFETY: these are the kernel's parameters, and both blocks hold `n` values.
        unsafe { launch.launch(LaunchConfig::for_num_elems(n)) }?;
        Ok(())
    }
}

fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

fn copies() -> Result {
    let host = Host::new()?;
    let values = numbers(5000, 1);
    let block = host.filled(&values)?;
    let mut other = host.block(5000)?;
    host.stream.memcpy_dtod(&block, &mut other)?;
    assert_eq!(host.values(&other)?, values);
    host.stream.memset_zeros(&mut other)?;
    assert_eq!(host.values(&other)?, vec![0.0; 5000]);
    // Our own drop runs, and cudarc frees nothing: the block serves the next request.
    let at = block.owner().address();
    drop((block, other));
    assert_eq!(host.allocator.stats().allocated_bytes.all.current, 0);
    let again = [host.block::<f32>(5000)?, host.block(5000)?];
    assert!(again.iter().any(|b| b.owner().address() == at));
    Ok(())
}

fn launches() -> Result {
    let host = Host::new()?;
    let saxpy = host.saxpy()?;
    let (x, y) = (numbers(3000, 2), numbers(3000, 3));
    let (a, mut b) = (host.filled(&x)?, host.filled(&y)?);
    host.launch(&saxpy, &mut b, &a, 2.0, 3000)?;
    let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x.mul_add(2.0, *y)).collect();
    assert_eq!(host.values(&b)?, expected);
    Ok(())
}

/// Copies and launches recorded into a graph whose temporaries come from its own pool; replayed with new inputs.
fn captured() -> Result {
    let host = Host::new()?;
    check_for_capture(&host.context)?;
    let saxpy = host.saxpy()?;
    let (mut input, mut output) = (host.filled(&numbers(3000, 4))?, host.filled(&[0.0; 3000])?);
    let captures = Captures::new(&host.allocator);
    let capture = captures.begin(&host.own, CaptureOptions::new())?;
    let mut temporary = host.block::<f32>(3000)?;
    host.stream.memcpy_dtod(&input, &mut temporary)?;
    host.launch(&saxpy, &mut temporary, &input, 3.0, 3000)?;
    host.stream.memcpy_dtod(&temporary, &mut output)?;
    drop(temporary);
    let graph = capture.end()?;
    assert_eq!((graph.report().node_count(), graph.report().memory_nodes), (3, 0), "no memory, and no events");
    let exec = graph.instantiate(InstantiateFlags::default())?;
    for seed in 5..15 {
        let values = numbers(3000, seed);
        host.stream.memcpy_htod(&values, &mut input)?;
        exec.launch(&host.own)?;
        let expected: Vec<f32> = values.iter().map(|x| x.mul_add(3.0, *x)).collect();
        assert_eq!(host.values(&output)?, expected);
    }
    Ok(())
}

/// The switch that must be off, and what says so.
fn the_switch() -> Result {
    let context = CudaContext::new(0)?;
    let _stream = context.new_stream()?;
    assert_eq!(check_for_capture(&context), Err(TracksEvents), "cudarc tracks by default");
    // SAFETY: there are no slices.
    unsafe { context.disable_event_tracking() };
    assert_eq!(check_for_capture(&context), Ok(()));
    Ok(())
}

const BATCH: usize = 64;
const INPUT: usize = 256;
const OUTPUT: usize = 32;
const RATE: f32 = 0.05;
const STEPS: usize = 20;

/// A linear layer whose matrix products are cuBLAS's, with a workspace of ours.
struct Layer<'a> {
    host: &'a Host,
    blas: CudaBlas,
    kernels: Experiments,
    weight: Block<f32>,
    input: Block<f32>,
    target: Block<f32>,
    loss: Block<f32>,
    _workspace: Block<u8>,
}

impl<'a> Layer<'a> {
    fn new(host: &'a Host) -> Result<Self> {
        const WORKSPACE: usize = 32 << 20;
        let blas = CudaBlas::new(Arc::clone(&host.stream))?;
        let workspace = host.block::<u8>(WORKSPACE)?;
        let at = workspace.owner().address().0 as *mut std::ffi::c_void;
        // SAFETY: the block outlives the handle (fields are dropped in order), and is used on the handle's stream alone.
        unsafe { cublas::cublasSetWorkspace_v2(*blas.handle(), at, WORKSPACE) }.result()?;
        Ok(Self {
            blas,
            kernels: Experiments::load(&host.device)?,
            weight: host.filled(&numbers(INPUT * OUTPUT, 6))?,
            input: host.filled(&numbers(BATCH * INPUT, 7))?,
            target: host.filled(&numbers(BATCH * OUTPUT, 8))?,
            loss: host.block(1)?,
            _workspace: workspace,
            host,
        })
    }

    /// c = a b, column-major, `b` transposed or not.
    fn gemm(&self, c: &mut Block<f32>, a: &Block<f32>, b: &Block<f32>, [m, n, k]: [usize; 3], bt: bool) -> Result {
        let [m, n, k] = [m, n, k].map(|x| i32::try_from(x).unwrap());
        let plain = cublas::cublasOperation_t::CUBLAS_OP_N;
        let transb = if bt { cublas::cublasOperation_t::CUBLAS_OP_T } else { plain };
        let ldb = if bt { n } else { k };
        let config = GemmConfig { transa: plain, transb, m, n, k, alpha: 1.0, lda: m, ldb, beta: 0.0, ldc: m };
        // SAFETY: the three blocks hold m k, k n and m n values.
        Ok(unsafe { self.blas.gemm(config, a, b, c) }?)
    }

    /// One step, eager or under capture. What is row-major here is column-major and transposed to cuBLAS.
    fn step(&self) -> Result {
        let (device, handle) = (&self.host.device, self.host.own.handle());
        let mut y = self.host.block(BATCH * OUTPUT)?;
        self.gemm(&mut y, &self.weight, &self.input, [OUTPUT, BATCH, INPUT], false)?;
        let grad = self.host.block::<f32>(BATCH * OUTPUT)?;
        let address = |block: &Block<f32>| block.owner().address();
        let n = (BATCH * OUTPUT) as u64;
        let loss = E::Loss {
            grad: address(&grad),
            loss: address(&self.loss),
            y: address(&y),
            target: address(&self.target),
            n,
        };
        self.kernels.launch(device, handle, loss)?;
        let mut change = self.host.block(INPUT * OUTPUT)?;
        self.gemm(&mut change, &grad, &self.input, [OUTPUT, INPUT, BATCH], true)?;
        let (weight, grad) = (address(&self.weight), address(&change));
        let n = (INPUT * OUTPUT) as u64;
        self.kernels.launch(device, handle, E::Descend { weight, grad, rate: RATE, n })?;
        Ok(())
    }

    fn loss(&self) -> Result<f32> {
        Ok(self.host.values(&self.loss)?[0])
    }
}

/// Experiment H with cuBLAS: steps of a layer, eager, and as replays of one captured step, give the same losses bit for bit.
fn with_cublas() -> Result {
    // SAFETY: this loads the library that cudarc would load.
    if !unsafe { cublas::is_culib_present() } {
        println!("skipped: no cuBLAS library in the loader's path");
        return Ok(());
    }
    let host = Host::new()?;
    let eager = Layer::new(&host)?;
    // The first product, against one made here.
    let (x, w) = (host.values(&eager.input)?, host.values(&eager.weight)?);
    let mut y = host.block(BATCH * OUTPUT)?;
    eager.gemm(&mut y, &eager.weight, &eager.input, [OUTPUT, BATCH, INPUT], false)?;
    for (at, found) in host.values(&y)?.into_iter().enumerate() {
        let (row, column) = (at / OUTPUT, at % OUTPUT);
        let expected: f64 = (0..INPUT).map(|k| f64::from(x[row * INPUT + k]) * f64::from(w[k * OUTPUT + column])).sum();
        assert!((f64::from(found) - expected).abs() < 1e-2, "{row}, {column}: {found}, expected {expected}");
    }
    let expected: Vec<f32> = (0..STEPS).map(|_| eager.step().and_then(|()| eager.loss())).collect::<Result<_>>()?;
    let layer = Layer::new(&host)?;
    let mut found: Vec<f32> = (0..3).map(|_| layer.step().and_then(|()| layer.loss())).collect::<Result<_>>()?;
    let captures = Captures::new(&host.allocator);
    let capture = captures.begin(&host.own, CaptureOptions::new())?;
    layer.step()?;
    let graph = capture.end()?;
    assert_eq!(graph.report().memory_nodes, 0);
    let exec = graph.instantiate(InstantiateFlags::default())?;
    while found.len() < STEPS {
        exec.launch(&host.own)?;
        found.push(layer.loss()?);
    }
    let bits = |losses: &[f32]| losses.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&found), bits(&expected));
    assert!(found[STEPS - 1] < found[0] * 0.99, "{found:?}");
    println!("cuBLAS: {} nodes; loss {} at first, {} at last", graph.report().node_count(), found[0], found[STEPS - 1]);
    Ok(())
}

fn main() {
    let tests: Vec<GpuTest> = vec![
        ("copies take blocks, and our own drop runs".into(), Box::new(copies)),
        ("launches take blocks".into(), Box::new(launches)),
        ("copies and launches of blocks are captured and replayed".into(), Box::new(captured)),
        ("event tracking must be off for captures, and it is said when it is on".into(), Box::new(the_switch)),
        ("a training step with cuBLAS is captured and replayed, bit for bit".into(), Box::new(with_cublas)),
    ];
    gpu::run(Vec::new(), tests);
}
