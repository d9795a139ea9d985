/* For a GPU: memory by every way in a context of the program's own and in the primary one, a capture in each, and the contexts' ends. Exits
 * with 1 if a word is wrong. What it prints is for people. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
typedef int R; typedef void *P; typedef uint64_t D;
R cuInit(unsigned); R cuDeviceGet(int *, int); R cuCtxCreate_v2(P *, unsigned, int); R cuCtxDestroy_v2(P); R cuCtxSynchronize(void);
R cuMemAlloc_v2(D *, size_t); R cuMemFree_v2(D); R cuMemAllocAsync(D *, size_t, P); R cuMemFreeAsync(D, P); R cuMemGetInfo_v2(size_t *, size_t *);
R cuStreamCreate(P *, unsigned); R cuStreamSynchronize(P); R cuStreamDestroy_v2(P); R cuMemsetD32Async(D, unsigned, size_t, P);
R cuMemcpyDtoHAsync_v2(void *, D, size_t, P); R cuMemcpyAsync(D, D, size_t, P); R cuStreamBeginCapture_v2(P, int); R cuStreamEndCapture(P, P *);
R cuGraphInstantiateWithFlags(P *, P, unsigned long long); R cuGraphLaunch(P, P); R cuGraphDestroy(P); R cuGraphExecDestroy(P);
R cuGetProcAddress_v2(const char *, P *, int, uint64_t, int *); R cuDevicePrimaryCtxRetain(P *, int); R cuCtxSetCurrent(P); R cuDevicePrimaryCtxRelease_v2(int);
R cuDevicePrimaryCtxReset_v2(int);
#define OK(c) do { int r = (c); if (r) { printf("line %d: %s: %d\n", __LINE__, #c, r); exit(1); } } while (0)
static unsigned word(D p, P s) { unsigned v = 0; OK(cuMemcpyDtoHAsync_v2(&v, p, 4, s)); OK(cuStreamSynchronize(s)); return v; }
static void use(const char *name) {
    P s, t, g, x; D p, q, out; size_t before, after, total; unsigned seed = 1, wrong = 0;
    OK(cuStreamCreate(&s, 1)); OK(cuStreamCreate(&t, 1)); OK(cuMemGetInfo_v2(&before, &total));
    for (unsigned i = 0; i < 500; i++) {
        seed = seed * 1664525u + 1013904223u; size_t n = 256 + seed % 2000000;
        OK(cuMemAllocAsync(&p, n * 4, s)); OK(cuMemsetD32Async(p, i, n, s)); OK(cuMemAlloc_v2(&q, n * 4));
        OK(cuMemcpyAsync(q, p, n * 4, s)); OK(cuMemFreeAsync(p, s)); wrong += word(q + (n - 1) * 4, s) != i; OK(cuMemFree_v2(q));
    }
    R (*looked_up)(D *, size_t, P); OK(cuGetProcAddress_v2("cuMemAllocAsync", (P *)&looked_up, 13000, 0, NULL));
    OK(looked_up(&out, 1 << 20, s)); OK(cuMemsetD32Async(out, 0, 1 << 18, s));
    OK(cuStreamBeginCapture_v2(s, 2)); OK(looked_up(&p, 1 << 20, s)); OK(cuMemsetD32Async(p, 77, 1 << 18, s)); OK(cuMemcpyAsync(out, p, 1 << 20, s));
    OK(cuMemFreeAsync(p, s)); OK(cuStreamEndCapture(s, &g)); OK(cuGraphInstantiateWithFlags(&x, g, 0)); OK(cuGraphDestroy(g));
    int launches = 0; while (launches < 1000 && !cuGraphLaunch(x, launches % 2 ? s : t)) { launches++; OK(cuStreamSynchronize(launches % 2 ? t : s)); }
    unsigned last = word(out + 4096, s);
    OK(cuGraphExecDestroy(x)); OK(cuMemFreeAsync(out, t)); OK(cuMemAlloc_v2(&q, 64 << 20)); OK(cuStreamDestroy_v2(t)); OK(cuMemGetInfo_v2(&after, &total));
    if (wrong || last != 77 || !launches) exit(1);
    printf("%s: %u wrong, %d launches, last word %u, free %ld MiB less\n", name, wrong, launches, last, (long)(before - after) >> 20);
}
int main(void) {
    int d; P mine, primary; OK(cuInit(0)); OK(cuDeviceGet(&d, 0)); OK(cuCtxCreate_v2(&mine, 0, d)); use("own context");
    OK(cuDevicePrimaryCtxRetain(&primary, d)); OK(cuCtxSetCurrent(primary)); use("primary");
    size_t a, b, c, t; OK(cuMemGetInfo_v2(&a, &t)); OK(cuCtxDestroy_v2(mine)); OK(cuMemGetInfo_v2(&b, &t));
    printf("the end of the own context gave %ld MiB back\n", (long)(b - a) >> 20);
    OK(cuDevicePrimaryCtxReset_v2(d)); OK(cuDevicePrimaryCtxRetain(&primary, d)); OK(cuCtxSetCurrent(primary)); OK(cuMemGetInfo_v2(&c, &t));
    use("primary after its reset"); printf("the reset gave %ld MiB back\n", (long)(c - b) >> 20); return 0;
}
