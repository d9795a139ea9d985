//! candle from crates.io, unmodified: an eager training loop, and inference steps captured as graphs and launched again and again.
//!
//! `example-candle [LAUNCHES]`. What it prints depends on who serves the memory: `compare` in this folder runs it with the driver
//! alone and with gpupool in front of it.

use std::collections::BTreeMap;
use std::time::Instant;

use candle_core::cuda_backend::cudarc::driver::{CudaGraph, DriverError, sys};
use candle_core::{Device, Result, Tensor, Var};

/// Graphs that live at once.
const GRAPHS: usize = 4;

/// Values that look random and are the same in every run.
fn values(count: usize, mut state: u32) -> Vec<f32> {
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

fn matrix(rows: usize, cols: usize, seed: u32, device: &Device) -> Result<Tensor> {
    Tensor::from_vec(values(rows * cols, seed), (rows, cols), device)
}

/// Trains two layers by gradient descent; the losses.
fn train(steps: usize, device: &Device) -> Result<Vec<f32>> {
    let (x, target) = (matrix(128, 256, 1, device)?, matrix(128, 64, 2, device)?);
    let first = Var::from_tensor(&(matrix(256, 512, 3, device)? / 8.0)?)?;
    let second = Var::from_tensor(&(matrix(512, 64, 4, device)? / 8.0)?)?;
    let mut losses = Vec::with_capacity(steps);
    for _ in 0..steps {
        let y = x.matmul(first.as_tensor())?.relu()?.matmul(second.as_tensor())?;
        let loss = (y - &target)?.sqr()?.mean_all()?;
        let gradients = loss.backward()?;
        for weight in [&first, &second] {
            if let Some(gradient) = gradients.get(weight) {
                weight.set(&(weight.as_tensor() - (gradient * 5.0)?)?)?;
            }
        }
        losses.push(loss.to_scalar::<f32>()?);
    }
    Ok(losses)
}

/// Eight layers of a network: six kernels each, and a temporary tensor for each of them.
fn infer(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let mut y = x.clone();
    for _ in 0..8 {
        y = ((y.matmul(weight)? / 16.0)?.tanh()? + &y)?.relu()?;
    }
    Ok(y)
}

/// How many nodes of each kind a graph has.
fn nodes(graph: &CudaGraph) -> BTreeMap<String, usize> {
    let mut count = 0;
    // SAFETY: asks for the number of nodes of a graph that is alive.
    let _known = unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &mut count) };
    let mut all = vec![std::ptr::null_mut(); count];
    // SAFETY: writes as many handles as there is room for.
    let _known = unsafe { sys::cuGraphGetNodes(graph.cu_graph(), all.as_mut_ptr(), &mut count) };
    let mut kinds = BTreeMap::new();
    for node in all {
        let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL;
        // SAFETY: a node of that graph; writes one number.
        let _known = unsafe { sys::cuGraphNodeGetType(node, &mut kind) };
        *kinds.entry(format!("{kind:?}").replace("CU_GRAPH_NODE_TYPE_", "")).or_insert(0) += 1;
    }
    kinds
}

fn main() -> Result<()> {
    let launches: usize = std::env::args().nth(1).map_or(10_000, |n| n.parse().unwrap_or(10_000));
    let device = Device::new_cuda_with_stream(0)?;
    let cuda = device.as_cuda_device()?.clone();
    // SAFETY: one stream only, so nothing needs the events that cudarc would record, also into captures.
    unsafe { cuda.disable_event_tracking() };

    let start = Instant::now();
    let losses = train(200, &device)?;
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    let digest = losses.iter().fold(0u64, |hash, loss| (hash ^ u64::from(loss.to_bits())).wrapping_mul(0x100_0000_01b3));
    println!("eager: loss {first} -> {last} in {} steps, digest {digest:016x}", losses.len());
    eprintln!("eager: {:.0} steps a second", losses.len() as f64 / start.elapsed().as_secs_f64());

    // Each graph has inputs and weights of its own; what it gives is compared with the same steps done eagerly.
    let stream = cuda.cuda_stream();
    let mut graphs = Vec::new();
    for number in 0..GRAPHS {
        let input = matrix(256, 256, 10 + number as u32, &device)?;
        let weight = matrix(256, 256, 20 + number as u32, &device)?;
        let expected = infer(&input, &weight)?.flatten_all()?.to_vec1::<f32>()?;
        stream.synchronize().map_err(candle_core::Error::wrap)?;
        stream
            .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
            .map_err(candle_core::Error::wrap)?;
        let output = infer(&input, &weight);
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).map_err(candle_core::Error::wrap)?;
        let (Some(graph), Ok(output)) = (graph, output) else {
            println!("graph {number}: no graph");
            continue;
        };
        println!("graph {number}: nodes {:?}", nodes(&graph));
        graphs.push((graph, input, weight, output, expected));
    }

    if graphs.is_empty() {
        return Ok(());
    }

    // They take turns, with eager work of other sizes between them.
    let (mut done, mut compared, mut wrong) = (0, 0, 0);
    let start = Instant::now();
    let mut failed: Option<DriverError> = None;
    'launches: for turn in 0..launches {
        let (graph, _, _, output, expected) = &graphs[turn % graphs.len()];
        if let Err(error) = graph.launch().and_then(|()| if turn < 100 { stream.synchronize() } else { Ok(()) }) {
            failed = Some(error);
            break 'launches;
        }
        done += 1;
        if turn % 97 == 0 {
            let other = (matrix(100 + turn % 400, 300, 5, &device)? * 2.0)?;
            compared += 1;
            wrong += usize::from(output.flatten_all()?.to_vec1::<f32>()? != *expected);
            drop(other);
        }
    }
    let ended = stream.synchronize();
    eprintln!("captured: {:.0} launches a second", done as f64 / start.elapsed().as_secs_f64());
    match failed.or(ended.err()) {
        Some(error) => println!("launches: {done} worked, the next one failed: {error}"),
        None => println!("launches: {done} worked"),
    }
    println!("results: {compared} compared with the eager ones, {wrong} wrong");
    Ok(())
}
