#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/compute.h"
#include "ballast/model/kernels.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/output_head.h"
#include "src/model/compute/pass_views.h"

namespace ballast::model {

/// The tables in the blocks of the embedding, and their gradients in sum rows.
template <class T>
class EmbeddingTables {
 public:
  EmbeddingTables(const Architecture& model, DeviceOps<T>& ops) : model_(model), ops_(ops) {
    if (model.outer.token_factor == 1.0) return;
    expects(model.outer.positions.empty(), "an embedding with positions is not scaled");
    const auto factor = static_cast<float>(model.outer.token_factor);
    token_scale_ = model.outer.rounds_factor ? to_float(from_float<T>(factor)) : factor;
  }

  static Ids ids_of(const BatchViews& batch) {
    return {batch.tokens.raw(), batch.positions.raw(), batch.sum_rows.raw()};
  }

  /// Views of the tables in a block. Gradients of frozen tables are null.
  template <class U>
  [[nodiscard]] Embedding<U> views(std::size_t block, U* values) const {
    const BlockSpec& about = model_.blocks[block];
    const TensorSpec& tokens = about.tensor(model_.outer.tokens);
    const TensorSpec* const positions =
        model_.outer.positions.empty() ? nullptr : about.find(model_.outer.positions);
    const auto at = [values](const TensorSpec* tensor) {
      const bool wanted = tensor != nullptr && (std::is_const_v<U> || !tensor->frozen);
      return wanted ? values + tensor->offset : nullptr;
    };
    return {.tokens = at(&tokens),
            .positions = at(positions),
            .scale = token_scale_,
            .first = tokens.first_row,
            .size = tokens.shape.front(),
            .tile = model_.config.vocabulary_tiles > 1,
            .begins = model_.split.tensor > 1 && block == 0};
  }
  /// Views of the sums of a block's gradient.
  [[nodiscard]] Embedding<float> sums(std::size_t block, DeviceView<float> all) const {
    const TokenSums layout(model_, model_.blocks[block]);
    Embedding<float> gradients = views<float>(block, all.raw());
    if (layout.rest > 0) gradients.positions = all.raw() + all.size() - layout.rest;
    return gradients;
  }

  /// Returns whether the sums are those of `size` elements of any block.
  [[nodiscard]] bool suit(std::size_t block, const GradientSums& sums, std::size_t size) const {
    const TokenSums layout(model_, model_.blocks.at(block));
    if (layout.table == 0) return size == sums.own.size() && sums.tied.empty();
    return size == layout.table + layout.rest && sums.tied.size() <= layout.table;
  }
  /// Describes the gradient of any block, to pack it. Enqueues work that finds the sum rows of the
  /// rows of a table. `sum_row_of`: memory for most_rows().
  [[nodiscard]] UnpackedGradient find_sum_rows(std::size_t block, const GradientSums& sums,
                                               std::uint32_t* sum_row_of) const {
    if (!has_token_sums(model_, model_.blocks[block])) return {.rest = sums.own.raw()};
    const TokenSums layout(model_, model_.blocks[block]);
    const TensorSpec& table = model_.blocks[block].tensor(model_.outer.tokens);
    ops_.packing->forget_sum_rows(sum_row_of, table.shape.front());
    for (const BatchViews& batch : sums.batches) {
      ops_.packing->find_sum_rows(ids_of(batch), table.first_row, table.shape.front(), sum_row_of);
    }
    return {.sum_rows = sums.own.raw(),
            .sum_row_of = sum_row_of,
            .rows = table.shape.front(),
            .width = model_.config.hidden_size,
            .table = layout.table,
            .rest = sums.own.raw() + sums.own.size() - layout.rest,
            .tied = sums.tied.raw(),
            .tied_size = sums.tied.size()};
  }
  /// Returns the rows of the largest table with sum rows.
  [[nodiscard]] std::size_t most_rows() const {
    std::size_t most = 0;
    for (const BlockSpec& block : model_.blocks) {
      if (!has_token_sums(model_, block)) continue;
      most = std::max<std::size_t>(most, block.tensor(model_.outer.tokens).shape.front());
    }
    return most;
  }

 private:
  const Architecture& model_;
  DeviceOps<T>& ops_;
  float token_scale_ = 1.0F;
};

/// Passes of the head. Each function returns the work of a pass, a function without arguments that
/// calls operations. References must outlive the object.
template <class T>
class HeadKernels {
 public:
  HeadKernels(const Architecture& model, const MicroBatchShape& shape, DeviceOps<T>& ops,
              Head<T>& head, const TileSums<T>& tile_sums)
      : model_(model),
        tokens_(shape.tokens()),
        views_(model, shape),
        norm_(find_norm(model.blocks[model.head()], model.outer.norm)),
        ops_(ops),
        head_(head),
        tile_sums_(tile_sums) {}

  /// Offsets of the norm before the output matrix.
  [[nodiscard]] const NormAt& norm() const { return norm_; }

  auto evaluate(const Pass& pass, const PassArguments& args) {
    expects(model_.config.vocabulary_tiles == 1, "the head has several tiles: visit each");
    const OutputRows<T> tile = views_.output_tiles(args).front();
    return [=, this, norm = weights_of<T>(args)[norm_], in = as<const T>(args[Port::input]),
            targets = args.batch.targets.raw(), losses = views_.losses_of(pass, args)] {
      ops_.tokens->check_tokens(targets, kLeastTarget);
      head_.forward(norm, tile, in, targets, losses);
    };
  }
  auto train(const Pass& pass, const PassArguments& args) {
    return [this, norm = weights_of<T>(args)[norm_], in = as<const T>(args[Port::input]),
            targets = args.batch.targets.raw(), tiles = views_.output_tiles(args),
            losses = views_.losses_of(pass, args), dx = as<T>(args[Port::activation_gradient]),
            kept = args[Port::kept].raw(), accumulation = args.scalars.accumulation,
            scale = args.scalars.loss_gradient] {
      ops_.tokens->check_tokens(targets, kLeastTarget);
      head_.train(norm, tiles, accumulation, in, targets, scale, dx, losses, kept);
    };
  }
  auto scan(const Pass& pass, const PassArguments& args) {
    HeadRows<T> known = rows_of(args);
    if (tile_sums_.apart()) {
      known.sums = as<RowSum<float>>(args[Port::row_sums]) + pass.number * tokens_;
    }
    return [=, this, targets = args.batch.targets.raw(), tile = views_.output_tile(pass, args),
            losses = views_.losses_of(pass, args)] {
      ops_.tokens->check_tokens(targets, kLeastTarget);
      head_.scan(tile, targets, known);
      if (!losses.out.empty()) head_.report_losses(targets, known, losses);
    };
  }
  auto differentiate(const Pass& pass, const PassArguments& args) {
    const bool pairs = !args[Port::pairs].empty();
    const RowTargets row_targets = {args.batch.targets.raw(),
                                    pairs ? views_.pairs_of(args).weights.raw() : nullptr};
    HeadRows<T> known = rows_of(args);
    if (known.dnormed != nullptr) known.dnormed = tile_sums_.part_of(known.dnormed, pass.number);
    return [=, this, tile = views_.output_tile(pass, args),
            accumulation = args.scalars.accumulation, scale = args.scalars.loss_gradient] {
      head_.differentiate(tile, accumulation, row_targets, scale, known);
    };
  }
  auto end(const Pass& pass, const PassArguments& args) {
    return [this, norm = weights_of<T>(args)[norm_], in = as<const T>(args[Port::input]),
            targets = args.batch.targets.raw(), dx = as<T>(args[Port::activation_gradient]),
            known = rows_of(args), losses = views_.losses_of(pass, args)] {
      if (!losses.out.empty()) head_.report_losses(targets, known, losses);
      if (dx != nullptr) head_.end(norm, in, known, dx);
    };
  }
  auto merge(const Pass& /*pass*/, const PassArguments& args) {
    const std::size_t tiles = model_.own_vocabulary_tiles();
    const RowSumsOfTiles all = {
        .sums = as<const RowSum<float>>(args[Port::all_row_sums]),
        .places = model_.split.tensor,
        .tiles = tiles,
        .rows = tokens_,
        .step = round_up(tiles * tokens_ * kRowSumBytes, kPage) / kRowSumBytes};
    return [=, this, known = rows_of(args)] { ops_.losses->merge_row_sums(all, known.sums); };
  }

 private:
  /// Lower bound for targets, because negative ones are valid.
  static constexpr std::int32_t kLeastTarget = std::numeric_limits<std::int32_t>::min();

  /// Returns the rows that the tiles share, with the gradient of the norm's result.
  [[nodiscard]] HeadRows<T> rows_of(const PassArguments& args) const {
    HeadRows<T> rows = head_.rows_at(args[Port::normed].raw());
    rows.dnormed = as<float>(args[Port::partial_sums]);
    rows.given = as<const T>(args[Port::normed_gradient]);
    return rows;
  }

  const Architecture& model_;
  std::size_t tokens_;
  PassViews<T> views_;
  NormAt norm_;
  DeviceOps<T>& ops_;
  Head<T>& head_;
  const TileSums<T>& tile_sums_;
};

}  // namespace ballast::model
