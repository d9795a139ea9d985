//! The allocators that are compared.

mod alone;
#[cfg(feature = "cubecl")]
mod cubecl;
mod gpupool;
mod heap;
mod naive;
mod nothing;
#[cfg(feature = "offset-allocator")]
mod offset;
mod on_device;

pub use alone::Alone;
#[cfg(feature = "cubecl")]
pub use cubecl::Cubecl;
pub use gpupool::{Gpupool, device};
pub use heap::Heap;
pub use naive::{Naive, SharedNaive};
pub use nothing::Nothing;
#[cfg(feature = "offset-allocator")]
pub use offset::Offset;
pub use on_device::OnDevice;
