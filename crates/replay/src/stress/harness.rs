//! Executing operations against an allocator, a device and the shadow model.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpupool_allocator::{AllocError, Allocation, Allocator, CaptureRegistry, Config, FreeError, Policy, Stream};
use gpupool_device::{Address, DriverError, EventHandle, Kernel, StreamHandle, StreamKind};

use super::StressDevice;
use crate::generate::Op;
use crate::shadow::{Breach, Shadow, Usage};

/// Sums that wait to be compared, at most.
const SLOTS: u64 = 256;
/// Bytes of the device that one thread compares in.
pub(super) const SCRATCH_BYTES: u64 = SLOTS * 8;
/// Bytes that one thread keeps live, at most: operations draw sizes, not how many fit.
const MOST_LIVE: u64 = 1 << 30;
/// Blocks that wait for another thread to take them, at most.
const MOST_OFFERED: usize = 64;

/// Something is not as it must be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failed {
    /// The shadow model disagrees.
    #[error(transparent)]
    Breach(#[from] Breach),
    /// A block's contents changed in its owner's hands.
    #[error("the contents of the block at {address} ({bytes} bytes) changed: the sum is {found:#x}, not {expected:#x}")]
    Contents {
        /// Where.
        address: Address,
        /// Its size.
        bytes: u64,
        /// The sum of what was written.
        expected: u64,
        /// The sum of what was there.
        found: u64,
    },
    /// The allocator refused for another reason than lack of memory.
    #[error(transparent)]
    Alloc(Box<AllocError>),
    /// The allocator refused to free a live block.
    #[error(transparent)]
    Free(#[from] FreeError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DriverError),
    /// The device found something wrong.
    #[error("the device found: {0}")]
    Finding(String),
    /// The allocator's own recount found something wrong.
    #[error("the allocator's recount found: {0}")]
    Recount(String),
    /// Memory was left after everything was freed and the cache was emptied.
    #[error("{bytes} bytes were left after everything was freed")]
    Leak {
        /// How much.
        bytes: u64,
    },
}

impl From<AllocError> for Failed {
    fn from(error: AllocError) -> Self {
        Self::Alloc(Box::new(error))
    }
}

/// What was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Allocations, frees and recorded uses.
    pub operations: u64,
    /// Requests that found no memory.
    pub out_of_memory: u64,
    /// Bytes whose contents were compared.
    pub checked_bytes: u64,
    /// Time in the allocator's calls.
    pub allocator_time: Duration,
}

impl Tally {
    /// Both together.
    pub fn add(&mut self, other: Self) {
        self.operations += other.operations;
        self.out_of_memory += other.out_of_memory;
        self.checked_bytes += other.checked_bytes;
        self.allocator_time += other.allocator_time;
    }
}

/// A block in a harness's hands.
struct Held<D: StressDevice> {
    allocation: Allocation<D>,
    word: u32,
    stream: u32,
    /// Work on streams that may use it.
    uses: Vec<Usage>,
}

/// A stream's work so far: for each position that matters an event.
#[derive(Default)]
struct Work {
    submitted: u64,
    /// Everything up to here is complete.
    complete: u64,
    marks: VecDeque<(u64, EventHandle)>,
}

/// What the harnesses of one allocator share.
pub struct Common<D: StressDevice> {
    // The allocator goes before the device's streams do.
    offered: Mutex<Vec<Held<D>>>,
    streams: Vec<Stream<D>>,
    allocator: Allocator<D>,
    device: Arc<D>,
    shadow: Mutex<Shadow>,
    work: Vec<Mutex<Work>>,
    /// For each stream the positions of every stream that it has waited for, if the policy may go by that: the driver's own pool does.
    waited: Option<Mutex<Vec<Vec<u64>>>>,
}

impl<D: StressDevice> Common<D> {
    /// An allocator on `device` with `streams` streams.
    ///
    /// # Errors
    ///
    /// The allocator's and the device's.
    pub fn new(device: Arc<D>, config: Config, streams: u32) -> Result<Self, Failed> {
        let follows = config.policy() == Policy::StreamOrdered;
        let allocator = Allocator::with_registry(Arc::clone(&device), config, Arc::new(CaptureRegistry::default()))?;
        let streams = (0..streams.max(1))
            .map(|_| Ok(allocator.register_stream(device.stream_create(StreamKind::NonBlocking)?)))
            .collect::<Result<Vec<_>, DriverError>>()?;
        let work = streams.iter().map(|_| Mutex::new(Work::default())).collect();
        let waited = follows.then(|| Mutex::new(vec![vec![0; streams.len()]; streams.len()]));
        Ok(Self { offered: Mutex::default(), streams, allocator, device, shadow: Mutex::default(), work, waited })
    }

    /// The allocator.
    #[must_use]
    pub fn allocator(&self) -> &Allocator<D> {
        &self.allocator
    }

    /// Compares the shadow model, the allocator's state and its own recount. For quiet moments.
    ///
    /// # Errors
    ///
    /// What differs.
    pub fn check(&self) -> Result<(), Failed> {
        lock(&self.shadow).check_state(&self.allocator.state())?;
        self.allocator.validate().map_err(Failed::Recount)?;
        match self.device.findings().into_iter().next() {
            Some(finding) => Err(Failed::Finding(finding)),
            None => Ok(()),
        }
    }

    /// After every harness is finished: waits for the device, empties the cache, and tells how many bytes are left.
    ///
    /// # Errors
    ///
    /// What [`check`](Self::check) finds, and the device's.
    pub fn finish(&self) -> Result<u64, Failed> {
        self.check()?;
        self.device.device_synchronize()?;
        self.allocator.empty_cache()?;
        for work in &self.work {
            for (_, event) in lock(work).marks.drain(..) {
                self.device.event_destroy(event)?;
            }
        }
        let held = u64::try_from(self.allocator.stats().reserved_bytes.all.current).unwrap_or(0);
        Ok(held.max(self.device.memory_in_use().unwrap_or(0)))
    }

    fn handle(&self, stream: u32) -> StreamHandle {
        self.streams[stream as usize].handle()
    }

    /// One more piece of work was submitted to a stream.
    fn submitted(&self, stream: u32) -> Usage {
        let mut work = lock(&self.work[stream as usize]);
        work.submitted += 1;
        Usage { stream, position: work.submitted }
    }

    /// Makes it possible to tell when the stream's work so far is complete.
    fn mark(&self, stream: u32) -> Result<(), Failed> {
        let mut work = lock(&self.work[stream as usize]);
        if work.marks.back().is_some_and(|(position, _)| *position == work.submitted) {
            return Ok(());
        }
        let event = self.device.event_create()?;
        self.device.event_record(event, self.handle(stream))?;
        let position = work.submitted;
        work.marks.push_back((position, event));
        Ok(())
    }

    /// Whether a use is complete on the device.
    fn complete(&self, usage: Usage) -> bool {
        let mut work = lock(&self.work[usage.stream as usize]);
        while let Some((position, event)) = work.marks.front().copied() {
            if !self.device.event_query(event).unwrap_or(false) {
                break;
            }
            work.complete = position;
            work.marks.pop_front();
            // An event that cannot be destroyed is found as a leak.
            let _ = self.device.event_destroy(event);
        }
        usage.position <= work.complete
    }

    /// Whether a use is over for what comes next on `stream`: complete, or waited for there.
    fn settled(&self, usage: Usage, stream: u32) -> bool {
        let waited = |waited: &Mutex<Vec<Vec<u64>>>| lock(waited)[stream as usize][usage.stream as usize];
        self.complete(usage) || self.waited.as_ref().is_some_and(|all| usage.position <= waited(all))
    }

    /// Makes `stream` wait for the work so far on `on`.
    fn order(&self, on: u32, stream: u32) -> Result<(), Failed> {
        // Held over the recording, so that the event is after every position that is noted.
        let mut waited = self.waited.as_ref().map(lock);
        let (from, to) = (on as usize, stream as usize);
        if let Some(all) = &mut waited {
            all[from][from] = lock(&self.work[from]).submitted;
        }
        let event = self.device.event_create()?;
        self.device.event_record(event, self.handle(on))?;
        self.device.stream_wait_event(self.handle(stream), event)?;
        self.device.event_destroy(event)?;
        if let Some(all) = &mut waited {
            let seen = all[from].clone();
            all[to].iter_mut().zip(seen).for_each(|(known, more)| *known = (*known).max(more));
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A sum that the device was asked for.
struct Asked {
    address: Address,
    bytes: u64,
    expected: u64,
}

/// Executes operations. See the module's documentation.
pub struct Harness<D: StressDevice> {
    held: Vec<Held<D>>,
    common: Arc<Common<D>>,
    /// The streams that requests are made on.
    own_streams: Vec<u32>,
    /// Where sums go, 8 bytes each. Memory of the harness's own.
    sums: Address,
    asked: Vec<Asked>,
    next_word: u32,
    live_bytes: u64,
    tally: Tally,
}

impl<D: StressDevice> Harness<D> {
    /// A harness that makes requests on `own_streams`, indices of the common streams. `number` tells harnesses apart.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn new(common: Arc<Common<D>>, own_streams: Vec<u32>, number: u32) -> Result<Self, Failed> {
        let sums = common.device.mem_alloc(SCRATCH_BYTES)?;
        let next_word = number.wrapping_mul(0x0100_0000) | 1;
        Ok(Self {
            held: Vec::new(),
            common,
            own_streams,
            sums,
            asked: Vec::new(),
            next_word,
            live_bytes: 0,
            tally: Tally::default(),
        })
    }

    /// What was done so far.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Executes one operation.
    ///
    /// # Errors
    ///
    /// What is not as it must be.
    pub fn apply(&mut self, op: Op) -> Result<(), Failed> {
        match op {
            Op::Alloc { bytes, stream } => self.alloc(bytes, stream),
            Op::Free { pick } => match self.take(pick) {
                Some(held) => self.free(held, None),
                None => Ok(()),
            },
            Op::FreeOn { pick, stream } => {
                let stream = self.any_stream(stream);
                match self.take(pick) {
                    Some(held) => self.free(held, Some(stream)),
                    None => Ok(()),
                }
            }
            Op::Use { pick, stream } => {
                let stream = self.any_stream(stream);
                match self.index(pick) {
                    Some(index) => self.use_on(index, stream),
                    None => Ok(()),
                }
            }
            Op::Write { pick } => match self.index(pick) {
                Some(index) => self.write(index),
                None => Ok(()),
            },
            Op::Progress { steps } => {
                self.common.device.progress(u32::from(steps));
                Ok(())
            }
            Op::Synchronize { stream } => {
                let stream = self.any_stream(stream);
                Ok(self.common.device.stream_synchronize(self.common.handle(stream))?)
            }
            Op::EmptyCache => Ok(self.timed(|common| common.allocator.empty_cache()).map(drop)?),
            Op::Trim => Ok(self.timed(|common| common.allocator.trim()).map(drop)?),
        }
    }

    /// Offers a block to the other harnesses, or takes one of theirs.
    pub fn exchange(&mut self, pick: u16) {
        let mut offered = lock(&self.common.offered);
        let count = offered.len();
        let taken = (count > 1).then(|| offered.swap_remove(usize::from(pick) % count));
        if offered.len() < MOST_OFFERED && !self.held.is_empty() {
            let held = self.held.swap_remove(usize::from(pick) % self.held.len());
            self.live_bytes -= held.allocation.size();
            offered.push(held);
        }
        drop(offered);
        if let Some(held) = taken {
            self.live_bytes += held.allocation.size();
            self.held.push(held);
        }
    }

    /// Frees everything, also what others offered, and compares what is left to compare.
    ///
    /// # Errors
    ///
    /// What is not as it must be.
    pub fn finish(mut self) -> Result<Tally, Failed> {
        let offered = std::mem::take(&mut *lock(&self.common.offered));
        for held in std::mem::take(&mut self.held).into_iter().chain(offered) {
            self.live_bytes = self.live_bytes.saturating_add(held.allocation.size());
            self.free(held, None)?;
        }
        self.compare()?;
        self.common.device.mem_free(self.sums)?;
        Ok(self.tally)
    }

    fn any_stream(&self, pick: u8) -> u32 {
        u32::from(pick) % self.common.streams.len() as u32
    }

    fn index(&self, pick: u16) -> Option<usize> {
        (!self.held.is_empty()).then(|| usize::from(pick) % self.held.len())
    }

    fn take(&mut self, pick: u16) -> Option<Held<D>> {
        self.index(pick).map(|index| self.held.swap_remove(index))
    }

    /// Calls the allocator, and counts time and operation.
    fn timed<T>(&mut self, call: impl FnOnce(&Common<D>) -> T) -> T {
        let start = Instant::now();
        let result = call(&self.common);
        self.tally.allocator_time += start.elapsed();
        self.tally.operations += 1;
        result
    }

    fn alloc(&mut self, bytes: u64, pick: u8) -> Result<(), Failed> {
        while self.live_bytes.saturating_add(bytes) > MOST_LIVE
            && let Some(held) = self.take(0)
        {
            self.free(held, None)?;
        }
        let stream = self.own_streams[usize::from(pick) % self.own_streams.len()];
        let allocation = match self.timed(|common| common.allocator.alloc(bytes, &common.streams[stream as usize])) {
            Ok(allocation) => allocation,
            Err(AllocError::OutOfMemory(_)) => {
                self.tally.out_of_memory += 1;
                return Ok(());
            }
            Err(other) => return Err(other.into()),
        };
        let (address, size) = (allocation.address(), allocation.size());
        let common = &self.common;
        lock(&common.shadow).hand_out(address, size, bytes, stream, |usage| common.settled(usage, stream))?;
        let word = self.next_word;
        self.next_word = self.next_word.wrapping_add(1);
        common.device.own(address, size, u64::from(word), common.handle(stream));
        self.live_bytes += size;
        self.held.push(Held { allocation, word, stream, uses: Vec::new() });
        self.write(self.held.len() - 1)
    }

    fn write(&mut self, index: usize) -> Result<(), Failed> {
        let held = &mut self.held[index];
        // A write must not pass a read of another stream: only blocks that nobody else uses are written again.
        if !held.uses.is_empty() {
            return Ok(());
        }
        let (dst, bytes, value) = (held.allocation.address(), held.allocation.size(), held.word);
        self.common.device.launch(self.common.handle(held.stream), Kernel::Fill { dst, bytes, value })?;
        self.common.submitted(held.stream);
        Ok(())
    }

    /// Asks for the block's sum on a stream that is ordered after the block's own.
    fn ask(&mut self, held: &Held<D>, stream: u32) -> Result<(), Failed> {
        if self.asked.len() as u64 == SLOTS {
            self.compare()?;
        }
        let (address, bytes) = (held.allocation.address(), held.allocation.size());
        let dst = self.sums.offset(self.asked.len() as u64 * 8);
        let kernel = Kernel::Checksum { dst, src: address, bytes };
        self.common.device.launch(self.common.handle(stream), kernel)?;
        self.common.submitted(stream);
        self.asked.push(Asked { address, bytes, expected: sum(held.word, bytes) });
        Ok(())
    }

    fn use_on(&mut self, index: usize, stream: u32) -> Result<(), Failed> {
        let held = self.held.swap_remove(index);
        let result = self.read_on(&held, stream).and_then(|usage| {
            self.timed(|common| held.allocation.record_stream(&common.streams[stream as usize]))?;
            Ok(usage)
        });
        self.held.push(held);
        if let (usage, Some(held)) = (result?, self.held.last_mut()) {
            held.uses.push(usage);
        }
        Ok(())
    }

    fn read_on(&mut self, held: &Held<D>, stream: u32) -> Result<Usage, Failed> {
        if stream != held.stream {
            self.common.order(held.stream, stream)?;
        }
        self.ask(held, stream)?;
        let position = lock(&self.common.work[stream as usize]).submitted;
        Ok(Usage { stream, position })
    }

    fn free(&mut self, mut held: Held<D>, on: Option<u32>) -> Result<(), Failed> {
        let last = self.read_on(&held, on.unwrap_or(held.stream))?;
        held.uses.push(last);
        // Whatever was submitted to the block's own stream so far may use it.
        let position = lock(&self.common.work[held.stream as usize]).submitted;
        held.uses.push(Usage { stream: held.stream, position });
        held.uses.sort_unstable();
        held.uses.dedup();
        for usage in &held.uses {
            self.common.mark(usage.stream)?;
        }
        let (address, size) = (held.allocation.address(), held.allocation.size());
        self.common.device.disown(address, size);
        self.live_bytes = self.live_bytes.saturating_sub(size);
        // The shadow first: once the allocator has the block, anyone may be handed it.
        lock(&self.common.shadow).free(address, held.uses)?;
        match on {
            None => self.timed(|_| held.allocation.free())?,
            Some(stream) => {
                let freed = self.timed(|common| held.allocation.free_on(&common.streams[stream as usize]));
                freed.map_err(|(_, error)| error)?;
            }
        }
        Ok(())
    }

    /// Waits for the sums asked for and compares them.
    fn compare(&mut self) -> Result<(), Failed> {
        if self.asked.is_empty() {
            return Ok(());
        }
        let device = &self.common.device;
        device.device_synchronize()?;
        let mut bytes = vec![0; self.asked.len() * 8];
        device.read(self.common.handle(self.own_streams[0]), self.sums, &mut bytes)?;
        let (sums, _) = bytes.as_chunks::<8>();
        for (asked, found) in std::mem::take(&mut self.asked).into_iter().zip(sums) {
            let found = u64::from_le_bytes(*found);
            if found != asked.expected {
                let Asked { address, bytes, expected } = asked;
                return Err(Failed::Contents { address, bytes, expected, found });
            }
            self.tally.checked_bytes += asked.bytes;
        }
        let common = &self.common;
        lock(&common.shadow).forget(|usage| common.complete(usage));
        Ok(())
    }
}

/// What the device's checksum is of `bytes` bytes that all hold `word`.
fn sum(word: u32, bytes: u64) -> u64 {
    let words = u128::from(bytes / 4);
    let weights = words * (words + 1) / 2;
    u64::from(word).wrapping_mul(weights as u64)
}

#[cfg(test)]
mod tests {
    use gpupool_device::Workbench;
    use gpupool_sim_device::{SimConfig, SimDevice};

    use super::*;

    #[test]
    fn what_a_stream_waits_for_is_over_for_it_under_the_drivers_own_pool() -> Result<(), Failed> {
        for (policy, goes_by_waits) in [(Policy::StreamOrdered, true), (Policy::Segments, false)] {
            let device = Arc::new(SimDevice::new(SimConfig::default()));
            let common = Common::new(Arc::clone(&device), Config::new(policy), 3)?;
            let gate = device.gate_create()?;
            device.launch(common.handle(0), Kernel::Wait { gate })?;
            let before = common.submitted(0);
            common.order(0, 1)?;
            common.order(1, 2)?;
            let later = common.submitted(0);
            let settled = |usage: Usage| [0, 1, 2].map(|stream| common.settled(usage, stream));
            assert_eq!(settled(before), [goes_by_waits; 3], "{policy}");
            assert_eq!(settled(later), [false; 3], "{policy}");
            device.gate_open(gate)?;
            common.mark(0)?;
            device.device_synchronize()?;
            assert_eq!(settled(later), [true; 3], "{policy}");
        }
        Ok(())
    }
}
