//! Reuse inside a capture, by the capture's own graph: a deferred block whose recorded uses all lie before where the requesting
//! stream now stands can be reused there at once.
//!
//! Per capture and stream, the set of nodes reachable backwards from the stream's frontier grows with it: each node is visited once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use gpupool_device::{CaptureId, Device, DriverError, NodeId};

use crate::arena::{Arena, BlockId};
use crate::error::AllocError;
use crate::ids::StreamId;
use crate::inner::{Inner, Request};

/// Nodes before each stream's frontier.
#[derive(Debug, Default)]
pub(crate) struct ReachSets {
    sets: HashMap<(CaptureId, StreamId), HashSet<NodeId>>,
}

impl ReachSets {
    /// Drops them all.
    pub(crate) fn clear(&mut self) {
        self.sets.clear();
    }
}

impl<D: Device> Arena<D> {
    /// The nodes that a deferred block must wait for: where its own stream and all recorded streams stand now. Empty (not
    /// provable) if one of them is not capturing.
    pub(crate) fn markers(&self, id: BlockId) -> Result<Vec<NodeId>, DriverError> {
        let (own, mut streams) = {
            let state = self.lock();
            let lane = state.blocks[id].lane as usize;
            (Arc::clone(&state.lanes[lane].core), state.uses_of(id).into_iter().map(|u| u.core).collect::<Vec<_>>())
        };
        streams.push(own);
        let mut nodes = Vec::new();
        for core in streams {
            match self.shared.driver.device().capture_frontier(core.handle)? {
                Some(frontier) => nodes.extend(frontier.nodes),
                None => return Ok(Vec::new()),
            }
        }
        nodes.sort_unstable();
        nodes.dedup();
        Ok(nodes)
    }
}

impl<D: Device> Inner<D> {
    /// Drops the sets of captures that are over. (Where captures are not the registry's, the end of a scope drops them.)
    fn forget_ended_captures(&self) {
        let registry = &self.shared.registry;
        if registry.is_quiet() {
            return;
        }
        let kept: Vec<CaptureId> = self.reach.lock().sets.keys().map(|(capture, _)| *capture).collect();
        let over: Vec<CaptureId> = kept.into_iter().filter(|id| registry.pool_of(*id).is_none()).collect();
        if !over.is_empty() {
            self.reach.lock().sets.retain(|(capture, _), _| !over.contains(capture));
        }
    }

    /// Frees the deferred blocks of the request's stream whose recorded uses all lie before its frontier.
    /// Returns how many. Each node of the graph is visited once in a capture.
    pub(crate) fn reuse_in_capture(&self, request: &Request<D>) -> Result<usize, AllocError> {
        if request.arena.lock().deferred.is_empty() {
            return Ok(0);
        }
        let device = self.shared.driver.device();
        // What the device cannot tell is not provable; it waits for the end of the capture.
        let Ok(Some(frontier)) = device.capture_frontier(request.core.handle) else { return Ok(0) };
        let key = (frontier.id, request.core.id);
        // Taken out while the driver is asked, so that no lock is held.
        let known = self.reach.lock().sets.remove(&key);
        if known.is_none() {
            self.forget_ended_captures();
        }
        let mut reached = known.unwrap_or_default();
        let mut to_visit = frontier.nodes;
        while let Some(node) = to_visit.pop() {
            if reached.insert(node) {
                match device.node_dependencies(frontier.graph, node) {
                    Ok(before) => to_visit.extend(before),
                    Err(_) => return Ok(0),
                }
            }
        }
        let freed;
        {
            let mut guard = request.arena.lock();
            let state = &mut *guard;
            let done: Vec<BlockId> = state
                .deferred
                .iter()
                .copied()
                .filter(|id| {
                    let block = &state.blocks[*id];
                    state.lanes[block.lane as usize].core.id == request.core.id
                        && state
                            .uses
                            .get(block.uses)
                            .is_some_and(|u| !u.markers.is_empty() && u.markers.iter().all(|n| reached.contains(n)))
                })
                .collect();
            state.deferred.retain(|id| !done.contains(id));
            freed = done.len();
            done.into_iter().for_each(|id| state.complete_free(id, &request.arena.counters));
        }
        self.reach.lock().sets.insert(key, reached);
        Ok(freed)
    }
}
