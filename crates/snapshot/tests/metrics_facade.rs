//! The `metrics` facade is told what Prometheus's text says.
#![cfg(feature = "metrics")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use gpupool_allocator::Stats;
use gpupool_snapshot::{prometheus, record_metrics};
use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

type Told = Arc<Mutex<BTreeMap<String, f64>>>;

#[derive(Default)]
struct Notebook(Told);

struct Line(Told, String);

impl Line {
    fn note(&self, value: f64) {
        self.0.lock().unwrap().insert(self.1.clone(), value);
    }
}

impl CounterFn for Line {
    fn increment(&self, _: u64) {
        panic!("figures are absolute");
    }
    fn absolute(&self, value: u64) {
        self.note(value as f64);
    }
}

impl GaugeFn for Line {
    fn increment(&self, _: f64) {
        panic!("figures are absolute");
    }
    fn decrement(&self, _: f64) {
        panic!("figures are absolute");
    }
    fn set(&self, value: f64) {
        self.note(value);
    }
}

impl Notebook {
    fn line(&self, key: &Key) -> Arc<Line> {
        let labels: Vec<String> = key.labels().map(|label| format!("{}=\"{}\"", label.key(), label.value())).collect();
        Arc::new(Line(Arc::clone(&self.0), format!("{}{{{}}}", key.name(), labels.join(","))))
    }
}

impl Recorder for Notebook {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.line(key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.line(key))
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        panic!("there is none");
    }
}

#[test]
fn the_facade_is_told_what_the_text_says() {
    let mut stats = Stats::default();
    stats.reserved_bytes.large_pool.current = 7 << 20;
    stats.num_ooms = 2;
    stats.private_pools.insert(gpupool_allocator::PoolId(1, 0), stats.reserved_bytes);
    let notebook = Notebook::default();
    metrics::with_local_recorder(&notebook, || record_metrics(&stats, 3));
    let text = prometheus(&stats, 3);
    let lines = text.lines().filter(|line| !line.starts_with('#')).map(|line| line.rsplit_once(' ').unwrap());
    let expected: BTreeMap<String, f64> =
        lines.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect();
    assert_eq!(*notebook.0.lock().unwrap(), expected);
}
