//! CUDA C++ sources as text, for compilation at run time (NVRTC). Nothing here is compiled when this crate is.
//!
//! Each source is one translation unit without includes; what its kernels take is written beside them.
#![forbid(unsafe_code)]

/// The workbench's kernels: `fill`, `copy`, `add`, `checksum` and `gate`.
pub const WORKBENCH: &str = include_str!("../cuda/workbench.cu");

/// The experiments' kernels: sums of arrays, `a * a + b * 2`, a small network's layers.
pub const EXPERIMENTS: &str = include_str!("../cuda/experiments.cu");

#[cfg(test)]
mod tests {
    #[test]
    fn every_kernel_is_extern_c_so_that_its_name_can_be_looked_up() {
        for source in [super::WORKBENCH, super::EXPERIMENTS] {
            let kernels = source.matches("__global__").count();
            assert!(kernels > 0 && kernels == source.matches("extern \"C\" __global__").count());
        }
    }
}
