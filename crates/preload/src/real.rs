//! The driver behind us.

use std::sync::OnceLock;

use crate::lookup::inside;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The driver's library. Ours has another name, so this is never ourselves.
fn library() -> Option<&'static Library> {
    static DRIVER: OnceLock<Option<Library>> = OnceLock::new();
    DRIVER
        .get_or_init(|| {
            // SAFETY: this is the driver's own name; we are linked against it, so it is loaded and no initialiser runs.
            unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }.ok()
        })
        .as_ref()
}

/// An entry point of the driver.
///
/// # Safety
///
/// `T` is the type of the function that the driver has under this name (which ends with a zero).
pub(crate) unsafe fn find<T: Copy>(name: &[u8]) -> Option<T> {
    // SAFETY: the caller knows the type; the library stays loaded as long as the process lives.
    inside(|| unsafe { library()?.get::<T>(name) }.ok().map(|symbol| *symbol))
}
