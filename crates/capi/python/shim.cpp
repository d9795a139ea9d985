// What PyTorch's plug-in interface needs and C cannot say: an exception when memory runs out, and the filter as a std::function.
// Built by gpupool_torch.py, where torch is.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include <c10/util/Exception.h>

#define EXPORTED __attribute__((visibility("default")))  // Nothing else is seen from outside: see gpupool_torch.py.
struct CUstream_st;
using Stream = CUstream_st *;          // cudaStream_t
using PoolId = std::pair<uint64_t, uint64_t>;  // c10::MempoolId_t
using Filter = std::function<bool(Stream)>;

extern "C" {
struct gpupool_pool { uint64_t capture, user; };
void *gpupool_torch_malloc(size_t size, int device, void *stream);
void gpupool_torch_free(void *block, size_t size, int device, void *stream);
int gpupool_torch_begin_allocate_to_pool(int device, gpupool_pool pool, bool (*filter)(void *, void *), void *context,
                                         void (*release)(void *));
int gpupool_last_status(void);
const char *gpupool_last_error(void);
}

namespace {
constexpr int kOutOfMemory = 2;

[[noreturn]] void fail(int status) {
    if (status == kOutOfMemory) {
        TORCH_CHECK_WITH(OutOfMemoryError, false, gpupool_last_error());
    }
    TORCH_CHECK(false, "gpupool: ", gpupool_last_error());
    __builtin_unreachable();
}

// The filter asks the driver about a stream; should it throw, it claims nothing.
bool claims(void *context, void *stream) noexcept {
    try {
        return (*static_cast<Filter *>(context))(static_cast<Stream>(stream));
    } catch (...) {
        return false;
    }
}

void release(void *context) noexcept { delete static_cast<Filter *>(context); }
}  // namespace

extern "C" EXPORTED void *gpupool_shim_malloc(size_t size, int device, Stream stream) {
    void *block = gpupool_torch_malloc(size, device, stream);
    if (block == nullptr && size != 0) {
        fail(gpupool_last_status());
    }
    return block;
}

// Here because PyTorch looks malloc and free up in one library.
extern "C" EXPORTED void gpupool_shim_free(void *block, size_t size, int device, Stream stream) {
    gpupool_torch_free(block, size, device, stream);
}

// PyTorch's filter dies after the call: the scope keeps a copy.
extern "C" EXPORTED void gpupool_shim_begin(int device, PoolId pool, Filter filter) {
    Filter *kept = filter ? new Filter(std::move(filter)) : nullptr;
    int status = gpupool_torch_begin_allocate_to_pool(device, {pool.first, pool.second}, kept ? claims : nullptr, kept,
                                                      kept ? release : nullptr);
    if (status != 0) {
        fail(status);
    }
}
