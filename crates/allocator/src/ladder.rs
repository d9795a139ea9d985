//! The ladder: what is tried, in which order, when no free block fits.
//!
//! A policy's ladder is a table of rungs. Each names a step and what follows if the step made progress: a search from the top, or
//! the next rung. The steps themselves are in [`crate::growth`] and [`crate::reclaim`].

use std::sync::Arc;

use gpupool_device::Device;

use crate::error::AllocError;
use crate::idle::Residency;
use crate::inner::{Inner, Request, Served};
use crate::pages::Haste;

/// One thing to try.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Merge what is in the arena's bins.
    EmptyBins,
    /// Free blocks whose recorded uses come before this request by the capture's own graph.
    CaptureOrder,
    /// Free blocks whose recorded uses are over.
    CompletedEvents,
    /// Let the requesting stream wait, on the device, for the recorded uses of its own freed blocks (if configured).
    WaitOnStream,
    /// Ask the registered reclaimers.
    Reclaimers,
    /// Give old free segments back (if configured).
    GarbageCollection,
    /// Move a wholly free segment of another stream here.
    TakeIdleSegment { wait: bool },
    /// Use free blocks of streams that are gone.
    TakeFromRetired,
    /// Put a small block of a capture into large memory that was reserved for its pool ahead.
    ReservedAhead,
    /// Give idle segments back if growth would exceed the previous peak or the high-water mark.
    TrimBeforeGrowth,
    /// A new segment from the driver.
    Grow { retry: bool },
    /// A new segment from the driver, no larger than the request needs: where one of the usual size was not to be had.
    GrowToFit,
    /// Cut a free handle that the best fit would pin.
    Cut,
    /// Move free pieces and make new memory for the request.
    Assemble(Haste),
    /// Blocks of pools that serve others when memory is short.
    OverflowPools,
    /// A free run of an idle pool that lends.
    Borrow { short: bool },
    /// Park idle pools that allow it.
    ParkIdle { wait: bool },
    /// Give idle segments back.
    ReleaseIdle { wait: bool },
    /// Wait for recorded uses of freed blocks.
    WaitForPending,
    /// PyTorch's `release_available`, then growth.
    OversizeThenGrow,
    /// PyTorch's `release_cached`, then growth as a retry.
    EmptyCacheThenGrow,
    /// Wait for the frees under way in the driver's own pool and empty it, then growth.
    EmptyDriverPoolThenGrow,
}

/// What follows a step that made progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Then {
    /// Search, and if that finds nothing start again from the top.
    SearchAgain,
    /// The next rung.
    GoOn,
}

/// A step of a policy's ladder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rung {
    pub(crate) step: Step,
    pub(crate) then: Then,
}

/// What a step brought.
pub(crate) enum Outcome<D: Device> {
    /// The block.
    Served(Served<D>),
    /// Something came back: a search may find it.
    Progress,
    /// Nothing.
    Nothing,
}

impl<D: Device> Inner<D> {
    /// Climbs the ladder until a block is found or every rung has failed.
    ///
    /// It ends: each progress consumed something finite (pending blocks, idle segments, binned blocks), and reclaimers, which may
    /// claim success for ever, are asked once.
    pub(crate) fn climb(&self, request: &Request<D>) -> Result<Served<D>, AllocError> {
        request.arena.counters.missed();
        let ladder = self.shared.rules.ladder;
        if request.arena.idle.residency() != Residency::Resident {
            request.arena.ready(Some(self), &[])?;
            if let Some(served) = self.search(request) {
                return Ok(served);
            }
        }
        let mut reclaimed = false;
        let mut at = 0;
        while let Some(rung) = ladder.get(at) {
            at += 1;
            if rung.step == Step::Reclaimers && std::mem::replace(&mut reclaimed, true) {
                continue;
            }
            match self.take_step(rung.step, request)? {
                Outcome::Served(served) => return Ok(served),
                Outcome::Progress if rung.then == Then::SearchAgain => {
                    if let Some(served) = self.search(request) {
                        return Ok(served);
                    }
                    at = 0;
                }
                Outcome::Progress | Outcome::Nothing => {}
            }
        }
        Err(self.out_of_memory(request))
    }

    fn take_step(&self, step: Step, request: &Request<D>) -> Result<Outcome<D>, AllocError> {
        let progress = |any: bool| if any { Outcome::Progress } else { Outcome::Nothing };
        Ok(match step {
            Step::Cut => self.cut(request)?,
            Step::Assemble(haste) => self.assemble(request, haste)?,
            Step::EmptyBins => progress(request.arena.lock().flush_bins(&request.arena.counters)),
            Step::CaptureOrder => progress(request.neutral.is_some() && self.reuse_in_capture(request)? > 0),
            Step::CompletedEvents => progress(request.arena.poll(true) > 0),
            Step::WaitOnStream => {
                let waits = self.shared.config.wait_for_recorded();
                progress(waits && request.arena.wait_on_device(&request.core)? > 0)
            }
            Step::Reclaimers => {
                let tidied = self.hooks.tidy(false);
                progress(self.hooks.reclaim(request.segment_bytes) || tidied)
            }
            Step::GarbageCollection => progress(self.collect_garbage()? > 0),
            Step::TakeIdleSegment { wait } => progress(self.take_idle_segment(request, wait)?),
            Step::TakeFromRetired => self.take_from_retired(request).map_or(Outcome::Nothing, Outcome::Served),
            Step::ReservedAhead => self.take_reserved(request).map_or(Outcome::Nothing, Outcome::Served),
            Step::TrimBeforeGrowth => progress(self.trim_before_growth(request)? > 0),
            Step::Grow { retry } => self.grow(request, retry)?,
            Step::GrowToFit => self.grow_to_fit(request)?,
            Step::OverflowPools => self.take_from_overflow(request).map_or(Outcome::Nothing, Outcome::Served),
            Step::Borrow { short } => self.borrow(request, short).map_or(Outcome::Nothing, Outcome::Served),
            Step::ParkIdle { wait } => progress(self.park_idle(&request.arena, wait) > 0),
            Step::ReleaseIdle { wait } => progress(self.release_idle(Some(request), wait)? > 0),
            Step::WaitForPending => progress(self.wait_for_pending(request)?),
            Step::OversizeThenGrow => match self.release_oversize(request)? {
                true => self.grow(request, false)?,
                false => Outcome::Nothing,
            },
            Step::EmptyDriverPoolThenGrow => self.empty_driver_pool_then_grow(request)?,
            Step::EmptyCacheThenGrow if request.in_capture => Outcome::Nothing,
            Step::EmptyCacheThenGrow => {
                self.release_cached()?;
                self.grow(request, true)?
            }
        })
    }

    /// Waits for pending blocks: first those of the request's own arena, then those of all others.
    fn wait_for_pending(&self, request: &Request<D>) -> Result<bool, AllocError> {
        if request.arena.wait_for_pending()? > 0 || self.hooks.tidy(true) {
            return Ok(true);
        }
        let mut freed = 0;
        for arena in self.arenas() {
            if !Arc::ptr_eq(&arena, &request.arena) {
                freed += arena.wait_for_pending()?;
            }
        }
        Ok(freed > 0)
    }
}
