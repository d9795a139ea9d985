//! The gpupool program.
fn main() {}
