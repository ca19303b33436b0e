#include <algorithm>
#include <charconv>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"

#include "src/device/cuda/runtime.h"

namespace ballast::device {

namespace {

constexpr std::string_view kDigits = "0123456789";

bool is_version(std::string_view word) {
  return word.find('.') != std::string_view::npos &&
         word.find_first_not_of("0123456789.") == std::string_view::npos;
}

/// Returns whether `name` is "nvidia0", "nvidia1" and so on.
bool is_gpu_name(std::string_view name) {
  constexpr std::string_view kPrefix = "nvidia";
  if (!name.starts_with(kPrefix) || name.size() == kPrefix.size()) return false;
  return name.substr(kPrefix.size()).find_first_not_of(kDigits) == std::string_view::npos;
}

}  // namespace

std::string driver_version(const std::filesystem::path& root) {
  std::ifstream file(root / "proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    if (is_version(word)) return word;
  }
  return "";
}

bool has_gpu_file(const std::filesystem::path& root) {
  std::error_code error;
  if (std::filesystem::exists(root / "dev/dxg", error)) return true;
  const std::filesystem::directory_iterator files(root / "dev", error);
  if (error) return false;
  return std::any_of(begin(files), end(files),
                     [](const auto& file) { return is_gpu_name(file.path().filename().string()); });
}

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

namespace {

constexpr int kOldestPtx = 80;

std::vector<int> numbers_of(std::string_view codes) {
  std::vector<int> numbers;
  const char* at = codes.data();
  const char* const end = at + codes.size();
  while (at != end) {
    int number = 0;
    const auto [after, failure] = std::from_chars(at, end, number);
    if (failure == std::errc()) numbers.push_back(number);
    at = failure == std::errc() ? after : at + 1;
  }
  return numbers;
}

std::string capability_text(int capability) {
  return fmt::format("{}.{}", capability / 10, capability % 10);
}

}  // namespace

bool compiles_kernels(std::string_view codes, int capability) {
  const std::vector<int> numbers = numbers_of(codes);
  const bool runs = std::ranges::any_of(numbers, [capability](int code) {
    return code / 10 == capability / 10 && code <= capability;
  });
  const bool has_ptx = std::ranges::any_of(
      numbers, [capability](int code) { return code >= kOldestPtx && code <= capability; });
  return has_ptx && !runs;
}

std::string describe_codes(std::string_view codes) {
  std::string text;
  for (const int code : numbers_of(codes)) {
    text += (text.empty() ? "" : ", ") + capability_text(code);
  }
  return text;
}

std::string gpu_code() {
  return describe_codes(kMachineCode);
}

void log_compilation(const std::string& name, int capability) {
  static std::mutex mutex;
  static std::set<int> logged;
  if (!compiles_kernels(kMachineCode, capability)) return;
  const std::scoped_lock lock(mutex);
  if (!logged.insert(capability).second) return;
  log(LogLevel::info,
      fmt::format(
          "device: compiling kernels for this GPU, {} with compute capability {}: this "
          "program has machine code for {} alone; the first start takes up to a minute longer",
          name, capability_text(capability), gpu_code()));
}

}  // namespace ballast::device
