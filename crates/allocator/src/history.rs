//! The history: a bounded record of what happened, for whoever asks later where the memory went.
//!
//! Off, it costs nothing: requests look at the word of `attention` (shared.rs) that they look at anyway. On,
//! every request takes the long way and every event takes the history's lock for a few stores.
//!
//! * **H1** The events of one address are in the order in which they happened: each is noted under the lock of the arena that has it,
//!   in the same hold in which it happens. So a piece of an arena copied under its lock knows exactly the events before it.
//! * **H2** Whoever copies the history keeps nobody waiting: events lie in chunks, of which the full ones are shared and only the open
//!   one is copied.
//! * **H3** At most the events asked for are kept, and the oldest go first.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use gpupool_device::{Address, StreamHandle};

use crate::arena::{ArenaState, Backing, BlockId, Handed};
pub use crate::backtrace::backtraces;
use crate::ids::{Part, PoolId};
pub use crate::owners::is_library;
use crate::sync::{Mutex, Rank};
use crate::units::{Units, to_bytes};

/// Events in a chunk.
const CHUNK: usize = 1024;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Action {
    /// A block was handed out.
    Alloc,
    /// Its owner freed it.
    FreeRequested,
    /// No stream can use it any more: it is free.
    FreeCompleted,
    /// A segment was taken from the driver, or from another stream that had no use for it.
    SegmentAlloc,
    /// A segment goes back to the driver, or to another stream.
    SegmentFree,
    /// The memory of an idle pool's segment went away: its addresses and blocks stay.
    SegmentAway,
    /// It is back.
    SegmentBack,
    /// Memory was mapped into a range of the policy `pages`.
    SegmentMap,
    /// Memory leaves such a range: for the driver, or for another place.
    SegmentUnmap,
    /// A request ended in out of memory.
    OutOfMemory,
    /// A capture into the pool begins.
    CaptureBegin,
    /// A capture into the pool is over.
    CaptureEnd,
}

/// A place in a program.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Frame {
    /// The function.
    pub name: String,
    /// The source file; may be empty.
    pub file: String,
    /// The line in it; 0 if unknown.
    pub line: u32,
}

/// Frames, innermost first. Shared by the events that have it.
pub type Stack = Arc<[Frame]>;

/// Says where the calling thread is. Called with no lock held, at each request and free while the history is on.
pub type StackSource = dyn Fn() -> Option<Stack> + Send + Sync;

/// One event.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Event {
    /// Counts the events of this allocator, from 1.
    pub sequence: u64,
    /// When, on the device's clock.
    pub time_ns: u64,
    /// Which thread: a number of this process's, from 1.
    pub thread: u32,
    /// What.
    pub action: Action,
    /// The block or segment; null for [`Action::OutOfMemory`] and the captures.
    pub address: Address,
    /// Bytes asked for; a segment's bytes; for [`Action::OutOfMemory`] the rounded request.
    pub requested: u64,
    /// Bytes of the block or segment; for [`Action::OutOfMemory`] what the driver had free.
    pub size: u64,
    /// The stream.
    pub stream: StreamHandle,
    /// The pool.
    pub pool: PoolId,
    /// Its part.
    pub part: Part,
    /// The caller's [`label`].
    pub label: Option<Arc<str>>,
    /// Where the caller was.
    pub stack: Option<Stack>,
}

/// What the history keeps.
#[derive(Clone)]
pub struct HistoryOptions {
    capacity: usize,
    stacks: Option<Arc<StackSource>>,
}

impl HistoryOptions {
    /// The last `events` events (one at least), without stacks. An event takes 136 bytes of host memory.
    #[must_use]
    pub fn new(events: usize) -> Self {
        Self { capacity: events.max(1), stacks: None }
    }

    /// With stacks from `source`. Equal stacks had better be one [`Stack`]: each event keeps a reference only.
    #[must_use]
    pub fn with_stacks(mut self, source: Arc<StackSource>) -> Self {
        self.stacks = Some(source);
        self
    }
}

impl fmt::Debug for HistoryOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HistoryOptions({} events, stacks: {})", self.capacity, self.stacks.is_some())
    }
}

/// A copy of the history.
#[derive(Clone, Debug, Default)]
pub struct HistoryState {
    chunks: Vec<Arc<[Event]>>,
    /// Events of the first chunk that are too old.
    skip: usize,
    /// Events before the first that is kept: newer ones took their place, or keeping a history was begun anew.
    pub forgotten: u64,
}

impl HistoryState {
    /// The events, oldest first.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.chunks.iter().flat_map(|c| c.iter()).skip(self.skip)
    }

    /// Those after a number, oldest first. O(chunks), and what comes.
    pub(crate) fn after(&self, sequence: u64) -> impl Iterator<Item = &Event> {
        let later = move |c: &&Arc<[Event]>| c.last().is_some_and(|e| e.sequence > sequence);
        self.chunks.iter().filter(later).flat_map(|c| c.iter()).filter(move |e| e.sequence > sequence)
    }

    /// How many they are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.chunks.iter().map(|c| c.len()).sum::<usize>() - self.skip
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

thread_local! {
    static LABELS: RefCell<Vec<Arc<str>>> = const { RefCell::new(Vec::new()) };
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

static NEXT_THREAD: AtomicU32 = AtomicU32::new(1);

/// What this thread requests until the guard is dropped is labelled `name` in histories; inside another label, `outer/name`.
#[must_use = "the label ends when this is dropped"]
pub fn label(name: &str) -> Label {
    LABELS.with_borrow_mut(|labels| {
        let full = labels.last().map_or_else(|| Arc::from(name), |outer| Arc::from(format!("{outer}/{name}")));
        labels.push(full);
    });
    Label { _not_send: std::marker::PhantomData }
}

/// A label in force on this thread. Labels end in the opposite order of their beginnings.
#[derive(Debug)]
pub struct Label {
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for Label {
    fn drop(&mut self) {
        let _ = LABELS.try_with(|labels| labels.borrow_mut().pop());
    }
}

/// Who makes a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller {
    thread: u32,
    label: Option<Arc<str>>,
    stack: Option<Stack>,
}

/// What an event says besides when and who.
pub(crate) struct What {
    pub(crate) action: Action,
    pub(crate) address: Address,
    pub(crate) requested: u64,
    pub(crate) size: u64,
    pub(crate) stream: StreamHandle,
    pub(crate) pool: PoolId,
    pub(crate) part: Part,
}

/// An allocator's history.
pub(crate) struct History {
    on: AtomicBool,
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    options: Mutex<Option<HistoryOptions>>,
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    capacity: usize,
    /// Events so far.
    sequence: u64,
    full: VecDeque<Arc<[Event]>>,
    open: Vec<Event>,
    /// Events before the oldest chunk that is kept.
    forgotten: u64,
}

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "History(on: {})", self.is_on())
    }
}

impl History {
    pub(crate) fn new(clock: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self {
            on: AtomicBool::new(false),
            clock: Box::new(clock),
            options: Mutex::new(Rank::Leaf, None),
            ring: Mutex::new(Rank::Leaf, Ring::default()),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// On, keeping nothing of what was noted before; or off.
    pub(crate) fn set(&self, options: Option<HistoryOptions>) {
        let capacity = options.as_ref().map_or(0, |o| o.capacity);
        let on = options.is_some();
        let before = std::mem::replace(&mut *self.options.lock(), options);
        let events = {
            let mut ring = self.ring.lock();
            ring.capacity = capacity;
            ring.forgotten = ring.sequence;
            (std::mem::take(&mut ring.full), std::mem::take(&mut ring.open))
        };
        self.on.store(on, Ordering::Release);
        // Stack sources and stacks are other people's: they are dropped with no lock held.
        drop((before, events));
    }

    /// Who is calling; `None` while the history is off. Calls the source of stacks: no lock may be held.
    pub(crate) fn caller(&self) -> Option<Caller> {
        if !self.is_on() {
            return None;
        }
        let source = self.options.lock().as_ref()?.stacks.clone();
        let stack = source.and_then(|source| {
            crate::sync::assert_unlocked();
            source()
        });
        let label = LABELS.try_with(|labels| labels.borrow().last().cloned()).ok().flatten();
        Some(Caller { thread: this_thread(), label, stack })
    }

    /// Notes an event; the arena's lock may be held. O(1).
    pub(crate) fn note(&self, what: What, caller: Option<&Caller>) {
        let time_ns = (self.clock)();
        let thread = caller.map_or_else(this_thread, |c| c.thread);
        let (label, stack) = caller.map_or((None, None), |c| (c.label.clone(), c.stack.clone()));
        let What { action, address, requested, size, stream, pool, part } = what;
        let mut ring = self.ring.lock();
        if ring.capacity == 0 {
            return;
        }
        ring.sequence += 1;
        let sequence = ring.sequence;
        let event =
            Event { sequence, time_ns, thread, action, address, requested, size, stream, pool, part, label, stack };
        let gone = ring.push(event);
        drop(ring);
        drop(gone);
    }

    /// Events noted so far.
    pub(crate) fn sequence(&self) -> u64 {
        self.ring.lock().sequence
    }

    /// A copy; `None` while the history is off.
    pub(crate) fn copy(&self) -> Option<HistoryState> {
        if !self.is_on() {
            return None;
        }
        let (mut chunks, open, capacity, forgotten) = {
            let ring = self.ring.lock();
            let chunks: Vec<Arc<[Event]>> = ring.full.iter().cloned().collect();
            (chunks, ring.open.clone(), ring.capacity, ring.forgotten)
        };
        chunks.push(Arc::from(open));
        let kept: usize = chunks.iter().map(|c| c.len()).sum();
        let skip = kept.saturating_sub(capacity);
        Some(HistoryState { chunks, skip, forgotten: forgotten + skip as u64 })
    }
}

impl Ring {
    /// Adds an event; returns the chunk that is too old now.
    fn push(&mut self, event: Event) -> Option<Arc<[Event]>> {
        if self.open.capacity() == 0 {
            self.open.reserve_exact(CHUNK);
        }
        self.open.push(event);
        if self.open.len() < CHUNK {
            return None;
        }
        self.full.push_back(Arc::from(std::mem::take(&mut self.open)));
        // What is left must hold the capacity without the oldest chunk.
        if (self.full.len() - 1) * CHUNK < self.capacity {
            return None;
        }
        let gone = self.full.pop_front();
        self.forgotten += gone.as_ref().map_or(0, |c| c.len() as u64);
        gone
    }
}

fn this_thread() -> u32 {
    let numbered = THREAD.try_with(|number| {
        if number.get() == 0 {
            number.set(NEXT_THREAD.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    });
    // While the thread is torn down it has no number any more.
    numbered.unwrap_or(0)
}

impl ArenaState {
    /// Notes that a block was handed out, by its address.
    pub(crate) fn note_handed(&self, handed: &Handed, requested: u64, stream: StreamHandle, caller: Option<&Caller>) {
        if !self.history.is_on() {
            return;
        }
        let lane = &self.lanes[self.blocks[handed.block()].lane as usize];
        let what = What {
            action: Action::Alloc,
            address: handed.address,
            requested,
            size: handed.bytes,
            stream,
            pool: self.slots[lane.slot as usize].pool,
            part: lane.part,
        };
        self.history.note(what, caller);
    }

    /// Notes that a segment joins the arena, or is about to leave it: for the driver, or for another arena; or that its memory is about to
    /// go away, or is back.
    pub(crate) fn note_segment(&self, id: u32, action: Action) {
        if !self.history.is_on() {
            return;
        }
        let Some(segment) = self.segments.get(id) else { return };
        if let Some(table) = &segment.pages {
            for (start, end, _) in table.mapped_runs().into_iter().filter(|_| action == Action::SegmentFree) {
                self.note_pages(id, start, end - start, Action::SegmentUnmap);
            }
            return;
        }
        // A range of pages is no memory yet: what is mapped there comes and goes by itself. What is away has gone already.
        if matches!(segment.memory.backing, Backing::Pages | Backing::Away) {
            return;
        }
        let (address, size) = (segment.memory.base, segment.memory.bytes);
        let stream = self.lanes[segment.lane as usize].core.handle;
        let (pool, part) = (self.slots[segment.slot as usize].pool, segment.part);
        self.history.note(What { action, address, requested: size, size, stream, pool, part }, None);
    }

    /// Notes that memory was mapped into a range of pages, or leaves it.
    pub(crate) fn note_pages(&self, id: u32, start: Units, units: Units, action: Action) {
        if !self.history.is_on() || units == 0 {
            return;
        }
        let Some(segment) = self.segments.get(id) else { return };
        let (address, size) = (segment.memory.base.offset(to_bytes(start)), to_bytes(units));
        let stream = self.lanes[segment.lane as usize].core.handle;
        let (pool, part) = (self.slots[segment.slot as usize].pool, segment.part);
        self.history.note(What { action, address, requested: size, size, stream, pool, part }, None);
    }

    /// Notes that a block is freed: half of it or all. Call it before the block changes.
    pub(crate) fn note_freed(&self, id: BlockId, actions: &[Action], caller: Option<&Caller>) {
        if !self.history.is_on() {
            return;
        }
        let block = &self.blocks[id];
        let lane = &self.lanes[block.lane as usize];
        let Some(segment) = self.segments.get(block.segment) else { return };
        for action in actions {
            let what = What {
                action: *action,
                address: segment.memory.base.offset(to_bytes(block.offset)),
                requested: block.requested,
                size: to_bytes(block.size),
                stream: lane.core.handle,
                pool: self.slots[lane.slot as usize].pool,
                part: lane.part,
            };
            self.history.note(what, caller);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(requested: u64) -> What {
        What {
            action: Action::Alloc,
            address: Address(requested),
            requested,
            size: requested,
            stream: StreamHandle(0),
            pool: PoolId::DEFAULT,
            part: Part::Small,
        }
    }

    #[test]
    fn the_last_events_are_kept_and_no_more() {
        for capacity in [1, 1000, CHUNK, CHUNK + 1, 3 * CHUNK] {
            let history = History::new(|| 7);
            history.set(Some(HistoryOptions::new(capacity)));
            for n in 1..=10_000 {
                history.note(event(n), None);
                let state = history.copy().unwrap();
                let expected = (n as usize).min(capacity);
                assert_eq!(state.len(), expected, "capacity {capacity}, after {n}");
                assert_eq!(state.forgotten, n - expected as u64);
                assert_eq!(state.events().last().map(|e| e.sequence), Some(n));
                assert_eq!(state.events().next().map(|e| e.sequence), Some(n - expected as u64 + 1));
            }
        }
    }

    #[test]
    fn off_keeps_nothing_and_on_begins_anew() {
        let history = History::new(|| 0);
        history.note(event(1), None);
        assert!(history.copy().is_none() && history.caller().is_none());
        history.set(Some(HistoryOptions::new(10)));
        history.note(event(2), None);
        assert_eq!(history.copy().unwrap().len(), 1);
        history.set(Some(HistoryOptions::new(10)));
        assert!(history.copy().unwrap().is_empty());
        history.set(None);
        assert!(history.copy().is_none());
    }

    #[test]
    fn labels_nest_and_end() {
        let history = History::new(|| 0);
        history.set(Some(HistoryOptions::new(10).with_stacks(Arc::new(|| Some(Arc::from([Frame::default()]))))));
        let now = || history.caller().unwrap().label.map(|l| l.to_string());
        assert_eq!(now(), None);
        {
            let _outer = label("step");
            let _inner = label("loss");
            assert_eq!(now().as_deref(), Some("step/loss"));
        }
        assert_eq!(now(), None);
        assert_eq!(history.caller().unwrap().stack.unwrap().len(), 1);
    }
}
