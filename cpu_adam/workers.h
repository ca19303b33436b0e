#pragma once

#include <cfenv>
#include <functional>
#include <memory>
#include <optional>

#include "ballast/core/memory.h"
#include "ballast/core/units.h"

namespace ballast::cpu_adam {

/// Sets this thread to round to nearest with denormals during the object's lifetime. Changing the
/// environment takes as long as updating hundreds of weights, so an object within the lifetime of
/// another one does nothing.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    if (outermost_ = !in_effect(); !outermost_) return;
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
    in_effect() = true;
  }
  ~DefaultFloatingPoint() {
    if (!outermost_) return;
    std::fesetenv(&saved_);
    in_effect() = false;
  }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  static bool& in_effect() {
    thread_local bool is_set = false;
    return is_set;
  }

  std::fenv_t saved_{};
  bool outermost_ = true;
};

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
