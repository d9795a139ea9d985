//! Reading a snapshot, pickle or JSON: rules S1 to S4.

use std::fmt;
use std::io::{self, Read};

use crate::convert;
use crate::format::tree::{Budget, Tree};
use crate::format::{json, pickle_read};
use crate::model::Snapshot;

/// No snapshot of this size is read.
const LARGEST: u64 = 2 << 30;

/// A file is no snapshot, and where it shows.
#[derive(Debug, thiserror::Error)]
#[error("{file}{}: {problem}", if .path.is_empty() { String::new() } else { format!(": {}", .path) })]
pub struct ReadError {
    /// The file, or what stands for one.
    pub file: String,
    /// The place in it, like `segments[3].blocks[0].size`; empty if it is the file as a whole.
    pub path: String,
    /// What is wrong there.
    #[source]
    pub problem: Problem,
}

/// What is wrong with a snapshot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The file cannot be read.
    #[error("cannot read the file: {0}")]
    Io(#[source] io::Error),
    /// There is nothing in the file.
    #[error("the file is empty")]
    EmptyFile,
    /// The file is larger than any snapshot.
    #[error("the file has more than {LARGEST} bytes")]
    TooLarge,
    /// What the file holds would take more memory than a file of its length may.
    #[error("what it holds takes more than {limit} bytes of memory, which no snapshot of this length needs")]
    Memory {
        /// The most it may take.
        limit: u64,
    },
    /// The file is a pickle of a version that is not read.
    #[error("this is a pickle of protocol {version}; protocols 2 to 5 are read")]
    Protocol {
        /// The version.
        version: u8,
    },
    /// The file is a pickle that does more than hold data.
    #[error("byte {at}: the pickle has opcode {opcode:#04x}, which plain data does not need; it is not run")]
    Opcode {
        /// The opcode.
        opcode: u8,
        /// Where it is.
        at: u64,
    },
    /// The file is a damaged pickle.
    #[error("before byte {at}: {what}: the pickle is damaged")]
    Pickled {
        /// What is wrong.
        what: &'static str,
        /// How far it was read.
        at: u64,
    },
    /// Values inside values without end.
    #[error("values lie in values more than {0} deep")]
    Depth(usize),
    /// The file is packed.
    #[error("this is a gzip file: unpack it, if there is a snapshot in it; traces are replayed")]
    Packed,
    /// The file is of neither kind.
    #[error("this is neither a pickle of protocols 2 to 5 nor JSON")]
    NeitherKind,
    /// The file is no JSON.
    #[error("this is not JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// A value of another kind than there should be.
    #[error("{expected} is expected here, not {found}")]
    Kind {
        /// What should be there.
        expected: Expected,
        /// What is there.
        found: &'static str,
    },
    /// A key that must be there is not.
    #[error("the key is missing")]
    Missing,
    /// A word that should be one of a few.
    #[error("{found:?} is not known here")]
    Word {
        /// The word.
        found: String,
    },
    /// A number beyond what it can be.
    #[error("{value} is too large: at most {most} makes sense here")]
    Range {
        /// The number.
        value: u64,
        /// The largest that it can be.
        most: u64,
    },
    /// A segment whose end no address has.
    #[error("a segment of {bytes} bytes does not fit at {address:#x}")]
    Address {
        /// Where it begins.
        address: u64,
        /// Its size.
        bytes: u64,
    },
    /// A block or segment in which more is said to be used or requested than it has.
    #[error("{bytes} bytes are more than the {whole} that it is a part of")]
    Beyond {
        /// What is said.
        bytes: u64,
        /// Bytes of the block or segment.
        whole: u64,
    },
    /// Segments that no address space holds.
    #[error("the segments up to here add up to more bytes than there are addresses")]
    Sum,
    /// The blocks of a segment do not fill it.
    #[error("the blocks add up to {blocks} bytes, the segment has {segment}")]
    Tiling {
        /// Bytes in blocks.
        blocks: u64,
        /// Bytes of the segment.
        segment: u64,
    },
    /// A block is not where the one before it ends.
    #[error("the block is at {address:#x}, but the one before it ends at {expected:#x}")]
    BlockAddress {
        /// Where it is.
        address: u64,
        /// Where it should be.
        expected: u64,
    },
    /// A block or segment of no bytes.
    #[error("a size of 0 bytes")]
    Empty,
    /// Two segments have bytes in common.
    #[error("the segment at {address:#x} overlaps the one at {other:#x}")]
    Overlap {
        /// Where it is.
        address: u64,
        /// Where the other is.
        other: u64,
    },
}

/// What should be at some place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Expected {
    /// An object.
    Object,
    /// A list.
    List,
    /// An unsigned integer.
    Unsigned,
    /// A string.
    Text,
    /// True or false.
    Truth,
    /// A pair of unsigned integers.
    Pair,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Object => "an object",
            Self::List => "a list",
            Self::Unsigned => "an unsigned integer",
            Self::Text => "a string",
            Self::Truth => "true or false",
            Self::Pair => "a pair of unsigned integers",
        })
    }
}

impl Snapshot {
    /// Reads a snapshot, PyTorch's (2.5 to 2.15) or this project's, as a pickle or as JSON. `name` stands for the file in errors.
    ///
    /// Nothing in a pickle is run. At most 2 GiB are read, and reading takes at most 64 MiB and 8 times that: a file that needs more is
    /// refused.
    ///
    /// # Errors
    ///
    /// When the input is no snapshot; the error names the place.
    pub fn read(name: &str, input: impl Read) -> Result<Self, ReadError> {
        let whole = |problem| ReadError { file: name.to_owned(), path: String::new(), problem };
        let mut bytes = Vec::new();
        input.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|e| whole(Problem::Io(e)))?;
        if bytes.len() as u64 > LARGEST {
            return Err(whole(Problem::TooLarge));
        }
        if bytes.is_empty() {
            return Err(whole(Problem::EmptyFile));
        }
        let mut tree = Tree::new(Budget::of_file(bytes.len() as u64));
        let read = match (bytes.trim_ascii_start().first(), &bytes[..]) {
            (_, [0x80, ..]) => pickle_read::read,
            (_, [0x1f, 0x8b, ..]) => return Err(whole(Problem::Packed)),
            // What else JSON can be says so by its kind.
            (Some(b'{' | b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f' | b'n'), _) => json::read,
            _ => return Err(whole(Problem::NeitherKind)),
        };
        let value = read(&bytes, &mut tree).map_err(whole)?;
        drop(bytes);
        convert::snapshot(tree, value).map_err(|wrong| ReadError {
            file: name.to_owned(),
            path: wrong.path,
            problem: wrong.problem,
        })
    }
}
