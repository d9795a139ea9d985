//! The smallest capacity at which a trace completes.
//!
//! Bisection in steps of 2 MiB between what is live at the most and a capacity that is known to suffice. More memory
//! can, in principle, make a policy fail where less did not; the answer is a capacity that suffices with one step
//! less that does not.

use super::DEFAULT_CAPACITY;
use super::run::{Options, ReplayError, completes};
use crate::trace::Trace;

/// Capacities are looked for in steps of this many bytes.
const STEP: u64 = 2 << 20;

/// What a search for the smallest capacity found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// The smallest capacity at which the trace completes; `None` if it does not at any that was tried.
    pub bytes: Option<u64>,
    /// Replays that were made.
    pub replays: u32,
}

/// Looks for the smallest capacity at which `trace` completes, up to the largest of an H200's memory and the capacity
/// of the options. `enough` is where it is expected to complete. `progress` is told replays so far.
///
/// # Errors
///
/// See [`ReplayError`].
pub fn find_capacity(
    trace: &Trace,
    options: &Options,
    enough: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<Capacity, ReplayError> {
    let mut replays = 0;
    let mut completes_at = |steps: u64| {
        replays += 1;
        progress(u64::from(replays));
        completes(trace, &Options { capacity: steps * STEP, ..options.clone() })
    };
    // Below what is live nothing fits.
    let mut too_little = trace.peak_live().div_ceil(STEP).saturating_sub(1);
    let most = (options.capacity.max(DEFAULT_CAPACITY) / STEP).max(too_little + 1);
    let mut suffices = enough.div_ceil(STEP).clamp(too_little + 1, most);
    while !completes_at(suffices)? {
        too_little = suffices;
        if suffices == most {
            return Ok(Capacity { bytes: None, replays });
        }
        suffices = (suffices * 2).min(most);
    }
    while suffices - too_little > 1 {
        let middle = too_little + (suffices - too_little) / 2;
        if completes_at(middle)? {
            suffices = middle;
        } else {
            too_little = middle;
        }
    }
    Ok(Capacity { bytes: Some(suffices * STEP), replays })
}
