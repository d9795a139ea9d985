//! Pickles: PyTorch's own are read and agree with its counters, ours are read by Python, and no bytes whatever do harm.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::io::Write;
use std::process::{Command, Stdio};

use gpupool_snapshot::{Action, Advice, BlockStatus, Growth, Problem, Snapshot, Summary};
use serde_json::Value;

/// Snapshots of torch 2.11 on an H200: a training run, graphs that share a pool, one that ended out of memory.
const RECORDED: [(&str, &[u8]); 3] = [
    ("train", include_bytes!("../data/train.pickle")),
    ("graphs_shared", include_bytes!("../data/graphs_shared.pickle")),
    ("oom", include_bytes!("../data/oom.pickle")),
];

/// More of torch 2.11 on an H200: expandable segments, pools of the user's, frees that are not complete, fragmentation that ended out of
/// memory, results that outlive their graphs, a history that forgot its beginning, and none at all.
const MORE: [(&str, &[u8]); 7] = [
    ("train_expandable", include_bytes!("../data/train_expandable.pickle")),
    ("pools", include_bytes!("../data/pools.pickle")),
    ("streams", include_bytes!("../data/streams.pickle")),
    ("fragmented_oom", include_bytes!("../data/fragmented_oom.pickle")),
    ("graphs_gone", include_bytes!("../data/graphs_gone.pickle")),
    ("short_ring", include_bytes!("../data/short_ring.pickle")),
    ("no_history", include_bytes!("../data/no_history.pickle")),
];

fn json(snapshot: &Snapshot) -> String {
    let mut written = Vec::new();
    snapshot.write_json(&mut written).unwrap();
    String::from_utf8(written).unwrap()
}

fn pickle(snapshot: &Snapshot) -> Vec<u8> {
    let mut written = Vec::new();
    snapshot.write_pickle(&mut written).unwrap();
    written
}

#[test]
fn snapshots_of_torch_agree_with_its_counters() {
    let stats: Value = serde_json::from_str(include_str!("../data/stats.json")).unwrap();
    for (name, bytes) in RECORDED {
        let snapshot = Snapshot::read(name, bytes).unwrap();
        let sum = |of: fn(&gpupool_snapshot::Segment) -> u64| snapshot.segments.iter().map(of).sum::<u64>();
        let told = |key: &str| stats[name][key].as_u64().unwrap();
        assert_eq!(sum(|s| s.total_size), told("reserved_bytes"), "{name}");
        assert_eq!(sum(|s| s.allocated_size), told("allocated_bytes"), "{name}");
        assert_eq!(sum(|s| s.active_size), told("active_bytes"), "{name}");
        assert!(!snapshot.stacks.is_empty());
    }
    let train = Snapshot::read("train", RECORDED[0].1).unwrap();
    let [trace] = &train.device_traces[..] else { panic!() };
    let count = |action| trace.iter().filter(|e| e.action == action).count();
    assert_eq!((count(Action::Alloc), count(Action::FreeCompleted), count(Action::SegmentAlloc)), (327, 292, 17));
    let frame = train.stacks.frames(trace[0].frames).next().unwrap();
    assert_eq!((frame.name, frame.file, frame.line), ("convert", "torch/nn/modules/module.py", 1370));
    assert_eq!(train.external_annotations.len(), 16);
    let oom = Snapshot::read("oom", RECORDED[2].1).unwrap();
    let event = oom.device_traces[0].iter().find(|e| e.action == Action::Oom).unwrap();
    assert_eq!((event.address, event.size), (148_836_057_088, 18_874_368));
    let graphs = Snapshot::read("graphs_shared", RECORDED[1].1).unwrap();
    assert!(graphs.segments.iter().any(|s| s.segment_pool_id == (1, 0)));
}

#[test]
fn summaries_of_torchs_snapshots_agree_with_its_counters() {
    let stats: Value = serde_json::from_str(include_str!("../data/stats.json")).unwrap();
    for (name, bytes) in MORE {
        let total = Summary::of(&Snapshot::read(name, bytes).unwrap()).total;
        let told = |key: &str| stats[name][key].as_u64().unwrap();
        assert_eq!((total.reserved, total.live), (told("reserved_bytes"), told("allocated_bytes")), "{name}");
        assert_eq!(
            (total.live + total.pending, total.requested),
            (told("active_bytes"), told("requested_bytes")),
            "{name}"
        );
        assert_eq!(total.live_blocks, told("allocation"), "{name}");
        // Torch counts an expandable segment once for each stream, and lists its mapped runs.
        assert!(total.segments == told("segment") || name == "train_expandable", "{name}");
    }
}

#[test]
fn what_a_fragmented_job_ran_into_is_said() {
    let summary = Summary::of(&Snapshot::read("fragmented_oom", MORE[3].1).unwrap());
    let fragmented = Advice::Fragmented { asked: 300 << 20, bytes: 300 << 20, longest: 20 << 20 };
    assert!(summary.advice.contains(&fragmented), "{:?}", summary.advice);
    assert_eq!((summary.pinned[0].size, summary.pinned[0].free, summary.pinned[0].blocks), (600 << 20, 300 << 20, 15));
    assert_eq!(summary.pinned[0].owners[0].owner, "train.py:9 tensor");
}

#[test]
fn a_summary_of_torchs_snapshots_says_whose_memory_it_is() {
    let summary = |at: usize| Summary::of(&Snapshot::read(RECORDED[at].0, RECORDED[at].1).unwrap());
    let oom = summary(2);
    assert_eq!(oom.owners[0].owner, "train.py:31 <module>");
    assert_eq!((oom.owners[0].bytes, oom.owners[0].blocks), (614_834_176, 60));
    assert_eq!(oom.advice, [Advice::RaiseLimit { asked: 18_874_368, bytes: 148_836_057_088 }]);
    assert_eq!((oom.out_of_memory.len(), oom.out_of_memory[0].event), (1, 127));
    let train = summary(0);
    let peak = &train.peaks[0];
    assert_eq!((peak.event, peak.before_history), (675, 0));
    assert_eq!(peak.owners.iter().map(|o| o.bytes).sum::<u64>(), peak.bytes);
    assert_eq!(train.advice[0], Advice::EmptyCache { bytes: 90 << 20 });
    let runs: u64 = train.free_runs.iter().map(|r| r.bytes).sum();
    assert_eq!(runs, train.total.free);
    let pools = summary(1).by_pool;
    assert_eq!(
        pools.iter().map(|p| (p.pool, p.amounts.reserved)).collect::<Vec<_>>(),
        [((0, 0), 78 << 20), ((1, 0), 36 << 20)]
    );
    let (small, large) = (Snapshot::read("a", RECORDED[0].1).unwrap(), Snapshot::read("b", RECORDED[2].1).unwrap());
    let growth = Growth::between(&small, &large);
    assert_eq!((growth.owners[0].owner.as_str(), growth.owners[0].after), ("train.py:31 <module>", 60));
}

#[test]
fn either_format_tells_the_same() {
    for (name, bytes) in RECORDED.into_iter().chain(MORE) {
        let snapshot = Snapshot::read(name, bytes).unwrap();
        let text = json(&snapshot);
        let ours = pickle(&snapshot);
        assert_eq!(json(&Snapshot::read(name, &ours[..]).unwrap()), text);
        let from_json = Snapshot::read(name, text.as_bytes()).unwrap();
        assert_eq!(json(&from_json), text);
        assert_eq!(pickle(&from_json), ours);
        assert!(ours.len() < bytes.len() * 11 / 10, "{name}: {} bytes, torch wrote {}", ours.len(), bytes.len());
    }
}

/// Every opcode of ours is on the list of PyTorch's viewer.
#[test]
fn ours_has_no_opcode_that_the_viewer_does_not_know() {
    for (name, bytes) in RECORDED {
        let ours = pickle(&Snapshot::read(name, bytes).unwrap());
        assert_eq!(&ours[..2], [0x80, 4]);
        let mut at = 2;
        while at < ours.len() {
            let word = |from: usize, bytes: usize| {
                ours[from..from + bytes].iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte))
            };
            at += match ours[at] {
                b'}' | b']' | b'(' | b'u' | b'e' | b'N' | 0x88 | 0x89 | 0x86 | 0x94 | b'.' => 1,
                b'K' | b'h' => 2,
                b'M' => 3,
                b'J' | b'j' => 5,
                b'G' => 9,
                0x8a => 2 + word(at + 1, 1),
                0x8c => 2 + word(at + 1, 1),
                b'X' => 5 + word(at + 1, 4),
                other => panic!("{name}: opcode {other:#x}"),
            };
        }
    }
}

/// CPython's own unpickler gets from our pickle what its JSON reader gets from our JSON, but for pairs, which are tuples; and from torch's
/// pickle the same segments and events.
#[test]
fn python_reads_ours() {
    const SCRIPT: &str = "
import json, pickle, sys
ours, theirs, text = (open(p, 'rb').read() for p in sys.argv[1:4])
a, b, t = pickle.loads(ours), json.loads(text), pickle.loads(theirs)
assert json.loads(json.dumps(a)) == b, 'pickle and JSON differ'
assert all(isinstance(s['segment_pool_id'], tuple) for s in a['segments'])
assert a['segments'] == t['segments'], 'segments differ'
assert a['device_traces'] == t['device_traces'], 'events differ'
assert a['allocator_settings'] == t['allocator_settings'] and a['external_annotations'] == t['external_annotations']
shared = {id(e['frames']) for d in a['device_traces'] for e in d if 'frames' in e}
total = sum(1 for d in a['device_traces'] for e in d if 'frames' in e)
assert len(shared) < total or not total, 'stacks are not shared'
print('same')
";
    if Command::new("python3").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        println!("skipped: no python3");
        return;
    }
    let folder = std::env::temp_dir().join(format!("gpupool-pickles-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (name, bytes) in RECORDED.into_iter().chain(MORE) {
        let snapshot = Snapshot::read(name, bytes).unwrap();
        let files = [
            ("ours.pickle", pickle(&snapshot)),
            ("theirs.pickle", bytes.to_vec()),
            ("ours.json", json(&snapshot).into_bytes()),
        ];
        let paths: Vec<_> = files.iter().map(|(file, _)| folder.join(file)).collect();
        for ((_, bytes), path) in files.iter().zip(&paths) {
            std::fs::File::create(path).unwrap().write_all(bytes).unwrap();
        }
        let out = Command::new("python3").arg("-c").arg(SCRIPT).args(&paths).output().unwrap();
        assert_eq!(
            String::from_utf8_lossy(&out.stdout).trim(),
            "same",
            "{name}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Pickles that would grow beyond what their length allows are refused, and quickly.
#[test]
fn no_pickle_takes_more_than_its_length_allows() {
    let head = b"\x80\x04".to_vec();
    let refused = |bytes: &[u8]| {
        let error = Snapshot::read("bomb", bytes).unwrap_err();
        assert!(matches!(error.problem, Problem::Memory { .. }), "{error}");
    };
    // Many empty lists: each takes far more than its one byte.
    refused(&[&head[..], &b"]".repeat(8 << 20), b"."].concat());
    refused(&[&head[..], &b"}".repeat(8 << 20), b"."].concat());
    refused(&[&head[..], &b"(".repeat(40 << 20), b"."].concat());
    // A memo of four thousand million places.
    refused(&[&head[..], b"]r\xff\xff\xff\xff."].concat());
    // One list of settings in which each level refers ten times to the one below: ten thousand million values.
    let mut laughs = [&head[..], b"}(X\x08\0\0\0segments]X\x12\0\0\0allocator_settings}X\x01\0\0\0a]\x94"].concat();
    for level in 0..10_u8 {
        laughs.extend_from_slice(b"](");
        (0..10).for_each(|_| laughs.extend_from_slice(&[b'h', level]));
        laughs.extend_from_slice(b"e\x94");
    }
    // What stands on the stack beneath the last list is not used: only the last is a value.
    let laughs = {
        let at = b"\x80\x04}(X\x08\0\0\0segments]X\x12\0\0\0allocator_settings}X\x01\0\0\0a".len();
        let mut fixed = head.clone();
        fixed.extend_from_slice(&laughs[at..]);
        fixed.extend_from_slice(b"}(X\x08\0\0\0segments]X\x12\0\0\0allocator_settings}X\x01\0\0\0ah\x0asu.");
        fixed
    };
    refused(&laughs);
    // One dictionary with many keys, referred to as an event many times: time, not memory.
    let mut heavy = [&head[..], b"}\x94("].concat();
    for key in 0..100_000_u32 {
        heavy.push(b'J');
        heavy.extend_from_slice(&key.to_le_bytes());
        heavy.push(b'N');
    }
    heavy.extend_from_slice(b"X\x06\0\0\0actionX\x04\0\0\0nonsu}(X\x08\0\0\0segments]X\x0d\0\0\0device_traces](](");
    heavy.extend(b"h\0".repeat(1 << 20));
    heavy.extend_from_slice(b"eeu.");
    refused(&heavy);
}

#[test]
fn settings_deeper_than_any_are_refused() {
    let deep =
        [&b"\x80\x04}(X\x08\0\0\0segments]X\x12\0\0\0allocator_settings}X\x01\0\0\0a"[..], b"]\x94h\0asu."].concat();
    let error = Snapshot::read("deep", &deep[..]).unwrap_err();
    assert!(matches!(error.problem, Problem::Depth(_)), "a list that contains itself: {error}");
}

/// Changed here and there, no file makes either reader panic, and what is read still holds together.
#[test]
fn damaged_files_are_errors_or_snapshots() {
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as usize
    };
    let mut read = 0;
    for (name, bytes) in RECORDED {
        let text = json(&Snapshot::read(name, bytes).unwrap()).into_bytes();
        for (whole, rounds) in [(bytes, 300), (&text[..], 60)] {
            for _ in 0..rounds {
                let mut changed = whole.to_vec();
                for _ in 0..1 + next() % 3 {
                    let at = next() % changed.len();
                    match next() % 4 {
                        0 => changed[at] = next() as u8,
                        1 => changed.truncate(at + 1),
                        2 => {
                            changed.remove(at);
                        }
                        _ => changed.insert(at, b"0.[]{}(uets\x94h]\"9,:"[next() % 18]),
                    }
                }
                let Ok(snapshot) = Snapshot::read("damaged", &changed[..]) else { continue };
                read += 1;
                for segment in &snapshot.segments {
                    assert_eq!(segment.blocks.iter().map(|b| b.size).sum::<u64>(), segment.total_size);
                    assert!(segment.blocks.iter().all(|b| b.state != BlockStatus::Inactive || b.size > 0));
                }
                assert_eq!(json(&Snapshot::read("again", &pickle(&snapshot)[..]).unwrap()), json(&snapshot));
            }
        }
    }
    assert!(read > 20, "only {read} of the changed files were still snapshots");
}
