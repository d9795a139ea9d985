//! Experiment H: a tensor runtime's whole step. Forward, backward and update of a small network, captured as one graph: work forks to a side
//! stream and joins, the backward part is recorded by another thread, a workspace is made before the capture. Replays must give the same
//! losses as eager execution, bit for bit.

mod common;

use std::sync::Arc;

use common::{Gpu, Outcome, Report, Runs, words};
use gpupool::device::{
    CaptureMode, Device, DriverResult, InstantiateFlags, Kernel, StreamHandle, StreamKind, Workbench,
};
use gpupool::graphs::{CaptureOptions, Captures};
use gpupool::{Allocation, Allocator, Config, Policy, Stream};
use gpupool_cuda_device::kernels::Experiment as E;
use gpupool_cuda_device::{CudaDevice, PinnedBytes};

const BATCH: u64 = 32;
const INPUT: u64 = 64;
const HIDDEN: u64 = 128;
const OUTPUT: u64 = 16;
const STEPS: usize = 20;
const RATE: f32 = 0.05;

type Block = Allocation<CudaDevice>;
type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Outcome {
    common::run("H. A tensor runtime's whole step", Runs::OnGpu(on_gpu))
}

/// What lives from step to step.
struct Network {
    gpu: Arc<Gpu>,
    allocator: Allocator<CudaDevice>,
    main: Stream<CudaDevice>,
    side: Stream<CudaDevice>,
    weights: [Block; 2],
    input: Block,
    target: Block,
    loss: Block,
    /// What a library would want for itself: made before the capture, so it is of no graph's pool.
    workspace: Block,
}

impl Network {
    fn new(gpu: &Arc<Gpu>, initial: &PinnedBytes) -> Result<Self, Failure> {
        let device = &gpu.device;
        let allocator = Allocator::new(Arc::clone(device), Config::new(Policy::Segments))?;
        let stream = || Ok::<_, Failure>(allocator.register_stream(device.stream_create(StreamKind::NonBlocking)?));
        let (main, side) = (stream()?, stream()?);
        let mut offset = 0;
        let mut filled = |floats: u64| -> Result<Block, Failure> {
            let block = allocator.alloc(floats * 4, &main)?;
            device.copy_async(main.handle(), block.address(), initial.address().offset(offset), floats * 4)?;
            offset += floats * 4;
            Ok(block)
        };
        let weights = [filled(INPUT * HIDDEN)?, filled(HIDDEN * OUTPUT)?];
        let (input, target) = (filled(BATCH * INPUT)?, filled(BATCH * OUTPUT)?);
        let (loss, workspace) = (allocator.alloc(512, &main)?, allocator.alloc(4 << 20, &main)?);
        device.stream_synchronize(main.handle())?;
        Ok(Self { gpu: Arc::clone(gpu), allocator, main, side, weights, input, target, loss, workspace })
    }

    fn launch(&self, stream: StreamHandle, kernel: E) -> DriverResult<()> {
        self.gpu.kernels.launch(&self.gpu.device, stream, kernel)
    }

    /// Makes one stream wait for another.
    fn order(&self, before: &Stream<CudaDevice>, after: &Stream<CudaDevice>) -> DriverResult<()> {
        let device = &self.gpu.device;
        let event = device.event_create()?;
        device.event_record(event, before.handle())?;
        device.stream_wait_event(after.handle(), event)?;
        device.event_destroy(event)
    }

    /// One step, eager or under capture: the requests and kernels are the same.
    fn step(&self) -> Result<(), Failure> {
        let (alloc, main) = (|floats: u64| self.allocator.alloc(floats * 4, &self.main), self.main.handle());
        let (hidden, activation, y) = (alloc(BATCH * HIDDEN)?, alloc(BATCH * HIDDEN)?, alloc(BATCH * OUTPUT)?);
        let matmul =
            |out: &Block, a: &Block, b: &Block, [rows, inner, cols]: [u64; 3], [at, bt]: [bool; 2]| E::Matmul {
                out: out.address(),
                a: a.address(),
                b: b.address(),
                rows,
                inner,
                cols,
                a_transposed: at,
                b_transposed: bt,
            };
        self.launch(main, matmul(&hidden, &self.input, &self.weights[0], [BATCH, INPUT, HIDDEN], [false, false]))?;
        self.launch(main, E::Relu { out: activation.address(), x: hidden.address(), n: BATCH * HIDDEN })?;
        drop(hidden);
        self.launch(main, matmul(&y, &activation, &self.weights[1], [BATCH, HIDDEN, OUTPUT], [false, false]))?;
        let grad = alloc(BATCH * OUTPUT)?;
        let (loss, target) = (self.loss.address(), self.target.address());
        self.launch(main, E::Loss { grad: grad.address(), loss, y: y.address(), target, n: BATCH * OUTPUT })?;
        // A library's scratch: written, of no importance.
        self.gpu.device.launch(main, Kernel::Fill { dst: self.workspace.address(), bytes: 4096, value: 0 })?;
        // The backward part is another thread's, as a tensor runtime's is.
        std::thread::scope(|scope| {
            scope
                .spawn(|| -> Result<(), Failure> {
                    let (first, second) = (alloc(INPUT * HIDDEN)?, alloc(HIDDEN * OUTPUT)?);
                    let back = alloc(BATCH * HIDDEN)?;
                    // The second layer's gradient on the side stream, while the main one goes on backwards.
                    self.order(&self.main, &self.side)?;
                    let side = self.side.handle();
                    self.launch(side, matmul(&second, &activation, &grad, [HIDDEN, BATCH, OUTPUT], [true, false]))?;
                    second.record_stream(&self.side)?;
                    activation.record_stream(&self.side)?;
                    grad.record_stream(&self.side)?;
                    self.launch(main, matmul(&back, &grad, &self.weights[1], [BATCH, OUTPUT, HIDDEN], [false, true]))?;
                    let n = BATCH * HIDDEN;
                    self.launch(main, E::ReluBack { grad: back.address(), activation: activation.address(), n })?;
                    self.launch(main, matmul(&first, &self.input, &back, [INPUT, BATCH, HIDDEN], [true, false]))?;
                    self.order(&self.side, &self.main)?;
                    let pairs =
                        [(&self.weights[0], &first, INPUT * HIDDEN), (&self.weights[1], &second, HIDDEN * OUTPUT)];
                    for (weight, grad, n) in pairs {
                        let kernel = E::Descend { weight: weight.address(), grad: grad.address(), rate: RATE, n };
                        self.launch(main, kernel)?;
                    }
                    Ok(())
                })
                .join()
                .map_err(|_| "the backward thread panicked")?
        })
    }

    fn loss(&self) -> DriverResult<u32> {
        Ok(words(&*self.gpu.device, self.main.handle(), self.loss.address(), 1)?.first().copied().unwrap_or(0))
    }
}

fn on_gpu(gpu: Arc<Gpu>, report: &Report) -> Outcome {
    let floats = INPUT * HIDDEN + HIDDEN * OUTPUT + BATCH * INPUT + BATCH * OUTPUT;
    let initial = PinnedBytes::new(&gpu.device, usize::try_from(floats * 4)?)?;
    let mut state = 1_u32;
    initial.write((0..floats).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 24) as f32 - 0.5).to_bits()
    }));
    let eager = Network::new(&gpu, &initial)?;
    let mut expected = Vec::new();
    for _ in 0..STEPS {
        eager.step()?;
        expected.push(eager.loss()?);
    }
    // The same start; three warm-up steps, then the rest as replays of one graph.
    let captured = Network::new(&gpu, &initial)?;
    let mut found = Vec::new();
    for _ in 0..3 {
        captured.step()?;
        found.push(captured.loss()?);
    }
    let captures = Captures::new(&captured.allocator);
    // Another thread records too: the mode watches no thread in particular.
    let capture = captures.begin(&captured.main, CaptureOptions::new().with_mode(CaptureMode::Global))?;
    captured.step()?;
    let graph = capture.end()?;
    report.tell(
        "the graph",
        &format!("{} nodes, {} of memory", graph.report().node_count(), graph.report().memory_nodes),
    );
    let exec = graph.instantiate(InstantiateFlags::default())?;
    while found.len() < STEPS {
        exec.launch(&captured.main)?;
        found.push(captured.loss()?);
    }
    let (first, last) = (found.first().copied().unwrap_or(0), found.last().copied().unwrap_or(0));
    report.tell("loss", &format!("{} at first, {} after {STEPS} steps", f32::from_bits(first), f32::from_bits(last)));
    report.expect("the loss falls", true, f32::from_bits(last) < f32::from_bits(first));
    report.expect(
        "losses that differ from the eager ones in any bit",
        0,
        expected.iter().zip(&found).filter(|(a, b)| a != b).count(),
    );
    Ok(())
}
