//! Benchmarks of gpupool and its peers.
#![forbid(unsafe_code)]
