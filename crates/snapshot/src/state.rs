//! An allocator's state in PyTorch's layout.

use std::collections::BTreeMap;

use gpupool_allocator::state::{BlockStatus as Status, SegmentState};
use gpupool_allocator::{Part as AllocatorPart, State};
use serde_json::{Value, json};

use crate::model::{Block, BlockStatus, Part, Segment, Snapshot};

/// What the allocator gives for memory that belongs to no one stream.
const NO_STREAM: u64 = u64::MAX;

impl Snapshot {
    /// The snapshot of `state`. `settings` are those the allocator was given, as a `PYTORCH_CUDA_ALLOC_CONF` string.
    #[must_use]
    pub fn of(state: &State, settings: &str) -> Self {
        let mut segments: Vec<Segment> = state.segments.iter().map(|s| segment(s, state.device)).collect();
        segments.sort_by_key(|s| s.address);
        let devices = state.device as usize + 1;
        Self {
            segments,
            device_traces: vec![Vec::new(); devices],
            allocator_settings: allocator_settings(state, settings),
            external_annotations: Vec::new(),
            gpupool: extra(state),
        }
    }
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
        is_expandable: false,
        frames: Vec::new(),
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
                frames: Vec::new(),
            })
            .collect(),
    }
}

fn allocator_settings(state: &State, settings: &str) -> BTreeMap<String, Value> {
    let pairs = [
        ("PYTORCH_CUDA_ALLOC_CONF", json!(settings)),
        ("max_split_size", json!(state.stats.max_split_size)),
        ("expandable_segments", json!(false)),
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
            })
        })
        .collect();
    let pairs = [
        ("policy", json!(state.policy.name())),
        ("total_memory", json!(state.total_memory)),
        ("limit", json!(state.limit.map(|limit| limit.bytes))),
        ("stats", Value::Object(stats)),
        ("pools", Value::Array(pools)),
    ];
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
