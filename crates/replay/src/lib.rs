//! The operation language: recorded workloads, conformance files, generators and the shadow model.
//!
//! * [`trace`] is what a real program asked of its allocator; [`replay`] runs it against ours and tells what it took.
//! * [`conform`] is every decision of PyTorch's allocator on a scripted sequence; its runner compares ours with it.
#![forbid(unsafe_code)]

pub mod conform;
mod text;
pub mod trace;

pub use text::TextProblem;
