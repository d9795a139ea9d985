//! Every peer that is present on every workload, in one run and one table.
//!
//! Samples are taken in turn, one of each peer, each of a fresh peer after a warm-up; a figure is their median, and a ratio the median of
//! those of the turns. With one thread the loop alone is taken off, for peers of another program that program's loop. With several the
//! figure is what all of them reach together, with the loop.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use gpupool_allocator::Policy;
use gpupool_cuda_device::CudaDevice;
use serde::Serialize;

use crate::foreign::{Foreign, Named, Program};
use crate::peers::{Alone, Gpupool, Nothing, OnDevice, SharedNaive};
use crate::sample::{SAMPLE, WARM_UP};
use crate::{Apart, Failed, Kind, Peer, Prepared, Running, Spread, Worker, Workload, sample, time, together};

/// How long several threads run together before they are timed, each having been warmed up by itself, and how long they are timed.
const WARM_TOGETHER: Duration = Duration::from_millis(300);
const TOGETHER: Duration = Duration::from_millis(300);
/// The loop alone, in every program.
const LOOP_ALONE: &str = "loop-alone";

/// What is to be compared.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// What is asked, row by row.
    pub rows: Vec<Asked>,
    /// Peers by name; all that are present if there are none.
    pub peers: Vec<String>,
    /// Samples of each peer.
    pub repetitions: u32,
    /// Where recordings are.
    pub traces: PathBuf,
    /// The GPU to run on, in place of the simulated device.
    pub gpu: Option<u32>,
    /// The program of foreign peers (`benches/peers/build`), which needs a GPU.
    pub program: Option<PathBuf>,
}

/// A workload, by as many threads at once, each with a stream of its own. Written `set-256x16`, or without the number for one thread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Asked {
    /// The workload.
    pub workload: Workload,
    /// Threads; one at least.
    pub threads: u16,
}

impl Asked {
    /// Every workload with one thread, then a hot pair and a working set of 256 blocks with one to `threads` threads, doubled each time.
    ///
    /// # Errors
    ///
    /// [`Failed::Io`] if the folder of recordings cannot be read.
    pub fn all(traces: &Path, threads: u16) -> Result<Vec<Self>, Failed> {
        let one = |workload| Self { workload, threads: 1 };
        let mut all: Vec<Self> =
            Workload::synthetic().into_iter().chain(Workload::recorded(traces)?).map(one).collect();
        for workload in [Workload::HotPair { bytes: 512 }, Workload::WorkingSet { live: 256 }] {
            let counts = std::iter::successors(Some(1_u16), |n| n.checked_mul(2)).take_while(|n| *n <= threads);
            // The hot pair of one thread is there.
            let counts = counts.filter(|n| *n > 1 || workload != Workload::HotPair { bytes: 512 });
            all.extend(counts.map(|threads| Self { workload: workload.clone(), threads }));
        }
        Ok(all)
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.threads {
            1 => self.workload.fmt(f),
            threads => write!(f, "{}x{threads}", self.workload),
        }
    }
}

impl FromStr for Asked {
    type Err = Failed;

    fn from_str(name: &str) -> Result<Self, Failed> {
        if let Some((workload, threads)) = name.rsplit_once('x')
            && let Ok(threads @ 1..) = threads.parse()
        {
            return Ok(Self { workload: workload.parse()?, threads });
        }
        Ok(Self { workload: name.parse()?, threads: 1 })
    }
}

/// What was found.
#[derive(Serialize, Debug)]
pub struct Comparisons {
    /// Samples of each peer.
    pub repetitions: u32,
    /// Cores of this machine.
    pub cores: usize,
    /// The device's name.
    pub device: String,
    /// Foreign peers and their versions.
    pub versions: Vec<String>,
    /// Peers that were asked for, by name or with all the others, and could not be had: each with what it takes.
    pub left_out: Vec<String>,
    /// A row a workload and number of threads.
    pub rows: Vec<Row>,
}

/// A workload's figures.
#[derive(Serialize, Debug)]
pub struct Row {
    /// The workload.
    pub workload: String,
    /// How many threads do it at once.
    pub threads: u16,
    /// What is counted.
    pub unit: &'static str,
    /// The loop with nothing in it, nanoseconds.
    pub loop_ns: Option<Spread>,
    /// The peers' figures.
    pub peers: Vec<Figure>,
}

/// A peer's figure.
#[derive(Serialize, Debug)]
pub struct Figure {
    /// The peer.
    pub peer: String,
    /// Nanoseconds from one unit of a thread to its next; of one thread without the loop.
    pub ns: Option<Spread>,
    /// All threads together, million units a second.
    pub million_a_second: Option<f64>,
    /// How many times as long as gpupool under `segments`: the median of what each turn shows.
    pub ratio: Option<f64>,
    /// Driver calls a unit, where they are counted.
    pub driver_calls: Option<f64>,
    /// Why there is no figure.
    pub error: Option<String>,
}

/// A peer of the run, and how a sample of it is had.
enum Column {
    Simulated(Kind),
    Gpu(Arc<CudaDevice>, Policy),
    GpuLoop,
    Foreign(String, Foreign),
}

impl Column {
    fn name(&self) -> &str {
        match self {
            Self::Simulated(kind) => kind.name(),
            Self::Gpu(_, policy) => policy.name(),
            Self::GpuLoop => LOOP_ALONE,
            Self::Foreign(name, _) => name,
        }
    }

    /// Whether it is a loop with nothing in it, and is no row's figure.
    fn is_loop(&self) -> bool {
        self.name() == LOOP_ALONE
    }
}

/// One sample: nanoseconds and driver calls a unit.
type Sampled = Result<(f64, Option<f64>), Failed>;

struct Run<'a> {
    what: &'a Comparison,
    columns: Vec<Column>,
    program: Option<Program>,
    worker: Option<Worker>,
}

/// Compares. `say` is told each workload as it begins.
///
/// # Errors
///
/// Those of the device, of recordings and of starting other programs; what a peer fails at is told in its figure.
pub fn compare(what: &Comparison, say: &mut dyn FnMut(&str)) -> Result<Comparisons, Failed> {
    let wanted = |name: &str| name == LOOP_ALONE || what.peers.is_empty() || what.peers.iter().any(|peer| peer == name);
    let (mut columns, mut worker, mut device) = (Vec::new(), None, "simulated".to_owned());
    let mut left_out = Vec::new();
    match what.gpu {
        Some(ordinal) => {
            let gpu = Arc::new(CudaDevice::open(ordinal)?);
            device = gpupool_device::Device::properties(&*gpu).name.clone();
            columns.push(Column::GpuLoop);
            columns.extend(Kind::OURS.map(|policy| Column::Gpu(Arc::clone(&gpu), policy)));
        }
        None => {
            worker = Worker::start(&what.traces)?;
            let built = |kind: &Kind| worker.is_some() || *kind != Kind::Rlsf;
            columns.extend(Kind::ALL.iter().copied().filter(built).map(Column::Simulated));
            let features = Kind::LEFT_OUT.iter().map(|name| (*name, format!("{name} (feature `{name}`)")));
            let program = (!built(&Kind::Rlsf)).then(|| "rlsf (the program `rlsf_worker` beside this one)".to_owned());
            let all = features.chain(program.map(|rlsf| (Kind::Rlsf.name(), rlsf)));
            left_out.extend(all.filter(|(name, _)| wanted(name)).map(|(_, takes)| takes));
        }
    }
    let program = what.program.as_deref().map(Program::new).transpose()?;
    for named in program.iter().flat_map(Program::peers).filter(|named| wanted(&named.peer)) {
        let started = program.as_ref().map(|program| program.start(&named.peer)).transpose()?;
        columns.extend(started.map(|process| Column::Foreign(named.peer.clone(), process)));
    }
    columns.retain(|column| wanted(column.name()));
    let with_version = |named: &Named| format!("{} {}", named.peer, named.version).trim().to_owned();
    let versions = program.iter().flat_map(Program::peers).filter(|named| named.peer != LOOP_ALONE);
    let versions = versions.map(with_version).collect();
    let mut run = Run { what, columns, program, worker };
    let mut rows = Vec::new();
    for asked in &what.rows {
        say(&asked.to_string());
        rows.extend(run.row(asked)?);
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Comparisons { repetitions: what.repetitions, cores, device, versions, left_out, rows })
}

impl Run<'_> {
    fn row(&mut self, asked: &Asked) -> Result<Option<Row>, Failed> {
        let Asked { workload, threads } = asked;
        let threads = (*threads).max(1);
        let prepared = Prepared::new(workload, &self.what.traces)?;
        // On a GPU nothing is captured, on any side.
        let captured = matches!(prepared, Prepared::Captured { .. } | Prepared::WorkingSet { captured: true, .. });
        if captured && self.what.gpu.is_some() {
            return Ok(None);
        }
        let script = self.program.as_ref().map(|program| program.script(&workload.to_string(), &prepared));
        let script = script.transpose()?.flatten();
        let mut samples: Vec<Vec<(f64, Option<f64>)>> = self.columns.iter().map(|_| Vec::new()).collect();
        let mut errors: Vec<Option<String>> = self.columns.iter().map(|_| None).collect();
        for _ in 0..self.what.repetitions {
            for (at, column) in self.columns.iter_mut().enumerate() {
                if errors[at].is_some() {
                    continue;
                }
                let sampled = match column {
                    Column::Simulated(kind) if threads == 1 => {
                        sample(*kind, workload, &prepared, self.worker.as_mut()).map(|s| (s.ns, s.driver_calls))
                    }
                    Column::Simulated(kind) => simulated_threads(*kind, &prepared, threads),
                    Column::Gpu(device, policy) => on_gpu(device, *policy, &prepared, threads),
                    Column::GpuLoop => of_threads(&prepared, vec![Alone; threads.into()]),
                    Column::Foreign(_, process) => foreign(process, script.as_deref(), threads),
                };
                match sampled {
                    Ok(sampled) => samples[at].push(sampled),
                    Err(Failed::Worker { answer }) => errors[at] = Some(answer),
                    Err(error) => errors[at] = Some(error.to_string()),
                }
            }
        }
        Ok(self.figures(workload, threads, &samples, errors))
    }

    fn figures(
        &self,
        workload: &Workload,
        threads: u16,
        samples: &[Vec<(f64, Option<f64>)>],
        errors: Vec<Option<String>>,
    ) -> Option<Row> {
        let spread = |at: usize| Spread::of(samples[at].iter().map(|(ns, _)| *ns).collect());
        let loops: Vec<usize> = (0..self.columns.len()).filter(|at| self.columns[*at].is_loop()).collect();
        let loop_of = |at: usize| {
            let foreign = matches!(self.columns[at], Column::Foreign(..));
            let same = |n: &&usize| matches!(self.columns[**n], Column::Foreign(..)) == foreign;
            loops.iter().find(same).and_then(|n| spread(*n)).map_or(0.0, |spread| spread.median)
        };
        let net = |at: usize| -> Vec<f64> {
            let off = if threads == 1 { loop_of(at) } else { 0.0 };
            samples[at].iter().map(|(ns, _)| (ns - off).max(0.0)).collect()
        };
        let ours = (0..self.columns.len()).find(|at| self.columns[*at].name() == Policy::Segments.name()).map(net);
        // Samples that were taken in the same turn: a machine that is slower for a while is so for both.
        let ratio = |ns: &[f64]| {
            let in_turn = ns.iter().zip(ours.iter().flatten()).filter(|(_, ours)| **ours > 0.0);
            Spread::of(in_turn.map(|(ns, ours)| ns / ours).collect()).map(|ratio| ratio.median)
        };
        let figures = self.columns.iter().enumerate().zip(errors).filter(|((_, column), _)| !column.is_loop());
        let peers = figures.map(|((at, column), error)| {
            let (ns, ratio) = (Spread::of(net(at)), ratio(&net(at)));
            let calls: Option<Vec<f64>> = samples[at].iter().map(|(_, calls)| *calls).collect();
            Figure {
                peer: column.name().to_owned(),
                ns,
                million_a_second: ns.filter(|ns| ns.median > 0.0).map(|ns| f64::from(threads) * 1e3 / ns.median),
                ratio,
                driver_calls: calls.and_then(Spread::of).map(|calls| calls.median),
                error,
            }
        });
        let (unit, loop_ns) = (workload.unit(), loops.first().and_then(|at| spread(*at)));
        Some(Row { workload: workload.to_string(), threads, unit, loop_ns, peers: peers.collect() })
    }
}

fn on_gpu(device: &Arc<CudaDevice>, policy: Policy, prepared: &Prepared, threads: u16) -> Sampled {
    let needs = prepared.needs();
    let first = OnDevice::new(Arc::clone(device), policy, needs)?;
    let others: Result<Vec<_>, Failed> = (1..threads).map(|_| first.beside(needs)).collect();
    let mut peers = others?;
    peers.insert(0, first);
    of_threads(prepared, peers)
}

fn simulated_threads(kind: Kind, prepared: &Prepared, threads: u16) -> Sampled {
    let needs = prepared.needs();
    match kind {
        Kind::LoopAlone => of_threads(prepared, (0..threads).map(|_| Nothing::new(needs)).collect()),
        Kind::Ours(policy) => {
            let peer = Gpupool::new(policy, needs)?;
            of_threads(prepared, (0..threads).map(|n| peer.with_stream(n)).collect())
        }
        Kind::TreeAndHash => {
            let peer = SharedNaive::default();
            of_threads(prepared, (0..threads).map(|_| peer.clone()).collect())
        }
        // One owner at a time, or a process of its own.
        _ => Err(Failed::Worker { answer: "one thread only".to_owned() }),
    }
}

/// A sample of as many threads as there are peers.
fn of_threads<P: Peer + Send>(prepared: &Prepared, mut peers: Vec<P>) -> Sampled
where
    P::Block: Send,
{
    if peers.len() == 1
        && let Some(peer) = peers.pop()
    {
        return time(prepared, peer).map(|sample| (sample.ns, sample.driver_calls));
    }
    let start = |peer| Running::start(prepared, peer).map(|running| Apart((running, 0)));
    let mut running: Vec<Apart<(Running<'_, P>, u64)>> = peers.into_iter().map(start).collect::<Result<_, _>>()?;
    let for_a_while = |span| {
        move |(one, rounds): &mut (Running<'_, P>, u64)| {
            *rounds = one.run_for(span)?.0;
            Ok(())
        }
    };
    together(&mut running, for_a_while(WARM_TOGETHER))?;
    let took = together(&mut running, for_a_while(TOGETHER))?;
    let rounds: u64 = running.iter().map(|Apart((_, rounds))| rounds).sum();
    let units = rounds as f64 * prepared.units_per_round() as f64;
    Ok((took.as_nanos() as f64 * running.len() as f64 / units, None))
}

fn foreign(process: &mut Foreign, script: Option<&Path>, threads: u16) -> Sampled {
    let (warm_up, span) = if threads == 1 { (WARM_UP, SAMPLE) } else { (WARM_TOGETHER, TOGETHER) };
    match script {
        Some(script) => process.sample(script, threads, warm_up, span).map(|ns| (ns, None)),
        None => Err(Failed::Worker { answer: "not for this peer".to_owned() }),
    }
}

impl Comparisons {
    /// As tables: nanoseconds of one thread, and what several reach together.
    #[must_use]
    pub fn tables(&self) -> String {
        let (one, many): (Vec<&Row>, Vec<&Row>) = self.rows.iter().partition(|row| row.threads == 1);
        let mut text = String::new();
        if !one.is_empty() {
            text.push_str("Nanoseconds, the loop taken off; how many times as long as gpupool under `segments`:\n\n");
            text.push_str(&table(&one, true).to_string());
        }
        if !many.is_empty() {
            text.push_str("\n\nThreads with a stream each, million pairs a second of all together:\n\n");
            text.push_str(&table(&many, false).to_string());
        }
        text.push_str(&format!("\n\nOn {}, {} cores, {} samples of each.", self.device, self.cores, self.repetitions));
        if !self.versions.is_empty() {
            text.push_str(&format!(" Beside {}.", self.versions.join(", ")));
        }
        if !self.left_out.is_empty() {
            text.push_str(&format!(" Left out, since not built with it: {}.", self.left_out.join(", ")));
        }
        let mut errors: Vec<String> = Vec::new();
        for (row, figure) in self.rows.iter().flat_map(|row| row.peers.iter().map(move |figure| (row, figure))) {
            if let Some(error) = &figure.error {
                errors.push(format!("{} on {}, {} threads: {error}", figure.peer, row.workload, row.threads));
            }
        }
        if !errors.is_empty() {
            text.push_str(&format!("\n\nWithout a figure: {}.", errors.join("; ")));
        }
        text
    }
}

fn table(rows: &[&Row], one: bool) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let names = rows.first().map(|row| row.peers.iter().map(|p| p.peer.clone())).into_iter().flatten();
    let heads: &[&str] = if one { &["workload", "loop alone"] } else { &["workload", "threads"] };
    let calls = |row: &Row| row.peers.iter().find(|p| p.peer == Policy::Segments.name()).and_then(|p| p.driver_calls);
    let counted = one && rows.iter().any(|row| calls(row).is_some());
    let last = counted.then(|| "driver calls of segments".to_owned());
    table.set_header(heads.iter().map(|head| (*head).to_owned()).chain(names).chain(last));
    for row in rows {
        let second = match row.loop_ns {
            Some(spread) if one => format!("{:.1}", spread.median),
            _ if one => "-".to_owned(),
            _ => row.threads.to_string(),
        };
        let mut cells = vec![row.workload.clone(), second];
        for figure in &row.peers {
            let ratio = figure.ratio.map_or_else(String::new, |ratio| format!(" {ratio:.1}x"));
            cells.push(match (figure.ns, figure.million_a_second) {
                (Some(ns), _) if one => format!("{:.1} ±{:.0}%{ratio}", ns.median, ns.relative() * 100.0),
                (_, Some(million)) if !one => format!("{million:.2}{ratio}"),
                _ => "-".to_owned(),
            });
        }
        if counted {
            cells.push(calls(row).map_or_else(|| "-".to_owned(), |calls| format!("{calls:.4} per {}", row.unit)));
        }
        table.add_row(cells);
    }
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_as_they_are_written() {
        let all = Asked::all(&crate::traces_folder(), 16).unwrap();
        assert_eq!(all.iter().filter(|asked| asked.threads > 1).count(), 8);
        for asked in all {
            assert_eq!(asked.to_string().parse::<Asked>().unwrap(), asked);
        }
        for name in ["hot-512x", "hot-512x0", "x4", "set-256x99999"] {
            assert!(name.parse::<Asked>().is_err(), "{name}");
        }
    }
}
