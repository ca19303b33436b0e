#include <algorithm>
#include <cerrno>
#include <cmath>

#include <fmt/format.h>
#include <unistd.h>

#include "ballast/config/config.h"
#include "ballast/config/edit.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/text/json.h"

#include "tools/io/paths.h"
#include "tools/tune/io.h"

namespace ballast::tools {
namespace {

using text::Json;

/// "256KiB", or a number of bytes if no unit divides it.
Json exact_bytes(Bytes bytes) {
  if (bytes % kMiB == 0) return fmt::format("{}MiB", bytes / kMiB);
  if (bytes % kKiB == 0) return fmt::format("{}KiB", bytes / kKiB);
  return bytes;
}

/// Rounds to three decimals; at least 0.001, since 0 would mean "not measured".
double rounded(double gbps) {
  return std::max(0.001, std::round(gbps * 1e3) / 1e3);
}

config::AioPath entry_of(const TunedPath& tuned) {
  return {.path = tuned.path,
          .block_size = tuned.setting.block,
          .queue_depth = tuned.setting.depth,
          .backend = config::value_named<config::IoBackend>(tuned.setting.backend).value(),
          .read_gbps = rounded(tuned.rates.read),
          .write_gbps = rounded(tuned.rates.write)};
}

Json json_of(const config::AioPath& entry) {
  return Json::object({{"path", entry.path.string()},
                       {"block_size", exact_bytes(entry.block_size)},
                       {"queue_depth", entry.queue_depth},
                       {"backend", config::name_of(entry.backend)},
                       {"read_gbps", entry.read_gbps},
                       {"write_gbps", entry.write_gbps}});
}

bool may_swap(const config::OffloadSection& section) {
  return !section.tier || *section.tier == Tier::nvme;
}

std::vector<config::Edit> edits_for(const config::Config& config, const IoTuning& tuning) {
  Json entries = Json::array();
  Json folders = Json::array();
  for (const TunedPath& tuned : tuning.paths) {
    entries.push_back(json_of(entry_of(tuned)));
    folders.push_back(tuned.path.string());
  }
  std::vector<config::Edit> edits = {
      {"aio.backend", Json(tuning.common.backend).compact()},
      {"aio.block_size", exact_bytes(tuning.common.block).compact()},
      {"aio.queue_depth", Json(tuning.common.depth).compact()},
      {"aio.paths", entries.pretty(1)},
  };
  const std::string nvme_path =
      (tuning.paths.size() > 1 ? folders : folders.elements().front()).pretty(0);
  if (may_swap(config.zero.optimizer)) {
    edits.push_back({"zero_optimization.offload_optimizer.nvme_path", nvme_path});
  }
  if (may_swap(config.zero.parameters)) {
    edits.push_back({"zero_optimization.offload_param.nvme_path", nvme_path});
  }
  return edits;
}

/// Throws unless `config` has the tuned settings.
void require_tuned(const config::Config& config, const IoTuning& tuning,
                   const std::filesystem::path& file) {
  std::vector<config::AioPath> entries;
  std::vector<std::filesystem::path> folders;
  for (const TunedPath& tuned : tuning.paths) {
    entries.push_back(entry_of(tuned));
    folders.push_back(tuned.path);
  }
  const auto require = [&](bool condition, std::string_view key) {
    if (condition) return;
    throw Error(ErrorCategory::state,
                fmt::format("{}: {} would not get the tuned value; the file was not changed",
                            file.string(), key));
  };
  const config::AioSection& aio = config.aio;
  require(config::name_of(aio.backend) == tuning.common.backend, "aio.backend");
  require(aio.block_size == tuning.common.block, "aio.block_size");
  require(aio.queue_depth == tuning.common.depth, "aio.queue_depth");
  require(aio.paths == entries, "aio.paths");
  for (const auto* section : {&config.zero.optimizer, &config.zero.parameters}) {
    require(!may_swap(*section) || section->nvme_path == folders, "nvme_path");
  }
}

void note_limits(const config::Config& config, const IoTuning& tuning,
                 const std::filesystem::path& file) {
  for (const TunedPath& tuned : tuning.paths) {
    if (tuned.setting.in_flight() <= config.aio.in_flight_bytes) continue;
    log(LogLevel::warning,
        fmt::format("{}: aio.in_flight_bytes is {}, less than the setting of {} needs: {} blocks "
                    "of {}; raise it",
                    file.string(), format_bytes(config.aio.in_flight_bytes), tuned.path.string(),
                    tuned.setting.depth, format_bytes(tuned.setting.block)));
  }
}

}  // namespace

void check_writable_config(const std::filesystem::path& config,
                           const std::vector<std::filesystem::path>& paths) {
  const config::Config before = config::load(config, {});
  const std::filesystem::path target = std::filesystem::canonical(config);
  for (const auto& place : {target, target.parent_path()}) {
    if (access(place.c_str(), W_OK) == 0) continue;
    throw Error(ErrorCategory::io,
                fmt::format("--write {}: {} is not writable", config.string(), place.string()),
                errno);
  }
  IoTuning sample = {.common = {.block = kMiB, .depth = 32, .backend = "threads"}};
  for (const auto& path : paths) {
    sample.paths.push_back(
        {.path = path, .setting = sample.common, .rates = {.read = 1.0, .write = 1.0}});
  }
  config::try_edit(config, edits_for(before, sample),
                   [&](const config::Config& after) { require_tuned(after, sample, config); });
}

void write_tuning(const std::filesystem::path& file, const IoTuning& tuning) {
  const config::Config before = config::load(file, {});
  config::edit_file(file, edits_for(before, tuning),
                    [&](const config::Config& after) { require_tuned(after, tuning, file); });
  note_limits(before, tuning, file);
}

}  // namespace ballast::tools
