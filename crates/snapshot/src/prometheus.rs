//! Counters for Prometheus: its text format, version 0.0.4; and for the `metrics` facade, behind the feature of that name.

use std::fmt::Write;

use gpupool_allocator::{Stat, Stats};

/// The content type of what [`prometheus`] gives.
pub const PROMETHEUS_TYPE: &str = "text/plain; version=0.0.4";

/// Figures of one kind: name, what it counts, whether it only grows, and its samples.
struct Figure {
    name: String,
    help: String,
    grows: bool,
    /// Labels beyond the device, and the value.
    samples: Vec<(String, i64)>,
}

/// Every figure of `stats`: current and peak as gauges, cumulative ones as counters.
fn figures(stats: &Stats) -> Vec<Figure> {
    let mut all = Vec::new();
    let mut add = |name: &str, kind: &str, of: fn(&Stat) -> i64, grows: bool, parts: &[(String, Stat)]| {
        all.push(Figure {
            name: format!("gpupool_{name}_{kind}"),
            help: format!("{} of PyTorch's figure {name}", if grows { "Movements" } else { "Level" }),
            grows,
            samples: parts.iter().map(|(labels, stat)| (labels.clone(), of(stat))).collect(),
        });
    };
    let mut each = |name: &str, parts: &[(String, Stat)]| {
        add(name, "current", |s| s.current, false, parts);
        add(name, "peak", |s| s.peak, false, parts);
        add(name, "allocated_total", |s| s.allocated, true, parts);
        add(name, "freed_total", |s| s.freed, true, parts);
    };
    for (name, array) in stats.arrays() {
        let part = |name: &str, stat: Stat| (format!("part=\"{name}\""), stat);
        each(name, &[part("small", array.small_pool), part("large", array.large_pool)]);
    }
    let pools: Vec<(String, Stat)> = stats
        .private_pools
        .iter()
        .map(|(pool, array)| (format!("pool=\"{}_{}\"", pool.0, pool.1), array.all))
        .collect();
    if !pools.is_empty() {
        each("reserved_bytes_by_private_pool", &pools);
    }
    for (name, value) in [
        ("alloc_retries", stats.num_alloc_retries),
        ("device_allocs", stats.num_device_alloc),
        ("device_frees", stats.num_device_free),
        ("oom_rejections", stats.num_oom_rejections),
        ("ooms", stats.num_ooms),
        ("sync_all_streams", stats.num_sync_all_streams),
    ] {
        all.push(Figure {
            name: format!("gpupool_{name}_total"),
            help: format!("PyTorch's figure num_{name}"),
            grows: true,
            samples: vec![(String::new(), value)],
        });
    }
    for (name, help, value) in [
        ("parks", "How often a pool was parked", stats.idle.parks),
        ("wakes", "How often a parked pool was woken", stats.idle.wakes),
        ("suspensions", "How often a pool was suspended", stats.idle.suspensions),
        ("resumptions", "How often a suspended pool was resumed", stats.idle.resumptions),
        ("away_bytes", "Bytes of idle pools that went away", stats.idle.away_bytes),
        ("back_bytes", "Bytes of idle pools that came back", stats.idle.back_bytes),
        ("loans", "Runs of idle pools that were lent", stats.idle.loans),
    ] {
        all.push(Figure {
            name: format!("gpupool_idle_{name}_total"),
            help: help.to_owned(),
            grows: true,
            samples: vec![(String::new(), i64::try_from(value).unwrap_or(i64::MAX))],
        });
    }
    all
}

/// `stats` in Prometheus's text format. Peaks over both parts of a pool are not the sum of the parts' peaks, so they are not given.
#[must_use]
pub fn prometheus(stats: &Stats, device: u32) -> String {
    let mut out = String::new();
    for figure in figures(stats) {
        let kind = if figure.grows { "counter" } else { "gauge" };
        // Writing to a string cannot fail.
        let _ = writeln!(out, "# HELP {} {}.\n# TYPE {} {kind}", figure.name, figure.help, figure.name);
        for (labels, value) in figure.samples {
            let comma = if labels.is_empty() { "" } else { "," };
            let _ = writeln!(out, "{}{{device=\"{device}\"{comma}{labels}}} {value}", figure.name);
        }
    }
    out
}

/// Tells the recorder of the `metrics` facade every figure of `stats`. Call it as often as the figures should be fresh.
#[cfg(feature = "metrics")]
pub fn record_metrics(stats: &Stats, device: u32) {
    for figure in figures(stats) {
        for (labels, value) in figure.samples {
            let mut all = vec![metrics::Label::new("device", device.to_string())];
            if let Some((key, text)) = labels.split_once('=') {
                all.push(metrics::Label::new(key.to_owned(), text.trim_matches('"').to_owned()));
            }
            if figure.grows {
                metrics::counter!(figure.name.clone(), all).absolute(u64::try_from(value).unwrap_or(0));
            } else {
                metrics::gauge!(figure.name.clone(), all).set(value as f64);
            }
        }
    }
}
