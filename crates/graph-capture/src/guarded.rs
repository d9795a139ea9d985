//! Calls that a capture does not permit, asked first: where the driver would refuse and break the capture, the answer is an error that
//! says what to use instead, and the capture survives.

use std::sync::Arc;

use gpupool_allocator::{Allocator, Stream};
use gpupool_device::{Call, CaptureStatus, DriverError, EventHandle, GraphDevice, code, with_relaxed_capture};

use crate::error::Forbidden;

/// A guarded call failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GuardedError {
    /// It was not made, since a capture under way does not permit it.
    #[error(transparent)]
    Forbidden(#[from] Forbidden),
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Calls that a capture may not permit. Made from [`Captures::guarded`](crate::Captures::guarded).
pub struct Guarded<'a, D: GraphDevice> {
    device: &'a Arc<D>,
    allocator: &'a Allocator<D>,
}

impl<'a, D: GraphDevice> Guarded<'a, D> {
    pub(crate) fn new(device: &'a Arc<D>, allocator: &'a Allocator<D>) -> Self {
        Self { device, allocator }
    }

    fn allow(&self, call: Call, stream: &Stream<D>, instead: &'static str) -> Result<(), GuardedError> {
        match self.device.capture_status(stream.handle())? {
            CaptureStatus::Active(capture) => Err(Forbidden { call, stream: stream.id(), capture, instead }.into()),
            CaptureStatus::Invalidated => Err(DriverError::new(call, code::CAPTURE_INVALIDATED).into()),
            CaptureStatus::None => Ok(()),
        }
    }

    /// Waits on the host for all work submitted to a stream. **Blocks.**
    ///
    /// # Errors
    ///
    /// [`Forbidden`] on a capturing stream; the driver's.
    pub fn synchronize(&self, stream: &Stream<D>) -> Result<(), GuardedError> {
        self.allow(Call::StreamSynchronize, stream, "end the capture first; inside it order streams with events")?;
        Ok(stream.work_so_far().wait()?)
    }

    /// Waits on the host for an event recorded on `stream`. **Blocks.**
    ///
    /// # Errors
    ///
    /// [`Forbidden`] if the stream is capturing, so that the event may be a captured one; the driver's.
    pub fn synchronize_event(&self, event: EventHandle, stream: &Stream<D>) -> Result<(), GuardedError> {
        self.allow(Call::EventSynchronize, stream, "let a stream wait for the event (cuStreamWaitEvent)")?;
        Ok(with_relaxed_capture(&**self.device, |d| d.event_synchronize(event))?)
    }

    /// Whether an event recorded on `stream` is complete.
    ///
    /// # Errors
    ///
    /// As [`synchronize_event`](Self::synchronize_event).
    pub fn query_event(&self, event: EventHandle, stream: &Stream<D>) -> Result<bool, GuardedError> {
        self.allow(Call::EventQuery, stream, "let a stream wait for the event (cuStreamWaitEvent)")?;
        Ok(with_relaxed_capture(&**self.device, |d| d.event_query(event))?)
    }

    /// Frees a plain driver allocation, which waits for the whole device. **Blocks.**
    ///
    /// # Errors
    ///
    /// [`Forbidden`] while `stream`, on which the memory was used last, is capturing; the driver's.
    pub fn free(&self, address: gpupool_device::Address, stream: &Stream<D>) -> Result<(), GuardedError> {
        self.allow(Call::MemFree, stream, "free the block through the allocator, which keeps it for the graph")?;
        Ok(with_relaxed_capture(&**self.device, |d| d.mem_free(address))?)
    }

    /// Whether work may be submitted to the legacy default stream: it would become part of a capture on a stream that waits for it.
    ///
    /// # Errors
    ///
    /// [`Forbidden`] if `stream`, which the work concerns, is capturing.
    pub fn allow_legacy(&self, stream: &Stream<D>) -> Result<(), GuardedError> {
        self.allow(
            Call::LaunchKernel,
            stream,
            "use a stream made non-blocking, or an asynchronous copy on the capture's stream",
        )
    }

    /// The allocator.
    #[must_use]
    pub fn allocator(&self) -> &Allocator<D> {
        self.allocator
    }

    /// The device's ordinal.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.device.ordinal()
    }
}
