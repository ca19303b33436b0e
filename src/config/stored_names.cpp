#include "src/config/stored_names.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <system_error>

#include <fcntl.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"
#include "ballast/text/words.h"

namespace ballast::config {
namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr const char* kIndexSuffix = ".index.json";
constexpr std::string_view kNf4 = ".quant_state.bitsandbytes__nf4";
/// Parts of the names of a text model's tensors in a model of text and images.
constexpr std::string_view kOfLanguage = "language_model.";
constexpr std::string_view kOfText = "text_model.";
/// Suffixes that the formats give to the names of codes, scales and descriptions: bitsandbytes,
/// MXFP4, GPTQ and AWQ, fp8 and compressed-tensors, HQQ.
constexpr std::string_view kOfCodes =
    ".absmax .quant_map .quant_state.bitsandbytes__nf4 .quant_state.bitsandbytes__fp4 .SCB _blocks "
    ".qweight .qzeros .weight_packed .weight_scale .weight_scale_inv .weight_zero_point .codes "
    ".W_q";

/// The index, or the header of a safetensors file; nothing if it is too long.
std::optional<std::string> read_description(const fs::path& path) {
  const auto file = text::open_file(path, O_RDONLY | O_NONBLOCK, ErrorCategory::data);
  const Bytes size = text::regular_file_size(file, path, ErrorCategory::data);
  if (!path.native().ends_with(kIndexSuffix)) return read_header_text(file, path, size).json;
  if (size > kLongestHeader) return {};
  std::string content(size, '\0');
  text::read_fully(file, path, 0, std::as_writable_bytes(std::span(content)));
  return content;
}

}  // namespace

HeaderText read_header_text(const Descriptor& file, const fs::path& path, Bytes size) {
  HeaderText header;
  text::read_fully(file, path, 0, std::as_writable_bytes(std::span(&header.length, 1)));
  if (header.length > kLongestHeader || header.length > size - kLengthBytes) return header;
  header.json.emplace(header.length, '\0');
  text::read_fully(file, path, kLengthBytes, std::as_writable_bytes(std::span(*header.json)));
  return header;
}

std::string name_in_text_model(const std::string& name) {
  constexpr std::string_view kModel = "model.";
  for (const std::string_view wrapper : {kOfLanguage, kOfText}) {
    std::string_view rest = name;
    if (rest.starts_with(kModel)) rest.remove_prefix(kModel.size());
    if (!rest.starts_with(wrapper)) continue;
    const bool inside = rest.size() < name.size();  // "model.language_model."
    rest.remove_prefix(wrapper.size());
    if (inside) return std::string(kModel) + std::string(rest);
    // "language_model." contains the whole class, with its head.
    if (rest.starts_with(kModel) || rest.starts_with("lm_head.")) return std::string(rest);
  }
  return name;
}

std::optional<std::set<std::string>> stored_names(const fs::path& weights) {
  std::error_code ignored;
  fs::path path = weights;
  if (fs::is_directory(path, ignored)) {
    path = weights / "model.safetensors";
    if (!fs::exists(path, ignored)) path += kIndexSuffix;
  }
  if (!fs::exists(path, ignored)) return {};
  try {
    const auto description = read_description(path);
    if (!description) return {};
    const Json json = text::parse_json(*description, path.string());
    const Json* const map = json.find("weight_map");
    std::set<std::string> names;
    for (const auto& [name, value, at] : (map == nullptr ? json : *map).members()) {
      names.insert(name_in_text_model(name));
    }
    return names;
  } catch (const Error&) {
    return {};
  }
}

bool are_quantized(const std::set<std::string>& names) {
  const auto ends = text::words_of(kOfCodes);
  return std::any_of(names.begin(), names.end(), [&ends](const std::string& name) {
    return std::any_of(ends.begin(), ends.end(),
                       [&](std::string_view end) { return name.ends_with(end); });
  });
}

bool is_nf4(const std::set<std::string>& names, const std::string& name) {
  return names.contains(name + std::string(kNf4)) ||
         names.contains(name.substr(name.find('.') + 1) + std::string(kNf4));
}

}  // namespace ballast::config
