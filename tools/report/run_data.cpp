#include "tools/report/run_data.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/checkpoint/checkpoints.h"
#include "ballast/comm/agreement.h"
#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/core/places.h"
#include "ballast/plan/lane_times.h"
#include "ballast/plan/simulator.h"
#include "ballast/setup/forecast.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "tools/report/metrics_log.h"

namespace ballast::tools {
namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr std::string_view kCurves =
    "loss eval_loss grad_norm loss_scale lr tokens_per_second step_seconds nvme_bytes_written "
    "experts.balance_loss experts.router_z_loss experts.largest_load experts.idle rewards.margin "
    "rewards.accuracy";

/// Whether a process holds the lock that a run takes on its metrics. Does not take it.
bool is_locked(const fs::path& file) {
  struct stat status = {};
  if (::stat(file.c_str(), &status) != 0) return false;
  const std::string wanted =
      fmt::format(" {:02x}:{:02x}:{} ", major(status.st_dev), minor(status.st_dev), status.st_ino);
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    if (line.find("FLOCK") != std::string::npos && line.find(wanted) != std::string::npos) {
      return true;
    }
  }
  return false;
}

void check_run_directory(const fs::path& directory) {
  std::error_code error;
  if (!fs::exists(directory, error)) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} does not exist; name the directory of a run (ballast train --out)",
                            directory.string()));
  }
  if (!fs::is_directory(directory, error) || !fs::exists(directory / "metrics.jsonl", error)) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} is not a run directory: it has no metrics.jsonl; name the one that "
                            "ballast train --out has made",
                            directory.string()));
  }
}

/// The timeline that this machine's rates predict for the run, if they are known and the run was
/// made on this machine.
std::optional<LaneTimeline> predict_run(const fs::path& file, const Json& run) {
  const Json* host = run.find("host");
  const Json* plan = run.find("plan");
  const Json* chosen = plan == nullptr ? nullptr : plan->find("chosen");
  if (host == nullptr || chosen == nullptr || host->text() != comm::host_name())
    return std::nullopt;
  std::vector<std::string> choices;
  for (const auto& [key, value, at] : chosen->members())
    choices.push_back(key + "=" + value.compact());
  try {
    const engine::Blueprint blueprint = setup::draw_blueprint(config::load(file, choices));
    const auto prediction =
        calibrate::RunPrediction::find(setup::translate(config::load(file, {})), blueprint);
    if (!prediction) return std::nullopt;
    const auto spans = plan::simulate(blueprint.schedule, prediction->rates(), {.timeline = true});
    return predicted_timeline(spans.timeline, step::OperationNames(blueprint.problem));
  } catch (const Error&) {
    return std::nullopt;  // such as a config whose files are gone
  }
}

std::uint64_t count_of(const Json* value) {
  return value == nullptr ? 0 : value->whole().value_or(0);
}

const Json* member(const Json& object, std::initializer_list<const char*> keys) {
  const Json* at = &object;
  for (const char* key : keys) {
    at = at->find(key);
    if (at == nullptr) return nullptr;
  }
  return at;
}

/// Ignores errors: a report shows what it can.
std::vector<fs::path> checkpoints_if_readable(const fs::path& run) {
  try {
    return checkpoint::checkpoints_of(run);
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

RunData::RunData(fs::path directory, const std::vector<fs::path>& traces)
    : directory_(std::move(directory)),
      name_((fs::absolute(directory_) / "").lexically_normal().parent_path().filename().string()),
      log_(directory_ / "metrics.jsonl") {
  check_run_directory(directory_);
  update_metrics();
  under_way_ = is_locked(directory_ / "metrics.jsonl");
  read_descriptions();
  read_traces(traces);
}

bool RunData::update() {
  bool changed = false;
  std::string lost;
  try {
    changed = update_metrics();
  } catch (const Error& error) {
    lost = fmt::format("The run cannot be read any more: {}. The page shows what was read before.",
                       error.what());
  }
  changed = std::exchange(lost_, lost) != lost || changed;
  const bool was = std::exchange(under_way_, is_locked(directory_ / "metrics.jsonl"));
  return changed || was != under_way_;
}

bool RunData::update_metrics() {
  const std::size_t before = log_.rows();
  const std::uint64_t restarts = log_.restarts();
  const bool changed = log_.update();
  // Another run may have started in the directory.
  if ((before == 0 && log_.rows() > 0) || restarts != log_.restarts()) read_descriptions();
  return changed;
}

/// Reads config.json and run.json, which a run writes with its first row. A damaged file is noted.
void RunData::read_descriptions() {
  notes_.clear();
  for (const auto& [name, target] :
       {std::pair("config.json", &config_), std::pair("run.json", &run_)}) {
    std::error_code ignored;
    *target = Json();
    if (!fs::exists(directory_ / name, ignored)) {
      notes_.push_back(fmt::format("The directory has no {}.", name));
      continue;
    }
    try {
      *target = text::parse_json(text::read_settings(directory_ / name, "run"),
                                 (directory_ / name).string(), {.comments = true});
    } catch (const Error& error) {
      notes_.push_back(fmt::format("{} is left out: {}", name, error.what()));
    }
  }
}

/// The trace that the run's command line names.
std::optional<fs::path> RunData::own_trace() const {
  const Json* command = run_.find("command");
  const Json* folder = run_.find("working_directory");
  if (command == nullptr || folder == nullptr) return std::nullopt;
  const std::vector<Json>& words = command->elements();
  const std::string prefix = "--trace=";
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i].text();
    if (word.starts_with(prefix)) return fs::path(folder->text()) / word.substr(prefix.size());
    if (word == "--trace" && i + 1 < words.size())
      return fs::path(folder->text()) / words[i + 1].text();
  }
  return std::nullopt;
}

void RunData::read_traces(const std::vector<fs::path>& files) {
  for (const fs::path& file : files) timelines_.push_back(read_trace(file));
  if (!files.empty()) return;
  const std::optional<fs::path> own = own_trace();
  std::error_code ignored;
  if (!own) return;
  if (!fs::exists(*own, ignored)) {
    notes_.push_back(fmt::format("The trace of this run is not there: {}.", own->string()));
    return;
  }
  try {
    timelines_.push_back(read_trace(*own));
    auto prediction = predict_run(directory_ / "config.json", run_);
    if (prediction) timelines_.push_back(std::move(*prediction));
  } catch (const Error& error) {
    notes_.push_back(fmt::format("The trace is left out: {}.", error.what()));
  }
}

std::uint64_t RunData::planned_steps() const {
  return count_of(member(config_, {"ballast", "steps"}));
}

/// Returns "finished", "under way", "ended early", or "not started".
std::string RunData::state() const {
  if (under_way_) return "under way";
  if (log_.rows() == 0) return "not started";
  const std::uint64_t planned = planned_steps();
  if (planned == 0) return "ended";
  return log_.steps().back() >= planned ? "finished" : "ended early";
}

/// Steps at which something happened, as a list of `step` and `kind`. Of many similar marks only
/// some are returned.
Json RunData::marks() const {
  constexpr std::size_t kMax = 500;
  Json list = Json::array();
  Json counts = Json::object();
  const auto add = [&](const char* kind, const std::vector<std::uint64_t>& steps) {
    counts[kind] = steps.size();
    const std::size_t stride = (steps.size() + kMax - 1) / kMax;
    for (std::size_t i = 0; i < steps.size(); i += stride) {
      list.push_back(Json::object({{"step", steps[i]}, {"kind", kind}}));
    }
  };
  const auto where = [&](const std::string& key, auto holds) {
    std::vector<std::uint64_t> steps;
    double before = 0.0;
    const MetricsLog::Column column = log_.column(key);
    for (std::size_t i = 0; i < column.size(); ++i) {
      if (holds(column[i], before)) steps.push_back(log_.steps()[i]);
      if (std::isfinite(column[i])) before = column[i];
    }
    return steps;
  };
  const auto set = [](double value, double) { return value == 1.0; };
  add("update skipped", where("skipped", set));
  add("updates repeated", where("rolled_back", set));
  add("data left out",
      where("skipped_batches", [](double value, double before) { return value > before; }));
  add("loss not finite", where("loss", [](double value, double) { return std::isinf(value); }));
  std::vector<std::uint64_t> checkpoints;
  for (const fs::path& folder : checkpoints_if_readable(directory_)) {
    const std::string number = folder.filename().string().substr(std::string("step-").size());
    checkpoints.push_back(std::strtoull(number.c_str(), nullptr, 10));
  }
  std::reverse(checkpoints.begin(), checkpoints.end());
  add("checkpoint", checkpoints);
  return Json::object({{"list", list}, {"counts", counts}});
}

Json RunData::totals() const {
  const MetricsLog::Column seconds = log_.column("step_seconds");
  double training = 0.0;
  for (const double value : seconds) training += std::isfinite(value) ? value : 0.0;
  double tokens = 0.0;
  for (const double value : log_.column("tokens")) tokens += std::isfinite(value) ? value : 0.0;
  const double written = log_.last("nvme_bytes_written");
  Json totals = Json::object({{"training_seconds", training},
                              {"tokens", tokens},
                              {"median_step_seconds", median_of(log_, "step_seconds")},
                              {"median_tokens_per_second", median_of(log_, "tokens_per_second")},
                              {"nvme_bytes_written", written}});
  for (const char* key : {"loss", "eval_loss", "lr", "grad_norm"})
    totals["last"][key] = log_.last(key);
  const MetricsLog::Column losses = log_.column("loss");
  totals["ends_not_finite"] = !losses.empty() && losses.back() == MetricsLog::kNotFinite;
  for (const Tier tier : kTiers) {
    const std::string name(to_string(tier));
    totals["peak_bytes"][name] = log_.last("peak_bytes." + name);
  }
  const std::uint32_t devices = device_count(log_);
  for (const plan::Lane lane : plan::lanes_of(devices)) {
    const std::string name(to_string(lane));
    const std::string times = "lanes." + name;
    totals["median_lanes"][name] =
        Json::object({{"busy_seconds", median_of(log_, times + ".busy_seconds")},
                      {"stalled_seconds", median_of(log_, times + ".stalled_seconds")},
                      {"bytes", median_of(log_, "bytes." + name)}});
  }
  totals["devices"] = Json::array();
  for (std::uint32_t d = 0; d < devices && devices > 1; ++d) {
    totals["devices"].push_back(device_totals(d));
  }
  // The first row also includes the writes of the initial states.
  const MetricsLog::Column all = log_.column("nvme_bytes_written");
  if (all.size() > 1 && written > all.front() && training > seconds.front()) {
    const std::vector<Bytes> bytes = {static_cast<Bytes>(written - all.front())};
    const auto wear = setup::estimate_wear(bytes, training - seconds.front());
    if (wear) totals["wear"] = setup::describe(*wear);
  }
  return totals;
}

/// Medians of a device's lanes over the steps, and its memory.
Json RunData::device_totals(std::uint32_t device) const {
  const std::string prefix = fmt::format("devices.{}.", device);
  Json out = Json::object({{"peak_bytes", log_.last(prefix + "peak_bytes")}});
  for (const plan::Lane lane : plan::kDrawnLanes) {
    if (!is_per_device(lane)) continue;
    const std::string times = fmt::format("{}lanes.{}.", prefix, to_string(lane));
    out["median_lanes"][to_string(lane)] =
        Json::object({{"busy_seconds", median_of(log_, times + "busy_seconds")},
                      {"stalled_seconds", median_of(log_, times + "stalled_seconds")}});
  }
  return out;
}

Json RunData::to_json(std::size_t groups) const {
  constexpr std::size_t kMeans = 300;
  Json series = Json::object();
  for (const std::string_view word : text::words_of(kCurves)) {
    const std::string key(word);
    series.add(key, series_json(log_, key, groups));
  }
  Json notes = Json::array();
  if (!lost_.empty()) notes.push_back(lost_);
  for (const std::string& note : log_.notes()) notes.push_back(note);
  for (const std::string& note : notes_) notes.push_back(note);
  Json timelines = Json::array();
  StepSeconds seconds;
  const MetricsLog::Column times = log_.column("step_seconds");
  for (std::size_t i = 0; i < times.size() && !timelines_.empty(); ++i) {
    if (std::isfinite(times[i])) seconds[log_.steps()[i]] = times[i];
  }
  for (const LaneTimeline& timeline : timelines_) {
    timelines.push_back(timeline_json(timeline, seconds));
  }
  return Json::object({{"name", name_},
                       {"directory", fs::absolute(directory_).lexically_normal().string()},
                       {"state", state()},
                       {"rows", log_.rows()},
                       {"first_step", log_.rows() == 0 ? 0 : log_.steps().front()},
                       {"last_step", log_.rows() == 0 ? 0 : log_.steps().back()},
                       {"planned_steps", planned_steps()},
                       {"notes", notes},
                       {"series", series},
                       {"means", means_json(log_, kMeans)},
                       {"marks", marks()},
                       {"totals", totals()},
                       {"timelines", timelines},
                       {"config", config_},
                       {"run", run_}});
}

Json differing_keys(const std::vector<RunData>& runs) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<Json>> values;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const auto take = [&](const std::string& key, const Json& value) {
      const auto [found, added] = values.try_emplace(key, runs.size());
      if (added) order.push_back(key);
      found->second[r] = value;
    };
    for_each_value(runs[r].config(), take);
    for (const char* key : {"version", "host", "cpu", "device", "ranks", "io_backend"}) {
      if (const Json* value = runs[r].run().find(key)) take(std::string("run: ") + key, *value);
    }
  }
  Json list = Json::array();
  for (const std::string& key : order) {
    const std::vector<Json>& all = values.at(key);
    std::set<std::string> distinct;
    Json row = Json::array();
    for (const Json& value : all) {
      distinct.insert(value.compact());
      row.push_back(value);
    }
    if (distinct.size() > 1) list.push_back(Json::object({{"key", key}, {"values", row}}));
  }
  return list;
}

}  // namespace ballast::tools
