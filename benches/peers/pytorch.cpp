// PyTorch's native allocator, through its C++ interface. Needs libtorch's c10 only.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/headeronly/version.h>

#include "peer.h"

// Of c10, in no header of it: libtorch says with it which devices it has touched. Without libtorch, which is too large to link here, we do.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*has)(DeviceIndex));
}

namespace {

namespace torch_allocator = c10::cuda::CUDACachingAllocator;

struct PyTorch : Peer {
  PyTorch() {
    static const bool once = [] {
      c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
      torch_allocator::init(1);
      return true;
    }();
    (void)once;
  }

  ~PyTorch() override { torch_allocator::emptyCache(); }

  void* alloc(std::size_t bytes, cudaStream_t stream) override {
    return torch_allocator::raw_alloc_with_stream(bytes, stream);
  }

  void free(void* block, std::size_t, cudaStream_t) override { torch_allocator::raw_delete(block); }

  void free_used(void* block, std::size_t, cudaStream_t, cudaStream_t other) override {
    // The pointer frees its block as it goes.
    const c10::Device device(c10::DeviceType::CUDA, 0);
    c10::DataPtr owned(block, block, torch_allocator::get()->raw_deleter(), device);
    torch_allocator::recordStream(owned, c10::cuda::getStreamFromExternal(other, 0));
  }

  void begin_pool(std::uint64_t pool, cudaStream_t stream) override {
    torch_allocator::beginAllocateToPool(0, {pool, 0}, [stream](cudaStream_t asks) { return asks == stream; });
  }

  void end_pool(std::uint64_t pool) override { torch_allocator::endAllocateToPool(0, {pool, 0}); }

  void drop_pool(std::uint64_t pool) override { torch_allocator::releasePool(0, {pool, 0}); }

  void empty_cache() override { torch_allocator::emptyCache(); }
};

const Register pytorch("pytorch", TORCH_VERSION, [] { return std::unique_ptr<Peer>(new PyTorch); });

}  // namespace
