//! A JSON object taken apart field by field, with none left over.

use serde_json::{Map, Value};

use super::ConformProblem;
use crate::text::excerpt;

/// The fields of one line that have not been taken yet.
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    pub(super) fn parse(text: &str) -> Result<Self, ConformProblem> {
        serde_json::from_str(text).map(Self).map_err(ConformProblem::Json)
    }

    pub(super) fn of(value: Value, field: &str) -> Result<Self, ConformProblem> {
        match value {
            Value::Object(map) => Ok(Self(map)),
            other => Err(wrong(field, "an object", &other)),
        }
    }

    /// Takes a field that may be missing.
    pub(super) fn maybe(&mut self, field: &str) -> Option<Value> {
        self.0.remove(field)
    }

    pub(super) fn take(&mut self, field: &'static str) -> Result<Value, ConformProblem> {
        self.maybe(field).ok_or(ConformProblem::Missing { field })
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, ConformProblem> {
        unsigned(&self.take(field)?, field)
    }

    pub(super) fn f64(&mut self, field: &'static str) -> Result<f64, ConformProblem> {
        let value = self.take(field)?;
        value.as_f64().ok_or_else(|| wrong(field, "a number", &value))
    }

    pub(super) fn bool(&mut self, field: &'static str) -> Result<bool, ConformProblem> {
        let value = self.take(field)?;
        value.as_bool().ok_or_else(|| wrong(field, "true or false", &value))
    }

    pub(super) fn string(&mut self, field: &'static str) -> Result<String, ConformProblem> {
        match self.take(field)? {
            Value::String(text) => Ok(text),
            other => Err(wrong(field, "a string", &other)),
        }
    }

    /// A pool's id, a pair of numbers.
    pub(super) fn pool(&mut self) -> Result<(u64, u64), ConformProblem> {
        let value = self.take("pool")?;
        match value.as_array().map(Vec::as_slice) {
            Some([a, b]) => Ok((unsigned(a, "pool")?, unsigned(b, "pool")?)),
            _ => Err(wrong("pool", "a pair of numbers", &value)),
        }
    }

    /// Everything that is left, as it stands.
    pub(super) fn into_rest(self) -> Map<String, Value> {
        self.0
    }

    /// Nothing may be left.
    pub(super) fn finish(self) -> Result<(), ConformProblem> {
        match self.0.into_iter().next() {
            None => Ok(()),
            Some((field, _)) => Err(ConformProblem::UnknownField { field }),
        }
    }
}

pub(super) fn wrong(field: &str, expected: &'static str, found: &Value) -> ConformProblem {
    ConformProblem::Type { field: field.to_owned(), expected, found: excerpt(&found.to_string()) }
}

pub(super) fn unsigned(value: &Value, field: &str) -> Result<u64, ConformProblem> {
    value.as_u64().ok_or_else(|| wrong(field, "an unsigned integer", value))
}

pub(super) fn signed(value: &Value, field: &str) -> Result<i64, ConformProblem> {
    value.as_i64().ok_or_else(|| wrong(field, "an integer", value))
}

pub(super) fn list<'a>(value: &'a Value, field: &str) -> Result<&'a [Value], ConformProblem> {
    value.as_array().map(Vec::as_slice).ok_or_else(|| wrong(field, "a list", value))
}
