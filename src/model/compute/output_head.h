#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ballast/core/memory.h"
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
                                 return block.content == BlockContent::router ||
                                        block.content == BlockContent::norm;
                               }) ||
                   head_sums_in_fp32(model, ops)),
        ops_(ops) {}

  /// Whether the gradient of the head's normed rows is summed in fp32.
  [[nodiscard]] static bool head_sums_in_fp32(const Architecture& model, const Ops& ops) {
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
  Ops& ops_;
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
/// variants compute the same products and sums in the same order. `Ops`: layer.h.
template <class Ops>
class Head {
 public:
  using T = typename Ops::Value;

  Head(const Architecture& model, const MicroBatchShape& shape, Ops& ops, TileSums<Ops>& tile_sums)
      : tokens_(shape.tokens()),
        length_(shape.length),
        width_(model.config.hidden_size),
        in_tiles_(model.config.vocabulary_tiles > 1),
        cap_(static_cast<float>(family(model.config.family).logit_cap(model.config))),
        ops_(ops),
        tile_sums_(tile_sums) {
    for (std::size_t t = 0; t < model.own_vocabulary_tiles(); ++t) tiles_.push_back(model.tile(t));
    logit_row_ = round_up(model.largest_tile(), 16);
    sums_in_fp32_ = TileSums<Ops>::head_sums_in_fp32(model, ops);
    chunk_ = chunk_rows(tokens_, bytes_per_row(model), ops.traits.logit_bytes);
  }

  /// Takes memory, after that of the TileSums.
  void take_memory(Bump& bump) {
    losses_ = bump.take<double>(tokens_);
    logits_ = bump.take<float>(chunk_ * logit_row_);
    if (in_tiles_) {
      if (!tile_sums_.apart()) part_ = bump.take<float>(chunk_ * width_);
      return;
    }
    own_ = HeadRows<T>::take(bump, tokens_, width_);
    if (sums_in_fp32_) own_.dnormed = bump.take<float>(tokens_ * width_);
  }

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
                     const RowTargets& row_targets, float scale, const HeadRows<T>& rows) {
    in_chunks([&](std::size_t first, std::size_t count) {
      project(tile, rows, first, count, logits_);
      differentiate_chunk(tile, accumulation, row_targets, scale, rows, first, count, logits_);
    });
  }
  /// Writes the losses, after the scan of all tiles.
  void report_losses(const std::int32_t* targets, const HeadRows<T>& rows,
                     const HeadLosses& losses) {
    ops_.losses->row_losses(rows.sums, targets, tokens_, losses_);
    if (losses.pairs) {
      const Pairs& pairs = *losses.pairs;
      ops_.losses->dpo_loss({losses_, targets, length_, tokens_ / (2 * length_),
                             pairs.reference.raw(), pairs.weights.raw()},
                            pairs.preference, reinterpret_cast<PairResult*>(losses.out.raw()));
    } else {
      ops_.losses->sum_losses(losses_, tokens_ / losses.out.size(), losses.out.size(),
                              losses.out.raw());
    }
  }
  /// dx = the gradient of the norm's input; adds to the gradient of the norm.
  void end(const Norm<T>& norm, const T* in, const HeadRows<T>& rows, T* dx) {
    tile_sums_.norm_backward(norm, in, rows.given, rows.dnormed, nullptr, dx);
  }

  // All tiles in one pass.

  /// Writes the losses. Requires that there is one tile.
  void forward(const Norm<T>& norm, const OutputRows<T>& tile, const T* in,
               const std::int32_t* targets, const HeadLosses& losses) {
    ops_.norms->norm(norm, in, own_.normed, tokens_);
    scan(tile, targets, own_);
    report_losses(targets, own_, losses);
  }

  /// Writes the losses, dx, and the gradients of scale * loss; overwrites the gradients of the
  /// tiles or adds to them. `memory`: one_pass_bytes(). Weights of pairs depend on all rows of the
  /// pair, so their chunks are visited twice.
  void train(const Norm<T>& norm, const std::vector<OutputRows<T>>& tiles,
             Accumulation accumulation, const T* in, const std::int32_t* targets, float scale,
             T* dx, const HeadLosses& losses, std::byte* memory) {
    Bump bump(memory);
    const OnePass all = tiles.size() == 1 ? OnePass{own_, logits_} : take_for_one_pass(bump);
    const std::size_t step = chunk_ * logit_row_;
    const RowTargets row_targets = {targets, losses.pairs ? losses.pairs->weights.raw() : nullptr};
    const auto scan_tiles = [&](std::size_t first, std::size_t count) {
      for (std::size_t t = 0; t < tiles.size(); ++t) {
        scan_chunk(tiles[t], targets, all.rows, first, count, all.logits + t * step);
      }
    };
    ops_.norms->norm(norm, in, all.rows.normed, tokens_);
    if (losses.pairs) {
      in_chunks(scan_tiles);
      report_losses(targets, all.rows, losses);
    }
    const bool known = losses.pairs && chunk_ >= tokens_;
    in_chunks([&](std::size_t first, std::size_t count) {
      if (!losses.pairs) scan_tiles(first, count);
      for (std::size_t t = tiles.size(); t-- > 0;) {
        float* const logits = all.logits + t * step;
        if (losses.pairs && !known) project(tiles[t], all.rows, first, count, logits);
        differentiate_chunk(tiles[t], accumulation, row_targets, scale, all.rows, first, count,
                            logits);
      }
    });
    end(norm, in, all.rows, dx);
    if (!losses.pairs) report_losses(targets, all.rows, losses);
  }

 private:
  struct OnePass {
    HeadRows<T> rows;
    float* logits = nullptr;  ///< for one chunk, tile by tile
  };
  OnePass take_for_one_pass(Bump& bump) const {
    OnePass all = {HeadRows<T>::take(bump, tokens_, width_)};
    all.rows.dnormed = bump.take<float>(tokens_ * width_);
    all.logits = bump.take<float>(tiles_.size() * chunk_ * logit_row_);
    return all;
  }

  /// Bytes of logits that bound the rows of a chunk. Visits keep those of one tile, a pass over all
  /// tiles keeps all of them, which may take kTilesInOnePass times the bound. Both have the same
  /// chunks, because sums over rows depend on them.
  [[nodiscard]] Bytes bytes_per_row(const Architecture& model) const {
    constexpr Bytes kTilesInOnePass = 4;
    const Bytes all = round_up(model.config.vocab_size, 16) * sizeof(float);
    return std::max(logit_row_ * sizeof(float),
                    all / std::min(model.config.vocabulary_tiles, kTilesInOnePass));
  }

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
    return {logits, rows, logit_row_, about.first, about.rows, cap_};
  }
  /// Computes the logits of rows [first, first + count).
  void project(const OutputRows<T>& tile, const HeadRows<T>& rows, std::size_t first,
               std::size_t count, float* logits) {
    ops_.products->multiply({count, tiles_[tile.number].rows, width_},
                            matrix(rows.normed + first * width_, width_),
                            transposed(tile.weights, width_), matrix(logits, logit_row_));
    if (cap_ > 0.0F) ops_.losses->cap_logits(logits_of(tile, count, logits));
  }
  void scan_chunk(const OutputRows<T>& tile, const std::int32_t* targets, const HeadRows<T>& rows,
                  std::size_t first, std::size_t count, float* logits) {
    project(tile, rows, first, count, logits);
    ops_.losses->sum_logits(logits_of(tile, count, logits), targets + first,
                            tile.number == 0 || tile_sums_.apart(), rows.sums + first);
  }
  void differentiate_chunk(const OutputRows<T>& tile, Accumulation accumulation,
                           const RowTargets& row_targets, float scale, const HeadRows<T>& rows,
                           std::size_t first, std::size_t count, float* logits) {
    // Gradients are narrower than logits. They overwrite them, starting at the start of each row.
    const std::size_t row = logit_row_ * sizeof(float) / sizeof(T);
    const T* const dlogits = reinterpret_cast<const T*>(logits);
    const std::size_t tokens = tiles_[tile.number].rows;
    const std::size_t at = first * width_;
    ops_.losses->logit_gradients(
        logits_of(tile, count, logits), row_targets.targets + first, scale,
        row_targets.weights == nullptr ? nullptr : row_targets.weights + first, rows.sums + first);
    if (!sums_in_fp32_ || rows.dnormed != nullptr) {
      const bool adds = !tile_sums_.apart() && tile.number + 1 < tiles_.size();
      ops_.products->multiply({count, width_, tokens}, matrix(dlogits, row),
                              matrix(tile.weights, width_),
                              sums_in_fp32_ ? matrix(adds ? part_ : rows.dnormed + at, width_)
                                            : matrix(tile_sums_.rounded() + at, width_));
      if (adds) ops_.elementwise->accumulate(part_, rows.dnormed + at, count * width_);
    }
    if (tile.gradient != nullptr) {
      ops_.products->multiply({tokens, width_, count}, transposed(dlogits, row),
                              matrix(rows.normed + at, width_), matrix(tile.gradient, width_),
                              first > 0 || accumulation == Accumulation::later);
    }
  }

  std::size_t tokens_;
  std::size_t length_;  ///< tokens per sequence
  std::size_t width_;
  bool in_tiles_;
  float cap_;                          ///< see LogitTile
  std::vector<VocabularyTile> tiles_;  ///< tiles of this tensor place
  std::size_t logit_row_ = 0;          ///< stride of a tile's logits, in floats
  std::size_t chunk_ = 0;              ///< rows per chunk
  bool sums_in_fp32_ = false;          ///< whether the normed rows' gradient is summed in fp32
  Ops& ops_;
  TileSums<Ops>& tile_sums_;
  HeadRows<T> own_;        ///< used if there is one tile
  float* part_ = nullptr;  ///< a tile's part of the gradient of a chunk of normed rows
  float* logits_ = nullptr;
  double* losses_ = nullptr;  ///< [tokens]
};

}  // namespace ballast::model
