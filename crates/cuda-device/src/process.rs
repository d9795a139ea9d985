//! Whether this process is a forked child of the one that opened the driver. A child inherits handles that mean nothing to it.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static FORKED: AtomicBool = AtomicBool::new(false);

/// Whether the process was forked after the driver was opened.
pub(crate) fn is_forked_child() -> bool {
    FORKED.load(Relaxed)
}

/// From now on a forked child knows that it is one.
pub(crate) fn watch_forks() {
    #[cfg(unix)]
    {
        unsafe extern "C" fn in_child() {
            FORKED.store(true, Relaxed);
        }
        unsafe extern "C" {
            fn pthread_atfork(
                prepare: Option<unsafe extern "C" fn()>,
                parent: Option<unsafe extern "C" fn()>,
                child: Option<unsafe extern "C" fn()>,
            ) -> std::ffi::c_int;
        }
        // SAFETY: 1. The signature is POSIX's. 2. The handler only stores to an atomic, which is safe after a fork in a process of
        // several threads. 3. It is part of this library, and POSIX lets handlers stay registered as long as the process lives; a
        // library that is unloaded takes its handlers along (glibc ties them to the object that registered them).
        let _out_of_memory = unsafe { pthread_atfork(None, None, Some(in_child)) };
    }
}
