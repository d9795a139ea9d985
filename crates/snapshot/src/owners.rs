//! Whose memory it is: by label, or by the frame that allocated it.

use std::collections::HashMap;

use gpupool_allocator::history::is_library;
use serde::Serialize;

use crate::model::{Action, Block, BlockStatus, Snapshot};
use crate::stacks::{FrameRef, StackId, TextId};

/// What stands for blocks of which nobody knows who allocated them.
pub(crate) const UNKNOWN: &str = "unknown";

/// Who allocated something: a label and a stack, of which either may be missing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Owner {
    pub(crate) label: TextId,
    pub(crate) frames: StackId,
}

/// What one owner has.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Owned {
    /// The label, or the place in the program; `unknown` where neither is recorded.
    pub owner: String,
    /// Bytes.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
}

impl Snapshot {
    /// A person's name for who allocated something: the label, else the innermost frame outside of libraries, else the innermost.
    #[must_use]
    pub fn owner_name(&self, label: TextId, frames: StackId) -> String {
        if label.is_some() {
            return self.stacks.text(label).to_owned();
        }
        let own = self.stacks.frames(frames).find(|frame| !is_library(frame.file));
        match own.or_else(|| self.stacks.frames(frames).next()) {
            None => UNKNOWN.to_owned(),
            Some(FrameRef { name, file, line }) => match u32::try_from(line) {
                Ok(line) if !file.is_empty() => format!("{file}:{line} {name}"),
                _ => format!("{file} {name}").trim().to_owned(),
            },
        }
    }

    /// Who allocated each block that is live or pending, by device and address: as the block itself says, else as the history does.
    pub(crate) fn owners(&self) -> HashMap<(u32, u64), Owner> {
        let mut told: HashMap<(u32, u64), Owner> = HashMap::new();
        for (device, trace) in (0..).zip(&self.device_traces) {
            for event in trace {
                match event.action {
                    Action::Alloc => {
                        told.insert((device, event.address), Owner { label: event.label, frames: event.frames });
                    }
                    Action::FreeCompleted => {
                        told.remove(&(device, event.address));
                    }
                    _ => {}
                }
            }
        }
        for segment in &self.segments {
            for block in segment.blocks.iter().filter(|block| block.state != BlockStatus::Inactive) {
                let owner = told.entry((segment.device, block.address)).or_default();
                if block.label.is_some() {
                    owner.label = block.label;
                }
                if block.frames.is_some() {
                    owner.frames = block.frames;
                }
            }
        }
        told
    }

    /// Live blocks by owner, most bytes first.
    pub(crate) fn live_by_owner(&self, owners: &HashMap<(u32, u64), Owner>) -> Vec<Owned> {
        let live = self.segments.iter().flat_map(|segment| {
            let live = |block: &&Block| block.state == BlockStatus::ActiveAllocated;
            segment.blocks.iter().filter(live).map(|block| (segment.device, block))
        });
        let of = |device, block: &Block| owners.get(&(device, block.address)).copied().unwrap_or_default();
        self.ranked(live.map(|(device, block)| (of(device, block), block.size)))
    }

    /// Sums bytes by the name of their owner, most first.
    pub(crate) fn ranked(&self, items: impl Iterator<Item = (Owner, u64)>) -> Vec<Owned> {
        let mut sums: HashMap<Owner, (u64, u64)> = HashMap::new();
        for (owner, bytes) in items {
            let (sum, blocks) = sums.entry(owner).or_default();
            *sum = sum.saturating_add(bytes);
            *blocks += 1;
        }
        // Different stacks may have one name.
        let mut named: HashMap<String, (u64, u64)> = HashMap::new();
        for (owner, (bytes, blocks)) in sums {
            let (sum, count) = named.entry(self.owner_name(owner.label, owner.frames)).or_default();
            *sum = sum.saturating_add(bytes);
            *count += blocks;
        }
        let mut list: Vec<Owned> =
            named.into_iter().map(|(owner, (bytes, blocks))| Owned { owner, bytes, blocks }).collect();
        list.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.owner.cmp(&b.owner)));
        list
    }
}
