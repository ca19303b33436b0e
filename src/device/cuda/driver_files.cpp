#include "src/device/cuda/driver_files.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>

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

}  // namespace ballast::device
