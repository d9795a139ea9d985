//! The workbench: its kernels, and the gates that they wait at.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use gpupool_device::{Call, DriverError, DriverResult, Gate, Kernel, code, with_relaxed_capture};
use parking_lot::Mutex;

use crate::CudaDevice;
use crate::context::Context;
use crate::device::Hardware;
use crate::host::PinnedBytes;
use crate::kernels::{Argument, KernelError, Module, compile, shape};

/// Gates of one page of pinned memory.
const GATES_A_PAGE: usize = 1024;
/// A gate's kernel gives up after this long: a forgotten gate does not hang the GPU.
const LONGEST_WAIT_NS: u64 = 30_000_000_000;
const NAMES: [&str; 5] = ["fill", "copy", "add", "checksum", "gate"];

/// What the workbench has, made when it is first needed.
#[derive(Debug)]
pub(crate) struct Bench {
    context: Arc<Context>,
    module: Mutex<Option<Arc<Module<{ NAMES.len() }>>>>,
    gates: Mutex<Gates>,
}

#[derive(Debug, Default)]
struct Gates {
    pages: Vec<PinnedBytes>,
    made: usize,
}

impl Gates {
    fn word(&self, gate: Gate) -> Option<(&PinnedBytes, usize)> {
        let index = usize::try_from(gate.0).ok()?.checked_sub(1).filter(|&i| i < self.made)?;
        Some((self.pages.get(index / GATES_A_PAGE)?, index % GATES_A_PAGE))
    }
}

impl Bench {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), module: Mutex::default(), gates: Mutex::default() }
    }

    fn module(&self, hardware: Hardware) -> Result<Arc<Module<{ NAMES.len() }>>, KernelError> {
        let mut slot = self.module.lock();
        if let Some(module) = &*slot {
            return Ok(Arc::clone(module));
        }
        let code = compiled(hardware)?;
        let module = Arc::new(Module::load(&self.context, &code, NAMES)?);
        *slot = Some(Arc::clone(&module));
        Ok(module)
    }
}

/// The kernels' machine code, compiled once a process for each kind of GPU.
fn compiled(hardware: Hardware) -> Result<Arc<[u8]>, KernelError> {
    type Known = Vec<((u32, u32), Arc<[u8]>)>;
    static COMPILED: Mutex<Known> = Mutex::new(Vec::new());
    let mut known = COMPILED.lock();
    if let Some((_, code)) = known.iter().find(|(capability, _)| *capability == hardware.capability) {
        return Ok(Arc::clone(code));
    }
    let code: Arc<[u8]> = compile(gpupool_kernels::WORKBENCH, hardware)?.into();
    known.push((hardware.capability, Arc::clone(&code)));
    Ok(code)
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Nothing may wait for a gate that nobody can open any more; and the kernels may go only once none runs.
        let gates = self.gates.get_mut();
        gates.pages.iter().flat_map(PinnedBytes::words).for_each(|word| word.store(1, Ordering::Release));
        let used = self.module.get_mut().is_some() || gates.made > 0;
        if used && let Ok(_current) = self.context.enter(Call::DeviceSynchronize) {
            // SAFETY: cuCtxSynchronize takes nothing; a context is current.
            let _failed = unsafe { (self.context.driver.ctx_synchronize)() };
        }
    }
}

impl CudaDevice {
    /// Compiles and loads the workbench's kernels now, rather than at the first launch.
    ///
    /// # Errors
    ///
    /// [`KernelError`], which says more than a launch's error can.
    pub fn load_kernels(&self) -> Result<(), KernelError> {
        with_relaxed_capture(self, |device| Ok(device.bench.module(device.hardware).map(drop)))?
    }

    pub(crate) fn launch_bench(&self, stream: gpupool_device::StreamHandle, kernel: Kernel) -> DriverResult<()> {
        let call = Call::LaunchKernel;
        self.stream(call, stream)?;
        let (index, shape, arguments) = self.arguments(kernel)?;
        let loaded = with_relaxed_capture(self, |device| Ok(device.bench.module(device.hardware)))?;
        let module = loaded.map_err(|error| match error {
            KernelError::Load(error) => error,
            _ => DriverError::new(call, code::NOT_SUPPORTED),
        })?;
        // SAFETY: `arguments` gives each kernel of workbench.cu its own parameters.
        unsafe { module.launch(self, stream, index, shape, &arguments) }
    }

    /// Which kernel, how many threads, and what they are passed.
    fn arguments(&self, kernel: Kernel) -> DriverResult<(usize, (u32, u32), Vec<Argument>)> {
        let error = |code| DriverError::new(Call::LaunchKernel, code);
        let checked = |ranges: &[(u64, u64)]| {
            let aligned = |&(at, bytes): &(u64, u64)| {
                at.is_multiple_of(4) && bytes.is_multiple_of(4) && at.checked_add(bytes).is_some()
            };
            let apart = match ranges {
                [(a, m), (b, n)] => a.saturating_add(*m) <= *b || b.saturating_add(*n) <= *a,
                _ => true,
            };
            if ranges.iter().all(aligned) && apart { Ok(()) } else { Err(error(code::INVALID_VALUE)) }
        };
        let shape = |bytes: u64| shape(self.hardware, bytes / 4);
        Ok(match kernel {
            Kernel::Fill { dst, bytes, value } => {
                checked(&[(dst.0, bytes)])?;
                (0, shape(bytes), vec![dst.into(), (bytes / 4).into(), value.into()])
            }
            Kernel::Copy { dst, src, bytes } => {
                checked(&[(src.0, bytes), (dst.0, bytes)])?;
                (1, shape(bytes), vec![dst.into(), src.into(), (bytes / 4).into()])
            }
            Kernel::Add { dst, bytes, value } => {
                checked(&[(dst.0, bytes)])?;
                (2, shape(bytes), vec![dst.into(), (bytes / 4).into(), value.into()])
            }
            Kernel::Checksum { dst, src, bytes } => {
                checked(&[(src.0, bytes), (dst.0, 8)])?;
                (3, (1, 1024), vec![dst.into(), src.into(), (bytes / 4).into()])
            }
            Kernel::Wait { gate } => {
                let gates = self.bench.gates.lock();
                let (page, word) = gates.word(gate).ok_or(error(code::INVALID_HANDLE))?;
                (4, (1, 1), vec![page.address().offset(word as u64 * 4).into(), LONGEST_WAIT_NS.into()])
            }
            _ => return Err(error(code::NOT_SUPPORTED)),
        })
    }

    pub(crate) fn make_gate(&self) -> DriverResult<Gate> {
        let mut gates = self.bench.gates.lock();
        if gates.made == gates.pages.len() * GATES_A_PAGE {
            gates.pages.push(PinnedBytes::new(self, GATES_A_PAGE * 4)?);
        }
        gates.made += 1;
        Ok(Gate(gates.made as u64))
    }

    pub(crate) fn open_gate(&self, gate: Gate) -> DriverResult<()> {
        let gates = self.bench.gates.lock();
        let (page, word) = gates.word(gate).ok_or(DriverError::new(Call::Other, code::INVALID_HANDLE))?;
        if let Some(word) = page.words().get(word) {
            word.store(1, Ordering::Release);
        }
        Ok(())
    }
}
