//! A device under the contract suite, and what the suite needs of it beyond the traits.

use std::sync::{Arc, Mutex};

use gpupool_cuda_device::CudaDevice;
use gpupool_cuda_device::foreign::ForeignPages;
use gpupool_device::{Address, DriverResult, StreamHandle, Workbench};
use gpupool_sim_device::{ForeignCall, SimConfig, SimDevice};

/// A host function that can run any number of times.
pub type Again = Arc<dyn Fn() + Send + Sync + 'static>;

/// A device under test. Every check gets a new one.
pub trait Subject: Sync {
    /// The device's type.
    type Device: Workbench;

    /// Whether the device answers every question. The simulated one refuses what nobody measured, and fails a wait that can never end where
    /// a real one waits for ever.
    const REAL: bool;

    /// The device.
    fn device(&self) -> &Self::Device;

    /// Makes ready for foreign calls, outside any capture.
    fn prepare_foreign(&self) {}

    /// A call that other libraries make. `stream` matters for the stream-ordered ones.
    fn foreign(&self, call: ForeignCall, stream: StreamHandle) -> DriverResult<()>;

    /// Whether a stream is idle.
    fn stream_query(&self, stream: StreamHandle) -> DriverResult<bool>;

    /// A host function that may become a node.
    fn host_function(&self, stream: StreamHandle, function: Again) -> DriverResult<()>;

    /// A node that only joins.
    fn empty_node(&self, stream: StreamHandle) -> DriverResult<()>;
}

/// The simulated device.
pub struct Simulated(SimDevice);

impl Simulated {
    /// A new one.
    pub fn new() -> Self {
        Self(SimDevice::new(SimConfig::default()))
    }
}

impl Default for Simulated {
    fn default() -> Self {
        Self::new()
    }
}

impl Subject for Simulated {
    type Device = SimDevice;
    const REAL: bool = false;

    fn device(&self) -> &SimDevice {
        &self.0
    }

    fn foreign(&self, call: ForeignCall, stream: StreamHandle) -> DriverResult<()> {
        self.0.foreign_call(call, stream)
    }

    fn stream_query(&self, stream: StreamHandle) -> DriverResult<bool> {
        self.0.stream_query(stream)
    }

    fn host_function(&self, stream: StreamHandle, function: Again) -> DriverResult<()> {
        self.0.launch_repeatable_host_function(stream, function)
    }

    fn empty_node(&self, stream: StreamHandle) -> DriverResult<()> {
        self.0.record_empty_node(stream)
    }
}

/// The real one.
pub struct Real {
    device: CudaDevice,
    /// A block of the driver's pool and pinned pages, for foreign frees.
    block: Mutex<Option<Address>>,
    pages: Mutex<Option<ForeignPages>>,
    /// Plain memory for foreign memsets.
    plain: Mutex<Option<Address>>,
}

impl Real {
    /// The first GPU, opened anew.
    pub fn open() -> Self {
        let device = CudaDevice::open(0).unwrap();
        device.load_kernels().unwrap();
        Self { device, block: Mutex::default(), pages: Mutex::default(), plain: Mutex::default() }
    }
}

impl Subject for Real {
    type Device = CudaDevice;
    const REAL: bool = true;

    fn device(&self) -> &CudaDevice {
        &self.device
    }

    fn prepare_foreign(&self) {
        use gpupool_device::Device;
        let stream = StreamHandle::LEGACY;
        let (mut block, mut pages) = (self.block.lock().unwrap(), self.pages.lock().unwrap());
        block.get_or_insert_with(|| self.device.alloc_async(stream, 4096).unwrap());
        pages.get_or_insert_with(|| self.device.foreign_host_alloc(4096).unwrap());
        self.plain.lock().unwrap().get_or_insert_with(|| self.device.mem_alloc(4096).unwrap());
        self.device.device_synchronize().unwrap();
    }

    fn foreign(&self, call: ForeignCall, stream: StreamHandle) -> DriverResult<()> {
        let d = &self.device;
        match call {
            ForeignCall::MemAllocAsync => d.alloc_async(stream, 4096).map(drop),
            ForeignCall::MemFreeAsync => {
                let block = self.block.lock().unwrap().expect("prepared");
                d.free_async(stream, block)?;
                *self.block.lock().unwrap() = None;
                Ok(())
            }
            ForeignCall::MemPoolTrimTo => d.default_pool()?.trim(0),
            ForeignCall::MemHostAlloc => d.foreign_host_alloc(4096).map(drop),
            ForeignCall::MemFreeHost => d.foreign_host_free(self.pages.lock().unwrap().take().expect("prepared")),
            ForeignCall::DeviceGraphMemTrim => d.trim_graph_memory(),
            ForeignCall::MemsetSynchronous => d.foreign_memset(self.plain.lock().unwrap().expect("prepared"), 4096),
            other => panic!("{other:?} is not known here"),
        }
    }

    fn stream_query(&self, stream: StreamHandle) -> DriverResult<bool> {
        self.device.stream_query(stream)
    }

    fn host_function(&self, stream: StreamHandle, function: Again) -> DriverResult<()> {
        self.device.launch_repeatable_host_function(stream, function)
    }

    fn empty_node(&self, stream: StreamHandle) -> DriverResult<()> {
        self.device.record_empty_node(stream)
    }
}
