#pragma once

#include <string>
#include <vector>

#include "ballast/plan/plan.h"

namespace ballast::plan {

/// Adds an edge from operation `from` of `plan` to `to`, unless it is implied or already in
/// `edges`.
void add_edge(std::vector<OpId>& edges, const Plan& plan, OpId from, const Operation& to);

/// Appends operations to a plan and derives their edges from their reads and writes, so that no
/// edge is written by hand: a read follows the last write; a write follows the last write and the
/// reads since. Edges implied by a common stream are omitted.
class Emitter {
 public:
  Emitter(std::string name, std::size_t buffer_count, std::uint32_t micro_batches);

  /// Adds `operation` (without lane and edges) and returns its id.
  OpId emit(Operation operation);

  /// Adds the boundaries and returns the plan.
  Plan finish();

 private:
  Plan plan_;
  std::vector<Boundary> history_;  ///< by buffer: its uses in the plan so far
};

}  // namespace ballast::plan
