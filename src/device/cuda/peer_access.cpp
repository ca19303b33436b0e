#include "src/device/cuda/peer_access.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "ballast/core/log.h"

#include "src/device/cuda/errors.h"

namespace ballast::device {
namespace {

using Memory = std::unique_ptr<void, CudaEnd<cudaFree>>;
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, CudaEnd<cudaStreamDestroy>>;

constexpr std::size_t kWords = std::size_t{1} << 18U;
constexpr std::size_t kBytes = kWords * sizeof(std::uint32_t);

void select(int gpu) {
  check_cuda(cudaSetDevice(gpu), fmt::format("selecting CUDA device {}", gpu));
}

bool is_allowed(int from, int to) {
  int allowed = 0;
  check_cuda(cudaDeviceCanAccessPeer(&allowed, from, to),
             fmt::format("connecting CUDA devices {} and {}", from, to));
  return allowed != 0;
}

cudaError_t enable(int from, int to) {
  select(from);
  const cudaError_t code = cudaDeviceEnablePeerAccess(to, 0);
  if (code != cudaSuccess) static_cast<void>(cudaGetLastError());
  return code == cudaErrorPeerAccessAlreadyEnabled ? cudaSuccess : code;
}

void disable(int from, int to) {
  select(from);
  if (cudaDeviceDisablePeerAccess(to) != cudaSuccess) static_cast<void>(cudaGetLastError());
}

/// Zeros in the GPU's memory.
Memory zeros_on(int gpu, std::string_view what) {
  select(gpu);
  void* start = nullptr;
  check_cuda(cudaMalloc(&start, kBytes), what);
  Memory memory(start);
  check_cuda(cudaMemset(start, 0, kBytes), what);
  check_cuda(cudaDeviceSynchronize(), what);
  return memory;
}

bool arrives(int from, int to) {
  const std::string what = fmt::format("testing copies from CUDA device {} to {}", from, to);
  std::vector<std::uint32_t> sent(kWords);
  for (std::size_t i = 0; i < kWords; ++i) {
    sent[i] = static_cast<std::uint32_t>(i) * 2654435761U + static_cast<std::uint32_t>(from);
  }
  const Memory target = zeros_on(to, what);
  const Memory source = zeros_on(from, what);
  cudaStream_t made = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), what);
  const Stream stream(made);
  check_cuda(cudaMemcpyAsync(source.get(), sent.data(), kBytes, cudaMemcpyHostToDevice, made),
             what);
  check_cuda(cudaMemcpyPeerAsync(target.get(), to, source.get(), from, kBytes, made), what);
  check_cuda(cudaStreamSynchronize(made), what);
  select(to);
  std::vector<std::uint32_t> received(kWords);
  check_cuda(cudaMemcpy(received.data(), target.get(), kBytes, cudaMemcpyDeviceToHost), what);
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
    const cudaError_t code = enable(from, to);
    if (code != cudaSuccess) reason = fmt::format("fail ({})", cudaGetErrorString(code));
  }
  if (reason.empty() && !(arrives(one, other) && arrives(other, one))) {
    reason = "do not arrive, although the driver allows them (an IOMMU or PCIe's ACS may be on)";
  }
  if (reason.empty()) return true;
  for (const auto& [from, to] : ways) disable(from, to);
  log(LogLevel::warning,
      fmt::format("direct copies between CUDA devices {} and {} {}, so copies pass through host "
                  "memory, which takes longer",
                  one, other, reason));
  return false;
}

}  // namespace ballast::device
