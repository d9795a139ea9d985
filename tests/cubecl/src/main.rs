//! CubeCL from crates.io, unmodified: kernels on buffers of many sizes. What it prints is the same whoever serves the memory.
//!
//! `example-cubecl [STEPS]`; with gpupool in front, the folder that holds it as `libcuda.so` comes first on LD_LIBRARY_PATH.

use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::*;

#[cube(launch)]
fn mix(x: &Array<f32>, y: &Array<f32>, out: &mut Array<f32>) {
    if ABSOLUTE_POS < out.len() {
        out[ABSOLUTE_POS] = x[ABSOLUTE_POS] * 0.75 + y[ABSOLUTE_POS] * 0.25 + 0.125;
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let steps: usize = std::env::args().nth(1).map_or(Ok(2000), |n| n.parse())?;
    let client = CudaRuntime::client(&CudaDevice::new(0));
    let (mut digest, mut state) = (0xcbf2_9ce4_8422_2325_u64, 12_345_u64);
    let mut random = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    for _ in 0..steps / 20 {
        // A chain of twenty steps on one size: each step's input is dropped once its output is there.
        let n = 256 * (1 + random(4000));
        let values: Vec<f32> = (0..n).map(|i| ((i * 31 + n) % 1000) as f32 / 500.0 - 1.0).collect();
        let y = client.create_from_slice(f32::as_bytes(&values));
        let mut x = y.clone();
        for _ in 0..20 {
            let out = client.empty(n * size_of::<f32>());
            let (count, dim) = (CubeCount::Static(n as u32 / 256, 1, 1), CubeDim::new_1d(256));
            // SAFETY: the three buffers have `n` values.
            let arguments = unsafe {
                (
                    ArrayArg::from_raw_parts(x.clone(), n),
                    ArrayArg::from_raw_parts(y.clone(), n),
                    ArrayArg::from_raw_parts(out.clone(), n),
                )
            };
            mix::launch::<CudaRuntime>(&client, count, dim, arguments.0, arguments.1, arguments.2);
            x = out;
        }
        let bytes = client.read_one(x).map_err(|e| format!("{e:?}"))?;
        for value in f32::from_bytes(&bytes) {
            digest = (digest ^ u64::from(value.to_bits())).wrapping_mul(0x100_0000_01b3);
        }
    }
    println!("{steps} steps, digest {digest:016x}");
    Ok(())
}
