#include "src/model/host/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ballast/core/memory.h"

#include "src/model/host/products.h"
#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Query rows per tile, and keys per product: small enough for the second-level cache.
constexpr std::size_t kTileRows = 64;
constexpr std::size_t kKeyBlock = 512;

/// Calls body(first key, keys) for each block of keys.begin .. keys.end; `begin` is a multiple of a
/// block.
template <class Body>
void for_keys(const KeyRange& keys, const Body& body) {
  for (std::size_t first = keys.begin; first < keys.end; first += kKeyBlock) {
    body(first, std::min(kKeyBlock, keys.end - first));
  }
}

}  // namespace

/// Memory of one thread. The scores of a tile have score_row columns.
template <class T>
struct Attention<T>::Scratch {
  float* scores;     ///< [kTileRows, score_row]
  float* dscores;    ///< [kTileRows, score_row], gradient of the probabilities
  float* tile;       ///< [kTileRows, sum_row]
  float* delta;      ///< [kTileRows]
  float* dkeys;      ///< [length, sum_row]
  float* dvalues;    ///< [length, sum_row]
  T* probabilities;  ///< [kTileRows, score_row]
  T* dproducts;      ///< [kTileRows, score_row], gradient of Q K^T
  // Operands of own products (products.h).
  Bf16* keys;             ///< [length, head_dim], by keys or, in forward(), the values
  Bf16* flipped_keys;     ///< [head_dim, length]
  Bf16* flipped_values;   ///< [head_dim, length]
  Bf16* flipped_weights;  ///< [length, kTileRows]
  Bf16* rows;             ///< [kTileRows, head_dim]
};

/// Keys or values of one head of one sequence.
template <class T>
struct Attention<T>::Side {
  const T* rows;      ///< [length, head_dim], shape.row() apart
  Bf16Pairs pairs;    ///< [length, head_dim] for own products
  Bf16Pairs flipped;  ///< [head_dim, length] for own products
};

/// Offsets of one head of one sequence in the arrays.
template <class T>
struct Attention<T>::Head {
  std::size_t query;  ///< in qkv
  std::size_t key;
  std::size_t value;
  std::size_t out;      ///< in out
  std::size_t log_sum;  ///< in log_sums
  AttentionMask mask;   ///< mask of the sequence
  float sink;           ///< logit of the sink, if there are sinks
};

/// Arrays of the backward pass.
template <class T>
struct Attention<T>::Gradients {
  const T* qkv;
  const T* out;
  const float* log_sums;
  const T* dout;
  T* dqkv;
};

/// Query rows [first, first + rows) and the keys that any of them sees.
template <class T>
struct Attention<T>::Tile {
  std::size_t first;
  std::size_t rows;
  KeyRange keys;
};

template <class T>
Attention<T>::Attention(const AttentionShape& shape, const RowKernels<T>& kernels,
                        std::size_t threads)
    : shape_(shape),
      kernels_(kernels),
      threads_(threads),
      scale_(shape.score_scale()),
      cap_(static_cast<float>(shape.cap)),
      score_row_(round_up(shape.length, kBf16TileColumns)),
      sum_row_(round_up(shape.head_dim, kBf16TileColumns)),
      is_own_(kTypeOf<T> == DType::bf16 && has_own_bf16_products() && shape.head_dim % 2 == 0) {}

template <class T>
auto Attention<T>::take_scratch(Bump& bump) const -> Scratch {
  const std::size_t tile = kTileRows * score_row_;
  const std::size_t gradient = shape_.length * sum_row_;
  Scratch s{};
  s.scores = bump.take<float>(tile);
  s.dscores = bump.take<float>(tile);
  s.tile = bump.take<float>(kTileRows * sum_row_);
  s.delta = bump.take<float>(kTileRows);
  s.dkeys = bump.take<float>(gradient);
  s.dvalues = bump.take<float>(gradient);
  s.probabilities = bump.take<T>(tile);
  s.dproducts = bump.take<T>(tile);
  if (kTypeOf<T> != DType::bf16) return s;
  s.keys = bump.take<Bf16>(bf16_pairs_size(shape_.length, shape_.head_dim));
  s.flipped_keys = bump.take<Bf16>(bf16_pairs_size(shape_.head_dim, shape_.length));
  s.flipped_values = bump.take<Bf16>(bf16_pairs_size(shape_.head_dim, shape_.length));
  s.flipped_weights = bump.take<Bf16>(tile);
  s.rows = bump.take<Bf16>(bf16_pairs_size(kTileRows, shape_.head_dim));
  return s;
}

template <class T>
std::size_t Attention<T>::scratch_bytes() const {
  Bump counting;
  take_scratch(counting);
  return threads_ * counting.used();
}

template <class T>
auto Attention<T>::scratch_of(std::byte* scratch, std::size_t thread) const -> Scratch {
  Bump bump(scratch + thread * (scratch_bytes() / threads_));
  return take_scratch(bump);
}

template <class T>
auto Attention<T>::head_of(std::size_t sequence, std::size_t head) const -> Head {
  const std::size_t first_row = sequence * shape_.length;
  const std::size_t kv_head = head / (shape_.heads / shape_.kv_heads);
  const std::size_t row = first_row * shape_.row();
  Head at{};
  at.query = row + head * shape_.head_dim;
  at.key = row + shape_.width() + kv_head * shape_.head_dim;
  at.value = at.key + shape_.kv_width();
  at.out = first_row * shape_.width() + head * shape_.head_dim;
  at.log_sum = (sequence * shape_.heads + head) * shape_.length;
  at.mask = shape_.mask.of(sequence, shape_.length);
  if (sinks_ != nullptr) at.sink = to_float(sinks_[head]);
  return at;
}

template <class T>
auto Attention<T>::tile_at(std::size_t first, const AttentionMask& mask) const -> Tile {
  const std::size_t rows = std::min(kTileRows, shape_.length - first);
  const std::size_t begin = mask.first_key(first) / kKeyBlock * kKeyBlock;
  return {first, rows, {begin, first + rows, mask}};
}

/// Makes primitives for one thread, because each later runs on one thread of a parallel region.
template <class T>
void Attention<T>::prepare() {
  if (prepared_ || is_own_) return;
  const SingleThreaded guard;
  for (std::size_t first = 0; first < shape_.length; first += kTileRows) {
    prepare_tile(tile_at(first, {}));
  }
  prepared_ = true;
}

template <class T>
void Attention<T>::prepare_tile(const Tile& tile) {
  const std::size_t size = shape_.head_dim;
  const T* const none = nullptr;
  const float* const none_f32 = nullptr;
  const Matrix rows = matrix(none, shape_.row());
  const Matrix flipped = transposed(none, shape_.row());
  const Matrix dout = matrix(none, shape_.width());
  const Matrix scores = matrix(none_f32, score_row_);
  const Matrix weights = matrix(none, score_row_);
  const Matrix weights_flipped = transposed(none, score_row_);
  const Matrix sums = matrix(none_f32, sum_row_);
  for_keys(tile.keys, [&](std::size_t /*first*/, std::size_t keys) {
    products_.prepare({tile.rows, keys, size}, rows, flipped, scores);
    products_.prepare({tile.rows, keys, size}, dout, flipped, scores);
    products_.prepare({tile.rows, size, keys}, weights, rows, sums, false);
    products_.prepare({tile.rows, size, keys}, weights, rows, sums, true);
    products_.prepare({keys, size, tile.rows}, weights_flipped, dout, sums, true);
    products_.prepare({keys, size, tile.rows}, weights_flipped, rows, sums, true);
  });
}

template <class T>
void Attention<T>::forward(const AttentionMask& mask, const AttentionSinks<T>& sinks, const T* qkv,
                           T* out, float* log_sums, std::byte* scratch) {
  prepare();
  shape_.mask = mask;
  sinks_ = sinks.logits;
  const std::size_t units = shape_.sequences * shape_.heads;
  on_team(threads_, [&](std::size_t thread) {
    const Scratch mine = scratch_of(scratch, thread);
    const Range here = range_of(units, threads_, thread);
    for (std::size_t unit = here.begin; unit < here.end; ++unit) {
      forward_head(head_of(unit / shape_.heads, unit % shape_.heads), qkv, out, log_sums, mine);
    }
  });
}

template <class T>
void Attention<T>::forward_head(const Head& head, const T* qkv, T* out, float* log_sums,
                                const Scratch& s) const {
  const std::size_t row = shape_.row();
  const Side keys = {qkv + head.key, {}, flipped(qkv + head.key, s.flipped_keys)};
  const Side values = {qkv + head.value, paired(qkv + head.value, s.keys), {}};
  for (std::size_t first = 0; first < shape_.length; first += kTileRows) {
    const Tile tile = tile_at(first, head.mask);
    multiply_flipped(tile, matrix(qkv + head.query + first * row, row), keys, s.scores);
    cap_scores(tile, s.scores);
    kernels_.attention_softmax(s.scores, s.probabilities, score_row_, first, tile.rows, tile.keys,
                               cap_ > 0.0F ? 1.0F : scale_, log_sums + head.log_sum + first);
    weigh(tile, s.probabilities, values, s.tile);
    if (sinks_ != nullptr) add_sink(head, s.tile, log_sums + head.log_sum + first, tile.rows);
    kernels_.convert(s.tile, sum_row_, out + head.out + first * shape_.width(), shape_.width(),
                     tile.rows, shape_.head_dim);
  }
}

/// Returns the operand of own products that is [length, head_dim], or nothing without them.
template <class T>
Bf16Pairs Attention<T>::paired(const T* rows, Bf16* to) const {
  if (!is_own_) return {};
  return pair_bf16(matrix(rows, shape_.row()), shape_.length, shape_.head_dim, to);
}

/// Returns the operand of own products that is [head_dim, length], or nothing without them.
template <class T>
Bf16Pairs Attention<T>::flipped(const T* rows, Bf16* to) const {
  if (!is_own_) return {};
  return pair_bf16(transposed(rows, shape_.row()), shape_.head_dim, shape_.length, to);
}

/// products[rows, keys] = rows * side^T, with the tile's keys.
template <class T>
void Attention<T>::multiply_flipped(const Tile& tile, const Matrix& rows, const Side& side,
                                    float* products) const {
  const std::size_t begin = tile.keys.begin;
  if (is_own_) {
    multiply_pairs({tile.rows, tile.keys.end - begin, shape_.head_dim},
                   {static_cast<const Bf16*>(rows.data), rows.row_step},
                   side.flipped.from(0, begin), products + begin, score_row_, false);
    return;
  }
  for_keys(tile.keys, [&](std::size_t key, std::size_t keys) {
    products_.multiply_prepared({tile.rows, keys, shape_.head_dim}, rows,
                                transposed(side.rows + key * shape_.row(), shape_.row()),
                                matrix(products + key, score_row_));
  });
}

/// sums[rows, head_dim] = weights * side.
template <class T>
void Attention<T>::weigh(const Tile& tile, T* weights, const Side& side, float* sums) const {
  const std::size_t begin = tile.keys.begin;
  const std::size_t count = tile.keys.end - begin;
  if (is_own_) {
    // The last pair of an odd number of keys.
    for (std::size_t r = 0; r < tile.rows * (count % 2); ++r) {
      weights[r * score_row_ + tile.keys.end] = {};
    }
    multiply_pairs({tile.rows, shape_.head_dim, count},
                   {reinterpret_cast<const Bf16*>(weights + begin), score_row_},
                   side.pairs.from(begin, 0), sums, sum_row_, false);
    return;
  }
  for_keys(tile.keys, [&](std::size_t key, std::size_t keys) {
    products_.multiply_prepared(
        {tile.rows, shape_.head_dim, keys}, matrix(weights + key, score_row_),
        matrix(side.rows + key * shape_.row(), shape_.row()), matrix(sums, sum_row_), key != begin);
  });
}

/// gradient[keys, head_dim] += weights^T * rows.
template <class T>
void Attention<T>::add_weighted(const Tile& tile, const T* weights, const Matrix& rows,
                                float* gradient, const Scratch& s) const {
  const std::size_t begin = tile.keys.begin;
  const std::size_t count = tile.keys.end - begin;
  if (is_own_) {
    const Bf16Rows flipped = pair_bf16_columns(reinterpret_cast<const Bf16*>(weights + begin),
                                               score_row_, tile.rows, count, s.flipped_weights);
    multiply_pairs({count, shape_.head_dim, tile.rows}, flipped,
                   pair_bf16(rows, tile.rows, shape_.head_dim, s.rows), gradient + begin * sum_row_,
                   sum_row_, true);
    return;
  }
  for_keys(tile.keys, [&](std::size_t key, std::size_t keys) {
    products_.multiply_prepared({keys, shape_.head_dim, tile.rows},
                                transposed(weights + key, score_row_), rows,
                                matrix(gradient + key * sum_row_, sum_row_), true);
  });
}

/// Applies the soft cap, if there is one.
template <class T>
void Attention<T>::cap_scores(const Tile& tile, float* scores) const {
  if (cap_ == 0.0F) return;
  for (std::size_t r = 0; r < tile.rows; ++r) {
    const std::size_t begin = tile.keys.mask.first_key(tile.first + r);
    kernels_.soft_cap(scores + r * score_row_ + begin, tile.first + r + 1 - begin, scale_, cap_);
  }
}

/// Adds the sink as one more key of the rows, with value 0. Its part of the softmax's sum makes
/// `values` [rows, sum_row] smaller.
template <class T>
void Attention<T>::add_sink(const Head& head, float* values, float* log_sums,
                            std::size_t rows) const {
  for (std::size_t r = 0; r < rows; ++r) {
    const double above = static_cast<double>(log_sums[r]) - static_cast<double>(head.sink);
    float* const row = values + r * sum_row_;
    const auto share = static_cast<float>(1.0 / (1.0 + std::exp(-above)));
    for (std::size_t i = 0; i < shape_.head_dim; ++i) row[i] *= share;
    log_sums[r] = static_cast<float>(std::max<double>(log_sums[r], head.sink) +
                                     std::log1p(std::exp(-std::abs(above))));
  }
}

/// Returns the rows' contribution to the gradient of the sink. The gradient of its probability is
/// 0.
template <class T>
double Attention<T>::sink_gradient(const Head& head, const float* log_sums, const float* delta,
                                   std::size_t rows) const {
  double sum = 0.0;
  for (std::size_t r = 0; r < rows; ++r) {
    sum -= std::exp(static_cast<double>(head.sink) - static_cast<double>(log_sums[r])) *
           static_cast<double>(delta[r]);
  }
  return sum;
}

template <class T>
void Attention<T>::backward(const AttentionMask& mask, const AttentionSinks<T>& sinks, const T* qkv,
                            const T* out, const float* log_sums, const T* dout, T* dqkv,
                            std::byte* scratch) {
  prepare();
  shape_.mask = mask;
  sinks_ = sinks.gradient == nullptr ? nullptr : sinks.logits;
  sink_gradients_.assign(sinks_ == nullptr ? 0 : shape_.sequences * shape_.heads, 0.0);
  const std::size_t units = shape_.sequences * shape_.kv_heads;
  on_team(threads_, [&](std::size_t thread) {
    const Scratch mine = scratch_of(scratch, thread);
    const Range here = range_of(units, threads_, thread);
    for (std::size_t unit = here.begin; unit < here.end; ++unit) {
      backward_group(unit / shape_.kv_heads, unit % shape_.kv_heads, qkv, out, log_sums, dout, dqkv,
                     mine);
    }
  });
  for (std::size_t unit = 0; unit < sink_gradients_.size(); ++unit) {
    sinks.gradient[unit % shape_.heads] += static_cast<float>(sink_gradients_[unit]);
  }
}

/// Processes all query heads that share one head of keys and values, in order.
template <class T>
void Attention<T>::backward_group(std::size_t sequence, std::size_t kv_head, const T* qkv,
                                  const T* out, const float* log_sums, const T* dout, T* dqkv,
                                  const Scratch& s) {
  const std::size_t size = shape_.head_dim;
  const std::size_t group = shape_.heads / shape_.kv_heads;
  const std::size_t bytes = shape_.length * sum_row_ * sizeof(float);
  std::memset(s.dkeys, 0, bytes);
  std::memset(s.dvalues, 0, bytes);
  const Head shared = head_of(sequence, kv_head * group);
  const T* const key_rows = qkv + shared.key;
  const T* const value_rows = qkv + shared.value;
  const Side keys = {key_rows, paired(key_rows, s.keys), flipped(key_rows, s.flipped_keys)};
  const Side values = {value_rows, {}, flipped(value_rows, s.flipped_values)};
  for (std::size_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    const Head head = head_of(sequence, h);
    for (std::size_t first = 0; first < shape_.length; first += kTileRows) {
      const Tile tile = tile_at(first, head.mask);
      backward_tile(tile, head, keys, values, {qkv, out, log_sums, dout, dqkv}, s);
      if (sinks_ == nullptr) continue;
      sink_gradients_[sequence * shape_.heads + h] +=
          sink_gradient(head, log_sums + head.log_sum + first, s.delta, tile.rows);
    }
  }
  kernels_.convert(s.dkeys, sum_row_, dqkv + shared.key, shape_.row(), shape_.length, size);
  kernels_.convert(s.dvalues, sum_row_, dqkv + shared.value, shape_.row(), shape_.length, size);
}

template <class T>
void Attention<T>::backward_tile(const Tile& tile, const Head& head, const Side& keys,
                                 const Side& values, const Gradients& all, const Scratch& s) const {
  const std::size_t row = shape_.row();
  const std::size_t hidden = shape_.width();
  const std::size_t at_query = head.query + tile.first * row;
  const std::size_t at_out = head.out + tile.first * hidden;
  const T* const dout = all.dout + at_out;
  const float* const log_sums = all.log_sums + head.log_sum + tile.first;
  multiply_flipped(tile, matrix(all.qkv + at_query, row), keys, s.scores);
  multiply_flipped(tile, matrix(dout, hidden), values, s.dscores);
  cap_scores(tile, s.scores);
  kernels_.row_dot(dout, hidden, all.out + at_out, hidden, s.delta, tile.rows, shape_.head_dim);
  kernels_.attention_softmax_backward(s.scores, s.dscores, s.probabilities, s.dproducts, score_row_,
                                      tile.first, tile.rows, tile.keys, scale_, cap_, log_sums,
                                      s.delta);
  add_weighted(tile, s.probabilities, matrix(dout, hidden), s.dvalues, s);
  add_weighted(tile, s.dproducts, matrix(all.qkv + at_query, row), s.dkeys, s);
  weigh(tile, s.dproducts, keys, s.tile);
  kernels_.convert(s.tile, sum_row_, all.dqkv + at_query, row, tile.rows, shape_.head_dim);
}

template class Attention<float>;
template class Attention<Bf16>;
template class Attention<F16>;

}  // namespace ballast::model::host
