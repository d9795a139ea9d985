//! Frees, recorded uses, and giving memory back.

use super::*;

/// Bytes of a segment that could go: all of it if nothing is in use, or handles that lie wholly in one free block.
fn idle_bytes(segment: &SegmentState) -> u64 {
    if segment.backing != BackingKind::Pages {
        return if segment.active() == 0 { segment.size } else { 0 };
    }
    let mut at = segment.address;
    let mut sum = 0;
    for bytes in &segment.handles {
        let end = at.offset(*bytes);
        let free = segment.blocks.iter().filter(|b| b.status == BlockStatus::Inactive);
        sum += if free.clone().any(|b| b.address <= at && end <= b.address.offset(b.size)) { *bytes } else { 0 };
        at = end;
    }
    sum
}

impl Machine {
    // Frees.

    pub(super) fn free(&mut self, at: usize, by_drop: bool) -> Result<(), String> {
        let Live { block, shared, .. } = self.live.swap_remove(at);
        let calls = self.driver_calls();
        if by_drop {
            drop(block);
        } else {
            block.free().map_err(|e| e.to_string())?;
        }
        let quiet = !shared && !self.config().quarantine();
        ensure(self.bit_exact() || self.ordered() || !quiet || self.driver_calls() == calls, || {
            format!("a free without recorded uses made {} driver calls", self.driver_calls() - calls)
        })
    }

    pub(super) fn free_on(&mut self, which: u8, stream: u8) -> Result<(), String> {
        let Some(at) = self.pick(which) else { return Ok(()) };
        let stream = self.stream(stream);
        self.note_use();
        let Live { block, .. } = self.live.swap_remove(at);
        block.free_on(&stream).map_err(|(_, e)| e.to_string())
    }

    pub(super) fn raw(&mut self, which: u8) -> Result<(), String> {
        let Some(at) = self.pick(which) else { return Ok(()) };
        let Live { block, stream, shared } = self.live.swap_remove(at);
        let (address, allocator) = (block.address(), &self.lab.allocator);
        ensure(allocator.into_raw(block) == address, || "another address".to_owned())?;
        let wrong = allocator.from_raw(address.offset(512)).map(|b| b.address());
        ensure(wrong == Err(FreeError::NotLive { address: address.offset(512) }), || format!("{wrong:?}"))?;
        let block = allocator.from_raw(address).map_err(|e| e.to_string())?;
        ensure(allocator.from_raw(address).is_err(), || "an address that was taken back is given again".to_owned())?;
        self.live.push(Live { block, stream, shared });
        Ok(())
    }

    pub(super) fn note_use(&mut self) {
        self.forgets_uses |= self.config().policy() == Policy::Torch211 && !self.scopes.is_empty();
    }

    pub(super) fn record(&mut self, at: usize, stream: &Stream<Watched>) -> Result<(), String> {
        self.note_use();
        let live = &mut self.live[at];
        live.shared |= live.stream.id() != stream.id();
        live.block.record_stream(stream).map_err(|e| e.to_string())
    }

    pub(super) fn retire(&mut self, number: u8) -> Result<(), String> {
        let old = self.stream(number);
        if let Err(e) = self.lab.allocator.retire_stream(&old) {
            ensure(self.faulty, || e.to_string())?;
            ensure(!old.is_retired(), || "a retirement that failed has retired the stream".to_owned())?;
            return Ok(());
        }
        if self.bit_exact() {
            return ensure(!old.is_retired(), || "a handle is a stream for ever".to_owned());
        }
        let refused = self.lab.allocator.alloc(512, &old).map(|b| b.address());
        ensure(matches!(refused, Err(AllocError::RetiredStream { .. })), || format!("{refused:?}"))?;
        self.lab.device.recycle(old.handle());
        self.retired.push(old);
        Ok(())
    }

    // Giving back.

    pub(super) fn released(&self, before: i64, result: Result<Trimmed, AllocError>) -> Result<Option<Trimmed>, String> {
        let trimmed = match result {
            Ok(trimmed) => trimmed,
            Err(AllocError::Driver(_)) if self.faulty => return Ok(None),
            Err(e) => return Err(e.to_string()),
        };
        let gone = before - self.lab.allocator.stats().reserved_bytes.all.current;
        let told = trimmed.released_bytes as i64;
        // What a wait returned has gone by itself where every block is the driver's.
        ensure(told == gone || self.faulty || self.ordered() && told <= gone, || {
            format!("{told} bytes are said to be released, {gone} are")
        })?;
        ensure(self.faulty || trimmed.refused.is_none(), || format!("{:?}", trimmed.refused))?;
        Ok(Some(trimmed))
    }

    /// Whether emptying the cache reaches the default pool: torch 2.11 takes any open scope for a capture.
    pub(super) fn reaches_default(&self) -> bool {
        self.config().policy() != Policy::Torch211 || self.scopes.is_empty()
    }

    pub(super) fn empty_cache(&mut self) -> Result<(), String> {
        let before = self.lab.allocator.stats().reserved_bytes.all.current;
        let result = self.lab.allocator.empty_cache();
        let Some(trimmed) = self.released(before, result)? else { return Ok(()) };
        if self.faulty || !self.reaches_default() {
            return Ok(());
        }
        let state = self.lab.allocator.state();
        let kept: Vec<(&SegmentState, u64)> =
            state.segments.iter().map(|s| (s, idle_bytes(s))).filter(|(_, n)| *n > 0).collect();
        let in_use = |id: PoolId| !id.is_default() && self.users(id) > 0;
        let wrong = kept.iter().find(|(s, _)| !in_use(s.pool));
        ensure(wrong.is_none(), || format!("the cache was emptied and {wrong:?} stayed"))?;
        let held: u64 = kept.iter().map(|(_, n)| n).sum();
        ensure(trimmed.held_by_pools_bytes == held, || format!("{held} bytes are held by pools, not {trimmed:?}"))?;
        ensure(state.stats.active_bytes.all.current == state.stats.allocated_bytes.all.current, || {
            "blocks are still pending".to_owned()
        })
    }

    pub(super) fn trim(&mut self) -> Result<(), String> {
        let before = self.lab.allocator.stats().reserved_bytes.all.current;
        let waits = self.lab.device.sim.host_waits();
        let result = self.lab.allocator.trim();
        let trimmed = self.released(before, result)?;
        // The driver's free of plain memory waits for the device, whatever is freed.
        let frees = self.lab.device.sim.calls(Call::MemFree) > 0 && trimmed.is_none_or(|t| t.released_bytes > 0);
        let waited = self.lab.device.sim.host_waits() - waits;
        ensure(waited == 0 || frees, || format!("trimming waited {waited} times"))
    }
}
