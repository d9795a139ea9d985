/* A driver with no GPU behind it, for tests of what stands in front: every entry point that gpupool looks up exists, memory is address
 * space that nobody touches, work completes as it is submitted, captures and graphs are numbers. `fake_calls` tells what reached it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int R;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_HANDLE = 400, NOT_SUPPORTED = 801 };

static struct { const char *name; long count; } calls[64];
/* A driver is called from many threads. */
static char taken;
static void lock(void) { while (__atomic_test_and_set(&taken, __ATOMIC_ACQUIRE)) sched_yield(); }
static void unlock(void) { __atomic_clear(&taken, __ATOMIC_RELEASE); }
static void called(const char *name) {
    lock();
    for (int i = 0; i < 64; i++) {
        if (!calls[i].name) calls[i].name = name;
        if (!strcmp(calls[i].name, name)) { calls[i].count++; break; }
    }
    unlock();
}
long fake_calls(const char *name) {
    long count = 0;
    lock();
    for (int i = 0; i < 64 && calls[i].name; i++) if (!strcmp(calls[i].name, name)) count = calls[i].count;
    unlock();
    return count;
}

static __thread void *current;
static int primary, second;
R cuInit(unsigned f) { (void)f; return OK; }
R cuDriverGetVersion(int *v) { *v = 13000; return OK; }
R cuDeviceGetCount(int *n) { *n = 1; return OK; }
R cuDeviceGet(int *d, int i) { *d = i; return i ? 101 : OK; }
R cuDeviceGetName(char *s, int n, int d) { (void)d; strncpy(s, "made-up GPU", (size_t)n); return OK; }
R cuDeviceTotalMem_v2(size_t *b, int d) { (void)d; *b = (size_t)1 << 33; return OK; }
R cuDeviceGetAttribute(int *v, int a, int d) { (void)d; *v = a == 115 ? 1 : a == 75 ? 9 : 0; return OK; }
R cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; *c = &primary; return OK; }
R cuDevicePrimaryCtxRelease_v2(int d) { (void)d; return OK; }
R cuDevicePrimaryCtxReset_v2(int d) { (void)d; called(__func__); return OK; }
R cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { (void)d; *f = 0; *a = 1; return OK; }
R cuCtxGetCurrent(void **c) { *c = current; return OK; }
R cuCtxSetCurrent(void *c) { current = c; return OK; }
static __thread void *below[8];
static __thread int depth;
R cuCtxPushCurrent_v2(void *c) { below[depth++] = current; current = c; return OK; }
R cuCtxPopCurrent_v2(void **c) { *c = current; current = below[--depth]; return OK; }
R cuCtxCreate_v2(void **c, unsigned f, int d) { (void)f; (void)d; current = *c = &second; return OK; }
R cuCtxDestroy_v2(void *c) { called(__func__); if (current == c) current = NULL; return OK; }
R cuCtxGetDevice(int *d) { *d = 0; return OK; }
R cuCtxSynchronize(void) { return OK; }
R cuCtxGetStreamPriorityRange(int *a, int *b) { *a = *b = 0; return OK; }

static uint64_t next = (uint64_t)1 << 40;
static size_t used;
R cuMemAlloc_v2(uint64_t *p, size_t n) {
    called(__func__);
    if (!n) return INVALID_VALUE;
    lock();
    R code = used + n > (size_t)1 << 33 ? OUT_OF_MEMORY : OK;
    if (!code) { used += n; *p = next; next += (n + 0xfffff) & ~(uint64_t)0xfffff; }
    unlock();
    return code;
}
R cuMemFree_v2(uint64_t p) { called(__func__); return p >> 40 ? OK : INVALID_VALUE; }
R cuMemAllocAsync(uint64_t *p, size_t n, void *s) { (void)s; called(__func__); *p = __atomic_fetch_add(&next, (n + 0xfffff) & ~(uint64_t)0xfffff, __ATOMIC_RELAXED); return OK; }
R cuMemFreeAsync(uint64_t p, void *s) { (void)s; called(__func__); return p >> 40 ? OK : INVALID_VALUE; }
R cuMemGetInfo_v2(size_t *f, size_t *t) { *t = (size_t)1 << 33; *f = *t - used; return OK; }
R cuMemPoolGetAttribute(void *p, int a, void *v) { (void)p; (void)a; *(uint64_t *)v = 1000; return OK; }
R cuMemPoolTrimTo(void *p, size_t n) { (void)p; (void)n; called(__func__); return OK; }
R cuDeviceGetDefaultMemPool(void **p, int d) { (void)d; *p = &used; return OK; }
R cuDeviceGetMemPool(void **p, int d) { (void)d; *p = &used; return OK; }

static uintptr_t handles = 16;
static uintptr_t fresh(void) { return __atomic_add_fetch(&handles, 16, __ATOMIC_RELAXED); }
static struct { uintptr_t stream, capture, graph; } capturing;
static uintptr_t captures;
/* A stream's number says whose it is. */
R cuStreamCreateWithPriority(void **s, unsigned f, int p) { (void)f; (void)p; *s = (void *)(fresh() + (current == &second ? 8 : 0)); return OK; }
R cuStreamGetCtx(void *s, void **c) { *c = (uintptr_t)s & 8 ? &second : &primary; return OK; }
R cuStreamDestroy_v2(void *s) { (void)s; called(__func__); return OK; }
R cuStreamQuery(void *s) { (void)s; return OK; }
R cuStreamSynchronize(void *s) { (void)s; return OK; }
R cuStreamWaitEvent(void *s, void *e, unsigned f) { (void)s; (void)e; (void)f; return OK; }
R cuEventCreate(void **e, unsigned f) { (void)f; *e = (void *)fresh(); return OK; }
R cuEventDestroy_v2(void *e) { (void)e; return OK; }
R cuEventRecord(void *e, void *s) { (void)e; (void)s; called(__func__); return OK; }
R cuCtxRecordEvent(void *c, void *e) { (void)c; (void)e; called(__func__); return capturing.stream ? 900 : OK; }
R cuEventQuery(void *e) { (void)e; return OK; }
R cuEventSynchronize(void *e) { (void)e; return OK; }
R cuThreadExchangeStreamCaptureMode(int *m) { *m = 0; return OK; }
R cuStreamIsCapturing(void *s, int *v) { *v = capturing.stream == (uintptr_t)s + 1; return OK; }
R cuStreamGetCaptureInfo_v3(void *s, int *st, unsigned long long *id, void **g, const void **n, const void **e, size_t *c) {
    int on = capturing.stream == (uintptr_t)s + 1;
    if (st) *st = on;
    if (id) *id = on ? capturing.capture : 0;
    if (g) *g = on ? (void *)capturing.graph : NULL;
    if (n) *n = NULL;
    if (e) *e = NULL;
    if (c) *c = 0;
    return OK;
}
R cuStreamBeginCapture_v2(void *s, int m) {
    (void)m; called(__func__);
    if (capturing.stream) return 401;
    capturing.stream = (uintptr_t)s + 1; capturing.capture = ++captures; capturing.graph = fresh();
    return OK;
}
R cuStreamEndCapture(void *s, void **g) {
    called(__func__);
    if (capturing.stream != (uintptr_t)s + 1) { *g = NULL; return 401; }
    *g = (void *)capturing.graph; capturing.stream = 0;
    return OK;
}
R cuGraphInstantiateWithFlags(void **x, void *g, unsigned long long f) { (void)g; (void)f; called(__func__); *x = (void *)fresh(); return OK; }
R cuGraphLaunch(void *x, void *s) { (void)x; (void)s; called(__func__); return OK; }
R cuGraphExecDestroy(void *x) { (void)x; called(__func__); return OK; }
R cuGraphDestroy(void *g) { (void)g; called(__func__); return OK; }
R cuGraphClone(void **c, void *g) { (void)g; called(__func__); *c = (void *)fresh(); return OK; }
R cuGraphAddChildGraphNode(void **n, void *g, const void *d, size_t c, void *h) { (void)g; (void)d; (void)c; (void)h; called(__func__); *n = (void *)fresh(); return OK; }
R cuGraphExecUpdate_v2(void *x, void *g, void *r) { (void)x; (void)g; (void)r; called(__func__); return OK; }

R cuGetProcAddress_v2(const char *name, void **f, int v, unsigned long long flags, int *st) {
    (void)v; (void)flags;
    *f = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
    if (st) *st = *f ? 0 : 1;
    return *f ? OK : 500;
}

#define MISSING(name) R name(void) { return NOT_SUPPORTED; }
MISSING(cuMemHostAlloc) MISSING(cuMemFreeHost) MISSING(cuMemHostGetDevicePointer_v2) MISSING(cuMemAddressReserve)
MISSING(cuMemAddressFree) MISSING(cuMemCreate) MISSING(cuMemRelease) MISSING(cuMemMap) MISSING(cuMemUnmap) MISSING(cuMemSetAccess)
MISSING(cuMemGetAllocationGranularity) MISSING(cuStreamUpdateCaptureDependencies_v2) MISSING(cuGraphGetNodes)
MISSING(cuGraphGetEdges_v2) MISSING(cuGraphNodeGetDependencies_v2) MISSING(cuGraphNodeGetType) MISSING(cuGraphMemAllocNodeGetParams)
MISSING(cuGraphMemFreeNodeGetParams) MISSING(cuGraphAddEmptyNode) MISSING(cuGraphDebugDotPrint) MISSING(cuGraphUpload)
MISSING(cuUserObjectCreate) MISSING(cuUserObjectRelease) MISSING(cuGraphRetainUserObject) MISSING(cuLaunchHostFunc)
MISSING(cuLaunchKernel) MISSING(cuModuleLoadData) MISSING(cuModuleUnload) MISSING(cuModuleGetFunction) MISSING(cuMemcpyDtoHAsync_v2)
MISSING(cuMemcpyAsync) MISSING(cuMemsetD8_v2) MISSING(cuMemsetD32Async) MISSING(cuMemPoolSetAttribute)
MISSING(cuMemPoolCreate) MISSING(cuMemPoolDestroy) MISSING(cuMemAllocFromPoolAsync)
MISSING(cuDeviceGetGraphMemAttribute) MISSING(cuDeviceSetGraphMemAttribute) MISSING(cuDeviceGraphMemTrim)

/* Only linked against. */
MISSING(cuStreamCreate)
