#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ballast/core/view.h"
#include "ballast/step/problem.h"

namespace ballast::engine {

// The report of a step: all values of the program with SlotRule::report. Losses are in double
// precision.

/// Places of one class of values: `bytes` per micro-batch, one after the other.
struct ReportPart {
  model::ClassId of = model::kNone;
  Bytes offset = 0;
  Bytes bytes = 0;

  [[nodiscard]] Bytes at(std::uint32_t micro) const { return offset + micro * bytes; }
  /// Returns the numbers of `count` micro-batches from `micro` on.
  [[nodiscard]] std::span<const double> in(HostBytes report, std::uint32_t micro,
                                           std::uint32_t count = 1) const {
    return {reinterpret_cast<const double*>(report.data() + at(micro)),
            count * bytes / sizeof(double)};
  }
};

/// Returns the parts in the order of the program: the losses of the head, then those of the routers
/// if the model has any.
inline std::vector<ReportPart> report_parts(const step::Problem& problem) {
  const std::vector<model::ValueClass>& classes = problem.program().classes;
  std::vector<ReportPart> parts;
  for (model::ClassId id = 0; id < classes.size(); ++id) {
    if (classes[id].slots != model::SlotRule::report) continue;
    const Bytes end = parts.empty() ? 0 : parts.back().at(problem.micro_batches);
    parts.push_back({id, end, classes[id].bytes});
  }
  return parts;
}

}  // namespace ballast::engine
