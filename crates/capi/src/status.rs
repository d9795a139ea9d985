//! How a call went: a status, and the last error in words; and the border that no panic crosses.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use gpupool::config::ConfigError;
use gpupool::device::DriverError;
use gpupool::graphs::{CaptureError, LaunchError};
use gpupool::{AllocError, FreeError, PoolError};

/// How a call went.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// It did what it says.
    Ok = 0,
    /// An argument makes no sense: a null pointer, a text that cannot be read, a setting that contradicts another.
    InvalidArgument = 1,
    /// There is no memory. The last error says where it is.
    OutOfMemory = 2,
    /// The address is not the start of a live block of this allocator: freed before, inside a block, or from elsewhere.
    NotLive = 3,
    /// The handle names nothing (any more), or something of another kind.
    UnknownHandle = 4,
    /// A call about a pool was refused.
    Pool = 5,
    /// A capture could not be begun, ended or adopted; or the request is on a stream whose capture nobody announced.
    Capture = 6,
    /// A launch was refused.
    Launch = 7,
    /// A driver call failed.
    Driver = 8,
    /// There is no such device, or no driver.
    Unavailable = 9,
    /// A file could not be written.
    Io = 10,
    /// A fault in gpupool itself, caught at the border. Please report it.
    Internal = 11,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(Status::InvalidArgument, text)
    }

    fn of_panic(payload: &(dyn Any + Send)) -> Self {
        let said = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
        let said = said.or_else(|| payload.downcast_ref::<String>().cloned());
        let said = said.unwrap_or_else(|| "no message".to_owned());
        Self::new(Status::Internal, format!("a fault in gpupool was caught at its C border: {said}"))
    }

    /// Makes this the calling thread's last error.
    pub(crate) fn note(self) -> Status {
        let status = self.status;
        // A text with a zero in it is cut there, as C would.
        let text = CString::new(self.text).unwrap_or_else(|e| {
            let at = e.nul_position();
            let mut bytes = e.into_vec();
            bytes.truncate(at);
            CString::new(bytes).unwrap_or_default()
        });
        // While the thread ends there is nowhere to keep it; the status is returned all the same.
        let _ended = LAST.try_with(|last| *last.borrow_mut() = Some((status, text)));
        status
    }
}

thread_local! {
    static LAST: RefCell<Option<(Status, CString)>> = const { RefCell::new(None) };
}

/// Runs `call`, and gives its value or notes why there is none. Nothing unwinds out of it.
pub(crate) fn caught<T>(call: impl FnOnce() -> Result<T, Failure>) -> Result<T, Status> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(failure)) => Err(failure.note()),
        Err(payload) => {
            let failure = Failure::of_panic(&*payload);
            // Dropping what was thrown could panic again.
            std::mem::forget(payload);
            Err(failure.note())
        }
    }
}

/// As [`caught`], for calls with no value but how they went.
pub(crate) fn guard(call: impl FnOnce() -> Result<(), Failure>) -> Status {
    caught(call).err().unwrap_or(Status::Ok)
}

/// The status of the calling thread's last failed call; `GPUPOOL_STATUS_OK` if none has failed. A call that succeeds does not change it.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_last_status() -> Status {
    LAST.try_with(|last| last.borrow().as_ref().map_or(Status::Ok, |(status, _)| *status)).unwrap_or(Status::Ok)
}

/// What went wrong in the calling thread's last failed call: what was asked, what was there, what to try. Empty if none has failed.
/// Valid until the next call that fails on this thread, or the thread's end.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_last_error() -> *const c_char {
    const NONE: &CStr = c"";
    LAST.try_with(|last| last.borrow().as_ref().map_or(NONE.as_ptr(), |(_, text)| text.as_ptr()))
        .unwrap_or(NONE.as_ptr())
}

/// The calling thread's last error, for messages of our own.
pub(crate) fn last_text() -> String {
    let last = LAST.try_with(|last| last.borrow().as_ref().map(|(_, text)| text.to_string_lossy().into_owned()));
    last.ok().flatten().unwrap_or_default()
}

impl From<ConfigError> for Failure {
    fn from(e: ConfigError) -> Self {
        Self::argument(e.to_string())
    }
}

impl From<DriverError> for Failure {
    fn from(e: DriverError) -> Self {
        let status = if e.is_out_of_memory() { Status::OutOfMemory } else { Status::Driver };
        Self::new(status, e.to_string())
    }
}

impl From<PoolError> for Failure {
    fn from(e: PoolError) -> Self {
        Self::new(Status::Pool, e.to_string())
    }
}

impl From<FreeError> for Failure {
    fn from(e: FreeError) -> Self {
        let status = match e {
            FreeError::NotLive { .. } => Status::NotLive,
            _ => Status::InvalidArgument,
        };
        Self::new(status, e.to_string())
    }
}

impl From<AllocError> for Failure {
    fn from(e: AllocError) -> Self {
        let status = match &e {
            AllocError::OutOfMemory(_) | AllocError::Rejected { .. } | AllocError::CannotReserve { .. } => {
                Status::OutOfMemory
            }
            AllocError::Driver(e) if e.is_out_of_memory() => Status::OutOfMemory,
            AllocError::Driver(_) => Status::Driver,
            AllocError::Pool(_) => Status::Pool,
            AllocError::PoolInCapture { .. }
            | AllocError::UnknownCapture { .. }
            | AllocError::InvalidatedCapture { .. } => Status::Capture,
            _ => Status::InvalidArgument,
        };
        Self::new(status, e.to_string())
    }
}

impl From<CaptureError> for Failure {
    fn from(e: CaptureError) -> Self {
        match e {
            CaptureError::Alloc(e) => e.into(),
            CaptureError::Driver(e) => e.into(),
            e => Self::new(Status::Capture, e.to_string()),
        }
    }
}

impl From<LaunchError> for Failure {
    fn from(e: LaunchError) -> Self {
        match e {
            LaunchError::Driver(e) => e.into(),
            e => Self::new(Status::Launch, e.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: the pointer is this thread's last error, and nothing fails here before it is copied.
        unsafe { CStr::from_ptr(gpupool_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_and_its_message_the_last_error() {
        assert_eq!((gpupool_last_status(), last().as_str()), (Status::Ok, ""));
        assert_eq!(guard(|| panic!("index {} of 3", 7)), Status::Internal);
        assert!(last().contains("index 7 of 3"), "{}", last());
        struct Loud;
        impl Drop for Loud {
            fn drop(&mut self) {
                panic!("again");
            }
        }
        assert_eq!(guard(|| std::panic::panic_any(Loud)), Status::Internal);
        assert!(last().contains("no message"));
    }

    #[test]
    fn the_last_error_is_the_threads_own_and_stays_until_the_next_failure() {
        assert_eq!(guard(|| Err(Failure::argument("one\0two"))), Status::InvalidArgument);
        assert_eq!(guard(|| Ok(())), Status::Ok);
        assert_eq!((gpupool_last_status(), last().as_str()), (Status::InvalidArgument, "one"));
        std::thread::spawn(|| assert_eq!(gpupool_last_status(), Status::Ok)).join().unwrap();
    }
}
