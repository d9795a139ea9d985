//! What the integration tests share: a driver whose every answer a test sets, and a bench that speaks the golden vectors' notation.
#![forbid(unsafe_code)]

pub mod bench;
pub mod fake;
pub mod graph_bench;
