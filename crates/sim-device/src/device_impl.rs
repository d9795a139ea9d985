//! [`Device`] for the simulated device.

use gpupool_device::{
    Address, Call, CaptureFrontier, CaptureMode, CaptureStatus, Device, DeviceProperties, DriverPoolFigures,
    DriverPoolHandle, DriverResult, EventHandle, GraphHandle, HostMemory, MemoryHandle, MemoryInfo, NodeId,
    StreamHandle, code,
};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::SimDevice;
use crate::events::{Record, Recorded};
use crate::scheduler::{Awaited, Goal};
use crate::state::{Code, State};
use crate::work::Work;

impl SimDevice {
    /// Copies between device memory and pinned memory (which, offset, bytes), and waits.
    fn host_copy(
        &self,
        call: Call,
        address: Address,
        (memory, offset, bytes): (HostMemory, u64, u64),
        to_host: bool,
    ) -> DriverResult<()> {
        self.call(call, |this, state| {
            this.unsafe_call(state)?;
            let host = state.pinned_part(memory.0, offset, bytes)?;
            let id = state.copy_stream(this.shared.ordinal);
            state.submit(id, Work::HostCopy { address: address.0, host, to_host });
            let position = state.streams.get(id).map_or(0, |s| s.submitted);
            let handle = state.streams.get(id).map_or(StreamHandle::LEGACY, |s| s.handle);
            this.wait(state, call, Awaited::Stream(handle), &Goal::Positions(vec![(id, position)]))?;
            let clock = state.stream_clock(id);
            state.host.learn(&clock);
            Ok(((), state.config.costs.launch))
        })
    }

    fn virtual_memory<T>(
        &self,
        call: Call,
        body: impl FnOnce(&mut State) -> Result<(T, u64), Code>,
    ) -> DriverResult<T> {
        self.call(call, |this, state| {
            if !this.shared.properties.virtual_memory {
                return Err(code::NOT_SUPPORTED);
            }
            body(state)
        })
    }
}

/// What an event that the host asks about was recorded after; `None` if it never was. Asking about a captured event
/// breaks its capture in every mode.
fn record_of(state: &mut State, event: EventHandle) -> Result<Option<Arc<Record>>, Code> {
    match &state.events.get(event).ok_or(code::INVALID_HANDLE)?.recorded {
        Recorded::Not => Ok(None),
        Recorded::Work(record) => Ok(Some(Arc::clone(record))),
        Recorded::Captured(id, _) => {
            let valid = state.captures.is_valid(*id);
            state.captures.invalidate(*id);
            Err(if valid { code::CAPTURED_EVENT } else { code::INVALID_VALUE })
        }
    }
}

impl Device for SimDevice {
    fn ordinal(&self) -> u32 {
        self.shared.ordinal
    }

    fn properties(&self) -> &DeviceProperties {
        &self.shared.properties
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<Address> {
        self.call(Call::MemAlloc, |this, state| {
            this.unsafe_call(state)?;
            let since = state.next_submission();
            let State { devices, numbers, config, .. } = &mut **state;
            let device = devices.get_mut(this.shared.ordinal as usize).ok_or(code::NO_DEVICE)?;
            let address = device.memory.alloc(bytes, since, numbers)?;
            Ok((Address(address), config.costs.mem_alloc.at(bytes)))
        })
    }

    fn mem_free(&self, address: Address) -> DriverResult<()> {
        self.call(Call::MemFree, |this, state| {
            this.unsafe_call(state)?;
            let ordinal = this.shared.ordinal;
            if state.device(ordinal)?.memory.is_pooled(address.0) {
                // The caller says that the device is done with it.
                state.device(ordinal)?.memory.pool_free(address.0, None)?;
                return Ok(((), state.config.costs.pool_free));
            }
            let bytes = state.device(ordinal)?.memory.plain(address.0)?;
            this.drain(state, Call::MemFree)?;
            // The lock was open while host functions ran: somebody else may have freed it.
            let gone = state.device(ordinal)?.memory.free(address.0)?;
            state.forget(gone);
            let withdrawal = state.withdrawal(Call::MemFree);
            state.detector.withdraw(address.0, bytes, withdrawal);
            Ok(((), state.config.costs.mem_free.at(bytes)))
        })
    }

    fn mem_info(&self) -> DriverResult<MemoryInfo> {
        self.call(Call::MemGetInfo, |this, state| {
            let gone = state.device(this.shared.ordinal)?.memory.reap_pools();
            gone.into_iter().for_each(|gone| state.forget(gone));
            let (free, total) = state.device(this.shared.ordinal)?.memory.info();
            Ok((MemoryInfo { free, total }, state.config.costs.mem_info))
        })
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<Address> {
        self.virtual_memory(Call::AddressReserve, |state| {
            let address = state.device(self.shared.ordinal)?.memory.reserve(bytes)?;
            Ok((Address(address), state.config.costs.address_reserve.at(bytes)))
        })
    }

    fn address_free(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.virtual_memory(Call::AddressFree, |state| {
            state.device(self.shared.ordinal)?.memory.unreserve(address.0, bytes)?;
            Ok(((), state.config.costs.address_free.at(bytes)))
        })
    }

    fn handle_create(&self, bytes: u64) -> DriverResult<MemoryHandle> {
        self.virtual_memory(Call::MemCreate, |state| {
            let State { devices, numbers, config, .. } = state;
            let device = devices.get_mut(self.shared.ordinal as usize).ok_or(code::NO_DEVICE)?;
            let number = device.memory.create(bytes, numbers)?;
            Ok((MemoryHandle(number), config.costs.mem_create.at(bytes)))
        })
    }

    fn handle_release(&self, handle: MemoryHandle) -> DriverResult<()> {
        self.virtual_memory(Call::MemRelease, |state| {
            let (bytes, gone) = state.device(self.shared.ordinal)?.memory.release(handle.0)?;
            gone.into_iter().for_each(|gone| state.forget(gone));
            Ok(((), state.config.costs.mem_release.at(bytes)))
        })
    }

    fn map(&self, address: Address, bytes: u64, handle: MemoryHandle) -> DriverResult<()> {
        self.virtual_memory(Call::MemMap, |state| {
            let since = state.next_submission();
            let alias = state.device(self.shared.ordinal)?.memory.map(address.0, bytes, handle.0, since)?;
            let costs = &state.config.costs;
            Ok(((), if alias { costs.mem_map_alias } else { costs.mem_map.at(bytes) }))
        })
    }

    fn set_access(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.virtual_memory(Call::MemSetAccess, |state| {
            let State { devices, config, .. } = state;
            let device = devices.get_mut(self.shared.ordinal as usize).ok_or(code::NO_DEVICE)?;
            Ok(((), device.memory.set_access(address.0, bytes, &config.costs)?))
        })
    }

    fn unmap(&self, address: Address, bytes: u64) -> DriverResult<()> {
        self.virtual_memory(Call::MemUnmap, |state| {
            let withdrawal = state.withdrawal(Call::MemUnmap);
            let host = state.host.current();
            let State { devices, config, detector, .. } = state;
            let device = devices.get_mut(self.shared.ordinal as usize).ok_or(code::NO_DEVICE)?;
            for piece in device.memory.unmappable(address.0, bytes)? {
                detector.unmap(&piece, &host, withdrawal);
            }
            detector.withdraw(address.0, bytes, withdrawal);
            let (gone, ns) = device.memory.unmap(address.0, bytes, &config.costs)?;
            gone.into_iter().for_each(|gone| state.forget(gone));
            Ok(((), ns))
        })
    }

    fn event_create(&self) -> DriverResult<EventHandle> {
        self.call(Call::EventCreate, |this, state| {
            Ok((state.events.create(this.shared.ordinal), state.config.costs.event_create))
        })
    }

    fn event_destroy(&self, event: EventHandle) -> DriverResult<()> {
        self.call(Call::EventDestroy, |_, state| {
            if !state.events.destroy(event) {
                return Err(code::INVALID_HANDLE);
            }
            Ok(((), state.config.costs.event_destroy))
        })
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        self.call(Call::EventRecord, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            let capture = state.recording(stream)?;
            if capture.is_none() {
                state.legacy_is_free(stream)?;
            }
            let recorded = match state.events.get_mut(event) {
                Some(e) if e.device == this.shared.ordinal => std::mem::replace(&mut e.recorded, Recorded::Not),
                _ => return Err(code::INVALID_HANDLE),
            };
            let new = match capture {
                Some(id) => Recorded::Captured(id, state.captured_nodes(id, stream)),
                None => {
                    let spare = if let Recorded::Work(record) = recorded { Some(record) } else { None };
                    state.order_with_legacy(stream);
                    Recorded::Work(state.record_tail(stream, spare))
                }
            };
            if let Some(e) = state.events.get_mut(event) {
                e.recorded = new;
            }
            Ok(((), state.config.costs.event_record))
        })
    }

    fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        self.call(Call::EventQuery, |this, state| {
            let record = record_of(state, event)?;
            this.unsafe_call(state)?;
            let complete = match record.as_ref().map(|r| r.done()) {
                None => true,
                Some(None) => false,
                Some(Some(done)) => {
                    state.host.learn(&done.clock);
                    true
                }
            };
            Ok((complete, state.config.costs.event_query))
        })
    }

    fn event_synchronize(&self, event: EventHandle) -> DriverResult<()> {
        self.call(Call::EventSynchronize, |this, state| {
            let record = record_of(state, event)?;
            this.unsafe_call(state)?;
            if let Some(record) = record {
                let goal = Goal::Record(Arc::clone(&record));
                this.wait(state, Call::EventSynchronize, Awaited::Event(event), &goal)?;
                if let Some(done) = record.done() {
                    state.host.learn(&done.clock);
                }
            }
            Ok(((), state.config.costs.event_query))
        })
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        self.call(Call::StreamWaitEvent, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            let recorded = state.events.get(event).ok_or(code::INVALID_HANDLE)?.recorded.clone();
            match (recorded, state.recording(stream)?) {
                (Recorded::Captured(id, nodes), _) => state.join_capture(stream, id, &nodes)?,
                (Recorded::Work(_), Some(id)) => {
                    state.captures.invalidate(id);
                    return Err(code::CAPTURE_ISOLATION);
                }
                (Recorded::Work(record), None) => {
                    state.legacy_is_free(stream)?;
                    state.wait_on(stream, &record);
                }
                (Recorded::Not, _) => {}
            }
            Ok(((), state.config.costs.stream_wait_event))
        })
    }

    fn capture_status(&self, stream: StreamHandle) -> DriverResult<CaptureStatus> {
        if self.world.captures.load(Relaxed) == 0 && !self.shared.armed.load(Relaxed) {
            // No lock where no stream of any device captures.
            self.shared.counters.count(Call::StreamGetCaptureInfo);
            self.charge(self.shared.status_ns);
            return Ok(CaptureStatus::None);
        }
        self.call(Call::StreamGetCaptureInfo, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            Ok((state.status(stream), this.shared.status_ns))
        })
    }

    fn capture_frontier(&self, stream: StreamHandle) -> DriverResult<Option<CaptureFrontier>> {
        self.call(Call::StreamGetCaptureInfo, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            Ok((state.frontier(stream), state.config.costs.capture_frontier))
        })
    }

    fn node_dependencies(&self, graph: GraphHandle, node: NodeId) -> DriverResult<Vec<NodeId>> {
        self.call(Call::GraphGetEdges, |_, state| {
            let graph = state.graphs.get(graph).ok_or(code::INVALID_VALUE)?;
            // Node numbers grow, so a graph's nodes are in order.
            let at = graph.nodes.binary_search_by_key(&node, |n| n.id).map_err(|_| code::INVALID_VALUE)?;
            Ok((graph.nodes[at].after.clone(), state.config.costs.capture_frontier))
        })
    }

    fn host_alloc(&self, bytes: u64) -> DriverResult<HostMemory> {
        self.call(Call::MemHostAlloc, |this, state| {
            this.unsafe_call(state)?;
            let number = state.pin(bytes)?;
            Ok((HostMemory(number), state.config.costs.host_alloc.at(bytes)))
        })
    }

    fn host_free(&self, memory: HostMemory) -> DriverResult<()> {
        self.call(Call::MemFreeHost, |this, state| {
            this.unsafe_call(state)?;
            let bytes = state.unpin(memory.0)?;
            Ok(((), state.config.costs.host_free.at(bytes)))
        })
    }

    fn copy_to_host(&self, dst: HostMemory, offset: u64, src: Address, bytes: u64) -> DriverResult<()> {
        self.host_copy(Call::MemcpyToHost, src, (dst, offset, bytes), true)
    }

    fn copy_from_host(&self, dst: Address, src: HostMemory, offset: u64, bytes: u64) -> DriverResult<()> {
        self.host_copy(Call::MemcpyFromHost, dst, (src, offset, bytes), false)
    }

    fn driver_pool_create(&self) -> DriverResult<DriverPoolHandle> {
        self.make_driver_pool()
    }

    fn driver_pool_destroy(&self, pool: DriverPoolHandle) -> DriverResult<()> {
        self.destroy_driver_pool(pool)
    }

    fn driver_pool_figures(&self, pool: DriverPoolHandle) -> DriverResult<DriverPoolFigures> {
        self.figures_of_driver_pool(pool)
    }

    fn driver_pool_trim(&self, pool: DriverPoolHandle, keep: u64) -> DriverResult<()> {
        self.trim_driver_pool(pool, keep)
    }

    fn mem_alloc_async(&self, pool: DriverPoolHandle, bytes: u64, stream: StreamHandle) -> DriverResult<Address> {
        self.alloc_in_order(pool, bytes, stream)
    }

    fn mem_free_async(&self, address: Address, stream: StreamHandle) -> DriverResult<()> {
        self.free_in_order(address, stream)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        if !self.shared.armed.load(Relaxed) {
            self.shared.counters.count(Call::ExchangeCaptureMode);
            self.charge(self.shared.exchange_ns);
            return Ok(self.set_thread_mode(mode));
        }
        self.call(Call::ExchangeCaptureMode, |this, _| Ok((this.set_thread_mode(mode), this.shared.exchange_ns)))
    }

    fn now(&self) -> u64 {
        self.world.time.now()
    }
}
