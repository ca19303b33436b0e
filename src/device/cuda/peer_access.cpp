#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/device/cuda/runtime.h"

namespace ballast::device {
namespace {

using OwnedMemory = std::unique_ptr<void, CudaEnd<cudaFree>>;

constexpr std::size_t kPatternWords = std::size_t{1} << 18U;
constexpr std::size_t kPatternBytes = kPatternWords * sizeof(std::uint32_t);

bool is_allowed(int from, int to) {
  int allowed = 0;
  check_cuda(cudaDeviceCanAccessPeer(&allowed, from, to),
             fmt::format("connecting CUDA devices {} and {}", from, to));
  return allowed != 0;
}

cudaError_t enable_access(int from, int to) {
  select_gpu(from);
  const cudaError_t code = cudaDeviceEnablePeerAccess(to, 0);
  if (code != cudaSuccess) static_cast<void>(cudaGetLastError());
  return code == cudaErrorPeerAccessAlreadyEnabled ? cudaSuccess : code;
}

void disable_access(int from, int to) {
  select_gpu(from);
  if (cudaDeviceDisablePeerAccess(to) != cudaSuccess) static_cast<void>(cudaGetLastError());
}

/// Zeros in the GPU's memory.
OwnedMemory zeros_on(int gpu, std::string_view what) {
  select_gpu(gpu);
  void* start = nullptr;
  check_cuda(cudaMalloc(&start, kPatternBytes), what);
  OwnedMemory memory(start);
  check_cuda(cudaMemset(start, 0, kPatternBytes), what);
  check_cuda(cudaDeviceSynchronize(), what);
  return memory;
}

bool copies_arrive(int from, int to) {
  const std::string what = fmt::format("testing copies from CUDA device {} to {}", from, to);
  std::vector<std::uint32_t> sent(kPatternWords);
  for (std::size_t i = 0; i < kPatternWords; ++i) {
    sent[i] = static_cast<std::uint32_t>(i) * 2654435761U + static_cast<std::uint32_t>(from);
  }
  const OwnedMemory target = zeros_on(to, what);
  const OwnedMemory source = zeros_on(from, what);
  const auto stream = make_cuda_stream(from, "peers");
  check_cuda(cudaMemcpyAsync(source.get(), sent.data(), kPatternBytes, cudaMemcpyHostToDevice,
                             stream->native()),
             what);
  check_cuda(
      cudaMemcpyPeerAsync(target.get(), to, source.get(), from, kPatternBytes, stream->native()),
      what);
  stream->synchronize();
  select_gpu(to);
  std::vector<std::uint32_t> received(kPatternWords);
  check_cuda(cudaMemcpy(received.data(), target.get(), kPatternBytes, cudaMemcpyDeviceToHost),
             what);
  return received == sent;
}

}  // namespace

bool enable_peer_access(int one, int other) {
  const std::array<std::pair<int, int>, 2> ways = {{{one, other}, {other, one}}};
  for (const auto& [from, to] : ways) {
    if (!is_allowed(from, to)) return false;
  }
  std::string reason;
  for (const auto& [from, to] : ways) {
    const cudaError_t code = enable_access(from, to);
    if (code != cudaSuccess) reason = fmt::format("fail ({})", cudaGetErrorString(code));
  }
  if (reason.empty() && !(copies_arrive(one, other) && copies_arrive(other, one))) {
    reason = "do not arrive, although the driver allows them (an IOMMU or PCIe's ACS may be on)";
  }
  if (reason.empty()) return true;
  for (const auto& [from, to] : ways) disable_access(from, to);
  log(LogLevel::warning,
      fmt::format("direct copies between CUDA devices {} and {} {}, so copies pass through host "
                  "memory, which takes longer",
                  one, other, reason));
  return false;
}

}  // namespace ballast::device
