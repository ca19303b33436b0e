#include <array>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/core/suggest.h"
#include "ballast/device/device.h"

#include "src/device/factories.h"

namespace ballast::device {
namespace {

void log_choice(const std::string& refusal) {
  if (refusal.empty()) {
    log(LogLevel::debug, "device: using the GPU");
  } else {
    log(cuda_built_in() ? LogLevel::info : LogLevel::debug,
        "device: using the host device; CUDA is not available: " + refusal);
  }
}

std::string find_gpu_refusal(const DeviceOptions& options) {
  if (std::string refusal = cuda_refusal(); !refusal.empty()) return refusal;
  if (std::string refusal = unsuitable_gpu(options); !refusal.empty()) return refusal;
  return missing_gpu_library();
}

}  // namespace

std::unique_ptr<Device> make_device(const DeviceOptions& options) {
  if (options.kind == "host") return make_host_device(options);
  if (options.kind == "cuda") return make_cuda_device(options);
  if (options.kind == "auto") {
    static std::once_flag said;
    const std::string refusal = gpu_refusal(options);
    std::call_once(said, log_choice, refusal);
    return refusal.empty() ? make_cuda_device(options) : make_host_device(options);
  }
  static const std::array<std::string, 3> choices = {"auto", "host", "cuda"};
  throw Error(ErrorCategory::config, "ballast.device: unknown device '" + options.kind +
                                         "'; choose auto, host or cuda" +
                                         did_you_mean(options.kind, choices));
}

std::string gpu_refusal(const DeviceOptions& options) {
  static std::mutex mutex;
  static std::map<std::pair<std::uint32_t, DType>, std::string> found;
  const std::scoped_lock lock(mutex);
  const std::pair key(options.local_rank, options.type);
  const auto known = found.find(key);
  if (known != found.end()) return known->second;
  return found.emplace(key, find_gpu_refusal(options)).first->second;
}

std::string_view kind_of(const DeviceOptions& options) {
  const bool gpu =
      options.kind == "cuda" || (options.kind == "auto" && gpu_refusal(options).empty());
  return gpu ? "cuda" : "host";
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
