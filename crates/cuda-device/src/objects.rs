//! What exists: tables of the driver's objects by their number, so that no number that is none reaches the driver.
//!
//! # Invariants
//!
//! * **O1** An object is in its table from the moment its number is given out until a destroy of it succeeds.
//! * **O2** Whoever uses an object holds it (`Arc`); the driver's destroy is called when nobody does, once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpupool_device::{Call, CaptureMode, DriverError, DriverResult};
use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::context::Context;
use crate::driver::{Code, Driver};
use crate::error::check_returned;

/// Parts of a table, each with a lock of its own: threads on different objects rarely meet.
const SHARDS: usize = 16;

/// A kind of object.
pub(crate) trait Kind: Send + Sync {
    /// The call that destroys one.
    const DESTROY: Call;

    /// Destroys the object `raw`, in the current context.
    ///
    /// # Safety
    ///
    /// `raw` is a live object of this kind, and nobody uses it any more.
    unsafe fn destroy(&self, driver: &Driver, raw: u64) -> Code;
}

/// An object of the driver's.
#[derive(Debug)]
pub(crate) struct Object<K: Kind> {
    pub(crate) raw: u64,
    pub(crate) kind: K,
    context: Arc<Context>,
    /// Nothing is left to destroy: that was done, or it is not ours to do.
    released: AtomicBool,
}

impl<K: Kind> Object<K> {
    /// An object that is ours to destroy.
    pub(crate) fn new(context: &Arc<Context>, raw: u64, kind: K) -> Self {
        Self { raw, kind, context: Arc::clone(context), released: AtomicBool::new(false) }
    }

    /// An object that somebody else destroys.
    pub(crate) fn borrowed(context: &Arc<Context>, raw: u64, kind: K) -> Self {
        Self { raw, kind, context: Arc::clone(context), released: AtomicBool::new(true) }
    }

    fn destroy(&self) -> DriverResult<()> {
        if self.released.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let code = match self.context.enter(K::DESTROY) {
            // SAFETY: 1. `raw` was made by the driver and put into the table, and `released` lets this be called once (O1, O2).
            // 2. The caller is the last who holds the object. 3. Its context is current.
            Ok(_current) => unsafe { self.kind.destroy(self.context.driver, self.raw) },
            Err(error) => error.code.cast_signed(),
        };
        let result = check_returned(K::DESTROY, code);
        self.released.store(result.is_ok(), Ordering::Release);
        result
    }
}

impl<K: Kind> Drop for Object<K> {
    fn drop(&mut self) {
        if self.released.load(Ordering::Acquire) {
            return;
        }
        // Whoever dropped this last may be capturing: relaxed, no destroy breaks a capture.
        let mut mode = mode_number(CaptureMode::Relaxed);
        let exchange = self.context.driver.exchange_mode;
        let forked = crate::process::is_forked_child();
        // SAFETY: cuThreadExchangeStreamCaptureMode reads and writes one int.
        let exchanged = !forked && unsafe { exchange(&mut mode) } == 0;
        let _lost = self.destroy();
        if exchanged {
            // SAFETY: as above; the thread's own mode goes back.
            let _relaxed = unsafe { exchange(&mut mode) };
        }
    }
}

/// The driver's number for a capture mode.
pub(crate) fn mode_number(mode: CaptureMode) -> std::ffi::c_int {
    match mode {
        CaptureMode::Global => 0,
        CaptureMode::ThreadLocal => 1,
        CaptureMode::Relaxed => 2,
    }
}

/// All objects of one kind.
#[derive(Debug)]
pub(crate) struct Table<K: Kind> {
    shards: [Mutex<HashMap<u64, Arc<Object<K>>>>; SHARDS],
}

impl<K: Kind> Default for Table<K> {
    fn default() -> Self {
        Self { shards: std::array::from_fn(|_| Mutex::default()) }
    }
}

impl<K: Kind> Table<K> {
    fn shard(&self, raw: u64) -> &Mutex<HashMap<u64, Arc<Object<K>>>> {
        // Handles are pointers: their lowest bits are all the same.
        let spread = raw.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.shards[spread as usize % SHARDS]
    }

    pub(crate) fn get(&self, raw: u64) -> Option<Arc<Object<K>>> {
        self.shard(raw).lock().get(&raw).cloned()
    }

    /// Adds an object. One that was there under this number is gone for the driver, or it would not give the number again.
    pub(crate) fn insert(&self, object: Object<K>) -> Arc<Object<K>> {
        let object = Arc::new(object);
        let before = self.shard(object.raw).lock().insert(object.raw, Arc::clone(&object));
        if let Some(before) = before {
            before.released.store(true, Ordering::Release);
        }
        object
    }

    /// Takes an object out without destroying it.
    pub(crate) fn forget(&self, raw: u64) {
        let taken = self.shard(raw).lock().remove(&raw);
        if let Some(taken) = taken {
            taken.released.store(true, Ordering::Release);
        }
    }

    /// Destroys an object, at once if nobody else uses it; one whose destroy fails stays.
    ///
    /// # Errors
    ///
    /// `unknown` if it is not there; the driver's.
    pub(crate) fn destroy(&self, raw: u64, unknown: u32) -> DriverResult<()> {
        let taken = self.shard(raw).lock().remove(&raw);
        let taken = taken.ok_or(DriverError::new(K::DESTROY, unknown))?;
        // Others who hold it destroy it when they are done.
        let Some(object) = Arc::into_inner(taken) else { return Ok(()) };
        let result = object.destroy();
        if result.is_err() {
            self.shard(raw).lock().insert(raw, Arc::new(object));
        }
        result
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|s| s.lock().len()).sum()
    }
}
