//! Writing a pickle that PyTorch's memory viewer and Python's own unpickler read.
//!
//! Protocol 4 without frames, and only opcodes from the viewer's list. Texts and stacks are memoised: a stack that a thousand events
//! share is written once. Lists are written in pieces, as Python does: the viewer hands the items of a piece to one call, and browsers bound
//! how many arguments a call may have.

use std::collections::HashMap;
use std::io::{self, Write};

use super::sink::Sink;
use crate::stacks::{StackId, Stacks};

/// Items of a list that one opcode appends, as in Python.
const PIECE: u32 = 1_000;

/// Writes one pickle.
pub(crate) struct PickleSink<W> {
    to: W,
    /// What is open, outermost first: a dictionary, or a list with how many items its last piece has.
    open: Vec<Option<u32>>,
    texts: HashMap<String, u32>,
    stacks: HashMap<u32, u32>,
    memoised: u32,
}

impl<W: Write> PickleSink<W> {
    pub(crate) fn new(mut to: W) -> io::Result<Self> {
        to.write_all(&[0x80, 4])?;
        Ok(Self { to, open: Vec::new(), texts: HashMap::new(), stacks: HashMap::new(), memoised: 0 })
    }

    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.to.write_all(b".")?;
        self.to.flush()
    }

    /// Remembers what was just written, and under which number.
    fn memoise(&mut self) -> io::Result<u32> {
        self.memoised += 1;
        self.to.write_all(&[0x94])?;
        Ok(self.memoised - 1)
    }

    /// A value comes. In a list whose last piece is full, another is begun.
    fn item(&mut self) -> io::Result<()> {
        let Some(Some(items)) = self.open.last_mut() else { return Ok(()) };
        if *items == PIECE {
            *items = 0;
            self.to.write_all(b"e(")?;
        }
        *items += 1;
        Ok(())
    }

    fn recall(&mut self, number: u32) -> io::Result<()> {
        match u8::try_from(number) {
            Ok(short) => self.to.write_all(&[b'h', short]),
            Err(_) => {
                self.to.write_all(b"j")?;
                self.to.write_all(&number.to_le_bytes())
            }
        }
    }
}

impl<W: Write> Sink for PickleSink<W> {
    fn open_dict(&mut self) -> io::Result<()> {
        self.item()?;
        self.open.push(None);
        self.to.write_all(b"}(")
    }

    fn close_dict(&mut self) -> io::Result<()> {
        self.open.pop();
        self.to.write_all(b"u")
    }

    fn open_list(&mut self) -> io::Result<()> {
        self.item()?;
        self.open.push(Some(0));
        self.to.write_all(b"](")
    }

    fn close_list(&mut self) -> io::Result<()> {
        self.open.pop();
        self.to.write_all(b"e")
    }

    fn key(&mut self, key: &str) -> io::Result<()> {
        self.text(key)
    }

    fn none(&mut self) -> io::Result<()> {
        self.item()?;
        self.to.write_all(b"N")
    }

    fn truth(&mut self, value: bool) -> io::Result<()> {
        self.item()?;
        self.to.write_all(&[if value { 0x88 } else { 0x89 }])
    }

    fn integer(&mut self, value: i128) -> io::Result<()> {
        self.item()?;
        if let Ok(byte) = u8::try_from(value) {
            return self.to.write_all(&[b'K', byte]);
        }
        if let Ok(two) = u16::try_from(value) {
            self.to.write_all(b"M")?;
            return self.to.write_all(&two.to_le_bytes());
        }
        if let Ok(four) = i32::try_from(value) {
            self.to.write_all(b"J")?;
            return self.to.write_all(&four.to_le_bytes());
        }
        let bytes = value.to_le_bytes();
        // The shortest form that has the sign in its highest bit.
        let fill = if value < 0 { 0xff } else { 0 };
        let spare = bytes.iter().rev().take_while(|byte| **byte == fill).count();
        let mut length = bytes.len() - spare;
        if length == 0 || (bytes[length - 1] & 0x80 != 0) != (value < 0) {
            length += 1;
        }
        self.to.write_all(&[0x8a, length as u8])?;
        self.to.write_all(&bytes[..length])
    }

    fn float(&mut self, value: f64) -> io::Result<()> {
        self.item()?;
        self.to.write_all(b"G")?;
        self.to.write_all(&value.to_be_bytes())
    }

    fn text(&mut self, value: &str) -> io::Result<()> {
        self.item()?;
        if let Some(number) = self.texts.get(value) {
            return self.recall(*number);
        }
        match u8::try_from(value.len()) {
            Ok(short) => self.to.write_all(&[0x8c, short])?,
            Err(_) => {
                let long = u32::try_from(value.len()).map_err(|_| io::Error::other("a text of 4 GiB"))?;
                self.to.write_all(b"X")?;
                self.to.write_all(&long.to_le_bytes())?;
            }
        }
        self.to.write_all(value.as_bytes())?;
        let number = self.memoise()?;
        self.texts.insert(value.to_owned(), number);
        Ok(())
    }

    fn pair(&mut self, value: (u64, u64)) -> io::Result<()> {
        self.item()?;
        // Neither number is an item of what is open around the pair.
        self.open.push(None);
        self.integer(value.0.into())?;
        self.integer(value.1.into())?;
        self.open.pop();
        self.to.write_all(&[0x86])
    }

    fn stack(&mut self, stacks: &Stacks, id: StackId) -> io::Result<()> {
        self.item()?;
        if let Some(number) = self.stacks.get(&id.0) {
            return self.recall(*number);
        }
        self.to.write_all(b"]")?;
        let number = self.memoise()?;
        self.stacks.insert(id.0, number);
        self.open.push(Some(0));
        self.to.write_all(b"(")?;
        self.frames(stacks, id)?;
        self.close_list()
    }
}
