//! Reading conformance files, each way in which one can be wrong, and whether the runner notices everything that a
//! file says.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use gpupool_replay::TextProblem;
use gpupool_replay::conform::{BlockKind, ConformError, ConformProblem, DriverCall, Op, Place, Script, Version, run};

const HEADER: &str = r#"{"format":"conform-1","source":"s","version":"2.15","kind":"plain","seed":1,"device_total":85899345920,"device_limit":85899345920,"conf":"","stats_shape":"current,peak,allocated,freed"}"#;

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn parse(lines: &str) -> Result<Script, ConformError> {
    Script::parse("c.gz", &gzip(&format!("{HEADER}\n{lines}"))[..])
}

#[track_caller]
fn problem(lines: &str) -> ConformProblem {
    let error = parse(lines).unwrap_err();
    assert_eq!((error.file.as_str(), error.line), ("c.gz", lines.lines().count() as u64 + 1), "{error}");
    error.problem
}

const MALLOC: &str =
    r#"{"op":"alloc","id":1,"size":1000,"stream":0,"driver":[["malloc",2097152,0,"0"]],"segment":0,"offset":0}"#;

fn recorded(name: &str) -> Script {
    Script::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("data/conform").join(name)).unwrap()
}

#[test]
fn headers_are_checked() {
    let with = |from: &str, to: &str| {
        let header = HEADER.replace(from, to);
        assert_ne!(header, HEADER);
        Script::parse("c.gz", &gzip(&format!("{header}\n"))[..]).unwrap_err().problem
    };
    assert!(matches!(with("conform-1", "torch-trace-1"), ConformProblem::Format { .. }));
    assert!(matches!(with("2.15", "2.13"), ConformProblem::Version { .. }));
    assert!(matches!(with("current,peak,allocated,freed", "peak"), ConformProblem::StatsShape { .. }));
    assert!(matches!(with("\"seed\":1,", ""), ConformProblem::Missing { field: "seed" }));
    assert!(matches!(with("\"seed\":1", "\"seed\":\"x\""), ConformProblem::Type { .. }));
    assert!(matches!(with("\"device_total\":85899345920", "\"device_total\":0"), ConformProblem::DeviceSize { .. }));
    assert!(matches!(with("{", "["), ConformProblem::Json(_)));
    assert!(matches!(Script::parse("c", &b"x"[..]).unwrap_err().problem, ConformProblem::Text(TextProblem::NotGzip)));
    let bad_conf =
        Script::parse("c", &gzip(&format!("{}\n", HEADER.replace("\"conf\":\"\"", "\"conf\":\"no_such:1\"")))[..]);
    let refused = run(&bad_conf.unwrap(), "c.gz", |_| {}).unwrap_err();
    assert!(matches!(refused.problem, ConformProblem::Conf { .. }), "{refused}");
}

#[test]
fn lines_are_checked() {
    assert!(matches!(problem("{\"op\":\"allocate\"}\n"), ConformProblem::UnknownOp { .. }));
    assert!(matches!(problem("not json\n"), ConformProblem::Json(_)));
    assert!(matches!(problem("[1]\n"), ConformProblem::Json(_)));
    assert!(matches!(problem("{}\n"), ConformProblem::Missing { field: "op" }));
    assert!(matches!(problem("{\"op\":1}\n"), ConformProblem::Type { .. }));
    assert!(matches!(problem("{\"op\":\"alloc\",\"id\":1}\n"), ConformProblem::Missing { field: "size" }));
    assert!(matches!(problem("{\"op\":\"alloc\",\"id\":-1,\"size\":1,\"stream\":0}\n"), ConformProblem::Type { .. }));
    assert!(matches!(problem("{\"op\":\"empty_cache\",\"pool\":[1,0]}\n"), ConformProblem::UnknownField { .. }));
    assert!(matches!(problem("{\"op\":\"free\",\"id\":7}\n"), ConformProblem::NotLive { id: 7 }));
    assert!(matches!(problem("{\"op\":\"record_stream\",\"id\":7,\"stream\":1}\n"), ConformProblem::NotLive { id: 7 }));
    assert!(matches!(problem("{\"op\":\"set_memory_fraction\",\"fraction\":1.5}\n"), ConformProblem::Fraction { .. }));
    assert!(matches!(problem("{\"op\":\"create_pool\",\"pool\":[1]}\n"), ConformProblem::Type { .. }));
    let begin = "{\"op\":\"begin_allocate_to_pool\",\"pool\":[1,0],\"filter\":\"some\"}\n";
    assert!(matches!(problem(begin), ConformProblem::Type { .. }));
    assert!(matches!(problem("{\"op\":\"stream_end_capture\",\"stream\":1}\n"), ConformProblem::Capture { .. }));
    assert!(matches!(
        problem("{\"op\":\"empty_cache\",\"stats\":{\"nonsense\":1}}\n"),
        ConformProblem::UnknownCounter { .. }
    ));
    assert!(matches!(problem("{\"op\":\"empty_cache\",\"stats\":{\"segment\":[1,2]}}\n"), ConformProblem::Type { .. }));
    assert!(matches!(
        problem("{\"op\":\"empty_cache\",\"stats\":{\"private_pools\":{\"x\":[0,0,0,0]}}}\n"),
        ConformProblem::UnknownCounter { .. }
    ));
    assert!(matches!(problem("{\"op\":\"empty_cache\"}"), ConformProblem::Text(TextProblem::NoNewline)));
}

#[test]
fn segments_and_allocations_are_checked() {
    assert!(parse(&format!("{MALLOC}\n")).is_ok());
    assert!(matches!(
        problem(&format!("{MALLOC}\n{MALLOC}\n")),
        ConformProblem::SegmentOrder { expected: 1, found: 0 }
    ));
    let again = MALLOC.replace("2097152,0,\"0\"", "2097152,1,\"400000\"");
    assert!(matches!(problem(&format!("{MALLOC}\n{again}\n")), ConformProblem::AllocatedTwice { id: 1 }));
    let over = again.replace("400000", "100000").replace("\"id\":1", "\"id\":2");
    assert!(matches!(problem(&format!("{MALLOC}\n{over}\n")), ConformProblem::Address { segment: 1, .. }));
    let nowhere = MALLOC.replace("\"segment\":0", "\"segment\":5");
    assert!(matches!(problem(&format!("{nowhere}\n")), ConformProblem::NoSegment { segment: 5 }));
    let outside = MALLOC.replace("\"offset\":0", "\"offset\":2097152");
    assert!(matches!(problem(&format!("{outside}\n")), ConformProblem::NoSegment { segment: 0 }));
    let absurd = MALLOC.replace("\"size\":1000", "\"size\":9000000000000000000");
    assert!(matches!(problem(&format!("{absurd}\n")), ConformProblem::Size { .. }));
    let free = "{\"op\":\"empty_cache\",\"driver\":[[\"free\",3]]}\n";
    assert!(matches!(problem(free), ConformProblem::NoSegment { segment: 3 }));
    let call = "{\"op\":\"empty_cache\",\"driver\":[[\"realloc\",3]]}\n";
    assert!(matches!(problem(call), ConformProblem::Type { .. }));
    let failed = r#"{"op":"alloc","id":9,"size":1000,"stream":0,"out_of_memory":true}"#;
    assert!(matches!(problem(&format!("{failed}\n{{\"op\":\"free\",\"id\":9}}\n")), ConformProblem::NotLive { id: 9 }));
}

/// Runs `script` and gives the number of the first operation that differed.
fn first_mismatch(script: &Script) -> Option<u64> {
    run(script, "changed", |_| {}).unwrap().first_mismatch.map(|mismatch| mismatch.op)
}

#[test]
fn a_changed_counter_is_noticed_where_it_was_changed() {
    let original = recorded("torch215-plain-9000.jsonl.gz");
    assert_eq!(first_mismatch(&original), None);
    let named: Vec<(usize, String)> = original
        .steps
        .iter()
        .enumerate()
        .flat_map(|(at, step)| step.stats.keys().map(move |key| (at, key.clone())))
        .collect();
    for (at, key) in named.iter().step_by(97) {
        let mut changed = original.clone();
        *changed.steps[*at].stats.get_mut(key).unwrap() += 1;
        assert_eq!(first_mismatch(&changed), Some(*at as u64 + 1), "{key}");
    }
}

#[test]
fn a_counter_that_should_not_have_changed_is_noticed() {
    let original = recorded("torch215-plain-9000.jsonl.gz");
    for key in
        ["allocation.all.current", "num_device_alloc", "active_bytes.large_pool.freed", "requested_bytes.all.peak"]
    {
        let at = original.steps.iter().rposition(|step| step.stats.contains_key(key)).unwrap();
        let mut changed = original.clone();
        changed.steps[at].stats.remove(key);
        let found = first_mismatch(&changed);
        let same_value =
            original.steps[..at].iter().rev().find_map(|s| s.stats.get(key)) == original.steps[at].stats.get(key);
        assert!(found == Some(at as u64 + 1) || same_value, "{key}: {found:?}");
    }
}

#[test]
fn a_changed_place_or_driver_call_is_noticed() {
    let original = recorded("torch215-pools-9003.jsonl.gz");
    assert_eq!(first_mismatch(&original), None);
    for (at, step) in original.steps.iter().enumerate().step_by(5) {
        let mut changed = original.clone();
        let change = &mut changed.steps[at];
        match (&mut change.op, step.driver.first()) {
            (Op::Alloc { place: Place::At { offset, .. }, .. }, _) => *offset += 512,
            (Op::Alloc { place: place @ Place::OutOfMemory, .. }, _) => *place = Place::At { segment: 0, offset: 0 },
            (_, Some(_)) => change.driver.clear(),
            _ => change.driver.push(DriverCall::Free { segment: 0 }),
        }
        assert_eq!(first_mismatch(&changed), Some(at as u64 + 1), "{step:?}");
    }
}

#[test]
fn a_changed_snapshot_is_noticed() {
    let original = recorded("torch215-plain-9001.jsonl.gz");
    let at = original.steps.iter().rposition(|step| matches!(step.op, Op::Snapshot(_))).unwrap();
    for change in 0..7 {
        let mut changed = original.clone();
        let Op::Snapshot(segments) = &mut changed.steps[at].op else { unreachable!() };
        let last = segments.last_mut().unwrap();
        match change {
            0 => last.size += 512,
            1 => last.stream += 1,
            2 => last.pool = (1, 0),
            3 => last.blocks[0].requested += 1,
            4 => last.blocks[0].kind = BlockKind::Pending,
            5 => last.blocks.push(last.blocks[0]),
            _ => drop(segments.pop()),
        }
        assert_eq!(first_mismatch(&changed), Some(at as u64 + 1), "change {change}");
    }
}

#[test]
fn the_other_versions_rules_do_not_pass() {
    let differing = ["torch211-graphs-1", "torch211-mix-3", "torch211-huge-1", "torch211-small-1"].map(|name| {
        let mut script = recorded(&format!("{name}.jsonl.gz"));
        script.header.version = Version::V215;
        first_mismatch(&script)
    });
    assert!(differing.iter().any(Option::is_some), "{differing:?}");
}
