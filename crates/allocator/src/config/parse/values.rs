//! From an item's text to a value that its option can have.

use super::Known;
use super::lex::{Token, Value};
use crate::config::{Allowed, ConfigError, LARGE_SEGMENT_LEAST, LARGE_SEGMENT_MOST, MIB, Rounding, excerpt};

/// The most threads that PyTorch registers pinned memory with.
const MOST_THREADS: u64 = 128;

impl Known<'_> {
    pub(super) fn bad(&self, token: &Token, allowed: Allowed) -> ConfigError {
        ConfigError::BadValue { option: self.name, value: excerpt(&token.text), place: token.place, allowed }
    }

    /// For a list where one value belongs, or the other way round.
    fn bad_shape(&self, allowed: Allowed) -> ConfigError {
        let value = &self.item.value;
        ConfigError::BadValue { option: self.name, value: excerpt(&value.to_string()), place: value.place(), allowed }
    }

    pub(super) fn one(&self) -> Result<&Token, ConfigError> {
        match &self.item.value {
            Value::One(token) => Ok(token),
            Value::List { .. } => Err(self.bad_shape(Allowed::OneValue)),
        }
    }

    pub(super) fn list(&self) -> Result<&[(Token, Token)], ConfigError> {
        match &self.item.value {
            Value::One(_) => Err(self.bad_shape(Allowed::List)),
            Value::List { pairs, .. } => Ok(pairs),
        }
    }

    pub(super) fn boolean(&self) -> Result<bool, ConfigError> {
        let token = self.one()?;
        match token.text.as_str() {
            "True" => Ok(true),
            "False" => Ok(false),
            _ => Err(self.bad(token, Allowed::Boolean)),
        }
    }

    /// A number of MiB, in bytes. One beyond the range of bytes is the largest whole number of MiB.
    pub(super) fn mebibytes(&self, least: u64) -> Result<u64, ConfigError> {
        let token = self.one()?;
        match token.text.parse::<u64>() {
            Ok(mib) if mib >= least => Ok(mib.min(u64::MAX / MIB) * MIB),
            _ => Err(self.bad(token, Allowed::Mebibytes { least })),
        }
    }

    /// A large segment's size, in bytes.
    pub(super) fn large_segment(&self) -> Result<u64, ConfigError> {
        let (least, most) = (LARGE_SEGMENT_LEAST / MIB, LARGE_SEGMENT_MOST / MIB);
        let token = self.one()?;
        match token.text.parse::<u64>() {
            Ok(mib) if (least..=most).contains(&mib) => Ok(mib * MIB),
            _ => Err(self.bad(token, Allowed::MebibytesBetween { least, most })),
        }
    }

    pub(super) fn share(&self, allowed: Allowed, holds: fn(f64) -> bool) -> Result<f64, ConfigError> {
        let token = self.one()?;
        token.text.parse::<f64>().ok().filter(|share| holds(*share)).ok_or_else(|| self.bad(token, allowed))
    }

    pub(super) fn threads(&self) -> Result<u64, ConfigError> {
        let token = self.one()?;
        let threads = token.text.parse::<u64>().ok().filter(|n| n.is_power_of_two() && *n <= MOST_THREADS);
        threads.ok_or_else(|| self.bad(token, Allowed::Threads { most: MOST_THREADS }))
    }

    /// Rounding divisions: one number for all sizes, or a list of where ranges begin and their numbers. The first range of the
    /// list also serves all smaller sizes, and `>` is what lies above the last range named before it (all sizes, if it comes first).
    pub(super) fn divisions(&self, entries: &mut [u32; Rounding::ENTRIES]) -> Result<(), ConfigError> {
        let pairs = match &self.item.value {
            Value::One(token) => {
                entries.fill(self.power_of_two(token, Allowed::Divisions)?);
                return Ok(());
            }
            Value::List { pairs, .. } => pairs,
        };
        entries.fill(0);
        let mut first = true;
        // The first entry above the last range named.
        let mut above = 0;
        for (key, value) in pairs {
            let divisions = match value.text.parse::<u64>() {
                Ok(0) => 0,
                _ => self.power_of_two(value, Allowed::DivisionsOrZero)?,
            };
            if key.text == ">" {
                entries[above..].fill(divisions);
                continue;
            }
            let mib = key.text.parse::<u64>().ok().filter(|mib| mib.is_power_of_two());
            let mib = mib.ok_or_else(|| self.bad(key, Allowed::Interval))?;
            let last = Rounding::entry_of(mib.saturating_mul(MIB));
            if std::mem::take(&mut first) {
                entries[..last].fill(divisions);
            }
            entries[last] = divisions;
            above = last + 1;
        }
        Ok(())
    }

    fn power_of_two(&self, token: &Token, allowed: Allowed) -> Result<u32, ConfigError> {
        let number = token.text.parse::<u32>().ok().filter(|n| n.is_power_of_two());
        number.ok_or_else(|| self.bad(token, allowed))
    }
}
