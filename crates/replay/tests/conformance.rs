//! The allocator decides as PyTorch's does: every operation of every recorded file, compared. One test a file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::path::Path;

use gpupool_replay::conform::{Outcome, Script, run};

fn check(name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/conform").join(format!("{name}.jsonl.gz"));
    let script = Script::read(&path).unwrap();
    let Outcome { ops, matched, first_mismatch } = run(&script, name, |_| {}).unwrap();
    if let Some(mismatch) = first_mismatch {
        panic!(
            "{name}: op {} of {ops} ({}):\n expected {}\n got      {}",
            mismatch.op, mismatch.name, mismatch.expected, mismatch.got
        );
    }
    assert!(ops > 200 && matched == ops);
}

macro_rules! files {
    ($($test:ident => $name:literal,)*) => {
        $(#[test] fn $test() { check($name); })*

        #[test]
        fn no_file_is_left_out() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/conform");
            assert_eq!(std::fs::read_dir(folder).unwrap().count(), [$($name),*].len());
        }
    };
}

files! {
    torch211_graphs_1 => "torch211-graphs-1",
    torch211_graphs_3 => "torch211-graphs-3",
    torch211_huge_1 => "torch211-huge-1",
    torch211_huge_3 => "torch211-huge-3",
    torch211_large_1 => "torch211-large-1",
    torch211_large_3 => "torch211-large-3",
    torch211_mix_1 => "torch211-mix-1",
    torch211_mix_3 => "torch211-mix-3",
    torch211_mix_max_split_size_mb_5 => "torch211-mix-max_split_size_mb-5",
    torch211_mix_roundup_power2_divisions_5 => "torch211-mix-roundup_power2_divisions-5",
    torch211_small_1 => "torch211-small-1",
    torch211_small_3 => "torch211-small-3",
    torch215_plain_9000 => "torch215-plain-9000",
    torch215_plain_9001 => "torch215-plain-9001",
    torch215_plain_9002 => "torch215-plain-9002",
    torch215_plain_9003 => "torch215-plain-9003",
    torch215_plain_9004 => "torch215-plain-9004",
    torch215_plain_9005 => "torch215-plain-9005",
    torch215_plain_9006 => "torch215-plain-9006",
    torch215_pools_9000 => "torch215-pools-9000",
    torch215_pools_9001 => "torch215-pools-9001",
    torch215_pools_9002 => "torch215-pools-9002",
    torch215_pools_9003 => "torch215-pools-9003",
    torch215_pools_9004 => "torch215-pools-9004",
    torch215_pools_9005 => "torch215-pools-9005",
    torch215_pools_9006 => "torch215-pools-9006",
    torch215_pools_9007 => "torch215-pools-9007",
}
