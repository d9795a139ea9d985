// RAPIDS memory manager: its pool and its arena over cudaMalloc.
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include "peer.h"

namespace {

constexpr std::size_t kAlignment = 256;

template <class Resource>
struct Rmm : Peer {
  Resource resource;

  template <class... Arguments>
  explicit Rmm(Arguments&&... arguments) : resource(std::forward<Arguments>(arguments)...) {}

  void* alloc(std::size_t bytes, cudaStream_t stream) override {
    return resource.allocate(cuda::stream_ref{stream}, bytes, kAlignment);
  }

  void free(void* block, std::size_t bytes, cudaStream_t stream) override {
    resource.deallocate(cuda::stream_ref{stream}, block, bytes, kAlignment);
  }
};

using Pool = rmm::mr::pool_memory_resource;
using Arena = rmm::mr::arena_memory_resource;
// What each takes from the driver first: more than any workload of one thread has live, so that growth decides no figure.
constexpr std::size_t kFirst = std::size_t{48} << 30;

std::unique_ptr<Peer> pool() { return std::unique_ptr<Peer>(new Rmm<Pool>(rmm::mr::cuda_memory_resource{}, kFirst)); }
std::unique_ptr<Peer> arena() { return std::unique_ptr<Peer>(new Rmm<Arena>(rmm::mr::cuda_memory_resource{}, kFirst)); }

const Register pool_entry("rmm-pool", RMM_PEER_VERSION, pool);
const Register arena_entry("rmm-arena", RMM_PEER_VERSION, arena);

}  // namespace
