//! The driver's own allocator: stream-ordered allocation from its pools.
//!
//! These calls are beside the device traits: policies do not use them. They serve the backend that is the driver's pool, and what compares
//! with it. *Capture*: on a capturing stream an allocation or free becomes a memory node; on other streams both are unsafe calls, as is
//! trimming.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys::CUmemoryPool;
use gpupool_device::{Address, Call, DriverResult, StreamHandle};

use crate::CudaDevice;
use crate::context::Context;
use crate::device_impl::size;
use crate::error::{check, check_returned};

/// What a pool holds, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolFigures {
    /// Held from the device now.
    pub reserved: u64,
    /// The most that was held since the last reset.
    pub reserved_high: u64,
    /// In blocks now.
    pub used: u64,
    /// The most that was in blocks since the last reset.
    pub used_high: u64,
}

/// `CU_MEMPOOL_ATTR_…`.
mod attribute {
    use std::ffi::c_int;
    pub(super) const RELEASE_THRESHOLD: c_int = 4;
    pub(super) const RESERVED: c_int = 5;
    pub(super) const RESERVED_HIGH: c_int = 6;
    pub(super) const USED: c_int = 7;
    pub(super) const USED_HIGH: c_int = 8;
}

/// One of the driver's memory pools on a device: the default one.
#[derive(Clone, Debug)]
pub struct DriverPool {
    context: Arc<Context>,
    raw: CUmemoryPool,
}

// SAFETY: a CUmemoryPool is a name that the driver locks; the pointer is never dereferenced here.
unsafe impl Send for DriverPool {}
// SAFETY: as for `Send`.
unsafe impl Sync for DriverPool {}

impl CudaDevice {
    /// The device's default pool, which `alloc_async` takes from.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn default_pool(&self) -> DriverResult<DriverPool> {
        let _current = self.enter(Call::Other)?;
        let mut raw: CUmemoryPool = std::ptr::null_mut();
        // SAFETY: cuDeviceGetDefaultMemPool writes one handle.
        check(Call::Other, unsafe { (self.driver.default_pool)(&mut raw, self.context.device) })?;
        Ok(DriverPool { context: Arc::clone(&self.context), raw })
    }

    /// Allocates from the default pool in stream order.
    ///
    /// # Errors
    ///
    /// `OUT_OF_MEMORY`; the driver's.
    pub fn alloc_async(&self, stream: StreamHandle, bytes: u64) -> DriverResult<Address> {
        let call = Call::MemAlloc;
        let stream = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        let mut address = 0;
        // SAFETY: cuMemAllocAsync takes a stream, which is held, and writes one address.
        check(call, unsafe { (self.driver.mem_alloc_async)(&mut address, size(call, bytes)?, stream.raw) })?;
        Ok(Address(address))
    }

    /// Frees in stream order what [`alloc_async`](Self::alloc_async) or a graph's memory node gave.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for any other address, for one that a graph allocates and no launch has, and on a capturing stream for a block from
    /// outside the capture.
    pub fn free_async(&self, stream: StreamHandle, address: Address) -> DriverResult<()> {
        let call = Call::MemFree;
        let stream = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        // SAFETY: cuMemFreeAsync takes any address and refuses one that is no block of a pool.
        check_returned(call, unsafe { (self.driver.mem_free_async)(address.0, stream.raw) })
    }
}

impl DriverPool {
    fn get(&self, attribute: c_int) -> DriverResult<u64> {
        let mut value = 0_u64;
        let _current = self.context.enter(Call::Other)?;
        // SAFETY: cuMemPoolGetAttribute writes a cuuint64_t for each attribute that is asked for here.
        let code = unsafe {
            (self.context.driver.pool_get)(self.raw, attribute, std::ptr::from_mut(&mut value).cast::<c_void>())
        };
        check(Call::Other, code).map(|()| value)
    }

    fn set(&self, attribute: c_int, mut value: u64) -> DriverResult<()> {
        let _current = self.context.enter(Call::Other)?;
        // SAFETY: cuMemPoolSetAttribute reads a cuuint64_t for each attribute that is set here.
        check(Call::Other, unsafe {
            (self.context.driver.pool_set)(self.raw, attribute, std::ptr::from_mut(&mut value).cast::<c_void>())
        })
    }

    /// What it holds.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn figures(&self) -> DriverResult<PoolFigures> {
        Ok(PoolFigures {
            reserved: self.get(attribute::RESERVED)?,
            reserved_high: self.get(attribute::RESERVED_HIGH)?,
            used: self.get(attribute::USED)?,
            used_high: self.get(attribute::USED_HIGH)?,
        })
    }

    /// Lowers both high marks to what is now.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn reset_high(&self) -> DriverResult<()> {
        self.set(attribute::RESERVED_HIGH, 0)?;
        self.set(attribute::USED_HIGH, 0)
    }

    /// Bytes that the pool keeps when a stream, event or the device is waited for; what is free beyond goes back to the device then.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn release_threshold(&self) -> DriverResult<u64> {
        self.get(attribute::RELEASE_THRESHOLD)
    }

    /// Sets [`release_threshold`](Self::release_threshold); `u64::MAX` keeps everything.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn set_release_threshold(&self, bytes: u64) -> DriverResult<()> {
        self.set(attribute::RELEASE_THRESHOLD, bytes)
    }

    /// Gives back what is free beyond `keep` bytes.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn trim(&self, keep: u64) -> DriverResult<()> {
        let _current = self.context.enter(Call::Other)?;
        // SAFETY: cuMemPoolTrimTo takes a pool of a live context.
        check(Call::Other, unsafe { (self.context.driver.pool_trim)(self.raw, size(Call::Other, keep)?) })
    }
}
