#pragma once

#include <string>
#include <vector>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {

/// Appends operations to a plan and derives their edges from what they read and write, so that no
/// edge is ever written by hand: a read follows the last write, a write follows the last write and
/// the reads since. Edges that the common stream implies are left out.
class Emitter {
 public:
  Emitter(std::string name, std::size_t buffer_count, std::uint32_t micro_batches);

  /// Adds `operation` (without lane and edges) and returns its id.
  OpId emit(Operation operation);

  /// Adds the boundaries and hands the plan over.
  Plan finish();

 private:
  void add_edge(std::vector<OpId>& edges, OpId from, const Operation& to) const;

  Plan plan_;
  std::vector<Boundary> history_;  ///< of each buffer, as far as the plan has come
};

}  // namespace ballast::schedule
