//! A network of two layers, and its training step.

use gpupool_cuda_device::kernels::Experiment;

use crate::compute::{Compute, Failure};
use crate::runtime::{Runtime, Tape, Tensor};

/// Rows of the batch, and widths of input, hidden layer and output.
pub const SHAPE: (u64, u64, u64, u64) = (32, 16, 64, 8);

/// What training needs. It outlives every step, so it is allocated before any capture.
#[derive(Debug)]
pub struct Network<C: Compute> {
    input: Tensor<C>,
    target: Tensor<C>,
    first: Tensor<C>,
    second: Tensor<C>,
    loss: Tensor<C>,
}

/// Values that look random and are the same in every run.
fn values(n: u64, mut state: u32) -> Vec<f32> {
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n).map(|_| next()).collect()
}

impl<C: Compute> Network<C> {
    /// The same network in every run.
    ///
    /// # Errors
    ///
    /// Out of memory; the driver's.
    pub fn new(runtime: &Runtime<C>) -> Result<Self, Failure> {
        let (batch, input, hidden, output) = SHAPE;
        let filled = |rows: u64, cols: u64, seed| runtime.tensor((rows, cols), &values(rows * cols, seed));
        Ok(Self {
            input: filled(batch, input, 1)?,
            target: filled(batch, output, 2)?,
            first: filled(input, hidden, 3)?,
            second: filled(hidden, output, 4)?,
            loss: runtime.tensor((1, 1), &[0.0])?,
        })
    }

    /// One step of gradient descent: forward, backward, update. Only submits; nothing waits.
    ///
    /// # Errors
    ///
    /// Out of memory; the driver's.
    pub fn step(&self, runtime: &Runtime<C>) -> Result<(), Failure> {
        let mut tape = Tape::new(runtime);
        let (x, w1, w2) = (tape.leaf(&self.input), tape.leaf(&self.first), tape.leaf(&self.second));
        let product = tape.matmul(x, w1)?;
        let hidden = tape.relu(product)?;
        let y = tape.matmul(hidden, w2)?;
        let gradient = runtime.empty(tape.value(y).shape)?;
        let (grad, loss, target, n) =
            (gradient.address(), self.loss.address(), self.target.address(), self.target.len());
        runtime.run(Experiment::Loss { grad, loss, y: tape.value(y).address(), target, n })?;
        let gradients = tape.gradients(gradient)?;
        for weight in [w1, w2] {
            if let Some(grad) = &gradients[weight] {
                let (weight, n) = (tape.value(weight).address(), grad.len());
                runtime.run(Experiment::Descend { weight, grad: grad.address(), rate: 0.1, n })?;
            }
        }
        Ok(())
    }

    /// The loss of the last step. **Waits.**
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn loss(&self, runtime: &Runtime<C>) -> Result<f32, Failure> {
        Ok(runtime.values(&self.loss)?.first().copied().unwrap_or(f32::NAN))
    }
}

/// What a training run was like.
#[derive(Clone, PartialEq, Debug)]
pub struct Run {
    /// The loss of each step.
    pub losses: Vec<f32>,
    /// Driver allocations after the first step.
    pub later_allocations: i64,
}

/// Trains a fresh network, each step submitted by the host, or one captured step launched again and again.
///
/// # Errors
///
/// Out of memory; the driver's.
pub fn train<C: Compute>(runtime: &Runtime<C>, steps: usize, captured: bool) -> Result<Run, Failure> {
    let network = Network::new(runtime)?;
    let graph = match captured {
        true => Some(runtime.capture(|| network.step(runtime))?),
        false => None,
    };
    let (mut losses, mut after_first) = (Vec::with_capacity(steps), None);
    for _ in 0..steps {
        match &graph {
            Some(graph) => runtime.launch(graph)?,
            None => network.step(runtime)?,
        }
        losses.push(network.loss(runtime)?);
        after_first.get_or_insert(runtime.allocator.stats().num_device_alloc);
    }
    let allocations = runtime.allocator.stats().num_device_alloc;
    Ok(Run { losses, later_allocations: allocations - after_first.unwrap_or(allocations) })
}
