//! The C ABI. `include/gpupool.h` is generated from here; docs/embedding.md shows its use.
//!
//! # Rules of the border
//!
//! * **B1** No panic crosses it: every exported function runs inside `guard` (`status.rs`) or cannot panic.
//! * **B2** Handles are numbers that are never used twice (`handles.rs`): a stale one is an error. So is an address that is not live.
//! * **B3** A failed call changes nothing but the calling thread's last error, and writes through none of its out-pointers.
//! * **B4** Exported names begin with `gpupool_`, which is what makes `no_mangle` safe: nobody else's do.
//!
//! What C promises in return is written at each function: pointers are valid or null, streams are streams.

pub mod abi;
mod device;
mod handles;
mod instance;
mod scopes;
pub mod status;
pub mod torch;

pub use scopes::{Release, StreamFilter};
