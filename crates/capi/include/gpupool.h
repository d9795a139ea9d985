/* gpupool: a caching allocator for GPU memory, with private pools for captured CUDA graphs.
 *
 * Generated from crates/capi by its test `header`; change the sources, not this file.
 *
 * Every function may be called from any thread. Those that return gpupool_status do nothing else than say how it went on
 * failure: gpupool_last_error() tells more, in words, for the calling thread. No function throws, unwinds or aborts.
 * Addresses are the device's; nothing on the host can be read through them. Streams are the driver's (CUstream or
 * cudaStream_t; 0 and 1 the legacy default stream, 2 the calling thread's own).
 */

#ifndef GPUPOOL_H
#define GPUPOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 Capture mode: calls that a capture cannot contain fail, from any thread. The allocator's own are permitted in every mode.
 */
#define GPUPOOL_CAPTURE_GLOBAL 0

/*
 Capture mode: such calls fail from the capturing thread.
 */
#define GPUPOOL_CAPTURE_THREAD_LOCAL 1

/*
 Capture mode: nothing is watched.
 */
#define GPUPOOL_CAPTURE_RELAXED 2

/*
 How a call went.
 */
typedef enum {
  /*
   It did what it says.
   */
  GPUPOOL_STATUS_OK = 0,
  /*
   An argument makes no sense: a null pointer, a text that cannot be read, a setting that contradicts another.
   */
  GPUPOOL_STATUS_INVALID_ARGUMENT = 1,
  /*
   There is no memory. The last error says where it is.
   */
  GPUPOOL_STATUS_OUT_OF_MEMORY = 2,
  /*
   The address is not the start of a live block of this allocator: freed before, inside a block, or from elsewhere.
   */
  GPUPOOL_STATUS_NOT_LIVE = 3,
  /*
   The handle names nothing (any more), or something of another kind.
   */
  GPUPOOL_STATUS_UNKNOWN_HANDLE = 4,
  /*
   A call about a pool was refused.
   */
  GPUPOOL_STATUS_POOL = 5,
  /*
   A capture could not be begun, ended or adopted; or the request is on a stream whose capture nobody announced.
   */
  GPUPOOL_STATUS_CAPTURE = 6,
  /*
   A launch was refused.
   */
  GPUPOOL_STATUS_LAUNCH = 7,
  /*
   A driver call failed.
   */
  GPUPOOL_STATUS_DRIVER = 8,
  /*
   There is no such device, or no driver.
   */
  GPUPOOL_STATUS_UNAVAILABLE = 9,
  /*
   A file could not be written.
   */
  GPUPOOL_STATUS_IO = 10,
  /*
   A fault in gpupool itself, caught at the border. Please report it.
   */
  GPUPOOL_STATUS_INTERNAL = 11,
} gpupool_status;

/*
 Names an allocator. 0 names none.
 */
typedef uint64_t gpupool_allocator;

/*
 A pool's name: two numbers of which one is zero. Both zero name the default pool.
 */
typedef struct {
  /*
   Counts the pools of captures.
   */
  uint64_t capture;
  /*
   Counts the pools that users make.
   */
  uint64_t user;
} gpupool_pool;

/*
 Names a capture under way.
 */
typedef uint64_t gpupool_capture;

/*
 Names a captured graph.
 */
typedef uint64_t gpupool_graph;

/*
 Names what keeps the memory of an adopted capture's graph where it is.
 */
typedef uint64_t gpupool_hold;

/*
 What a capture became.
 */
typedef struct {
  /*
   The pool that its memory is in.
   */
  gpupool_pool pool;
  /*
   Nodes in all.
   */
  uint64_t nodes;
  /*
   Nodes that allocate or free memory when the graph runs: recorded by others. Such a graph cannot be launched twice.
   */
  uint64_t memory_nodes;
} gpupool_graph_info;

/*
 Names an executable graph.
 */
typedef uint64_t gpupool_exec;

/*
 Whether a scope claims a stream's requests. C: `bool filter(void *context, void *stream)`. Must neither throw nor call gpupool.
 */
typedef bool (*gpupool_stream_filter)(void *context, void *stream);

/*
 Called once with a filter's context, when the scope is closed.
 */
typedef void (*gpupool_release)(void *context);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 The version of this library's ABI: 1000 times the major number, and the minor one. The major number changes when a program must be
 compiled again.
 */
uint32_t gpupool_abi_version(void);

/*
 Creates an allocator. `device` is `sim` or `sim:BYTES` (a simulated GPU, for tests), `cuda` or `cuda:N`. `settings` are
 `name=value` pairs separated by `;`, such as `policy=segments; memory_limit=8GiB`; null or empty takes the defaults.

 # Safety

 `device` and `settings` are null or zero-terminated strings, `out` is null or writable.
 */
gpupool_status gpupool_create(const char *device, const char *settings, gpupool_allocator *out);

/*
 Destroys an allocator. Its live blocks are freed, so no work may use them any more, and its scopes closed; memory of graphs that still
 exist, or are being captured, stays until they are gone.
 */
gpupool_status gpupool_destroy(gpupool_allocator allocator);

/*
 Gives every wholly free segment back to the driver. Waits for freed blocks that other streams still use. Writes the bytes given
 back to `released` unless it is null.

 # Safety

 `released` is null or writable.
 */
gpupool_status gpupool_empty_cache(gpupool_allocator allocator, uint64_t *released);

/*
 As `gpupool_empty_cache`, but waits for nothing: what the device may still use stays.

 # Safety

 `released` is null or writable.
 */
gpupool_status gpupool_trim(gpupool_allocator allocator, uint64_t *released);

/*
 Limits the memory held to a fraction of the device's, 0 to 1; 1 takes any limit off.
 */
gpupool_status gpupool_set_memory_fraction(gpupool_allocator allocator, double fraction);

/*
 Limits the memory held to `bytes`; UINT64_MAX takes any limit off.
 */
gpupool_status gpupool_set_memory_limit(gpupool_allocator allocator, uint64_t bytes);

/*
 Bytes that requests could still be served from: free with the driver, and cached in wholly free segments.

 # Safety

 `bytes` is null or writable.
 */
gpupool_status gpupool_available(gpupool_allocator allocator, uint64_t *bytes);

/*
 Makes a non-blocking stream.

 # Safety

 `out` is null or writable.
 */
gpupool_status gpupool_bench_stream_create(gpupool_allocator allocator, void **out);

/*
 Retires and destroys a stream of `gpupool_bench_stream_create`; its work still completes.

 # Safety

 `stream` came from `gpupool_bench_stream_create` and was not destroyed.
 */
gpupool_status gpupool_bench_stream_destroy(gpupool_allocator allocator, void *stream);

/*
 Waits for all work of a stream.

 # Safety

 As for `gpupool_alloc`.
 */
gpupool_status gpupool_bench_synchronize(gpupool_allocator allocator, void *stream);

/*
 Submits a kernel that sets every 32-bit word of a range to `value`.

 # Safety

 As for `gpupool_alloc`; the range is memory of the device.
 */
gpupool_status gpupool_bench_fill(gpupool_allocator allocator, void *stream, void *address, uint64_t bytes, uint32_t value);

/*
 Submits a kernel that adds `value` to every 32-bit word of a range.

 # Safety

 As for `gpupool_bench_fill`.
 */
gpupool_status gpupool_bench_add(gpupool_allocator allocator, void *stream, void *address, uint64_t bytes, uint32_t value);

/*
 Submits a kernel that copies a range to another that does not overlap it.

 # Safety

 As for `gpupool_bench_fill`.
 */
gpupool_status gpupool_bench_copy(gpupool_allocator allocator, void *stream, void *to, void *from, uint64_t bytes);

/*
 Waits for a stream, then copies device memory to the host.

 # Safety

 As for `gpupool_bench_fill`; `into` is writable for `bytes`.
 */
gpupool_status gpupool_bench_read(gpupool_allocator allocator, void *stream, void *from, uint8_t *into, size_t bytes);

/*
 Serves a block of at least `bytes` on `stream`, aligned to 512, and writes its address to `out`. Zero bytes give null. Work submitted
 to `stream` before the block is freed never meets its next owner's.

 # Safety

 `stream` is a stream of the allocator's device, and stays one until `gpupool_stream_retired`; `out` is null or writable.
 */
gpupool_status gpupool_alloc(gpupool_allocator allocator,
                             uint64_t bytes,
                             void *stream,
                             void **out);

/*
 Frees a block, in the order of its own stream. Null is fine. Anything that is not the start of a live block of this allocator is
 GPUPOOL_STATUS_NOT_LIVE and changes nothing.
 */
gpupool_status gpupool_free(gpupool_allocator allocator, void *address);

/*
 Says that work on `stream` uses the block, too: once freed, it becomes free only after the work submitted there by then.

 # Safety

 As for `gpupool_alloc`.
 */
gpupool_status gpupool_record_stream(gpupool_allocator allocator, void *address, void *stream);

/*
 Bytes of a live block: what was asked for, rounded up, or more.

 # Safety

 `bytes` is null or writable.
 */
gpupool_status gpupool_block_size(gpupool_allocator allocator, void *address, uint64_t *bytes);

/*
 Start and bytes of the driver allocation that an address lies in. Under `policy=pages` a block may span several, and another address of it
 tells another; what is registered or exported comes from a pool of `gpupool_pool_whole_segments`, or from `policy=segments`.

 # Safety

 `base` and `bytes` are null or writable.
 */
gpupool_status gpupool_base_allocation(gpupool_allocator allocator,
                                       void *address,
                                       void **base,
                                       uint64_t *bytes);

/*
 Call it before a stream is destroyed: its free memory is given to all once its last work is done, and a new stream of the same
 number is another stream. Does not wait.

 # Safety

 As for `gpupool_alloc`.
 */
gpupool_status gpupool_stream_retired(gpupool_allocator allocator, void *stream);

/*
 Begins to capture what is submitted to `stream`. Requests on it, and on every stream that joins, are served from `pool`, or from a
 fresh one if that is zero. Graphs may share a pool: their launches are kept from overlapping. `mode_number` is one of
 GPUPOOL_CAPTURE_GLOBAL, GPUPOOL_CAPTURE_THREAD_LOCAL and GPUPOOL_CAPTURE_RELAXED.

 # Safety

 As for `gpupool_alloc`; `out` is null or writable.
 */
gpupool_status gpupool_capture_begin(gpupool_allocator allocator,
                                     void *stream,
                                     gpupool_pool pool,
                                     uint32_t mode_number,
                                     gpupool_capture *out);

/*
 Ends a capture and writes its graph to `out`. Whatever this returns the capture is over, but for an unknown handle and a null `out`.

 # Safety

 `out` is null or writable.
 */
gpupool_status gpupool_capture_end(gpupool_capture capture,
                                   gpupool_graph *out);

/*
 Ends a capture whose graph nobody wants: stream, routing and pool are as they were before.
 */
gpupool_status gpupool_capture_abandon(gpupool_capture capture);

/*
 The pool that a capture of this thread draws from.

 # Safety

 `out` is null or writable.
 */
gpupool_status gpupool_capture_pool(gpupool_capture capture, gpupool_pool *out);

/*
 Gives a capture that someone else began on `stream` a pool (a fresh one if `pool` is zero). Close it with `gpupool_adopted_finish` once
 the capture has ended. `used` receives the pool unless it is null.

 # Safety

 As for `gpupool_alloc`; `out` and `used` are null or writable.
 */
gpupool_status gpupool_capture_adopt(gpupool_allocator allocator,
                                     void *stream,
                                     gpupool_pool pool,
                                     gpupool_capture *out,
                                     gpupool_pool *used);

/*
 An adopted capture has ended. Keep the hold for as long as its graph, or anything made from it, can run.

 # Safety

 `out` is null or writable.
 */
gpupool_status gpupool_adopted_finish(gpupool_capture capture, gpupool_hold *out);

/*
 The graph of an adopted capture is gone and its last launch is complete.
 */
gpupool_status gpupool_hold_release(gpupool_hold hold);

/*
 What a capture became.

 # Safety

 `out` is null or writable.
 */
gpupool_status gpupool_graph_get_info(gpupool_graph graph, gpupool_graph_info *out);

/*
 Makes a graph executable.

 # Safety

 `out` is null or writable.
 */
gpupool_status gpupool_graph_instantiate(gpupool_graph graph, gpupool_exec *out);

/*
 Destroys a graph. Executables of it stay; its memory stays as long as one of them, or a launch, exists. Neither waits nor fails.
 */
gpupool_status gpupool_graph_destroy(gpupool_graph graph);

/*
 Submits one run to `stream`. Launches of graphs that share a pool are ordered on the device.

 # Safety

 As for `gpupool_alloc`.
 */
gpupool_status gpupool_exec_launch(gpupool_exec exec, void *stream);

/*
 Destroys an executable; a launch of it still completes. Neither waits nor fails.
 */
gpupool_status gpupool_exec_destroy(gpupool_exec exec);

/*
 Makes a private pool with one user, and writes its name to `out`.

 # Safety

 `out` is null or writable.
 */
gpupool_status gpupool_pool_create(gpupool_allocator allocator, gpupool_pool *out);

/*
 From now on each segment that this pool takes is one driver allocation, whatever the policy: for memory that is registered with other
 libraries or exported, which has to lie in one. Say it before the pool's first request: under `policy=pages` it is an error once
 the pool holds memory in pieces.
 */
gpupool_status gpupool_pool_whole_segments(gpupool_allocator allocator,
                                           gpupool_pool pool);

/*
 Sends requests to a pool until `gpupool_pool_end`; makes the pool if there is none, and counts one user more. `filter` is asked which
 streams; without one it is those that capture. `release`, unless it is null, is called with `context` once the scope is closed, or if this call fails.

 # Safety

 `filter` and `release` may be called with `context` from any thread, several at once; they neither throw nor call gpupool.
 */
gpupool_status gpupool_pool_begin(gpupool_allocator allocator,
                                  gpupool_pool pool,
                                  gpupool_stream_filter filter,
                                  void *context,
                                  gpupool_release release);

/*
 Closes the newest scope of a pool (of the calling thread, if it has one). The pool keeps its user.
 */
gpupool_status gpupool_pool_end(gpupool_allocator allocator, gpupool_pool pool);

/*
 One user of a pool less. After the last one its memory goes elsewhere only once everything submitted so far, on any stream, is done:
 a graph of it may be running. Does not wait.
 */
gpupool_status gpupool_pool_release(gpupool_allocator allocator,
                                    gpupool_pool pool);

/*
 Bytes that a pool has reserved, and that live blocks of it take.

 # Safety

 `reserved` and `allocated` are null or writable.
 */
gpupool_status gpupool_pool_bytes(gpupool_allocator allocator, gpupool_pool pool, int64_t *reserved, int64_t *allocated);

/*
 One figure by its name in PyTorch's `memory_stats`, such as `reserved_bytes.all.peak`.

 # Safety

 `name` is null or a zero-terminated string, `out` is null or writable.
 */
gpupool_status gpupool_stat(gpupool_allocator allocator, const char *name, int64_t *out);

/*
 All figures as one JSON object under PyTorch's names. Writes at most `size` bytes to `buffer`, the last one zero, and the bytes that
 the whole takes, with the zero, to `needed`. `buffer` may be null if `size` is 0.

 # Safety

 `buffer` is writable for `size` bytes, `needed` is null or writable.
 */
gpupool_status gpupool_stats_json(gpupool_allocator allocator,
                                  char *buffer,
                                  size_t size,
                                  size_t *needed);

/*
 Sets every peak to the current figure.
 */
gpupool_status gpupool_reset_peaks(gpupool_allocator allocator);

/*
 Sets cumulative figures and counts to zero.
 */
gpupool_status gpupool_reset_accumulated(gpupool_allocator allocator);

/*
 Writes what the allocator holds to a file, in the layout of PyTorch's memory snapshots, as JSON, or, if its name ends with `.pickle`, as
 the pickle that PyTorch's memory viewer opens. `gpupool inspect` reads both.

 # Safety

 `path` is null or a zero-terminated string.
 */
gpupool_status gpupool_snapshot(gpupool_allocator allocator,
                                const char *path);

/*
 The status of the calling thread's last failed call; `GPUPOOL_STATUS_OK` if none has failed. A call that succeeds does not change it.
 */
gpupool_status gpupool_last_status(void);

/*
 What went wrong in the calling thread's last failed call: what was asked, what was there, what to try. Empty if none has failed.
 Valid until the next call that fails on this thread, or the thread's end.
 */
const char *gpupool_last_error(void);

/*
 Chooses what the hooks below work on, before the first of them is called: `cuda`, or `sim` for a test without a GPU; with
 settings as for `gpupool_create`. Fails once an allocator is in use.

 # Safety

 Both are null or zero-terminated strings.
 */
gpupool_status gpupool_torch_configure(const char *device_kind, const char *settings);

/*
 The allocator that serves a device, for statistics, snapshots and limits. It must not be destroyed.

 # Safety

 `out` is null or writable.
 */
gpupool_status gpupool_torch_allocator(int device, gpupool_allocator *out);

/*
 PyTorch's `malloc`: null for zero bytes, and null with a last error when it fails.

 # Safety

 `stream` is a stream of the device.
 */
void *gpupool_torch_malloc(size_t size, int device, void *stream);

/*
 PyTorch's `free`, with what the block was allocated with. A pointer that is not a live block changes nothing and is reported on
 standard error.
 */
void gpupool_torch_free(void *ptr, size_t _size, int device, void *_stream);

/*
 PyTorch's `init`: nothing to do, since a device is opened when it is first used.
 */
void gpupool_torch_init(int _device_count);

/*
 PyTorch's `reset`, which is `empty_cache` on every device in use.
 */
void gpupool_torch_reset(void);

/*
 PyTorch's memory fraction.
 */
void gpupool_torch_memory_fraction(double fraction, int device);

/*
 PyTorch's base allocation: the start of the driver allocation that `ptr` lies in, and its bytes; under `policy=pages` a block may
 span several. `ptr` itself if it is not ours.

 # Safety

 `size` is null or writable.
 */
void *gpupool_torch_base_alloc(void *ptr, size_t *size);

/*
 PyTorch's `record_stream`.

 # Safety

 `stream` is a stream of the device that `ptr` is on.
 */
void gpupool_torch_record_stream(void *ptr, void *stream);

/*
 PyTorch's begin, with the filter as a C function (a `std::function` is C++'s: the shim wraps it). Without a filter the pool gets the
 requests of streams that capture.

 # Safety

 As for `gpupool_pool_begin`.
 */
gpupool_status gpupool_torch_begin_allocate_to_pool(int device,
                                                    gpupool_pool pool,
                                                    gpupool_stream_filter filter,
                                                    void *context,
                                                    gpupool_release release);

/*
 PyTorch's end.
 */
void gpupool_torch_end_allocate_to_pool(int device, gpupool_pool pool);

/*
 PyTorch's release: from now on nothing of the pool is reused or unmapped until all work submitted so far is complete.
 */
void gpupool_torch_release_pool(int device, gpupool_pool pool);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GPUPOOL_H */
