#include "src/config/stored_names.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <system_error>

#include <fcntl.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::config {
namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr const char* kIndexSuffix = ".index.json";
constexpr std::string_view kNf4 = ".quant_state.bitsandbytes__nf4";
/// Ends of the names that the formats give to codes, scales and descriptions: bitsandbytes, MXFP4,
/// GPTQ and AWQ, fp8 and compressed-tensors.
constexpr std::array<std::string_view, 13> kOfCodes = {".absmax",
                                                       ".quant_map",
                                                       kNf4,
                                                       ".quant_state.bitsandbytes__fp4",
                                                       ".SCB",
                                                       "_blocks",
                                                       ".qweight",
                                                       ".qzeros",
                                                       ".weight_packed",
                                                       ".weight_scale",
                                                       ".weight_scale_inv",
                                                       ".weight_zero_point",
                                                       ".codes"};

/// The index, or the header of a safetensors file (whose length comes first).
std::string read_description(const fs::path& path) {
  constexpr Bytes kLongest = 100'000'000;
  const auto file = text::open_file(path, O_RDONLY | O_NONBLOCK, ErrorCategory::data);
  Bytes length = text::regular_file_size(file, path, ErrorCategory::data);
  Bytes first = 0;
  if (!path.native().ends_with(kIndexSuffix)) {
    std::array<std::byte, sizeof(std::uint64_t)> prefix;
    text::read_fully(file, path, 0, prefix);
    first = prefix.size();
    const auto header = std::bit_cast<std::uint64_t>(prefix);
    length = header > length - first ? kLongest + 1 : header;
  }
  if (length > kLongest) throw Error(ErrorCategory::data, "no description of tensors");
  std::string content(length, '\0');
  text::read_fully(file, path, first, std::as_writable_bytes(std::span(content)));
  return content;
}

}  // namespace

std::optional<std::set<std::string>> stored_names(const fs::path& weights) {
  std::error_code ignored;
  fs::path path = weights;
  if (fs::is_directory(path, ignored)) {
    path = weights / "model.safetensors";
    if (!fs::exists(path, ignored)) path += kIndexSuffix;
  }
  if (!fs::exists(path, ignored)) return {};
  try {
    const Json json = text::parse_json(read_description(path), path.string());
    const Json* const map = json.find("weight_map");
    std::set<std::string> names;
    for (const auto& [name, value, at] : (map == nullptr ? json : *map).members()) {
      names.insert(name);
    }
    return names;
  } catch (const Error&) {
    return {};
  }
}

bool are_codes(const std::set<std::string>& names) {
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return std::any_of(kOfCodes.begin(), kOfCodes.end(),
                       [&](std::string_view end) { return name.ends_with(end); });
  });
}

bool is_nf4(const std::set<std::string>& names, const std::string& name) {
  return names.contains(name + std::string(kNf4)) ||
         names.contains(name.substr(name.find('.') + 1) + std::string(kNf4));
}

}  // namespace ballast::config
