//! The caching allocator of gpupool: segments, blocks, pools, reclaiming and statistics.
#![forbid(unsafe_code)]
