//! The driver's own allocator: stream-ordered allocation from its pools.
//!
//! The pools that [`Device`](gpupool_device::Device) makes are our own, so that their figures are, too; the device's default pool, which
//! other libraries take from, is beside the traits, for experiments that compare with it. *Capture*: on a capturing stream an allocation or free becomes a memory node; on other streams both are unsafe calls, as is
//! trimming.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{CUmemAllocationHandleType, CUmemAllocationType, CUmemPoolProps, CUmemoryPool};
use gpupool_device::{
    Address, Call, DriverError, DriverPoolFigures, DriverPoolHandle, DriverResult, StreamHandle, code,
};

use crate::CudaDevice;
use crate::context::Context;
use crate::device::location;
use crate::device_impl::size;
use crate::driver::{Code, Driver};
use crate::error::{check, check_returned};
use crate::objects::{Kind, Object};

/// `CU_MEMPOOL_ATTR_…`.
mod attribute {
    use std::ffi::c_int;
    pub(super) const RELEASE_THRESHOLD: c_int = 4;
    pub(super) const RESERVED: c_int = 5;
    pub(super) const RESERVED_HIGH: c_int = 6;
    pub(super) const USED: c_int = 7;
    pub(super) const USED_HIGH: c_int = 8;
}

/// A pool that we made.
#[derive(Debug)]
pub(crate) struct PoolKind;

impl Kind for PoolKind {
    const DESTROY: Call = Call::MemPoolDestroy;
    // SAFETY: the trait's contract is that the pool is live and unused.
    unsafe fn destroy(&self, driver: &Driver, raw: u64) -> Code {
        // SAFETY: made by cuMemPoolCreate, and no block of it is left (`destroy_pool`).
        unsafe { (driver.pool_destroy)(raw as CUmemoryPool) }
    }
}

/// One of the driver's memory pools on a device, for its figures and switches.
#[derive(Clone, Debug)]
pub struct DriverPool {
    context: Arc<Context>,
    raw: CUmemoryPool,
}

// SAFETY: a CUmemoryPool is a name that the driver locks; the pointer is never dereferenced here.
unsafe impl Send for DriverPool {}
// SAFETY: as for `Send`.
unsafe impl Sync for DriverPool {}

/// What [`Device`](gpupool_device::Device) asks of pools.
impl CudaDevice {
    pub(crate) fn make_pool(&self) -> DriverResult<DriverPoolHandle> {
        let call = Call::MemPoolCreate;
        let _current = self.enter(call)?;
        let properties = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: location(self.context.device),
            win32SecurityAttributes: std::ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut raw: CUmemoryPool = std::ptr::null_mut();
        // SAFETY: cuMemPoolCreate reads the properties and writes one handle.
        check(call, unsafe { (self.driver.pool_create)(&mut raw, &properties) })?;
        let pool = DriverPool { context: Arc::clone(&self.context), raw };
        self.pools.insert(Object::new(&self.context, raw as u64, PoolKind));
        pool.set(attribute::RELEASE_THRESHOLD, u64::MAX)?;
        Ok(DriverPoolHandle(raw as u64))
    }

    /// A pool of ours, held while it is used.
    fn held_pool(&self, call: Call, pool: DriverPoolHandle) -> DriverResult<(Arc<Object<PoolKind>>, DriverPool)> {
        let held = self.pools.get(pool.0).ok_or(DriverError::new(call, code::INVALID_VALUE))?;
        let raw = held.raw as CUmemoryPool;
        Ok((held, DriverPool { context: Arc::clone(&self.context), raw }))
    }

    pub(crate) fn pool_figures(&self, pool: DriverPoolHandle) -> DriverResult<DriverPoolFigures> {
        let (_held, pool) = self.held_pool(Call::MemPoolGetAttribute, pool)?;
        pool.figures()
    }

    pub(crate) fn trim_pool(&self, pool: DriverPoolHandle, keep: u64) -> DriverResult<()> {
        let (_held, pool) = self.held_pool(Call::MemPoolTrimTo, pool)?;
        pool.trim(keep)
    }

    /// Destroys a pool that has no blocks any more. One that has is refused: driver 580.159 crashes now and then in cuMemPoolDestroy there.
    pub(crate) fn destroy_pool(&self, pool: DriverPoolHandle) -> DriverResult<()> {
        let call = Call::MemPoolDestroy;
        let held = self.held_pool(call, pool)?;
        if held.1.get(attribute::USED)? > 0 {
            // A block that cuMemFree took counts as used for good, but its memory goes.
            held.1.trim(0)?;
            if held.1.get(attribute::RESERVED)? > 0 {
                return Err(DriverError::new(call, code::INVALID_VALUE));
            }
        }
        drop(held);
        self.pools.destroy(pool.0, code::INVALID_VALUE)
    }

    pub(crate) fn alloc_from(&self, pool: DriverPoolHandle, bytes: u64, stream: StreamHandle) -> DriverResult<Address> {
        let call = Call::MemAllocAsync;
        // The driver gives a null address for nothing.
        if bytes == 0 {
            return Err(DriverError::new(call, code::INVALID_VALUE));
        }
        let (held, stream) = (self.held_pool(call, pool)?.0, self.stream(call, stream)?);
        let _current = self.enter(call)?;
        let (mut address, raw) = (0, held.raw as CUmemoryPool);
        // SAFETY: cuMemAllocFromPoolAsync takes a pool and a stream, both held, and writes one address.
        check(call, unsafe { (self.driver.mem_alloc_from_pool)(&mut address, size(call, bytes)?, raw, stream.raw) })?;
        Ok(Address(address))
    }
}

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
        let call = Call::MemAllocAsync;
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
        let call = Call::MemFreeAsync;
        let stream = self.stream(call, stream)?;
        let _current = self.enter(call)?;
        // SAFETY: cuMemFreeAsync takes any address and refuses one that is no block of a pool.
        check_returned(call, unsafe { (self.driver.mem_free_async)(address.0, stream.raw) })
    }
}

impl DriverPool {
    fn get(&self, attribute: c_int) -> DriverResult<u64> {
        let mut value = 0_u64;
        let call = Call::MemPoolGetAttribute;
        let _current = self.context.enter(call)?;
        // SAFETY: cuMemPoolGetAttribute writes a cuuint64_t for each attribute that is asked for here.
        let code = unsafe {
            (self.context.driver.pool_get)(self.raw, attribute, std::ptr::from_mut(&mut value).cast::<c_void>())
        };
        check(call, code).map(|()| value)
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
    pub fn figures(&self) -> DriverResult<DriverPoolFigures> {
        Ok(DriverPoolFigures {
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
        let call = Call::MemPoolTrimTo;
        let _current = self.context.enter(call)?;
        // SAFETY: cuMemPoolTrimTo takes a pool of a live context.
        check(call, unsafe { (self.context.driver.pool_trim)(self.raw, size(call, keep)?) })
    }
}
