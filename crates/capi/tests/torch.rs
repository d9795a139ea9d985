//! The functions that PyTorch calls, in the order in which it calls them, on two simulated devices.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

use gpupool_capi::abi::bench::gpupool_bench_stream_create;
use gpupool_capi::abi::pools::Pool;
use gpupool_capi::abi::state::gpupool_stat;
use gpupool_capi::status::{Status, gpupool_last_error, gpupool_last_status};
use gpupool_capi::torch::*;

fn figure(allocator: u64, name: &CStr) -> i64 {
    let mut value = -1;
    // SAFETY: a C string and a variable of ours.
    assert_eq!(unsafe { gpupool_stat(allocator, name.as_ptr(), &mut value) }, Status::Ok);
    value
}

fn malloc(bytes: usize, device: i32, stream: *mut c_void) -> *mut c_void {
    // SAFETY: streams of a simulated device are looked up.
    unsafe { gpupool_torch_malloc(bytes, device, stream) }
}

/// One test, since the functions work on one state of the process.
#[test]
fn pytorchs_calls_are_served_on_every_device_and_stream() {
    // SAFETY: C strings.
    unsafe {
        assert_eq!(gpupool_torch_configure(c"rocm".as_ptr(), null_mut()), Status::InvalidArgument);
        assert_eq!(gpupool_torch_configure(c"sim".as_ptr(), c"nonsense".as_ptr()), Status::InvalidArgument);
        assert_eq!(gpupool_torch_configure(c"sim".as_ptr(), c"memory_limit=1GiB".as_ptr()), Status::Ok);
    }
    gpupool_torch_init(2);
    let mut allocators = [0; 2];
    for (device, allocator) in allocators.iter_mut().enumerate() {
        // SAFETY: a variable of ours.
        assert_eq!(unsafe { gpupool_torch_allocator(device as i32, allocator) }, Status::Ok);
    }
    // SAFETY: C strings.
    let late = unsafe { gpupool_torch_configure(c"sim".as_ptr(), null_mut()) };
    assert_eq!(late, Status::InvalidArgument);

    let mut stream = null_mut();
    // SAFETY: a variable of ours.
    assert_eq!(unsafe { gpupool_bench_stream_create(allocators[1], &mut stream) }, Status::Ok);
    assert!(malloc(0, 1, stream).is_null());
    // SAFETY: streams of a simulated device are looked up.
    unsafe { gpupool_torch_record_stream(null_mut(), stream) };
    gpupool_torch_free(null_mut(), 0, 1, stream);
    assert_eq!(gpupool_last_status(), Status::InvalidArgument, "nothing failed since the configuration");
    let blocks =
        [(0, null_mut()), (1, null_mut()), (1, stream)].map(|(device, s)| (malloc(3 << 20, device, s), device, s));
    assert!(blocks.iter().all(|(p, ..)| !p.is_null()));
    let name = c"allocation.all.current";
    assert_eq!(allocators.map(|a| figure(a, name)), [1, 2]);

    let (block, ..) = blocks[2];
    let mut bytes = 0;
    // SAFETY: a variable of ours; streams of a simulated device are looked up.
    unsafe {
        let inside = block.byte_add(512);
        let base = gpupool_torch_base_alloc(inside, &mut bytes);
        assert!(base <= inside && base.byte_add(bytes) > inside);
        let foreign = 0x10 as *mut c_void;
        assert_eq!(gpupool_torch_base_alloc(foreign, null_mut()), foreign);
        gpupool_torch_record_stream(block, null_mut());
    }
    for (p, device, s) in blocks {
        gpupool_torch_free(p, 3 << 20, device, s);
    }
    assert_eq!(allocators.map(|a| figure(a, name)), [0, 0]);
    assert_eq!(gpupool_last_status(), Status::InvalidArgument, "nothing failed since the configuration");

    // A second free, and a free on another device than the block's, change nothing.
    gpupool_torch_free(block, 3 << 20, 1, stream);
    assert_eq!(gpupool_last_status(), Status::NotLive);
    let block = malloc(1 << 20, 0, null_mut());
    gpupool_torch_free(block, 1 << 20, 1, null_mut());
    assert_eq!(allocators.map(|a| figure(a, name)), [1, 0]);
    gpupool_torch_free(block, 1 << 20, 0, null_mut());

    // Out of memory is null, and says what there was.
    assert!(malloc(2 << 30, 0, null_mut()).is_null());
    assert_eq!(gpupool_last_status(), Status::OutOfMemory);
    // SAFETY: the last error of this thread.
    let text = unsafe { CStr::from_ptr(gpupool_last_error()) }.to_str().unwrap().to_lowercase();
    assert!(text.contains("out of memory"), "{text}");
    assert!(malloc(1, 2, null_mut()).is_null());
    assert_eq!(gpupool_last_status(), Status::Unavailable);
    assert!(malloc(1, -1, null_mut()).is_null());
    gpupool_torch_memory_fraction(0.25, 0);

    // The call order of torch.cuda.graph, with nothing captured.
    let pool = Pool { capture: 1, user: 0 };
    gpupool_torch_reset();
    // SAFETY: no filter.
    assert_eq!(unsafe { gpupool_torch_begin_allocate_to_pool(0, pool, None, null_mut(), None) }, Status::Ok);
    gpupool_torch_end_allocate_to_pool(0, pool);
    gpupool_torch_release_pool(0, pool);
    gpupool_torch_reset();
    assert_eq!(allocators.map(|a| figure(a, c"reserved_bytes.all.current")), [0, 0]);
}
