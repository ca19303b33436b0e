#include <algorithm>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/formats/file_formats.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"
#include "ballast/train/trainer.h"

#include "src/train/run_inputs.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using text::Json;

/// Returns the key that reads a file of `format`; "" if the content does not decide.
std::string_view kind_of(formats::FileFormat format) {
  using formats::FileFormat;
  if (format == FileFormat::unknown || format == FileFormat::git_lfs) return "";
  if (format == FileFormat::megatron_index) return "tokens";
  const std::string_view reader = formats::reader_of(format);
  return reader.empty() ? "text" : reader;
}

/// The content decides; if it does not, the name.
std::string_view kind_of(const fs::path& file) {
  const std::string extension = file.extension().string();
  const bool binary = extension == ".bin" || extension == ".npy";
  if (const auto kind = kind_of(formats::recognise(file)); !kind.empty()) {
    return kind == "text" && binary ? "tokens" : kind;
  }
  if (extension == ".safetensors") return "documents";
  return binary ? "tokens" : "text";
}

/// Documents and tokens in a folder take precedence over its texts.
std::string_view kind_of_folder(const fs::path& folder) {
  std::string_view found = "text";
  std::error_code error;
  for (fs::recursive_directory_iterator entry(folder, error);
       !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const std::string extension = entry->path().extension().string();
    if (extension == ".safetensors") return kind_of(entry->path());
    if (extension == ".bin" || extension == ".npy") found = "tokens";
  }
  return found;
}

std::string_view kind_of(const std::string& file) {
  std::error_code ignored;
  return fs::is_directory(file, ignored) ? kind_of_folder(file) : kind_of(fs::path(file));
}

/// Returns the kind of the files. Throws Error(usage) if there are several.
std::string_view kind_of_all(const std::vector<std::string>& files) {
  const std::string_view kind = kind_of(files.front());
  for (const std::string& file : files) {
    const std::string_view other = kind_of(file);
    if (other == kind) continue;
    throw Error(ErrorCategory::usage,
                fmt::format("--data: {} is a file of {} and {} one of {}; give one kind "
                            "(.safetensors: documents, .bin and .npy: tokens, others: text)",
                            files.front(), kind, file, other));
  }
  return kind;
}

/// Returns the absolute paths as a JSON array.
std::string absolute_paths(const std::vector<std::string>& files) {
  Json names = Json::array();
  for (const std::string& file : files) names.push_back(fs::absolute(file).string());
  return names.compact();
}

}  // namespace

std::vector<std::string> data_overrides(const std::vector<std::string>& files) {
  if (files.empty()) return {};
  const std::string_view kind = kind_of_all(files);
  const std::string names = absolute_paths(files);
  std::vector<std::string> overrides;
  for (const std::string_view other : {"text", "tokens", "documents", "pairs"}) {
    overrides.push_back(fmt::format("data.{}={}", other, other == kind ? names : "[]"));
  }
  return overrides;
}

std::vector<std::string> evaluation_data_overrides(const std::vector<std::string>& files) {
  std::vector<std::string> overrides = data_overrides(files);
  if (files.empty()) return overrides;
  overrides.push_back(fmt::format("data.eval={}", absolute_paths(files)));
  overrides.emplace_back("data.held_out=null");
  return overrides;
}

std::uint64_t usual_length(const fs::path& folder) {
  const fs::path file = folder / config::kCheckpointConfig;
  const Json json = config::text_model_of(
      text::parse_json(text::read_settings(file, "model"), file.string()), file);
  for (const char* key : {"max_position_embeddings", "n_positions"}) {
    const Json* const most = json.find(key);
    if (most == nullptr || !most->is_number() || !(most->number() >= 1.0)) continue;
    return static_cast<std::uint64_t>(std::min(most->number(), double{kFolderLength}));
  }
  return kFolderLength;
}

}  // namespace ballast::train
