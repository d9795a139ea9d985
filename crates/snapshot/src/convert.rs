//! From a tree to a snapshot, checked: rules S1 to S4.
//!
//! What PyTorch itself writes may be odd in three ways, and is kept: a free block's `requested_size` is stale, and may exceed what is left
//! of the block; an `oom` event has the size that was asked for, whatever it is; events may be of kinds that are not known here, which are
//! counted and left out. So are events of a size or at an address that nothing can have. Of a segment's own sums only the bounds are
//! checked: the figures are those of its blocks.
//!
//! A tree may share and even contain its own parts. The layout has a fixed depth, so following it ends; what is made is charged to the
//! tree's budget, so a part that is referred to a million times cannot become a million parts.

use std::collections::{BTreeMap, HashMap};

use crate::format::keys::Key;
use crate::format::tree::{Budget, Kind, Tree, Value};
use crate::model::{Action, Annotation, Block, BlockStatus, Event, Part, Segment, Snapshot, Stage};
use crate::read::{Expected, Problem};
use crate::stacks::{Frame, StackId, Stacks, TextId};

/// No GPU has an ordinal this high.
const MOST_DEVICES: u64 = 1 << 10;
/// No segment, block or request is larger: 1 TiB, several times the memory of any GPU.
const MOST_BYTES: u64 = 1 << 40;
/// Settings do not lie deeper.
const DEEPEST: usize = 32;
/// What a value of the settings takes at most, beside its text.
const SETTING: u64 = 256;

/// A problem whose path grows as it is handed outwards.
pub(crate) struct Wrong {
    pub(crate) path: String,
    pub(crate) problem: Problem,
}

impl Wrong {
    fn inside(mut self, outer: &str) -> Self {
        let dot = if self.path.is_empty() || self.path.starts_with('[') { "" } else { "." };
        self.path = format!("{outer}{dot}{}", self.path);
        self
    }

    fn at(self, list: Key, index: usize) -> Self {
        self.inside(&format!("{}[{index}]", list.name()))
    }
}

impl From<Problem> for Wrong {
    fn from(problem: Problem) -> Self {
        Self { path: String::new(), problem }
    }
}

/// The values of a dictionary by key; the last of equal keys counts.
struct Fields([Value; Key::COUNT]);

impl Fields {
    fn get(&self, key: Key) -> Option<Value> {
        Some(self.0[key.0 as usize]).filter(|value| *value != Value::ABSENT)
    }
}

struct Converter {
    tree: Tree,
    stacks: Stacks,
    /// Stacks by the list that they were.
    known: HashMap<u32, StackId>,
    unknown_events: u64,
    absurd_events: u64,
}

pub(crate) fn snapshot(tree: Tree, value: Value) -> Result<Snapshot, Wrong> {
    let (stacks, known) = (Stacks::default(), HashMap::new());
    let mut on = Converter { tree, stacks, known, unknown_events: 0, absurd_events: 0 };
    let top = on.fields(value)?;
    let list = on.required(&top, Key::SEGMENTS, Converter::list)?;
    let mut segments = on.vec(list)?;
    for index in 0..on.tree.list_at(list).len() {
        let value = on.tree.list_at(list)[index];
        segments.push(on.segment(value).map_err(|wrong| wrong.at(Key::SEGMENTS, index))?);
    }
    no_overlap(&segments)?;
    no_overflow(&segments)?;
    let mut device_traces = Vec::new();
    if let Some(list) = on.optional(&top, Key::DEVICE_TRACES, Converter::list)? {
        device_traces = on.vec(list)?;
        for index in 0..on.tree.list_at(list).len() {
            let value = on.tree.list_at(list)[index];
            device_traces.push(on.trace(value).map_err(|wrong| wrong.at(Key::DEVICE_TRACES, index))?);
        }
    }
    let mut external_annotations = Vec::new();
    if let Some(list) = on.optional(&top, Key::EXTERNAL_ANNOTATIONS, Converter::list)? {
        external_annotations = on.vec(list)?;
        for index in 0..on.tree.list_at(list).len() {
            let value = on.tree.list_at(list)[index];
            let annotation = on.annotation(value).map_err(|wrong| wrong.at(Key::EXTERNAL_ANNOTATIONS, index))?;
            external_annotations.push(annotation);
        }
    }
    let allocator_settings = on.optional(&top, Key::ALLOCATOR_SETTINGS, Converter::settings)?.unwrap_or_default();
    let gpupool = on.optional(&top, Key::GPUPOOL, Converter::settings)?.unwrap_or_default();
    let Converter { stacks, unknown_events, absurd_events, .. } = on;
    Ok(Snapshot {
        segments,
        device_traces,
        stacks,
        allocator_settings,
        external_annotations,
        gpupool,
        unknown_events,
        absurd_events,
    })
}

impl Converter {
    fn budget(&mut self) -> &mut Budget {
        &mut self.tree.budget
    }

    /// A list with room for what the items of `list` become.
    fn vec<T>(&mut self, list: u32) -> Result<Vec<T>, Problem> {
        let length = self.tree.list_at(list).len();
        let mut made = Vec::new();
        self.budget().reserve(&mut made, length)?;
        Ok(made)
    }

    fn kind_error(&self, expected: Expected, value: Value) -> Wrong {
        let found = match self.tree.kind(value) {
            Kind::None => "null",
            Kind::Truth(_) => "a truth value",
            Kind::Integer(_) | Kind::Float(_) => "a number of another kind",
            Kind::Text(_) => "a string",
            Kind::List(_) => "a list",
            Kind::Dict(_) => "an object",
        };
        Problem::Kind { expected, found }.into()
    }

    fn fields(&mut self, value: Value) -> Result<Fields, Wrong> {
        let Kind::Dict(index) = self.tree.kind(value) else { return Err(self.kind_error(Expected::Object, value)) };
        let length = self.tree.dict_at(index).len();
        if length > 2 * Key::COUNT {
            // A large dictionary may be referred to often, and costs time each time.
            self.budget().charge(8 * length as u64)?;
        }
        let mut fields = Fields([Value::ABSENT; Key::COUNT]);
        for (key, value) in self.tree.dict_at(index) {
            if let Kind::Text(text) = self.tree.kind(*key)
                && let key = self.tree.key_at(text)
                && key != Key::OTHER
            {
                fields.0[key.0 as usize] = *value;
            }
        }
        Ok(fields)
    }

    fn list(&mut self, value: Value) -> Result<u32, Wrong> {
        match self.tree.kind(value) {
            Kind::List(index) => Ok(index),
            _ => Err(self.kind_error(Expected::List, value)),
        }
    }

    fn unsigned(&mut self, value: Value) -> Result<u64, Wrong> {
        match self.tree.kind(value) {
            Kind::Integer(number) => u64::try_from(number).map_err(|_| self.kind_error(Expected::Unsigned, value)),
            _ => Err(self.kind_error(Expected::Unsigned, value)),
        }
    }

    fn size(&mut self, value: Value) -> Result<u64, Wrong> {
        match self.unsigned(value)? {
            0 => Err(Problem::Empty.into()),
            value if value > MOST_BYTES => Err(Problem::Range { value, most: MOST_BYTES }.into()),
            bytes => Ok(bytes),
        }
    }

    /// A number of which only so much is of interest: thread, generation.
    fn small(&mut self, value: Value) -> Result<u32, Wrong> {
        let number = self.unsigned(value)?;
        u32::try_from(number).map_err(|_| Problem::Range { value: number, most: u32::MAX.into() }.into())
    }

    fn device(&mut self, value: Value) -> Result<u32, Wrong> {
        let device = self.unsigned(value)?;
        match u32::try_from(device) {
            Ok(ordinal) if device < MOST_DEVICES => Ok(ordinal),
            _ => Err(Problem::Range { value: device, most: MOST_DEVICES - 1 }.into()),
        }
    }

    fn truth(&mut self, value: Value) -> Result<bool, Wrong> {
        match self.tree.kind(value) {
            Kind::Truth(value) => Ok(value),
            _ => Err(self.kind_error(Expected::Truth, value)),
        }
    }

    fn text(&mut self, value: Value) -> Result<u32, Wrong> {
        match self.tree.kind(value) {
            Kind::Text(index) => Ok(index),
            _ => Err(self.kind_error(Expected::Text, value)),
        }
    }

    /// A text that is kept.
    fn kept_text(&mut self, value: Value) -> Result<TextId, Wrong> {
        if self.tree.kind(value) == Kind::None {
            return Ok(TextId::default());
        }
        let index = self.text(value)?;
        Ok(self.stacks.add_text(self.tree.text_at(index)))
    }

    fn pair(&mut self, value: Value) -> Result<(u64, u64), Wrong> {
        let numbers = match self.tree.kind(value) {
            Kind::List(index) => match *self.tree.list_at(index) {
                [a, b] => Some((self.tree.kind(a), self.tree.kind(b))),
                _ => None,
            },
            _ => None,
        };
        if let Some((Kind::Integer(a), Kind::Integer(b))) = numbers
            && let (Ok(a), Ok(b)) = (u64::try_from(a), u64::try_from(b))
        {
            return Ok((a, b));
        }
        Err(self.kind_error(Expected::Pair, value))
    }

    fn optional<T>(
        &mut self,
        fields: &Fields,
        key: Key,
        read: impl FnOnce(&mut Self, Value) -> Result<T, Wrong>,
    ) -> Result<Option<T>, Wrong> {
        match fields.get(key) {
            None => Ok(None),
            Some(value) => read(self, value).map(Some).map_err(|wrong| wrong.inside(key.name())),
        }
    }

    fn required<T>(
        &mut self,
        fields: &Fields,
        key: Key,
        read: impl FnOnce(&mut Self, Value) -> Result<T, Wrong>,
    ) -> Result<T, Wrong> {
        self.optional(fields, key, read)?.ok_or_else(|| Wrong::from(Problem::Missing).inside(key.name()))
    }

    fn segment(&mut self, value: Value) -> Result<Segment, Wrong> {
        let fields = self.fields(value)?;
        let address = self.required(&fields, Key::ADDRESS, Self::unsigned)?;
        let total_size = self.required(&fields, Key::TOTAL_SIZE, Self::size)?;
        let Some(end) = address.checked_add(total_size) else {
            return Err(Problem::Address { address, bytes: total_size }.into());
        };
        for key in [Key::ALLOCATED_SIZE, Key::ACTIVE_SIZE, Key::REQUESTED_SIZE] {
            if let Some(bytes) = self.optional(&fields, key, Self::unsigned)? {
                within(bytes, total_size).map_err(|wrong| wrong.inside(key.name()))?;
            }
        }
        let list = self.required(&fields, Key::BLOCKS, Self::list)?;
        let mut blocks = self.vec(list)?;
        let mut next = address;
        for index in 0..self.tree.list_at(list).len() {
            let value = self.tree.list_at(list)[index];
            let block = self.block(value, next).map_err(|wrong| wrong.at(Key::BLOCKS, index))?;
            next = match next.checked_add(block.size) {
                Some(next) if next <= end => next,
                _ => {
                    let blocks = next.saturating_add(block.size) - address;
                    return Err(Problem::Tiling { blocks, segment: total_size }.into());
                }
            };
            blocks.push(block);
        }
        if next != end {
            return Err(Problem::Tiling { blocks: next - address, segment: total_size }.into());
        }
        let sum =
            |pick: fn(&Block) -> bool, of: fn(&Block) -> u64| blocks.iter().filter(|b| pick(b)).map(of).sum::<u64>();
        let kind = self.optional(&fields, Key::SEGMENT_TYPE, Self::text)?;
        let segment_type = match kind.map(|index| &**self.tree.text_at(index)) {
            Some("small") => Part::Small,
            Some("large") => Part::Large,
            None if total_size == 2 << 20 => Part::Small,
            None => Part::Large,
            Some(other) => return Err(word(other).inside(Key::SEGMENT_TYPE.name())),
        };
        Ok(Segment {
            device: self.required(&fields, Key::DEVICE, Self::device)?,
            address,
            total_size,
            allocated_size: sum(|b| b.state == BlockStatus::ActiveAllocated, |b| b.size),
            active_size: sum(|b| b.state != BlockStatus::Inactive, |b| b.size),
            requested_size: sum(|b| b.state != BlockStatus::Inactive, |b| b.requested_size),
            stream: self.required(&fields, Key::STREAM, Self::unsigned)?,
            any_stream: self.optional(&fields, Key::ANY_STREAM, Self::truth)?.unwrap_or(false),
            segment_type,
            segment_pool_id: self.optional(&fields, Key::SEGMENT_POOL_ID, Self::pair)?.unwrap_or((0, 0)),
            is_expandable: self.optional(&fields, Key::IS_EXPANDABLE, Self::truth)?.unwrap_or(false),
            frames: self.optional(&fields, Key::FRAMES, Self::stack)?.unwrap_or_default(),
            blocks,
        })
    }

    fn block(&mut self, value: Value, at: u64) -> Result<Block, Wrong> {
        let fields = self.fields(value)?;
        let address = self.optional(&fields, Key::ADDRESS, Self::unsigned)?.unwrap_or(at);
        if address != at {
            return Err(Wrong::from(Problem::BlockAddress { address, expected: at }).inside("address"));
        }
        let size = self.required(&fields, Key::SIZE, Self::size)?;
        let state = self.required(&fields, Key::STATE, Self::text)?;
        let state = match &**self.tree.text_at(state) {
            "active_allocated" => BlockStatus::ActiveAllocated,
            "active_pending_free" | "active_awaiting_free" => BlockStatus::ActivePendingFree,
            "inactive" => BlockStatus::Inactive,
            other => return Err(word(other).inside(Key::STATE.name())),
        };
        let requested_size = self.optional(&fields, Key::REQUESTED_SIZE, Self::unsigned)?.unwrap_or(size);
        if state != BlockStatus::Inactive {
            within(requested_size, size).map_err(|wrong| wrong.inside(Key::REQUESTED_SIZE.name()))?;
        }
        Ok(Block {
            address,
            size,
            requested_size,
            state,
            frames: self.optional(&fields, Key::FRAMES, Self::stack)?.unwrap_or_default(),
            label: self.optional(&fields, Key::LABEL, Self::kept_text)?.unwrap_or_default(),
            generation: self.optional(&fields, Key::GENERATION, Self::small)?.unwrap_or(0),
            graph: self.optional(&fields, Key::GRAPH, Self::unsigned)?.unwrap_or(0),
        })
    }

    fn trace(&mut self, value: Value) -> Result<Vec<Event>, Wrong> {
        let list = self.list(value)?;
        let mut events = self.vec(list)?;
        for index in 0..self.tree.list_at(list).len() {
            let value = self.tree.list_at(list)[index];
            let event = self.event(value).map_err(|wrong| wrong.inside(&format!("[{index}]")))?;
            events.extend(event);
        }
        Ok(events)
    }

    fn event(&mut self, value: Value) -> Result<Option<Event>, Wrong> {
        let fields = self.fields(value)?;
        let action = self.required(&fields, Key::ACTION, Self::text)?;
        let Some(action) = Action::of_name(self.tree.text_at(action)) else {
            self.unknown_events += 1;
            return Ok(None);
        };
        let address = if action == Action::Oom { Key::DEVICE_FREE } else { Key::ADDR };
        let frames = self.optional(&fields, Key::FRAMES, Self::stack)?;
        let address = self.required(&fields, address, Self::unsigned)?;
        let size = self.required(&fields, Key::SIZE, Self::unsigned)?;
        let somewhere = !matches!(action, Action::Oom | Action::Snapshot | Action::Annotate);
        if somewhere && (size > MOST_BYTES || address.checked_add(size).is_none()) {
            self.absurd_events += 1;
            return Ok(None);
        }
        Ok(Some(Event {
            action,
            address,
            size,
            stream: self.required(&fields, Key::STREAM, Self::unsigned)?,
            time_us: self.optional(&fields, Key::TIME_US, Self::unsigned)?.unwrap_or(0),
            frames: frames.map_or(StackId::default(), |id| if id.is_some() { id } else { StackId::EMPTY_LIST }),
            label: self.optional(&fields, Key::USER_METADATA, Self::kept_text)?.unwrap_or_default(),
            context: self.optional(&fields, Key::COMPILE_CONTEXT, Self::kept_text)?.unwrap_or_default(),
            pool: self.optional(&fields, Key::POOL_ID, Self::pair)?,
            thread: self.optional(&fields, Key::THREAD, Self::small)?.unwrap_or(0),
        }))
    }

    fn annotation(&mut self, value: Value) -> Result<Annotation, Wrong> {
        let fields = self.fields(value)?;
        let stage = self.required(&fields, Key::STAGE, Self::text)?;
        Ok(Annotation {
            stage: match &**self.tree.text_at(stage) {
                "START" => Stage::Start,
                "END" => Stage::End,
                other => return Err(word(other).inside(Key::STAGE.name())),
            },
            name: self.required(&fields, Key::NAME, Self::kept_text)?,
            device: self.optional(&fields, Key::DEVICE, Self::device)?.unwrap_or(0),
            time_us: self.optional(&fields, Key::TIME_US, Self::unsigned)?.unwrap_or(0),
        })
    }

    /// A list of frames. Lists that are one are read once.
    fn stack(&mut self, value: Value) -> Result<StackId, Wrong> {
        if self.tree.kind(value) == Kind::None {
            return Ok(StackId::default());
        }
        let list = self.list(value)?;
        if let Some(known) = self.known.get(&list) {
            return Ok(*known);
        }
        let mut frames = self.vec(list)?;
        for index in 0..self.tree.list_at(list).len() {
            let value = self.tree.list_at(list)[index];
            frames.push(self.frame(value).map_err(|wrong| wrong.inside(&format!("[{index}]")))?);
        }
        self.budget().charge(4 * size_of::<(u32, StackId)>() as u64)?;
        let id = self.stacks.add_stack(frames);
        self.known.insert(list, id);
        Ok(id)
    }

    fn frame(&mut self, value: Value) -> Result<Frame, Wrong> {
        let fields = self.fields(value)?;
        Ok(Frame {
            name: self.optional(&fields, Key::NAME, Self::kept_text)?.unwrap_or_default(),
            file: self.optional(&fields, Key::FILENAME, Self::kept_text)?.unwrap_or_default(),
            line: self.optional(&fields, Key::LINE, Self::unsigned)?.unwrap_or(0),
        })
    }

    fn settings(&mut self, value: Value) -> Result<BTreeMap<String, serde_json::Value>, Wrong> {
        match self.setting(value, 0)? {
            serde_json::Value::Object(pairs) => Ok(pairs.into_iter().collect()),
            _ => Err(self.kind_error(Expected::Object, value)),
        }
    }

    /// Any value, as it is.
    fn setting(&mut self, value: Value, depth: usize) -> Result<serde_json::Value, Wrong> {
        use serde_json::Value as Json;
        if depth > DEEPEST {
            return Err(Problem::Depth(DEEPEST).into());
        }
        self.budget().charge(SETTING)?;
        Ok(match self.tree.kind(value) {
            Kind::None => Json::Null,
            Kind::Truth(value) => Json::Bool(value),
            Kind::Integer(number) => match (i64::try_from(number), u64::try_from(number)) {
                (Ok(number), _) => Json::from(number),
                (_, Ok(number)) => Json::from(number),
                _ => return Err(self.kind_error(Expected::Unsigned, value)),
            },
            Kind::Float(number) => Json::from(number),
            Kind::Text(index) => {
                let length = self.tree.text_at(index).len() as u64;
                self.budget().charge(length)?;
                Json::String(self.tree.text_at(index).to_string())
            }
            Kind::List(list) => {
                let mut items = Vec::new();
                for index in 0..self.tree.list_at(list).len() {
                    let value = self.tree.list_at(list)[index];
                    items.push(self.setting(value, depth + 1).map_err(|wrong| wrong.inside(&format!("[{index}]")))?);
                }
                Json::Array(items)
            }
            Kind::Dict(dict) => {
                let mut pairs = serde_json::Map::new();
                for index in 0..self.tree.dict_at(dict).len() {
                    let (key, value) = self.tree.dict_at(dict)[index];
                    let key = self.text(key)?;
                    let key = self.tree.text_at(key).to_string();
                    self.budget().charge(key.len() as u64)?;
                    let value = self.setting(value, depth + 1).map_err(|wrong| wrong.inside(&key))?;
                    pairs.insert(key, value);
                }
                Json::Object(pairs)
            }
        })
    }
}

fn word(found: &str) -> Wrong {
    Problem::Word { found: found.chars().take(40).collect() }.into()
}

/// A part is not larger than the whole.
fn within(bytes: u64, whole: u64) -> Result<(), Wrong> {
    if bytes > whole { Err(Problem::Beyond { bytes, whole }.into()) } else { Ok(()) }
}

/// So that no sum over segments or blocks can overflow.
fn no_overflow(segments: &[Segment]) -> Result<(), Wrong> {
    let mut sum = 0_u64;
    for (index, segment) in segments.iter().enumerate() {
        sum = sum.checked_add(segment.total_size).ok_or_else(|| Wrong::from(Problem::Sum).at(Key::SEGMENTS, index))?;
    }
    Ok(())
}

/// No two segments of a device have bytes in common.
fn no_overlap(segments: &[Segment]) -> Result<(), Wrong> {
    let mut order: Vec<usize> = (0..segments.len()).collect();
    order.sort_by_key(|at| (segments[*at].device, segments[*at].address));
    for pair in order.windows(2) {
        let (before, after) = (&segments[pair[0]], &segments[pair[1]]);
        // The sum does not overflow: it was checked as the segment was read.
        if before.device == after.device && before.address + before.total_size > after.address {
            let (first, second) = if pair[0] < pair[1] { (before, after) } else { (after, before) };
            let problem = Problem::Overlap { address: second.address, other: first.address };
            return Err(Wrong::from(problem).at(Key::SEGMENTS, pair[0].max(pair[1])));
        }
    }
    Ok(())
}
