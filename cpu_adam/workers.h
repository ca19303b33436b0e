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
  /// `threads` 0: usable_cpus(), or as many of them as belong to the node. Throws Error(config).
  Workers(int threads, std::optional<int> numa_node);
  ~Workers();

  /// Calls `range(first, last)` for ranges of chunks that together are [0, count), each chunk once,
  /// with rounding to nearest and denormals whatever the caller's thread has set: a range as long
  /// as possible for each thread. Returns when all are done.
  void for_ranges(Elems count, const std::function<void(Elems first, Elems last)>& range) const;

  /// See Updater::allocate.
  [[nodiscard]] Mapping allocate(Bytes bytes) const;

  [[nodiscard]] int threads() const { return threads_; }

 private:
  struct Arena;
  class Node;

  std::unique_ptr<Node> node_;    ///< null when none was named
  std::unique_ptr<Arena> arena_;  ///< null when the caller's thread does all
  int threads_ = 1;
};

}  // namespace ballast::cpu_adam
