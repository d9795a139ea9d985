//! A CUDA context: who keeps it, and making it current for the time of a call.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUcontext, CUdevice};
use gpupool_device::{Call, DriverError, DriverResult, code};

use crate::driver::Driver;
use crate::error::check;
use crate::process::is_forked_child;

/// Who keeps the context alive.
#[derive(Debug)]
enum Keeper {
    /// We: one retain of the device's primary context.
    Primary,
    /// cudarc's context, and we hold it.
    Cudarc { _context: Arc<CudaContext> },
    /// The embedder, who promised to.
    Embedder,
}

/// A context and the driver that it belongs to. Held by the device and by every object made in it.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) driver: &'static Driver,
    pub(crate) device: CUdevice,
    raw: CUcontext,
    keeper: Keeper,
}

// SAFETY: a CUcontext is a name that the driver locks internally; every driver function may be called from any thread ("The driver API is
// thread-safe" in the programming guide). The pointer is never dereferenced here.
unsafe impl Send for Context {}
// SAFETY: as for `Send`; `Context` has no interior mutability of its own.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of a device.
    pub(crate) fn primary(driver: &'static Driver, device: CUdevice) -> DriverResult<Self> {
        let mut raw: CUcontext = std::ptr::null_mut();
        // SAFETY: cuDevicePrimaryCtxRetain writes one handle; `device` came from cuDeviceGet.
        check(Call::Other, unsafe { (driver.primary_retain)(&mut raw, device) })?;
        Ok(Self { driver, device, raw, keeper: Keeper::Primary })
    }

    /// Uses a context of cudarc's, and keeps it.
    pub(crate) fn of_cudarc(driver: &'static Driver, context: &Arc<CudaContext>) -> Self {
        let (raw, device) = (context.cu_ctx(), context.cu_device());
        Self { driver, device, raw, keeper: Keeper::Cudarc { _context: Arc::clone(context) } }
    }

    /// Uses a context of the embedder's.
    ///
    /// # Safety
    ///
    /// `raw` is a context of this process's driver, and stays one as long as this value and everything made in it lives.
    pub(crate) unsafe fn borrowed(driver: &'static Driver, raw: CUcontext) -> DriverResult<Self> {
        let mut context = Self { driver, device: 0, raw, keeper: Keeper::Embedder };
        let mut device = 0;
        {
            let _current = context.enter(Call::Other)?;
            // SAFETY: cuCtxGetDevice writes one int; a context is current.
            check(Call::Other, unsafe { (driver.ctx_get_device)(&mut device) })?;
        }
        context.device = device;
        Ok(context)
    }

    pub(crate) fn raw(&self) -> CUcontext {
        self.raw
    }

    /// Makes the context current on the calling thread until the guard is dropped.
    ///
    /// # Errors
    ///
    /// `FORKED` in a forked child; what the driver says when it cannot.
    pub(crate) fn enter(&self, call: Call) -> DriverResult<Current<'_>> {
        if is_forked_child() {
            return Err(DriverError::new(call, code::FORKED));
        }
        let mut current: CUcontext = std::ptr::null_mut();
        // SAFETY: cuCtxGetCurrent writes one handle.
        check(call, unsafe { (self.driver.ctx_get_current)(&mut current) })?;
        let pushed = current != self.raw;
        if pushed {
            // SAFETY: cuCtxPushCurrent takes a live context: the keeper sees to that.
            check(call, unsafe { (self.driver.ctx_push)(self.raw) })?;
        }
        Ok(Current { driver: self.driver, pushed, _thread: PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if matches!(self.keeper, Keeper::Primary) && !is_forked_child() {
            // SAFETY: this undoes the one retain of `primary`. A driver that is shutting down says so, and that is all right.
            let _gone = unsafe { (self.driver.primary_release)(self.device) };
        }
    }
}

/// While this lives, the context is current on the thread that made it.
pub(crate) struct Current<'a> {
    driver: &'a Driver,
    pushed: bool,
    /// The current context is the thread's: the guard stays on it.
    _thread: PhantomData<*mut ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: CUcontext = std::ptr::null_mut();
            // SAFETY: cuCtxPopCurrent takes what `enter` pushed: guards are dropped in reverse order, as they never leave their frame.
            let _gone = unsafe { (self.driver.ctx_pop)(&mut popped) };
        }
    }
}
