#include "src/model/host/ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/device/streams.h"

#include "src/model/host/layer_ops.h"
#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Sums squares in sixteen interleaved sums, so that every instruction set gives the same bits.
template <class T>
float square_sum(const T* values, std::size_t size) {
  constexpr std::size_t kSums = 16;
  std::array<float, kSums> sums = {};
  std::size_t at = 0;
  for (; at + kSums <= size; at += kSums) {
    for (std::size_t i = 0; i < kSums; ++i) {
      const float value = to_float(values[at + i]);
      sums[i] += value * value;
    }
  }
  for (std::size_t i = 0; at + i < size; ++i) {
    const float value = to_float(values[at + i]);
    sums[i] += value * value;
  }
  for (std::size_t half = kSums / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) sums[i] += sums[half + i];
  }
  return sums[0];
}

std::size_t place_of(const ExpertRows& rows, std::size_t i) {
  return rows.places == nullptr ? i : static_cast<std::size_t>(rows.places[i]);
}

/// product / weight, or 0 for a weight of 0.
float quotient(float product, float weight) {
  return weight == 0.0F ? 0.0F : product / weight;
}

/// Embedding columns per thread: a cache line of fp32.
constexpr std::size_t kColumns = 16;

void check_tokens(const std::int32_t* tokens, std::size_t count, std::int32_t least,
                  std::size_t vocabulary) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t token = tokens[i];
    if (token >= least && (token < 0 || static_cast<std::size_t>(token) < vocabulary)) continue;
    throw Error(ErrorCategory::data,
                fmt::format("token {} of the micro-batch is {}, but model.vocab_size is {}", i,
                            tokens[i], vocabulary));
  }
}

/// The position of token `i` of a micro-batch of sequences of `length`.
std::size_t position_of(const Ids& ids, std::size_t i, std::size_t length) {
  return ids.positions == nullptr ? i % length : static_cast<std::size_t>(ids.positions[i]);
}

/// Row of token `i` in a table, or the table's size if it does not have the token.
template <class U>
std::size_t row_of(const Embedding<U>& tables, const Ids& ids, std::size_t i) {
  return std::min(static_cast<std::size_t>(ids.tokens[i]) - tables.first, tables.size);
}

template <class T>
void embed(const RowKernels<T>& kernels, const Embedding<const T>& tables, const Ids& ids,
           std::size_t count, std::size_t length, std::size_t width, T* outputs) {
  split(KernelGroup::embedding, count, 1, [&](Range rows) {
    for (std::size_t i = rows.begin; i < rows.end; ++i) {
      const std::size_t at = row_of(tables, ids, i);
      const bool here = at < tables.size;
      T* const out = outputs + i * width;
      if (!here && tables.begins) std::fill_n(out, width, from_float<T>(-0.0F));
      const T* const row = here ? tables.tokens + at * width : out;
      if (tables.positions != nullptr) {
        kernels.add(row, tables.positions + position_of(ids, i, length) * width, out, width);
      } else if (here && tables.scale != 1.0F) {
        kernels.scale(row, tables.scale, out, width);
      } else if (here) {
        std::memcpy(out, row, width * sizeof(T));
      }
    }
  });
}

/// Each thread has some columns and all rows, so that sums run in token order.
template <class T>
void embed_backward(const RowKernels<T>& kernels, const Ids& ids, std::size_t count,
                    std::size_t length, std::size_t width, const T* dy,
                    const Embedding<float>& gradients) {
  split(KernelGroup::embedding, width, kColumns, [&](Range columns) {
    for (std::size_t i = 0; i < count; ++i) {
      const T* const from = dy + i * width + columns.begin;
      const bool here = gradients.tokens != nullptr && row_of(gradients, ids, i) < gradients.size;
      const auto sum_row = here ? static_cast<std::uint32_t>(ids.sum_rows[i]) : kNoSumRow;
      const std::size_t first = sum_row * width + columns.begin;
      float* const to = sum_row == kNoSumRow ? nullptr : gradients.tokens + first;
      if (to != nullptr && gradients.scale == 1.0F) {
        kernels.accumulate(to, from, columns.size());
      } else if (to != nullptr) {
        kernels.accumulate_scaled(to, from, gradients.scale, columns.size());
      }
      if (gradients.positions == nullptr) continue;
      const std::size_t position = position_of(ids, i, length) * width;
      kernels.accumulate(gradients.positions + position + columns.begin, from, columns.size());
    }
  });
}

/// Column of a row's target in a tile. It is at least the tile's width if the target is in another
/// tile.
std::size_t column_of(const LogitTile& tile, std::int32_t target) {
  return static_cast<std::size_t>(target) - tile.first;
}

}  // namespace

template <class T>
Ops<T>::Ops(const KernelExtents& extents, std::size_t threads, const MlpRule& mlp_rule)
    : state_(std::make_shared<SharedState<T>>(extents, threads)),
      kernels_(state_->kernels.rows),
      sum_kernels_(best_kernels<float>().rows),
      shape_(extents.shape),
      hidden_(extents.hidden),
      vocabulary_(extents.vocabulary),
      threads_(threads),
      mlp_rule_(mlp_rule) {
  add_row_ops(state_, *this);
  add_packing_ops(state_, *this);
  add_attention_ops(state_, *this);
}

template <class T>
void Ops<T>::run(device::Stream& stream, std::function<void()> work) {
  as_host(stream).enqueue([work = std::move(work)] {
    const KernelClock clock(KernelGroup::pass);
    work();
  });
}

template <class T>
void Ops<T>::linear(const Linear<T>& layer, const T* x, T* y, std::size_t y_row, std::size_t rows) {
  const Product p = forward_product(layer, x, y, y_row, rows);
  products_.multiply(p.extents, p.a, p.b, p.c, false, layer.bias);
}

template <class T>
void Ops<T>::linear_onto(const Linear<T>& layer, const T* x, const T* residual, T* y,
                         std::size_t rows) {
  split(KernelGroup::elementwise, rows * layer.out, kStep,
        [&](Range r) { std::memcpy(y + r.begin, residual + r.begin, r.size() * sizeof(T)); });
  const Product p = forward_product(layer, x, y, layer.out, rows);
  products_.multiply(p.extents, p.a, p.b, p.c, true, layer.bias);
}

template <class T>
void Ops<T>::linear_weight(const Linear<T>& layer, const T* x, const T* dy, std::size_t dy_row,
                           std::size_t rows) {
  if (layer.weight_gradient == nullptr) return;
  const Product p = weight_product(layer, x, dy, dy_row, rows);
  products_.multiply(p.extents, p.a, p.b, p.c, !layer.overwrites_gradient);
}

template <class T>
void Ops<T>::check_tokens(const std::int32_t* tokens, std::int32_t least) const {
  host::check_tokens(tokens, shape_.tokens(), least, vocabulary_);
}

template <class T>
void Ops<T>::embed(const Embedding<const T>& tables, const Ids& ids, T* out) const {
  host::embed(kernels_, tables, ids, shape_.tokens(), shape_.length, hidden_, out);
}

template <class T>
void Ops<T>::embed_backward(const Ids& ids, const T* dy, const Embedding<float>& gradients,
                            std::byte*) const {
  host::embed_backward(kernels_, ids, shape_.tokens(), shape_.length, hidden_, dy, gradients);
}

template <class T>
void Ops<T>::cap_logits(const LogitTile& tile) const {
  split(KernelGroup::cross_entropy, tile.rows, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      kernels_.soft_cap(tile.logits + i * tile.stride, tile.width, 1.0F, tile.cap);
    }
  });
}

template <class T>
void Ops<T>::sum_logits(const LogitTile& tile, const std::int32_t* targets, bool first,
                        RowSum<float>* sums) const {
  split(KernelGroup::cross_entropy, tile.rows, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      RowSum<float> own;
      if (targets[i] >= 0) {
        kernels_.sum_logits(tile.logits + i * tile.stride, tile.width, column_of(tile, targets[i]),
                            &own);
      }
      sums[i] = first ? own : merged(sums[i], own);
    }
  });
}

template <class T>
void Ops<T>::merge_row_sums(const RowSumsOfTiles& tiles, RowSum<float>* sums) const {
  split(KernelGroup::cross_entropy, tiles.rows, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) sums[i] = tiles.merged_row(i);
  });
}

template <class T>
void Ops<T>::logit_gradients(const LogitTile& tile, const std::int32_t* targets, float scale,
                             const float* weights, const RowSum<float>* sums) const {
  split(KernelGroup::cross_entropy, tile.rows, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      float* const row = tile.logits + i * tile.stride;
      if (targets[i] < 0) {
        std::memset(row, 0, tile.width * sizeof(T));
        continue;
      }
      const float weight = weights == nullptr ? 1.0F : weights[i];
      kernels_.logit_gradients(row, tile.width, column_of(tile, targets[i]), &sums[i],
                               scale * weight, tile.cap, reinterpret_cast<T*>(row));
    }
  });
}

template <class T>
void Ops<T>::row_losses(const RowSum<float>* sums, const std::int32_t* targets, std::size_t rows,
                        double* losses) const {
  for (std::size_t i = 0; i < rows; ++i) {
    const RowSum<float>& sum = sums[i];
    losses[i] = targets[i] < 0 ? 0.0
                               : std::log(sum.total) + static_cast<double>(sum.largest) -
                                     static_cast<double>(sum.wanted);
  }
}

template <class T>
void Ops<T>::sum_losses(const double* losses, std::size_t count, std::size_t parts,
                        double* sums) const {
  for (std::size_t p = 0; p < parts; ++p, losses += count) {
    sums[p] = std::accumulate(losses, losses + count, 0.0);
  }
}

template <class T>
void Ops<T>::dpo_loss(const PairRows& rows, const Preference& how, PairResult* results) const {
  for (std::size_t pair = 0; pair < rows.pairs; ++pair) {
    const std::size_t first = 2 * pair * rows.length;
    const std::size_t second = first + rows.length;
    const std::size_t end = second + rows.length;
    const double* const reference = rows.reference + 2 * pair;
    const auto sum = [&](std::size_t begin, std::size_t stop) {
      return std::accumulate(rows.losses + begin, rows.losses + stop, 0.0);
    };
    const bool counts = std::any_of(rows.targets + first, rows.targets + end,
                                    [](std::int32_t target) { return target >= 0; });
    WeighedPair found;
    if (counts) {
      found = weigh_pair(how, {sum(first, second), reference[0]}, {sum(second, end), reference[1]});
    }
    results[pair] = found.result;
    std::fill_n(rows.weights + first, rows.length, found.weight);
    std::fill_n(rows.weights + second, rows.length, -found.weight);
  }
}

template <class T>
void Ops<T>::route(const RouterShape& shape, float* logits, const RouterBiases<T>& biases,
                   const std::int32_t* targets, const Routing& to, std::int32_t* starts) const {
  std::vector<float> correction;
  if (biases.moved != nullptr) {
    correction.assign(biases.moved, biases.moved + shape.experts);
  } else if (biases.correction != nullptr) {
    correction.resize(shape.experts);
    for (std::size_t e = 0; e < shape.experts; ++e) {
      for (std::size_t a = 0; a < kAddends; ++a) {
        correction[e] += to_float(biases.correction[a * shape.experts + e]);
      }
    }
  }
  split(KernelGroup::experts, shape.rows, 1, [&](Range r) {
    for (std::size_t row = r.begin; row < r.end; ++row) {
      const bool padding = targets != nullptr && targets[row] == kPaddingTarget;
      float* const own = padding ? nullptr : logits + row * shape.step();
      if (biases.logits != nullptr && !padding) {
        kernels_.accumulate(own, biases.logits, shape.experts);
      }
      route_row(shape, own, correction.empty() ? nullptr : correction.data(), row, to);
    }
  });
  place_choices(shape, to, starts);
}

template <class T>
void Ops<T>::router_gradient(const RouterShape& shape, const Routing& routing,
                             const RouterTotals& totals, const RouterLossScales& scales,
                             T* gradients) const {
  const RouterGradient gradient(shape, routing, totals, scales);
  split(KernelGroup::experts, shape.rows, 1, [&](Range r) {
    std::vector<double> row_gradients(shape.experts);
    for (std::size_t row = r.begin; row < r.end; ++row) {
      gradient.differentiate(row, row_gradients.data());
      T* const to = gradients + row * shape.step();
      for (std::size_t e = 0; e < shape.experts; ++e)
        to[e] = from_float<T>(static_cast<float>(row_gradients[e]));
    }
  });
}

template <class T>
void Ops<T>::gather_rows(const ExpertRows& rows, const T* x, const float* weights, T* y,
                         std::size_t padded, std::size_t width) const {
  split(KernelGroup::experts, padded, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      T* const to = y + i * width;
      if (i >= rows.count) {
        std::fill_n(to, width, T());
        continue;
      }
      const std::size_t place = place_of(rows, i);
      const T* const from = x + place / rows.per_token * width;
      if (weights == nullptr) {
        std::memcpy(to, from, width * sizeof(T));
      } else {
        kernels_.scale(from, weights[place], to, width);
      }
    }
  });
}

template <class T>
void Ops<T>::dot_rows(const ExpertRows& rows, const T* activated, const T* gradients,
                      const float* weights, float* weight_gradients, std::size_t width) const {
  dot(rows, activated, width, gradients, weights, width,
      [&](std::size_t place, float product) { weight_gradients[place] = product; });
}

template <class T>
void Ops<T>::dot_bias(const ExpertRows& rows, const T* bias, const T* gradients,
                      const float* weights, float* weight_gradients, std::size_t width) const {
  dot(rows, bias, 0, gradients, weights, width,
      [&](std::size_t place, float product) { weight_gradients[place] += product; });
}

template <class T>
template <class Take>
void Ops<T>::dot(const ExpertRows& rows, const T* with, std::size_t step, const T* gradients,
                 const float* weights, std::size_t width, Take take) const {
  split(KernelGroup::experts, rows.count, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      const std::size_t place = place_of(rows, i);
      float product = 0.0F;
      kernels_.row_dot(gradients + i * width, width, with + i * step, width, &product, 1, width);
      take(place, weights == nullptr ? product : quotient(product, weights[place]));
    }
  });
}

template <class T>
void Ops<T>::put_quotients(const ExpertRows& rows, const float* values, const float* weights,
                           float* to) const {
  for (std::size_t i = 0; i < rows.count; ++i) {
    const std::size_t place = place_of(rows, i);
    to[place] = quotient(values[i], weights[place]);
  }
}

template <class T>
void Ops<T>::add_rows(const ExpertRows& rows, const float* y, const float* weights, float* sums,
                      std::size_t width) const {
  split(KernelGroup::experts, rows.count, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      const std::size_t place = place_of(rows, i);
      const float weight = weights == nullptr ? 1.0F : weights[place];
      float* const to = sums + place / rows.per_token * width;
      sum_kernels_.accumulate_scaled(to, y + i * width, weight, width);
    }
  });
}

template <class T>
void Ops<T>::compute_dora_scales(const AdaptedRows<T>& rows, float* scales,
                                 float* inverse_norms) const {
  const std::size_t out = rows.map.out;
  split(KernelGroup::elementwise, out, kStep, [&](Range r) {
    if (rows.map.flipped) {
      for (std::size_t i = r.begin; i < r.end; ++i) {
        scales[i] = square_sum(rows.map.weight + i * rows.map.in, rows.map.in);
      }
    } else {
      std::fill(scales + r.begin, scales + r.end, 0.0F);
      for (std::size_t row = 0; row < rows.map.in; ++row) {
        const T* const from = rows.map.weight + row * out;
        for (std::size_t i = r.begin; i < r.end; ++i) {
          const float value = to_float(from[i]);
          scales[i] += value * value;
        }
      }
    }
    for (std::size_t i = r.begin; i < r.end; ++i) {
      const T* const b = rows.b + i * rows.rank;
      const float added =
          added_square([b](std::size_t k) { return to_float(b[k]); }, rows.cross + i * rows.rank,
                       rows.gram, rows.rank, rows.scale);
      const float norm = std::sqrt(std::max(scales[i] + added, 0.0F));
      inverse_norms[i] = norm > 0.0F ? 1.0F / norm : 0.0F;
      scales[i] = to_float(rows.magnitudes[i]) * inverse_norms[i];
    }
  });
}

template <class T>
void Ops<T>::scale_columns(const ScaledColumns<T>& c) const {
  split(KernelGroup::elementwise, c.rows, 1, [&](Range r) {
    for (std::size_t row = r.begin; row < r.end; ++row) {
      const T* const x = c.x + row * c.x_step;
      T* const y = c.y + row * c.y_step;
      for (std::size_t i = 0; i < c.width; ++i) {
        float value = to_float(x[i]) * (c.scales == nullptr ? 1.0F : c.scales[i]);
        if (c.bias != nullptr) value += to_float(c.bias[i]);
        if (c.residual != nullptr) value += to_float(c.residual[row * c.y_step + i]);
        y[i] = from_float<T>(value);
      }
    }
  });
}

template <class T>
void Ops<T>::add_column_products(const ColumnProducts<T>& c, float* gradient) const {
  split(KernelGroup::elementwise, c.width, kStep, [&](Range r) {
    for (std::size_t first = r.begin; first < r.end; first += kStep) {
      const std::size_t count = std::min(kStep, r.end - first);
      std::array<float, kStep> sums = {};
      for (std::size_t row = 0; row < c.rows; ++row) {
        const T* const x = c.x + row * c.x_step + first;
        const T* const y = c.y + row * c.y_step + first;
        for (std::size_t i = 0; i < count; ++i) sums[i] += to_float(x[i]) * to_float(y[i]);
      }
      for (std::size_t i = 0; i < count; ++i) gradient[first + i] += c.factors[first + i] * sums[i];
    }
  });
}

template class Ops<float>;
template class Ops<Bf16>;
template class Ops<F16>;

}  // namespace ballast::model::host
