//! Snapshots: whatever is read, what it tells must come out, and it must make a trace or say why not.
#![no_main]

use gpupool_replay::trace::what_if;
use gpupool_snapshot::{Growth, Snapshot, Summary};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(snapshot) = Snapshot::read("fuzzed", data) else { return };
    let _ = Summary::of(&snapshot);
    let _ = Growth::between(&snapshot, &snapshot);
    let _ = what_if("fuzzed", &snapshot);
    let mut pickle = Vec::new();
    snapshot.write_pickle(&mut pickle).unwrap();
    Snapshot::read("again", &pickle[..]).unwrap();
});
