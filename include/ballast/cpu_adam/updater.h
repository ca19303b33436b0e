#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/machine.h"
#include "ballast/core/memory.h"
#include "ballast/cpu_adam/optimizer.h"

namespace ballast::cpu_adam {

/// The memory traffic of one update, per element. Not counted: the shared exponents of Codes (1/256
/// byte per moment; Updater::touch omits them too) and lines that a cache reads before it
/// overwrites them.
struct Traffic {
  struct Array {
    /// "w" weight or fp32 master, "r" its remainder, "c" a write-only copy, "m" first
    /// moment, "v" second moment or sum of squares, "g" gradient.
    std::string_view name;
    Bytes bytes = 0;  ///< size of one element
    bool read = false;
    bool written = false;
  };

  std::vector<Array> arrays;  ///< arrays that the update uses, in the order of their kernel
  Bytes first_moment = 0;     ///< size of one element; 0 if the update has none
  Bytes second_moment = 0;    ///< size of one element; 0 if the update has none

  /// Bytes of one element of the array called `name`; 0 when the update has none.
  [[nodiscard]] Bytes bytes_of(std::string_view name) const;
  /// Bytes read plus bytes written.
  [[nodiscard]] Bytes bytes_per_element() const;
  /// Bytes of memory that the arrays take, per element.
  [[nodiscard]] Bytes stored_per_element() const;
  /// "read w2 r2 m4 v4 g2 + write w2 r2 m4 v4 = 26 bytes/parameter".
  [[nodiscard]] std::string formula() const;
};

/// The traffic of an update with these formats: the same arrays that Updater::step walks through.
Traffic traffic(Optimizer optimizer, Weights::Format weights, DType gradient,
                Moments::Format moments);

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

/// One element of a shard, decoded to float. A moment that is not kept is 0.
struct Element {
  float weight = 0.0F;  ///< the fp32 master
  float first = 0.0F;
  float second = 0.0F;
  float gradient = 0.0F;
  /// With Codes, the smallest magnitude above 0 that the element's block can hold; otherwise 0.
  float first_smallest = 0.0F;
  float second_smallest = 0.0F;
};

/// Decodes element `index` (< size) of a shard, for checks and inspection; slow. This second
/// implementation of the formats shares no code with the kernels.
Element read_element(Optimizer optimizer, const Shard& shard, Elems index);

/// Copies the moments of a shard to floats, each span `size` long. A span that is empty, or whose
/// moment is not kept, is not changed. Throws Error(state) for another length.
void read_moments(Optimizer optimizer, const Shard& shard, std::span<float> first,
                  std::span<float> second);

/// Sets the moments of a shard from floats, the inverse of read_moments(). Values that a format
/// cannot hold are rounded to nearest; a second moment that is not zero does not become zero.
void write_moments(Optimizer optimizer, const Shard& shard, std::span<const float> first,
                   std::span<const float> second);

/// The error of one update against the same update computed in double: the largest distance of the
/// weight and of the moments, each divided by its bound in README.md. 1 or less is correct. NaN
/// where only one of the two is finite, or neither is and they differ. `before` and `after`
/// are the element before and after Updater::step(hyper, shard) with moments in that format.
double reference_error(const Hyper& hyper, Moments::Format moments, const Element& before,
                       const Element& after);

}  // namespace ballast::cpu_adam
