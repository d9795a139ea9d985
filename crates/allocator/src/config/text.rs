//! Settings as one line of text: for C callers, environment variables and command lines.

use super::{Config, ConfigError, Policy, VirtualMemory, excerpt};

/// What a setting's value may be, for errors.
const BYTES: &str = "bytes, such as 8589934592, 512MiB or 8GiB";
const FRACTION: &str = "a fraction, such as 0.5";
const SWITCH: &str = "on or off";
const MILLISECONDS: &str = "milliseconds, such as 500";
const NAMES: &str = "policy, preset, pytorch, memory_limit, memory_fraction, large_segment_size, garbage_collection_threshold, trim_above, \
                     idle_decay_ms, bins, trim_before_growth, virtual_memory, wait_for_recorded, wait_for_streams, quarantine, \
                     caching";

impl Config {
    /// Reads `name=value` pairs separated by `;`, on top of the defaults of the policy that they name ([`Policy::default`] without one). Spaces
    /// around names and values do not count; an empty text is all defaults. `pytorch=` takes the text of `PYTORCH_CUDA_ALLOC_CONF`.
    /// Checks the whole.
    ///
    /// ```
    /// use gpupool_allocator::Config;
    ///
    /// let config = Config::parse_settings("memory_limit = 8GiB; pytorch = max_split_size_mb:64")?;
    /// assert_eq!((config.memory_limit(), config.max_split_size()), (Some(8 << 30), Some(64 << 20)));
    /// assert!(Config::parse_settings("memory_limt=8GiB").unwrap_err().to_string().contains("memory_limit"));
    /// # Ok::<(), gpupool_allocator::config::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ConfigError::Setting`] names the pair; otherwise those of the settings themselves.
    pub fn parse_settings(text: &str) -> Result<Self, ConfigError> {
        let mut pairs = Vec::new();
        for pair in text.split(';').map(str::trim).filter(|pair| !pair.is_empty()) {
            let Some((name, value)) = pair.split_once('=') else {
                return Err(setting(pair, "name=value"));
            };
            pairs.push((name.trim(), value.trim()));
        }
        let named = pairs.iter().rfind(|(name, _)| *name == "policy");
        let policy = named.map_or(Ok(Policy::default()), |(_, name)| name.parse())?;
        let pytorch = pairs.iter().rfind(|(name, _)| *name == "pytorch");
        let mut config = pytorch.map_or(Ok(Self::new(policy)), |(_, text)| Self::parse_pytorch(text, policy))?;
        for (name, value) in pairs {
            config = config.with_text(name, value)?;
        }
        config.build()
    }

    fn with_text(self, name: &str, value: &str) -> Result<Self, ConfigError> {
        let pair = || format!("{name}={value}");
        let size = || bytes(value).ok_or_else(|| setting(&pair(), BYTES));
        let share = || value.parse::<f64>().map_err(|_| setting(&pair(), FRACTION));
        let on = || switch(value).ok_or_else(|| setting(&pair(), SWITCH));
        Ok(match name {
            "policy" | "pytorch" => self,
            "preset" => self.with_preset(value.parse()?),
            "memory_limit" => self.with_memory_limit(size()?),
            "memory_fraction" => self.with_memory_fraction(share()?),
            "large_segment_size" => self.with_large_segment_size(size()?),
            "garbage_collection_threshold" => self.with_garbage_collection_threshold(share()?),
            "trim_above" => self.with_trim_above(size()?),
            "idle_decay_ms" => {
                let milliseconds = value.parse::<u64>().ok().and_then(|ms| ms.checked_mul(1_000_000));
                self.with_idle_decay(milliseconds.ok_or_else(|| setting(&pair(), MILLISECONDS))?)
            }
            "bins" => self.with_bins(on()?),
            "trim_before_growth" => self.with_trim_before_growth(on()?),
            "virtual_memory" => {
                self.with_virtual_memory(if on()? { VirtualMemory::WherePossible } else { VirtualMemory::Never })
            }
            "wait_for_recorded" => self.with_wait_for_recorded(on()?),
            "wait_for_streams" => self.with_wait_for_streams(on()?),
            "quarantine" => self.with_quarantine(on()?),
            "caching" => self.with_caching(on()?),
            _ => return Err(setting(&pair(), NAMES)),
        })
    }
}

fn setting(pair: &str, expected: &'static str) -> ConfigError {
    ConfigError::Setting { pair: excerpt(pair), expected }
}

fn switch(value: &str) -> Option<bool> {
    match value {
        "on" | "1" | "true" => Some(true),
        "off" | "0" | "false" => Some(false),
        _ => None,
    }
}

/// A number of bytes, plain or with a binary unit.
fn bytes(value: &str) -> Option<u64> {
    let (number, unit) = match value.find(|c: char| !c.is_ascii_digit()) {
        Some(at) => value.split_at(at),
        None => (value, ""),
    };
    let shift = match unit.trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::super::Preset;
    use super::*;

    #[test]
    fn nothing_said_is_all_defaults() {
        for text in ["", " ; ;", ";"] {
            assert_eq!(Config::parse_settings(text).unwrap(), Config::default());
        }
    }

    #[test]
    fn every_setting_can_be_said() {
        let text = "policy=segments; memory_limit=3GiB; memory_fraction=0.5; large_segment_size=32MiB; \
                    garbage_collection_threshold=0.75; trim_above=64KiB; idle_decay_ms=7; bins=off; trim_before_growth=off; \
                    virtual_memory=off; wait_for_recorded=on; wait_for_streams=off; caching=1";
        let expected = Config::new(Policy::Segments)
            .with_memory_limit(3 << 30)
            .with_memory_fraction(0.5)
            .with_large_segment_size(32 << 20)
            .with_garbage_collection_threshold(0.75)
            .with_trim_above(64 << 10)
            .with_idle_decay(7_000_000)
            .with_bins(false)
            .with_trim_before_growth(false)
            .with_virtual_memory(VirtualMemory::Never)
            .with_wait_for_recorded(true)
            .with_wait_for_streams(false);
        assert_eq!(Config::parse_settings(text).unwrap(), expected);
        assert!(Config::parse_settings("quarantine=on").unwrap().quarantine());
        let pages = Config::parse_settings("policy=pages; preset=memory").unwrap();
        assert_eq!((pages.policy(), pages.preset()), (Policy::Pages, Preset::Memory));
    }

    #[test]
    fn a_policy_may_be_named_anywhere() {
        let config = Config::parse_settings("memory_limit=2MiB;policy=torch-2.15").unwrap();
        assert_eq!((config.policy(), config.memory_limit()), (Policy::Torch215, Some(2 << 20)));
    }

    #[test]
    fn what_cannot_be_read_is_named_with_what_was_expected() {
        for (text, named, expected) in [
            ("memory_limit", "memory_limit", "name=value"),
            ("memory_limit=x", "memory_limit=x", BYTES),
            ("memory_limit=8GB", "memory_limit=8GB", BYTES),
            ("memory_limit=99999999999GiB", "memory_limit", BYTES),
            ("memory_limit=-1", "memory_limit=-1", BYTES),
            ("memory_fraction=half", "memory_fraction=half", FRACTION),
            ("caching=maybe", "caching=maybe", SWITCH),
            ("idle_decay_ms=18446744073709551615", "idle_decay_ms", MILLISECONDS),
            ("cachign=on", "cachign=on", NAMES),
        ] {
            let text = Config::parse_settings(text).unwrap_err().to_string();
            assert!(text.contains(named) && text.contains(expected), "{text}");
        }
        assert!(matches!(Config::parse_settings("policy=x"), Err(ConfigError::UnknownPolicy { .. })));
        assert!(matches!(Config::parse_settings("policy=pages;preset=x"), Err(ConfigError::UnknownPreset { .. })));
        assert!(matches!(Config::parse_settings("memory_fraction=2"), Err(ConfigError::OutsideRange { .. })));
    }
}
