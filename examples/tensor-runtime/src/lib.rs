//! A small tensor runtime on gpupool: tensors on blocks, gradients by a tape, a training step that runs eagerly or as a captured graph.
//! docs/embedding.md walks through it.
#![forbid(unsafe_code)]

pub mod compute;
pub mod network;
pub mod runtime;
