//! Tensors on blocks, and a tape that knows how gradients flow back.

use std::rc::Rc;

use gpupool::device::{Address, StreamKind, Workbench};
use gpupool::graphs::{CaptureOptions, Captures, Executable};
use gpupool::{Allocation, Allocator, Config, Stream};
use gpupool_cuda_device::kernels::Experiment;

use crate::compute::{Compute, Failure, download};

/// What everything needs: a device, its allocator, a stream.
pub struct Runtime<C: Compute> {
    /// The device.
    pub compute: C,
    /// Its memory.
    pub allocator: Allocator<C::Device>,
    captures: Captures<C::Device>,
    stream: Stream<C::Device>,
}

impl<C: Compute> std::fmt::Debug for Runtime<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Runtime({:?})", self.allocator)
    }
}

/// A matrix. The block goes back when the last clone is dropped, in the order of its stream: kernels that were submitted before may still
/// use it, and nothing waits.
pub struct Tensor<C: Compute> {
    block: Rc<Allocation<C::Device>>,
    /// Rows and columns.
    pub shape: (u64, u64),
}

impl<C: Compute> Clone for Tensor<C> {
    fn clone(&self) -> Self {
        Self { block: Rc::clone(&self.block), shape: self.shape }
    }
}

impl<C: Compute> std::fmt::Debug for Tensor<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({} x {} at {})", self.shape.0, self.shape.1, self.address())
    }
}

impl<C: Compute> Tensor<C> {
    /// Where it is.
    #[must_use]
    pub fn address(&self) -> Address {
        self.block.address()
    }

    /// How many values it has.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.shape.0 * self.shape.1
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<C: Compute> Runtime<C> {
    /// One allocator and one stream for a device.
    ///
    /// # Errors
    ///
    /// The configuration's, the driver's.
    pub fn new(mut compute: C, config: Config) -> Result<Self, Failure> {
        let allocator = Allocator::new(compute.device().clone(), config)?;
        let stream = allocator.register_stream(compute.device().stream_create(StreamKind::NonBlocking)?);
        if compute.workspace() > 0 {
            // A library would allocate for itself, inside a capture, too: it gets a block of ours before the first one.
            let workspace = allocator.alloc(compute.workspace(), &stream)?;
            compute.lend_workspace(stream.handle(), workspace)?;
        }
        Ok(Self { captures: Captures::new(&allocator), compute, allocator, stream })
    }

    /// A matrix with whatever is in memory. In steady state: one lock, no driver call.
    ///
    /// # Errors
    ///
    /// Out of memory, with a report.
    pub fn empty(&self, shape: (u64, u64)) -> Result<Tensor<C>, Failure> {
        let block = self.allocator.alloc(shape.0 * shape.1 * 4, &self.stream)?;
        Ok(Tensor { block: Rc::new(block), shape })
    }

    /// A matrix of these values.
    ///
    /// # Errors
    ///
    /// Out of memory; the driver's.
    pub fn tensor(&self, shape: (u64, u64), values: &[f32]) -> Result<Tensor<C>, Failure> {
        let tensor = self.empty(shape)?;
        self.compute.upload(self.stream.handle(), tensor.address(), values)?;
        Ok(tensor)
    }

    /// A matrix's values. **Waits.**
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn values(&self, tensor: &Tensor<C>) -> Result<Vec<f32>, Failure> {
        Ok(download(&self.compute, self.stream.handle(), tensor.address(), tensor.len() as usize)?)
    }

    /// Submits a kernel.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn run(&self, kernel: Experiment) -> Result<(), Failure> {
        self.compute.run(self.stream.handle(), kernel)
    }

    /// a b, or of the transposes.
    ///
    /// # Errors
    ///
    /// Out of memory; the driver's.
    pub fn matmul(&self, (a, at): (&Tensor<C>, bool), (b, bt): (&Tensor<C>, bool)) -> Result<Tensor<C>, Failure> {
        let (rows, inner) = if at { (a.shape.1, a.shape.0) } else { a.shape };
        let cols = if bt { b.shape.0 } else { b.shape.1 };
        let out = self.empty((rows, cols))?;
        let (a, b, a_transposed, b_transposed) = (a.address(), b.address(), at, bt);
        self.run(Experiment::Matmul { out: out.address(), a, b, rows, inner, cols, a_transposed, b_transposed })?;
        Ok(out)
    }

    /// Records what `step` submits as a graph that can be launched. Whatever `step` allocates comes from a pool of the graph's own, and what
    /// it frees is used again inside it.
    ///
    /// # Errors
    ///
    /// Those of `step`, in which case the capture is undone; the driver's.
    pub fn capture(&self, step: impl FnOnce() -> Result<(), Failure>) -> Result<Executable<C::Device>, Failure> {
        let capture = self.captures.begin(&self.stream, CaptureOptions::new())?;
        step()?;
        let graph = capture.end()?;
        Ok(graph.instantiate(Default::default())?)
    }

    /// Launches a graph.
    ///
    /// # Errors
    ///
    /// Those of [`Executable::launch`].
    pub fn launch(&self, graph: &Executable<C::Device>) -> Result<(), Failure> {
        graph.launch(&self.stream)?;
        Ok(())
    }
}

/// How a value came to be.
enum Origin {
    Leaf,
    Product(usize, usize),
    Relu(usize),
}

/// A forward pass, remembered so that gradients can be computed from its end. Dropping it gives every intermediate value back.
pub struct Tape<'a, C: Compute> {
    runtime: &'a Runtime<C>,
    values: Vec<(Tensor<C>, Origin)>,
}

impl<C: Compute> std::fmt::Debug for Tape<'_, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tape({} values)", self.values.len())
    }
}

impl<'a, C: Compute> Tape<'a, C> {
    /// An empty tape.
    #[must_use]
    pub fn new(runtime: &'a Runtime<C>) -> Self {
        Self { runtime, values: Vec::new() }
    }

    fn push(&mut self, value: Tensor<C>, origin: Origin) -> usize {
        self.values.push((value, origin));
        self.values.len() - 1
    }

    /// A value that was there before: an input or a weight.
    pub fn leaf(&mut self, value: &Tensor<C>) -> usize {
        self.push(value.clone(), Origin::Leaf)
    }

    /// The value of a number that this tape gave.
    #[must_use]
    pub fn value(&self, number: usize) -> &Tensor<C> {
        &self.values[number].0
    }

    /// The product of two values.
    ///
    /// # Errors
    ///
    /// Out of memory; the driver's.
    pub fn matmul(&mut self, a: usize, b: usize) -> Result<usize, Failure> {
        let product = self.runtime.matmul((self.value(a), false), (self.value(b), false))?;
        Ok(self.push(product, Origin::Product(a, b)))
    }

    /// A value with what is negative set to 0.
    ///
    /// # Errors
    ///
    /// Out of memory; the driver's.
    pub fn relu(&mut self, x: usize) -> Result<usize, Failure> {
        let (x_address, n, shape) = (self.value(x).address(), self.value(x).len(), self.value(x).shape);
        let out = self.runtime.empty(shape)?;
        self.runtime.run(Experiment::Relu { out: out.address(), x: x_address, n })?;
        Ok(self.push(out, Origin::Relu(x)))
    }

    /// The gradients of all values, given that of the last one.
    ///
    /// # Errors
    ///
    /// Out of memory; the driver's.
    pub fn gradients(&self, of_last: Tensor<C>) -> Result<Vec<Option<Tensor<C>>>, Failure> {
        let mut gradients: Vec<Option<Tensor<C>>> = vec![None; self.values.len()];
        if let Some(last) = gradients.last_mut() {
            *last = Some(of_last);
        }
        for (number, (value, origin)) in self.values.iter().enumerate().rev() {
            let Some(gradient) = gradients[number].clone() else { continue };
            match *origin {
                Origin::Leaf => {}
                Origin::Product(a, b) => {
                    let to_a = self.runtime.matmul((&gradient, false), (self.value(b), true))?;
                    let to_b = self.runtime.matmul((self.value(a), true), (&gradient, false))?;
                    self.add(&mut gradients[a], to_a)?;
                    self.add(&mut gradients[b], to_b)?;
                }
                Origin::Relu(x) => {
                    let (grad, activation, n) = (gradient.address(), value.address(), value.len());
                    self.runtime.run(Experiment::ReluBack { grad, activation, n })?;
                    self.add(&mut gradients[x], gradient)?;
                }
            }
        }
        Ok(gradients)
    }

    fn add(&self, to: &mut Option<Tensor<C>>, more: Tensor<C>) -> Result<(), Failure> {
        *to = Some(match to.take() {
            None => more,
            Some(before) => {
                let sum = self.runtime.empty(more.shape)?;
                let (out, x, y, n) = (sum.address(), before.address(), more.address(), sum.len());
                self.runtime.run(Experiment::Sum { out, x, y, n })?;
                sum
            }
        });
        Ok(())
    }
}
