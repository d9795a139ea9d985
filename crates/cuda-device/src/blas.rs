//! Matrix products by cuBLAS, which is found at run time, with a workspace of ours: a product in a capture takes no memory of its own.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, OnceLock};

use gpupool_device::{Address, Call, DriverError, Memory, StreamHandle};
use libloading::Library;
use parking_lot::Mutex;

use crate::CudaDevice;
use crate::device::StreamRef;
use crate::kernels::library_names;

/// Why there is no product.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlasError {
    /// The library is not on this machine.
    #[error(
        "no cuBLAS library on this machine (looked for libcublas in the loader's path, CUDA_HOME and /usr/local/cuda)"
    )]
    NoLibrary,
    /// cuBLAS said no.
    #[error("{call} returned {code}")]
    Failed {
        /// Its function.
        call: &'static str,
        /// Its status.
        code: i32,
    },
    /// The driver said no.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// More than cuBLAS can count.
    #[error("a product of {rows} x {inner} x {cols} is larger than cuBLAS can count")]
    TooLarge {
        /// Rows of the result.
        rows: u64,
        /// Columns of the first factor.
        inner: u64,
        /// Columns of the result.
        cols: u64,
    },
}

type Handle = *mut c_void;

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),* $(,)?);)*) => {
        struct Functions { $($field: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Functions {
            /// # Safety
            ///
            /// `library` is cuBLAS and stays loaded.
            unsafe fn resolve(library: &Library) -> Option<Self> {
                Some(Self { $(
                    // SAFETY: the caller says that this is cuBLAS, whose functions of these names have these signatures.
                    $field: *unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> c_int>($symbol) }.ok()?,
                )* })
            }
        }
    };
}

functions! {
    create = b"cublasCreate_v2" (*mut Handle);
    destroy = b"cublasDestroy_v2" (Handle);
    set_stream = b"cublasSetStream_v2" (Handle, *mut c_void);
    set_workspace = b"cublasSetWorkspace_v2" (Handle, *mut c_void, usize);
    sgemm = b"cublasSgemm_v2" (Handle, c_int, c_int, c_int, c_int, c_int, *const f32, *const f32, c_int, *const f32, c_int,
        *const f32, *mut f32, c_int);
}

fn functions() -> Result<&'static Functions, BlasError> {
    static FOUND: OnceLock<Option<Functions>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        // SAFETY: loading a library runs its initialisers; the names are cuBLAS's, which has harmless ones.
        let library = library_names("libcublas").iter().find_map(|name| unsafe { Library::new(name) }.ok())?;
        // SAFETY: what carries cuBLAS's name is cuBLAS, and it is never closed.
        let functions = unsafe { Functions::resolve(&library) };
        std::mem::forget(library);
        functions
    });
    found.as_ref().ok_or(BlasError::NoLibrary)
}

/// A product of row-major matrices of `f32`: `out` is `rows` x `cols`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Product {
    /// Where the result goes.
    pub out: Address,
    /// The first factor, `rows` x `inner`, or its transpose.
    pub a: Address,
    /// The second factor, `inner` x `cols`, or its transpose.
    pub b: Address,
    /// Rows of the result.
    pub rows: u64,
    /// What is summed over.
    pub inner: u64,
    /// Columns of the result.
    pub cols: u64,
    /// Whether `a` is stored as `inner` x `rows`.
    pub a_transposed: bool,
    /// Whether `b` is stored as `cols` x `inner`.
    pub b_transposed: bool,
}

/// cuBLAS on one stream, with a workspace.
pub struct Blas {
    /// Locked while it is used: cuBLAS does not lock it.
    handle: Mutex<Handle>,
    functions: &'static Functions,
    /// Kept as long as cuBLAS may submit to it.
    _stream: StreamRef,
    device: Arc<CudaDevice>,
    _workspace: Box<dyn Memory + Send>,
}

// SAFETY: a cuBLAS handle may be used from any thread, by one at a time: the lock sees to that. The stream's pointer is only kept.
unsafe impl Send for Blas {}
// SAFETY: as for `Send`.
unsafe impl Sync for Blas {}

impl std::fmt::Debug for Blas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Blas(device {})", self.device.ordinal)
    }
}

impl Blas {
    /// cuBLAS on `stream`. Products there use `workspace`, a block of that stream, and so must nobody else: 32 MiB is what cuBLAS asks for on
    /// a Hopper GPU. Takes memory of the driver's for itself once, so not while a capture is open.
    ///
    /// # Errors
    ///
    /// [`BlasError`].
    pub fn new(
        device: &Arc<CudaDevice>,
        stream: StreamHandle,
        workspace: impl Memory + Send + 'static,
    ) -> Result<Self, BlasError> {
        let functions = functions()?;
        let held = device.stream(Call::Other, stream)?;
        let _current = device.enter(Call::Other)?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: cublasCreate writes one handle, for the current context.
        check("cublasCreate", unsafe { (functions.create)(&mut handle) })?;
        let raw = held.raw.cast::<c_void>();
        let (address, bytes) = (workspace.address().0 as *mut c_void, workspace.bytes() as usize);
        let this = Self {
            handle: Mutex::new(handle),
            functions,
            _stream: held,
            device: Arc::clone(device),
            _workspace: Box::new(workspace),
        };
        // SAFETY: the handle is live, the stream is one of the context, and both are kept. The workspace comes after the stream, which resets it.
        unsafe {
            check("cublasSetStream", (functions.set_stream)(handle, raw))?;
            check("cublasSetWorkspace", (functions.set_workspace)(handle, address, bytes))?;
        }
        Ok(this)
    }

    /// Submits a product, or records it in a capture.
    ///
    /// # Errors
    ///
    /// [`BlasError`].
    pub fn multiply(&self, product: &Product) -> Result<(), BlasError> {
        let Product { out, a, b, rows, inner, cols, a_transposed, b_transposed } = *product;
        let too_large = |_| BlasError::TooLarge { rows, inner, cols };
        let int = |n: u64| c_int::try_from(n).map_err(too_large);
        let (m, n, k) = (int(cols)?, int(rows)?, int(inner)?);
        let (one, zero) = (1.0_f32, 0.0_f32);
        let _current = self.device.enter(Call::Other)?;
        let handle = self.handle.lock();
        // cuBLAS counts by columns, where a row-major matrix is its own transpose: out' = b' a'.
        let (lda, ldb) = (if a_transposed { n } else { k }, if b_transposed { k } else { m });
        // SAFETY: the handle is live and locked; numbers are read from here before it returns. Addresses that are wrong are the GPU's fault to
        // report, no harm to the host.
        let code = unsafe {
            (self.functions.sgemm)(
                *handle,
                c_int::from(b_transposed),
                c_int::from(a_transposed),
                m,
                n,
                k,
                &one,
                b.0 as *const f32,
                ldb,
                a.0 as *const f32,
                lda,
                &zero,
                out.0 as *mut f32,
                m,
            )
        };
        check("cublasSgemm", code)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        if crate::process::is_forked_child() {
            return;
        }
        let Ok(_current) = self.device.enter(Call::Other) else { return };
        // SAFETY: the handle is live, and nobody uses it any more.
        let _gone = unsafe { (self.functions.destroy)(*self.handle.get_mut()) };
    }
}

fn check(call: &'static str, code: c_int) -> Result<(), BlasError> {
    if code == 0 { Ok(()) } else { Err(BlasError::Failed { call, code }) }
}
