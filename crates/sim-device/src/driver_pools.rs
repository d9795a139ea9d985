//! The calls of the driver's stream-ordered pools, and memory nodes.

use gpupool_device::{Address, Call, DriverPoolFigures, DriverPoolHandle, DriverResult, NodeKind, StreamHandle, code};

use crate::SimDevice;
use crate::graphs::{ExecNode, NodeWork};
use crate::state::{Code, State};

impl SimDevice {
    pub(crate) fn make_driver_pool(&self) -> DriverResult<DriverPoolHandle> {
        self.call(Call::MemPoolCreate, |this, state| {
            this.unsafe_call(state)?;
            Ok((
                DriverPoolHandle(state.device(this.shared.ordinal)?.memory.pool_create()),
                state.config.costs.pool_other,
            ))
        })
    }

    pub(crate) fn destroy_driver_pool(&self, pool: DriverPoolHandle) -> DriverResult<()> {
        self.call(Call::MemPoolDestroy, |this, state| {
            this.unsafe_call(state)?;
            let gone = state.device(this.shared.ordinal)?.memory.pool_destroy(pool.0)?;
            gone.into_iter().for_each(|gone| state.forget(gone));
            Ok(((), state.config.costs.pool_other))
        })
    }

    pub(crate) fn figures_of_driver_pool(&self, pool: DriverPoolHandle) -> DriverResult<DriverPoolFigures> {
        self.call(Call::MemPoolGetAttribute, |this, state| {
            this.unsafe_call(state)?;
            Ok((state.device(this.shared.ordinal)?.memory.pool_figures(pool.0)?, state.config.costs.pool_other))
        })
    }

    pub(crate) fn trim_driver_pool(&self, pool: DriverPoolHandle, keep: u64) -> DriverResult<()> {
        self.call(Call::MemPoolTrimTo, |this, state| {
            this.unsafe_call(state)?;
            let gone = state.device(this.shared.ordinal)?.memory.pool_trim(pool.0, keep)?;
            let bytes = gone.iter().map(|gone| gone.bytes).sum();
            gone.into_iter().for_each(|gone| state.forget(gone));
            Ok(((), state.config.costs.mem_release.at(bytes)))
        })
    }

    pub(crate) fn alloc_in_order(
        &self,
        pool: DriverPoolHandle,
        bytes: u64,
        stream: StreamHandle,
    ) -> DriverResult<Address> {
        self.call(Call::MemAllocAsync, |this, state| {
            let ordinal = this.shared.ordinal;
            let stream = state.stream(ordinal, stream)?;
            if let Some(capture) = state.recording(stream)? {
                let address = Address(state.device(ordinal)?.memory.node_alloc(bytes)?);
                state.record_node(capture, stream, NodeWork::Memory(NodeKind::MemAlloc { address, bytes }))?;
                return Ok((address, state.config.costs.pool_alloc));
            }
            this.unsafe_call(state)?;
            state.legacy_is_free(stream)?;
            let since = state.next_submission();
            let State { devices, numbers, config, .. } = &mut **state;
            let memory = &mut devices.get_mut(ordinal as usize).ok_or(code::NO_DEVICE)?.memory;
            let reserved = memory.pool_figures(pool.0)?.reserved;
            let (address, after) = memory.pool_alloc(pool.0, bytes, stream, since, numbers)?;
            let grown = memory.pool_figures(pool.0)?.reserved - reserved;
            let growth = if grown > 0 { config.costs.mem_alloc.at(grown) } else { 0 };
            let cost = config.costs.pool_alloc + growth;
            state.order_with_legacy(stream);
            after.iter().for_each(|free| state.wait_on(stream, free));
            Ok((Address(address), cost))
        })
    }

    pub(crate) fn free_in_order(&self, address: Address, stream: StreamHandle) -> DriverResult<()> {
        self.call(Call::MemFreeAsync, |this, state| {
            let ordinal = this.shared.ordinal;
            let stream = state.stream(ordinal, stream)?;
            if let Some(capture) = state.recording(stream)? {
                if !state.is_allocated_in(capture, address) {
                    return Err(code::INVALID_VALUE);
                }
                state.record_node(capture, stream, NodeWork::Memory(NodeKind::MemFree { address }))?;
                return Ok(((), state.config.costs.pool_free));
            }
            this.unsafe_call(state)?;
            if !state.device(ordinal)?.memory.is_pooled(address.0) {
                // A driver takes plain memory, too, as if it were freed by its address.
                let bytes = state.device(ordinal)?.memory.plain(address.0)?;
                this.drain(state, Call::MemFreeAsync)?;
                let gone = state.device(ordinal)?.memory.free(address.0)?;
                state.forget(gone);
                let withdrawal = state.withdrawal(Call::MemFreeAsync);
                state.detector.withdraw(address.0, bytes, withdrawal);
                return Ok(((), state.config.costs.mem_free.at(bytes)));
            }
            state.legacy_is_free(stream)?;
            state.order_with_legacy(stream);
            let free = state.record_tail(stream, None);
            state.device(ordinal)?.memory.pool_free(address.0, Some(free))?;
            Ok(((), state.config.costs.pool_free))
        })
    }
}

impl State {
    /// Whether a capture has allocated a block and not freed it.
    fn is_allocated_in(&self, capture: gpupool_device::CaptureId, address: Address) -> bool {
        let Some(graph) = self.graph_under(capture) else { return false };
        let count = |wanted: fn(&NodeKind) -> Option<Address>| {
            graph.nodes.iter().filter(|node| wanted(&node.work.kind()) == Some(address)).count()
        };
        count(allocates) > count(frees)
    }

    /// A graph's memory nodes get memory as it is launched.
    pub(crate) fn launch_memory(&mut self, nodes: &[ExecNode], auto_free: bool) -> Result<(), Code> {
        let memory = |node: &&ExecNode| matches!(node.work, NodeWork::Memory(_));
        if !nodes.iter().any(|node| memory(&node)) {
            return Ok(());
        }
        let since = self.submissions;
        for (device, ordinal) in self.devices.iter_mut().zip(0_u32..) {
            let of_device = nodes.iter().filter(memory).filter(|node| node.device == ordinal);
            let kinds: Vec<NodeKind> = of_device.map(|node| node.work.kind()).collect();
            let freed: Vec<Address> = kinds.iter().filter_map(frees).collect();
            let own = kinds.iter().filter_map(allocates);
            let nodes: Vec<(u64, bool)> = own.map(|at| (at.0, !freed.contains(&at))).collect();
            device.memory.nodes_launched(&nodes, auto_free, since, &mut self.numbers)?;
        }
        Ok(())
    }
}

fn allocates(kind: &NodeKind) -> Option<Address> {
    if let NodeKind::MemAlloc { address, .. } = kind { Some(*address) } else { None }
}

fn frees(kind: &NodeKind) -> Option<Address> {
    if let NodeKind::MemFree { address } = kind { Some(*address) } else { None }
}
