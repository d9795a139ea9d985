//! The process: what is served in which context, and what is said when it ends.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::fs::File;
use std::io::{BufWriter, Read};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

use gpupool::CaptureRegistry;
use gpupool::device::{Device, StreamHandle};
use gpupool::snapshot::Snapshot;
use gpupool_cuda_device::CudaDevice;
use parking_lot::{Mutex, RwLock};

use crate::blocks::Served;
use crate::lookup::inside;
use crate::real;
use crate::settings::Settings;

/// A served context.
pub(crate) type Context = Served<CudaDevice>;

static SETTINGS: LazyLock<Option<Settings>> = LazyLock::new(|| match Settings::read(|name| std::env::var(name).ok()) {
    Ok(settings) => Some(settings),
    Err(wrong) => {
        say!("gpupool: {wrong}; the driver serves this process");
        None
    }
});

/// What is known of a context.
struct Known {
    /// `None` if the driver serves it.
    served: Option<Arc<Context>>,
    /// The device whose primary context it is.
    primary_of: Option<c_int>,
}

static CONTEXTS: LazyLock<RwLock<HashMap<usize, Known>>> = LazyLock::new(RwLock::default);
static OPENING: Mutex<()> = Mutex::new(());

struct Driver {
    ctx_get_current: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
    ctx_get_device: unsafe extern "C" fn(*mut c_int) -> c_int,
    primary_state: unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> c_int,
    stream_get_ctx: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int,
}

fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    let find = || {
        // SAFETY: the CUDA Driver API reference documents the four with these signatures.
        unsafe {
            Some(Driver {
                ctx_get_current: real::find(b"cuCtxGetCurrent\0")?,
                ctx_get_device: real::find(b"cuCtxGetDevice\0")?,
                primary_state: real::find(b"cuDevicePrimaryCtxGetState\0")?,
                stream_get_ctx: real::find(b"cuStreamGetCtx\0")?,
            })
        }
    };
    DRIVER.get_or_init(find).as_ref()
}

/// Whether what libraries look up in the driver's file is ours, too.
pub(crate) fn serves_libraries() -> bool {
    SETTINGS.as_ref().is_some_and(|settings| settings.libraries)
}

/// What serves the calling thread's current context; `None` where the driver does.
pub(crate) fn current() -> Option<Arc<Context>> {
    SETTINGS.as_ref()?;
    let driver = driver()?;
    let mut context = std::ptr::null_mut();
    // SAFETY: cuCtxGetCurrent writes one handle.
    if unsafe { (driver.ctx_get_current)(&mut context) } != 0 || context.is_null() {
        return None;
    }
    if let Some(known) = CONTEXTS.read().get(&(context as usize)) {
        return known.served.clone();
    }
    let _one_at_a_time = OPENING.lock();
    if let Some(known) = CONTEXTS.read().get(&(context as usize)) {
        return known.served.clone();
    }
    let known = open(driver, context);
    let served = known.served.clone();
    CONTEXTS.write().insert(context as usize, known);
    served
}

/// What serves a stream: its own context, whichever is current. A default stream is the current context's. A context that was never current where
/// we saw it is the driver's business: memory of another one would not do.
pub(crate) fn of_stream(stream: u64) -> Option<Arc<Context>> {
    let here = current();
    if stream <= StreamHandle::PER_THREAD.0 || here.as_ref().is_some_and(|context| context.knows_stream(stream)) {
        return here;
    }
    let mut context = std::ptr::null_mut();
    // SAFETY: the program says that it is a stream, and the driver looks; writes one handle.
    if unsafe { (driver()?.stream_get_ctx)(stream as *mut c_void, &mut context) } != 0 {
        return here;
    }
    CONTEXTS.read().get(&(context as usize)).and_then(|known| known.served.clone())
}

/// The context that knows something: the current one, or any other.
pub(crate) fn one_that(knows: impl Fn(&Context) -> bool) -> Option<Arc<Context>> {
    current().filter(|context| knows(context)).or_else(|| served().into_iter().find(|context| knows(context)))
}

impl Context {
    /// Whether a pool of the driver's is the one that requests of the device come from: the program believes that ours do.
    pub(crate) fn is_its_pool(&self, pool: *mut c_void) -> bool {
        static FOUND: OnceLock<Option<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int>> = OnceLock::new();
        // SAFETY: the driver's function of this name has this signature.
        let get = *FOUND.get_or_init(|| unsafe { real::find(b"cuDeviceGetMemPool\0") });
        let mut its = std::ptr::null_mut();
        // SAFETY: cuDeviceGetMemPool writes one handle.
        get.is_none_or(|get| unsafe { get(&mut its, self.device.ordinal().cast_signed()) } != 0 || its == pool)
    }
}

fn open(driver: &Driver, context: *mut c_void) -> Known {
    let mut known = Known { served: None, primary_of: None };
    let Some(settings) = SETTINGS.as_ref() else { return known };
    let (mut device, mut flags, mut active) = (0, 0, 0);
    // SAFETY: both write numbers of ours; a context is current.
    let codes =
        unsafe { ((driver.ctx_get_device)(&mut device), (driver.primary_state)(device, &mut flags, &mut active)) };
    if codes != (0, 0) {
        return known;
    }
    let say = |why: &dyn std::fmt::Display| say!("gpupool: device {device}: {why}; the driver serves it");
    // Only an active one is opened: a program that has contexts of its own need not pay for the primary one.
    let primary = (active != 0).then(|| inside(|| CudaDevice::open(device.unsigned_abs()))).transpose();
    let Ok(primary) = primary.map_err(|e| say(&e)) else { return known };
    let opened = match primary.filter(|opened| opened.cu_context().cast::<c_void>() == context) {
        Some(opened) => {
            known.primary_of = Some(device);
            Ok(opened)
        }
        // SAFETY: the context is current, so it is one; before the program destroys it, `ends` forgets it.
        None => inside(|| unsafe { CudaDevice::with_context(context.cast()) }),
    };
    let Ok(opened) = opened.map_err(|e| say(&e)) else { return known };
    let served =
        Served::new(Arc::new(opened), settings.config.clone(), CaptureRegistry::global(), settings.one_graph_pool);
    let Ok(served) = served.map_err(|e| say(&e)) else { return known };
    watch_the_end(settings);
    if settings.log {
        let name = &served.device.properties().name;
        let kind = if known.primary_of.is_some() { "" } else { ", a context of the program's" };
        say!("gpupool: serving device {device} ({name}{kind}), policy {}", settings.config.policy());
    }
    known.served = Some(Arc::new(served));
    known
}

/// The context is about to be destroyed, and its number may be another's after that.
pub(crate) fn context_ends(context: *mut c_void) {
    let gone = CONTEXTS.write().remove(&(context as usize));
    if let Some(served) = gone.and_then(|known| known.served) {
        served.ends();
    }
}

/// A device's primary context is about to be reset.
pub(crate) fn primary_ends(device: c_int) {
    let gone: Vec<_> = CONTEXTS.write().extract_if(|_, known| known.primary_of == Some(device)).collect();
    gone.iter().filter_map(|(_, known)| known.served.as_ref()).for_each(|served| served.ends());
}

/// A use of a device's primary context is over. We use it, too, so it goes on; what is cached goes back, as all of it would have.
pub(crate) fn primary_released(device: c_int) {
    let of_device = |known: &&Known| known.primary_of == Some(device);
    let served: Vec<_> = CONTEXTS.read().values().filter(of_device).filter_map(|known| known.served.clone()).collect();
    for context in served {
        // What could not be given back stays cached.
        let _kept = context.allocator.trim();
    }
}

unsafe extern "C" {
    fn atexit(function: extern "C" fn()) -> c_int;
    fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
    fn write(file: c_int, bytes: *const c_void, count: usize) -> isize;
    fn __errno_location() -> *mut c_int;
}

static WAKE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_exit() {
    // This thread's own variables are gone by now, and locks use some: a fresh thread has its own. It catches what is thrown there.
    if let Ok(last) = std::thread::Builder::new().spawn(finish) {
        let _caught = last.join();
    }
}

/// Only what may be done in a signal handler: one write to a pipe. What the program did meanwhile keeps its error number.
extern "C" fn on_signal(_number: c_int) {
    let file = WAKE.load(Ordering::Relaxed);
    if file >= 0 {
        // SAFETY: both may be called in a handler; the first gives a place of this thread's own; the byte lives in this frame; the file is a
        // pipe that stays open.
        unsafe {
            let number = __errno_location();
            let before = number.read();
            let _full = write(file, std::ptr::from_ref(&0u8).cast(), 1);
            number.write(before);
        }
    }
}

/// Registers what is done at the end and on the signal, once.
fn watch_the_end(settings: &'static Settings) {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        // SAFETY: the handler is a function of ours that does not unwind, and this library is never unloaded: nothing closes it.
        let _refused = unsafe { atexit(on_exit) };
        let Some(number) = settings.signal else { return };
        let Ok((mut reader, writer)) = std::io::pipe() else { return };
        WAKE.store(writer.as_raw_fd(), Ordering::Relaxed);
        std::mem::forget(writer);
        let wait = move || {
            let mut byte = [0];
            while reader.read(&mut byte).is_ok_and(|n| n == 1) {
                snapshots(settings);
            }
        };
        if std::thread::Builder::new().name("gpupool".into()).spawn(wait).is_ok() {
            // SAFETY: the handler only does what a handler may.
            unsafe { signal(number, on_signal) };
        }
    });
}

fn served() -> Vec<Arc<Context>> {
    CONTEXTS.read().values().filter_map(|known| known.served.clone()).collect()
}

/// Writes a snapshot of every context. A pickle if the path says so, else JSON.
fn snapshots(settings: &Settings) {
    let Some(path) = &settings.snapshot else { return };
    let mut contexts = served();
    contexts.sort_by_key(|context| context.device.ordinal());
    let mut written = Vec::new();
    for context in contexts {
        let path = another(&path.replace("{device}", &context.device.ordinal().to_string()), &written);
        let snapshot = Snapshot::of(&context.allocator.state(), context.allocator.config().pytorch_options());
        let write = |file| match path.ends_with(".pickle") {
            true => snapshot.write_pickle(BufWriter::new(file)),
            false => snapshot.write_json(BufWriter::new(file)),
        };
        if let Err(error) = File::create(&path).and_then(write) {
            say!("gpupool: {path}: {error}");
        }
        written.push(path);
    }
}

/// A path that is not among those `taken`: this one, or with a number before its ending.
fn another(path: &str, taken: &[String]) -> String {
    let name = path.rfind('/').map_or(0, |slash| slash + 1);
    let ending = path[name..].rfind('.').map_or(path.len(), |dot| name + dot);
    let numbered = (2..).map(|number| format!("{}-{number}{}", &path[..ending], &path[ending..]));
    let free = |candidate: &String| !taken.contains(candidate);
    std::iter::once(path.to_owned()).chain(numbered).find(free).unwrap_or_else(|| path.to_owned())
}

fn finish() {
    let Some(settings) = SETTINGS.as_ref() else { return };
    snapshots(settings);
    if !settings.log {
        return;
    }
    for context in served() {
        let ((requests, foreign), stats) = (context.counts(), context.allocator.stats());
        let (graphs, execs) = context.graphs.counts();
        say!(
            "gpupool: device {}: {requests} requests served, {} driver allocations, {} MiB reserved at most, {foreign} foreign frees, \
             {graphs} graphs and {execs} executables hold pools, {} leave",
            context.device.ordinal(),
            stats.num_device_alloc,
            stats.reserved_bytes.all.peak >> 20,
            context.leaving.len(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::another;

    #[test]
    fn no_context_writes_over_anothers_snapshot() {
        let mut taken = Vec::new();
        for expected in ["a.b/state.json", "a.b/state-2.json", "a.b/state-3.json"] {
            taken.push(another("a.b/state.json", &taken));
            assert_eq!(taken.last().unwrap(), expected);
        }
        assert_eq!(another("a.b/state", &["a.b/state".to_owned()]), "a.b/state-2");
    }
}
