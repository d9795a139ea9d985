//! The process: what is served in which context, and what is said when it ends.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::fs::File;
use std::io::{BufWriter, Read};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

use gpupool::CaptureRegistry;
use gpupool::device::Device;
use gpupool::snapshot::Snapshot;
use gpupool_cuda_device::CudaDevice;
use parking_lot::{Mutex, RwLock};

use crate::blocks::Served;
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

/// By context; `None` for contexts that the driver serves: not a device's primary one.
static CONTEXTS: LazyLock<RwLock<HashMap<usize, Option<Arc<Context>>>>> = LazyLock::new(RwLock::default);
static OPENING: Mutex<()> = Mutex::new(());

struct Driver {
    ctx_get_current: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
    ctx_get_device: unsafe extern "C" fn(*mut c_int) -> c_int,
    primary_state: unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> c_int,
}

fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    let find = || {
        // SAFETY: the CUDA Driver API reference documents the three with these signatures.
        unsafe {
            Some(Driver {
                ctx_get_current: real::find(b"cuCtxGetCurrent\0")?,
                ctx_get_device: real::find(b"cuCtxGetDevice\0")?,
                primary_state: real::find(b"cuDevicePrimaryCtxGetState\0")?,
            })
        }
    };
    DRIVER.get_or_init(find).as_ref()
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
        return known.clone();
    }
    let _one_at_a_time = OPENING.lock();
    if let Some(known) = CONTEXTS.read().get(&(context as usize)) {
        return known.clone();
    }
    let opened = open(driver, context);
    CONTEXTS.write().insert(context as usize, opened.clone());
    opened
}

fn open(driver: &Driver, context: *mut c_void) -> Option<Arc<Context>> {
    let settings = SETTINGS.as_ref()?;
    let (mut device, mut flags, mut active) = (0, 0, 0);
    // SAFETY: both write numbers of ours; a context is current.
    let codes =
        unsafe { ((driver.ctx_get_device)(&mut device), (driver.primary_state)(device, &mut flags, &mut active)) };
    if codes != (0, 0) || active == 0 {
        return None;
    }
    let say = |why: &dyn std::fmt::Display| say!("gpupool: device {device}: {why}; the driver serves it");
    let opened = CudaDevice::open(device.unsigned_abs()).map_err(|e| say(&e)).ok()?;
    if opened.cu_context().cast::<c_void>() != context {
        return None;
    }
    let served =
        Served::new(Arc::new(opened), settings.config.clone(), CaptureRegistry::global(), settings.one_graph_pool);
    let served = Arc::new(served.map_err(|e| say(&e)).ok()?);
    watch_the_end(settings);
    if settings.log {
        let name = &served.device.properties().name;
        say!("gpupool: serving device {device} ({name}), policy {}", settings.config.policy());
    }
    Some(served)
}

/// The context of a device is gone with everything in it: what we knew of it names nothing any more.
pub(crate) fn forget(device: c_int) {
    let mut contexts = CONTEXTS.write();
    let of_device = |c: &Option<Arc<Context>>| c.as_ref().is_some_and(|c| c.device.ordinal() == device.unsigned_abs());
    let gone: Vec<_> = contexts.extract_if(|_, c| of_device(c)).collect();
    // What is left to the driver may be another context now; what other devices serve stays.
    contexts.retain(|_, context| context.is_some());
    drop(contexts);
    // Dropping it would give memory back that the driver has taken already.
    std::mem::forget(gone);
}

unsafe extern "C" {
    fn atexit(function: extern "C" fn()) -> c_int;
    fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
    fn write(file: c_int, bytes: *const c_void, count: usize) -> isize;
}

static WAKE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_exit() {
    // This thread's own variables are gone by now, and locks use some: a fresh thread has its own. It catches what is thrown there.
    if let Ok(last) = std::thread::Builder::new().spawn(finish) {
        let _caught = last.join();
    }
}

/// Only what may be done in a signal handler: one write to a pipe.
extern "C" fn on_signal(_number: c_int) {
    let file = WAKE.load(Ordering::Relaxed);
    if file >= 0 {
        // SAFETY: write(2) may be called in a handler; the byte lives in this frame; the file is a pipe that stays open.
        let _full = unsafe { write(file, std::ptr::from_ref(&0u8).cast(), 1) };
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
    CONTEXTS.read().values().flatten().cloned().collect()
}

/// Writes a snapshot of every device. A pickle if the path says so, else JSON.
fn snapshots(settings: &Settings) {
    let Some(path) = &settings.snapshot else { return };
    for context in served() {
        let path = path.replace("{device}", &context.device.ordinal().to_string());
        let snapshot = Snapshot::of(&context.allocator.state(), context.allocator.config().pytorch_options());
        let write = |file| match path.ends_with(".pickle") {
            true => snapshot.write_pickle(BufWriter::new(file)),
            false => snapshot.write_json(BufWriter::new(file)),
        };
        if let Err(error) = File::create(&path).and_then(write) {
            say!("gpupool: {path}: {error}");
        }
    }
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
