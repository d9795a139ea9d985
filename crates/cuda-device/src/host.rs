//! Functions that the driver calls on the host, and host memory that the GPU reads and writes.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gpupool_device::{Address, Call, CaptureMode, Device, DriverError, DriverResult, HostFunction, StreamHandle, code};

use cudarc::driver::sys::CUuserObject;

use crate::CudaDevice;
use crate::context::Context;
use crate::error::check;

/// A host function that can run any number of times, from a thread of the driver's. It must not call the device.
pub type RepeatableHostFunction = Arc<dyn Fn() + Send + Sync + 'static>;

/// Runs a `Box<HostFunction>` and drops it.
unsafe extern "C" fn run_once(data: *mut c_void) {
    // SAFETY: `data` is the box that `submit_once` gave away, and the driver calls this once.
    let function = unsafe { Box::from_raw(data.cast::<HostFunction>()) };
    // A panic must not unwind into the driver.
    let _ = catch_unwind(AssertUnwindSafe(move || (*function)()));
}

/// Runs a `RepeatableHostFunction`.
unsafe extern "C" fn run_again(data: *mut c_void) {
    // SAFETY: `data` points to the box that the graph keeps (`drop_repeatable` frees it when no graph or executable is left).
    let function = unsafe { &*data.cast::<RepeatableHostFunction>() };
    let _ = catch_unwind(AssertUnwindSafe(|| function()));
}

/// Frees a `RepeatableHostFunction`.
unsafe extern "C" fn drop_repeatable(data: *mut c_void) {
    // SAFETY: the driver calls a user object's destructor once, when the last reference is gone.
    let function = unsafe { Box::from_raw(data.cast::<RepeatableHostFunction>()) };
    let _ = catch_unwind(AssertUnwindSafe(move || drop(function)));
}

impl CudaDevice {
    /// Submits a function to a stream that is not capturing.
    pub(crate) fn submit_once(&self, stream: StreamHandle, function: HostFunction) -> DriverResult<()> {
        let call = Call::LaunchHostFunc;
        let stream = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        let data = Box::into_raw(Box::new(function));
        // SAFETY: cuLaunchHostFunc takes a stream, which is held, a function and what to pass it; the box is `run_once`'s from here on.
        let code = unsafe { (self.driver.launch_host_func)(stream.raw, run_once, data.cast()) };
        check(call, code).inspect_err(|_| {
            // SAFETY: the driver refused, so nobody else has the box.
            drop(unsafe { Box::from_raw(data) });
        })
    }

    /// As [`launch_host_function`](gpupool_device::GraphDevice::launch_host_function), for a function that can run any number of times; on a
    /// capturing stream it becomes a node, and the graph and its executables keep it.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn launch_repeatable_host_function(
        &self,
        stream: StreamHandle,
        function: RepeatableHostFunction,
    ) -> DriverResult<()> {
        let call = Call::LaunchHostFunc;
        let Some(graph) = self.graph_of(call, stream)? else {
            if self.is_capturing(call, stream)? {
                return Err(DriverError::new(call, code::CAPTURE_INVALIDATED));
            }
            return self.submit_once(stream, Box::new(move || function()));
        };
        let stream = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        let data = Box::into_raw(Box::new(function)).cast::<c_void>();
        let mut object: CUuserObject = std::ptr::null_mut();
        // SAFETY: cuUserObjectCreate takes data, its destructor, a first reference, and the flag 1 that every caller must pass
        // (CU_USER_OBJECT_NO_DESTRUCTOR_SYNC), and writes one handle.
        let code = unsafe { (self.driver.user_object_create)(&mut object, data, drop_repeatable, 1, 1) };
        check(call, code).inspect_err(|_| {
            // SAFETY: no object was made, so the box is still ours.
            unsafe { drop_repeatable(data) }
        })?;
        // SAFETY: cuGraphRetainUserObject takes the graph, which its capture keeps alive, and moves our one reference (flag 1).
        let code = unsafe { (self.driver.retain_user_object)(graph, object, 1, 1) };
        check(call, code).inspect_err(|_| {
            // SAFETY: the reference was not moved; releasing it runs the destructor.
            let _ = unsafe { (self.driver.user_object_release)(object, 1) };
        })?;
        // SAFETY: as in `submit_once`; the graph keeps what `run_again` is passed.
        check(call, unsafe { (self.driver.launch_host_func)(stream.raw, run_again, data) })
    }
}

/// Pinned host memory that the GPU can read and write, zeroed. Freed when dropped, without panicking and without breaking a capture.
#[derive(Debug)]
pub struct PinnedBytes {
    context: Arc<Context>,
    host: *mut c_void,
    address: Address,
    bytes: usize,
}

// SAFETY: the pages are plain memory of the process, reached through atomics only.
unsafe impl Send for PinnedBytes {}
// SAFETY: as for `Send`.
unsafe impl Sync for PinnedBytes {}

impl PinnedBytes {
    /// `bytes` of pinned memory, a multiple of 4. Made with the thread's capture mode relaxed: no capture is broken.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for a size of 0 or no multiple of 4; the driver's.
    pub fn new(device: &CudaDevice, bytes: usize) -> DriverResult<Self> {
        gpupool_device::with_relaxed_capture(device, |device| Self::allocate(&device.context, bytes))
    }

    pub(crate) fn allocate(context: &Arc<Context>, bytes: usize) -> DriverResult<Self> {
        /// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
        const MAPPED: u32 = 1 | 2;
        let call = Call::Other;
        if bytes == 0 || !bytes.is_multiple_of(4) {
            return Err(DriverError::new(call, code::INVALID_VALUE));
        }
        let driver = context.driver;
        let _current = context.enter(call)?;
        let mut host = std::ptr::null_mut();
        // SAFETY: cuMemHostAlloc writes one pointer.
        check(call, unsafe { (driver.mem_host_alloc)(&mut host, bytes, MAPPED) })?;
        let mut this = Self { context: Arc::clone(context), host, address: Address::NULL, bytes };
        // SAFETY: the pages are ours, `bytes` long, and nobody else has them yet.
        unsafe { std::ptr::write_bytes(host.cast::<u8>(), 0, bytes) };
        // SAFETY: cuMemHostGetDevicePointer writes one address for memory that cuMemHostAlloc gave as mapped.
        check(call, unsafe { (driver.mem_host_device_pointer)(&mut this.address.0, host, 0) })?;
        Ok(this)
    }

    /// Where the GPU sees it.
    #[must_use]
    pub fn address(&self) -> Address {
        self.address
    }

    /// The words. The GPU may change them at any time, hence atomics.
    #[must_use]
    pub fn words(&self) -> &[AtomicU32] {
        // SAFETY: 1. cuMemHostAlloc gives page-aligned memory of `bytes` bytes, which lives as long as `self`. 2. It was zeroed. 3. An
        // AtomicU32 has a u32's size and alignment, and may be shared with other writers of the same memory.
        unsafe { std::slice::from_raw_parts(self.host.cast::<AtomicU32>(), self.bytes / 4) }
    }

    /// Writes words from the start on.
    pub fn write(&self, words: impl IntoIterator<Item = u32>) {
        self.words().iter().zip(words).for_each(|(to, from)| to.store(from, Ordering::Release));
    }

    /// The words as they are now.
    #[must_use]
    pub fn read(&self) -> Vec<u32> {
        self.words().iter().map(|word| word.load(Ordering::Acquire)).collect()
    }
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter(Call::Other) else { return };
        let driver = self.context.driver;
        let mut mode = crate::objects::mode_number(CaptureMode::Relaxed);
        // SAFETY: cuThreadExchangeStreamCaptureMode reads and writes one int, here and below.
        let exchanged = unsafe { (driver.exchange_mode)(&mut mode) } == 0;
        // SAFETY: cuMemFreeHost takes what cuMemHostAlloc gave; it waits until the device is done with it.
        let _gone = unsafe { (driver.mem_free_host)(self.host) };
        if exchanged {
            // SAFETY: as above.
            let _relaxed = unsafe { (driver.exchange_mode)(&mut mode) };
        }
    }
}

impl CudaDevice {
    /// Copies on a stream between any two places that the GPU sees: device memory, pinned memory. Asynchronous; a node on a capturing
    /// stream.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn copy_async(&self, stream: StreamHandle, dst: Address, src: Address, bytes: u64) -> DriverResult<()> {
        let call = Call::Other;
        let stream = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        let bytes = crate::device_impl::size(call, bytes)?;
        // SAFETY: cuMemcpyAsync takes addresses of the unified space and refuses those it does not know; Rust reaches pinned memory through
        // atomics only, so the GPU may write it at any time.
        check(call, unsafe { (self.driver.copy_async)(dst.0, src.0, bytes, stream.raw) })
    }

    /// Sets 32-bit words on a stream. Asynchronous; a memset node on a capturing stream.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn memset_async(&self, stream: StreamHandle, dst: Address, value: u32, words: u64) -> DriverResult<()> {
        let call = Call::Other;
        let stream = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        let words = crate::device_impl::size(call, words)?;
        // SAFETY: as for `copy_async`.
        check(call, unsafe { (self.driver.memset_d32_async)(dst.0, value, words, stream.raw) })
    }
}

/// Where a device is asked about its own memory.
impl CudaDevice {
    /// Bytes of the whole device that are taken, by whomever.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn bytes_in_use(&self) -> DriverResult<u64> {
        let info = self.mem_info()?;
        Ok(info.total.saturating_sub(info.free))
    }
}
