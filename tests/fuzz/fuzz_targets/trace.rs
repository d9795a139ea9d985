//! Whatever a file holds, reading it as a trace ends; and what is accepted can be replayed.
#![no_main]

use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use gpupool_allocator::Policy;
use gpupool_replay::replay::{Options, replay_simulated};
use gpupool_replay::trace::Trace;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((first, text)) = data.split_first() else { return };
    let raw = *first == b'R';
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    let packed = gzip.write_all(text).and_then(|()| gzip.finish());
    let input = if raw { text.to_vec() } else { packed.unwrap_or_default() };
    if let Ok(trace) = Trace::parse("fuzzed", &input[..])
        && trace.events.len() < 2_000
    {
        for policy in [Policy::Segments, Policy::Torch215] {
            let mut options = Options::new(policy);
            options.timed = false;
            let _ = replay_simulated(&trace, &options, &mut |_| {});
        }
    }
});
