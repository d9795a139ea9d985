//! The memory that the driver keeps for graphs with memory nodes, one pool a device.

use std::ffi::{c_int, c_void};

use gpupool_device::{Call, DriverPoolFigures, DriverResult};

use crate::CudaDevice;
use crate::error::check;

/// `CU_GRAPH_MEM_ATTR_…`: used now, used at most, reserved now, reserved at most.
const FIGURES: [c_int; 4] = [0, 1, 2, 3];

impl CudaDevice {
    /// What graphs' memory nodes hold of this device.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn graph_memory(&self) -> DriverResult<DriverPoolFigures> {
        let _current = self.enter(Call::Other)?;
        let mut values = [0_u64; 4];
        for (attribute, value) in FIGURES.into_iter().zip(&mut values) {
            // SAFETY: cuDeviceGetGraphMemAttribute writes a cuuint64_t.
            let code = unsafe {
                (self.driver.graph_mem_get)(self.context.device, attribute, std::ptr::from_mut(value).cast::<c_void>())
            };
            check(Call::Other, code)?;
        }
        let [used, used_high, reserved, reserved_high] = values;
        Ok(DriverPoolFigures { reserved, reserved_high, used, used_high })
    }

    /// Lowers both high marks to what is now.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn reset_graph_memory_high(&self) -> DriverResult<()> {
        let _current = self.enter(Call::Other)?;
        for attribute in [FIGURES[1], FIGURES[3]] {
            let mut zero = 0_u64;
            // SAFETY: cuDeviceSetGraphMemAttribute reads a cuuint64_t, which must be 0.
            let code = unsafe {
                (self.driver.graph_mem_set)(
                    self.context.device,
                    attribute,
                    std::ptr::from_mut(&mut zero).cast::<c_void>(),
                )
            };
            check(Call::Other, code)?;
        }
        Ok(())
    }

    /// Gives back what no graph uses. *Capture*: permitted.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn trim_graph_memory(&self) -> DriverResult<()> {
        let _current = self.enter(Call::Other)?;
        // SAFETY: cuDeviceGraphMemTrim takes a device.
        check(Call::Other, unsafe { (self.driver.graph_mem_trim)(self.context.device) })
    }
}
