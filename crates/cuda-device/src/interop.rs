//! Blocks of ours as arguments of cudarc's safe functions: copies, memsets, cuBLAS, launches.
//!
//! [`TypedBlock`] implements cudarc's traits for memory that something of ours owns. Its drop is the owner's: cudarc frees nothing.
//!
//! # What must be off, and when
//!
//! cudarc orders its own slices with two events each, unless the context's event tracking is off
//! (`CudaContext::disable_event_tracking`, `unsafe` there). A `TypedBlock` has no events and needs none: its memory is used in the order of
//! its stream, and use on another stream is told to the allocator (`record_stream`). But a cudarc *slice* beside it in a captured call would
//! record its events into the capture; so a context in which captures are made must have tracking off. [`check_for_capture`] says so.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::CUcontext;
use cudarc::driver::{
    CudaContext, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop,
};
use gpupool_device::{Address, Memory};

/// A block as `len` values of type `T`, on a stream of cudarc's.
#[derive(Debug)]
pub struct TypedBlock<T, O> {
    address: u64,
    len: usize,
    stream: Arc<CudaStream>,
    owner: O,
    _values: PhantomData<fn() -> T>,
}

/// A block cannot be seen as these values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a block of {bytes} bytes at {address} cannot hold {len} values of {size} bytes aligned to {align}")]
pub struct NotThatType {
    /// Where the block is.
    pub address: Address,
    /// Its length.
    pub bytes: u64,
    /// Values asked for.
    pub len: usize,
    /// A value's size in bytes.
    pub size: usize,
    /// A value's alignment in bytes.
    pub align: usize,
}

impl<T: DeviceRepr, O: Memory> TypedBlock<T, O> {
    /// `owner` as `len` values. `stream` is the block's own: the one that it was allocated on.
    ///
    /// # Errors
    ///
    /// [`NotThatType`], with the owner.
    pub fn new(owner: O, len: usize, stream: &Arc<CudaStream>) -> Result<Self, (O, NotThatType)> {
        let (address, bytes) = (owner.address(), owner.bytes());
        let (size, align) = (size_of::<T>(), align_of::<T>());
        let fits = (len as u64).checked_mul(size as u64).is_some_and(|wanted| wanted <= bytes);
        if !fits || !address.0.is_multiple_of(align as u64) {
            return Err((owner, NotThatType { address, bytes, len, size, align }));
        }
        Ok(Self { address: address.0, len, stream: Arc::clone(stream), owner, _values: PhantomData })
    }
}

impl<T, O> TypedBlock<T, O> {
    /// The owner.
    #[must_use]
    pub fn owner(&self) -> &O {
        &self.owner
    }

    /// Gives the owner back.
    #[must_use]
    pub fn into_owner(self) -> O {
        self.owner
    }
}

impl<T, O> DeviceSlice<T> for TypedBlock<T, O> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<T, O> DevicePtr<T> for TypedBlock<T, O> {
    fn device_ptr<'a>(&'a self, _stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Record(None))
    }
}

impl<T, O> DevicePtrMut<T> for TypedBlock<T, O> {
    fn device_ptr_mut<'a>(&'a mut self, _stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Record(None))
    }
}

// SAFETY: cudarc passes what the argument points to as the kernel's parameter. `arg(&u64)` pushes a pointer to the address, which lives as
// long as the block that the launch borrows.
unsafe impl<'a, 'b: 'a, T, O> PushKernelArg<&'b TypedBlock<T, O>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, block: &'b TypedBlock<T, O>) -> &mut Self {
        self.arg(&block.address)
    }
}

// SAFETY: as for the shared reference.
unsafe impl<'a, 'b: 'a, T, O> PushKernelArg<&'b mut TypedBlock<T, O>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, block: &'b mut TypedBlock<T, O>) -> &mut Self {
        self.arg(&block.address)
    }
}

/// The context that is current on this thread; none without a driver, too.
#[must_use]
pub fn current_context() -> Option<CUcontext> {
    let open = crate::availability::open().ok()?;
    let mut current: CUcontext = std::ptr::null_mut();
    // SAFETY: cuCtxGetCurrent writes one handle; the driver was initialised.
    let code = unsafe { (open.table.ctx_get_current)(&mut current) };
    (code == 0 && !current.is_null()).then_some(current)
}

/// cudarc would record events of its slices into captures.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "cudarc's event tracking is on in this context: its slices would record events into captures and break them; call \
     CudaContext::disable_event_tracking before the first capture"
)]
pub struct TracksEvents;

/// Whether captures in this context are safe from cudarc's own events.
///
/// # Errors
///
/// [`TracksEvents`] if event tracking is on and the context has more than one stream.
pub fn check_for_capture(context: &CudaContext) -> Result<(), TracksEvents> {
    if context.is_managing_stream_synchronization() { Err(TracksEvents) } else { Ok(()) }
}
