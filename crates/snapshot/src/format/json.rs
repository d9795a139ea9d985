//! Reading JSON into a tree.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::tree::{Tree, Value};
use crate::read::Problem;

/// Reads one JSON value.
pub(crate) fn read(bytes: &[u8], tree: &mut Tree) -> Result<Value, Problem> {
    let mut refused = None;
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let read =
        Build { tree, refused: &mut refused }.deserialize(&mut json).and_then(|value| json.end().map(|()| value));
    read.map_err(|error| refused.unwrap_or(Problem::Json(error)))
}

/// Builds one value. What the tree refuses is noted beside the error that ends the reading.
struct Build<'a> {
    tree: &'a mut Tree,
    refused: &'a mut Option<Problem>,
}

impl Build<'_> {
    fn keep<T, E: Error>(&mut self, made: impl FnOnce(&mut Tree) -> Result<T, Problem>) -> Result<T, E> {
        made(self.tree).map_err(|problem| {
            *self.refused = Some(problem);
            E::custom("refused")
        })
    }

    fn inside(&mut self) -> Build<'_> {
        Build { tree: &mut *self.tree, refused: &mut *self.refused }
    }
}

impl<'de> DeserializeSeed<'de> for Build<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Build<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::NONE)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::truth(value))
    }

    fn visit_i64<E: Error>(mut self, value: i64) -> Result<Value, E> {
        self.keep(|tree| tree.integer(value.into()))
    }

    fn visit_u64<E: Error>(mut self, value: u64) -> Result<Value, E> {
        self.keep(|tree| tree.integer(value.into()))
    }

    fn visit_f64<E: Error>(mut self, value: f64) -> Result<Value, E> {
        self.keep(|tree| tree.float(value))
    }

    fn visit_str<E: Error>(mut self, value: &str) -> Result<Value, E> {
        self.keep(|tree| tree.text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut from: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = from.next_element_seed(self.inside())? {
            self.keep(|tree| tree.budget.push(&mut items, item))?;
        }
        self.keep(|tree| tree.list(items))
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut from: A) -> Result<Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(key) = from.next_key_seed(self.inside())? {
            let value = from.next_value_seed(self.inside())?;
            self.keep(|tree| {
                tree.budget.push(&mut pairs, key)?;
                tree.budget.push(&mut pairs, value)
            })?;
        }
        self.keep(|tree| {
            let dict = tree.dict()?;
            tree.insert(dict, &pairs)?;
            Ok(dict)
        })
    }
}
