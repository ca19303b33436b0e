#include "src/device/cuda/shared_memory.h"

#include <map>
#include <mutex>
#include <utility>

namespace ballast::device {
namespace {

/// The limit of a kernel on a device.
struct Allowed {
  std::mutex mutex;
  std::size_t bytes = 0;
};

Allowed& allowed_to(const void* kernel, int ordinal) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Allowed> all;
  const std::scoped_lock lock(mutex);
  return all[{kernel, ordinal}];
}

}  // namespace

cudaError_t allow_shared_memory(const void* kernel, std::size_t bytes) {
  if (bytes <= kFreelyShared) return cudaSuccess;
  int ordinal = 0;
  if (const cudaError_t code = cudaGetDevice(&ordinal); code != cudaSuccess) return code;
  Allowed& allowed = allowed_to(kernel, ordinal);
  // The call may load the kernel and wait for its device. Launches on other devices do not wait.
  const std::scoped_lock lock(allowed.mutex);
  if (bytes <= allowed.bytes) return cudaSuccess;
  const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(bytes));
  if (code == cudaSuccess) allowed.bytes = bytes;
  return code;
}

}  // namespace ballast::device
