// An allocator under test, as the loops of main.cpp see it. One translation unit a peer: whatever headers are there are built.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

struct Peer {
  virtual ~Peer() = default;
  // A block of at least `bytes` for a stream; null when there is none.
  virtual void* alloc(std::size_t bytes, cudaStream_t stream) = 0;
  // Frees it on the stream that it was allocated on.
  virtual void free(void* block, std::size_t bytes, cudaStream_t stream) = 0;
  // The same for a block that another stream used. Peers without such uses just free.
  virtual void free_used(void* block, std::size_t bytes, cudaStream_t stream, cudaStream_t /*other*/) {
    free(block, bytes, stream);
  }
  // Requests on `stream` go to private pool `pool` until `end_pool`. Peers without pools ignore it.
  virtual void begin_pool(std::uint64_t /*pool*/, cudaStream_t /*stream*/) {}
  virtual void end_pool(std::uint64_t /*pool*/) {}
  virtual void drop_pool(std::uint64_t /*pool*/) {}
  // Unused memory goes back to the driver.
  virtual void empty_cache() {}
};

// A peer by name, and how it is made. Each translation unit registers its own.
struct Entry {
  std::string name;
  std::string version;
  std::unique_ptr<Peer> (*make)();
};

std::vector<Entry>& entries();

struct Register {
  Register(const char* name, std::string version, std::unique_ptr<Peer> (*make)()) {
    entries().push_back({name, std::move(version), make});
  }
};

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    std::printf("{\"error\": \"%s: %s\"}\n", what, cudaGetErrorString(status));
    std::fflush(stdout);
    std::_Exit(1);
  }
}
