//! Experiment C: stream-ordered allocation from the driver's default pool. a + b = c over 256 Mi integers, c allocated in stream order.

mod common;

use std::sync::Arc;

use common::{GIB, Gpu, Machine, Outcome, Report, Runs, mib, taken, words};
use gpupool::device::{Device, Kernel, StreamKind, Workbench};

fn main() -> Outcome {
    common::run("C. Stream-ordered allocation and the default driver pool", Runs::OnGpu(on_gpu))
}

fn on_gpu(gpu: Arc<Gpu>, report: &Report) -> Outcome {
    let device = &gpu.device;
    let pool = device.default_pool()?;
    let stream = device.stream_create(StreamKind::NonBlocking)?;
    let (a, b) = (device.mem_alloc(GIB)?, device.mem_alloc(GIB)?);
    for (dst, value) in [(a, 1), (b, 2)] {
        device.launch(stream, Kernel::Fill { dst, bytes: GIB, value })?;
    }
    device.stream_synchronize(stream)?;
    for (name, threshold) in [("release threshold 0", 0), ("release threshold at its maximum", u64::MAX)] {
        println!(" {name}");
        pool.set_release_threshold(threshold)?;
        pool.trim(0)?;
        pool.reset_high()?;
        let before = taken(&**device)?;
        let more = |device: &gpupool_cuda_device::CudaDevice| {
            Ok::<_, gpupool::device::DriverError>(taken(device)?.saturating_sub(before))
        };
        let c = device.alloc_async(stream, GIB)?;
        report.expect("taken after the allocation, bytes", GIB, more(device)?);
        gpu.sum(stream, c, a, (b, 2), GIB / 4)?;
        report.expect(
            "the sum's first and last words",
            vec![3, 3],
            [words(&**device, stream, c, 1)?, words(&**device, stream, c.offset(GIB - 4), 1)?].concat(),
        );
        // The sum again, so that work is under way when c is freed.
        gpu.sum(stream, c, a, (b, 2), GIB / 4)?;
        device.free_async(stream, c)?;
        report.expect("taken after the free, bytes", GIB, more(device)?);
        let used = pool.figures()?;
        report.expect("used in the pool after the free, now and at most", (0, GIB), (used.used, used.used_high));
        device.stream_synchronize(stream)?;
        let kept = if threshold == 0 { 0 } else { GIB };
        report.expect("taken after the stream was waited for, bytes", kept, more(device)?);
        report.expect("reserved by the pool, bytes", kept, pool.figures()?.reserved);
        report.tell("most that the pool reserved", &mib(pool.figures()?.reserved_high));
        pool.trim(0)?;
        report.expect("taken after trimming the pool, bytes", 0, more(device)?);
    }
    pool.set_release_threshold(0)?;
    device.mem_free(a)?;
    device.mem_free(b)?;
    Ok(())
}
