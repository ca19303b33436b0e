#include "src/device/cuda/gpu_facts.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "src/device/cuda/driver_files.h"
#include "src/device/cuda/errors.h"

namespace ballast::device {

std::string cuda_version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string gpu_facts() {
  int ordinal = 0;
  check_cuda(cudaGetDevice(&ordinal), "querying the current CUDA device");
  cudaDeviceProp properties = {};
  check_cuda(cudaGetDeviceProperties(&properties, ordinal),
             fmt::format("querying the properties of CUDA device {}", ordinal));
  std::string driver = driver_version();
  if (driver.empty()) {
    int supported = 0;
    check_cuda(cudaDriverGetVersion(&supported), "querying the version of the driver");
    driver = "for CUDA " + cuda_version_text(supported);
  }
  return fmt::format("{} with {} multiprocessors, driver {}, CUDA {}", properties.name,
                     properties.multiProcessorCount, driver, cuda_version_text(CUDART_VERSION));
}

}  // namespace ballast::device
