//! An allocator's state in PyTorch's layout.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use gpupool_allocator::history::{self, HistoryState};
use gpupool_allocator::state::{BackingKind, BlockStatus as Status, SegmentState};
use gpupool_allocator::{Part as AllocatorPart, State};
use serde_json::{Value, json};

use crate::model::{Action, Block, BlockStatus, Event, Part, Segment, Snapshot};
use crate::stacks::{Frame, StackId, Stacks, TextId};

/// What the allocator gives for memory that belongs to no one stream.
const NO_STREAM: u64 = u64::MAX;

impl Snapshot {
    /// The snapshot of `state`, with its history if it has one. `settings` are those the allocator was given, as a
    /// `PYTORCH_CUDA_ALLOC_CONF` string.
    #[must_use]
    pub fn of(state: &State, settings: &str) -> Self {
        // What is away is no memory: its pool says so, and readers of PyTorch's layout would count it.
        let there = state.segments.iter().filter(|s| s.backing != BackingKind::Away);
        let mut segments: Vec<Segment> = there.map(|s| segment(s, state.device)).collect();
        segments.sort_by_key(|s| s.address);
        let mut gpupool = extra(state);
        let mut device_traces = vec![Vec::new(); state.device as usize + 1];
        let mut stacks = Stacks::default();
        if let (Some(history), Some(trace)) = (&state.history, device_traces.last_mut()) {
            let told = Told::of(history, &mut stacks);
            told.attribute(&mut segments);
            *trace = told.events;
            gpupool.insert("captures".to_owned(), Value::Array(told.captures));
            gpupool.insert("events_forgotten".to_owned(), json!(history.forgotten));
        }
        Self {
            segments,
            device_traces,
            stacks,
            allocator_settings: allocator_settings(state, settings),
            gpupool,
            ..Self::default()
        }
    }
}

/// A history in PyTorch's terms.
#[derive(Default)]
struct Told {
    events: Vec<Event>,
    /// Captures, which PyTorch's layout does not have: each its pool, and the events that came before its begin and its end.
    captures: Vec<Value>,
    /// Who allocated what is live: by address.
    owners: HashMap<u64, (StackId, TextId)>,
}

impl Told {
    fn of(history: &HistoryState, stacks: &mut Stacks) -> Self {
        let mut told = Self::default();
        let mut known: HashMap<*const history::Frame, StackId> = HashMap::new();
        let mut streams: HashMap<u64, u64> = HashMap::new();
        let mut open: Vec<usize> = Vec::new();
        for event in history.events() {
            use history::Action as From;
            let pool = (event.pool.0, event.pool.1);
            let at = told.events.len();
            let action = match event.action {
                From::Alloc => Action::Alloc,
                From::FreeRequested => Action::FreeRequested,
                From::FreeCompleted => Action::FreeCompleted,
                // PyTorch's layout has no memory that is away: segments are given back and taken at the same address.
                From::SegmentAlloc | From::SegmentBack => Action::SegmentAlloc,
                From::SegmentFree | From::SegmentAway => Action::SegmentFree,
                From::SegmentMap => Action::SegmentMap,
                From::SegmentUnmap => Action::SegmentUnmap,
                From::OutOfMemory => Action::Oom,
                From::CaptureBegin => {
                    open.push(told.captures.len());
                    told.captures.push(json!({ "pool": [pool.0, pool.1], "begin": at }));
                    continue;
                }
                From::CaptureEnd => {
                    let of_pool = |index: &usize| told.captures[*index]["pool"] == json!([pool.0, pool.1]);
                    if let Some(place) = open.iter().rposition(of_pool) {
                        told.captures[open.remove(place)]["end"] = json!(at);
                    }
                    continue;
                }
                _ => continue,
            };
            let frames = event.stack.as_ref().map_or(StackId::default(), |stack| {
                *known.entry(stack.as_ptr()).or_insert_with(|| add_stack(stacks, stack))
            });
            let label = event.label.as_ref().map_or(TextId::default(), |label| stacks.add_text(label));
            let address = if action == Action::Oom { event.size } else { event.address.0 };
            match action {
                Action::Alloc => {
                    streams.insert(address, event.stream.0);
                    told.owners.insert(address, (frames, label));
                }
                Action::FreeCompleted => {
                    told.owners.remove(&address);
                }
                _ => {}
            }
            let stream = match event.stream.0 {
                // What belongs to no stream at its free was of one when it was allocated.
                NO_STREAM => streams.get(&address).copied().unwrap_or(0),
                stream => stream,
            };
            let time_us = event.time_ns / 1000;
            let (size, thread) = (event.requested, event.thread);
            told.events.push(Event {
                action,
                address,
                size,
                stream,
                time_us,
                frames,
                label,
                context: TextId::default(),
                pool: Some(pool),
                thread,
            });
        }
        told
    }

    /// Says of live and pending blocks who allocated them, as far as the history goes back.
    fn attribute(&self, segments: &mut [Segment]) {
        for block in segments.iter_mut().flat_map(|segment| &mut segment.blocks) {
            if block.state != BlockStatus::Inactive
                && let Some((frames, label)) = self.owners.get(&block.address)
            {
                (block.frames, block.label) = (*frames, *label);
            }
        }
    }
}

fn add_stack(stacks: &mut Stacks, stack: &[history::Frame]) -> StackId {
    let frames = stack.iter().map(|frame| Frame {
        name: stacks.add_text(&Arc::from(frame.name.as_str())),
        file: stacks.add_text(&Arc::from(frame.file.as_str())),
        line: frame.line.into(),
    });
    let frames = frames.collect();
    stacks.add_stack(frames)
}

fn segment(of: &SegmentState, device: u32) -> Segment {
    let any_stream = of.stream_handle.0 == NO_STREAM;
    Segment {
        device,
        address: of.address.0,
        total_size: of.size,
        allocated_size: of.allocated(),
        active_size: of.active(),
        requested_size: of.requested(),
        stream: if any_stream { 0 } else { of.stream_handle.0 },
        any_stream,
        segment_type: match of.part {
            AllocatorPart::Small => Part::Small,
            AllocatorPart::Large => Part::Large,
        },
        segment_pool_id: (of.pool.0, of.pool.1),
        is_expandable: of.backing == BackingKind::Pages,
        frames: StackId::default(),
        blocks: of
            .blocks
            .iter()
            .map(|block| Block {
                address: block.address.0,
                size: block.size,
                requested_size: block.requested,
                state: match block.status {
                    Status::ActiveAllocated => BlockStatus::ActiveAllocated,
                    Status::ActivePendingFree => BlockStatus::ActivePendingFree,
                    Status::Inactive => BlockStatus::Inactive,
                },
                frames: StackId::default(),
                label: TextId::default(),
                generation: block.generation,
                graph: block.graph.unwrap_or(0),
            })
            .collect(),
    }
}

fn allocator_settings(state: &State, settings: &str) -> BTreeMap<String, Value> {
    // PyTorch's own scripts want every key.
    let roundup =
        (0..16).map(|power| ((1_u32 << power).to_string(), json!(0))).collect::<serde_json::Map<_, _>>().into();
    let pairs = [
        ("PYTORCH_CUDA_ALLOC_CONF", json!(settings)),
        ("max_split_size", json!(state.stats.max_split_size)),
        ("garbage_collection_threshold", json!(0.0)),
        ("expandable_segments", json!(false)),
        ("pinned_num_register_threads", json!(1)),
        ("release_lock_on_cudamalloc", json!(false)),
        ("pinned_use_cuda_host_register", json!(false)),
        ("graph_capture_record_stream_reuse", json!(false)),
        ("roundup_power2_divisions", roundup),
    ];
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn extra(state: &State) -> BTreeMap<String, Value> {
    let stats: serde_json::Map<String, Value> =
        state.stats.flat().into_iter().map(|(key, value)| (key, json!(value))).collect();
    let pools: Vec<Value> = state
        .pools
        .iter()
        .map(|pool| {
            json!({
                "id": [pool.id.0, pool.id.1],
                "use_count": pool.use_count,
                "captured": pool.captured,
                "allocated_bytes": pool.allocated_bytes.all.current,
                "reserved_bytes": pool.reserved_bytes.all.current,
                "residency": pool.residency.to_string(),
                "tag": pool.tag,
                "away_bytes": pool.away_bytes,
                "host_bytes": pool.host_bytes,
                "lent_bytes": pool.lent_bytes,
            })
        })
        .collect();
    let written = |id| state.graphs.iter().filter(move |graph| graph.id == id).flat_map(|graph| &graph.written);
    let graphs: Vec<Value> = state
        .graph_bytes()
        .into_iter()
        .map(|graph| {
            json!({
                "id": graph.id,
                "pools": graph.pools.iter().map(|pool| [pool.0, pool.1]).collect::<Vec<_>>(),
                "written_bytes": graph.written,
                "exclusive_bytes": graph.exclusive,
                "written": written(graph.id).map(|range| [range.address.0, range.bytes]).collect::<Vec<_>>(),
            })
        })
        .collect();
    let captures: Vec<Value> = state
        .captures
        .iter()
        .map(|capture| {
            json!({
                "id": capture.id.map(|id| id.0),
                "device": capture.stream.map(|(device, _)| device),
                "stream": capture.stream.map(|(_, stream)| stream.0),
                "pool": [capture.pool.0, capture.pool.1],
                "pools": capture.pools.iter().map(|pool| [pool.0, pool.1]).collect::<Vec<_>>(),
            })
        })
        .collect();
    let streams = state
        .streams
        .iter()
        .map(|stream| json!({ "id": stream.id.0, "handle": stream.handle.0, "retired": stream.retired }))
        .collect();
    let pairs = [
        ("version", json!(1)),
        ("policy", json!(state.policy.name())),
        ("total_memory", json!(state.total_memory)),
        ("limit", json!(state.limit.map(|limit| limit.bytes))),
        ("stats", Value::Object(stats)),
        ("pools", Value::Array(pools)),
        ("streams", Value::Array(streams)),
        ("graphs", Value::Array(graphs)),
        ("captures_in_progress", Value::Array(captures)),
    ];
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
