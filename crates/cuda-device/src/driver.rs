//! The driver's entry points as a table of functions, looked up once. What is not in here is not called.
//!
//! Every function returns an integer: an enumeration would be undefined behaviour for a code that it does not list.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphEdgeData, CUgraphExec, CUgraphNode,
    CUmemAccessDesc, CUmemAllocationProp, CUmemPoolProps, CUmemoryPool, CUmodule, CUstream, CUuserObject,
};
use libloading::Library;

/// The driver's result code.
pub(crate) type Code = c_int;

/// A function that the driver calls on the host.
pub(crate) type HostFn = unsafe extern "C" fn(*mut c_void);

/// A handle of virtual memory.
pub(crate) type MemHandle = c_ulonglong;

macro_rules! entry_points {
    ($($field:ident = $symbol:literal ($($argument:ty),* $(,)?);)*) => {
        /// Every driver function that this crate calls. Each is called as the CUDA Driver API reference of 13.0 documents it.
        #[derive(Clone, Copy)]
        pub(crate) struct Driver {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl Driver {
            /// Their names.
            pub(crate) const SYMBOLS: &'static [&'static str] = &[$($symbol),*];

            /// Looks all of them up; otherwise the names of those that are missing.
            ///
            /// # Safety
            ///
            /// `library` is a CUDA driver (or something with functions of the same names and signatures), and stays loaded as
            /// long as the table is used.
            pub(crate) unsafe fn resolve(library: &Library) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the caller says that symbols of these names are functions of these signatures.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> Code>($symbol.as_bytes())
                    };
                    let $field = match found {
                        Ok(symbol) => Some(*symbol),
                        Err(_) => {
                            missing.push($symbol);
                            None
                        }
                    };
                )*
                let all = || Some(Self { $($field: $field?,)* });
                all().ok_or(missing)
            }

            /// A driver whose every function does nothing and returns what [`fake::answer`] says.
            #[cfg(test)]
            pub(crate) fn fake() -> Self {
                $(
                    unsafe extern "C" fn $field($(_: $argument),*) -> Code {
                        fake::answer($symbol)
                    }
                )*
                Self { $($field,)* }
            }
        }
    };
}

entry_points! {
    init = "cuInit" (c_uint);
    driver_version = "cuDriverGetVersion" (*mut c_int);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device_get = "cuDeviceGet" (*mut CUdevice, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
    device_total_mem = "cuDeviceTotalMem_v2" (*mut usize, CUdevice);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, CUdevice);
    primary_retain = "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
    primary_release = "cuDevicePrimaryCtxRelease_v2" (CUdevice);
    ctx_get_current = "cuCtxGetCurrent" (*mut CUcontext);
    ctx_push = "cuCtxPushCurrent_v2" (CUcontext);
    ctx_pop = "cuCtxPopCurrent_v2" (*mut CUcontext);
    ctx_get_device = "cuCtxGetDevice" (*mut CUdevice);
    ctx_synchronize = "cuCtxSynchronize" ();
    mem_alloc = "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
    mem_free = "cuMemFree_v2" (CUdeviceptr);
    mem_get_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    mem_host_alloc = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    mem_free_host = "cuMemFreeHost" (*mut c_void);
    mem_host_device_pointer = "cuMemHostGetDevicePointer_v2" (*mut CUdeviceptr, *mut c_void, c_uint);
    address_reserve = "cuMemAddressReserve" (*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    address_free = "cuMemAddressFree" (CUdeviceptr, usize);
    mem_create = "cuMemCreate" (*mut MemHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    mem_release = "cuMemRelease" (MemHandle);
    mem_map = "cuMemMap" (CUdeviceptr, usize, usize, MemHandle, c_ulonglong);
    mem_unmap = "cuMemUnmap" (CUdeviceptr, usize);
    mem_set_access = "cuMemSetAccess" (CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    mem_granularity = "cuMemGetAllocationGranularity" (*mut usize, *const CUmemAllocationProp, c_int);
    event_create = "cuEventCreate" (*mut CUevent, c_uint);
    event_destroy = "cuEventDestroy_v2" (CUevent);
    event_record = "cuEventRecord" (CUevent, CUstream);
    event_query = "cuEventQuery" (CUevent);
    event_synchronize = "cuEventSynchronize" (CUevent);
    stream_create = "cuStreamCreateWithPriority" (*mut CUstream, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2" (CUstream);
    stream_query = "cuStreamQuery" (CUstream);
    stream_synchronize = "cuStreamSynchronize" (CUstream);
    stream_wait_event = "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
    stream_is_capturing = "cuStreamIsCapturing" (CUstream, *mut c_int);
    capture_info = "cuStreamGetCaptureInfo_v3" (CUstream, *mut c_int, *mut c_ulonglong, *mut CUgraph, *mut *const CUgraphNode,
        *mut *const CUgraphEdgeData, *mut usize);
    begin_capture = "cuStreamBeginCapture_v2" (CUstream, c_int);
    end_capture = "cuStreamEndCapture" (CUstream, *mut CUgraph);
    update_dependencies = "cuStreamUpdateCaptureDependencies_v2" (CUstream, *mut CUgraphNode, *const CUgraphEdgeData, usize,
        c_uint);
    exchange_mode = "cuThreadExchangeStreamCaptureMode" (*mut c_int);
    priority_range = "cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
    graph_nodes = "cuGraphGetNodes" (CUgraph, *mut CUgraphNode, *mut usize);
    graph_edges = "cuGraphGetEdges_v2" (CUgraph, *mut CUgraphNode, *mut CUgraphNode, *mut CUgraphEdgeData, *mut usize);
    node_dependencies = "cuGraphNodeGetDependencies_v2" (CUgraphNode, *mut CUgraphNode, *mut CUgraphEdgeData, *mut usize);
    node_type = "cuGraphNodeGetType" (CUgraphNode, *mut c_int);
    node_mem_alloc = "cuGraphMemAllocNodeGetParams" (CUgraphNode, *mut c_void);
    node_mem_free = "cuGraphMemFreeNodeGetParams" (CUgraphNode, *mut CUdeviceptr);
    graph_add_empty = "cuGraphAddEmptyNode" (*mut CUgraphNode, CUgraph, *const CUgraphNode, usize);
    graph_destroy = "cuGraphDestroy" (CUgraph);
    graph_dot = "cuGraphDebugDotPrint" (CUgraph, *const c_char, c_uint);
    instantiate = "cuGraphInstantiateWithFlags" (*mut CUgraphExec, CUgraph, c_ulonglong);
    graph_upload = "cuGraphUpload" (CUgraphExec, CUstream);
    graph_launch = "cuGraphLaunch" (CUgraphExec, CUstream);
    exec_destroy = "cuGraphExecDestroy" (CUgraphExec);
    user_object_create = "cuUserObjectCreate" (*mut CUuserObject, *mut c_void, HostFn, c_uint, c_uint);
    user_object_release = "cuUserObjectRelease" (CUuserObject, c_uint);
    retain_user_object = "cuGraphRetainUserObject" (CUgraph, CUuserObject, c_uint, c_uint);
    launch_host_func = "cuLaunchHostFunc" (CUstream, HostFn, *mut c_void);
    launch_kernel = "cuLaunchKernel" (CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
        *mut *mut c_void, *mut *mut c_void);
    module_load = "cuModuleLoadData" (*mut CUmodule, *const c_void);
    module_unload = "cuModuleUnload" (CUmodule);
    module_function = "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
    copy_to_host = "cuMemcpyDtoHAsync_v2" (*mut c_void, CUdeviceptr, usize, CUstream);
    copy_async = "cuMemcpyAsync" (CUdeviceptr, CUdeviceptr, usize, CUstream);
    memset_d8 = "cuMemsetD8_v2" (CUdeviceptr, u8, usize);
    memset_d32_async = "cuMemsetD32Async" (CUdeviceptr, c_uint, usize, CUstream);
    default_pool = "cuDeviceGetDefaultMemPool" (*mut CUmemoryPool, CUdevice);
    pool_create = "cuMemPoolCreate" (*mut CUmemoryPool, *const CUmemPoolProps);
    pool_destroy = "cuMemPoolDestroy" (CUmemoryPool);
    pool_trim = "cuMemPoolTrimTo" (CUmemoryPool, usize);
    pool_get = "cuMemPoolGetAttribute" (CUmemoryPool, c_int, *mut c_void);
    pool_set = "cuMemPoolSetAttribute" (CUmemoryPool, c_int, *mut c_void);
    mem_alloc_async = "cuMemAllocAsync" (*mut CUdeviceptr, usize, CUstream);
    mem_alloc_from_pool = "cuMemAllocFromPoolAsync" (*mut CUdeviceptr, usize, CUmemoryPool, CUstream);
    mem_free_async = "cuMemFreeAsync" (CUdeviceptr, CUstream);
    graph_mem_get = "cuDeviceGetGraphMemAttribute" (CUdevice, c_int, *mut c_void);
    graph_mem_set = "cuDeviceSetGraphMemAttribute" (CUdevice, c_int, *mut c_void);
    graph_mem_trim = "cuDeviceGraphMemTrim" (CUdevice);
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Driver({} entry points)", Self::SYMBOLS.len())
    }
}

#[cfg(test)]
pub(crate) mod fake {
    //! What a made-up driver answers.

    use std::cell::{Cell, RefCell};

    use super::Code;

    thread_local! {
        static ANSWER: Cell<Code> = const { Cell::new(0) };
        static CALLS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    }

    pub(crate) fn answer(symbol: &'static str) -> Code {
        CALLS.with_borrow_mut(|calls| calls.push(symbol));
        ANSWER.get()
    }

    /// From now on every call from this thread gets this code.
    pub(crate) fn answer_with(code: Code) {
        ANSWER.set(code);
    }

    /// The calls of this thread since the last time this was asked.
    pub(crate) fn take_calls() -> Vec<&'static str> {
        CALLS.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_symbol_is_looked_up_twice_and_versions_are_named_where_they_differ() {
        let distinct: std::collections::BTreeSet<_> = Driver::SYMBOLS.iter().collect();
        assert_eq!(distinct.len(), Driver::SYMBOLS.len());
        for (plain, versioned) in [("cuMemAlloc", "cuMemAlloc_v2"), ("cuMemFree", "cuMemFree_v2")] {
            assert!(!Driver::SYMBOLS.contains(&plain) && Driver::SYMBOLS.contains(&versioned));
        }
    }
}
