#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/model/attention.h"

#include "src/model/compute/layer_arguments.h"
#include "src/model/description/rotary_angles.h"

namespace ballast::model {

/// Rotary positions of one layer: indices into those of the model.
struct RotaryAt {
  std::size_t keys = 0;
  std::size_t queries = 0;
  std::size_t growth = 0;     ///< multiplies whole queries; 0: none
  std::size_t plain = 0;      ///< values at the start of each head that do not rotate
  bool without_keys = false;  ///< true: only queries rotate
};

/// Rotates queries and keys. Owns the tables of cosines and sines of all rotary positions of a
/// model.
template <class T>
class LayerRotation {
 public:
  LayerRotation(std::vector<Rotary> rotaries, const AttentionShape& shape, DeviceOps<T>& ops)
      : rotaries_(std::move(rotaries)), angles_(rotaries_.size()), shape_(shape), ops_(ops) {}

  /// Takes memory that lasts between calls.
  void take_memory(Bump& bump) {
    for (std::size_t i = 0; i < angles_.size(); ++i) {
      const std::size_t half = rotaries_[i].frequencies.size();
      const std::size_t length = shape_.whole_length();
      const bool by_row = rotaries_[i].depends_on_documents(length);
      expects(!by_row || shape_.slices == 1, "angles by document need whole sequences");
      const std::size_t rows = by_row ? shape_.tokens() : length;
      angles_[i] = {.cosine = bump.take<float>(rows * half),
                    .sine = bump.take<float>(rows * half),
                    .half = half,
                    .interleaved = rotaries_[i].interleaved,
                    .by_row = by_row};
    }
    filled_ = false;
  }

  /// Rotates by `positions`, see HeadOps::rotate(); `direction` -1 rotates back. `shape`: that of
  /// the layer. Queries and keys of a row are rotated as one row of heads unless they have
  /// different rotary positions.
  void rotate(const AttentionShape& shape, const RotaryAt& at, T* qkv,
              const std::int32_t* positions, float direction) {
    for (std::size_t i = 0; i < angles_.size(); ++i) {
      const bool used = i == at.keys || i == at.queries;
      const bool stale = angles_[i].by_row ? used : !filled_;
      if (stale) ops_.heads->fill_angles(rotaries_[i], angles_[i], positions);
    }
    filled_ = true;
    const std::size_t all = shape.heads + (at.without_keys ? 0 : shape.kv_heads);
    const std::size_t apart = at.queries == at.keys ? 0 : shape.heads;
    if (at.growth > 0)
      ops_.heads->rotate(qkv, shape.heads, angles_[at.growth], positions, direction);
    qkv += at.plain;
    if (apart > 0) ops_.heads->rotate(qkv, apart, angles_[at.queries], positions, direction);
    ops_.heads->rotate(qkv + apart * shape.head_dim, all - apart, angles_[at.keys], positions,
                       direction);
  }

 private:
  std::vector<Rotary> rotaries_;
  std::vector<Angles> angles_;  ///< one element per rotary
  bool filled_ = false;         ///< whether angles by position are filled; angles by row never are
  AttentionShape shape_;
  DeviceOps<T>& ops_;
};

/// RMSNorms without weights: they are an offset plus zeros.
template <class T>
class UnitNorm {
 public:
  /// `width`: that of the widest row or head.
  UnitNorm(std::size_t width, DeviceOps<T>& ops) : ops_(ops), width_(width) {}

  /// Takes memory that lasts between calls.
  void take_memory(Bump& bump) {
    zeros_ = bump.take<float>(width_);
    zeroed_ = false;
  }
  Norm<T> norm(float offset = 1.0F, float epsilon = 0.0F) {
    if (!zeroed_) ops_.elementwise->zero(zeros_, width_);
    zeroed_ = true;
    return {.weight = reinterpret_cast<const T*>(zeros_), .offset = offset, .epsilon = epsilon};
  }

 private:
  DeviceOps<T>& ops_;
  std::size_t width_;
  float* zeros_ = nullptr;  ///< [width]
  bool zeroed_ = false;
};

}  // namespace ballast::model
