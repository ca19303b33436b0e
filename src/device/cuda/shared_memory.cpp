#include "src/device/cuda/shared_memory.h"

#include <map>
#include <mutex>
#include <utility>

namespace ballast::device {

cudaError_t allow_shared_memory(const void* kernel, std::size_t bytes) {
  if (bytes <= kFreelyShared) return cudaSuccess;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, std::size_t> allowed;
  int ordinal = 0;
  if (const cudaError_t code = cudaGetDevice(&ordinal); code != cudaSuccess) return code;
  const std::scoped_lock lock(mutex);
  std::size_t& most = allowed[{kernel, ordinal}];
  if (bytes <= most) return cudaSuccess;
  const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(bytes));
  if (code == cudaSuccess) most = bytes;
  return code;
}

}  // namespace ballast::device
