//! Calls that the allocator never makes, but other libraries of the same process do: what a capture makes of them.

use gpupool_device::{Address, Call, DriverResult, NodeKind, StreamHandle, code};

use crate::SimDevice;
use crate::graphs::NodeWork;

/// A driver call of somebody else. Only its effect on captures is simulated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ForeignCall {
    /// `cuMemAllocAsync` on the given stream; on a capturing one it becomes a memory node.
    MemAllocAsync,
    /// `cuMemFreeAsync`, on the given stream, of a block from outside any capture.
    MemFreeAsync,
    /// `cuMemPoolTrimTo`.
    MemPoolTrimTo,
    /// `cuMemHostAlloc`.
    MemHostAlloc,
    /// `cuMemFreeHost`.
    MemFreeHost,
    /// `cuDeviceGraphMemTrim`.
    DeviceGraphMemTrim,
    /// A memset or copy that waits on the host.
    MemsetSynchronous,
}

impl SimDevice {
    /// Makes a foreign call from the calling thread. `stream` matters for the stream-ordered ones.
    ///
    /// # Errors
    ///
    /// What the driver was measured to return: `CAPTURE_UNSUPPORTED` for an unsafe call, `INVALID_VALUE` for a
    /// stream-ordered free of an outside block on a capturing stream.
    pub fn foreign_call(&self, call: ForeignCall, stream: StreamHandle) -> DriverResult<()> {
        self.call(Call::Other, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            match (call, state.recording(stream)?) {
                (ForeignCall::MemAllocAsync, Some(id)) => {
                    let kind = NodeKind::MemAlloc { address: Address::NULL, bytes: 0 };
                    state.record_node(id, stream, NodeWork::Foreign(kind))?;
                }
                (ForeignCall::MemFreeAsync, Some(_)) => return Err(code::INVALID_VALUE),
                (ForeignCall::DeviceGraphMemTrim, _) => {
                    let gone = state.device(this.shared.ordinal)?.memory.trim_nodes();
                    gone.into_iter().for_each(|gone| state.forget(gone));
                }
                (ForeignCall::MemsetSynchronous, _) => {}
                _ => this.unsafe_call(state)?,
            }
            Ok(((), 0))
        })
    }
}
