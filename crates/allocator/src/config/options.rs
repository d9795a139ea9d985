//! The options of `PYTORCH_CUDA_ALLOC_CONF`: which exist, in which version, and what becomes of those that do not apply here.

use std::fmt;

use super::{Place, Policy};

/// An option, whatever alias it was written under.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Opt {
    Backend,
    LargeSegmentSize,
    MaxSplitSize,
    MaxNonSplitRounding,
    GarbageCollectionThreshold,
    RoundupDivisions,
    ExpandableSegments,
    ExpandableReserve,
    ExpandableReserveByClass,
    ReleaseLock,
    CaptureReuse,
    MemoryFraction,
    RejectOverFraction,
    PinnedFlag,
    PinnedThreads,
    PinnedReserve,
    PinnedSize,
}

/// One name that PyTorch knows.
struct Known {
    name: &'static str,
    /// The name that PyTorch's documentation uses, when this one is an alias.
    alias_of: Option<&'static str>,
    opt: Opt,
    /// Whether 2.11 knows it already; 2.15 knows all.
    in_211: bool,
}

const fn old(name: &'static str, opt: Opt) -> Known {
    Known { name, alias_of: None, opt, in_211: true }
}

const fn new(name: &'static str, opt: Opt) -> Known {
    Known { name, alias_of: None, opt, in_211: false }
}

const fn alias(name: &'static str, alias_of: &'static str, opt: Opt) -> Known {
    Known { name, alias_of: Some(alias_of), opt, in_211: true }
}

const KNOWN: &[Known] = &[
    old("backend", Opt::Backend),
    old("large_segment_size_mb", Opt::LargeSegmentSize),
    old("max_split_size_mb", Opt::MaxSplitSize),
    old("max_non_split_rounding_mb", Opt::MaxNonSplitRounding),
    old("garbage_collection_threshold", Opt::GarbageCollectionThreshold),
    old("roundup_power2_divisions", Opt::RoundupDivisions),
    old("expandable_segments", Opt::ExpandableSegments),
    new("expandable_segments_reserve", Opt::ExpandableReserve),
    new("expandable_segments_reserve_by_class", Opt::ExpandableReserveByClass),
    old("release_lock_on_cudamalloc", Opt::ReleaseLock),
    alias("release_lock_on_hipmalloc", "release_lock_on_cudamalloc", Opt::ReleaseLock),
    old("graph_capture_record_stream_reuse", Opt::CaptureReuse),
    old("per_process_memory_fraction", Opt::MemoryFraction),
    new("throw_on_cudamalloc_oom", Opt::RejectOverFraction),
    old("pinned_use_cuda_host_register", Opt::PinnedFlag),
    alias("pinned_use_hip_host_register", "pinned_use_cuda_host_register", Opt::PinnedFlag),
    old("pinned_num_register_threads", Opt::PinnedThreads),
    old("pinned_use_background_threads", Opt::PinnedFlag),
    old("pinned_reserve_segment_size_mb", Opt::PinnedReserve),
    new("pinned_free_catch_all", Opt::PinnedFlag),
    new("pinned_max_round_threshold_mb", Opt::PinnedSize),
    new("pinned_max_cached_size_mb", Opt::PinnedSize),
];

impl Known {
    fn in_policy(&self, policy: Policy) -> bool {
        self.in_211 || policy != Policy::Torch211
    }
}

/// The option called `name`, and the name its documentation uses, if the version that `policy` follows knows it.
pub(super) fn find(name: &str, policy: Policy) -> Option<(Opt, &'static str)> {
    let known = KNOWN.iter().find(|known| known.name == name && known.in_policy(policy))?;
    Some((known.opt, known.alias_of.unwrap_or(known.name)))
}

/// Whether PyTorch 2.15 knows `name`: for the error of a policy that does not.
pub(super) fn newer_version_knows(name: &str, policy: Policy) -> bool {
    policy == Policy::Torch211 && KNOWN.iter().any(|known| known.name == name)
}

/// The names that `policy` knows, aliases left out.
pub(super) fn names(policy: Policy) -> impl Iterator<Item = &'static str> + Clone {
    KNOWN.iter().filter(move |known| known.alias_of.is_none() && known.in_policy(policy)).map(|known| known.name)
}

/// An option or variable that was read, found valid, and has no effect on this allocator.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct AcceptedOption {
    /// Its name as PyTorch's documentation writes it, whatever alias was used.
    pub name: &'static str,
    /// Its value as it was written, without whitespace, cut short where it is very long.
    pub value: String,
    /// Why it has no effect.
    pub why: AcceptedWhy,
    /// Where it stands in the options; `None` for an environment variable of its own.
    pub place: Option<Place>,
}

impl fmt::Display for AcceptedOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} has no effect: {}", self.name, self.value, self.why)
    }
}

/// Why an option has no effect.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum AcceptedWhy {
    /// It configures pinned host memory, and this allocator serves the device's.
    HostMemory,
    /// It asks for what this allocator is anyway (`backend:native`; `expandable_segments:True` under `pages`, `False` elsewhere).
    AlreadySo,
    /// It keeps free memory from being taken apart, and under `pages` what is apart is brought together. Where the device has no virtual
    /// memory it has its effect.
    PagesMove,
    /// It says how many addresses are reserved, and `pages` reserves them as they are needed.
    AddressesAsNeeded,
    /// It is about pages, and virtual memory is turned off.
    NoVirtualMemory,
    /// It only acts together with expandable segments.
    NeedsExpandableSegments,
    /// It drops a lock around driver calls, and no lock is ever held over one here.
    NoLockHeld,
    /// The same option follows with another value, and the last one counts, as in PyTorch.
    Overridden,
    /// Its value is none that PyTorch knows, which PyTorch warns about and ignores.
    Ignored,
}

impl fmt::Display for AcceptedWhy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HostMemory => "it is about pinned host memory, which this allocator does not serve",
            Self::AlreadySo => "this is how it is anyway",
            Self::PagesMove => "the policy `pages` brings free memory together, so it may always be taken apart",
            Self::AddressesAsNeeded => "the policy `pages` reserves addresses as they are needed",
            Self::NoVirtualMemory => "it needs virtual memory, which is turned off",
            Self::NeedsExpandableSegments => "it only acts together with expandable segments",
            Self::NoLockHeld => "no lock is held over a driver call here",
            Self::Overridden => "the same option follows again, and the last one counts",
            Self::Ignored => "PyTorch ignores this value with a warning",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_2_11_lacks_exactly_what_came_later() {
        let missing: Vec<_> = names(Policy::Torch215).filter(|name| find(name, Policy::Torch211).is_none()).collect();
        assert_eq!(
            missing,
            [
                "expandable_segments_reserve",
                "expandable_segments_reserve_by_class",
                "throw_on_cudamalloc_oom",
                "pinned_free_catch_all",
                "pinned_max_round_threshold_mb",
                "pinned_max_cached_size_mb",
            ]
        );
        assert!(missing.iter().all(|name| newer_version_knows(name, Policy::Torch211)));
        assert!(!newer_version_knows("backend_", Policy::Torch211));
        assert_eq!(names(Policy::Torch215).count(), 20);
        assert!(names(Policy::Segments).eq(names(Policy::Torch215)));
    }

    #[test]
    fn aliases_lead_to_the_documented_name() {
        for policy in Policy::ALL {
            assert_eq!(
                find("release_lock_on_hipmalloc", *policy),
                Some((Opt::ReleaseLock, "release_lock_on_cudamalloc"))
            );
            assert_eq!(
                find("pinned_use_hip_host_register", *policy),
                Some((Opt::PinnedFlag, "pinned_use_cuda_host_register"))
            );
            assert_eq!(find("expandable_segments_handle_type", *policy), None);
        }
    }
}
