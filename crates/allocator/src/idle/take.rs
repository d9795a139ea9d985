//! Memory goes away: a pool is parked or suspended.
//!
//! First the host waits for everything that may use what goes, then one look under the arena's lock decides what goes and holds what is
//! free, then contents are copied, and only then anything is unmapped. So whatever fails before the first unmap has changed nothing, and
//! what the driver does not take back afterwards stays where it was.

use std::collections::HashSet;
use std::sync::Arc;

use gpupool_device::{Address, Device, DriverError, DriverResult, MemoryHandle, code};

use super::{Away, Contents, IdleOptions, Moved, Residency, Saved};
use crate::arena::{Arena, ArenaState, Backing, BlockId, BlockState, LaneKind, NONE};
use crate::counters::PoolCounters;
use crate::error::{AllocError, PoolError};
use crate::history::Action;
use crate::ids::{Part, PoolId, StreamId};
use crate::pages::Piece;
use crate::stream::StreamCore;
use crate::units::{Units, to_bytes};

/// Looks at an arena that others keep changing.
const LOOKS: usize = 64;

/// Neighbouring memory of one segment that goes.
struct Going {
    segment: u32,
    address: Address,
    range: Away,
    part: Part,
    pool: PoolId,
    counters: Option<Arc<PoolCounters>>,
    /// The one handle of a segment that has one.
    handle: Option<MemoryHandle>,
    /// Otherwise its pieces.
    pieces: Vec<(Units, Piece)>,
}

/// What a move does, as one look decided.
#[derive(Default)]
struct Plan {
    going: Vec<Going>,
    copies: Vec<(Address, u64)>,
    /// Free blocks that this move holds.
    held: Vec<BlockId>,
    kept_bytes: u64,
}

/// Why a look decided nothing.
enum Unclear {
    /// The driver is being asked about blocks of the arena: look again.
    Changing,
    /// Work that cannot be waited for uses what must go.
    Busy(&'static str),
}

impl<D: Device> Arena<D> {
    /// The pool that an arena's memory belongs to.
    pub(crate) fn pool_id(&self) -> PoolId {
        self.lock().slots.first().map_or(PoolId::DEFAULT, |slot| slot.pool)
    }

    /// Takes the arena's memory away, in the state `to`. The caller sees to it that nothing of the pool runs and nothing is started.
    /// **Waits** for streams. Without `wait` it does nothing where somebody else is moving the arena's memory.
    pub(crate) fn take_away(&self, to: Residency, options: &IdleOptions, wait: bool) -> Result<Moved, AllocError> {
        let _turn = match wait {
            true => self.idle.turn.take(),
            false => match self.idle.turn.try_take() {
                Some(turn) => turn,
                None => return Ok(Moved::default()),
            },
        };
        let pool = self.pool_id();
        match (self.idle.residency(), to) {
            (Residency::Suspended, _) | (Residency::Parked, Residency::Parked) => return Ok(Moved::default()),
            _ => {}
        }
        self.check_movable(pool)?;
        self.settle_leaving(true)?;
        let was_away = self.lock().idle.away;
        let plan = self.plan(pool, to, options)?;
        if self.shared.registry.is_drawn_from(pool) && !pool.is_default() {
            self.give_up(&plan, was_away);
            return Err(AllocError::PoolInCapture { pool });
        }
        let copied_bytes = plan.copies.iter().map(|(_, bytes)| bytes).sum();
        match self.save(&plan.copies) {
            Ok(saved) => self.idle.saved.lock().extend(saved),
            Err(e) => {
                self.give_up(&plan, was_away);
                return Err(e.into());
            }
        }
        let begun = self.shared.driver.device().now();
        let mut moved = Moved { kept_bytes: plan.kept_bytes, copied_bytes, ..Moved::default() };
        for going in plan.going {
            self.part_with(going, &mut moved);
        }
        let state = self.lock();
        self.idle.set(to);
        drop(state);
        let spent = self.shared.driver.device().now().saturating_sub(begun);
        self.shared.totals.lock().idle.went(to, moved.bytes, spent);
        Ok(moved)
    }

    /// Whether memory of this kind can go away and leave its addresses.
    fn check_movable(&self, pool: PoolId) -> Result<(), PoolError> {
        let mut state = self.lock();
        if state.loans_out(&[]).0 > 0 {
            let (loans, bytes) = state.loans_out(&[]);
            return Err(PoolError::LoansOut { pool, loans, bytes });
        }
        if self.idle.residency() == Residency::Lent {
            self.idle.set(Residency::Resident);
        }
        let fixed = |backing: &Backing| match backing {
            Backing::Plain => Some("it has plain memory, whose addresses go with it: configure virtual memory"),
            Backing::Provider(_) => Some("its memory is a provider's"),
            Backing::Ordered { .. } => Some("its blocks are the driver's own pool's, or the graph's"),
            Backing::Handle(_) | Backing::Pages | Backing::Away => None,
        };
        match state.segments.iter().find_map(|(_, s)| fixed(&s.memory.backing)) {
            Some(why) => Err(PoolError::CannotMove { pool, why }),
            None => Ok(()),
        }
    }

    /// Waits for what may use what goes, and decides. From then on everything free is held.
    fn plan(&self, pool: PoolId, to: Residency, options: &IdleOptions) -> Result<Plan, AllocError> {
        let driver = &self.shared.driver;
        let mut why = "blocks of it are being handed out and freed";
        for _ in 0..LOOKS {
            self.wait_for_pending()?;
            let (seen, lanes, moves_live) = {
                let mut state = self.lock();
                state.flush_bins(&self.counters);
                let eager = state.lanes.iter().filter(|l| l.in_use && l.kind == LaneKind::Stream);
                let lanes: Vec<Arc<StreamCore>> = eager.map(|l| Arc::clone(&l.core)).collect();
                (self.version(), lanes, state.moves_live(to, options))
            };
            let mut busy: Vec<StreamId> = Vec::new();
            for core in &lanes {
                match core.wait(driver, core.open_mark()) {
                    Err(e) if to == Residency::Parked && cannot_be_asked(e.code) => busy.push(core.id),
                    waited => waited.map_err(|e| refusal(pool, e))?,
                }
            }
            if moves_live {
                // What owners of live blocks do with them nobody was told.
                let streams = self.shared.context.streams.lock().clone();
                for core in streams {
                    core.wait(driver, core.open_mark()).map_err(|e| refusal(pool, e))?;
                }
            }
            let mut state = self.lock();
            if self.version() != seen {
                continue;
            }
            match state.plan(to, options, &busy) {
                Ok(plan) => {
                    state.leave();
                    for id in &plan.held {
                        state.hold_free(*id, &self.counters);
                    }
                    return Ok(plan);
                }
                Err(Unclear::Changing) => {}
                Err(Unclear::Busy(reason)) => why = reason,
            }
            drop(state);
            crate::sync::yield_now();
        }
        Err(PoolError::Busy { pool, why }.into())
    }

    /// The move is off: what it held is free again.
    fn give_up(&self, plan: &Plan, was_away: bool) {
        // If memory was away before, everything free stays held.
        if was_away {
            return;
        }
        let mut state = self.lock();
        debug_assert!(plan.held.iter().all(|id| state.idle.parked.contains(id)));
        state.arrive(&self.counters);
    }

    /// Copies contents to the host. After an error nothing is kept.
    fn save(&self, copies: &[(Address, u64)]) -> DriverResult<Option<Saved>> {
        let bytes: u64 = copies.iter().map(|(_, bytes)| bytes).sum();
        if bytes == 0 {
            return Ok(None);
        }
        let driver = &self.shared.driver;
        let mut saved = Saved { memory: driver.host_alloc(bytes)?, bytes, blocks: Vec::new() };
        let mut offset = 0;
        for &(address, bytes) in copies {
            if let Err(e) = driver.copy_to_host(saved.memory, offset, address, bytes) {
                self.shared.free_host(saved.memory);
                return Err(e);
            }
            saved.blocks.push((address, bytes, offset));
            offset += bytes;
        }
        Ok(Some(saved))
    }

    /// Unmaps a run and releases its handles. What the driver does not unmap stays.
    fn part_with(&self, going: Going, moved: &mut Moved) {
        let bytes = to_bytes(going.range.units);
        if let Err(e) = self.shared.driver.unmap(going.address, bytes) {
            tracing::warn!(address = %going.address, bytes, error = %e, "the driver did not take idle memory; it stays");
            moved.refused_bytes += bytes;
            return;
        }
        {
            let mut state = self.lock();
            let Some(segment) = state.segments.get_mut(going.segment) else { return };
            segment.away.push(going.range);
            let mut runs = 0;
            match &mut segment.pages {
                Some(table) => {
                    let before = table.runs();
                    going.pieces.iter().for_each(|(at, _)| drop(table.remove(*at)));
                    runs = table.runs() - before;
                    state.note_pages(going.segment, going.range.offset, going.range.units, Action::SegmentUnmap);
                }
                None => {
                    state.note_segment(going.segment, Action::SegmentAway);
                    if let Some(segment) = state.segments.get_mut(going.segment) {
                        segment.memory.backing = Backing::Away;
                    }
                }
            }
            if let Some(counters) = &going.counters {
                counters.reserved_bytes.decrease(going.part, bytes as i64);
            }
            if runs != 0 {
                self.shared.totals.lock().segment.change(going.part, runs);
            }
        }
        moved.bytes += bytes;
        if let Some(handle) = going.handle {
            moved.handles += 1;
            self.shared.release_segment_handle(handle, bytes, going.part, going.pool);
        }
        for (_, piece) in going.pieces {
            moved.handles += 1;
            piece.handle.unmapped();
            self.shared.release_handle(piece.handle.id, piece.handle.bytes, going.part, going.pool);
        }
    }
}

/// Why a move is refused that could not wait for work.
pub(super) fn refusal(pool: PoolId, error: DriverError) -> AllocError {
    const WHY: &str =
        "work of a stream cannot be waited for that is capturing, or is another thread's own default stream";
    match cannot_be_asked(error.code) {
        true => PoolError::Busy { pool, why: WHY }.into(),
        false => error.into(),
    }
}

/// Whether a stream's work cannot be learned now: it is capturing, or another thread's own default stream.
fn cannot_be_asked(error: u32) -> bool {
    matches!(error, code::CAPTURE_UNSUPPORTED | code::INVALID_CONTEXT)
}

impl ArenaState {
    fn contents_of(&self, id: BlockId, to: Residency, options: &IdleOptions) -> Contents {
        let said = self.idle.contents.get(&self.blocks.key(id)).copied().unwrap_or_default();
        match (said, to) {
            (Contents::Discarded, _) => Contents::Discarded,
            (_, Residency::Suspended) => Contents::Copied,
            (Contents::Usual, _) if options.parked_contents == Contents::Usual => Contents::InPlace,
            (Contents::Usual, _) => options.parked_contents,
            (said, _) => said,
        }
    }

    /// Forgets what was said of blocks that are gone. O(what was said).
    pub(crate) fn forget_contents(&mut self) {
        let Self { blocks, idle, .. } = self;
        idle.contents.retain(|key, _| blocks.live(*key).is_some());
    }

    /// Whether live blocks would move.
    fn moves_live(&self, to: Residency, options: &IdleOptions) -> bool {
        let live = |id: &BlockId| self.blocks[*id].state == BlockState::Live;
        self.blocks.ids().filter(live).any(|id| self.contents_of(id, to, options) != Contents::InPlace)
    }

    /// What goes, and what of it is copied. `busy` are streams whose work cannot be waited for. Changes nothing but notes about blocks that
    /// are gone.
    fn plan(&mut self, to: Residency, options: &IdleOptions, busy: &[StreamId]) -> Result<Plan, Unclear> {
        self.forget_contents();
        let leaving: HashSet<BlockId> = self.leaving.iter().map(|l| l.block).collect();
        let mut plan = Plan::default();
        for (at, segment) in self.segments.iter() {
            let base = segment.memory.base;
            // Ranges whose memory stays, in order.
            let mut kept: Vec<(Units, Units)> = Vec::new();
            let mut id = segment.first;
            while id != NONE {
                let block = &self.blocks[id];
                let (start, end) = (block.offset, block.offset + block.size);
                let stays = match block.state {
                    BlockState::Live => match self.contents_of(id, to, options) {
                        Contents::Copied => {
                            // What is away already was copied then.
                            if !segment.away.iter().any(|a| a.offset < end && start < a.end()) {
                                plan.copies.push((base.offset(to_bytes(start)), to_bytes(block.size)));
                            }
                            false
                        }
                        Contents::Discarded => false,
                        Contents::InPlace | Contents::Usual => true,
                    },
                    BlockState::Pending if to == Residency::Suspended => {
                        return Err(Unclear::Busy("freed blocks of it wait for streams that are capturing"));
                    }
                    BlockState::Pending => true,
                    BlockState::Free => {
                        // What the stream may use still stays mapped; found by nobody meanwhile is all of it.
                        plan.held.push(id);
                        let lane = &self.lanes[block.lane as usize];
                        lane.kind == LaneKind::Stream && busy.contains(&lane.core.id)
                    }
                    BlockState::Held if leaving.contains(&id) || self.idle.parked.contains(&id) => false,
                    BlockState::Held | BlockState::Binned => return Err(Unclear::Changing),
                    BlockState::Hole | BlockState::Vacant => false,
                };
                if stays {
                    kept.push((start, end));
                }
                id = block.next;
            }
            let stays = |start: Units, end: Units| {
                let first = kept.partition_point(|k| k.1 <= start);
                kept.get(first).is_some_and(|k| k.0 < end)
            };
            let slot = &self.slots[segment.slot as usize];
            let run = |range: Away, handle, pieces| Going {
                segment: at,
                address: base.offset(to_bytes(range.offset)),
                range,
                part: segment.part,
                pool: slot.pool,
                counters: slot.counters.clone(),
                handle,
                pieces,
            };
            match (&segment.memory.backing, &segment.pages) {
                (Backing::Handle(handle), _) => {
                    let units = (segment.memory.bytes / crate::units::UNIT) as Units;
                    if kept.is_empty() {
                        let range = Away { offset: 0, units, ordinal: segment.memory.ordinal };
                        plan.going.push(run(range, Some(*handle), Vec::new()));
                    } else {
                        plan.kept_bytes += segment.memory.bytes;
                    }
                }
                (_, Some(table)) => {
                    let mut last: Option<Going> = None;
                    for (offset, piece) in table.iter() {
                        // Memory that is mapped elsewhere too would not go.
                        if stays(offset, offset + piece.units) || piece.handle.is_aliased() {
                            plan.kept_bytes += piece.handle.bytes;
                            plan.going.extend(last.take());
                            continue;
                        }
                        match &mut last {
                            Some(going) if going.range.end() == offset => {
                                going.range.units += piece.units;
                                going.pieces.push((offset, piece.clone()));
                            }
                            _ => {
                                plan.going.extend(last.take());
                                let range = Away { offset, units: piece.units, ordinal: piece.ordinal };
                                last = Some(run(range, None, vec![(offset, piece.clone())]));
                            }
                        }
                    }
                    plan.going.extend(last);
                }
                _ => {}
            }
        }
        Ok(plan)
    }
}
