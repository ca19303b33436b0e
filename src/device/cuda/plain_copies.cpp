#include "ballast/device/plain_copies.h"

#include <cstring>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/cuda_stream.h"

#include "src/device/cuda/errors.h"
#include "src/device/factories.h"

namespace ballast::device {
namespace {

/// Copies in one direction, on a separate stream, between buffers allocated by CUDA.
class OneWay {
 public:
  OneWay(Device& device, Bytes bytes, cudaMemcpyKind kind)
      : bytes_(bytes), kind_(kind), stream_(device.make_stream("plain")) {
    as_cuda(*stream_).native();  // makes the device the current one
    void* memory = nullptr;
    check_cuda(cudaMallocHost(&memory, bytes),
               fmt::format("plain copies: allocating {} of pinned memory", format_bytes(bytes)));
    host_.reset(memory);
    std::memset(memory, 1, bytes);
    check_cuda(cudaMalloc(&memory, bytes),
               fmt::format("plain copies: allocating {} of device memory", format_bytes(bytes)));
    device_.reset(memory);
  }

  void enqueue() {
    const bool up = kind_ == cudaMemcpyHostToDevice;
    void* const to = up ? device_.get() : host_.get();
    const void* const from = up ? host_.get() : device_.get();
    check_cuda(cudaMemcpyAsync(to, from, bytes_, kind_, as_cuda(*stream_).native()), "plain copy");
  }
  void wait() { stream_->synchronize(); }

 private:
  Bytes bytes_;
  cudaMemcpyKind kind_;
  std::unique_ptr<void, CudaEnd<cudaFreeHost>> host_;
  std::unique_ptr<void, CudaEnd<cudaFree>> device_;
  std::unique_ptr<Stream> stream_;  ///< destroyed, and so synchronized, before the memory
};

class CudaPlainCopies final : public PlainCopies {
 public:
  CudaPlainCopies(Device& device, Bytes bytes)
      : up_(device, bytes, cudaMemcpyHostToDevice), down_(device, bytes, cudaMemcpyDeviceToHost) {}

  void run(CopyWay way, std::size_t count) override {
    for (std::size_t i = 0; i < count; ++i) {
      if (way != CopyWay::down) up_.enqueue();
      if (way != CopyWay::up) down_.enqueue();
    }
    if (way != CopyWay::down) up_.wait();
    if (way != CopyWay::up) down_.wait();
  }

 private:
  OneWay up_;
  OneWay down_;
};

}  // namespace

std::unique_ptr<PlainCopies> make_cuda_plain_copies(Device& device, Bytes bytes) {
  return std::make_unique<CudaPlainCopies>(device, bytes);
}

}  // namespace ballast::device
