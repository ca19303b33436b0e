#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "ballast/core/mapping.h"
#include "ballast/core/units.h"

namespace ballast::cpu_adam {

/// The threads of an Updater: a oneTBB arena, pinned to a NUMA node on request.
class Workers {
 public:
  /// `threads` 0: usable_cpus(), at most the number of CPUs of the node. Throws Error(config).
  Workers(int threads, std::optional<int> numa_node);
  ~Workers();

  /// Calls `range(first, last)` on the threads with ranges that together cover each chunk of [0,
  /// count) once. Each thread gets one range, as long as possible, and rounds to nearest with
  /// denormals. Returns when all are done.
  void for_ranges(Elems count, const std::function<void(Elems first, Elems last)>& range) const;

  /// See Updater::allocate.
  [[nodiscard]] Mapping allocate(Bytes bytes) const;

  [[nodiscard]] int threads() const { return threads_; }

 private:
  struct Arena;
  class Node;

  std::unique_ptr<Node> node_;    ///< null without a requested node
  std::unique_ptr<Arena> arena_;  ///< null when the caller's thread does all the work
  int threads_ = 1;
};

}  // namespace ballast::cpu_adam
