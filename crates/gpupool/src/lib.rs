//! A caching allocator for GPU memory with private pools for captured graphs.
#![forbid(unsafe_code)]
