//! `gpupool conform`: every decision, compared with PyTorch's.

use std::path::Path;

use gpupool_replay::conform::{Outcome, Script, Version, run as run_script};
use serde::Serialize;

use crate::Verdict;
use crate::args::Conform;
use crate::failure::Failure;
use crate::output::{print, print_json, table};
use crate::progress::Progress;
use crate::units::count;

/// One file's result, as `--json` prints it.
#[derive(Serialize)]
struct FileResult<'a> {
    file: &'a str,
    ops: u64,
    matched: u64,
    first_mismatch: Option<FirstMismatch<'a>>,
}

#[derive(Serialize)]
struct FirstMismatch<'a> {
    op: u64,
    line: u64,
    name: &'a str,
    expected: &'a str,
    got: &'a str,
}

pub(crate) fn run(arguments: &Conform) -> Result<Verdict, Failure> {
    let scripts: Vec<(String, Script)> = arguments
        .files
        .iter()
        .map(|path| Ok((path.display().to_string(), Script::read(path)?)))
        .collect::<Result<_, Failure>>()?;
    let outcomes = run_all(&scripts)?;
    if arguments.json {
        for ((file, _), outcome) in scripts.iter().zip(&outcomes) {
            print_json(&result(file, outcome))?;
        }
    } else {
        print(&text(&scripts, &outcomes))?;
    }
    let good = outcomes.iter().all(|outcome| outcome.first_mismatch.is_none());
    Ok(if good { Verdict::Good } else { Verdict::Bad })
}

fn run_all(scripts: &[(String, Script)]) -> Result<Vec<Outcome>, Failure> {
    let total: usize = scripts.iter().map(|(_, script)| script.steps.len()).sum();
    let progress = Progress::new("conform".to_owned(), total as u64);
    let mut before = 0;
    let mut outcomes = Vec::new();
    for (file, script) in scripts {
        progress.say(short(file));
        outcomes.push(run_script(script, file, |op| progress.at(before + op))?);
        before += script.steps.len() as u64;
    }
    Ok(outcomes)
}

fn result<'a>(file: &'a str, outcome: &'a Outcome) -> FileResult<'a> {
    let first_mismatch = outcome.first_mismatch.as_ref().map(|mismatch| FirstMismatch {
        op: mismatch.op,
        line: mismatch.op + 1,
        name: mismatch.name,
        expected: &mismatch.expected,
        got: &mismatch.got,
    });
    FileResult { file, ops: outcome.ops, matched: outcome.matched, first_mismatch }
}

fn text(scripts: &[(String, Script)], outcomes: &[Outcome]) -> String {
    let mut rows = table(&["file", "PyTorch", "kind", "result", "operations", "matched"], 4);
    let mut details = String::new();
    for ((file, script), outcome) in scripts.iter().zip(outcomes) {
        let version = match script.header.version {
            Version::V211 => "2.11",
            Version::V215 => "2.15",
        };
        let verdict = if outcome.first_mismatch.is_none() { "same" } else { "DIFFERS" };
        rows.add_row([
            short(file),
            version.to_owned(),
            script.header.kind.clone(),
            verdict.to_owned(),
            count(outcome.ops),
            count(outcome.matched),
        ]);
        if let Some(mismatch) = &outcome.first_mismatch {
            details.push_str(&format!(
                "\n{file}: operation {} ({}, line {}) differs; nothing was run after it\n  expected  {}\n  got       {}\n",
                mismatch.op,
                mismatch.name,
                mismatch.op + 1,
                mismatch.expected,
                mismatch.got
            ));
        }
    }
    let same = outcomes.iter().filter(|outcome| outcome.first_mismatch.is_none()).count();
    let matched: u64 = outcomes.iter().map(|outcome| outcome.matched).sum();
    let total: u64 = outcomes.iter().map(|outcome| outcome.ops).sum();
    format!(
        "{}\n{same} of {} files the same: {} of {} operations, with every placement, driver call, counter and snapshot.{}",
        rows.trim_fmt(),
        outcomes.len(),
        count(matched),
        count(total),
        details.trim_end()
    )
}

fn short(file: &str) -> String {
    let name = Path::new(file).file_name().map_or_else(|| file.into(), |name| name.to_string_lossy());
    name.trim_end_matches(".jsonl.gz").to_owned()
}
