//! Reading traces: the recordings in `data/traces` are read whole, and each way in which a file can be wrong has its
//! error.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use gpupool_device::Address;
use gpupool_replay::TextProblem;
use gpupool_replay::trace::write::{Peaks, TraceWriter};
use gpupool_replay::trace::{Event, Trace, TraceError, TraceProblem};

fn recordings() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/traces");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 8);
    files
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// A trace of `body` under a header whose counts are these.
fn parse_counted(body: &str, allocs: u64, taken: u64, end: u64) -> Result<Trace, TraceError> {
    let header = format!(
        r#"{{"format": "torch-trace-1", "name": "t", "conf": "", "peak_allocated": 0, "peak_requested": 0, "peak_active": 0,
            "peak_reserved": 0, "device_allocs": {}, "allocs": {}, "segments_end": {end}, "steps": 3}}"#,
        taken + 1,
        allocs + 1,
    );
    Trace::parse("t.gz", &gzip(&format!("{}\n{body}", header.replace('\n', " ")))[..])
}

fn parse(body: &str) -> Result<Trace, TraceError> {
    let count = |letter: char| body.lines().filter(|l| l.starts_with(letter)).count() as u64;
    parse_counted(body, count('a'), count('S'), count('S') - count('s'))
}

#[track_caller]
fn problem(body: &str, line: u64) -> TraceProblem {
    let error = parse(body).unwrap_err();
    assert_eq!((error.file.as_str(), error.line), ("t.gz", line), "{error}");
    error.problem
}

#[test]
fn every_recording_is_read_whole() {
    for file in recordings() {
        let trace = Trace::read(&file).unwrap();
        assert_eq!(trace.blocks.len() as u64 + 1, trace.header.allocs);
        assert_eq!(trace.segments.len() as u64 + 1, trace.header.device_allocs);
        assert_eq!(trace.peak_requested(), trace.header.peak_requested, "{}", trace.name());
        assert_eq!(trace.events.len(), trace.lines.len());
        assert!(size_of::<Event>() <= 16);
    }
}

#[test]
fn every_recording_cut_off_anywhere_is_an_error() {
    for file in recordings() {
        let bytes = std::fs::read(&file).unwrap();
        for cut in (0..bytes.len()).step_by(bytes.len() / 20 + 1) {
            let error = Trace::parse("cut", &bytes[..cut]).unwrap_err();
            let expected = matches!(error.problem, TraceProblem::Text(TextProblem::TruncatedGzip | TextProblem::Empty));
            assert!(expected, "{}: {error}", file.display());
        }
    }
}

#[test]
fn a_free_is_late_unless_its_completion_is_the_next_line() {
    let trace =
        parse("a 1 512 0\na 2 512 1\nf 1\n# a remark is no line of its own\nc 1\nf 2\na 3 100 0\nc 2\nf 3\nf 0\nc 0\n")
            .unwrap();
    let (first, second, third) = (0, 1, 2);
    assert_eq!(
        trace.events,
        [
            Event::Alloc { block: first, bytes: 512, stream: 0 },
            Event::Alloc { block: second, bytes: 512, stream: 1 },
            Event::Free { block: first },
            Event::FreeLate { block: second, late: 0 },
            Event::Alloc { block: third, bytes: 100, stream: 0 },
            Event::Complete { late: 0 },
            Event::FreeLate { block: third, late: 1 },
            Event::FreeForeign,
        ]
    );
    assert_eq!(trace.lines, [2, 3, 4, 7, 8, 9, 10, 11]);
    assert_eq!((trace.late[0].freed_at, trace.late[0].completes_at), (4, Some(5)));
    assert_eq!((trace.late[1].freed_at, trace.late[1].completes_at), (6, None));
    assert_eq!((trace.counted, trace.streams), (7, 2));
    assert_eq!(trace.peak_requested(), 1024);
}

#[test]
fn captures_and_segments_are_listed() {
    let trace =
        parse("S 7f00 2097152 0\na 1 512 0\ne\nB 7 3 1\na 2 512 1\nE 7\ns 7f00 2097152\nS 7f00 1048576 1\n").unwrap();
    assert_eq!(trace.graphs.len(), 1);
    assert_eq!((trace.graphs[0].number, trace.graphs[0].pool, trace.graphs[0].stream), (7, 3, 1));
    assert_eq!(trace.segments.len(), 2);
    assert_eq!((trace.segments[0].taken_before, trace.segments[0].given_back_before), (0, Some(5)));
    assert_eq!((trace.segments[1].address, trace.segments[1].given_back_before), (Address(0x7f00), None));
}

#[test]
fn what_the_writer_writes_reads_back() {
    let mut writer = TraceWriter::new();
    writer.comment("two\nlines");
    writer.take(Address(0x1000_0000), 2 << 20, 0);
    let first = writer.alloc(1000, 0);
    writer.free(first);
    writer.complete(first);
    writer.empty_cache();
    writer.give_back(Address(0x1000_0000), 2 << 20);
    writer.begin(1, 1, 1);
    let second = writer.alloc(2000, 1);
    writer.end(1);
    writer.free(second);
    let peaks = Peaks { allocated: 2048, requested: 2000, active: 2048, reserved: 2 << 20 };
    let trace = Trace::parse("written", &writer.finish("mine", "", peaks).unwrap()[..]).unwrap();
    assert_eq!(trace.name(), "mine");
    assert_eq!(trace.events.len(), 7);
    assert_eq!(trace.header.peak_allocated, 2048);
    assert_eq!(trace.late.len(), 1);
}

#[test]
fn the_header_is_checked() {
    let whole = |first: &str| Trace::parse("t.gz", &gzip(&format!("{first}\n"))[..]).unwrap_err();
    assert!(matches!(whole("not json").problem, TraceProblem::Header(_)));
    assert!(matches!(whole(r#"{"format": "torch-trace-1"}"#).problem, TraceProblem::Header(_)));
    let other = r#"{"format": "conform-1", "name": "", "conf": "", "peak_allocated": 0, "peak_requested": 0, "peak_active": 0,
        "peak_reserved": 0, "device_allocs": 1, "allocs": 1, "segments_end": 0}"#;
    assert!(matches!(whole(&other.replace('\n', "")).problem, TraceProblem::Format { .. }));
    // Another format has fields of its own.
    assert!(matches!(whole(r#"{"format": "conform-1"}"#).problem, TraceProblem::Format { .. }));
    let right = other.replace('\n', "").replace("conform-1", "torch-trace-1");
    assert!(matches!(whole(&right.replace("\"allocs\": 1", "\"allocs\": -1")).problem, TraceProblem::Header(_)));
    for (allocs, taken, end, field) in [(2, 1, 1, "allocs"), (1, 2, 1, "device_allocs"), (1, 1, 0, "segments_end")] {
        let error = parse_counted("S 1000 2097152 0\na 1 512 0\n", allocs, taken, end).unwrap_err();
        assert!(matches!(error.problem, TraceProblem::Count { field: f, .. } if f == field), "{error}");
        assert!(error.to_string().starts_with("t.gz: line 3: the file is truncated or damaged"), "{error}");
    }
}

#[test]
fn a_file_without_its_last_newline_is_truncated() {
    assert!(matches!(problem("a 1 512 0\nf 1", 3), TraceProblem::Text(TextProblem::NoNewline)));
    assert!(matches!(Trace::parse("t", &b""[..]).unwrap_err().problem, TraceProblem::Text(TextProblem::Empty)));
    assert!(matches!(Trace::parse("t", &gzip("")[..]).unwrap_err().problem, TraceProblem::Text(TextProblem::Empty)));
    assert!(matches!(
        Trace::parse("t", &b"a 1 2 3\n"[..]).unwrap_err().problem,
        TraceProblem::Text(TextProblem::NotGzip)
    ));
    let missing = Trace::read(Path::new("/no/such/file")).unwrap_err();
    assert!(matches!(missing.problem, TraceProblem::Text(TextProblem::Io(_))));
}

#[test]
fn lines_that_say_nothing_known_are_errors() {
    for bad in ["z 1\n", "\n", "A 1 512 0\n", " a 1 512 0\n", "aa 1 512 0\n", "\u{feff}a 1 512 0\n"] {
        assert!(matches!(problem(bad, 2), TraceProblem::UnknownEvent { .. }), "{bad}");
    }
    for bad in [
        "a 1 512\n",
        "a 1 512 0 0\n",
        "a\n",
        "f\n",
        "f 1 2\n",
        "c\n",
        "e e\n",
        "B 1 1\n",
        "E\n",
        "s 1000\n",
        "a  1 512\n",
    ] {
        assert!(matches!(parse_counted(bad, 0, 0, 0).unwrap_err().problem, TraceProblem::Form { .. }), "{bad}");
    }
    for bad in [
        "a x 512 0\n",
        "a 1 -5 0\n",
        "a 1 5.5 0\n",
        "a 1 512 -1\n",
        "a 99999999999999999999 512 0\n",
        "f +1\n",
        "S 0x10 1 0\n",
    ] {
        assert!(matches!(parse_counted(bad, 0, 0, 0).unwrap_err().problem, TraceProblem::Number { .. }), "{bad}");
    }
}

#[test]
fn absurd_numbers_are_errors() {
    assert!(matches!(problem("a 1 0 0\n", 2), TraceProblem::Size { bytes: 0 }));
    assert!(matches!(problem("a 1 9000000000000000000 0\n", 2), TraceProblem::Size { .. }));
    assert!(matches!(problem("S 1000 0 0\n", 2), TraceProblem::Size { bytes: 0 }));
    assert!(matches!(problem("S ffffffffffffff00 2097152 0\n", 2), TraceProblem::Address { .. }));
    assert!(matches!(problem("a 1 512 4096\n", 2), TraceProblem::Stream { stream: 4096 }));
}

#[test]
fn allocations_live_once() {
    assert!(matches!(problem("a 0 512 0\n", 2), TraceProblem::AllocatesZero));
    assert!(matches!(problem("a 1 512 0\na 1 512 0\n", 3), TraceProblem::AllocatedTwice { id: 1, before: 2 }));
    assert!(matches!(problem("f 5\n", 2), TraceProblem::NeverAllocated { id: 5 }));
    assert!(matches!(problem("c 5\n", 2), TraceProblem::NeverAllocated { id: 5 }));
    assert!(matches!(problem("a 1 5 0\nf 1\nc 1\nf 1\n", 5), TraceProblem::FreedTwice { id: 1, before: 3 }));
    assert!(matches!(problem("a 1 5 0\nf 1\nf 1\n", 4), TraceProblem::FreedTwice { id: 1, before: 3 }));
    assert!(matches!(problem("a 1 5 0\nc 1\n", 3), TraceProblem::CompletedUnfreed { id: 1 }));
    assert!(matches!(problem("a 1 5 0\nf 1\nc 1\nc 1\n", 5), TraceProblem::CompletedTwice { id: 1 }));
    assert!(matches!(problem("a 1 5 0\nf 1\ne\nc 1\nc 1\n", 6), TraceProblem::CompletedTwice { id: 1 }));
}

#[test]
fn captures_do_not_cross() {
    assert!(matches!(problem("B 1 0 1\n", 2), TraceProblem::DefaultPool));
    assert!(matches!(problem("B 1 1 1\nB 1 1 2\n", 3), TraceProblem::CapturedTwice { graph: 1, before: 2 }));
    assert!(matches!(problem("B 1 1 1\nB 2 1 1\n", 3), TraceProblem::StreamCapturing { stream: 1, graph: 1 }));
    assert!(matches!(problem("E 1\n", 2), TraceProblem::NotCapturing { graph: 1 }));
    assert!(matches!(problem("B 1 1 1\nE 1\nE 1\n", 4), TraceProblem::NotCapturing { graph: 1 }));
    assert!(parse("B 1 1 1\nE 1\nB 2 1 1\n").is_ok(), "a capture may stay open at the end");
}

#[test]
fn segments_do_not_overlap() {
    let first = "S 10000000 2097152 0\n";
    for other in ["S 10000000 512 0\n", "S 101fffff 512 0\n", "S fffffff 2 0\n", "S 1 1000000000 0\n"] {
        let found = problem(&format!("{first}{other}"), 3);
        assert!(matches!(found, TraceProblem::SegmentOverlaps { other: 2, .. }), "{other}: {found}");
    }
    assert!(parse(&format!("{first}S 10200000 512 0\nS fffffff 1 0\n")).is_ok());
    assert!(matches!(parse_counted("s 1000 512\n", 0, 0, 0).unwrap_err().problem, TraceProblem::NoSegment { .. }));
    assert!(matches!(problem(&format!("{first}s 10000000 512\n"), 3), TraceProblem::NoSegment { .. }));
}
