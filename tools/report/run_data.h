#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ballast/plan/lane_times.h"
#include "ballast/step/plans.h"
#include "ballast/text/json.h"

#include "tools/report/metrics_log.h"

namespace ballast::tools {

/// Operations on lanes over time, for drawing.
struct LaneTimeline {
  struct Slice {
    std::string lane;
    std::string name;
    std::int64_t start = 0;     ///< nanoseconds since the first operation
    std::int64_t duration = 0;  ///< nanoseconds
    std::uint64_t step = 0;     ///< 0: outside of training steps
    std::uint64_t bytes = 0;
    std::vector<std::size_t> after;  ///< slices that it waited for
  };

  bool predicted = false;  ///< true if simulated, false if measured
  std::string source;      ///< description of its source
  std::vector<Slice> slices;
};

/// Reads a file of `ballast train --trace` or `ballast plan --trace`. Throws Error(io), or
/// Error(data) if it is another file.
LaneTimeline read_trace(const std::filesystem::path& file);

/// A prediction of plan::simulate().
LaneTimeline predicted_timeline(const plan::Timeline& timeline, const step::OperationNames& names);

/// Seconds of steps by their number.
using StepSeconds = std::map<std::uint64_t, double>;

/// Columns of the slices, with `critical` for those of the chain that ends last: each is the one
/// that ended last of all that the next one waited for, the one before in its lane included.
/// `steps`: number, beginning and end of each step, `whole` if the beginning is there. A long
/// timeline has the slices of its middle step alone (`left_out`: the others), and short ones of it
/// are joined (`joined`: how many). The whole step is always there.
/// `seconds`: what the metrics say of the steps, if the timeline was measured.
text::Json timeline_json(const LaneTimeline& timeline, const StepSeconds& seconds = {});

/// A run directory, as a report shows it.
class RunData {
 public:
  /// Reads `directory` and the files `traces`. Without traces, reads the one that the run's command
  /// line names, if it exists, and predicts one with this machine's rates. Throws Error(usage) if
  /// it is not a run directory; Error(io); Error(data).
  RunData(std::filesystem::path directory, const std::vector<std::filesystem::path>& traces);

  /// Reads what the run has added. Returns whether there was a change. If the directory cannot be
  /// read any more, because it was removed, that is noted and earlier content is kept.
  bool update();

  [[nodiscard]] const std::string& name() const { return name_; }
  void rename(std::string name) { name_ = std::move(name); }
  [[nodiscard]] const MetricsLog& metrics() const { return log_; }
  [[nodiscard]] const text::Json& config() const { return config_; }
  [[nodiscard]] const text::Json& run() const { return run_; }
  /// Whether a process trains in the directory.
  [[nodiscard]] bool under_way() const { return under_way_; }
  /// `groups`: number of groups of rows in a curve.
  [[nodiscard]] text::Json to_json(std::size_t groups) const;

 private:
  bool update_metrics();
  void read_descriptions();
  void read_traces(const std::vector<std::filesystem::path>& files);
  [[nodiscard]] std::optional<std::filesystem::path> own_trace() const;
  [[nodiscard]] std::uint64_t planned_steps() const;
  [[nodiscard]] std::string state() const;
  [[nodiscard]] text::Json marks() const;
  [[nodiscard]] text::Json totals() const;
  [[nodiscard]] text::Json device_totals(std::uint32_t device) const;

  std::filesystem::path directory_;
  std::string name_;
  MetricsLog log_;
  text::Json config_;  ///< null if it is missing
  text::Json run_;
  std::vector<LaneTimeline> timelines_;
  std::vector<std::string> notes_;
  std::string lost_;  ///< why the directory cannot be read any more
  bool under_way_ = false;
};

/// Keys whose values differ between the runs, as a list of `key` and `values` (null: the run has
/// none).
text::Json differing_keys(const std::vector<RunData>& runs);

}  // namespace ballast::tools
