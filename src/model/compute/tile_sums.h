#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ballast/core/bump.h"
#include "ballast/model/compute.h"

#include "src/model/compute/layer.h"

namespace ballast::model {

/// Sums over the tiles of a vocabulary or a layer, fp32 [N, H]: rounds them, and runs the backward
/// pass of the norm before the tiles. `Ops`: layer.h.
template <class Ops>
class TileSums {
 public:
  using T = typename Ops::Value;

  TileSums(const Architecture& model, std::size_t tokens, Ops& ops)
      : tokens_(tokens),
        size_(tokens * model.config.hidden_size),
        apart_(model.split.tensor > 1),
        has_layer_tiles_(model.config.layer_tiles > 1),
        has_tiles_(std::any_of(model.blocks.begin(), model.blocks.end(),
                               [](const BlockSpec& block) {
                                 return block.part == LayerPart::router ||
                                        block.part == LayerPart::norm;
                               }) ||
                   head_sums_in_fp32(model)),
        ops_(ops) {}

  /// Whether the gradient of the head's normed rows is summed in fp32.
  [[nodiscard]] static bool head_sums_in_fp32(const Architecture& model) {
    return model.config.vocabulary_tiles > 1 || Ops::sums_in_parts(model.config.vocab_size);
  }

  /// Takes the memory for the rows of one tile, in addition to that of a layer.
  void take_part(Bump& bump) {
    if (has_layer_tiles_ && !apart_) part_ = bump.take<float>(size_);
  }
  void take_memory(Bump& bump) {
    rounded_ = bump.take<T>(size_);
    if (!has_tiles_) return;
    partial_ = bump.take<GradientStats>((size_ + kStatsChunk - 1) / kStatsChunk);
  }

  /// Whether parts of tiles stay apart, because the tiles are on several tensor places.
  [[nodiscard]] bool apart() const { return apart_; }
  /// Returns the memory of tile `number` of this place in `sums`.
  [[nodiscard]] float* part_of(float* sums, std::uint32_t number) const {
    return apart_ ? sums + number * size_ : sums;
  }
  /// Calls compute(float* part), which writes a tile's part [N, H], and adds the part to `sums`.
  /// The tile that `begins` overwrites the sums. A part is complete before it is added, so that
  /// sums do not depend on where it is computed.
  template <class Compute>
  void add_part(float* sums, bool begins, const Compute& compute) {
    if (begins || apart_) return compute(sums);
    compute(part_);
    ops_.accumulate(part_, sums, size_);
  }
  /// [N, H], sums in the training type.
  [[nodiscard]] T* rounded() const { return rounded_; }
  void round(const float* sums, T* to) { ops_.pack({.rest = sums}, to, size_, partial_, nullptr); }
  /// dx = residual (null: 0) + gradient of the norm's input `in`. The gradient of its result is
  /// `given`, or else `sums`, or else rounded(). Adds to the gradient of the norm.
  void norm_backward(const Norm<T>& norm, const T* in, const T* given, const float* sums,
                     const T* residual, T* dx) {
    if (given == nullptr && sums != nullptr) round(sums, rounded_);
    ops_.norm_backward(norm, in, given == nullptr ? rounded_ : given, residual, dx, tokens_);
  }

 private:
  std::size_t tokens_;
  std::size_t size_;
  bool apart_;
  bool has_layer_tiles_;
  bool has_tiles_;
  Ops& ops_;
  float* part_ = nullptr;  ///< [N, H] of one tile
  T* rounded_ = nullptr;
  GradientStats* partial_ = nullptr;  ///< scratch of the rounding
};

}  // namespace ballast::model
