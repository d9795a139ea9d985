//! Whatever a file holds, reading it as a conformance file ends; and what is accepted can be run.
#![no_main]

use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use gpupool_replay::conform::{Script, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((first, text)) = data.split_first() else { return };
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    let packed = gzip.write_all(text).and_then(|()| gzip.finish());
    let input = if *first == b'R' { text.to_vec() } else { packed.unwrap_or_default() };
    if let Ok(script) = Script::parse("fuzzed", &input[..]) {
        let _ = run(&script, "fuzzed", |_| {});
    }
});
