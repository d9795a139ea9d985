//! A miss: pieces moved and memory made for one request, all or nothing.
//!
//! First everything concerned is held (in no index, under the arenas' locks, one after the other), then the driver is called with no
//! lock held, then everything is entered. Whatever fails, [`Assembly::undo`] brings back what was (G6).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use gpupool_device::{Address, Device, DriverResult};

use super::cost;
use super::leave::Leaving;
use super::plan::{PageRules, Target, handle_sizes};
use super::sources::Source;
use super::table::{Handle, Piece};
use crate::arena::{Arena, ArenaState, BlockId};
use crate::error::AllocError;
use crate::ids::{Part, PoolId};
use crate::inner::{Inner, Request};
use crate::ladder::Outcome;
use crate::policy::SHORT_ABOVE;
use crate::totals::Refusal;
use crate::units::{Units, to_bytes, to_units};

/// How much is done for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Haste {
    /// Free pieces of its own stream that it uses up, if moving them costs at most so many nanoseconds: so that it pins no larger one.
    Sparing { worth: u64 },
    /// What the preset finds worth it.
    Usual,
    /// Memory is short: everything that can be moved now.
    Short,
    /// As `Short`, waiting on the host for other streams.
    Waiting,
}

/// What is being put together. It ends in [`Inner::enter_assembly`] or in [`Inner::undo`].
pub(super) struct Assembly<D: Device> {
    target: Target,
    filled: BlockId,
    /// Held neighbours.
    beside: Vec<BlockId>,
    address: Address,
    offset: Units,
    /// Where the block for the request ends.
    end: Units,
    needs: Units,
    pub(super) sources: Vec<Source<D>>,
    fresh: Vec<Arc<Handle>>,
    promised: u64,
    /// Bytes that a repetition takes from other streams.
    traded: u64,
    /// Bytes at its front that are mapped and could not be unmapped.
    stuck: u64,
}

impl<D: Device> Inner<D> {
    /// Serves a request from moved pieces and new memory. Never waits but in [`Haste::Waiting`].
    pub(crate) fn assemble(&self, request: &Request<D>, haste: Haste) -> Result<Outcome<D>, AllocError> {
        let Some(rules) = self.shared.rules.pages else { return Ok(Outcome::Nothing) };
        if request.pool.as_ref().is_some_and(|p| p.provider.is_some() || p.whole_segments.load(Ordering::Relaxed)) {
            return Ok(Outcome::Nothing);
        }
        request.arena.settle_leaving(false)?;
        if haste == Haste::Usual && self.shared.config.idle_decay().is_some() {
            self.decay()?;
        }
        let rules = self.rules_for(&rules, request.size);
        let overdrawn = self.overdrawn(&rules);
        let has_room = request.pool.is_none()
            && haste == Haste::Usual
            && request.arena.lock().has_room(&rules, overdrawn, request.size, &request.arena.counters);
        let grows_first = haste == Haste::Usual && (rules.worth == 0 || has_room);
        let Some(mut assembly) = self.begin_assembly(request, &rules, grows_first, has_room)? else {
            return Ok(Outcome::Nothing);
        };
        let filled = self.fill_assembly(&mut assembly, request, &rules, haste, grows_first);
        request.arena.lock().repetition.spent(assembly.price(), &request.arena.counters);
        match filled {
            Ok(true) => {}
            Ok(false) => {
                self.undo(assembly, request);
                return Ok(Outcome::Nothing);
            }
            Err(e) => {
                self.undo(assembly, request);
                return Err(e);
            }
        }
        self.enter_assembly(assembly, request)
    }

    /// The rules for a request of so many bytes: stricter ones where memory is short.
    pub(super) fn rules_for(&self, rules: &PageRules, bytes: u64) -> PageRules {
        let total = self.shared.driver.device().properties().total_memory;
        let totals = self.shared.totals.lock();
        let most = totals.limit.map_or(total, |l| l.bytes.min(total));
        let after = totals.held().saturating_add(bytes);
        let rules = rules.for_request(bytes);
        if after > most / 100 * SHORT_ABOVE { rules.if_short() } else { rules }
    }

    /// `None` while moves may go on; where they have taken more than their share of the time and memory is not short, the room that growth has
    /// in their place, in sixteenths of the peak. Takes the totals' lock.
    pub(super) fn overdrawn(&self, rules: &PageRules) -> Option<u64> {
        let now = self.shared.driver.device().now();
        self.shared.totals.lock().moves.room(now, rules.share).filter(|_| rules.worth < u64::MAX)
    }

    /// Finds a place and holds what is beside it. `None` if no addresses are to be had.
    fn begin_assembly(
        &self,
        request: &Request<D>,
        rules: &PageRules,
        grows_first: bool,
        has_room: bool,
    ) -> Result<Option<Assembly<D>>, AllocError> {
        let Some(size) = to_units(request.size) else { return Ok(None) };
        let lanes: Vec<u32> = [Some(request.lane), request.neutral].into_iter().flatten().collect();
        for attempt in 0..2 {
            {
                let mut state = request.arena.lock();
                if request.is_stranded(&state) {
                    return Err(AllocError::RetiredStream { stream: request.core.id });
                }
                if state.idle.away {
                    // What is free beside a hole has no memory behind it.
                    return Ok(None);
                }
                if let Some(target) = state.target(rules, request.neutral.unwrap_or(request.lane), &lanes, size) {
                    let generous = match (grows_first, has_room) {
                        (true, true) => {
                            let most = state.repetition.may_hold().saturating_sub(state.mapped_bytes());
                            let generous = state.repetition.segment_bytes(to_bytes(target.needs));
                            if rules.worth == 0 { generous } else { generous.min(most) }
                        }
                        (true, false) if rules.in_segments && target.after.is_none() => request.segment_bytes,
                        _ => 0,
                    };
                    return Ok(Some(self.hold_target(&mut state, request, rules, target, size, generous)));
                }
            }
            if attempt == 0 && !self.add_range(request, rules, size)? {
                break;
            }
        }
        Ok(None)
    }

    fn hold_target(
        &self,
        state: &mut ArenaState,
        request: &Request<D>,
        rules: &PageRules,
        target: Target,
        size: Units,
        generous: u64,
    ) -> Assembly<D> {
        let counters = &request.arena.counters;
        let mut beside: Vec<BlockId> = [target.before, target.after].into_iter().flatten().collect();
        let lane = beside.first().map_or(request.neutral.unwrap_or(request.lane), |b| state.blocks[*b].lane);
        let begin = target.before.map_or(state.blocks[target.hole].offset, |b| state.blocks[b].offset);
        // What lies behind the request may be moved for it.
        let stop = begin.saturating_add(size);
        beside.retain(|block| state.blocks[*block].offset < stop);
        for block in &beside {
            let (start, end) = (state.blocks[*block].offset, state.end_of(*block));
            state.hold(*block, start, end.min(stop), counters);
        }
        let offset = state.blocks[target.hole].offset;
        let more = to_units(rules.round_up(generous / crate::units::UNIT) * crate::units::UNIT).unwrap_or(0);
        let needs = target.needs.max(more.min(target.room));
        // All of the hole, so that a large piece may cover a little more; what is not used becomes a hole again.
        let filled = state.fill(target.hole, target.room, lane);
        let base = state.segments.get(target.segment).map_or(Address::NULL, |s| s.memory.base);
        Assembly {
            target,
            filled,
            beside,
            address: base.offset(to_bytes(offset)),
            offset,
            end: stop,
            needs,
            sources: Vec::new(),
            fresh: Vec::new(),
            promised: 0,
            traded: 0,
            stuck: 0,
        }
    }

    /// Reserves addresses for a part of a pool: the more, the more it holds already, so that there are few ranges.
    fn add_range(&self, request: &Request<D>, rules: &PageRules, size: Units) -> Result<bool, AllocError> {
        let page = rules.page_bytes();
        let total = self.shared.driver.device().properties().total_memory;
        let held: u64 = {
            let state = request.arena.lock();
            state.mapped_bytes()
        };
        let share = match (request.part, request.pool.is_some()) {
            (Part::Large, false) => total / 4,
            (Part::Large, true) => total / 64,
            (Part::Small, _) => total / 256,
        };
        // The last page is never mapped, and a request may begin inside one.
        let least = rules.round_up(u64::from(size)) * crate::units::UNIT + 2 * page;
        let generous = least.max(share).max(held.saturating_mul(2).min(total)).next_multiple_of(page);
        let most = (u64::from(u32::MAX) * crate::units::UNIT) / page * page;
        if least > most {
            return Ok(false);
        }
        let made = [generous.min(most), least].into_iter().find_map(|bytes| match self.shared.reserve_range(bytes) {
            Ok(memory) => Some(Ok(memory)),
            Err(e) if e.is_out_of_memory() => None,
            Err(e) => Some(Err(e)),
        });
        let Some(memory) = made.transpose()? else { return Ok(false) };
        let mut state = request.arena.lock();
        if request.is_stranded(&state) {
            drop(state);
            self.shared.free_range(memory.base, memory.bytes);
            return Ok(false);
        }
        let lane = request.neutral.unwrap_or(request.lane);
        Ok(state.add_hole(memory, lane, rules.page).is_some())
    }

    /// Gathers what is needed and maps it. `false` if there is not enough.
    fn fill_assembly(
        &self,
        assembly: &mut Assembly<D>,
        request: &Request<D>,
        rules: &PageRules,
        haste: Haste,
        grows_first: bool,
    ) -> Result<bool, AllocError> {
        let mut missing = assembly.needs;
        let moves_own = !grows_first || self.moves_at_peak(request, rules, missing);
        if moves_own {
            missing = self.own_sources(assembly, request, rules, missing, haste)?;
            if let Haste::Sparing { worth } = haste
                && (missing > 0 || assembly.moves() * cost::MOVE > worth)
            {
                return Ok(false);
            }
        }
        // Even in a repetition: what lies free on other streams would add up, a peak for each. But not for ever.
        if missing > 0
            && (haste != Haste::Usual || rules.worth > 0 && self.raises_peak(to_bytes(missing)))
            && !(grows_first && self.shared.totals.has_traded_enough(to_bytes(missing)))
        {
            let wanted = missing;
            missing = self.other_sources(assembly, request, rules, missing, haste, false)?;
            if grows_first {
                assembly.traded = to_bytes(wanted - missing);
            } else {
                missing = self.awaited_sources(assembly, request, rules, missing, haste)?;
            }
            if haste == Haste::Waiting {
                missing = self.other_sources(assembly, request, rules, missing, haste, true)?;
            }
        }
        if missing > 0 && !self.make_fresh(assembly, request, rules, missing)? {
            return Ok(false);
        }
        self.map_assembly(assembly)?;
        if assembly.traded > 0 {
            self.shared.totals.traded(assembly.traded);
        }
        Ok(true)
    }

    /// Whether a repetition's growth would raise the device's peak, and the moves that can be had instead are few.
    fn moves_at_peak(&self, request: &Request<D>, rules: &PageRules, missing: Units) -> bool {
        // Pieces are of all sizes up to the largest.
        let handles = u64::from(missing / (rules.largest / 2).max(rules.page)) + 1;
        rules.worth > 0
            && self.raises_peak(to_bytes(missing))
            && handles * cost::MOVE <= request.arena.lock().repetition.left_at_peak()
    }

    fn raises_peak(&self, bytes: u64) -> bool {
        let totals = self.shared.totals.lock();
        let after = totals.held().saturating_add(bytes);
        after > totals.peak_held() || self.shared.config.trim_above().is_some_and(|mark| after > mark)
    }

    /// New memory, a handle at a time. `false` if there is not enough.
    fn make_fresh(
        &self,
        assembly: &mut Assembly<D>,
        request: &Request<D>,
        rules: &PageRules,
        missing: Units,
    ) -> Result<bool, AllocError> {
        let bytes = to_bytes(missing);
        match self.shared.totals.begin_growth(bytes, false) {
            Ok(()) => {}
            Err(Refusal::Limit) => return Ok(false),
            Err(Refusal::Rejected) => {
                let held = self.shared.totals.lock().held();
                let total = self.shared.driver.device().properties().total_memory;
                self.hooks.rejected(bytes, held, total);
                return Err(AllocError::Rejected { requested: request.requested });
            }
        }
        assembly.promised = bytes;
        let first = assembly.offset + assembly.moved_units();
        for units in handle_sizes(rules, first, missing, assembly.end) {
            match self.shared.driver.handle_create(to_bytes(units)) {
                Ok(id) => assembly.fresh.push(Arc::new(Handle::new(id, to_bytes(units)))),
                Err(e) if e.is_out_of_memory() => return Ok(false),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(true)
    }

    /// Maps everything at its place, sources first. After an error nothing new is mapped.
    fn map_assembly(&self, assembly: &mut Assembly<D>) -> DriverResult<()> {
        let driver = &self.shared.driver;
        let start = driver.device().now();
        let moved = assembly.sources.iter().flat_map(|s| &s.pieces).map(|p| &p.handle);
        let moves = !assembly.sources.is_empty();
        let mut at = assembly.address;
        let mut failed = None;
        for handle in moved.chain(&assembly.fresh) {
            if let Err(e) = driver.map_only(at, handle.bytes, handle.id) {
                failed = Some(e);
                break;
            }
            at = at.offset(handle.bytes);
        }
        let bytes = at.offset_from(assembly.address);
        if failed.is_none() {
            failed = driver.set_access(assembly.address, bytes).err();
        }
        let spent = driver.device().now().saturating_sub(start);
        if moves {
            let mut totals = self.shared.totals.lock();
            totals.pages.remap_ns += spent;
            totals.moves.spend(spent);
        }
        let Some(error) = failed else { return Ok(()) };
        if bytes > 0
            && let Err(e) = driver.unmap(assembly.address, bytes)
        {
            // It cannot be used: it stays where it is until it can be unmapped.
            tracing::warn!(address = %assembly.address, bytes, error = %e, "mappings that could not be made accessible stay");
            assembly.stuck = bytes;
        }
        Err(error)
    }

    /// Enters what was mapped and hands the request its block.
    fn enter_assembly(&self, mut assembly: Assembly<D>, request: &Request<D>) -> Result<Outcome<D>, AllocError> {
        if request.is_stranded(&request.arena.lock()) {
            let bytes = assembly.mapped_bytes();
            if self.shared.driver.unmap(assembly.address, bytes).is_err() {
                assembly.stuck = bytes;
            }
            self.undo(assembly, request);
            return Err(match &request.pool {
                Some(pool) => crate::error::PoolError::Unknown { pool: pool.id }.into(),
                None => AllocError::RetiredStream { stream: request.core.id },
            });
        }
        let to = (request.part, request.pool_id());
        let totals = &self.shared.totals;
        let mapped = assembly.mapped_bytes();
        let mut pieces: Vec<Piece> = Vec::new();
        let sources = std::mem::take(&mut assembly.sources);
        for source in &sources {
            source.pieces.iter().for_each(|p| p.handle.mapped());
            let done = |since| match source.awaited {
                // The wait is the stream's work now.
                true => request.core.stamp(),
                false if source.core.has_passed(since) => 0,
                false => since,
            };
            pieces.extend(source.pieces.iter().map(|p| Piece { since: done(p.since), ..p.clone() }));
            let mut state = source.arena.lock();
            let (_, runs) = state.lift(source.block);
            state.leaving.push(source.leaving());
            if let Some(counters) = &source.counters {
                counters.reserved_bytes.decrease(source.part, source.bytes as i64);
            }
            totals.lock().pages_moved(source.bytes, source.pieces.len() as u64, (source.part, source.pool), to, runs);
        }
        for handle in &assembly.fresh {
            handle.mapped();
            let (handle, units) = (Arc::clone(handle), to_units(handle.bytes).unwrap_or(0));
            pieces.push(Piece { handle, units, since: 0, ordinal: self.shared.take_ordinal() });
        }
        let counters = &request.arena.counters;
        let mut state = request.arena.lock();
        let runs = state.enter(assembly.target.segment, assembly.offset, pieces);
        totals.lock().pages_made(assembly.promised, assembly.fresh.len() as i64, to, runs);
        if let Some(pool) = &request.pool {
            pool.counters.reserved_bytes.increase(request.part, mapped as i64);
        }
        let filled = assembly.filled;
        let used = to_units(mapped).unwrap_or(0);
        if used < state.blocks[filled].size {
            let rest = state.divide(filled, used);
            state.empty(rest);
        }
        for block in &assembly.beside {
            state.unhold(*block, counters);
        }
        let block = state.unhold(filled, counters);
        state.unindex(block);
        let handed = state.hand_out(block, request.size, request.requested, counters);
        let served = handed.map(|handed| request.served(&mut state, handed));
        drop(state);
        // What has left goes at once where the device is done with it.
        let mut arenas: Vec<&Arc<Arena<D>>> = sources.iter().map(|s| &s.arena).collect();
        arenas.dedup_by(|a, b| Arc::ptr_eq(a, b));
        for arena in arenas {
            if let Err(e) = arena.settle_leaving(false) {
                tracing::warn!(error = %e, "old mappings stay for now");
            }
        }
        Ok(served.map_or(Outcome::Nothing, Outcome::Served))
    }

    /// Brings back what was: sources and neighbours are free again, new handles go back, the place is a hole.
    fn undo(&self, mut assembly: Assembly<D>, request: &Request<D>) {
        for source in &assembly.sources {
            let mut state = source.arena.lock();
            state.unhold(source.block, &source.arena.counters);
        }
        {
            let mut state = request.arena.lock();
            let stuck = to_units(assembly.stuck).unwrap_or(0);
            let rest = match stuck {
                0 => Some(assembly.filled),
                _ if stuck < state.blocks[assembly.filled].size => Some(state.divide(assembly.filled, stuck)),
                _ => None,
            };
            if stuck > 0 {
                // Nothing uses it, so it leaves as soon as the driver lets it. New handles stay and are counted until then.
                let homeless = std::mem::take(&mut assembly.fresh);
                let moved = assembly.sources.iter().flat_map(|s| &s.pieces).map(|p| &p.handle);
                let handles: Vec<Arc<Handle>> = moved.chain(&homeless).cloned().collect();
                handles.iter().for_each(|h| h.mapped());
                let part = request.part;
                let mut totals = self.shared.totals.lock();
                totals.pages.aliased_bytes += assembly.stuck as i64;
                let promised = std::mem::take(&mut assembly.promised);
                totals.pages_made(promised, homeless.len() as i64, (part, PoolId::DEFAULT), 0);
                drop(totals);
                let (core, block, address) = (Arc::clone(&self.shared.neutral), assembly.filled, assembly.address);
                let bytes = assembly.stuck;
                state.leaving.push(Leaving { block, address, bytes, handles, homeless, part, core, since: 0 });
            }
            if let Some(rest) = rest {
                state.empty(rest);
            }
            for block in &assembly.beside {
                state.unhold(*block, &request.arena.counters);
            }
        }
        if assembly.promised > 0 {
            self.shared.totals.cancel(assembly.promised);
        }
        for handle in &assembly.fresh {
            self.shared.release_unmapped(handle.id);
        }
    }
}

impl<D: Device> Assembly<D> {
    /// Units that may be mapped beyond what is needed.
    pub(super) fn spare(&self) -> Units {
        self.target.room - self.needs
    }

    /// Handles that are moved.
    fn moves(&self) -> u64 {
        self.sources.iter().map(|s| s.pieces.len() as u64).sum()
    }

    /// What putting it together takes of the driver, by the model's prices: a decision that went by the clock would differ from run to run.
    fn price(&self) -> u64 {
        self.moves() * cost::MOVE + self.fresh.iter().map(|handle| cost::make(handle.bytes)).sum::<u64>()
    }

    fn moved_units(&self) -> Units {
        self.sources.iter().flat_map(|s| &s.pieces).map(|p| p.units).sum()
    }

    fn mapped_bytes(&self) -> u64 {
        to_bytes(self.moved_units()) + self.fresh.iter().map(|h| h.bytes).sum::<u64>()
    }
}
