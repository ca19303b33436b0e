#include "tools/io/load.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"

namespace ballast::tools {
namespace {

constexpr std::array<std::string_view, 4> kPatterns = {"read", "write", "mixed", "copy"};

}  // namespace

std::string_view to_string(IoPattern pattern) {
  return kPatterns[static_cast<std::size_t>(pattern)];
}

IoPattern parse_io_pattern(const std::string& name) {
  const auto* const found = std::find(kPatterns.begin(), kPatterns.end(), name);
  if (found != kPatterns.end()) return static_cast<IoPattern>(found - kPatterns.begin());
  const std::vector<std::string> names(kPatterns.begin(), kPatterns.end());
  throw Error(ErrorCategory::usage,
              fmt::format("unknown pattern '{}'{}; choose read, write, mixed or copy", name,
                          did_you_mean(name, names)));
}

IoRegion::IoRegion(const std::filesystem::path& directory, unsigned index, Bytes size,
                   aio::File::Access access)
    : file_(aio::File::create_anonymous(directory, round_up(size, kMiB), access)),
      content_(index, file_.size()) {}

IoRegion::IoRegion(aio::File file) : file_(std::move(file)), content_(0, file_.size()) {}

IoRegion IoRegion::placeholder(Bytes size) {
  return IoRegion(aio::File::create_in_memory(round_up(size, kMiB)));
}

double IoResult::gb_per_second() const {
  return seconds > 0.0 ? 1e-9 * static_cast<double>(bytes()) / seconds : 0.0;
}

double IoResult::cpu_seconds_per_gb() const {
  return bytes() > 0 ? cpu_seconds / (1e-9 * static_cast<double>(bytes())) : 0.0;
}

double IoResult::blocks_per_batch() const {
  return batches > 0 ? static_cast<double>(blocks) / static_cast<double>(batches) : 0.0;
}

}  // namespace ballast::tools
