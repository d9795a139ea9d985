// Repeats a recorded sequence of requests and frees on whichever allocator is torch's current one, and says what each takes the host.
// Built by training.py.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

using Clock = std::chrono::steady_clock;

// `operations`: a request of so many bytes, or -1 - n for the free of request n. Nanoseconds of the fastest turn.
template <typename Allocate, typename Release>
static double fastest_turn(const int64_t *operations, int64_t count, int64_t requests, int turns, Allocate allocate, Release release) {
    std::vector<void *> blocks(requests);
    double best = 0;
    for (int turn = 0; turn < turns; turn++) {
        int64_t next = 0;
        auto start = Clock::now();
        for (int64_t i = 0; i < count; i++) {
            if (operations[i] >= 0) {
                blocks[next++] = allocate(operations[i]);
            } else {
                release(blocks[-1 - operations[i]]);
            }
        }
        double took = std::chrono::duration<double, std::nano>(Clock::now() - start).count();
        best = turn == 0 || took < best ? took : best;
    }
    return best;
}

extern "C" double host_time_through_torch(const int64_t *operations, int64_t count, int64_t requests, int turns) {
    auto *allocator = c10::cuda::CUDACachingAllocator::get();
    auto stream = c10::cuda::getCurrentCUDAStream();
    return fastest_turn(
        operations, count, requests, turns, [&](int64_t bytes) { return allocator->raw_alloc_with_stream(bytes, stream); },
        [&](void *block) { allocator->raw_delete(block); });
}

// The same without torch's own books of a plug-in's blocks: the plug-in's two functions directly.
extern "C" double host_time_of_functions(const int64_t *operations, int64_t count, int64_t requests, int turns,
                                         void *(*allocate)(size_t, int, cudaStream_t), void (*release)(void *, size_t, int, cudaStream_t)) {
    cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    return fastest_turn(
        operations, count, requests, turns, [&](int64_t bytes) { return allocate(bytes, 0, stream); },
        [&](void *block) { release(block, 0, 0, stream); });
}
