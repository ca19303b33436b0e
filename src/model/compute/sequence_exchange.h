#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/model/attention.h"
#include "ballast/model/compute.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model {

/// Exchange of rows against heads around attention, among ranks that share sequences: every rank
/// has a slice of the rows for everything else, and a part of the heads for attention. Source:
/// Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.1. With one slice, nothing is exchanged.
template <class T>
class SequenceExchange {
 public:
  /// Columns of one slice's heads.
  struct Columns {
    std::size_t first = 0;   ///< see Regrouping
    std::size_t others = 0;  ///< see Regrouping
  };

  /// `shapes`: those of the rank's rows in all layers, with all heads.
  SequenceExchange(const std::vector<AttentionShape>& shapes, DeviceOps<T>& ops)
      : shape_(shapes.front()), ops_(ops) {
    for (const AttentionShape& shape : shapes) {
      expects(shape.slices > 0 && shape.kv_heads % shape.slices == 0,
              "sequence parallelism: the ranks cannot share the heads of keys equally");
      widest_ = std::max(widest_, shape.row());
    }
  }

  [[nodiscard]] bool is_needed() const { return shape_.slices > 1; }
  /// Takes the memory for one call.
  void take_memory(Bump& bump) {
    if (!is_needed()) return;
    sent_ = bump.take<T>(shape_.tokens() * widest_);
    received_ = bump.take<T>(shape_.tokens() * widest_);
  }
  /// Sets the shape of the following calls.
  void use_heads(const AttentionShape& shape) { shape_ = shape; }
  /// Sets slice and stream of the following calls.
  void use(const SequenceSlice& slice, device::Stream& stream) {
    slice_ = slice;
    stream_ = &stream;
  }

  /// Columns of [queries | keys | values], and of the results of attention.
  [[nodiscard]] Columns projections() const {
    return {shape_.width() / shape_.slices, shape_.kv_width() / shape_.slices};
  }
  [[nodiscard]] Columns results() const { return {shape_.width() / shape_.slices, 0}; }

  /// Returns the sinks of this rank's heads.
  [[nodiscard]] AttentionSinks<T> own(AttentionSinks<T> sinks) const {
    const std::size_t first = slice_.number * (shape_.heads / shape_.slices);
    if (sinks.logits != nullptr) sinks.logits += first;
    if (sinks.gradient != nullptr) sinks.gradient += first;
    return sinks;
  }

  /// Exchanges this rank's rows of all heads for whole sequences of its heads. `to` may be `from`.
  void to_heads(const Columns& columns, const T* from, T* to) {
    copy(columns, RowOrder::local, from, RowOrder::by_slice, sent_);
    // With one sequence, rows that arrive in the order of their ranks are in order.
    T* const arrived = shape_.sequences == 1 ? to : received_;
    exchange(columns, sent_, arrived);
    if (arrived != to) copy(columns, RowOrder::by_slice, arrived, RowOrder::by_heads, to);
  }
  /// The opposite.
  void to_rows(const Columns& columns, const T* from, T* to) {
    const T* leaving = from;
    if (shape_.sequences > 1) {
      copy(columns, RowOrder::by_heads, from, RowOrder::by_slice, sent_);
      leaving = sent_;
    }
    exchange(columns, leaving, received_);
    copy(columns, RowOrder::by_slice, received_, RowOrder::local, to);
  }

 private:
  void copy(const Columns& columns, RowOrder from_order, const T* from, RowOrder to_order, T* to) {
    ops_.heads->regroup({.slices = shape_.slices,
                         .sequences = shape_.sequences,
                         .length = shape_.length,
                         .first = columns.first,
                         .others = columns.others,
                         .from = from_order,
                         .to = to_order},
                        from, to);
  }
  void exchange(const Columns& columns, const T* from, T* to) {
    const Bytes part = shape_.tokens() * (columns.first + 2 * columns.others) * sizeof(T);
    const Bytes all = part * shape_.slices;
    const std::vector<Bytes> parts(shape_.slices, part);
    slice_.exchange->exchange(*stream_, {reinterpret_cast<const std::byte*>(from), all}, parts,
                              {reinterpret_cast<std::byte*>(to), all}, parts);
  }

  AttentionShape shape_;
  std::size_t widest_ = 0;  ///< longest row of queries, keys and values
  DeviceOps<T>& ops_;
  SequenceSlice slice_;
  device::Stream* stream_ = nullptr;
  T* sent_ = nullptr;      ///< [N, queries | keys | values] by part
  T* received_ = nullptr;  ///< like sent_
};

}  // namespace ballast::model
