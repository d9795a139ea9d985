//! From a result code to an error.

use gpupool_device::{Call, DriverError, DriverResult, code};

use crate::driver::Code;

/// The driver's code as this project's number for it. Codes are not negative; one that were would still be an error.
pub(crate) fn number(code: Code) -> u32 {
    code.unsigned_abs()
}

/// `Ok` for 0.
pub(crate) fn check(call: Call, code: Code) -> DriverResult<()> {
    if code == 0 { Ok(()) } else { Err(DriverError::new(call, number(code))) }
}

/// As [`check`] for calls that give something back: once the driver is gone, or in a forked child, there is nothing to give back to, and
/// that is no failure.
pub(crate) fn check_returned(call: Call, code: Code) -> DriverResult<()> {
    match number(code) {
        code::DEINITIALIZED | code::CONTEXT_DESTROYED | code::FORKED => Ok(()),
        _ => check(call, code),
    }
}
