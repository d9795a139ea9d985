//! [`Workbench`] for the real GPU.

use cudarc::driver::sys::CUstream;
use gpupool_device::{Address, Call, DriverResult, Gate, Kernel, StreamHandle, StreamKind, Workbench, code};

use crate::CudaDevice;
use crate::device::StreamKindOf;
use crate::error::check;
use crate::objects::Object;

impl CudaDevice {
    /// Creates a stream with a priority: the lower the number, the earlier its work is taken up. The driver clamps it to what it has.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn stream_create_with_priority(&self, kind: StreamKind, priority: i32) -> DriverResult<StreamHandle> {
        let call = Call::StreamCreate;
        let _current = self.enter(call)?;
        let mut raw: CUstream = std::ptr::null_mut();
        let flags = match kind {
            StreamKind::Blocking => 0,
            StreamKind::NonBlocking => 1,
        };
        // SAFETY: cuStreamCreateWithPriority writes one handle.
        check(call, unsafe { (self.driver.stream_create)(&mut raw, flags, priority) })?;
        if !raw.is_null() {
            self.streams.insert(Object::new(&self.context, raw as u64, StreamKindOf));
        }
        Ok(StreamHandle(raw as u64))
    }

    /// The lowest and the highest priority that streams can have; the highest is the smallest number.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn stream_priorities(&self) -> DriverResult<(i32, i32)> {
        let _current = self.enter(Call::Other)?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: cuCtxGetStreamPriorityRange writes two ints.
        check(Call::Other, unsafe { (self.driver.priority_range)(&mut least, &mut greatest) })?;
        Ok((least, greatest))
    }

    /// Whether a stream is idle. *Capture*: unsafe call; on a capturing stream it fails in every mode.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn stream_query(&self, stream: StreamHandle) -> DriverResult<bool> {
        let stream = self.stream(Call::StreamQuery, stream)?;
        let _current = self.enter(Call::StreamQuery)?;
        // SAFETY: cuStreamQuery takes a stream, which is held.
        let code = unsafe { (self.driver.stream_query)(stream.raw) };
        if code == code::NOT_READY.cast_signed() {
            return Ok(false);
        }
        check(Call::StreamQuery, code).map(|()| true)
    }

    fn wait_for(&self, call: Call, stream: StreamHandle) -> DriverResult<()> {
        let stream = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        // SAFETY: cuStreamSynchronize takes a stream, which is held until it returns.
        check(call, unsafe { (self.driver.stream_synchronize)(stream.raw) })
    }
}

impl Workbench for CudaDevice {
    fn stream_create(&self, kind: StreamKind) -> DriverResult<StreamHandle> {
        self.stream_create_with_priority(kind, 0)
    }

    fn stream_destroy(&self, stream: StreamHandle) -> DriverResult<()> {
        self.streams.destroy(stream.0, code::INVALID_HANDLE)
    }

    fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult<()> {
        self.wait_for(Call::StreamSynchronize, stream)
    }

    fn device_synchronize(&self) -> DriverResult<()> {
        let _current = self.enter(Call::DeviceSynchronize)?;
        // SAFETY: cuCtxSynchronize takes nothing; the context is current.
        check(Call::DeviceSynchronize, unsafe { (self.driver.ctx_synchronize)() })
    }

    fn launch(&self, stream: StreamHandle, kernel: Kernel) -> DriverResult<()> {
        self.launch_bench(stream, kernel)
    }

    fn gate_create(&self) -> DriverResult<Gate> {
        self.make_gate()
    }

    fn gate_open(&self, gate: Gate) -> DriverResult<()> {
        self.open_gate(gate)
    }

    fn read(&self, stream: StreamHandle, src: Address, into: &mut [u8]) -> DriverResult<()> {
        let call = Call::MemcpyToHost;
        // First: on a capturing stream this fails, where a copy would become a node that writes to `into` long after this returned.
        self.wait_for(call, stream)?;
        if into.is_empty() {
            return Ok(());
        }
        {
            let held = self.stream(call, stream)?;
            let _current = self.enter(call)?;
            // SAFETY: 1. `into` is ours and `into.len()` long. 2. cuMemcpyDtoHAsync into pageable memory returns once the copy is complete; the wait
            // below makes sure of it.
            check(call, unsafe { (self.driver.copy_to_host)(into.as_mut_ptr().cast(), src.0, into.len(), held.raw) })?;
        }
        self.wait_for(call, stream)
    }
}
