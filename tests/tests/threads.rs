//! Sixteen threads on one allocator: no block overlaps another, none goes to a stream that does not come after its last uses, and in
//! the end every figure is right and everything is given back. How the threads interleave is the machine's affair; what they do is not.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use gpupool_allocator::{AllocError, Config, Filter, Policy, PoolId};
use gpupool_tests::lab::{BACKINGS, Backing, Block, Lab, MIB, segments};

const THREADS: u64 = 16;

struct Draw(u64);

impl Draw {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % below
    }

    fn bytes(&mut self) -> u64 {
        match self.next(8) {
            0..4 => 1 + self.next(20_000),
            4..6 => [4_096, 65_536, MIB, 3 * MIB][self.next(4) as usize],
            6 => 1 + self.next(8 * MIB),
            _ => 10 * MIB + self.next(20 * MIB),
        }
    }
}

/// A lab that many threads share, and who owns which bytes in it.
struct Yard {
    lab: Lab,
    owned: Mutex<BTreeMap<u64, u64>>,
    taken: AtomicI64,
}

impl Yard {
    fn new(config: Config, mib: u64) -> Self {
        Self { lab: Lab::with(config, mib), owned: Mutex::default(), taken: AtomicI64::new(0) }
    }

    /// Takes a block, or nothing if there is none.
    fn take(&self, stream: u64, bytes: u64) -> Option<Block> {
        let registered = self.lab.stream(stream);
        let block = match self.lab.allocator.alloc(bytes, &registered) {
            Ok(block) => block,
            Err(AllocError::OutOfMemory(_)) => return None,
            Err(e) => panic!("{e}"),
        };
        self.taken.fetch_add(1, Ordering::Relaxed);
        let (start, end) = (block.address().0, block.address().0 + block.size());
        let mut owned = self.owned.lock().unwrap();
        let before = owned.range(..end).next_back();
        assert!(before.is_none_or(|(_, e)| *e <= start), "{block:?} overlaps a live block");
        owned.insert(start, end);
        drop(owned);
        self.lab.device.handed(registered.handle(), block.address(), block.size()).unwrap();
        Some(block)
    }

    /// Whoever frees a block gives up its bytes first.
    fn disown(&self, block: &Block) {
        assert!(self.owned.lock().unwrap().remove(&block.address().0).is_some());
    }

    fn give(&self, block: Block) {
        self.disown(&block);
        block.free().unwrap();
    }

    fn give_on(&self, block: Block, stream: u64) {
        self.disown(&block);
        block.free_on(&self.lab.stream(stream)).unwrap();
    }

    /// Work on a block by its own stream, or by another one that is recorded for it.
    fn work(&self, block: &Block, stream: u64, draw: &mut Draw) {
        self.lab.record(block, stream);
        self.lab.run_until(stream, block, self.lab.device.sim.tick() + draw.next(4));
    }

    fn end(self) {
        assert!(self.owned.lock().unwrap().is_empty());
        self.lab.check();
        // Figures of streams and pools that are gone stay counted, once.
        let (taken, stats) = (self.taken.into_inner(), self.lab.allocator.stats().allocation.all);
        assert_eq!((stats.allocated, stats.freed), (taken, taken));
        self.lab.done();
    }
}

/// What a thread does: a working set that changes, some of it used by other streams, now and then something for everybody.
fn work(yard: &Yard, thread: u64, stream_of: impl Fn(&mut Draw) -> u64, ops: u64, also: impl Fn(u64)) {
    let mut draw = Draw::new(thread + 1);
    let mut live: Vec<Block> = Vec::new();
    for op in 0..ops {
        match draw.next(10) {
            0..5 => {
                let stream = stream_of(&mut draw);
                let bytes = draw.bytes();
                match yard.take(stream, bytes) {
                    Some(block) => live.push(block),
                    None => live.drain(..).for_each(|b| yard.give(b)),
                }
            }
            5 if !live.is_empty() => {
                let at = draw.next(live.len() as u64) as usize;
                let stream = 1 + draw.next(THREADS);
                yard.work(&live[at], stream, &mut draw);
            }
            6 if !live.is_empty() => {
                let block = live.swap_remove(draw.next(live.len() as u64) as usize);
                yard.give_on(block, 1 + draw.next(THREADS));
            }
            7 if op % 8 == 0 => yard.lab.finish(),
            _ if !live.is_empty() => {
                let block = live.swap_remove(draw.next(live.len() as u64) as usize);
                yard.give(block);
            }
            _ => {}
        }
        also(op);
    }
    live.into_iter().for_each(|b| yard.give(b));
}

#[test]
fn each_thread_on_its_own_stream() {
    for backing in BACKINGS {
        let yard = Yard::new(segments(backing), 8_000);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let yard = &yard;
                scope.spawn(move || work(yard, thread, |_| thread + 1, 4_000, |_| ()));
            }
        });
        yard.end();
    }
}

#[test]
fn all_threads_on_four_streams_with_little_memory() {
    for config in [
        segments(Backing::Virtual),
        segments(Backing::Plain),
        segments(Backing::Virtual).with_wait_for_recorded(true),
        segments(Backing::Virtual).with_quarantine(true),
        Config::new(Policy::Torch215),
        Config::new(Policy::Torch211),
    ] {
        let yard = Yard::new(config, 300);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let yard = &yard;
                scope.spawn(move || work(yard, thread, |draw| 1 + draw.next(4), 1_500, |_| ()));
            }
        });
        yard.end();
    }
}

#[test]
fn with_trims_limits_and_statistics_from_other_threads() {
    for backing in BACKINGS {
        let yard = Yard::new(segments(backing), 1_000);
        std::thread::scope(|scope| {
            for thread in 0..THREADS - 4 {
                let yard = &yard;
                scope.spawn(move || work(yard, thread, |draw| 1 + draw.next(6), 2_000, |_| ()));
            }
            let allocator = &yard.lab.allocator;
            scope.spawn(|| {
                (0..800).for_each(|_| {
                    allocator.trim().unwrap();
                })
            });
            scope.spawn(|| {
                (0..300).for_each(|_| {
                    allocator.empty_cache().unwrap();
                })
            });
            scope.spawn(|| {
                (0..200).for_each(|n: u64| allocator.set_memory_limit(n.is_multiple_of(2).then_some(200 * MIB)));
                allocator.set_memory_limit(None);
            });
            scope.spawn(|| {
                for _ in 0..300 {
                    let stats = allocator.stats();
                    assert!(stats.reserved_bytes.all.current >= 0);
                    allocator.validate().unwrap();
                    let state = allocator.state();
                    for segment in &state.segments {
                        let bytes: u64 = segment.blocks.iter().map(|b| b.size).sum();
                        assert_eq!(bytes, segment.size, "each segment is consistent in itself");
                    }
                    let _ = (allocator.largest_free_block(), allocator.available().unwrap());
                }
            });
        });
        yard.end();
    }
}

#[test]
fn blocks_freed_by_other_threads_than_their_own() {
    for policy in Policy::ALL {
        let yard = Yard::new(Config::new(*policy), 4_000);
        let (to, from): (Vec<Sender<Block>>, Vec<Receiver<Block>>) = (0..THREADS).map(|_| channel()).unzip();
        std::thread::scope(|scope| {
            for (thread, inbox) in (0..THREADS).zip(from) {
                let (yard, to) = (&yard, to.clone());
                scope.spawn(move || {
                    let mut draw = Draw::new(thread + 100);
                    for _ in 0..2_000 {
                        let bytes = draw.bytes();
                        if let Some(block) = yard.take(thread + 1, bytes) {
                            if draw.next(2) == 0 {
                                yard.work(&block, 1 + draw.next(THREADS), &mut draw);
                            }
                            // The receiver may be gone already: then the block comes back with the error.
                            if let Err(back) = to[draw.next(THREADS) as usize].send(block) {
                                yard.give(back.0);
                            }
                        }
                        while let Ok(block) = inbox.try_recv() {
                            yard.give(block);
                        }
                    }
                    drop(to);
                    inbox.into_iter().for_each(|block| yard.give(block));
                });
            }
            drop(to);
        });
        yard.end();
    }
}

#[test]
fn streams_that_come_and_go_while_others_work() {
    for backing in BACKINGS {
        let yard = Yard::new(segments(backing), 2_000);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let yard = &yard;
                scope.spawn(move || {
                    let mut draw = Draw::new(thread + 200);
                    for _ in 0..150 {
                        let stream = yard.lab.stream(thread + 1);
                        let mut live: Vec<Block> = (0..8).filter_map(|_| yard.take(thread + 1, draw.bytes())).collect();
                        if let Some(block) = live.first() {
                            yard.work(block, thread + 1, &mut draw);
                        }
                        let kept = live.pop();
                        live.into_iter().for_each(|b| yard.give(b));
                        yard.lab.allocator.retire_stream(&stream).unwrap();
                        yard.lab.device.recycle(stream.handle());
                        // One block outlives its stream.
                        kept.into_iter().for_each(|b| yard.give(b));
                        if draw.next(4) == 0 {
                            yard.lab.finish();
                        }
                    }
                });
            }
        });
        yard.lab.allocator.empty_cache().unwrap();
        let retired = yard.lab.allocator.state().streams.iter().filter(|s| s.retired).count();
        assert_eq!(retired, 0, "streams that are gone are forgotten once their work is done");
        yard.end();
    }
}

#[test]
fn each_thread_in_pools_of_its_own() {
    for policy in Policy::ALL {
        let yard = Yard::new(Config::new(*policy), 4_000);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let yard = &yard;
                scope.spawn(move || {
                    let allocator = &yard.lab.allocator;
                    for turn in 0..6 {
                        let pool = PoolId::fresh();
                        allocator.begin_allocate_to_pool(pool, Filter::Thread(std::thread::current().id())).unwrap();
                        work(yard, thread + 50 * turn, |_| thread + 1, 300, |_| ());
                        let live = allocator.pool_stats(pool).unwrap().allocated_bytes.all;
                        assert_eq!(live.current, 0, "nobody else's requests went here, and all of ours are freed");
                        allocator.end_allocate_to_pool(pool).unwrap();
                        allocator.release_pool(pool).unwrap();
                        if turn % 2 == 0 {
                            let _ = allocator.empty_cache_of(pool).unwrap();
                        }
                    }
                });
            }
        });
        yard.end();
    }
}

#[test]
fn owners_that_keep_addresses_only() {
    let yard = Yard::new(segments(Backing::Virtual), 4_000);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let yard = &yard;
            scope.spawn(move || {
                let (allocator, mut draw) = (&yard.lab.allocator, Draw::new(thread + 300));
                let mut addresses = Vec::new();
                for _ in 0..3_000 {
                    if draw.next(2) == 0
                        && let Some(block) = yard.take(thread + 1, draw.bytes())
                    {
                        addresses.push(allocator.into_raw(block));
                    } else if let Some(address) = addresses.pop() {
                        let block = allocator.from_raw(address).unwrap();
                        assert!(allocator.from_raw(address).is_err());
                        yard.give(block);
                    }
                }
                addresses.into_iter().for_each(|a| yard.give(allocator.from_raw(a).unwrap()));
            });
        }
    });
    yard.end();
}
