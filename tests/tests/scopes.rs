//! Where requests go while scopes come and go, beside a model that knows nothing but the rule: a request goes to the pool that it names, or
//! the newest scope that claims it decides.
//!
//! Threads take turns, so that which one asks is known, and blocks of few sizes are freed and asked for again, so that most requests are
//! served by what was remembered of an earlier one.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::ThreadId;

use gpupool_allocator::{
    AllocError, Allocation, Allocator, Config, Filter, Policy, PoolError, PoolId, ScopeKey, Stream,
};
use gpupool_device::{CaptureId, StreamKind, Workbench};
use gpupool_graph_capture::{CaptureOptions, Captures};
use gpupool_sim_device::{SimConfig, SimDevice};

const MIB: u64 = 1 << 20;
const THREADS: usize = 3;
const STREAMS: usize = 3;
const POOLS: usize = 4;
/// Some of them small in private pools and large in the default pool under `pages`.
const SIZES: [u64; 6] = [512, 512, 4_096, 700 << 10, 3 * MIB, 12 * MIB];

type Block = Allocation<SimDevice>;

struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % n
    }
}

/// A thread that does what it is told, while the one that tells it waits.
struct Hand {
    thread: ThreadId,
    orders: Sender<Box<dyn FnOnce() + Send>>,
    done: Receiver<()>,
}

impl Hand {
    fn new() -> Self {
        let (orders, ordered) = channel::<Box<dyn FnOnce() + Send>>();
        let (tell, done) = channel();
        let thread = std::thread::spawn(move || {
            for order in ordered {
                order();
                tell.send(()).unwrap();
            }
        });
        Self { thread: thread.thread().id(), orders, done }
    }

    fn does<T: Send + 'static>(&self, order: impl FnOnce() -> T + Send + 'static) -> T {
        let (tell, told) = channel();
        self.orders.send(Box::new(move || tell.send(order()).unwrap())).unwrap();
        self.done.recv().unwrap();
        told.recv().unwrap()
    }
}

/// A scope as the model knows it.
struct Open {
    pool: PoolId,
    filter: Filter,
    /// Of one that is closed by its key.
    key: Option<ScopeKey>,
}

struct Model {
    device: Arc<SimDevice>,
    allocator: Allocator<SimDevice>,
    captures: Captures<SimDevice>,
    /// The bit-exact policies know scopes alone: none for captures or to the default pool, and streams are never retired.
    bit_exact: bool,
    hands: Vec<Hand>,
    streams: Vec<Stream<SimDevice>>,
    /// With their users.
    pools: Vec<(PoolId, i64)>,
    /// Oldest first.
    scopes: Vec<Open>,
    live: Vec<Block>,
    draw: Draw,
}

impl Model {
    fn new(config: Config, seed: u64) -> Self {
        let device = Arc::new(SimDevice::new(SimConfig::default().with_capacity(4_096 * MIB)));
        let allocator = Allocator::with_registry(Arc::clone(&device), config, Arc::default()).unwrap();
        let stream = |_| allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
        Self {
            streams: (0..STREAMS).map(stream).collect(),
            captures: Captures::new(&allocator),
            bit_exact: matches!(allocator.config().policy(), Policy::Torch215 | Policy::Torch211),
            hands: (0..THREADS).map(|_| Hand::new()).collect(),
            pools: (0..POOLS).map(|_| (PoolId::fresh(), 0)).collect(),
            scopes: Vec::new(),
            live: Vec::new(),
            draw: Draw(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            device,
            allocator,
        }
    }

    fn hand(&mut self) -> usize {
        self.draw.below(THREADS)
    }

    /// Where the newest scope that claims it sends a request outside captures.
    fn pool_for(&self, stream: usize, thread: ThreadId) -> PoolId {
        let claims = |open: &&Open| match open.filter {
            Filter::All => true,
            Filter::Stream(handle) => handle == self.streams[stream].handle(),
            Filter::Thread(of) => of == thread,
            _ => false,
        };
        self.scopes.iter().rfind(claims).map_or(PoolId::DEFAULT, |open| open.pool)
    }

    fn users(&self, pool: PoolId) -> i64 {
        self.pools.iter().find(|(id, _)| *id == pool).map_or(1, |(_, users)| *users)
    }

    fn pool_of(&self, block: &Block) -> PoolId {
        let ordinal = block.placement().unwrap().segment;
        let state = self.allocator.state();
        let inside = |start: gpupool_device::Address, size: u64| {
            start <= block.address() && block.address().offset_from(start) < size
        };
        let found = state.segments.iter().find(|s| inside(s.address, s.size));
        found.unwrap_or_else(|| panic!("segment {ordinal} is not in the state")).pool
    }

    /// A pool that a request names, now and then.
    fn named(&mut self) -> Option<PoolId> {
        match self.draw.below(20) {
            at @ 0..POOLS => Some(self.pools[at].0),
            POOLS => Some(PoolId::DEFAULT),
            _ => None,
        }
    }

    /// One request of a thread, which goes where the model says, or fails for a pool that was given up, or never made.
    fn request(&mut self, hand: usize, stream: usize) {
        let named = self.named();
        let wanted = named.unwrap_or_else(|| self.pool_for(stream, self.hands[hand].thread));
        let bytes = SIZES[self.draw.below(SIZES.len())];
        let (allocator, on) = (self.allocator.clone(), self.streams[stream].clone());
        let request = move || match named {
            Some(pool) => allocator.alloc_in_pool(bytes, &on, pool),
            None => allocator.alloc(bytes, &on),
        };
        match self.hands[hand].does(request) {
            Ok(block) => {
                assert_eq!(self.pool_of(&block), wanted, "{bytes} bytes on stream {stream} by thread {hand}");
                self.live.push(block);
            }
            Err(AllocError::Pool(PoolError::Unknown { pool })) => {
                assert_eq!(pool, wanted);
                assert!(self.users(pool) <= 0, "{pool} is there");
            }
            Err(e) => panic!("{e}"),
        }
    }

    fn open(&mut self, hand: usize) {
        let (at, stream, other) = (self.draw.below(POOLS), self.draw.below(STREAMS), self.hand());
        let filter = match self.draw.below(3) {
            0 => Filter::All,
            1 => Filter::Stream(self.streams[stream].handle()),
            _ => Filter::Thread(self.hands[other].thread),
        };
        // No capture has this id, so outside captures such a scope is one like others; it may also lead to the default pool.
        let inside = (self.draw.below(3) == 0 && !self.bit_exact).then_some(CaptureId(1 << 40));
        let to_default = inside.is_some() && self.draw.below(2) == 0;
        let id = if to_default { PoolId::DEFAULT } else { self.pools[at].0 };
        // PyTorch has one scope a pool.
        if self.bit_exact && self.scopes.iter().any(|open| open.pool == id) {
            return;
        }
        let allocator = self.allocator.clone();
        let opened = self.hands[hand].does(move || match inside {
            Some(capture) => allocator.begin_allocate_inside(capture, id, filter).map(Some),
            None => allocator.begin_allocate_to_pool(id, filter).map(|()| None),
        });
        match opened {
            Ok(key) => {
                if !to_default {
                    self.pools[at].1 = self.pools[at].1.max(0) + 1;
                }
                self.scopes.push(Open { pool: id, filter, key });
            }
            // It was given up, and is gone for good.
            Err(AllocError::Pool(PoolError::Released { .. })) if self.pools[at].1 <= 0 => {
                self.pools[at] = (PoolId::fresh(), 0);
            }
            Err(e) => panic!("{e}"),
        }
    }

    fn close(&mut self, hand: usize) {
        if self.scopes.is_empty() {
            return;
        }
        let at = self.draw.below(self.scopes.len());
        let (pool, key) = (self.scopes[at].pool, self.scopes[at].key);
        let allocator = self.allocator.clone();
        if let Some(key) = key {
            assert!(self.hands[hand].does(move || allocator.close_scope(key)));
            self.scopes.remove(at);
            return;
        }
        let closed = self.hands[hand].does(move || allocator.end_allocate_to_pool(pool));
        let me = self.hands[hand].thread;
        let mine = |s: &Open| s.pool == pool && !matches!(s.filter, Filter::Thread(of) if of != me);
        match (self.scopes.iter().rposition(mine), closed) {
            (Some(newest), Ok(())) => drop(self.scopes.remove(newest)),
            (None, Err(AllocError::Pool(PoolError::NotRecording { .. }))) => {}
            (newest, closed) => panic!("{closed:?}, {newest:?}"),
        }
    }

    /// One user of a pool less, perhaps under an open scope.
    fn release(&mut self, hand: usize) {
        let at = self.draw.below(POOLS);
        let (id, users) = self.pools[at];
        // Mostly of pools that no scope leads to.
        if users <= 0 || (self.scopes.iter().any(|s| s.pool == id) && self.draw.below(4) > 0) {
            return;
        }
        let allocator = self.allocator.clone();
        self.hands[hand].does(move || allocator.release_pool(id)).unwrap();
        self.pools[at].1 -= 1;
    }

    /// Requests of a stream that captures go to the capture's pool, those of others where the scopes send them.
    fn capture(&mut self, hand: usize) {
        let (stream, other) = (self.draw.below(STREAMS), self.draw.below(STREAMS));
        let capture = self.captures.begin(&self.streams[stream], CaptureOptions::new()).unwrap();
        let (allocator, on) = (self.allocator.clone(), self.streams[stream].clone());
        let block = self.hands[hand].does(move || allocator.alloc(512, &on)).unwrap();
        assert_eq!(self.pool_of(&block), capture.pool());
        drop(block);
        let used: Vec<PoolId> = self.pools.iter().filter(|(_, users)| *users > 0).map(|(id, _)| *id).collect();
        if !used.is_empty() {
            let named = used[self.draw.below(used.len())];
            let (allocator, on) = (self.allocator.clone(), self.streams[stream].clone());
            let block = self.hands[hand].does(move || allocator.alloc_in_pool(512, &on, named)).unwrap();
            assert_eq!(self.pool_of(&block), named);
            // For the graph, as long as that is there.
            assert_eq!(self.allocator.pool_use_count(named).unwrap(), self.users(named) + 1);
        }
        if other != stream {
            self.request(hand, other);
        }
        drop(capture.end().unwrap());
    }

    fn retire(&mut self) {
        let at = self.draw.below(STREAMS);
        let handle = self.streams[at].handle();
        self.allocator.retire_stream(&self.streams[at]).unwrap();
        let gone = std::mem::replace(&mut self.streams[at], self.allocator.register_stream(handle));
        assert!(matches!(self.allocator.alloc(512, &gone), Err(AllocError::RetiredStream { .. })));
    }

    fn step(&mut self) {
        let hand = self.hand();
        match self.draw.below(100) {
            0..50 => {
                let stream = self.draw.below(STREAMS);
                self.request(hand, stream);
            }
            50..80 if !self.live.is_empty() => {
                let block = self.live.swap_remove(self.draw.below(self.live.len()));
                self.hands[hand].does(move || drop(block));
            }
            80..86 => self.open(hand),
            86..92 => self.close(hand),
            92..95 => self.release(hand),
            95 => drop(self.allocator.empty_cache().unwrap()),
            96 => drop(self.allocator.trim().unwrap()),
            97 if !self.bit_exact => self.retire(),
            98 if !self.bit_exact => self.capture(hand),
            _ => self.allocator.validate().unwrap(),
        }
    }

    fn end(mut self) {
        self.live.clear();
        while let Some(open) = self.scopes.pop() {
            match open.key {
                Some(key) => assert!(self.allocator.close_scope(key)),
                None => {
                    let (allocator, pool) = (self.allocator.clone(), open.pool);
                    let of = |h: &&Hand| !matches!(open.filter, Filter::Thread(of) if of != h.thread);
                    self.hands.iter().find(of).unwrap().does(move || allocator.end_allocate_to_pool(pool)).unwrap();
                }
            }
        }
        for (id, users) in &self.pools {
            (0..*users).for_each(|_| self.allocator.release_pool(*id).unwrap());
        }
        self.device.run_until_idle();
        self.captures.tidy();
        self.allocator.empty_cache().unwrap();
        self.allocator.validate().unwrap();
        assert_eq!(self.allocator.stats().reserved_bytes.all.current, 0);
        assert_eq!(self.device.memory_in_use(), 0);
        assert_eq!(self.device.reports(), []);
    }
}

#[test]
fn a_request_goes_to_the_pool_it_names_or_where_the_newest_scope_that_claims_it_leads() {
    for policy in [Policy::Segments, Policy::Pages, Policy::Torch215, Policy::Torch211] {
        for seed in 0..40 {
            let mut model = Model::new(Config::new(policy), seed);
            (0..400).for_each(|_| model.step());
            model.end();
        }
    }
}

#[test]
fn a_pool_is_named_under_every_policy_and_one_that_is_not_there_is_refused() {
    for policy in [Policy::Segments, Policy::Pages, Policy::StreamOrdered, Policy::Torch215, Policy::Torch211] {
        let device = Arc::new(SimDevice::new(SimConfig::default().with_capacity(4_096 * MIB)));
        let allocator = Allocator::new(Arc::clone(&device), Config::new(policy)).unwrap();
        let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
        let (used, scoped, unknown) = (PoolId::fresh(), PoolId::fresh(), PoolId::fresh());
        let _hold = allocator.hold_pool(used).unwrap();
        allocator.begin_allocate_to_pool(scoped, Filter::All).unwrap();

        let live = |pool| allocator.pool_stats(pool).unwrap().allocated_bytes.all.current;
        for bytes in SIZES {
            // Once more, when the pool has something free.
            for _ in 0..2 {
                let block = allocator.alloc_in_pool(bytes, &stream, used).unwrap();
                assert_eq!(live(used), block.size() as i64, "{policy:?}, {bytes} bytes");
            }
        }
        let block = allocator.alloc_in_pool(512, &stream, PoolId::DEFAULT).unwrap();
        assert_eq!((live(used), live(scoped)), (0, 0));
        drop(block);

        assert!(allocator.alloc_in_pool(0, &stream, used).unwrap().address().is_null());
        let refused = allocator.alloc_in_pool(512, &stream, unknown).unwrap_err();
        assert!(matches!(refused, AllocError::Pool(PoolError::Unknown { pool }) if pool == unknown), "{refused}");
        let uncached = Allocator::new(Arc::clone(&device), Config::new(policy).with_caching(false)).unwrap();
        let on = uncached.register_stream(stream.handle());
        let refused = uncached.alloc_in_pool(512, &on, unknown).unwrap_err();
        assert!(matches!(refused, AllocError::Pool(PoolError::Unknown { .. })), "{refused}");
        let elsewhere = Allocator::new(Arc::clone(&device), Config::new(policy)).unwrap();
        let refused = elsewhere.alloc_in_pool(512, &stream, PoolId::DEFAULT).unwrap_err();
        assert!(matches!(refused, AllocError::ForeignStream { .. }), "{refused}");
        allocator.end_allocate_to_pool(scoped).unwrap();
        allocator.validate().unwrap();
    }
}
