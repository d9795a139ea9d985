//! The operation language: recorded workloads, conformance files, generators and the shadow model.
//!
//! * [`trace`] is what a real program asked of its allocator; [`replay`] runs it against ours and tells what it took.
//! * [`conform`] is every decision of PyTorch's allocator on a scripted sequence; its runner compares ours with it.
//! * [`generate`] draws operations from a seed or from any bytes; [`stress`] executes them, from one thread or many,
//!   with a [`shadow`] model and the contents of every block against them.
//! * [`real`] puts a real device under either.
//!
//! Files come from anywhere: reading one ends, whatever it holds, with the whole of it or an error that names the line.
#![forbid(unsafe_code)]

pub mod conform;
pub mod forecast;
pub mod generate;
pub mod real;
pub mod replay;
pub mod shadow;
pub mod stress;
mod text;
pub mod trace;

pub use text::TextProblem;

/// A recorded PyTorch training run (GPT-2, 16 steps on an H200), as a `torch-trace-1` file: something to replay where
/// no trace is at hand.
pub const BUNDLED_TRACE: &[u8] = include_bytes!("../data/traces/gpt2_train.trace.gz");
