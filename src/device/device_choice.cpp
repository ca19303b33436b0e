#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"

#include "src/device/implementations.h"

namespace ballast::device {
namespace {

/// The result of looking for a usable GPU.
struct GpuSearch {
  std::string refusal;  ///< reason why there is none, or ""
  /// True if there is a GPU that an installation or another setting would make usable.
  bool remediable = false;
  bool lacks_library = false;  ///< true if plain kernels would run
};

void log_choice(const std::string& refusal) {
  if (refusal.empty()) {
    log(LogLevel::debug, "device: using the GPU");
  } else {
    log(cuda_built_in() ? LogLevel::info : LogLevel::debug,
        "device: using the host device; CUDA is not available: " + refusal);
  }
}

GpuSearch search_gpu(const DeviceOptions& options) {
  if (std::string refusal = cuda_refusal(); !refusal.empty()) return {refusal, has_gpu()};
  if (std::string refusal = unsuitable_gpu(options); !refusal.empty()) {
    return {refusal, !gpu_is_outdated(options)};
  }
  if (!options.needs_libraries) return {};
  const std::string refusal = missing_gpu_library();
  return {refusal, !refusal.empty(), !refusal.empty()};
}

/// Searches once per local rank, type and need of libraries.
const GpuSearch& gpu_search(const DeviceOptions& options) {
  static std::mutex mutex;
  static std::map<std::tuple<std::uint32_t, DType, bool>, GpuSearch> found;
  const std::scoped_lock lock(mutex);
  const std::tuple key(options.local_rank, options.type, options.needs_libraries);
  const auto known = found.find(key);
  if (known != found.end()) return known->second;
  return found.emplace(key, search_gpu(options)).first->second;
}

}  // namespace

std::unique_ptr<Device> make_device(const DeviceOptions& options) {
  require_device(options);
  if (options.kind == "auto") {
    static std::once_flag said;
    std::call_once(said, log_choice, gpu_refusal(options));
  }
  return kind_of(options) == "cuda" ? make_cuda_device(options) : make_host_device(options);
}

void require_device(const DeviceOptions& options) {
  static const std::array<std::string, 3> choices = {"auto", "host", "cuda"};
  if (std::find(choices.begin(), choices.end(), options.kind) == choices.end()) {
    throw Error(ErrorCategory::config, "ballast.device: unknown device '" + options.kind +
                                           "'; choose auto, host or cuda" +
                                           did_you_mean(options.kind, choices));
  }
  if (options.kind == "host") return;
  const GpuSearch& search = gpu_search(options);
  if (search.refusal.empty() || (options.kind == "auto" && !search.remediable)) return;
  const std::string advice =
      !search.remediable
          ? "use \"auto\" or \"host\""
          : fmt::format("{}to train on the CPU on purpose, set ballast.device to \"host\"",
                        search.lacks_library ? "to train on the GPU without it, slowly, set "
                                               "ballast.kernels to \"plain\"; "
                                             : "");
  throw Error(
      ErrorCategory::device,
      fmt::format("ballast.device is \"{}\"{}, but {}; {}", options.kind,
                  options.kind == "auto" ? " and there is a GPU" : "", search.refusal, advice));
}

bool has_unusable_gpu(const DeviceOptions& options) {
  return gpu_search(options).remediable;
}

std::string gpu_refusal(const DeviceOptions& options) {
  return gpu_search(options).refusal;
}

std::string_view kind_of(const DeviceOptions& options) {
  if (options.kind != "auto") return options.kind == "cuda" ? "cuda" : "host";
  require_device(options);
  return gpu_refusal(options).empty() ? "cuda" : "host";
}

bool shares_host_cores(const DeviceOptions& options) {
  return kind_of(options) == "host";
}

Bytes own_memory(const DeviceOptions& options) {
  return kind_of(options) == "cuda" && cuda_refusal().empty() ? free_cuda_memory(options) : 0;
}

std::string gpu_name(const DeviceOptions& options) {
  if (kind_of(options) == "host") return "";
  require_device(options);
  return cuda_name(options);
}

std::unique_ptr<PlainCopies> make_plain_copies(Device& device, Bytes bytes) {
  return device.kind() == "cuda" ? make_cuda_plain_copies(device, bytes)
                                 : make_host_plain_copies(bytes);
}

}  // namespace ballast::device
