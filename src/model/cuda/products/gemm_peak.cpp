#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/core/seconds.h"
#include "ballast/device/cuda_stream.h"

#include "src/device/cuda/errors.h"
#include "src/model/cuda/factories.h"
#include "src/model/cuda/products/products.h"

namespace ballast::model::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kSmallest = 256;
constexpr std::size_t kLargest = 8192;
/// Seconds of products to enqueue before waiting, because waking a thread takes up to a
/// millisecond.
constexpr double kStretch = 0.02;
constexpr int kMostAtOnce = 64;
constexpr Bytes kWorkspaceAlignment = 256;

/// Returns random words. As two bf16 or one fp32, each has magnitudes from 0.5 to 1.
std::vector<std::uint32_t> random_words() {
  std::vector<std::uint32_t> words(kMiB / sizeof(std::uint32_t));
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = (static_cast<std::uint32_t>(random_u64(1, i)) & 0x807f807fU) | 0x3f003f00U;
  }
  return words;
}

/// Device memory filled with random numbers, because a GPU multiplies constants faster (they need
/// less power). Null if there is not enough memory.
class Filled {
 public:
  explicit Filled(Bytes size) {
    void* made = nullptr;
    const cudaError_t code = cudaMalloc(&made, size);
    if (code == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      return;
    }
    device::check_cuda(code, "allocating matrices");
    memory_.reset(made);
    const std::vector<std::uint32_t> words = random_words();
    const Bytes once = words.size() * sizeof(std::uint32_t);
    for (Bytes at = 0; at < size; at += once) {
      device::check_cuda(cudaMemcpy(static_cast<std::byte*>(made) + at, words.data(),
                                    std::min(once, size - at), cudaMemcpyHostToDevice),
                         "filling matrices");
    }
    // Copies run on the default stream, for which other streams do not wait.
    device::check_cuda(cudaDeviceSynchronize(), "filling matrices");
  }
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(memory_.get()); }

 private:
  std::unique_ptr<void, device::CudaEnd<cudaFree>> memory_;
};

/// Products of n x n matrices.
class Square {
 public:
  Square(Products& products, device::CudaStream& stream, DType type, std::size_t n)
      : products_(products),
        stream_(stream),
        type_(type),
        n_(n),
        size_(n * n * size_of(type)),
        memory_(kWorkspaceAlignment + Products::kWorkspace + 3 * size_) {}

  [[nodiscard]] bool has_memory() const { return memory_.data() != nullptr; }

  /// Returns the shortest time of one product, measured for about `seconds` after a warm-up.
  double fastest(double seconds) {
    products_.set_workspace(workspace());
    run(1);
    double best = run(1);
    for (const auto start = Clock::now(); seconds_since(start) < seconds;) {
      const double count = std::clamp(kStretch / std::max(best, 1e-9), 1.0, double{kMostAtOnce});
      best = std::min(best, run(static_cast<int>(count)));
    }
    return best;
  }

 private:
  [[nodiscard]] std::byte* workspace() const {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return memory_.data() + (round_up(address, kWorkspaceAlignment) - address);
  }
  /// Returns the mean seconds per product over `count` products.
  double run(int count) {
    const auto at = [&](std::size_t i) {
      return Matrix{
          .data = workspace() + Products::kWorkspace + i * size_, .type = type_, .row_step = n_};
    };
    const auto start = Clock::now();
    for (int i = 0; i < count; ++i) {
      products_.multiply(stream_.native(), {n_, n_, n_}, at(0), at(1), at(2));
    }
    stream_.synchronize();
    return seconds_since(start) / count;
  }

  Products& products_;
  device::CudaStream& stream_;
  DType type_;
  std::size_t n_;
  Bytes size_;
  Filled memory_;
};

}  // namespace

double measure_cuda_gemm_peak(device::Device& device, DType type, double seconds, KernelSet set) {
  const auto owned = device.make_stream("gemm peak");
  device::CudaStream& stream = device::as_cuda(*owned);
  static_cast<void>(stream.native());  // selects the device for the allocations below
  Products products(nullptr, set);
  double best = 0.0;
  const auto start = Clock::now();
  for (std::size_t n = kSmallest; n <= kLargest; n *= 2) {
    Square square(products, stream, type, n);
    if (!square.has_memory()) break;
    const double left = seconds - seconds_since(start);
    const double took = square.fastest(n == kLargest ? left : left / 8);
    const auto size = static_cast<double>(n);
    best = std::max(best, 2.0 * size * size * size / std::max(took, 1e-9));
    // The next size takes eight times as long and runs at least twice.
    if (2 * 8 * took > seconds - seconds_since(start)) break;
  }
  if (best == 0.0) {
    throw Error(ErrorCategory::memory, fmt::format("measuring matrix products: {} of device memory "
                                                   "are needed in addition to ballast.device_bytes",
                                                   format_bytes(Products::kWorkspace)));
  }
  return best;
}

}  // namespace ballast::model::cuda
