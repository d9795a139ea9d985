// What the experiments compute. Lengths are elements.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static __device__ u64 first() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ u64 stride() { return (u64)gridDim.x * blockDim.x; }

// A: adds `value` to every element, `times` times in the kernel.
extern "C" __global__ void add_often(i64 *x, u64 n, i64 value, u32 times) {
    for (u64 i = first(); i < n; i += stride())
        for (u32 k = 0; k < times; k++) {
            x[i] += value;
            // Keeps the compiler from making one addition of them.
            asm volatile("" ::: "memory");
        }
}

// C, D, E: c = a + b.
extern "C" __global__ void sum_i32(u32 *c, const u32 *a, const u32 *b, u64 n) {
    for (u64 i = first(); i < n; i += stride()) c[i] = a[i] + b[i];
}

// F: out = x * x, out = x * 2, out = x + y.
extern "C" __global__ void square_f32(float *out, const float *x, u64 n) {
    for (u64 i = first(); i < n; i += stride()) out[i] = x[i] * x[i];
}

extern "C" __global__ void double_f32(float *out, const float *x, u64 n) {
    for (u64 i = first(); i < n; i += stride()) out[i] = x[i] * 2.0f;
}

extern "C" __global__ void sum_f32(float *out, const float *x, const float *y, u64 n) {
    for (u64 i = first(); i < n; i += stride()) out[i] = x[i] + y[i];
}

// H: out[r][c] = sum over k of a[r][k] * b[k][c], or of the transposes; each element by one thread, in order, so deterministic.
extern "C" __global__ void matmul_f32(float *out, const float *a, const float *b, u64 rows, u64 inner, u64 cols, u32 a_transposed,
                                      u32 b_transposed) {
    for (u64 i = first(); i < rows * cols; i += stride()) {
        u64 r = i / cols, c = i % cols;
        float sum = 0.0f;
        for (u64 k = 0; k < inner; k++) {
            float x = a_transposed ? a[k * rows + r] : a[r * inner + k];
            float y = b_transposed ? b[c * inner + k] : b[k * cols + c];
            sum += x * y;
        }
        out[i] = sum;
    }
}

extern "C" __global__ void relu_f32(float *out, const float *x, u64 n) {
    for (u64 i = first(); i < n; i += stride()) out[i] = x[i] > 0.0f ? x[i] : 0.0f;
}

// The gradient passes where the activation is positive.
extern "C" __global__ void relu_back_f32(float *grad, const float *activation, u64 n) {
    for (u64 i = first(); i < n; i += stride()) if (!(activation[i] > 0.0f)) grad[i] = 0.0f;
}

// The gradient of the mean squared error, and the error itself, summed in order by one thread.
extern "C" __global__ void loss_f32(float *grad, float *loss, const float *y, const float *target, u64 n) {
    for (u64 i = first(); i < n; i += stride()) grad[i] = 2.0f * (y[i] - target[i]) / (float)n;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        float sum = 0.0f;
        for (u64 i = 0; i < n; i++) {
            float d = y[i] - target[i];
            sum += d * d;
        }
        *loss = sum / (float)n;
    }
}

extern "C" __global__ void descend_f32(float *weight, const float *grad, float rate, u64 n) {
    for (u64 i = first(); i < n; i += stride()) weight[i] -= rate * grad[i];
}
