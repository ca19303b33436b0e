#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ballast/core/cpu.h"
#include "ballast/core/gradient_stats.h"
#include "ballast/core/mapping.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/shard.h"

namespace ballast::cpu_adam {

/// Instruction sets compiled in and supported by this CPU, slowest first. The environment variable
/// BALLAST_ISA_MASK (a name) hides all faster ones.
std::vector<Isa> available();

/// The fastest of available().
Isa active();

struct UpdaterOptions {
  int threads = 0;         ///< 0: usable_cpus(), or those of the NUMA node
  std::optional<Isa> isa;  ///< unset: active()
  /// Threads run on the CPUs of this NUMA node (logical number, from 0) and allocate() prefers its
  /// memory.
  std::optional<int> numa_node;
};

/// A memory access pattern with the loads and stores of an update; the fastest one depends on the
/// processor.
struct TouchWay {
  Elems stretch = kCacheLine;  ///< elements of an array before the next array follows; a multiple
                               ///< of this
  bool prefetches = true;      ///< prefetches as far ahead as the update does
  bool streams = false;        ///< non-temporal stores where instruction set and array allow them
  friend bool operator==(const TouchWay&, const TouchWay&) = default;
};

/// The patterns that a benchmark should try, the update's own first.
const std::vector<TouchWay>& touch_ways();

/// Work on elements [first, first + count) of a shard before and after their update, while a core
/// has them in its cache. `first` is a multiple of Codes::kBlock, and `count` too except at the end
/// of the shard. Called on the threads of the update, for each element once.
struct PieceWork {
  std::function<void(Elems first, Elems count)> before;
  std::function<void(Elems first, Elems count)> after;
  /// Most elements of a piece, a multiple of Codes::kBlock. This many narrow ones have been
  /// prefetched by the update of the preceding piece.
  Elems elements = 1024;
};

/// Runs updates on a bounded number of threads. The result is bit-identical for every instruction
/// set, number of threads, order of chunks and division of a range into shards (with Codes: at
/// multiples of Codes::kBlock). Calls on one object must not overlap.
class Updater {
 public:
  /// Throws Error(config) when the instruction set or the NUMA node is not available here.
  explicit Updater(const UpdaterOptions& options = {});
  ~Updater();
  Updater(Updater&&) noexcept;
  Updater& operator=(Updater&&) noexcept;

  /// One update in a single pass over memory. Blocks until done. Throws Error(state) when a
  /// required pointer is null, hyper.step is below 1, or first_element is not a multiple of
  /// Codes::kBlock with Codes.
  void step(const Hyper& hyper, const Shard& shard) const;

  /// Like step() above, and copies every array that changes to that of `saved` first, so that
  /// restore() can undo the step. `saved` has the same formats and size; its null pointers and its
  /// gradient are ignored.
  void step(const Hyper& hyper, const Shard& shard, const Shard& saved) const;

  /// Like step() above, with other work on each piece of the shard. Both functions must be set.
  void step(const Hyper& hyper, const Shard& shard, const PieceWork& around) const;

  /// Copies the arrays of `saved` that are not null back to `shard`.
  void restore(Optimizer optimizer, const Shard& shard, const Shard& saved) const;

  /// Loads and stores every cache line that step() would, without computing: the fastest of
  /// touch_ways() bounds the speed of step(). Only a copy of the weights changes: it becomes zero.
  /// Omits elements after the last multiple of Codes::kBlock and the shared exponents of Codes.
  void touch(Optimizer optimizer, const Shard& shard, const TouchWay& way = {}) const;

  /// Sums in double, in an order that depends only on `size`.
  [[nodiscard]] GradientStats gradient_stats(const Gradient& gradient, Elems size) const;

  /// Zeroed memory in huge pages if the kernel grants them, on the NUMA node if one was requested.
  /// Each part is first touched by a thread of this object. Throws Error(memory).
  [[nodiscard]] Mapping allocate(Bytes bytes) const;

  /// Runs other work on the threads: calls `range(first, last)` with ranges that together cover
  /// each chunk of [0, count) once. Each thread gets one range, as long as possible. Blocks until
  /// all are done; rethrows the first exception.
  void for_ranges(Elems count, const std::function<void(Elems first, Elems last)>& range) const;

  /// Calls `work(i)` once for each of these sizes in elements, so that many small shards do not
  /// wake the threads one by one. Neighbours of at most kSmall elements are divided among the
  /// threads; in their `work`, step() and gradient_stats() may be called for at most that many
  /// elements. For larger ones `work` runs on the calling
  /// thread and may use all threads. Blocks until all are done; rethrows the first exception.
  void for_each(std::span<const Elems> sizes, const std::function<void(std::size_t)>& work) const;

  /// The most elements that step() and gradient_stats() process on the calling thread alone.
  static constexpr Elems kSmall = Elems{64} * 1024;

  [[nodiscard]] Isa isa() const noexcept;
  [[nodiscard]] int threads() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::cpu_adam
