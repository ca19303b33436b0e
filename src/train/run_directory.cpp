#include "src/train/run_directory.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"
#include "ballast/formats/export.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"
#include "ballast/setup/translate.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"
#include "ballast/train/run_options.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"
#include "src/checkpoint/kept_checkpoints.h"

namespace ballast::train {

namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr const char* kMetricsLog = "metrics.jsonl";

/// Returns at most 1 MiB from the beginning or, with `end`, from the end of a file.
std::string edge_of_file(const fs::path& path, bool end) {
  const Descriptor file = text::open_file(path, O_RDONLY, ErrorCategory::io);
  const Bytes size = text::regular_file_size(file, path, ErrorCategory::io);
  std::string content(std::min(size, kMiB), '\0');
  text::read_fully(file, path, end ? size - content.size() : 0,
                   std::as_writable_bytes(std::span(content)));
  return content;
}

[[noreturn]] void refuse_to_begin(const fs::path& found, std::string_view what) {
  throw Error(ErrorCategory::usage,
              fmt::format("{}: {}; choose another run directory with --out, or move it away",
                          found.string(), what));
}

/// Throws unless everything that a new run would remove from `checkpoints` is part of an unfinished
/// checkpoint.
void check_leftovers(const fs::path& checkpoints) {
  std::error_code error;
  for (fs::directory_iterator entry(checkpoints, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (checkpoint::is_leftover(entry->path())) continue;
    refuse_to_begin(entry->path(),
                    "is in the folder of checkpoints, which has no complete checkpoint to continue "
                    "from and would be replaced by a new run");
  }
}

/// Returns the last complete row of metrics.jsonl, if there is one.
std::optional<Json> last_row(const fs::path& directory) {
  const fs::path path = directory / kMetricsLog;
  if (!checkpoint::can_be_found(path)) return std::nullopt;
  std::string text = edge_of_file(path, true);
  text.resize(text.rfind('\n') + 1);  // a row without a newline is incomplete
  if (text.empty()) return std::nullopt;
  text.pop_back();
  try {
    return text::parse_json(text.substr(text.rfind('\n') + 1), path.string(),
                            {.category = ErrorCategory::data});
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool has_other_settings(const fs::path& folder, const config::Settings& settings) {
  try {
    const checkpoint::Checkpoint checkpoint(folder);
    const config::Settings& before = checkpoint.facts().settings;
    return !before.empty() && !config::find_changes(before, settings).empty();
  } catch (const Error&) {
    return false;  // without it, the run is complete
  }
}

}  // namespace

RunDirectory begin_or_continue(const fs::path& directory, bool is_new) {
  if (!checkpoint::checkpoints_of(directory).empty()) return RunDirectory::continued;
  if (is_new) return RunDirectory::fresh;
  check_leftovers(directory / checkpoint::kCheckpoints);
  const fs::path metrics = directory / kMetricsLog;
  const std::string begin = edge_of_file(metrics, false);
  constexpr std::string_view kRow = R"({"step":)";
  if (!begin.starts_with(std::string_view(kRow).substr(0, std::min(kRow.size(), begin.size())))) {
    refuse_to_begin(metrics, "is not the file of a run, whose first line is the row of a step");
  }
  if (checkpoint::can_be_found(directory / formats::kRunWeights)) {
    refuse_to_begin(
        directory / formats::kRunWeights,
        "are trained weights without a checkpoint to continue from, which a new run would replace");
  }
  if (!begin.empty()) {
    log(LogLevel::info,
        fmt::format("{} has no checkpoint yet, so the run begins again; its first step replaces "
                    "the rows in metrics.jsonl",
                    directory.string()));
  }
  return RunDirectory::overwritten;
}

std::optional<FinishedRun> find_finished(const config::Config& config,
                                         const config::Settings& settings) {
  const fs::path& directory = config.ballast.out;
  const std::optional<Json> row = last_row(directory);
  if (!row || !row->is_object()) return std::nullopt;
  const Json* const step = row->find("step");
  const RunEnd end(config);
  if (step == nullptr || !step->is_number() || !end.is_last(step->whole().value_or(0)))
    return std::nullopt;
  FinishedRun run = {.directory = directory, .steps = end.steps()};
  if (checkpoint::can_be_found(directory / formats::kRunWeights))
    run.weights = directory / formats::kRunWeights;
  const std::vector<fs::path> checkpoints = checkpoint::checkpoints_of(directory);
  const bool of_last_step =
      !checkpoints.empty() && checkpoint::step_of(checkpoints.front()) == end.steps();
  if (!end.is_complete(!run.weights.empty(), of_last_step)) return std::nullopt;
  if (!checkpoints.empty()) {
    run.checkpoint = checkpoints.front();
    if (has_other_settings(run.checkpoint, settings)) return std::nullopt;
  }
  const Json* const loss = row->find("loss");
  if (loss != nullptr && loss->is_number()) run.last_loss = loss->number();
  return run;
}

namespace {

namespace fs = std::filesystem;

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

namespace {

namespace fs = std::filesystem;

bool is_same(const struct stat& one, const struct stat& other) {
  return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

}  // namespace

RunPlace::RunPlace(fs::path directory)
    : directory_(std::move(directory)),
      descriptor_(text::open_file(directory_, O_PATH | O_DIRECTORY, ErrorCategory::io)) {}

RunPlace::Whereabouts RunPlace::look() const {
  struct stat here = {};
  struct stat own = {};
  if (::fstat(descriptor_.number(), &own) != 0) return {};
  const bool found = ::stat(directory_.c_str(), &here) == 0;
  if (found ? is_same(here, own) : errno != ENOENT && errno != ENOTDIR) return {};
  return find();
}

RunPlace::Whereabouts RunPlace::find() const {
  constexpr std::string_view kGone = " (deleted)";
  std::error_code error;
  const fs::path name =
      fs::read_symlink(fmt::format("/proc/self/fd/{}", descriptor_.number()), error);
  struct stat named = {};
  struct stat own = {};
  if (error || ::fstat(descriptor_.number(), &own) != 0) return {};
  if (::stat(name.c_str(), &named) == 0 && is_same(named, own)) return {Fate::moved, name};
  if (own.st_nlink > 0 && !name.string().ends_with(kGone)) return {};
  const bool is_free = !fs::exists(directory_, error) ||
                       (fs::is_directory(directory_, error) && fs::is_empty(directory_, error));
  return {is_free ? Fate::deleted : Fate::replaced, {}};
}

RunFolders::RunFolders(const config::Config& config, const engine::Blueprint& blueprint,
                       comm::Ranks* ranks) {
  comm::collective_try(ranks, [&] {
    if (ranks != nullptr && ranks->rank() != 0) unnamed_.emplace_back(config.ballast.out);
    if (blueprint.schedule.bytes(Tier::nvme) == 0) return;
    make_swap_folders(
        setup::swap_options(config, ranks == nullptr ? comm::Launch{} : ranks->launch()));
  });
}

void RunFolders::make_swap_folders(const state::SwapOptions& options) {
  for (const state::SwapPath& path : options.paths) {
    std::error_code ignored;
    if (!path.made_later || std::filesystem::exists(path.directory, ignored)) continue;
    if (path.key.empty()) {
      unnamed_.emplace_back(path.directory);
      continue;
    }
    try {
      named_.emplace_back(path.directory, "swap folder", "choose another");
    } catch (const Error& error) {
      throw error.with_context(path.key);
    }
    log(LogLevel::info, fmt::format("{}: made the folder {} on {}", path.key,
                                    path.directory.string(), path.file_system()));
  }
}

void RunFolders::keep() {
  for (formats::MadeDirectory& folder : named_) folder.keep();
}

}  // namespace ballast::train
