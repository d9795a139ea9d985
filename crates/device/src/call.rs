//! The kinds of driver call, for errors, counts and fault injection.

use std::fmt;

macro_rules! calls {
    ($($(#[$doc:meta])* $variant:ident => $name:literal,)*) => {
        /// A kind of driver call. Its name is the driver API's.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum Call {
            $($(#[$doc])* $variant,)*
        }

        impl Call {
            /// Every kind, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The driver API's name of the call.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

calls! {
    /// Plain allocation.
    MemAlloc => "cuMemAlloc",
    /// Plain free.
    MemFree => "cuMemFree",
    /// Allocate from a pool of the driver's, in stream order.
    MemAllocAsync => "cuMemAllocFromPoolAsync",
    /// Free in stream order.
    MemFreeAsync => "cuMemFreeAsync",
    /// Make a pool of the driver's.
    MemPoolCreate => "cuMemPoolCreate",
    /// Destroy one.
    MemPoolDestroy => "cuMemPoolDestroy",
    /// What one holds.
    MemPoolGetAttribute => "cuMemPoolGetAttribute",
    /// Give back what one holds and nobody has.
    MemPoolTrimTo => "cuMemPoolTrimTo",
    /// Free and total memory.
    MemGetInfo => "cuMemGetInfo",
    /// Reserve addresses.
    AddressReserve => "cuMemAddressReserve",
    /// Give addresses back.
    AddressFree => "cuMemAddressFree",
    /// Create a physical handle.
    MemCreate => "cuMemCreate",
    /// Release a physical handle.
    MemRelease => "cuMemRelease",
    /// Map a handle.
    MemMap => "cuMemMap",
    /// Make a mapping accessible.
    MemSetAccess => "cuMemSetAccess",
    /// Unmap.
    MemUnmap => "cuMemUnmap",
    /// Create an event.
    EventCreate => "cuEventCreate",
    /// Destroy an event.
    EventDestroy => "cuEventDestroy",
    /// Record an event.
    EventRecord => "cuEventRecord",
    /// Ask whether an event is complete.
    EventQuery => "cuEventQuery",
    /// Wait on the host for an event.
    EventSynchronize => "cuEventSynchronize",
    /// Make a stream wait for an event.
    StreamWaitEvent => "cuStreamWaitEvent",
    /// Capture status and id of a stream, or its frontier.
    StreamGetCaptureInfo => "cuStreamGetCaptureInfo",
    /// Exchange the calling thread's capture mode.
    ExchangeCaptureMode => "cuThreadExchangeStreamCaptureMode",
    /// Begin a capture.
    StreamBeginCapture => "cuStreamBeginCapture",
    /// End a capture.
    StreamEndCapture => "cuStreamEndCapture",
    /// Nodes of a graph.
    GraphGetNodes => "cuGraphGetNodes",
    /// Edges of a graph.
    GraphGetEdges => "cuGraphGetEdges",
    /// Destroy a graph.
    GraphDestroy => "cuGraphDestroy",
    /// Instantiate a graph.
    GraphInstantiate => "cuGraphInstantiate",
    /// Upload an executable graph.
    GraphUpload => "cuGraphUpload",
    /// Launch an executable graph.
    GraphLaunch => "cuGraphLaunch",
    /// Destroy an executable graph.
    GraphExecDestroy => "cuGraphExecDestroy",
    /// Enqueue a host function.
    LaunchHostFunc => "cuLaunchHostFunc",
    /// Create a stream.
    StreamCreate => "cuStreamCreate",
    /// Destroy a stream.
    StreamDestroy => "cuStreamDestroy",
    /// Wait on the host for a stream.
    StreamSynchronize => "cuStreamSynchronize",
    /// Ask whether a stream is idle.
    StreamQuery => "cuStreamQuery",
    /// Wait on the host for everything on the device.
    DeviceSynchronize => "cuCtxSynchronize",
    /// Launch a kernel.
    LaunchKernel => "cuLaunchKernel",
    /// Copy device memory to the host, in stream order, and wait.
    MemcpyToHost => "cuMemcpyDtoH",
    /// Pin memory of the host.
    MemHostAlloc => "cuMemHostAlloc",
    /// Give pinned memory back.
    MemFreeHost => "cuMemFreeHost",
    /// Copy pinned memory to the device, and wait.
    MemcpyFromHost => "cuMemcpyHtoD",
    /// Any other call; its name is in the documentation of what made it.
    Other => "other driver call",
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
