use std::sync::atomic::{AtomicUsize, Ordering};

use gpupool::device::{Address, CaptureMode, GraphDevice, InstantiateFlags, Kernel, StreamKind, Workbench};
use gpupool::sim::{SimConfig, SimDevice};
use gpupool::{Config, Policy};

use super::*;
use crate::instance::Instance;

const MIB: u64 = 1 << 20;

fn instance() -> Of<SimDevice> {
    Of::new(Arc::new(SimDevice::new(SimConfig::default())), Config::new(Policy::Segments), Arc::default()).unwrap()
}

fn alloc(of: &Of<SimDevice>, bytes: u64, stream: u64) -> Result<Address, Failure> {
    // SAFETY: streams of a simulated device are looked up.
    unsafe { of.alloc(bytes, stream) }
}

/// What PyTorch's filter does: true for one stream.
unsafe extern "C" fn is_stream(context: *mut c_void, stream: *mut c_void) -> bool {
    context == stream
}

fn only(stream: u64) -> StreamTest {
    // SAFETY: `is_stream` compares two pointers.
    unsafe { StreamTest::new(Some(is_stream), stream as *mut c_void, None) }
}

/// A capture as `torch.cuda.graph` makes it: begin the pool, begin the capture, allocate, end the capture, end the pool.
fn capture(of: &Of<SimDevice>, stream: u64, pool: PoolId, out: Address, value: u32) -> gpupool::device::ExecHandle {
    let d = &of.device;
    of.pool_begin(pool, only(stream)).unwrap();
    d.begin_capture(StreamHandle(stream), CaptureMode::Global).unwrap();
    let scratch = alloc(of, MIB, stream).unwrap();
    d.launch(StreamHandle(stream), Kernel::Fill { dst: scratch, bytes: MIB, value }).unwrap();
    d.launch(StreamHandle(stream), Kernel::Copy { dst: out, src: scratch, bytes: MIB }).unwrap();
    of.free(scratch).unwrap();
    let graph = d.end_capture(StreamHandle(stream)).unwrap();
    of.pool_end(pool).unwrap();
    let exec = d.instantiate(graph, InstantiateFlags::default()).unwrap();
    d.graph_destroy(graph).unwrap();
    exec
}

fn reserved(of: &Of<SimDevice>) -> i64 {
    of.allocator.stats().reserved_bytes.all.current
}

#[test]
fn a_capture_of_pytorchs_draws_from_its_pool_and_eager_work_beside_it_does_not() {
    let of = instance();
    let (s, eager) = (of.stream_create().unwrap(), of.stream_create().unwrap());
    let pool = PoolId(1, 0);
    of.pool_begin(pool, only(s)).unwrap();
    of.device.begin_capture(StreamHandle(s), CaptureMode::Global).unwrap();
    let inside = alloc(&of, MIB, s).unwrap();
    let beside = alloc(&of, MIB, eager).unwrap();
    assert_eq!(of.pool_bytes(pool).unwrap().1, MIB as i64);
    of.free(inside).unwrap();
    assert_eq!(alloc(&of, MIB, s).unwrap(), inside, "reused inside the capture");
    of.free(inside).unwrap();
    of.free(beside).unwrap();
    of.device.end_capture(StreamHandle(s)).unwrap();
    of.pool_end(pool).unwrap();
    // What the graph baked in is not handed out, on any stream.
    for stream in [s, eager] {
        assert_ne!(alloc(&of, MIB, stream).unwrap(), inside);
    }
}

#[test]
fn a_capture_that_no_open_pool_claims_is_an_error_and_not_default_memory() {
    let of = instance();
    let (s, other) = (of.stream_create().unwrap(), of.stream_create().unwrap());
    of.pool_begin(PoolId(1, 0), only(other)).unwrap();
    of.device.begin_capture(StreamHandle(s), CaptureMode::Relaxed).unwrap();
    let failure = alloc(&of, MIB, s).unwrap_err();
    assert_eq!(failure.status, Status::Capture);
    of.device.end_capture(StreamHandle(s)).unwrap();
    of.pool_end(PoolId(1, 0)).unwrap();
    alloc(&of, MIB, s).unwrap();
}

#[test]
fn without_a_filter_the_pool_is_that_of_whatever_captures() {
    let of = instance();
    let s = of.stream_create().unwrap();
    let pool = PoolId(7, 0);
    // SAFETY: there is no function.
    of.pool_begin(pool, unsafe { StreamTest::new(None, std::ptr::null_mut(), None) }).unwrap();
    let before = alloc(&of, MIB, s).unwrap();
    of.device.begin_capture(StreamHandle(s), CaptureMode::Global).unwrap();
    alloc(&of, MIB, s).unwrap();
    assert_eq!(of.pool_bytes(pool).unwrap().1, MIB as i64, "the capture's block and not the one before");
    of.device.end_capture(StreamHandle(s)).unwrap();
    of.pool_end(pool).unwrap();
    of.free(before).unwrap();
}

#[test]
fn graphs_share_a_pool_and_both_keep_running_right() {
    let of = instance();
    let s = of.stream_create().unwrap();
    let out = alloc(&of, MIB, s).unwrap();
    let pool = PoolId(1, 0);
    let first = capture(&of, s, pool, out, 3);
    let taken = of.pool_bytes(pool).unwrap().0;
    let second = capture(&of, s, pool, out, 4);
    assert_eq!(of.pool_bytes(pool).unwrap().0, taken, "the second took no more");
    for (exec, value) in [(first, 3), (second, 4), (first, 3)] {
        of.device.graph_launch(exec, StreamHandle(s)).unwrap();
        of.device.stream_synchronize(StreamHandle(s)).unwrap();
        assert_eq!(of.device.read_bytes(out, 4).unwrap(), [value, 0, 0, 0]);
    }
    // One of the two lets go: the other's memory stays.
    of.pool_release(pool).unwrap();
    of.empty_cache().unwrap();
    assert_eq!(of.pool_bytes(pool).unwrap().0, taken);
    of.pool_release(pool).unwrap();
    of.empty_cache().unwrap();
    assert!(of.pool_bytes(pool).is_err());
    assert_eq!(of.device.take_reports(), []);
}

/// PyTorch makes no call at a replay, so a release must assume that one is running, on any stream.
#[test]
fn a_released_pools_memory_stays_until_the_replay_that_may_be_running_is_done() {
    let of = instance();
    let (s, replays) = (of.stream_create().unwrap(), of.stream_create().unwrap());
    let out = alloc(&of, MIB, s).unwrap();
    let pool = PoolId(1, 0);
    let exec = capture(&of, s, pool, out, 9);
    of.empty_cache().unwrap();
    let before = reserved(&of);
    let gate = of.device.gate_create().unwrap();
    of.device.launch(StreamHandle(replays), Kernel::Wait { gate }).unwrap();
    of.device.launch(StreamHandle(replays), Kernel::Wait { gate }).unwrap();
    of.device.graph_launch(exec, StreamHandle(replays)).unwrap();
    of.pool_release(pool).unwrap();
    assert_eq!(of.leaving.len(), 1);
    of.trim().unwrap();
    assert_eq!(reserved(&of), before, "nothing was unmapped under the replay");
    of.device.gate_open(gate).unwrap();
    of.device.stream_synchronize(StreamHandle(replays)).unwrap();
    of.trim().unwrap();
    assert_eq!((of.leaving.len(), reserved(&of)), (0, before - 2 * MIB as i64));
}

#[test]
fn while_a_capture_is_open_a_released_pool_waits_for_its_end_to_be_recorded() {
    let of = instance();
    let (s, capturing) = (of.stream_create().unwrap(), of.stream_create().unwrap());
    let out = alloc(&of, MIB, s).unwrap();
    capture(&of, s, PoolId(1, 0), out, 9);
    of.device.begin_capture(StreamHandle(capturing), CaptureMode::Global).unwrap();
    of.pool_release(PoolId(1, 0)).unwrap();
    of.trim().unwrap();
    assert_eq!(of.leaving.len(), 1);
    of.device.end_capture(StreamHandle(capturing)).expect("the capture is unharmed");
    of.trim().unwrap();
    assert_eq!(of.leaving.len(), 0);
}

static RELEASES: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn count(_context: *mut c_void) {
    RELEASES.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn a_filters_context_is_released_once_also_when_the_scope_is_refused() {
    let of = instance();
    // SAFETY: both functions look at nothing.
    let test = || unsafe { StreamTest::new(Some(is_stream), std::ptr::null_mut(), Some(count)) };
    assert_eq!(of.pool_begin(PoolId::DEFAULT, test()).unwrap_err().status, Status::Pool);
    assert_eq!(RELEASES.load(Ordering::Relaxed), 1);
    of.pool_begin(PoolId(1, 0), test()).unwrap();
    assert_eq!(RELEASES.load(Ordering::Relaxed), 1);
    of.pool_end(PoolId(1, 0)).unwrap();
    assert_eq!(RELEASES.load(Ordering::Relaxed), 2);
    assert_eq!(of.pool_end(PoolId(1, 0)).unwrap_err().status, Status::Pool);
}

#[test]
fn a_stream_that_was_destroyed_does_not_hold_a_pool_up() {
    let of = instance();
    let (s, gone) = (of.stream_create().unwrap(), of.stream_create().unwrap());
    let out = alloc(&of, MIB, s).unwrap();
    capture(&of, s, PoolId(1, 0), out, 1);
    of.device.stream_destroy(StreamHandle(gone)).unwrap();
    of.pool_release(PoolId(1, 0)).unwrap();
    of.empty_cache().unwrap();
    assert_eq!(of.leaving.len(), 0);
    let events = of.device.events_in_use();
    let again = of.device.stream_create(StreamKind::NonBlocking).unwrap();
    of.device.stream_destroy(again).unwrap();
    assert_eq!(of.device.events_in_use(), events);
}
