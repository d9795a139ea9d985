//! [`Workbench`] for the simulated device.

use gpupool_device::{
    Address, Call, DriverError, DriverResult, Gate, Kernel, StreamHandle, StreamKind, Workbench, code,
};

use crate::SimDevice;
use crate::scheduler::{Awaited, Goal};
use crate::streams::Kind;
use crate::work::Work;

impl Workbench for SimDevice {
    fn stream_create(&self, kind: StreamKind) -> DriverResult<StreamHandle> {
        self.call(Call::StreamCreate, |this, state| {
            let handle = state.streams.next_handle();
            let kind = match kind {
                StreamKind::Blocking => Kind::Blocking,
                StreamKind::NonBlocking => Kind::NonBlocking,
            };
            state.add_stream(this.shared.ordinal, handle, kind);
            Ok((handle, state.config.costs.stream_create))
        })
    }

    fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()> {
        self.call(Call::StreamDestroy, |this, state| {
            if stream.0 <= StreamHandle::PER_THREAD.0 {
                return Err(code::INVALID_HANDLE);
            }
            let stream = state.stream(this.shared.ordinal, stream)?;
            state.leave_capture(stream);
            state.streams.destroy(stream);
            state.bury(stream);
            Ok(((), state.config.costs.stream_destroy))
        })
    }

    fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult<()> {
        self.call(Call::StreamSynchronize, |this, state| {
            let id = state.stream(this.shared.ordinal, stream)?;
            state.not_while_capturing(id)?;
            this.unsafe_call(state)?;
            this.wait_for_stream(state, Call::StreamSynchronize, id, stream)?;
            Ok(((), state.config.costs.event_query))
        })
    }

    fn device_synchronize(&self) -> DriverResult<()> {
        self.call(Call::DeviceSynchronize, |this, state| {
            state.whole_device_call(this.shared.ordinal)?;
            this.drain(state, Call::DeviceSynchronize)?;
            Ok(((), state.config.costs.event_query))
        })
    }

    fn launch(&self, stream: StreamHandle, kernel: Kernel) -> DriverResult<()> {
        self.call(Call::LaunchKernel, |this, state| {
            this.submit_kernel(state, stream, kernel, None)?;
            Ok(((), state.config.costs.launch))
        })
    }

    fn gate_create(&self) -> DriverResult<Gate> {
        let mut state = self.world.state.lock();
        let number = state.gates.len() as u64 + 1;
        state.gates.insert(number, None);
        Ok(Gate(number))
    }

    fn gate_open(&self, gate: Gate) -> DriverResult<()> {
        let mut state = self.world.state.lock();
        let opened = (state.host.current(), state.time.now());
        match state.gates.get_mut(&gate.0) {
            Some(open) => {
                open.get_or_insert(opened);
                Ok(())
            }
            None => Err(DriverError::new(Call::Other, code::INVALID_HANDLE)),
        }
    }

    fn read(&self, stream: StreamHandle, src: Address, into: &mut [u8]) -> DriverResult<()> {
        let bytes = into.len() as u64;
        let data = self.call(Call::MemcpyToHost, |this, state| {
            let id = state.stream(this.shared.ordinal, stream)?;
            state.not_while_capturing(id)?;
            this.unsafe_call(state)?;
            state.legacy_is_free(id)?;
            let submission = state.submit(id, Work::Read(src.0, bytes));
            state.reads.insert(submission, Vec::new());
            let waited = this.wait_for_stream(state, Call::MemcpyToHost, id, stream);
            let data = state.reads.remove(&submission);
            waited?;
            Ok((data, state.config.costs.launch))
        })?;
        // Without contents everything reads zero.
        into.fill(0);
        into.iter_mut().zip(data.unwrap_or_default()).for_each(|(to, from)| *to = from);
        Ok(())
    }
}

impl SimDevice {
    /// Waits for everything submitted to a stream so far, and tells the host so.
    fn wait_for_stream(
        &self,
        state: &mut crate::state::Held<'_>,
        call: Call,
        id: crate::streams::StreamId,
        handle: StreamHandle,
    ) -> Result<(), u32> {
        let position = state.streams.get(id).map_or(0, |s| s.submitted);
        self.wait(state, call, Awaited::Stream(handle), &Goal::Positions(vec![(id, position)]))?;
        let clock = state.stream_clock(id);
        state.host.learn(&clock);
        Ok(())
    }
}
