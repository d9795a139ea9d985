//! The policies by name. What a policy decides is not here: the allocator asks its own policy module.

use std::fmt;
use std::str::FromStr;

use super::{ConfigError, excerpt};

/// The rules an allocator follows, chosen when it is built and fixed from then on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Policy {
    /// Segments from the driver, split and merged: this project's own rules, one driver allocation a segment.
    Segments,
    /// Virtual ranges over physical handles: free memory is mapped where it is needed. The default. Where a device has no virtual memory
    /// this is [`Segments`](Self::Segments).
    #[default]
    Pages,
    /// The driver's own stream-ordered pool behind the same handles: every block is taken from it and given back to it. In a capture blocks
    /// are memory nodes of the graph.
    StreamOrdered,
    /// Bit for bit what PyTorch 2.15.0 does.
    Torch215,
    /// Bit for bit what PyTorch 2.11.0 does.
    Torch211,
}

impl Policy {
    /// Every policy of this version.
    pub const ALL: &'static [Self] =
        &[Self::Segments, Self::Pages, Self::StreamOrdered, Self::Torch215, Self::Torch211];

    /// The name that [`Display`](fmt::Display) writes and [`FromStr`] reads.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Segments => "segments",
            Self::Pages => "pages",
            Self::StreamOrdered => "stream-ordered",
            Self::Torch215 => "torch-2.15",
            Self::Torch211 => "torch-2.11",
        }
    }

    /// Whether the policy promises the very addresses, statistics and events of a PyTorch version.
    #[must_use]
    pub const fn is_bit_exact(self) -> bool {
        match self {
            Self::Segments | Self::Pages | Self::StreamOrdered => false,
            Self::Torch215 | Self::Torch211 => true,
        }
    }
}

/// How the policy `pages` weighs memory against the driver's time (see `docs/pages.md`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Preset {
    /// The least memory: handles of at most two pages, and every free page is used before any is asked of the driver.
    Memory,
    /// Handles of at most 24 MiB: nearly as tight, and growth costs a few milliseconds a GiB.
    #[default]
    Balanced,
    /// One handle a request: growth at the price of a plain allocation; memory is moved only where the alternative is failure.
    Latency,
}

impl Preset {
    /// Every preset.
    pub const ALL: &'static [Self] = &[Self::Memory, Self::Balanced, Self::Latency];

    /// The name that [`Display`](fmt::Display) writes and [`FromStr`] reads.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Balanced => "balanced",
            Self::Latency => "latency",
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Preset {
    type Err = ConfigError;

    /// Reads exactly the names of [`Preset::ALL`].
    fn from_str(name: &str) -> Result<Self, ConfigError> {
        let found = Self::ALL.iter().find(|preset| preset.name() == name);
        found.copied().ok_or_else(|| ConfigError::UnknownPreset { name: excerpt(name) })
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Policy {
    type Err = ConfigError;

    /// Reads exactly the names of [`Policy::ALL`].
    fn from_str(name: &str) -> Result<Self, ConfigError> {
        if let Some(policy) = Self::ALL.iter().find(|policy| policy.name() == name) {
            return Ok(*policy);
        }
        Err(ConfigError::UnknownPolicy { name: excerpt(name) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for policy in Policy::ALL {
            assert_eq!(policy.to_string().parse::<Policy>().unwrap(), *policy);
        }
        assert_eq!(Policy::default(), Policy::Pages);
        assert_eq!(format!("{:>12}|", Policy::Torch211), "  torch-2.11|");
    }

    #[test]
    fn an_unknown_name_is_told_the_known_ones() {
        for name in ["", "Segments", "torch", "torch-2.13", " segments", "ſegments"] {
            let text = name.parse::<Policy>().unwrap_err().to_string();
            for policy in Policy::ALL {
                assert!(text.contains(policy.name()), "{text}");
            }
        }
        let long = "x".repeat(1 << 20);
        assert!(long.parse::<Policy>().unwrap_err().to_string().len() < 300);
    }
}
