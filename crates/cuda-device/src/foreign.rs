//! Calls that the allocator never makes, but other libraries of the same process do: for tests of what a capture makes of them.

use std::ffi::c_void;

use gpupool_device::{Address, Call, DriverResult, StreamHandle};

use crate::CudaDevice;
use crate::error::check;

/// Pinned pages of somebody else.
#[derive(Debug)]
pub struct ForeignPages(*mut c_void);

// SAFETY: the pointer is only ever given back to the driver, which any thread may do.
unsafe impl Send for ForeignPages {}

impl CudaDevice {
    /// `cuMemHostAlloc` without any exchange of the capture mode.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn foreign_host_alloc(&self, bytes: usize) -> DriverResult<ForeignPages> {
        let _current = self.enter(Call::Other)?;
        let mut host = std::ptr::null_mut();
        // SAFETY: cuMemHostAlloc writes one pointer.
        check(Call::Other, unsafe { (self.driver.mem_host_alloc)(&mut host, bytes, 0) })?;
        Ok(ForeignPages(host))
    }

    /// `cuMemFreeHost` without any exchange. If it fails the pages stay taken for good.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn foreign_host_free(&self, pages: ForeignPages) -> DriverResult<()> {
        let _current = self.enter(Call::Other)?;
        // SAFETY: cuMemFreeHost takes what cuMemHostAlloc gave; nobody can have it any more.
        check(Call::Other, unsafe { (self.driver.mem_free_host)(pages.0) })
    }

    /// A memset that waits on the host.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn foreign_memset(&self, at: Address, bytes: usize) -> DriverResult<()> {
        let _current = self.enter(Call::Other)?;
        // SAFETY: cuMemsetD8 takes an address and refuses one that it does not know.
        check(Call::Other, unsafe { (self.driver.memset_d8)(at.0, 0, bytes) })
    }

    /// `cuStreamIsCapturing`: 0 none, 1 active, 2 invalidated.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn foreign_is_capturing(&self, stream: StreamHandle) -> DriverResult<i32> {
        let stream = self.stream(Call::StreamGetCaptureInfo, stream)?;
        let _current = self.enter(Call::StreamGetCaptureInfo)?;
        let mut status = 0;
        // SAFETY: cuStreamIsCapturing takes a stream, which is held, and writes one int.
        let code = unsafe { (self.driver.stream_is_capturing)(stream.raw, &mut status) };
        check(Call::StreamGetCaptureInfo, code).map(|()| status)
    }
}
