//! PyTorch's memory viewer opens what we write: a page that loads a pickle as the viewer does runs in a browser.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

mod browser;

use std::path::{Path, PathBuf};

use browser::{browser, gpupool, recorded, repeated, shown, temporary};
use gpupool_snapshot::{Action, BlockStatus, Snapshot};
use serde_json::{Value, json};

/// A page with the file in it, as PyTorch's own script makes one.
fn page_with(pickle: &Path) -> PathBuf {
    let mut text = String::new();
    let bytes = std::fs::read(pickle).unwrap();
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for three in bytes.chunks(3) {
        let number = (0..3).fold(0_u32, |n, at| n << 8 | u32::from(three.get(at).copied().unwrap_or(0)));
        for at in 0..4 {
            let letter = LETTERS[(number >> (18 - 6 * at) & 63) as usize] as char;
            text.push(if at > three.len() { '=' } else { letter });
        }
    }
    let page = pickle.with_extension("viewer.html");
    let html = format!(
        "<!doctype html><meta charset=utf-8><canvas id=canvas width=1000 height=500></canvas><output id=\"work\" hidden></output>\
         <script type=\"text/plain\" id=\"file\">{text}</script><script>{}</script>",
        include_str!("browser/viewer.js")
    );
    std::fs::write(&page, html).unwrap();
    page
}

/// What the page must find, by another road.
fn expected(pickle: &Path) -> Value {
    let snapshot = Snapshot::read("file", std::fs::File::open(pickle).unwrap()).unwrap();
    let device = |(device, events): (u32, &Vec<gpupool_snapshot::Event>)| {
        let own = || snapshot.segments.iter().filter(move |segment| segment.device == device);
        let active = own().flat_map(|s| &s.blocks).filter(|b| b.state != BlockStatus::Inactive);
        // Backwards: what is live or pending at the end, less what came, more what went.
        let held = own().flat_map(|s| &s.blocks).filter(|b| b.state != BlockStatus::Inactive);
        let mut now = held.map(|b| b.requested_size).sum::<u64>() as i64;
        let moves = events.iter().rev().filter(|e| matches!(e.action, Action::Alloc | Action::FreeCompleted));
        let mut peak = now;
        for event in moves {
            now += if event.action == Action::Alloc { -(event.size as i64) } else { event.size as i64 };
            peak = peak.max(now);
        }
        json!({
            "events": events.len(), "drawn": events.len(), "segments": own().count(), "before": now, "peak": peak,
            "reserved": own().map(|s| s.total_size).sum::<u64>(), "requested": active.map(|b| b.requested_size).sum::<u64>(),
        })
    };
    Value::Array((0..).zip(&snapshot.device_traces).map(device).collect())
}

fn opens(browser: &str, pickle: &Path) {
    let name = pickle.display();
    let (_, told) = shown(browser, &page_with(pickle), &[], "work");
    assert!(told["error"].is_null(), "{name}: {told}");
    for (told, expected) in told["devices"].as_array().unwrap().iter().zip(expected(pickle).as_array().unwrap()) {
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(told[key], *value, "{name}: {key}: {told}");
        }
    }
}

#[test]
fn pytorchs_viewer_opens_what_we_write() {
    let Some(browser) = browser() else { return };
    // PyTorch's own files as we write them, and PyTorch's own, so that the page is known to be no stricter than it.
    for name in ["train", "graphs_shared", "oom"] {
        let theirs = recorded(&format!("{name}.pickle"));
        let ours = temporary(&format!("ours-{name}.pickle"));
        gpupool(&["inspect", &theirs.display().to_string(), "--snapshot", &ours.display().to_string(), "--json"]);
        opens(browser, &ours);
        let copy = temporary(&format!("theirs-{name}.pickle"));
        std::fs::copy(&theirs, &copy).unwrap();
        opens(browser, &copy);
    }
    // Our own allocator's, with graphs, several streams, frees that complete late.
    for (trace, policy) in [
        ("graph_serving", "segments"),
        ("overlap_streams", "segments"),
        ("gnn_sampling", "torch-2.15"),
        ("gpt2_train", "pages"),
        ("graph_serving", "pages"),
    ] {
        let file = temporary(&format!("own-{trace}-{policy}.pickle"));
        let recording = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../replay/data/traces/{trace}.trace.gz"));
        let (file_name, recording) = (file.display().to_string(), recording.display().to_string());
        gpupool(&["replay", &recording, "--policy", policy, "--snapshot", &file_name, "--json"]);
        opens(browser, &file);
    }
    // Longer than what one call takes as arguments.
    opens(browser, &repeated(300_000));
    std::fs::remove_dir_all(temporary("")).unwrap();
}
