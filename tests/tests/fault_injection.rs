//! Every driver call that fails, one at a time: for each kind of call that the allocator makes and each of a set of scenarios, the n-th
//! call fails, for n from 1 until the scenario makes fewer. After every operation the checks of `gpupool_tests::machine` hold: what came
//! back was a block or an error with a type, live blocks are as they were, every counter equals a recount. In the end faults are
//! cleared, everything is dropped, and nothing may remain.

use gpupool_allocator::{Config, Preset};
use gpupool_device::{Call, code};
use gpupool_tests::lab::{BACKINGS, Backing, Lab, MIB, driver_error, pages, segments};
use gpupool_tests::machine::{Claim, Ending, Machine, Op};
use gpupool_tests::watched::ALLOCATOR_CALLS;

/// Blocks of many sizes, freed in another order, cached, and served again.
fn growing_and_shrinking() -> Vec<Op> {
    let mut ops = Vec::new();
    for bytes in [1_000, MIB, 3 * MIB, 9 * MIB, 20 * MIB, 64 * MIB] {
        ops.push(Op::Alloc(0, bytes));
    }
    ops.extend([Op::Free(1), Op::Free(3), Op::Alloc(0, 8 * MIB), Op::Free(0), Op::Drop(0), Op::EmptyCache]);
    ops.extend([Op::Alloc(1, 30 * MIB), Op::Free(9), Op::Trim, Op::Alloc(0, 100 * MIB), Op::Free(0), Op::EmptyCache]);
    ops
}

/// Blocks that other streams use, some still as they are freed.
fn recorded_uses() -> Vec<Op> {
    let mut ops = Vec::new();
    for i in 0..4 {
        ops.extend([Op::Alloc(0, 20 * MIB), Op::Work(i, 1, 3), Op::Work(i, 2, 1)]);
    }
    ops.extend([Op::Free(0), Op::Free(1), Op::Alloc(0, 20 * MIB), Op::Tick(1), Op::Alloc(0, 20 * MIB), Op::Trim]);
    ops.extend([Op::FreeOn(0, 3), Op::Free(0), Op::Tick(5), Op::Alloc(0, 20 * MIB), Op::EmptyCache, Op::Trim]);
    ops
}

/// So many frees with recorded uses that events are recorded for them as they come.
fn many_recorded_frees() -> Vec<Op> {
    let mut ops: Vec<Op> = (0..70).flat_map(|i| [Op::Alloc(0, 4_096), Op::Work(i, 1, 2)]).collect();
    ops.extend((0..70).map(|_| Op::Free(0)));
    ops.extend([Op::Tick(3), Op::Alloc(0, 5 * MIB), Op::Alloc(0, 4_096), Op::Trim]);
    ops
}

/// Memory runs out: idle memory of this and other streams, pending memory, and at last nothing.
fn running_out() -> Vec<Op> {
    vec![
        Op::Alloc(0, 100 * MIB),
        Op::Alloc(1, 80 * MIB),
        Op::Work(1, 1, 2),
        Op::Free(1),
        Op::Alloc(2, 40 * MIB),
        Op::Work(1, 3, 4),
        Op::Free(1),
        Op::Alloc(3, 120 * MIB),
        Op::Alloc(3, 60 * MIB),
        Op::Alloc(0, 200 * MIB),
        Op::Free(0),
        Op::Alloc(0, 90 * MIB),
        Op::Limit(Some(150)),
        Op::Alloc(1, 40 * MIB),
        Op::Alloc(1, 40 * MIB),
        Op::Limit(None),
        Op::EmptyCache,
    ]
}

/// Pools, scopes, whole blocks, pools that help out, layouts noted and brought back.
fn pools() -> Vec<Op> {
    vec![
        Op::NewPool,
        Op::Open(0, Claim::All),
        Op::Alloc(0, 30 * MIB),
        Op::Alloc(1, 1_000),
        Op::Checkpoint(0),
        Op::Work(0, 2, 1),
        Op::Free(0),
        Op::Tick(2),
        Op::Alloc(0, 10 * MIB),
        Op::Restore(0, 0),
        Op::Close(0),
        Op::NewPool,
        Op::NoSplit(1),
        Op::Open(1, Claim::Stream(2)),
        Op::Alloc(2, 5 * MIB),
        Op::Free(0),
        Op::Close(1),
        Op::UseOnOom(1, true),
        Op::Alloc(2, 150 * MIB),
        Op::Alloc(2, 100 * MIB),
        Op::Alloc(2, 4 * MIB),
        Op::ReleasePool(1),
        Op::EmptyCacheOf(1),
        Op::ReleasePool(0),
        Op::Trim,
        Op::EmptyCache,
    ]
}

/// Streams that go away with memory that they still use, and blocks that outlive them.
fn streams_that_go() -> Vec<Op> {
    vec![
        Op::Alloc(0, 30 * MIB),
        Op::Alloc(0, 20 * MIB),
        Op::Work(0, 0, 3),
        Op::Alloc(1, 25 * MIB),
        Op::Work(2, 0, 3),
        Op::Free(0),
        Op::Retire(0),
        Op::Alloc(1, 30 * MIB),
        Op::Retire(0),
        Op::Free(1),
        Op::Free(0),
        Op::Tick(4),
        Op::Alloc(2, 30 * MIB),
        Op::Alloc(0, 20 * MIB),
        Op::Trim,
        Op::Retire(1),
        Op::Alloc(3, 200 * MIB),
        Op::EmptyCache,
    ]
}

fn scenarios() -> [(&'static str, Vec<Op>); 6] {
    [
        ("growing and shrinking", growing_and_shrinking()),
        ("recorded uses", recorded_uses()),
        ("many recorded frees", many_recorded_frees()),
        ("running out", running_out()),
        ("pools", pools()),
        ("streams that go", streams_that_go()),
    ]
}

/// Fails the n-th call of a kind in a scenario. Whether the scenario made that many.
fn inject(config: &Config, ops: &[Op], call: Call, n: u64, code: u32, ending: Ending) -> Result<bool, String> {
    let mut machine = Machine::new(config.clone(), 256);
    machine.expect_faults();
    let sim = machine.lab.device.sim.clone();
    let before = sim.calls(call);
    sim.fail_nth(call, n, code);
    for (i, op) in ops.iter().enumerate() {
        machine.step(op).map_err(|e| format!("operation {i}: {e}"))?;
    }
    let made = sim.calls(call) - before;
    machine.end(ending)?;
    Ok(made >= n)
}

/// Calls for which being out of memory is an answer of its own.
const MAY_RUN_OUT: [Call; 4] = [Call::MemAlloc, Call::AddressReserve, Call::MemCreate, Call::EventCreate];

/// All of it for one configuration. How many faults struck.
fn matrix(config: Config) -> u64 {
    let mut struck = 0;
    for (name, ops) in scenarios() {
        for call in ALLOCATOR_CALLS {
            for (code, allocator_first) in [(code::UNKNOWN, false), (code::UNKNOWN, true), (code::OUT_OF_MEMORY, false)]
            {
                if code == code::OUT_OF_MEMORY && !MAY_RUN_OUT.contains(call) {
                    continue;
                }
                for n in 1.. {
                    let ending = Ending { order: n, allocator_first };
                    let result = inject(&config, &ops, *call, n, code, ending);
                    let more = result.unwrap_or_else(|e| {
                        panic!("{name}: {call} number {n} fails with {code}, allocator first {allocator_first}: {e}")
                    });
                    if !more {
                        break;
                    }
                    struck += 1;
                }
            }
        }
    }
    struck
}

/// A kind of call fails every time from some operation on, until everything is given up.
fn broken_from_somewhere_on(config: &Config, call: Call, code: u32) {
    for (name, ops) in scenarios() {
        for from in (0..ops.len()).step_by(if ops.len() > 60 { 10 } else { 1 }) {
            let mut machine = Machine::new(config.clone(), 256);
            machine.expect_faults();
            let result = ops.iter().enumerate().try_for_each(|(i, op)| {
                if i == from {
                    machine.lab.device.sim.fail_all(call, code);
                }
                machine.step(op).map_err(|e| format!("operation {i}: {e}"))
            });
            let ending = Ending { order: from as u64, allocator_first: from % 2 == 1 };
            result.and_then(|()| machine.end(ending)).unwrap_or_else(|e| {
                panic!("{name}: every {call} from operation {from} on fails with {code}: {e}");
            });
        }
    }
}

#[test]
fn a_kind_of_call_that_goes_on_failing_costs_nothing_in_the_end() {
    for backing in BACKINGS {
        for call in ALLOCATOR_CALLS {
            let code = if MAY_RUN_OUT.contains(call) { code::OUT_OF_MEMORY } else { code::UNKNOWN };
            broken_from_somewhere_on(&segments(backing), *call, code);
        }
    }
}

#[test]
fn an_event_that_could_not_be_recorded_is_made_up_for_without_waiting() {
    for backing in BACKINGS {
        for call in [Call::EventRecord, Call::EventCreate, Call::EventQuery, Call::StreamGetCaptureInfo] {
            let lab = Lab::new(backing, 1_000);
            let (x, y) = (lab.alloc(1, 100), lab.alloc(1, 100));
            lab.run(2, &x);
            lab.record(&x, 2);
            lab.run(1, &y);
            lab.free(x);
            lab.free(y);
            for n in 1..4 {
                lab.device.sim.fail_nth(call, 1, code::UNKNOWN);
                let refused = lab.allocator.trim();
                assert!(refused.is_ok() || driver_error(&refused.unwrap_err()).is_some_and(|e| e.call == call), "{n}");
                lab.device.sim.clear_faults();
            }
            lab.finish();
            lab.allocator.trim().unwrap();
            assert_eq!((lab.reserved(), lab.device.sim.host_waits()), (0, 0), "{backing:?} {call}");
            lab.done();
        }
    }
}

#[test]
fn every_call_fails_in_turn_with_virtual_memory() {
    let struck = matrix(segments(Backing::Virtual));
    assert!(struck > 500, "{struck}");
}

#[test]
fn every_call_fails_in_turn_with_plain_memory() {
    let struck = matrix(segments(Backing::Plain));
    assert!(struck > 500, "{struck}");
}

#[test]
fn every_call_fails_in_turn_where_streams_wait_on_the_device() {
    for backing in BACKINGS {
        let config = segments(backing).with_wait_for_recorded(true).with_max_split_size(40 * MIB);
        let struck = matrix(config);
        assert!(struck > 500, "{struck}");
    }
}

#[test]
fn every_call_fails_in_turn_with_collection_and_a_high_water_mark() {
    for backing in BACKINGS {
        let config = segments(backing)
            .with_memory_fraction(0.9)
            .with_garbage_collection_threshold(0.4)
            .with_trim_above(100 * MIB)
            .with_trim_before_growth(false);
        let struck = matrix(config);
        assert!(struck > 500, "{struck}");
    }
}

#[test]
fn every_call_fails_in_turn_in_quarantine() {
    let struck = matrix(segments(Backing::Virtual).with_quarantine(true));
    assert!(struck > 500, "{struck}");
}

#[test]
fn every_call_fails_in_turn_with_pages() {
    for preset in Preset::ALL {
        let struck = matrix(pages(*preset));
        assert!(struck > 500, "{struck}");
    }
}

#[test]
fn a_kind_of_call_that_goes_on_failing_costs_nothing_in_the_end_with_pages() {
    for call in ALLOCATOR_CALLS {
        let code = if MAY_RUN_OUT.contains(call) { code::OUT_OF_MEMORY } else { code::UNKNOWN };
        broken_from_somewhere_on(&pages(Preset::Balanced), *call, code);
    }
}
