//! What stress needs of a device beyond streams and kernels.

use gpupool_device::{Address, StreamHandle, Workbench};
use gpupool_sim_device::SimDevice;

/// A device that stress runs on. What a device cannot do it need not.
pub trait StressDevice: Workbench {
    /// What a command line calls the device.
    fn label(&self) -> String {
        format!("cuda:{}", self.ordinal())
    }

    /// The bytes were handed to an owner, for use on `stream`.
    fn own(&self, _start: Address, _bytes: u64, _tag: u64, _stream: StreamHandle) {}

    /// The bytes belong to nobody from now on.
    fn disown(&self, _start: Address, _bytes: u64) {}

    /// Does up to `steps` pieces of work. A real device needs no telling.
    fn progress(&self, _steps: u32) {}

    /// What the device itself found wrong, in words.
    fn findings(&self) -> Vec<String> {
        Vec::new()
    }

    /// Does once what a run does many times, on as many streams, so that what a driver takes for itself is taken before memory in use is
    /// compared.
    fn warm_up(&self, _streams: u32) {}

    /// Bytes of memory that are taken, if the device knows its own from others'.
    fn memory_in_use(&self) -> Option<u64> {
        None
    }
}

impl StressDevice for SimDevice {
    fn label(&self) -> String {
        "sim".to_owned()
    }

    fn own(&self, start: Address, bytes: u64, tag: u64, stream: StreamHandle) {
        Self::own(self, start, bytes, tag, stream);
    }

    fn disown(&self, start: Address, bytes: u64) {
        Self::disown(self, start, bytes);
    }

    fn progress(&self, steps: u32) {
        for _ in 0..steps {
            if !self.step() {
                break;
            }
        }
    }

    fn findings(&self) -> Vec<String> {
        let mut found: Vec<String> = self.reports().iter().map(ToString::to_string).collect();
        let kept = found.len() as u64;
        let more = self.reports_found().saturating_sub(kept);
        if more > 0 {
            found.push(format!("and {more} more findings of the device"));
        }
        found
    }

    fn memory_in_use(&self) -> Option<u64> {
        Some(Self::memory_in_use(self))
    }
}
