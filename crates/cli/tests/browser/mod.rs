//! What the tests in a browser have in common. They are skipped, and say so, where there is none.
#![allow(dead_code, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use gpupool_snapshot::{Action, Event, Snapshot};
use serde_json::Value;

pub(crate) fn temporary(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("gpupool-page-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder.join(name)
}

pub(crate) fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../snapshot/data").join(name)
}

/// Runs the program; it must succeed.
pub(crate) fn gpupool(arguments: &[&str]) {
    let out = Command::new(env!("CARGO_BIN_EXE_gpupool")).args(arguments).output().unwrap();
    assert!(out.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// The recorded training run, over and over: between the turns what is left is freed.
pub(crate) fn repeated(events: usize) -> PathBuf {
    let mut snapshot = Snapshot::read("train", std::fs::File::open(recorded("train.pickle")).unwrap()).unwrap();
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

pub(crate) fn page_of(snapshot: &Path, name: &str) -> PathBuf {
    let page = temporary(name);
    gpupool(&["inspect", &snapshot.display().to_string(), "--html", &page.display().to_string(), "--json"]);
    page
}

/// A browser without a window; `None` after saying that the test is skipped.
pub(crate) fn browser() -> Option<&'static str> {
    let there = |name: &&&str| {
        let mut command = Command::new(**name);
        let status = command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    let found = ["chromium", "chromium-browser", "google-chrome"].iter().find(there).copied();
    if found.is_none() {
        println!("skipped: no chromium");
    }
    found
}

/// The page's elements after its scripts have run, and what it says in its element `element`.
pub(crate) fn shown(browser: &str, page: &Path, flags: &[&str], element: &str) -> (String, Value) {
    let profile = temporary(&format!("profile-{}", page.file_name().unwrap().display()));
    let out = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom"])
        .args(flags)
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("file://{}", page.display()))
        .stderr(Stdio::null())
        .output()
        .unwrap();
    std::fs::remove_dir_all(profile).unwrap();
    let dom = String::from_utf8(out.stdout).unwrap();
    let begin = format!("<output id=\"{element}\" hidden=\"\">");
    let work = dom.split(&begin).nth(1).and_then(|rest| rest.split("</output>").next());
    let work = work.unwrap_or_else(|| panic!("the page drew nothing: {}", &dom[..dom.len().min(2000)]));
    let work = work.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&");
    (dom.clone(), serde_json::from_str(&work).unwrap_or_else(|e| panic!("{e}: {work:?}")))
}
