//! The race detector: who touched which byte last, who owns it, and whether the next access is in order.
//!
//! For every byte the detector keeps the last write and the reads since, each with a component and an epoch of a vector
//! clock (the way of FastTrack). An access is in order with an earlier one if its clock has reached that epoch.
//! Accesses are kept by physical number, so aliases of the same memory are seen as the same bytes; owners are kept by
//! address.
//!
//! Ownership is told by whoever hands memory out ([`own`](crate::SimDevice::own),
//! [`disown`](crate::SimDevice::disown)). It is checked when work is *submitted*, because that is when the program
//! decides; order is checked when work *runs*.
//!
//! # Invariants
//!
//! * **R1** A component is given to somebody else only once no access of it is kept, and goes on counting from where it
//!   stopped.
//! * **R2** Two accesses between which the bytes were handed out collide even if both only read.
//! * **R3** A read that is ordered before a later kept read may be forgotten: whatever is unordered with the first is
//!   unordered with the second, or was reported before.
//! * **R4** At most [`KEPT`] reports are kept, the first ones, one for each pair of submissions and kind.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use gpupool_device::{Address, CaptureId};

use crate::clocks::VectorClock;
use crate::intervals::{IntervalMap, Piecewise};
use crate::kernels::Touch;
use crate::memory::{Physical, Piece};
use crate::report::{Access, OwnerInfo, Report, ReportKind, Withdrawal};

/// Reports that are kept.
pub(crate) const KEPT: usize = 64;
/// Withdrawals that are remembered, for reports.
const WITHDRAWALS: usize = 1024;
/// Dead components that may pile up before the accesses are searched for them.
const DEAD_COMPONENTS: usize = 64;

/// An access at a point of its component's time.
#[derive(Clone, Debug)]
pub(crate) struct Stamp {
    component: u32,
    epoch: u64,
    access: Arc<Access>,
}

#[derive(Clone, Debug, Default)]
struct Shadow {
    write: Option<Stamp>,
    reads: Vec<Stamp>,
    /// Submissions before the bytes were last handed out.
    handed: u64,
}

impl PartialEq for Stamp {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.access, &other.access) && (self.component, self.epoch) == (other.component, other.epoch)
    }
}

impl Piecewise for Shadow {
    fn continues(&self, _: u64, next: &Self) -> bool {
        self.handed == next.handed && self.write == next.write && self.reads == next.reads
    }
}

impl Piecewise for OwnerInfo {
    fn continues(&self, _: u64, next: &Self) -> bool {
        self == next
    }
}

/// Where in the order of things an access happens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment<'a> {
    pub(crate) clock: &'a VectorClock,
    pub(crate) component: u32,
    pub(crate) epoch: u64,
}

#[derive(Debug)]
pub(crate) struct Detector {
    on: bool,
    shadow: IntervalMap<Shadow>,
    /// By device.
    owners: Vec<IntervalMap<OwnerInfo>>,
    reports: Vec<Report>,
    found: u64,
    withdrawn: VecDeque<(u64, u64, Withdrawal)>,
    next_component: u32,
    free_components: Vec<(u32, u64)>,
    dead_components: Vec<(u32, u64)>,
    dead_limit: usize,
}

impl Detector {
    pub(crate) fn new(on: bool, devices: u32) -> Self {
        Self {
            on,
            shadow: IntervalMap::default(),
            owners: (0..devices).map(|_| IntervalMap::default()).collect(),
            reports: Vec::new(),
            found: 0,
            withdrawn: VecDeque::new(),
            next_component: 0,
            free_components: Vec::new(),
            dead_components: Vec::new(),
            dead_limit: DEAD_COMPONENTS,
        }
    }

    pub(crate) fn on(&self) -> bool {
        self.on
    }

    /// A component, and the clock of somebody who is its first user.
    pub(crate) fn component(&mut self) -> (u32, VectorClock) {
        let mut clock = VectorClock::default();
        if !self.on {
            return (0, clock);
        }
        if let Some((component, epoch)) = self.free_components.pop() {
            clock.raise(component, epoch);
            return (component, clock);
        }
        self.next_component += 1;
        (self.next_component - 1, clock)
    }

    /// A component's user is gone; `epoch` is where it stopped.
    pub(crate) fn bury(&mut self, component: u32, epoch: u64) {
        if !self.on {
            return;
        }
        self.dead_components.push((component, epoch));
        if self.dead_components.len() < self.dead_limit {
            return;
        }
        let used: BTreeSet<u32> =
            self.shadow.values().flat_map(|s| s.write.iter().chain(&s.reads)).map(|stamp| stamp.component).collect();
        let (keep, free): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.dead_components).into_iter().partition(|(c, _)| used.contains(c));
        self.dead_components = keep;
        self.free_components.extend(free);
        self.dead_limit = DEAD_COMPONENTS.max(self.dead_components.len() * 2);
    }

    pub(crate) fn reports(&self) -> &[Report] {
        &self.reports
    }

    pub(crate) fn found(&self) -> u64 {
        self.found
    }

    pub(crate) fn clear_reports(&mut self) {
        self.reports.clear();
        self.found = 0;
    }

    pub(crate) fn report(&mut self, report: Report) {
        let key = |r: &Report| (r.kind, r.access.submission, r.earlier.as_ref().map(|e| e.submission));
        if self.reports.iter().any(|kept| key(kept) == key(&report)) {
            return;
        }
        self.found += 1;
        if self.reports.len() < KEPT {
            self.reports.push(report);
        }
    }

    /// Memory that is gone: nobody can touch these bytes any more.
    pub(crate) fn forget(&mut self, gone: Physical) {
        self.shadow.remove(gone.start, gone.start + gone.bytes);
    }

    /// Notes a call that took addresses away.
    pub(crate) fn withdraw(&mut self, address: u64, bytes: u64, withdrawal: Withdrawal) {
        if self.withdrawn.len() >= WITHDRAWALS {
            self.withdrawn.pop_front();
        }
        self.withdrawn.push_back((address, address.saturating_add(bytes), withdrawal));
    }

    fn withdrawal(&self, address: u64) -> Option<Withdrawal> {
        self.withdrawn.iter().rev().find(|w| w.0 <= address && address < w.1).map(|w| w.2)
    }

    /// Reports a touch of something that is not accessible at `at`.
    pub(crate) fn illegal(&mut self, access: Access, at: u64) {
        let bytes = (access.address.0 + access.bytes).saturating_sub(at);
        let withdrawn = self.withdrawal(at);
        let owner = self.owner_at(access.device, at);
        let (kind, address) = (ReportKind::IllegalAddress, Address(at));
        self.report(Report { kind, address, bytes, access, earlier: None, owner, withdrawn });
    }

    fn owner_at(&self, device: u32, address: u64) -> Option<OwnerInfo> {
        let owners = self.owners.get(device as usize)?;
        owners.within(address, address.saturating_add(1)).next().map(|(_, _, owner)| owner)
    }

    /// Checks an access that runs now against those before it, and keeps it.
    pub(crate) fn touch(&mut self, access: &Arc<Access>, pieces: &[Piece], now: Moment<'_>) {
        if !self.on {
            return;
        }
        let stamp = Stamp { component: now.component, epoch: now.epoch, access: Arc::clone(access) };
        for piece in pieces {
            if piece.since > access.submission {
                self.report(Report {
                    kind: ReportKind::MappedAfterSubmission,
                    address: Address(piece.address),
                    bytes: piece.bytes,
                    access: (**access).clone(),
                    earlier: None,
                    owner: self.owner_at(access.device, piece.address),
                    withdrawn: self.withdrawal(piece.address),
                });
            }
            for (start, end, shadow) in self.shadow.cover(piece.physical, piece.physical + piece.bytes) {
                let mut shadow = shadow.unwrap_or_default();
                if let Some(earlier) = collision(&shadow, access, now.clock) {
                    let address = piece.address + (start - piece.physical);
                    self.report(Report {
                        kind: ReportKind::Race,
                        address: Address(address),
                        bytes: end - start,
                        access: (**access).clone(),
                        earlier: Some((*earlier.access).clone()),
                        owner: self.owner_at(access.device, address),
                        withdrawn: None,
                    });
                }
                if access.write {
                    shadow.write = Some(stamp.clone());
                    shadow.reads.clear();
                } else {
                    shadow.reads.retain(|read| now.clock.get(read.component) < read.epoch);
                    shadow.reads.push(stamp.clone());
                }
                self.shadow.set(start, end, shadow);
            }
        }
    }

    /// Checks that the host knows every access through `piece` to be complete.
    pub(crate) fn unmap(&mut self, piece: &Piece, host: &VectorClock, withdrawal: Withdrawal) {
        let end = piece.address + piece.bytes;
        let through = |a: &Access| a.address.0 < end && piece.address < a.address.0 + a.bytes;
        let unknown = |stamp: &&Stamp| host.get(stamp.component) < stamp.epoch && through(&stamp.access);
        let mut found = Vec::new();
        for (start, stop, shadow) in self.shadow.within(piece.physical, piece.physical + piece.bytes) {
            if let Some(stamp) = shadow.write.iter().chain(&shadow.reads).find(unknown) {
                found.push((piece.address + (start - piece.physical), stop - start, (*stamp.access).clone()));
            }
        }
        for (address, bytes, access) in found {
            let owner = self.owner_at(access.device, address);
            let (kind, address) = (ReportKind::UnmappedInUse, Address(address));
            self.report(Report { kind, address, bytes, access, earlier: None, owner, withdrawn: Some(withdrawal) });
        }
    }

    /// Bytes are handed out, or taken back.
    pub(crate) fn hand(&mut self, device: u32, start: u64, bytes: u64, owner: Handing, pieces: &[Piece]) {
        let Some(owners) = self.owners.get_mut(device as usize) else { return };
        let end = start.saturating_add(bytes);
        match owner {
            Handing::Out(owner) => {
                owners.set(start, end, owner);
                for piece in pieces {
                    for (s, e, shadow) in self.shadow.cover(piece.physical, piece.physical + piece.bytes) {
                        let shadow = Shadow { handed: owner.submission, ..shadow.unwrap_or_default() };
                        self.shadow.set(s, e, shadow);
                    }
                }
            }
            Handing::Back(submission) => {
                for (s, e, owner) in owners.within(start, end).collect::<Vec<_>>() {
                    owners.set(s, e, OwnerInfo { live: false, submission, ..owner });
                }
            }
        }
    }

    /// Checks a submission in the name of an owner: the bytes must be that owner's. `graph` is set for a node of a
    /// launch, which may touch what belongs to nobody, and what was handed out in its own capture.
    pub(crate) fn check_owner(&mut self, access: &Access, graph: Option<CaptureId>) {
        let Some(tag) = access.tag.filter(|_| self.on) else { return };
        let Some(owners) = self.owners.get(access.device as usize) else { return };
        let stale = |owner: &OwnerInfo| match graph {
            None => !owner.live || owner.tag != tag,
            Some(capture) => owner.live && owner.tag != tag && owner.capture != Some(capture),
        };
        let (start, end) = (access.address.0, access.address.0.saturating_add(access.bytes));
        let found = owners.within(start, end).find(|(_, _, owner)| stale(owner));
        if let Some((s, e, owner)) = found {
            self.report(Report {
                kind: ReportKind::StaleOwner,
                address: Address(s),
                bytes: e - s,
                access: access.clone(),
                earlier: None,
                owner: Some(owner),
                withdrawn: None,
            });
        }
    }
}

/// A hand-out or its end.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Handing {
    Out(OwnerInfo),
    /// Submissions before it.
    Back(u64),
}

/// The first kept access that collides with `access`.
fn collision<'a>(shadow: &'a Shadow, access: &Access, clock: &VectorClock) -> Option<&'a Stamp> {
    let unordered = |stamp: &&Stamp| clock.get(stamp.component) < stamp.epoch;
    let handed_between = |stamp: &Stamp| {
        let (a, b) = (stamp.access.submission, access.submission);
        a.min(b) <= shadow.handed && shadow.handed < a.max(b)
    };
    let written = shadow.write.iter().find(unordered);
    written.or_else(|| shadow.reads.iter().filter(unordered).find(|read| access.write || handed_between(read)))
}

/// An access that has not run yet, for checks at submission.
pub(crate) fn pending(touch: &Touch, template: &Access) -> Access {
    Access { address: Address(touch.address), bytes: touch.bytes, write: touch.write, ..template.clone() }
}
