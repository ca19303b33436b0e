#include "src/train/used_directory.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <string>
#include <system_error>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/formats/export.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"
#include "ballast/text/json.h"

#include "src/checkpoint/checkpoint.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr std::array kOwn = {kMetrics, kConfig, kRun, formats::kRunWeights,
                             checkpoint::kCheckpoints};

[[noreturn]] void refuse_foreign(const fs::path& path, const std::string& why) {
  throw Error(ErrorCategory::usage,
              fmt::format("{} {}, so --overwrite does not replace it; choose another run directory "
                          "with --out",
                          path.string(), why));
}

/// Also true for a symbolic link without a target.
bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

bool is_link(const fs::path& path) {
  std::error_code ignored;
  return fs::is_symlink(fs::symlink_status(path, ignored));
}

/// Returns whether `file` is the metrics.jsonl of a run, which is empty for a run without steps.
bool has_rows(const fs::path& file) {
  constexpr std::string_view kBegin = "{\"step\"";
  std::error_code error;
  if (!fs::is_regular_file(file, error)) return false;
  if (fs::file_size(file, error) == 0 && !error) return true;
  std::string head(kBegin.size(), '\0');
  std::ifstream(file, std::ios::binary)
      .read(head.data(), static_cast<std::streamsize>(head.size()));
  return head == kBegin;
}

/// Returns whether `file` is a JSON object with these members, which must be objects or strings.
bool has_members(const fs::path& file, std::string_view first, std::string_view second) {
  try {
    const Json json = text::parse_json(formats::read_small_file(file), file.string());
    return json.find(first) != nullptr && json.find(second) != nullptr;
  } catch (const Error&) {
    return false;
  }
}

void check_checkpoints(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool is_own = name.starts_with("step-") || name.starts_with(".incomplete-") ||
                        name.starts_with(".removed-") || name.starts_with("damaged-");
    if (!is_own || entry->is_symlink(error)) refuse_foreign(entry->path(), "is not a checkpoint");
  }
}

}  // namespace

bool is_of_run_directory(const fs::path& name) {
  return std::find(kOwn.begin(), kOwn.end(), name.string()) != kOwn.end();
}

void refuse_used(const fs::path& file) {
  throw Error(ErrorCategory::usage,
              fmt::format("{} exists: choose another run directory with --out, or give --overwrite "
                          "to replace it",
                          file.string()));
}

void refuse_used_directory(const fs::path& directory, std::string_view ignored) {
  for (const char* name : kOwn) {
    if (name != ignored && is_there(directory / name)) refuse_used(directory / name);
  }
}

void refuse_foreign_files(const fs::path& directory) {
  const auto name_of = [&](const char* name) { return directory / name; };
  if (std::none_of(kOwn.begin(), kOwn.end(), [&](auto name) { return is_there(name_of(name)); })) {
    return;
  }
  // A path with a trailing slash would be resolved through the link.
  const fs::path place = directory.has_filename() ? directory : directory.parent_path();
  if (is_link(place)) {
    refuse_foreign(place, fmt::format("is a symbolic link to {}, which has files of a run",
                                      fs::weakly_canonical(place).string()));
  }
  for (const char* name : kOwn) {
    if (is_link(name_of(name))) refuse_foreign(name_of(name), "is a symbolic link");
  }
  for (const char* name : kOwn) {
    if (!is_there(name_of(name))) continue;
    if (!has_rows(name_of(kMetrics))) {
      refuse_foreign(name_of(name), "is not from a run, which would have metrics.jsonl next to it");
    }
  }
  if (is_there(name_of(kConfig)) && !has_members(name_of(kConfig), "ballast", "data")) {
    refuse_foreign(name_of(kConfig), "is not the config of a run");
  }
  if (is_there(name_of(kRun)) && !has_members(name_of(kRun), "version", "started")) {
    refuse_foreign(name_of(kRun), "is not from a run");
  }
  formats::check_removable(name_of(formats::kRunWeights));
  check_checkpoints(name_of(checkpoint::kCheckpoints));
}

}  // namespace ballast::train
