//! Whatever `PYTORCH_CUDA_ALLOC_CONF` says, it is a configuration or an error.
#![no_main]

use gpupool_allocator::{Config, Policy};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    for policy in [Policy::Segments, Policy::Torch215, Policy::Torch211] {
        if let Ok(config) = Config::parse_pytorch(text, policy) {
            assert!(config.validate().is_ok());
            let _ = config.rounding().round(text.len() as u64 * 12_345);
        }
    }
});
