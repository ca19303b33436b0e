#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "ballast/plan/timeline.h"
#include "ballast/step/names.h"
#include "ballast/text/json.h"

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

}  // namespace ballast::tools
