#include "src/train/automatic_resume.h"

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/formats/export.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"
#include "src/checkpoint/swap.h"
#include "src/train/run_end.h"

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

}  // namespace ballast::train
