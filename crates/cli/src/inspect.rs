//! `gpupool inspect`: where the memory of a snapshot is, and what keeps it there.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use gpupool_snapshot::{Advice, Growth, Owned, Place, Snapshot, Summary, write_page};
use serde::Serialize;

use crate::Verdict;
use crate::args::Inspect;
use crate::failure::Failure;
use crate::output::{print, print_json, table, write_others};
use crate::units::{bytes, count, percent, shortfall, signed_bytes};

/// Places that a table lists; the rest is summed up in words.
const MOST_PLACES: usize = 20;
/// Lines of other lists.
const MOST_LINES: usize = 8;

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
    if (arguments.html.is_some() || arguments.rewritten.is_some()) && arguments.later.is_some() {
        return Err(Failure::Usage("--html and --snapshot take one snapshot"));
    }
    write_others(&[&arguments.html, &arguments.rewritten], std::slice::from_ref(&arguments.snapshot))?;
    let first = read(&arguments.snapshot)?;
    let summary = Summary::of(&first);
    if let Some(path) = &arguments.html {
        page(path, &first, &summary, &arguments.snapshot.display().to_string())?;
    }
    if let Some(path) = &arguments.rewritten {
        write_snapshot(path, &first)?;
    }
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

/// Writes `snapshot`: as a pickle if the file's name says so, else as JSON.
pub(crate) fn write_snapshot(path: &Path, snapshot: &Snapshot) -> Result<(), Failure> {
    let pickle = path.extension().is_some_and(|extension| extension == "pickle" || extension == "pkl");
    let write = File::create(path)
        .map(BufWriter::new)
        .and_then(|file| if pickle { snapshot.write_pickle(file) } else { snapshot.write_json(file) });
    write.map_err(|error| Failure::Write { path: path.to_owned(), error })
}

/// Writes a page that shows `snapshot`.
pub(crate) fn page(path: &Path, snapshot: &Snapshot, summary: &Summary, title: &str) -> Result<(), Failure> {
    let advice = summary.advice.iter().map(|advice| (advice.bytes(), advice_text(advice))).collect();
    let write = File::create(path).and_then(|file| write_page(snapshot, title, advice, BufWriter::new(file)));
    write.map_err(|error| Failure::Write { path: path.to_owned(), error })
}

fn text(summary: &Summary) -> String {
    let total = summary.total;
    if total.segments == 0 {
        return format!("The allocator held no memory.\n\n{}", details(summary));
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
    text.push_str(&details(summary));
    text
}

/// Where free memory lies, whose live memory is, when most was live, and what would help.
fn details(summary: &Summary) -> String {
    let mut text = String::new();
    if summary.by_segment_size.len() > 1 {
        let mut rows = table(&["segments of", "reserved", "live", "pending", "free", "segments"], 0);
        for size in summary.by_segment_size.iter().take(MOST_LINES) {
            let amounts = size.amounts;
            rows.add_row([
                bytes(size.segment_size),
                bytes(amounts.reserved),
                bytes(amounts.live),
                bytes(amounts.pending),
                bytes(amounts.free),
                count(amounts.segments),
            ]);
        }
        text.push_str(&format!("{}\n\n", rows.trim_fmt()));
    }
    if !summary.free_runs.is_empty() {
        text.push_str("Free bytes by the length of the run:");
        for runs in summary.free_runs.iter().take(MOST_LINES) {
            let (from, to) = (bytes(runs.from), bytes(runs.from.saturating_mul(2)));
            text.push_str(&format!("\n  {:>12}  in {} of {from} to {to}", bytes(runs.bytes), count(runs.runs)));
        }
        text.push_str("\n\n");
    }
    if summary.total.segments > 0 {
        text.push_str(&format!(
            "{} lies in {} wholly free segments; {} more is free in segments that something still uses.\n\n",
            bytes(summary.idle),
            count(summary.idle_segments),
            bytes(summary.free_in_use)
        ));
    }
    if !summary.pinned.is_empty() {
        text.push_str("Mostly free segments, and what keeps them:\n");
        let mut rows = table(&["segment", "pool", "stream", "kept by", "whose", "size", "free"], 5);
        for pinned in &summary.pinned {
            let [pool, stream, _] = place(pinned.place);
            let blocks: Vec<String> =
                pinned.largest.iter().map(|(address, size)| format!("{} at {address:#x}", bytes(*size))).collect();
            let more = pinned.blocks - pinned.largest.len() as u64;
            let more = if more == 0 { String::new() } else { format!("\nand {} more", count(more)) };
            let whose: Vec<&str> = pinned.owners.iter().map(|owned| owned.owner.as_str()).collect();
            rows.add_row([
                format!("{:#x}", pinned.address),
                pool,
                stream,
                format!("{}{more}", blocks.join("\n")),
                whose.join("\n"),
                bytes(pinned.size),
                bytes(pinned.free),
            ]);
        }
        text.push_str(&format!("{}\n\n", rows.trim_fmt()));
    }
    if summary.owners.iter().any(|owned| owned.owner != "unknown") {
        text.push_str(&format!("Live blocks, by who allocated them:{}\n\n", owners(&summary.owners)));
    }
    for graph in summary.graphs.iter().take(MOST_LINES) {
        text.push_str(&format!(
            "Graph g{} may write {}: {} of its own, {} that other graphs may write too; {} in {} of its results is live.\n",
            graph.id,
            bytes(graph.written),
            bytes(graph.exclusive),
            bytes(graph.shared),
            bytes(graph.live),
            count(graph.live_blocks)
        ));
    }
    if summary.graphs.len() > MOST_LINES {
        text.push_str(&format!("and {} smaller ones.\n", summary.graphs.len() - MOST_LINES));
    }
    for capture in &summary.captures {
        let stream =
            capture.stream.map_or_else(|| "a stream of others".to_owned(), |handle| format!("stream {handle:#x}"));
        let (a, b) = capture.pool;
        text.push_str(&format!("A capture is under way on {stream} into pool ({a}, {b}).\n"));
    }
    if !summary.graphs.is_empty() || !summary.captures.is_empty() {
        text.push('\n');
    }
    if summary.outliving.blocks > 0 {
        text.push_str(&format!(
            "{} in {} live blocks outlives the graphs of its pool and keeps {}:{}\n\n",
            bytes(summary.outliving.bytes),
            count(summary.outliving.blocks),
            bytes(summary.outliving.segment_bytes),
            owners(&summary.outliving.owners)
        ));
    }
    for peak in &summary.peaks {
        text.push_str(&format!(
            "Most was live on device {} at event {}: {} requested, of which {} was there before the history begins:{}\n\n",
            peak.device,
            count(peak.event as u64 + 1),
            bytes(peak.bytes),
            bytes(peak.before_history),
            owners(&peak.owners)
        ));
    }
    for oom in &summary.out_of_memory {
        text.push_str(&format!(
            "Out of memory on device {} at event {}: {} asked for on stream {:#x}; the driver had {} free{}.\n\n",
            oom.device,
            count(oom.event as u64 + 1),
            bytes(oom.size),
            oom.stream,
            bytes(oom.device_free),
            shortfall(oom.size, oom.device_free)
        ));
    }
    for (left_out, why) in [
        (summary.unknown_events, "of kinds that are not known"),
        (summary.absurd_events, "of sizes or at addresses that nothing can have"),
    ] {
        if left_out > 0 {
            text.push_str(&format!("{} events {why} were left out.\n\n", count(left_out)));
        }
    }
    if summary.advice.is_empty() {
        text.push_str("Nothing stands out that would bring memory back.");
    } else {
        text.push_str("What would help:");
        for advice in &summary.advice {
            text.push_str(&format!("\n  {:>12}  {}", bytes(advice.bytes()), advice_text(advice)));
        }
    }
    text
}

fn owners(list: &[Owned]) -> String {
    let line =
        |owned: &Owned| format!("\n  {:>12}  {} ({} blocks)", bytes(owned.bytes), owned.owner, count(owned.blocks));
    list.iter().map(line).collect()
}

/// What a piece of advice says, after its bytes.
pub(crate) fn advice_text(advice: &Advice) -> String {
    match advice {
        Advice::Fragmented { asked, longest, .. } => format!(
            "is free, but in pieces: the request of {} failed since the longest run is {}{}. Free what pins the segments above, allocate \
             long-lived blocks first, or use expandable segments",
            bytes(*asked),
            bytes(*longest),
            shortfall(*asked, *longest)
        ),
        Advice::RaiseLimit { asked, .. } => {
            format!(
                "was free with the driver when the request of {} failed: a limit stopped it; raise the limit",
                bytes(*asked)
            )
        }
        Advice::EmptyCache { .. } => {
            "goes back to the driver when the cache is emptied: nothing uses these segments".to_owned()
        }
        Advice::Unpin { by, blocks, .. } => format!(
            "is free beside {} in {} blocks that keep mostly free segments: free or move those blocks (listed above)",
            bytes(*by),
            count(*blocks)
        ),
        Advice::SharePools { pools, .. } => {
            format!(
                "is free in {} private pools and serves nobody else: let graphs share a pool, or drop them",
                count(*pools)
            )
        }
        Advice::DropOutliving { blocks, .. } => {
            format!("stays because {} blocks outlive the graphs of their pool: drop them", count(*blocks))
        }
        Advice::SynchronizeStreams { .. } => {
            "was freed, but streams that used it may not be done: synchronise them, or say when the last use was"
                .to_owned()
        }
        Advice::FewerStreams { streams, .. } => format!(
            "is free on {} streams beside the one with most, and serves those only: allocate on fewer streams",
            count(*streams - 1)
        ),
        Advice::Rounding { .. } => "is lost to rounding: ask for sizes just below the steps of the rounding".to_owned(),
        other => format!("{other:?}"),
    }
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
    if growth.owners.iter().any(|grown| grown.owner != "unknown") {
        let mut rows = table(&["whose", "blocks before", "after", "grown by"], 1);
        for grown in &growth.owners {
            rows.add_row([
                grown.owner.clone(),
                count(grown.before),
                count(grown.after),
                signed_bytes(grown.grown_bytes),
            ]);
        }
        text.push_str("\n\nLive blocks that became more, by who allocated them:\n");
        text.push_str(&rows.trim_fmt());
    }
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
