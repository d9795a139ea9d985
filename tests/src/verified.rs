//! A recorded workload with contents: each block is filled when it is handed out and summed up when it is freed, on any device.

use std::collections::HashMap;
use std::sync::Arc;

use gpupool_allocator::{Allocation, Allocator, CaptureRegistry, Config, PoolId, Stream};
use gpupool_device::{Address, InstantiateFlags, Kernel, StreamKind};
use gpupool_graph_capture::{Capture, CaptureOptions, Captures, Executable};
use gpupool_replay::stress::StressDevice;
use gpupool_replay::trace::{Event, Trace};

/// What is summed up of a block, from several places in it, has at most this many bytes each.
const WINDOW: u64 = 4096;
/// Private streams that use blocks which are freed late.
const PRIVATE: usize = 8;

/// What a verified replay came to.
#[derive(Clone, Copy, Default, Debug)]
pub struct Verified {
    /// Blocks whose contents were compared.
    pub blocks: u64,
    /// Sums compared.
    pub sums: u64,
    /// Sums that were not what was written.
    pub wrong: u64,
    /// The most that was held of the driver, in bytes.
    pub peak_reserved: u64,
    /// The most by which what is reserved and what the driver's memory in use grew by differed, in bytes; the driver's own is told at the end.
    pub off: u64,
    /// Handles moved, and cut.
    pub moves: (u64, u64),
}

struct Run<'a, D: StressDevice> {
    device: &'a Arc<D>,
    allocator: &'a Allocator<D>,
    streams: Vec<Stream<D>>,
    private: Vec<Stream<D>>,
    sums: Address,
    expected: Vec<u64>,
    held: HashMap<u32, (Allocation<D>, u16)>,
    out: Verified,
}

/// The sum that a checksum kernel finds over so many words that all hold `word`.
fn sum(word: u32, words: u64) -> u64 {
    u64::from(word).wrapping_mul(words.wrapping_mul(words + 1) / 2)
}

impl<D: StressDevice> Run<'_, D> {
    fn word(block: u32) -> u32 {
        block.wrapping_mul(0x9e37_79b9) | 1
    }

    /// Sums up the block's ends and what lies between, on a stream that comes after its own.
    fn look(&mut self, block: u32, held: &Allocation<D>, on: &Stream<D>) {
        let bytes = held.size();
        let window = WINDOW.min(bytes);
        let mut places = vec![0, (bytes - window) / 1024 * 512, bytes - window];
        places.dedup();
        for place in places {
            let dst = self.sums.offset(self.expected.len() as u64 * 8);
            let src = held.address().offset(place);
            self.device.launch(on.handle(), Kernel::Checksum { dst, src, bytes: window }).unwrap();
            self.expected.push(sum(Self::word(block), window / 4));
        }
        self.out.blocks += 1;
    }

    fn free(&mut self, block: u32, late: Option<u32>) {
        let Some((held, stream)) = self.held.remove(&block) else { return };
        let own = self.streams[usize::from(stream)].clone();
        match late {
            None => self.look(block, &held, &own),
            Some(n) => {
                let other = self.private[n as usize % PRIVATE].clone();
                let event = self.device.event_create().unwrap();
                self.device.event_record(event, own.handle()).unwrap();
                self.device.stream_wait_event(other.handle(), event).unwrap();
                self.device.event_destroy(event).unwrap();
                self.look(block, &held, &other);
                held.record_stream(&other).unwrap();
            }
        }
        self.device.disown(held.address(), held.size());
        drop(held);
    }
}

/// Replays `trace` under `config`. `steps` pieces of work are done after each event where the device must be told.
///
/// # Panics
///
/// Where the allocator or the device fails.
pub fn verified<D: StressDevice>(device: &Arc<D>, trace: &Trace, config: Config, steps: u32) -> Verified {
    let allocator = Allocator::with_registry(Arc::clone(device), config, Arc::<CaptureRegistry>::default()).unwrap();
    let captures = Captures::new(&allocator);
    let stream = || allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
    let streams: Vec<Stream<D>> = (0..trace.streams.max(1)).map(|_| stream()).collect();
    let private: Vec<Stream<D>> = (0..PRIVATE).map(|_| stream()).collect();
    let room = (trace.blocks.len() as u64 * 3 + 1) * 8;
    let sums = device.mem_alloc(room).unwrap();
    device.own(sums, room, u64::MAX, streams[0].handle());
    let mut run = Run {
        device,
        allocator: &allocator,
        streams,
        private,
        sums,
        expected: Vec::new(),
        held: HashMap::new(),
        out: Verified::default(),
    };
    // Whatever the kernels take for themselves is taken before memory in use is compared.
    device.launch(run.streams[0].handle(), Kernel::Fill { dst: sums, bytes: 8, value: 0 }).unwrap();
    device.device_synchronize().unwrap();
    let before = device.mem_info().unwrap().free;
    let mut open: HashMap<u32, Capture<D>> = HashMap::new();
    let mut kept: Vec<Executable<D>> = Vec::new();
    let end = |run: &mut Run<'_, D>, kept: &mut Vec<Executable<D>>, capture: Capture<D>, stream: u16| {
        let exec = capture.end().unwrap().instantiate(InstantiateFlags::default()).unwrap();
        exec.launch(&run.streams[usize::from(stream)]).unwrap();
        kept.push(exec);
    };
    for (at, event) in trace.events.iter().enumerate() {
        match *event {
            Event::Alloc { block, bytes, stream } => {
                let on = run.streams[usize::from(stream)].clone();
                let held = run.allocator.alloc(bytes, &on).unwrap();
                if held.size() > 0 {
                    device.own(held.address(), held.size(), u64::from(block), on.handle());
                    let fill = Kernel::Fill { dst: held.address(), bytes: held.size(), value: Run::<D>::word(block) };
                    device.launch(on.handle(), fill).unwrap();
                    run.held.insert(block, (held, stream));
                }
            }
            Event::Free { block } => run.free(block, None),
            Event::FreeLate { block, late } => run.free(block, Some(late)),
            Event::EmptyCache => drop(run.allocator.empty_cache().unwrap()),
            Event::Begin { graph } => {
                let of = trace.graphs[graph as usize];
                let options = CaptureOptions::new().with_pool(PoolId(of.pool + 1, 0));
                let capture = captures.begin(&run.streams[usize::from(of.stream)], options).unwrap();
                open.insert(graph, capture);
            }
            Event::End { graph } => {
                if let Some(capture) = open.remove(&graph) {
                    end(&mut run, &mut kept, capture, trace.graphs[graph as usize].stream);
                }
            }
            _ => {}
        }
        device.progress(steps);
        if at % 500 == 499 && open.is_empty() {
            let reserved = allocator.stats().reserved_bytes.all.current as u64;
            let fell = before.saturating_sub(device.mem_info().unwrap().free);
            run.out.off = run.out.off.max(fell.abs_diff(reserved));
        }
    }
    for (graph, capture) in open.drain() {
        end(&mut run, &mut kept, capture, trace.graphs[graph as usize].stream);
    }
    let mut rest: Vec<u32> = run.held.keys().copied().collect();
    rest.sort_unstable();
    rest.into_iter().for_each(|block| run.free(block, None));
    device.device_synchronize().unwrap();
    allocator.validate().unwrap();
    let mut bytes = vec![0u8; run.expected.len() * 8];
    if !bytes.is_empty() {
        device.read(run.streams[0].handle(), sums, &mut bytes).unwrap();
    }
    let found = bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap()));
    run.out.sums = run.expected.len() as u64;
    run.out.wrong = found.zip(&run.expected).filter(|(found, expected)| found != *expected).count() as u64;
    let stats = allocator.stats();
    run.out.peak_reserved = stats.reserved_bytes.all.peak as u64;
    run.out.moves = (stats.pages.remaps, stats.pages.splits);
    let out = run.out;
    drop(run);
    drop(kept);
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
    device.mem_free(sums).unwrap();
    out
}
