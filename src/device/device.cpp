#include "ballast/device/device.h"

#include <array>
#include <mutex>
#include <string>

#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/core/suggest.h"

#include "src/device/factories.h"

namespace ballast::device {
namespace {

void log_cuda() {
  const std::string refusal = cuda_refusal();
  if (refusal.empty()) {
    log(LogLevel::info,
        "device: using the host device; CUDA was found, but its kernels have not been run on a GPU "
        "yet: set ballast.device to \"cuda\" to use them");
  } else {
    log(cuda_built_in() ? LogLevel::info : LogLevel::debug,
        "device: using the host device; CUDA is not available: " + refusal);
  }
}

}  // namespace

std::unique_ptr<Device> make_device(const DeviceOptions& options) {
  if (options.kind == "host") return make_host_device(options);
  if (options.kind == "cuda") return make_cuda_device(options);
  if (options.kind == "auto") {
    static std::once_flag said;
    std::call_once(said, log_cuda);
    return make_host_device(options);
  }
  static const std::array<std::string, 3> choices = {"auto", "host", "cuda"};
  throw Error(ErrorCategory::config, "ballast.device: unknown device '" + options.kind +
                                         "'; choose auto, host or cuda" +
                                         did_you_mean(options.kind, choices));
}

std::string_view kind_of(const DeviceOptions& options) {
  return options.kind == "cuda" ? "cuda" : "host";
}

bool shares_host_cores(const DeviceOptions& options) {
  return kind_of(options) == "host";
}

Bytes own_memory(const DeviceOptions& options) {
  return kind_of(options) == "cuda" && cuda_refusal().empty() ? free_cuda_memory(options) : 0;
}

std::string gpu_name(const DeviceOptions& options) {
  return kind_of(options) == "cuda" ? cuda_name(options) : "";
}

std::unique_ptr<PlainCopies> make_plain_copies(Device& device, Bytes bytes) {
  return device.kind() == "cuda" ? make_cuda_plain_copies(device, bytes)
                                 : make_host_plain_copies(bytes);
}

}  // namespace ballast::device
