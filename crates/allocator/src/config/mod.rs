//! How an allocator is set up.
//!
//! # Building one
//!
//! [`Config::default`] is the default policy with its defaults, [`Config::new`] another one; `with_*` changes a setting; [`Config::build`]
//! checks the whole. A setting that the policy cannot honour is an error, never silently dropped: the bit-exact policies leave no choice in
//! what PyTorch fixes.
//!
//! ```
//! use gpupool_allocator::config::{Config, Policy};
//!
//! let config = Config::new(Policy::Segments).with_memory_limit(8 << 30).with_quarantine(true).build()?;
//! assert_eq!(config.large_segment_size(), 20 << 20);
//! assert!(Config::new(Policy::Torch215).with_quarantine(true).build().is_err());
//! # Ok::<(), gpupool_allocator::config::ConfigError>(())
//! ```
//!
//! # PyTorch's options
//!
//! [`Config::parse_pytorch`] reads the text of `PYTORCH_CUDA_ALLOC_CONF`, and [`Config::from_environment`] finds it. What applies
//! sets this configuration; what PyTorch knows and does not apply here is checked and listed in [`Config::accepted`]; anything
//! else is an error that names the option and its place.

mod environment;
mod error;
mod options;
mod parse;
mod policy;
mod rounding;
mod settings;
mod text;

pub use error::{Allowed, ConfigError, Expected, Place};
pub use options::{AcceptedOption, AcceptedWhy};
pub use policy::{Policy, Preset};
pub use rounding::Rounding;
pub(crate) use settings::fraction_limit;

use error::{MIB, excerpt};
use std::fmt;

/// The size of a segment for requests from above 1 MiB to below 10 MiB, unless set otherwise, in bytes.
const LARGE_SEGMENT: u64 = 20 * MIB;

/// The least and the largest that a large segment may be, in bytes: above the size from which requests get a segment of their own,
/// and no more than any one device's memory for years to come, so that sums of sizes stay far from the end of their range.
const LARGE_SEGMENT_LEAST: u64 = 11 * MIB;
const LARGE_SEGMENT_MOST: u64 = 1 << 40;

/// Who set a limit on an allocator's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LimitSource {
    /// The program, by a call to a running allocator.
    User,
    /// [`Config::memory_limit`].
    Configuration,
    /// [`Config::memory_fraction`].
    Fraction,
}

impl fmt::Display for LimitSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::User => "set at run time",
            Self::Configuration => "set in the configuration",
            Self::Fraction => "a fraction of the device's memory",
        })
    }
}

/// Whether segments are virtual memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum VirtualMemory {
    /// One handle a segment on devices that have it, plain allocations on the others.
    WherePossible,
    /// Plain allocations only.
    Never,
}

/// The settings of an allocator, fixed once it is built. Sizes are in bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    policy: Policy,
    preset: Preset,
    rounding: Rounding,
    max_split_size: Option<u64>,
    /// `None` follows the large segment size.
    max_non_split_rounding: Option<u64>,
    large_segment_size: u64,
    garbage_collection_threshold: Option<f64>,
    memory_fraction: f64,
    memory_limit: Option<u64>,
    reject_over_fraction: bool,
    capture_reuse: bool,
    release_lock_on_malloc: bool,
    caching: bool,
    bins: bool,
    trim_before_growth: bool,
    exact_peaks: bool,
    trim_above: Option<u64>,
    idle_decay: Option<u64>,
    wait_for_recorded: bool,
    wait_for_streams: bool,
    quarantine: bool,
    virtual_memory: VirtualMemory,
    accepted: Vec<AcceptedOption>,
    pytorch_options: String,
}

impl Default for Config {
    /// The defaults of the default policy, [`Policy::default`].
    fn default() -> Self {
        Self::new(Policy::default())
    }
}

impl Config {
    /// The defaults of a policy. They are valid.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let own = !policy.is_bit_exact();
        Self {
            policy,
            preset: Preset::default(),
            rounding: Rounding::default(),
            max_split_size: None,
            max_non_split_rounding: None,
            large_segment_size: LARGE_SEGMENT,
            garbage_collection_threshold: None,
            memory_fraction: 1.0,
            memory_limit: None,
            reject_over_fraction: false,
            capture_reuse: own,
            release_lock_on_malloc: false,
            caching: true,
            bins: own,
            trim_before_growth: own,
            exact_peaks: !own,
            trim_above: None,
            idle_decay: None,
            wait_for_recorded: false,
            wait_for_streams: own,
            quarantine: false,
            virtual_memory: if own { VirtualMemory::WherePossible } else { VirtualMemory::Never },
            accepted: Vec::new(),
            pytorch_options: String::new(),
        }
    }

    /// This configuration, if [`validate`](Self::validate) finds nothing wrong with it.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate).
    pub fn build(self) -> Result<Self, ConfigError> {
        self.validate()?;
        Ok(self)
    }

    /// Checks each setting against its range, the policy, and the others. Building an allocator does this too.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_ranges()?;
        self.validate_policy()?;
        for (both, first, second) in [
            (self.quarantine && self.wait_for_recorded, "quarantine", "wait_for_recorded"),
            (self.quarantine && !self.caching, "quarantine", "caching off"),
            (self.trim_above.is_some() && !self.caching, "trim_above", "caching off"),
            (self.idle_decay.is_some() && !self.caching, "idle_decay", "caching off"),
        ] {
            if both {
                return Err(ConfigError::Contradiction { first, second });
            }
        }
        Ok(())
    }

    fn validate_ranges(&self) -> Result<(), ConfigError> {
        let large = self.large_segment_size;
        if !large.is_multiple_of(MIB) {
            return Err(ConfigError::NotWholeMib { setting: "large_segment_size", bytes: large });
        }
        if large > LARGE_SEGMENT_MOST {
            let (setting, most) = ("large_segment_size", LARGE_SEGMENT_MOST);
            return Err(ConfigError::TooLarge { setting, bytes: large, most });
        }
        for (setting, bytes, least) in [
            ("large_segment_size", Some(large), LARGE_SEGMENT_LEAST),
            ("max_split_size", self.max_split_size, large),
            ("max_non_split_rounding", self.max_non_split_rounding, large),
        ] {
            if let Some(bytes) = bytes.filter(|bytes| *bytes < least) {
                return Err(ConfigError::TooSmall { setting, bytes, least });
            }
        }
        if let Some(value) = self.garbage_collection_threshold.filter(|share| !is_open_fraction(*share)) {
            let setting = "garbage_collection_threshold";
            return Err(ConfigError::OutsideRange { setting, value, allowed: Allowed::OpenFraction });
        }
        if !is_fraction(self.memory_fraction) {
            let (setting, value) = ("memory_fraction", self.memory_fraction);
            return Err(ConfigError::OutsideRange { setting, value, allowed: Allowed::Fraction });
        }
        Ok(())
    }

    fn validate_policy(&self) -> Result<(), ConfigError> {
        let policy = self.policy;
        if self.preset != Preset::default() && policy != Policy::Pages {
            return Err(ConfigError::NoSuchSetting { setting: "preset", policy });
        }
        if self.reject_over_fraction && policy == Policy::Torch211 {
            return Err(ConfigError::NoSuchSetting { setting: "reject_over_fraction", policy });
        }
        if !policy.is_bit_exact() {
            return Ok(());
        }
        for (setting, value, fixed) in [
            ("bins", self.bins, false),
            ("trim_before_growth", self.trim_before_growth, false),
            ("exact_peaks", self.exact_peaks, true),
        ] {
            if value != fixed {
                return Err(ConfigError::NotWithPolicy { setting, value, policy });
            }
        }
        for (set, setting) in [
            (self.trim_above.is_some(), "trim_above"),
            (self.idle_decay.is_some(), "idle_decay"),
            (self.wait_for_recorded, "wait_for_recorded"),
            (self.wait_for_streams, "wait_for_streams"),
            (self.quarantine, "quarantine"),
            (self.virtual_memory != VirtualMemory::Never, "virtual_memory"),
        ] {
            if set {
                return Err(ConfigError::NoSuchSetting { setting, policy });
            }
        }
        Ok(())
    }
}

/// Above 0 and below 1; false for what is not a number.
fn is_open_fraction(share: f64) -> bool {
    share > 0.0 && share < 1.0
}

/// From 0 to 1; false for what is not a number.
fn is_fraction(share: f64) -> bool {
    (0.0..=1.0).contains(&share)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TORCH: [Policy; 2] = [Policy::Torch215, Policy::Torch211];

    #[test]
    fn defaults_are_valid_and_as_documented() {
        for policy in Policy::ALL {
            let config = Config::new(*policy).build().unwrap();
            let own = !policy.is_bit_exact();
            assert_eq!(config.policy(), *policy);
            assert_eq!((config.large_segment_size(), config.max_non_split_rounding()), (20 * MIB, 20 * MIB));
            assert_eq!((config.max_split_size(), config.trim_above(), config.memory_limit()), (None, None, None));
            assert_eq!(config.idle_decay(), None);
            assert_eq!((config.garbage_collection_threshold(), config.memory_fraction()), (None, 1.0));
            assert_eq!(config.bins(), own);
            assert_eq!((config.trim_before_growth(), config.capture_reuse(), config.exact_peaks()), (own, own, !own));
            assert_eq!(config.virtual_memory() == VirtualMemory::WherePossible, own);
            assert!(config.caching());
            assert!(!config.reject_over_fraction() && !config.release_lock_on_malloc());
            assert!(!config.wait_for_recorded() && !config.quarantine());
            assert_eq!(config.initial_limit(1 << 30), None);
        }
    }

    #[test]
    fn what_pytorch_fixes_cannot_be_set() {
        for policy in TORCH {
            let new = || Config::new(policy);
            for (config, setting) in [
                (new().with_trim_above(0), "trim_above"),
                (new().with_idle_decay(0), "idle_decay"),
                (new().with_wait_for_recorded(true), "wait_for_recorded"),
                (new().with_wait_for_streams(true), "wait_for_streams"),
                (new().with_quarantine(true), "quarantine"),
                (new().with_virtual_memory(VirtualMemory::WherePossible), "virtual_memory"),
            ] {
                assert_eq!(config.build(), Err(ConfigError::NoSuchSetting { setting, policy }));
            }
            for (config, setting, value) in [
                (new().with_bins(true), "bins", true),
                (new().with_trim_before_growth(true), "trim_before_growth", true),
                (new().with_exact_peaks(false), "exact_peaks", false),
            ] {
                assert_eq!(config.build(), Err(ConfigError::NotWithPolicy { setting, value, policy }));
            }
            let fixed = new().with_trim_before_growth(false).with_exact_peaks(true).with_quarantine(false);
            fixed.with_virtual_memory(VirtualMemory::Never).with_memory_limit(1).with_caching(false).build().unwrap();
        }
        let rejecting = |policy| Config::new(policy).with_reject_over_fraction(true).build();
        let (setting, policy) = ("reject_over_fraction", Policy::Torch211);
        assert_eq!(rejecting(policy), Err(ConfigError::NoSuchSetting { setting, policy }));
        assert!(rejecting(Policy::Torch215).is_ok() && rejecting(Policy::Segments).is_ok());
    }

    #[test]
    fn contradictions() {
        let new = || Config::new(Policy::Segments);
        for (config, first, second) in [
            (new().with_quarantine(true).with_wait_for_recorded(true), "quarantine", "wait_for_recorded"),
            (new().with_quarantine(true).with_caching(false), "quarantine", "caching off"),
            (new().with_trim_above(0).with_caching(false), "trim_above", "caching off"),
            (new().with_idle_decay(0).with_caching(false), "idle_decay", "caching off"),
        ] {
            assert_eq!(config.build(), Err(ConfigError::Contradiction { first, second }));
        }
    }

    #[test]
    fn sizes_have_bounds() {
        let new = || Config::new(Policy::Segments);
        let small = |setting, bytes, least| Err(ConfigError::TooSmall { setting, bytes, least });
        let large = "large_segment_size";
        assert_eq!(new().with_large_segment_size(10 * MIB).build(), small(large, 10 * MIB, 11 * MIB));
        assert_eq!(new().with_large_segment_size(0).build(), small(large, 0, 11 * MIB));
        let bytes = 11 * MIB + 512;
        assert_eq!(
            new().with_large_segment_size(bytes).build(),
            Err(ConfigError::NotWholeMib { setting: large, bytes })
        );
        let (bytes, most) = ((1 << 40) + MIB, 1 << 40);
        assert_eq!(
            new().with_large_segment_size(bytes).build(),
            Err(ConfigError::TooLarge { setting: large, bytes, most })
        );
        let bytes = 20 * MIB - 1;
        assert_eq!(new().with_max_split_size(bytes).build(), small("max_split_size", bytes, 20 * MIB));
        assert_eq!(new().with_max_non_split_rounding(bytes).build(), small("max_non_split_rounding", bytes, 20 * MIB));
        // The order of the calls does not matter.
        assert!(new().with_max_split_size(bytes).with_large_segment_size(11 * MIB).build().is_ok());
        assert!(new().with_max_split_size(u64::MAX).with_max_non_split_rounding(u64::MAX).build().is_ok());
    }

    #[test]
    fn shares_have_bounds() {
        for share in [0.0, 1.0, -0.5, f64::NAN, f64::INFINITY] {
            let error = Config::new(Policy::Segments).with_garbage_collection_threshold(share).build().unwrap_err();
            assert!(matches!(error, ConfigError::OutsideRange { setting: "garbage_collection_threshold", .. }));
        }
        for share in [-0.1, 1.1, f64::NAN, f64::NEG_INFINITY] {
            let config = Config::new(Policy::Segments).with_memory_fraction(share);
            assert_eq!(config.initial_limit(1 << 30), None);
            let error = config.build().unwrap_err();
            assert!(matches!(error, ConfigError::OutsideRange { setting: "memory_fraction", .. }));
        }
    }

    #[test]
    fn the_lower_limit_counts() {
        let fraction = |share| Config::new(Policy::Torch215).with_memory_fraction(share);
        assert_eq!(fraction(0.1).initial_limit(1 << 30), Some((107_374_182, LimitSource::Fraction)));
        assert_eq!(fraction(0.0).initial_limit(1 << 30), Some((0, LimitSource::Fraction)));
        assert_eq!(fraction(1.0).initial_limit(1 << 30), None);
        assert_eq!(fraction(1.0).with_memory_limit(7).initial_limit(1), Some((7, LimitSource::Configuration)));
        assert_eq!(fraction(0.5).with_memory_limit(7).initial_limit(10), Some((5, LimitSource::Fraction)));
        assert_eq!(fraction(0.5).with_memory_limit(3).initial_limit(10), Some((3, LimitSource::Configuration)));
        assert!(fraction(0.999_999_999_999).initial_limit(u64::MAX).is_some());
    }
}
