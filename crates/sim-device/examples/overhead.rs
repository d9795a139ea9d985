//! Host time of the simulated device's own bookkeeping, per call, on idle streams and with work that lags behind.

use std::time::Instant;

use gpupool_device::{Device, Kernel, StreamHandle, StreamKind, Workbench};
use gpupool_sim_device::{SimConfig, SimDevice};

fn time(what: &str, n: u64, mut run: impl FnMut(u64)) {
    let start = Instant::now();
    (0..n).for_each(&mut run);
    println!("{what:<64} {:>8.1} ns", start.elapsed().as_nanos() as f64 / n as f64);
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for race_detector in [false, true] {
        println!("race detector: {race_detector}");
        let d = SimDevice::new(SimConfig { race_detector, ..SimConfig::default() });
        let streams: Vec<StreamHandle> =
            (0..16).map(|_| d.stream_create(StreamKind::NonBlocking)).collect::<Result<_, _>>()?;
        let events: Vec<_> = (0..1024).map(|_| d.event_create()).collect::<Result<_, _>>()?;
        let event = |i: u64| events[(i % 1024) as usize];
        let stream = |i: u64| streams[(i % 16) as usize];
        let n = 1_000_000;
        time("capture status, no capture anywhere", n, |i| {
            let _ = d.capture_status(stream(i));
        });
        time("record + query, idle stream", n, |i| {
            let _ = d.event_record(event(i), stream(i));
            let _ = d.event_query(event(i));
        });
        time("record + wait on another stream, both idle", n, |i| {
            let _ = d.event_record(event(i), stream(i));
            let _ = d.stream_wait_event(stream(i + 1), event(i));
        });
        time("advance a tick, nothing held", n, |_| {
            d.advance_tick();
        });
        time("hold for 100 ticks + record + query an old event + advance", n, |i| {
            let tick = d.advance_tick();
            let _ = d.hold_until_tick(stream(i), tick + 100);
            let _ = d.event_record(event(i), stream(i));
            let _ = d.event_query(event(i + 900));
        });
        d.device_synchronize()?;
        time("plain allocation + free, idle device", 100_000, |_| {
            if let Ok(x) = d.mem_alloc(2 << 20) {
                let _ = d.mem_free(x);
            }
        });
        let x = d.mem_alloc(64 << 20)?;
        time("kernel of 4 KiB submitted and run", 200_000, |i| {
            let _ = d.launch(stream(0), Kernel::Fill { dst: x.offset(i % 1000 * 4096), bytes: 4096, value: i as u32 });
            d.step();
        });
    }
    Ok(())
}
