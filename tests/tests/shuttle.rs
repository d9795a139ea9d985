//! Where threads meet, in every order that a model checker comes up with: capture begin and end against allocation, free and trim.
//!
//! Needs the checker's locks: `RUSTFLAGS="--cfg gpupool_shuttle" cargo test -p gpupool-tests --test shuttle --target-dir target/shuttle`,
//! which `.ci/run` does. Built without, this file has one test, which says so.

#[cfg(not(gpupool_shuttle))]
#[test]
#[ignore = "needs --cfg gpupool_shuttle; .ci/run builds it so"]
fn threads_meet_in_every_order() {}

#[cfg(gpupool_shuttle)]
mod checked {
    use std::sync::Arc;

    use gpupool_allocator::{
        AllocError, Allocation, Allocator, Config, Filter, IdleOptions, Lending, OnLoan, Policy, PoolError, PoolId,
        Stream,
    };
    use gpupool_device::{Address, InstantiateFlags, Kernel, StreamKind, Workbench};
    use gpupool_graph_capture::{CaptureError, CaptureOptions, Captures, LaunchOptions};
    use gpupool_sim_device::{SimConfig, SimDevice};
    use shuttle::thread;

    /// Schedules tried for each test.
    const SCHEDULES: usize = 1_500;

    struct Bench {
        device: Arc<SimDevice>,
        allocator: Allocator<SimDevice>,
        captures: Captures<SimDevice>,
    }

    impl Bench {
        fn new() -> Arc<Self> {
            let device = Arc::new(SimDevice::new(SimConfig::default()));
            let config = Config::new(Policy::Segments);
            let allocator = Allocator::with_registry(Arc::clone(&device), config, Arc::default()).unwrap();
            let captures = Captures::new(&allocator);
            Arc::new(Self { device, allocator, captures })
        }

        fn stream(&self) -> Stream<SimDevice> {
            self.allocator.register_stream(self.device.stream_create(StreamKind::NonBlocking).unwrap())
        }

        fn fill(&self, stream: &Stream<SimDevice>, dst: gpupool_device::Address, value: u32) {
            self.device.launch(stream.handle(), Kernel::Fill { dst, bytes: 512, value }).unwrap();
        }

        /// Nothing is left, and nothing was found.
        fn finish(&self) {
            self.device.run_until_idle();
            self.captures.tidy();
            self.allocator.empty_cache().unwrap();
            self.allocator.validate().unwrap();
            assert_eq!(self.device.reports(), []);
            assert_eq!(self.allocator.stats().reserved_bytes.all.current, 0);
            assert_eq!(self.device.memory_in_use(), 0);
        }
    }

    fn check(test: impl Fn() + Send + Sync + 'static) {
        shuttle::check_random(test, SCHEDULES);
    }

    /// Captures into a pool, launches, and drops everything.
    fn capture_and_launch(bench: &Bench, stream: &Stream<SimDevice>, options: CaptureOptions) {
        let capture = match bench.captures.begin(stream, options) {
            Ok(capture) => capture,
            // Another thread draws from the pool right now.
            Err(CaptureError::Alloc(_)) => return,
            Err(e) => panic!("{e}"),
        };
        let pool = capture.pool();
        let a = bench.allocator.alloc(512, stream).unwrap();
        bench.fill(stream, a.address(), 1);
        drop(a);
        let b = bench.allocator.alloc(3 << 20, stream).unwrap();
        bench.fill(stream, b.address(), 2);
        drop(b);
        let graph = capture.end().unwrap();
        assert_eq!(graph.pools(), [pool]);
        let exec = graph.instantiate(InstantiateFlags::default()).unwrap();
        exec.launch(stream).unwrap();
        drop(graph);
        exec.launch_with(stream, LaunchOptions::new()).unwrap();
    }

    #[test]
    fn a_capture_against_allocation_and_free_on_another_stream() {
        check(|| {
            let bench = Bench::new();
            let (captured, eager) = (bench.stream(), bench.stream());
            let worker = {
                let bench = Arc::clone(&bench);
                thread::spawn(move || {
                    for bytes in [512, 3 << 20, 512] {
                        let block = bench.allocator.alloc(bytes, &eager).unwrap();
                        bench.fill(&eager, block.address(), 7);
                        drop(block);
                    }
                })
            };
            capture_and_launch(&bench, &captured, CaptureOptions::new());
            worker.join().unwrap();
            bench.finish();
        });
    }

    #[test]
    fn a_capture_against_trim_and_emptying_the_cache() {
        check(|| {
            let bench = Bench::new();
            let (captured, eager) = (bench.stream(), bench.stream());
            drop(bench.allocator.alloc(3 << 20, &eager).unwrap());
            let worker = {
                let bench = Arc::clone(&bench);
                thread::spawn(move || {
                    bench.allocator.trim().unwrap();
                    bench.allocator.empty_cache().unwrap();
                })
            };
            capture_and_launch(&bench, &captured, CaptureOptions::new());
            worker.join().unwrap();
            bench.finish();
        });
    }

    #[test]
    fn two_captures_one_pool() {
        check(|| {
            let bench = Bench::new();
            let pool = PoolId::fresh();
            let (one, two) = (bench.stream(), bench.stream());
            let worker = {
                let bench = Arc::clone(&bench);
                thread::spawn(move || capture_and_launch(&bench, &two, CaptureOptions::new().with_pool(pool)))
            };
            capture_and_launch(&bench, &one, CaptureOptions::new().with_pool(pool));
            worker.join().unwrap();
            bench.finish();
        });
    }

    #[test]
    fn a_request_from_another_thread_on_the_capturing_stream() {
        check(|| {
            let bench = Bench::new();
            let stream = bench.stream();
            let capture = bench.captures.begin(&stream, CaptureOptions::new()).unwrap();
            let pool = capture.pool();
            let worker = {
                let (bench, stream) = (Arc::clone(&bench), stream.clone());
                thread::spawn(move || drop(bench.allocator.alloc(3 << 20, &stream).unwrap()))
            };
            drop(bench.allocator.alloc(512, &stream).unwrap());
            worker.join().unwrap();
            let reserved = bench.allocator.pool_stats(pool).unwrap().reserved_bytes.all.current;
            assert_eq!(reserved, (2 << 20) + (20 << 20), "both requests went to the capture's pool");
            drop(capture);
            bench.finish();
        });
    }

    #[test]
    fn graphs_and_executables_dropped_while_another_thread_captures() {
        check(|| {
            let bench = Bench::new();
            let (one, two) = (bench.stream(), bench.stream());
            let capture = bench.captures.begin(&one, CaptureOptions::new()).unwrap();
            let block = bench.allocator.alloc(512, &one).unwrap();
            bench.fill(&one, block.address(), 3);
            drop(block);
            let graph = capture.end().unwrap();
            let exec = graph.instantiate(InstantiateFlags::default()).unwrap();
            exec.launch(&one).unwrap();
            let worker = thread::spawn(move || {
                drop(exec);
                drop(graph);
            });
            capture_and_launch(&bench, &two, CaptureOptions::new());
            worker.join().unwrap();
            bench.finish();
        });
    }

    #[test]
    fn launches_of_two_graphs_of_a_pool_from_two_threads() {
        check(|| {
            let bench = Bench::new();
            let pool = PoolId::fresh();
            let stream = bench.stream();
            let mut execs = Vec::new();
            for value in [1, 2] {
                let capture = bench.captures.begin(&stream, CaptureOptions::new().with_pool(pool)).unwrap();
                let block = bench.allocator.alloc(512, &stream).unwrap();
                bench.fill(&stream, block.address(), value);
                drop(block);
                execs.push(capture.end().unwrap().instantiate(InstantiateFlags::default()).unwrap());
            }
            let workers: Vec<_> = execs
                .into_iter()
                .map(|exec| {
                    let bench = Arc::clone(&bench);
                    let stream = bench.stream();
                    thread::spawn(move || drop(exec.launch(&stream).unwrap()))
                })
                .collect();
            workers.into_iter().for_each(|w| w.join().unwrap());
            bench.finish();
        });
    }

    /// A graph that adds one to a block of its pool through scratch memory, and what a launch of it is refused for.
    fn graph_of_a_pool(
        bench: &Bench,
        stream: &Stream<SimDevice>,
    ) -> (PoolId, gpupool_graph_capture::Executable<SimDevice>) {
        let capture = bench.captures.begin(stream, CaptureOptions::new()).unwrap();
        let block = bench.allocator.alloc(3 << 20, stream).unwrap();
        bench.fill(stream, block.address(), 3);
        drop(block);
        let pool = capture.pool();
        (pool, capture.end().unwrap().instantiate(InstantiateFlags::default()).unwrap())
    }

    #[test]
    fn a_launch_against_parking_and_waking() {
        check(|| {
            let bench = Bench::new();
            let stream = bench.stream();
            let (pool, exec) = graph_of_a_pool(&bench, &stream);
            let worker = {
                let bench = Arc::clone(&bench);
                thread::spawn(move || {
                    bench.allocator.park_pool(pool).unwrap();
                    bench.allocator.wake_pool(pool).unwrap();
                    bench.allocator.park_pool(pool).unwrap();
                })
            };
            exec.launch(&stream).unwrap();
            exec.launch(&stream).unwrap();
            worker.join().unwrap();
            bench.allocator.validate().unwrap();
            drop(exec);
            bench.finish();
        });
    }

    #[test]
    fn a_launch_against_a_loan() {
        check(|| {
            let bench = Bench::new();
            let (stream, eager) = (bench.stream(), bench.stream());
            let (pool, exec) = graph_of_a_pool(&bench, &stream);
            let options = IdleOptions::new().with_lending(Lending::BeforeGrowth).with_on_loan(OnLoan::Wait);
            bench.allocator.set_idle_options(pool, options).unwrap();
            let worker = {
                let bench = Arc::clone(&bench);
                thread::spawn(move || {
                    let loan = bench.allocator.alloc(3 << 20, &eager).unwrap();
                    bench.fill(&eager, loan.address(), 9);
                    drop(loan);
                })
            };
            exec.launch(&stream).unwrap();
            worker.join().unwrap();
            drop(exec);
            bench.finish();
        });
    }

    #[test]
    fn a_capture_into_a_pool_against_parking_it() {
        check(|| {
            let bench = Bench::new();
            let stream = bench.stream();
            let (pool, exec) = graph_of_a_pool(&bench, &stream);
            let worker = {
                let bench = Arc::clone(&bench);
                thread::spawn(move || match bench.allocator.park_pool(pool) {
                    // It cannot be learned while its stream captures whether its last run is over: busy.
                    Ok(_) | Err(AllocError::PoolInCapture { .. } | AllocError::Pool(PoolError::Busy { .. })) => {}
                    Err(e) => panic!("{e}"),
                })
            };
            capture_and_launch(&bench, &stream, CaptureOptions::new().with_pool(pool));
            worker.join().unwrap();
            bench.allocator.validate().unwrap();
            drop(exec);
            bench.finish();
        });
    }

    /// The pool that a block came from.
    fn pool_of(bench: &Bench, block: &Allocation<SimDevice>) -> PoolId {
        let state = bench.allocator.state();
        let inside = |start: Address, size: u64| start <= block.address() && block.address().offset_from(start) < size;
        state.segments.iter().find(|s| inside(s.address, s.size)).unwrap().pool
    }

    /// A thread asks while another closes the scope that claims it, lets the pool go and opens a scope for the next one.
    #[test]
    fn requests_under_a_scope_against_its_end_and_that_of_its_pool() {
        check(|| {
            let bench = Bench::new();
            let stream = bench.stream();
            let (first, second) = (PoolId::fresh(), PoolId::fresh());
            bench.allocator.begin_allocate_to_pool(first, Filter::Stream(stream.handle())).unwrap();
            // From here on the stream remembers where the scope leads.
            drop(bench.allocator.alloc(512, &stream).unwrap());
            let worker = {
                let (bench, stream) = (Arc::clone(&bench), stream.clone());
                thread::spawn(move || {
                    bench.allocator.end_allocate_to_pool(first).unwrap();
                    bench.allocator.release_pool(first).unwrap();
                    let outside = bench.allocator.alloc(512, &stream).unwrap();
                    assert_eq!(pool_of(&bench, &outside), PoolId::DEFAULT);
                    bench.allocator.empty_cache().unwrap();
                    bench.allocator.begin_allocate_to_pool(second, Filter::All).unwrap();
                    let inside = bench.allocator.alloc(512, &stream).unwrap();
                    assert_eq!(pool_of(&bench, &inside), second);
                })
            };
            let order = [first, PoolId::DEFAULT, second];
            let mut latest = 0;
            for _ in 0..3 {
                match bench.allocator.alloc(512, &stream) {
                    Ok(block) => {
                        let at = order.iter().position(|pool| *pool == pool_of(&bench, &block)).unwrap();
                        assert!(at >= latest, "a request went back to {:?}", order[at]);
                        latest = at;
                    }
                    // It was sent there before the scope was closed, and came after the pool was gone.
                    Err(AllocError::Pool(PoolError::Unknown { pool })) => assert_eq!((pool, latest), (first, 0)),
                    Err(e) => panic!("{e}"),
                }
            }
            worker.join().unwrap();
            bench.allocator.end_allocate_to_pool(second).unwrap();
            bench.allocator.release_pool(second).unwrap();
            bench.finish();
        });
    }

    #[test]
    fn recorded_uses_freed_on_two_threads_while_a_third_polls() {
        check(|| {
            let bench = Bench::new();
            let (own, other) = (bench.stream(), bench.stream());
            let block = bench.allocator.alloc(512, &own).unwrap();
            block.record_stream(&other).unwrap();
            let second = bench.allocator.alloc(3 << 20, &own).unwrap();
            second.record_stream(&other).unwrap();
            let one = thread::spawn(move || drop(block));
            let two = thread::spawn(move || drop(second));
            let polls = {
                let (bench, own) = (Arc::clone(&bench), own.clone());
                thread::spawn(move || {
                    drop(bench.allocator.alloc(5 << 20, &own).unwrap());
                    bench.allocator.trim().unwrap();
                })
            };
            for thread in [one, two, polls] {
                thread.join().unwrap();
            }
            bench.finish();
        });
    }

    #[test]
    fn an_idle_segment_that_two_streams_want_and_its_own_uses() {
        check(|| {
            let bench = Bench::new();
            let streams = [bench.stream(), bench.stream(), bench.stream()];
            drop(bench.allocator.alloc(30 << 20, &streams[0]).unwrap());
            let threads = streams.map(|stream| {
                let bench = Arc::clone(&bench);
                thread::spawn(move || {
                    let block = bench.allocator.alloc(30 << 20, &stream).unwrap();
                    bench.fill(&stream, block.address(), 1);
                    drop(block);
                    drop(bench.allocator.alloc(20 << 20, &stream).unwrap());
                })
            });
            for thread in threads {
                thread.join().unwrap();
            }
            bench.finish();
        });
    }

    #[test]
    fn a_stream_retired_while_others_allocate_and_trim() {
        check(|| {
            let bench = Bench::new();
            let (gone, stays) = (bench.stream(), bench.stream());
            drop(bench.allocator.alloc(3 << 20, &gone).unwrap());
            let worker = {
                let bench = Arc::clone(&bench);
                thread::spawn(move || {
                    drop(bench.allocator.alloc(3 << 20, &stays).unwrap());
                    bench.allocator.trim().unwrap();
                })
            };
            bench.allocator.retire_stream(&gone).unwrap();
            worker.join().unwrap();
            drop(gone);
            bench.finish();
        });
    }
}
