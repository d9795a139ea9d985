//! What a real driver makes of an embedder's own context, of a forked child, and of a process that ends.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::{Arc, Mutex};

use cudarc::driver::CudaContext;
use gpupool_allocator::{Allocation, Allocator, CaptureRegistry, Config, Policy, Stream};
use gpupool_cuda_device::CudaDevice;
use gpupool_cuda_device::interop::current_context;
use gpupool_device::{Device, InstantiateFlags, Kernel, StreamHandle, StreamKind, Workbench, code};
use gpupool_graph_capture::{CaptureOptions, Captures, Executable};
use gpupool_tests::gpu::{self, GpuTest};
use libtest_mimic::Failed;

const MIB: u64 = 1 << 20;
/// What this program is called with to end with memory still held.
const ENDS_HOLDING: &str = "--ends-holding";

unsafe extern "C" {
    fn fork() -> c_int;
    fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn _exit(status: c_int) -> !;
    fn atexit(function: extern "C" fn()) -> c_int;
}

/// An allocator with a live block, a cached one and a graph that ran.
struct Held {
    device: Arc<CudaDevice>,
    allocator: Allocator<CudaDevice>,
    stream: Stream<CudaDevice>,
    block: Allocation<CudaDevice>,
    exec: Executable<CudaDevice>,
    captures: Captures<CudaDevice>,
}

impl Held {
    fn new(device: Arc<CudaDevice>) -> Result<Self, Failed> {
        let registry = Arc::<CaptureRegistry>::default();
        let allocator = Allocator::with_registry(Arc::clone(&device), Config::new(Policy::Segments), registry)?;
        let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking)?);
        let block = allocator.alloc(64 * MIB, &stream)?;
        device.launch(stream.handle(), Kernel::Fill { dst: block.address(), bytes: 64 * MIB, value: 5 })?;
        drop(allocator.alloc(32 * MIB, &stream)?);
        let captures = Captures::new(&allocator);
        let capture = captures.begin(&stream, CaptureOptions::new())?;
        let inside = allocator.alloc(16 * MIB, &stream)?;
        device.launch(stream.handle(), Kernel::Copy { dst: inside.address(), src: block.address(), bytes: MIB })?;
        device.launch(stream.handle(), Kernel::Add { dst: inside.address(), bytes: MIB, value: 1 })?;
        device.launch(stream.handle(), Kernel::Copy { dst: block.address(), src: inside.address(), bytes: MIB })?;
        drop(inside);
        let exec = capture.end()?.instantiate(InstantiateFlags::default())?;
        exec.launch(&stream)?;
        Ok(Self { device, allocator, stream, block, exec, captures })
    }

    /// The first word of the block.
    fn word(&self) -> u32 {
        let mut bytes = [0; 4];
        self.device.read(self.stream.handle(), self.block.address(), &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }
}

/// Everything in a context of the embedder's, beside the primary one; all of it is back before that context goes.
fn a_context_of_ones_own() -> Result<(), Failed> {
    let primary = gpu::gpu();
    let embedders = CudaContext::new_non_primary(0, 0)?;
    let mut before = None;
    for _ in 0..2 {
        // SAFETY: the context lives to the end of this function, and what uses it does not.
        let device = Arc::new(unsafe { CudaDevice::with_context(embedders.cu_ctx()) }?);
        assert_eq!((device.cu_context(), device.ordinal()), (embedders.cu_ctx(), 0));
        assert_ne!(device.cu_context(), primary.cu_context());
        let held = Held::new(device)?;
        assert_eq!(held.word(), 6);
        held.exec.launch(&held.stream)?;
        assert_eq!(held.word(), 7);
        // From a thread that has another context current, and from one that has none.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                embedders.bind_to_thread().unwrap();
                let there = current_context();
                let block = primary.mem_alloc(MIB).unwrap();
                primary.mem_free(block).unwrap();
                assert_eq!(current_context(), there, "another context was left current");
                drop(held.allocator.alloc(MIB, &held.stream).unwrap());
                assert_eq!(current_context(), there);
            });
            scope.spawn(|| {
                drop(held.allocator.alloc(3 * MIB, &held.stream).unwrap());
                assert_eq!(held.word(), 7);
                assert_eq!(current_context(), None);
            });
        });
        drop(held);
        let now = primary.bytes_in_use()?;
        assert_eq!(*before.get_or_insert(now), now, "what was taken in the context is back while it still lives");
    }
    drop(embedders);
    assert!(primary.bytes_in_use()? < before.unwrap_or(0), "the context itself took memory");
    Ok(())
}

/// A forked child is told why it cannot have anything, frees nothing, and may drop everything; the parent's memory is as it was.
fn a_forked_child() -> Result<(), Failed> {
    let held = Held::new(Arc::new(gpu::gpu()))?;
    assert_eq!(held.word(), 6);
    let used = held.device.bytes_in_use()?;
    // SAFETY: the child runs this program's own code on its one thread, which holds no lock, and leaves with `_exit`.
    let child = unsafe { fork() };
    if child == 0 {
        let step = std::cell::Cell::new(1);
        let checked = catch_unwind(AssertUnwindSafe(|| {
            let forked = |code: u32, number: i32| {
                step.set(number);
                assert_eq!(code, code::FORKED);
            };
            forked(held.device.mem_alloc(MIB).unwrap_err().code, 2);
            forked(held.device.event_create().unwrap_err().code, 3);
            forked(held.device.capture_status(StreamHandle::LEGACY).unwrap_err().code, 4);
            step.set(5);
            let error = held.allocator.alloc(512 * MIB, &held.stream).unwrap_err().to_string();
            assert!(error.contains("fork"), "{error}");
            step.set(6);
            assert!(CudaDevice::open(0).is_err());
            step.set(7);
            drop(held);
        }));
        // SAFETY: it ends the child without running what the parent registered for its end.
        unsafe { _exit(if checked.is_ok() { 0 } else { step.get() }) };
    }
    let mut status = -1;
    // SAFETY: waitpid writes one int.
    let waited = unsafe { waitpid(child, &mut status, 0) };
    assert_eq!((waited, status), (child, 0), "the child's exit status (times 256) is the step that failed");
    held.exec.launch(&held.stream)?;
    assert_eq!((held.word(), held.device.bytes_in_use()?), (7, used));
    Ok(())
}

static HELD: Mutex<Vec<Held>> = Mutex::new(Vec::new());

/// Drops what is held, at the end of the process.
extern "C" fn let_go() {
    let Some(held) = HELD.lock().ok().and_then(|mut all| all.pop()) else { return };
    let code = |result: Result<(), u32>| result.map_or_else(|code| code, |()| 0);
    let alloc = held.device.mem_alloc(MIB).map(drop).map_err(|e| e.code);
    let tidied = catch_unwind(AssertUnwindSafe(|| held.captures.tidy())).is_ok();
    let emptied = held.allocator.empty_cache().is_ok();
    let dropped = catch_unwind(AssertUnwindSafe(|| drop(held))).is_ok();
    println!(
        "let go: an allocation gives {}, the cache emptied {emptied}, no panic {}",
        code(alloc),
        tidied && dropped
    );
}

/// What the child process of [`the_end_of_a_process`] does: one of the handlers runs before the driver's own, the other after it.
fn end_holding() {
    // SAFETY: the function may be called at the process's end.
    assert_eq!(unsafe { atexit(let_go) }, 0);
    let device = Arc::new(gpu::gpu());
    let two = [Held::new(Arc::clone(&device)).ok(), Held::new(device).ok()];
    HELD.lock().unwrap().extend(two.into_iter().flatten());
    // SAFETY: as above.
    assert_eq!(unsafe { atexit(let_go) }, 0);
}

/// Drops while the driver shuts down neither panic nor fail.
fn the_end_of_a_process() -> Result<(), Failed> {
    let output = Command::new(std::env::current_exe()?).arg(ENDS_HOLDING).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    print!("{said}");
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert_eq!(said.lines().filter(|l| l.starts_with("let go") && l.ends_with("no panic true")).count(), 2, "{said}");
    Ok(())
}

fn main() {
    if std::env::args().any(|argument| argument == ENDS_HOLDING) {
        return end_holding();
    }
    let tests: Vec<GpuTest> = vec![
        (
            "an embedder's own context serves, and everything is freed before it goes".into(),
            Box::new(a_context_of_ones_own),
        ),
        ("a forked child frees nothing and is told why it gets nothing".into(), Box::new(a_forked_child)),
        ("drops while the process ends neither panic nor fail".into(), Box::new(the_end_of_a_process)),
    ];
    gpu::run(Vec::new(), tests);
}
