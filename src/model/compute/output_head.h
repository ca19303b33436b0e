#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/model/compute.h"

#include "src/model/compute/layer_arguments.h"

namespace ballast::model {

/// Sums over the tiles of a vocabulary or a layer, fp32 [N, H]: rounds them, and runs the backward
/// pass of the norm before the tiles.
template <class T>
class TileSums {
 public:
  TileSums(const Architecture& model, std::size_t tokens, DeviceOps<T>& ops)
      : tokens_(tokens),
        size_(tokens * model.config.hidden_size),
        apart_(model.split.tensor > 1),
        has_layer_tiles_(model.config.layer_tiles > 1),
        has_tiles_(std::any_of(model.blocks.begin(), model.blocks.end(),
                               [](const BlockSpec& block) {
                                 return block.content == BlockContent::router ||
                                        block.content == BlockContent::norm;
                               }) ||
                   head_sums_in_fp32(model, ops)),
        ops_(ops) {}

  /// Whether the gradient of the head's normed rows is summed in fp32.
  [[nodiscard]] static bool head_sums_in_fp32(const Architecture& model, const DeviceOps<T>& ops) {
    return model.config.vocabulary_tiles > 1 || ops.traits.sums_in_parts(model.config.vocab_size);
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
    ops_.elementwise->accumulate(part_, sums, size_);
  }
  /// [N, H], sums in the training type.
  [[nodiscard]] T* rounded() const { return rounded_; }
  void round(const float* sums, T* to) {
    ops_.packing->pack({.rest = sums}, to, size_, partial_, nullptr);
  }
  /// dx = residual (null: 0) + gradient of the norm's input `in`. The gradient of its result is
  /// `given`, or else `sums`, or else rounded(). Adds to the gradient of the norm.
  void norm_backward(const Norm<T>& norm, const T* in, const T* given, const float* sums,
                     const T* residual, T* dx) {
    if (given == nullptr && sums != nullptr) round(sums, rounded_);
    ops_.norms->norm_backward(norm, in, given == nullptr ? rounded_ : given, residual, dx, tokens_);
  }

 private:
  std::size_t tokens_;
  std::size_t size_;
  bool apart_;
  bool has_layer_tiles_;
  bool has_tiles_;
  DeviceOps<T>& ops_;
  float* part_ = nullptr;  ///< [N, H] of one tile
  T* rounded_ = nullptr;
  GradientStats* partial_ = nullptr;  ///< scratch of the rounding
};

/// A vocabulary tile of the output matrix.
template <class T>
struct OutputRows {
  std::size_t number = 0;      ///< index of the tile
  const T* weights = nullptr;  ///< [rows of the tile, H]
  float* gradient = nullptr;   ///< like `weights`; null: not wanted
};

/// A micro-batch of preference pairs, see Port::pairs.
struct Pairs {
  Preference preference;
  DeviceView<double> reference;  ///< [sequences], sums of the reference model's cross-entropy
  /// [N], derivative of the pair's loss with respect to the row's. Written before any gradient.
  DeviceView<float> weights;
};

/// Outputs for the cross-entropy of the rows, in nats.
struct HeadLosses {
  /// Sums over equal parts of the rows, one part per element. With `pairs`: [sequences / 2]
  /// PairResults.
  DeviceView<double> out = {};
  std::optional<Pairs> pairs = {};
};

/// Targets of the rows of a micro-batch, and weights of their losses.
struct RowTargets {
  const std::int32_t* targets = nullptr;  ///< [N]
  const float* weights = nullptr;         ///< [N], weights of the rows' losses; null: 1
};

/// Data per row that the head keeps between tiles. The norm's result comes first, as in the rows of
/// layers.
template <class T>
struct HeadRows {
  T* normed = nullptr;            ///< [N, H]
  RowSum<float>* sums = nullptr;  ///< [N]
  /// [N, H]; null if not wanted, or if the sums are not in fp32.
  float* dnormed = nullptr;
  const T* given = nullptr;  ///< gradient of `normed`, if dnormed does not have it

  static HeadRows take(Bump& bump, std::size_t tokens, std::size_t width) {
    HeadRows rows;
    rows.normed = bump.take<T>(tokens * width);
    rows.sums = bump.take<RowSum<float>>(tokens);
    return rows;
  }
};

/// Final norm, output matrix and cross-entropy. Logits exist for a chunk of rows at a time.
///
/// A large vocabulary is cut into tiles. Either tiles are visited one after the other, twice: in
/// ascending order for the softmax sums of the rows, in descending order for the gradients, with
/// recomputed logits. Or one pass does both and keeps the logits of a chunk for all tiles. Both
/// variants compute the same products and sums in the same order.
template <class T>
class Head {
 public:
  Head(const Architecture& model, const MicroBatchShape& shape, DeviceOps<T>& ops,
       TileSums<T>& tile_sums);

  /// Takes memory, after that of the TileSums.
  void take_memory(Bump& bump);

  [[nodiscard]] std::size_t rows_bytes() const {
    Bump counting;
    static_cast<void>(HeadRows<T>::take(counting, tokens_, width_));
    return in_tiles_ ? counting.used() : 0;
  }
  [[nodiscard]] HeadRows<T> rows_at(std::byte* place) const {
    Bump bump(place);
    return HeadRows<T>::take(bump, tokens_, width_);
  }
  /// Bytes that one pass over several tiles needs; 0 if there is one tile, or if the tiles are on
  /// several tensor places.
  [[nodiscard]] std::size_t one_pass_bytes() const {
    Bump counting;
    static_cast<void>(take_for_one_pass(counting));
    return in_tiles_ && !tile_sums_.apart() ? counting.used() : 0;
  }

  // Tile by tile.

  /// Adds a tile to the sums of the rows. Runs after the norm; tiles in ascending order. Tiles of
  /// several tensor places overwrite the sums.
  void scan(const OutputRows<T>& tile, const std::int32_t* targets, const HeadRows<T>& rows) {
    in_chunks([&](std::size_t first, std::size_t count) {
      scan_chunk(tile, targets, rows, first, count, logits_);
    });
  }
  /// Adds a tile's contribution to rows.dnormed (the last tile overwrites it, and so do tiles of
  /// several tensor places) and to the gradient of the tile, unless they are null. Tiles in
  /// descending order.
  void differentiate(const OutputRows<T>& tile, Accumulation accumulation,
                     const RowTargets& row_targets, float scale, const HeadRows<T>& rows);
  /// Writes the losses, after the scan of all tiles.
  void report_losses(const std::int32_t* targets, const HeadRows<T>& rows,
                     const HeadLosses& losses);
  /// dx = the gradient of the norm's input; adds to the gradient of the norm.
  void end(const Norm<T>& norm, const T* in, const HeadRows<T>& rows, T* dx) {
    tile_sums_.norm_backward(norm, in, rows.given, rows.dnormed, nullptr, dx);
  }

  // All tiles in one pass.

  /// Writes the losses. Requires that there is one tile.
  void forward(const Norm<T>& norm, const OutputRows<T>& tile, const T* in,
               const std::int32_t* targets, const HeadLosses& losses);

  /// Writes the losses, dx, and the gradients of scale * loss; overwrites the gradients of the
  /// tiles or adds to them. `memory`: one_pass_bytes(). Weights of pairs depend on all rows of the
  /// pair, so their chunks are visited twice.
  void train(const Norm<T>& norm, const std::vector<OutputRows<T>>& tiles,
             Accumulation accumulation, const T* in, const std::int32_t* targets, float scale,
             T* dx, const HeadLosses& losses, std::byte* memory);

 private:
  struct OnePass {
    HeadRows<T> rows;
    float* logits = nullptr;  ///< for one chunk, tile by tile
  };
  OnePass take_for_one_pass(Bump& bump) const;

  /// Bytes of logits that bound the rows of a chunk. Visits keep those of one tile, a pass over all
  /// tiles keeps all of them, which may take kTilesInOnePass times the bound. Both have the same
  /// chunks, because sums over rows depend on them.
  [[nodiscard]] Bytes bytes_per_row(const Architecture& model) const;

  /// Calls `work(first, rows)` for each chunk.
  template <class Work>
  void in_chunks(const Work& work) const {
    for (std::size_t first = 0; first < tokens_; first += chunk_) {
      work(first, std::min(chunk_, tokens_ - first));
    }
  }

  [[nodiscard]] LogitTile logits_of(const OutputRows<T>& tile, std::size_t rows,
                                    float* logits) const {
    const VocabularyTile& about = tiles_[tile.number];
    return {logits, rows, logit_row_, about.first, about.rows, cap_, factor_};
  }
  /// Computes the logits of rows [first, first + count).
  void project(const OutputRows<T>& tile, const HeadRows<T>& rows, std::size_t first,
               std::size_t count, float* logits);
  void scan_chunk(const OutputRows<T>& tile, const std::int32_t* targets, const HeadRows<T>& rows,
                  std::size_t first, std::size_t count, float* logits);
  void differentiate_chunk(const OutputRows<T>& tile, Accumulation accumulation,
                           const RowTargets& row_targets, float scale, const HeadRows<T>& rows,
                           std::size_t first, std::size_t count, float* logits);

  std::size_t tokens_;
  std::size_t length_;  ///< tokens per sequence
  std::size_t width_;
  bool in_tiles_;
  float cap_;                          ///< see LogitTile
  float factor_;                       ///< see LogitTile
  std::vector<VocabularyTile> tiles_;  ///< tiles of this tensor place
  std::size_t logit_row_ = 0;          ///< stride of a tile's logits, in floats
  std::size_t chunk_ = 0;              ///< rows per chunk
  bool sums_in_fp32_ = false;          ///< whether the normed rows' gradient is summed in fp32
  DeviceOps<T>& ops_;
  TileSums<T>& tile_sums_;
  HeadRows<T> own_;        ///< used if there is one tile
  float* part_ = nullptr;  ///< a tile's part of the gradient of a chunk of normed rows
  float* logits_ = nullptr;
  double* losses_ = nullptr;  ///< [tokens]
};

}  // namespace ballast::model
