// Calls the shim as PyTorch does, on the simulated device: exceptions, and a filter that is a std::function.
#include "../../python/shim.cpp"

#include <cstdio>
#include <cstdlib>
#include <memory>

extern "C" {
int gpupool_torch_configure(const char *, const char *);
int gpupool_torch_allocator(int, uint64_t *);
void gpupool_torch_end_allocate_to_pool(int, gpupool_pool);
void gpupool_torch_release_pool(int, gpupool_pool);
int gpupool_pool_bytes(uint64_t, gpupool_pool, int64_t *, int64_t *);
int gpupool_bench_stream_create(uint64_t, void **);
}
#define CHECK(c) do { if (!(c)) { std::fprintf(stderr, "line %d: %s: %s\n", __LINE__, #c, gpupool_last_error()); std::exit(1); } } while (0)

int main() {
    CHECK(gpupool_torch_configure("sim", "memory_limit=1GiB") == 0);
    uint64_t allocator = 0;
    void *raw = nullptr;
    CHECK(gpupool_torch_allocator(1, &allocator) == 0 && gpupool_bench_stream_create(allocator, &raw) == 0);
    auto stream = static_cast<Stream>(raw);
    CHECK(gpupool_shim_malloc(0, 1, stream) == nullptr);
    bool thrown = false;
    try {
        gpupool_shim_malloc(size_t{2} << 30, 1, stream);
    } catch (const c10::OutOfMemoryError &e) {
        thrown = std::string(e.what()).find("emory") != std::string::npos;
    }
    CHECK(thrown);
    thrown = false;
    try {
        gpupool_shim_malloc(1, 9, stream);
    } catch (const c10::OutOfMemoryError &) {
    } catch (const c10::Error &e) {
        thrown = std::string(e.what()).find("device 9") != std::string::npos;
    }
    CHECK(thrown);

    // The filter's state lives as long as the scope, though PyTorch's own copy dies after the call.
    auto alive = std::make_shared<int>(0);
    gpupool_pool pool{1, 0};
    gpupool_shim_begin(1, {1, 0}, [alive, stream](Stream s) { return ++*alive, s == stream; });
    CHECK(alive.use_count() == 2);
    void *inside = gpupool_shim_malloc(1 << 20, 1, stream), *beside = gpupool_shim_malloc(1 << 20, 1, nullptr);
    int64_t reserved = 0, allocated = 0;
    CHECK(gpupool_pool_bytes(allocator, pool, &reserved, &allocated) == 0 && allocated == 1 << 20 && *alive == 2);
    gpupool_torch_end_allocate_to_pool(1, pool);
    CHECK(alive.use_count() == 1);
    gpupool_shim_free(inside, 1 << 20, 1, stream);
    gpupool_shim_free(beside, 1 << 20, 1, nullptr);
    gpupool_torch_release_pool(1, pool);
    // A filter that throws claims nothing.
    gpupool_shim_begin(1, {2, 0}, [](Stream) -> bool { throw 1; });
    inside = gpupool_shim_malloc(1 << 20, 1, stream);
    CHECK(gpupool_pool_bytes(allocator, {2, 0}, &reserved, &allocated) == 0 && allocated == 0);
    thrown = false;
    try {
        gpupool_shim_begin(1, {0, 0}, {});
    } catch (const c10::Error &) {
        thrown = true;
    }
    CHECK(thrown);
    std::puts("all is well");
}
