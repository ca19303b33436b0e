#pragma once

#include <cstddef>

#include "ballast/core/units.h"

#include "src/model/spec/block_steps.h"

namespace ballast::model {

/// Places of the norms of heads in tiles of attention. The weights, [head_dim] for queries and for
/// keys or [value_width] for the results of a gated delta net, belong to the block of the norm
/// before attention. Its pass appends them to its result (Port::normed), from which all tiles read
/// them. Each tile writes its part of their gradients to its own slice after the sums
/// (Port::partial_sums), and the norm's backward pass adds the slices in the order of the tiles.
class HeadNorms {
 public:
  HeadNorms() = default;
  /// `activation`: elements of the norm's result and of the sums. `width`: that of the widest norm
  /// of a layer. `tiles`: the largest number of attention tiles in a layer.
  HeadNorms(std::size_t activation, std::size_t width, std::size_t tiles)
      : begin_(round_up(activation, kTensorStep)),
        step_(round_up(width, kTensorStep)),
        tiles_(tiles) {}

  [[nodiscard]] bool empty() const { return tiles_ == 0; }
  /// Elements of queries and keys together, and the offset of the keys. Other norms are in the
  /// place of the queries.
  [[nodiscard]] std::size_t size() const { return 2 * step_; }
  [[nodiscard]] std::size_t keys() const { return step_; }
  /// Returns the appended weights of the norm's result `normed`.
  template <class T>
  [[nodiscard]] T* weights(T* normed) const {
    return normed + begin_;
  }
  [[nodiscard]] float* slice(float* sums, std::size_t tile) const {
    return sums + begin_ + tile * size();
  }
  [[nodiscard]] const float* slice(const float* sums, std::size_t tile) const {
    return sums + begin_ + tile * size();
  }
  /// Elements of Port::normed and of Port::partial_sums; 0 without norms of heads.
  [[nodiscard]] std::size_t rows() const { return empty() ? 0 : begin_ + size(); }
  [[nodiscard]] std::size_t sums() const { return empty() ? 0 : begin_ + tiles_ * size(); }

 private:
  std::size_t begin_ = 0;
  std::size_t step_ = 0;
  std::size_t tiles_ = 0;
};

}  // namespace ballast::model
