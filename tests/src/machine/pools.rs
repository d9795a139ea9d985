//! Pools, scopes and checkpoints.

use super::*;

impl Machine {
    pub(super) fn apply_to_pools(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::NewPool => {
                let id = PoolId::fresh();
                self.lab.allocator.create_pool(id).map_err(|e| e.to_string())?;
                self.pools.push(Pool { id, users: 1, no_split: false, overflow: false });
                Ok(())
            }
            Op::TakePool(which) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                let (id, had) = (self.pools[at].id, self.users(self.pools[at].id));
                match self.lab.allocator.create_pool(id) {
                    Ok(()) => self.pools[at].users += 1,
                    // Without users it may have been forgotten, or may not be revived.
                    Err(AllocError::Pool(PoolError::Released { .. })) if had == 0 => {}
                    Err(e) => return Err(e.to_string()),
                }
                Ok(())
            }
            Op::ReleasePool(which) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                self.release_pool(at)
            }
            Op::Open(which, claim) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                self.open(at, claim)
            }
            Op::Close(which) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                let id = self.pools[at].id;
                let last = self.scopes.iter().rposition(|s| s.pool == id);
                match (last, self.lab.allocator.end_allocate_to_pool(id)) {
                    (Some(last), Ok(())) => {
                        self.scopes.remove(last);
                        self.lab.allocator.release_pool(id).map_err(|e| e.to_string())
                    }
                    (None, Err(AllocError::Pool(PoolError::NotRecording { .. }))) => Ok(()),
                    (last, result) => Err(format!("{result:?} with scope {last:?}")),
                }
            }
            Op::NoSplit(which) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                self.pools[at].no_split = true;
                self.lab.allocator.set_no_split(self.pools[at].id);
                Ok(())
            }
            Op::UseOnOom(which, on) => {
                let Some(at) = self.pool(which) else { return Ok(()) };
                self.pools[at].overflow = on;
                self.lab.allocator.set_use_on_oom(self.pools[at].id, on);
                Ok(())
            }
            Op::Checkpoint(which) => self.checkpoint(which),
            Op::Restore(which, stream) => self.restore(which, stream),
            _ => Err("no such operation".to_owned()),
        }
    }

    // Pools.

    /// All users of a pool, scopes included.
    pub(super) fn users(&self, id: PoolId) -> i64 {
        let own = self.pools.iter().find(|p| p.id == id).map_or(0, |p| p.users);
        own + self.scopes.iter().filter(|s| s.pool == id).count() as i64
    }

    pub(super) fn release_pool(&mut self, at: usize) -> Result<(), String> {
        let (id, had) = (self.pools[at].id, self.users(self.pools[at].id));
        if self.pools[at].users > 0 {
            self.pools[at].users -= 1;
            return self.lab.allocator.release_pool(id).map_err(|e| e.to_string());
        }
        // What was not taken cannot be released; but PyTorch's count goes below zero for good.
        if had > 0 || self.bit_exact() {
            return Ok(());
        }
        match self.lab.allocator.release_pool(id) {
            Err(AllocError::Pool(PoolError::OverReleased { .. } | PoolError::Unknown { .. })) => Ok(()),
            other => Err(format!("{other:?} for a pool with no user")),
        }
    }

    pub(super) fn open(&mut self, at: usize, claim: Claim) -> Result<(), String> {
        let (id, had) = (self.pools[at].id, self.users(self.pools[at].id));
        let filter = match claim {
            Claim::All => Filter::All,
            Claim::Thread => Filter::Thread(std::thread::current().id()),
            Claim::Stream(number) => Filter::Stream(self.stream(number).handle()),
        };
        let open = self.scopes.iter().any(|s| s.pool == id);
        match self.lab.allocator.begin_allocate_to_pool(id, filter) {
            Ok(()) => {
                ensure(!(open && self.bit_exact()), || "a second scope of one pool".to_owned())?;
                self.scopes.push(Scope { pool: id, claim });
            }
            // The user that was counted before the refusal is still there.
            Err(AllocError::Pool(PoolError::AlreadyRecording { .. })) if open && self.bit_exact() => {
                self.pools[at].users += 1;
            }
            Err(AllocError::Pool(PoolError::Released { .. })) if had == 0 => {}
            Err(e) => return Err(e.to_string()),
        }
        Ok(())
    }

    pub(super) fn checkpoint(&mut self, which: u8) -> Result<(), String> {
        let Some(at) = self.pool(which) else { return Ok(()) };
        let id = self.pools[at].id;
        match self.lab.allocator.checkpoint_pool(id) {
            Ok(checkpoint) => self.checkpoints.push(checkpoint),
            Err(AllocError::Pool(PoolError::PendingBlock { .. })) => {
                let state = self.lab.allocator.state();
                let mut blocks = state.segments.iter().filter(|s| s.pool == id).flat_map(|s| &s.blocks);
                let pending = blocks.any(|b| b.status == BlockStatus::ActivePendingFree);
                ensure(pending, || "no block is pending".to_owned())?;
            }
            Err(AllocError::Pool(PoolError::Unknown { .. })) if self.users(id) == 0 => {}
            Err(e) => return Err(e.to_string()),
        }
        Ok(())
    }

    pub(super) fn restore(&mut self, which: u8, stream: u8) -> Result<(), String> {
        if self.checkpoints.is_empty() {
            return Ok(());
        }
        let checkpoint = &self.checkpoints[usize::from(which) % self.checkpoints.len()];
        let (id, stream) = (checkpoint.pool(), self.stream(stream));
        self.peaks_blurred = true;
        let restored = match self.lab.allocator.restore_pool(checkpoint, &stream) {
            Ok(restored) => restored,
            Err(AllocError::Pool(PoolError::CheckpointMismatch { .. })) => return Ok(()),
            Err(AllocError::Pool(PoolError::Unknown { .. } | PoolError::Released { .. })) if self.users(id) == 0 => {
                return Ok(());
            }
            Err(e) => return Err(e.to_string()),
        };
        // The blocks of the pool that were live are gone, whoever held them.
        let mut freed: BTreeSet<Address> = restored.freed.iter().copied().collect();
        for at in (0..self.live.len()).rev() {
            if freed.remove(&self.live[at].block.address()) {
                self.stale.push(self.live.swap_remove(at).block);
            }
        }
        ensure(freed.is_empty(), || format!("{freed:?} were freed and not live"))?;
        for block in restored.allocated {
            let state = self.lab.allocator.state();
            let segment = segment_of(&state, block.address()).ok_or("a restored block is in no segment")?;
            let record = segment.blocks.iter().find(|b| b.address == block.address());
            let record = record.ok_or("a restored block is not listed")?;
            ensure(segment.pool == id && record.size == block.size(), || format!("{block:?} is {record:?}"))?;
            // Restoring is the caller's doing: what used the blocks before is its to order. The block goes on as before, in the
            // order of its own stream, or of the one given.
            let shared = true;
            self.live.push(Live { block, stream: stream.clone(), shared });
        }
        Ok(())
    }
}
