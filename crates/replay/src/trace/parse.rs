//! Reading a trace, with every line checked against those before it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use gpupool_device::Address;
use hashbrown::HashMap;

use super::{Event, FORMAT, Graph, Header, LateFree, MAX_BYTES, MAX_STREAMS, RecordedSegment, Trace};
use super::{TraceError, TraceProblem};
use crate::text::{Limits, Lines, TextProblem, decimal, excerpt, hexadecimal};

/// A recording of a training run of hours has a few million lines.
const LIMITS: Limits = Limits { total: 1 << 28, line: 1 << 16 };
const MAX_EVENTS: usize = 1 << 24;

impl Trace {
    /// Reads the trace in the file at `path`.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or is no whole, consistent trace; the error names file and line.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let name = path.display().to_string();
        match File::open(path) {
            Ok(file) => Self::parse(&name, file),
            Err(error) => Err(TraceError { file: name, line: 0, problem: TextProblem::Io(error).into() }),
        }
    }

    /// Reads a trace from `input`; `name` stands for the file in errors.
    ///
    /// # Errors
    ///
    /// When the input is no whole, consistent trace.
    pub fn parse(name: &str, input: impl Read) -> Result<Self, TraceError> {
        let mut line = 1;
        match parse(input, &mut line) {
            Ok(trace) => Ok(Self { file: name.to_owned(), ..trace }),
            Err(problem) => Err(TraceError { file: name.to_owned(), line, problem }),
        }
    }
}

fn parse(input: impl Read, line: &mut u64) -> Result<Trace, TraceProblem> {
    let mut lines = Lines::new(input, LIMITS)?;
    let header = match lines.next_line()? {
        Some(text) => header(text)?,
        None => return Err(TextProblem::Empty.into()),
    };
    let mut reader = Reader::default();
    loop {
        *line += 1;
        match lines.next_line()? {
            Some(text) => reader.line(*line, text)?,
            None => {
                // What is wrong with the file as a whole is wrong with its last line.
                *line -= 1;
                return reader.finish(header);
            }
        }
    }
}

fn header(text: &str) -> Result<Header, TraceProblem> {
    // What names another format need not have this one's fields.
    #[derive(serde::Deserialize)]
    struct Named {
        format: String,
    }
    let named: Result<Named, _> = serde_json::from_str(text);
    if let Ok(Named { format }) = named
        && format != FORMAT
    {
        return Err(TraceProblem::Format { found: excerpt(&format) });
    }
    serde_json::from_str(text).map_err(TraceProblem::Header)
}

/// What is known about an allocation.
struct Known {
    block: u32,
    allocated: u64,
    freed: Option<u64>,
    completed: bool,
    /// Where it is in the list of late frees.
    late: Option<u32>,
}

/// What the lines so far add up to.
#[derive(Default)]
struct Reader {
    events: Vec<Event>,
    lines: Vec<u32>,
    late: Vec<LateFree>,
    graphs: Vec<Graph>,
    segments: Vec<RecordedSegment>,
    blocks: Vec<u64>,
    streams: u16,
    counted: u32,
    known: HashMap<u64, Known>,
    /// A free whose next line is not known yet: the allocation's number and the line.
    open_free: Option<(u64, u64)>,
    /// By graph number: which graph, and the line on which its capture began.
    captured: HashMap<u64, (u32, u64)>,
    /// By stream: the graph that is being captured there.
    capturing: HashMap<u16, u32>,
    /// Segments that exist, by address: which, and the line on which it was taken.
    standing: BTreeMap<u64, (u32, u64)>,
    given_back: u64,
}

impl Reader {
    fn line(&mut self, line: u64, text: &str) -> Result<(), TraceProblem> {
        if text.starts_with('#') {
            return Ok(());
        }
        let (head, rest) = text.split_once(' ').unwrap_or((text, ""));
        if head == "c" {
            return self.complete(line, rest);
        }
        self.close_free()?;
        match head {
            "a" => self.alloc(line, rest),
            "f" => self.free(line, rest),
            "S" => self.take(line, rest),
            "s" => self.give_back(rest),
            "B" => self.begin(line, rest),
            "E" => self.end(line, rest),
            "e" if text == "e" => self.event(line, Event::EmptyCache),
            "e" => Err(TraceProblem::Form { form: "e", found: excerpt(text) }),
            _ => Err(TraceProblem::UnknownEvent { found: excerpt(text) }),
        }
    }

    fn event(&mut self, line: u64, event: Event) -> Result<(), TraceProblem> {
        if self.events.len() == MAX_EVENTS {
            return Err(TraceProblem::TooManyEvents { limit: MAX_EVENTS });
        }
        self.counted += u32::from(event.counts());
        self.events.push(event);
        // Bounded text has fewer lines than a u32 counts.
        self.lines.push(line as u32);
        Ok(())
    }

    fn alloc(&mut self, line: u64, rest: &str) -> Result<(), TraceProblem> {
        let [id, bytes, stream] = words(rest, "a ID BYTES STREAM")?;
        let id = number("allocation", id)?;
        let bytes = size(number("the size", bytes)?)?;
        let stream = self.stream(stream)?;
        if id == 0 {
            return Err(TraceProblem::AllocatesZero);
        }
        if let Some(known) = self.known.get(&id) {
            return Err(TraceProblem::AllocatedTwice { id, before: known.allocated });
        }
        let block = self.blocks.len() as u32;
        self.blocks.push(bytes);
        self.known.insert(id, Known { block, allocated: line, freed: None, completed: false, late: None });
        self.event(line, Event::Alloc { block, bytes, stream })
    }

    fn free(&mut self, line: u64, rest: &str) -> Result<(), TraceProblem> {
        let [id] = words(rest, "f ID")?;
        let id = number("allocation", id)?;
        if id == 0 {
            return self.event(line, Event::FreeForeign);
        }
        let known = self.known.get_mut(&id).ok_or(TraceProblem::NeverAllocated { id })?;
        if let Some(before) = known.freed {
            return Err(TraceProblem::FreedTwice { id, before });
        }
        known.freed = Some(line);
        self.open_free = Some((id, line));
        Ok(())
    }

    /// The line after a free is there, and it is not the free's completion.
    fn close_free(&mut self) -> Result<(), TraceProblem> {
        let Some((id, line)) = self.open_free.take() else { return Ok(()) };
        let known = self.known.get_mut(&id).ok_or(TraceProblem::NeverAllocated { id })?;
        let late = self.late.len() as u32;
        let block = known.block;
        known.late = Some(late);
        self.late.push(LateFree { block, freed_at: self.counted + 1, completes_at: None });
        self.event(line, Event::FreeLate { block, late })
    }

    fn complete(&mut self, line: u64, rest: &str) -> Result<(), TraceProblem> {
        let [id] = words(rest, "c ID")?;
        let id = number("allocation", id)?;
        if id == 0 {
            return Ok(());
        }
        if let Some((open, free_line)) = self.open_free
            && open == id
        {
            self.open_free = None;
            let known = self.known.get_mut(&id).ok_or(TraceProblem::NeverAllocated { id })?;
            known.completed = true;
            let block = known.block;
            return self.event(free_line, Event::Free { block });
        }
        self.close_free()?;
        let known = self.known.get_mut(&id).ok_or(TraceProblem::NeverAllocated { id })?;
        if known.completed {
            return Err(TraceProblem::CompletedTwice { id });
        }
        let Some(late) = known.late else { return Err(TraceProblem::CompletedUnfreed { id }) };
        known.completed = true;
        self.late[late as usize].completes_at = Some(self.counted);
        self.event(line, Event::Complete { late })
    }

    fn begin(&mut self, line: u64, rest: &str) -> Result<(), TraceProblem> {
        let [graph, pool, stream] = words(rest, "B GRAPH POOL STREAM")?;
        let number_of_graph = number("graph", graph)?;
        let pool = number("pool", pool)?;
        let stream = self.stream(stream)?;
        if pool == 0 {
            return Err(TraceProblem::DefaultPool);
        }
        if let Some((_, before)) = self.captured.get(&number_of_graph) {
            return Err(TraceProblem::CapturedTwice { graph: number_of_graph, before: *before });
        }
        if let Some(other) = self.capturing.get(&stream) {
            let graph = self.graphs[*other as usize].number;
            return Err(TraceProblem::StreamCapturing { stream: u64::from(stream), graph });
        }
        let graph = self.graphs.len() as u32;
        self.graphs.push(Graph { number: number_of_graph, pool, stream });
        self.captured.insert(number_of_graph, (graph, line));
        self.capturing.insert(stream, graph);
        self.event(line, Event::Begin { graph })
    }

    fn end(&mut self, line: u64, rest: &str) -> Result<(), TraceProblem> {
        let [graph] = words(rest, "E GRAPH")?;
        let graph = number("graph", graph)?;
        let open = self.captured.get(&graph).map(|(index, _)| *index).and_then(|index| {
            let stream = self.graphs[index as usize].stream;
            (self.capturing.get(&stream) == Some(&index)).then_some((index, stream))
        });
        let Some((index, stream)) = open else { return Err(TraceProblem::NotCapturing { graph }) };
        self.capturing.remove(&stream);
        self.event(line, Event::End { graph: index })
    }

    fn take(&mut self, line: u64, rest: &str) -> Result<(), TraceProblem> {
        let [address, bytes, stream] = words(rest, "S ADDR BYTES STREAM")?;
        let address = hexadecimal_number(address)?;
        let bytes = size(number("the size", bytes)?)?;
        let stream = self.stream(stream)?;
        let end = address.checked_add(bytes).filter(|_| address > 0).ok_or(TraceProblem::Address { address, bytes })?;
        let before = self.standing.range(..end).next_back();
        if let Some((start, (index, other))) = before
            && start + self.segments[*index as usize].bytes > address
        {
            return Err(TraceProblem::SegmentOverlaps { address, bytes, other: *other });
        }
        self.standing.insert(address, (self.segments.len() as u32, line));
        self.segments.push(RecordedSegment {
            address: Address(address),
            bytes,
            stream,
            taken_before: self.events.len() as u32,
            given_back_before: None,
        });
        Ok(())
    }

    fn give_back(&mut self, rest: &str) -> Result<(), TraceProblem> {
        let [address, bytes] = words(rest, "s ADDR BYTES")?;
        let address = hexadecimal_number(address)?;
        let bytes = number("the size", bytes)?;
        let missing = TraceProblem::NoSegment { address, bytes };
        let Some((index, _)) = self.standing.get(&address) else { return Err(missing) };
        let segment = &mut self.segments[*index as usize];
        if segment.bytes != bytes {
            return Err(missing);
        }
        segment.given_back_before = Some(self.events.len() as u32);
        self.standing.remove(&address);
        self.given_back += 1;
        Ok(())
    }

    fn stream(&mut self, word: &str) -> Result<u16, TraceProblem> {
        let stream = number("stream", word)?;
        if stream >= MAX_STREAMS {
            return Err(TraceProblem::Stream { stream });
        }
        let stream = stream as u16;
        self.streams = self.streams.max(stream + 1);
        Ok(stream)
    }

    fn finish(mut self, header: Header) -> Result<Trace, TraceProblem> {
        self.close_free()?;
        let taken = self.segments.len() as u64;
        let counts = [
            ("allocs", header.allocs, self.blocks.len() as u64 + 1),
            ("device_allocs", header.device_allocs, taken + 1),
            ("segments_end", header.segments_end, taken - self.given_back),
        ];
        for (field, promised, found) in counts {
            if promised != found {
                return Err(TraceProblem::Count { field, promised, found });
            }
        }
        Ok(Trace {
            file: String::new(),
            of_history: false,
            header,
            events: self.events,
            lines: self.lines,
            late: self.late,
            graphs: self.graphs,
            segments: self.segments,
            blocks: self.blocks,
            streams: self.streams,
            counted: self.counted,
        })
    }
}

fn words<'a, const N: usize>(rest: &'a str, form: &'static str) -> Result<[&'a str; N], TraceProblem> {
    let mut parts = rest.split(' ');
    let words: Option<Vec<&str>> = (0..N).map(|_| parts.next()).collect();
    match words.and_then(|words| <[&str; N]>::try_from(words).ok()) {
        Some(words) if parts.next().is_none() && words.iter().all(|w| !w.is_empty()) => Ok(words),
        _ => Err(TraceProblem::Form { form, found: excerpt(rest) }),
    }
}

fn number(what: &'static str, word: &str) -> Result<u64, TraceProblem> {
    decimal(word).ok_or_else(|| TraceProblem::Number { what, found: excerpt(word) })
}

fn hexadecimal_number(word: &str) -> Result<u64, TraceProblem> {
    hexadecimal(word).ok_or_else(|| TraceProblem::Number { what: "the address", found: excerpt(word) })
}

fn size(bytes: u64) -> Result<u64, TraceProblem> {
    if bytes == 0 || bytes > MAX_BYTES { Err(TraceProblem::Size { bytes }) } else { Ok(bytes) }
}
