// What the CUDA runtime itself has: cudaMallocAsync, cudaMalloc, and nothing at all (the loops alone).
#include <atomic>

#include "peer.h"

namespace {

struct LoopAlone : Peer {
  void* alloc(std::size_t, cudaStream_t) override { return this; }
  void free(void*, std::size_t, cudaStream_t) override {}
};

struct MallocAsync : Peer {
  cudaMemPool_t pool = nullptr;

  MallocAsync() {
    check(cudaDeviceGetDefaultMemPool(&pool, 0), "cudaDeviceGetDefaultMemPool");
    std::uint64_t keep = UINT64_MAX;
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
  }

  ~MallocAsync() override { empty_cache(); }

  void* alloc(std::size_t bytes, cudaStream_t stream) override {
    void* block = nullptr;
    return cudaMallocAsync(&block, bytes, stream) == cudaSuccess ? block : nullptr;
  }

  void free(void* block, std::size_t, cudaStream_t stream) override {
    check(cudaFreeAsync(block, stream), "cudaFreeAsync");
  }

  void empty_cache() override {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check(cudaMemPoolTrimTo(pool, 0), "cudaMemPoolTrimTo");
  }
};

std::string runtime_version() {
  int version = 0;
  cudaRuntimeGetVersion(&version);
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

const Register loop_alone("loop-alone", "", [] { return std::unique_ptr<Peer>(new LoopAlone); });
const Register malloc_async("cudaMallocAsync", runtime_version(), [] { return std::unique_ptr<Peer>(new MallocAsync); });

}  // namespace
