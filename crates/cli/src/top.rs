//! `gpupool top`: a running process, from its socket.

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use gpupool_snapshot::{Sample, read_live};

use crate::Verdict;
use crate::args::Top;
use crate::failure::Failure;
use crate::output::table;
use crate::units::{bytes, count};

pub(crate) fn run(arguments: &Top) -> Result<Verdict, Failure> {
    let terminal = io::stdout().is_terminal();
    let mut before: Option<(Instant, Vec<Sample>)> = None;
    loop {
        let read = read_live(&arguments.socket);
        let now = Instant::now();
        let samples = match read {
            Ok(Some(samples)) => samples,
            Ok(None) => return over(),
            // Whoever was there has gone.
            Err(error) if before.is_some() && gone(&error) => return over(),
            Err(error) => return Err(Failure::Watch { path: arguments.socket.clone(), error }),
        };
        let text = screen(&arguments.socket, &samples, before.as_ref().map(|(then, old)| (now - *then, &old[..])));
        let clear = if terminal && !arguments.once { "\x1b[H\x1b[2J" } else { "" };
        let mut out = io::stdout().lock();
        writeln!(out, "{clear}{text}").and_then(|()| out.flush()).map_err(Failure::output)?;
        drop(out);
        if arguments.once {
            return Ok(Verdict::Good);
        }
        before = Some((now, samples));
        std::thread::sleep(Duration::from_secs_f64(arguments.interval));
    }
}

fn gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset)
}

fn over() -> Result<Verdict, Failure> {
    writeln!(io::stdout(), "The process has ended.").map_err(Failure::output)?;
    Ok(Verdict::Good)
}

/// The sum of a figure over its labels, or over those with `label`.
fn figure(samples: &[Sample], name: &str, label: &str) -> f64 {
    let name = format!("gpupool_{name}");
    samples.iter().filter(|s| s.name == name && s.labels.contains(label)).map(|s| s.value).sum()
}

fn screen(path: &Path, samples: &[Sample], before: Option<(Duration, &[Sample])>) -> String {
    let size = |value: f64| bytes(value.max(0.0) as u64);
    let of = |name: &str, label: &str| figure(samples, name, label);
    let mut rows = table(&["", "reserved", "live", "pending", "free", "blocks", "segments"], 0);
    for (part, label) in [("all", ""), ("small", "part=\"small\""), ("large", "part=\"large\"")] {
        let (reserved, active, live) = (
            of("reserved_bytes_current", label),
            of("active_bytes_current", label),
            of("allocated_bytes_current", label),
        );
        rows.add_row([
            part.to_owned(),
            size(reserved),
            size(live),
            size(active - live),
            size(reserved - active),
            count(of("allocation_current", label) as u64),
            count(of("segment_current", label) as u64),
        ]);
    }
    let mut text = format!("{}\n\n{}", path.display(), rows.trim_fmt());
    let rate = |name: &str| match before {
        Some((time, old)) if time > Duration::ZERO => {
            let per_second = (of(name, "") - figure(old, name, "")) / time.as_secs_f64();
            format!(", {} a second", count(per_second.max(0.0) as u64))
        }
        _ => String::new(),
    };
    for (what, name) in [
        ("allocations", "allocation_allocated_total"),
        ("frees", "allocation_freed_total"),
        ("segments taken", "device_allocs_total"),
        ("segments given back", "device_frees_total"),
        ("asked again", "alloc_retries_total"),
        ("out of memory", "ooms_total"),
    ] {
        text.push_str(&format!("\n{:>22}  {}{}", what, count(of(name, "") as u64), rate(name)));
    }
    let pools: Vec<&Sample> = samples
        .iter()
        .filter(|s| s.name == "gpupool_reserved_bytes_by_private_pool_current" && s.value > 0.0)
        .collect();
    for pool in pools.iter().take(10) {
        let name = pool.labels.split("pool=").nth(1).unwrap_or("").trim_matches('"');
        text.push_str(&format!("\n{:>22}  {} reserved", format!("pool {name}"), size(pool.value)));
    }
    text
}
