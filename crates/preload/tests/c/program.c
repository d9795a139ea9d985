/* A program that knows nothing of gpupool. It is linked against the driver (the made-up one), and says what reached it. */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int cuInit(unsigned); int cuDeviceGet(int *, int); int cuDevicePrimaryCtxRetain(void **, int); int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(uint64_t *, size_t); int cuMemFree_v2(uint64_t); int cuMemAllocAsync(uint64_t *, size_t, void *);
int cuMemFreeAsync(uint64_t, void *); int cuMemGetInfo_v2(size_t *, size_t *); int cuStreamCreateWithPriority(void **, unsigned, int);
int cuStreamDestroy_v2(void *); int cuStreamBeginCapture_v2(void *, int); int cuStreamEndCapture(void *, void **);
int cuGraphInstantiateWithFlags(void **, void *, unsigned long long); int cuGraphLaunch(void *, void *);
int cuGraphExecDestroy(void *); int cuGraphDestroy(void *); int cuGraphClone(void **, void *);
int cuGraphAddChildGraphNode(void **, void *, const void *, size_t, void *); int cuGraphExecUpdate_v2(void *, void *, void *);
int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *); int cuCtxCreate_v2(void **, unsigned, int); int cuCtxDestroy_v2(void *); int cuMemPoolGetAttribute(void *, int, void *); int cuDeviceGetDefaultMemPool(void **, int);
long fake_calls(const char *);

#define CHECK(c) do { if (!(c)) { fprintf(stderr, "line %d: %s\n", __LINE__, #c); exit(1); } } while (0)
#define OK(call) CHECK((call) == 0)

static uint64_t handed[64];
static void *churn(void *context) {
    void *mine;
    unsigned seed = (unsigned)(uintptr_t)&mine;
    OK(cuCtxSetCurrent(context)); OK(cuStreamCreateWithPriority(&mine, 1, 0));
    for (int i = 0; i < 3000; i++) {
        uint64_t a, b;
        seed = seed * 1664525u + 1013904223u;
        OK(cuMemAllocAsync(&a, 1 + seed % 300000, i % 2 ? mine : NULL)); OK(cuMemAlloc_v2(&b, 1 + seed % 7000));
        /* Somebody else's block for ours. */
        a = __atomic_exchange_n(&handed[seed % 64], a, __ATOMIC_RELAXED);
        if (a) OK(i % 3 ? cuMemFreeAsync(a, mine) : cuMemFree_v2(a));
        OK(i % 5 ? cuMemFree_v2(b) : cuMemFreeAsync(b, mine));
    }
    OK(cuStreamDestroy_v2(mine));
    return NULL;
}
/* Nothing is served where no context is current; what others got is found all the same. */
static void *stray(void *unused) {
    (void)unused;
    for (int i = 0; i < 64; i++) {
        uint64_t a = __atomic_exchange_n(&handed[i], 0, __ATOMIC_RELAXED);
        if (a) OK(cuMemFree_v2(a));
    }
    return NULL;
}

int main(int argc, char **argv) {
    int device;
    void *context, *mine, *third, *stream, *other, *graph, *clone, *node, *exec, *second, *pool;
    uint64_t a, b, inside = 0, figure = 0;
    int stable = 1;
    size_t before, after, total;
    OK(cuInit(0)); OK(cuDeviceGet(&device, 0)); OK(cuDevicePrimaryCtxRetain(&context, device)); OK(cuCtxSetCurrent(context));
    OK(cuStreamCreateWithPriority(&stream, 1, 0)); OK(cuStreamCreateWithPriority(&other, 1, 0));
    OK(cuMemGetInfo_v2(&before, &total));
    for (int i = 0; i < 1000; i++) {
        OK(cuMemAllocAsync(&a, 3 << 20, stream)); OK(cuMemAllocAsync(&b, 5000, other));
        OK(cuMemFreeAsync(a, stream)); OK(cuMemFreeAsync(b, other));
        OK(cuMemAlloc_v2(&a, 100 << 10)); OK(cuMemFree_v2(a));
    }
    OK(cuMemGetInfo_v2(&after, &total));
    OK(cuDeviceGetDefaultMemPool(&pool, 0)); OK(cuMemPoolGetAttribute(pool, 5, &figure));
    printf("async %ld/%ld sync %ld/%ld free_kept %d pool %llu\n", fake_calls("cuMemAllocAsync"), fake_calls("cuMemFreeAsync"),
           fake_calls("cuMemAlloc_v2"), fake_calls("cuMemFree_v2"), before == after, (unsigned long long)figure);

    OK(cuStreamBeginCapture_v2(stream, 2));
    for (int i = 0; i < 50; i++) {
        OK(cuMemAllocAsync(&a, 1 << 20, stream)); OK(cuMemFreeAsync(a, stream));
        stable = stable && (!inside || inside == a); inside = a;
    }
    OK(cuStreamEndCapture(stream, &graph)); OK(cuGraphClone(&clone, graph));
    OK(cuGraphAddChildGraphNode(&node, clone, NULL, 0, graph));
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0)); OK(cuGraphInstantiateWithFlags(&second, clone, 0));
    OK(cuGraphExecUpdate_v2(second, graph, NULL));
    for (int i = 0; i < 100; i++) { OK(cuGraphLaunch(exec, i % 2 ? stream : other)); }
    OK(cuMemAllocAsync(&a, 1 << 20, stream)); printf("addresses stable %d, captured memory reused %d\n", stable, a == inside);
    OK(cuMemFreeAsync(a, stream));
    OK(cuGraphDestroy(graph)); OK(cuGraphDestroy(clone)); OK(cuGraphExecDestroy(exec)); OK(cuGraphExecDestroy(second));
    printf("graph %ld %ld %ld %ld\n", fake_calls("cuGraphLaunch"), fake_calls("cuGraphDestroy"), fake_calls("cuGraphExecDestroy"),
           fake_calls("cuMemAllocAsync"));
    /* A pointer that nobody gave us. */
    printf("foreign %d %d", cuMemFree_v2(64), cuMemFreeAsync(64, stream));
    printf(" forwarded %ld\n", fake_calls("cuMemFreeAsync"));
    OK(cuStreamDestroy_v2(other)); printf("streams %ld\n", fake_calls("cuStreamDestroy_v2"));
    /* A context of the program's own, whose memory is freed while another is current; some of it never. */
    long taken = fake_calls("cuMemAlloc_v2"), given = fake_calls("cuMemFree_v2");
    OK(cuCtxCreate_v2(&mine, 0, device)); OK(cuStreamCreateWithPriority(&third, 1, 0));
    OK(cuMemAlloc_v2(&a, 3 << 20)); OK(cuMemAlloc_v2(&b, 3 << 20)); OK(cuMemAllocAsync(&inside, 30 << 20, third));
    OK(cuCtxSetCurrent(context));
    OK(cuMemFree_v2(a)); OK(cuMemFreeAsync(inside, third)); OK(cuMemAllocAsync(&inside, 5000, third)); OK(cuMemFreeAsync(inside, stream));
    OK(cuStreamDestroy_v2(third)); OK(cuCtxDestroy_v2(mine));
    taken = fake_calls("cuMemAlloc_v2") - taken; given = fake_calls("cuMemFree_v2") - given;
    printf("own context: taken %ld, kept %ld, async %ld\n", taken, taken - given, fake_calls("cuMemAllocAsync"));
    /* Entry points that are looked up through the driver itself. */
    int (*looked_up)(uint64_t *, size_t, void *), (*init)(unsigned);
    OK(cuGetProcAddress_v2("cuMemAllocAsync", (void **)&looked_up, 13000, 0, NULL));
    OK(cuGetProcAddress_v2("cuInit", (void **)&init, 13000, 0, NULL));
    CHECK(cuGetProcAddress_v2("cuNothing", (void **)&graph, 13000, 0, NULL) == 500);
    OK(init(0)); OK(looked_up(&a, 5000, stream)); OK(cuMemFreeAsync(a, stream));
    /* And through the driver's own file, as the CUDA runtime does. */
    void *opened = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(opened && dlsym(opened, "cuInit") && !dlsym(opened, "cuNothing") && dlsym(RTLD_DEFAULT, "puts") == dlsym(RTLD_NEXT, "puts"));
    looked_up = (int (*)(uint64_t *, size_t, void *))dlsym(opened, "cuMemAllocAsync");
    OK(looked_up(&a, 5000, stream)); OK(cuMemFreeAsync(a, stream));
    printf("looked up %ld\n", fake_calls("cuMemAllocAsync"));
    /* Many threads, with blocks that one allocates and another frees, and one without a context. */
    pthread_t threads[5];
    for (int i = 0; i < 5; i++) CHECK(!pthread_create(&threads[i], NULL, i < 4 ? churn : stray, i < 4 ? context : NULL));
    for (int i = 0; i < 5; i++) CHECK(!pthread_join(threads[i], NULL));
    for (int i = 0; i < 64; i++) if (handed[i]) OK(cuMemFree_v2(handed[i]));
    printf("threads %ld\n", fake_calls("cuMemAllocAsync"));
    /* A stream of a context that is gone: no other context's memory will do for it. */
    OK(cuMemAllocAsync(&b, 5000, (void *)0x1008)); OK(cuMemFreeAsync(b, (void *)0x1008));
    printf("unknown context %ld\n", fake_calls("cuMemAllocAsync"));
    if (argc > 1) {
        /* Ask for a snapshot, and go on once it is there. */
        FILE *file = NULL;
        raise(SIGUSR1);
        while (!(file = fopen(argv[1], "r")) || fseek(file, 0, SEEK_END) || ftell(file) == 0) { if (file) fclose(file); usleep(1000); }
        fclose(file);
        printf("signalled\n");
    }
    fflush(stdout);
    return 0;
}
