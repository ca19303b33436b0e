#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/model/attention.h"

#include "src/model/compute/factories.h"
#include "src/model/host/kernel_tables.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model::host {

/// Threads get multiples of this many elements: whole cache lines of any type, and whole groups of
/// a dropout mask.
inline constexpr std::size_t kStep = 64;

/// State that the operations of the host device share.
template <class T>
class SharedState {
 public:
  SharedState(KernelExtents model, std::size_t team,
              const TypeKernels<T>& table = best_kernels<T>())
      : extents(std::move(model)), threads(team), kernels(table) {
    const std::size_t delta = extents.delta.key_heads > 0 ? 2 * extents.heads.front().width() : 0;
    sum_row_ = round_up(std::max({extents.hidden * 3, extents.widest_sum, delta}), 16);
  }

  /// Takes the memory of sum().
  void take_memory(Bump& bump) {
    sums_ = bump.take<float>(parts_of(extents.shape.tokens()) * 2 * sum_row_);
  }
  /// Number of parts of a sum over rows: one per kRowsOfSum rows, but at most kMaxSums. Threads
  /// share the parts, so the bits of a sum do not depend on the number of threads.
  [[nodiscard]] static std::size_t parts_of(std::size_t rows) {
    constexpr std::size_t kRowsOfSum = 32;
    constexpr std::size_t kMaxSums = 32;
    return std::min((rows + kRowsOfSum - 1) / kRowsOfSum, kMaxSums);
  }
  /// Returns sums of part `part`: the first or second of its two rows.
  [[nodiscard]] float* sum(std::size_t part, std::size_t which) const {
    return sums_ + (2 * part + which) * sum_row_;
  }
  [[nodiscard]] const AttentionShape& heads() const { return extents.heads[selected]; }

  KernelExtents extents;
  std::size_t threads;  ///< size of the OpenMP team
  const TypeKernels<T>& kernels;
  std::size_t selected = 0;  ///< number of the shape that AttentionOps::use_heads() has selected

 private:
  std::size_t sum_row_;
  float* sums_ = nullptr;
};

template <class T>
using State = std::shared_ptr<SharedState<T>>;

// Operations of the facets of ../ops, spread over the OpenMP team of the calling thread. Results do
// not depend on the number of threads.

template <class T>
void add_row_ops(const State<T>& state, DeviceOps<T>& to);
template <class T>
void add_packing_ops(const State<T>& state, DeviceOps<T>& to);
/// Requires elementwise operations.
template <class T>
void add_product_ops(const State<T>& state, DeviceOps<T>& to);
template <class T>
void add_expert_ops(const State<T>& state, DeviceOps<T>& to);
template <class T>
void add_token_ops(const State<T>& state, DeviceOps<T>& to);
template <class T>
void add_attention_ops(const State<T>& state, DeviceOps<T>& to);

/// Makes all operations. `threads`: size of the team.
template <class T>
DeviceOps<T> make_ops(const KernelExtents& extents, std::size_t threads,
                      const MlpRule& mlp_rule = kMlpRule);

}  // namespace ballast::model::host
