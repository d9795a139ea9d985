//! Pickles: as `snapshot`, but the two bytes that say that it is one are given, so that the fuzzer works on the opcodes.
#![no_main]

use gpupool_replay::trace::what_if;
use gpupool_snapshot::{Snapshot, Summary};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(snapshot) = Snapshot::read("fuzzed", &[&[0x80, 4], data].concat()[..]) else { return };
    let _ = Summary::of(&snapshot);
    let _ = what_if("fuzzed", &snapshot);
    let mut json = Vec::new();
    snapshot.write_json(&mut json).unwrap();
    Snapshot::read("again", &json[..]).unwrap();
});
