//! `gpupool inspect`: where the memory of a snapshot is, and what keeps it there.

use std::fs::File;
use std::path::Path;

use gpupool_snapshot::{Growth, Place, Snapshot, Summary};
use serde::Serialize;

use crate::Verdict;
use crate::args::Inspect;
use crate::failure::Failure;
use crate::output::{print, print_json, table};
use crate::units::{bytes, count, percent, signed_bytes};

/// Places that a table lists; the rest is summed up in words.
const MOST_PLACES: usize = 20;

/// What `--json` prints for one snapshot.
#[derive(Serialize)]
struct One<'a> {
    file: String,
    summary: &'a Summary,
}

/// What `--json` prints for two.
#[derive(Serialize)]
struct Two<'a> {
    before: One<'a>,
    after: One<'a>,
    growth: &'a Growth,
}

pub(crate) fn run(arguments: &Inspect) -> Result<Verdict, Failure> {
    if arguments.html.is_some() {
        return Err(Failure::Unavailable(
            "--html is not in this version; PyTorch's memory viewer opens the same files",
        ));
    }
    let first = read(&arguments.snapshot)?;
    let summary = Summary::of(&first);
    let named = |path: &Path| path.display().to_string();
    let Some(path) = &arguments.later else {
        if arguments.json {
            print_json(&One { file: named(&arguments.snapshot), summary: &summary })?;
        } else {
            print(&text(&summary))?;
        }
        return Ok(Verdict::Good);
    };
    let later = read(path)?;
    let (growth, later_summary) = (Growth::between(&first, &later), Summary::of(&later));
    if arguments.json {
        print_json(&Two {
            before: One { file: named(&arguments.snapshot), summary: &summary },
            after: One { file: named(path), summary: &later_summary },
            growth: &growth,
        })?;
    } else {
        print(&growth_text(&growth, &summary, &later_summary))?;
    }
    Ok(Verdict::Good)
}

fn read(path: &Path) -> Result<Snapshot, Failure> {
    let file = File::open(path).map_err(|error| Failure::Read { path: path.to_owned(), error })?;
    Ok(Snapshot::read(&path.display().to_string(), file)?)
}

fn text(summary: &Summary) -> String {
    let total = summary.total;
    if total.segments == 0 {
        return "The allocator held no memory.".to_owned();
    }
    let share = |part: u64| percent(part as f64 / total.reserved as f64);
    let mut text = format!(
        "{} reserved in {} segments\n  {:>12}  {:>7}  live, in {} blocks\n  {:>12}  {:>7}  freed, but some stream may still use it\n  \
         {:>12}  {:>7}  free; the longest run is {}\n\n",
        bytes(total.reserved),
        count(total.segments),
        bytes(total.live),
        share(total.live),
        count(total.live_blocks),
        bytes(total.pending),
        share(total.pending),
        bytes(total.free),
        share(total.free),
        bytes(summary.largest_free_run),
    );
    let header = ["pool", "stream", "part", "reserved", "live", "pending", "free", "longest free", "segments"];
    let mut rows = table(&header, 3);
    for bucket in summary.buckets.iter().take(MOST_PLACES) {
        let [pool, stream, part] = place(bucket.place);
        let amounts = bucket.amounts;
        rows.add_row([
            pool,
            stream,
            part,
            bytes(amounts.reserved),
            bytes(amounts.live),
            bytes(amounts.pending),
            bytes(amounts.free),
            bytes(bucket.largest_free_run),
            count(amounts.segments),
        ]);
    }
    text.push_str(&rows.trim_fmt());
    if summary.buckets.len() > MOST_PLACES {
        text.push_str(&format!("\nand {} smaller ones", summary.buckets.len() - MOST_PLACES));
    }
    text.push_str("\n\n");
    text.push_str(&advice(summary));
    text
}

/// What can be done about the free memory.
fn advice(summary: &Summary) -> String {
    let mut text = format!(
        "Emptying the cache gives back {} in {} wholly free segments (those of private pools once no graph holds them).\n\
         {} more is free in segments that something still uses.",
        bytes(summary.idle),
        count(summary.idle_segments),
        bytes(summary.free_in_use)
    );
    if summary.pinned.is_empty() {
        return text;
    }
    text.push_str("\n\nMostly free segments, and what keeps them:\n");
    let mut rows = table(&["segment", "pool", "stream", "kept by", "size", "free"], 4);
    for pinned in &summary.pinned {
        let [pool, stream, _] = place(pinned.place);
        let blocks: Vec<String> =
            pinned.largest.iter().map(|(address, size)| format!("{} at {address:#x}", bytes(*size))).collect();
        let more = pinned.blocks - pinned.largest.len() as u64;
        let more = if more == 0 { String::new() } else { format!("\nand {} more", count(more)) };
        rows.add_row([
            format!("{:#x}", pinned.address),
            pool,
            stream,
            format!("{}{more}", blocks.join("\n")),
            bytes(pinned.size),
            bytes(pinned.free),
        ]);
    }
    text.push_str(&rows.trim_fmt());
    text
}

fn growth_text(growth: &Growth, before: &Summary, after: &Summary) -> String {
    let mut rows = table(&["", "before", "after", "change"], 1);
    let (old, new, change) = (before.total, after.total, growth.total);
    for (what, old, new, change) in [
        ("reserved", old.reserved, new.reserved, change.reserved),
        ("live", old.live, new.live, change.live),
        ("pending", old.pending, new.pending, change.pending),
        ("free", old.free, new.free, change.free),
    ] {
        rows.add_row([what.to_owned(), bytes(old), bytes(new), signed_bytes(change)]);
    }
    let mut text = rows.trim_fmt();
    if growth.places.is_empty() && growth.sizes.is_empty() {
        text.push_str("\n\nNothing changed in any pool.");
        return text;
    }
    let mut rows = table(&["pool", "stream", "part", "reserved", "live", "pending", "free", "live blocks"], 3);
    for (at, change) in growth.places.iter().take(MOST_PLACES) {
        let [pool, stream, part] = place(*at);
        rows.add_row([
            pool,
            stream,
            part,
            signed_bytes(change.reserved),
            signed_bytes(change.live),
            signed_bytes(change.pending),
            signed_bytes(change.free),
            format!("{:+}", change.live_blocks),
        ]);
    }
    text.push_str("\n\nWhere, most grown first:\n");
    text.push_str(&rows.trim_fmt());
    if !growth.sizes.is_empty() {
        let mut rows = table(&["requested", "blocks before", "after", "grown by"], 0);
        for size in &growth.sizes {
            rows.add_row([
                bytes(size.requested),
                count(size.before),
                count(size.after),
                signed_bytes(size.grown_bytes),
            ]);
        }
        text.push_str("\n\nLive blocks that became more, by the size requested:\n");
        text.push_str(&rows.trim_fmt());
    }
    text
}

/// A place in three words. The device is told only where there are several.
fn place(place: Place) -> [String; 3] {
    let pool = match place.pool {
        (0, 0) => "default".to_owned(),
        (a, b) => format!("({a}, {b})"),
    };
    let pool = if place.device == 0 { pool } else { format!("{pool} of device {}", place.device) };
    let stream = place.stream.map_or_else(|| "any".to_owned(), |handle| format!("{handle:#x}"));
    [pool, stream, place.part.name().to_owned()]
}
