//! Memory: plain and virtual, what is allowed, what it costs, what it holds.
#![allow(clippy::unwrap_used, clippy::panic)]

use gpupool_device::{Address, Call, Device, Kernel, MemoryHandle, StreamHandle, StreamKind, Workbench, code};
use gpupool_sim_device::{CostModel, Placement, SimConfig, SimDevice};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;

fn device() -> SimDevice {
    SimDevice::new(SimConfig::default())
}

fn stream(d: &SimDevice) -> StreamHandle {
    d.stream_create(StreamKind::NonBlocking).unwrap()
}

fn word(d: &SimDevice, at: Address) -> u32 {
    u32::from_le_bytes(d.read_bytes(at, 4).unwrap().try_into().unwrap())
}

#[test]
fn memory_runs_out_exactly_at_its_capacity_and_comes_back() {
    let d = SimDevice::new(SimConfig::default().with_capacity(10 * MIB));
    let a = d.mem_alloc(6 * MIB).unwrap();
    let h = d.handle_create(2 * MIB).unwrap();
    assert_eq!(d.mem_alloc(3 * MIB).unwrap_err().code, code::OUT_OF_MEMORY, "3 MiB take 4");
    assert_eq!(d.mem_info().unwrap().free, 2 * MIB);
    let b = d.mem_alloc(1).unwrap();
    assert_eq!((d.mem_info().unwrap().free, d.memory_in_use()), (0, 10 * MIB));
    d.mem_free(a).unwrap();
    d.mem_free(b).unwrap();
    d.handle_release(h).unwrap();
    assert_eq!((d.memory_in_use(), d.peak_memory_in_use()), (0, 10 * MIB));
    assert_eq!(d.mem_alloc(0).unwrap_err().code, code::INVALID_VALUE);
    assert_eq!(d.mem_free(a).unwrap_err().code, code::INVALID_VALUE, "double free");
    assert_eq!(d.mem_free(b.offset(512)).unwrap_err().code, code::INVALID_VALUE, "interior address");
    d.set_capacity(MIB);
    assert!(d.mem_alloc(PAGE).unwrap_err().is_out_of_memory());
}

#[test]
fn virtual_memory_obeys_the_measured_rules() {
    let d = device();
    let invalid = |r: Result<(), gpupool_device::DriverError>| assert_eq!(r.unwrap_err().code, code::INVALID_VALUE);
    assert_eq!(d.address_reserve(PAGE + 1).unwrap_err().code, code::INVALID_VALUE);
    assert_eq!(d.handle_create(MIB).unwrap_err().code, code::INVALID_VALUE);
    let range = d.address_reserve(8 * PAGE).unwrap();
    assert_eq!(d.address_space_in_use(), 8 * PAGE);
    let (one, two) = (d.handle_create(PAGE).unwrap(), d.handle_create(2 * PAGE).unwrap());

    invalid(d.map(range, 2 * PAGE, one));
    invalid(d.map(range.offset(MIB), PAGE, one));
    invalid(d.map(range.offset(8 * PAGE), PAGE, one));
    invalid(d.map(range.offset(7 * PAGE), 2 * PAGE, two));
    invalid(d.map(range, PAGE, MemoryHandle(999)));
    d.map(range, PAGE, one).unwrap();
    invalid(d.map(range, PAGE, one));
    d.map(range.offset(4 * PAGE), PAGE, one).unwrap();
    d.map(range.offset(PAGE), 2 * PAGE, two).unwrap();

    invalid(d.unmap(range.offset(PAGE), PAGE));
    invalid(d.unmap(range.offset(2 * PAGE), PAGE));
    d.unmap(range.offset(5 * PAGE), PAGE).unwrap();
    invalid(d.unmap(range, 2 * PAGE));
    invalid(d.set_access(range, 4 * PAGE));
    d.set_access(range, 3 * PAGE).unwrap();

    d.handle_release(two).unwrap();
    invalid(d.handle_release(two));
    invalid(d.map(range.offset(6 * PAGE), 2 * PAGE, two));
    assert_eq!(d.memory_in_use(), 3 * PAGE, "a released handle lives while it is mapped");
    invalid(d.address_free(range, 8 * PAGE));
    d.unmap(range, 3 * PAGE).unwrap();
    assert_eq!(d.memory_in_use(), PAGE, "the other one still has an alias");
    d.unmap(range.offset(4 * PAGE), PAGE).unwrap();
    assert_eq!(d.memory_in_use(), PAGE, "a handle that is mapped nowhere waits for its release");
    d.handle_release(one).unwrap();
    invalid(d.address_free(range, 4 * PAGE));
    d.address_free(range, 8 * PAGE).unwrap();
    assert_eq!((d.memory_in_use(), d.address_space_in_use()), (0, 0));
    let block = d.mem_alloc(PAGE).unwrap();
    invalid(d.unmap(block, PAGE));
    invalid(d.set_access(block, PAGE));
}

#[test]
fn without_virtual_memory_its_calls_are_not_supported() {
    let d = SimDevice::new(SimConfig { virtual_memory: false, ..SimConfig::default() });
    assert!(!d.properties().virtual_memory);
    assert_eq!(d.address_reserve(PAGE).unwrap_err().code, code::NOT_SUPPORTED);
    assert_eq!(d.handle_create(PAGE).unwrap_err().code, code::NOT_SUPPORTED);
}

#[test]
fn calls_cost_what_was_measured() {
    let d = device();
    let cost = |call: &dyn Fn()| {
        let before = (d.driver_ns(), d.now());
        call();
        assert_eq!(d.now() - before.1, d.driver_ns() - before.0, "nothing waited");
        d.driver_ns() - before.0
    };
    let mut block = Address::NULL;
    for (mib, alloc, free, reserve, create, map, access, unmap, release, unreserve) in [
        (2, 31_700, 27_600, 500, 7_500, 700, 19_900, 13_700, 9_400, 400),
        (20, 36_100, 35_900, 600, 7_500, 600, 20_100, 13_600, 13_700, 500),
        (64, 35_900, 45_000, 2_000, 8_200, 600, 34_000, 21_000, 26_100, 1_600),
        (512, 70_300, 176_000, 2_200, 24_100, 800, 46_700, 25_300, 146_200, 1_700),
        (2048, 199_900, 590_000, 2_400, 26_200, 900, 84_000, 38_200, 535_000, 2_000),
    ] {
        let bytes = mib * MIB;
        assert_eq!(
            cost(&|| {
                d.mem_alloc(bytes).unwrap();
            }),
            alloc,
            "{mib}"
        );
        block = d.mem_alloc(bytes).unwrap();
        assert_eq!(cost(&|| d.mem_free(block).unwrap()), free, "{mib}");
        assert_eq!(
            cost(&|| {
                d.address_reserve(bytes).unwrap();
            }),
            reserve,
            "{mib}"
        );
        assert_eq!(
            cost(&|| {
                d.handle_create(bytes).unwrap();
            }),
            create,
            "{mib}"
        );
        let (range, handle) = (d.address_reserve(bytes).unwrap(), d.handle_create(bytes).unwrap());
        assert_eq!(cost(&|| d.map(range, bytes, handle).unwrap()), map, "{mib}");
        assert_eq!(cost(&|| d.set_access(range, bytes).unwrap()), access, "{mib}");
        assert_eq!(cost(&|| d.set_access(range, bytes).unwrap()), 270, "{mib}: again");
        let alias = d.address_reserve(bytes).unwrap();
        assert_eq!(cost(&|| d.map(alias, bytes, handle).unwrap()), 1_130, "{mib}: alias");
        assert_eq!(cost(&|| d.unmap(range, bytes).unwrap()), unmap, "{mib}");
        assert_eq!(cost(&|| d.handle_release(handle).unwrap()), release, "{mib}");
        assert_eq!(cost(&|| d.address_free(range, bytes).unwrap()), unreserve, "{mib}");
    }
    assert!(!block.is_null());
    let event = d.event_create().unwrap();
    let s = stream(&d);
    assert_eq!(cost(&|| d.event_record(event, s).unwrap()), 146);
    assert_eq!(
        cost(&|| {
            d.event_query(event).unwrap();
        }),
        135
    );
    assert_eq!(cost(&|| d.stream_wait_event(s, event).unwrap()), 110);
    assert_eq!(
        cost(&|| {
            d.capture_status(s).unwrap();
        }),
        20
    );
    assert_eq!(
        cost(&|| {
            d.mem_info().unwrap();
        }),
        4_900
    );
    let free = SimDevice::new(SimConfig::default().with_costs(CostModel::free()));
    free.mem_alloc(PAGE).unwrap();
    assert_eq!((free.driver_ns(), free.now(), free.calls(Call::MemAlloc)), (0, 0, 1));
}

#[test]
fn an_alias_shows_the_same_bytes_and_a_moved_handle_takes_them_along() {
    let d = device();
    let s = stream(&d);
    let range = d.address_reserve(4 * PAGE).unwrap();
    let (h, fresh) = (d.handle_create(PAGE).unwrap(), d.handle_create(PAGE).unwrap());
    let (a, b) = (range, range.offset(2 * PAGE));
    d.map(a, PAGE, h).unwrap();
    d.set_access(a, PAGE).unwrap();
    d.launch(s, Kernel::Fill { dst: a, bytes: PAGE, value: 7 }).unwrap();
    d.map(b, PAGE, h).unwrap();
    d.set_access(b, PAGE).unwrap();
    d.launch(s, Kernel::Add { dst: b, bytes: 8, value: 1 }).unwrap();
    d.stream_synchronize(s).unwrap();
    assert_eq!((word(&d, a), word(&d, b.offset(8))), (8, 7));
    d.unmap(a, PAGE).unwrap();
    assert!(d.read_bytes(a, 4).is_none());
    d.map(a, PAGE, fresh).unwrap();
    d.set_access(a, PAGE).unwrap();
    assert_eq!((word(&d, a), word(&d, b)), (0, 8), "new physical memory reads zero");
    assert_eq!(d.reports(), []);
}

#[test]
fn work_spans_mappings_and_bytes_can_be_poked() {
    let d = device();
    let s = stream(&d);
    let range = d.address_reserve(4 * PAGE).unwrap();
    for i in [1, 0, 3, 2] {
        let h = d.handle_create(PAGE).unwrap();
        d.map(range.offset(i * PAGE), PAGE, h).unwrap();
    }
    d.set_access(range, 4 * PAGE).unwrap();
    let near = range.offset(PAGE - 8);
    assert!(d.write_bytes(near, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]));
    d.launch(s, Kernel::Copy { dst: range.offset(3 * PAGE - 4), src: near, bytes: 16 }).unwrap();
    let mut got = [0; 13];
    d.read(s, range.offset(3 * PAGE - 4), &mut got).unwrap();
    assert_eq!(got, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 0]);
    assert!(!d.write_bytes(range.offset(4 * PAGE - 1), &[0, 0]));
    let free = Address(0x1000);
    assert_eq!(
        d.launch(s, Kernel::Fill { dst: range.offset(2), bytes: 4, value: 0 }).unwrap_err().code,
        code::INVALID_VALUE
    );
    let overlap = Kernel::Copy { dst: range, src: range.offset(4), bytes: 8 };
    assert_eq!(d.launch(s, overlap).unwrap_err().code, code::INVALID_VALUE);
    assert!(d.read_bytes(free, 1).is_none());
}

#[test]
fn the_checksum_kernel_tells_orders_apart() {
    let d = device();
    let s = stream(&d);
    let x = d.mem_alloc(PAGE).unwrap();
    d.write_bytes(x, &[1, 0, 0, 0, 2, 0, 0, 0]);
    d.launch(s, Kernel::Checksum { dst: x.offset(64), src: x, bytes: 8 }).unwrap();
    d.write_bytes(x.offset(16), &[2, 0, 0, 0, 1, 0, 0, 0]);
    d.launch(s, Kernel::Checksum { dst: x.offset(72), src: x.offset(16), bytes: 8 }).unwrap();
    let mut sums = [0; 16];
    d.read(s, x.offset(64), &mut sums).unwrap();
    assert_eq!(sums.map(u64::from), [5, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn without_contents_kernels_take_the_same_time() {
    let time = |contents| {
        let d = SimDevice::new(SimConfig { contents, ..SimConfig::default() });
        let s = stream(&d);
        let x = d.mem_alloc(64 * MIB).unwrap();
        d.launch(s, Kernel::Fill { dst: x, bytes: 64 * MIB, value: 1 }).unwrap();
        d.stream_synchronize(s).unwrap();
        (d.now(), word(&d, x))
    };
    let (with, without) = (time(true), time(false));
    assert_eq!((with.0, with.1, without.1), (without.0, 1, 0));
}

#[test]
fn segments_are_placed_where_they_were_told_to() {
    let at = |placement, n: u64| {
        let d = SimDevice::new(SimConfig::default().with_placement(placement));
        (0..n).map(|_| d.mem_alloc(PAGE).map(|a| a.0).map_err(|e| e.code)).collect::<Vec<_>>()
    };
    let up = at(Placement::Growing, 3);
    assert!(up.windows(2).all(|w| w[1].unwrap() == w[0].unwrap() + PAGE));
    let down = at(Placement::Falling, 3);
    assert!(down.windows(2).all(|w| w[1].unwrap() == w[0].unwrap() - PAGE));
    let script = [0x5000_0000_u64, 0x4000_0000].map(Address).to_vec();
    assert_eq!(at(Placement::Scripted(script), 3), [Ok(0x5000_0000), Ok(0x4000_0000), Ok(0x7000_0000_0000)]);
    let again = [0x5000_0000_u64, 0x5000_0000].map(Address).to_vec();
    assert_eq!(at(Placement::Scripted(again), 2)[1], Err(code::INVALID_VALUE));
}
