//! Integration tests over all of gpupool.
#![forbid(unsafe_code)]
