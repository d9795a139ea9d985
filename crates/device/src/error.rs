//! The one error of this crate: which call failed, and the driver's number for why.

use crate::Call;

/// A driver call failed. Codes stay numbers: a driver newer than this crate may return ones nobody knows here.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[error("{call} failed with code {code} ({})", code::name(*.code))]
pub struct DriverError {
    /// The call that failed.
    pub call: Call,
    /// The driver's result code; see [`code`].
    pub code: u32,
}

/// What a driver call returns.
pub type DriverResult<T> = Result<T, DriverError>;

impl DriverError {
    /// An error of `call` with a driver's `code`.
    #[must_use]
    pub const fn new(call: Call, code: u32) -> Self {
        Self { call, code }
    }

    /// Whether the driver had no memory left.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        self.code == code::OUT_OF_MEMORY
    }
}

/// Result codes of the driver API that gpupool tells apart or the simulated device returns.
pub mod code {
    macro_rules! codes {
        ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
            $($(#[$doc])* pub const $name: u32 = $value;)*

            /// A readable name of a code, `"see cuda.h"` for those not listed here.
            #[must_use]
            pub const fn name(code: u32) -> &'static str {
                match code { $($value => $text,)* _ => "see cuda.h" }
            }
        };
    }

    codes! {
        /// An argument makes no sense: an unknown address, a size of zero, a partial unmap.
        INVALID_VALUE = 1, "invalid value";
        /// No memory left, on the device or under a limit.
        OUT_OF_MEMORY = 2, "out of memory";
        /// The driver was not initialised.
        NOT_INITIALIZED = 3, "not initialized";
        /// The driver is shutting down.
        DEINITIALIZED = 4, "driver shutting down";
        /// No device.
        NO_DEVICE = 100, "no device";
        /// No context is current, or it was destroyed.
        INVALID_CONTEXT = 201, "invalid context";
        /// The context was destroyed.
        CONTEXT_DESTROYED = 709, "context destroyed";
        /// The object is not in a state in which the call makes sense.
        ILLEGAL_STATE = 401, "illegal state";
        /// The handle names nothing.
        INVALID_HANDLE = 400, "invalid handle";
        /// Asynchronous work is not finished. Not a failure of a query.
        NOT_READY = 600, "not ready";
        /// Device memory was touched where nothing is mapped. Sticky.
        ILLEGAL_ADDRESS = 700, "illegal address";
        /// The device or driver cannot do this.
        NOT_SUPPORTED = 801, "not supported";
        /// A capture does not permit this call, which has invalidated the capture.
        CAPTURE_UNSUPPORTED = 900, "not permitted while a stream is capturing";
        /// The capture was invalidated by an earlier call.
        CAPTURE_INVALIDATED = 901, "the capture was invalidated by an earlier call";
        /// Two captures would merge.
        CAPTURE_MERGE = 902, "two captures would merge";
        /// The capture was not begun on this stream.
        CAPTURE_UNMATCHED = 903, "the capture was begun on another stream";
        /// A stream that joined the capture was not joined back.
        CAPTURE_UNJOINED = 904, "a stream that joined the capture was not joined back";
        /// A captured stream would depend on work outside its capture.
        CAPTURE_ISOLATION = 905, "a capturing stream depends on work outside its capture";
        /// A capture would depend on the legacy default stream.
        CAPTURE_IMPLICIT = 906, "a capture would depend on the legacy default stream";
        /// The event's last record was in a capture.
        CAPTURED_EVENT = 907, "the event was recorded in a capture";
        /// A capture that is not relaxed was ended by another thread than its own.
        CAPTURE_WRONG_THREAD = 908, "the capture was begun by another thread";
        /// Anything else.
        UNKNOWN = 999, "unknown error";
        /// Not a driver's code: the simulated device refuses a call whose legality nobody measured.
        UNMEASURED = 0x1_0000, "unmeasured: nobody has asked a real driver whether this is legal";
        /// Not a driver's code: the simulated device was asked to wait for something that can never happen.
        WAIT_NEVER_ENDS = 0x1_0001, "this wait can never end";
        /// Not a driver's code: the process is a forked child, and the device was opened by its parent.
        FORKED = 0x1_0002, "a forked child cannot use the GPU memory and streams of its parent";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_call_and_the_meaning_of_its_code() {
        let e = DriverError::new(Call::MemFree, code::CAPTURE_UNSUPPORTED);
        assert_eq!(e.to_string(), "cuMemFree failed with code 900 (not permitted while a stream is capturing)");
        assert_eq!(
            DriverError::new(Call::Other, 12345).to_string(),
            "other driver call failed with code 12345 (see cuda.h)"
        );
    }

    #[test]
    fn every_call_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> = Call::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), Call::ALL.len());
    }
}
