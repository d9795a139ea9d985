//! What the program says of graphs: whose results are live, what each graph writes, what outlives its graph, which captures are under way;
//! and the out-of-memory error says the same.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use gpupool_allocator::history::{HistoryOptions, label};
use gpupool_allocator::{Advice, AllocError, Allocation, Allocator, Config, Policy, Stream};
use gpupool_device::{StreamKind, Workbench};
use gpupool_graph_capture::{CaptureOptions, Captures, Graph};
use gpupool_sim_device::{SimConfig, SimDevice};
use gpupool_snapshot::Snapshot;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

struct Serving {
    allocator: Allocator<SimDevice>,
    captures: Captures<SimDevice>,
    stream: Stream<SimDevice>,
}

impl Serving {
    fn new(capacity: u64) -> Self {
        let device = Arc::new(SimDevice::new(SimConfig::default().with_capacity(capacity)));
        // A registry of its own: captures of other tests are none of its business.
        let allocator = Allocator::with_registry(Arc::clone(&device), Config::new(Policy::Segments), Arc::default());
        let allocator = allocator.unwrap();
        allocator.record_history(Some(HistoryOptions::new(1_000)));
        let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
        Self { captures: Captures::new(&allocator), allocator, stream }
    }

    /// A graph with so many bytes of scratch memory and a result.
    fn graph(&self, options: CaptureOptions, scratch: u64, result: u64) -> (Graph<SimDevice>, Allocation<SimDevice>) {
        let capture = self.captures.begin(&self.stream, options).unwrap();
        let scratch = self.allocator.alloc(scratch, &self.stream).unwrap();
        let _label = label("logits");
        let result = self.allocator.alloc(result, &self.stream).unwrap();
        drop(scratch);
        (capture.end().unwrap(), result)
    }

    /// Writes the state as a pickle and as JSON, and what `inspect --json` and `inspect` say of both.
    fn inspect(&self, name: &str) -> (Value, String) {
        let snapshot = Snapshot::of(&self.allocator.state(), "");
        let path = |ending: &str| Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.{ending}"));
        let (pickle, text) = (path("pickle"), path("json"));
        snapshot.write_pickle(std::fs::File::create(&pickle).unwrap()).unwrap();
        snapshot.write_json(std::fs::File::create(&text).unwrap()).unwrap();
        let said = |arguments: &[&str], file: &PathBuf| {
            let output = Command::new(env!("CARGO_BIN_EXE_gpupool")).arg("inspect").arg(file).args(arguments).output();
            let output = output.unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let summary = |file| serde_json::from_str::<Value>(&said(&["--json"], file)).unwrap()["summary"].clone();
        assert_eq!(summary(&pickle), summary(&text));
        assert_eq!(said(&[], &pickle), said(&[], &text));
        (summary(&pickle), said(&[], &pickle))
    }
}

#[test]
fn what_a_graph_writes_alone_and_with_others_and_its_live_results_are_told() {
    let serving = Serving::new(1_000 * MIB);
    let (large, large_result) = serving.graph(CaptureOptions::new(), 200 * MIB, 30 * MIB);
    // Another graph of the same pool writes over what the first has as scratch memory.
    let (small, small_result) = serving.graph(CaptureOptions::new().with_pool_of(&large), 150 * MIB, 20 * MIB);
    let apart = serving.graph(CaptureOptions::new(), 50 * MIB, 10 * MIB);
    let (summary, text) = serving.inspect("graphs");
    let graphs = summary["graphs"].as_array().unwrap();
    let of = |graph: &Graph<SimDevice>| graphs.iter().find(|g| g["id"] == graph.id().number()).unwrap();
    for (graph, result) in [(&large, 30), (&small, 20), (&apart.0, 10)] {
        let told = of(graph);
        assert_eq!((&told["live"], &told["live_blocks"]), (&json!(result * MIB), &json!(1)), "{told}");
        let pool = graph.pool();
        assert_eq!(told["pools"], json!([[pool.0, pool.1]]));
        let written: u64 = graph.report().pools.iter().map(|p| p.written_bytes()).sum();
        assert_eq!(told["written"], written);
        let exclusive = graph.exclusive_bytes(&[&large, &small, &apart.0]);
        assert_eq!((&told["exclusive"], &told["shared"]), (&json!(exclusive), &json!(written - exclusive)));
    }
    assert!(of(&large)["shared"].as_u64().unwrap() >= 150 * MIB, "{}", of(&large));
    assert_eq!(of(&apart.0)["shared"], 0);
    assert!(text.contains(&format!("Graph {} may write", large.id())), "{text}");
    assert_eq!(summary["outliving"]["blocks"], 0);
    // A result that is dropped is nobody's any more.
    drop(large_result);
    let (summary, _) = serving.inspect("graphs-later");
    let told = summary["graphs"].as_array().unwrap().iter().find(|g| g["id"] == large.id().number()).unwrap();
    assert_eq!((&told["live"], &told["live_blocks"]), (&json!(0), &json!(0)));
    drop((small, small_result));
}

#[test]
fn results_that_outlive_their_graph_are_told_with_their_owner() {
    let serving = Serving::new(1_000 * MIB);
    let (graph, result) = serving.graph(CaptureOptions::new(), 100 * MIB, 30 * MIB);
    let (summary, _) = serving.inspect("outliving-before");
    assert_eq!(summary["outliving"]["blocks"], 0);
    drop(graph);
    serving.captures.tidy();
    let (summary, text) = serving.inspect("outliving");
    let told = &summary["outliving"];
    assert_eq!((&told["blocks"], &told["bytes"]), (&json!(1), &json!(30 * MIB)));
    assert_eq!(told["owners"][0]["owner"], "logits");
    assert!(summary["graphs"].as_array().unwrap().is_empty());
    assert!(text.contains("outlives the graphs of its pool") && text.contains("logits"), "{text}");
    let kept = told["segment_bytes"].as_u64().unwrap();
    let Err(AllocError::OutOfMemory(report)) = serving.allocator.alloc(2_000 * MIB, &serving.stream) else { panic!() };
    assert_eq!(report.advice, [Advice::LargerThanDevice]);
    let Err(AllocError::OutOfMemory(report)) = serving.allocator.alloc(990 * MIB, &serving.stream) else { panic!() };
    let same = |advice: &Advice| matches!(advice, Advice::DropOutliving { blocks: 1, bytes } if *bytes <= kept);
    assert!(report.advice.iter().any(same), "{report}");
    drop(result);
}

#[test]
fn captures_under_way_are_told() {
    let serving = Serving::new(1_000 * MIB);
    let capture = serving.captures.begin(&serving.stream, CaptureOptions::new()).unwrap();
    let block = serving.allocator.alloc(MIB, &serving.stream).unwrap();
    let (summary, text) = serving.inspect("capturing");
    let pool = capture.pool();
    let stream = serving.stream.handle().0;
    assert_eq!(summary["captures"], json!([{ "id": capture.id().0, "stream": stream, "pool": [pool.0, pool.1] }]));
    assert!(text.contains("A capture is under way"), "{text}");
    drop((block, capture));
    let (summary, _) = serving.inspect("captured");
    assert_eq!(summary["captures"], json!([]));
}

#[test]
fn the_error_of_a_request_carries_the_same() {
    let serving = Serving::new(600 * MIB);
    let (graph, result) = serving.graph(CaptureOptions::new(), 300 * MIB, 100 * MIB);
    let Err(AllocError::OutOfMemory(report)) = serving.allocator.alloc(500 * MIB, &serving.stream) else { panic!() };
    let [told] = &report.graphs[..] else { panic!("{report}") };
    assert_eq!((told.id, told.written), (graph.id().number(), told.exclusive));
    assert!(told.written >= 400 * MIB);
    let pool = report.pools.iter().find(|p| p.pool == graph.pool()).unwrap();
    assert!(pool.held && pool.captured && pool.live == 100 * MIB, "{pool:?}");
    let owners: Vec<_> = report.owners.iter().map(|o| (o.owner.as_str(), o.bytes)).collect();
    assert_eq!(owners, [("logits", 100 * MIB)]);
    let blocks: Vec<_> = report.mostly_free.iter().flat_map(|p| &p.blocks).collect();
    assert!(
        blocks.iter().all(|b| b.graph == Some(graph.id().number()) && b.owner.as_deref() == Some("logits")),
        "{report}"
    );
    assert!(report.captures.is_empty());
    drop(result);
}
