//! Peaks: of one arena, and of all arenas together.
//!
//! What one arena had at most is easy: its figures change under one lock. What all had at most *at once* is not the sum of that, and a
//! total that every change writes would be memory that all threads fight for. So each arena has, for each figure, a **ceiling**: what the
//! arena may have without anybody being told. Requests that stay below the ceilings touch nothing shared.
//!
//! * **K1** Outside a lock's hold, an arena's figure is at most its ceiling.
//! * **K2** The ceilings of all arenas add up to `ceilings`, which is at most `exact` and a tolerance, at first 0.
//! * **K3** `exact` is only raised to a sum of figures that were there at one moment. The peak that is told is the greatest that `exact` or
//!   `ceilings` ever was.
//!
//! A request whose figure passes the ceiling raises it on its way out, when it holds no lock: from what is left below `exact` if that is
//! enough. Else all arenas are stopped for the moment it takes to lower each ceiling to the figure; only if the sum of those is above
//! `exact` is there a new peak, and else what is left is shared out. So peaks are exact, in the order in which requests come out; a
//! workload that has seen its peak seldom comes here; and a peak never drops when an arena goes, since the peak is not the arena's.
//!
//! Many threads whose figures go up and down, each at its own time, would stop each other for ever: their figures hardly ever peak
//! together, so what each needs does not fit below what all had at once. So stops are added up, those in vain, and above all those at which
//! threads **met**: one had to wait for another. From [`PATIENCE`] on there is a tolerance, which doubles as often as that much comes again
//! and so grows until threads meet no more: at the latest when each arena may have what it had at most, since then nothing is told. A
//! peak reads high by that tolerance at most, and never higher than the sum of what each arena had at most. 16 threads with 256 blocks each
//! told 4 to 5 of 1,000 steps for ever before that, and did 2.7 times as much as one.
//!
//! An arena in which nothing has happened between two such stops is *at rest*: its ceilings are its figures, and it is left alone until it
//! tells that something has happened in it. So a stop costs as much as there are arenas in use, however many pools lie about.
//!
//! With `exact_peaks` every change is added up here as it comes out of its arena, and no arena is ever stopped for another's peak.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use gpupool_device::Device;

use crate::arena::Arena;
use crate::counters::{ArenaCounters, FIGURES, Watches};
use crate::sync::{Mutex, Rank};

/// Of what is left below the peak, an arena that needs some takes this part (a quarter) beyond what it needs.
const SHARE: i64 = 4;

/// The most that a figure of one arena was, and its ceiling. Written under the arena's lock.
#[derive(Debug)]
pub(crate) struct Peak {
    /// The smaller of the other two: a figure that is not above it is nothing new.
    watch: AtomicI64,
    most: AtomicI64,
    ceiling: AtomicI64,
}

/// Without a ceiling: nobody else is told.
impl Default for Peak {
    fn default() -> Self {
        Self { watch: AtomicI64::new(0), most: AtomicI64::new(0), ceiling: AtomicI64::new(i64::MAX) }
    }
}

impl Peak {
    /// The figure is `current` now. Whether it is above the ceiling.
    #[inline]
    pub(crate) fn note(&self, current: i64) -> bool {
        current > self.watch.load(Relaxed) && self.pass(current)
    }

    #[cold]
    fn pass(&self, current: i64) -> bool {
        self.set_most(self.most().max(current));
        current > self.ceiling.load(Relaxed)
    }

    /// What is nothing new.
    pub(crate) fn watch(&self) -> i64 {
        self.watch.load(Relaxed)
    }

    /// The most there was since the last reset.
    pub(crate) fn most(&self) -> i64 {
        self.most.load(Relaxed)
    }

    /// Forgets what was: the most is what is there now.
    pub(crate) fn reset(&self, current: i64) {
        self.set_most(current);
    }

    fn set_most(&self, most: i64) {
        self.most.store(most, Relaxed);
        self.watch.store(most.min(self.ceiling.load(Relaxed)), Relaxed);
    }

    fn set_ceiling(&self, ceiling: i64) {
        self.ceiling.store(ceiling, Relaxed);
        self.watch.store(ceiling.min(self.most()), Relaxed);
    }
}

/// A figure is above its ceiling; or every change is told; or the next one, since the arena is at rest.
const PEAKS: u8 = 1;
/// The allocator has no use for the arena any more.
const DISCARDED: u8 = 2;

/// Whether an arena has something to tell. Written under the arena's lock.
#[derive(Debug)]
pub(crate) struct Telling {
    /// [`PEAKS`] and [`DISCARDED`].
    due: AtomicU8,
    always: AtomicBool,
    /// How much had happened in it when it was put to rest, or [`NEVER`].
    rested_at: AtomicI64,
}

impl Default for Telling {
    fn default() -> Self {
        Self { due: AtomicU8::new(0), always: AtomicBool::new(false), rested_at: AtomicI64::new(NEVER) }
    }
}

impl Telling {
    /// A figure is above its ceiling.
    #[inline]
    pub(crate) fn note(&self, above: bool) {
        if above {
            self.set(PEAKS, true);
        }
    }

    fn set(&self, bit: u8, on: bool) {
        let rest = self.due.load(Relaxed) & !bit;
        self.due.store(if on { rest | bit } else { rest }, Relaxed);
    }

    /// Whether anything is to be told: one load.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Relaxed) != 0
    }

    pub(crate) fn peaks_are_due(&self) -> bool {
        self.due.load(Relaxed) & PEAKS != 0
    }

    /// The allocator has no use for the arena any more.
    pub(crate) fn discard(&self) {
        self.set(DISCARDED, true);
    }

    pub(crate) fn is_discarded(&self) -> bool {
        self.due.load(Relaxed) & DISCARDED != 0
    }
}

/// Stops before peaks are tolerated to read high, and before they are tolerated to read twice as high: those that raise no peak, and that many
/// for each at which threads met.
const PATIENCE: u32 = 4_096;
const MEETING: u32 = 256;
/// The tolerance begins at this part of the peak (a 32nd), and is doubled so often at most.
const FIRST_SHIFT: u32 = 5;
const DOUBLED: u32 = 16;
/// It is at least this for each arena: blocks, and bytes.
const LEAST_BLOCKS: i64 = 16;
const LEAST_BYTES: i64 = 2 << 20;
/// The figures that are bytes, in the order of [`ArenaCounters::figures`].
const BYTES: std::ops::Range<usize> = 9..21;

/// An arena that was never looked at.
const NEVER: i64 = -1;

/// An arena in use, and how much had happened in it when it was last looked at.
#[derive(Debug)]
struct InUse<D: Device> {
    arena: Weak<Arena<D>>,
    seen: i64,
}

#[derive(Debug)]
struct Books<D: Device> {
    in_use: Vec<InUse<D>>,
    resting: Vec<Weak<Arena<D>>>,
    /// The ceilings of those at rest together, figure by figure.
    at_rest: [i64; FIGURES],
    /// All arenas' ceilings together, figure by figure.
    ceilings: [i64; FIGURES],
    /// The most there was at one moment, as far as anybody looked.
    exact: [i64; FIGURES],
    /// Stops that cost something: in vain, or of threads that met.
    stops: u32,
}

impl<D: Device> Books<D> {
    /// By how much a figure of so many arenas in use may read high.
    fn tolerance(&self, at: usize, arenas: usize) -> i64 {
        let Some(doubled) = (self.stops / PATIENCE).checked_sub(1) else { return 0 };
        let least = if BYTES.contains(&at) { LEAST_BYTES } else { LEAST_BLOCKS };
        let first = (self.exact[at] >> FIRST_SHIFT).max(least * arenas as i64);
        first.saturating_mul(1 << doubled.min(DOUBLED))
    }

    /// All arenas were stopped: for nothing, or while threads met.
    fn stopped(&mut self, in_vain: bool, met: bool) {
        let counts = if met { MEETING } else { u32::from(in_vain) };
        self.stops = self.stops.saturating_add(counts);
    }

    /// What ceilings may still be raised by.
    fn left(&self, at: usize, arenas: usize) -> i64 {
        (self.exact[at] - self.ceilings[at]).saturating_add(self.tolerance(at, arenas))
    }

    /// Something has happened in an arena that may have been at rest. Under its lock.
    fn wake(&mut self, arena: &Arena<D>) {
        let Some(at) = self.resting.iter().position(|a| std::ptr::eq(a.as_ptr(), arena)) else { return };
        for (sum, (_, peak)) in self.at_rest.iter_mut().zip(arena.counters.figures()) {
            *sum -= peak.ceiling.load(Relaxed);
        }
        self.in_use.push(InUse { arena: self.resting.swap_remove(at), seen: NEVER });
        arena.counters.telling.rested_at.store(NEVER, Relaxed);
    }

    /// Nothing has happened in an arena since it was last looked at: its ceilings are its figures from now on. Under its lock.
    fn rest(&mut self, arena: &Arc<Arena<D>>) {
        let figures = arena.counters.figures();
        for ((all, resting), (current, peak)) in self.ceilings.iter_mut().zip(&mut self.at_rest).zip(figures) {
            *all += current - peak.ceiling.load(Relaxed);
            *resting += current;
            peak.set_ceiling(current);
        }
        self.resting.push(Arc::downgrade(arena));
        // The next change is told.
        arena.counters.telling.rested_at.store(arena.counters.changes(), Relaxed);
        arena.counters.telling.set(PEAKS, true);
    }
}

/// The peaks of an allocator with several arenas.
#[derive(Debug)]
pub(crate) struct Peaks<D: Device> {
    books: Mutex<Books<D>>,
    /// Read without the lock.
    peaks: [AtomicI64; FIGURES],
    /// What arenas that are gone had at most, added up since peaks were last reset.
    gone: [AtomicI64; FIGURES],
    /// Every change is added up.
    every_change: bool,
}

impl<D: Device> Peaks<D> {
    pub(crate) fn new(every_change: bool) -> Self {
        let books = Books {
            in_use: Vec::new(),
            resting: Vec::new(),
            at_rest: [0; FIGURES],
            ceilings: [0; FIGURES],
            exact: [0; FIGURES],
            stops: 0,
        };
        let [peaks, gone] = [(); 2].map(|()| std::array::from_fn(|_| AtomicI64::new(0)));
        Self { books: Mutex::new(Rank::Peaks, books), peaks, gone, every_change }
    }

    /// The peak of a figure, in the order of [`ArenaCounters::figures`]; `sum` is what the arenas that are there had at most, added up.
    /// Takes no lock.
    pub(crate) fn read(&self, at: usize, sum: i64) -> i64 {
        self.peaks[at].load(Relaxed).min(sum.saturating_add(self.gone[at].load(Relaxed)))
    }

    /// An arena in which nothing was allocated yet counts from now on.
    pub(crate) fn join(&self, arena: &Arc<Arena<D>>) {
        let mut books = self.books.lock();
        let mut held = arena.lock_beside_others();
        for (sum, (current, peak)) in books.ceilings.iter_mut().zip(arena.counters.figures()) {
            peak.set_ceiling(current);
            *sum += current;
        }
        arena.counters.rewatch(&mut held.state.watches);
        arena.counters.telling.always.store(self.every_change, Relaxed);
        arena.counters.telling.set(PEAKS, self.every_change);
        books.in_use.push(InUse { arena: Arc::downgrade(arena), seen: NEVER });
    }

    /// An arena is going, in which nothing is live: before nobody finds it any more. Whether it was there.
    pub(crate) fn leave(&self, arena: &Arena<D>) -> bool {
        let mut books = self.books.lock();
        let mut held = arena.lock_beside_others();
        books.wake(arena);
        let before = books.in_use.len();
        books.in_use.retain(|a| !std::ptr::eq(a.arena.as_ptr(), arena));
        if books.in_use.len() == before {
            return false;
        }
        for ((sum, gone), (_, peak)) in books.ceilings.iter_mut().zip(&self.gone).zip(arena.counters.figures()) {
            *sum -= peak.ceiling.load(Relaxed);
            gone.fetch_add(peak.most(), Relaxed);
            peak.set_ceiling(i64::MAX);
        }
        arena.counters.rewatch(&mut held.state.watches);
        arena.counters.telling.always.store(false, Relaxed);
        arena.counters.telling.set(PEAKS, false);
        true
    }

    /// A request comes out of an arena in which some figure is above its ceiling, or that was at rest. O(1), or O(arenas in use) on the
    /// way to a new peak, with those stopped meanwhile.
    #[cold]
    #[inline(never)]
    pub(crate) fn publish(&self, arena: &Arena<D>) {
        if arena.counters.telling.rested_at.load(Relaxed) == arena.counters.changes() {
            // Somebody has looked at it.
            return;
        }
        let (mut books, met) = match self.books.try_lock() {
            Some(books) => (books, false),
            None => (self.books.lock(), true),
        };
        let mut wanting = Vec::new();
        {
            let mut held = arena.lock_beside_others();
            books.wake(arena);
            let telling = &arena.counters.telling;
            telling.set(PEAKS, telling.always.load(Relaxed));
            for (at, (current, peak)) in arena.counters.figures().into_iter().enumerate() {
                let more = current - peak.ceiling.load(Relaxed);
                if self.every_change && telling.always.load(Relaxed) {
                    books.ceilings[at] += more;
                    peak.set_ceiling(current);
                    self.peaks[at].fetch_max(books.ceilings[at], Relaxed);
                } else if more > 0 && !self.grant(&mut books, at, peak, more) {
                    wanting.push(at);
                }
            }
            arena.counters.rewatch(&mut held.state.watches);
        }
        let seen = if wanting.is_empty() { Vec::new() } else { self.sweep(&mut books, &wanting, met) };
        drop(books);
        // Perhaps the last references: an arena's end calls the driver.
        drop(seen);
    }

    /// Raises a ceiling by `more` and some, if that is left.
    fn grant(&self, books: &mut Books<D>, at: usize, peak: &Peak, more: i64) -> bool {
        let left = books.left(at, books.in_use.len());
        if more > left {
            return false;
        }
        let granted = more + (left - more) / SHARE;
        books.ceilings[at] += granted;
        peak.set_ceiling(peak.ceiling.load(Relaxed) + granted);
        self.peaks[at].fetch_max(books.ceilings[at], Relaxed);
        true
    }

    /// Lowers the ceilings of some figures in all arenas to what is there at one moment, raises the peaks that this passes, and shares half
    /// of what is left, or all that each arena had at most where that is left. `met` says whether a thread has waited for another. Returns
    /// the arenas it looked at.
    fn sweep(&self, books: &mut Books<D>, wanting: &[usize], mut met: bool) -> Vec<Arc<Arena<D>>> {
        let in_use = books.in_use.drain(..).filter_map(|a| Some((a.arena.upgrade()?, a.seen)));
        let (arenas, seen): (Vec<_>, Vec<_>) = in_use.unzip();
        // Nobody else holds more than one, since that takes the lock of the books.
        let mut held = Vec::with_capacity(arenas.len());
        for arena in &arenas {
            met |= arena.is_busy();
            held.push(arena.lock_beside_others());
        }
        let figures: Vec<_> = arenas.iter().map(|a| a.counters.figures()).collect();
        let mut in_vain = false;
        for at in wanting.iter().copied() {
            books.ceilings[at] = books.at_rest[at] + figures.iter().map(|arena| arena[at].0).sum::<i64>();
            in_vain |= books.ceilings[at] <= books.exact[at];
            books.exact[at] = books.exact[at].max(books.ceilings[at]);
        }
        books.stopped(in_vain, met);
        for at in wanting.iter().copied() {
            // So much less than its most has each.
            let below = |arena: &[(i64, &Peak); FIGURES]| (arena[at].1.most() - arena[at].0).max(0);
            let (left, below_most) = (books.left(at, figures.len()), figures.iter().map(below).sum::<i64>());
            let up_to_most = below_most <= left;
            let rest = if up_to_most { left - below_most } else { left };
            let each = (rest / 2 / figures.len().max(1) as i64).max(0);
            for arena in &figures {
                let more = each + if up_to_most { below(arena) } else { 0 };
                arena[at].1.set_ceiling(arena[at].0 + more);
                books.ceilings[at] += more;
            }
            self.peaks[at].fetch_max(books.exact[at].max(books.ceilings[at]), Relaxed);
        }
        drop(figures);
        for ((arena, seen), held) in arenas.iter().zip(seen).zip(&mut held) {
            let changes = arena.counters.changes();
            if changes == seen {
                books.rest(arena);
            } else {
                books.in_use.push(InUse { arena: Arc::downgrade(arena), seen: changes });
            }
            arena.counters.rewatch(&mut held.state.watches);
        }
        drop(held);
        arenas
    }

    /// Sets every peak to what is there at this moment.
    pub(crate) fn reset(&self) {
        let mut books = self.books.lock();
        let all: Vec<usize> = (0..FIGURES).collect();
        // With no peak to stay below, nothing is left to be shared.
        (books.exact, books.stops) = ([0; FIGURES], 0);
        self.gone.iter().for_each(|gone| gone.store(0, Relaxed));
        let arenas = self.sweep(&mut books, &all, false);
        for (peak, sum) in self.peaks.iter().zip(books.ceilings) {
            peak.store(sum, Relaxed);
        }
        drop(books);
        drop(arenas);
    }
}

/// Tells, when an arena's lock has been given back, what has to be told.
pub(crate) struct Publisher<'a, D: Device>(pub(crate) &'a Arena<D>);

impl<D: Device> Drop for Publisher<'_, D> {
    #[inline]
    fn drop(&mut self) {
        if self.0.counters.telling.is_due() {
            self.0.tell();
        }
    }
}

impl ArenaCounters {
    /// Sets what the arena had at most to what it has now. Under the arena's lock.
    pub(crate) fn reset_peaks(&self, watches: &mut Watches) {
        self.figures().into_iter().for_each(|(current, peak)| peak.reset(current));
        self.watch_empty();
        self.rewatch(watches);
    }
}
