//! Rust's own backtraces as a history's stacks.
//!
//! The standard library's backtraces can be printed and nothing else, so their text is read: a line for each function and, where the
//! program has line tables, one with its place. Capturing and resolving one takes tens to hundreds of microseconds; what lies inside the
//! allocator, and outside of `main` or the thread's closure, is left out. Equal backtraces are one [`Stack`].

use std::backtrace::Backtrace;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::history::{Frame, Stack, StackSource};
use crate::sync::{Mutex, Rank};

/// Stacks that are kept to be found again; when there are more, all are forgotten.
const MOST_KNOWN: usize = 4_096;
/// Frames of a stack, innermost first; what lies further out is cut off.
const MOST_FRAMES: usize = 64;

/// A source of stacks for [`HistoryOptions::with_stacks`](crate::history::HistoryOptions::with_stacks): where in the program each request and
/// free is made. It is called only while the history is on.
#[must_use]
pub fn backtraces() -> Arc<StackSource> {
    let known = Mutex::new(Rank::Leaf, Known::default());
    Arc::new(move || {
        let text = Backtrace::force_capture().to_string();
        let found = known.lock().by_text.get(&text).cloned();
        let stack = found.unwrap_or_else(|| {
            let frames = frames(&text);
            known.lock().add(text, frames)
        });
        (!stack.is_empty()).then_some(stack)
    })
}

/// Stacks that were seen. Texts that differ inside the allocator only have one stack.
#[derive(Default)]
struct Known {
    by_text: HashMap<String, Stack>,
    stacks: HashSet<Stack>,
}

impl Known {
    fn add(&mut self, text: String, frames: Vec<Frame>) -> Stack {
        if self.by_text.len() >= MOST_KNOWN {
            *self = Self::default();
        }
        let stack = self.stacks.get(&frames[..]).cloned().unwrap_or_else(|| Arc::from(frames));
        self.stacks.insert(Arc::clone(&stack));
        self.by_text.insert(text, Arc::clone(&stack));
        stack
    }
}

/// The frames of a printed backtrace, innermost first.
fn frames(text: &str) -> Vec<Frame> {
    let mut frames: Vec<Frame> = Vec::new();
    for line in text.lines() {
        let line = line.trim_start();
        if let Some(place) = line.strip_prefix("at ") {
            if let Some(frame) = frames.last_mut() {
                (frame.file, frame.line) = split_place(place);
            }
        } else if let Some((number, name)) = line.split_once(": ")
            && number.parse::<u32>().is_ok()
        {
            frames.push(Frame { name: name.to_owned(), ..Frame::default() });
        }
    }
    let ours = |frame: &Frame| {
        ["gpupool_allocator::", "std::backtrace", "std::sys::backtrace", "core::ops::function"]
            .iter()
            .any(|part| frame.name.contains(part))
    };
    let outside = frames.iter().position(|frame| frame.name.contains("__rust_begin_short_backtrace"));
    frames.truncate(outside.unwrap_or(frames.len()));
    frames.drain(..frames.iter().position(|frame| !ours(frame)).unwrap_or(frames.len()));
    frames.truncate(MOST_FRAMES);
    frames
}

/// `FILE:LINE:COLUMN` in its parts.
fn split_place(place: &str) -> (String, u32) {
    let number = |text: &str| text.parse::<u32>().ok();
    let parts = place.rsplit_once(':').and_then(|(rest, column)| number(column).and(rest.rsplit_once(':')));
    match parts.and_then(|(file, line)| Some((file, number(line)?))) {
        Some((file, line)) => (file.to_owned(), line),
        None => (place.to_owned(), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_backtrace_is_read_and_its_ends_are_cut() {
        let text = "   0: std::backtrace_rs::backtrace::libunwind::trace
             at /rustc/abc/library/std/src/backtrace.rs:117:9
   1: gpupool_allocator::history::History::caller
             at ./crates/allocator/src/history.rs:10:2
   2: model::Layer::forward
             at ./src/model.rs:42:17
   3: without_a_place
   4: <F as core::ops::function::FnOnce<()>>::call_once
             at C:\\src\\function.rs:250:5
   5: std::sys::backtrace::__rust_begin_short_backtrace
   6: main
";
        let frames = frames(text);
        let told: Vec<_> = frames.iter().map(|f| (f.name.as_str(), f.file.as_str(), f.line)).collect();
        let expected = [
            ("model::Layer::forward", "./src/model.rs", 42),
            ("without_a_place", "", 0),
            ("<F as core::ops::function::FnOnce<()>>::call_once", "C:\\src\\function.rs", 250),
        ];
        assert_eq!(told, expected);
        assert!(super::frames("").is_empty());
        assert!(super::frames("disabled backtrace").is_empty());
    }
}
