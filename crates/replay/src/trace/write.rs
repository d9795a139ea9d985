//! Writing a trace.
//!
//! A [`TraceWriter`] is told what happens and counts along; [`finish`](TraceWriter::finish) puts the header, whose
//! counts it knows, before the events. Its output reads back as the same events.

use std::fmt::Write as _;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use gpupool_device::Address;

use super::{FORMAT, Header};

/// The peaks that a header tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Peaks {
    /// The most bytes in blocks handed out at one time.
    pub allocated: u64,
    /// The most bytes requested and not completely freed at one time.
    pub requested: u64,
    /// The most bytes in blocks handed out or pending at one time.
    pub active: u64,
    /// The most bytes held of the driver.
    pub reserved: u64,
}

/// Collects the events of a trace. See the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct TraceWriter {
    text: String,
    lines: usize,
    allocs: u64,
    taken: u64,
    given_back: u64,
}

impl TraceWriter {
    /// A trace with no events.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn line(&mut self, arguments: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.text.write_fmt(arguments);
        self.text.push('\n');
        self.lines += 1;
    }

    /// How many lines there are below the header.
    pub(super) fn lines(&self) -> usize {
        self.lines
    }

    /// `bytes` requested on `stream`. Gives the allocation's number.
    pub fn alloc(&mut self, bytes: u64, stream: u16) -> u64 {
        self.allocs += 1;
        let id = self.allocs;
        self.line(format_args!("a {id} {bytes} {stream}"));
        id
    }

    /// A free of allocation `id` is requested.
    pub fn free(&mut self, id: u64) {
        self.line(format_args!("f {id}"));
    }

    /// The free of allocation `id` completes.
    pub fn complete(&mut self, id: u64) {
        self.line(format_args!("c {id}"));
    }

    /// A capture begins.
    pub fn begin(&mut self, graph: u64, pool: u64, stream: u16) {
        self.line(format_args!("B {graph} {pool} {stream}"));
    }

    /// A capture ends.
    pub fn end(&mut self, graph: u64) {
        self.line(format_args!("E {graph}"));
    }

    /// The cache is emptied.
    pub fn empty_cache(&mut self) {
        self.line(format_args!("e"));
    }

    /// A segment is taken of the driver.
    pub fn take(&mut self, address: Address, bytes: u64, stream: u16) {
        self.taken += 1;
        self.line(format_args!("S {:x} {bytes} {stream}", address.0));
    }

    /// A segment is given back.
    pub fn give_back(&mut self, address: Address, bytes: u64) {
        self.given_back += 1;
        self.line(format_args!("s {:x} {bytes}", address.0));
    }

    /// A remark. Line breaks in it become spaces.
    pub fn comment(&mut self, text: &str) {
        let text = text.replace(['\n', '\r'], " ");
        self.line(format_args!("# {text}"));
    }

    /// The trace as gzip text.
    ///
    /// # Errors
    ///
    /// None in practice: compressing in memory does not fail.
    pub fn finish(self, name: &str, conf: &str, peaks: Peaks) -> io::Result<Vec<u8>> {
        let header = Header {
            format: FORMAT.to_owned(),
            name: name.to_owned(),
            conf: conf.to_owned(),
            peak_allocated: peaks.allocated,
            peak_requested: peaks.requested,
            peak_active: peaks.active,
            peak_reserved: peaks.reserved,
            device_allocs: self.taken + 1,
            allocs: self.allocs + 1,
            segments_end: self.taken.saturating_sub(self.given_back),
            rest: serde_json::Map::new(),
        };
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        serde_json::to_writer(&mut encoder, &header)?;
        encoder.write_all(b"\n")?;
        encoder.write_all(self.text.as_bytes())?;
        encoder.finish()
    }
}
