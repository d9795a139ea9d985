//! Snapshots as JSON: what is written is read back, and whatever else is read is an error that names its place.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use gpupool_snapshot::{BlockStatus, Growth, Part, Problem, ReadError, Snapshot, Summary};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

fn example() -> Value {
    json!({
        "segments": [
            {
                "device": 0, "address": 0x1000_0000_u64, "total_size": 20 * MIB, "stream": 0, "segment_type": "large",
                "segment_pool_id": [0, 0], "frames": [], "unknown": {"a": 1},
                "blocks": [
                    {"size": 2 * MIB, "requested_size": 2 * MIB - 100, "state": "active_allocated", "frames": []},
                    {"size": 15 * MIB, "requested_size": 0, "state": "inactive"},
                    {"address": 0x1000_0000_u64 + 17 * MIB, "size": 3 * MIB, "state": "active_pending_free"},
                ],
            },
            {
                "device": 0, "address": 0x2000_0000_u64, "total_size": 2 * MIB, "stream": 7, "segment_pool_id": [1, 0],
                "blocks": [{"size": 2 * MIB, "state": "inactive"}],
            },
        ],
        "device_traces": [[]],
        "allocator_settings": {"max_split_size": -1},
    })
}

fn read(value: &Value) -> Result<Snapshot, ReadError> {
    Snapshot::read("file.json", value.to_string().as_bytes())
}

#[test]
fn what_is_left_out_has_a_neutral_value() {
    let snapshot = read(&example()).unwrap();
    let [large, small] = &snapshot.segments[..] else { panic!() };
    assert_eq!((large.allocated_size, large.active_size), (2 * MIB, 5 * MIB));
    assert_eq!(large.requested_size, 5 * MIB - 100);
    assert_eq!(large.blocks[1].address, 0x1000_0000 + 2 * MIB);
    assert_eq!(large.blocks[2].state, BlockStatus::ActivePendingFree);
    assert_eq!((small.segment_type, small.segment_pool_id, small.is_expandable), (Part::Small, (1, 0), false));
}

#[test]
fn what_is_written_reads_back() {
    let snapshot = read(&example()).unwrap();
    let mut written = Vec::new();
    snapshot.write_json(&mut written).unwrap();
    let mut again = Vec::new();
    let read_back = Snapshot::read("again", &written[..]).unwrap();
    read_back.write_json(&mut again).unwrap();
    assert_eq!(String::from_utf8(written), String::from_utf8(again));
    assert_eq!(read_back.segments, snapshot.segments);
}

#[test]
fn an_error_names_its_place() {
    let change = |pointer: &str, value: Value| {
        let mut example = example();
        *example.pointer_mut(pointer).unwrap() = value;
        let error = read(&example).unwrap_err();
        assert_eq!(error.file, "file.json");
        error
    };
    let kind = change("/segments/0/blocks/2/size", json!("big"));
    assert_eq!(
        kind.to_string(),
        "file.json: segments[0].blocks[2].size: an unsigned integer is expected here, not a string"
    );
    assert_eq!(change("/segments/0/total_size", json!(-1)).path, "segments[0].total_size");
    assert!(matches!(change("/segments/0/total_size", json!(0)).problem, Problem::Empty));
    assert!(matches!(change("/segments/0/total_size", json!(21 * MIB)).problem, Problem::Tiling { .. }));
    assert!(matches!(change("/segments/0/total_size", json!(19 * MIB)).problem, Problem::Tiling { .. }));
    assert!(matches!(change("/segments/0/total_size", json!(u64::MAX)).problem, Problem::Range { .. }));
    assert!(matches!(change("/segments/0/blocks/0/size", json!(u64::MAX)).problem, Problem::Range { .. }));
    assert!(matches!(change("/segments/0/blocks/0/size", json!(1_u64 << 40)).problem, Problem::Tiling { .. }));
    assert!(matches!(change("/segments/0/blocks/2/address", json!(1)).problem, Problem::BlockAddress { .. }));
    let state = change("/segments/0/blocks/0/state", json!("busy"));
    assert_eq!(state.to_string(), "file.json: segments[0].blocks[0].state: \"busy\" is not known here");
    assert!(matches!(change("/segments/0/segment_type", json!("tiny")).problem, Problem::Word { .. }));
    assert!(matches!(change("/segments/0/segment_pool_id", json!([1])).problem, Problem::Kind { .. }));
    assert!(matches!(change("/segments/0/device", json!(5000)).problem, Problem::Range { .. }));
    let overlap = change("/segments/1/address", json!(0x1000_0000_u64 + MIB));
    assert!(matches!(overlap.problem, Problem::Overlap { .. }), "{overlap}");
    assert_eq!(overlap.path, "segments[1]");
    assert_eq!(change("/device_traces/0", json!(3)).path, "device_traces[0]");
    let missing = read(&json!({"segments": [{"address": 1, "total_size": 2}]})).unwrap_err();
    assert_eq!(missing.to_string(), "file.json: segments[0].blocks: the key is missing");
    assert_eq!(read(&json!({})).unwrap_err().path, "segments");
    assert_eq!(read(&json!([])).unwrap_err().path, "");
}

#[test]
fn sizes_that_nothing_can_have_are_refused_with_their_place() {
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut example = example();
        change(&mut example);
        read(&example).unwrap_err().to_string()
    };
    let whole = |size: u64| {
        move |example: &mut Value| {
            let segment = &mut example["segments"][1];
            (segment["address"], segment["total_size"]) = (json!(0), json!(size));
            segment["blocks"] = json!([{"size": size, "state": "inactive"}]);
        }
    };
    let most = 1_u64 << 40;
    for size in [u64::MAX, most + 1] {
        let words = format!("segments[1].total_size: {size} is too large: at most {most} makes sense here");
        assert!(refused(&whole(size)).contains(&words), "{}", refused(&whole(size)));
    }
    let end = refused(&|example| example["segments"][1]["address"] = json!(u64::MAX - 100));
    assert_eq!(end, "file.json: segments[1]: a segment of 2097152 bytes does not fit at 0xffffffffffffff9b");
    for key in ["allocated_size", "active_size", "requested_size"] {
        let error = refused(&|example| example["segments"][1][key] = json!(2 * MIB + 1));
        let words = "2097153 bytes are more than the 2097152 that it is a part of";
        assert_eq!(error, format!("file.json: segments[1].{key}: {words}"));
    }
    for block in [0, 2] {
        let error = refused(&|example| example["segments"][0]["blocks"][block]["requested_size"] = json!(1_u64 << 50));
        assert!(error.starts_with(&format!("file.json: segments[0].blocks[{block}].requested_size: ")), "{error}");
    }
    // PyTorch leaves in a free block what was last requested there, though the block may be a piece of that by now.
    let mut stale = example();
    stale["segments"][0]["blocks"][1]["requested_size"] = json!(1_u64 << 50);
    assert_eq!(read(&stale).unwrap().segments[0].requested_size, 5 * MIB - 100);
    let outside = refused(&|example| example["segments"][0]["blocks"][2]["address"] = json!(0x9000_0000_u64));
    assert!(outside.starts_with("file.json: segments[0].blocks[2].address: the block is at 0x90000000"), "{outside}");
}

#[test]
fn events_that_say_nothing_are_counted_and_left_out() {
    let event = |action: &str, addr: u64, size: u64| json!({"action": action, "addr": addr, "size": size, "stream": 0});
    let oom = json!({"action": "oom", "device_free": u64::MAX, "size": 1_u64 << 60, "stream": 0});
    let mut history = example();
    history["device_traces"] = json!([
        [event("alloc", 4096, 512), event("alloc", 8192, u64::MAX), event("teleport", 1, 2)],
        [event("free_completed", u64::MAX, 512), event("segment_alloc", 0, (1 << 40) + 1), oom],
    ]);
    let read = read(&history).unwrap();
    assert_eq!((read.unknown_events, read.absurd_events), (1, 3));
    // Whatever was asked for in vain was asked for.
    let kept: Vec<usize> = read.device_traces.iter().map(Vec::len).collect();
    assert_eq!(kept, [1, 1]);
    let summary = Summary::of(&read);
    assert_eq!((summary.unknown_events, summary.absurd_events), (1, 3));
}

#[test]
fn other_files_are_told_apart() {
    let read = |bytes: &[u8]| Snapshot::read("f", bytes).unwrap_err();
    assert!(matches!(read(b"\x80\x04}").problem, Problem::Pickled { .. }));
    assert!(matches!(read(b"").problem, Problem::EmptyFile));
    assert!(matches!(read(b"\x1f\x8b\x08").problem, Problem::Packed));
    // A pickle of protocol 0, and text that is nothing.
    assert!(matches!(read(b"(dp0\n.").problem, Problem::NeitherKind));
    assert!(matches!(read(b" \n").problem, Problem::NeitherKind));
    assert_eq!(read(b"[]").to_string(), "f: an object is expected here, not a list");
    assert!(matches!(read(b"{\"segments\": [").problem, Problem::Json(_)));
    assert!(matches!(read("[".repeat(100_000).as_bytes()).problem, Problem::Json(_)));
}

#[test]
fn a_summary_says_where_memory_is_and_what_keeps_it() {
    let summary = Summary::of(&read(&example()).unwrap());
    assert_eq!((summary.total.reserved, summary.total.live), (22 * MIB, 2 * MIB));
    assert_eq!((summary.total.pending, summary.total.free), (3 * MIB, 17 * MIB));
    assert_eq!((summary.idle, summary.idle_segments, summary.free_in_use), (2 * MIB, 1, 15 * MIB));
    assert_eq!(summary.largest_free_run, 15 * MIB);
    assert_eq!(summary.buckets.len(), 2);
    assert_eq!(summary.buckets[0].amounts.reserved, 20 * MIB, "the largest first");
    let [pinned] = &summary.pinned[..] else { panic!() };
    assert_eq!((pinned.address, pinned.free, pinned.blocks), (0x1000_0000, 15 * MIB, 2));
    assert_eq!(pinned.largest[0], (0x1000_0000 + 17 * MIB, 3 * MIB), "the largest first");
}

#[test]
fn growth_is_what_the_second_has_more() {
    let before = read(&example()).unwrap();
    let mut changed = example();
    changed["segments"][1]["blocks"][0]["state"] = json!("active_allocated");
    changed["segments"].as_array_mut().unwrap().remove(0);
    let growth = Growth::between(&before, &read(&changed).unwrap());
    assert_eq!((growth.total.reserved, growth.total.live_blocks), (-(20 * MIB as i64), 0));
    assert_eq!(growth.places.len(), 2);
    assert_eq!(growth.places[0].1.live, 2 * MIB as i64);
    assert_eq!(growth.sizes.len(), 1);
    assert_eq!((growth.sizes[0].requested, growth.sizes[0].after), (2 * MIB, 1));
    assert!(Growth::between(&before, &before).places.is_empty());
}
