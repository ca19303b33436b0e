#pragma once

#include <string>
#include <vector>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {

/// Appends operations to a plan and derives their edges from what they read and write, so that no
/// edge is ever written by hand: a read follows the last write, a write follows the last write and
/// the reads since, within the step and from one run of the plan to the next. Edges that the common
/// lane implies are left out.
class Emitter {
 public:
  Emitter(std::string name, std::size_t buffer_count, std::uint32_t micro_batches);

  /// Adds `operation` (without edges) and returns its id.
  OpId emit(Operation operation);

  /// Adds the edges between two runs and hands the plan over.
  Plan finish();

 private:
  /// What this step has done with a buffer so far.
  struct History {
    OpId last_writer = kNoOp;
    std::vector<OpId> readers;        ///< since the last write
    std::vector<OpId> first_readers;  ///< before the first write
    OpId first_writer = kNoOp;
  };

  void add_edge(std::vector<OpId>& edges, OpId from, const Operation& to) const;

  Plan plan_;
  std::vector<History> history_;
};

}  // namespace ballast::schedule
