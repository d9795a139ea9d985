//! A library in front of the CUDA driver: programs that know nothing of gpupool get their memory from it.
//!
//! It exports the driver's entry points for memory, captures and graphs ([`hooks`]) and needs the driver itself, so a program finds ours
//! first and everything else behind us, whether the library is preloaded, found first by search path (as `libcuda.so`), or opened first by
//! the program. docs/use-under-programs.md has the commands, and what it does not see.
//!
//! Each context, a device's primary one or the program's own, is served from an allocator of its own (`process.rs`), made when it is first used;
//! what cannot be served is left to the driver. Addresses decide who owns memory: one that is not ours is forwarded.
//!
//! Configured by the environment (`settings.rs`): `GPUPOOL_CONF`, `GPUPOOL_GRAPH_POOL`, `GPUPOOL_LIBRARIES`, `GPUPOOL_LOG`, `GPUPOOL_SNAPSHOT`,
//! `GPUPOOL_SNAPSHOT_SIGNAL`.

/// Says something on standard error, if anyone listens: a closed one is no reason to fail.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _nobody_listens = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod blocks;
mod front;
mod graphs;
pub mod hooks;
mod leaving;
pub mod lookup;
mod process;
mod real;
mod settings;

#[cfg(test)]
mod tests;
