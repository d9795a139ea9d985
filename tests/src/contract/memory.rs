//! Plain and virtual memory.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use gpupool_device::{Address, Call, Device, Kernel, MemoryHandle, Workbench, code};

use super::{
    Check, PAGE, Subject, add, check, code_of, copy, counting, holding, mapped, set, stream, unmapped, word, words,
    zeroed,
};

pub(super) fn checks<S: Subject>() -> Vec<Check<S>> {
    vec![
        check("properties are those of a GPU", properties),
        check("plain memory is aligned, and what is freed is back", plain_memory),
        check("plain memory refuses what makes no sense", plain_refusals),
        check("addresses are reserved and given back as they were", reservations),
        zeroed("a handle is created zeroed and mapped whole", handles),
        zeroed("a handle can be mapped twice, and both see the same", aliases),
        zeroed("aliases keep the order of a stream", alias_order),
        check("unmapping is by whole mappings", unmapping),
        counting("what else was asked of a driver about mappings", asked),
        counting("a released handle keeps its memory while it is mapped", released),
        check("access is set over several mappings and again", access),
        holding("a plain free waits for the device, giving virtual memory back does not", waits),
        check("the clock does not go back", clock),
        check("checksums tell order from contents", checksums),
        check("kernels refuse ranges that make no sense", kernel_ranges),
        zeroed("zeroed memory is zeroed again after it was used", zeroed_again),
        check("pinned memory is copied to and from, by parts", pinned),
        zeroed("pinned memory refuses what makes no sense", pinned_refusals),
        zeroed("contents survive new memory at their addresses", moved_and_back),
    ]
}

fn properties<S: Subject>(s: &S) {
    let d = s.device();
    let p = d.properties();
    assert!(p.virtual_memory && p.granularity == PAGE && !p.name.is_empty());
    let info = d.mem_info().unwrap();
    assert!(info.free <= info.total && info.free > 1 << 30);
    assert!(info.total <= p.total_memory, "{} of {}", info.total, p.total_memory);
    assert_eq!(d.ordinal(), 0);
}

fn plain_memory<S: Subject>(s: &S) {
    let d = s.device();
    let (a, b) = (d.mem_alloc(1).unwrap(), d.mem_alloc(1000).unwrap());
    assert!(a.0.is_multiple_of(512) && b.0.is_multiple_of(512) && a != b);
    let before = d.mem_info().unwrap().free;
    let big = d.mem_alloc(64 << 20).unwrap();
    assert_eq!(before - d.mem_info().unwrap().free, 64 << 20);
    d.mem_free(big).unwrap();
    assert_eq!(d.mem_info().unwrap().free, before);
    d.mem_free(a).unwrap();
    d.mem_free(b).unwrap();
}

fn plain_refusals<S: Subject>(s: &S) {
    let d = s.device();
    assert_eq!(code_of(d.mem_alloc(0)), code::INVALID_VALUE);
    let error = d.mem_alloc(1 << 45).unwrap_err();
    assert_eq!((error.call, error.code), (Call::MemAlloc, code::OUT_OF_MEMORY));
    let a = d.mem_alloc(4096).unwrap();
    assert_eq!(code_of(d.mem_free(a.offset(512))), code::INVALID_VALUE, "inside a block");
    d.mem_free(a).unwrap();
    assert_eq!(code_of(d.mem_free(a)), code::INVALID_VALUE, "twice");
    let v = mapped(d, PAGE);
    assert_eq!(code_of(d.mem_free(v)), code::INVALID_VALUE, "virtual memory");
    unmapped(d, v, PAGE);
}

fn reservations<S: Subject>(s: &S) {
    let d = s.device();
    assert_eq!(code_of(d.address_reserve(PAGE - 1)), code::INVALID_VALUE);
    assert_eq!(code_of(d.address_reserve(0)), code::INVALID_VALUE);
    let at = d.address_reserve(4 * PAGE).unwrap();
    assert!(at.0.is_multiple_of(PAGE));
    let free = d.mem_info().unwrap().free;
    let more = d.address_reserve(1 << 40).unwrap();
    assert_eq!(d.mem_info().unwrap().free, free, "addresses are not memory");
    d.address_free(more, 1 << 40).unwrap();
    assert_eq!(code_of(d.address_free(at, 2 * PAGE)), code::INVALID_VALUE, "a part");
    assert_eq!(code_of(d.address_free(at.offset(PAGE), PAGE)), code::INVALID_VALUE, "a part inside");
    d.address_free(at, 4 * PAGE).unwrap();
    assert_eq!(code_of(d.address_free(at, 4 * PAGE)), code::INVALID_VALUE, "twice");
}

fn handles<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    assert_eq!(code_of(d.handle_create(PAGE + 4096)), code::INVALID_VALUE);
    assert_eq!(code_of(d.handle_create(0)), code::INVALID_VALUE);
    assert_eq!(code_of(d.handle_create(1 << 45)), code::OUT_OF_MEMORY);
    assert_eq!(code_of(d.handle_release(MemoryHandle(u64::MAX))), code::INVALID_VALUE);
    let (at, h) = (d.address_reserve(4 * PAGE).unwrap(), d.handle_create(2 * PAGE).unwrap());
    assert_eq!(code_of(d.map(at, PAGE, h)), code::INVALID_VALUE, "a part of a handle");
    assert_eq!(code_of(d.map(Address(PAGE), 2 * PAGE, h)), code::INVALID_VALUE, "addresses nobody reserved");
    d.map(at, 2 * PAGE, h).unwrap();
    let other = d.handle_create(2 * PAGE).unwrap();
    assert_eq!(code_of(d.map(at, 2 * PAGE, other)), code::INVALID_VALUE, "mapped already");
    assert_eq!(code_of(d.map(at.offset(PAGE), 2 * PAGE, other)), code::INVALID_VALUE, "half of it mapped already");
    assert_eq!(code_of(d.set_access(at.offset(2 * PAGE), PAGE)), code::INVALID_VALUE, "nothing mapped");
    d.set_access(at, 2 * PAGE).unwrap();
    assert_eq!(words(d, st, at.offset(2 * PAGE - 64), 16), [0; 16]);
    assert_eq!(code_of(d.address_free(at, 4 * PAGE)), code::INVALID_VALUE, "something is mapped");
    d.unmap(at, 2 * PAGE).unwrap();
    d.address_free(at, 4 * PAGE).unwrap();
    d.handle_release(h).unwrap();
    d.handle_release(other).unwrap();
    assert_eq!(code_of(d.handle_release(h)), code::INVALID_VALUE, "twice");
}

fn aliases<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let (at, h) = (d.address_reserve(2 * PAGE).unwrap(), d.handle_create(PAGE).unwrap());
    let other = at.offset(PAGE);
    d.map(at, PAGE, h).unwrap();
    d.map(other, PAGE, h).unwrap();
    d.set_access(at, 2 * PAGE).unwrap();
    d.launch(st, set(at.offset(8), 7)).unwrap();
    d.launch(st, add(other.offset(8), 1)).unwrap();
    assert_eq!(word(d, st, at.offset(8)), 8);
    d.unmap(at, PAGE).unwrap();
    assert_eq!(word(d, st, other.offset(8)), 8, "the other mapping stays");
    d.unmap(other, PAGE).unwrap();
    d.handle_release(h).unwrap();
    d.address_free(at, 2 * PAGE).unwrap();
}

fn alias_order<S: Subject>(s: &S) {
    const BYTES: u64 = 64 << 20;
    let (d, st) = (s.device(), stream(s.device()));
    let (at, h) = (d.address_reserve(2 * BYTES).unwrap(), d.handle_create(BYTES).unwrap());
    let (alias, sums) = (at.offset(BYTES), mapped(d, PAGE));
    d.map(at, BYTES, h).unwrap();
    d.set_access(at, BYTES).unwrap();
    for round in 0..20 {
        d.launch(st, Kernel::Fill { dst: at, bytes: BYTES, value: round }).unwrap();
        d.map(alias, BYTES, h).unwrap();
        d.set_access(alias, BYTES).unwrap();
        d.launch(st, copy(sums, alias.offset(BYTES - 4))).unwrap();
        d.launch(st, Kernel::Add { dst: alias, bytes: BYTES, value: 100 }).unwrap();
        d.launch(st, copy(sums.offset(4), at.offset(BYTES - 4))).unwrap();
        assert_eq!(words(d, st, sums, 2), [round, round + 100]);
        d.unmap(alias, BYTES).unwrap();
    }
    d.unmap(at, BYTES).unwrap();
    d.handle_release(h).unwrap();
    d.address_free(at, 2 * BYTES).unwrap();
    unmapped(d, sums, PAGE);
}

fn unmapping<S: Subject>(s: &S) {
    let d = s.device();
    let at = d.address_reserve(4 * PAGE).unwrap();
    let handles = [2 * PAGE, PAGE, PAGE].map(|bytes| d.handle_create(bytes).unwrap());
    d.map(at, 2 * PAGE, handles[0]).unwrap();
    d.map(at.offset(2 * PAGE), PAGE, handles[1]).unwrap();
    assert_eq!(code_of(d.unmap(at, PAGE)), code::INVALID_VALUE, "a part");
    assert_eq!(code_of(d.unmap(at.offset(PAGE), 2 * PAGE)), code::INVALID_VALUE, "from inside");
    d.unmap(at.offset(3 * PAGE), PAGE).unwrap();
    d.unmap(at, 3 * PAGE).unwrap();
    d.map(at.offset(PAGE), PAGE, handles[2]).unwrap();
    d.unmap(at.offset(PAGE), PAGE).unwrap();
    handles.iter().for_each(|h| d.handle_release(*h).unwrap());
    d.address_free(at, 4 * PAGE).unwrap();
}

fn released<S: Subject>(s: &S) {
    const BYTES: u64 = 32 << 20;
    let (d, st) = (s.device(), stream(s.device()));
    let (at, before) = (d.address_reserve(BYTES).unwrap(), d.mem_info().unwrap().free);
    let h = d.handle_create(BYTES).unwrap();
    assert_eq!(before - d.mem_info().unwrap().free, BYTES);
    d.map(at, BYTES, h).unwrap();
    d.set_access(at, BYTES).unwrap();
    d.handle_release(h).unwrap();
    assert_eq!(before - d.mem_info().unwrap().free, BYTES, "still mapped");
    d.launch(st, set(at, 3)).unwrap();
    assert_eq!(word(d, st, at), 3);
    d.unmap(at, BYTES).unwrap();
    assert_eq!(d.mem_info().unwrap().free, before);
    d.address_free(at, BYTES).unwrap();
}

fn access<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let at = d.address_reserve(3 * PAGE).unwrap();
    for page in 0..3 {
        let h = d.handle_create(PAGE).unwrap();
        d.map(at.offset(page * PAGE), PAGE, h).unwrap();
        d.handle_release(h).unwrap();
    }
    d.set_access(at.offset(PAGE), PAGE).unwrap();
    d.set_access(at, 3 * PAGE).unwrap();
    d.set_access(at, 3 * PAGE).unwrap();
    d.launch(st, Kernel::Fill { dst: at, bytes: 3 * PAGE, value: 9 }).unwrap();
    assert_eq!([0, PAGE, 3 * PAGE - 4].map(|o| word(d, st, at.offset(o))), [9; 3]);
    d.unmap(at, 3 * PAGE).unwrap();
    d.address_free(at, 3 * PAGE).unwrap();
}

fn waits<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let (unused, block, gate) = (mapped(d, PAGE), d.mem_alloc(PAGE).unwrap(), d.gate_create().unwrap());
    d.launch(st, Kernel::Wait { gate }).unwrap();
    // None of these waits, or the gate would never be opened.
    let grown = mapped(d, PAGE);
    unmapped(d, grown, PAGE);
    unmapped(d, unused, PAGE);
    let plain = d.mem_alloc(PAGE).unwrap();
    d.mem_info().unwrap();
    assert!(!s.stream_query(st).unwrap());
    if S::REAL {
        let opened = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let freeing = scope.spawn(|| {
                d.mem_free(block).unwrap();
                opened.load(SeqCst)
            });
            opened.store(true, SeqCst);
            d.gate_open(gate).unwrap();
            assert!(freeing.join().unwrap(), "the free came back before the gate was open");
        });
    } else {
        assert_eq!(code_of(d.mem_free(block)), code::WAIT_NEVER_ENDS);
        d.gate_open(gate).unwrap();
        d.mem_free(block).unwrap();
    }
    assert!(s.stream_query(st).unwrap());
    d.mem_free(plain).unwrap();
}

fn clock<S: Subject>(s: &S) {
    let d = s.device();
    let mut last = d.now();
    for _ in 0..100 {
        d.mem_info().unwrap();
        let now = d.now();
        assert!(now >= last);
        last = now;
    }
}

fn checksums<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let at = mapped(d, PAGE);
    let sum = |bytes: u64| {
        let dst = at.offset(PAGE - 4096);
        d.launch(st, Kernel::Checksum { dst, src: at, bytes }).unwrap();
        let w = words(d, st, dst, 2);
        u64::from(w[0]) | u64::from(w[1]) << 32
    };
    let expected = |words: u64, value: u64| (1..=words).map(|i| i * value).fold(0, u64::wrapping_add);
    for words in [0, 1, 5, 1023, 1024, 1025, 9000, 100_000] {
        d.launch(st, Kernel::Fill { dst: at, bytes: words * 4, value: 0xdead_beef }).unwrap();
        assert_eq!(sum(words * 4), expected(words, 0xdead_beef), "{words} words");
    }
    d.launch(st, Kernel::Fill { dst: at, bytes: 400, value: 1 }).unwrap();
    d.launch(st, set(at.offset(40), 5)).unwrap();
    let one = sum(400);
    d.launch(st, set(at.offset(40), 1)).unwrap();
    d.launch(st, set(at.offset(44), 5)).unwrap();
    assert_eq!((one, sum(400)), (5050 + 44, 5050 + 48));
    unmapped(d, at, PAGE);
}

fn kernel_ranges<S: Subject>(s: &S) {
    let (d, st, x) = (s.device(), stream(s.device()), super::plain(s.device()));
    let bad = [
        Kernel::Fill { dst: x.offset(1), bytes: 4, value: 0 },
        Kernel::Fill { dst: x, bytes: 5, value: 0 },
        Kernel::Copy { dst: x, src: x.offset(4), bytes: 8 },
        Kernel::Checksum { dst: x, src: x, bytes: 4 },
    ];
    for kernel in bad {
        assert_eq!(code_of(d.launch(st, kernel)), code::INVALID_VALUE, "{kernel:?}");
    }
    d.launch(st, Kernel::Fill { dst: x, bytes: 0, value: 0 }).unwrap();
    assert_eq!(code_of(d.launch(gpupool_device::StreamHandle(0x7777_7770), set(x, 1))), code::INVALID_HANDLE);
    assert_eq!(code_of(d.launch(st, Kernel::Wait { gate: gpupool_device::Gate(99_999) })), code::INVALID_HANDLE);
    assert_eq!(code_of(d.gate_open(gpupool_device::Gate(99_999))), code::INVALID_HANDLE);
    d.mem_free(x).unwrap();
}

fn zeroed_again<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    for _ in 0..4 {
        let at = mapped(d, 16 * PAGE);
        d.launch(st, Kernel::Checksum { dst: at, src: at.offset(PAGE), bytes: 15 * PAGE }).unwrap();
        assert_eq!(words(d, st, at, 2), [0, 0]);
        d.launch(st, Kernel::Fill { dst: at, bytes: 16 * PAGE, value: 0xffff_ffff }).unwrap();
        d.stream_synchronize(st).unwrap();
        unmapped(d, at, 16 * PAGE);
    }
}

/// Ranges with holes, and what each call on them gives: asked of an H200 first, then written down.
fn asked<S: Subject>(s: &S) {
    let d = s.device();
    let mut found = Vec::new();
    let at = d.address_reserve(8 * PAGE).unwrap();
    let page = |n: u64| at.offset(n * PAGE);
    let map = |n: u64| {
        let h = d.handle_create(PAGE).unwrap();
        d.map(page(n), PAGE, h).unwrap();
        d.handle_release(h).unwrap();
    };
    let before = d.mem_info().unwrap().free;
    // Page 1 and page 3 are mapped.
    map(1);
    map(3);
    found.push(("access over a mapping and a hole", code_of(d.set_access(page(1), 2 * PAGE))));
    found.push(("access over a hole and a mapping", code_of(d.set_access(page(0), 2 * PAGE))));
    found.push(("access of a part of a mapping", code_of(d.set_access(page(1), PAGE / 2))));
    found.push(("unmap nothing, in a reservation", code_of(d.unmap(page(5), PAGE))));
    found.push(("unmap nothing, 0 bytes", code_of(d.unmap(page(5), 0))));
    found.push(("unmap nothing, half a page", code_of(d.unmap(page(5), PAGE / 2))));
    found.push(("unmap beyond a reservation", code_of(d.unmap(page(7), 2 * PAGE))));
    found.push(("unmap where nothing is reserved", code_of(d.unmap(Address(PAGE), PAGE))));
    found.push(("unmap two mappings and the hole between", code_of(d.unmap(page(1), 3 * PAGE))));
    found.push(("memory is back after it", u32::from(d.mem_info().unwrap().free == before)));
    map(2);
    found.push(("unmap a hole, a mapping and a hole", code_of(d.unmap(at, 8 * PAGE))));
    found.push(("memory is back after that", u32::from(d.mem_info().unwrap().free == before)));
    found.push(("unmap plain memory", {
        let plain = d.mem_alloc(PAGE).unwrap();
        let code = code_of(d.unmap(plain, PAGE));
        d.mem_free(plain).unwrap();
        code
    }));
    let expected = [1, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1];
    let wrong: Vec<_> = found.iter().zip(expected).filter(|((_, code), expected)| code != expected).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    d.unmap(at, 8 * PAGE).unwrap();
    d.address_free(at, 8 * PAGE).unwrap();
}

fn pinned<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let (a, b) = (mapped(d, PAGE), mapped(d, PAGE));
    let host = d.host_alloc(2 * PAGE).unwrap();
    d.launch(st, Kernel::Fill { dst: a, bytes: PAGE, value: 7 }).unwrap();
    d.launch(st, Kernel::Add { dst: a.offset(PAGE / 2), bytes: PAGE / 2, value: 1 }).unwrap();
    d.stream_synchronize(st).unwrap();
    d.copy_to_host(host, PAGE, a, PAGE).unwrap();
    // The halves change places.
    d.copy_from_host(b, host, PAGE + PAGE / 2, PAGE / 2).unwrap();
    d.copy_from_host(b.offset(PAGE / 2), host, PAGE, PAGE / 2).unwrap();
    assert_eq!(words(d, st, b.offset(PAGE / 2 - 8), 4), [8, 8, 7, 7]);
    assert_eq!(words(d, st, b.offset(PAGE - 8), 2), [7, 7]);
    d.host_free(host).unwrap();
    unmapped(d, a, PAGE);
    unmapped(d, b, PAGE);
}

fn pinned_refusals<S: Subject>(s: &S) {
    let d = s.device();
    let a = mapped(d, PAGE);
    assert_eq!(code_of(d.host_alloc(0)), code::INVALID_VALUE);
    let host = d.host_alloc(4096).unwrap();
    for (offset, bytes) in [(0, 0), (0, 8192), (4096, 4), (u64::MAX - 3, 8)] {
        assert_eq!(code_of(d.copy_to_host(host, offset, a, bytes)), code::INVALID_VALUE, "{offset} {bytes}");
        assert_eq!(code_of(d.copy_from_host(a, host, offset, bytes)), code::INVALID_VALUE, "{offset} {bytes}");
    }
    d.copy_to_host(host, 4092, a, 4).unwrap();
    d.host_free(host).unwrap();
    assert_eq!(code_of(d.host_free(host)), code::INVALID_VALUE, "twice");
    assert_eq!(code_of(d.copy_to_host(host, 0, a, 4)), code::INVALID_VALUE, "given back");
    unmapped(d, a, PAGE);
}

/// What a suspension does: memory leaves its addresses and other memory comes there.
fn moved_and_back<S: Subject>(s: &S) {
    let (d, st) = (s.device(), stream(s.device()));
    let (at, first) = (d.address_reserve(4 * PAGE).unwrap(), d.handle_create(2 * PAGE).unwrap());
    d.map(at, 2 * PAGE, first).unwrap();
    d.set_access(at, 2 * PAGE).unwrap();
    d.launch(st, Kernel::Fill { dst: at, bytes: 2 * PAGE, value: 11 }).unwrap();
    d.stream_synchronize(st).unwrap();
    let host = d.host_alloc(2 * PAGE).unwrap();
    d.copy_to_host(host, 0, at, 2 * PAGE).unwrap();
    d.unmap(at, 2 * PAGE).unwrap();
    d.handle_release(first).unwrap();
    let second = d.handle_create(4 * PAGE).unwrap();
    d.map(at, 4 * PAGE, second).unwrap();
    d.set_access(at, 4 * PAGE).unwrap();
    d.copy_from_host(at, host, 0, 2 * PAGE).unwrap();
    d.launch(st, Kernel::Add { dst: at, bytes: 4 * PAGE, value: 1 }).unwrap();
    assert_eq!(words(d, st, at.offset(2 * PAGE - 8), 4), [12, 12, 1, 1]);
    d.host_free(host).unwrap();
    d.unmap(at, 4 * PAGE).unwrap();
    d.handle_release(second).unwrap();
    d.address_free(at, 4 * PAGE).unwrap();
}
