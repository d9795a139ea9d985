//! Stacks of frames and other texts, each kept once.

use std::collections::HashMap;
use std::sync::Arc;

/// A text of a snapshot's [`Stacks`]; the default is none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct TextId(pub(crate) u32);

/// A stack of a snapshot's [`Stacks`]; the default is empty.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct StackId(pub(crate) u32);

impl TextId {
    /// Whether there is a text.
    #[must_use]
    pub const fn is_some(self) -> bool {
        self.0 != 0
    }
}

impl StackId {
    /// A list of no frames, where that is told: PyTorch keeps such for what no Python code did.
    pub(crate) const EMPTY_LIST: Self = Self(u32::MAX);

    /// Whether there are frames.
    #[must_use]
    pub const fn is_some(self) -> bool {
        self.0 != 0 && self.0 != Self::EMPTY_LIST.0
    }
}

/// A place in a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameRef<'a> {
    /// The function.
    pub name: &'a str,
    /// The source file.
    pub file: &'a str,
    /// The line in it. PyTorch writes 2^64 - 1 where it knows none.
    pub line: u64,
}

/// A frame as it is kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Frame {
    pub(crate) name: TextId,
    pub(crate) file: TextId,
    pub(crate) line: u64,
}

/// What a snapshot's events and blocks refer to: texts, and stacks of frames, innermost first.
#[derive(Clone, Debug, Default)]
pub struct Stacks {
    texts: Vec<Arc<str>>,
    text_ids: HashMap<Arc<str>, TextId>,
    stacks: Vec<Arc<[Frame]>>,
    stack_ids: HashMap<Arc<[Frame]>, StackId>,
}

impl Stacks {
    /// The text; empty for none.
    #[must_use]
    pub fn text(&self, id: TextId) -> &str {
        (id.0 as usize).checked_sub(1).and_then(|at| self.texts.get(at)).map_or("", |text| text)
    }

    /// The frames, innermost first.
    pub fn frames(&self, id: StackId) -> impl Iterator<Item = FrameRef<'_>> {
        let frames = (id.0 as usize).checked_sub(1).and_then(|at| self.stacks.get(at));
        frames.into_iter().flat_map(|frames| frames.iter()).map(|frame| FrameRef {
            name: self.text(frame.name),
            file: self.text(frame.file),
            line: frame.line,
        })
    }

    /// How many stacks there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.stacks.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }

    pub(crate) fn add_text(&mut self, text: &Arc<str>) -> TextId {
        if text.is_empty() {
            return TextId::default();
        }
        if let Some(known) = self.text_ids.get(text) {
            return *known;
        }
        self.texts.push(Arc::clone(text));
        let id = TextId(self.texts.len() as u32);
        self.text_ids.insert(Arc::clone(text), id);
        id
    }

    pub(crate) fn add_stack(&mut self, frames: Vec<Frame>) -> StackId {
        if frames.is_empty() {
            return StackId::default();
        }
        if let Some(known) = self.stack_ids.get(&frames[..]) {
            return *known;
        }
        let frames: Arc<[Frame]> = Arc::from(frames);
        self.stacks.push(Arc::clone(&frames));
        let id = StackId(self.stacks.len() as u32);
        self.stack_ids.insert(frames, id);
        id
    }
}
