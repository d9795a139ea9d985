//! The page in a real browser: it shows a history of 300,000 events, and the work of a picture depends on the pixels, not on the events.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use gpupool_snapshot::{Action, Event, Snapshot};
use serde_json::Value;

fn temporary(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("gpupool-page-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder.join(name)
}

fn recorded() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../snapshot/data/train.pickle")
}

/// The recorded training run, over and over: between the turns what is left is freed.
fn repeated(events: usize) -> PathBuf {
    let mut snapshot = Snapshot::read("train", std::fs::File::open(recorded()).unwrap()).unwrap();
    let turn = snapshot.device_traces[0].clone();
    let length = turn.last().unwrap().time_us - turn[0].time_us + 1;
    let mut live: BTreeMap<u64, Event> = BTreeMap::new();
    let mut out: Vec<Event> = Vec::new();
    let mut turns = 0;
    while out.len() < events {
        for mut event in std::mem::take(&mut live).into_values() {
            event.time_us = turn[0].time_us + turns * length;
            for action in [Action::FreeRequested, Action::FreeCompleted] {
                event.action = action;
                out.push(event.clone());
            }
        }
        for event in &turn {
            let mut event = event.clone();
            event.time_us += turns * length;
            match event.action {
                Action::Alloc => drop(live.insert(event.address, event.clone())),
                Action::FreeCompleted => drop(live.remove(&event.address)),
                // Memory stays where it is from one turn to the next.
                Action::SegmentAlloc if turns > 0 => continue,
                _ => {}
            }
            out.push(event);
        }
        turns += 1;
    }
    snapshot.device_traces[0] = out;
    let path = temporary("repeated.pickle");
    snapshot.write_pickle(std::io::BufWriter::new(std::fs::File::create(&path).unwrap())).unwrap();
    path
}

fn page_of(snapshot: &Path, name: &str) -> PathBuf {
    let page = temporary(name);
    let out = Command::new(env!("CARGO_BIN_EXE_gpupool"))
        .args(["inspect", &snapshot.display().to_string(), "--html", &page.display().to_string(), "--json"])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    page
}

fn browser() -> Option<&'static str> {
    let there = |name: &&&str| {
        Command::new(**name)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|s| s.success())
    };
    ["chromium", "chromium-browser", "google-chrome"].iter().find(there).copied()
}

/// What the page says of its work after it was drawn.
fn shown(browser: &str, page: &Path) -> (String, Value) {
    let profile = temporary("profile");
    let out = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("file://{}", page.display()))
        .stderr(Stdio::null())
        .output()
        .unwrap();
    let dom = String::from_utf8(out.stdout).unwrap();
    let work = dom.split("<output id=\"work\" hidden=\"\">").nth(1).and_then(|rest| rest.split("</output>").next());
    let work = work.unwrap_or_else(|| panic!("the page drew nothing: {}", &dom[..dom.len().min(2000)]));
    (dom.clone(), serde_json::from_str(work).unwrap_or_else(|e| panic!("{e}: {work:?}")))
}

/// Leaves a history of 300,000 events for whoever wants to measure: `GPUPOOL_KEEP=FILE cargo test -p gpupool-cli --test page -- --ignored`,
/// `GPUPOOL_EVENTS` of them if that is set.
#[test]
#[ignore = "makes a file to measure with"]
fn make_a_long_history() {
    let events = std::env::var("GPUPOOL_EVENTS").ok().and_then(|n| n.parse().ok()).unwrap_or(300_000);
    std::fs::copy(repeated(events), std::env::var_os("GPUPOOL_KEEP").unwrap()).unwrap();
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    let text = std::fs::read_to_string(page_of(&recorded(), "plain.html")).unwrap();
    for word in ["http://", "https://", "<link", "src=", "@import", "url(", "fetch(", "XMLHttpRequest", "%%"] {
        assert!(!text.contains(word), "{word}");
    }
    assert!(text.contains("train.py:8 forward") && text.contains("default-src 'none'"));
}

#[test]
fn what_a_snapshot_says_cannot_become_code() {
    let evil = temporary("evil.json");
    let name = "</script><script>document.title='gotcha'</script><img src=x onerror=alert(1)>";
    let text = serde_json::json!({
        "segments": [{"device": 0, "address": 4096, "total_size": 512, "stream": 0, "blocks":
            [{"size": 512, "state": "active_allocated", "frames": [{"name": name, "filename": name, "line": 1}]}]}],
        "device_traces": [[{"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "user_metadata": name}]],
    });
    std::fs::write(&evil, text.to_string()).unwrap();
    let page = std::fs::read_to_string(page_of(&evil, "evil.html")).unwrap();
    assert!(!page.contains("</script><script>document") && !page.contains("<img"));
}

#[test]
fn a_picture_takes_work_by_the_pixel_and_not_by_the_event() {
    let Some(browser) = browser() else {
        println!("skipped: no chromium");
        return;
    };
    let small = shown(browser, &page_of(&recorded(), "small.html"));
    assert!(small.0.contains("256.0 MiB reserved in 17 segments"), "the figures are there");
    let (dom, work) = shown(browser, &page_of(&repeated(300_000), "large.html"));
    assert!(dom.contains("train.py:8 forward"), "the legend is there");
    let figure = |key: &str| work[key].as_f64().unwrap();
    let columns = figure("columns");
    assert!((1000.0..=1400.0).contains(&columns), "a column a pixel: {work}");
    assert!(figure("points") / columns <= 14.0, "a point a column for each area: {work}");
    // A checkpoint each 256 events, and the tree of maxima: two nodes a level.
    assert!(figure("visitedPerColumn") <= 256.0 + 2.0 * 20.0, "{work}");
    println!("first picture after {} ms", figure("firstPictureMs"));
    for large in ["large.html", "repeated.pickle"] {
        std::fs::remove_file(temporary(large)).unwrap();
    }
    std::fs::remove_dir_all(temporary("profile")).unwrap();
}
