#include "ballast/formats/settings_kind.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/formats/file_formats.h"
#include "src/formats/format_advice.h"

namespace ballast::formats {
namespace {

/// A kind of JSON file, recognised by its top-level keys.
struct JsonKind {
  std::vector<std::string_view> keys;  ///< all of which it has
  std::string_view kind;
  std::string_view advice;
};

const std::vector<JsonKind> kJsonKinds = {
    {{"upload_gbps"}, "a file of rates", "it is for ballast plan CONFIG --rates FILE"},
    {{"traceEvents"}, "a timeline", "ui.perfetto.dev and ballast report --trace show it"},
    {{"weight_map"}, "an index of weights", "name its folder as model.path of a config"},
    {{"base_model_name_or_path"},
     "the adapter_config.json of PEFT",
     "name its folder as ballast.adapters.path of a config"},
    {{"architectures"}, "the config.json of a model", "name its folder as model.path of a config"},
    {{"model_type"}, "the config.json of a model", "name its folder as model.path of a config"},
    {{"step", "loss"}, "the metrics of a run", "ballast report draws them"},
    {{"command", "version"}, "the record of a run", "its config is config.json next to it"},
    {{"zero_optimization"},
     "a config",
     "rates are measured, or in a file like those in configs/rates"},
    {{"model", "data"},
     "a config",
     "rates are measured, or in a file like those in configs/rates"}};

/// `text` as JSON, even with mistakes that a reader of configs reports; nothing if it is not JSON.
std::optional<text::Json> lenient(std::string_view text) {
  try {
    return text::parse_json(text, "", {.comments = true, .non_finite = true, .repeated = true});
  } catch (const Error&) {
    return {};
  }
}

/// The first JSON object of the file, or null.
text::Json first_object(const std::filesystem::path& path) {
  try {
    const std::string text = text::read_settings(path, "JSON");
    if (auto whole = lenient(text)) return *std::move(whole);
    if (auto line = lenient(text.substr(0, text.find('\n')))) return *std::move(line);
  } catch (const Error&) {
    // Its reader has reported what is wrong.
  }
  return {};
}

/// A config may have the keys of a row of data in its sections.
bool is_config(const text::Json& json) {
  constexpr std::array kSections = {"model",     "data",    "optimizer", "zero_optimization",
                                    "scheduler", "ballast", "aio",       "train_batch_size"};
  return std::any_of(kSections.begin(), kSections.end(),
                     [&](const char* key) { return json.find(key) != nullptr; });
}

std::string explain_json(const std::filesystem::path& path, const text::Json& json,
                         std::string_view wanted) {
  for (const JsonKind& one : kJsonKinds) {
    const bool all = std::all_of(one.keys.begin(), one.keys.end(),
                                 [&](std::string_view key) { return json.find(key) != nullptr; });
    if (all && one.kind != wanted) {
      return fmt::format("{} is {}, not {}: {}", path.string(), one.kind, wanted, one.advice);
    }
  }
  return "";
}

/// Whether the text begins like JSON, or like a comment before it.
bool begins_like_json(const std::filesystem::path& path) {
  try {
    const std::string text = text::read_settings(path, "JSON");
    const std::size_t at = text.find_first_not_of(" \t\r\n\xef\xbb\xbf");
    return at == std::string::npos || std::string_view("{[/#").find(text[at]) != std::string::npos;
  } catch (const Error&) {
    return true;
  }
}

/// Describes text in a format that people write configs in, by the file's extension, or other text.
std::string explain_text(const std::filesystem::path& path, std::string_view wanted) {
  constexpr std::array kEnds = {".yaml", ".yml", ".toml", ".ini", ".py", ".md", ".sh"};
  const std::string end = path.extension().string();
  if (std::find(kEnds.begin(), kEnds.end(), end) == kEnds.end()) {
    if (begins_like_json(path)) return "";
    return fmt::format("{} is text, not {} in JSON", path.string(), wanted);
  }
  return fmt::format("{} is not JSON ({}); write {} in JSON", path.string(), end, wanted);
}

}  // namespace

std::string explain_other_settings(const std::filesystem::path& path, Settings wanted) {
  const std::string_view name = wanted == Settings::config ? "a config" : "a file of rates";
  const text::Json json = first_object(path);
  if (wanted == Settings::config && is_config(json)) return "";
  const FileFormat format = recognise(path);
  const bool packed_json = format == FileFormat::gzip && path.stem().extension() == ".json";
  if (packed_json) {
    return fmt::format("{0} is compressed with gzip; unpack it first (gzip -dk {0})",
                       path.string());
  }
  if (format == FileFormat::json) return explain_json(path, json, name);
  if (format == FileFormat::unknown || format == FileFormat::text) return explain_text(path, name);
  return fmt::format("{} is {}, not {}: {}", path.string(), describe(format), name,
                     reader_of(format).empty()
                         ? advice_for(path, format)
                         : "a config in JSON names files of data and of weights");
}

}  // namespace ballast::formats
