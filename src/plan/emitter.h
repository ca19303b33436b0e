#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ballast/plan/plan.h"

namespace ballast::plan {

/// The operations of a plan from which edges start. A plan has up to millions of them, so the edges
/// of an operation are derived without reading the others.
class EdgeSources {
 public:
  EdgeSources() = default;
  explicit EdgeSources(const Plan& plan);

  /// Adds the next operation of the plan.
  void add(const Operation& operation);
  /// Adds an edge from operation `from` to operation `to`, which has the number `id` in its plan,
  /// unless `from` is kNoOp, or a stream implies the edge, or `edges` has it. All edges to an
  /// operation must be added one after the other.
  void add_edge(std::vector<OpId>& edges, OpId from, OpId id, const Operation& to);

 private:
  struct Source {
    std::optional<StreamId> stream;
    OpId last = kNoOp;  ///< the operation to which an edge was last added
  };
  std::vector<Source> sources_;
};

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
  EdgeSources sources_;
  std::vector<Boundary> history_;  ///< by buffer: its uses in the plan so far
  std::vector<OpId> edges_;        ///< edges of the new operation; kept for its memory
};

}  // namespace ballast::plan
