//! Statistics and snapshots.

use std::ffi::c_char;
use std::fmt::Write as _;
use std::fs::File;
use std::io::BufWriter;

use super::allocator::gpupool_allocator;
use super::{check_out, put, required};
use crate::handles::ALLOCATORS;
use crate::status::{Failure, Status, guard};

/// One figure by its name in PyTorch's `memory_stats`, such as `reserved_bytes.all.peak`.
///
/// # Safety
///
/// `name` is null or a zero-terminated string, `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_stat(allocator: gpupool_allocator, name: *const c_char, out: *mut i64) -> Status {
    guard(|| {
        // SAFETY: the caller says so.
        let name = unsafe { required("the figure's name", name)? };
        let found = ALLOCATORS.get(allocator)?.stats().into_iter().find(|(key, _)| key == name);
        let none = || Failure::argument(format!("there is no figure `{name}`; gpupool_stats_json lists them all"));
        let (_, value) = found.ok_or_else(none)?;
        // SAFETY: the caller says so.
        unsafe { put(out, value) }
    })
}

/// All figures as one JSON object under PyTorch's names. Writes at most `size` bytes to `buffer`, the last one zero, and the bytes that
/// the whole takes, with the zero, to `needed`. `buffer` may be null if `size` is 0.
///
/// # Safety
///
/// `buffer` is writable for `size` bytes, `needed` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_stats_json(
    allocator: gpupool_allocator,
    buffer: *mut c_char,
    size: usize,
    needed: *mut usize,
) -> Status {
    guard(|| {
        check_out(needed)?;
        let mut json = String::from("{");
        for (at, (name, value)) in ALLOCATORS.get(allocator)?.stats().into_iter().enumerate() {
            // Names are plain letters, digits, dots and underscores. Writing to a string cannot fail.
            let _ = write!(json, "{}\"{name}\":{value}", if at == 0 { "" } else { "," });
        }
        json.push('}');
        if !buffer.is_null() && size > 0 {
            let bytes = json.len().min(size - 1);
            // SAFETY: the buffer has `size` bytes, as the caller says, and no more than that is written; ours does not overlap it.
            unsafe {
                buffer.copy_from_nonoverlapping(json.as_ptr().cast(), bytes);
                buffer.add(bytes).write(0);
            }
        }
        // SAFETY: the caller says so.
        unsafe { put(needed, json.len() + 1) }
    })
}

/// Sets every peak to the current figure.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_reset_peaks(allocator: gpupool_allocator) -> Status {
    guard(|| {
        ALLOCATORS.get(allocator)?.reset_peaks();
        Ok(())
    })
}

/// Sets cumulative figures and counts to zero.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_reset_accumulated(allocator: gpupool_allocator) -> Status {
    guard(|| {
        ALLOCATORS.get(allocator)?.reset_accumulated();
        Ok(())
    })
}

/// Writes what the allocator holds to a file, in the layout of PyTorch's memory snapshots, as JSON, or, if its name ends with `.pickle`, as
/// the pickle that PyTorch's memory viewer opens. `gpupool inspect` reads both.
///
/// # Safety
///
/// `path` is null or a zero-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_snapshot(allocator: gpupool_allocator, path: *const c_char) -> Status {
    guard(|| {
        // SAFETY: the caller says so.
        let path = unsafe { required("the path", path)? };
        let snapshot = ALLOCATORS.get(allocator)?.snapshot();
        let failed = |e: std::io::Error| Failure::new(Status::Io, format!("{path}: {e}"));
        let file = File::create(path).map_err(failed)?;
        let written = match path.ends_with(".pickle") {
            true => snapshot.write_pickle(BufWriter::new(file)),
            false => snapshot.write_json(BufWriter::new(file)),
        };
        written.map_err(failed)
    })
}
