//! Reading a pickle: a stack machine that builds data and can do nothing else.
//!
//! It knows the opcodes that plain data needs, protocols 2 to 5. Whatever names, makes or calls an object is an error that says so, so no
//! pickle can run anything. Memory is the tree's budget; time is linear in the file: no opcode does more than it pushes or pops.

use super::tree::{Tree, Value};
use crate::read::Problem;

/// Reads one pickle. What follows it in `bytes` is ignored, as in Python.
pub(crate) fn read(bytes: &[u8], tree: &mut Tree) -> Result<Value, Problem> {
    let mut machine = Machine { bytes, at: 0, stack: Vec::new(), marks: Vec::new(), memo: Vec::new() };
    match machine.run(tree) {
        // A reference to nothing in memory can only come from a file that ends too early or was damaged.
        Err(Problem::Pickled { what, .. }) => Err(Problem::Pickled { what, at: machine.at as u64 }),
        other => other,
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    /// Heights of the stack at open marks.
    marks: Vec<u32>,
    memo: Vec<Value>,
}

const fn broken(what: &'static str) -> Problem {
    Problem::Pickled { what, at: 0 }
}

impl<'a> Machine<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Problem> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else { return Err(broken("the file ends in the middle")) };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    /// A little-endian number of up to 8 bytes.
    fn number(&mut self, bytes: usize) -> Result<u64, Problem> {
        Ok(self.take(bytes)?.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte)))
    }

    fn push(&mut self, tree: &mut Tree, value: Value) -> Result<(), Problem> {
        tree.budget.push(&mut self.stack, value)
    }

    fn floor(&self) -> usize {
        self.marks.last().map_or(0, |mark| *mark as usize)
    }

    fn pop(&mut self) -> Result<Value, Problem> {
        if self.stack.len() <= self.floor() {
            return Err(broken("an opcode wants more than there is"));
        }
        self.stack.pop().ok_or(broken("an opcode wants more than there is"))
    }

    fn top(&self) -> Result<Value, Problem> {
        self.stack.last().copied().ok_or(broken("an opcode wants more than there is"))
    }

    /// Where the values above the last mark begin; the mark is gone.
    fn above_mark(&mut self) -> Result<usize, Problem> {
        self.marks.pop().map(|mark| mark as usize).ok_or(broken("an opcode wants a mark"))
    }

    fn put(&mut self, tree: &mut Tree, index: u64) -> Result<(), Problem> {
        let value = self.top()?;
        let index = usize::try_from(index).map_err(|_| broken("a memo of that number"))?;
        if index >= self.memo.len() {
            let more = (index + 1 - self.memo.len()).max(if index == self.memo.len() { self.memo.len() } else { 0 });
            if index >= self.memo.capacity() {
                tree.budget.reserve(&mut self.memo, more)?;
            }
            self.memo.resize(index + 1, Value::ABSENT);
        }
        self.memo[index] = value;
        Ok(())
    }

    fn get(&mut self, tree: &mut Tree, index: u64) -> Result<(), Problem> {
        let value = usize::try_from(index).ok().and_then(|index| self.memo.get(index)).copied();
        match value {
            Some(value) if value != Value::ABSENT => self.push(tree, value),
            _ => Err(broken("something is referred to that is not there")),
        }
    }

    fn text(&mut self, tree: &mut Tree, length: u64) -> Result<(), Problem> {
        let length = usize::try_from(length).map_err(|_| broken("the file ends in the middle"))?;
        let text = std::str::from_utf8(self.take(length)?).map_err(|_| broken("a text that is not UTF-8"))?;
        let value = tree.text(text)?;
        self.push(tree, value)
    }

    fn tuple(&mut self, tree: &mut Tree, from: usize) -> Result<(), Problem> {
        if self.stack.len() < from || from < self.floor() {
            return Err(broken("an opcode wants more than there is"));
        }
        let mut items = Vec::new();
        tree.budget.reserve(&mut items, self.stack.len() - from)?;
        items.extend(self.stack.drain(from..));
        let value = tree.list(items)?;
        self.push(tree, value)
    }

    fn last(&self, count: usize) -> Result<usize, Problem> {
        self.stack.len().checked_sub(count).ok_or(broken("an opcode wants more than there is"))
    }

    fn dict(&mut self, tree: &mut Tree, from: usize) -> Result<(), Problem> {
        let dict = tree.dict()?;
        tree.insert(dict, &self.stack[from..])?;
        self.stack.truncate(from);
        self.push(tree, dict)
    }

    fn insert(&mut self, tree: &mut Tree, from: usize) -> Result<(), Problem> {
        if !(self.stack.len() - from).is_multiple_of(2) {
            return Err(broken("a key without a value"));
        }
        let dict = from.checked_sub(1).filter(|at| *at >= self.floor()).map(|at| self.stack[at]);
        let dict = dict.ok_or(broken("an opcode wants more than there is"))?;
        if !tree.insert(dict, &self.stack[from..])? {
            return Err(broken("a key for what is no dictionary"));
        }
        self.stack.truncate(from);
        Ok(())
    }

    fn extend(&mut self, tree: &mut Tree, from: usize) -> Result<(), Problem> {
        let list = from.checked_sub(1).filter(|at| *at >= self.floor()).map(|at| self.stack[at]);
        let list = list.ok_or(broken("an opcode wants more than there is"))?;
        if !tree.extend(list, &self.stack[from..])? {
            return Err(broken("an item for what is no list"));
        }
        self.stack.truncate(from);
        Ok(())
    }

    fn integer(&mut self, tree: &mut Tree, value: i128) -> Result<(), Problem> {
        let value = tree.integer(value)?;
        self.push(tree, value)
    }

    /// A little-endian number in two's complement.
    fn long(&mut self, tree: &mut Tree, length: u64) -> Result<(), Problem> {
        if length > 15 {
            return Err(broken("an integer of more than 15 bytes"));
        }
        let bytes = self.take(length as usize)?;
        let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let value = bytes.iter().rev().fold(if negative { -1_i128 } else { 0 }, |n, byte| n << 8 | i128::from(*byte));
        self.integer(tree, value)
    }

    fn run(&mut self, tree: &mut Tree) -> Result<Value, Problem> {
        loop {
            let opcode = self.take(1)?[0];
            match opcode {
                0x80 => match self.number(1)? {
                    2..=5 => {}
                    version => return Err(Problem::Protocol { version: version as u8 }),
                },
                // A frame says how much may be read at once: nothing that is needed here.
                0x95 => {
                    self.take(8)?;
                }
                b'.' if self.marks.is_empty() => return self.pop(),
                b'.' => return Err(broken("it ends under a mark")),
                b'(' => {
                    let mark = self.stack.len() as u32;
                    tree.budget.push(&mut self.marks, mark)?;
                }
                b'N' => self.push(tree, Value::NONE)?,
                0x88 => self.push(tree, Value::truth(true))?,
                0x89 => self.push(tree, Value::truth(false))?,
                b'K' => {
                    let value = self.number(1)?;
                    self.integer(tree, value.into())?;
                }
                b'M' => {
                    let value = self.number(2)?;
                    self.integer(tree, value.into())?;
                }
                b'J' => {
                    let value = self.number(4)? as u32 as i32;
                    self.integer(tree, value.into())?;
                }
                0x8a => {
                    let length = self.number(1)?;
                    self.long(tree, length)?;
                }
                0x8b => {
                    let length = self.number(4)?;
                    self.long(tree, length)?;
                }
                b'G' => {
                    let mut bytes = [0; 8];
                    bytes.copy_from_slice(self.take(8)?);
                    let value = tree.float(f64::from_be_bytes(bytes))?;
                    self.push(tree, value)?;
                }
                0x8c => {
                    let length = self.number(1)?;
                    self.text(tree, length)?;
                }
                b'X' => {
                    let length = self.number(4)?;
                    self.text(tree, length)?;
                }
                0x8d => {
                    let length = self.number(8)?;
                    self.text(tree, length)?;
                }
                b']' | b')' => {
                    let value = tree.list(Vec::new())?;
                    self.push(tree, value)?;
                }
                b'}' => {
                    let value = tree.dict()?;
                    self.push(tree, value)?;
                }
                b't' | b'l' => {
                    let from = self.above_mark()?;
                    self.tuple(tree, from)?;
                }
                0x85..=0x87 => {
                    let from = self.last(usize::from(opcode) - 0x84)?;
                    self.tuple(tree, from)?;
                }
                b'd' => {
                    let from = self.above_mark()?;
                    if !(self.stack.len() - from).is_multiple_of(2) {
                        return Err(broken("a key without a value"));
                    }
                    self.dict(tree, from)?;
                }
                b'a' => {
                    let from = self.last(1)?;
                    self.extend(tree, from)?;
                }
                b'e' => {
                    let from = self.above_mark()?;
                    self.extend(tree, from)?;
                }
                b's' => {
                    let from = self.last(2)?;
                    self.insert(tree, from)?;
                }
                b'u' => {
                    let from = self.above_mark()?;
                    self.insert(tree, from)?;
                }
                0x94 => self.put(tree, self.memo.len() as u64)?,
                b'q' => {
                    let index = self.number(1)?;
                    self.put(tree, index)?;
                }
                b'r' => {
                    let index = self.number(4)?;
                    self.put(tree, index)?;
                }
                b'h' => {
                    let index = self.number(1)?;
                    self.get(tree, index)?;
                }
                b'j' => {
                    let index = self.number(4)?;
                    self.get(tree, index)?;
                }
                opcode => return Err(Problem::Opcode { opcode, at: self.at as u64 - 1 }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::tree::{Budget, Kind};

    fn with(bytes: &[u8]) -> Result<(Tree, Value), Problem> {
        let mut tree = Tree::new(Budget::of_file(bytes.len() as u64));
        let value = read(bytes, &mut tree)?;
        Ok((tree, value))
    }

    #[test]
    fn integers_of_every_width() {
        for (bytes, expected) in [
            (&b"\x80\x02K\xff."[..], 255),
            (b"\x80\x02M\xff\xff.", 65_535),
            (b"\x80\x02J\xff\xff\xff\xff.", -1),
            (b"\x80\x02\x8a\x00.", 0),
            (b"\x80\x02\x8a\x01\xff.", -1),
            (b"\x80\x02\x8a\x02\xff\x00.", 255),
            (b"\x80\x02\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00.", u64::MAX.into()),
        ] {
            let (tree, value) = with(bytes).unwrap();
            assert_eq!(tree.kind(value), Kind::Integer(expected), "{bytes:?}");
        }
        assert!(matches!(with(b"\x80\x02\x8a\x10................."), Err(Problem::Pickled { .. })));
    }

    #[test]
    fn nothing_that_names_or_calls_is_read() {
        // os.system("true"), as any book on the matter has it, and the opcodes one by one.
        let classic = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.";
        assert!(matches!(with(classic), Err(Problem::Opcode { opcode: 0x93, at: 19 })));
        for opcode in *b"cRbioPQ0123456789\x81\x82\x83\x84\x8e\x8f\x90\x91\x92\x93\x96\x97\x98" {
            let result = with(&[0x80, 4, b'N', opcode, 0, 0, 0, 0, b'.']);
            assert!(matches!(result, Err(Problem::Opcode { .. })), "{opcode:#x}: {result:?}");
        }
    }

    #[test]
    fn an_opcode_finds_no_more_than_there_is() {
        for bytes in [
            &b""[..],
            b".",
            b"\x80",
            b"\x80\x01",
            b"\x80\x04",
            b"\x80\x04a.",
            b"\x80\x04]a.",
            b"\x80\x04NNa.",
            b"\x80\x04}Nu.",
            b"\x80\x04}(Nu.",
            b"\x80\x04e.",
            b"\x80\x04(e.",
            b"\x80\x04(u.",
            b"\x80\x04}Ns.",
            b"\x80\x04\x87.",
            b"\x80\x04N(\x85.",
            b"\x80\x04h\x00.",
            b"\x80\x04\x94.",
            b"\x80\x04r\xff\xff\xff\xff.",
            b"\x80\x04]r\xff\xff\xff\xff.",
            b"\x80\x04X\xff\xff\xff\xff.",
            b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
            b"\x80\x04\x8c\x01\xff.",
            b"\x80\x04(N.",
            b"\x80\x04N(a.",
            b"\x80\x04](.",
            b"\x80\x04N(NNs.",
        ] {
            assert!(with(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_list_may_contain_itself() {
        let (tree, value) = with(b"\x80\x04]\x94h\x00a.").unwrap();
        let Kind::List(index) = tree.kind(value) else { panic!() };
        assert_eq!(tree.list_at(index), [value]);
    }
}
