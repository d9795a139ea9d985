//! [`GraphDevice`] for the simulated device.

use std::sync::Arc;

use gpupool_device::{
    Address, Call, CaptureMode, DriverError, DriverResult, Edge, ExecHandle, GraphDevice, GraphHandle, HostFunction,
    InstantiateFlags, Node, StreamHandle, code,
};

use crate::SimDevice;
use crate::graphs::{NodeWork, RepeatableHostFunction};
use crate::kernels;
use crate::race::pending;
use crate::report::Access;
use crate::state::{Code, Held, State};
use crate::work::Work;

impl GraphDevice for SimDevice {
    fn begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> DriverResult<()> {
        self.call(Call::StreamBeginCapture, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            state.begin(stream, mode)?;
            Ok(((), state.config.costs.begin_capture))
        })
    }

    fn end_capture(&self, stream: StreamHandle) -> DriverResult<GraphHandle> {
        self.call(Call::StreamEndCapture, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            Ok((state.end(stream)?, state.config.costs.end_capture))
        })
    }

    fn graph_nodes(&self, graph: GraphHandle) -> DriverResult<Vec<Node>> {
        self.call(Call::GraphGetNodes, |_, state| {
            let graph = state.graphs.get(graph).ok_or(code::INVALID_VALUE)?;
            let nodes = graph.nodes.iter().map(|n| Node { id: n.id, kind: n.work.kind() }).collect();
            Ok((nodes, state.config.costs.graph_other))
        })
    }

    fn graph_edges(&self, graph: GraphHandle) -> DriverResult<Vec<Edge>> {
        self.call(Call::GraphGetEdges, |_, state| {
            let graph = state.graphs.get(graph).ok_or(code::INVALID_VALUE)?;
            let edges = graph.nodes.iter().flat_map(|n| n.after.iter().map(|&from| Edge { from, to: n.id })).collect();
            Ok((edges, state.config.costs.graph_other))
        })
    }

    fn graph_destroy(&self, graph: GraphHandle) -> DriverResult<()> {
        self.call(Call::GraphDestroy, |_, state| {
            // A graph under capture belongs to the driver.
            if state.graphs.get(graph).is_none_or(|g| g.open) {
                return Err(code::INVALID_VALUE);
            }
            state.graphs.remove(graph);
            Ok(((), state.config.costs.graph_other))
        })
    }

    fn instantiate(&self, graph: GraphHandle, flags: InstantiateFlags) -> DriverResult<ExecHandle> {
        self.call(Call::GraphInstantiate, |this, state| {
            this.unsafe_call(state)?;
            let State { graphs, detector, config, .. } = &mut **state;
            let nodes = graphs.get(graph).map_or(0, |g| g.nodes.len());
            let exec = graphs.instantiate(graph, flags.auto_free_on_launch, detector).ok_or(code::INVALID_VALUE)?;
            Ok((exec, per_node(nodes, config.costs.instantiate_node)))
        })
    }

    fn graph_upload(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        self.call(Call::GraphUpload, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            state.not_while_capturing(stream)?;
            let nodes = state.graphs.exec(exec).ok_or(code::INVALID_VALUE)?.nodes.len();
            Ok(((), per_node(nodes, state.config.costs.upload_node)))
        })
    }

    fn graph_launch(&self, exec: ExecHandle, stream: StreamHandle) -> DriverResult<()> {
        self.call(Call::GraphLaunch, |this, state| {
            let id = state.stream(this.shared.ordinal, stream)?;
            state.not_while_capturing(id)?;
            state.legacy_is_free(id)?;
            let launched = state.graphs.exec(exec).ok_or(code::INVALID_VALUE)?;
            let (nodes, auto_free) = (Arc::clone(&launched.nodes), launched.auto_free);
            state.launch_memory(&nodes, auto_free)?;
            state.order_with_legacy(id);
            let submission = state.next_submission();
            let run = state.graphs.launch(exec, id, submission).ok_or(code::INVALID_VALUE)?;
            this.check_node_owners(state, &run, stream, submission);
            let nodes = run.nodes.len();
            state.enqueue_as(id, Work::Launch(Box::new(run)), submission);
            Ok(((), per_node(nodes, state.config.costs.launch_node)))
        })
    }

    fn exec_destroy(&self, exec: ExecHandle) -> DriverResult<()> {
        self.call(Call::GraphExecDestroy, |this, state| {
            this.unsafe_call(state)?;
            let State { graphs, detector, config, .. } = &mut **state;
            let nodes = graphs.exec(exec).ok_or(code::INVALID_VALUE)?.nodes.len();
            graphs.destroy(exec, detector);
            Ok(((), per_node(nodes, config.costs.exec_destroy_node)))
        })
    }

    fn launch_host_function(&self, stream: StreamHandle, function: HostFunction) -> DriverResult<()> {
        self.call(Call::LaunchHostFunc, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            if state.recording(stream)?.is_some() {
                // It can run only once, a graph many times: see `launch_repeatable_host_function`.
                return Err(code::NOT_SUPPORTED);
            }
            state.legacy_is_free(stream)?;
            state.submit(stream, Work::Host(Some(function)));
            Ok(((), state.config.costs.launch))
        })
    }
}

fn per_node(nodes: usize, ns: u64) -> u64 {
    (nodes as u64).max(1) * ns
}

impl SimDevice {
    /// As `launch_host_function`, for a function that can run any number of times; on a capturing stream it becomes a node.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE`, `CAPTURE_INVALIDATED`.
    pub fn launch_repeatable_host_function(
        &self,
        stream: StreamHandle,
        function: RepeatableHostFunction,
    ) -> DriverResult<()> {
        self.call(Call::LaunchHostFunc, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            match state.recording(stream)? {
                Some(id) => state.record_node(id, stream, NodeWork::Host(function))?,
                None => {
                    state.legacy_is_free(stream)?;
                    state.submit(stream, Work::Host(Some(Box::new(move || function()))));
                }
            }
            Ok(((), state.config.costs.launch))
        })
    }

    /// Records a node on a capturing stream that only joins its dependencies.
    ///
    /// # Errors
    ///
    /// `ILLEGAL_STATE` if the stream is not capturing.
    pub fn record_empty_node(&self, stream: StreamHandle) -> DriverResult<()> {
        self.call(Call::Other, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            let id = state.recording(stream)?.ok_or(code::ILLEGAL_STATE)?;
            state.record_node(id, stream, NodeWork::Empty)?;
            Ok(((), 0))
        })
    }

    /// Submits a kernel in the name of an owner, or of nobody.
    pub(crate) fn submit_kernel(
        &self,
        state: &mut Held<'_>,
        handle: StreamHandle,
        kernel: gpupool_device::Kernel,
        tag: Option<u64>,
    ) -> Result<(), Code> {
        let stream = state.stream(self.shared.ordinal, handle)?;
        kernels::check(&kernel)?;
        if let gpupool_device::Kernel::Wait { gate } = kernel
            && !state.gates.contains_key(&gate.0)
        {
            return Err(code::INVALID_HANDLE);
        }
        let capture = state.recording(stream)?;
        state.legacy_is_free(stream)?;
        if tag.is_some() && state.detector.on() {
            let access = self.template(state, handle, kernels::name(&kernel), state.submissions + 1, tag);
            for touch in kernels::touches(&kernel)? {
                state.detector.check_owner(&pending(&touch, &access), None);
            }
        }
        match capture {
            Some(id) => state.record_node(id, stream, NodeWork::Kernel(kernel, tag)),
            None => {
                state.submit(stream, Work::Kernel(kernel, tag));
                Ok(())
            }
        }
    }

    fn template(
        &self,
        state: &State,
        stream: StreamHandle,
        operation: &'static str,
        submission: u64,
        tag: Option<u64>,
    ) -> Access {
        Access {
            device: self.shared.ordinal,
            stream,
            operation,
            write: false,
            address: Address::NULL,
            bytes: 0,
            submission,
            graph: None,
            tag,
            time: state.time.now(),
        }
    }

    /// Checks the owners named in a graph's nodes against those of the bytes now.
    fn check_node_owners(&self, state: &mut Held<'_>, run: &crate::graphs::Run, stream: StreamHandle, submission: u64) {
        if !state.detector.on() {
            return;
        }
        for node in Arc::clone(&run.nodes).iter() {
            let NodeWork::Kernel(kernel, tag @ Some(_)) = &node.work else { continue };
            let mut access = self.template(state, stream, kernels::name(kernel), submission, *tag);
            access.device = node.device;
            access.graph = Some(run.capture);
            for touch in kernels::touches(kernel).unwrap_or_default() {
                state.detector.check_owner(&pending(&touch, &access), Some(run.capture));
            }
        }
    }

    /// Launches a kernel in the name of an owner: bytes that do not belong to `tag` when it is submitted are reported.
    ///
    /// # Errors
    ///
    /// Those of `launch`.
    pub fn launch_as(&self, stream: StreamHandle, kernel: gpupool_device::Kernel, tag: u64) -> DriverResult<()> {
        self.call(Call::LaunchKernel, |this, state| {
            this.submit_kernel(state, stream, kernel, Some(tag))?;
            Ok(((), state.config.costs.launch))
        })
    }

    /// Whether a stream is idle: the driver's query, with its capture rules.
    ///
    /// # Errors
    ///
    /// `CAPTURE_UNSUPPORTED` on a capturing stream in every mode, and as an unsafe call.
    pub fn stream_query(&self, stream: StreamHandle) -> Result<bool, DriverError> {
        self.call(Call::StreamQuery, |this, state| {
            let stream = state.stream(this.shared.ordinal, stream)?;
            state.not_while_capturing(stream)?;
            this.unsafe_call(state)?;
            let idle = state.streams.get(stream).is_none_or(|s| s.queue.is_empty());
            if idle {
                let clock = state.stream_clock(stream);
                state.host.learn(&clock);
            }
            Ok((idle, state.config.costs.event_query))
        })
    }
}
