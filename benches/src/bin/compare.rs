//! Every peer on every workload in one run: one table with ratios.
//!
//! The samples of a workload come in turn, one of each peer, several times over, so that a slow moment of the machine is nobody's. Each
//! sample has a fresh peer and a warm-up of its own. Build the whole package first: rlsf runs in a program beside this one.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use gpupool_benches::{Failed, Kind, Prepared, Sample, Spread, Worker, Workload, or_exit, sample, traces_folder};
use serde::Serialize;

/// Every peer on every workload in one run.
#[derive(Parser, Debug)]
#[command(name = "compare")]
struct Arguments {
    /// Workloads (hot-BYTES, set-LIVE, trace-NAME); all of them if none is named.
    workloads: Vec<Workload>,
    /// Only these peers, beside the loop alone.
    #[arg(long, value_delimiter = ',')]
    peers: Vec<Kind>,
    /// Samples of each peer.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Where recordings are.
    #[arg(long, default_value_os_t = traces_folder())]
    traces: PathBuf,
    /// One JSON object and nothing else.
    #[arg(long)]
    json: bool,
}

/// A workload's figures.
#[derive(Serialize, Debug)]
struct Row {
    workload: String,
    unit: &'static str,
    /// The loop with nothing in it, nanoseconds; taken off every peer's figure.
    loop_ns: Spread,
    peers: Vec<Figure>,
}

/// A peer's figure.
#[derive(Serialize, Debug)]
struct Figure {
    peer: &'static str,
    /// Nanoseconds, the loop taken off.
    ns: Spread,
    /// How many times as long as gpupool under `segments`.
    ratio: Option<f64>,
    driver_calls: Option<f64>,
}

#[derive(Serialize, Debug)]
struct Report {
    repetitions: u32,
    cores: usize,
    rows: Vec<Row>,
}

fn main() {
    or_exit(run(&Arguments::parse()));
}

fn run(arguments: &Arguments) -> Result<(), Failed> {
    let mut worker = Worker::start(&arguments.traces)?;
    let workloads = match arguments.workloads.is_empty() {
        true => [Workload::synthetic(), Workload::recorded(&arguments.traces)?].concat(),
        false => arguments.workloads.clone(),
    };
    let wanted = |kind: &Kind| arguments.peers.is_empty() || arguments.peers.contains(kind);
    let kinds: Vec<Kind> = Kind::ALL
        .iter()
        .copied()
        .filter(|kind| *kind == Kind::LoopAlone || wanted(kind))
        .filter(|kind| worker.is_some() || *kind != Kind::Rlsf)
        .collect();
    if worker.is_none() && wanted(&Kind::Rlsf) {
        eprintln!("no rlsf: its worker was not built (cargo build --release -p gpupool-benches)");
    }
    let mut rows = Vec::new();
    for workload in &workloads {
        if !arguments.json {
            eprintln!("{workload}");
        }
        let prepared = Prepared::new(workload, &arguments.traces)?;
        let mut samples = vec![Vec::new(); kinds.len()];
        for _ in 0..arguments.repetitions {
            for (kind, samples) in kinds.iter().zip(&mut samples) {
                samples.push(sample(*kind, workload, &prepared, worker.as_mut())?);
            }
        }
        rows.extend(row(workload, &kinds, &samples));
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let report = Report { repetitions: arguments.repetitions, cores, rows };
    match arguments.json {
        true => println!("{}", serde_json::to_string_pretty(&report).unwrap_or_default()),
        false => println!("{}", table(&report.rows)),
    }
    Ok(())
}

/// A workload's samples put together; the first kind is the loop alone.
fn row(workload: &Workload, kinds: &[Kind], samples: &[Vec<Sample>]) -> Option<Row> {
    let loop_ns = Spread::of(samples.first()?.iter().map(|s| s.ns).collect())?;
    let net = |samples: &[Sample]| Spread::of(samples.iter().map(|s| (s.ns - loop_ns.median).max(0.0)).collect());
    let ours = kinds.iter().position(|kind| *kind == Kind::Segments).and_then(|at| net(&samples[at]));
    let peers = kinds.iter().zip(samples).skip(1).filter_map(|(kind, samples)| {
        let ns = net(samples)?;
        let calls: Option<Vec<f64>> = samples.iter().map(|s| s.driver_calls).collect();
        Some(Figure {
            peer: kind.name(),
            ns,
            ratio: ours.filter(|ours| ours.median > 0.0).map(|ours| ns.median / ours.median),
            driver_calls: calls.and_then(Spread::of).map(|calls| calls.median),
        })
    });
    Some(Row { workload: workload.to_string(), unit: workload.unit(), loop_ns, peers: peers.collect() })
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let names = rows.first().map(|row| row.peers.iter().map(|p| p.peer)).into_iter().flatten();
    let heads = ["workload", "loop alone"].into_iter().chain(names);
    table.set_header(heads.map(str::to_owned).chain(["driver calls of segments".to_owned()]));
    for row in rows {
        let mut cells = vec![row.workload.clone(), format!("{:.1}", row.loop_ns.median)];
        for figure in &row.peers {
            let ratio = figure.ratio.map_or_else(String::new, |ratio| format!(" {ratio:.1}x"));
            let spread = figure.ns.relative() * 100.0;
            cells.push(format!("{:.1} ±{spread:.0}%{ratio}", figure.ns.median));
        }
        let calls = row.peers.iter().find(|p| p.peer == Kind::Segments.name()).and_then(|p| p.driver_calls);
        cells.push(calls.map_or_else(|| "-".to_owned(), |calls| format!("{calls:.4} per {}", row.unit)));
        table.add_row(cells);
    }
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}
