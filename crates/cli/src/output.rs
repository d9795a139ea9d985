//! Standard output: tables for people, JSON for programs.

use std::borrow::Cow;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use comfy_table::{CellAlignment, ContentLineStyle, LineStyle, Table, TableStyle};
use serde::Serialize;

use crate::failure::Failure;

/// Lines above, below and under the header; nothing between columns.
const STYLE: TableStyle = TableStyle::new()
    .top_border(LineStyle::none().fill('─').junction('─'))
    .header_lines(ContentLineStyle::none().junction(' '))
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .content_lines(ContentLineStyle::none().junction(' '))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// That no file is written that is read, and none twice.
pub(crate) fn write_others(written: &[&Option<PathBuf>], read: &[PathBuf]) -> Result<(), Failure> {
    let mut taken: Vec<PathBuf> = read.iter().filter_map(|path| path.canonicalize().ok()).collect();
    for path in written.iter().copied().flatten() {
        // What is not there yet is known by its folder.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let new = || Some(folder.canonicalize().ok()?.join(path.file_name()?));
        let Some(place) = path.canonicalize().ok().or_else(new) else { continue };
        if taken.contains(&place) {
            return Err(Failure::Usage("--html and --snapshot write two files, and none that is read"));
        }
        taken.push(place);
    }
    Ok(())
}

/// A table whose first `texts` columns are text and the others figures, aligned to the right.
pub(crate) fn table(header: &[&str], texts: usize) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(header.to_vec());
    for column in table.column_iter_mut().skip(texts) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Prints text and a line break.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(harmless(text).as_bytes())
        .and_then(|()| out.write_all(b"\n"))
        .and_then(|()| out.flush())
        .map_err(Failure::output)
}

/// `text` with its control characters written out. Names come from files, and what a file says must not command a terminal.
pub(crate) fn harmless(text: &str) -> Cow<'_, str> {
    let commands = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(commands) {
        return Cow::Borrowed(text);
    }
    let written = |c: char| if commands(c) { c.escape_default().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(written).collect())
}

/// Prints one JSON object and a line break.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value).map_err(|error| Failure::output(error.into()))?;
    print(&text)
}
