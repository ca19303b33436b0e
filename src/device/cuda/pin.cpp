#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/device/cuda/runtime.h"
#include "src/device/implementations.h"

namespace ballast::device {
namespace {

/// Largest registration. Parts allow progress for -v, partial results in errors, and interrupts.
constexpr Bytes kPart = kGiB;
/// Pinning more than this takes long enough to log it.
constexpr Bytes kLogAbove = 8 * kGiB;

int numa_node_of_gpu(int ordinal, const NumaNodes& nodes) {
  std::array<char, 32> address = {};
  if (cudaDeviceGetPCIBusId(address.data(), static_cast<int>(address.size()), ordinal) !=
      cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return -1;
  }
  return numa_node_of(address.data(), nodes.devices);
}

class CudaPin final : public Pin {
 public:
  CudaPin(int ordinal, HostBytes memory, std::string_view setting,
          const std::atomic<bool>* interrupted, const NumaNodes& nodes)
      : ordinal_(ordinal) {
    if (memory.empty()) return;
    select_gpu(ordinal);
    place(memory, nodes);
    if (memory.size() > kLogAbove) {
      log(LogLevel::info,
          fmt::format("pinning {} of host memory ({}) for CUDA device {}: this takes a while",
                      format_bytes(memory.size()), setting, ordinal));
    }
    while (bytes_ < memory.size()) {
      if (interrupted != nullptr && *interrupted) {
        throw Error(ErrorCategory::interrupted,
                    fmt::format("interrupted while pinning host memory ({})", setting));
      }
      const Bytes size = pinned_part(memory.data() + bytes_, memory.size() - bytes_);
      const HostBytes part = memory.subspan(bytes_, size);
      // CUDA would populate the pages with only one thread.
      make_resident(part);
      const cudaError_t code = cudaHostRegister(part.data(), size, cudaHostRegisterPortable);
      if (code != cudaSuccess) {
        keep_pageable(code, memory, setting);
        return;
      }
      parts_.emplace_back(part.data());
      bytes_ += size;
      log(LogLevel::debug, fmt::format("pinned {} of {} of host memory", format_bytes(bytes_),
                                       format_bytes(memory.size())));
    }
  }
  ~CudaPin() override {
    if (cudaSetDevice(ordinal_) != cudaSuccess) static_cast<void>(cudaGetLastError());
  }

  [[nodiscard]] Bytes bytes() const override { return bytes_; }

 private:
  /// Called before the pages exist. Affects only speed.
  void place(HostBytes memory, const NumaNodes& nodes) const {
    const int node = numa_node_of_gpu(ordinal_, nodes);
    if (node < 0) return;
    const bool granted = nodes.prefer(memory, node);
    log(LogLevel::debug, fmt::format("host memory for CUDA device {}: {} NUMA node {}", ordinal_,
                                     granted ? "prefers" : "the kernel refused", node));
  }

  /// Leaves the memory from the first refused part on pageable, if the system's limits are the
  /// reason. Throws otherwise.
  void keep_pageable(cudaError_t code, HostBytes memory, std::string_view setting) const {
    static_cast<void>(cudaGetLastError());
    const std::string what = fmt::format(
        "host memory ({}): {} of {} could be pinned for CUDA device {}; CUDA: {} ({})", setting,
        bytes_ == 0 ? "nothing" : format_bytes(bytes_), format_bytes(memory.size()), ordinal_,
        cudaGetErrorString(code), cudaGetErrorName(code));
    const bool limited = code == cudaErrorMemoryAllocation || code == cudaErrorNotSupported ||
                         code == cudaErrorNotPermitted || code == cudaErrorOperatingSystem;
    if (!limited) {
      throw Error(ErrorCategory::memory, fmt::format("{}; lower {}", what, setting));
    }
    log(LogLevel::warning,
        fmt::format("{}; the rest is copied more slowly and not during the computation: allow more "
                    "pinned memory (container, virtual machine) or lower {}",
                    what, setting));
  }

  int ordinal_;
  Bytes bytes_ = 0;  ///< pinned so far
  std::vector<std::unique_ptr<void, CudaEnd<cudaHostUnregister>>> parts_;
};

}  // namespace

std::unique_ptr<Pin> make_cuda_pin(int ordinal, HostBytes memory, std::string_view setting,
                                   const std::atomic<bool>* interrupted, const NumaNodes& nodes) {
  return std::make_unique<CudaPin>(ordinal, memory, setting, interrupted, nodes);
}

Bytes pinned_part(const std::byte* start, Bytes bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(start);
  return std::min<Bytes>(bytes, kPart - address % kPart);
}

}  // namespace ballast::device
