//! What a file holds, before anyone asks what it means: a compact tree with a budget.
//!
//! * **T1** Every byte that a file makes us keep is charged before it is taken. What would go beyond the budget is refused, so no file
//!   takes more than [`FREE`] bytes and [`TIMES`] times its length.
//! * **T2** A value may be referred to more than once, and even contain itself: whoever walks the tree must not follow without bounds.

use std::collections::HashMap;
use std::sync::Arc;

use super::keys::{Key, key_of};
use crate::read::Problem;

/// Bytes that any file may take.
const FREE: u64 = 64 << 20;
/// Bytes that a file may take for each of its own.
const TIMES: u64 = 8;
/// What the system's allocator takes beside each piece.
const OVERHEAD: u64 = 16;

/// What a reader may still take.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    used: u64,
}

impl Budget {
    /// For a file of that many bytes, which are in memory already.
    pub(crate) fn of_file(bytes: u64) -> Self {
        Self { limit: FREE.saturating_add(bytes.saturating_mul(TIMES)), used: bytes }
    }

    /// Takes bytes off what is left.
    pub(crate) fn charge(&mut self, bytes: u64) -> Result<(), Problem> {
        self.used = self.used.saturating_add(bytes);
        if self.used > self.limit { Err(Problem::Memory { limit: self.limit }) } else { Ok(()) }
    }

    /// Adds to a list, charged.
    pub(crate) fn push<T>(&mut self, list: &mut Vec<T>, item: T) -> Result<(), Problem> {
        if list.len() == list.capacity() {
            let more = list.capacity().max(4);
            self.reserve(list, more)?;
        }
        list.push(item);
        Ok(())
    }

    /// Makes room in a list, charged: old and new place are there at once for a moment.
    pub(crate) fn reserve<T>(&mut self, list: &mut Vec<T>, more: usize) -> Result<(), Problem> {
        let wanted = list.len().saturating_add(more);
        if wanted > list.capacity() {
            self.charge((wanted as u64).saturating_mul(size_of::<T>() as u64).saturating_add(OVERHEAD))?;
            list.reserve_exact(more);
        }
        Ok(())
    }
}

/// A value: its kind in the low three bits, and a small integer or the index of the rest above them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Value(u64);

/// What a value is.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Kind {
    None,
    Truth(bool),
    Integer(i128),
    Float(f64),
    Text(u32),
    List(u32),
    Dict(u32),
}

const SMALL: u64 = 0;
const SINGLE: u64 = 1;
const BIG: u64 = 2;
const FLOAT: u64 = 3;
const TEXT: u64 = 4;
const LIST: u64 = 5;
const DICT: u64 = 6;

impl Value {
    pub(crate) const NONE: Self = Self(SINGLE);
    /// Stands for nothing at all. No file holds it.
    pub(crate) const ABSENT: Self = Self(SINGLE | 3 << 3);

    pub(crate) const fn truth(yes: bool) -> Self {
        Self(SINGLE | (1 + yes as u64) << 3)
    }

    const fn index(kind: u64, index: u32) -> Self {
        Self(kind | (index as u64) << 3)
    }
}

/// The tree.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) budget: Budget,
    big: Vec<i128>,
    floats: Vec<f64>,
    texts: Vec<(Arc<str>, Key)>,
    known: HashMap<Arc<str>, u32>,
    lists: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Value, Value)>>,
}

impl Tree {
    pub(crate) fn new(budget: Budget) -> Self {
        Self {
            budget,
            big: Vec::new(),
            floats: Vec::new(),
            texts: Vec::new(),
            known: HashMap::new(),
            lists: Vec::new(),
            dicts: Vec::new(),
        }
    }

    pub(crate) fn integer(&mut self, value: i128) -> Result<Value, Problem> {
        if let Ok(small) = i64::try_from(value)
            && (small << 3) >> 3 == small
        {
            return Ok(Value(SMALL | (small << 3) as u64));
        }
        self.budget.push(&mut self.big, value)?;
        Ok(Value::index(BIG, self.big.len() as u32 - 1))
    }

    pub(crate) fn float(&mut self, value: f64) -> Result<Value, Problem> {
        self.budget.push(&mut self.floats, value)?;
        Ok(Value::index(FLOAT, self.floats.len() as u32 - 1))
    }

    /// Equal texts are one.
    pub(crate) fn text(&mut self, text: &str) -> Result<Value, Problem> {
        if let Some(known) = self.known.get(text) {
            return Ok(Value::index(TEXT, *known));
        }
        // The text, and its places in the list and the table, which may be half empty.
        self.budget.charge(text.len() as u64 + 6 * OVERHEAD)?;
        let shared: Arc<str> = Arc::from(text);
        self.budget.push(&mut self.texts, (Arc::clone(&shared), key_of(text)))?;
        let index = self.texts.len() as u32 - 1;
        self.known.insert(shared, index);
        Ok(Value::index(TEXT, index))
    }

    pub(crate) fn list(&mut self, items: Vec<Value>) -> Result<Value, Problem> {
        self.budget.push(&mut self.lists, items)?;
        Ok(Value::index(LIST, self.lists.len() as u32 - 1))
    }

    pub(crate) fn dict(&mut self) -> Result<Value, Problem> {
        self.budget.push(&mut self.dicts, Vec::new())?;
        Ok(Value::index(DICT, self.dicts.len() as u32 - 1))
    }

    /// Adds to a list; `false` for what is none.
    pub(crate) fn extend(&mut self, list: Value, items: &[Value]) -> Result<bool, Problem> {
        let Kind::List(index) = self.kind(list) else { return Ok(false) };
        let list = &mut self.lists[index as usize];
        if list.capacity() - list.len() < items.len() {
            let more = items.len().max(list.len());
            self.budget.reserve(list, more)?;
        }
        list.extend_from_slice(items);
        Ok(true)
    }

    /// Adds keys and values in turn to a dictionary; `false` for what is none.
    pub(crate) fn insert(&mut self, dict: Value, pairs: &[Value]) -> Result<bool, Problem> {
        let Kind::Dict(index) = self.kind(dict) else { return Ok(false) };
        let dict = &mut self.dicts[index as usize];
        let pairs = pairs.as_chunks::<2>().0;
        if dict.capacity() - dict.len() < pairs.len() {
            let more = pairs.len().max(dict.len());
            self.budget.reserve(dict, more)?;
        }
        dict.extend(pairs.iter().map(|[key, value]| (*key, *value)));
        Ok(true)
    }

    pub(crate) fn kind(&self, value: Value) -> Kind {
        let index = (value.0 >> 3) as usize;
        match value.0 & 7 {
            SMALL => Kind::Integer(i128::from(value.0 as i64 >> 3)),
            BIG => Kind::Integer(self.big[index]),
            FLOAT => Kind::Float(self.floats[index]),
            TEXT => Kind::Text(index as u32),
            LIST => Kind::List(index as u32),
            DICT => Kind::Dict(index as u32),
            _ => match index {
                1 => Kind::Truth(false),
                2 => Kind::Truth(true),
                _ => Kind::None,
            },
        }
    }

    pub(crate) fn text_at(&self, index: u32) -> &Arc<str> {
        &self.texts[index as usize].0
    }

    pub(crate) fn key_at(&self, index: u32) -> Key {
        self.texts[index as usize].1
    }

    pub(crate) fn list_at(&self, index: u32) -> &[Value] {
        &self.lists[index as usize]
    }

    pub(crate) fn dict_at(&self, index: u32) -> &[(Value, Value)] {
        &self.dicts[index as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_as_they_went_in() {
        let mut tree = Tree::new(Budget::of_file(0));
        for value in
            [0, 1, -1, 1 << 59, -(1 << 59), (1 << 60) - 1, -(1 << 60), 1 << 60, -(1 << 60) - 1, 1 << 63, i128::MAX]
        {
            let stored = tree.integer(value).unwrap();
            assert_eq!(tree.kind(stored), Kind::Integer(value));
        }
        assert_eq!(tree.kind(Value::NONE), Kind::None);
        assert_eq!(tree.kind(Value::truth(true)), Kind::Truth(true));
        assert_eq!(tree.kind(Value::truth(false)), Kind::Truth(false));
        let float = tree.float(1.5).unwrap();
        assert_eq!(tree.kind(float), Kind::Float(1.5));
        assert_eq!(tree.text("a").unwrap(), tree.text("a").unwrap());
        assert_ne!(tree.text("a").unwrap(), tree.text("b").unwrap());
    }

    #[test]
    fn beyond_the_budget_nothing_is_kept() {
        let mut tree = Tree::new(Budget::of_file(100));
        let mut kept = 0_u64;
        while tree.list(Vec::new()).is_ok() {
            kept += 1;
        }
        assert!(kept * 24 <= FREE + 800 && kept > 1000, "{kept}");
        assert!(matches!(tree.text("more"), Err(Problem::Memory { limit }) if limit == FREE + 800));
    }
}
