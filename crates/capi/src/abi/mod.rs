//! The exported functions, by what they are about.

pub mod allocator;
pub mod bench;
pub mod blocks;
pub mod captures;
pub mod pools;
pub mod state;

use std::ffi::{CStr, c_char};

use crate::status::Failure;

/// Writes through a C caller's out-pointer.
///
/// # Safety
///
/// `out` is null or valid for a write of `T`.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) -> Result<(), Failure> {
    check_out(out)?;
    // SAFETY: not null, so valid for a write, as the caller says. It may be unaligned in a packed struct of C's.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Refuses a null out-pointer before anything is done that it should have received.
pub(crate) fn check_out<T>(out: *mut T) -> Result<(), Failure> {
    if out.is_null() { Err(Failure::argument("an out-pointer is null")) } else { Ok(()) }
}

/// A C string that must be there.
///
/// # Safety
///
/// As for [`text`].
pub(crate) unsafe fn required<'a>(what: &str, value: *const c_char) -> Result<&'a str, Failure> {
    // SAFETY: the caller says so.
    match unsafe { text(value)? } {
        "" => Err(Failure::argument(format!("{what} is null or empty"))),
        value => Ok(value),
    }
}

/// A C string; empty for null.
///
/// # Safety
///
/// `text` is null or a string that ends with a zero and lives for `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Ok("");
    }
    // SAFETY: not null, so what the caller says it is.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::argument(format!("a text is not UTF-8: {}", text.to_string_lossy())))
}
