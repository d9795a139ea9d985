//! What the interposer needs of a device beyond [`Device`]: streams that the program made, and one event for all that was submitted.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use gpupool::device::{Call, Device, DriverError, DriverResult, EventHandle, StreamHandle, StreamKind, Workbench};
use gpupool_cuda_device::CudaDevice;

/// A device that a program uses behind the interposer's back.
pub(crate) trait Front: Device {
    /// Makes a stream known that the program made.
    ///
    /// # Safety
    ///
    /// `raw` is a stream of this device's context, and stays one until [`take_back`](Self::take_back).
    unsafe fn lend(&self, raw: u64) -> StreamHandle;

    /// The program is about to destroy a stream.
    fn take_back(&self, stream: StreamHandle);

    /// A stream of our own, that nobody submits to.
    fn private_stream(&self) -> DriverResult<StreamHandle>;

    /// Records `event` after everything submitted to the context so far, on whatever stream; an error while a capture is open. `None` if
    /// the device has no such call.
    fn record_context(&self, event: EventHandle) -> Option<DriverResult<()>>;

    /// **Waits** for everything submitted to the context.
    fn wait_for_all(&self) -> DriverResult<()>;
}

/// `cuCtxRecordEvent(context, event)`, from 12.5 on.
type CtxRecordEvent = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;

fn ctx_record_event() -> Option<CtxRecordEvent> {
    static FOUND: OnceLock<Option<CtxRecordEvent>> = OnceLock::new();
    // SAFETY: the CUDA Driver API reference documents this symbol with this signature.
    *FOUND.get_or_init(|| unsafe { crate::real::find(b"cuCtxRecordEvent\0") })
}

impl Front for CudaDevice {
    unsafe fn lend(&self, raw: u64) -> StreamHandle {
        // SAFETY: the caller's promise is the one asked for.
        unsafe { self.borrow_stream(raw as *mut _) }
    }

    fn take_back(&self, stream: StreamHandle) {
        self.return_stream(stream);
    }

    fn private_stream(&self) -> DriverResult<StreamHandle> {
        self.stream_create(StreamKind::NonBlocking)
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

    fn wait_for_all(&self) -> DriverResult<()> {
        self.device_synchronize()
    }
}
