//! What "the same" means: rules C2 to C4.

use std::collections::BTreeSet;

use gpupool_allocator::state::{BlockStatus, SegmentState};
use gpupool_allocator::{Part, PoolId, State, Stats};

use super::device::{DeviceCall, ScriptedDevice};
use super::op::{BlockKind, DriverCall, ExpectedBlock, ExpectedSegment, PartKind, StatsLine, Step};

/// What was expected and what there was instead.
pub(super) struct Difference {
    pub(super) expected: String,
    pub(super) got: String,
}

fn difference(expected: impl ToString, got: impl ToString) -> Option<Difference> {
    Some(Difference { expected: expected.to_string(), got: got.to_string() })
}

/// Compares driver calls (C3). `pool_of` knows each segment's pool.
pub(super) fn driver(
    expected: &[DriverCall],
    made: &[DeviceCall],
    pool_of: impl Fn(u64) -> PoolId,
) -> Option<Difference> {
    let expected_segments: Vec<Option<u64>> = expected
        .iter()
        .map(|call| match *call {
            DriverCall::Free { segment } => Some(segment),
            _ => None,
        })
        .collect();
    let made_segments: Vec<Option<u64>> = made
        .iter()
        .map(|call| match *call {
            DeviceCall::Free { segment } => Some(segment),
            _ => None,
        })
        .collect();
    let expected_order = order(&expected_segments, &pool_of);
    let made_order = order(&made_segments, &pool_of);
    let same =
        expected.len() == made.len() && expected_order.iter().zip(&made_order).all(|(e, m)| made[*m].is(expected[*e]));
    if same { None } else { difference(list(expected), list(made)) }
}

/// The order in which calls are compared: each run of frees (`Some`) by pool, unless a private pool's came before the
/// default pool's, which is a difference by itself.
fn order(frees: &[Option<u64>], pool_of: impl Fn(u64) -> PoolId) -> Vec<usize> {
    let mut order: Vec<usize> = (0..frees.len()).collect();
    for run in order.chunk_by_mut(|a, b| frees[*a].is_some() && frees[*b].is_some()) {
        let pool = |index: &usize| frees[*index].map_or(PoolId::DEFAULT, &pool_of);
        let default_first = run.iter().is_sorted_by_key(|index| !pool(index).is_default());
        if default_first {
            run.sort_by_key(pool);
        }
    }
    order
}

fn list<T: ToString>(calls: &[T]) -> String {
    if calls.is_empty() {
        return "no driver call".to_owned();
    }
    calls.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// The counters as the file has them so far.
pub(super) struct Counters {
    expected: StatsLine,
    /// What the file names anywhere; of `private_pools` the word itself.
    recorded: BTreeSet<String>,
    has_hash_orders: bool,
}

impl Counters {
    pub(super) fn new(steps: &[Step], has_hash_orders: bool) -> Self {
        let named = steps.iter().flat_map(|step| step.stats.keys());
        let recorded = named.filter(|key| !key.starts_with("private_pools.")).cloned().collect();
        Self { expected: StatsLine::new(), recorded, has_hash_orders }
    }

    /// Applies the changes of a line and compares everything (C2).
    pub(super) fn compare(&mut self, changes: &StatsLine, stats: &Stats) -> Option<Difference> {
        self.expected.extend(changes.iter().map(|(key, value)| (key.clone(), *value)));
        let (mut expected, mut got) = (Vec::new(), Vec::new());
        for (key, value) in flat(stats) {
            if self.compared(&key) {
                let wanted = self.expected.get(&key).copied().unwrap_or(0);
                if wanted != value {
                    expected.push(format!("{key} = {wanted}"));
                    got.push(format!("{key} = {value}"));
                }
            }
        }
        let ours = |pool: &str| stats.private_pools.keys().any(|id| pool_key(*id) == pool);
        for (key, value) in &self.expected {
            let pool = key.strip_prefix("private_pools.").and_then(|rest| rest.split_once('.'));
            if let Some((pool, _)) = pool
                && *value != 0
                && !ours(pool)
            {
                expected.push(format!("{key} = {value}"));
                got.push(format!("{key} = 0"));
            }
        }
        if expected.is_empty() { None } else { difference(expected.join(", "), got.join(", ")) }
    }

    fn compared(&self, key: &str) -> bool {
        if key.starts_with("private_pools.") {
            return self.recorded.contains("private_pools")
                && (self.recorded_shape_is_full() || key.ends_with(".current"));
        }
        if self.has_hash_orders && key.starts_with("inactive_split") && !key.ends_with(".current") {
            return false;
        }
        self.recorded.contains(key)
    }

    fn recorded_shape_is_full(&self) -> bool {
        self.recorded.iter().any(|key| key.ends_with(".peak"))
    }
}

fn pool_key(pool: PoolId) -> String {
    format!("{},{}", pool.0, pool.1)
}

/// Our counters under the file's keys, which are PyTorch's but for those of private pools.
fn flat(stats: &Stats) -> Vec<(String, i64)> {
    let mut out = stats.flat();
    for (pool, array) in &stats.private_pools {
        let name = format!("private_pools.{}", pool_key(*pool));
        out.extend(array.all.values().map(|(key, value)| (format!("{name}.{key}"), value)));
    }
    out
}

/// Compares a snapshot, in order of segment numbers (C4).
pub(super) fn snapshot(
    expected: &[ExpectedSegment],
    state: &State,
    device: &ScriptedDevice,
    has_hash_orders: bool,
) -> Option<Difference> {
    let number = |segment: &SegmentState| device.locate(segment.address).map_or(u64::MAX, |(number, _)| number);
    let mut got: Vec<ExpectedSegment> = state.segments.iter().map(|s| as_expected(s, number(s))).collect();
    got.sort_by_key(|segment| segment.segment);
    let mut expected = expected.to_vec();
    expected.sort_by_key(|segment| segment.segment);
    if has_hash_orders {
        for block in expected.iter_mut().chain(&mut got).flat_map(|segment| &mut segment.blocks) {
            if block.kind == BlockKind::Inactive {
                block.requested = 0;
            }
        }
    }
    for (e, g) in expected.iter().zip(&got) {
        if e != g {
            return difference(format!("{e:?}"), format!("{g:?}"));
        }
    }
    let count = |segments: &[ExpectedSegment]| format!("{} segments", segments.len());
    if expected.len() == got.len() { None } else { difference(count(&expected), count(&got)) }
}

fn as_expected(segment: &SegmentState, number: u64) -> ExpectedSegment {
    ExpectedSegment {
        segment: number,
        size: segment.size,
        stream: segment.stream_handle.0,
        pool: (segment.pool.0, segment.pool.1),
        kind: match segment.part {
            Part::Small => PartKind::Small,
            Part::Large => PartKind::Large,
        },
        blocks: segment
            .blocks
            .iter()
            .map(|block| ExpectedBlock {
                size: block.size,
                requested: block.requested,
                kind: match block.status {
                    BlockStatus::ActiveAllocated => BlockKind::Alloc,
                    BlockStatus::ActivePendingFree => BlockKind::Pending,
                    BlockStatus::Inactive => BlockKind::Inactive,
                },
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool_of(segment: u64) -> PoolId {
        match segment {
            0..10 => PoolId::DEFAULT,
            10..20 => PoolId(1, 0),
            _ => PoolId(0, 5),
        }
    }

    fn same(expected: &[u64], made: &[u64]) -> bool {
        let expected: Vec<_> = expected.iter().map(|segment| DriverCall::Free { segment: *segment }).collect();
        let made: Vec<_> = made.iter().map(|segment| DeviceCall::Free { segment: *segment }).collect();
        driver(&expected, &made, pool_of).is_none()
    }

    #[test]
    fn c3_the_order_between_private_pools_does_not_count() {
        assert!(same(&[1, 2, 10, 11, 20], &[1, 2, 20, 10, 11]));
        assert!(!same(&[1, 2], &[2, 1]), "inside a pool it does");
        assert!(!same(&[10, 11, 20], &[11, 10, 20]));
        assert!(!same(&[1, 10], &[10, 1]), "the default pool comes first");
        assert!(!same(&[1, 10], &[1]));
        assert!(!same(&[], &[1]));
    }

    #[test]
    fn c3_a_run_of_frees_ends_at_an_allocation() {
        let malloc = DriverCall::Malloc { bytes: 512, segment: 30, address: 0 };
        let made = DeviceCall::Malloc { bytes: 512, segment: 30 };
        let (e10, e20) = (DriverCall::Free { segment: 10 }, DriverCall::Free { segment: 20 });
        let (m10, m20) = (DeviceCall::Free { segment: 10 }, DeviceCall::Free { segment: 20 });
        assert!(driver(&[e10, malloc, e20], &[m10, made, m20], pool_of).is_none());
        assert!(driver(&[e10, malloc, e20], &[m20, made, m10], pool_of).is_some());
        assert!(driver(&[e10, e20, malloc], &[m20, m10, made], pool_of).is_none());
    }
}
