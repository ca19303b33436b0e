#include "src/model/compute/output_head.h"

#include <algorithm>

#include "ballast/core/dtype.h"
#include "ballast/model/family.h"

#include "src/model/compute/matrix.h"

namespace ballast::model {

template <class T>
Head<T>::Head(const Architecture& model, const MicroBatchShape& shape, DeviceOps<T>& ops,
              TileSums<T>& tile_sums)
    : tokens_(shape.tokens()),
      length_(shape.length),
      width_(model.config.hidden_size),
      in_tiles_(model.config.vocabulary_tiles > 1),
      cap_(static_cast<float>(model.outer.logit_cap)),
      factor_(static_cast<float>(model.outer.logit_factor)),
      ops_(ops),
      tile_sums_(tile_sums) {
  for (std::size_t t = 0; t < model.own_vocabulary_tiles(); ++t) tiles_.push_back(model.tile(t));
  logit_row_ = round_up(model.largest_tile(), 16);
  sums_in_fp32_ = TileSums<T>::head_sums_in_fp32(model, ops);
  chunk_ = chunk_rows(tokens_, bytes_per_row(model), ops.traits.logit_bytes);
}

template <class T>
void Head<T>::take_memory(Bump& bump) {
  losses_ = bump.take<double>(tokens_);
  logits_ = bump.take<float>(chunk_ * logit_row_);
  if (in_tiles_) {
    if (!tile_sums_.apart()) part_ = bump.take<float>(chunk_ * width_);
    return;
  }
  own_ = HeadRows<T>::take(bump, tokens_, width_);
  if (sums_in_fp32_) own_.dnormed = bump.take<float>(tokens_ * width_);
}

template <class T>
void Head<T>::differentiate(const OutputRows<T>& tile, Accumulation accumulation,
                            const RowTargets& row_targets, float scale, const HeadRows<T>& rows) {
  in_chunks([&](std::size_t first, std::size_t count) {
    project(tile, rows, first, count, logits_);
    differentiate_chunk(tile, accumulation, row_targets, scale, rows, first, count, logits_);
  });
}

template <class T>
void Head<T>::report_losses(const std::int32_t* targets, const HeadRows<T>& rows,
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

template <class T>
void Head<T>::forward(const Norm<T>& norm, const OutputRows<T>& tile, const T* in,
                      const std::int32_t* targets, const HeadLosses& losses) {
  ops_.norms->norm(norm, in, own_.normed, tokens_);
  scan(tile, targets, own_);
  report_losses(targets, own_, losses);
}

template <class T>
void Head<T>::train(const Norm<T>& norm, const std::vector<OutputRows<T>>& tiles,
                    Accumulation accumulation, const T* in, const std::int32_t* targets,
                    float scale, T* dx, const HeadLosses& losses, std::byte* memory) {
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

template <class T>
auto Head<T>::take_for_one_pass(Bump& bump) const -> OnePass {
  OnePass all = {HeadRows<T>::take(bump, tokens_, width_)};
  all.rows.dnormed = bump.take<float>(tokens_ * width_);
  all.logits = bump.take<float>(tiles_.size() * chunk_ * logit_row_);
  return all;
}

template <class T>
Bytes Head<T>::bytes_per_row(const Architecture& model) const {
  constexpr Bytes kTilesInOnePass = 4;
  const Bytes all = round_up(model.config.vocab_size, 16) * sizeof(float);
  return std::max(logit_row_ * sizeof(float),
                  all / std::min(model.config.vocabulary_tiles, kTilesInOnePass));
}

template <class T>
void Head<T>::project(const OutputRows<T>& tile, const HeadRows<T>& rows, std::size_t first,
                      std::size_t count, float* logits) {
  ops_.products->multiply({count, tiles_[tile.number].rows, width_},
                          matrix(rows.normed + first * width_, width_),
                          transposed(tile.weights, width_), matrix(logits, logit_row_));
  if (cap_ > 0.0F || factor_ != 1.0F) ops_.losses->cap_logits(logits_of(tile, count, logits));
}

template <class T>
void Head<T>::scan_chunk(const OutputRows<T>& tile, const std::int32_t* targets,
                         const HeadRows<T>& rows, std::size_t first, std::size_t count,
                         float* logits) {
  project(tile, rows, first, count, logits);
  ops_.losses->sum_logits(logits_of(tile, count, logits), targets + first,
                          tile.number == 0 || tile_sums_.apart(), rows.sums + first);
}

template <class T>
void Head<T>::differentiate_chunk(const OutputRows<T>& tile, Accumulation accumulation,
                                  const RowTargets& row_targets, float scale,
                                  const HeadRows<T>& rows, std::size_t first, std::size_t count,
                                  float* logits) {
  // Gradients are narrower than logits. They overwrite them, starting at the start of each row.
  const std::size_t row = logit_row_ * sizeof(float) / sizeof(T);
  const T* const dlogits = reinterpret_cast<const T*>(logits);
  const std::size_t tokens = tiles_[tile.number].rows;
  const std::size_t at = first * width_;
  ops_.losses->logit_gradients(
      logits_of(tile, count, logits), row_targets.targets + first, scale * factor_,
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

template class Head<float>;
template class Head<Bf16>;
template class Head<F16>;

}  // namespace ballast::model
