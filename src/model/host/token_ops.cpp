#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/clocks.h"
#include "ballast/core/error.h"
#include "ballast/model/kernels.h"

#include "src/model/compute/formulas.h"
#include "src/model/host/kernel_tables.h"
#include "src/model/host/ops.h"
#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Embedding columns per thread: a cache line of fp32.
constexpr std::size_t kColumns = 16;

/// The position of token `i` of a micro-batch of sequences of `length`.
std::size_t position_of(const Ids& ids, std::size_t i, std::size_t length) {
  return ids.positions == nullptr ? i % length : static_cast<std::size_t>(ids.positions[i]);
}

/// Row of token `i` in a table, or the table's size if it does not have the token.
template <class U>
std::size_t row_of(const Embedding<U>& tables, const Ids& ids, std::size_t i) {
  return std::min(static_cast<std::size_t>(ids.tokens[i]) - tables.first, tables.size);
}

/// Column of a row's target in a tile. It is at least the tile's width if the target is in another
/// tile.
std::size_t column_of(const LogitTile& tile, std::int32_t target) {
  return static_cast<std::size_t>(target) - tile.first;
}

template <class T>
class HostTokens final : public TokenOps<T> {
 public:
  explicit HostTokens(State<T> state) : state_(std::move(state)), kernels_(state_->kernels.rows) {}

  void check_tokens(const std::int32_t* tokens, std::int32_t least) override {
    for (std::size_t i = 0; i < state_->extents.shape.tokens(); ++i) {
      const std::int32_t token = tokens[i];
      if (token >= least &&
          (token < 0 || static_cast<std::size_t>(token) < state_->extents.vocabulary))
        continue;
      throw Error(ErrorCategory::data,
                  fmt::format("token {} of the micro-batch is {}, but model.vocab_size is {}", i,
                              tokens[i], state_->extents.vocabulary));
    }
  }
  void embed(const Embedding<const T>& tables, const Ids& ids, T* outputs) override {
    const std::size_t count = state_->extents.shape.tokens();
    const std::size_t length = state_->extents.shape.length;
    const std::size_t width = state_->extents.hidden;
    split(KernelGroup::embedding, count, 1, [&](Range rows) {
      for (std::size_t i = rows.begin; i < rows.end; ++i) {
        const std::size_t at = row_of(tables, ids, i);
        const bool here = at < tables.size;
        T* const out = outputs + i * width;
        if (!here && tables.begins) std::fill_n(out, width, from_float<T>(-0.0F));
        const T* const row = here ? tables.tokens + at * width : out;
        if (tables.positions != nullptr) {
          kernels_.add(row, tables.positions + position_of(ids, i, length) * width, out, width);
        } else if (here && tables.scale != 1.0F) {
          kernels_.scale(row, tables.scale, out, width);
        } else if (here) {
          std::memcpy(out, row, width * sizeof(T));
        }
      }
    });
  }
  [[nodiscard]] std::size_t embedding_scratch_bytes() const override { return 0; }
  /// Each thread has some columns and all rows, so that sums run in token order.
  void embed_backward(const Ids& ids, const T* dy, const Embedding<float>& gradients,
                      std::byte* /*scratch*/) override {
    const std::size_t count = state_->extents.shape.tokens();
    const std::size_t length = state_->extents.shape.length;
    const std::size_t width = state_->extents.hidden;
    split(KernelGroup::embedding, width, kColumns, [&](Range columns) {
      for (std::size_t i = 0; i < count; ++i) {
        const T* const from = dy + i * width + columns.begin;
        const bool here = gradients.tokens != nullptr && row_of(gradients, ids, i) < gradients.size;
        const auto sum_row = here ? static_cast<std::uint32_t>(ids.sum_rows[i]) : kNoSumRow;
        const std::size_t first = sum_row * width + columns.begin;
        float* const to = sum_row == kNoSumRow ? nullptr : gradients.tokens + first;
        if (to != nullptr && gradients.scale == 1.0F) {
          kernels_.accumulate(to, from, columns.size());
        } else if (to != nullptr) {
          kernels_.accumulate_scaled(to, from, gradients.scale, columns.size());
        }
        if (gradients.positions == nullptr) continue;
        const std::size_t position = position_of(ids, i, length) * width;
        kernels_.accumulate(gradients.positions + position + columns.begin, from, columns.size());
      }
    });
  }

 private:
  State<T> state_;
  const RowKernels<T>& kernels_;
};

template <class T>
class HostLosses final : public LossOps<T> {
 public:
  explicit HostLosses(const RowKernels<T>& kernels) : kernels_(kernels) {}

  void cap_logits(const LogitTile& tile) override {
    split(KernelGroup::cross_entropy, tile.rows, 1, [&](Range r) {
      for (std::size_t i = r.begin; i < r.end; ++i) {
        float* const row = tile.logits + i * tile.stride;
        if (tile.cap > 0.0F) {
          kernels_.soft_cap(row, tile.width, tile.factor, tile.cap);
        } else {
          for (std::size_t c = 0; c < tile.width; ++c) row[c] *= tile.factor;
        }
      }
    });
  }
  void sum_logits(const LogitTile& tile, const std::int32_t* targets, bool first,
                  RowSum<float>* sums) override {
    split(KernelGroup::cross_entropy, tile.rows, 1, [&](Range r) {
      for (std::size_t i = r.begin; i < r.end; ++i) {
        RowSum<float> own;
        if (targets[i] >= 0) {
          kernels_.sum_logits(tile.logits + i * tile.stride, tile.width,
                              column_of(tile, targets[i]), &own);
        }
        sums[i] = first ? own : merged(sums[i], own);
      }
    });
  }
  void merge_row_sums(const RowSumsOfTiles& tiles, RowSum<float>* sums) override {
    split(KernelGroup::cross_entropy, tiles.rows, 1, [&](Range r) {
      for (std::size_t i = r.begin; i < r.end; ++i) sums[i] = tiles.merged_row(i);
    });
  }
  void logit_gradients(const LogitTile& tile, const std::int32_t* targets, float scale,
                       const float* weights, const RowSum<float>* sums) override {
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
  void row_losses(const RowSum<float>* sums, const std::int32_t* targets, std::size_t rows,
                  double* losses) override {
    for (std::size_t i = 0; i < rows; ++i) {
      const RowSum<float>& sum = sums[i];
      losses[i] = targets[i] < 0 ? 0.0
                                 : std::log(sum.total) + static_cast<double>(sum.largest) -
                                       static_cast<double>(sum.wanted);
    }
  }
  void sum_losses(const double* losses, std::size_t count, std::size_t parts,
                  double* sums) override {
    for (std::size_t p = 0; p < parts; ++p, losses += count) {
      sums[p] = std::accumulate(losses, losses + count, 0.0);
    }
  }
  void dpo_loss(const PairRows& rows, const Preference& how, PairResult* results) override {
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
        found =
            weigh_pair(how, {sum(first, second), reference[0]}, {sum(second, end), reference[1]});
      }
      results[pair] = found.result;
      std::fill_n(rows.weights + first, rows.length, found.weight);
      std::fill_n(rows.weights + second, rows.length, -found.weight);
    }
  }

 private:
  const RowKernels<T>& kernels_;
};

}  // namespace

template <class T>
void add_token_ops(const State<T>& state, DeviceOps<T>& to) {
  to.tokens = std::make_shared<HostTokens<T>>(state);
  to.losses = std::make_shared<HostLosses<T>>(state->kernels.rows);
}

template void add_token_ops(const State<float>&, DeviceOps<float>&);
template void add_token_ops(const State<Bf16>&, DeviceOps<Bf16>&);
template void add_token_ops(const State<F16>&, DeviceOps<F16>&);

}  // namespace ballast::model::host
