//! What can be wrong with a configuration.

use std::fmt;

use super::{Policy, Preset, options};

/// Bytes in a MiB, the unit that PyTorch's options call `mb`.
pub(super) const MIB: u64 = 1 << 20;

/// Why a configuration was refused. Sizes are in bytes unless a field says otherwise.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No policy has this name.
    #[error("unknown policy `{name}`; the policies are {}", Listed(Policy::ALL.iter().map(|policy| policy.name())))]
    UnknownPolicy {
        /// The name that was asked for, cut short where it is very long.
        name: String,
    },

    /// No preset has this name.
    #[error("unknown preset `{name}`; the presets of the policy `pages` are {}", Listed(Preset::ALL.iter().map(|preset| preset.name())))]
    UnknownPreset {
        /// The name that was asked for, cut short where it is very long.
        name: String,
    },

    /// A `name=value` pair that cannot be read.
    #[error("`{pair}` is not a setting: expected {expected}")]
    Setting {
        /// The pair, cut short where it is very long.
        pair: String,
        /// What would do.
        expected: &'static str,
    },

    /// The policy fixes this setting, and it was set to something else.
    #[error("{setting} cannot be {value} under the policy {policy}")]
    NotWithPolicy {
        /// The setting, by the name of its getter.
        setting: &'static str,
        /// What it was set to.
        value: bool,
        /// The policy that cannot honour it.
        policy: Policy,
    },

    /// The policy has no such setting.
    #[error("the policy {policy} does not know {setting}")]
    NoSuchSetting {
        /// The setting, by the name of its getter.
        setting: &'static str,
        /// The policy that cannot honour it.
        policy: Policy,
    },

    /// Two settings that cannot both hold.
    #[error("{first} and {second} contradict each other")]
    Contradiction {
        /// One setting, by the name of its getter.
        first: &'static str,
        /// The other.
        second: &'static str,
    },

    /// A size below what its setting allows.
    #[error("{setting} is {bytes} bytes, which is less than {least}")]
    TooSmall {
        /// The setting, by the name of its getter.
        setting: &'static str,
        /// What it was set to, in bytes.
        bytes: u64,
        /// The least that it may be, in bytes.
        least: u64,
    },

    /// A size above what its setting allows.
    #[error("{setting} is {bytes} bytes, which is more than {most}")]
    TooLarge {
        /// The setting, by the name of its getter.
        setting: &'static str,
        /// What it was set to, in bytes.
        bytes: u64,
        /// The most that it may be, in bytes.
        most: u64,
    },

    /// A size that must be a multiple of 1 MiB and is not.
    #[error("{setting} is {bytes} bytes, which is not a multiple of 1 MiB")]
    NotWholeMib {
        /// The setting, by the name of its getter.
        setting: &'static str,
        /// What it was set to, in bytes.
        bytes: u64,
    },

    /// A share outside its range.
    #[error("{setting} is {value}; it must be {allowed}")]
    OutsideRange {
        /// The setting, by the name of its getter.
        setting: &'static str,
        /// What it was set to.
        value: f64,
        /// What it may be.
        allowed: Allowed,
    },

    /// A number of rounding divisions that is neither 0 nor a power of two.
    #[error("entry {entry} of the rounding divisions is {value}; it must be 0 or a power of two")]
    Divisions {
        /// The entry of the table, from 0.
        entry: usize,
        /// Its value.
        value: u32,
    },

    /// The options are not `key:value,key:value`.
    #[error("the options cannot be read at {place}: expected {expected}, found {}", Found(.found))]
    Syntax {
        /// Where.
        place: Place,
        /// What could have stood there.
        expected: Expected,
        /// What stood there, cut short where it is very long; `None` at the end of the text.
        found: Option<String>,
    },

    /// No option has this name in the version that the policy follows.
    #[error(
        "unknown option `{name}` at {place}{}; the options that {policy} knows are {}",
        if *.newer { " (torch-2.15 has it)" } else { "" },
        Listed(options::names(*.policy))
    )]
    UnknownOption {
        /// The name, cut short where it is very long.
        name: String,
        /// Where it stands.
        place: Place,
        /// The policy whose options were read.
        policy: Policy,
        /// Whether a later version of PyTorch knows it.
        newer: bool,
    },

    /// An option's value is not one that it can have.
    #[error("`{option}` cannot be `{value}` at {place}: it must be {allowed}")]
    BadValue {
        /// The option, as PyTorch's documentation writes it.
        option: &'static str,
        /// The value, or the part of a list that is wrong, cut short where it is very long.
        value: String,
        /// Where the value stands.
        place: Place,
        /// What it may be.
        allowed: Allowed,
    },

    /// The option asks for a way of working that another policy takes the place of.
    #[error("`{option}:{value}` at {place}: the policy `{superseded_by}` does that: choose it instead")]
    Superseded {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// Where the value stands.
        place: Place,
        /// The policy that does what the option asks for.
        superseded_by: &'static str,
    },

    /// An environment variable holds options that cannot be used.
    #[error("{variable}: {error}")]
    Environment {
        /// The variable.
        variable: &'static str,
        /// What is wrong with its value; places in it count from the value's start.
        error: Box<Self>,
    },
}

/// A place in the text of the options.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Place {
    /// Bytes from the start of the text.
    pub offset: usize,
    /// Which of the comma-separated items, from 1; a list in brackets is part of one item.
    pub item: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {} (item {})", self.offset, self.item)
    }
}

/// What could have stood where the options could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Expected {
    /// The name of an option.
    Name,
    /// `:`, then a value.
    Colon,
    /// A value, or `[` and a list.
    Value,
    /// `,` and another option, or the end.
    CommaOrEnd,
    /// A `key:value` pair of the list, or `]`.
    PairOrBracket,
    /// The value of a pair in a list.
    PairValue,
    /// `,` and another pair, or `]`.
    CommaOrBracket,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Name => "an option's name",
            Self::Colon => "`:` and a value",
            Self::Value => "a value or `[`",
            Self::CommaOrEnd => "`,` or the end",
            Self::PairOrBracket => "`key:value` or `]`",
            Self::PairValue => "the pair's value",
            Self::CommaOrBracket => "`,` or `]`",
        })
    }
}

/// What a value may be.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Allowed {
    /// `True` or `False`, in exactly this spelling.
    Boolean,
    /// A whole number of MiB.
    Mebibytes {
        /// The least number of MiB.
        least: u64,
    },
    /// A whole number of MiB in a range, both ends included.
    MebibytesBetween {
        /// The least number of MiB.
        least: u64,
        /// The largest number of MiB.
        most: u64,
    },
    /// Above 0 and below 1.
    OpenFraction,
    /// From 0 to 1, both included.
    Fraction,
    /// One of the back ends of PyTorch; only this one is served here.
    Backend,
    /// A number of rounding divisions for all sizes: a power of two.
    Divisions,
    /// A number of rounding divisions for one range of sizes: 0 or a power of two.
    DivisionsOrZero,
    /// Where a range of sizes begins: a power of two in MiB, or `>`.
    Interval,
    /// A number of threads: a power of two, at most this.
    Threads {
        /// The largest number.
        most: u64,
    },
    /// One value, not a list.
    OneValue,
    /// A list in brackets.
    List,
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Boolean => f.write_str("True or False"),
            Self::Mebibytes { least } => write!(f, "a whole number of MiB, at least {least}"),
            Self::MebibytesBetween { least, most } => write!(f, "a whole number of MiB from {least} to {most}"),
            Self::OpenFraction => f.write_str("above 0 and below 1"),
            Self::Fraction => f.write_str("from 0 to 1"),
            Self::Backend => f.write_str("native"),
            Self::Divisions => write!(f, "a power of two up to {MOST_DIVISIONS}"),
            Self::DivisionsOrZero => write!(f, "0 or a power of two up to {MOST_DIVISIONS}"),
            Self::Interval => f.write_str("a power of two in MiB, or `>`"),
            Self::Threads { most } => write!(f, "a power of two up to {most}"),
            Self::OneValue => f.write_str("one value, not a list"),
            Self::List => f.write_str("a list in brackets"),
        }
    }
}

/// The largest power of two that an entry of the rounding table holds.
const MOST_DIVISIONS: u32 = 1 << 31;

/// Names in a row, each in backticks.
struct Listed<I>(I);

impl<I: Iterator<Item = &'static str> + Clone> fmt::Display for Listed<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, name) in self.0.clone().enumerate() {
            write!(f, "{}`{name}`", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// What stood in a place, or that the text ended there.
struct Found<'a>(&'a Option<String>);

impl fmt::Display for Found<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(token) => write!(f, "`{token}`"),
            None => f.write_str("the end of the text"),
        }
    }
}

/// `text` for use in an error: its beginning, when it is very long.
pub(super) fn excerpt(text: &str) -> String {
    const MOST: usize = 80;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excerpts_end_between_characters() {
        assert_eq!(excerpt("short"), "short");
        assert_eq!(excerpt(&"é".repeat(80)), "é".repeat(80));
        assert_eq!(excerpt(&"é".repeat(81)), format!("{}…", "é".repeat(80)));
    }

    #[test]
    fn errors_are_send_sync_and_small() {
        fn send_sync<T: Send + Sync + 'static>() {}
        send_sync::<ConfigError>();
        assert!(size_of::<ConfigError>() <= 96, "{}", size_of::<ConfigError>());
    }
}
