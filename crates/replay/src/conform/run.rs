//! Running a script, and the first operation after which anything differs.

use std::sync::Arc;

use gpupool_allocator::{AllocError, Allocation, Allocator, CaptureRegistry, Config, Filter, Policy, PoolId, Stream};
use gpupool_device::{CaptureId, StreamHandle};
use hashbrown::HashMap;

use super::compare::{self, Counters, Difference};
use super::device::{DeviceCall, ScriptedDevice};
use super::op::{FilterSpec, Op, Place, PoolPair, Script, Step, Version};
use super::{ConformError, ConformProblem};

/// The first difference in a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// The operation, from 1; it is on the next line of the file.
    pub op: u64,
    /// The operation's name.
    pub name: &'static str,
    /// What the file says.
    pub expected: String,
    /// What happened.
    pub got: String,
}

/// How a file went.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Operations in the file.
    pub ops: u64,
    /// Operations after which everything was as the file says.
    pub matched: u64,
    /// The first after which something was not; nothing is run after it.
    pub first_mismatch: Option<Mismatch>,
}

/// Runs `script` against a fresh allocator under the policy of its version, telling `progress` after each operation.
///
/// # Errors
///
/// [`ConformProblem::Conf`] when the header's configuration is not one; `file` stands for the file in it.
pub fn run(script: &Script, file: &str, mut progress: impl FnMut(u64)) -> Result<Outcome, ConformError> {
    let refused = |problem: String| ConformError {
        file: file.to_owned(),
        line: 1,
        problem: ConformProblem::Conf { conf: script.header.conf.clone(), problem },
    };
    let policy = match script.header.version {
        Version::V211 => Policy::Torch211,
        Version::V215 => Policy::Torch215,
    };
    let config = Config::parse_pytorch(&script.header.conf, policy).map_err(|e| refused(e.to_string()))?;
    let mut runner = Runner::new(script, config).map_err(|e| refused(e.to_string()))?;
    let ops = script.steps.len() as u64;
    for (op, step) in (1..).zip(&script.steps) {
        if let Some(Difference { expected, got }) = runner.step(step) {
            let first_mismatch = Some(Mismatch { op, name: step.op.name(), expected, got });
            return Ok(Outcome { ops, matched: op - 1, first_mismatch });
        }
        progress(op);
    }
    Ok(Outcome { ops, matched: ops, first_mismatch: None })
}

struct Runner {
    // Blocks go before the allocator, and that before the device.
    live: HashMap<u64, Allocation<ScriptedDevice>>,
    streams: HashMap<u64, Stream<ScriptedDevice>>,
    allocator: Allocator<ScriptedDevice>,
    device: Arc<ScriptedDevice>,
    counters: Counters,
    /// By segment: its pool. A freed segment can no longer be asked.
    pools: HashMap<u64, PoolId>,
    has_hash_orders: bool,
}

impl Runner {
    fn new(script: &Script, config: Config) -> Result<Self, AllocError> {
        let header = &script.header;
        let device = Arc::new(ScriptedDevice::new(header.device_total, header.device_limit));
        let allocator = Allocator::with_registry(Arc::clone(&device), config, Arc::new(CaptureRegistry::default()))?;
        let has_hash_orders = header.has_hash_orders();
        Ok(Self {
            live: HashMap::new(),
            streams: HashMap::new(),
            allocator,
            device,
            counters: Counters::new(&script.steps, has_hash_orders),
            pools: HashMap::new(),
            has_hash_orders,
        })
    }

    fn stream(&mut self, number: u64) -> Stream<ScriptedDevice> {
        let allocator = &self.allocator;
        self.streams.entry(number).or_insert_with(|| allocator.register_stream(StreamHandle(number))).clone()
    }

    fn step(&mut self, step: &Step) -> Option<Difference> {
        self.device.expect(&step.driver);
        let placed = match self.execute(&step.op) {
            Ok(placed) => placed,
            Err(error) => {
                let got = format!("error: {error}");
                return Some(Difference { expected: format!("{} succeeds", step.op.name()), got });
            }
        };
        if placed.is_some() {
            return placed;
        }
        let made = self.device.made();
        if made.iter().any(|call| matches!(call, DeviceCall::Malloc { .. })) {
            self.note_pools();
        }
        let pool_of = |segment: u64| self.pools.get(&segment).copied().unwrap_or(PoolId::DEFAULT);
        compare::driver(&step.driver, &made, pool_of)
            .or_else(|| self.counters.compare(&step.stats, &self.allocator.stats()))
    }

    fn note_pools(&mut self) {
        for segment in self.allocator.state().segments {
            if let Some((number, _)) = self.device.locate(segment.address) {
                self.pools.insert(number, segment.pool);
            }
        }
    }

    fn execute(&mut self, op: &Op) -> Result<Option<Difference>, Box<dyn std::error::Error>> {
        match op {
            Op::Alloc { id, size, stream, place } => return self.alloc(*id, *size, *stream, *place),
            Op::Free { id } => {
                if let Some(block) = self.live.remove(id) {
                    block.free()?;
                }
            }
            Op::RecordStream { id, stream } => {
                let stream = self.stream(*stream);
                if let Some(block) = self.live.get(id) {
                    block.record_stream(&stream)?;
                }
            }
            Op::CompleteAllWork => self.device.complete_all_work(),
            Op::EmptyCache => {
                self.allocator.empty_cache()?;
            }
            Op::SetMemoryFraction { fraction } => self.allocator.set_memory_fraction(*fraction)?,
            Op::SetCurrentStream { stream } => {
                let stream = self.stream(*stream);
                self.allocator.set_current_stream(&stream)?;
            }
            Op::CreatePool(pool) => self.allocator.create_pool(id_of(*pool))?,
            Op::ReleasePool(pool) => self.allocator.release_pool(id_of(*pool))?,
            Op::BeginAllocateToPool(pool, filter) => {
                let filter = match filter {
                    FilterSpec::All => Filter::All,
                    FilterSpec::Stream(stream) => Filter::Stream(StreamHandle(*stream)),
                };
                self.allocator.begin_allocate_to_pool(id_of(*pool), filter)?;
            }
            Op::EndAllocateToPool(pool) => self.allocator.end_allocate_to_pool(id_of(*pool))?,
            Op::SetNoSplit(pool) => self.allocator.set_no_split(id_of(*pool)),
            Op::SetUseOnOom(pool, on) => self.allocator.set_use_on_oom(id_of(*pool), *on),
            Op::StreamBeginCapture { stream, capture } => {
                self.device.begin_capture(StreamHandle(*stream), CaptureId(*capture));
            }
            Op::StreamEndCapture { stream } => self.device.end_capture(StreamHandle(*stream)),
            Op::MarkCaptureBegin => self.allocator.mark_capture_begin(),
            Op::MarkCaptureEnd => self.allocator.mark_capture_end(),
            Op::Snapshot(expected) => {
                let state = self.allocator.state();
                return Ok(compare::snapshot(expected, &state, &self.device, self.has_hash_orders));
            }
        }
        Ok(None)
    }

    fn alloc(
        &mut self,
        id: u64,
        size: u64,
        stream: u64,
        expected: Place,
    ) -> Result<Option<Difference>, Box<dyn std::error::Error>> {
        let stream = self.stream(stream);
        let got = match self.allocator.alloc(size, &stream) {
            Ok(block) => {
                let place = self.device.locate(block.address());
                let Some((segment, offset)) = place else {
                    let got = format!("{} outside of every segment", block.address());
                    return Ok(Some(Difference { expected: expected.to_string(), got }));
                };
                self.live.insert(id, block);
                Place::At { segment, offset }
            }
            Err(AllocError::OutOfMemory(_)) => Place::OutOfMemory,
            Err(other) => return Err(other.into()),
        };
        Ok((got != expected).then(|| Difference { expected: expected.to_string(), got: got.to_string() }))
    }
}

fn id_of(pool: PoolPair) -> PoolId {
    PoolId(pool.0, pool.1)
}
