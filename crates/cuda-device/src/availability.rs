//! Whether there is a driver, and what is wrong if there is none that can be used.

use std::ffi::c_int;
use std::sync::OnceLock;

use libloading::Library;

use crate::driver;

/// Why no GPU can be used on this machine.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// There is no driver.
    #[error(
        "no CUDA driver library on this machine (looked for {looked_for}): install the NVIDIA driver, or use the simulated device"
    )]
    NoLibrary {
        /// The names that the loader was asked for.
        looked_for: &'static str,
    },
    /// The driver lacks functions.
    #[error(
        "the CUDA driver lacks {} of the {} functions needed, {} among them: it is older than 12.3; update it",
        .missing.len(), .needed, .missing.first().copied().unwrap_or("none")
    )]
    OldDriver {
        /// All that it lacks.
        missing: Vec<&'static str>,
        /// Functions needed in all.
        needed: usize,
    },
    /// The library is the stub that programs are linked against, no driver.
    #[error(
        "the CUDA driver library that the loader found is the toolkit's stub: put the driver's own folder first on its path"
    )]
    Stub,
    /// The driver did not start.
    #[error("the CUDA driver cannot start: cuInit returned {code} ({})", gpupool_device::code::name(*.code))]
    Init {
        /// Its code.
        code: u32,
    },
    /// The driver sees no device.
    #[error("the CUDA driver works, but sees no device (CUDA_VISIBLE_DEVICES may hide them)")]
    NoDevice,
    /// There are fewer devices.
    #[error("there is no CUDA device {ordinal}: there are {count}, counted from 0")]
    NoSuchDevice {
        /// The one asked for.
        ordinal: u32,
        /// Devices there are.
        count: u32,
    },
    /// A device exists, but a call that is needed to open it failed.
    #[error("CUDA device {ordinal} cannot be opened: {error}")]
    Device {
        /// The device.
        ordinal: u32,
        /// Which call, and its code.
        #[source]
        error: gpupool_device::DriverError,
    },
}

/// A driver that works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Driver {
    /// The version of its API: 1000 times the major and 10 times the minor number.
    pub version: u32,
    /// Devices it sees.
    pub devices: u32,
}

/// The process's driver, once it was opened.
pub(crate) struct Open {
    pub(crate) table: driver::Driver,
    pub(crate) info: Driver,
}

const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
const LOOKED_FOR: &str = "libcuda.so.1, libcuda.so";
/// `CUDA_ERROR_STUB_LIBRARY`.
const STUB_LIBRARY: u32 = 34;

/// The driver, or why there is none. The first call in the process finds out; the answer stays.
///
/// # Errors
///
/// [`Unavailable`].
pub fn driver() -> Result<Driver, Unavailable> {
    open().map(|open| open.info)
}

pub(crate) fn open() -> Result<&'static Open, Unavailable> {
    static OPEN: OnceLock<Result<Open, Unavailable>> = OnceLock::new();
    OPEN.get_or_init(|| open_library(&NAMES)).as_ref().map_err(Clone::clone)
}

fn open_library(names: &[&str]) -> Result<Open, Unavailable> {
    // SAFETY: loading a library runs its initialisers. The names are those of the CUDA driver, whose initialisers may run in any
    // process at any time; a program that has another library of that name has chosen to have it called as a driver.
    let library = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
    let library = library.ok_or(Unavailable::NoLibrary { looked_for: LOOKED_FOR })?;
    // SAFETY: 1. What carries a CUDA driver's name has functions of the signatures that its API documents. 2. It stays loaded: the
    // handle is never closed.
    let table = unsafe { driver::Driver::resolve(&library) };
    std::mem::forget(library);
    let table = table.map_err(|missing| Unavailable::OldDriver { missing, needed: driver::Driver::SYMBOLS.len() })?;
    start(table)
}

/// Initialises a driver and counts its devices.
fn start(table: driver::Driver) -> Result<Open, Unavailable> {
    // SAFETY: cuInit takes 0 and may be called first, again, and from any thread.
    let code = crate::error::number(unsafe { (table.init)(0) });
    match code {
        0 => {}
        gpupool_device::code::NO_DEVICE => return Err(Unavailable::NoDevice),
        STUB_LIBRARY => return Err(Unavailable::Stub),
        code => return Err(Unavailable::Init { code }),
    }
    let (mut version, mut devices): (c_int, c_int) = (0, 0);
    // SAFETY: cuDriverGetVersion writes one int; ours lives.
    let code = unsafe { (table.driver_version)(&mut version) };
    if code != 0 {
        return Err(Unavailable::Init { code: crate::error::number(code) });
    }
    // SAFETY: cuDeviceGetCount writes one int, and the driver was initialised above.
    let code = unsafe { (table.device_count)(&mut devices) };
    if code != 0 || devices <= 0 {
        return Err(Unavailable::NoDevice);
    }
    crate::process::watch_forks();
    Ok(Open { table, info: Driver { version: version.unsigned_abs(), devices: devices.unsigned_abs() } })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::fake;

    #[test]
    fn a_library_that_is_not_there_is_an_error_with_the_names_that_were_looked_for() {
        let error = open_library(&["libgpupool-no-such-driver.so.9"]).err().unwrap();
        assert_eq!(error, Unavailable::NoLibrary { looked_for: LOOKED_FOR });
        assert!(error.to_string().contains("libcuda.so.1"));
    }

    #[test]
    fn a_library_without_the_functions_is_an_old_driver() {
        // The C library is a library, and no driver.
        let Err(Unavailable::OldDriver { missing, needed }) = open_library(&["libc.so.6"]) else { panic!() };
        assert_eq!((missing.len(), needed), (needed, driver::Driver::SYMBOLS.len()));
        let text = Unavailable::OldDriver { missing, needed }.to_string();
        assert!(text.contains("cuInit") && text.contains("12.3"), "{text}");
    }

    #[test]
    fn what_the_driver_says_at_start_becomes_a_named_error() {
        for (code, expected) in [
            (100, Unavailable::NoDevice),
            (34, Unavailable::Stub),
            (803, Unavailable::Init { code: 803 }),
            (0, Unavailable::NoDevice),
            (31_337, Unavailable::Init { code: 31_337 }),
        ] {
            fake::answer_with(code);
            assert_eq!(start(driver::Driver::fake()).err(), Some(expected));
        }
    }
}
