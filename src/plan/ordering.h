#pragma once

#include <array>
#include <functional>
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

/// The order in which some operations of a plan start, across all lanes of a device.
struct Turns {
  std::array<std::vector<OpId>, kMaxDevices> order;  ///< by device
  std::vector<bool> taken;                           ///< by operation: whether it is in an order
};

/// Returns the turns of the operations that `takes_turn` selects. They have the order in which the
/// operations would start if each operation of the plan took the same time. So they depend on the
/// plan alone, the turns of a lane are in plan order, an operation comes after all operations that
/// it needs, and operations of different lanes alternate as they do in a run.
Turns turns_of(const Plan& plan, const std::function<bool(const Operation&)>& takes_turn);

}  // namespace ballast::plan
