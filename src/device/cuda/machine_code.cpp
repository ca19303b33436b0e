#include "src/device/cuda/machine_code.h"

#include <algorithm>
#include <charconv>
#include <mutex>
#include <set>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/log.h"
#include "ballast/device/device.h"

namespace ballast::device {
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
