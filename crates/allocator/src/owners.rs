//! Whose memory it is: by label, or by the place in the program that asked for it.

use std::collections::{BTreeMap, HashMap};

use gpupool_device::Address;

use crate::history::{Action, Event, Frame};
use crate::state::{BlockStatus, State};

/// What one owner has.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Owned {
    /// The label, or the place in the program; `unknown` for what is older than the history, or was requested without either.
    pub owner: String,
    /// Bytes.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
}

/// Whether a source file is a library's, so that a person looks for the owner further out.
#[must_use]
pub fn is_library(file: &str) -> bool {
    let parts = ["/torch/", "site-packages/", "/rustc/", ".cargo/registry/"];
    file.is_empty() || file.starts_with("torch/") || parts.iter().any(|part| file.contains(part))
}

/// A person's name for who asked: the label, else the innermost frame outside of libraries, else the innermost.
fn name(event: &Event) -> Option<String> {
    if let Some(label) = &event.label {
        return Some(label.to_string());
    }
    let frames = event.stack.as_deref()?;
    let own = frames.iter().find(|frame| !is_library(&frame.file));
    own.or_else(|| frames.first()).map(place)
}

fn place(frame: &Frame) -> String {
    let Frame { name, file, line } = frame;
    if file.is_empty() || *line == 0 {
        format!("{file} {name}").trim().to_owned()
    } else {
        format!("{file}:{line} {name}")
    }
}

/// Who asked for what is live or pending, as far as a history goes back.
pub(crate) struct Owners<'a> {
    by_address: HashMap<Address, &'a Event>,
}

impl<'a> Owners<'a> {
    /// Of a state. O(events).
    pub(crate) fn of(state: &'a State) -> Self {
        let mut by_address = HashMap::new();
        for event in state.history.iter().flat_map(|history| history.events()) {
            match event.action {
                Action::Alloc => {
                    by_address.insert(event.address, event);
                }
                Action::FreeCompleted => {
                    by_address.remove(&event.address);
                }
                _ => {}
            }
        }
        Self { by_address }
    }

    /// Who asked for the block at an address, if anybody said so.
    pub(crate) fn name(&self, address: Address) -> Option<String> {
        self.by_address.get(&address).and_then(|event| name(event))
    }

    /// Live blocks by owner, most bytes first; none where nothing at all is known.
    pub(crate) fn live(&self, state: &State) -> Vec<Owned> {
        if self.by_address.is_empty() {
            return Vec::new();
        }
        let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        let blocks = state.segments.iter().flat_map(|segment| &segment.blocks);
        for block in blocks.filter(|block| block.status == BlockStatus::ActiveAllocated) {
            let owner = self.name(block.address).unwrap_or_else(|| "unknown".to_owned());
            let (bytes, blocks) = sums.entry(owner).or_default();
            *bytes += block.size;
            *blocks += 1;
        }
        let mut list: Vec<Owned> =
            sums.into_iter().map(|(owner, (bytes, blocks))| Owned { owner, bytes, blocks }).collect();
        list.sort_by_key(|owned| std::cmp::Reverse(owned.bytes));
        list
    }
}
