//! Lines of a gzip file, read within bounds.
//!
//! Recordings come from anywhere, so reading one must end, whatever it holds: a file that expands without end, a line
//! without an end, a file cut off in the middle. [`Lines`] hands out one line at a time and holds no more than that
//! line.
//!
//! * **T1** Every line handed out ended in a newline; a last line without one is [`TextProblem::NoNewline`].
//! * **T2** No more than the limits' bytes are expanded, and no line longer than their line limit is held.
//! * **T3** The end is reported only after the gzip checksum was right, and with nothing left of the file.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::GzDecoder;

/// What can be wrong with a file before anyone looks at what its lines say.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextProblem {
    /// The file cannot be opened or read.
    #[error("cannot read the file: {0}")]
    Io(#[source] io::Error),
    /// The file does not begin as gzip does.
    #[error("this is not a gzip file (traces and conformance files are gzip: pack it)")]
    NotGzip,
    /// The file ends inside its compressed data.
    #[error("the file is truncated: its gzip data end too early")]
    TruncatedGzip,
    /// What follows the compressed data is none.
    #[error(
        "after the end of the gzip data come bytes that are none: something was added to the file, or it is damaged"
    )]
    Trailing,
    /// The compressed data contradict themselves.
    #[error("the gzip data are damaged ({0})")]
    DamagedGzip(#[source] io::Error),
    /// The last line has no newline.
    #[error("the file is truncated: its last line has no newline")]
    NoNewline,
    /// There is not even a header.
    #[error("the file is empty")]
    Empty,
    /// More text than any recording has.
    #[error("the file expands to more than {limit} bytes")]
    TooLong {
        /// The most that is read.
        limit: u64,
    },
    /// A line longer than any in a recording.
    #[error("the line is longer than {limit} bytes")]
    LineTooLong {
        /// The longest that is read.
        limit: usize,
    },
    /// The line is no text.
    #[error("the line is not UTF-8 text")]
    NotText,
}

/// "line N: " as errors begin; nothing for line 0, the file as a whole.
pub(crate) fn at_line(line: u64) -> String {
    if line == 0 { String::new() } else { format!("line {line}: ") }
}

/// How much is read at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes after expansion.
    pub(crate) total: u64,
    /// Bytes in one line.
    pub(crate) line: usize,
}

/// The lines of a gzip stream. See the module's documentation.
pub(crate) struct Lines<R: Read> {
    input: BufReader<Members<R>>,
    limits: Limits,
    line: Vec<u8>,
    total: u64,
}

impl<R: Read> Lines<R> {
    /// Reads the first bytes of `input` to see whether it is gzip at all.
    pub(crate) fn new(input: R, limits: Limits) -> Result<Self, TextProblem> {
        let mut input = BufReader::new(input);
        let start = input.fill_buf().map_err(TextProblem::Io)?;
        if start.is_empty() {
            return Err(TextProblem::Empty);
        }
        if !begins_as_gzip(start) {
            return Err(TextProblem::NotGzip);
        }
        let input = BufReader::with_capacity(1 << 16, Members::One(GzDecoder::new(input)));
        Ok(Self { input, limits, line: Vec::new(), total: 0 })
    }

    /// The next line without its newline, or `None` at the end.
    pub(crate) fn next_line(&mut self) -> Result<Option<&str>, TextProblem> {
        self.line.clear();
        loop {
            let chunk = match self.input.fill_buf() {
                Ok(chunk) => chunk,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(gzip_problem(error)),
            };
            if chunk.is_empty() {
                if !self.line.is_empty() {
                    return Err(TextProblem::NoNewline);
                }
                return Ok(None);
            }
            let newline = chunk.iter().position(|b| *b == b'\n');
            let text = newline.unwrap_or(chunk.len());
            if self.line.len() + text > self.limits.line {
                return Err(TextProblem::LineTooLong { limit: self.limits.line });
            }
            self.line.extend_from_slice(&chunk[..text]);
            let used = newline.map_or(text, |n| n + 1);
            self.input.consume(used);
            self.total += used as u64;
            if self.total > self.limits.total {
                return Err(TextProblem::TooLong { limit: self.limits.total });
            }
            if newline.is_some() {
                break;
            }
        }
        std::str::from_utf8(&self.line).map(Some).map_err(|_| TextProblem::NotText)
    }
}

/// What a gzip file holds: members, one after another.
enum Members<R> {
    /// In the middle of one, or just after it.
    One(GzDecoder<BufReader<R>>),
    /// After the last.
    Over,
}

impl<R: Read> Read for Members<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let Self::One(member) = self else { return Ok(0) };
            match member.read(into)? {
                0 if !into.is_empty() => {}
                bytes => return Ok(bytes),
            }
            let rest = member.get_mut().fill_buf()?;
            if !rest.is_empty() && !begins_as_gzip(rest) {
                return Err(io::Error::other(Trailing));
            }
            let more = !rest.is_empty();
            if let Self::One(member) = std::mem::replace(self, Self::Over)
                && more
            {
                *self = Self::One(GzDecoder::new(member.into_inner()));
            }
        }
    }
}

/// Why [`Members`] stop early.
#[derive(Debug, thiserror::Error)]
#[error("bytes after the gzip data")]
struct Trailing;

fn begins_as_gzip(bytes: &[u8]) -> bool {
    bytes.starts_with(&[0x1f, 0x8b]) || bytes == [0x1f]
}

fn gzip_problem(error: io::Error) -> TextProblem {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => TextProblem::TruncatedGzip,
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => TextProblem::DamagedGzip(error),
        _ if error.get_ref().is_some_and(|inner| inner.is::<Trailing>()) => TextProblem::Trailing,
        _ => TextProblem::Io(error),
    }
}

/// A decimal number as recordings write it: digits and nothing else, no leading zero but for `0` itself.
pub(crate) fn decimal(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits || (text.len() > 1 && text.starts_with('0')) {
        return None;
    }
    text.parse().ok()
}

/// A hexadecimal number as recordings write it: digits and nothing else.
pub(crate) fn hexadecimal(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u64::from_str_radix(text, 16).ok()
}

/// The first characters of what a file says, so that an error stays short.
pub(crate) fn excerpt(text: &str) -> String {
    const MOST: usize = 60;
    match text.char_indices().nth(MOST) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn read(bytes: &[u8], limits: Limits) -> Result<Vec<String>, TextProblem> {
        let mut lines = Lines::new(bytes, limits)?;
        let mut all = Vec::new();
        while let Some(line) = lines.next_line()? {
            all.push(line.to_owned());
        }
        Ok(all)
    }

    const LIMITS: Limits = Limits { total: 1000, line: 100 };

    #[test]
    fn lines_come_whole_and_in_order() {
        assert_eq!(read(&gzip(b"one\n\nthree\n"), LIMITS).unwrap(), ["one", "", "three"]);
        assert_eq!(read(&[gzip(b"one\nt"), gzip(b"wo\n")].concat(), LIMITS).unwrap(), ["one", "two"]);
    }

    #[test]
    fn what_is_no_gzip_file_is_told_apart_from_a_broken_one() {
        assert!(matches!(read(b"", LIMITS), Err(TextProblem::Empty)));
        assert!(matches!(read(b"plain text\n", LIMITS), Err(TextProblem::NotGzip)));
        let whole = gzip(b"one\ntwo\n");
        for cut in 1..whole.len() {
            let error = read(&whole[..cut], LIMITS).unwrap_err();
            assert!(matches!(error, TextProblem::TruncatedGzip), "{cut}: {error}");
        }
        let mut damaged = whole.clone();
        let at = damaged.len() - 6;
        damaged[at] ^= 1;
        let error = read(&damaged, LIMITS).unwrap_err();
        assert!(matches!(error, TextProblem::DamagedGzip(_)), "{error:?}");
        for added in [&b"what is no gzip header"[..], b"\n", b"\0\0\0\0", b"\x1e\x8b"] {
            let error = read(&[&whole[..], added].concat(), LIMITS).unwrap_err();
            assert!(matches!(error, TextProblem::Trailing), "{added:?}: {error:?}");
        }
        for begun in [&whole[..5], b"\x1f", b"\x1f\x8b"] {
            let error = read(&[&whole[..], begun].concat(), LIMITS).unwrap_err();
            assert!(matches!(error, TextProblem::TruncatedGzip), "{begun:?}: {error:?}");
        }
    }

    #[test]
    fn a_last_line_without_newline_is_truncated() {
        assert!(matches!(read(&gzip(b"one\ntwo"), LIMITS), Err(TextProblem::NoNewline)));
    }

    #[test]
    fn a_file_that_expands_without_end_is_given_up() {
        let bomb = gzip(&vec![b'\n'; 10_000_000]);
        assert!(bomb.len() < 100_000);
        assert!(matches!(read(&bomb, LIMITS), Err(TextProblem::TooLong { limit: 1000 })));
        let long = gzip(&vec![0; 10_000_000]);
        assert!(matches!(read(&long, LIMITS), Err(TextProblem::LineTooLong { limit: 100 })));
    }

    #[test]
    fn numbers_are_digits_and_nothing_else() {
        assert_eq!(decimal("0"), Some(0));
        assert_eq!(decimal("18446744073709551615"), Some(u64::MAX));
        for bad in ["", "+1", "-1", "01", "1 ", "1.5", "1e3", "18446744073709551616", "0x10", "١"] {
            assert_eq!(decimal(bad), None, "{bad}");
        }
        assert_eq!(hexadecimal("7f2118000000"), Some(0x7f21_1800_0000));
        for bad in ["", "0x7f", "-1", "g", "10000000000000000"] {
            assert_eq!(hexadecimal(bad), None, "{bad}");
        }
    }
}
