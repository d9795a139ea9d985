//! The program as a whole: what it prints, and its exit status.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;

fn gpupool(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gpupool")).args(arguments).output().unwrap()
}

fn status(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(output: &Output) -> Value {
    assert!(output.stderr.is_empty(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn data(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../replay/data").join(name).display().to_string()
}

fn temporary(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn write_gzip(name: &str, text: &str) -> String {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    let path = temporary(name);
    std::fs::write(&path, encoder.finish().unwrap()).unwrap();
    path.display().to_string()
}

const HEADER: &str = r#"{"format": "torch-trace-1", "name": "t", "conf": "", "peak_allocated": 1, "peak_requested": 1, "peak_active": 1, "peak_reserved": 1, "device_allocs": 1, "allocs": 2, "segments_end": 0}"#;

/// The arguments are refused: status 2, nothing on standard output, and these words.
#[track_caller]
fn refused(arguments: &[&str], words: &str) {
    let output = gpupool(arguments);
    assert_eq!(status(&output), 2, "{arguments:?}: {}", stderr(&output));
    assert!(output.stdout.is_empty(), "{arguments:?}");
    assert!(stderr(&output).contains(words), "{arguments:?}: {}", stderr(&output));
}

#[test]
fn replay_tells_what_the_contract_says() {
    let output = gpupool(&[
        "replay",
        &data("traces/seed_batches.trace.gz"),
        "--policy",
        "torch-2.11",
        "--iterations",
        "2",
        "--json",
    ]);
    assert_eq!(status(&output), 0);
    let all = json(&output);
    assert_eq!(all.as_object().unwrap().len(), 1);
    let trace = &all["traces"][0];
    for (key, value) in [("trace", "seed_batches"), ("policy", "torch-2.11"), ("device", "sim")] {
        assert_eq!(trace[key], value);
    }
    assert_eq!(trace["events"], 2564);
    assert_eq!(trace["peak_requested"], 2_621_456);
    assert_eq!(trace["peak_allocated"], 2_622_464);
    assert_eq!(trace["peak_reserved"], 6_291_456);
    assert!((trace["utilization"].as_f64().unwrap() - 2_621_456.0 / 6_291_456.0).abs() < 1e-9);
    assert_eq!(trace["driver_calls"]["cuMemAlloc"], 5);
    assert!(trace["driver_us"].as_f64().unwrap() > 0.0);
    assert!(trace["ns_per_event"].as_f64().unwrap() > 0.0);
    assert_eq!(trace["recorded"]["peak_reserved"], 6_291_456);
    assert_eq!(trace["recorded"]["steps"], 1, "the whole header is quoted");
    let iterations = trace["iterations"].as_array().unwrap();
    assert_eq!(iterations.len(), 2);
    for key in ["driver_calls", "driver_us", "peak_reserved", "remaps", "splits"] {
        assert!(iterations.iter().all(|turn| turn.get(key).is_some()), "{key}");
    }
    let segments = trace["segments"].as_array().unwrap();
    assert_eq!(segments.len(), 5);
    assert_eq!(segments[0], serde_json::json!([0, 2_097_152, 0, 0, 1280]));
    assert_eq!(segments[3], serde_json::json!([3, 2_097_152, 1, 1, null]));
    let pool = &trace["pools"][0];
    assert_eq!((&pool["pool"], &pool["graphs"], &pool["peak_reserved"]), (&1.into(), &128.into(), &4_194_304.into()));
    assert!(pool["peak_allocated"].as_u64().unwrap() > 0);
}

#[test]
fn replay_without_a_trace_runs_the_bundled_one() {
    let output = gpupool(&["replay", "--json"]);
    assert_eq!(status(&output), 0);
    assert_eq!(json(&output)["traces"][0]["trace"], "gpt2_train");
    let output = gpupool(&["replay"]);
    assert_eq!(status(&output), 0);
    let text = stdout(&output);
    for words in ["gpt2_train", "pages", "15.87 GiB", "77.8 %"] {
        assert!(text.contains(words), "{text}");
    }
    assert!(output.stderr.is_empty(), "no progress where nobody looks");
}

#[test]
fn replay_tries_every_policy() {
    let output = gpupool(&[
        "replay",
        &data("traces/overlap_streams.trace.gz"),
        "--policy",
        "all",
        "--json",
        "--completion-lag",
        "3",
    ]);
    let all = json(&output);
    let policies: Vec<&str> = all["traces"].as_array().unwrap().iter().map(|t| t["policy"].as_str().unwrap()).collect();
    assert_eq!(policies, ["segments", "pages", "stream-ordered", "torch-2.15", "torch-2.11"]);
}

#[test]
fn running_out_of_memory_is_told_and_is_status_1() {
    let trace = data("traces/gpt2_train.trace.gz");
    let output = gpupool(&["replay", &trace, "--capacity", "8GiB", "--json"]);
    assert_eq!(status(&output), 1);
    let all = json(&output);
    let trace_result = &all["traces"][0];
    assert_eq!(trace_result["completed"], false);
    assert!(trace_result["stopped"]["line"].as_u64().unwrap() > 1);
    assert!(trace_result["ns_per_event"].is_null());
    let output = gpupool(&["replay", &trace, "--capacity", "8GiB"]);
    assert_eq!(status(&output), 1);
    assert!(stdout(&output).contains("out of memory"), "{}", stdout(&output));
}

#[test]
fn a_forecast_that_does_not_fit_explains_itself() {
    let trace = data("traces/gpt2_train.trace.gz");
    let output = gpupool(&["forecast", &trace, "--capacity", "8GiB", "--json"]);
    assert_eq!(status(&output), 1);
    let told = json(&output);
    assert_eq!(
        (&told["file"], &told["policy"], &told["completed"]),
        (&trace.clone().into(), &"pages".into(), &false.into())
    );
    assert_eq!((&told["capacity"], &told["stopped"]["requested"]), (&(8_u64 << 30).into(), &1_350_908_160_u64.into()));
    let line = told["stopped"]["line"].as_u64().unwrap();
    assert!(told["error"].as_str().unwrap().contains(&format!("line {line}")), "{told}");
    assert!(told.get("peak_reserved").is_none(), "no part of a forecast looks like one");
    let output = gpupool(&["forecast", &trace, "--capacity", "8GiB"]);
    assert_eq!(status(&output), 1);
    let text = stdout(&output);
    for words in [
        trace.as_str(),
        "8.00 GiB",
        &format!("line {line}"),
        "1.26 GiB requested",
        "free of 8.00 GiB",
        "--find-capacity",
    ] {
        assert!(text.contains(words), "{words} in {text}");
    }
}

#[test]
fn a_forecast_of_a_snapshot_says_what_its_history_does_not_tell() {
    let file = recorded("graphs_shared.pickle");
    let told = json(&gpupool(&["forecast", &file, "--json"]));
    assert!(told["peak_reserved"].as_u64() > Some(0), "{told}");
    assert!(told["notes"].to_string().contains("says nothing about graphs"), "{told}");
    assert!(stdout(&gpupool(&["forecast", &file])).contains("says nothing about graphs"));
    let trace = json(&gpupool(&["forecast", &data("traces/seed_batches.trace.gz"), "--json"]));
    assert!(trace.get("notes").is_none() && !trace["pools"].as_array().unwrap().is_empty(), "{trace}");
}

#[test]
fn a_file_of_another_kind_is_told_by_its_kind() {
    let (trace, conform) = (data("traces/seed_batches.trace.gz"), data("conform/torch211-mix-1.jsonl.gz"));
    refused(&["replay", &conform], "line 1: the format is \"conform-1\", not \"torch-trace-1\"");
    refused(&["conform", &trace], "line 1: the format is \"torch-trace-1\", not \"conform-1\"");
    refused(&["inspect", &trace], "this is a gzip file: unpack it, if there is a snapshot in it; traces are replayed");
    refused(&["inspect", &data("../src/lib.rs")], "this is neither a pickle of protocols 2 to 5 nor JSON");
}

#[test]
fn what_a_policy_refuses_names_the_file_and_the_line() {
    // Two captures that draw from one pool at a time, which the policy does not do, and a conf that it does not know.
    let header = HEADER.replace("\"allocs\": 2", "\"allocs\": 1").replace("\"t\"", "\"another name\"");
    let file = write_gzip("two_captures.trace.gz", &format!("{header}\nB 1 1 1\nB 2 1 2\nE 1\nE 2\n"));
    refused(&["replay", &file], &format!("{file}: line 3, under pages: "));
    refused(&["forecast", &file], &format!("{file}: line 3, under pages: "));
    let conf = header.replace("\"conf\": \"\"", "\"conf\": \"sideways:True\"");
    let file = write_gzip("conf.trace.gz", &format!("{conf}\n"));
    refused(&["replay", &file, "--policy", "torch-2.11"], &format!("{file}: the recorded PYTORCH_CUDA_ALLOC_CONF"));
}

/// A snapshot with this history and one segment.
fn write_history(name: &str, events: Value) -> String {
    let path = temporary(name);
    let block = serde_json::json!({"size": 2 << 20, "state": "inactive"});
    let segment =
        serde_json::json!({"device": 0, "address": 4096, "total_size": 2 << 20, "stream": 0, "blocks": [block]});
    std::fs::write(&path, serde_json::json!({"segments": [segment], "device_traces": [events]}).to_string()).unwrap();
    path.display().to_string()
}

fn event(action: &str, addr: u64, size: u64) -> Value {
    serde_json::json!({"action": action, "addr": addr, "size": size, "stream": 0})
}

#[test]
fn events_that_are_left_out_of_a_history_are_told() {
    let strange = [event("teleport", 1, 2), event("alloc", 4096, u64::MAX), event("segment_alloc", u64::MAX, 512)];
    let file = write_history("nothing_left.json", strange.to_vec().into());
    let left = "1 events of kinds that are not known and 2 events of sizes or at addresses that nothing can have";
    refused(&["replay", &file], &format!("the snapshot has no history but for {left}"));
    let some: Vec<Value> = strange.into_iter().chain([event("alloc", 4096, 512)]).collect();
    let file = write_history("some_left.json", some.into());
    let output = gpupool(&["replay", &file]);
    assert!(status(&output) == 0 && stdout(&output).contains(&format!("{left} were left out")), "{}", stdout(&output));
    let text = stdout(&gpupool(&["inspect", &file]));
    assert!(text.contains("1 events of kinds that are not known were left out."), "{text}");
    assert!(text.contains("2 events of sizes or at addresses that nothing can have were left out."), "{text}");
}

#[test]
#[cfg(unix)]
fn what_comes_through_a_pipe_is_read_once() {
    let from_pipe = |file: &str| {
        let mut cat = Command::new("cat").arg(file).stdout(std::process::Stdio::piped()).spawn().unwrap();
        let input = cat.stdout.take().unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_gpupool"));
        let output = program.args(["replay", "/dev/stdin", "--json"]).stdin(input).output().unwrap();
        cat.wait().unwrap();
        output
    };
    for file in [data("traces/seed_batches.trace.gz"), recorded("oom.pickle")] {
        let output = from_pipe(&file);
        assert_eq!(status(&output), 0, "{file}: {}", stderr(&output));
    }
    refused(&["replay", env!("CARGO_TARGET_TMPDIR")], "cannot read the file");
}

#[test]
fn a_history_is_told_by_its_own_events() {
    let large = 40_u64 << 30;
    let events = [event("alloc", 4096, large), event("free_completed", 9 << 40, large), event("alloc", 5 << 40, large)];
    let file = write_history("large.json", events.to_vec().into());
    // The block of the second event is older than the history, and there is room for two.
    let output = gpupool(&["replay", &file, "--capacity", "60GiB", "--json"]);
    let stopped = json(&output)["traces"][0]["stopped"].clone();
    assert_eq!((&stopped["line"], &stopped["place"]), (&1.into(), &"event 1 of its history".into()));
    let output = gpupool(&["replay", &file, "--capacity", "30GiB"]);
    let text = stdout(&output);
    assert!(text.contains("stopped in turn 1 at a block that is older than its history, out of memory"), "{text}");
    let output = gpupool(&["replay", &file, "--capacity", "100GiB"]);
    assert_eq!(status(&output), 0, "a free whose request was not recorded is a free: {}", stdout(&output));
}

#[test]
fn memory_that_is_gone_leaves_a_history_to_tell_of() {
    let path = temporary("gone.json");
    let events = serde_json::json!([
        event("alloc", 4096, 512),
        event("free_requested", 4096, 512),
        event("free_completed", 4096, 512)
    ]);
    std::fs::write(&path, serde_json::json!({"segments": [], "device_traces": [events]}).to_string()).unwrap();
    let text = stdout(&gpupool(&["inspect", &path.display().to_string()]));
    assert!(text.contains("held no memory") && text.contains("Most was live on device 0 at event 1: 512 B"), "{text}");
}

#[test]
fn the_smallest_capacity_is_found() {
    let output = gpupool(&["replay", &data("traces/seed_batches.trace.gz"), "--find-capacity", "--json"]);
    assert_eq!(json(&output)["traces"][0]["min_capacity"], 6_291_456);
}

#[test]
fn a_snapshot_of_the_peak_can_be_inspected() {
    let file = temporary("peak.json").display().to_string();
    let output = gpupool(&["replay", &data("traces/graph_serving.trace.gz"), "--snapshot", &file, "--json"]);
    let peak = json(&output)["traces"][0]["peak_reserved"].clone();
    let output = gpupool(&["inspect", &file, "--json"]);
    assert_eq!(status(&output), 0);
    assert_eq!(json(&output)["summary"]["total"]["reserved"], peak);
    let text = stdout(&gpupool(&["inspect", &file]));
    assert!(text.contains("reserved in") && text.contains("default"), "{text}");
    let other = temporary("other.json").display().to_string();
    gpupool(&["replay", &data("traces/seed_batches.trace.gz"), "--snapshot", &other]);
    let output = gpupool(&["inspect", &other, &file, "--json"]);
    assert!(json(&output)["growth"]["total"]["reserved"].as_i64().unwrap() > 0);
    assert!(stdout(&gpupool(&["inspect", &other, &file])).contains("Where, most grown first"));
    refused(&["inspect", &file, &other, "--html", "x"], "--html and --snapshot take one snapshot");
    // Its history says what was asked for up to the peak: replayed, it takes the same.
    let again = gpupool(&["replay", &file, "--json"]);
    let again = &json(&again)["traces"][0];
    assert_eq!((&again["peak_reserved"], again["pools"].as_array().unwrap().is_empty()), (&peak, false));
}

#[test]
fn snapshots_that_are_none_are_refused_with_their_place() {
    let path = temporary("bad.json");
    std::fs::write(&path, r#"{"segments": [{"device": 0, "address": 1, "total_size": "x"}]}"#).unwrap();
    let file = path.display().to_string();
    refused(&["inspect", &file], "bad.json: segments[0].total_size: an unsigned integer is expected");
    refused(&["inspect", "/no/such/file"], "/no/such/file: cannot read the file");
    refused(&["replay", &file], "bad.json: segments[0].total_size");
    let path = temporary("no_history.json");
    std::fs::write(&path, r#"{"segments": []}"#).unwrap();
    refused(&["replay", &path.display().to_string()], "the snapshot has no history");
}

fn recorded(name: &str) -> String {
    format!("{}/../snapshot/data/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn what_a_job_would_have_needed_is_one_command() {
    let output = gpupool(&["replay", &recorded("train.pickle"), "--policy", "all", "--find-capacity", "--json"]);
    assert_eq!(status(&output), 0);
    let all = json(&output);
    let of = |policy: &str| all["traces"].as_array().unwrap().iter().find(|t| t["policy"] == policy).unwrap().clone();
    let exact = of("torch-2.11");
    assert_eq!(exact["recorded"]["peak_reserved"], 268_435_456, "what torch reserved at the most");
    assert_eq!(exact["peak_reserved"], 268_435_456, "and so does its policy on its own history");
    assert_eq!(exact["peak_requested"], exact["recorded"]["peak_requested"]);
    let (ours, least) = (of("segments")["peak_reserved"].as_u64(), of("segments")["min_capacity"].as_u64());
    assert!(ours <= Some(268_435_456) && least <= ours, "{ours:?} {least:?}");
    let output = gpupool(&["replay", &recorded("graphs_shared.pickle"), "--json"]);
    let notes = json(&output)["traces"][0]["notes"].to_string();
    assert!(notes.contains("private pools") && notes.contains("says nothing about graphs"), "{notes}");
    let text = stdout(&gpupool(&["replay", &recorded("oom.pickle")]));
    assert!(text.contains("the request of 18874368 bytes that failed is made at the end"), "{text}");
}

#[test]
fn every_allocator_that_is_present_is_compared() {
    let output = gpupool(&["stress", "--compare", "--workloads", "hot-512,set-64x2", "--samples", "1", "--json"]);
    assert_eq!(status(&output), 0);
    let found = json(&output);
    let rows = found["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["workload"].as_str().unwrap()).collect::<Vec<_>>(), ["hot-512", "set-64"]);
    assert_eq!(rows[1]["threads"], 2);
    for peer in ["segments", "pages", "torch-2.15", "tree-and-hash"] {
        for row in rows {
            let figure = row["peers"].as_array().unwrap().iter().find(|figure| figure["peer"] == peer).unwrap();
            assert!(figure["ns"]["median"].is_number() && figure["error"].is_null(), "{figure}");
        }
    }
    let is_there = rows[0]["peers"].as_array().unwrap().iter().any(|figure| figure["peer"] == "cubecl");
    let is_said_to_be_left_out = found["left_out"].to_string().contains("cubecl (feature `cubecl`)");
    assert_eq!((is_there, is_said_to_be_left_out), (cfg!(feature = "cubecl"), !cfg!(feature = "cubecl")));
}

#[test]
fn a_snapshot_is_written_again_in_either_format() {
    for ending in ["pickle", "json"] {
        let file = temporary(&format!("again.{ending}")).display().to_string();
        assert_eq!(status(&gpupool(&["inspect", &recorded("train.pickle"), "--snapshot", &file, "--json"])), 0);
        assert_eq!(std::fs::read(&file).unwrap()[0], if ending == "pickle" { 0x80 } else { b'{' });
        let summary = |file: &str| json(&gpupool(&["inspect", file, "--json"]))["summary"].clone();
        assert_eq!(summary(&file), summary(&recorded("train.pickle")));
    }
}

#[test]
fn pickles_of_torch_are_inspected() {
    let output = gpupool(&["inspect", &recorded("oom.pickle"), "--json"]);
    assert_eq!(status(&output), 0);
    let summary = &json(&output)["summary"];
    assert_eq!((&summary["total"]["reserved"], &summary["total"]["live"]), (&624_951_296.into(), &614_834_176.into()));
    let text = stdout(&gpupool(&["inspect", &recorded("oom.pickle")]));
    assert!(text.contains("train.py:31 <module>") && text.contains("raise the limit"), "{text}");
    let text = stdout(&gpupool(&["inspect", &recorded("train.pickle"), &recorded("oom.pickle")]));
    assert!(text.contains("by who allocated them"), "{text}");
    let file = temporary("ours.pickle").display().to_string();
    gpupool(&["replay", &data("traces/graph_serving.trace.gz"), "--snapshot", &file]);
    assert_eq!(std::fs::read(&file).unwrap()[..2], [0x80, 4], "written as a pickle by its name");
    assert_eq!(status(&gpupool(&["inspect", &file])), 0);
}

#[test]
fn conform_tells_one_object_a_file() {
    let files = [data("conform/torch215-pools-9003.jsonl.gz"), data("conform/torch211-mix-1.jsonl.gz")];
    let output = gpupool(&["conform", &files[0], &files[1], "--json"]);
    assert_eq!(status(&output), 0);
    let results: Vec<Value> = stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(results.len(), 2);
    for (result, (file, ops)) in results.iter().zip(files.iter().zip([323, 500])) {
        assert_eq!(result, &serde_json::json!({"file": file, "ops": ops, "matched": ops, "first_mismatch": null}));
    }
    assert!(stdout(&gpupool(&["conform", &files[0]])).contains("1 of 1 files the same"));
}

#[test]
fn a_decision_that_differs_is_status_1() {
    let header = r#"{"format":"conform-1","source":"s","version":"2.15","kind":"plain","seed":1,"device_total":85899345920,"device_limit":85899345920,"conf":"","stats_shape":"current"}"#;
    let alloc =
        r#"{"op":"alloc","id":1,"size":1000,"stream":0,"driver":[["malloc",2097152,0,"0"]],"segment":0,"offset":512}"#;
    let file = write_gzip("differs.jsonl.gz", &format!("{header}\n{{\"op\":\"empty_cache\"}}\n{alloc}\n"));
    let output = gpupool(&["conform", &file, "--json"]);
    assert_eq!(status(&output), 1);
    let result = json(&output);
    assert_eq!((&result["ops"], &result["matched"]), (&2.into(), &1.into()));
    let mismatch = &result["first_mismatch"];
    assert_eq!((&mismatch["op"], &mismatch["line"]), (&2.into(), &3.into()));
    assert_eq!(mismatch["expected"], "segment 0, offset 512");
    assert_eq!(mismatch["got"], "segment 0, offset 0");
    let output = gpupool(&["conform", &file]);
    assert_eq!(status(&output), 1);
    assert!(stdout(&output).contains("operation 2 (alloc, line 3) differs"));
}

#[test]
fn bad_input_is_status_2_with_file_and_line() {
    let file = write_gzip("freed.trace.gz", &format!("{HEADER}\na 1 512 0\nf 7\n"));
    refused(&["replay", &file, "--json"], "freed.trace.gz: line 3: allocation 7 was never allocated");
    let file = write_gzip("short.trace.gz", &format!("{HEADER}\na 1 512 0"));
    refused(&["replay", &file], "short.trace.gz: line 2: the file is truncated");
    let file = write_gzip("unknown.trace.gz", &format!("{HEADER}\nx 1\n"));
    refused(&["replay", &file], "line 2: unknown event");
    let plain = temporary("plain.trace.gz");
    std::fs::write(&plain, "text\n").unwrap();
    refused(&["replay", &plain.display().to_string()], "this is not a gzip file");
    let whole = std::fs::read(data("traces/seed_batches.trace.gz")).unwrap();
    let cut = temporary("cut.trace.gz");
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    let good = data("traces/seed_batches.trace.gz");
    refused(&["replay", &good, &cut.display().to_string(), "--json"], "gzip data end too early");
    let file = write_gzip("unknown.jsonl.gz", "{\"format\":\"conform-1\"}\n");
    refused(&["conform", &file], "unknown.jsonl.gz: line 1");
    refused(&["replay", "/no/such/file"], "/no/such/file: ");
    refused(&["conform", "/no/such/file"], "/no/such/file: cannot read the file");
    let added = temporary("added.trace.gz");
    std::fs::write(&added, [&whole[..], b"junk"].concat()).unwrap();
    refused(&["replay", &added.display().to_string()], "after the end of the gzip data come bytes that are none");
    let list = temporary("list.json");
    std::fs::write(&list, " []\n").unwrap();
    refused(&["replay", &list.display().to_string()], "list.json: an object is expected here, not a list");
    let empty = temporary("empty.json");
    std::fs::write(&empty, "").unwrap();
    refused(&["inspect", &empty.display().to_string()], "empty.json: the file is empty");
    refused(&["replay", &empty.display().to_string()], "the file is empty");
    let unpacked = temporary("unpacked.trace");
    std::fs::write(&unpacked, format!("{HEADER}\na 1 512 0\n")).unwrap();
    refused(&["replay", &unpacked.display().to_string()], "this is not a gzip file");
}

#[test]
fn what_is_read_is_not_overwritten_and_nothing_is_written_of_nothing() {
    let empty = write_gzip("empty.trace.gz", &format!("{}\n", HEADER.replace("\"allocs\": 2", "\"allocs\": 1")));
    let page = temporary("empty.html").display().to_string();
    refused(&["replay", &empty, "--html", &page], "nothing was ever reserved");
    assert!(!std::path::Path::new(&page).exists());
    let snapshot = temporary("kept.json").display().to_string();
    let trace = data("traces/seed_batches.trace.gz");
    assert_eq!(status(&gpupool(&["replay", &trace, "--snapshot", &snapshot])), 0);
    let before = std::fs::read(&snapshot).unwrap();
    let words = "write two files, and none that is read";
    refused(&["inspect", &snapshot, "--html", &snapshot], words);
    refused(&["replay", &snapshot, "--html", &snapshot], words);
    assert_eq!(std::fs::read(&snapshot).unwrap(), before);
    let both = temporary("both.html").display().to_string();
    refused(&["replay", &trace, "--html", &both, "--snapshot", &both], words);
    refused(&["inspect", &snapshot, "--html", &both, "--snapshot", &both], words);
    assert!(!std::path::Path::new(&both).exists());
}

#[test]
fn what_a_file_is_called_does_not_command_the_terminal() {
    let header = HEADER.replace("\"name\": \"t\"", r#""name": "\u001b[31mred\u0007""#);
    let events = "a 1 512 0\nf 1\nc 1\n";
    let output = gpupool(&["replay", &write_gzip("red.trace.gz", &format!("{header}\n{events}"))]);
    let text = stdout(&output);
    assert!(status(&output) == 0 && text.contains(r"\u{1b}[31mred\u{7}"), "{text}");
    assert!(!text.contains('\u{1b}') && !text.contains('\u{7}'));
}

#[test]
fn arguments_that_make_no_sense_are_status_2() {
    // Without a driver that is what is said; with one, that there are not so many GPUs.
    refused(&["replay", "--device", "cuda:99"], "CUDA d");
    refused(&["stress", "--device", "cuda:99"], "CUDA d");
    refused(&["replay", "--device", "cuda", "--find-capacity"], "--find-capacity takes --device sim");
    refused(&["replay", "--device", "cuda:"], "a device is sim or cuda[:N]");
    refused(&["replay", "--device", "tpu"], "a device is sim or cuda[:N]");
    refused(&["replay", "--policy", "pages", "--preset", "tight"], "unknown preset `tight`");
    refused(&["replay", "--policy", "best"], "best");
    refused(&["replay", "--policy", "segments", "--preset", "memory"], "--preset belongs to the policy `pages`");
    refused(&["replay", "--policy", "all", "--snapshot", "x"], "take one trace and one policy");
    refused(&["replay", "--capacity", "0"], "0 bytes");
    refused(&["replay", "--capacity", "9999999999999999"], "absurd");
    refused(&["replay", "--iterations", "0"], "iterations");
    refused(&["stress", "--seconds", "-1"], "seconds");
    refused(&["stress", "--seconds", "nan"], "seconds");
    refused(&["stress", "--threads", "0"], "threads");
    refused(&["stress", "--compare", "--peers", "x"], "add --device cuda");
    refused(&["stress", "--samples", "3"], "--compare");
    refused(&["top"], "SOCKET");
    refused(&["top", "socket", "--interval", "nan"], "0.1 to 3600 seconds");
    refused(&["top", "socket", "--interval", "1e300"], "0.1 to 3600 seconds");
    refused(&["stress", "--capacity", "1", "--operations", "5"], "it has 1 of 1 bytes free");
    refused(&["conform"], "FILE");
    refused(&["forecast"], "TRACE");
}

#[test]
fn stress_tells_what_the_contract_says() {
    let output = gpupool(&["stress", "--operations", "3000", "--threads", "2", "--seed", "5", "--json"]);
    assert_eq!(status(&output), 0);
    let report = json(&output);
    assert_eq!((&report["errors"], &report["leaked_bytes"]), (&0.into(), &0.into()));
    assert!(report["operations"].as_u64().unwrap() > 1000);
    assert!(report["checked_bytes"].as_u64().unwrap() > 0);
    assert!(report["ns_per_operation"].as_f64().unwrap() > 0.0);
    let output = gpupool(&["stress", "--seconds", "0.2", "--policy", "all"]);
    assert_eq!(status(&output), 0);
    assert!(stdout(&output).contains("torch-2.15"));
}
