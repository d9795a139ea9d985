//! Reading the text of `PYTORCH_CUDA_ALLOC_CONF`: `key:value,key:[key:value,key:value]`, whitespace ignored.
//!
//! # Strictness
//!
//! What is not of this form is an error that names the place: a missing `:` or `,`, letters after a number, a negative size. Only a
//! comma at the end is let pass.
//!
//! # Options that come twice
//!
//! The last one counts, whole; the earlier ones must be valid too, and are listed as overridden. (Our choice: the reference that this
//! parser is written from does not say what PyTorch does.)

mod lex;
mod values;

#[cfg(test)]
mod tests;

use super::options::{self, Opt};
use super::{AcceptedOption, AcceptedWhy, Allowed, Config, ConfigError, MIB, Policy, excerpt};
use lex::Item;

impl Config {
    /// Reads PyTorch's options on top of the defaults of `policy`: the version's own list for a bit-exact policy, that of 2.15
    /// for the others. `text` may be empty.
    ///
    /// Options that PyTorch knows and that have no effect here are checked and listed in [`accepted`](Self::accepted).
    ///
    /// # Errors
    ///
    /// The first thing that cannot be read, the first unknown option, or the first value that its option cannot have, with its
    /// place in `text`. `expandable_segments` and `backend` are [`ConfigError::Superseded`] where another policy
    /// is what they ask for.
    ///
    /// ```
    /// use gpupool_allocator::config::{Config, Policy};
    ///
    /// let text = "roundup_power2_divisions:[256:1,512:2,>:8], max_split_size_mb: 64";
    /// let config = Config::parse_pytorch(text, Policy::Torch215)?;
    /// assert_eq!(config.max_split_size(), Some(64 << 20));
    ///
    /// let error = Config::parse_pytorch("max_split_size_mb:8", Policy::Torch215).unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "`max_split_size_mb` cannot be `8` at byte 18 (item 1): it must be a whole number of MiB, at least 20"
    /// );
    /// # Ok::<(), gpupool_allocator::config::ConfigError>(())
    /// ```
    pub fn parse_pytorch(text: &str, policy: Policy) -> Result<Self, ConfigError> {
        let items = lex::items(text)?;
        let known = items.iter().map(|item| Known::find(item, policy)).collect::<Result<Vec<_>, _>>()?;
        let mut config = Self::new(policy);
        config.pytorch_options = text.to_owned();
        // The smallest value of other options depends on it, wherever it stands.
        for option in known.iter().filter(|option| option.opt == Opt::LargeSegmentSize) {
            config.large_segment_size = option.large_segment()?;
        }
        for (i, option) in known.iter().enumerate() {
            let why = config.apply(option)?;
            let overridden = || known[i + 1..].iter().any(|later| later.overrides(option));
            if let Some(why) = why.or_else(|| overridden().then_some(AcceptedWhy::Overridden)) {
                config.accepted.push(option.accepted(why));
            }
        }
        Ok(config)
    }

    /// Makes `option` part of this configuration, or says why it has no effect.
    fn apply(&mut self, option: &Known<'_>) -> Result<Option<AcceptedWhy>, ConfigError> {
        let least = self.large_segment_size / MIB;
        let paged = self.policy == Policy::Pages;
        let reserve = if paged { AcceptedWhy::AddressesAsNeeded } else { AcceptedWhy::NeedsExpandableSegments };
        match option.opt {
            // Read before all others.
            Opt::LargeSegmentSize => {}
            Opt::MaxSplitSize => {
                self.max_split_size = Some(option.mebibytes(least)?);
                return Ok(paged.then_some(AcceptedWhy::PagesMove));
            }
            Opt::MaxNonSplitRounding => {
                self.max_non_split_rounding = Some(option.mebibytes(least)?);
                return Ok(paged.then_some(AcceptedWhy::PagesMove));
            }
            Opt::GarbageCollectionThreshold => {
                let share = option.share(Allowed::OpenFraction, super::is_open_fraction)?;
                self.garbage_collection_threshold = Some(share);
            }
            Opt::MemoryFraction => self.memory_fraction = option.share(Allowed::Fraction, super::is_fraction)?,
            Opt::RoundupDivisions => option.divisions(self.rounding.entries_mut())?,
            Opt::CaptureReuse => self.capture_reuse = option.boolean()?,
            Opt::RejectOverFraction => self.reject_over_fraction = option.boolean()?,
            Opt::ReleaseLock => {
                self.release_lock_on_malloc = option.boolean()?;
                return Ok(Some(AcceptedWhy::NoLockHeld));
            }
            Opt::Backend => {
                let backend = option.one()?;
                let ordered = self.policy == Policy::StreamOrdered;
                return match (backend.text.as_str(), ordered) {
                    ("native", false) | ("cudaMallocAsync" | "hipMallocAsync", true) => {
                        Ok(Some(AcceptedWhy::AlreadySo))
                    }
                    ("native", true) => Err(option.superseded("segments")),
                    ("cudaMallocAsync" | "hipMallocAsync", false) => Err(option.superseded("stream-ordered")),
                    _ => Err(option.bad(backend, Allowed::Backend)),
                };
            }
            Opt::ExpandableSegments => {
                return match (option.boolean()?, paged) {
                    (false, false) | (true, true) => Ok(Some(AcceptedWhy::AlreadySo)),
                    (true, false) => Err(option.superseded("pages")),
                    (false, true) => Err(option.superseded("segments")),
                };
            }
            Opt::ExpandableReserve => {
                // A bad value is only a warning in PyTorch (reference, section 10), and the option has no effect here.
                option.one()?;
                return Ok(Some(reserve));
            }
            Opt::ExpandableReserveByClass => {
                option.list()?;
                return Ok(Some(reserve));
            }
            Opt::PinnedFlag => {
                option.boolean()?;
                return Ok(Some(AcceptedWhy::HostMemory));
            }
            Opt::PinnedThreads => {
                option.threads()?;
                return Ok(Some(AcceptedWhy::HostMemory));
            }
            Opt::PinnedReserve => {
                option.mebibytes(1)?;
                return Ok(Some(AcceptedWhy::HostMemory));
            }
            Opt::PinnedSize => {
                option.mebibytes(0)?;
                return Ok(Some(AcceptedWhy::HostMemory));
            }
        }
        Ok(None)
    }

    /// Virtual memory is turned off, so `pages` decides as `segments` does: options that were taken to be about pages have their effect, or none
    /// for another reason.
    pub(super) fn turn_pages_off(&mut self) {
        self.accepted.retain(|option| option.why != AcceptedWhy::PagesMove);
        let of_pages = |option: &&mut AcceptedOption| {
            option.name.starts_with("expandable_segments") && option.why != AcceptedWhy::Overridden
        };
        self.accepted.iter_mut().filter(of_pages).for_each(|option| option.why = AcceptedWhy::NoVirtualMemory);
    }
}

/// An item whose name PyTorch knows.
struct Known<'i> {
    opt: Opt,
    name: &'static str,
    item: &'i Item,
}

impl<'i> Known<'i> {
    fn find(item: &'i Item, policy: Policy) -> Result<Self, ConfigError> {
        let written = item.name.text.as_str();
        match options::find(written, policy) {
            Some((opt, name)) => Ok(Self { opt, name, item }),
            None => Err(ConfigError::UnknownOption {
                name: excerpt(written),
                place: item.name.place,
                policy,
                newer: options::newer_version_knows(written, policy),
            }),
        }
    }

    fn overrides(&self, earlier: &Self) -> bool {
        self.opt == earlier.opt
    }

    fn superseded(&self, superseded_by: &'static str) -> ConfigError {
        let (value, place) = (excerpt(&self.item.value.to_string()), self.item.value.place());
        ConfigError::Superseded { option: self.name, value, place, superseded_by }
    }

    fn accepted(&self, why: AcceptedWhy) -> AcceptedOption {
        let value = excerpt(&self.item.value.to_string());
        AcceptedOption { name: self.name, value, why, place: Some(self.item.name.place) }
    }
}
