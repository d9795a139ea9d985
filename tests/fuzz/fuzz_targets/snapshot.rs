//! Whatever a file holds, reading it as a snapshot ends, and what is accepted can be summed up.
#![no_main]

use gpupool_snapshot::Snapshot;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = Snapshot::read("fuzzed", data);
});
