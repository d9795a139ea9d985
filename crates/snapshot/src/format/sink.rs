//! One layout, two formats: what a snapshot's file holds, told to whatever writes it.

use std::io::{self, Write};

use serde_json::Value;

use super::keys::Key;
use crate::model::{Action, Snapshot, Stage};
use crate::stacks::{StackId, Stacks};

/// Writes values in some format, in the order in which they come.
pub(crate) trait Sink: Sized {
    fn open_dict(&mut self) -> io::Result<()>;
    fn close_dict(&mut self) -> io::Result<()>;
    fn open_list(&mut self) -> io::Result<()>;
    fn close_list(&mut self) -> io::Result<()>;
    /// The key of what comes next, inside a dictionary.
    fn key(&mut self, key: &str) -> io::Result<()>;
    fn none(&mut self) -> io::Result<()>;
    fn truth(&mut self, value: bool) -> io::Result<()>;
    fn integer(&mut self, value: i128) -> io::Result<()>;
    fn float(&mut self, value: f64) -> io::Result<()>;
    fn text(&mut self, value: &str) -> io::Result<()>;
    /// Two integers, which are a tuple where the format has such.
    fn pair(&mut self, value: (u64, u64)) -> io::Result<()>;
    /// A list of frames.
    fn stack(&mut self, stacks: &Stacks, id: StackId) -> io::Result<()>;

    /// The frames of a stack, inside a list.
    fn frames(&mut self, stacks: &Stacks, id: StackId) -> io::Result<()> {
        for frame in stacks.frames(id) {
            self.open_dict()?;
            self.field_text(Key::NAME, frame.name)?;
            self.field_text(Key::FILENAME, frame.file)?;
            self.field(Key::LINE, frame.line)?;
            self.close_dict()?;
        }
        Ok(())
    }

    fn field(&mut self, key: Key, value: u64) -> io::Result<()> {
        self.key(key.name())?;
        self.integer(value.into())
    }

    fn field_text(&mut self, key: Key, value: &str) -> io::Result<()> {
        self.key(key.name())?;
        self.text(value)
    }

    /// Any value.
    fn value(&mut self, value: &Value) -> io::Result<()> {
        match value {
            Value::Null => self.none(),
            Value::Bool(value) => self.truth(*value),
            Value::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => self.integer(value.into()),
                (_, Some(value)) => self.integer(value.into()),
                _ => self.float(number.as_f64().unwrap_or(0.0)),
            },
            Value::String(text) => self.text(text),
            Value::Array(items) => {
                self.open_list()?;
                items.iter().try_for_each(|item| self.value(item))?;
                self.close_list()
            }
            Value::Object(pairs) => self.pairs(pairs.iter()),
        }
    }

    fn pairs<'a>(&mut self, pairs: impl Iterator<Item = (&'a String, &'a Value)>) -> io::Result<()> {
        self.open_dict()?;
        for (key, value) in pairs {
            self.key(key)?;
            self.value(value)?;
        }
        self.close_dict()
    }
}

/// Tells a whole snapshot.
pub(crate) fn write(snapshot: &Snapshot, to: &mut impl Sink) -> io::Result<()> {
    to.open_dict()?;
    to.key(Key::SEGMENTS.name())?;
    to.open_list()?;
    for segment in &snapshot.segments {
        self::segment(snapshot, segment, to)?;
    }
    to.close_list()?;
    to.key(Key::DEVICE_TRACES.name())?;
    to.open_list()?;
    for trace in &snapshot.device_traces {
        to.open_list()?;
        for event in trace {
            self::event(snapshot, event, to)?;
        }
        to.close_list()?;
    }
    to.close_list()?;
    to.key(Key::ALLOCATOR_SETTINGS.name())?;
    to.pairs(snapshot.allocator_settings.iter())?;
    to.key(Key::EXTERNAL_ANNOTATIONS.name())?;
    to.open_list()?;
    for annotation in &snapshot.external_annotations {
        to.open_dict()?;
        to.field_text(Key::STAGE, if annotation.stage == Stage::Start { "START" } else { "END" })?;
        to.field_text(Key::NAME, snapshot.stacks.text(annotation.name))?;
        to.field(Key::DEVICE, annotation.device.into())?;
        to.field(Key::TIME_US, annotation.time_us)?;
        to.close_dict()?;
    }
    to.close_list()?;
    to.key(Key::GPUPOOL.name())?;
    to.pairs(snapshot.gpupool.iter())?;
    to.close_dict()
}

fn segment(snapshot: &Snapshot, segment: &crate::model::Segment, to: &mut impl Sink) -> io::Result<()> {
    to.open_dict()?;
    to.field(Key::DEVICE, segment.device.into())?;
    to.field(Key::ADDRESS, segment.address)?;
    to.field(Key::TOTAL_SIZE, segment.total_size)?;
    for (key, value) in [
        ("allocated_size", segment.allocated_size),
        ("active_size", segment.active_size),
        ("requested_size", segment.requested_size),
    ] {
        to.key(key)?;
        to.integer(value.into())?;
    }
    to.field(Key::STREAM, segment.stream)?;
    if segment.any_stream {
        to.key(Key::ANY_STREAM.name())?;
        to.truth(true)?;
    }
    to.field_text(Key::SEGMENT_TYPE, segment.segment_type.name())?;
    to.key(Key::SEGMENT_POOL_ID.name())?;
    to.pair(segment.segment_pool_id)?;
    to.key(Key::IS_EXPANDABLE.name())?;
    to.truth(segment.is_expandable)?;
    to.key(Key::FRAMES.name())?;
    to.stack(&snapshot.stacks, segment.frames)?;
    to.key(Key::BLOCKS.name())?;
    to.open_list()?;
    for block in &segment.blocks {
        to.open_dict()?;
        to.field(Key::ADDRESS, block.address)?;
        to.field(Key::SIZE, block.size)?;
        to.field(Key::REQUESTED_SIZE, block.requested_size)?;
        to.field_text(Key::STATE, block.state.name())?;
        to.key(Key::FRAMES.name())?;
        to.stack(&snapshot.stacks, block.frames)?;
        if block.label.is_some() {
            to.field_text(Key::LABEL, snapshot.stacks.text(block.label))?;
        }
        if block.generation != 0 {
            to.field(Key::GENERATION, block.generation.into())?;
        }
        if block.graph != 0 {
            to.field(Key::GRAPH, block.graph)?;
        }
        to.close_dict()?;
    }
    to.close_list()?;
    to.close_dict()
}

fn event(snapshot: &Snapshot, event: &crate::model::Event, to: &mut impl Sink) -> io::Result<()> {
    to.open_dict()?;
    to.field_text(Key::ACTION, event.action.name())?;
    to.field(if event.action == Action::Oom { Key::DEVICE_FREE } else { Key::ADDR }, event.address)?;
    to.field(Key::SIZE, event.size)?;
    to.field(Key::STREAM, event.stream)?;
    to.field(Key::TIME_US, event.time_us)?;
    let context = if event.context.is_some() { snapshot.stacks.text(event.context) } else { "N/A" };
    to.field_text(Key::COMPILE_CONTEXT, context)?;
    to.field_text(Key::USER_METADATA, snapshot.stacks.text(event.label))?;
    if let Some(pool) = event.pool {
        to.key(Key::POOL_ID.name())?;
        to.pair(pool)?;
    }
    if event.thread != 0 {
        to.field(Key::THREAD, event.thread.into())?;
    }
    if event.frames != StackId::default() {
        to.key(Key::FRAMES.name())?;
        to.stack(&snapshot.stacks, event.frames)?;
    }
    to.close_dict()
}

/// JSON, without blanks.
pub(crate) struct JsonSink<W> {
    to: W,
    /// Something stands before the next value on this level, so that it needs a comma.
    comma: bool,
}

impl<W: Write> JsonSink<W> {
    pub(crate) fn new(to: W) -> Self {
        Self { to, comma: false }
    }

    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.to.write_all(b"\n")?;
        self.to.flush()
    }

    fn put(&mut self, bytes: &[u8], comma_after: bool) -> io::Result<()> {
        if self.comma {
            self.to.write_all(b",")?;
        }
        self.comma = comma_after;
        self.to.write_all(bytes)
    }

    fn close(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.comma = true;
        self.to.write_all(bytes)
    }
}

impl<W: Write> Sink for JsonSink<W> {
    fn open_dict(&mut self) -> io::Result<()> {
        self.put(b"{", false)
    }

    fn close_dict(&mut self) -> io::Result<()> {
        self.close(b"}")
    }

    fn open_list(&mut self) -> io::Result<()> {
        self.put(b"[", false)
    }

    fn close_list(&mut self) -> io::Result<()> {
        self.close(b"]")
    }

    fn key(&mut self, key: &str) -> io::Result<()> {
        self.text(key)?;
        self.comma = false;
        self.to.write_all(b":")
    }

    fn none(&mut self) -> io::Result<()> {
        self.put(b"null", true)
    }

    fn truth(&mut self, value: bool) -> io::Result<()> {
        self.put(if value { b"true" } else { b"false" }, true)
    }

    fn integer(&mut self, value: i128) -> io::Result<()> {
        self.put(value.to_string().as_bytes(), true)
    }

    fn float(&mut self, value: f64) -> io::Result<()> {
        // JSON knows no infinity.
        self.put(if value.is_finite() { format!("{value:?}") } else { "null".to_owned() }.as_bytes(), true)
    }

    fn text(&mut self, value: &str) -> io::Result<()> {
        self.put(serde_json::to_string(value)?.as_bytes(), true)
    }

    fn pair(&mut self, value: (u64, u64)) -> io::Result<()> {
        self.put(format!("[{},{}]", value.0, value.1).as_bytes(), true)
    }

    fn stack(&mut self, stacks: &Stacks, id: StackId) -> io::Result<()> {
        self.open_list()?;
        self.frames(stacks, id)?;
        self.close_list()
    }
}
