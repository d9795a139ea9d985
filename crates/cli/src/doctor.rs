//! `gpupool doctor`: what this machine has, and what will and will not work on it.

use gpupool_cuda_device::{CudaDevice, availability, kernels};
use gpupool_device::{
    Address, CaptureMode, Device, DriverError, DriverResult, GraphDevice, Kernel, StreamHandle, StreamKind, Workbench,
    with_relaxed_capture,
};
use serde::Serialize;

use crate::Verdict;
use crate::args::Doctor;
use crate::failure::Failure;
use crate::output::{print, print_json};
use crate::units::bytes;

/// What `--json` prints.
#[derive(Serialize)]
struct Findings {
    /// Whether any GPU can be used.
    usable: bool,
    /// The driver's API version, 1000 times the major and 10 times the minor number.
    driver_version: Option<u32>,
    /// Why there is no driver to use.
    problem: Option<String>,
    /// Whether kernels can be compiled.
    kernel_compiler: bool,
    devices: Vec<DeviceFindings>,
}

/// One GPU.
#[derive(Serialize)]
struct DeviceFindings {
    ordinal: u32,
    /// Why it cannot be opened.
    problem: Option<String>,
    name: String,
    capability: String,
    multiprocessors: u32,
    total_memory: u64,
    free_memory: u64,
    virtual_memory: bool,
    granularity: u64,
    memory_pools: bool,
    checks: Vec<Checked>,
}

/// Something that was tried.
#[derive(Serialize)]
struct Checked {
    what: &'static str,
    works: bool,
    /// What does not, and what that means.
    problem: Option<String>,
}

pub(crate) fn run(arguments: &Doctor) -> Result<Verdict, Failure> {
    let findings = look();
    if arguments.json {
        print_json(&findings)?;
    } else {
        print(&text(&findings))?;
    }
    Ok(if findings.usable { Verdict::Good } else { Verdict::Bad })
}

fn look() -> Findings {
    let driver = availability::driver();
    let count = driver.as_ref().map_or(0, |driver| driver.devices);
    let devices: Vec<DeviceFindings> = (0..count).map(look_at).collect();
    Findings {
        usable: devices.iter().any(|d| d.problem.is_none()),
        driver_version: driver.as_ref().ok().map(|driver| driver.version),
        problem: driver.err().map(|error| error.to_string()),
        kernel_compiler: kernels::compiler_present(),
        devices,
    }
}

fn look_at(ordinal: u32) -> DeviceFindings {
    let mut found = DeviceFindings {
        ordinal,
        problem: None,
        name: String::new(),
        capability: String::new(),
        multiprocessors: 0,
        total_memory: 0,
        free_memory: 0,
        virtual_memory: false,
        granularity: 0,
        memory_pools: false,
        checks: Vec::new(),
    };
    let device = match CudaDevice::open(ordinal) {
        Ok(device) => device,
        Err(error) => {
            found.problem = Some(error.to_string());
            return found;
        }
    };
    let (properties, hardware) = (device.properties(), device.hardware());
    found.name.clone_from(&properties.name);
    found.capability = format!("{}.{}", hardware.capability.0, hardware.capability.1);
    found.multiprocessors = hardware.multiprocessors;
    found.total_memory = properties.total_memory;
    found.virtual_memory = properties.virtual_memory;
    found.granularity = properties.granularity;
    found.memory_pools = hardware.memory_pools;
    match device.mem_info() {
        Ok(info) => found.free_memory = info.free,
        Err(error) => found.problem = Some(error.to_string()),
    }
    found.checks = checks(&device);
    found
}

/// Tries what gpupool needs, each a few microseconds long.
fn checks(device: &CudaDevice) -> Vec<Checked> {
    type Try = (&'static str, fn(&CudaDevice) -> DriverResult<()>, &'static str);
    const TRIES: [Try; 6] = [
        ("plain allocation", |d| d.mem_free(d.mem_alloc(512)?), "nothing works without it"),
        (
            "virtual memory",
            virtual_memory,
            "segments are then plain allocations, and giving them back waits for the GPU",
        ),
        ("streams and events", events, "nothing works without them"),
        (
            "capture, with virtual memory growing inside",
            |d| captured(d, virtual_memory),
            "captures must be sized ahead",
        ),
        (
            "capture, with plain allocation under the relaxed exchange",
            |d| {
                captured(d, |d| {
                    with_relaxed_capture(d, |d| d.mem_alloc(512))
                        .and_then(|at| with_relaxed_capture(d, |d| d.mem_free(at)))
                })
            },
            "captures must be sized ahead where there is no virtual memory",
        ),
        ("the driver's stream-ordered pool", stream_ordered, "the policy `stream-ordered` cannot be used"),
    ];
    let mut all: Vec<Checked> = TRIES
        .iter()
        .map(|&(what, attempt, otherwise)| {
            let error = attempt(device).err();
            Checked { what, works: error.is_none(), problem: error.map(|e| format!("{e}: {otherwise}")) }
        })
        .collect();
    let kernels = device.load_kernels().map_err(|e| e.to_string());
    let kernels = kernels.and_then(|()| kernel(device).map_err(|e| e.to_string()));
    let problem = kernels.err().map(|e| format!("{e}: stress, tests and examples cannot run; the allocator can"));
    all.push(Checked { what: "kernels compiled at run time", works: problem.is_none(), problem });
    all
}

fn virtual_memory(device: &CudaDevice) -> DriverResult<()> {
    let bytes = device.properties().granularity;
    let at = device.address_reserve(bytes)?;
    let handle = device.handle_create(bytes)?;
    let mapped = device.map(at, bytes, handle);
    device.handle_release(handle)?;
    mapped?;
    device.set_access(at, bytes)?;
    device.unmap(at, bytes)?;
    device.address_free(at, bytes)
}

/// Does something with a stream of its own.
fn on_stream<T>(device: &CudaDevice, what: impl FnOnce(StreamHandle) -> DriverResult<T>) -> DriverResult<T> {
    let stream = device.stream_create(StreamKind::NonBlocking)?;
    let result = what(stream);
    device.stream_destroy(stream)?;
    result
}

fn events(device: &CudaDevice) -> DriverResult<()> {
    on_stream(device, |stream| {
        let event = device.event_create()?;
        device.event_record(event, stream)?;
        device.event_synchronize(event)?;
        device.event_destroy(event)
    })
}

/// Does something while a stream captures in global mode, which must survive it.
fn captured(device: &CudaDevice, inside: fn(&CudaDevice) -> DriverResult<()>) -> DriverResult<()> {
    on_stream(device, |stream| {
        device.begin_capture(stream, CaptureMode::Global)?;
        let result = inside(device);
        let graph = device.end_capture(stream);
        result?;
        device.graph_destroy(graph?)
    })
}

fn stream_ordered(device: &CudaDevice) -> DriverResult<()> {
    on_stream(device, |stream| {
        let at = device.alloc_async(stream, 512)?;
        device.free_async(stream, at)?;
        device.stream_synchronize(stream)
    })
}

fn kernel(device: &CudaDevice) -> Result<(), DriverError> {
    on_stream(device, |stream| {
        let at: Address = device.mem_alloc(512)?;
        device.launch(stream, Kernel::Fill { dst: at, bytes: 512, value: 1 })?;
        device.stream_synchronize(stream)?;
        device.mem_free(at)
    })
}

fn text(findings: &Findings) -> String {
    let mut lines = Vec::new();
    match (findings.driver_version, &findings.problem) {
        (Some(version), _) => lines.push(format!("CUDA driver: API {}.{}", version / 1000, version % 1000 / 10)),
        (None, Some(problem)) => lines.push(format!("CUDA driver: {problem}")),
        (None, None) => {}
    }
    let compiler =
        if findings.kernel_compiler { "present" } else { "missing: stress, tests and examples cannot run on a GPU" };
    lines.push(format!("kernel compiler (NVRTC): {compiler}"));
    for device in &findings.devices {
        lines.push(String::new());
        if let Some(problem) = &device.problem {
            lines.push(format!("cuda:{}: {problem}", device.ordinal));
        }
        if device.name.is_empty() {
            continue;
        }
        lines.push(format!(
            "cuda:{}: {}, compute capability {}, {} multiprocessors",
            device.ordinal, device.name, device.capability, device.multiprocessors
        ));
        lines.push(format!("  memory: {}, {} of it free", bytes(device.total_memory), bytes(device.free_memory)));
        if device.virtual_memory {
            lines.push(format!("  virtual memory in pages of {}", bytes(device.granularity)));
        }
        for check in &device.checks {
            match &check.problem {
                None => lines.push(format!("  works: {}", check.what)),
                Some(problem) => lines.push(format!("  does not work: {}: {problem}", check.what)),
            }
        }
    }
    lines.push(String::new());
    lines.push("The simulated device (--device sim) always works.".to_owned());
    lines.join("\n")
}
