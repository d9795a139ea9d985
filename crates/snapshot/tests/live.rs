//! Figures of a running process: Prometheus's text, and the socket.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::io;
use std::sync::Arc;

use gpupool_allocator::Stats;
use gpupool_snapshot::{Live, prometheus, read_live};

fn stats() -> Stats {
    let mut stats = Stats::default();
    stats.reserved_bytes.small_pool.current = 2 << 20;
    stats.reserved_bytes.large_pool.current = 40 << 20;
    stats.reserved_bytes.large_pool.peak = 60 << 20;
    stats.num_ooms = 3;
    stats.private_pools.insert(gpupool_allocator::PoolId(1, 0), stats.reserved_bytes);
    stats
}

#[test]
fn the_text_has_a_type_for_each_figure_and_no_figure_twice() {
    let text = prometheus(&stats(), 1);
    for line in [
        "# TYPE gpupool_reserved_bytes_current gauge",
        "gpupool_reserved_bytes_current{device=\"1\",part=\"large\"} 41943040",
        "gpupool_reserved_bytes_peak{device=\"1\",part=\"large\"} 62914560",
        "# TYPE gpupool_ooms_total counter",
        "gpupool_ooms_total{device=\"1\"} 3",
        "gpupool_reserved_bytes_by_private_pool_current{device=\"1\",pool=\"1_0\"} 0",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
    }
    let mut names: Vec<&str> =
        text.lines().filter(|l| !l.starts_with('#')).map(|l| l.rsplit_once(' ').unwrap().0).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn a_socket_tells_and_goes_with_its_owner() {
    let path = std::env::temp_dir().join(format!("gpupool-live-{}.sock", std::process::id()));
    let live = Live::serve(&path, Arc::new(|| Some((0, stats())))).unwrap();
    assert_eq!(Live::serve(&path, Arc::new(|| None)).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    for _ in 0..3 {
        let samples = read_live(&path).unwrap().unwrap();
        let oom = samples.iter().find(|s| s.name == "gpupool_ooms_total").unwrap();
        assert_eq!((oom.value, oom.labels.as_str()), (3.0, "device=\"0\""));
    }
    drop(live);
    assert!(!path.exists());
    assert_eq!(read_live(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
    std::fs::write(&path, "something else").unwrap();
    assert_eq!(
        Live::serve(&path, Arc::new(|| None)).unwrap_err().kind(),
        io::ErrorKind::AlreadyExists,
        "no file is replaced"
    );
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_socket_that_another_has_taken_is_left_to_it() {
    let path = std::env::temp_dir().join(format!("gpupool-taken-{}.sock", std::process::id()));
    let first = Live::serve(&path, Arc::new(|| None)).unwrap();
    std::fs::remove_file(&path).unwrap();
    let second = Live::serve(&path, Arc::new(|| Some((0, stats())))).unwrap();
    drop(first);
    assert!(read_live(&path).unwrap().is_some(), "the second one's socket is still there");
    drop(second);
    assert!(!path.exists());
}
