//! What libraries look up in the driver's own file, past everything in front of it: the CUDA runtime, and with it cuBLAS, opens the driver
//! by name and asks `dlsym` for its functions. So `dlsym` is ours, too, and gives our function where the driver's own would have been the
//! answer. Every other answer is the real one's, which is jumped to: it sees the caller as if nobody stood between.

// Elsewhere only what keeps our own lookups apart is used.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports))]

#[cfg(target_arch = "x86_64")]
use std::arch::naked_asm;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::{hooks, process, real};

/// The real one; null until the first lookup.
static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

thread_local! {
    /// Whether this thread looks for itself.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `look`, whose lookups find the driver's own functions.
pub(crate) fn inside<R>(look: impl FnOnce() -> R) -> R {
    struct Back(bool);
    impl Drop for Back {
        fn drop(&mut self) {
            // While the thread ends there is nobody left to look.
            let _ended = INSIDE.try_with(|inside| inside.set(self.0));
        }
    }
    let _back = Back(INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true));
    look()
}

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// The dynamic linker's function of this name.
///
/// # Safety
///
/// As dlsym(3) says.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: saves the two arguments, with the stack aligned as a call demands; asks; then returns what it got, or restores the arguments and
    // jumps to the real function, which returns to our caller. A caller may have changed no register that this uses beyond what a call may.
    naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {ours}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jne 2f",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "je 2f",
        "jmp rax",
        "2:",
        "ret",
        ours = sym in_place_of,
        real = sym REAL,
    )
}

/// Our function, where the driver's would be the answer; null for everything else.
#[cfg(target_arch = "x86_64")]
unsafe extern "C" fn in_place_of(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
    const NEXT: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);
    let none = std::ptr::null_mut();
    let mut real = REAL.load(Ordering::Acquire);
    if real.is_null() {
        // SAFETY: asks for the C library's own function, by the versions that it has had.
        real = unsafe {
            let newer = dlvsym(NEXT, c"dlsym".as_ptr(), c"GLIBC_2.34".as_ptr());
            if newer.is_null() { dlvsym(NEXT, c"dlsym".as_ptr(), c"GLIBC_2.2.5".as_ptr()) } else { newer }
        };
        REAL.store(real, Ordering::Release);
    }
    // The two handles that are no library's find ours by themselves, or mean what comes after it.
    if real.is_null() || name.is_null() || handle.is_null() || handle == NEXT {
        return none;
    }
    // SAFETY: the caller says that it is a string.
    let wanted = unsafe { CStr::from_ptr(name) };
    if !wanted.to_bytes().starts_with(b"cu") || INSIDE.try_with(Cell::get).unwrap_or(true) {
        return none;
    }
    let Some(ours) = hooks::named(wanted.to_bytes_with_nul()) else { return none };
    inside(|| {
        // SAFETY: it was found under this name, in the C library.
        let real = unsafe { std::mem::transmute::<*mut c_void, Dlsym>(real) };
        // SAFETY: the caller's own arguments; a symbol's address, whatever it is the address of.
        let (answer, drivers) = unsafe { (real(handle, name), real::find::<*mut c_void>(wanted.to_bytes_with_nul())) };
        let is_the_drivers = !answer.is_null() && Some(answer) == drivers;
        if is_the_drivers && process::serves_libraries() { ours } else { none }
    })
}
