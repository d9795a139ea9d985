//! Requests: what each must bring, by the model.

use super::*;

/// Bytes of a segment that cannot go, since something in them is in use: the handles concerned, or all of it.
fn pinned(segment: &SegmentState) -> u64 {
    if segment.backing != BackingKind::Pages {
        return if segment.active() > 0 { segment.size } else { 0 };
    }
    let mut at = segment.address;
    let mut sum = 0;
    for bytes in &segment.handles {
        let end = at.offset(*bytes);
        let used = segment.blocks.iter().filter(|b| b.status != BlockStatus::Inactive);
        sum += if used.clone().any(|b| b.address < end && at < b.address.offset(b.size)) { *bytes } else { 0 };
        at = end;
    }
    sum
}

impl Machine {
    // Requests.

    pub(super) fn driver_calls(&self) -> u64 {
        self.lab.calls()
    }

    /// The pool that a request on a stream goes to.
    pub(super) fn expected_pool(&self, stream: u8) -> PoolId {
        let claims = |scope: &&Scope| match scope.claim {
            Claim::All | Claim::Thread => true,
            Claim::Stream(number) => number % STREAMS == stream % STREAMS,
        };
        self.scopes.iter().rev().find(claims).map_or(PoolId::DEFAULT, |s| s.pool)
    }

    pub(super) fn alloc(&mut self, number: u8, bytes: u64) -> Result<(), String> {
        let (stream, pool) = (self.stream(number), self.expected_pool(number));
        let before = self.lab.allocator.state();
        let hit = self.predict(&before, bytes, &stream, pool);
        let calls = self.driver_calls();
        match self.lab.allocator.alloc(bytes, &stream) {
            Ok(block) if bytes == 0 => {
                ensure(block.address().is_null() && self.driver_calls() == calls, || format!("{block:?} for 0 bytes"))
            }
            Ok(block) => {
                let unasked = self.driver_calls() == calls;
                self.hits += u64::from(unasked);
                if let Some(hit) = &hit {
                    // A large handle is cut before a small block is put into it.
                    let cuts = self.pages();
                    ensure(self.bit_exact() || unasked || cuts, || {
                        let made = self.driver_calls() - calls;
                        format!("{made} driver calls for {bytes} bytes, which {hit:?} could serve")
                    })?;
                    self.best_fit(&before, &block, hit)?;
                }
                self.admit(block, &stream, bytes, pool)
            }
            Err(error) => {
                ensure(hit.is_none() || self.faulty, || format!("{error}, with {hit:?} free"))?;
                self.refused(error, bytes, &stream, pool)
            }
        }
    }

    /// What a request can be served from without asking anybody, if anything: the free blocks of its stream in its part of its pool.
    pub(super) fn predict(
        &self,
        state: &State,
        bytes: u64,
        stream: &Stream<Watched>,
        pool: PoolId,
    ) -> Option<Prediction> {
        if bytes == 0 {
            return None;
        }
        let size = self.config().rounding().round(bytes);
        let small = if self.pages() && pool.is_default() { MIB / 4 } else { MIB };
        let part = if size <= small { Part::Small } else { Part::Large };
        let mut found = Prediction::default();
        let mut runs = Vec::new();
        for segment in state.segments.iter().filter(|s| s.pool == pool && s.part == part) {
            let mut run: Option<(Address, u64)> = None;
            for block in &segment.blocks {
                if block.status != BlockStatus::Inactive || block.stream != stream.id() {
                    runs.extend(run.take());
                    continue;
                }
                match &mut run {
                    Some((_, length)) => *length += block.size,
                    None => run = Some((block.address, block.size)),
                }
                if !block.binned {
                    found.indexed.push((block.address, block.size));
                } else if block.size == size {
                    found.binned.push((block.address, block.size));
                }
            }
            runs.extend(run);
        }
        let fits = |free: &[(Address, u64)]| {
            let best = free.iter().map(|(_, n)| *n).filter(|n| *n >= size).min();
            let limit = self.config().max_split_size().unwrap_or(u64::MAX);
            let slack = self.config().max_non_split_rounding();
            best.filter(|n| if size < limit { *n < limit } else { *n < size.saturating_add(slack) })
        };
        found.best = fits(&found.indexed);
        // What is in bins is merged before anybody is asked.
        found.merged = fits(&runs).map(|_| runs.iter().copied().filter(|(_, n)| *n >= size).collect());
        (!found.binned.is_empty() || found.best.is_some() || found.merged.is_some()).then_some(found)
    }

    /// A hit takes a block of exactly its size from a bin, else the smallest that is large enough.
    pub(super) fn best_fit(&self, before: &State, block: &Block, free: &Prediction) -> Result<(), String> {
        let pending = before.stats.active.all.current != before.stats.allocation.all.current;
        if pending && self.bit_exact() {
            // PyTorch looks for completed events first, so there may be more than there was.
            return Ok(());
        }
        let at = block.address();
        if !free.binned.is_empty() {
            return ensure(free.binned.iter().any(|(a, _)| *a == at), || {
                format!("{block:?} was not taken from a bin: {free:?}")
            });
        }
        let candidates = match (free.best, &free.merged) {
            (Some(best), _) => free.indexed.iter().filter(|(_, n)| *n == best).copied().collect(),
            (None, Some(merged)) => {
                let best = merged.iter().map(|(_, n)| *n).min();
                merged.iter().filter(|(_, n)| Some(*n) == best).copied().collect()
            }
            (None, None) => Vec::new(),
        };
        let after = self.lab.allocator.stats();
        let (was, is) = (before.stats.pages.remaps, after.pages.remaps);
        let same = after.reserved_bytes.all.current == before.stats.reserved_bytes.all.current;
        if self.pages() && is > was && same {
            // Smaller handles were moved together, because the best fit would have pinned a larger one.
            return Ok(());
        }
        if self.pages() && self.faulty && after.num_device_alloc > before.stats.num_device_alloc {
            // The handle that was to be cut got lost over it.
            return Ok(());
        }
        ensure(candidates.iter().any(|(a, _)| *a == at), || {
            format!("{block:?} is none of the best fits {candidates:?}: {free:?}")
        })
    }

    /// A block was handed out.
    pub(super) fn admit(
        &mut self,
        block: Block,
        stream: &Stream<Watched>,
        bytes: u64,
        pool: PoolId,
    ) -> Result<(), String> {
        self.handed += 1;
        let (start, end) = (block.address(), block.address().offset(block.size()));
        ensure(block.size() >= bytes && block.requested() == bytes, || format!("{block:?} for {bytes} bytes"))?;
        for other in &self.live {
            let (s, e) = (other.block.address(), other.block.address().offset(other.block.size()));
            ensure(end <= s || e <= start, || format!("{block:?} overlaps {:?}", other.block))?;
        }
        let state = self.lab.allocator.state();
        let segment = segment_of(&state, start).ok_or_else(|| format!("{block:?} is in no segment"))?;
        let record = segment.blocks.iter().find(|b| b.address == start).ok_or("the block is not listed")?;
        ensure(record.status == BlockStatus::ActiveAllocated, || format!("{record:?} was handed out"))?;
        ensure((record.size, record.requested) == (block.size(), bytes), || {
            format!("{block:?} is listed as {record:?}")
        })?;
        let overflow = pool.is_default() && self.pools.iter().any(|p| p.id == segment.pool && p.overflow);
        ensure(segment.pool == pool || overflow, || format!("{block:?} is of pool {}, not {pool}", segment.pool))?;
        let borrowed = record.stream != stream.id();
        ensure(!borrowed || self.retired.iter().any(|r| r.id() == record.stream), || {
            format!("stream {} got a block of stream {}, which is not retired", stream.id(), record.stream)
        })?;
        let ordered = self.lab.device.handed(stream.handle(), start, block.size());
        if !self.forgets_uses {
            ordered?;
        }
        self.live.push(Live { block, stream: stream.clone(), shared: borrowed });
        Ok(())
    }

    /// A request was refused: was that right?
    pub(super) fn refused(
        &mut self,
        error: AllocError,
        bytes: u64,
        stream: &Stream<Watched>,
        pool: PoolId,
    ) -> Result<(), String> {
        match error {
            AllocError::OutOfMemory(report) => {
                self.ooms += 1;
                self.out_of_memory(&report, bytes, stream, pool)
            }
            AllocError::Rejected { requested } => {
                ensure(self.config().reject_over_fraction() && requested == bytes, || format!("rejected {requested}"))
            }
            // A scope whose pool was released and forgotten.
            AllocError::Pool(PoolError::Unknown { pool: p }) => {
                ensure(p == pool && self.users(pool) == 0, || format!("pool {p} is unknown, but has users"))
            }
            AllocError::Driver(e) if self.faulty => ensure(e.code != 0, || "an error without a code".to_owned()),
            other => Err(other.to_string()),
        }
    }

    pub(super) fn out_of_memory(
        &self,
        report: &OutOfMemory,
        bytes: u64,
        stream: &Stream<Watched>,
        pool: PoolId,
    ) -> Result<(), String> {
        let asked = (report.requested, report.stream, report.pool);
        ensure(asked == (bytes, stream.id(), pool), || format!("the report is about {asked:?}"))?;
        let state = self.lab.allocator.state();
        let free: u64 = report.free.iter().map(|f| f.bytes).sum();
        if !self.faulty {
            ensure(report.reserved == report.live + report.pending + free, || {
                format!(
                    "{} reserved are not {} live, {} pending and {free} free",
                    report.reserved, report.live, report.pending
                )
            })?;
            let info = self.lab.device.mem_info().map_err(|e| e.to_string())?;
            ensure(report.driver == info, || format!("{:?} is reported, the device says {info:?}", report.driver))?;
        }
        ensure(!report.to_string().is_empty() && !report.pytorch_message().is_empty(), || "no text".to_owned())?;
        if self.bit_exact() || self.faulty {
            return Ok(());
        }
        // Everything that is free could have gone, but for what live blocks pin and what pools in use that captures used keep.
        ensure(report.pending == 0, || format!("{} bytes are pending", report.pending))?;
        let pinned: u64 = state.segments.iter().map(pinned).sum();
        let size = self.config().rounding().round(bytes);
        let nominal = match size {
            n if self.pages() => n.next_multiple_of(2 * MIB),
            n if n <= MIB => 2 * MIB,
            n if n < 10 * MIB => self.config().large_segment_size(),
            n => n.next_multiple_of(2 * MIB),
        };
        let capacity = self.lab.device.properties().total_memory;
        let room = self.lab.allocator.memory_limit().map_or(capacity, |l| l.bytes.min(capacity));
        // The driver's own pool may hold the room in pieces that no block of ours pins.
        ensure(self.ordered() || pinned + nominal > room, || {
            format!("out of memory for {bytes} bytes, with {pinned} of {room} pinned: giving back the rest makes room")
        })
    }

    /// What is said to be available must be had, if it is asked for as one segment.
    pub(super) fn take_all(&mut self, number: u8) -> Result<(), String> {
        let available = match self.lab.allocator.available() {
            Ok(available) => available,
            Err(AllocError::Driver(_)) if self.faulty => return Ok(()),
            Err(e) => return Err(e.to_string()),
        };
        let capacity = self.lab.device.properties().total_memory;
        ensure(available <= capacity, || format!("{available} bytes are available of {capacity}"))?;
        let bytes = available / (2 * MIB) * (2 * MIB);
        let exact = self.config().rounding().round(bytes) == bytes && !self.config().reject_over_fraction();
        // A scope that takes it elsewhere, or a share of the cache that PyTorch does not give back in it.
        // Cached memory above a limit serves what fits its segments, but not in one piece.
        let reserved = self.lab.allocator.stats().reserved_bytes.all.current as u64;
        let above = self.lab.allocator.memory_limit().is_some_and(|l| l.bytes < reserved);
        if bytes < 10 * MIB
            || above
            || !exact
            || self.expected_pool(number) != PoolId::DEFAULT
            || !self.reaches_default()
        {
            return Ok(());
        }
        let before = self.live.len();
        self.alloc(number, bytes)?;
        ensure(self.live.len() == before + 1 || self.faulty, || {
            format!("{available} bytes are available, and {bytes} were not to be had")
        })
    }

    pub(super) fn alloc_at(&mut self, number: u8, bytes: u64, which: u8, skip: u8) -> Result<(), String> {
        let (stream, pool) = (self.stream(number), self.expected_pool(number));
        let state = self.lab.allocator.state();
        let free: Vec<_> = state
            .segments
            .iter()
            .filter(|s| s.pool == pool)
            .flat_map(|s| &s.blocks)
            .filter(|b| b.status == BlockStatus::Inactive && b.stream == stream.id())
            .collect();
        if free.is_empty() || bytes == 0 {
            return Ok(());
        }
        let block = free[usize::from(which) % free.len()];
        let address = block.address.offset(u64::from(skip) * 512);
        let size = self.config().rounding().round(bytes);
        let fits = u64::from(skip) * 512 + size <= block.size;
        self.peaks_blurred = true;
        match self.lab.allocator.alloc_at(bytes, address, &stream) {
            Ok(Some(got)) => {
                ensure(got.address() == address, || format!("{got:?} is not at {address}"))?;
                self.admit(got, &stream, bytes, pool)
            }
            // Blocks in bins merge with their neighbours first, so more may fit than this block alone holds, not less.
            Ok(None) => ensure(!fits, || format!("{bytes} bytes at {address} are free and were not given")),
            Err(e) => self.refused(e, bytes, &stream, pool),
        }
    }
}
