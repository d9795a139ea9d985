//! Kernels: compilation at run time, and safe launches of this project's own sources.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{CUfunction, CUmodule};
use gpupool_device::{Address, Call, DriverError, DriverResult, StreamHandle};
use libloading::Library;

use crate::CudaDevice;
use crate::context::Context;
use crate::device::Hardware;
use crate::error::check;

/// Why kernels cannot be had.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The compiler's library is not on this machine.
    #[error(
        "no NVRTC library on this machine (looked for libnvrtc in the loader's path, CUDA_HOME and /usr/local/cuda): kernels cannot be compiled"
    )]
    NoCompiler,
    /// The compiler refused the source.
    #[error("NVRTC returned {code}: {log}")]
    Compile {
        /// The compiler's result code.
        code: i32,
        /// What it says.
        log: String,
    },
    /// The driver refused the result.
    #[error("the compiled kernels cannot be loaded: {0}")]
    Load(#[from] DriverError),
}

type Program = *mut c_void;

macro_rules! compiler {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        struct Compiler { $($field: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Compiler {
            /// # Safety
            ///
            /// `library` is NVRTC and stays loaded.
            unsafe fn resolve(library: &Library) -> Option<Self> {
                Some(Self { $(
                    // SAFETY: the caller says that this is NVRTC, whose functions of these names have these signatures.
                    $field: *unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> c_int>($symbol) }.ok()?,
                )* })
            }
        }
    };
}

compiler! {
    create = b"nvrtcCreateProgram" (*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    compile = b"nvrtcCompileProgram" (Program, c_int, *const *const c_char);
    log_size = b"nvrtcGetProgramLogSize" (Program, *mut usize);
    log = b"nvrtcGetProgramLog" (Program, *mut c_char);
    cubin_size = b"nvrtcGetCUBINSize" (Program, *mut usize);
    cubin = b"nvrtcGetCUBIN" (Program, *mut c_char);
    destroy = b"nvrtcDestroyProgram" (*mut Program);
}

/// Where a library of the toolkit's may be, by the start of its name.
pub(crate) fn library_names(stem: &str) -> Vec<String> {
    let names = ["so", "so.13", "so.12"].map(|end| format!("{stem}.{end}"));
    let mut all: Vec<String> = names.to_vec();
    let homes = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|v| std::env::var(v).ok());
    for home in homes.chain(["/usr/local/cuda".to_owned()]) {
        all.extend(names.iter().map(|name| format!("{home}/lib64/{name}")));
    }
    all
}

fn compiler() -> Result<&'static Compiler, KernelError> {
    static COMPILER: OnceLock<Option<Compiler>> = OnceLock::new();
    let found = COMPILER.get_or_init(|| {
        // SAFETY: loading a library runs its initialisers; the names are NVRTC's, which has harmless ones.
        let library = library_names("libnvrtc").iter().find_map(|name| unsafe { Library::new(name) }.ok())?;
        // SAFETY: what carries NVRTC's name is NVRTC, and it is never closed.
        let compiler = unsafe { Compiler::resolve(&library) };
        std::mem::forget(library);
        compiler
    });
    found.as_ref().ok_or(KernelError::NoCompiler)
}

/// Whether NVRTC is here.
#[must_use]
pub fn compiler_present() -> bool {
    compiler().is_ok()
}

/// Machine code for `source` on a GPU of this kind. Takes a tenth of a second or so.
///
/// # Errors
///
/// [`KernelError`].
pub fn compile(source: &str, hardware: Hardware) -> Result<Vec<u8>, KernelError> {
    let compiler = compiler()?;
    let zero_inside = |_| KernelError::Compile { code: -1, log: "the source has a zero byte in it".to_owned() };
    let source = CString::new(source).map_err(zero_inside)?;
    let (major, minor) = hardware.capability;
    let architecture = CString::new(format!("--gpu-architecture=sm_{major}{minor}")).map_err(zero_inside)?;
    let mut program: Program = std::ptr::null_mut();
    // SAFETY: nvrtcCreateProgram reads two strings that end in zero, takes no headers, and writes one handle.
    let code = unsafe {
        (compiler.create)(&mut program, source.as_ptr(), c"gpupool.cu".as_ptr(), 0, std::ptr::null(), std::ptr::null())
    };
    if code != 0 {
        return Err(KernelError::Compile { code, log: String::new() });
    }
    let options = [architecture.as_ptr(), c"--std=c++17".as_ptr(), c"--fmad=false".as_ptr()];
    // SAFETY: the program is live, the options are strings that end in zero.
    let code = unsafe { (compiler.compile)(program, options.len() as c_int, options.as_ptr()) };
    let result = if code == 0 {
        // SAFETY: the program was compiled for a real architecture, so it has machine code.
        unsafe { text(program, compiler.cubin_size, compiler.cubin) }
            .map_err(|code| KernelError::Compile { code, log: String::new() })
    } else {
        // SAFETY: a program has a log whether or not it compiled.
        let log = unsafe { text(program, compiler.log_size, compiler.log) }.unwrap_or_default();
        Err(KernelError::Compile { code, log: String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned() })
    };
    // SAFETY: the program is live and not used after this.
    let _ = unsafe { (compiler.destroy)(&mut program) };
    result
}

/// What the compiler has to say, by its size first.
///
/// # Safety
///
/// The program is live, and `bytes` writes as many bytes as `size` says.
unsafe fn text(
    program: Program,
    size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    bytes: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
) -> Result<Vec<u8>, c_int> {
    let mut length = 0;
    // SAFETY: the caller's promise; one size is written.
    match unsafe { size(program, &mut length) } {
        0 => {}
        code => return Err(code),
    }
    let mut out = vec![0_u8; length];
    // SAFETY: the caller's promise; there is room for `length` bytes.
    match unsafe { bytes(program, out.as_mut_ptr().cast()) } {
        0 => Ok(out),
        code => Err(code),
    }
}

/// A kernel's argument.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Argument {
    Word(u32),
    Long(u64),
    Float(f32),
}

impl From<u32> for Argument {
    fn from(value: u32) -> Self {
        Self::Word(value)
    }
}
impl From<u64> for Argument {
    fn from(value: u64) -> Self {
        Self::Long(value)
    }
}
impl From<Address> for Argument {
    fn from(value: Address) -> Self {
        Self::Long(value.0)
    }
}
impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

/// A loaded module and some of its functions.
#[derive(Debug)]
pub(crate) struct Module<const N: usize> {
    context: Arc<Context>,
    raw: CUmodule,
    functions: [CUfunction; N],
}

// SAFETY: modules and functions are names that the driver locks; the pointers are never dereferenced here.
unsafe impl<const N: usize> Send for Module<N> {}
// SAFETY: as for `Send`.
unsafe impl<const N: usize> Sync for Module<N> {}

impl<const N: usize> Module<N> {
    /// Loads machine code and looks the functions up.
    pub(crate) fn load(context: &Arc<Context>, code: &[u8], names: [&str; N]) -> DriverResult<Self> {
        let driver = context.driver;
        let call = Call::Other;
        let _current = context.enter(call)?;
        let mut raw: CUmodule = std::ptr::null_mut();
        // SAFETY: cuModuleLoadData reads an image whose header says how long it is: ours came from the compiler whole.
        check(call, unsafe { (driver.module_load)(&mut raw, code.as_ptr().cast()) })?;
        let mut this = Self { context: Arc::clone(context), raw, functions: [std::ptr::null_mut(); N] };
        for (name, slot) in names.into_iter().zip(&mut this.functions) {
            let invalid = DriverError::new(call, gpupool_device::code::INVALID_VALUE);
            let name = CString::new(name).map_err(|_| invalid)?;
            // SAFETY: cuModuleGetFunction takes a live module and a string that ends in zero, and writes one handle.
            check(call, unsafe { (driver.module_function)(slot, raw, name.as_ptr()) })?;
        }
        Ok(this)
    }

    /// Launches the function with this index.
    ///
    /// # Safety
    ///
    /// The arguments are those of the function, in number, order and type, and it takes any values of them (addresses that are wrong are
    /// the GPU's fault to report, no harm to the host).
    pub(crate) unsafe fn launch(
        &self,
        device: &CudaDevice,
        stream: StreamHandle,
        index: usize,
        (blocks, threads): (u32, u32),
        arguments: &[Argument],
    ) -> DriverResult<()> {
        let call = Call::LaunchKernel;
        let stream = device.stream(call, stream)?;
        let _current = device.enter(call)?;
        let mut pointers: Vec<*mut c_void> = arguments
            .iter()
            .map(|argument| match argument {
                Argument::Word(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::Long(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Argument::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
            })
            .collect();
        let function = self.functions.get(index).copied().unwrap_or(std::ptr::null_mut());
        // SAFETY: 1. The function is one of a live module (null is refused). 2. cuLaunchKernel reads as many arguments as the function has, each
        // through its pointer: the caller's promise. 3. The values live until the call returns, and it copies them.
        check(call, unsafe {
            (device.driver.launch_kernel)(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.raw,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

impl<const N: usize> Drop for Module<N> {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter(Call::Other) {
            // SAFETY: cuModuleUnload takes a live module; its owner has no kernel under way (the device waits before it goes).
            let _gone = unsafe { (self.context.driver.module_unload)(self.raw) };
        }
    }
}

/// Blocks and threads for so many elements.
pub(crate) fn shape(hardware: Hardware, elements: u64) -> (u32, u32) {
    const THREADS: u64 = 256;
    let most = u64::from(hardware.multiprocessors.max(1)) * 8;
    let blocks = elements.div_ceil(THREADS).clamp(1, most);
    (blocks as u32, THREADS as u32)
}

/// A kernel of `kernels/cuda/experiments.cu`. Addresses and lengths (elements) are as there.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the kernels' own parameters, which the source names and explains")]
pub enum Experiment {
    /// Adds `value` to every 64-bit element, `times` times.
    AddOften { x: Address, n: u64, value: i64, times: u32 },
    /// c = a + b, 32-bit integers.
    SumI32 { c: Address, a: Address, b: Address, n: u64 },
    /// out = x * x.
    Square { out: Address, x: Address, n: u64 },
    /// out = x * 2.
    Double { out: Address, x: Address, n: u64 },
    /// out = x + y.
    Sum { out: Address, x: Address, y: Address, n: u64 },
    /// out = a b, or of the transposes.
    Matmul {
        out: Address,
        a: Address,
        b: Address,
        rows: u64,
        inner: u64,
        cols: u64,
        a_transposed: bool,
        b_transposed: bool,
    },
    /// out = max(x, 0).
    Relu { out: Address, x: Address, n: u64 },
    /// grad = 0 where the activation is not positive.
    ReluBack { grad: Address, activation: Address, n: u64 },
    /// The mean squared error and its gradient.
    Loss { grad: Address, loss: Address, y: Address, target: Address, n: u64 },
    /// weight -= rate * grad.
    Descend { weight: Address, grad: Address, rate: f32, n: u64 },
}

const EXPERIMENTS: [&str; 10] = [
    "add_often",
    "sum_i32",
    "square_f32",
    "double_f32",
    "sum_f32",
    "matmul_f32",
    "relu_f32",
    "relu_back_f32",
    "loss_f32",
    "descend_f32",
];

/// The experiments' kernels, loaded on a device.
#[derive(Debug)]
pub struct Experiments {
    module: Module<{ EXPERIMENTS.len() }>,
}

impl Experiments {
    /// Compiles and loads them. Not while a capture is under way.
    ///
    /// # Errors
    ///
    /// [`KernelError`].
    pub fn load(device: &CudaDevice) -> Result<Self, KernelError> {
        let code = compile(gpupool_kernels::EXPERIMENTS, device.hardware())?;
        Ok(Self { module: Module::load(&device.context, &code, EXPERIMENTS)? })
    }

    /// Launches one, or records it on a capturing stream.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE`; the driver's.
    pub fn launch(&self, device: &CudaDevice, stream: StreamHandle, kernel: Experiment) -> DriverResult<()> {
        use Experiment as E;
        let (index, elements, arguments): (usize, u64, Vec<Argument>) = match kernel {
            E::AddOften { x, n, value, times } => {
                (0, n, vec![x.into(), n.into(), value.cast_unsigned().into(), times.into()])
            }
            E::SumI32 { c, a, b, n } => (1, n, vec![c.into(), a.into(), b.into(), n.into()]),
            E::Square { out, x, n } => (2, n, vec![out.into(), x.into(), n.into()]),
            E::Double { out, x, n } => (3, n, vec![out.into(), x.into(), n.into()]),
            E::Sum { out, x, y, n } => (4, n, vec![out.into(), x.into(), y.into(), n.into()]),
            E::Matmul { out, a, b, rows, inner, cols, a_transposed, b_transposed } => {
                let flags: [Argument; 2] = [u32::from(a_transposed).into(), u32::from(b_transposed).into()];
                let mut arguments = vec![out.into(), a.into(), b.into(), rows.into(), inner.into(), cols.into()];
                arguments.extend(flags);
                (5, rows.saturating_mul(cols), arguments)
            }
            E::Relu { out, x, n } => (6, n, vec![out.into(), x.into(), n.into()]),
            E::ReluBack { grad, activation, n } => (7, n, vec![grad.into(), activation.into(), n.into()]),
            E::Loss { grad, loss, y, target, n } => {
                (8, n, vec![grad.into(), loss.into(), y.into(), target.into(), n.into()])
            }
            E::Descend { weight, grad, rate, n } => (9, n, vec![weight.into(), grad.into(), rate.into(), n.into()]),
        };
        let shape = shape(device.hardware(), elements);
        // SAFETY: each list above is the parameter list of the kernel with that index in experiments.cu.
        unsafe { self.module.launch(device, stream, index, shape, &arguments) }
    }
}
