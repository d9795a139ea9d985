//! What the C border needs of a device beyond [`Workbench`]: streams that somebody else made, and one event for all that was submitted.

use std::ffi::c_int;
use std::sync::OnceLock;

use gpupool::device::{Call, DriverError, DriverResult, EventHandle, StreamHandle, Workbench};
use gpupool::sim::SimDevice;
use gpupool_cuda_device::CudaDevice;

/// A device behind the C border.
pub(crate) trait Border: Workbench {
    /// Makes a stream known that the caller made.
    ///
    /// # Safety
    ///
    /// `raw` is a stream of this device, and stays one until it was given to [`take_back`](Self::take_back).
    unsafe fn lend(&self, raw: u64) -> StreamHandle;

    /// The caller is about to destroy a stream that it lent.
    fn take_back(&self, stream: StreamHandle);

    /// Records `event` after everything submitted to the context so far, on whatever stream. `None` if the device has no such call.
    fn record_context(&self, event: EventHandle) -> Option<DriverResult<()>>;
}

impl Border for SimDevice {
    unsafe fn lend(&self, raw: u64) -> StreamHandle {
        // A number that names no stream is an error of the call that uses it.
        StreamHandle(raw)
    }

    fn take_back(&self, _stream: StreamHandle) {}

    fn record_context(&self, _event: EventHandle) -> Option<DriverResult<()>> {
        None
    }
}

/// `cuCtxRecordEvent(context, event)`.
type CtxRecordEvent = unsafe extern "C" fn(*mut std::ffi::c_void, *mut std::ffi::c_void) -> c_int;

/// The driver's, from version 12.5 on.
fn ctx_record_event() -> Option<CtxRecordEvent> {
    static FOUND: OnceLock<Option<CtxRecordEvent>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: a device is open, so the driver of this name is loaded already: no initialiser runs.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: the CUDA Driver API reference documents this symbol with this signature.
        let symbol = unsafe { library.get::<CtxRecordEvent>(b"cuCtxRecordEvent\0") }.ok().map(|s| *s);
        // The function is used for as long as the process lives.
        std::mem::forget(library);
        symbol
    })
}

impl Border for CudaDevice {
    unsafe fn lend(&self, raw: u64) -> StreamHandle {
        // SAFETY: the caller's promise is the one asked for.
        unsafe { self.borrow_stream(raw as *mut _) }
    }

    fn take_back(&self, stream: StreamHandle) {
        self.return_stream(stream);
    }

    fn record_context(&self, event: EventHandle) -> Option<DriverResult<()>> {
        let record = ctx_record_event()?;
        // SAFETY: the context is the device's and lives as long as it; the event is one that this device made and that its owner keeps:
        // the driver's pointer is the handle's number.
        let code = unsafe { record(self.cu_context().cast(), event.0 as *mut _) };
        Some(match code {
            0 => Ok(()),
            code => Err(DriverError::new(Call::EventRecord, code.unsigned_abs())),
        })
    }
}
