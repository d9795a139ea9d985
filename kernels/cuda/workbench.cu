// What tests and stress do to memory. Words are 32 bits; ranges are counted in words.

typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ u64 first() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ u64 stride() { return (u64)gridDim.x * blockDim.x; }

extern "C" __global__ void fill(u32 *dst, u64 words, u32 value) {
    for (u64 i = first(); i < words; i += stride()) dst[i] = value;
}

extern "C" __global__ void copy(u32 *dst, const u32 *src, u64 words) {
    for (u64 i = first(); i < words; i += stride()) dst[i] = src[i];
}

extern "C" __global__ void add(u32 *dst, u64 words, u32 value) {
    for (u64 i = first(); i < words; i += stride()) dst[i] += value;
}

// One block of 1024 threads, so that one launch needs no scratch memory: the sum over all words, each times its index plus one.
extern "C" __global__ void checksum(u32 *dst, const u32 *src, u64 words) {
    __shared__ u64 partial[1024];
    u64 sum = 0;
    u64 i = threadIdx.x;
    for (; i + 7 * 1024 < words; i += 8 * 1024) {
        u32 w[8];
        for (int k = 0; k < 8; k++) w[k] = src[i + k * 1024];
        for (int k = 0; k < 8; k++) sum += (u64)w[k] * (i + k * 1024 + 1);
    }
    for (; i < words; i += 1024) sum += (u64)src[i] * (i + 1);
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (u32 half = 512; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        // The address is a multiple of 4 only.
        dst[0] = (u32)partial[0];
        dst[1] = (u32)(partial[0] >> 32);
    }
}

// One thread that waits until the host sets the word, or until `limit_ns` have passed: a forgotten gate must not hang the GPU.
extern "C" __global__ void gate(const volatile u32 *word, u64 limit_ns) {
    u64 start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        if (*word != 0) return;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < limit_ns);
}
