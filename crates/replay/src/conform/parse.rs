//! Reading a conformance file, with every line checked against those before it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use super::fields::{Fields, list, signed, unsigned, wrong};
use super::op::{
    BlockKind, DriverCall, ExpectedBlock, ExpectedSegment, FORMAT, FilterSpec, Header, Op, PartKind, Place, Script,
    StatsLine, StatsShape, Step, Version,
};
use super::{ConformError, ConformProblem};
use crate::text::{Limits, Lines, TextProblem, decimal, excerpt, hexadecimal};
use crate::trace::MAX_BYTES;

const LIMITS: Limits = Limits { total: 1 << 28, line: 1 << 24 };
const MAX_OPS: usize = 1 << 20;

const ARRAYS: [&str; 9] = [
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
];
const SINGLE: [&str; 2] = ["oversize_allocations", "oversize_segments"];
const NUMBERS: [&str; 6] = [
    "num_alloc_retries",
    "num_ooms",
    "num_oom_rejections",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
];
const PARTS: [&str; 3] = ["all", "small_pool", "large_pool"];
const VALUES: [&str; 4] = ["current", "peak", "allocated", "freed"];

impl Script {
    /// Reads the conformance file at `path`.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or is no whole, consistent conformance file; the error names file and line.
    pub fn read(path: &Path) -> Result<Self, ConformError> {
        let name = path.display().to_string();
        match File::open(path) {
            Ok(file) => Self::parse(&name, file),
            Err(error) => Err(ConformError { file: name, line: 0, problem: TextProblem::Io(error).into() }),
        }
    }

    /// Reads a conformance file from `input`; `name` stands for the file in errors.
    ///
    /// # Errors
    ///
    /// When the input is no whole, consistent conformance file.
    pub fn parse(name: &str, input: impl Read) -> Result<Self, ConformError> {
        let mut line = 1;
        parse(input, &mut line).map_err(|problem| ConformError { file: name.to_owned(), line, problem })
    }
}

fn parse(input: impl Read, line: &mut u64) -> Result<Script, ConformProblem> {
    let mut lines = Lines::new(input, LIMITS)?;
    let header = match lines.next_line()? {
        Some(text) => header(Fields::parse(text)?)?,
        None => return Err(TextProblem::Empty.into()),
    };
    let mut reader = Reader { shape: header.shape, ..Reader::default() };
    let mut steps = Vec::new();
    loop {
        *line += 1;
        match lines.next_line()? {
            Some(_) if steps.len() == MAX_OPS => return Err(ConformProblem::TooManyOps { limit: MAX_OPS }),
            Some(text) => steps.push(reader.step(Fields::parse(text)?)?),
            None => return Ok(Script { header, steps }),
        }
    }
}

fn header(mut fields: Fields) -> Result<Header, ConformProblem> {
    let format = fields.string("format")?;
    if format != FORMAT {
        return Err(ConformProblem::Format { found: excerpt(&format) });
    }
    let version = fields.string("version")?;
    let version = match version.as_str() {
        "2.11" => Version::V211,
        "2.15" => Version::V215,
        other => return Err(ConformProblem::Version { found: excerpt(other) }),
    };
    let shape = fields.string("stats_shape")?;
    let shape = match shape.as_str() {
        "current" => StatsShape::Current,
        "current,peak,allocated,freed" => StatsShape::Full,
        other => return Err(ConformProblem::StatsShape { found: excerpt(other) }),
    };
    let (total, limit) = (fields.u64("device_total")?, fields.u64("device_limit")?);
    if total == 0 || total > MAX_BYTES || limit > MAX_BYTES {
        return Err(ConformProblem::DeviceSize { total, limit });
    }
    Ok(Header {
        source: fields.string("source")?,
        version,
        kind: fields.string("kind")?,
        seed: fields.u64("seed")?,
        device_total: total,
        device_limit: limit,
        conf: fields.string("conf")?,
        shape,
    })
}

/// What the lines so far add up to.
struct Reader {
    shape: StatsShape,
    live: BTreeSet<u64>,
    capturing: BTreeSet<u64>,
    /// Segments made so far.
    made: u64,
    /// Segments that exist: address and size by number.
    standing: BTreeMap<u64, (u64, u64)>,
    /// The same by address.
    by_address: BTreeMap<u64, u64>,
}

impl Default for Reader {
    fn default() -> Self {
        Self {
            shape: StatsShape::Full,
            live: BTreeSet::new(),
            capturing: BTreeSet::new(),
            made: 0,
            standing: BTreeMap::new(),
            by_address: BTreeMap::new(),
        }
    }
}

impl Reader {
    fn step(&mut self, mut fields: Fields) -> Result<Step, ConformProblem> {
        let name = fields.string("op")?;
        let driver = match fields.maybe("driver") {
            Some(value) => self.driver(&value)?,
            None => Vec::new(),
        };
        let stats = match fields.maybe("stats") {
            Some(value) => self.stats(value)?,
            None => StatsLine::new(),
        };
        let op = self.op(&name, &mut fields)?;
        fields.finish()?;
        Ok(Step { op, driver, stats })
    }

    fn op(&mut self, name: &str, fields: &mut Fields) -> Result<Op, ConformProblem> {
        Ok(match name {
            "alloc" => self.alloc(fields)?,
            "free" => {
                let id = fields.u64("id")?;
                if !self.live.remove(&id) {
                    return Err(ConformProblem::NotLive { id });
                }
                Op::Free { id }
            }
            "record_stream" => {
                let (id, stream) = (fields.u64("id")?, fields.u64("stream")?);
                if !self.live.contains(&id) {
                    return Err(ConformProblem::NotLive { id });
                }
                Op::RecordStream { id, stream }
            }
            "complete_all_work" => Op::CompleteAllWork,
            "empty_cache" => Op::EmptyCache,
            "set_memory_fraction" => {
                let fraction = fields.f64("fraction")?;
                if !(0.0..=1.0).contains(&fraction) {
                    return Err(ConformProblem::Fraction { fraction });
                }
                Op::SetMemoryFraction { fraction }
            }
            "set_current_stream" => Op::SetCurrentStream { stream: fields.u64("stream")? },
            "create_pool" => Op::CreatePool(fields.pool()?),
            "release_pool" => Op::ReleasePool(fields.pool()?),
            "begin_allocate_to_pool" => Op::BeginAllocateToPool(fields.pool()?, filter(fields)?),
            "end_allocate_to_pool" => Op::EndAllocateToPool(fields.pool()?),
            "set_no_split" => Op::SetNoSplit(fields.pool()?),
            "set_use_on_oom" => Op::SetUseOnOom(fields.pool()?, fields.bool("on")?),
            "stream_begin_capture" => {
                let (stream, capture) = (fields.u64("stream")?, fields.u64("capture_id")?);
                if !self.capturing.insert(stream) {
                    return Err(ConformProblem::Capture { stream, capturing: true });
                }
                Op::StreamBeginCapture { stream, capture }
            }
            "stream_end_capture" => {
                let stream = fields.u64("stream")?;
                if !self.capturing.remove(&stream) {
                    return Err(ConformProblem::Capture { stream, capturing: false });
                }
                Op::StreamEndCapture { stream }
            }
            "mark_capture_begin" => Op::MarkCaptureBegin,
            "mark_capture_end" => Op::MarkCaptureEnd,
            "snapshot" => Op::Snapshot(self.snapshot(&fields.take("segments")?)?),
            other => return Err(ConformProblem::UnknownOp { found: excerpt(other) }),
        })
    }

    fn alloc(&mut self, fields: &mut Fields) -> Result<Op, ConformProblem> {
        let (id, size, stream) = (fields.u64("id")?, sized(fields.u64("size")?)?, fields.u64("stream")?);
        let fails = fields.maybe("out_of_memory").map_or(Ok(false), |value| {
            value.as_bool().ok_or_else(|| wrong("out_of_memory", "true or false", &value))
        })?;
        if self.live.contains(&id) {
            return Err(ConformProblem::AllocatedTwice { id });
        }
        let place = if fails {
            Place::OutOfMemory
        } else {
            let (segment, offset) = (fields.u64("segment")?, fields.u64("offset")?);
            match self.standing.get(&segment) {
                Some((_, bytes)) if offset < *bytes => {}
                _ => return Err(ConformProblem::NoSegment { segment }),
            }
            self.live.insert(id);
            Place::At { segment, offset }
        };
        Ok(Op::Alloc { id, size, stream, place })
    }

    fn driver(&mut self, value: &Value) -> Result<Vec<DriverCall>, ConformProblem> {
        list(value, "driver")?.iter().map(|call| self.driver_call(call)).collect()
    }

    fn driver_call(&mut self, call: &Value) -> Result<DriverCall, ConformProblem> {
        const EXPECTED: &str =
            "[\"malloc\", bytes, segment, address], [\"malloc\", bytes, null] or [\"free\", segment]";
        let words = list(call, "driver")?;
        match (words.first().and_then(Value::as_str), words) {
            (Some("malloc"), [_, bytes, Value::Null]) => {
                Ok(DriverCall::Refused { bytes: sized(unsigned(bytes, "driver")?)? })
            }
            (Some("malloc"), [_, bytes, segment, Value::String(address)]) => {
                let (bytes, segment) = (sized(unsigned(bytes, "driver")?)?, unsigned(segment, "driver")?);
                let Some(address) = hexadecimal(address) else { return Err(wrong("driver", EXPECTED, call)) };
                self.make(segment, address, bytes)?;
                Ok(DriverCall::Malloc { bytes, segment, address })
            }
            (Some("free"), [_, segment]) => {
                let segment = unsigned(segment, "driver")?;
                let Some((address, _)) = self.standing.remove(&segment) else {
                    return Err(ConformProblem::NoSegment { segment });
                };
                self.by_address.remove(&address);
                Ok(DriverCall::Free { segment })
            }
            _ => Err(wrong("driver", EXPECTED, call)),
        }
    }

    fn make(&mut self, segment: u64, address: u64, bytes: u64) -> Result<(), ConformProblem> {
        if segment != self.made {
            return Err(ConformProblem::SegmentOrder { expected: self.made, found: segment });
        }
        let misplaced = ConformProblem::Address { segment, address };
        if address > super::device::HIGHEST {
            return Err(misplaced);
        }
        let before = self.by_address.range(..address + bytes).next_back();
        let overlaps =
            before.is_some_and(|(at, other)| self.standing.get(other).is_some_and(|(_, size)| at + size > address));
        if overlaps {
            return Err(misplaced);
        }
        self.made += 1;
        self.standing.insert(segment, (address, bytes));
        self.by_address.insert(address, segment);
        Ok(())
    }

    fn stats(&self, value: Value) -> Result<StatsLine, ConformProblem> {
        let mut line = StatsLine::new();
        for (name, value) in Fields::of(value, "stats")?.into_rest() {
            if ARRAYS.contains(&name.as_str()) {
                let parts = list(&value, &name)?;
                if parts.len() != PARTS.len() {
                    return Err(wrong(&name, "one counter each for [all, small_pool, large_pool]", &value));
                }
                for (part, value) in PARTS.iter().zip(parts) {
                    self.counter(&mut line, &format!("{name}.{part}"), value)?;
                }
            } else if SINGLE.contains(&name.as_str()) {
                self.counter(&mut line, &name, &value)?;
            } else if NUMBERS.contains(&name.as_str()) {
                let number = signed(&value, &name)?;
                line.insert(name, number);
            } else if name == "private_pools" {
                // Named even when there is no pool yet, so that it counts as recorded.
                line.insert(name.clone(), 0);
                for (pool, value) in Fields::of(value, &name)?.into_rest() {
                    let both = pool.split_once(',').map(|(a, b)| decimal(a).is_some() && decimal(b).is_some());
                    if both != Some(true) {
                        return Err(ConformProblem::UnknownCounter {
                            counter: format!("private_pools.{}", excerpt(&pool)),
                        });
                    }
                    self.counter(&mut line, &format!("private_pools.{pool}"), &value)?;
                }
            } else {
                return Err(ConformProblem::UnknownCounter { counter: excerpt(&name) });
            }
        }
        Ok(line)
    }

    fn counter(&self, line: &mut StatsLine, name: &str, value: &Value) -> Result<(), ConformProblem> {
        match self.shape {
            StatsShape::Current => {
                line.insert(format!("{name}.current"), signed(value, name)?);
            }
            StatsShape::Full => {
                let values = list(value, name)?;
                if values.len() != VALUES.len() {
                    return Err(wrong(name, "[current, peak, allocated, freed]", value));
                }
                for (key, value) in VALUES.iter().zip(values) {
                    line.insert(format!("{name}.{key}"), signed(value, name)?);
                }
            }
        }
        Ok(())
    }

    fn snapshot(&self, value: &Value) -> Result<Vec<ExpectedSegment>, ConformProblem> {
        list(value, "segments")?.iter().map(|segment| self.segment(segment.clone())).collect()
    }

    fn segment(&self, value: Value) -> Result<ExpectedSegment, ConformProblem> {
        let mut fields = Fields::of(value, "segments")?;
        let segment = fields.u64("segment")?;
        if !self.standing.contains_key(&segment) {
            return Err(ConformProblem::NoSegment { segment });
        }
        let kind = fields.string("kind")?;
        let expected = ExpectedSegment {
            segment,
            size: sized(fields.u64("size")?)?,
            stream: fields.u64("stream")?,
            pool: fields.pool()?,
            kind: match kind.as_str() {
                "small" => PartKind::Small,
                "large" => PartKind::Large,
                _ => return Err(wrong("kind", "\"small\" or \"large\"", &Value::String(kind))),
            },
            blocks: list(&fields.take("blocks")?, "blocks")?.iter().map(block).collect::<Result<_, _>>()?,
        };
        fields.finish()?;
        Ok(expected)
    }
}

fn block(value: &Value) -> Result<ExpectedBlock, ConformProblem> {
    const EXPECTED: &str = "[size, requested, \"alloc\", \"pending\" or \"inactive\"]";
    let [size, requested, kind] = list(value, "blocks")? else { return Err(wrong("blocks", EXPECTED, value)) };
    let kind = match kind.as_str() {
        Some("alloc") => BlockKind::Alloc,
        Some("pending") => BlockKind::Pending,
        Some("inactive") => BlockKind::Inactive,
        _ => return Err(wrong("blocks", EXPECTED, value)),
    };
    Ok(ExpectedBlock { size: sized(unsigned(size, "blocks")?)?, requested: unsigned(requested, "blocks")?, kind })
}

fn filter(fields: &mut Fields) -> Result<FilterSpec, ConformProblem> {
    let value = fields.take("filter")?;
    if value.as_str() == Some("all") {
        return Ok(FilterSpec::All);
    }
    match value.as_object() {
        Some(map) if map.len() == 1 => match map.get("stream").and_then(Value::as_u64) {
            Some(stream) => Ok(FilterSpec::Stream(stream)),
            None => Err(wrong("filter", "\"all\" or {\"stream\": n}", &value)),
        },
        _ => Err(wrong("filter", "\"all\" or {\"stream\": n}", &value)),
    }
}

fn sized(bytes: u64) -> Result<u64, ConformProblem> {
    if bytes == 0 || bytes > MAX_BYTES { Err(ConformProblem::Size { bytes }) } else { Ok(bytes) }
}
