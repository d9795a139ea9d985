//! Lifetime: a graph, its executable, a hold of its pool, an output and the allocator are dropped in every order, with the cache trimmed
//! between or not, while a launch is under way, during another capture, and with each driver call failing in turn.

use std::error::Error;
use std::sync::Arc;

use gpupool_allocator::{Config, Policy, PoolHold, Stream};
use gpupool_device::{Call, CaptureMode, Device, Gate, GraphDevice, Kernel, StreamKind, Workbench, code};
use gpupool_graph_capture::{Capture, CaptureOptions, Executable, Graph, PoolChoice};
use gpupool_sim_device::{Scheduler, SimConfig, SimDevice};
use gpupool_tests::graph_bench::{Block, EAGER, KIB, Lab, assert_nothing_left, permutations};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// What can be dropped.
const THINGS: [&str; 5] = ["graph", "executable", "hold", "output", "allocator"];
const ALLOCATOR: usize = 4;

/// How far the launch is when things are dropped.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Flight {
    /// Done, and known to be.
    Landed,
    /// Submitted; it runs when somebody waits for it.
    Pending,
    /// Behind a gate that opens only before something that is permitted to wait.
    Gated,
}

/// What else goes on.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Setting {
    flight: Flight,
    /// The cache is emptied (or, where that would wait, trimmed) before and after each drop.
    trims: bool,
    /// A capture is under way on another stream.
    capturing: bool,
    virtual_memory: bool,
}

impl Setting {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for flight in [Flight::Landed, Flight::Pending, Flight::Gated] {
            for bits in 0..8 {
                let bit = |n: u32| bits >> n & 1 == 1;
                let setting = Self { flight, trims: bit(0), capturing: bit(1), virtual_memory: !bit(2) };
                // Without virtual memory every free waits for the device.
                if setting.virtual_memory || flight != Flight::Gated {
                    all.push(setting);
                }
            }
        }
        all
    }
}

/// What is alive.
struct Alive {
    device: Arc<SimDevice>,
    gate: Option<Gate>,
    graph: Option<Graph<SimDevice>>,
    exec: Option<Executable<SimDevice>>,
    hold: Option<PoolHold>,
    output: Option<Block>,
    other: Option<Capture<SimDevice>>,
    lab: Option<(Lab, Vec<Stream<SimDevice>>)>,
}

impl Alive {
    fn new(setting: Setting) -> Self {
        let sim = SimConfig { virtual_memory: setting.virtual_memory, ..SimConfig::default() };
        let device = Arc::new(SimDevice::new(sim.with_scheduler(Scheduler::Adversarial)));
        let mut streams = Vec::new();
        let lab = Lab::on(Arc::clone(&device), Config::new(Policy::Segments), Arc::default());
        for _ in 0..3 {
            streams.push(lab.allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap()));
        }
        let lab = Some((lab, streams));
        Self { device, gate: None, graph: None, exec: None, hold: None, output: None, other: None, lab }
    }

    /// Captures, instantiates and launches; what was made before an error stays.
    fn build(&mut self, setting: Setting) -> Outcome<()> {
        let Some((lab, streams)) = &self.lab else { return Ok(()) };
        let device = Arc::clone(&self.device);
        let input = lab.try_block(EAGER, 4 * KIB, &streams[0])?;
        device.launch(streams[0].handle(), Kernel::Fill { dst: input.address(), bytes: 4 * KIB, value: 1 })?;
        // Some cache of the default pool, too large for a bin (from which it would come with what the gate holds up), and marked before the gate.
        drop(lab.try_block(EAGER, 2048 * KIB, &streams[1])?);
        let _before_the_gate = streams[1].mark_work()?;
        let capture = lab.captures.begin(&streams[0], CaptureOptions::new())?;
        let temp = lab.try_block(EAGER, 4 * KIB, &streams[0])?;
        device
            .launch(streams[0].handle(), Kernel::Copy { dst: temp.address(), src: input.address(), bytes: 4 * KIB })?;
        device.launch(streams[0].handle(), Kernel::Add { dst: temp.address(), bytes: 4 * KIB, value: 1 })?;
        let output = lab.try_block(EAGER, 4 * KIB, &streams[0])?;
        device
            .launch(streams[0].handle(), Kernel::Copy { dst: output.address(), src: temp.address(), bytes: 4 * KIB })?;
        self.output = Some(output);
        drop(temp);
        let graph = self.graph.insert(capture.end()?);
        graph.retain(input.into_allocation());
        let exec = self.exec.insert(graph.instantiate(Default::default())?);
        self.hold = Some(lab.allocator.hold_pool(graph.pools()[0])?);
        let event = device.event_create()?;
        let ordered = device
            .event_record(event, streams[0].handle())
            .and_then(|()| device.stream_wait_event(streams[1].handle(), event));
        device.event_destroy(event)?;
        ordered?;
        if setting.flight == Flight::Gated {
            let gate = device.gate_create()?;
            device.launch(streams[1].handle(), Kernel::Wait { gate })?;
            self.gate = Some(gate);
        }
        exec.launch(&streams[1])?;
        if setting.flight == Flight::Landed {
            device.stream_synchronize(streams[1].handle())?;
        }
        if setting.capturing {
            let capture = lab.captures.begin(&streams[2], CaptureOptions::new())?;
            drop(lab.try_block(EAGER, 4 * KIB, &streams[2])?);
            self.other = Some(capture);
        }
        Ok(())
    }

    /// Gives memory back; errors are the driver's.
    fn trim(&self, setting: Setting) -> Outcome<()> {
        let Some((lab, _)) = self.lab.as_ref().filter(|_| setting.trims) else { return Ok(()) };
        match self.gate {
            Some(_) => lab.allocator.trim()?,
            None => lab.allocator.empty_cache()?,
        };
        Ok(())
    }

    fn drop_one(&mut self, thing: usize) {
        match THINGS[thing] {
            "graph" => drop(self.graph.take()),
            "executable" => drop(self.exec.take()),
            "hold" => drop(self.hold.take()),
            "output" => drop(self.output.take()),
            _ => drop(self.lab.take()),
        }
    }

    /// Whether dropping `thing` leaves nobody who would let go of the launch later: then that drop waits for it.
    fn is_last_witness(&self, thing: usize) -> bool {
        let left =
            [self.graph.is_some(), self.exec.is_some(), false, false, self.lab.is_some() || self.other.is_some()];
        left.iter().enumerate().all(|(at, left)| !left || at == thing)
    }

    fn open_gate(&mut self) {
        if let Some(gate) = self.gate.take() {
            self.device.gate_open(gate).unwrap();
        }
    }

    /// Drops everything in this order. Neither a drop nor a trim waits while the gate is closed.
    fn drop_all(&mut self, order: &[usize], setting: Setting) {
        for &thing in order {
            let _errors_of_faults = self.trim(setting);
            if self.is_last_witness(thing) {
                self.open_gate();
            }
            let waits = self.device.host_waits();
            self.drop_one(thing);
            if self.gate.is_some() {
                assert_eq!(self.device.host_waits(), waits, "dropping the {} waited", THINGS[thing]);
            }
            if let Some((lab, _)) = &self.lab {
                lab.allocator.validate().unwrap();
            }
            let _errors_of_faults = self.trim(setting);
        }
        self.open_gate();
        drop(self.other.take());
    }
}

#[test]
fn everything_dropped_in_every_order_leaves_nothing() {
    for setting in Setting::all() {
        for order in permutations(THINGS.len()) {
            let mut alive = Alive::new(setting);
            alive.build(setting).unwrap();
            let device = Arc::clone(&alive.device);
            let _named = Named(&order, setting);
            alive.drop_all(&order, setting);
            drop(alive);
            assert_nothing_left(&device);
        }
    }
}

#[test]
fn everything_but_the_allocator_dropped_in_every_order_leaves_an_empty_cache() {
    for setting in Setting::all() {
        for order in permutations(ALLOCATOR) {
            let mut alive = Alive::new(setting);
            alive.build(setting).unwrap();
            let device = Arc::clone(&alive.device);
            let _named = Named(&order, setting);
            alive.drop_all(&order, setting);
            let (lab, _streams) = alive.lab.as_ref().unwrap();
            lab.allocator.empty_cache().unwrap();
            lab.assert_clean();
            assert_eq!((lab.reserved(), lab.captures.queued(), device.memory_in_use()), (0, 0, 0));
            assert!(lab.allocator.state().pools.is_empty() && lab.captures.orphans().is_empty());
            drop(alive);
            assert_nothing_left(&device);
        }
    }
}

#[test]
fn an_adopted_captures_holds_a_block_and_the_allocator_dropped_in_every_order_leave_nothing() {
    for finishes in [true, false] {
        for order in permutations(3) {
            let device = Arc::new(SimDevice::new(SimConfig::default().with_scheduler(Scheduler::Adversarial)));
            let lab = Lab::on(Arc::clone(&device), Config::new(Policy::Segments), Arc::default());
            let s = lab.stream();
            device.begin_capture(s.handle(), CaptureMode::Global).unwrap();
            let adopted = lab.captures.adopt(&s, PoolChoice::New).unwrap();
            let output = lab.try_block(EAGER, 4 * KIB, &s).unwrap();
            let kernel = Kernel::Fill { dst: output.address(), bytes: 4 * KIB, value: 1 };
            device.launch(s.handle(), kernel).unwrap();
            let graph = device.end_capture(s.handle()).unwrap();
            let mut holds = match finishes {
                true => Some(adopted.finish()),
                false => {
                    drop(adopted);
                    None
                }
            };
            let (mut output, mut rest) = (Some(output), Some((lab, s)));
            if finishes {
                // As its owner would: launched while the holds live, and over before they go.
                let exec = device.instantiate(graph, Default::default()).unwrap();
                let stream = rest.as_ref().unwrap().1.handle();
                device.graph_launch(exec, stream).unwrap();
                device.stream_synchronize(stream).unwrap();
                device.exec_destroy(exec).unwrap();
            }
            device.graph_destroy(graph).unwrap();
            for thing in order {
                match thing {
                    0 => drop(holds.take()),
                    1 => drop(output.take()),
                    _ => drop(rest.take()),
                }
            }
            assert_nothing_left(&device);
        }
    }
}

/// Names what failed.
struct Named<'a>(&'a [usize], Setting);

impl Drop for Named<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let order: Vec<_> = self.0.iter().map(|thing| THINGS[*thing]).collect();
            eprintln!("dropping {order:?}, {:?}", self.1);
        }
    }
}

/// Every order with the `n`-th call of a kind failing, for every kind and every `n` that the run without faults makes.
fn with_faults(settings: &[Setting], orders: &[Vec<usize>], fault: u32) {
    let mut runs = 0;
    for &setting in settings {
        for order in orders {
            let mut healthy = Alive::new(setting);
            healthy.build(setting).unwrap();
            let device = Arc::clone(&healthy.device);
            healthy.drop_all(order, setting);
            drop(healthy);
            let counts = device.call_counts();
            // The test's own streams are made before any fault.
            for (&call, &count) in counts.iter().filter(|(call, _)| **call != Call::StreamCreate) {
                for nth in 1..=count {
                    runs += 1;
                    let mut alive = Alive::new(setting);
                    let device = Arc::clone(&alive.device);
                    let (_named, _fault) = (Named(order, setting), FaultNamed(call, nth));
                    device.fail_nth(call, nth, fault);
                    let built = alive.build(setting);
                    alive.drop_all(order, setting);
                    // A capture that could not be ended may have kept the fault for its second try.
                    device.clear_faults();
                    if let Some((lab, _)) = &alive.lab {
                        lab.allocator.empty_cache().unwrap();
                        lab.assert_clean();
                        assert_eq!((lab.reserved(), lab.captures.queued()), (0, 0), "{built:?}");
                    }
                    drop(alive);
                    // An event that could not be destroyed is the driver's.
                    assert_eq!((device.memory_in_use(), device.address_space_in_use()), (0, 0), "{built:?}");
                    assert_eq!(device.reports(), []);
                }
            }
        }
    }
    println!("{runs} runs");
}

struct FaultNamed(Call, u64);

impl Drop for FaultNamed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("with call {} of {} failing", self.1, self.0);
        }
    }
}

fn faulty_settings(virtual_memory: bool) -> Vec<Setting> {
    let all = Setting::all().into_iter();
    all.filter(|s| s.flight != Flight::Gated && s.virtual_memory == virtual_memory).collect()
}

#[test]
fn everything_but_the_allocator_dropped_with_every_call_failing_in_turn_leaves_an_empty_cache() {
    for fault in [code::UNKNOWN, code::OUT_OF_MEMORY, code::CAPTURE_UNSUPPORTED] {
        for virtual_memory in [true, false] {
            with_faults(&faulty_settings(virtual_memory), &permutations(ALLOCATOR), fault);
        }
    }
}

#[test]
fn everything_dropped_with_every_call_failing_in_turn_leaves_nothing() {
    // Half of the settings: the orders are five times as many.
    let settings: Vec<_> = faulty_settings(true).into_iter().filter(|s| s.trims != s.capturing).collect();
    with_faults(&settings, &permutations(THINGS.len()), code::UNKNOWN);
}
